"""Figure 2 (docs/method.md, 2.5), of one Result or of several beside each other.

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) with a frame
of it, loss against position. Of one Result a curve is a selector; of several it is a Result, under its name, by one
selector for all (where they share none, the legend names each). The other selectors of one have a figure of their own,
`selectors_figure`; the ways in which tokens were given back (2.2a) stand side by side in `levels_figure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    nats,
)
from olmo_sparsity.util.errors import UserError

POLICIES = ("h2o", "snapkv")
"""Selectors that keep what an eviction policy of a KV cache keeps."""


Curves = dict[str, tuple[str, str]]
"""What a colour stands for: by label, the name of a Result and of a selector of it."""


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
    figure, axes = _new_panels(3 if length is None else 4, width)
    panels.plot_loss(axes[0])
    panels.plot_net_recovery(axes[1])
    panels.plot_gain_bins(axes[2], k)
    models = [] if length is None else plot_length(axes[3], length)
    style.add_legend(figure, [*panels.handles(), *models])
    if heading:
        style.add_heading(figure, describe(results))
    if path is not None:
        style.save_figure(figure, path)
    return figure


def selectors_figure(
    result: Result, *, selectors: Sequence[str] | None = None, **options: Any
) -> Figure | None:
    """`figure2` of the selectors that it leaves out, beside the default one; None without any."""
    names = numbers.Measured(result).names
    main = [default_selector(names), *_main_selectors(names, selectors)]
    others = [name for name in names if name not in main]
    return figure2({"": result}, selectors=[main[0], *others], **options) if others else None


@matplotlib.rc_context(style.STYLE)
def levels_figure(
    result: Result, *, selectors: Sequence[str] | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure | None:
    """Recovery against k, a panel for each way in which tokens were given back; None where there is one way only."""
    if len(ways := levels(result)) < 2:
        return None
    recovery = numbers.recovery(result, **bootstrap).assign(result="")
    curves, styles = _curves_of_one("", list(recovery["selector"].unique()), selectors)
    figure, panels = style.small_multiples(style.in_rows(len(ways), style.columns_in(width, 2.0)), width)
    for axes, level in zip(panels, ways, strict=True):
        at_level = recovery[(recovery[list(level)] == list(level.values())).all(axis=1)]
        for context in (PLACEBO, TRUE):
            rows = _rows(at_level, curves, context)
            style.draw_curves(axes, rows, styles, placebo=context == PLACEBO)
        style.recovery_axis(axes, "y")
        style.k_axis(axes, result.ks)
        axes.set_title(f"as {level_in_words(**level)}", loc="left")
    style.outer_labels(panels, "k [far tokens given back]", f"recovery\n{style.OF_GAIN}")
    looks = {label: styles[label] for label in curves}
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


def _curves_of_one(
    result: str, measured: Sequence[str], wanted: Sequence[str] | None
) -> tuple[Curves, dict[str, style.Style]]:
    """The main selectors of the one Result that is drawn, and the look of every one that was measured, by label."""
    styles = {style.selector_label(name): look for name, look in style.selector_styles(measured).items()}
    main = _main_selectors(measured, wanted)
    return {style.selector_label(name): (result, name) for name in main}, styles


def _curves_of_several(
    measured: Mapping[str, Sequence[str]], wanted: Sequence[str] | None
) -> tuple[Curves, dict[str, style.Style]]:
    """Of each Result the ``wanted`` selectors, or the one that they share (else its default), and their looks."""
    usual = (DEFAULT_SELECTOR, SIGNED_SELECTOR)
    shared = [name for name in usual if all(name in names for names in measured.values())][:1]
    chosen = [
        (result, name)
        for result, names in measured.items()
        for name in (_main_selectors(names, wanted) if wanted else shared or [default_selector(names)])
    ]
    alike = len({name for _, name in chosen}) == 1
    curves = {result if alike else f"{result}, {name}": (result, name) for result, name in chosen}
    return curves, style.model_styles({label: style.encoding_of(of[0]) for label, of in curves.items()})


def _new_panels(count: int, width: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, up to two in a row; the last one fills its row."""
    letters = "abcd"[:count]
    columns = min(style.columns_in(width, 3.2), 2)
    rows = [letters[first : first + columns] for first in range(0, count, columns)]
    figure = style.new_figure(width, 2.6 * len(rows) + 0.9)
    panels = figure.subplot_mosaic(";".join(row.ljust(columns, letters[-1]) for row in rows))
    return figure, [panels[letter] for letter in letters]


class _Panels:
    """The frames, curves and styles of one figure, and what draws each panel."""

    def __init__(
        self, results: Mapping[str, Result], selectors: Sequence[str] | None, bootstrap: Mapping[str, int]
    ):
        self.results, self.bootstrap = results, bootstrap
        at_main_level = {name: numbers.Measured(result).result for name, result in results.items()}
        self.recovery = _together(numbers.recovery, at_main_level, **bootstrap)
        self.losses = _together(numbers.losses, at_main_level, **bootstrap)
        self.ks = sorted({k for result in results.values() for k in result.ks})
        by_result = self.recovery.groupby("result", sort=False)["selector"]
        measured = {str(name): list(names.unique()) for name, names in by_result}
        self.alone = len(results) == 1
        if self.alone:
            [(result, names)] = measured.items()
            self.curves, self.styles = _curves_of_one(result, names, selectors)
            self.in_bins: Curves = {name: (result, name) for name in style.shown_selectors(names)}
        else:
            self.curves, self.styles = _curves_of_several(measured, selectors)
            self.in_bins = self.curves

    def handles(self) -> list[Line2D]:
        """For the legend: what each colour stands for, and the placebo where there is one."""
        has_placebo = any(PLACEBO in result.far_contexts for result in self.results.values())
        looks = {label: self.styles[label] for label in {**self.curves, **self.in_bins}}
        return style.selector_handles(looks, placebo=has_placebo)

    def plot_loss(self, axes: Axes) -> None:
        """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
        for context in (PLACEBO, TRUE):
            rows = _rows(self.losses, self.curves, context)
            style.draw_curves(axes, rows, self.styles, placebo=context == PLACEBO)
        looks = {result: self.styles[label] for label, (result, _) in self.curves.items()}
        for number, (name, result) in enumerate(self.results.items()):
            shares = numbers.shares(result, **self.bootstrap).set_index("name")
            colour = "black" if self.alone else looks[name][0]
            for which, place in (("short", 1.03), ("long", 1.05)):  # intervals may overlap
                text = f"$L_{{{which}}}$" if number == len(self.results) - 1 else ""
                row = shares.loc[[f"loss_{which}_over_tau_nats"]]
                _plot_reference(axes, row, text, colour, place + 0.04 * number)
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

    def plot_gain_bins(self, axes: Axes, k: int | None) -> None:
        """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

        A point without a bar comes from too few documents for an interval.
        """
        frame = _together(numbers.gain_bins, self.results, k=k, **self.bootstrap)
        place = frame.groupby(["from_nats", "to_nats"]).ngroup()
        bins = frame.groupby(place)[["from_nats", "to_nats", "n_targets"]].first().to_numpy()
        shifts = iter(style.side_by_side(2 * len(self.in_bins), min(0.13, 0.4 / len(self.in_bins))))
        for label, of in self.in_bins.items():
            for context in (TRUE, PLACEBO):
                shift = next(shifts)
                for rows in _rows(frame, {label: of}, context).values():
                    places, look = place[rows.index] + shift, self.styles[label]
                    style.draw_points(axes, places, rows, label, look, placebo=context == PLACEBO)
        labels = [f"> {low:g}" if math.isinf(high) else f"{low:g}–{high:g}" for low, high, _ in bins]
        if self.alone:
            labels = [f"{text}\nn={n:,.0f}" for text, (_, _, n) in zip(labels, bins, strict=True)]
        axes.set_xticks(range(len(bins)), labels)
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(r"$L_{short} - L_{long}$ of the target [nats]")
        style.recovery_axis(axes, "y")
        ks = sorted({choose_k(result.ks, k) for result in self.results.values()})
        selectors = dict.fromkeys(selector for _, selector in self.in_bins.values())
        title = f"(c) Recovery by size of the gain, k = {', '.join(map(str, ks))}\n{', '.join(selectors)}"
        axes.set_title(title, loc="left")


def _together(
    frame_of: Callable[..., pd.DataFrame], results: Mapping[str, Result], **options: Any
) -> pd.DataFrame:
    """Frames of all results as one, with the column ``result``."""
    frames = [frame_of(result, **options).assign(result=name) for name, result in results.items()]
    return pd.concat(frames, ignore_index=True)


def _rows(frame: pd.DataFrame, curves: Curves, far_context: str) -> dict[str, pd.DataFrame]:
    """The rows of each curve in one far context, by label; not of what has none."""
    groups = dict(iter(frame.groupby(["result", "selector", "far_context"], sort=False)))
    keys = {label: (*of, far_context) for label, of in curves.items()}
    return {label: groups[key] for label, key in keys.items() if key in groups}


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
        f"{name}: {_sizes(result)}; {len(result.over):,} of {len(result.targets):,} over "
        f"$\\tau$ = {nats(result.settings['tau_nats'])}"
        for name, result in results.items()
    ]
    return "; ".join([*parts, "bars: 95 %"])


def _sizes(result: Result) -> str:
    """N, M, and what is not as usual: B, and the prefix (docs/method.md, 2.1)."""
    settings = result.settings
    size, prefix = settings.get("targets_per_block", 1), settings.get("prefix")
    blocks = f", B = {size}" if size > 1 else ""
    before = f", prefix {' '.join(map(str, prefix))}" if prefix else ""
    return f"N = {settings['n_long']}, M = {settings['n_short']}{blocks}{before}"


def _describe_one(result: Result) -> str:
    settings, counts = result.settings, numbers.counts(result)
    share = numbers.shares(result, resamples=2).set_index("name")["value"]
    trainings = f"{counts['trainings']} trainings × " if counts["trainings"] > 1 else ""
    said = [
        f"{_sizes(result)}; {trainings}{counts['targets'] // counts['trainings']:,} targets of {counts['documents']:,} "
        rf"documents, {counts['targets_over_tau']:,} with $L_{{short}}-L_{{long}}>\tau$ = {nats(settings['tau_nats'])} "
        rf"({100 * share['share_over_tau']:.1f} %; {100 * share['share_below_minus_tau']:.1f} % below $-\tau$)"
    ]
    if np.isfinite(held := share["share_of_gain"]):
        said.append(f"{100 * held:.0f} % of the net gain{', as others lose' if held > 1 else ''}")
    if counts["targets_measured"] < counts["targets_over_tau"]:
        said.append(f"{counts['targets_measured']:,} measured so far")
    if result.crossfit:
        untrained = settings["selected_by"].get("untrained")
        said.append(f"cross-fit: chosen {'with untrained weights' if untrained else 'by another model'}")
    return "; ".join([*said, f"bars: 95 %, {by_clusters(counts, '_over_tau')}"])
