"""What scripts that submit SLURM jobs share: the job script, its submission, and the options on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.slurm import job_path, render, submit

TEMPLATES = Path(__file__).resolve().parents[1] / "slurm"
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
    job.folder.mkdir(parents=True, exist_ok=True)  # SLURM drops the log of a job whose folder is not there
    job.path.write_text(job.script, encoding="utf8")
    number = submit(job.path, options)
    return number, f"submitted {job.path} as job {number}; its output goes to {job.folder}/slurm-*.out"


def common_values(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What every template asks for."""
    directives = {
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "mem": options.mem,
    }
    given = [f"--{key}={value}" for key, value in directives.items() if value is not None]
    folder = job_path(Path.cwd(), "the current folder")
    return {"NAME": job_path(name, "name of the job"), "FOLDER": folder, "OPTIONS": [*given, *options.sbatch]}


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what follows `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def add_slurm_options(parser: Any) -> None:
    """The options that all kinds of job share; ``parser`` may be a group of one."""
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="default: %(default)s")
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


def whole_number(text: str) -> int:
    """A number from 1 up, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)
