"""Faults in prepare, train and measure, at moments that a seed draws, and one property:

    The command ends with the right result, or with one line ("error: ...") and a non-zero exit in time, and what was
    whole before is whole after. Run again undisturbed it ends with the right result; on a truncated file it may refuse,
    and on a truncated `metrics.jsonl`, on which no loss depends, it goes on without the rows that are lost.

The right result is that of an undisturbed run: token files and manifest byte for byte; weights, optimizer state and
every loss bit for bit; every frame of a measurement.
"""

import gzip
import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from analysis import load
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.util.errors import FAILED_EXIT_CODE
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE
from tests.support import tiny
from tests.support.forked import Forked
from tests.support.processes import SECONDS
from tests.support.slow import slow_but

PEERS_WAIT = "5"  # seconds that processes of one training wait for each other
INJECTIONS = 4  # of every fault in every command
BYSTANDER = "notes of mine.txt"


@dataclass(frozen=True)
class Command:
    """A command, the folder that it writes, and the commands that make what it is given."""

    script: str
    arguments: str
    out: str
    given: tuple[str, ...] = ()
    again: str = ""  # what is added when it is run again
    processes: int = 1


COMMANDS = {
    "prepare": Command(
        "prepare_data",
        "text --files {0}/text/one.jsonl.gz {0}/text/two.jsonl.gz --out {0}/corpus --workers 1 "
        "--heldout-fraction 0.2 --vocab-size 320",
        "corpus",
    ),
    "train": Command("train", "{0}/config.yaml", "run", ("prepare",), "--resume"),
    "train-2": Command("train", "{0}/config.yaml", "run", ("prepare",), "--resume", processes=2),
    "measure": Command(
        "measure",
        "{0}/run --corpus {0}/corpus --out {0}/records --n-long 24 --n-short 8 --targets 128 --tau 0.001 --k 1,2,4 "
        "--device cpu --targets-per-block 1 --selectors leave-one-out,attention,random --tokens-per-batch 4096",
        "records",
        ("prepare", "train"),
    ),
}


def result_of(name: str, scene: Path) -> dict[str, str]:
    """What a command was run for, by name; what cannot be read is never the right one."""
    out = scene / COMMANDS[name].out
    if name == "prepare":
        return {
            path.name: sha256_file(path) for path in out.iterdir() if path.suffix in (".npy", ".gz", ".json")
        }
    if name.startswith("train"):
        last = max(out.glob("step*"))
        losses = [(row["step"], row["loss_nats"]) for row in read_metrics(out / "metrics.jsonl")]
        tensors = {path.name: sha256_file(path) for path in last.glob("*.safetensors")}
        return {"checkpoint": last.name, "losses": json.dumps(losses), **tensors}
    result = load(out)
    return {frame: getattr(result, frame).to_json() for frame in ("targets", "choices", "texts")}


class Scenes:
    """Makes scenes, the folders that commands run in, and the undisturbed run of each command when it is needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.undisturbed = cache(self._undisturbed)

    def begin(self, name: str, scene: Path) -> Path:
        """The folder ``scene`` as the command is to find it."""
        write_inputs(scene)
        for maker in COMMANDS[name].given:
            out = COMMANDS[maker].out
            shutil.copytree(self.undisturbed(maker)[0] / out, scene / out, dirs_exist_ok=True)
        (scene / COMMANDS[name].out).mkdir(exist_ok=True)
        for folder in (scene, scene / COMMANDS[name].out):
            (folder / BYSTANDER).write_text("not made by any command\n")
        return scene

    def _undisturbed(self, name: str) -> tuple[Path, dict[str, str], float, int]:
        """Scene, result, seconds and changes of files (of rank 0)."""
        scene, started = self.begin(name, self.folder / name), time.monotonic()
        code, errors = end(start(name, scene, {0: {"kind": "none"}}))
        assert code == 0, errors
        changes = (self.folder / f"{name}.changes").stat().st_size
        return scene, result_of(name, scene), time.monotonic() - started, changes


def write_inputs(scene: Path) -> None:
    """Made-up text, in which documents repeat their own words, and a config."""
    words = random.Random(0)
    (scene / "text").mkdir(parents=True)
    for name in ("one", "two"):
        names = ["".join(words.choices(["ba", "do", "ki", "lu", "me", "no"], k=3)) for _ in range(40)]
        texts = (" ".join(words.choices(words.sample(names, 5), k=90)) for _ in range(40))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path = scene / "text" / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
        os.utime(path, (0, 0))  # a text is known by its name, size and time of change
    model = {"vocab_size": 320, "embedding_size": 384, "residual_dropout": 0.1}
    sizes = {"max_duration": 16, "global_train_batch_size": 8, "device_train_microbatch_size": 4}
    tiny.write_yaml(scene, scene / "corpus", model=model, save_num_checkpoints_to_keep=2, **sizes)


def start(name: str, scene: Path, faults: dict[int, dict] | None = None, more: str = "") -> Forked:
    """Start a command in its scene; ``faults`` by rank."""
    command = COMMANDS[name]
    words = [*command.arguments.format(scene).split(), *more.split()]
    where = {"log": f"{scene}.changes", "beneath": f"{scene}{os.sep}"}
    armed = {rank: {**where, **fault} for rank, fault in (faults or {}).items()}
    environment = {"OLMO_SPARSITY_TIMEOUT": PEERS_WAIT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Forked(command.processes, words, scene.parent, environment, command=command.script, faults=armed)


def end(process: Forked) -> tuple[int, str]:
    """Exit code and standard error of a command that ends in time."""
    try:
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()
    return process.returncode, errors


def end_beside_a_stale_rank(process: Forked, rank: int) -> tuple[int, str]:
    """The same, where the other process has to end by itself and ``rank`` stands still, or has ended."""
    stale, other = (list(process.exit_codes)[index] for index in (rank, 1 - rank))
    deadline = time.monotonic() + SECONDS
    while other in process.running:
        assert time.monotonic() < deadline, "the other process waits for ever"
        time.sleep(0.05)
    if stale in process.running:
        os.kill(stale, signal.SIGKILL)
    return process.exit_codes[other], end(process)[1]


def inject(fault: str, name: str, scene: Path, scenes: Scenes, draw: random.Random) -> bool:
    """Let one fault happen to a command; whether it left no result."""
    _, right, seconds, changes = scenes.undisturbed(name)
    rank = draw.randrange(COMMANDS[name].processes)
    moment = draw.choice([{"change": draw.randint(1, changes)}, {"seconds": draw.uniform(0, seconds)}])
    if fault == "signal":
        process = start(name, scene)
        time.sleep(draw.uniform(0, seconds))
        number = draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        for pid in process.running:
            os.killpg(pid, number)  # its children too, as a terminal and SLURM do
        code, errors = end(process)
        # one process may have ended before the other listened to signals
        assert code in (0, 1, FAILED_EXIT_CODE, 130, REQUEUE_EXIT_CODE, -number), (number, code, errors)
    else:
        process = start(name, scene, {rank: {"kind": fault, "room": int(10 ** draw.uniform(3, 5)), **moment}})
        code, errors = end_beside_a_stale_rank(process, rank) if fault == "stale" else end(process)
        if fault != "kill":
            assert code == 0 or (code > 0 and "error: " in errors), (moment, code, errors)
        if fault == "full-disk" and code:
            assert errors.count("error: ") == 1 or COMMANDS[name].processes > 1, errors
    if code == 0:
        assert result_of(name, scene) == right, (moment, "another result")
    return code != 0


def run_again(
    name: str, scene: Path, right: dict[str, str], may_refuse: bool = False, may_lose_rows: bool = False
) -> None:
    """The same command, undisturbed. It may refuse, or go on without rows that `metrics.jsonl` has lost."""
    code, errors = end(start(name, scene, more=COMMANDS[name].again))
    if code and may_refuse:
        # a line of each process, with its rank
        assert 1 <= errors.count("error: ") <= COMMANDS[name].processes, errors
    else:
        assert code == 0, errors
        result = result_of(name, scene)
        if may_lose_rows:
            rows = json.loads(result["losses"])
            assert [row for row in json.loads(right["losses"]) if row in rows] == rows
            result["losses"] = right["losses"]
        assert result == right, "another result"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return Scenes(tmp_path_factory.mktemp("undisturbed"))


def whole(scene: Path, out: str) -> dict[Path, str]:
    """Checksums of what a command may not change: its inputs, and what is somebody else's."""
    paths = [path for path in scene.rglob("*") if path.is_file()]
    kept = [path for path in paths if path.relative_to(scene).parts[0] != out or path.name == BYSTANDER]
    return {path.relative_to(scene): sha256_file(path) for path in kept}


PAIRS = [
    *((fault, name) for fault in ("kill", "full-disk", "signal") for name in COMMANDS),
    ("stale", "train-2"),
]


@pytest.mark.parametrize(("fault", "name"), slow_but(PAIRS, ("kill", "prepare")))
def test_the_same_command_goes_on_after_a_fault(fault, name, scenes, tmp_path):
    right = scenes.undisturbed(name)[1]
    for seed in range(1 if (fault, name) == ("kill", "prepare") else INJECTIONS):
        draw = random.Random(f"{fault} {name} {seed}")
        scene = scenes.begin(name, tmp_path / str(seed))
        before = whole(scene, COMMANDS[name].out)
        if inject(fault, name, scene, scenes, draw):
            run_again(name, scene, right)
        assert whole(scene, COMMANDS[name].out) == before


def damageable(scene: Path, folders: list[str]) -> list[Path]:
    """Files that a command made. Text and config, which a user wrote, have no checksum."""
    paths = [path for folder in folders for path in sorted((scene / folder).rglob("*")) if path.is_file()]
    return [path for path in paths if path.stat().st_size and path.name != BYSTANDER]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_truncated_file_gives_the_right_result_or_one_line(name, scenes, tmp_path):
    """Of what is given, of what a killed command left, or of what a finished one made."""
    command, (finished, right, *_) = COMMANDS[name], scenes.undisturbed(name)
    for seed in range(2 * INJECTIONS):
        draw = random.Random(f"truncation {name} {seed}")
        scene = scenes.begin(name, tmp_path / str(seed))
        state = draw.choice(["given", "killed", "finished"])
        folders = [COMMANDS[maker].out for maker in command.given] if state == "given" else [command.out]
        if state == "killed":
            inject("kill", name, scene, scenes, draw)
        if not (files := damageable(scene, folders)):
            shutil.copytree(finished / command.out, scene / command.out, dirs_exist_ok=True)
            files = damageable(scene, [command.out])
        path = draw.choice(files)
        os.truncate(path, draw.randrange(path.stat().st_size))
        before = whole(scene, command.out)
        loses_rows = name.startswith("train") and path.name == "metrics.jsonl"
        run_again(name, scene, right, may_refuse=True, may_lose_rows=loses_rows)
        assert whole(scene, command.out) == before
