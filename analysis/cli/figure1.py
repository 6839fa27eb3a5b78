"""The figures of the synthetic tasks from records of exact match: accuracy against length, and the bound.

examples:
  olmo-sparsity figure1 runs/parity-*/exact_match.json --out runs/figure1
  olmo-sparsity figure1 runs/sparse --out runs/sparse --bound
  olmo-sparsity figure1 runs/scratchpad runs/assignment --out runs/schemes
  olmo-sparsity figure1 runs/needs --out runs/needs --by positions.coupled_share positions.id_noise

reads every exact_match.json of scripts/exact_match.py that it is given, or that lies in a folder it is given (no model
is needed), pools the training seeds of one setting, prints the numbers and writes, each as PNG and PDF,

  figure1-sparse_parity.*   planted tasks: accuracy against length, a panel per K_train, a curve per k; a figure for
  figure1-planted.*         each task
  figure1-TASK-bound.*      with --bound: their errors under Theorem 4.3, its constant taken from the shorter lengths
                            beyond the trained ones and tried at the longer ones
  figure1-schemes.*         tasks with coupled ids: exact match by position scheme
  figure1-errors.*          and what the first errors are
  figure1-options.*         with --by: exact match against options of training, a curve per length, in their place
  figure1.json              every number that is drawn, and where the records come from

Intervals are 95 %: Wilson's for one seed, Student's t over seeds for several. Records that differ in the
training seed alone are pooled; what they do not tell, such as precision, heads and weight decay, is not compared. The
same records give the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.util.arguments import Parser, out_folder
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.stats.bound import BoundTest
    from analysis.stats.exact_match import Group


def main() -> None:
    """Read and pool the records, then draw, write and print what they say."""
    arguments = _parser().parse_args()
    from analysis.plots.style import save_figure
    from analysis.stats.bound import trained_error, try_bounds
    from analysis.stats.exact_match import curves_json, load_records, pool, sources_json
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_bounds, render_curves
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import current_commit, library_versions

    commit = current_commit()  # before the figures are drawn over those of a checkout
    groups = pool(load_records(arguments.records))
    planted = [group for group in groups if group.settings.k_train is not None]
    if arguments.bound and not planted:
        raise UserError("--bound is for tasks with planted tokens, and no record is of one; leave it out")
    tests = try_bounds([trained_error(group) for group in planted if arguments.bound])
    paths = [
        path
        for name, figure in _figures(groups, tests, arguments.by).items()
        for path in save_figure(figure, arguments.out, name)
    ]
    paths.append(arguments.out / "figure1.json")
    written = {
        "curves": curves_json(groups),
        "bounds": [test.as_dict() for test in tests],
        "records": sources_json(groups),
        "provenance": {"commit": commit, "versions": library_versions()},
    }
    write_json(paths[-1], written)
    print_result([render_curves(groups), *([render_bounds(tests)] if tests else [])], paths)


def _figures(groups: list[Group], tests: list[BoundTest], by: list[str]) -> dict[str, Figure]:
    """Every figure that the groups give, by file name."""
    from analysis.plots.bound import bound_figure
    from analysis.plots.figure1 import (
        accuracy_by_length_figure,
        first_errors_figure,
        scheme_comparison_figure,
    )
    from analysis.plots.options import option_figure
    from analysis.stats.exact_match import by_option

    if by:
        return {"figure1-options": option_figure(by_option(groups, by))}
    figures = {}
    planted = [group for group in groups if group.settings.k_train is not None]
    for task in dict.fromkeys(group.settings.task for group in planted):
        figures[f"figure1-{task}"] = accuracy_by_length_figure(
            [g for g in planted if g.settings.task == task]
        )
        if own := [test for test in tests if test.starts[0].group.settings.task == task]:
            figures[f"figure1-{task}-bound"] = bound_figure(own)
    if coupled := [group for group in groups if group.settings.k_train is None]:
        figures["figure1-schemes"] = scheme_comparison_figure(coupled)
        figures["figure1-errors"] = first_errors_figure(coupled)
    return figures


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="exact_match.json, or a folder that holds some",
    )
    parser.add_argument("--out", type=out_folder, metavar="DIR", required=True, help="where to write")
    parser.add_argument(
        "--bound", action="store_true", help="draw the errors of planted tasks under the bound, too"
    )
    parser.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="OPTION",
        help="draw exact match against these options of training",
    )
    return parser
