"""One self-contained HTML page from records: figures, tables, settings, and examples to read.

examples:
  olmo-sparsity report runs/demo/influence
  olmo-sparsity report runs/books/influence --length runs/books/length --longppl runs/books/longppl \\
      --compare runs/books/compare.json --examples 300 --out books.html

reads the records that scripts/influence.py wrote (no model is needed). The page opens in any browser, also from an
e-mail or a USB stick: nothing is loaded from anywhere. In its browser of examples, every target is shown in its text
with the far tokens that a selector chose, in its own document and in the placebo; press ? there for the keys. The same
records and seed give the same file.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from olmo_sparsity.util.arguments import Parser, out_file, whole_number, whole_number_or_zero


def main() -> None:
    """Read what was measured, then write the page."""
    arguments = _parser().parse_args()
    from analysis.plots.dependencies import all_figures
    from analysis.plots.style import COLUMN, PAGE
    from analysis.records.results import COMPARISON, LENGTH, LONGPPL
    from analysis.records.store import load_records
    from analysis.report.page import report_html
    from analysis.stats.summary import summarize
    from olmo_sparsity.util.files import atomic_path

    length = LENGTH.load(arguments.length) if arguments.length else None
    longppl = LONGPPL.load(arguments.longppl) if arguments.longppl else None
    comparison = COMPARISON.load(arguments.compare) if arguments.compare else None
    records = load_records(arguments.records)
    summary = summarize(records, arguments.resamples, arguments.seed, k_of_bins=arguments.k)
    wide, narrow = (all_figures(summary, length, width=width) for width in (PAGE, COLUMN))
    out = arguments.out or arguments.records / "report.html"
    html = report_html(
        records,
        summary,
        {name: (figure, narrow[name]) for name, figure in wide.items()},
        command=shlex.join(["python", "scripts/report.py", *sys.argv[1:]]),
        examples=arguments.examples,
        longppl=longppl,
        comparison=comparison,
    )
    with atomic_path(out) as temporary:
        temporary.write_text(html, encoding="utf8")
    print(f"wrote {out}")


def _parser() -> Parser:
    from analysis.cli.arguments import add_bootstrap_arguments

    parser = Parser(description=__doc__)
    parser.add_argument(
        "records", type=Path, metavar="RECORDS", help="folder that scripts/influence.py wrote"
    )
    parser.add_argument(
        "--length",
        type=Path,
        metavar="DIR",
        help="result of scripts/length.py: adds loss by position to Figure 2",
    )
    parser.add_argument(
        "--longppl", type=Path, metavar="DIR", help="result of scripts/longppl.py: adds its table"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="JSON", help="result of scripts/compare.py --out: adds its table"
    )
    parser.add_argument(
        "--examples",
        type=whole_number_or_zero,
        default=1000,
        metavar="n",
        help="at most so many targets to read, a page of about 4 kB each (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=out_file("report.html"),
        metavar="FILE",
        help="page (default: report.html in the records folder)",
    )
    parser.add_argument(
        "--k", type=whole_number, help="k of what is shown at one k only (default: 4, or the closest to it)"
    )
    add_bootstrap_arguments(parser)
    return parser
