"""What all figures share: one look for each selector and model, sizes, legends, error intervals, and saving.

Selectors differ by colour and marker, `best` and screened forms by line style too, and placebos are dashed and hollow:
the figures survive grey printing and colour-blind eyes (palette: Okabe and Ito 2008). All intervals are 95 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.stats.recovery import BEST, CONTROLS, Json, default_selector
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path

Style = tuple[str, str, Any]
"""Colour, marker and line style."""

DPI = 200

FORMATS: dict[str, Any] = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Kinds of figure files, and what keeps the date out of each."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # text stays text in the PDF
}

# by name, so that a selector looks the same in every figure
_STYLES: dict[str, Style] = {
    "leave-one-out": ("#0072B2", "o", "-"),
    "leave-one-in": ("#E69F00", "s", "-"),
    "greedy": ("#009E73", "^", "-"),
    "gradient": ("#CC79A7", "D", (0, (9, 1.5))),
    "attention": ("#D55E00", "v", (0, (9, 1.5))),
    "random": ("0.40", "d", "-."),
    "nearest": ("0.62", "<", "-."),
    BEST: ("#000000", "*", (0, (7, 1, 1, 1, 1, 1))),
}

# of screened and unknown selectors, in the order in which they come
_FURTHER_COLOURS = ("#56B4E9", "#8C6D00", "#5D3A9B", "#882255")

_FURTHER_MARKERS = (">", "P", "X", "p", "h")

_FURTHER_LINES = ((0, (1, 0.8)), (0, (3, 1, 1, 1, 1, 1, 1, 1)), (0, (4, 1, 4, 1, 1, 1)))

PLACEBO_LINE = (0, (4, 2))

PLACEBO_LABEL = "placebo far context: dashed, hollow"

MANY_SELECTORS = 4
"""With more curves than these in one panel, intervals are bars beside each other: bands would hide each other."""

# colour, marker, line style: runs differ by all three at once, for grey printing and colour-blind eyes
_RUN_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", (0, (5, 1))),
    ("#56B4E9", "P", (0, (3, 1, 1, 1))),
    ("#000000", "X", (0, (1, 1))),
)


def selector_styles(names: Sequence[str]) -> dict[str, Style]:
    """Colour, marker and line style of each selector; unknown names get what is left, in their order.

    Screened forms (`EXACT@PROPOSER:m`) count as unknown names: no other selector has any of the three in common
    with them, nor with `best`.
    """
    further = (
        (_FURTHER_COLOURS[i % 4], _FURTHER_MARKERS[i % 5], _FURTHER_LINES[i % 3]) for i in range(len(names))
    )
    return {name: _STYLES[name] if name in _STYLES else next(further) for name in names}


def selector_label(name: str) -> str:
    """The name, and for `best` what it is."""
    return f"{name} of the selectors: existence certificate" if name == BEST else name


def shown_selectors(names: Sequence[str]) -> list[str]:
    """For panels without room for all: the default selector, and the controls that were measured."""
    return list(dict.fromkeys([default_selector(names), *(name for name in CONTROLS if name in names)]))


def curve_style(number: int) -> tuple[str, str, Any]:
    """Colour, marker and line style of a curve; all three together differ for the first 49 numbers."""
    turn, place = divmod(number, len(_RUN_STYLES))
    _, marker, line = _RUN_STYLES[(place + 2 * turn) % len(_RUN_STYLES)]
    return _RUN_STYLES[place][0], marker, line


def draw_curves(
    axes: Axes, selectors: Json, key: str, styles: dict[str, Style], *, placebo: bool = False
) -> None:
    """``key`` of every selector against k, with its interval.

    Few curves have bands; many have bars, set a little apart so that none hides another.
    """
    many = len(selectors) > MANY_SELECTORS
    for number, (name, per_k) in enumerate(selectors.items()):
        apart = 2 ** (0.04 * (number - (len(selectors) - 1) / 2)) if many else 1
        x = [int(k) * apart for k in per_k]
        intervals = [values[key] for values in per_k.values()]
        values, low, high = (
            [to_number(each[bound]) for each in intervals] for bound in ("value", "low", "high")
        )
        colour, marker, line = styles[name]
        looks = placebo_looks(marker) if placebo else {"linestyle": line, "marker": marker}
        axes.plot(x, values, color=colour, label=f"{name} {key}", zorder=2.5 if placebo else 3.0, **looks)
        if many:
            bars: Json = {"elinewidth": 0.8, "alpha": 0.35 if placebo else 0.7, "zorder": 2.2}
            axes.errorbar(x, values, bar_lengths(intervals), fmt="none", ecolor=colour, **bars)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.06 if placebo else 0.13, linewidth=0)


def legend_handles(styles: dict[str, Style], *, placebo: bool = True) -> list[Line2D]:
    """A line for each selector, and one for the placebo."""
    looks: list[Json] = [
        {"label": selector_label(name), "color": colour, "marker": marker, "linestyle": line}
        for name, (colour, marker, line) in styles.items()
    ]
    if placebo:
        looks.append({"label": PLACEBO_LABEL, "color": "0.2", **placebo_looks("o")})
    return [Line2D([], [], **each) for each in looks]


def placebo_looks(marker: str) -> Json:
    """How every curve of a placebo is drawn: thin, dashed, hollow."""
    looks: Json = {"linestyle": PLACEBO_LINE, "linewidth": 1, "marker": marker, "markersize": 3.8}
    return {**looks, "markerfacecolor": "white", "markeredgewidth": 0.8}


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure that knows nothing of pyplot; draw into it with `STYLE` in force."""
    figure = Figure(figsize=(width_inches, height_inches), layout=ConstrainedLayoutEngine(w_pad=0.08))
    FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
    return figure


def in_rows(count: int) -> list[tuple[int, int]]:
    """(row, column) of ``count`` panels, up to four a row."""
    columns = 3 if count in (3, 5, 6, 9) else 4
    return [divmod(number, columns) for number in range(count)]


def small_multiples(places: Sequence[tuple[int, int]], title_lines: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with a small panel at each (row, column), all with the same axes; other places stay empty."""
    rows, columns = (1 + max(place[axis] for place in places) for axis in (0, 1))
    figure = new_figure(3.1 * max(columns, 2), (2.05 + 0.15 * title_lines) * rows + 1.2)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in np.ndenumerate(grid):
        if place not in places:
            axes.remove()
    return figure, [grid[place] for place in places]


def outer_labels(panels: Sequence[Axes], x: str, y: str) -> None:
    """Name the axes of panels that share them: below the lowest of each column, left of the first of each row."""
    places = []
    for axes in panels:
        spec = axes.get_subplotspec()
        assert spec is not None
        places.append((spec.rowspan.start, spec.colspan.start))
    for axes, (row, column) in zip(panels, places, strict=True):
        lowest = not any(each[0] > row and each[1] == column for each in places)
        first = not any(each[0] == row and each[1] < column for each in places)
        axes.tick_params(labelbottom=lowest, labelleft=first)
        axes.set_xlabel(x if lowest else "")
        axes.set_ylabel(y if first else "")


def add_heading(figure: Figure, text: str) -> None:
    """Small letters above all panels, from the left edge; broken after semicolons where the figure is narrow."""
    lines = [""]
    for part in text.split("; "):
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        letters = len(re.sub(r"[\\${}_]", "", joined))  # without the marks of formulas
        if letters > 13 * figure.get_figwidth() and lines[-1]:
            lines[-1] += ";"
            lines.append(part)
        else:
            lines[-1] = joined
    figure.suptitle("\n".join(lines), fontsize=8.5, color="0.25", x=0.01, ha="left")


def add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend below all panels, in as few rows as its names fit into."""
    letters = [len(each.get_label()) + 9 for each in handles]  # 9: the line drawn before each name
    for rows in range(1, len(handles) + 1):
        widths = [max(letters[first : first + rows]) for first in range(0, len(letters), rows)]
        if sum(widths) <= 14.5 * figure.get_figwidth():
            break
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(widths), frameon=False, handlelength=3.6
    )


def k_axis(axes: Axes, ks: Sequence[int]) -> None:
    """The x axis of curves against k: logarithmic, marked where something was measured."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k [far tokens added to the short context]")


def bar_lengths(intervals: Sequence[Json]) -> list[list[float]]:
    """Lengths of the error bars below and above the values; NaN, hence no bar, where there is no interval."""
    below = [to_number(each["value"]) - to_number(each["low"]) for each in intervals]
    above = [to_number(each["high"]) - to_number(each["value"]) for each in intervals]
    # a percentile interval need not hold its value; a bar cannot be negative
    return [[0.0 if x < 0 else x for x in lengths] for lengths in (below, above)]


def to_number(value: float | None) -> float:
    """NaN, which is not drawn, for what the summary has no value for."""
    return float("nan") if value is None else value


def save_figure(figure: Figure, folder: str | Path, name: str = "figure2") -> list[Path]:
    """Write ``name``.png (200 dpi) and ``name``.pdf into ``folder``, atomically; returns both paths.

    The same summary gives the same bytes: no date is written into them.
    """
    return [write_figure(figure, Path(folder) / f"{name}.{kind}") for kind in ("png", "pdf")]


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as the ending of ``path``, one of `FORMATS`, says, atomically; returns the path."""
    kind, drawn = path.suffix[1:].lower(), BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "olmo-sparsity"}):  # else an SVG's ids are random
        figure.savefig(drawn, format=kind, dpi=DPI, metadata=FORMATS[kind])
    with atomic_path(path) as temporary:  # only now: matplotlib answers a full disk with errors of its own
        temporary.write_bytes(drawn.getbuffer())
    return path


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as the ending of ``path`` says, atomically. Raises `UserError` for an unknown ending."""
    path = Path(path)
    if path.suffix[1:].lower() not in FORMATS:
        raise UserError(f"{path} has no ending of {', '.join(FORMATS)}; name it with one of them")
    return write_figure(figure, path)
