"""The submit command: what it asks of sbatch and refuses, and jobs under a real SLURM, where there is one."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from olmo_sparsity.checkpoint import OPTIMIZER, WEIGHTS, TrainState
from olmo_sparsity.cli.submit import checkpoint_bytes
from olmo_sparsity.model.build import empty_model
from olmo_sparsity.new_checkpoint import Share
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import (
    BAD_INPUT_EXIT_CODE,
    FAILED_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    UserError,
)
from tests.support import local_slurm, tiny
from tests.support.processes import SECONDS, started
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
SMALL = "--n-long 20 --n-short 5 --targets 3000"
"""What fits the documents of `tiny`."""
START = [sys.executable, "-P", "-m", "olmo_sparsity.cli"]


@pytest.fixture
def submit(monkeypatch, call_main, tmp_path):
    """The command in this process and ``tmp_path``, as on a machine without sbatch; returns what it printed."""

    def run(line, path="") -> str:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("PATH", path)
            return call_main("submit", *shlex.split(line))[1]

    return run


@pytest.fixture
def dry_run(submit):
    """The words of every call of sbatch: its options, the name of its script, and the command."""

    def calls(line):
        printed = submit(f"{line} --dry-run").splitlines()
        for call in (shlex.split(text) for text in printed if not text.startswith("#")):
            script = next(i for i, word in enumerate(call) if word.endswith(".sbatch"))
            yield call[1:script], Path(call[script]).name, call[script + 1 :]

    return lambda line: list(calls(line))


@pytest.fixture
def run_folder(tmp_path):
    """A corpus, and a checkpoint's outer shape: enough to submit, not to measure."""
    tiny.save_model(tmp_path / "run", tiny.train_config(tmp_path), torch.nn.Identity(), step=8)
    return tmp_path


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_job_scripts_are_sound_bash(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if SHELLCHECK:
        done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_training_of_many_nodes(dry_run, tmp_path):
    tiny.train_config(tmp_path)
    options = "--nodes=1 --gpus-per-node=4 --time=24:00:00 --partition=gpu --account=lab"
    more = "--after 7:8 --cpus 6 --sbatch=--qos=high --sbatch=--exclusive -- --seed=2"
    ((given, script, command),) = dry_run(f"train config.yaml {options} {more}")
    expected = "--ntasks-per-node=4 --cpus-per-task=6 --qos=high --exclusive --output=run/slurm-%j.out"
    expected += " --dependency=afterok:7:8 --kill-on-invalid-dep=yes"
    assert {*options.split(), *expected.replace("run/", f"{tmp_path}/run/").split()} <= set(given)
    options = [f"--run={tmp_path}/run", "--retries=3"]
    trained = [*START, "train", "config.yaml", "--seed=2", "--resume"]
    assert (script, command) == ("train.sbatch", [*options, *trained])


def test_options_may_stand_before_the_config_as_in_train(dry_run, tmp_path):
    tiny.train_config(tmp_path)
    ((_, _, command),) = dry_run("train --seed=2 --resume config.yaml --epoch=1")
    assert command[2:] == [*START, "train", "config.yaml", "--seed=2", "--epoch=1", "--resume"]


def test_retries_are_passed_on_and_none_is_allowed(dry_run, tmp_path):
    tiny.train_config(tmp_path)
    for count in ("0", "12"):
        ((_, _, command),) = dry_run(f"train config.yaml --retries {count}")
        assert command[1] == f"--retries={count}"


@pytest.mark.parametrize("optimizer", ["adamw", "lionw"])
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(tmp_path, optimizer):
    config = tiny.train_config(tmp_path, max_duration=4, optimizer={"name": optimizer})
    folder = train(config)
    stored = [
        tensor
        for name in (WEIGHTS, OPTIMIZER)
        for tensor in load_file(folder / name).values()
        if tensor.ndim  # the optimizer's count of steps is none of the size
    ]
    assert checkpoint_bytes(config, empty_model(config, device="meta")) == sum(
        tensor.nbytes for tensor in stored
    )


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ([], 120),
        (["--signal=USR1@60"], 60),
        (["--qos=high", "--signal", "R:USR1@30"], 30),
        (["--signal=USR1"], 60),
        (["--signal=USR1@9", "--signal=USR1@168"], 168),
    ],
    ids=str,
)
def test_a_save_that_outlasts_the_warning_is_said_before_the_job_waits(
    submit, tmp_path, monkeypatch, given, warning
):
    """As of OLMo-7B: 84 GB."""
    tiny.train_config(tmp_path)
    monkeypatch.setattr("olmo_sparsity.cli.submit.checkpoint_bytes", lambda *_: 84e9)
    line = "train config.yaml --dry-run " + " ".join(f"--sbatch={option}" for option in given)
    (said,) = [text for text in submit(line).splitlines() if text.startswith("#")]
    assert "84 GB takes about 168 s at 0.5 GB/s" in said
    assert f"only {warning} s before" in said and "--sbatch=--signal=USR1@300" in said
    assert "#" not in submit(f"{line} --sbatch=--signal=USR1@300")


@pytest.mark.parametrize(
    "line",
    [
        "train config.yaml --corpus.path=corpus",
        "sweep config.yaml --grid seed=1,2 --out out -- --corpus.path=corpus",
        "measure run --corpus corpus --out out",
    ],
)
def test_a_dry_run_works_before_the_corpus_is_there_and_says_so(submit, tmp_path, line):
    tiny.train_config(tmp_path)
    shutil.move(tmp_path / "corpus", tmp_path / "later")
    assert "# the corpus corpus is not there yet; it must be when" in submit(f"--dry-run {line}")
    with refused("corpus is no prepared corpus"):
        submit(line)


def test_a_sweep_is_an_array_with_a_task_for_each_cell(dry_run, tmp_path):
    tiny.train_config(tmp_path)
    line = "sweep config.yaml --grid seed=1,2,3 --out out --jobs 2 --gpus-per-node 1 -- --max_duration=6"
    ((given, script, command),) = dry_run(line)
    assert {"--array=1-3%2", "--output=out/slurm-%A_%a.out", "--gpus-per-node=1"} <= set(given)
    arguments = "sweep config.yaml --grid seed=1,2,3 --out out --jobs 2 --max_duration=6 --only %a"
    assert (script, command) == ("job.sbatch", [*START, *arguments.split()])


def test_c4_becomes_an_array_and_a_merge(dry_run):
    line = "prepare_data c4 --out data/c4 --array 64%16 --limit-tokens 10000000000"
    (array, _, command), (merge, _, merging) = dry_run(line)
    assert "--array=1-64%16" in array
    assert not any(option.startswith("--array") for option in merge)
    shared = "prepare_data c4 --out data/c4 --limit-tokens 10000000000 --workers=4"
    assert command == [*START, *f"{shared} --shard %a/64".split()]
    assert merging == [*START, *shared.split()]


@pytest.fixture
def sbatch(tmp_path):
    """A folder with a stand-in for sbatch, which writes what it is called with to the file ``calls`` there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\necho "$@" >>{folder}/calls; echo "5;cluster"\n')
    (folder / "sbatch").chmod(0o755)
    return folder


def test_measure_takes_the_checkpoint_of_now_in_shards(submit, sbatch, dry_run, run_folder):
    """Without --shard the same command puts the shards together."""
    line = f"measure run --corpus corpus --out x --array 3%2 --gpus-per-node 1 -- {SMALL} --tau 0.5"
    path = f"{sbatch}{os.pathsep}{os.environ['PATH']}"
    assert submit(line, path=path).splitlines() == ["submitted as job 5"] * 2 + ["logs: x/slurm-*.out"]
    array, merge = (sbatch / "calls").read_text().splitlines()
    command = f"measure run/step00000008 --corpus corpus --out x {SMALL} --tau 0.5"
    assert "--array=1-3%2" in array and "--gpus-per-node=1" in array
    assert array.endswith(f"{command} --shard %a/3") and merge.endswith(command)
    assert "--dependency=afterok:5 --kill-on-invalid-dep=yes" in merge and "gpus" not in merge
    assert (run_folder / "x").is_dir()
    ((given, script, words),) = dry_run(f"measure run@yarn:4 --corpus none --out x --after 3 -- {SMALL}")
    assert script == "job.sbatch" and "--dependency=afterok:3" in given
    assert words[4:6] == ["measure", "run@yarn:4"]


def test_a_result_stays_in_the_folder_of_the_run_that_is_measured(submit, sbatch, run_folder):
    """In that of the checkpoint it would be removed with it, when a later one is saved."""
    submit(
        f"measure --out run run --corpus corpus -- {SMALL}", path=f"{sbatch}{os.pathsep}{os.environ['PATH']}"
    )
    assert "measure --out run run/step00000008 --corpus" in (sbatch / "calls").read_text()


def test_any_other_command_is_a_job_of_one_process(dry_run):
    ((_, script, command),) = dry_run("exact_match runs/parity --samples 9 --time 10")
    assert (script, command) == ("job.sbatch", [*START, *["exact_match", "runs/parity", "--samples", "9"]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train config.yaml --nodes 3 --gpus-per-node 2", "size 4 cannot be shared by 6 processes"),
        ("train config.yaml -- --global_train_batch_size=400", "fewer than global_train_batch_size"),
        ("train config.yaml -- --model.block_group_size=5", "model: n layers must be divisible"),
        (
            "train config.yaml -- --save_folder=x --initial_weights=none",
            "none is neither a checkpoint nor a run",
        ),
        ("sweep config.yaml --grid seed=1 --out x -- --model.block_group_size=5", "model: n layers must be"),
        (f"measure corpus --corpus corpus --out x {SMALL}", "corpus is neither a checkpoint nor a run"),
        (
            "measure run --corpus none --out x -- --n-long 16 --n-short 32",
            "N = 16 must be larger than M = 32",
        ),
        ("prepare_data c4 --out x --array 2 -- --tokenizer bpe", "--shard needs a tokenizer"),
        ("prepare_data c4 --out x -- --tokenizer none.json", "none.json"),
    ],
)
def test_what_would_fail_is_refused_before_it_waits_in_the_queue(submit, run_folder, line, message):
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(UserError, match=re.escape(message)):
        submit(line)
    assert sorted(run_folder.rglob("*")) == before


@pytest.mark.parametrize("line", ["train config.yaml", "sweep config.yaml --out . --grid seed=3"])
def test_a_folder_that_holds_a_run_of_other_settings_is_refused_before_it_waits(dry_run, tmp_path, line):
    config = tiny.train_config(tmp_path)
    folder = "seed=3" if line.startswith("sweep") else config.save_folder
    tensors = {"weight": torch.zeros(1)}
    state = TrainState(4, 4, finished=False)
    tiny.save_shares(tmp_path / folder, [Share(tensors, tensors)], config=config, state=state)
    before = sorted(tmp_path.rglob("*"))
    assert len(dry_run(line)) == 1
    with refused(r"weight_decay"):
        dry_run(f"{line} --optimizer.weight_decay=0.5")
    assert sorted(tmp_path.rglob("*")) == before


# The job scripts under bash, with stand-ins for SLURM's programs.


def run_script(
    tmp_path: Path,
    name: str,
    command: list[str],
    cwd: Path | None = None,
    programs: Mapping[str, str] | None = None,
    **job: str,
) -> tuple[int, str, str]:
    """Run a job script in ``cwd``, `tmp_path` by default: (exit code, output, what was requeued)."""
    stand_ins = {
        "srun": "while [[ $1 == --* ]]; do shift; done\nfor r in $(seq $((${SLURM_NTASKS:-1} - 1)) -1 0); do "
        'SLURM_PROCID=$r SLURM_LOCALID=$r "$@" || exit; done',
        "scontrol": f'[[ $1 == requeue ]] && echo "$2" >{tmp_path}/requeued',
    }
    for program, code in {**stand_ins, **(programs or {})}.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / program).chmod(0o755)
    always = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_CPUS_PER_TASK": "1"}
    environment = {**os.environ, **always, **{f"SLURM_{key}": value for key, value in job.items()}}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment["TMPDIR"] = str(tmp_path)
    script = ["bash", str(ROOT / "slurm" / name), *command]
    requeued = tmp_path / "requeued"
    requeued.unlink(missing_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with started(script, cwd=cwd or tmp_path, env=environment, **pipes) as process:
        printed, _ = process.communicate(timeout=SECONDS)
    return process.returncode, printed, requeued.read_text() if requeued.exists() else ""


def run_training(
    tmp_path: Path, code: str, *arguments: str, options: Sequence[str] = (), **job: Any
) -> tuple[int, str, str]:
    """Run train.sbatch, with ``options`` of its own, and Python ``code`` in place of the training."""
    command = [*options, sys.executable, "-c", code, *arguments]
    return run_script(tmp_path, "train.sbatch", command, **{"JOB_NUM_NODES": "1", "NTASKS": "2", **job})


@pytest.mark.parametrize("options", [(), ("--run=new/run",)], ids=str)
@pytest.mark.parametrize(("code", "expected", "requeued"), [(0, 0, ""), (85, 0, "7\n"), (1, 1, "")])
def test_a_saved_run_is_requeued_and_no_mark_is_left(tmp_path, code, expected, requeued, options):
    (tmp_path / ".slurm-7.abc").mkdir()  # of an earlier start
    (tmp_path / ".slurm-7.abc" / "saved").touch()
    ended = run_training(tmp_path, f"raise SystemExit({code})", options=options)
    assert ended[::2] == (expected, requeued), ended
    assert not list(tmp_path.glob("new/run/.slurm-*"))
    assert options or not list(tmp_path.glob(".slurm-*"))


@pytest.mark.parametrize("options", [[], ["--run={}/run"]], ids=str)
def test_the_submit_folder_may_be_read_only(tmp_path, options):
    """As where home is mounted so on compute nodes. In /proc nobody makes a file, root included."""
    options = [option.format(tmp_path) for option in options]
    ended = run_training(tmp_path, "raise SystemExit(85)", options=options, cwd=Path("/proc"))
    assert ended[::2] == (0, "7\n"), ended


def fails(code: int) -> str:
    """Code that ends with an exit code, or, above 128, by a signal."""
    return f"import os; os.kill(os.getpid(), {code - 128})" if code > 128 else f"raise SystemExit({code})"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_killed_job_goes_on(tmp_path, by):
    options = ["--run=run", "--retries=2"]
    assert run_training(tmp_path, fails(128 + by), options=options)[::2] == (0, "7\n")


def test_a_failed_job_goes_on_as_often_as_it_may_without_a_new_checkpoint(tmp_path):
    def start(number="7"):
        options = ["--run=run", "--retries=2"]
        return run_training(tmp_path, fails(FAILED_EXIT_CODE), options=options, JOB_ID=number)[::2]

    again, end = (0, "7\n"), (FAILED_EXIT_CODE, "")
    assert [start(), start(), start()] == [again, again, end]
    assert [start(), start()] == [again, again]  # submitted again: it counts anew
    (tmp_path / "run" / "step00000004").mkdir()
    assert [start(), start()] == [again, again]
    (tmp_path / "run" / ".step00000008.tmp-node-1").mkdir()  # a save that was cut off is no checkpoint
    assert start() == end
    assert [start(), start()] == [again, again]
    assert start("8") == (0, "8\n")
    assert run_training(tmp_path, "", options=["--run=run"])[::2] == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".step00000008.tmp-node-1",
        "step00000004",
    ]


def test_no_retry_where_none_is_wanted_or_no_folder_can_count_it(tmp_path):
    for options in ([], ["--retries=3"], ["--run=run", "--retries=0"]):
        assert run_training(tmp_path, fails(FAILED_EXIT_CODE), options=options)[::2] == (FAILED_EXIT_CODE, "")


@pytest.mark.parametrize("code", [BAD_INPUT_EXIT_CODE, 2, OUT_OF_MEMORY_EXIT_CODE, 126, 127, 130])
def test_what_another_start_would_meet_again_is_no_reason_for_one(tmp_path, code):
    assert run_training(tmp_path, fails(code), options=["--run=run"])[::2] == (code, "")


def test_bad_input_of_one_process_ends_the_job_though_others_are_killed(tmp_path):
    code = "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL); raise SystemExit(1)"
    srun = """
        while [[ $1 == --* ]]; do shift; done
        SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
        SLURM_PROCID=1 SLURM_LOCALID=1 "$@"
    """
    ended = run_training(tmp_path, code, options=["--run=run"], programs={"srun": srun})
    assert ended[::2] == (1, ""), ended


@pytest.mark.parametrize(
    "option", ["--run=", "--run", "--retries=", "--retries=-1", "--retries=x", "--nodes=2"]
)
def test_an_unknown_option_of_the_job_script_is_refused(tmp_path, option):
    code, printed, requeued = run_training(tmp_path, "", options=[option])
    assert (code, requeued) == (2, "") and printed.startswith(f"error: {option} is no option"), printed


@pytest.mark.parametrize("code", [85, 70])
def test_a_job_that_is_cancelled_stays_so_and_leaves_no_mark(tmp_path, code):
    parent = "parent = lambda of: int(open(f'/proc/{of}/stat').read().split()[3])"
    cancel = f"import os, signal; {parent}; os.kill(parent(parent(os.getppid())), signal.SIGTERM)"
    ended = run_training(tmp_path, f"{cancel}; raise SystemExit({code})", options=["--run=run"])
    assert ended[::2] == (143, ""), ended
    assert not list(tmp_path.glob("run/.slurm-*"))


def test_every_process_is_told_where_the_others_are(tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    code = "import os, sys; print(*(os.environ[name] for name in sys.argv[1:]))"
    _, output, _ = run_training(tmp_path, code, *names, "OMP_NUM_THREADS")
    assert "0 0 2 2 127.0.0.1 20007 1" in output
    assert "1 1 2 2 127.0.0.1 20007 1" in output


def test_the_first_of_many_nodes_is_named(tmp_path):
    """Their names are more than one write of scontrol's; the job ended with 141 where nobody read the second."""
    code = "import os; print(os.environ['MASTER_ADDR'])"
    ended = run_training(tmp_path, code, programs={"scontrol": "seq -f node%g 20000"}, JOB_NUM_NODES="2")
    assert ended[0] == 0 and ended[1].splitlines()[1:] == ["node1"] * 2, ended


def test_a_signal_before_python_listens_kills_nothing(tmp_path):
    """It is ignored until then, and the run's own handler takes over."""
    early = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getppid(), signal.SIGUSR1)"
    late = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(85)); os.kill(os.getpid(), signal.SIGUSR1)"
    assert run_training(tmp_path, f"{early}; {late}")[::2] == (0, "7\n")


@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (1, ""), (85, "40_5\n")])
def test_a_task_gets_its_number_and_is_requeued_alone_where_it_saved(tmp_path, code, requeued):
    script = f'printf "%s\\n" "$@" >words; exit {code}'
    command = ["bash", "-c", script, "x", "--only", "%a", "%a/8", "a\n#SBATCH --wrap=x", "10%a"]
    end, _, again = run_script(tmp_path, "job.sbatch", command, ARRAY_TASK_ID="5", ARRAY_JOB_ID="40")
    assert (end, again) == (code if code != 85 else 0, requeued)
    assert (tmp_path / "words").read_text() == "--only\n5\n5/8\na\n#SBATCH --wrap=x\n10%a\n"


def test_the_shell_of_a_process_outlives_sigterm_until_the_run_has_saved(tmp_path):
    """SLURM sends SIGTERM to all of a step, and kills what is left of it once its shells have ended."""
    template = (ROOT / "slurm" / "train.sbatch").read_text()
    process = re.search(r"^process='(.*?)^'$", template, re.DOTALL | re.MULTILINE).group(1)
    run = "trap 'sleep 0.5; touch written; exit 85' TERM; touch listens; while :; do sleep 0.05; done"
    environment = dict.fromkeys(
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "0"
    )
    command = ["bash", "-c", process, "process", str(tmp_path), "bash", "-c", run]
    with started(command, cwd=tmp_path, env={**os.environ, **environment}) as shell:
        local_slurm.wait_for("the run", (tmp_path / "listens").exists)
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(SECONDS) == 0
    assert (tmp_path / "written").exists() and (tmp_path / "saved").exists()


# Under a real SLURM.


@pytest.fixture(scope="session")
def slurm():
    local_slurm.start()


def submitted(*arguments, cwd) -> list[str]:
    """Submit for real; the numbers of the jobs."""
    command = [sys.executable, "-m", "olmo_sparsity.cli", "submit", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "env": environment, "timeout": SECONDS}
    done = subprocess.run(command, cwd=cwd, **options)
    assert done.returncode == 0, done.stderr
    return re.findall(r"as job (\d+)", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_told_to_stop_saves_requeues_and_goes_on_to_the_end(slurm, tmp_path, processes):
    if processes > local_slurm.cores():
        pytest.skip("SLURM here has one core")
    steps = {1: 1500, 2: 500}[processes]  # enough to be stopped in the middle
    length = (f"--max_duration={steps}", "--save_interval=100000", "--console_log_interval=1")
    tiny.train_config(tmp_path)
    options = ("--cpus", 1, "--processes-per-node", processes, "--time", "30")
    (number,) = submitted("train", "config.yaml", *options, "--", *length, cwd=tmp_path)
    run = tmp_path / "run"
    log = run / f"slurm-{number}.out"
    local_slurm.wait_for("first steps", lambda: len(read_metrics(run / "metrics.jsonl")) > 20)
    subprocess.run(["scancel", "--signal=USR1", number], check=True, timeout=SECONDS)
    local_slurm.start_now(number)
    stopped_at = len(read_metrics(run / "metrics.jsonl"))
    assert 20 < stopped_at < steps
    job = local_slurm.wait_for_end(number, 180)
    text = log.read_text()
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), text
    assert f"stopped after step {stopped_at} (SIGUSR1)" in text
    assert f"start 2: {processes} processes" in text
    assert "resuming from" in text
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_killed_process_ends_its_job_which_goes_on_until_no_retry_is_left(slurm, tmp_path):
    """From a submit folder in which nobody makes a file, root included."""
    processes = min(2, local_slurm.cores())
    steps = 2000
    tiny.train_config(tmp_path, save_interval=steps, console_log_interval=1)
    options = ("--cpus", 1, "--processes-per-node", processes, "--time", "30", "--retries", 1)
    command = ("train", tmp_path / "config.yaml", *options, "--", f"--max_duration={steps}")
    (number,) = submitted(*command, cwd="/proc")
    run = tmp_path / "run"

    def lose_a_process() -> None:
        metrics = run / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        local_slurm.wait_for("steps", lambda: metrics.is_file() and len(read_metrics(metrics)) > 20)
        os.kill(local_slurm.process_of(number, processes - 1), signal.SIGKILL)

    lose_a_process()
    local_slurm.start_now(number)
    lose_a_process()
    job = local_slurm.wait_for_end(number)
    text = (run / f"slurm-{number}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "1"), text
    assert "failed with exit code 137; back into the queue, retry 1 of 1" in text
    assert "no new checkpoint after 1 retries, so this is the end" in text
    assert not list(run.glob(".slurm-*")) and not (run / ".failures").exists()


@pytest.mark.slow
def test_a_signal_and_a_read_only_submit_folder_end_in_a_requeue(slurm, tmp_path):
    tiny.train_config(tmp_path, save_interval=100000, console_log_interval=1)
    options = ("--cpus", 1, "--time", "30")
    command = ("train", tmp_path / "config.yaml", *options, "--", "--max_duration=1500")
    (number,) = submitted(*command, cwd="/proc")
    run = tmp_path / "run"
    local_slurm.wait_for("first steps", lambda: len(read_metrics(run / "metrics.jsonl")) > 20)
    subprocess.run(["scancel", "--signal=USR1", number], check=True, timeout=SECONDS)
    local_slurm.start_now(number)
    job = local_slurm.wait_for_end(number, 180)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0")


@pytest.mark.slow
def test_an_array_trains_all_cells_and_one_that_is_told_to_stop_goes_on_alone(slurm, tmp_path):
    tiny.train_config(tmp_path, save_interval=100000, console_log_interval=1)
    where = ["--out", "out", "--cpus", "1", "--time", "30", "--jobs", "1"]
    grid = ["sweep", "config.yaml", "--grid", "max_duration=20,1000"]
    (number,) = submitted(*grid, *where, cwd=tmp_path)
    cells = {steps: tmp_path / "out" / f"max_duration={steps}" for steps in (20, 1000)}
    # The last task's own number is that of the array: requeued by it, the first one would run again.
    local_slurm.wait_for("first steps", lambda: len(read_metrics(cells[1000] / "metrics.jsonl")) > 20, 300)
    subprocess.run(["scancel", "--signal=USR1", f"{number}_2"], check=True, timeout=SECONDS)
    local_slurm.start_now(f"{number}_2")
    jobs = [local_slurm.wait_for_end(f"{number}_{task}", 300) for task in (1, 2)]
    logs = [path.read_text() for path in (tmp_path / "out").glob("slurm-*.out")]
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [("COMPLETED", "0"), ("COMPLETED", "1")], (
        logs
    )
    assert "resuming from" in (cells[1000] / "sweep.log").read_text()
    for steps, cell in cells.items():
        assert [row["step"] for row in read_metrics(cell / "metrics.jsonl")] == [*range(1, steps + 1)]
