"""Needles in held-out text: does a model find, at any depth and context length, what it has read once?

examples:
  python scripts/needle.py runs/rope runs/pose --corpus data/books --out runs/needle
  python scripts/needle.py runs/rope runs/rope@yarn:4 --corpus data/books --lengths 128,256,512,1024 --ks 1,4 \\
      --depths 0,0.5,1 --samples 200 --out runs/needle
  python scripts/needle.py runs/pose --corpus data/books --out runs/needle \\
      --selectors leave-one-out,gradient,attention,random --recall-length 256

A needle of k tokens is a random key of --key-tokens tokens and behind it a random value of k tokens, put at some depth
(0: first, 1: last) of a stretch of text from one document. The context ends with the key again, and the model is to go
on with the value. None of these tokens occurs elsewhere in the stretch. Beside it stands the same context without the
needle, which is chance: what the model then loses, and how often it is right, on a value that it cannot know.

With --selectors the influence selectors are asked for the far tokens that the first value token depends on, and it is
counted how many of the needle's tokens they find; their placebo is a context with another needle.

Checkpoints are those of scripts/length.py: CKPT@SCHEME:FACTOR scales RoPE, and those with one label are seeds of one
model. Writes needle.json, needle.parquet (every needle), needle.png and needle_gain.png (a heat map per model and k),
needle_recall.png, all also as pdf, and prints a table.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from olmo_sparsity.util.arguments import Parser, finite_number, several, whole_number, whole_numbers
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Measure, then draw and print what was written."""
    from analysis.cli.arguments import labels_of
    from analysis.measure.needle import ROWS_NAME, NeedleSettings, measure_needle
    from analysis.plots.needle import MEASURES, needle_figure, recall_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import NEEDLE
    from analysis.stats.tables import print_whole, render_needle

    values: dict[str, Any] = vars(_parser().parse_args())
    values["checkpoints"] = tuple(values["checkpoints"])
    values["labels"] = labels_of(values["checkpoints"], values["labels"])
    values["recall"] = _recall(values)
    path = measure_needle(NeedleSettings(**values))
    measured = NEEDLE.load(path)
    paths = [path, path.with_name(ROWS_NAME)]
    for measure, (name, _) in MEASURES.items():
        paths += save_figure(needle_figure(measured, measure), path.parent, name)
    if values["recall"] is not None:
        paths += save_figure(recall_figure(measured), path.parent, "needle_recall")
    console = Console(highlight=False, soft_wrap=True)
    for table in render_needle(measured):
        print_whole(console, table)
        console.print()
    console.print(f"wrote {', '.join(map(str, paths))}", markup=False)


def _recall(values: dict[str, Any]) -> Any:
    """Takes the options of the recall out of ``values``."""
    from analysis.measure.needle import RecallOptions

    selectors, length, samples = (
        values.pop(name) for name in ("selectors", "recall_length", "recall_samples")
    )
    if not selectors:
        return None
    names = tuple(name.strip() for name in selectors.split(","))
    length = values["lengths"][0] if length is None else length
    if length > values["lengths"][-1]:
        raise UserError(
            f"--recall-length {length} is beyond the largest of --lengths; lower it, or raise those"
        )
    return RecallOptions(names, length, values["depths"][len(values["depths"]) // 2], samples)


def _depth(text: str) -> float:
    value = finite_number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not lie between 0 (first) and 1 (last)")
    return value


def _parser() -> Parser:
    from analysis.cli.arguments import add_measurement_arguments, add_model_arguments

    parser = Parser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        "--lengths",
        type=whole_numbers,
        default="64,128,256,512",
        help="tokens of context, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--ks", type=whole_numbers, default="1,2,4,8", help="tokens of a value (default: %(default)s)"
    )
    parser.add_argument(
        "--depths",
        type=several(_depth),
        default="0,0.25,0.5,0.75,1",
        help="from 0 to 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=whole_number,
        default=100,
        help="needles of each cell, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--key-tokens", type=whole_number, default=2, help="tokens of a key (default: %(default)s)"
    )
    add_measurement_arguments(parser, seed_of="needles and bootstrap")
    recall = parser.add_argument_group("recall of the needle by influence selectors")
    recall.add_argument("--selectors", help="comma-separated, as in scripts/influence.py (default: none)")
    recall.add_argument(
        "--recall-length", type=whole_number, help="tokens of context (default: the smallest length)"
    )
    recall.add_argument(
        "--recall-samples",
        type=whole_number,
        default=40,
        help="needles, at the middle depth (default: %(default)s)",
    )
    return parser
