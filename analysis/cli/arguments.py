"""Arguments that several scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from analysis.stats.bootstrap import DEFAULT_RESAMPLES
from olmo_sparsity.util.arguments import out_folder, seed_number, whole_number

LEAST_RESAMPLES = 1000
"""Of everything that is shown: docs/method.md, 2.4."""


def add_bootstrap_arguments(parser: argparse.ArgumentParser, *, of: str = "documents") -> None:
    """``--resamples`` and ``--seed``; what is resampled stands in the help."""
    parser.add_argument(
        "--resamples",
        type=_resamples,
        default=DEFAULT_RESAMPLES,
        help=f"bootstrap resamples of {of}, at least {LEAST_RESAMPLES} (default: %(default)s)",
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


def add_measurement_arguments(parser: argparse.ArgumentParser, *, seed_of: str) -> None:
    """``--corpus``, ``--out``, ``--split``, ``--seed``, and what decides speed and memory."""
    parser.add_argument("--corpus", required=True, help="folder made by prepare_data with the same tokenizer")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--split", default="heldout", help="split of the corpus (default: %(default)s)")
    parser.add_argument(
        "--seed", type=seed_number, default=0, help=f"seed of {seed_of} (default: %(default)s)"
    )
    parser.add_argument("--bf16", action="store_true", help="measure in bf16: faster, coarser")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument(
        "--tokens-per-batch",
        type=whole_number,
        help="tokens of one forward pass; lower it when memory runs out",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``CKPT …`` and ``--labels``, models that are measured side by side; `labels_of` reads them."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="CKPT",
        help="checkpoint, run (then its last one), or transformers directory, maybe with @SCHEME:FACTOR; the first is "
        "what others are compared with",
    )
    parser.add_argument(
        "--labels",
        help="a name for each checkpoint, comma-separated; seeds of one model share one (default: from their paths)",
    )


def labels_of(checkpoints: Sequence[str], labels: str | None) -> tuple[str, ...]:
    """The names in ``labels``, as they stand between its commas, or as much of the paths as tells them apart."""
    if labels:
        return tuple(label.strip() for label in labels.split(","))
    # with matplotlib, which most who parse arguments do not need
    from analysis.plots.training import run_names

    return tuple(run_names([Path(path).resolve() for path in checkpoints]))
