"""What all figures share: one look for each selector, panels, legends, error bars, and saving.

Selectors have colours and markers of their own, the same in every figure (palettes: Okabe and Ito 2008 for selectors,
Paul Tol's for models, so that no model looks like a selector). Placebos are dashed and
hollow. Figures are drawn at the width at which they are printed, with text of 7 points or more. Intervals are 95 %;
axes follow the points, and bars and bands that are out of proportion to them end at the edge of the panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection as Bars
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from PIL import Image

from analysis.contexts import TRUE
from analysis.stats.recovery import BEST, CONTROLS, NET, default_selector
from analysis.stats.tables import INTERVAL
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, user_path

Look = dict[str, Any]
"""Colour, marker and line style, as matplotlib takes them."""
PAGE, COLUMN = 6.75, 3.25
"""Widths in inches: of a page of two columns, and of one of them."""
SMALL = 7
"""Size of the smallest text in points."""
OF_K = "k [far tokens added to the short context]"
OF_GAIN = r"[fraction of $L_{short} - L_{long}$]"
"""The unit of recoveries, for labels of axes."""
STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "legend.columnspacing": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.6,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # text stays text in the PDF
    "svg.hashsalt": "olmo-sparsity",  # else an SVG's ids are random
}
REFERENCE: Look = {"color": "0.3", "linewidth": 0.8, "zorder": 1.5}
"""Lines that curves are compared with, such as that at zero."""
OF_PLACEBO: Look = {
    "linestyle": (0, (4, 2)), "linewidth": 0.9, "markersize": 3.4, "markerfacecolor": "white", "markeredgewidth": 0.8
}  # fmt: skip
"""What every curve of a placebo has of its own: it is thin, dashed and hollow."""
IN_LEGEND: dict[str, Look] = {"placebo: dashed, hollow": {"color": "0.2", "marker": "o", **OF_PLACEBO}}
_DPI = 200
_WIDTHS = (2, 100)
"""In inches: panels collapse in a narrower figure, and a wider one has more dots than matplotlib draws."""
_FORMATS = (".png", ".pdf", ".svg")
_TOO_FAR = 4
_MARGIN = 0.08
"""Beside the points, where bars are cut: a share of what is shown."""
_LETTERS = 17
"""Of the smallest text in an inch."""
_UNDATED: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""What keeps the date out of a file, so that the same numbers give the same bytes."""

_SELECTORS: dict[str, tuple[Any, Any, Any]] = {
    "leave-one-out": ("#0072B2", "o", "-"),
    "leave-one-out-kl": ("#D01C8B", (4, 1, 0), "-"),
    "leave-one-out-tv": ("#7FA800", (6, 1, 0), "-"),
    "leave-one-out-absolute": ("#00325E", (3, 1, 0), "-"),
    "leave-one-in": ("#E69F00", "s", "-"),
    "greedy": ("#009E73", "^", "-"),
    "gradient": ("#CC79A7", "D", (0, (9, 1.5))),
    "attention": ("#D55E00", "v", (0, (9, 1.5))),
    "random": ("0.35", "d", "-."),
    "nearest": ("0.62", "<", "-."),
    BEST: ("#000000", "*", (0, (7, 1, 1, 1, 1, 1))),
}
"""Colour, marker and line; screened and unknown selectors take further ones, in the order in which they come."""
_FURTHER_COLOURS = ("#56B4E9", "#8C6D00", "#5D3A9B", "#882255")
_FURTHER_MARKERS = (">", "P", "X", "p", "h")
_FURTHER_LINES = ((0, (1, 0.8)), (0, (3, 1, 1, 1, 1, 1, 1, 1)), (0, (4, 1, 4, 1, 1, 1)))
_MODEL_COLOURS = ("#0077BB", "#EE7733", "#009988", "#CC3311", "#EE3377", "#777777", "#000000")
_MODEL_MARKERS = "os^DvPX"
"""Colours and markers of models, in their order."""
_MODEL_LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")
_SHADE_MARKERS = "os^DvPXdp"


def _look(colour: Any, marker: Any, line: Any) -> Look:
    return {"color": colour, "marker": marker, "linestyle": line}


def selector_styles(names: Iterable[str]) -> dict[str, Look]:
    """The look of each selector; unknown names get what is left, in their order.

    Screened forms (`EXACT@PROPOSER:m`) count as unknown names. No other selector shares any of the three with them,
    nor with `best`.
    """
    colours = cycle(_FURTHER_COLOURS)
    markers = cycle(_FURTHER_MARKERS)
    lines = cycle(_FURTHER_LINES)
    looks = {}
    for name in names:
        if name in _SELECTORS:
            looks[name] = _look(*_SELECTORS[name])
        else:
            looks[name] = _look(next(colours), next(markers), next(lines))
    return looks


def selector_label(name: str) -> str:
    """The name, and for `best` what it is."""
    if name == BEST:
        return "best of all selectors, chosen with the answer"
    return name


def shown_selectors(names: Collection[str]) -> list[str]:
    """For panels without room for all: the default selector, and the controls that were measured."""
    shown = [default_selector(names)]
    for name in CONTROLS:
        if name in names and name not in shown:
            shown.append(name)
    return shown


def model_styles(labels: Iterable[str]) -> dict[str, Look]:
    """The look of models by label, in their order; with many of them colours come again with another line."""
    looks = []
    for line in _MODEL_LINES:
        for colour, marker in zip(_MODEL_COLOURS, _MODEL_MARKERS, strict=True):
            looks.append(_look(colour, marker, line))
    return dict(zip(labels, cycle(looks), strict=False))


def shades(names: Iterable[str]) -> dict[str, Look]:
    """The look of names that stand for ascending numbers: ever lighter."""
    names = list(names)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(names)))
    markers = cycle(_SHADE_MARKERS)
    looks = {}
    for name, colour in zip(names, colours, strict=True):
        looks[name] = _look(tuple(colour), next(markers), "-")
    return looks


# --- figures, panels and legends ---


class _Layout(ConstrainedLayoutEngine):
    """Before panels are placed, which is whenever a figure is drawn, their axes follow the points."""

    def execute(self, fig: Figure) -> None:
        for axes in fig.axes:
            along_x = axes.get_shared_x_axes().get_siblings(axes)
            along_y = axes.get_shared_y_axes().get_siblings(axes)
            _follow_points(axes, 0, along_x)
            _follow_points(axes, 1, along_y)
        super().execute(fig)


def _follow_points(axes: Axes, dimension: int, together: Sequence[Axes]) -> None:
    """Limit an axis (0: x, 1: y) to what it shows, but for ends of bars and bands that are out of proportion.

    An end is out of proportion where it is farther from all points and lines than the largest of these, and than
    `_TOO_FAR` times their range. Without such an end the limits stay those of matplotlib, and so do limits that were
    set. ``together``: the panels that share the axis.
    """
    if dimension == 0:
        axis: Axis = axes.xaxis
        autoscaled = axes.get_autoscalex_on()
        set_limits: Callable[[float, float], Any] = axes.set_xlim
    else:
        axis = axes.yaxis
        autoscaled = axes.get_autoscaley_on()
        set_limits = axes.set_ylim
    if not autoscaled or axis.get_scale() != "linear":
        return
    of_lines = [_placed(panel, _lines_but_caps(panel), dimension) for panel in together]
    of_bars = [_placed(panel, panel.collections, dimension) for panel in together]
    points = np.concatenate(of_lines)
    ends = np.concatenate(of_bars)
    if not len(points) or not len(ends):
        return
    reach = max(np.abs(points).max(), _TOO_FAR * np.ptp(points))
    in_proportion = (ends >= points.min() - reach) & (ends <= points.max() + reach)
    if in_proportion.all() or reach == 0:
        return
    shown = np.concatenate([points, ends[in_proportion]])
    margin = _MARGIN * (np.ptp(shown) or reach)
    set_limits(shown.min() - margin, shown.max() + margin)


def _lines_but_caps(axes: Axes) -> list[Line2D]:
    """Curves, points and reference lines: not the caps at the ends of bars, which are lines too."""
    caps: list[Line2D] = []
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer):
            _, of_bars, _ = container.lines
            caps += of_bars
    return [line for line in axes.lines if line not in caps]


def _placed(axes: Axes, artists: Iterable[Line2D | Bars], dimension: int) -> np.ndarray:
    """Where lines or bars are along x (0) or y (1), in the data's unit, but for those at a place of the panel."""
    values = [np.empty(0)]
    for artist in artists:
        in_data = artist.get_transform().contains_branch_seperately(axes.transData)
        if not in_data[dimension]:
            continue
        paths = artist.get_paths() if isinstance(artist, Bars) else [artist.get_path()]
        for path in paths:
            vertices = np.asarray(path.vertices)
            values.append(vertices[:, dimension])
    placed = np.concatenate(values)
    return placed[np.isfinite(placed)]


def check_width(width: float) -> None:
    """Raise `UserError` for a width in inches at which no panel can be drawn."""
    if not _WIDTHS[0] <= width <= _WIDTHS[1]:
        raise UserError(
            f"a figure cannot be {width:g} inches wide; give a width from {_WIDTHS[0]} to {_WIDTHS[1]}"
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that knows nothing of pyplot; draw into it with `STYLE` in force."""
    check_width(width)
    figure = Figure(figsize=(width, height), layout=_Layout(w_pad=0.06))
    FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
    return figure


def large_panels(
    count: int, width: float, row_height: float, *, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, two in a row where it is a page wide; the last one fills its row."""
    columns = 1
    if width >= 6.4 and count > 1:
        columns = 2
    rows = math.ceil(count / columns)
    figure = new_figure(width, row_height * rows + 1)
    places = np.arange(rows * columns).reshape(rows, columns)
    mosaic = np.minimum(places, count - 1).tolist()
    panels = figure.subplot_mosaic(mosaic, sharey=sharey)
    return figure, list(panels.values())


def small_panels(
    titles: Sequence[str], x: str, y: str, *, width: float = PAGE, least: float = 2.0
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, ``least`` inches wide or more, its rows as full as they can be.

    All have the same axes, which ``x`` and ``y`` name.
    """
    check_width(width)
    most_columns = max(1, math.floor(width / least))
    rows = math.ceil(len(titles) / most_columns)
    columns = math.ceil(len(titles) / rows)
    width = min(width, max(COLUMN, 2.6 * columns))
    lines = 1 + max(title.count("\n") for title in titles)
    height = max(1.2, 0.68 * width / columns) + 0.2 + 0.13 * lines
    figure = new_figure(width, height * rows + 0.9)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[len(titles) :]:
        axes.remove()
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title)
    for axes in figure.axes[::columns]:
        axes.set_ylabel(y)
    for axes in figure.axes[-columns:]:  # the lowest of each column, also above a place without a panel
        axes.set_xlabel(x)
        axes.tick_params(labelbottom=True)
    return figure, figure.axes


def add_heading(figure: Figure, *texts: str) -> None:
    """Small letters above all panels, from the left edge; of ``texts`` those that are not empty."""
    heading = "; ".join(filter(None, texts))
    figure.suptitle(heading, fontsize=SMALL, color="0.25", x=0.01, ha="left", wrap=True)


def add_legend(figure: Figure, looks: Mapping[str, Look], *others: Artist) -> None:
    """One legend below all panels: a line for each name, and the ``others``; as many columns as the figure is wide."""
    handles: list[Artist] = []
    for name, look in looks.items():
        handles.append(Line2D([], [], label=selector_label(name), **look))
    handles += others
    longest = max(len(str(handle.get_label())) for handle in handles) + 7  # the line before a name
    columns = min(max(1, int(_LETTERS * figure.get_figwidth()) // longest), len(handles))
    while True:
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
        columns -= 1


# --- values with their intervals ---


def draw(
    axes: Axes,
    frame: pd.DataFrame,
    looks: Mapping[str, Look],
    by: str,
    x: str,
    *,
    joined: bool = True,
    across: bool = False,
    step: float = 0.03,
) -> None:
    """The values of a frame against its column ``x``, with intervals as bars, for each name in the column ``by``.

    Dashed and hollow of a placebo, whose label says so. Marks of one place stand ``step`` apart, so that no bar hides
    another: as octaves where lines join them, else as they are. ``across``: values are along the x axis.
    """
    is_placebo = pd.Series(False, index=frame.index)
    if "far_context" in frame:
        is_placebo = ~frame["far_context"].isin([TRUE, NET, np.nan])
    marks = []
    for name, placebo in product(looks, (False, True)):
        rows = frame[(frame[by] == name) & (is_placebo == placebo)]
        if len(rows):
            marks.append((name, placebo, rows))
    for number, (name, placebo, rows) in enumerate(marks):
        label = name
        look = looks[name]
        opacity = 0.85
        zorder = 3.0
        if placebo:
            label = f"{name} placebo"
            look = look | OF_PLACEBO
            opacity = 0.45
            zorder = 2.5
        shift = step * (number - (len(marks) - 1) / 2)
        if joined:
            places = rows[x] * 2**shift
        else:
            places = rows[x] + shift
            look = look | {"linestyle": "none"}
        bars: dict[str, Any] = {"ecolor": (look["color"], opacity), "elinewidth": 0.8}
        lengths = bar_lengths(rows)
        drawn_as = {"label": label, "zorder": zorder, **bars, **look}
        if across:
            line, *_ = axes.errorbar(rows["value"], places, xerr=lengths, **drawn_as)
        else:
            line, *_ = axes.errorbar(places, rows["value"], yerr=lengths, **drawn_as)
        line.set_label(label)


def draw_band(
    axes: Axes, x: Any, rows: pd.DataFrame, label: str, look: Look, *, alpha: float = 0.12, scale: float = 1.0
) -> None:
    """The values of some rows, times ``scale``, as a curve in a band of its colour."""
    value, low, high = scale * rows[list(INTERVAL)].to_numpy(dtype=float).T
    axes.plot(x, value, label=label, zorder=3, **look)
    axes.fill_between(x, low, high, color=look["color"], alpha=alpha, linewidth=0)


def bar_lengths(frame: pd.DataFrame) -> np.ndarray:
    """Lengths of the error bars below and above the values, (2, n); NaN, hence no bar, where there is no interval."""
    value, low, high = frame[list(INTERVAL)].to_numpy(dtype=float).T
    # a percentile interval need not hold its value; a bar cannot be negative
    return np.maximum([value - low, high - value], 0.0)


def says_intervals(mark: str, frame: pd.DataFrame) -> str:
    """``mark`` is 95 %, for headings; empty where no value of the frame has an interval."""
    has_intervals = frame[["low", "high"]].notna().any(axis=None)
    if not has_intervals:
        return ""
    return f"{mark}: 95 %"


def recovery_lines(axes: Axes) -> None:
    """Lines at a recovery of 0, and of 1, which is all of the gain."""
    axes.axhline(0.0, **REFERENCE)
    axes.axhline(1.0, linestyle=":", **REFERENCE)


def log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with these ticks and no others, as plain numbers."""
    labels = []
    for tick in ticks:
        if tick < 1000:
            labels.append(f"{tick:,.4g}")
        else:
            labels.append(f"{tick:,.0f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels)
    axes.set_xticks([], minor=True)


def save_figure(figure: Figure, *path: str | Path) -> list[Path]:
    """Write a figure, atomically, as its ending says; returns the paths. The same numbers give the same bytes.

    ``path``: of the file, or parts of it; without an ending a .png is written. A PNG has 200 dots per inch and a
    palette of 256 colours, which makes it a fraction of the size.

    Raises `UserError` for another ending, and for the name of a folder.
    """
    whole = user_path(Path(*path))
    if whole.is_dir():
        raise UserError(f"{whole} is a folder; name a file for the figure, such as {whole / 'figure.png'}")
    if not whole.suffix:
        whole = whole.with_suffix(".png")
    if whole.suffix not in _FORMATS:
        raise UserError(
            f"{whole}: figures are not written as {whole.suffix}; end the name in {', '.join(_FORMATS)}"
        )
    with atomic_path(whole) as temporary, matplotlib.rc_context(STYLE):
        figure.savefig(temporary, format=whole.suffix[1:], dpi=_DPI, metadata=_UNDATED.get(whole.suffix))
        if whole.suffix == ".png":
            with Image.open(temporary) as image:
                colours = image.convert("RGB")
            palette = colours.quantize(256, dither=Image.Dither.NONE)
            palette.save(temporary, format="PNG", optimize=True, dpi=(_DPI, _DPI))
    return [whole]
