"""Loss curves of training runs [nats per token], and the command `plot_metrics`.

examples:
  olmo-sparsity plot_metrics runs/demo
  olmo-sparsity plot_metrics runs/* --x steps --out loss.pdf

Training loss as logged (faint) and its running mean over 2 % of the rows, held-out loss as markers. Reads metrics.jsonl
of each run only, also while it trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis.figures import style
from olmo_sparsity.util.arguments import Parser, out_file
from olmo_sparsity.util.errors import UserError

X_AXES = {"tokens": ("tokens", "training tokens"), "steps": ("step", "optimizer steps")}
"""What can be drawn against: its column, and what it is called."""


def last_parts(paths: Sequence[PurePath], fewest: int = 1) -> list[str]:
    """As many of the last parts of each path as tell all apart, at least ``fewest``; none where two paths are alike."""
    for count in range(fewest, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return []


@matplotlib.rc_context(style.STYLE)
def training_figure(runs: Mapping[str, pd.DataFrame], x: str = "tokens") -> Figure:
    """Training and held-out loss against ``x``, one of `X_AXES`; ``runs``: rows of metrics.jsonl by name."""
    styles = style.model_styles({name: style.encoding_of(name) for name in runs})
    column, label = X_AXES[x]
    figure = style.new_figure(4.6, 3.6)
    axes = figure.subplots()
    for name, (colour, marker, line) in styles.items():
        rows = runs[name].reindex(columns=[column, "loss_nats", "heldout_loss_nats"]).set_index(column)
        logged, heldout = rows["loss_nats"].dropna(), rows["heldout_loss_nats"].dropna()
        axes.plot(logged, color=colour, alpha=0.22, linewidth=0.7)
        window = max(1, len(logged) // 50)
        axes.plot(logged.rolling(window, center=True, min_periods=1).mean(), color=colour, linestyle=line)
        axes.plot(heldout, color=colour, marker=marker, markerfacecolor="white", linestyle="none")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel=label, ylabel="loss [nats per token]")
    axes.set_title("Loss while training; markers: held-out", loc="left")
    style.add_legend(figure, style.line_handles(styles))
    return figure


def main() -> None:
    """Read the rows of every run, draw and write the figure."""
    parser = Parser(prog="olmo-sparsity plot_metrics", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that training wrote")
    parser.add_argument("--x", choices=X_AXES, default="tokens", help="default: %(default)s")
    parser.add_argument("--out", type=out_file("loss.png"), metavar="FILE", help="default: RUN/loss.png")
    options = parser.parse_args()
    files = list(dict.fromkeys(run.resolve() / "metrics.jsonl" for run in options.runs))
    if missing := [str(path) for path in files if not path.is_file()]:
        raise UserError(f"there is no {', '.join(missing)}; name folders that training wrote")
    names = last_parts([path.parent for path in files])
    runs = {name: read_rows(path) for name, path in zip(names, files, strict=True)}
    out = options.out or options.runs[0] / "loss.png"
    print(f"wrote {style.save_figure(training_figure(runs, options.x), out)[0]}")


def read_rows(path: Path) -> pd.DataFrame:
    """The rows of a metrics.jsonl but for a last line that is still being written."""
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    return pd.DataFrame([json.loads(line) for line in lines if line.endswith("\n")])
