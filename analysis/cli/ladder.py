"""Sparsity against size and against length generalization, from influence records and loss by position.

examples:
  olmo-sparsity ladder runs/ladder/*/influence --length runs/ladder/length --out runs/ladder/figures
  olmo-sparsity ladder runs/*/influence runs/*/crossfit --length runs/length --k 8 --times 2 --out runs/joint
  olmo-sparsity ladder runs/*/inside --beyond runs/*/beyond --length runs/length --out runs/encodings

RECORDS are folders that scripts/influence.py wrote, cross-fitted ones too; --length is what scripts/length.py wrote of
the checkpoints that they evaluate, with the training window as the smallest of its --lengths and --times the window
among them.

--beyond are further records of the same checkpoints, whose short context is the training window and whose long context
goes beyond it: what the model gains there says whether a loss that it holds is of any use.

Writes ladder.json (a point for each folder), joint.png (rise of the loss from the training window to --times the
window, against net recovery at k and the gain beyond the window) and, of models of different sizes, ladder.png (each
against size), both also as pdf, and prints tables: the points and, of four models or more, how they correlate with the
rise. All intervals are 95 %, over documents; those of correlations over models and seeds. No model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.cli.arguments import add_choice_arguments, add_records_arguments, common_selector, summaries_of
from olmo_sparsity.util.arguments import Parser, whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

_SHAPE = ("n_long", "n_short", "tau_nats")


def main() -> None:
    """Join, draw and print."""
    arguments = _parser().parse_args()
    from analysis.plots.ladder import joint_figure, ladder_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import LADDER, LENGTH
    from analysis.stats.ladder import correlations, ladder_points
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_correlations, render_ladder
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import current_commit

    length = LENGTH.load(arguments.length)
    summaries = summaries_of(arguments, arguments.records)
    beyond = summaries_of(arguments, arguments.beyond)
    selector = common_selector(arguments.selector, [list(each["selectors"]) for each in summaries])
    points = ladder_points(
        summaries, length, selector=selector, k=arguments.k, times=arguments.times, beyond=beyond
    )
    shape = _shape_of(summaries)
    path = arguments.out / LADDER.name
    result = {
        "settings": {
            "selector": selector,
            "k": arguments.k,
            "times": arguments.times,
            **dict(zip(_SHAPE, shape, strict=True)),
            **({"n_beyond": _shape_of(beyond)[0]} if beyond else {}),
            "resamples": arguments.resamples,
        },
        "points": [
            {**point, "records": str(folder)} for point, folder in zip(points, arguments.records, strict=True)
        ],
        "correlations": correlations(points, resamples=arguments.resamples, seed=arguments.seed),
        "commit": current_commit(),
    }
    write_json(path, LADDER.stamped(result))
    figures = save_figure(joint_figure(result), arguments.out, "joint")
    if len({point["parameters"] for point in points}) > 1:
        figures += save_figure(ladder_figure(result), arguments.out, "ladder")
    tables = [render_ladder(result), *([render_correlations(result)] if result["correlations"] else [])]
    print_result(tables, [path, *figures])


def _shape_of(summaries: Sequence[Json]) -> tuple[float, ...]:
    """N, M and tau, the same of all. Raises `UserError` where they are not."""
    shapes = {tuple(each["settings"][name] for name in _SHAPE) for each in summaries}
    if len(shapes) > 1:
        raise UserError(f"the records have different N, M and tau, {sorted(shapes)}; give those of one")
    return shapes.pop()


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    add_records_arguments(parser)
    parser.add_argument("--length", required=True, metavar="DIR", help="folder that scripts/length.py wrote")
    parser.add_argument(
        "--beyond",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="records of the same checkpoints beyond their window",
    )
    add_choice_arguments(parser)
    parser.add_argument(
        "--times", type=whole_number, default=4, help="multiple of the training window (default: %(default)s)"
    )
    return parser
