"""The figures from records: loss and recovery against k, kinds of dependency, distances, and tokens needed.

examples:
  python scripts/figure2.py runs/demo/influence
  python scripts/figure2.py runs/demo/influence --length runs/length --out results/demo

reads the records that scripts/influence.py wrote (no model is needed), prints the numbers and writes beside them

  summary.json        every number that is drawn
  figure2.*           (a) loss against k, (b) net recovery, (c) recovery by size of the gain; with --length also
                      (d) loss against position, from the length.json that scripts/length.py wrote
  kinds.*             share, gain and recovery by kind of dependency
  distances.*         how far back the chosen tokens stand
  tokens_needed.*     how many of them bring back 90 % of the gain

each as PNG and PDF. It takes seconds and may be repeated at will: the same records and seed give the same files.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from analysis.cli.arguments import add_bootstrap_arguments
from analysis.plots.dependencies import all_figures
from analysis.plots.style import save_figure
from analysis.records.results import LENGTH
from analysis.records.store import load_records
from analysis.stats.summary import summarize, write_summary
from analysis.stats.tables import render_table
from olmo_sparsity.util.arguments import Parser, out_folder, whole_number


def main() -> None:
    """Read the records, then write and print what they say."""
    arguments = _parser().parse_args()
    length = LENGTH.load(arguments.length) if arguments.length else None
    records = load_records(arguments.records)
    summary = summarize(records, arguments.resamples, arguments.seed, k_of_bins=arguments.k)
    folder = arguments.out or arguments.records
    write_summary(summary, folder / "summary.json")
    figures = all_figures(summary, length)
    paths = [path for name, figure in figures.items() for path in save_figure(figure, folder, name)]
    console = Console(highlight=False, soft_wrap=True)
    console.print(render_table(summary))
    console.print(f"wrote {', '.join(map(str, [*paths, folder / 'summary.json']))}", markup=False)


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "records", type=Path, metavar="RECORDS", help="folder that scripts/influence.py wrote"
    )
    parser.add_argument(
        "--out", type=out_folder, metavar="DIR", help="where to write (default: the records folder)"
    )
    parser.add_argument(
        "--length", type=Path, metavar="DIR_OR_JSON", help="length.json, or its folder: draws panel (d) too"
    )
    parser.add_argument(
        "--k",
        type=whole_number,
        help="k of panel (c), kinds and distances, one that was measured (default: 4, or the closest to it)",
    )
    add_bootstrap_arguments(parser)
    return parser
