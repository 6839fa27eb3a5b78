"""Loss curves of training runs, drawn from the rows of their `metrics.jsonl`, and the command `plot_metrics`.

(a) training loss, raw and smoothed, and held-out loss against training tokens or steps; (b) held-out loss against
position at each run's last evaluation, where one was made. Losses are in nats per token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.figures import style
from olmo_sparsity.util.arguments import Parser, finite_number, out_file
from olmo_sparsity.util.errors import UserError

METRICS_NAME = "metrics.jsonl"
X_AXES = {"tokens": "training tokens", "step": "optimizer steps"}
"""Columns to draw against, and what they are called."""
LOSS, HELDOUT, BY_POSITION = "loss_nats", "heldout_loss_nats", "heldout_loss_by_position"
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
    *whole, last = path.read_text(encoding="utf8").split("\n")
    rows = [json.loads(line) for line in whole]
    with suppress(ValueError):  # it is empty, or a line that is being written
        rows.append(json.loads(last))
    return pd.DataFrame(rows)


def last_parts(paths: Sequence[PurePath], fewest: int = 1) -> list[str]:
    """As many of the last parts of each path as tell all apart, at least ``fewest``; none where two paths are alike."""
    for count in range(fewest, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return []


def training_figure(
    runs: Mapping[str, pd.DataFrame],
    path: str | Path | None = None,
    *,
    x: str = "tokens",
    fraction: float = 0.02,
    log_x: bool = False,
) -> Figure:
    """Panel (a), and (b) where a run has it; one legend below. Raises `UserError` for a run without losses.

    Args:
        runs: rows of each run (`read_runs`), by the name in the legend.
        path: where to write it (`style.save_figure`); None: nowhere.
        x: "tokens" or "step".
        fraction: of a run's rows that the running mean is over.
        log_x: whether the x axis is logarithmic.
    """
    for name, rows in runs.items():
        if _series(rows, LOSS, x).empty:
            raise UserError(f"{name} has no training loss in its {METRICS_NAME} yet; wait for the first row")
    by_position = {name: row for name, rows in runs.items() if (row := _last_by_position(rows)) is not None}
    styles = style.model_styles({name: style.encoding_of(name) for name in runs})
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if by_position else 4.6, 3.6)
        panels = figure.subplots(1, 2 if by_position else 1, squeeze=False)[0]
        _plot_curves(panels[0], runs, styles, x, fraction)
        if log_x:
            panels[0].set_xscale("log")
        panels[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        panels[0].set_xlabel(f"{X_AXES[x]}{' (log scale)' if log_x else ''}")
        if by_position:
            _plot_by_position(panels[1], by_position, styles)
        style.add_legend(figure, _legend_handles(runs, styles))
    if path is not None:
        style.save_figure(figure, path)
    return figure


def _series(rows: pd.DataFrame, key: str, x: str) -> pd.DataFrame:
    """``x`` and ``key`` of the rows where both are finite, by ``x``."""
    if key not in rows or x not in rows:
        return pd.DataFrame(columns=[x, key], dtype=float)
    series = rows[[x, key]].astype(float).replace([np.inf, -np.inf], np.nan)
    return series.dropna().sort_values([x, key])


def _last_by_position(rows: pd.DataFrame) -> pd.Series | None:
    """The last row that has the loss by position."""
    evaluated = rows.dropna(subset=[BY_POSITION]) if BY_POSITION in rows else rows[:0]
    return evaluated.iloc[-1] if len(evaluated) else None


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
    axes: Axes,
    runs: Mapping[str, pd.DataFrame],
    styles: Mapping[str, style.Style],
    x: str,
    fraction: float,
) -> None:
    """Panel (a): training loss, raw (faint) and smoothed, and held-out loss (markers) [nats per token]."""
    notes = [f"lines: training, mean over {100 * fraction:g} % of the run", "faint: training, as logged"]
    for name, rows in runs.items():
        colour, marker, line = styles[name]
        training, heldout = _series(rows, LOSS, x), _series(rows, HELDOUT, x)
        smoothed = smooth(training[LOSS].to_numpy(), fraction)
        axes.plot(training[x], training[LOSS], color=colour, alpha=0.22, linewidth=0.7, zorder=2)
        axes.plot(training[x], smoothed, color=colour, linestyle=line, label=name, zorder=3)
        looks: dict[str, Any] = {"linestyle": "none", "marker": marker, **_HELDOUT_LOOKS}
        axes.plot(heldout[x], heldout[HELDOUT], color=colour, zorder=4, **looks)
        if len(heldout) and len(notes) == 2:
            notes.append("markers: held-out")
    axes.set_ylabel("loss [nats per token]")
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "linespacing": 1.4}
    axes.text(0.99, 0.98, "\n".join(notes), fontsize=style.SMALL, color="0.35", **place)
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
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("position in the document [tokens]")
    axes.set_ylabel("held-out loss [nats per token]")
    axes.set_title("(b) Held-out loss by position, last evaluation", loc="left")


def _legend_handles(runs: Mapping[str, pd.DataFrame], styles: Mapping[str, style.Style]) -> list[Line2D]:
    handles = style.line_handles(styles)
    for handle, rows in zip(handles, runs.values(), strict=True):
        handle.set(**_HELDOUT_LOOKS)
        if _series(rows, HELDOUT, "step").empty:
            handle.set_marker("none")
    return handles


def short_number(value: float) -> str:
    """1,500 as 1.5k, then M for 10^6 and B for 10^9."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


# --- the command ---


def parser() -> Parser:
    """Of `plot_metrics`."""
    parser = Parser(
        prog="olmo-sparsity plot_metrics",
        description="""Loss curves of training runs, from their metrics.jsonl; also while they train.

examples:
  olmo-sparsity plot_metrics runs/demo
  olmo-sparsity plot_metrics runs/pose runs/rope --out loss.png
  olmo-sparsity plot_metrics runs/* --x steps --log-x --out loss.pdf

Training loss as logged (faint) and smoothed, held-out loss as markers, in nats per token; beside it, where the runs
have evaluated, the held-out loss by position at the last evaluation. Reads metrics.jsonl only: no model and no GPU
is needed, and a copy of that file is enough.""",
    )
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


def main() -> None:
    """Read the rows of every run, draw and write the figure."""
    options = parser().parse_args()
    if not 0 <= options.smooth < 1:
        raise UserError(f"--smooth {options.smooth} is no fraction; give 0 (not at all) to 1, such as 0.02")
    first = options.runs[0]
    folder = first.parent if first.name == METRICS_NAME else first
    x = "step" if options.x == "steps" else "tokens"
    figure = training_figure(read_runs(options.runs), x=x, fraction=options.smooth, log_x=options.log_x)
    paths = style.save_figure(figure, options.out or folder / "loss.png")
    print(f"wrote {', '.join(map(str, paths))}")
