"""One self-contained HTML page from records: figures, tables, settings, and examples to read.

examples:
  olmo-sparsity report runs/demo/influence
  olmo-sparsity report runs/books/influence --length runs/books/length --longppl runs/books/longppl \\
      --compare runs/books/compare.json --examples 300 --out books.html

reads the records that influence wrote (no model is needed). The page opens in any browser and loads nothing from
anywhere; press ? in its examples for the keys. The same records and seed give the same file.
"""

from __future__ import annotations

from pathlib import Path

from analysis.cli.arguments import add_summary_arguments, read_summary
from olmo_sparsity.util.arguments import Parser, out_file, whole_number_or_zero
from olmo_sparsity.util.provenance import command_line


def main() -> None:
    """Read what was measured, then write the page."""
    arguments = _parser().parse_args()
    from analysis.plots.dependencies import all_figures
    from analysis.plots.style import COLUMN, PAGE
    from analysis.records.results import COMPARISON, LONGPPL
    from analysis.report.page import report_html
    from olmo_sparsity.util.files import write_text

    longppl = LONGPPL.load(arguments.longppl) if arguments.longppl else None
    comparison = COMPARISON.load(arguments.compare) if arguments.compare else None
    records, summary, length = read_summary(arguments, [arguments.records])
    wide, narrow = (all_figures(summary, length, width=width) for width in (PAGE, COLUMN))
    out = arguments.out or arguments.records / "report.html"
    html = report_html(
        records,
        summary,
        {name: (figure, narrow[name]) for name, figure in wide.items()},
        command=command_line("scripts/report.py"),
        examples=arguments.examples,
        longppl=longppl,
        comparison=comparison,
    )
    write_text(out, html)
    print(f"wrote {out}")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("records", type=Path, metavar="RECORDS", help="folder that influence wrote")
    add_summary_arguments(parser)
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
    return parser
