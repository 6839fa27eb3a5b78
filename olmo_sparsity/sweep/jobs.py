"""What scripts that submit SLURM jobs share: the job script, its submission, and the options on the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.sweep.slurm import check_directive, find_sbatch, job_name, job_path, render, submit
from olmo_sparsity.util.arguments import whole_number, whole_number_or_zero
from olmo_sparsity.util.files import atomic_path

TEMPLATES = Path(__file__).resolve().parents[2] / "slurm"
OPTIONS = ("gpus_per_node", "cpus", "time", "partition", "account", "mem", "sbatch")
"""What `add_slurm_options` adds, as attributes."""


@dataclass(frozen=True)
class Job:
    """One job script, and where it goes."""

    kind: str
    """Name of its template, and of the file it becomes."""
    folder: Path
    """Kept here, with the logs."""
    values: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The file that is submitted."""
        return self.folder / f"{self.kind}.sbatch"

    @property
    def script(self) -> str:
        """The template filled in."""
        return render((TEMPLATES / f"{self.kind}.sbatch").read_text(encoding="utf8"), self.values)


def submit_job(job: Job, *options: str) -> tuple[str, str]:
    """Write the job script and submit it, with further options of sbatch; returns the job's number, and a line to show.

    Raises `UserError` where SLURM refuses it.
    """
    find_sbatch()  # before anything is written
    job.folder.mkdir(parents=True, exist_ok=True)  # SLURM drops the log of a job whose folder is not there
    with atomic_path(job.path) as temporary:
        temporary.write_text(
            job.script, encoding="utf8", errors="surrogateescape"
        )  # of names in other encodings
    number = submit(job.path, options)
    return number, f"submitted {job.path} as job {number}; its output goes to {job.folder}/slurm-*.out"


def common_values(
    options: argparse.Namespace, name: str, what: str = "the name of the job"
) -> dict[str, Any]:
    """What every template asks for; ``what`` tells where ``name`` is from.

    Raises `UserError` that names the option whose value SLURM would misread.
    """
    directives = {
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "mem": options.mem,
    }
    given = {f"--{key}": f"--{key}={value}" for key, value in directives.items() if value is not None}
    checked = [check_directive(text, option) for option, text in given.items()]
    checked += [check_directive(text, "--sbatch") for text in options.sbatch]
    folder = job_path(Path.cwd(), "the current folder")
    return {"NAME": job_name(name, what), "FOLDER": folder, "OPTIONS": checked}


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what follows `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def dependency(jobs: tuple[str, ...]) -> list[str]:
    """Options of sbatch for a job that starts when ``jobs`` have ended well.

    Where one of them fails for good it could never start: it then leaves the queue instead of waiting for ever.
    """
    return [f"--dependency=afterok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"] if jobs else []


def job_numbers(text: str) -> tuple[str, ...]:
    """Numbers of jobs with commas between them, for argparse."""
    numbers = tuple(text.split(","))
    for number in numbers:
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", number):
            raise argparse.ArgumentTypeError(f"{number!r} is no number of a job, such as 123 or 123_4")
    return numbers


def add_slurm_options(parser: Any) -> None:
    """The options that all kinds of job share; ``parser`` may be a group of one."""
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
