"""Loss curves of training runs, drawn from the rows of their `metrics.jsonl`, and the command `plot_metrics`.

(a) training loss, raw and smoothed, and held-out loss against training tokens or steps; (b) held-out loss against
position at each run's last evaluation, where one was made. Losses are in nats per token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis.figures import style
from olmo_sparsity.util.arguments import Parser, out_file
from olmo_sparsity.util.errors import UserError

METRICS_NAME = "metrics.jsonl"
X_AXES = {"tokens": "training tokens", "step": "optimizer steps"}
"""Columns to draw against, and what they are called."""
LOSS, HELDOUT, BY_POSITION = "loss_nats", "heldout_loss_nats", "heldout_loss_by_position"
SMOOTHED = 0.02
"""Share of a run's rows that the running mean is over."""
_HELDOUT_LOOKS: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.0, "markersize": 3.8}


def read_runs(paths: Sequence[str | Path]) -> dict[str, pd.DataFrame]:
    """A frame of the rows of each run's `metrics.jsonl`, by a short name; a run's folder or the file may be given.

    Raises `UserError` for a folder without the file, and for a run that is named twice.
    """
    folders = [path.parent if path.name == METRICS_NAME else path for path in map(Path, paths)]
    names = last_parts([folder.resolve() for folder in folders])
    if not names:
        raise UserError(f"a run is named twice: {', '.join(map(str, paths))}; name each once")
    return {name: _read(folder) for name, folder in zip(names, folders, strict=True)}


def _read(folder: Path) -> pd.DataFrame:
    path = folder / METRICS_NAME
    if not path.is_file():
        raise UserError(f"{folder} is no run: it has no {METRICS_NAME}; name a folder that training wrote")
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    # a run may be writing the last line
    return pd.DataFrame([json.loads(line) for line in lines if line.endswith("\n")])


def last_parts(paths: Sequence[PurePath], fewest: int = 1) -> list[str]:
    """As many of the last parts of each path as tell all apart, at least ``fewest``; none where two paths are alike."""
    for count in range(fewest, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return []


@matplotlib.rc_context(style.STYLE)
def training_figure(runs: Mapping[str, pd.DataFrame], *, x: str = "tokens") -> Figure:
    """Panel (a), and (b) where a run has it; one legend below. Raises `UserError` for a run without losses.

    ``runs``: rows of each run (`read_runs`), by the name in the legend; ``x``: "tokens" or "step".
    """
    for name, rows in runs.items():
        if _series(rows, LOSS, x).empty:
            raise UserError(f"{name} has no training loss in its {METRICS_NAME} yet; wait for the first row")
    by_position = {
        name: rows.dropna(subset=[BY_POSITION]).iloc[-1]
        for name, rows in runs.items()
        if BY_POSITION in rows and rows[BY_POSITION].notna().any()
    }
    styles = style.model_styles({name: style.encoding_of(name) for name in runs})
    figure = style.new_figure(style.PAGE if by_position else 4.6, 3.6)
    panels = figure.subplots(1, 2 if by_position else 1, squeeze=False)[0]
    _plot_curves(panels[0], runs, styles, x)
    if by_position:
        _plot_by_position(panels[1], by_position, styles)
    handles = style.line_handles(styles)
    for handle, rows in zip(handles, runs.values(), strict=True):
        handle.set(**_HELDOUT_LOOKS)
        if _series(rows, HELDOUT, x).empty:
            handle.set_marker("none")
    style.add_legend(figure, handles)
    return figure


def _series(rows: pd.DataFrame, key: str, x: str) -> pd.DataFrame:
    """``x`` and ``key`` of the rows where both are finite, by ``x``."""
    if key not in rows or x not in rows:
        return pd.DataFrame(columns=[x, key], dtype=float)
    series = rows[[x, key]].astype(float).replace([np.inf, -np.inf], np.nan)
    return series.dropna().sort_values([x, key])


def smooth(values: np.ndarray, fraction: float) -> np.ndarray:
    """Running mean (n,) over a window of ``fraction`` of the values around each.

    The window is narrower near the start, where the loss falls fast and a wide one would show it too low or too late,
    and has one side only at the end.
    """
    index = np.arange(len(values))
    half = np.minimum(int(len(values) * fraction / 2), index // 4)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first, last = index - half, np.minimum(index + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _plot_curves(
    axes: Axes, runs: Mapping[str, pd.DataFrame], styles: Mapping[str, style.Style], x: str
) -> None:
    """Panel (a): training loss, raw (faint) and smoothed, and held-out loss (markers) [nats per token]."""
    notes = [f"lines: training, mean over {100 * SMOOTHED:g} % of the run", "faint: training, as logged"]
    if any(len(_series(rows, HELDOUT, x)) for rows in runs.values()):
        notes.append("markers: held-out")
    for name, rows in runs.items():
        colour, marker, line = styles[name]
        training, heldout = _series(rows, LOSS, x), _series(rows, HELDOUT, x)
        smoothed = smooth(training[LOSS].to_numpy(), SMOOTHED)
        axes.plot(training[x], training[LOSS], color=colour, alpha=0.22, linewidth=0.7, zorder=2)
        axes.plot(training[x], smoothed, color=colour, linestyle=line, label=name, zorder=3)
        looks: dict[str, Any] = {"linestyle": "none", "marker": marker, **_HELDOUT_LOOKS}
        axes.plot(heldout[x], heldout[HELDOUT], color=colour, zorder=4, **looks)
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "linespacing": 1.4}
    axes.text(0.99, 0.98, "\n".join(notes), fontsize=style.SMALL, color="0.35", **place)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel=X_AXES[x], ylabel="loss [nats per token]")
    axes.set_title("(a) Loss while training", loc="left")


def _plot_by_position(
    axes: Axes, evaluated: Mapping[str, pd.Series], styles: Mapping[str, style.Style]
) -> None:
    """Panel (b): held-out loss in bins of position, at the last evaluation; a dotted line at the window trained on."""
    windows = set()
    for name, row in evaluated.items():
        colour, marker, line = styles[name]
        bins = pd.DataFrame(row[BY_POSITION])
        centres = (bins["from"] + bins["to"]) / 2
        looks: dict[str, Any] = {"linestyle": line, "marker": marker, **_HELDOUT_LOOKS}
        axes.plot(centres, bins["loss_nats"], color=colour, label=name, **looks)
        windows.add(row.get("heldout_window_tokens"))
    for window in sorted(window for window in windows if pd.notna(window)):
        axes.axvline(window, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        text = f"trained on windows\nof {window:,.0f} tokens"
        axes.annotate(text, (window, 0.98), (4, 0), va="top", fontsize=style.SMALL, color="0.35", **place)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("position in the document [tokens]")
    axes.set_ylabel("held-out loss [nats per token]")
    axes.set_title("(b) Held-out loss by position, last evaluation", loc="left")


# --- the command ---


def parser() -> Parser:
    """Of `plot_metrics`."""
    parser = Parser(
        prog="olmo-sparsity plot_metrics",
        description="""Loss curves of training runs, from their metrics.jsonl; also while they train.

examples:
  olmo-sparsity plot_metrics runs/demo
  olmo-sparsity plot_metrics runs/* --x steps --out loss.pdf

Training loss as logged (faint) and smoothed, held-out loss as markers, in nats per token; beside it, where the runs
have evaluated, the held-out loss by position at the last evaluation. Reads metrics.jsonl only: no model and no GPU
is needed, and a copy of that file is enough.""",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder, or its metrics.jsonl")
    parser.add_argument(
        "--out",
        type=out_file("loss.png"),
        metavar="FILE",
        help=".png, .pdf or .svg (default: loss.png in the first RUN)",
    )
    parser.add_argument("--x", choices=["tokens", "steps"], default="tokens", help="default: %(default)s")
    return parser


def main() -> None:
    """Read the rows of every run, draw and write the figure."""
    options = parser().parse_args()
    first = options.runs[0]
    folder = first.parent if first.name == METRICS_NAME else first
    figure = training_figure(read_runs(options.runs), x={"steps": "step"}.get(options.x, options.x))
    print(f"wrote {style.save_figure(figure, options.out or folder / 'loss.png')[0]}")
