"""What all figures share: one look for each selector and position encoding, sizes, legends, error bars, and saving.

Selectors and position encodings have colours and markers of their own, the same in every figure (palettes: Okabe and
Ito 2008 for selectors, Paul Tol's for encodings, so that no model looks like a selector). Placebos are dashed and
hollow. Figures are drawn at the width at which they are printed, with text of 7 points or more. Intervals are 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from PIL import Image

from analysis.stats.measured import BEST, CONTROLS, default_selector
from olmo_sparsity.util.files import atomic_path

Style = tuple[Any, Any, Any]
"""Colour, marker and line style."""

PAGE, COLUMN = 6.75, 3.25
"""Widths in inches: of a page of two columns, and of one of them."""
SMALL = 7
"""Size of the smallest text in points."""
OF_GAIN = r"[fraction of $L_{short} - L_{long}$]"
"""The unit of recoveries, for labels of axes."""
STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.6,
    "hatch.linewidth": 0.5,
    "mathtext.fontset": "dejavusans",
    "pdf.fonttype": 42,  # text stays text in the PDF
}
_DPI = 200
_LETTERS = 17
"""Of the smallest text in an inch."""
_UNDATED: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""What keeps the date out of a file, so that the same numbers give the same bytes."""

_SELECTORS: dict[str, Style] = {
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
# of screened and unknown selectors, in the order in which they come
_FURTHER_COLOURS = ("#56B4E9", "#8C6D00", "#5D3A9B", "#882255")
_FURTHER_MARKERS = (">", "P", "X", "p", "h")
_FURTHER_LINES = ((0, (1, 0.8)), (0, (3, 1, 1, 1, 1, 1, 1, 1)), (0, (4, 1, 4, 1, 1, 1)))
REFERENCE: dict[str, Any] = {"color": "0.3", "linewidth": 0.8, "zorder": 1.5}
"""Lines that curves are compared with, such as that at zero."""

_ENCODINGS: dict[str | None, tuple[str, str]] = {
    "contiguous": ("#332288", "o"),
    "random_start": ("#CC6677", "v"),
    "pose": ("#117733", "s"),
    "random_float": ("#88CCEE", "p"),
    "coupled": ("#997700", "P"),
    "predicted": ("#004488", "X"),
    "nope": ("#999933", "d"),
    "alibi": ("#44AA99", "^"),
    "linear": ("#6699CC", "<"),
    "ntk": ("#AA4499", "D"),
    "yarn": ("#661100", ">"),
}
"""Colour and marker by position scheme, encoding or extension of RoPE."""
_IN_LABELS = ("alibi", "nope", "yarn", "ntk", "linear", "pose", "random start", "random float")
_OTHERS = tuple(
    zip(("#0077BB", "#EE7733", "#009988", "#CC3311", "#EE3377", "#777777", "#000000"), "os^DvPX", strict=True)
)
"""Of models that name no encoding, such as the runs of a sweep."""
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")


def selector_styles(names: Iterable[str]) -> dict[str, Style]:
    """Colour, marker and line style of each selector; unknown names get what is left, in their order.

    Screened forms (`EXACT@PROPOSER:m`) count as unknown names. No other selector shares any of the three with them,
    nor with `best`.
    """
    further = zip(cycle(_FURTHER_COLOURS), cycle(_FURTHER_MARKERS), cycle(_FURTHER_LINES), strict=False)
    return {name: _SELECTORS[name] if name in _SELECTORS else next(further) for name in names}


def selector_label(name: str) -> str:
    """The name, and for `best` what it is."""
    return "best of all selectors, chosen with the answer" if name == BEST else name


def shown_selectors(names: Collection[str]) -> list[str]:
    """For panels without room for all: the default selector, and the controls that were measured."""
    return list(dict.fromkeys([default_selector(names), *(name for name in CONTROLS if name in names)]))


def encoding_of(label: str, scheme: str | None = None) -> str | None:
    """The position encoding that a model's label names, else its position ``scheme``; None where neither is known.

    The label decides, as position scheme alone does not tell NoPE, ALiBi and scaled RoPE from RoPE.
    """
    for name in _IN_LABELS:
        if name in label.lower():
            return name.replace(" ", "_")
    return scheme if scheme in _ENCODINGS else "contiguous" if "rope" in label.lower() else None


def model_styles(encodings: dict[str, str | None]) -> dict[str, Style]:
    """Colour, marker and line style of models by label, given their encodings (`encoding_of`).

    Models of one encoding share its colour and marker. They differ by line style, and each is lighter than the last.
    """
    styles: dict[str, Style] = {}
    for label, encoding in encodings.items():
        alike = [other for other in encodings if encodings[other] == encoding]
        number = alike.index(label)
        if encoding is None:
            colour, marker = _OTHERS[number % len(_OTHERS)]
            line = number + number // len(_OTHERS)
        else:
            pure, marker = _ENCODINGS[encoding]
            lighter = 0.5 * number / max(len(alike) - 1, 2)
            mixed = (1 - lighter) * np.array(matplotlib.colors.to_rgb(pure)) + lighter
            colour = matplotlib.colors.to_hex(tuple(mixed))
            line = number + (encoding == "random_start")  # else it would cover plain RoPE
        styles[label] = (colour, marker, _LINES[line % len(_LINES)])
    return styles


# --- figures and panels ---


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that knows nothing of pyplot; draw into it with `STYLE` in force."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06))
    FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
    return figure


def columns_in(width: float, least: float) -> int:
    """How many panels of at least ``least`` inches stand beside each other."""
    return max(1, math.floor(width / least))


def in_rows(count: int, columns: int) -> list[tuple[int, int]]:
    """(row, column) of ``count`` panels, up to ``columns`` a row; the last row is as full as it can be."""
    rows = math.ceil(count / columns)
    return [divmod(number, math.ceil(count / rows)) for number in range(count)]


def small_multiples(
    places: Sequence[tuple[int, int]], width: float = PAGE, title_lines: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with a small panel at each (row, column), all with the same axes; other places stay empty."""
    rows, columns = (1 + max(place[axis] for place in places) for axis in (0, 1))
    width = min(width, max(COLUMN, 2.6 * columns))
    panel_height = max(1.2, 0.68 * width / columns)
    figure = new_figure(width, (panel_height + 0.2 + 0.13 * title_lines) * rows + 0.9)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in np.ndenumerate(grid):
        if place not in places:
            axes.remove()
    return figure, [grid[place] for place in places]


def lines_of(titles: Sequence[str]) -> int:
    """Lines of the longest of these titles."""
    return 1 + max(title.count("\n") for title in titles)


def outer_labels(panels: Sequence[Axes], x: str, y: str) -> None:
    """Name the axes of panels that share them: below the lowest of each column, left of the first of each row."""
    lowest = {axes.get_subplotspec().colspan.start: axes for axes in panels}  # type: ignore[union-attr]
    for axes in panels:  # row by row
        axes.set(xlabel=x, ylabel=y)
        axes.label_outer()
    for axes in lowest.values():  # also above a place without a panel
        axes.set_xlabel(x)
        axes.tick_params(labelbottom=True)


def add_heading(figure: Figure, *texts: str) -> None:
    """Small letters above all panels, from the left edge; of ``texts`` those that are not empty."""
    letters = int(_LETTERS * figure.get_figwidth())
    text = "; ".join(filter(None, texts)).replace(" %", "~%").replace(" = ", "~=~")
    lines = wrap(text, letters, break_long_words=False, break_on_hyphens=False)
    heading = "\n".join(lines).replace("~", " ")
    figure.suptitle(heading, fontsize=SMALL, color="0.25", x=0.01, ha="left")


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend below all panels, with as many columns as its longest name allows."""
    longest = max(len(handle.get_label()) for handle in handles) + 7  # the line before a name
    columns = max(1, int(_LETTERS * figure.get_figwidth()) // longest)
    looks: dict[str, Any] = {"frameon": False, "handlelength": 3, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), **looks)


def line_handles(styles: Mapping[str, Style]) -> list[Line2D]:
    """A line for each name, for legends."""
    return [
        Line2D([], [], label=name, color=colour, marker=marker, linestyle=line)
        for name, (colour, marker, line) in styles.items()
    ]


def selector_handles(
    styles: Mapping[str, Style], *, placebo: bool = True, joined: bool = True
) -> list[Line2D]:
    """A line for each selector, and one for the placebo; of points that are not ``joined``, their markers."""
    handles = line_handles({selector_label(name): look for name, look in styles.items()})
    if placebo:
        label = "placebo: dashed, hollow" if joined else "placebo: hollow"
        handles.append(Line2D([], [], label=label, color="0.2", **placebo_looks("o")))
    for handle in () if joined else handles:
        handle.set_linestyle("none")
    return handles


# --- curves ---


def placebo_looks(marker: Any) -> dict[str, Any]:
    """How every curve of a placebo is drawn: thin, dashed, hollow."""
    looks: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.9, "marker": marker, "markersize": 3.4}
    return {**looks, "markerfacecolor": "white", "markeredgewidth": 0.8}


def draw_curves(
    axes: Axes,
    curves: Mapping[str, pd.DataFrame],
    styles: Mapping[str, Style],
    *,
    x: str = "k",
    placebo: bool = False,
) -> None:
    """A curve for each frame of ``x``, value, low and high, by label; those of a placebo are labelled so.

    Intervals are bars, set a little apart so that none hides another.
    """
    for shift, (label, frame) in zip(side_by_side(len(curves), 0.06), curves.items(), strict=True):
        places = frame[x].to_numpy() * 2**shift
        colour, marker, line = styles[label]
        looks = placebo_looks(marker) if placebo else {"linestyle": line, "marker": marker}
        name = f"{label} placebo" if placebo else label
        axes.plot(places, frame["value"], color=colour, label=name, zorder=2.5 if placebo else 3.0, **looks)
        bars: dict[str, Any] = {"elinewidth": 0.8, "alpha": 0.45 if placebo else 0.85, "zorder": 2.2}
        axes.errorbar(places, frame["value"], bar_lengths(frame), fmt="none", ecolor=colour, **bars)


def draw_band(
    axes: Axes,
    x: Sequence[float] | np.ndarray,
    interval: Sequence[Any],
    label: str,
    style: Style,
    alpha: float,
) -> None:
    """A curve in a band of its colour; ``interval``: values, lower and upper bounds, each of the length of ``x``."""
    (value, low, high), (colour, marker, line) = interval, style
    axes.plot(x, value, color=colour, marker=marker, linestyle=line, label=label, zorder=3)
    axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_points(
    axes: Axes,
    places: Sequence[float] | np.ndarray | pd.Series,
    frame: pd.DataFrame,
    label: str,
    style: Style,
    *,
    placebo: bool = False,
    across: bool = False,
) -> None:
    """The values of a frame as points with bars at ``places``, hollow of a ``placebo``; ``across``: along x."""
    colour, marker, _ = style
    x, y = (frame["value"], places) if across else (places, frame["value"])
    looks: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": colour, "capsize": 1.5}
    looks |= {"markerfacecolor": "white" if placebo else colour, "elinewidth": 0.8}
    looks |= {"xerr" if across else "yerr": bar_lengths(frame)}
    axes.errorbar(x, y, label=f"{label} placebo" if placebo else label, **looks)


def side_by_side(count: int, step: float) -> np.ndarray:
    """How far ``count`` marks of one place are moved from it, (count,), so that they stand ``step`` apart."""
    return step * (np.arange(count) - (count - 1) / 2)


def bar_lengths(frame: pd.DataFrame) -> np.ndarray:
    """Lengths of the error bars below and above the values, (2, n); NaN, hence no bar, where there is no interval."""
    value, low, high = (frame[name].to_numpy(dtype=float) for name in ("value", "low", "high"))
    # a percentile interval need not hold its value; a bar cannot be negative
    return np.maximum([value - low, high - value], 0.0)


def recovery_axis(axes: Axes, axis: Literal["x", "y"]) -> None:
    """Recovery along one axis: its label, and lines at 0 and at 1, which is all of the gain."""
    draw = axes.axvline if axis == "x" else axes.axhline
    draw(0.0, **REFERENCE)
    draw(1.0, linestyle=":", **REFERENCE)
    axes.set(**{f"{axis}label": f"recovery\n{OF_GAIN}"})


def k_axis(axes: Axes, ks: Sequence[int]) -> None:
    """The x axis of curves against k: logarithmic, marked where something was measured."""
    log_axis(axes, ks)
    axes.set_xlabel("k [far tokens added to the short context]")


def log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with these ticks and no others, as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks])
    axes.set_xticks([], minor=True)


def save_figure(figure: Figure, *path: str | Path) -> list[Path]:
    """Write a figure, atomically, as its ending says; returns the paths. The same numbers give the same bytes.

    ``path``: of the file, or parts of it; without an ending a .png is written. A PNG has 200 dots per inch and a
    palette of 256 colours, which makes it a fraction of the size.
    """
    whole = Path(*path)
    whole = whole if whole.suffix else whole.with_suffix(".png")
    rc: dict[Any, Any] = {**STYLE, "svg.hashsalt": "olmo-sparsity"}  # else an SVG's ids are random
    with atomic_path(whole) as temporary, matplotlib.rc_context(rc):
        figure.savefig(temporary, format=whole.suffix[1:], dpi=_DPI, metadata=_UNDATED.get(whole.suffix))
        if whole.suffix == ".png":
            with Image.open(temporary) as image:
                palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            palette.save(temporary, format="PNG", optimize=True, dpi=(_DPI, _DPI))
    return [whole]
