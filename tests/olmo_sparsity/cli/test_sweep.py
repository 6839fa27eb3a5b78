"""The sweep command: cells and their names, what is refused, resuming, failures, signals."""

import itertools
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from olmo_sparsity.cli import sweep as module
from olmo_sparsity.cli.sweep import Cell, plan, run_cells
from olmo_sparsity.config.load import load_config
from olmo_sparsity.training.loop import train
from tests.support import tiny, tiny_task
from tests.support.processes import SECONDS
from tests.support.refusals import refused
from tests.support.slow import slow_but


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def sweep_here(monkeypatch, call_main, tmp_path):
    """Calls the command in ``tmp_path``; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return lambda line: call_main("sweep", *shlex.split(line))


@pytest.fixture
def cells_of(monkeypatch, tmp_path):
    """The cells that a command line means, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    return lambda line: plan(shlex.split(line))[1]


def shell_cell(folder, name, *scripts):
    """A cell whose commands are bash scripts."""
    return Cell(folder / name, tuple(("bash", "-c", script) for script in scripts))


# The grid.


def test_cells_are_the_product_in_order_and_their_commands_make_their_configs(cells_of, tmp_path):
    """Several configs are the slowest axis; commas outside of brackets separate values."""
    tiny.train_config(tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "rope.yaml").write_text(text.replace("scheme: pose", "scheme: contiguous"))
    rates = "{betas: [0.9, 0.95], eps: 1e-6}, {eps: 1e-7, betas: [0.8, 0.99]}"
    axes = f"--grid seed=1,2 --grid 'optimizer={rates}'"
    cells = cells_of(f"rope.yaml config.yaml {axes} --out out -- --max_duration=6")
    assert [cell.folder.name for cell in cells] == [
        f"config={config},seed={seed},optimizer={rate}"
        for config in ("rope", "config")
        for seed in (1, 2)
        for rate in ("betas-0.9-0.95-eps-1e-6", "eps-1e-7-betas-0.8-0.99")
    ]
    *_, path, resume, where, name, duration, seed, rate = shlex.split(cells[7].line)
    assert resume == "--resume" and "train rope.yaml" in cells[3].line
    config = load_config(path, [where, name, duration, seed, rate])
    assert config.save_folder == str(cells[7].folder) == f"out/{cells[7].folder.name}"
    assert config.run_name == f"out-{cells[7].folder.name}"
    assert config.positions.scheme == "pose"
    assert (config.seed, config.max_duration, config.optimizer.eps) == (2, 6, 1e-7)
    assert tuple(config.optimizer.betas) == (0.8, 0.99)


# What is refused before anything starts.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--grid model", "--grid model: write a key of the config and its values"),
        ("--grid model.n_layers=1,,2", "write a key of the config and its values"),
        ("--grid seed=3", "a key is given twice"),
        ("--grid optimizer.betas=[0.9,0.95],'[0.9, 0.95]'", "two cells would share a folder"),
        ("--save-folder=x", "save_folder is x, not out/seed=1; leave it to the sweep"),
        ("--out 'a #1'", "save_folder is a, not a #1/seed=1"),
        ("--grid positions.scheme=pose,posse", "one cannot run: seed=1,positions.scheme=posse: "),
    ],
)
def test_bad_arguments_are_named_and_nothing_starts(cells_of, tmp_path, arguments, message):
    tiny.train_config(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        cells_of(f"config.yaml --grid seed=1,2 --out out {arguments}")


def test_what_the_evaluation_would_refuse_is_refused_before_the_training(cells_of, tmp_path):
    tiny_task.write(tmp_path)
    with refused("length 1000: "):
        cells_of("task.yaml --grid seed=1,2 --out out --evaluate '--lengths 1000'")


def test_one_folder_for_the_measurements_of_all_cells_is_refused(cells_of, tmp_path):
    """Each would replace the one before it."""
    tiny_task.write(tmp_path)
    with refused("--evaluate: --out x is one folder for all cells"):
        cells_of("task.yaml --grid seed=1,2 --out out --evaluate '--samples 5 --out x'")


def test_a_task_of_an_array_that_has_no_cell_is_no_success(cells_of, tmp_path):
    tiny_task.write(tmp_path)
    with refused("--only 3: there are 2 cells"):
        cells_of("task.yaml --grid seed=1,2 --out out --only 3")


# Running.


def test_a_failing_cell_leaves_the_others_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("olmo_sparsity.cli.sweep.available_cores", lambda: 6)
    cells = [
        shell_cell(
            tmp_path, "bad", "echo fine; echo 'error: no such thing' >&2; exit 3", f"touch {tmp_path}/never"
        ),
        shell_cell(tmp_path, "good", "echo $OMP_NUM_THREADS", "echo second"),
        shell_cell(tmp_path, "killed", "echo last; kill -9 $$"),
    ]
    assert run_cells(cells, 2) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["[1/3]", "[2/3]", "[3/3]"]
    assert sorted(line.partition(" ")[2] for line in printed) == [
        "bad: failed with exit code 3: error: no such thing", "good: finished", "killed: failed by SIGKILL: last",
    ]  # fmt: skip
    log = (tmp_path / "good" / "sweep.log").read_text()
    assert log == f"$ {cells[1].line}\n3\nsecond\n"
    assert not (tmp_path / "never").exists()


def test_no_more_than_two_cells_run_at_a_time(tmp_path):
    script = f"echo +1 >>{tmp_path}/times; sleep 0.2; echo -1 >>{tmp_path}/times"
    assert run_cells([shell_cell(tmp_path, str(i), script) for i in range(3)], 2) == 0
    assert max(itertools.accumulate(map(int, (tmp_path / "times").read_text().split()))) == 2


@pytest.fixture
def hears_hangups():
    """SIGHUP is not ignored, as it is in tests that run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_and_waited_for(capsys, tmp_path, monkeypatch, number):
    """The first saves and ends with 85, the second dies before it listens, the third never starts."""
    saves = "trap 'sleep 0.3; echo saved; exit 85' TERM; touch listens; while :; do sleep 0.05; done"
    early = f"while [[ ! -e listens ]]; do sleep 0.02; done; kill -{int(number)} {os.getpid()}; exec sleep 60"
    scripts = (("saves", saves, "touch measured"), ("early", early), ("waiting", "true"))
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(one) for one in signal.valid_signals()]
    assert run_cells([shell_cell(tmp_path, *script) for script in scripts], 2) == 85
    assert [signal.getsignal(one) for one in signal.valid_signals()] == handlers
    output, errors = capsys.readouterr()
    printed = output.splitlines()
    assert f"{number.name}: waiting until these have saved: saves, early" in errors
    assert sorted(printed[:2]) == ["[0/3] early: stopped", "[0/3] saves: stopped"]
    assert printed[2:] == ["3 of 3 cells are stopped or have not started; the same command goes on"]
    assert (tmp_path / "saves" / "sweep.log").read_text().endswith("saved\n")
    assert not (tmp_path / "waiting").exists() and not (tmp_path / "measured").exists()


def test_a_second_ctrl_c_kills_what_does_not_end(tmp_path):
    """Such as a run on a file system that does not answer any more, which nobody would notice afterwards."""
    ctrl_c = f"kill -INT {os.getpid()}"
    cell = shell_cell(tmp_path, "a", f"trap '{ctrl_c}' TERM; {ctrl_c}; while :; do sleep 0.05; done")
    processes = []
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        start = module._start
        patch.setattr(module, "_start", lambda *words: processes.append(start(*words)) or processes[-1])
        run_cells([cell], 1)
    assert [process.returncode for process in processes] == [-signal.SIGKILL]


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path):
    cell = shell_cell(tmp_path, "a", f"kill -HUP {os.getpid()}")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_cells([cell], 1) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_saved_for_its_own_time_limit_goes_on_later_and_the_others_now(tmp_path):
    cells = [shell_cell(tmp_path, "limit", "exit 85"), shell_cell(tmp_path, "next", f"touch {tmp_path}/done")]
    assert run_cells(cells, 1) == 85 and (tmp_path / "done").exists()


def test_what_ended_well_after_a_signal_is_not_followed_by_the_next_command(capsys, tmp_path):
    cell = shell_cell(tmp_path, "a", f"kill -TERM {os.getpid()}", f"touch {tmp_path}/never")
    assert run_cells([cell], 1) == 85
    assert capsys.readouterr().out.startswith("[0/1] a: stopped\n") and not (tmp_path / "never").exists()


def test_nothing_goes_on_when_the_sweep_itself_breaks(tmp_path):
    saves = "trap 'echo stopped; exit 85' TERM; while :; do sleep 0.05; done"
    (tmp_path / "b").touch()  # no folder can be made there
    with pytest.raises(FileExistsError):
        run_cells([shell_cell(tmp_path, "a", saves), shell_cell(tmp_path, "b", "true")], 2)
    _, *printed = (tmp_path / "a" / "sweep.log").read_text().splitlines()
    assert set(printed) <= {"Terminated", "stopped"}  # of the sleep; it may have ended before it listened


@pytest.mark.parametrize("patience", slow_but([*range(40)], 0, 1))
def test_a_signal_reaches_a_command_that_has_just_been_started(tmp_path, patience):
    """A shell between them would lose it in the child that it has forked, about once in 150 times, and hang."""
    saves = "trap 'exit 85' TERM; while :; do sleep 0.05; done"
    cell = shell_cell(tmp_path, "a", saves, "true")
    with module._start(cell, 0, dict(os.environ)) as started:
        time.sleep(patience / 10_000)
        os.killpg(started.pid, signal.SIGTERM)
        try:
            assert started.args == cell.commands[0]
            assert started.wait(SECONDS) in (85, -signal.SIGTERM)
        finally:
            started.kill()


@pytest.mark.slow
def test_two_real_cells_are_trained_and_left_out_when_finished(sweep_here, tmp_path, monkeypatch):
    """One goes on from where it was stopped, and ends with the weights of a run without a sweep."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny.train_config(tmp_path, max_duration=4)
    for run in (["--save_folder=plain"], ["--save_folder=out/seed=2", "--stop_at=2"]):
        train(load_config("config.yaml", ["--seed=2", *run]))
    command = "config.yaml --grid seed=1,2 --out out --jobs 2"
    code, printed = sweep_here(command)
    assert code == 0, printed
    swept, plain = (load_file(f"{run}/step00000004/model.safetensors") for run in ("out/seed=2", "plain"))
    assert all(tensor.equal(plain[name]) for name, tensor in swept.items())
    assert "resuming from out/seed=2/step00000002" in Path("out/seed=2/sweep.log").read_text()
    logs = [Path(f"out/seed={seed}/sweep.log").read_bytes() for seed in (1, 2)]
    assert sweep_here(command) == (0, "2 of 2 cells are finished already\n")
    assert logs == [Path(f"out/seed={seed}/sweep.log").read_bytes() for seed in (1, 2)]


def test_a_cell_is_finished_when_it_is_trained_and_measured_as_asked(sweep_here, call_main, tmp_path):
    tiny_task.write(tmp_path)
    command = "task.yaml --grid seed=1,2 --out out --evaluate '--samples {}' --dry-run"
    overrides = ["--seed=2", "--save_folder=out/seed=2"]
    train(load_config("task.yaml", overrides))
    assert "# finished" not in sweep_here(command.format(5))[1]
    call_main("exact_match", "out/seed=2", "--samples", 5)
    first, second = sweep_here(command.format(5))[1].splitlines()
    assert "# finished" not in first and second.endswith("# finished")
    assert "# finished" not in sweep_here(command.format(6))[1]


def test_a_dry_run_prints_a_command_a_cell_and_only_one_where_it_is_asked_for(sweep_here, tmp_path):
    tiny_task.write(tmp_path)
    command = "task.yaml --grid seed=1,2 --out out --evaluate '--samples 5' --dry-run --max_duration=3"
    code, printed = sweep_here(command)
    start = f"{shlex.quote(sys.executable)} -P -m olmo_sparsity.cli"
    for seed, line in enumerate(printed.splitlines(), start=1):
        assert line.startswith(f"{start} train task.yaml --resume --save_folder=out/seed={seed} ")
        assert line.endswith(f" && {start} exact_match out/seed={seed} --overwrite --samples 5")
    assert (code, seed, sweep_here(f"{command} --only 2")[1]) == (0, 2, f"{line}\n")
    assert not os.path.exists("out")
