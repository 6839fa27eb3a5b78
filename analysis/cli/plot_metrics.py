"""Loss curves of training runs, from their metrics.jsonl; also while they train.

examples:
  olmo-sparsity plot_metrics runs/demo
  olmo-sparsity plot_metrics runs/pose runs/rope --out loss.png
  olmo-sparsity plot_metrics runs/* --x steps --log-x --out loss.pdf

Training loss as logged (faint) and smoothed, held-out loss as markers, in nats per token; beside it, where the runs
have evaluated, the held-out loss by position at the last evaluation. Reads metrics.jsonl only: no model and no GPU
is needed, and a copy of that file is enough.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.training.metrics import METRICS_NAME, read_metrics
from olmo_sparsity.util.arguments import Parser, finite_number, out_file
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Read the rows of every run, draw and write the figure."""
    arguments = _parser().parse_args()
    from analysis.plots.style import write_figure
    from analysis.plots.training import RunMetrics, run_names, training_figure

    if not 0 <= arguments.smooth < 1:
        raise UserError(f"--smooth {arguments.smooth} is no fraction; give 0 (not at all) to 1, such as 0.02")
    folders = [path.parent if path.name == METRICS_NAME else path for path in arguments.runs]
    names = run_names([folder.resolve() for folder in folders])
    runs = [RunMetrics(name, _rows(folder)) for name, folder in zip(names, folders, strict=True)]
    figure = training_figure(runs, x=arguments.x, fraction=arguments.smooth, log_x=arguments.log_x)
    print(f"wrote {write_figure(figure, arguments.out or folders[0] / 'loss.png')}")


def _rows(folder: Path) -> list[dict]:
    if not (folder / METRICS_NAME).is_file():
        raise UserError(
            f"{folder} is no run: it has no {METRICS_NAME}; name a folder that scripts/train.py wrote"
        )
    return read_metrics(folder / METRICS_NAME)


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folder, or its metrics.jsonl; one or more"
    )
    parser.add_argument(
        "--out",
        type=out_file("loss.png"),
        metavar="FILE",
        help=".png, .pdf or .svg (default: loss.png in the first RUN)",
    )
    parser.add_argument("--x", choices=["tokens", "steps"], default="tokens", help="default: %(default)s")
    parser.add_argument("--log-x", action="store_true", help="logarithmic x axis: shows the start at length")
    parser.add_argument(
        "--smooth",
        type=finite_number,
        default=0.02,
        metavar="FRACTION",
        help="running mean over this part of the run's rows; 0: none (default: %(default)s)",
    )
    return parser
