"""Sparsity against size and against length generalization, from influence records and loss by position.

examples:
  olmo-sparsity ladder runs/ladder/*/influence --length runs/ladder/length --out runs/ladder/figures
  olmo-sparsity ladder runs/*/influence runs/*/crossfit --length runs/length --k 8 --times 2 --out runs/joint
  olmo-sparsity ladder runs/*/inside --beyond runs/*/beyond --length runs/length --needle runs/needle --out runs/joint

RECORDS are folders that scripts/influence.py wrote, cross-fitted ones too; --length is what scripts/length.py wrote of
the checkpoints that they evaluate, with the training window as the smallest of its --lengths and --times the window
among them. Checkpoints of one label there are seeds of one model, and are measured together.

--beyond are further records of the same checkpoints, whose short context is the training window and whose long context
goes beyond it: what the model gains there says whether a loss that it holds is of any use. --needle is what
scripts/needle.py wrote of models that were trained to find needles, with the labels of --length: the share that they
find at --times the window.

Writes ladder.json (a point for each model), joint.png (rise of the loss from the training window to --times the window,
against net recovery at k, the gain beyond the window and the needles found there) and, of models of different sizes,
ladder.png (each against size), both also as pdf, and prints tables: the points and, of four models or more, how they
correlate with the rise. All intervals are 95 %, over seeds, groups and documents; those of correlations over models
and seeds. No model is needed.
"""

from __future__ import annotations

from pathlib import Path

from analysis.cli.arguments import add_choice_arguments, add_records_arguments, common_selector
from olmo_sparsity.util.arguments import Parser, whole_number
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Join, draw and print."""
    arguments = _parser().parse_args()
    from analysis.plots.ladder import joint_figure, ladder_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import LADDER, LENGTH, NEEDLE
    from analysis.records.store import load_records
    from analysis.stats.ladder import by_model, correlations, model_point, with_needles
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_correlations, render_ladder
    from olmo_sparsity.util.progress import progress
    from olmo_sparsity.util.provenance import current_commit

    length = LENGTH.load(arguments.length)
    inside = by_model([load_records(folder) for folder in arguments.records], length)
    beyond = by_model([load_records(folder) for folder in arguments.beyond], length, of_all_targets=True)
    if beyond and (missing := [key[0] for key in inside if key[1] is None and key not in beyond]):
        raise UserError(
            f"{', '.join(missing)}: not measured beyond the window; give their records to --beyond as well"
        )
    selector = common_selector(arguments.selector, [each.manifest.selectors for each in inside.values()])
    options = {
        "selector": selector,
        "k": arguments.k,
        "times": arguments.times,
        "resamples": arguments.resamples,
    }
    points = []
    with progress("summarising", len(inside), "models", enabled=len(inside) > 1) as advance:
        for key, records in inside.items():
            point = model_point(records, length, beyond=beyond.get(key), seed=arguments.seed, **options)
            folders = [str(each.folder) for each in records.trainings or (records,)]
            points.append({**point, "records": folders})
            advance()
    if arguments.needle:
        points = with_needles(points, NEEDLE.load(arguments.needle), arguments.times)
    manifest = next(iter(inside.values())).manifest
    window = next((each.manifest for each in beyond.values()), None)
    further = {"n_beyond": window.n_long, "window": window.n_short} if window else {}
    result = {
        "settings": {
            **options,
            **{name: getattr(manifest, name) for name in ("n_long", "n_short", "tau_nats")},
            **further,
        },
        "points": points,
        "correlations": correlations(points, resamples=arguments.resamples, seed=arguments.seed),
        "commit": current_commit(),
    }
    path = arguments.out / LADDER.name
    LADDER.save(path, result)
    figures = save_figure(joint_figure(result), arguments.out, "joint")
    sizes = [point["parameters"] for point in points]
    if max(sizes) > 1.1 * min(sizes):  # an attention's own parameters are not another size
        figures += save_figure(ladder_figure(result), arguments.out, "ladder")
    tables = [render_ladder(result), *([render_correlations(result)] if result["correlations"] else [])]
    print_result(tables, [path, *figures])


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
    parser.add_argument("--needle", metavar="DIR", help="folder that scripts/needle.py wrote")
    add_choice_arguments(parser)
    parser.add_argument(
        "--times", type=whole_number, default=4, help="multiple of the training window (default: %(default)s)"
    )
    return parser
