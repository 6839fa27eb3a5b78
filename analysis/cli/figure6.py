"""Figure 6 from records: recovery at further k, N, M and model sizes, a small panel for each records folder.

examples:
  olmo-sparsity figure6 runs/pose-20m/influence runs/pose-60m/influence --out runs/sizes
  olmo-sparsity figure6 runs/books/influence-* --out runs/books/grid --rows n_long --columns n_short
  olmo-sparsity figure6 runs/seed1/influence runs/seed2/influence --out runs/seeds --labels "seed 1" "seed 2"

reads records that scripts/influence.py wrote (no model is needed) and writes figure6.png and .pdf (net recovery),
figure6-recovery.png and .pdf (recovery and its placebo) and figure6.json, a table of what is drawn. Any records may be
drawn beside each other: the titles say the model, N, M, how many targets are over tau, and every further setting that
differs. The same records and seed give the same files.
"""

from __future__ import annotations

from analysis.cli.arguments import add_records_arguments, check_labels
from olmo_sparsity.util.arguments import Parser


def main() -> None:
    """Summarise every folder, then draw and write the grid."""
    arguments = _parser().parse_args()
    check_labels(arguments.labels or [])
    from analysis.plots.figure6 import choose_selectors, figure6, grid_panels, grid_table
    from analysis.plots.style import save_figure
    from analysis.records.store import load_records
    from analysis.stats.summary import summarize
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.progress import progress

    folders, summaries = arguments.records, []
    with progress("summarising", len(folders), "folders", enabled=len(folders) > 1) as advance:
        for folder in folders:
            summaries.append(summarize(load_records(folder), arguments.resamples, arguments.seed))
            advance()
    panels = grid_panels(
        list(map(str, folders)),
        summaries,
        rows=arguments.rows,
        columns=arguments.columns,
        labels=arguments.labels,
    )
    selectors = choose_selectors(panels, arguments.selectors)
    paths = [
        *save_figure(figure6(panels, selectors, net=True), arguments.out, "figure6"),
        *save_figure(figure6(panels, selectors, net=False), arguments.out, "figure6-recovery"),
        arguments.out / "figure6.json",
    ]
    write_json(paths[-1], grid_table(panels, selectors))
    print(f"wrote {', '.join(map(str, paths))}")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    add_records_arguments(parser)
    parser.add_argument(
        "--rows", metavar="SETTING", help="setting whose values are the rows, such as n_long or checkpoint"
    )
    parser.add_argument("--columns", metavar="SETTING", help="the same for the columns")
    parser.add_argument(
        "--labels", nargs="+", metavar="TEXT", help="a name for each folder, in place of its model's"
    )
    parser.add_argument(
        "--selectors",
        nargs="+",
        metavar="NAME",
        help="to draw (default: leave-one-out-kl where all records have it, else leave-one-out; the controls, best)",
    )
    return parser
