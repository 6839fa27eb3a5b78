"""Several processes on CPU over gloo, against one process; through the real launcher or forked as its processes."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from olmo_sparsity.checkpoint import checkpoints, load_state
from olmo_sparsity.config.load import load_config
from olmo_sparsity.training.engine import standard_error_held_back
from olmo_sparsity.training.metrics import read_metrics
from olmo_sparsity.training.zero import deepspeed_config
from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE
from scripts.faults.processes import free_port, ranks
from tests.support import tiny
from tests.support.forked import Forked
from tests.support.refusals import refused
from tests.support.slow import slow_but

ROOT = Path(__file__).parents[3]
STEPS = 20
SECONDS = 240.0  # until processes that hang are ended; a busy machine takes a tenth


def arguments_of(folder, *overrides, stage=None):
    zero = () if stage is None else (f"--deepspeed.config=configs/deepspeed/zero{stage}.json",)
    return [str(folder / "config.yaml"), *overrides, *zero]


def launch(processes, *arguments, environment=None, before=None):
    """Start training as a user would; returns the running launcher."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        command += ["--master_port", str(free_port())]
    return subprocess.Popen(
        [*command, "scripts/train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def ended(process):
    """What training printed as output and as errors. One that hangs is ended, and a launcher ends what it started."""
    try:
        return process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise


def run(processes, folder, name, *overrides, stage=None, launched=False, environment=None):
    """Train to the end in RUN ``name`` and return its metrics by step."""
    arguments = arguments_of(folder, f"--save_folder={folder / name}", *overrides, stage=stage)
    if launched:
        process = launch(processes, *arguments, environment=environment)
    else:
        process = Forked(processes, arguments, folder, environment)
    _, errors = ended(process)
    assert process.returncode == 0, errors[-3000:]
    return {row["step"]: row for row in read_metrics(folder / name / "metrics.jsonl")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    tiny.train_config(folder, max_duration=STEPS, save_interval=100, scheduler={"t_warmup": 7})
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return run(1, folder, "alone")


def assert_same(rows, expected):
    assert rows.keys() == expected.keys() == set(range(1, STEPS + 1))
    for step, row in rows.items():
        assert row["loss_nats"] == pytest.approx(expected[step]["loss_nats"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)
        assert row["learning_rate"] == expected[step]["learning_rate"]


SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3)]


@pytest.mark.parametrize("stage", [None, 2, *SLOW_STAGES])
def test_two_processes_have_the_losses_of_one(folder, alone, stage, tmp_path):
    """Gradient accumulation too: each process runs its two windows one by one, one process runs two at a time.

    And nothing is compiled: DeepSpeed's extension took a minute, and a killed compiler's lock had every run wait.
    """
    rows = run(
        2,
        folder,
        f"zero{stage}",
        "--device_train_microbatch_size=1",
        stage=stage,
        launched=stage in (None, 3),
        environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)},
    )
    assert_same(rows, alone)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 2])
def test_two_compiled_processes_have_the_losses_of_one(folder, alone, stage):
    asked = "--compile.backend=aot_eager", "--compile.from_steps=0"
    assert_same(run(2, folder, f"compiled{stage}", *asked, stage=stage), alone)


@pytest.mark.slow
def test_lionw_goes_on_under_zero(folder):
    """It counts no steps, which its state then lacks."""
    lion = "--optimizer.name=lionw", "--max_duration=8"
    whole = run(1, folder, "lion", *lion, stage=2)
    run(1, folder, "lion-parts", *lion, "--stop_at=3", stage=2)
    parts = run(1, folder, "lion-parts", *lion, "--resume", stage=2)
    assert [row["loss_nats"] for row in parts.values()] == [row["loss_nats"] for row in whole.values()]


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_another_stage(folder, alone):
    """ZeRO 3 on two processes, then one process without DeepSpeed, then ZeRO 1 on four: as if nothing had happened."""
    run(2, folder, "mixed", "--stop_at=6", stage=3)
    run(1, folder, "mixed", "--stop_at=12", "--resume")
    assert_same(run(4, folder, "mixed", "--resume", stage=1), alone)
    for file in ("model", "optimizer"):
        ours, theirs = (
            load_file(checkpoints(folder / n)[-1] / f"{file}.safetensors") for n in ("mixed", "alone")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor.float() - theirs[name].float()).abs().max() < 1e-5


@pytest.mark.parametrize("number", slow_but([signal.SIGUSR1, signal.SIGTERM], signal.SIGUSR1))
def test_a_signal_saves_and_asks_to_be_requeued(folder, alone, tmp_path, number):
    process = Forked(1, arguments_of(folder, f"--save_folder={tmp_path}", "--max_duration=100000"), tmp_path)
    deadline = time.monotonic() + 60
    while len(read_metrics(tmp_path / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = ended(process)
    assert process.returncode == REQUEUE_EXIT_CODE, errors
    assert f"({number.name})" in output
    step = load_state(checkpoints(tmp_path)[-1]).step
    assert 3 <= step == read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]


def error_lines(errors):
    """What our script said, without the launcher's own report."""
    return [line for line in errors.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_full_disk_while_saving_ends_every_process(folder, tmp_path):
    """A file-size limit stands for the full disk; only the main process writes, and the other must not wait for it."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    process = launch(2, *arguments_of(folder, f"--save_folder={tmp_path / 'run'}"), before=limit)
    _, errors = ended(process)
    assert process.returncode != 0
    assert "the disk is full" in error_lines(errors)[0]
    assert not list((tmp_path / "run").glob("*step*"))


@pytest.mark.parametrize("lost", slow_but([0, 1], 0))
@pytest.mark.parametrize("number", slow_but([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_a_peer_that_dies_or_stalls_is_told_in_one_line(folder, tmp_path, lost, number):
    overrides = (f"--save_folder={tmp_path / 'run'}", "--max_duration=100000", "--save_interval=3")
    process = Forked(2, arguments_of(folder, *overrides), tmp_path, {"OLMO_SPARSITY_TIMEOUT": "6"})
    ranks = list(process.exit_codes)
    deadline = time.monotonic() + SECONDS
    while not checkpoints(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(ranks[lost], number)
    while ranks[1 - lost] in process.running and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, errors = ended(process)
    assert process.exit_codes[ranks[1 - lost]] == 1
    [line] = error_lines(errors)
    assert "another process of this run was lost" in line
    assert "go on with --resume" in line
    assert [each for each in errors.splitlines() if not each.startswith(("error: ", "training: "))] == []


@pytest.mark.slow
def test_processes_wait_for_the_main_one_however_long_it_works(folder):
    """To read a large corpus takes longer than processes wait for each other."""
    code = f"""
import time
from olmo_sparsity.config.load import load_config
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.engine import Engine
config = load_config({str(folder / "config.yaml")!r})
Engine(config, build_model(config)).on_main(lambda: time.sleep(5))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **rank, "OLMO_SPARSITY_TIMEOUT": "2"}
        )
        for rank in ranks(2)
    ]
    assert [process.wait(SECONDS) for process in processes] == [0, 0]


@pytest.mark.slow
def test_an_unreachable_rank_0_is_named_in_one_line(folder, tmp_path):
    port = free_port()
    environment = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OLMO_SPARSITY_TIMEOUT": "2"}
    process = launch(1, *arguments_of(folder, f"--save_folder={tmp_path}"), environment=environment)
    _, errors = ended(process)
    assert process.returncode == 1
    [line] = errors.splitlines()
    assert line.startswith(f"error: no connection to rank 0 at 127.0.0.1:{port} within 2 s")


def lose(listener, rank_0):
    """Pass on to the store ``rank_0`` what comes in, until the processes are to meet; then close the connections."""

    def pass_on(source, target):
        with contextlib.suppress(OSError):  # the other direction has closed it
            while (data := source.recv(4096)) and b"init/" not in data:
                target.sendall(data)
        for each in (source, target):
            each.close()

    with contextlib.suppress(OSError):  # closed by the test
        while True:
            ends = listener.accept()[0], socket.create_connection(("127.0.0.1", rank_0.port))
            for source, target in (ends, ends[::-1]):
                threading.Thread(target=pass_on, args=(source, target), daemon=True).start()


def leave(listener, rank_0):
    """End as rank 0 does that is killed once another process has found its port open."""
    listener.accept()[0].close()
    listener.close()


@pytest.mark.parametrize("ends", [lose, leave])
def test_a_rank_0_that_is_lost_while_processes_meet_is_one_line(folder, tmp_path, ends):
    """PyTorch prints a page of C++ addresses."""
    rank_0 = torch.distributed.TCPStore("127.0.0.1", free_port(), 2, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=ends, args=(listener, rank_0), daemon=True).start()
        environment = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        environment |= {"OLMO_SPARSITY_TIMEOUT": "1"}
        process = launch(1, *arguments_of(folder, f"--save_folder={tmp_path}"), environment=environment)
        _, errors = ended(process)
    assert process.returncode == 1
    [line] = errors.splitlines()
    assert line.startswith("error: ") and "check that rank 0 runs there" in line


def test_text_that_is_held_back_is_shown_unless_a_lost_peer_explains_it(capfd):
    with standard_error_held_back():
        os.write(2, b"a warning")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a warning"
    for error, shown in ((ImportError, "frame #0"), (TimeoutError, ""), (torch.distributed.DistError, "")):
        with pytest.raises(error), standard_error_held_back():
            os.write(2, b"frame #0")
            raise error
        assert capfd.readouterr().err == shown


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "is damaged (maximum recursion"),
        ("{", "is damaged (Expecting"),
        ("[]", "is damaged (it holds no dict)"),
        ("\udcff", "is damaged ('utf-8' codec"),
        ("{}", "has no zero_optimization.stage of 0, 1, 2 or 3"),
        ('{"zero_optimization": []}', "has no zero_optimization.stage"),
        ('{"zero_optimization": {"stage": "1"}}', "has no zero_optimization.stage"),
        ('{"zero_optimization": {"stage": 4}}', "has no zero_optimization.stage"),
        (None, "is missing"),
    ],
)
def test_a_deepspeed_file_that_is_none(tmp_path, text, part):
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    config = load_config(
        ROOT / "configs" / "base.yaml", [f"--deepspeed.config={path}", "--deepspeed.offload_optimizer"]
    )
    with refused() as error:
        deepspeed_config(config, 1)
    message = str(error.value)
    assert message.startswith(f"deepspeed.config: {path} {part}") and message.endswith(
        "see configs/deepspeed/"
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    "change", [{"train_batch_size": 8}, {"gradient_clipping": 1.0}, {"bf16": {"enabled": True}}]
)
def test_a_value_is_not_written_twice(tmp_path, change):
    values = json.loads((ROOT / "configs" / "deepspeed" / "zero1.json").read_text())
    (tmp_path / "own.json").write_text(json.dumps({**values, **change}))
    config = load_config(ROOT / "configs" / "base.yaml", [f"--deepspeed.config={tmp_path / 'own.json'}"])
    with refused(f"{next(iter(change))} is decided by the YAML"):
        deepspeed_config(config, 1)
