"""Loss curves of training runs, drawn from the rows of their `metrics.jsonl`: no model, no torch.

(a) training loss, raw and smoothed, and held-out loss against training tokens or steps; (b) held-out loss against
position at each run's last evaluation, where one was made. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.plots import style
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

X_AXES = {"tokens": "training tokens", "steps": "optimizer steps"}
_HELDOUT: Json = {"markerfacecolor": "white", "markeredgewidth": 1.0, "markersize": 3.8}


@dataclass(frozen=True)
class RunMetrics:
    """The rows of one run's `metrics.jsonl`, and the name it has in the figure."""

    name: str
    rows: list[Json]

    def series(self, key: str, x: str) -> tuple[np.ndarray, np.ndarray]:
        """``key`` and the tokens or steps it was measured at, of the rows where both are finite numbers; each (n,).

        Raises `UserError` for what is no number.
        """
        column = {"tokens": "tokens", "steps": "step"}[x]
        points = [(row.get(column), row[key]) for row in self.rows if key in row]
        try:
            array = np.array(points, dtype=float).reshape(-1, 2)
        except (TypeError, ValueError):
            raise UserError(
                f"{self.name}: not every {key} and {column} in its metrics.jsonl is a number; remove those rows"
            ) from None
        array = array[np.isfinite(array).all(axis=1)]
        places, values = array[np.lexsort(array.T[::-1])].T
        return places, values

    @property
    def last_by_position(self) -> Json | None:
        """The last row that has the loss by position."""
        return next((row for row in reversed(self.rows) if row.get("heldout_loss_by_position")), None)


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """Short names that tell the runs apart. Raises `UserError` for a run that is named twice."""
    if names := last_parts([PurePath(path) for path in paths]):
        return names
    raise UserError(f"a run is named twice: {', '.join(map(str, paths))}; name each once")


def last_parts(paths: Sequence[PurePath], fewest: int = 1) -> list[str]:
    """As many of the last parts of each path as tell all apart, at least ``fewest``; none where two paths are alike."""
    for count in range(fewest, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return []


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


def plot_curves(
    axes: Axes, runs: Sequence[RunMetrics], x: str, fraction: float, *, log_x: bool = False
) -> None:
    """Panel (a): training loss, raw (faint) and smoothed, and held-out loss (markers) [nats per token]."""
    styles = _styles(runs)
    for run in runs:
        colour, marker, line = styles[run.name]
        places, losses = run.series("loss_nats", x)
        axes.plot(places, losses, color=colour, alpha=0.22, linewidth=0.7, zorder=2)
        axes.plot(places, smooth(losses, fraction), color=colour, linestyle=line, label=run.name, zorder=3)
        places, losses = run.series("heldout_loss_nats", x)
        axes.plot(places, losses, color=colour, linestyle="none", marker=marker, zorder=4, **_HELDOUT)
    if log_x:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.set_xlabel(f"{X_AXES[x]}{' (log scale)' if log_x else ''}")
    axes.set_ylabel("loss [nats per token]")
    lines = [f"lines: training, mean over {100 * fraction:g} % of the run", "faint: training, as logged"]
    if any(len(run.series("heldout_loss_nats", x)[0]) for run in runs):
        lines.append("markers: held-out")
    looks: Json = {"transform": axes.transAxes, "ha": "right", "va": "top", "linespacing": 1.4}
    axes.text(0.99, 0.98, "\n".join(lines), fontsize=style.SMALL, color="0.35", **looks)
    axes.set_title("(a) Loss while training", loc="left")


def plot_by_position(axes: Axes, runs: Sequence[RunMetrics]) -> None:
    """Panel (b): held-out loss in bins of position, at the last evaluation; a dotted line at the window trained on."""
    lengths: set[int] = set()
    styles = _styles(runs)
    for run in runs:
        row = run.last_by_position
        if row is None:
            continue
        colour, marker, line = styles[run.name]
        bins = row["heldout_loss_by_position"]
        centres = [(each["from"] + each["to"]) / 2 for each in bins]
        losses = [each["loss_nats"] for each in bins]
        axes.plot(centres, losses, color=colour, linestyle=line, marker=marker, label=run.name, **_HELDOUT)
        if "heldout_window_tokens" in row:
            lengths.add(row["heldout_window_tokens"])
    for length in sorted(lengths):
        axes.axvline(length, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
        place: Json = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        text = f"trained on windows\nof {length:,} tokens"
        axes.annotate(text, (length, 0.98), (4, 0), va="top", fontsize=style.SMALL, color="0.35", **place)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("position in the document [tokens]")
    axes.set_ylabel("held-out loss [nats per token]")
    axes.set_title("(b) Held-out loss by position, last evaluation", loc="left")


def training_figure(
    runs: Sequence[RunMetrics], *, x: str = "tokens", fraction: float = 0.02, log_x: bool = False
) -> Figure:
    """Panel (a), and (b) where a run has it; one legend below. Raises `UserError` for a run without losses."""
    for run in runs:
        if not len(run.series("loss_nats", x)[0]):
            raise UserError(
                f"{run.name} has no training loss in its metrics.jsonl yet; wait for the first row"
            )
    by_position = any(run.last_by_position for run in runs)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if by_position else 4.6, 3.6)
        panels = figure.subplots(1, 1 + by_position, squeeze=False)[0]
        plot_curves(panels[0], runs, x, fraction, log_x=log_x)
        if by_position:
            plot_by_position(panels[1], runs)
        style.add_legend(figure, _legend_handles(runs))
    return figure


def short_number(value: float) -> str:
    """1,500 as 1.5k, then M for 10^6 and B for 10^9."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _styles(runs: Sequence[RunMetrics]) -> dict[str, style.Style]:
    return style.model_styles({run.name: style.encoding_of(run.name) for run in runs})


def _legend_handles(runs: Sequence[RunMetrics]) -> list[Line2D]:
    handles = style.line_handles(_styles(runs))
    for handle, run in zip(handles, runs, strict=True):
        handle.set(**_HELDOUT)
        if not len(run.series("heldout_loss_nats", "steps")[0]):
            handle.set_marker("none")
    return handles
