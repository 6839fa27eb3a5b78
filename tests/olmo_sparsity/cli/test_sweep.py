"""scripts/sweep.py: cells and their names, what is refused, resuming, failures, signals, jobs under a real SLURM."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from olmo_sparsity.cli import sweep as module
from olmo_sparsity.config.load import load_config
from olmo_sparsity.sweep.grid import Cell
from olmo_sparsity.sweep.runner import Outcome, run_cells
from olmo_sparsity.sweep.slurm import words
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics import read_metrics
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.result_files import EXACT_MATCH
from tests.analysis.synthetic.made_up import record, row
from tests.olmo_sparsity.sweep.test_grid import TASK
from tests.olmo_sparsity.sweep.test_slurm import check_shell
from tests.support import local_slurm, tiny
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr("olmo_sparsity.sweep.runner.SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def sweep_here(monkeypatch, call_main, tmp_path):
    """Calls the command in ``tmp_path``; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return lambda line: call_main("sweep", *shlex.split(line))


def shell_cell(folder, name, *scripts):
    """A cell whose commands are bash scripts."""
    commands = tuple(("bash", "-c", script) for script in scripts)
    return Cell(folder / name, {"seed": name}, {"seed": name}, commands, None)


def run_shell_cells(cells, jobs=1):
    """Run them; the outcomes in order."""
    outcomes = []
    run_cells(cells, jobs=jobs, environment=dict(os.environ), commit="abc", report=outcomes.append)
    return [(outcome.cell.name, outcome.state, outcome.reason) for outcome in outcomes]


# What is refused before anything starts.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--time 1:00:00", "--time is for SLURM; add --slurm"),
        ("--evaluate '--samples 5'", "--evaluate: config.yaml has no task to evaluate"),
        ("--evaluate '--out x'", "--out is the folder of each cell"),
        ('--evaluate "\'"', "--evaluate ': No closing quotation"),
        ("--only 3", "--only 3: there are 2 cells"),
        ("--slurm --gpus-per-node 4", "a cell is one process and takes one GPU"),
        ("--slurm --out 'a b'", "--out 'a b': SLURM needs a path"),
        ("--slurm", "there is no sbatch on this machine"),
        ("-- --model.d_modle=3", "did you mean model.d_model"),
    ],
)
def test_bad_arguments_are_one_line(sweep_here, tmp_path, monkeypatch, arguments, message):
    tiny.train_config(tmp_path)
    monkeypatch.setenv("PATH", "")
    with refused(re.escape(message)):
        sweep_here(f"config.yaml --grid seed=1,2 --out out {arguments}")
    assert not list(tmp_path.glob("**/seed=*"))


def test_wrong_arguments_of_the_evaluation_are_found_before_the_training(sweep_here, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(TASK)
    with pytest.raises(SystemExit, match="2"):
        sweep_here("config.yaml --grid seed=1 --out out --evaluate '--sample 5'")
    assert "--sample" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("--lengths 1000", "length 1000: "),
        ("--ks 3", "plants no tokens"),
        ("--parameters '{nope: 1}'", "unknown parameter 'nope'"),
        ("--device cuda", "device 'cuda' cannot be used here"),
    ],
)
def test_what_the_evaluation_would_refuse_is_found_before_the_training(
    sweep_here, tmp_path, monkeypatch, evaluation, message
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "config.yaml").write_text(TASK)
    with refused(f"--evaluate: .*{re.escape(message)}"):
        sweep_here(f"config.yaml --grid seed=1,2 --out out --dry-run --evaluate {shlex.quote(evaluation)}")
    assert not (tmp_path / "out").exists()


# Running.


def test_a_failing_cell_leaves_the_others_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("olmo_sparsity.util.provenance.available_cores", lambda: 6)
    cells = [
        shell_cell(tmp_path, "bad", "echo fine; echo 'error: no such thing' >&2; exit 3", "touch never"),
        shell_cell(tmp_path, "good", "echo $OMP_NUM_THREADS", "echo second"),
        shell_cell(tmp_path, "killed", "echo last; kill -9 $$"),
    ]
    assert module._run(cells, 2, "abc") == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["[1/3]", "[2/3]", "[3/3]"]
    assert {line.partition(" ")[2] for line in printed[:3]} == {
        "bad: failed; exit code 3: error: no such thing",
        "good: finished",
        "killed: failed; killed by SIGKILL: last",
    }
    assert printed[3] == "2 of 3 cells failed:"
    assert set(printed[4:]) == {
        f"  {tmp_path}/bad: exit code 3: error: no such thing",
        f"  {tmp_path}/killed: killed by SIGKILL: last",
    }
    lines = (tmp_path / "good" / "sweep.log").read_text().splitlines()
    assert lines == [f"$ {words(cells[1].commands[0])}", "3", f"$ {words(cells[1].commands[1])}", "second"]
    assert [cell.marker.is_file() for cell in cells] == [False, True, False]
    marker = json.loads(cells[1].marker.read_text())
    assert (marker["commit"], marker["settings"], marker["values"]) == (
        "abc",
        {"seed": "good"},
        {"seed": "good"},
    )
    assert marker["commands"] == [list(command) for command in cells[1].commands]


@pytest.mark.parametrize("jobs", [1, 2])
def test_so_many_cells_run_at_a_time(tmp_path, jobs):
    script = f"echo start >>{tmp_path}/times; sleep 0.2; echo end >>{tmp_path}/times"
    cells = [shell_cell(tmp_path, str(i), script) for i in range(3)]
    outcomes = run_shell_cells(cells, jobs)
    assert Counter(state for _, state, _ in outcomes) == {"running": 3, "finished": 3}
    at_once = [0]
    for word in (tmp_path / "times").read_text().split():
        at_once.append(at_once[-1] + (1 if word == "start" else -1))
    assert max(at_once) == jobs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_waited_for(capsys, tmp_path, monkeypatch, number):
    """The first saves and ends with 85, the second dies before it listens, the third never starts."""
    saves = "trap 'sleep 0.3; echo saved; exit 85' TERM; touch listens; while :; do sleep 0.05; done"
    early = f"while [[ ! -e listens ]]; do sleep 0.02; done; kill -{int(number)} $PPID; exec sleep 60"
    cells = [
        shell_cell(tmp_path, *each) for each in (("saves", saves), ("early", early), ("waiting", "true"))
    ]
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    assert module._run(cells, 2, "abc") == 85
    assert [signal.getsignal(each) for each in signal.valid_signals()] == handlers
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed[:2]) == ["[0/3] early: stopped", "[0/3] saves: stopped"]
    assert printed[2:] == ["3 of 3 cells are stopped or have not started; the same command goes on"]
    assert (tmp_path / "saves" / "sweep.log").read_text().endswith("saved\n")
    assert not (tmp_path / "waiting").exists()
    assert not list(tmp_path.rglob("sweep.json"))


def test_nohup_is_respected(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcomes = run_shell_cells([shell_cell(tmp_path, "a", "kill -HUP $PPID; sleep 0.5")])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcomes == [("a", "running", ""), ("a", "finished", "")]


def test_a_run_that_saved_for_its_own_time_limit_goes_on_later_and_the_others_now(tmp_path):
    cells = [shell_cell(tmp_path, "limit", "exit 85"), shell_cell(tmp_path, "next", "true")]
    outcomes = [outcome[:2] for outcome in run_shell_cells(cells)]
    assert outcomes[::2] == [("limit", "running"), ("next", "running")]
    assert outcomes[1::2] == [("limit", "stopped"), ("next", "finished")]


def test_nothing_goes_on_when_the_sweep_itself_breaks(tmp_path):
    def broken(outcome):
        if outcome.cell.name == "b":
            raise RuntimeError("broken")

    cells = [shell_cell(tmp_path, "a", "trap 'echo told; exit 85' TERM; while :; do sleep 0.05; done")]
    cells.append(shell_cell(tmp_path, "b", "true"))
    with pytest.raises(RuntimeError, match="broken"):
        run_cells(cells, jobs=2, environment=dict(os.environ), commit="", report=broken)
    log = (tmp_path / "a" / "sweep.log").read_text()
    assert log.endswith("told\n") or log.count("\n") == 1  # told, or ended before it listened


def test_a_finished_cell_tells_its_loss_and_exact_match(tmp_path):
    cell = shell_cell(tmp_path, "seed=1")
    rows = [
        {"step": 7, "loss_nats": 9.0},
        {"step": 8, "loss_nats": 0.51},
        {"step": 8, "heldout_loss_nats": 7},
    ]
    cell.folder.mkdir()
    (cell.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    exact = [(20, 4, 10), (20, 6, 9), (40, 4, 5), (400, 4, 1)]
    rows = [row(length, right, k, (10 - right, 0, 0)) for length, k, right in exact]
    EXACT_MATCH.save(cell.folder / "exact_match.json", record(rows))
    line = "seed=1: finished; loss 0.5100 nats at step 8; exact match 95.0 % at 20, 10.0 % at 400"
    assert module._line(Outcome(cell, "finished")) == line


@pytest.mark.slow
def test_two_real_cells_are_trained_skipped_and_refused(sweep_here, tmp_path, monkeypatch):
    """One goes on from where it was stopped, and ends with the weights of a run without a sweep."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny.train_config(tmp_path, max_duration=4)
    for run in (["--save_folder=plain"], ["--save_folder=out/seed=2", "--stop_at=2"]):
        train(load_config("config.yaml", ["--seed=2", *run]))
    command = "config.yaml --grid seed=1,2 --out out --jobs 2"
    code, printed = sweep_here(command)
    assert code == 0, printed
    ours, plain = (load_file(f"{run}/step00000004/model.safetensors") for run in ("out/seed=2", "plain"))
    assert all(tensor.equal(plain[name]) for name, tensor in ours.items())
    assert "resuming from out/seed=2/step00000002" in Path("out/seed=2/sweep.log").read_text()
    for seed in (1, 2):
        loss = read_metrics(f"out/seed={seed}/metrics.jsonl")[-1]["loss_nats"]
        assert f"] seed={seed}: finished; loss {loss:.4f} nats at step 4\n" in printed
    listed = json.loads(Path("out/sweep.json").read_text())
    assert listed["axes"] == {"seed": [1, 2]}
    assert listed["cells"] == [{"folder": f"seed={seed}", "values": {"seed": seed}} for seed in (1, 2)]
    logs = [Path(f"out/seed={seed}/sweep.log").read_bytes() for seed in (1, 2)]
    assert sweep_here(command) == (0, "2 of 2 cells are finished already\n")
    assert logs == [Path(f"out/seed={seed}/sweep.log").read_bytes() for seed in (1, 2)]
    with pytest.raises(
        UserError, match=r"already finished in out, with max_duration 4, which is 5 now"
    ) as error:
        sweep_here(f"{command} -- --max_duration=5")
    assert "\n" not in str(error.value)


@pytest.fixture
def held(tmp_path):
    """Somebody works in the sweep's folder as long as the test runs."""
    with folder_lock(tmp_path / "out"):
        yield


def test_a_second_sweep_on_a_folder_is_refused_and_its_list_stays(sweep_here, held, tmp_path):
    tiny.train_config(tmp_path)
    (tmp_path / "out" / "sweep.json").write_text("of the first")
    with pytest.raises(
        UserError, match=r"^out is in use by process \d+ on .*; wait for it or stop it"
    ) as error:
        sweep_here("config.yaml --grid seed=7 --out out")
    assert "\n" not in str(error.value)
    assert (tmp_path / "out" / "sweep.json").read_text() == "of the first"
    assert not (tmp_path / "out" / "seed=7").exists()


def test_a_folder_that_cannot_be_made_and_damaged_results_leave_the_others_alone(capsys, tmp_path):
    (tmp_path / "file").touch()
    cells = [
        shell_cell(tmp_path / "file", "bad", "true"),
        shell_cell(tmp_path, "odd", f"echo '{{' >{tmp_path}/odd/exact_match.json"),
        shell_cell(tmp_path, "good", "true"),
    ]
    assert module._run(cells, 1, "abc") == 1
    bad, odd, good, *_ = capsys.readouterr().out.splitlines()
    assert bad == f"[1/3] bad: failed; {tmp_path}/file/bad: Not a directory"
    assert odd.startswith("[2/3] odd: finished; ") and "exact_match.json" in odd
    assert good == "[3/3] good: finished"


def test_a_dry_run_prints_a_command_a_cell(sweep_here, tmp_path):
    (tmp_path / "config.yaml").write_text(TASK)
    code, printed = sweep_here(
        "config.yaml --grid seed=1,2 --out out --evaluate '--samples 5' --dry-run -- --max_duration=3"
    )
    start = f"{words([sys.executable])} -P -m olmo_sparsity.cli"
    assert (code, printed.splitlines()) == (
        0,
        [
            f"{start} train config.yaml --resume --save_folder=out/seed={seed} "
            f"--run_name=out-seed={seed} --max_duration=3 --seed={seed} && "
            f"{start} exact_match --overwrite out/seed={seed} --samples 5"
            for seed in (1, 2)
        ],
    )
    assert not (tmp_path / "out").exists()


# SLURM.


@pytest.fixture
def job_script(sweep_here, tmp_path):
    (tmp_path / "config.yaml").write_text(TASK)
    grid = "--grid task.parameters.train_length=[5,10],[5,9] --grid seed=1 --evaluate '--samples 5'"
    options = "--slurm --dry-run --jobs 2 --cpus 3 --gpus-per-node 1 --time 1:00:00 --sbatch=--qos=high"
    _, script = sweep_here(f"config.yaml --out out {grid} {options} -- --max_duration=3")
    return script


def test_a_sweep_becomes_a_sound_array(job_script, tmp_path):
    path = tmp_path / "sweep.sbatch"
    path.write_text(job_script)
    check_shell(path)
    expected = ["--job-name=out", f"--chdir={tmp_path}", "--output=out/slurm-%A_%a.out", "--array=1-2%2"]
    expected += ["--cpus-per-task=3", "--gpus-per-node=1", "--time=1:00:00", "--qos=high", "--requeue"]
    assert set(expected) <= set(re.findall("^#SBATCH (.*)", job_script, re.MULTILINE))
    assert not re.findall("@[A-Z_]+@", job_script)


@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (1, ""), (85, "40_5\n")])
def test_a_task_runs_its_cell_and_is_requeued_alone_where_it_saved(job_script, tmp_path, code, requeued):
    """The job script under bash, with stand-ins for SLURM's programs and for Python."""
    for name, script in {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'[[ $1 == requeue ]] && echo "$2" >>{tmp_path}/requeued',
        "fake-python": f'printf "%s\\n" "$OMP_NUM_THREADS" "$@" >{tmp_path}/told; exit {code}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {"ARRAY_TASK_ID": "5", "ARRAY_JOB_ID": "40", "JOB_ID": "40", "JOB_NODELIST": "n"}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in job.items()}}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    text = job_script.replace(words([sys.executable]), "fake-python")
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == (code if code != 85 else 0), done.stderr
    threads, *start = (tmp_path / "told").read_text().splitlines()
    start, told = start[:4], start[4:]
    assert (threads, start) == ("3", ["-P", "-m", "olmo_sparsity.cli", "sweep"])
    assert told == [
        "config.yaml", "--out", "out", "--grid=task.parameters.train_length=[5,10],[5,9]", "--grid=seed=1",
        "--evaluate=--samples 5", "--only", "5", "--", "--max_duration=3",
    ]  # fmt: skip
    path = tmp_path / "requeued"
    assert (path.read_text() if path.exists() else "") == requeued


def test_a_task_of_an_array_checks_and_runs_its_cell_beside_the_others(
    sweep_here, held, tmp_path, monkeypatch
):
    tiny.train_config(tmp_path)
    asked = []
    monkeypatch.setattr(module, "_run", lambda cells, jobs, commit: asked.extend(cells) or 0)
    assert sweep_here("config.yaml --grid seed=bad,8 --out out --only 2") == (0, "")
    assert [cell.name for cell in asked] == ["seed=8"]
    assert not (tmp_path / "out" / "sweep.json").exists()


@pytest.mark.slow
def test_an_array_trains_all_cells_and_one_that_is_told_to_stop_goes_on_alone(sweep_here, tmp_path):
    local_slurm.start()
    tiny.train_config(tmp_path, save_interval=100000, console_log_interval=1)
    where = "--out out --slurm --cpus 1 --time 30 --jobs 1"
    _, printed = sweep_here(f"config.yaml --grid max_duration=20,1000 {where}")
    number = re.search(r"as job (\d+)", printed)[1]
    cells = {steps: tmp_path / "out" / f"max_duration={steps}" for steps in (20, 1000)}
    # The last task's own number is that of the array: requeued by it, the first one would run again.
    local_slurm.wait_for("first steps", lambda: len(read_metrics(cells[1000] / "metrics.jsonl")) > 20, 300)
    subprocess.run(["scancel", "--signal=USR1", f"{number}_2"], check=True)
    local_slurm.start_now(f"{number}_2")
    jobs = [local_slurm.wait_for_end(f"{number}_{task}", 300) for task in (1, 2)]
    logs = "".join(path.read_text() for path in (tmp_path / "out").glob("slurm-*.out"))
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [("COMPLETED", "0"), ("COMPLETED", "1")], (
        logs
    )
    assert "resuming from" in (cells[1000] / "sweep.log").read_text()
    for steps, cell in cells.items():
        assert [row["step"] for row in read_metrics(cell / "metrics.jsonl")] == [*range(1, steps + 1)]
        assert (cell / "sweep.json").is_file()
    assert (tmp_path / "out" / "sweep.sbatch").is_file()
