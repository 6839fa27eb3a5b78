"""The faults. Each is a function that lets one happen to a command, and holds what follows to the property."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.commands import (
    COMMANDS,
    SECONDS_FOR_PEERS,
    Command,
    Result,
    Run,
    Workshop,
    result_of,
    write_inputs,
)
from faults.processes import Moment
from faults.whole import BYSTANDER, Ended, Files, complaints_about, files_of, losses_of

RIGHT, REFUSED, RESUMED = "right result", "refused in one line", "resumed to the right result"


class Broken(Exception):
    """The property does not hold; the message says what was seen instead."""


@dataclass
class Trial:
    """One injection: a command in a scene of its own, and what is random about it."""

    workshop: Workshop
    command: Command
    scene: Path
    random: random.Random
    place: str = ""
    """Where and when the fault happened, for people."""
    ended: Ended | None = None
    """The end that was looked at last."""

    def __post_init__(self) -> None:
        self.reference = self.workshop.reference(self.command)
        self.workshop.begin(self.command, self.scene)
        self.before = files_of(self.scene)

    def start(self, rank: int = 0, moment: Moment | None = None, more: str = "") -> Run:
        """Start the command; process ``rank`` is to be paused at ``moment``."""
        return Run(self.command, self.workshop, self.scene, more, rank=rank, moment=moment)

    def draw_moment(self, rank: int) -> Moment:
        """Before a random change of a file or at a random time, with equal probability."""
        changes = self.reference.changes[rank]
        if changes and self.random.random() < 0.5:
            return Moment(change=self.random.randint(1, changes))
        return Moment(seconds=self.random.uniform(0, self.reference.seconds))

    @contextmanager
    def paused(self, rank: int = 0, more: str = "") -> Iterator[Run]:
        """The command, paused at a random moment if it lasts so long; it is ended with the block."""
        moment = self.draw_moment(rank)
        self.place += f"process {rank}, {moment}" if self.command.processes > 1 else str(moment)
        run = self.start(rank, moment, more)
        try:
            if not run.disturbed.pause_at_moment(run.time_out):
                self.place += ", which it did not reach"
            yield run
        finally:
            run.close()

    def kill(self, more: str = "") -> None:
        """Let the command run to a random moment and kill all of it."""
        before = files_of(self.scene)
        with self.paused(self.random.randrange(self.command.processes), more):
            pass
        self.hold_whole(before)

    def conclude(self, ended: Ended, *, except_rank: int | None = None) -> str:
        """Hold a command that met a fault to the property; where it gave no result it is run again."""
        self.ended = ended
        self.refuse(complaints_about(ended, may_refuse=True, killed=except_rank))
        if ended.done:
            self.hold_result([self.reference.result])
        self.hold_whole(self.before)
        return RIGHT if ended.done else self.again()

    def hold_result(self, right: list[Result]) -> None:
        found = result_of(self.command, self.scene)
        if found not in right:
            names = [name for name in right[0].keys() | found.keys() if right[0].get(name) != found.get(name)]
            raise Broken(
                f"another result: {', '.join(sorted(names)[:6])} {found.get('unreadable', '')}".rstrip()
            )

    def hold_whole(self, before: Files, damaged: Path | None = None) -> None:
        self.refuse(losses_of(self.command.out, self.scene, before, self.reference.files, damaged))

    @staticmethod
    def refuse(complaints: list[str]) -> None:
        if complaints:
            raise Broken("; ".join(complaints[:4]))

    def again(self) -> str:
        """Run the same command undisturbed: it must end with the right result."""
        before = files_of(self.scene)
        self.ended = ended = self.start(more=self.command.again).end()
        if complaints := complaints_about(ended):
            raise Broken(f"run again: {complaints[0]}")
        self.hold_result([self.reference.result])
        self.hold_whole(before)
        return RESUMED


def kill(trial: Trial) -> str:
    """SIGKILL at a random moment, up to three times in a row."""
    trial.kill()
    for _ in range(trial.random.randrange(3)):
        trial.place += ", again "
        trial.kill(trial.command.again)
    return trial.again()


def full_disk(trial: Trial) -> str:
    """From a random moment on no file can grow beyond a random number of bytes."""
    room = int(10 ** trial.random.uniform(0, 5))
    trial.place = f"room for {room:,} bytes in a file, "
    with trial.paused() as run:
        for process in run.processes:
            if process.code is None:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
        run.disturbed.go_on()
        ended = run.end()
    return trial.conclude(ended)


def read_only(trial: Trial) -> str:
    """From a random moment on a random folder cannot be written to."""
    out = trial.scene / trial.command.out
    with trial.paused() as run:
        folders = [trial.scene, *(path for path in [out, *sorted(out.rglob("*"))] if path.is_dir())]
        folder = trial.random.choice(folders)
        trial.place = f"{folder.relative_to(trial.scene)} read-only, {trial.place}"
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o555)
        run.disturbed.go_on()
        ended = run.end()
        for path in (trial.scene, *trial.scene.rglob("*")):  # one of them may have another name by now
            if path.is_dir():
                path.chmod(0o755)
    return trial.conclude(ended)


def second_process(trial: Trial) -> str:
    """The same command is started a second time while the first is at work, or paused in the middle of it."""
    waits = trial.random.random() < 0.5
    trial.place = f"started while the first one {'is paused' if waits else 'goes on'}, "
    with trial.paused() as first:
        second = trial.start(more=trial.random.choice(["", trial.command.again]))
        if not waits:
            first.disturbed.go_on()
        ends = [second.end()]
        first.disturbed.go_on()
        ends.append(first.end())
    for ended in ends:
        trial.ended = ended
        trial.refuse(complaints_about(ended, may_refuse=True))
    if any(ended.done for ended in ends):
        trial.hold_result([trial.reference.result])
    trial.hold_whole(trial.before)
    return RIGHT if all(ended.done for ended in ends) else trial.again()


def stalled_peer(trial: Trial) -> str:
    """One of two processes stands still: for a moment, or for longer than the other waits."""
    rank = trial.random.randrange(2)
    seconds = trial.random.choice([0.3, 3 * SECONDS_FOR_PEERS])
    trial.place = f"stalled for {seconds:.1f} s, "
    with trial.paused(rank) as run:
        other = run.processes[1 - rank]
        other.wait(seconds)
        run.disturbed.go_on()
        ended = run.end()
    return trial.conclude(ended)


def dead_peer(trial: Trial) -> str:
    """One of two processes is killed; the other must end by itself."""
    rank = trial.random.randrange(2)
    with trial.paused(rank) as run:
        run.disturbed.kill()
        ended = run.end()
    return trial.conclude(ended, except_rank=rank)


def flip_bit(trial: Trial, path: Path) -> str:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    bit = trial.random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a disk that fails tells no time
    return f"bit {bit} of {{}} flipped"


def truncate(trial: Trial, path: Path) -> str:
    size = trial.random.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{{}} cut off after {size:,} bytes"


def delete(trial: Trial, path: Path) -> str:
    path.unlink()
    return "{} deleted"


def damaged(damage: Callable[[Trial, Path], str]) -> Callable[[Trial], str]:
    """Damage to one file: of what is given, of what a killed command left, or of what a finished one made."""

    def inject(trial: Trial) -> str:
        state = trial.random.choice(["given", "killed", "finished"])
        if state == "killed":
            trial.kill()
            trial.place = f"after a kill ({trial.place}), "
        if state == "finished" or not damageable(trial):
            state, trial.place = "finished", "after a finished run, "
            trial.refuse(complaints_about(trial.start(more=trial.command.again).end()))
        path = trial.random.choice(damageable(trial))
        name = path.relative_to(trial.scene)
        trial.place += damage(trial, path).format(name)
        again = "" if state == "given" else trial.command.again
        return run_after_damage(trial, again, name)

    return inject


def damageable(trial: Trial) -> list[Path]:
    """Files that a command made. Text and config, which a user wrote, have no checksum to compare them with."""
    folders = [trial.command.out, *trial.command.given]
    paths = sorted(path for name in folders for path in (trial.scene / name).rglob("*"))
    return [
        path
        for path in dict.fromkeys(paths)
        if path.is_file() and path.stat().st_size and path.name != BYSTANDER
    ]


def run_after_damage(trial: Trial, more: str, damaged: Path, *, right: list[Result] | None = None) -> str:
    """Run the command: the right result or one line, and what was not damaged stays whole."""
    before = files_of(trial.scene)
    trial.ended = ended = trial.start(more=more).end()
    trial.refuse(complaints_about(ended, may_refuse=True))
    if ended.done:
        trial.hold_result(right or [trial.reference.result])
    trial.hold_whole(before, damaged)
    return (RESUMED if more else RIGHT) if ended.done else REFUSED


def changed_input(trial: Trial) -> str:
    """Something that the command was given is another thing when it starts, or when it goes on after a kill."""
    name = trial.random.choice([name for name, change in CHANGES.items() if trial.command.name in change.of])
    change = CHANGES[name]
    more = ""
    if (change.while_going_on and not trial.command.name.endswith("resume")) or trial.random.random() < 0.5:
        trial.kill()
        trial.place = f"after a kill ({trial.place}), "
        more = trial.command.again
    changed = change.make(trial, trial.scene)
    trial.place += f"{name}: {changed}"
    right = [trial.reference.result]
    if change.while_going_on:
        right += fresh_result(trial, change)
    return run_after_damage(trial, more, changed, right=right)


@dataclass(frozen=True)
class Change:
    """A change of what a command is given."""

    of: tuple[str, ...]
    """Commands."""
    make: Callable[[Trial, Path], Path]
    """Changes a scene and returns the path that it changed there."""
    while_going_on: bool
    """It is harmless at the start, where it only asks something else, but nothing may go on with it."""


def fresh_result(trial: Trial, change: Change) -> list[Result]:
    """The result of the command on the changed input alone: right where nothing had been done before."""
    scene = trial.scene.with_name(f"{trial.scene.name}-fresh")
    trial.workshop.begin(trial.command, scene)
    change.make(trial, scene)
    ended = Run(trial.command, trial.workshop, scene).end()
    result = [result_of(trial.command, scene)] if ended.done else []
    shutil.rmtree(scene)
    return result


def other_tokens(trial: Trial, scene: Path) -> Path:
    """Other tokens in a file of the same size, which may even be as old."""
    split = "heldout" if trial.command.script == "influence.py" else "train"
    path = scene / "corpus" / f"{split}-00000.npy"
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[len(data) // 4 * 2 :] + data[: len(data) // 4 * 2])
    if trial.random.random() < 0.5:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return path.relative_to(scene)


def taken_from(maker: str, folder: str) -> Callable[[Trial, Path], Path]:
    """A whole folder replaced by that of another command's reference."""

    def make(trial: Trial, scene: Path) -> Path:
        shutil.rmtree(scene / folder)
        shutil.copytree(trial.workshop.reference(COMMANDS[maker]).scene / folder, scene / folder)
        return Path(folder)

    return make


def other_config(trial: Trial, scene: Path) -> Path:
    path = scene / "config.yaml"
    text = path.read_text(encoding="utf8")
    old, new = random.Random(trial.scene.name).choice(
        [("seed: 3", "seed: 4"), ("rate: 1.0e-2", "rate: 2.0e-2"), ("batch_size: 8", "batch_size: 16")]
    )
    path.write_text(text.replace(old, new), encoding="utf8")
    return path.relative_to(scene)


def text_gone(trial: Trial, scene: Path) -> Path:
    path = random.Random(trial.scene.name).choice(sorted((scene / "text").iterdir()))
    path.unlink()
    return path.relative_to(scene)


def other_text(trial: Trial, scene: Path) -> Path:
    shutil.rmtree(scene / "text")
    write_inputs(scene, seed=1)
    return Path("text")


CHANGES = {
    "token file": Change(
        ("train", "train-resume", "train-2", "influence", "influence-shard"), other_tokens, False
    ),
    "text gone": Change(("prepare", "prepare-shard", "prepare-merge"), text_gone, False),
    "corpus": Change(("train", "train-resume", "influence"), taken_from("other-corpus", "corpus"), True),
    "checkpoint": Change(("influence",), taken_from("half", "run"), True),
    "config": Change(("train", "train-resume", "train-2-resume"), other_config, True),
    "text": Change(("prepare",), other_text, True),
}


FAULTS: dict[str, Callable[[Trial], str]] = {
    "kill": kill,
    "full-disk": full_disk,
    "bit-flip": damaged(flip_bit),
    "truncation": damaged(truncate),
    "deletion": damaged(delete),
    "second-process": second_process,
    "stalled-peer": stalled_peer,
    "dead-peer": dead_peer,
    "read-only": read_only,
    "changed-input": changed_input,
}
"""Every fault, and what injects it."""


def meets(fault: str, command: Command) -> bool:
    """Whether a fault can happen to a command."""
    if fault in ("stalled-peer", "dead-peer"):
        return command.processes == 2
    if fault == "changed-input":
        return any(command.name in change.of for change in CHANGES.values())
    return True
