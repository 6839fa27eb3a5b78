"""The property: a right result, or one line and a non-zero exit in time; and what was whole before is whole after."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

BYSTANDER = "notes of mine.txt"
KEPT_CHECKPOINTS = 2
Files = dict[str, str]
"""Checksums by path, relative to the scene."""

_PROGRESS = re.compile(r".+: [\d,]+/[\d,]+ .+/s, .+ s left")
_LOG = re.compile(r"(WARNING|INFO)\b")
# Files of a run that go on growing, or say when it ran; results are compared by what they hold instead.
_GROWING = (*("metrics.jsonl", "provenance.json", "verified.json", "manifest.json", "olmo_sparsity.json"),)


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (None: at the time-out), standard error and changes of files of each process."""

    codes: tuple[int | None, ...]
    errors: tuple[str, ...]
    seconds: float
    changes: tuple[int, ...]

    @property
    def done(self) -> bool:
        """Whether it reports success."""
        return all(code == 0 for code in self.codes)


def digest(content: bytes | Path) -> str:
    """SHA-256 of some bytes, or of a file."""
    data = content.read_bytes() if isinstance(content, Path) else content
    return hashlib.sha256(data).hexdigest()


def files_of(scene: Path) -> Files:
    """Every file of a scene."""
    paths = [path for path in sorted(scene.rglob("*")) if path.is_file()]
    return {str(path.relative_to(scene)): digest(path) for path in paths}


def complaints_about(ended: Ended, *, may_refuse: bool = False, killed: int | None = None) -> list[str]:
    """What is wrong with the end of a command.

    With ``may_refuse`` a process may end with a non-zero exit and exactly one line, one of several also with the
    traceback of what another's end made of it above that; ``killed`` is a process that did not end by itself.
    """
    found = []
    for rank, (code, errors) in enumerate(zip(ended.codes, ended.errors, strict=True)):
        who = f"process {rank}: " if len(ended.codes) > 1 else ""
        if rank == killed:
            continue
        if code is None:
            found.append(f"{who}still running at its time-out")
            continue
        lines = [line for line in errors.splitlines() if line.strip()]
        odd = [line for line in lines if not (_PROGRESS.match(line) or _LOG.match(line))]
        said = [line for line in odd if line.startswith("error: ")]
        if code == 0 and odd:
            found.append(f"{who}exit 0, and on standard error: {_shorten(odd)}")
        elif code != 0 and not may_refuse:
            found.append(f"{who}exit {code}: {_shorten(odd)}")
        elif code != 0 and (code < 0 or len(said) != 1 or (len(odd) != 1 and len(ended.codes) == 1)):
            found.append(f"{who}exit {code} and not one line: {_shorten(odd)}")
    return found


def _shorten(lines: list[str]) -> str:
    text = " | ".join(lines) or "nothing"
    return text if len(text) < 400 else f"{text[:200]} … {text[-200:]}"


def losses_of(out: str, scene: Path, before: Files, end: Files, damaged: Path | None = None) -> list[str]:
    """What was whole in a scene before a command with the output folder ``out``, and is not after it.

    ``end``: the files of the undisturbed reference, which may have taken the place of earlier ones; ``damaged``: what
    the fault itself changed, and a checkpoint with a damaged file was not whole as a whole.
    """
    after, found = files_of(scene), []
    for name, content in before.items():
        path, now = Path(name), after.get(name)
        if now == content or (damaged is not None and _unit(path) == _unit(damaged)):
            continue
        own = path.parts[0] == out and path.name != BYSTANDER
        grows = path.name in _GROWING and _unit(path) == path
        # the parts of a measurement give way to the result
        unfinished = grows or any(part == "parts" or part.startswith(".") for part in path.parts)
        if own and (unfinished or now == end.get(name, "absent") or _gave_way(scene, path)):
            continue
        found.append(f"{name} was whole and is {'gone' if now is None else 'another'}")
    return found


def _unit(path: Path) -> Path:
    """What is whole or torn together: the folder of a checkpoint, or the file alone."""
    return path.parent if path.parent.name.startswith("step") else path


def _gave_way(scene: Path, path: Path) -> bool:
    """Whether a file is of a checkpoint that goes, or is half gone: as many newer ones as a run keeps are whole."""
    folder = scene / path.parent
    newer = [each for each in folder.parent.glob("step*") if each.name > folder.name and _is_whole(each)]
    return folder.name.startswith("step") and len(newer) >= KEPT_CHECKPOINTS


def _is_whole(checkpoint: Path) -> bool:
    try:
        noted = json.loads((checkpoint / "checksums.json").read_text(encoding="utf8"))
        return all(digest(checkpoint / name) == each["sha256"] for name, each in noted.items())
    except (OSError, ValueError):
        return False
