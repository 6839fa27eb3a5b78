"""Figure 2 (docs/method.md, 2.5), of one Result or of several beside each other.

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) with a frame
of it, loss against position. Of one Result a curve is a selector; of several it is a Result, under its name, by one
selector for all (where they share none, the legend names each). The other selectors of one have a figure of their own,
`selectors_figure`; the ways in which tokens were given back (2.2a) stand side by side in `levels_figure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import style
from analysis.figures.length import plot_length
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import by_clusters
from analysis.stats.measured import (
    CONTROLS,
    DEFAULT_SELECTOR,
    NET,
    PLACEBO,
    SIGNED_SELECTOR,
    TRUE,
    choose_k,
    default_selector,
    level_in_words,
    levels,
    main_level,
    nats,
)
from olmo_sparsity.util.errors import UserError

POLICIES = ("h2o", "snapkv")
"""Selectors that keep what an eviction policy of a KV cache keeps."""


@dataclass(frozen=True)
class _Curve:
    """What one colour stands for: a selector of a Result."""

    label: str
    result: str
    selector: str


@matplotlib.rc_context(style.STYLE)
def figure2(
    results: Mapping[str, Result],
    path: str | Path | None = None,
    *,
    length: pd.DataFrame | None = None,
    selectors: Sequence[str] | None = None,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure:
    """Panels (a) to (c), and with ``length`` panel (d).

    Args:
        results: by the names that stand in the legend; the name of one alone is not shown.
        path: where to write it (`style.save_figure`); None: nowhere.
        length: loss by position, see `analysis.figures.length.plot_length`.
        selectors: of panels (a) and (b); by default the default selector, of one Result also its signed form, attention
            and the controls.
        k: of panel (c); by default 4 or the closest that was measured.
        width: in inches.
        heading: whether a line above the panels says what was measured.
        bootstrap: ``resamples`` and ``seed`` of the intervals.

    Raises `UserError` where recovery is undefined, and for a selector that was not measured.
    """
    panels = _Panels(results, selectors, bootstrap)
    draws: list[Callable[[Axes], None]] = [panels.plot_loss, panels.plot_net_recovery]
    draws.append(partial(panels.plot_gain_bins, k=k))
    legend_height = 0.0  # of panel (d) in inches
    if length is not None:
        draws.append(partial(plot_length, frame=length))
        legend_height = 0.16 * length["model"].nunique()
    figure = _in_panels(draws, width, legend_height)
    style.add_legend(figure, panels.handles([*panels.curves, *panels.in_bins]))
    if heading:
        style.add_heading(figure, describe(results))
    figure.draw_without_rendering()  # panel (d) has a legend of its own: the layout takes two passes
    if path is not None:
        style.save_figure(figure, path)
    return figure


@matplotlib.rc_context(style.STYLE)
def selectors_figure(
    result: Result, *, selectors: Sequence[str] | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure | None:
    """Panels (a) and (b) of the selectors that `figure2` leaves out, beside the default one; None without any."""
    names = numbers.Measured(result).names
    main = [default_selector(names), *_main_selectors(names, selectors)]
    others = [name for name in names if name not in main]
    if not others:
        return None
    panels = _Panels({"": result}, [main[0], *others], bootstrap)
    figure = _in_panels([panels.plot_loss, panels.plot_net_recovery], width)
    style.add_legend(figure, panels.handles(panels.curves))
    return figure


@matplotlib.rc_context(style.STYLE)
def levels_figure(
    result: Result, *, selectors: Sequence[str] | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure | None:
    """Recovery against k, a panel for each way in which tokens were given back; None where there is one way only."""
    if len(ways := levels(result)) < 2:
        return None
    recovery = numbers.recovery(result, **bootstrap)
    names = list(recovery["selector"].unique())
    styles = {style.selector_label(name): look for name, look in style.selector_styles(names).items()}
    curves = [_Curve(style.selector_label(name), "", name) for name in _main_selectors(names, selectors)]
    figure, panels = style.small_multiples(style.in_rows(len(ways), style.columns_in(width, 2.0)), width)
    for axes, level in zip(panels, ways, strict=True):
        frames = {"": _at(level, recovery)}
        style.draw_curves(axes, _rows(frames, curves, PLACEBO), styles, placebo=True)
        style.draw_curves(axes, _rows(frames, curves, TRUE), styles)
        style.recovery_axis(axes, "y")
        style.k_axis(axes, result.ks)
        axes.set_title(f"as {level_in_words(**level)}", loc="left")
    style.outer_labels(panels, "k [far tokens given back]", f"recovery\n{style.OF_GAIN}")
    looks = {curve.label: styles[curve.label] for curve in curves}
    style.add_legend(figure, style.selector_handles(looks, placebo=PLACEBO in result.far_contexts))
    return figure


def _main_selectors(measured: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """``wanted``, or of what was measured the default selector, its signed form, attention and the controls.

    Raises `UserError` for a selector that was not measured.
    """
    if unknown := [name for name in wanted or () if name not in measured]:
        raise UserError(f"{', '.join(unknown)} was not measured; choose from {', '.join(measured)}")
    usual = (default_selector(measured), SIGNED_SELECTOR, "attention", *POLICIES, *CONTROLS)
    return list(wanted or [name for name in dict.fromkeys(usual) if name in measured])


def _one_selector(measured: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The target-blind selector for every Result, else its signed form; where some have neither, each its default."""
    usual = (DEFAULT_SELECTOR, SIGNED_SELECTOR)
    shared = [name for name in usual if all(name in names for names in measured.values())]
    return {result: (shared or [default_selector(names)])[:1] for result, names in measured.items()}


def _in_panels(draws: Sequence[Callable[[Axes], None]], width: float, legend_height: float = 0.0) -> Figure:
    """A figure with a panel for each of ``draws``, up to two in a row; the last one fills its row."""
    letters = "abcd"[: len(draws)]
    columns = min(style.columns_in(width, 3.2), len(draws))
    rows = [letters[first : first + columns] for first in range(0, len(letters), columns)]
    figure = style.new_figure(width, 2.6 * len(rows) + 0.9 + legend_height)
    panels = figure.subplot_mosaic(";".join(row.ljust(columns, letters[-1]) for row in rows))
    for letter, draw in zip(letters, draws, strict=True):
        draw(panels[letter])
    return figure


class _Panels:
    """The frames, curves and styles of one figure, and what draws each panel."""

    def __init__(
        self, results: Mapping[str, Result], selectors: Sequence[str] | None, bootstrap: Mapping[str, int]
    ):
        self.results, self.bootstrap = results, bootstrap
        self.recovery, self.losses = (
            {name: _at(main_level(one), frame(one, **bootstrap)) for name, one in results.items()}
            for frame in (numbers.recovery, numbers.losses)
        )
        self.ks = sorted({k for result in results.values() for k in result.ks})
        measured = {name: list(frame["selector"].unique()) for name, frame in self.recovery.items()}
        self.alone = len(results) == 1
        if self.alone:
            [(result, names)] = measured.items()
            labels = {name: style.selector_label(name) for name in names}
            self.styles = {labels[name]: look for name, look in style.selector_styles(names).items()}
            main, in_bins = _main_selectors(names, selectors), style.shown_selectors(names)
            self.curves = [_Curve(labels[name], result, name) for name in main]
            self.in_bins = [_Curve(labels[name], result, name) for name in in_bins]
            return
        chosen = _one_selector(measured)
        if selectors is not None:
            chosen = {result: _main_selectors(names, selectors) for result, names in measured.items()}
        alike = len({name for names in chosen.values() for name in names}) == 1
        self.curves = self.in_bins = [
            _Curve(result if alike else f"{result}, {name}", result, name)
            for result, names in chosen.items()
            for name in names
        ]
        encodings = {curve.label: style.encoding_of(curve.result) for curve in self.curves}
        self.styles = style.model_styles(encodings)

    def handles(self, curves: Sequence[_Curve]) -> list[Line2D]:
        """For the legend: what each colour stands for, and the placebo where there is one."""
        has_placebo = any(PLACEBO in result.far_contexts for result in self.results.values())
        looks = {curve.label: self.styles[curve.label] for curve in curves}
        return style.selector_handles(looks, placebo=has_placebo)

    def plot_loss(self, axes: Axes) -> None:
        """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
        style.draw_curves(axes, _rows(self.losses, self.curves, PLACEBO), self.styles, placebo=True)
        style.draw_curves(axes, _rows(self.losses, self.curves, TRUE), self.styles)
        for number, (name, result) in enumerate(self.results.items()):
            rows = numbers.shares(result, **self.bootstrap).set_index("name")
            short, long = (rows.loc[[f"loss_{which}_over_tau_nats"]] for which in ("short", "long"))
            look = next(self.styles[curve.label] for curve in self.curves if curve.result == name)
            colour = "black" if self.alone else look[0]
            # where both intervals overlap, and of every further result, they stand beside each other
            place = 1.03 + 0.025 * number
            beside = 0.025 * bool(long["high"].iloc[0] >= short["low"].iloc[0])
            last = number == len(self.results) - 1
            _plot_reference(axes, short, r"$L_{short}$" if last else "", colour, place)
            _plot_reference(axes, long, r"$L_{long}$" if last else "", colour, place + beside)
        style.k_axis(axes, self.ks)
        axes.margins(y=0.08)
        axes.set_ylabel("mean loss [nats per token]")
        axes.set_title("(a) Loss with k influential far tokens", loc="left")

    def plot_net_recovery(self, axes: Axes) -> None:
        """Panel (b): net recovery (docs/method.md, 2.3) against k; recovery where there is no placebo."""
        net = _rows(self.recovery, self.curves, NET)
        style.draw_curves(axes, net or _rows(self.recovery, self.curves, TRUE), self.styles)
        axes.axhline(0.0, **style.REFERENCE)
        style.k_axis(axes, self.ks)
        axes.set_ylabel(f"{'net ' if net else ''}recovery\n{style.OF_GAIN}")
        axes.set_title("(b) Net recovery (recovery − placebo$^+$)" if net else "(b) Recovery", loc="left")

    def plot_gain_bins(self, axes: Axes, k: int | None = None) -> None:
        """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

        A point without a bar comes from too few documents for an interval.
        """
        frames = {name: numbers.gain_bins(one, k, **self.bootstrap) for name, one in self.results.items()}
        frames = {name: frame.set_index(["from_nats", "to_nats"]) for name, frame in frames.items()}
        bins = sorted(set().union(*(frame.index for frame in frames.values())))
        shifts = iter(style.side_by_side(2 * len(self.in_bins), min(0.13, 0.4 / len(self.in_bins))))
        for curve in self.in_bins:
            for context, label in ((TRUE, curve.label), (PLACEBO, f"{curve.label} placebo")):
                shift = next(shifts)
                for rows in _rows(frames, [curve], context).values():
                    places = [bins.index(one) + shift for one in rows.index]
                    hollow = context == PLACEBO
                    style.draw_points(axes, places, rows, label, self.styles[curve.label], hollow=hollow)
        labels = [f"> {low:g}" if math.isinf(high) else f"{low:g}–{high:g}" for low, high in bins]
        if self.alone:
            [frame] = frames.values()
            counts = frame["n_targets"].groupby(level=[0, 1]).first()
            labels = [f"{text}\nn={counts[one]:,}" for text, one in zip(labels, bins, strict=True)]
        axes.set_xticks(range(len(bins)), labels)
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(r"$L_{short} - L_{long}$ of the target [nats]")
        style.recovery_axis(axes, "y")
        ks = sorted({choose_k(result.ks, k) for result in self.results.values()})
        selectors = dict.fromkeys(curve.selector for curve in self.in_bins)
        title = f"(c) Recovery by size of the gain, k = {', '.join(map(str, ks))}\n{', '.join(selectors)}"
        axes.set_title(title, loc="left")


def _rows(
    frames: Mapping[str, pd.DataFrame], curves: Sequence[_Curve], far_context: str
) -> dict[str, pd.DataFrame]:
    """The rows of each curve in one far context, by label; not of what has none."""
    rows = {}
    for curve in curves:
        frame = frames[curve.result]
        of_curve = frame[(frame["selector"] == curve.selector) & (frame["far_context"] == far_context)]
        if len(of_curve):
            rows[curve.label] = of_curve
    return rows


def _at(level: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at one level, in which tokens were given back in one way."""
    return frame[(frame[list(level)] == list(level.values())).all(axis=1)]


def _plot_reference(axes: Axes, row: pd.DataFrame, text: str, colour: Any, place: float) -> None:
    """A dotted line across the panel; its interval, at ``place``, and name are to the right of the curves."""
    [value] = row["value"]
    axes.axhline(value, color=colour, linewidth=1.0, linestyle=":", label=row.index[0], zorder=2.0)
    right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    axes.errorbar([place], [value], style.bar_lengths(row), color=colour, elinewidth=1, capsize=2, **right)
    axes.text(place + 0.03, value, text, va="center", **right)


def describe(results: Mapping[str, Result]) -> str:
    """What was measured, for headings: context lengths, targets, documents, tau; of several Results the main counts."""
    if len(results) == 1:
        return _describe_one(*results.values())
    parts = [
        f"{name}: {_sizes(result)}; {numbers.counts(result)['targets_over_tau']:,} of {len(result.targets):,} over "
        f"$\\tau$ = {nats(result.settings['tau_nats'])}"
        for name, result in results.items()
    ]
    return "; ".join([*parts, "bars: 95 %"])


def _describe_one(result: Result) -> str:
    settings, counts = result.settings, numbers.counts(result)
    share = numbers.shares(result, resamples=2).set_index("name")["value"]
    targets = f"{counts['targets'] // counts['trainings']:,} targets of {counts['documents']:,} documents"
    if counts["trainings"] > 1:
        targets = f"{counts['trainings']} trainings × {targets}"
    tails = rf"{100 * share['share_below_minus_tau']:.1f} % below $-\tau$"
    held = share["share_of_gain"]
    if np.isfinite(held):
        tails += f"; {100 * held:.0f} % of the net gain{', as others lose' if held > 1 else ''}"
    missing = counts["targets_over_tau"] - counts["targets_measured"]
    unfinished = f" ({counts['targets_measured']:,} measured so far)" if missing else ""
    chosen = "; cross-fit: chosen by one model, measured by another" if result.crossfit else ""
    if result.crossfit and settings["selected_by"].get("untrained"):
        chosen = "; sanity check: chosen with untrained weights"
    return (
        f"{_sizes(result)}; {targets}, {counts['targets_over_tau']:,} with "
        rf"$L_{{short}} - L_{{long}} > \tau$ = {nats(settings['tau_nats'])} "
        f"({100 * share['share_over_tau']:.1f} %; {tails}){unfinished}{chosen}; "
        f"bars: 95 %, {by_clusters(counts, '_over_tau')}"
    )


def _sizes(result: Result) -> str:
    """N, M, and what is not as usual: B, and the prefix (docs/method.md, 2.1)."""
    settings = result.settings
    size, prefix = settings.get("targets_per_block", 1), settings.get("prefix")
    blocks = f", B = {size}" if size > 1 else ""
    before = f", prefix {' '.join(map(str, prefix))}" if prefix else ""
    return f"N = {settings['n_long']}, M = {settings['n_short']}{blocks}{before}"
