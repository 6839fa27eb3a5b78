"""The influence map of a text as a heat map."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from analysis.figures import style
from analysis.pieces import code_point
from analysis.stats.recovery import nats
from analysis.xray.influences import Influences

MOST_CELLS = 360
"""Cells in a row; with more tokens, a cell stands for several."""
LINEAR_NATS = 0.1
"""Colours are linear up to here, logarithmic beyond."""
_LETTERS = 14
_MARKS = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
"""How white space is written that would break the line."""
_MARKER = 7
"""Diameter of a marker in points."""
_LABEL = (6, 8)
"""Width and height of a number in points, with a little room."""
_RADII = (9.0, 14.0, 20.0, 27.0, 35.0, 44.0)
"""How far a label may stand from its marker, in points."""
_ANGLES = (35, 0, 70, 20, 52, 90, 110, -35, 145, -70, 180, -110, -145)
"""In which directions, in degrees against the clock from the right."""


@matplotlib.rc_context(style.STYLE)
def map_figure(xray: Influences) -> Figure:
    """Influence of every token (across) on every later one (down), and beside it their gains."""
    matrix, step = _pooled(xray.matrix(), MOST_CELLS)
    top = max(1.0, float(np.nanmax(np.abs(matrix), initial=0.0)))
    figure = style.new_figure(style.PAGE, 0.92 * style.PAGE)
    axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    extent = (0, len(matrix) * step, len(matrix) * step, 0)
    norm = SymLogNorm(LINEAR_NATS, vmin=-top, vmax=top, base=10)
    image = axes.imshow(
        matrix, norm=norm, extent=extent, cmap="PuOr_r", interpolation="nearest", aspect="auto"
    )
    axes.set(facecolor="0.93", xlim=(0, len(xray)), ylim=(len(xray), 0))
    axes.set_xlabel("token that is left out [place in the text]")
    axes.set_ylabel("token that is predicted [place in the text]")
    axes.grid(False)
    cell = ""
    if step > 1:
        cell = f"; strongest of {step} × {step}"
    bar: dict[str, Any] = {"location": "bottom", "aspect": 40, "shrink": 0.7, "pad": 0.02, "format": "{x:g}"}
    figure.colorbar(image, ax=[axes, beside], label=f"influence [nats]{cell}", **bar)
    tau = xray.about["tau_nats"]
    gains = np.nan_to_num(xray.gain_nats)
    beside.stairs(gains, range(len(xray) + 1), orientation="horizontal", fill=True, color="#0072B2", lw=0)
    beside.axvline(tau, color="0.2", linewidth=0.8, linestyle=":")
    beside.set_title(f"dotted: tau, {nats(tau)}", fontsize=style.SMALL)
    beside.set_xlabel("gain [nats]")
    beside.grid(False, axis="y")
    measured = f"N = {xray.about['n_long']}, M = {xray.about['n_short']}"
    selector = xray.about.get("selector", "leave-one-out")
    style.add_heading(figure, f"{xray.extent}; {measured}; {selector}; gray: not measured")
    _name_strongest(figure, axes, xray, 5)  # when all else stands, on which the size of the axes depends
    return figure


def _pooled(matrix: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """The value of largest magnitude in cells of so many tokens that there are at most ``most`` a row, and their side;
    NaN where nothing in a cell was measured."""
    step = math.ceil(len(matrix) / most)
    side = math.ceil(len(matrix) / step)
    padding = side * step - len(matrix)
    padded = np.pad(matrix, (0, padding), constant_values=np.nan)
    cells = padded.reshape(side, step, side, step).swapaxes(1, 2).reshape(side, side, step * step)
    largest = np.argmax(np.nan_to_num(np.abs(cells), nan=-1.0), axis=2)[..., None]
    return np.take_along_axis(cells, largest, axis=2)[..., 0], step


def _name_strongest(figure: Figure, axes: Axes, xray: Influences, count: int) -> None:
    """Number the ``count`` largest influences and name them, in the corner where nothing is measured."""
    strongest = xray.needed_most(count)
    lines = ["needed → predicted"]
    for number, (nat, i, t) in enumerate(strongest, start=1):
        lines.append(f"{number}  {_word(xray.labels[i])} → {_word(xray.labels[t])}: {nat:.1f} nats")
    corner: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    axes.text(0.98, 0.98, "\n".join(lines), fontsize=style.SMALL, parse_math=False, **corner)
    if strongest:
        places = np.array([(i + 0.5, t + 0.5) for _, i, t in strongest])
        across, down = places.T
        axes.plot(across, down, "o", markersize=_MARKER, markerfacecolor="none", color="0.1")
        _number(figure, axes, places)


def _number(figure: Figure, axes: Axes, positions: np.ndarray) -> None:
    """Write 1, 2, … beside markers at some places (n, 2) of the axes, with a line to those that stand apart."""
    figure.draw_without_rendering()  # only then the axes have their size
    to_points = 72 / figure.dpi
    points = axes.transData.transform(positions) * to_points
    frame = axes.bbox.get_points() * to_points
    line = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 0, "shrinkB": _MARKER / 2}
    halo = [patheffects.withStroke(linewidth=1.5, foreground="white")]
    offsets = label_offsets(points, frame)
    for number, (position, offset) in enumerate(zip(positions, offsets, strict=True), start=1):
        is_apart = np.hypot(*offset) > _RADII[0] + 1
        axes.annotate(
            str(number),
            position,
            offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=style.SMALL,
            arrowprops=line if is_apart else None,
            path_effects=halo,
        )


def label_offsets(points: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Where a label stands from each of its points, (n, 2), so that it hides no marker and no other label.

    One label after the other takes the nearest free place, first above on the right; nor do lines from points to labels
    run through labels. ``points``: (n, 2); ``frame``: (2, 2), lower left and upper right corner of what labels lie in.
    All in points as in 72 an inch.
    """
    radii, angles = np.meshgrid(_RADII, np.radians(_ANGLES), indexing="ij")
    candidates = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=-1).reshape(-1, 2)
    along = np.linspace(0.4, 1, 7)[:, None, None]  # places on a line, the last of which is its label
    half = np.array(_LABEL) / 2
    offsets = np.zeros_like(points)
    for number, point in enumerate(points):
        centers = point + candidates
        earlier = points[:number] + along * offsets[:number]
        is_outside = ((centers - half < frame[0]) | (centers + half > frame[1])).any(axis=1)
        on_marker = _any_within(centers, points, half + _MARKER / 2)
        on_label = _any_within(centers, earlier[-1], 2 * half)
        on_label |= _any_within(centers, earlier.reshape(-1, 2), half)
        for place in point + along * candidates:
            on_label |= _any_within(place, earlier[-1], half)
        cost = 4 * on_label + 2 * is_outside + on_marker
        offsets[number] = candidates[np.argmin(cost)]  # the first of the best
    return offsets


def _any_within(centers: np.ndarray, others: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Whether any of ``others`` (m, 2) is nearer than ``reach`` (2,) across and upwards, for all ``centers``, (n,)."""
    is_within = (np.abs(centers[:, None] - others) < reach).all(axis=2)
    return is_within.any(axis=1)


def _word(label: str) -> str:
    """A token in a few letters that the font has, others by their code points."""
    text = label.strip() or label.replace(" ", "␣")
    letters = [_MARKS.get(letter) or _drawable(letter) for letter in text]
    if sum(map(len, letters)) > _LETTERS:
        shown = ""
        for letter in letters:
            if len(shown) + len(letter) >= _LETTERS:
                break
            shown += letter
        return f"“{shown}…”"
    return f"“{''.join(letters)}”"


def _drawable(letter: str) -> str:
    """The letter where the font has it, else its code point."""
    font = findfont(FontProperties())
    if letter.isprintable() and ord(letter) in _letters_of(font):
        return letter
    return code_point(letter)


@cache
def _letters_of(font: str) -> frozenset[int]:
    """Code points of all characters that a font file has."""
    return frozenset(get_font(font).get_charmap())
