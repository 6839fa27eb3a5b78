"""The influence map of a text as a heat map."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.figures import style
from analysis.stats.measured import nats
from analysis.xray.map import InfluenceMap

MOST_CELLS = 360
"""Cells in a row at the width of a page; with more tokens, a cell stands for several."""
LINEAR_NATS = 0.1
"""Colours are linear up to here, logarithmic beyond."""
_WITH_GAINS = 5.0
"""Inches from which on there is room for the gains."""
_LETTERS = 14


def map_figure(xray: InfluenceMap, *, width: float = style.PAGE) -> Figure:
    """Influence of every token (across) on every later one (down), and beside it, where there is room, their gains."""
    narrow = width < _WITH_GAINS
    matrix, step = _pooled(xray.matrix(), int(MOST_CELLS * width / style.PAGE))
    top = max(1.0, float(np.nanmax(np.abs(matrix), initial=0.0)))
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, (1.2 if narrow else 0.92) * width)
        ratios = (1,) if narrow else (5, 1)
        panels = figure.subplots(1, len(ratios), sharey=True, width_ratios=ratios, squeeze=False)[0]
        axes = panels[0]
        image = axes.imshow(
            matrix,
            cmap="PuOr_r",
            norm=SymLogNorm(LINEAR_NATS, vmin=-top, vmax=top, base=10),
            extent=(0, len(matrix) * step, len(matrix) * step, 0),
            interpolation="nearest",
            aspect="auto",
        )
        axes.set(
            facecolor="0.93",
            xlim=(0, len(xray)),
            ylim=(len(xray), 0),
            xlabel="token that is left out [place in the text]",
            ylabel="token that is predicted [place in the text]",
        )
        axes.grid(False)
        bar = figure.colorbar(image, ax=list(panels), location="bottom", aspect=40, shrink=0.7, pad=0.02)
        bar.set_ticks(_ticks(top))
        bar.ax.xaxis.set_major_formatter(FuncFormatter(_signed))
        cell = "" if step == 1 else f"; strongest of {step} × {step}"
        bar.set_label(f"influence [nats]{cell}")
        _name_strongest(axes, xray, 3 if narrow else 5)
        if not narrow:
            _draw_gains(panels[1], xray)
        measured = f"N = {xray.about['n_long']}, M = {xray.about['n_short']}"
        selector = xray.about.get("selector", "leave-one-out")
        style.add_heading(figure, f"{len(xray):,} tokens; {measured}; {selector}; gray: not measured")
    return figure


def _signed(value: float, place: int) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def _pooled(matrix: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """The value of largest magnitude in cells of so many tokens that there are at most ``most`` a row, and their side;
    NaN where nothing in a cell was measured."""
    step = math.ceil(len(matrix) / most)
    side = math.ceil(len(matrix) / step)
    padded = np.full((side * step, side * step), np.nan, dtype=matrix.dtype)
    padded[: len(matrix), : len(matrix)] = matrix
    cells = padded.reshape(side, step, side, step).swapaxes(1, 2).reshape(side, side, step * step)
    largest = np.argmax(np.nan_to_num(np.abs(cells), nan=-1.0), axis=2)[..., None]
    return np.take_along_axis(cells, largest, axis=2)[..., 0], step


def _draw_gains(axes: Axes, xray: InfluenceMap) -> None:
    """A line for the gain of each token, and one at tau."""
    gains = np.nan_to_num(xray.gain_nats)
    places = np.repeat(np.arange(len(xray) + 1), 2)[1:-1]
    axes.fill_betweenx(places, np.repeat(gains, 2), color="#0072B2", linewidth=0)
    tau = xray.about["tau_nats"]
    axes.axvline(tau, color="0.2", linewidth=0.8, linestyle=":")
    axes.set_title(f"dotted: tau, {nats(tau)}", fontsize=style.SMALL, loc="left")
    axes.set_xlabel("gain [nats]")
    axes.grid(False, axis="y")


def _ticks(top: float) -> list[float]:
    """0, and 0.1, 1, 10 … on both sides."""
    powers = [LINEAR_NATS * 10**power for power in range(1 + int(math.log10(top / LINEAR_NATS)))]
    return [*(-power for power in reversed(powers)), 0.0, *powers]


def _name_strongest(axes: Axes, xray: InfluenceMap, count: int) -> None:
    """Number the ``count`` largest influences and name them, in the corner where nothing is measured."""
    lines, pieces = ["needed → predicted"], xray.tokens["piece"]
    for number, (nat, i, t) in enumerate(xray.needed_most(count), start=1):
        axes.plot(
            i + 0.5, t + 0.5, marker="o", markersize=7, markerfacecolor="none", color="0.1", linewidth=0
        )
        axes.annotate(
            str(number), (i + 0.5, t + 0.5), xytext=(5, 3), textcoords="offset points", fontsize=style.SMALL
        )
        words = (_word(pieces[i]), _word(pieces[t]))
        lines.append(f"{number}  {words[0]} → {words[1]}: {nat:.1f} nats")
    axes.text(
        0.98,
        0.98,
        "\n".join(lines),
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=style.SMALL,
        parse_math=False,
    )


def _word(piece: str) -> str:
    """A token in a few letters that the font has."""
    word = piece.strip() or piece.replace("\n", "\\n") or "?"
    shown = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in word)
    return f"“{shown if len(shown) <= _LETTERS else shown[: _LETTERS - 1] + '…'}”"
