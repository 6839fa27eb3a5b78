"""Checkpoints that are written while training goes on: what waits for one, and what a fault makes of it."""

import json
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from olmo_sparsity.checkpoint import TrainState, checkpoints, load_state
from olmo_sparsity.new_checkpoint import NewCheckpoint
from olmo_sparsity.training import loop
from olmo_sparsity.training.engine import Engine, share_of
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.saving import CheckpointSaver, PendingSave
from olmo_sparsity.util.background import in_background
from olmo_sparsity.util.errors import BAD_INPUT_EXIT_CODE, NotFinite, UserError
from olmo_sparsity.util.signals import StoppedBySignal
from tests.support import tiny
from tests.support.forked import Forked
from tests.support.processes import SECONDS
from tests.support.refusals import refused
from tests.support.slow import slow_but

SHARDS = [f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)]


def steps_in(run):
    return [load_state(folder).step for folder in checkpoints(run)]


def leftovers(run):
    return [path.name for path in run.iterdir() if path.name.startswith(".step")]


def assert_whole(folder):
    """Every file has its checksum and is the one that was saved."""
    noted = json.loads((folder / "checksums.json").read_text())
    assert noted.keys() | {"checksums.json"} == {path.name for path in folder.iterdir()}
    for name, of_file in noted.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == of_file["sha256"], folder / name


# --- one process ---


@pytest.fixture
def held_write(monkeypatch):
    """Have every save wait, at most a minute, until the event is set; gives the event and when the saves began."""
    release = threading.Event()
    begun = []
    write = NewCheckpoint.write

    def held(self, share):
        begun.append(self.folder.name)
        release.wait(60)
        return write(self, share)

    monkeypatch.setattr(NewCheckpoint, "write", held)
    return release, begun


def before_step(monkeypatch, number, action):
    """Call ``action`` before a step is trained."""
    original = loop.train_step

    def train_step(engine, batch, plan, step):
        if step == number:
            action()
        return original(engine, batch, plan, step)

    monkeypatch.setattr(loop, "train_step", train_step)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    tmp_path, monkeypatch, held_write
):
    """The weights are those of its step, though later steps have changed the model before they were written."""
    release, begun = held_write
    config = tiny.train_config(tmp_path, "--save_interval=2", "--max_duration=5")
    seen = {}

    def look():
        seen.update(begun=[*begun], placed=checkpoints(tmp_path / "run"))
        release.set()

    before_step(monkeypatch, 4, look)
    train(config)
    assert seen == {"begun": ["step00000002"], "placed": []}
    assert begun == ["step00000002", "step00000004", "step00000005"] and steps_in(tmp_path / "run") == [
        2,
        4,
        5,
    ]
    monkeypatch.undo()
    again = tiny.train_config(
        tmp_path, "--max_duration=5", f"--save_folder={tmp_path / 'again'}", "--stop_at=2"
    )
    expected = train(again)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "run" / "step00000002" / name).read_bytes() == (expected / name).read_bytes()


def test_a_checkpoint_is_in_its_place_at_the_next_step_after_it_is_written(tmp_path, monkeypatch):
    placed = []
    before_step(monkeypatch, 4, lambda: placed.extend(steps_in(tmp_path / "run")))
    before_step(monkeypatch, 3, lambda: time.sleep(1))  # of a tiny model it is written by then
    train(tiny.train_config(tmp_path, "--save_interval=2"))
    assert placed == [2]


def test_files_of_one_process_are_those_of_the_library(tmp_path):
    folder = train(tiny.train_config(tmp_path))
    assert {path.name for path in folder.iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "state.json", "config.yaml", "tokenizer.json"),
        "checksums.json",
    }
    for name in ("model.safetensors", "optimizer.safetensors"):
        save_file(load_file(folder / name), tmp_path / name)
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()
    assert_whole(folder)


def slow_write(monkeypatch, seconds=0.2):
    write = NewCheckpoint.write

    def slow(self, share):
        time.sleep(seconds)
        return write(self, share)

    monkeypatch.setattr(NewCheckpoint, "write", slow)


def test_a_signal_waits_for_the_checkpoint_that_is_written(tmp_path, monkeypatch):
    slow_write(monkeypatch)
    before_step(monkeypatch, 4, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(StoppedBySignal, match="stopped after step 4"):
        train(tiny.train_config(tmp_path, "--save_interval=3"))
    assert steps_in(tmp_path / "run") == [3, 4]
    assert not leftovers(tmp_path / "run")


def evaluations(run):
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], row["heldout_loss_nats"]) for row in rows if "heldout_loss_nats" in row]


def test_a_run_that_is_stopped_saves_at_once_and_evaluates_when_it_goes_on(tmp_path, monkeypatch):
    """SLURM may leave it half a minute."""
    config = tiny.train_config(tmp_path, evaluation={"interval": 4})
    train(config)
    with monkeypatch.context() as stopping:
        before_step(stopping, 4, lambda: signal.raise_signal(signal.SIGTERM))
        stopped = replace(config, save_folder=str(tmp_path / "stopped"))
        with pytest.raises(StoppedBySignal, match="stopped after step 4"):
            train(stopped)
    assert evaluations(tmp_path / "stopped") == []
    assert load_state(train(stopped, resume=True)).finished
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "run")
    assert [step for step, _ in evaluations(tmp_path / "run")] == [4, 8]


def test_a_run_that_is_killed_in_its_last_evaluation_is_finished_by_the_next_start(tmp_path, monkeypatch):
    config = tiny.train_config(tmp_path, evaluation={"interval": 8})
    with monkeypatch.context() as stopping:
        before_step(stopping, 8, lambda: signal.raise_signal(signal.SIGTERM))
        stopping.setattr(Engine, "evaluate", lambda *_: sys.exit(137))
        with pytest.raises(SystemExit):
            train(config)
    assert steps_in(tmp_path / "run") == [4, 8] and not evaluations(tmp_path / "run")
    last = train(config, resume=True)
    assert load_state(last) == replace(load_state(last), step=8, finished=True, evaluation_due=False)
    assert [step for step, _ in evaluations(tmp_path / "run")] == [8]


@pytest.mark.parametrize("kind", ["not finite", "a bug"])
def test_an_error_waits_for_the_checkpoint_that_is_written(tmp_path, monkeypatch, kind):
    slow_write(monkeypatch)
    original = loop.forward_backward

    def fails():
        if kind == "a bug":
            raise ZeroDivisionError
        values = lambda *arguments: {**original(*arguments), "loss_nats": float("nan")}  # noqa: E731
        monkeypatch.setattr(loop, "forward_backward", values)

    before_step(monkeypatch, 5, fails)
    expected = pytest.raises(ZeroDivisionError) if kind == "a bug" else refused("loss_nats is nan at step 5")
    with expected:
        train(tiny.train_config(tmp_path, "--save_interval=4"))
    assert steps_in(tmp_path / "run") == [4] and not leftovers(tmp_path / "run")
    assert_whole(tmp_path / "run" / "step00000004")


def test_what_fails_in_the_background_ends_the_run_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    """An error that is no full disk keeps its own text."""

    def fails(self, share):
        (self.temporary / "model.safetensors").write_bytes(b"half")
        raise OSError(5, "Input/output error")

    before_step(monkeypatch, 6, lambda: monkeypatch.setattr(NewCheckpoint, "write", fails))
    with pytest.raises(OSError, match="Input/output error"):
        train(tiny.train_config(tmp_path, "--save_interval=4"))
    assert steps_in(tmp_path / "run") == [4] and not leftovers(tmp_path / "run")


def test_an_error_of_the_loop_is_the_one_that_is_shown_where_the_save_fails_too(
    tmp_path, monkeypatch, caplog
):
    def fails(self, share):
        time.sleep(1)
        raise OSError(5, "Input/output error")

    def stops():
        raise ZeroDivisionError

    monkeypatch.setattr(NewCheckpoint, "write", fails)
    before_step(monkeypatch, 5, stops)
    with pytest.raises(ZeroDivisionError):
        train(tiny.train_config(tmp_path, "--save_interval=4"))
    assert "Input/output error" in caplog.text
    assert steps_in(tmp_path / "run") == [] and not leftovers(tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "waits"), [(NotFinite("in all ranks"), True), (UserError("of a sample of this rank"), False)]
)
def test_only_an_error_of_all_ranks_waits_for_them(tmp_path, error, waits):
    """Where one rank waited for the others, the exchange would meet that of their next step."""
    waited = []
    engine = SimpleNamespace(
        world_size=2,
        is_rank_zero=True,
        results_of_all_ranks=lambda running: waited.append(running) or [],
        on_rank_zero=lambda action: None,
    )
    config = tiny.train_config(tmp_path)
    saver = CheckpointSaver(engine, tmp_path, config, None, None, 1, keep_last=-1, keep_every=None)
    checkpoint = NewCheckpoint.begin(saver.folder_of(4))
    saver.pending = PendingSave(checkpoint, TrainState(4, 4), in_background(list))
    with pytest.raises(type(error)), saver:
        raise error
    assert bool(waited) == waits and saver.pending is None
    assert checkpoint.temporary.exists() == waits  # the engine above puts nothing in its place


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_tensor_is_saved_by_one_rank_and_ranks_save_about_as_much(count):
    model = tiny.model_config()
    shapes = {name: tensor.shape for name, tensor in tiny.PositionedOLMo(model).named_parameters()}
    shares = [share_of(rank, count, shapes) for rank in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(shapes)
    sizes = [sum(shapes[name].numel() for name in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(shape.numel() for shape in shapes.values())


# --- two processes ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a config with a checkpoint every second step, all kept."""
    folder = tmp_path_factory.mktemp("saving")
    tiny.train_config(
        folder, save_interval=2, max_duration=60, console_log_interval=1, scheduler={"t_warmup": 7}
    )
    return folder


def start(folder, run, *overrides, faults=None):
    arguments = [str(folder / "config.yaml"), f"--save_folder={run}", "--resume", *overrides]
    where = {"log": f"{run}.changes", "beneath": f"{run}/"}
    faults = {rank: {**where, **fault} for rank, fault in (faults or {}).items()}
    return Forked(2, arguments, run.parent, {"OLMO_SPARSITY_TIMEOUT": "5"}, faults=faults)


def end(process):
    try:
        return process.communicate(SECONDS)
    finally:
        process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_each_of_two_processes_writes_its_share(folder, tmp_path, stage):
    """The tensors are those of one process, but for rounding; no rank writes more than its share."""
    zero = () if stage is None else (f"--deepspeed.config=configs/deepspeed/zero{stage}.json",)
    process = start(folder, tmp_path / "run", "--stop_at=4", *zero)
    assert end(process) and process.returncode == 0
    alone = Forked(
        1, [str(folder / "config.yaml"), f"--save_folder={tmp_path / 'alone'}", "--stop_at=4"], tmp_path
    )
    assert end(alone) and alone.returncode == 0
    assert steps_in(tmp_path / "run") == [2, 4]
    last = tmp_path / "run" / "step00000004"
    assert_whole(last)
    assert {path.name for path in last.glob("*.safetensors")} == {*SHARDS}
    for kind in ("model", "optimizer"):
        expected = load_file(tmp_path / "alone" / "step00000004" / f"{kind}.safetensors")
        first, second = (load_file(last / name) for name in SHARDS if name.startswith(kind))
        assert not first.keys() & second.keys()
        assert (saved := first | second).keys() == expected.keys()
        assert all((saved[name].float() - expected[name].float()).abs().max() < 1e-5 for name in saved)
        sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in (first, second)]
        assert max(sizes) < 0.6 * sum(sizes)


@pytest.mark.parametrize("rank", slow_but([0, 1], 1))
def test_a_disk_that_is_full_for_one_rank_ends_all_and_leaves_the_checkpoint_before_it(
    folder, tmp_path, rank
):
    """From its second checkpoint on no file of this rank can grow beyond 10 kB."""
    first = start(folder, tmp_path / "run", "--stop_at=2")
    assert end(first) and first.returncode == 0
    full = {rank: {"kind": "full-disk", "room": 10_000, "change": 1}}
    if rank == 0:  # it writes other files before
        full[0] = {"kind": "full-disk", "room": 10_000, "seconds": 0.0}
    process = start(folder, tmp_path / "run", faults=full)
    _, errors = end(process)
    assert set(process.exit_codes.values()) == {BAD_INPUT_EXIT_CODE}, errors
    assert errors.count("step00000004 cannot be saved: the disk is full") == 2, errors
    assert errors.count("step00000002 is whole: make room, and go on with --resume") == 2, errors
    assert errors.count("error: ") == 2 and f"rank {rank} failed (UserError: " in errors
    assert steps_in(tmp_path / "run") == [2] and not leftovers(tmp_path / "run")
    assert_whole(tmp_path / "run" / "step00000002")
    again = start(folder, tmp_path / "run", "--stop_at=6")
    assert end(again) and again.returncode == 0
    assert steps_in(tmp_path / "run") == [2, 4, 6]


@pytest.mark.slow
def test_kills_lose_the_checkpoint_that_is_being_written_and_nothing_else(folder, tmp_path):
    """Of one of two processes, or both: 30, at drawn moments, half of them changes of files, which saves make.

    What is trained from then on is what a run trains that nothing happened to, bit for bit.
    """
    run = tmp_path / "run"
    long = "--max_duration=100000", "--save_num_checkpoints_to_keep=4"
    first = start(folder, run, *long, "--stop_at=2")
    assert end(first) and first.returncode == 0
    draw = random.Random(0)
    unfinished = 0
    for _ in range(30):
        last_step = steps_in(run)[-1]
        moment = draw.choice([{"change": draw.randint(1, 60)}, {"seconds": draw.uniform(0.5, 6.0)}])
        ranks = draw.choice([[0], [1], [0, 1]])
        process = start(folder, run, *long, faults={rank: {"kind": "kill", **moment} for rank in ranks})
        end(process)
        assert -signal.SIGKILL in process.exit_codes.values(), process.exit_codes
        assert steps_in(run)[-1] >= last_step
        for checkpoint in checkpoints(run):
            assert_whole(checkpoint)
        # The save of an even step begins after its row is written, and finishes the one before it first.
        rows = read_metrics(run / "metrics.jsonl")
        assert steps_in(run)[-1] >= (rows[-1]["step"] - 1) // 2 * 2 - 2
        unfinished += bool(leftovers(run))
    assert unfinished > 0
    stop = f"--stop_at={steps_in(run)[-1] + 4}"
    for path, more in ((run, ()), (tmp_path / "undisturbed", ("--save_interval=100000",))):
        process = start(folder, path, *long, stop, *more)
        assert end(process) and process.returncode == 0
    assert not leftovers(run)
    saved, expected = (
        [(row["step"], row["loss_nats"]) for row in read_metrics(path / "metrics.jsonl")]
        for path in (run, tmp_path / "undisturbed")
    )
    assert saved == expected
    for name in SHARDS:
        one, other = (checkpoints(path)[-1] / name for path in (run, tmp_path / "undisturbed"))
        assert one.read_bytes() == other.read_bytes()
