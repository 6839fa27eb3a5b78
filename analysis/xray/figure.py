"""The influence map of a text as a heat map."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from analysis.figures import style
from analysis.stats.measured import nats
from analysis.xray.map import InfluenceMap

MOST_CELLS = 360
"""Cells in a row; with more tokens, a cell stands for several."""
LINEAR_NATS = 0.1
"""Colours are linear up to here, logarithmic beyond."""
_LETTERS = 14


@matplotlib.rc_context(style.STYLE)
def map_figure(xray: InfluenceMap) -> Figure:
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
    cell = "" if step == 1 else f"; strongest of {step} × {step}"
    bar: dict[str, Any] = {"location": "bottom", "aspect": 40, "shrink": 0.7, "pad": 0.02, "format": "{x:g}"}
    figure.colorbar(image, ax=[axes, beside], label=f"influence [nats]{cell}", **bar)
    _name_strongest(axes, xray, 5)
    tau, gains = xray.about["tau_nats"], np.nan_to_num(xray.gain_nats)
    beside.stairs(gains, range(len(xray) + 1), orientation="horizontal", fill=True, color="#0072B2", lw=0)
    beside.axvline(tau, color="0.2", linewidth=0.8, linestyle=":")
    beside.set_title(f"dotted: tau, {nats(tau)}", fontsize=style.SMALL)
    beside.set_xlabel("gain [nats]")
    beside.grid(False, axis="y")
    measured = f"N = {xray.about['n_long']}, M = {xray.about['n_short']}"
    selector = xray.about.get("selector", "leave-one-out")
    style.add_heading(figure, f"{len(xray):,} tokens; {measured}; {selector}; gray: not measured")
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


def _name_strongest(axes: Axes, xray: InfluenceMap, count: int) -> None:
    """Number the ``count`` largest influences and name them, in the corner where nothing is measured."""
    lines, pieces = ["needed → predicted"], xray.tokens["piece"]
    for number, (nat, i, t) in enumerate(xray.needed_most(count), start=1):
        place = (i + 0.5, t + 0.5)
        axes.plot(*place, "o", markersize=7, markerfacecolor="none", color="0.1")
        axes.annotate(str(number), place, (5, 3), textcoords="offset points", fontsize=style.SMALL)
        lines.append(f"{number}  {_word(pieces[i])} → {_word(pieces[t])}: {nat:.1f} nats")
    corner: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    axes.text(0.98, 0.98, "\n".join(lines), fontsize=style.SMALL, parse_math=False, **corner)


def _word(piece: str) -> str:
    """A token in a few letters that the font has."""
    word = piece.strip() or piece.replace("\n", "\\n") or "?"
    shown = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in word)
    return f"“{shown if len(shown) <= _LETTERS else shown[: _LETTERS - 1] + '…'}”"
