"""Arguments that several commands share, and what is read by them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from analysis.measure.settings import ComparisonSettings
from analysis.stats.bootstrap import DEFAULT_RESAMPLES
from olmo_sparsity.util.arguments import (
    out_folder,
    seed_number,
    whole_number,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

if TYPE_CHECKING:
    from analysis.records.store import Records

_Settings = TypeVar("_Settings")
_Comparison = TypeVar("_Comparison", bound=ComparisonSettings)

LEAST_RESAMPLES = 1000
"""Of everything that is shown: docs/method.md, 2.4."""


def add_bootstrap_arguments(parser: argparse.ArgumentParser) -> None:
    """``--resamples`` and ``--seed``."""
    parser.add_argument(
        "--resamples",
        type=_resamples,
        default=DEFAULT_RESAMPLES,
        help="bootstrap resamples of groups and documents, where these are not few, at least "
        f"{LEAST_RESAMPLES} (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="seed of the bootstrap (default: %(default)s)"
    )


def _resamples(text: str) -> int:
    value = whole_number(text)
    if value < LEAST_RESAMPLES:
        raise argparse.ArgumentTypeError(
            f"{value} is too few for 95 % intervals; give {LEAST_RESAMPLES} or more"
        )
    return value


def add_summary_arguments(parser: argparse.ArgumentParser) -> None:
    """``--length`` and ``--k`` of commands that show one summary, and `add_bootstrap_arguments`."""
    parser.add_argument(
        "--length",
        type=Path,
        metavar="DIR_OR_JSON",
        help="what length wrote: adds loss by position to Figure 2",
    )
    parser.add_argument(
        "--k",
        type=whole_number,
        help="k of what is shown at one k only, one that was measured (default: 4, or the closest to it)",
    )
    add_bootstrap_arguments(parser)


def read_summary(arguments: argparse.Namespace, folders: Sequence[Path]) -> tuple[Records, Json, Json | None]:
    """The records of one training or of several, their summary, and loss by position where it is given."""
    from analysis.records.results import LENGTH
    from analysis.records.store import load_records
    from analysis.records.trainings import join_trainings
    from analysis.stats.summary import summarize

    length = LENGTH.load(arguments.length) if arguments.length else None
    records = join_trainings([load_records(folder) for folder in folders])
    summary = summarize(records, arguments.resamples, arguments.seed, k_of_bins=arguments.k)
    return records, summary, length


def add_records_arguments(parser: argparse.ArgumentParser) -> None:
    """``RECORDS …`` and ``--out`` of commands that read several folders of records, and `add_bootstrap_arguments`."""
    help = "folder that influence wrote"
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help=help)
    parser.add_argument("--out", type=out_folder, metavar="DIR", required=True, help="where to write")
    add_bootstrap_arguments(parser)


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """``--selector`` and ``--k`` of commands that show one selector at one k; see `common_selector`."""
    parser.add_argument(
        "--selector", help="default: leave-one-out-kl where all records have it, else leave-one-out"
    )
    parser.add_argument("--k", type=whole_number, default=4, help="selected tokens (default: %(default)s)")


def common_selector(wanted: str | None, measured: Sequence[Sequence[str]]) -> str:
    """The selector ``wanted``, else the default one of those that were measured in all records."""
    from analysis.stats.recovery import default_selector

    in_all = [name for name in measured[0] if all(name in each for each in measured)]
    return wanted or default_selector(in_all or measured[0])


def with_labels(settings: _Comparison) -> _Comparison:
    """Settings in which every checkpoint has a label, if need be as much of its path as tells it apart.

    Raises `UserError` as `check_labels` does.
    """
    if settings.labels:
        check_labels(settings.labels)
        return settings
    # with matplotlib, which --help does not need
    from analysis.plots.training import run_names

    return replace(settings, labels=tuple(run_names([Path(path).resolve() for path in settings.checkpoints])))


def check_labels(labels: Sequence[str]) -> None:
    """Raise `UserError` for a label that no figure could show: what stands between two dollar signs is a formula."""
    from matplotlib.cbook import is_math_text
    from matplotlib.mathtext import MathTextParser

    for label in filter(is_math_text, labels):
        try:
            MathTextParser("path").parse(label)
        except ValueError:
            raise UserError(
                f"the label {label!r} is no formula between its dollar signs; write \\$ for a dollar sign"
            ) from None
