"""The figures from records: loss and recovery against k, kinds of dependency, distances, and tokens needed.

examples:
  olmo-sparsity figure2 runs/demo/influence
  olmo-sparsity figure2 runs/seeds/seed=*/influence --out runs/seeds
  olmo-sparsity figure2 runs/demo/influence --length runs/length --out results/demo
  olmo-sparsity figure2 runs/demo/influence --width 3.25 --format pdf --no-title --out paper

reads the records that scripts/influence.py wrote (no model is needed), prints the numbers and writes beside them
(or into --out)

  summary.json        every number that is drawn
  figure2.*           (a) loss against k, (b) net recovery, (c) recovery by size of the gain; with --length also
                      (d) loss against position, from the length.json that scripts/length.py wrote
  figure2-selectors.* (a) and (b) of all other selectors, where there are any
  kinds.*             share, gain and recovery by kind of dependency
  distances.*         how far back the chosen tokens stand
  tokens_needed.*     how many of them give 90 % of the gain
  placebos.*          what of a recovery is luck, common context and specific, where influence was given
                      --further-placebos

Several folders of records are several trainings of one model, measured on the same targets with the same settings:
the numbers are those of all of them together, and intervals also say how much trainings differ. Intervals of one
training leave that out.

Each figure is written as PNG and PDF, at the width at which it is printed, with text of 7 points or more. The same
records and seed give the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.cli.arguments import add_summary_arguments, read_summary
from olmo_sparsity.util.arguments import Parser, out_folder, positive_number, texts


def main() -> None:
    """Read the records, then write and print what they say."""
    arguments = _parser().parse_args()
    from analysis.plots.dependencies import all_figures
    from analysis.plots.style import save_figure
    from analysis.tables.cells import print_result
    from analysis.tables.summary import render_summary
    from olmo_sparsity.util.files import write_json

    _, summary, length = read_summary(arguments, arguments.records)
    figures = all_figures(
        summary, length, selectors=arguments.selectors, width=arguments.width, heading=arguments.title
    )
    folder = arguments.out or arguments.records[0]
    write_json(folder / "summary.json", summary)
    paths = [
        path
        for name, figure in figures.items()
        for path in save_figure(figure, folder, name, arguments.format)
    ]
    print_result([render_summary(summary)], [*paths, folder / "summary.json"])


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="folder that influence wrote; several: of several trainings of one model",
    )
    add_summary_arguments(parser)
    parser.add_argument(
        "--out", type=out_folder, metavar="DIR", help="where to write (default: the first records folder)"
    )
    parser.add_argument(
        "--selectors",
        type=texts,
        metavar="NAMES",
        help="of panels (a) and (b), comma-separated (default: leave-one-out-kl, leave-one-out, attention, controls)",
    )
    parser.add_argument(
        "--width",
        type=_width,
        default=6.75,
        metavar="INCHES",
        help="of the figures, 3 to 20: 3.25 for a column, 6.75 for a page (default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        type=_formats,
        default="png,pdf",
        metavar="KINDS",
        help="png, pdf or svg, several with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--no-title", dest="title", action="store_false", help="without the line on what was measured"
    )
    return parser


def _width(text: str) -> float:
    if not 3 <= (width := positive_number(text)) <= 20:
        raise argparse.ArgumentTypeError(f"{text} inches are not 3 to 20")
    return width


def _formats(text: str) -> list[str]:
    kinds = [kind.strip().lower() for kind in text.split(",")]
    if odd := [kind for kind in kinds if kind not in ("png", "pdf", "svg")]:
        raise argparse.ArgumentTypeError(f"{odd[0]!r} is none of png, pdf and svg")
    return kinds
