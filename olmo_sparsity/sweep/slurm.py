"""SLURM job scripts: filled in from the templates in `slurm/`, and submitted.

A template is a bash script whose `@NAME@` words are replaced; `$VARIABLES` stay for the shell of the job. A line with a
list in it is repeated once per element, and left out where the list is empty.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.util.errors import UserError

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")


def render(template: str, values: Mapping[str, str | int | Sequence[str]]) -> str:
    """``template`` with every `@NAME@` replaced.

    Raises `ValueError` where names and values do not match each other exactly: a template and its caller belong
    together.
    """
    wanted = set(_PLACEHOLDER.findall(template))
    if wanted != values.keys():
        raise ValueError(f"template and values differ in {', '.join(sorted(wanted ^ values.keys()))}")
    return "".join(_render_line(line, values) for line in template.splitlines(keepends=True))


def _render_line(line: str, values: Mapping[str, str | int | Sequence[str]]) -> str:
    names = _PLACEHOLDER.findall(line)
    repeated = [name for name in names if not isinstance(values[name], str | int)]
    if not repeated:
        return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), line)
    (name,) = repeated  # two lists in a line would have no meaning
    elements = values[name]
    assert not isinstance(elements, str | int)
    return "".join(_render_line(line, {**values, name: element}) for element in elements)


def words(arguments: Sequence[object]) -> str:
    """``arguments`` as words of a shell command, quoted where the shell would read more into them."""
    return shlex.join(map(str, arguments))


def job_path(path: str | Path, what: str) -> str:
    """``path`` as it can stand in a #SBATCH line. Raises `UserError` where SLURM would read it otherwise."""
    return _plain(str(path), what, "path")


def job_name(name: str, what: str) -> str:
    """The name of a job, as `job_path`."""
    return _plain(name, what, "name")


def _plain(text: str, what: str, kind: str) -> str:
    if shlex.quote(text) != text or "%" in text:
        raise UserError(f"{what} {text!r}: SLURM needs a {kind} of letters, digits and ._-/ alone; rename it")
    return text


def check_directive(text: str, option: str) -> str:
    """An option of sbatch as it can stand in a #SBATCH line.

    Raises `UserError` where it would end the line, and what is behind it would be a command of the job.
    """
    if not text.isprintable():
        raise UserError(f"{option}: {text!r} holds a line break or another control character; leave it out")
    return text


@dataclass(frozen=True)
class Array:
    """Numbers 1 to ``tasks``, at most ``at_once`` of them at the same time."""

    tasks: int
    at_once: int | None = None

    def __str__(self) -> str:
        return f"1-{self.tasks}" + (f"%{self.at_once}" if self.at_once else "")

    @classmethod
    def parse(cls, text: str) -> Array:
        """Read `64`, `1-64` or `64%16`, as sbatch's --array but always from 1."""
        match = re.fullmatch(r"(?:1-)?([1-9][0-9]{0,8})(?:%([1-9][0-9]{0,8}))?", text)
        if not match:
            raise UserError(
                f"--array {text!r}: write the number of shards, or 64%16 for at most 16 of 64 at a time"
            )
        return cls(int(match[1]), int(match[2]) if match[2] else None)


def find_sbatch() -> str:
    """The program that submits. Raises `UserError` where there is none."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(
            "there is no sbatch on this machine; submit from a login node, or look with --dry-run"
        )
    return sbatch


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Give ``script`` to sbatch; returns the job's number. Raises `UserError` with SLURM's reason."""
    command = [find_sbatch(), "--parsable", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise UserError(f"SLURM refused {script}: {reason or f'sbatch ended with code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]  # behind it the cluster's name, where there are several
