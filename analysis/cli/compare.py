"""Compare two checkpoints that were measured on the same targets: paired differences with intervals.

example:
  olmo-sparsity influence runs/a --corpus data/books --out runs/a/influence
  olmo-sparsity influence runs/b --corpus data/books --out runs/b/influence
  olmo-sparsity compare runs/a/influence runs/b/influence --out compare.json

reads both records folders (no model is needed) and prints, for A and B and A - B: the share of targets over tau, the
mean gain from the long context, and recovery, placebo and net recovery of every selector and k that both have.
Groups and documents are resampled for both at once. The two must share corpus, split, N, M, tau, --targets,
--targets-per-block and --seed.

Are the tokens that A and B choose the same ones? For the targets over tau in both, the last table has the share of the
first k tokens that both chose: from the true far context, from the placebo, and what two random choices would share.
Records with random subsets also give the rank correlation of the losses of A and B on them (the ceiling of LDS).
"""

from __future__ import annotations

from pathlib import Path

from analysis.cli.arguments import add_bootstrap_arguments
from olmo_sparsity.util.arguments import Parser, out_file


def main() -> None:
    """Read both records, then print and write how they differ."""
    arguments = _parser().parse_args()
    from analysis.records.results import COMPARISON
    from analysis.records.store import load_records
    from analysis.stats.compare import compare
    from analysis.tables.cells import print_result
    from analysis.tables.comparison import render_comparison

    first, second = load_records(arguments.first), load_records(arguments.second)
    comparison = compare(first, second, arguments.resamples, arguments.seed)
    if arguments.out:
        COMPARISON.save(arguments.out, comparison)
    print_result([render_comparison(comparison)], [arguments.out] if arguments.out else [])


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("first", type=Path, metavar="A", help="records folder of scripts/influence.py")
    parser.add_argument("second", type=Path, metavar="B", help="another one, of the same targets")
    parser.add_argument(
        "--out", type=out_file("compare.json"), metavar="FILE", help="JSON to write (default: none)"
    )
    add_bootstrap_arguments(parser)
    return parser
