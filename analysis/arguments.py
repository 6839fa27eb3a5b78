"""Arguments that several scripts share."""

from __future__ import annotations

import argparse

from analysis.statistics import DEFAULT_RESAMPLES
from olmo_sparsity.errors import UserError

LEAST_RESAMPLES = 1000
"""METHOD 2.4 asks for so many for everything that is shown."""


def add_bootstrap_arguments(parser: argparse.ArgumentParser, *, of: str = "documents") -> None:
    """``--resamples`` and ``--seed``; what is resampled stands in the help."""
    parser.add_argument(
        "--resamples",
        type=int,
        default=DEFAULT_RESAMPLES,
        help=f"bootstrap resamples of {of}, at least {LEAST_RESAMPLES} (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: %(default)s)")


def check_bootstrap_arguments(arguments: argparse.Namespace) -> None:
    """Raise `UserError` where there are too few resamples for an interval."""
    if arguments.resamples < LEAST_RESAMPLES:
        raise UserError(
            f"--resamples {arguments.resamples} is too few for 95 % intervals; give {LEAST_RESAMPLES} or more"
        )


def ascending_integers(text: str, option: str, such_as: str) -> tuple[int, ...]:
    """The numbers of ``1,2,4``, ascending, each once. Raises `UserError` that names the option for anything else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UserError(
            f"{option} takes whole numbers with commas between them, such as {such_as}, not {text!r}"
        ) from error
