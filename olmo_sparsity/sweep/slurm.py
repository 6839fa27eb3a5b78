"""SLURM jobs: their options, scripts filled in from the templates in `slurm/`, and submission.

A template is a bash script whose `@NAME@` words are replaced; `$VARIABLES` stay for the shell of the job. A line with a
list in it is repeated once per element, and left out where the list is empty.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.util.arguments import whole_number, whole_number_or_zero
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path
from olmo_sparsity.util.shipped import shipped

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_Values = Mapping[str, str | int | Sequence[str]]


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


@dataclass(frozen=True)
class Job:
    """One job script, and where it goes."""

    kind: str
    """Name of its template, and of the file it becomes."""
    folder: Path
    """Kept here, with the logs."""
    values: _Values

    @property
    def path(self) -> Path:
        """The file that is submitted."""
        return self.folder / f"{self.kind}.sbatch"

    @property
    def script(self) -> str:
        """The template filled in."""
        return render(shipped(f"slurm/{self.kind}.sbatch").read_text(encoding="utf8"), self.values)

    def submit(self, *options: str) -> tuple[str, str]:
        """Write the script and give it to sbatch with further options; returns the job's number, and a line to show.

        Raises `UserError` where there is no SLURM, or SLURM refuses it.
        """
        sbatch = shutil.which("sbatch")  # before anything is written
        if sbatch is None:
            raise UserError(
                "there is no sbatch on this machine; submit from a login node, or look with --dry-run"
            )
        self.folder.mkdir(
            parents=True, exist_ok=True
        )  # SLURM drops the log of a job whose folder is not there
        with atomic_path(self.path) as temporary:  # surrogateescape: of names in other encodings
            temporary.write_text(self.script, encoding="utf8", errors="surrogateescape")
        command = [sbatch, "--parsable", *options, str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
            raise UserError(
                f"SLURM refused {self.path}: {reason or f'sbatch ended with code {done.returncode}'}"
            )
        number = done.stdout.strip().partition(";")[
            0
        ]  # behind it the cluster's name, where there are several
        return number, f"submitted {self.path} as job {number}; its output goes to {self.folder}/slurm-*.out"


def render(template: str, values: _Values) -> str:
    """``template`` with every `@NAME@` replaced.

    Raises `ValueError` where names and values do not match each other exactly: a template and its caller belong
    together.
    """
    wanted = set(_PLACEHOLDER.findall(template))
    if wanted != values.keys():
        raise ValueError(f"template and values differ in {', '.join(sorted(wanted ^ values.keys()))}")
    return "".join(_render_line(line, values) for line in template.splitlines(keepends=True))


def _render_line(line: str, values: _Values) -> str:
    for name in _PLACEHOLDER.findall(line):
        elements = values[name]
        if not isinstance(elements, str | int):
            return "".join(_render_line(line, {**values, name: element}) for element in elements)
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), line)


def words(arguments: Sequence[object]) -> str:
    """``arguments`` as words of a shell command, quoted where necessary."""
    return shlex.join(map(str, arguments))


def plain_word(text: str | Path, what: str, kind: str = "path") -> str:
    """A path or name as it can stand in a #SBATCH line. Raises `UserError` where SLURM would read it otherwise."""
    word = str(text)
    if shlex.quote(word) != word or "%" in word:
        raise UserError(f"{what} {word!r}: SLURM needs a {kind} of letters, digits and ._-/ alone; rename it")
    return word


def add_slurm_options(parser: Any) -> None:
    """The options of a job; ``parser`` may be a group of one."""
    parser.add_argument(
        "--gpus-per-node", type=whole_number_or_zero, default=0, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--cpus", type=whole_number, default=4, metavar="N", help="cores a process (default: %(default)s)"
    )
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="time limit (default: the partition's)")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--mem", metavar="SIZE", help="memory a node, such as 64G")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="=OPTION",
        help="any further option of sbatch, once for each: --sbatch=--qos=high",
    )


OPTIONS = ("gpus_per_node", "cpus", "time", "partition", "account", "mem", "sbatch")
"""What `add_slurm_options` adds, as attributes."""


def common_values(
    options: argparse.Namespace, name: str, named_by: str = "the name of the job"
) -> dict[str, Any]:
    """What every template asks for; ``named_by`` tells where ``name`` is from.

    Raises `UserError` that names the option whose value SLURM would misread.
    """
    directives = {"--gpus-per-node": options.gpus_per_node or None}
    directives |= {f"--{key}": getattr(options, key) for key in ("time", "partition", "account", "mem")}
    given = [(option, f"{option}={value}") for option, value in directives.items() if value is not None]
    given += [("--sbatch", text) for text in options.sbatch]
    for option, text in given:
        if not text.isprintable():  # what is behind a line break would be a command of the job
            raise UserError(
                f"{option}: {text!r} holds a line break or another control character; leave it out"
            )
        if option == "--sbatch" and not text.startswith("-"):
            raise UserError(
                f"--sbatch {text!r} is no option of sbatch; write it with its dashes: --sbatch=--{text}"
            )
        if option != "--sbatch" and shlex.quote(text) != text:
            raise UserError(
                f"{text}: SLURM would not read this as one word; write letters, digits and ,:._-/ alone"
            )
    return {
        "NAME": plain_word(name, named_by, "name"),
        "FOLDER": plain_word(Path.cwd(), "the current folder"),
        "OPTIONS": [text for _, text in given],
    }


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before ``--``, and those behind it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def dependency(jobs: Sequence[str]) -> list[str]:
    """Options of sbatch for a job that starts when ``jobs`` have ended well.

    If one of them fails it could never start: it then leaves the queue instead of waiting.
    """
    return [f"--dependency=afterok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"] if jobs else []


def job_numbers(text: str) -> tuple[str, ...]:
    """Numbers of jobs with commas between them, for argparse."""
    numbers = tuple(text.split(","))
    for number in numbers:
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", number):
            raise argparse.ArgumentTypeError(f"{number!r} is no number of a job, such as 123 or 123_4")
    return numbers
