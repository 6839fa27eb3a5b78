"""Figure 2 (docs/method.md, 2.5), of one Result or of several beside each other.

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) with a frame
of it, loss against position. Of one Result a curve is a selector; of several it is a Result, under its name, by one
selector for all (where they share none, the legend names each). The other selectors of one have a figure of their own,
`selectors_figure`; the ways in which tokens were kept (2.2a) stand side by side in `kept_as_figure`. Where no
recovery is defined, as with no target over tau, the mean losses of all targets stand in place of (a) to (c).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, TransformedBbox

from analysis.contexts import PLACEBO, TRUE
from analysis.figures import style
from analysis.figures.length import plot_length
from analysis.measurement import Measurement
from analysis.policies.policy import POLICIES
from analysis.stats import numbers
from analysis.stats.bootstrap import counted, interval_caption
from analysis.stats.recovery import (
    CONTROLS,
    DEFAULT_SELECTOR,
    KEPT_AS_COLUMNS,
    NET,
    SIGNED_SELECTOR,
    choose_k,
    default_selector,
    largest_gain,
    nats,
    of_one_way,
    refuse_without_gain,
    way_in_words,
    why_no_recovery,
)
from olmo_sparsity.util.errors import UserError

TITLE_WIDTH = 27
"""Characters in a line of the title of a panel that stands beside two others."""
Curves = dict[str, tuple[str, str]]
"""What a colour stands for: by label, the name of a Result and of a selector of it."""


@matplotlib.rc_context(style.STYLE)
def figure2(
    results: Mapping[str, Measurement],
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

    Where no recovery is defined, such as with no target over tau, the one panel of `_plot_losses_of_all` stands for (a)
    to (c). Of several results those without recovery are named in the heading alone, unless all are.

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

    Raises `UserError` for a selector that was not measured, and where no target was.
    """
    with_recovery = {name: result for name, result in results.items() if not why_no_recovery(result)}
    if with_recovery:
        is_comparison = len(results) > 1
        figure = _with_recovery(with_recovery, is_comparison, length, selectors, k, width, **bootstrap)
    else:
        figure = _without_recovery(results, length, width, **bootstrap)
    if heading:
        style.add_heading(figure, describe(results))
    if path is not None:
        style.save_figure(figure, path)
    return figure


def _without_recovery(
    results: Mapping[str, Measurement], length: pd.DataFrame | None, width: float, **bootstrap: int
) -> Figure:
    """The mean losses of all targets, and with ``length`` the loss by position."""
    for result in results.values():
        if len(result.targets) == 0:
            refuse_without_gain(result)
    count = 1
    if length is not None:
        count = 2
    figure, panels = style.large_panels(count, width, 2.6)
    looks = style.model_styles(results)
    if len(results) == 1:
        looks = {name: look | {"color": "black"} for name, look in looks.items()}
    _plot_losses_of_all(panels[0], results, looks, **bootstrap)
    legend = {name: look for name, look in looks.items() if name}
    if length is not None:
        legend |= plot_length(panels[1], length, "b")
    if legend:
        style.add_legend(figure, legend)
    return figure


def _plot_losses_of_all(
    axes: Axes, results: Mapping[str, Measurement], looks: Mapping[str, style.Look], **bootstrap: int
) -> None:
    """Mean L_short and L_long of all targets, whether they are over tau or not."""
    contexts = {
        "loss_short_nats": "$L_{short}$\nlast M tokens",
        "loss_long_nats": "$L_{long}$\nall N tokens",
    }
    frames = [numbers.shares(result, **bootstrap).assign(curve=name) for name, result in results.items()]
    frame = pd.concat(frames, ignore_index=True)
    frame = frame[frame["name"].isin(contexts)]
    place = frame["name"].map(list(contexts).index)
    frame = frame.assign(place=place)
    style.draw(axes, frame, looks, "curve", "place", joined=False, step=0.1)
    axes.set_xticks(range(len(contexts)), list(contexts.values()))
    axes.set(xlim=(-0.5, len(contexts) - 0.5), ylabel="mean loss [nats per token]")
    axes.grid(visible=False, axis="x")
    axes.set_title("(a) Mean loss of all targets")


def _with_recovery(
    results: Mapping[str, Measurement],
    is_comparison: bool,
    length: pd.DataFrame | None,
    selectors: Sequence[str] | None,
    k: int | None,
    width: float,
    **bootstrap: int,
) -> Figure:
    """Panels (a) to (c), and with ``length`` panel (d); ``is_comparison``: curves are results, else selectors of one.

    The other arguments are those of `figure2`.
    """
    of_main_way = {name: of_one_way(result) for name, result in results.items()}
    curves, in_bins, looks = _curves(of_main_way, selectors, is_comparison)
    main = {label: looks[label] for label in curves}

    def rows(frame_of: Callable[..., pd.DataFrame], drawn: Curves, **options: Any) -> pd.DataFrame:
        """The frames of all results as one; its column ``curve`` says which of ``drawn`` a row is of."""
        frames = []
        for name, result in of_main_way.items():
            labels = {selector: label for label, (of, selector) in drawn.items() if of == name}
            frame = frame_of(result, **options, **bootstrap)
            frames.append(frame.assign(curve=frame["selector"].map(labels)))
        return pd.concat(frames, ignore_index=True)

    count = 3
    if length is not None:
        count = 4
    figure, panels = style.large_panels(count, width, 2.6)
    ks = {k for result in results.values() for k in result.ks}
    for axes in panels[:2]:
        style.log_axis(axes, sorted(ks))
        axes.set_xlabel(style.OF_K)
    style.draw(panels[0], rows(numbers.losses, curves), main, "curve", "k")
    colours = dict.fromkeys(results, "black")
    if is_comparison:
        for label, (name, _) in reversed(curves.items()):  # that of the first curve of a result
            colours[name] = looks[label]["color"]
    _plot_short_and_long(panels[0], results, colours, **bootstrap)
    recovery = rows(numbers.recovery, curves)
    _plot_net_recovery(panels[1], recovery, main)
    bins = rows(numbers.gain_bins, in_bins, k=k)
    of_bins = {label: looks[label] for label in in_bins}
    _plot_gain_bins(panels[2], bins, of_bins, counted=not is_comparison)
    shown_ks = {choose_k(result.ks, k) for result in results.values()}
    at_k = ", ".join(map(str, sorted(shown_ks)))
    of_selectors = ", ".join(dict.fromkeys(selector for _, selector in in_bins.values()))
    panels[2].set_title(f"(c) Recovery by size of the gain, k = {at_k}\n{of_selectors}")
    legend = main | of_bins
    if PLACEBO in set(recovery["far_context"]):
        legend |= style.IN_LEGEND
    if length is not None:
        legend |= plot_length(panels[3], length)
    style.add_legend(figure, legend)
    return figure


def selectors_figure(
    result: Measurement, *, selectors: Sequence[str] | None = None, **options: Any
) -> Figure | None:
    """`figure2` of the selectors that it leaves out, beside the default one; None without any."""
    names = numbers.Measured(result).names
    main = [default_selector(names), *_main_selectors(names, selectors)]
    others = [name for name in names if name not in main]
    if not others:
        return None
    return figure2({"": result}, selectors=[main[0], *others], **options)


@matplotlib.rc_context(style.STYLE)
def kept_as_figure(
    result: Measurement,
    *,
    selectors: Sequence[str] | None = None,
    width: float = style.PAGE,
    **bootstrap: int,
) -> Figure | None:
    """Recovery against k, a panel for each way in which tokens were kept; None where there is one way only."""
    recovery = numbers.recovery(result, **bootstrap)
    recovery = recovery[recovery["far_context"] != NET]
    ways = dict(iter(recovery.groupby([*KEPT_AS_COLUMNS], sort=False)))
    if len(ways) < 2:
        return None
    all_looks = style.selector_styles(recovery["selector"].unique())
    main = _main_selectors(list(all_looks), selectors)
    looks = {name: all_looks[name] for name in main}
    titles = [textwrap.fill(f"as {way_in_words(*way)}", TITLE_WIDTH) for way in ways]
    labels = ("k [far tokens kept]", f"recovery\n{style.OF_GAIN}")
    figure, panels = style.small_panels(titles, *labels, width=width)
    for axes, of_way in zip(panels, ways.values(), strict=True):
        style.draw(axes, of_way, looks, "selector", "k")
        style.recovery_lines(axes)
        style.log_axis(axes, result.ks)
    if PLACEBO in result.far_contexts:
        looks |= style.IN_LEGEND
    style.add_legend(figure, looks)
    return figure


def _main_selectors(measured: Sequence[str], requested: Sequence[str] | None) -> list[str]:
    """``requested``, or of what was measured the default selector, its signed form, attention and the controls.

    Raises `UserError` for a selector that was not measured.
    """
    if requested:
        unknown = [name for name in requested if name not in measured]
        if unknown:
            raise UserError(f"{', '.join(unknown)} was not measured; choose from {', '.join(measured)}")
        return list(requested)
    usual = (default_selector(measured), SIGNED_SELECTOR, "attention", *POLICIES, *CONTROLS)
    return [name for name in dict.fromkeys(usual) if name in measured]


def _curves(
    results: Mapping[str, Measurement], requested: Sequence[str] | None, is_comparison: bool
) -> tuple[Curves, Curves, dict[str, style.Look]]:
    """The curves of panels (a) and (b), those of (c), and the looks of all.

    Of one Result its main selectors; of several the ``requested`` ones of each, or the one that they share (else the
    default one of each).
    """
    measured = {name: numbers.Measured(result).names for name, result in results.items()}
    if not is_comparison:
        [(result, names)] = measured.items()
        curves = {name: (result, name) for name in _main_selectors(names, requested)}
        in_bins = {name: (result, name) for name in style.shown_selectors(names)}
        return curves, in_bins, style.selector_styles(names)
    chosen = []
    for result, names in measured.items():
        if requested:
            chosen += [(result, name) for name in _main_selectors(names, requested)]
        else:
            chosen.append((result, _shared_selector(measured) or default_selector(names)))
    alike = len({name for _, name in chosen}) == 1
    curves = {}
    for result, name in chosen:
        label = result
        if not alike:
            label = f"{result}, {name}"
        curves[label] = (result, name)
    looks = style.model_styles(curves)
    return curves, curves, looks


def _shared_selector(measured: Mapping[str, Sequence[str]]) -> str | None:
    """The default selector or its signed form where all results have it; None where they share neither."""
    for name in (DEFAULT_SELECTOR, SIGNED_SELECTOR):
        if all(name in names for names in measured.values()):
            return name
    return None


def _plot_short_and_long(
    axes: Axes, results: Mapping[str, Measurement], colours: Mapping[str, str], **bootstrap: int
) -> None:
    """Dotted lines at L_short and L_long in panel (a), in the colour of each Result.

    Intervals stand to the right of the curves, a Result beside the other, and names behind the last.
    """
    right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    beside = TransformedBbox(Bbox([[0, 0], [2, 1]]), axes.transAxes)
    for number, (name, result) in enumerate(results.items()):
        shares = numbers.shares(result, **bootstrap)
        colour = colours[name]
        for which, first in (("short", 1.03), ("long", 1.05)):  # they may overlap
            row = shares[shares["name"] == f"loss_{which}_over_tau_nats"]
            text = f"$L_{{{which}}}$"
            [value] = row["value"]
            place = first + 0.04 * number
            axes.axhline(value, color=colour, linewidth=1, linestyle=":", label=text, zorder=2)
            if row["low"].isna().all():
                place = 0.98  # no bar stands between the axes and the name
            else:
                lengths = style.bar_lengths(row)
                bars = axes.errorbar(place, value, lengths, color=colour, elinewidth=1, capsize=2, **right)
                for artist in bars.get_children():  # cut above and below, as all bars are
                    artist.set(clip_on=True, clip_box=beside, clip_path=None, in_layout=False)
            if number == len(results) - 1:
                axes.text(place + 0.03, value, text, va="center", **right)
    axes.margins(y=0.08)
    axes.set(ylabel="mean loss [nats per token]", title="(a) Loss with k influential far tokens")


def _plot_net_recovery(axes: Axes, recovery: pd.DataFrame, looks: Mapping[str, style.Look]) -> None:
    """Panel (b): net recovery (docs/method.md, 2.3) against k; recovery where there is no placebo."""
    context = TRUE
    label = f"recovery\n{style.OF_GAIN}"
    title = "(b) Recovery"
    if (recovery["far_context"] == NET).any():
        context = NET
        label = f"net {label}"
        title = "(b) Net recovery (recovery − placebo$^+$)"
    shown = recovery[recovery["far_context"] == context]
    style.draw(axes, shown, looks, "curve", "k")
    axes.axhline(0.0, **style.REFERENCE)
    axes.set_ylabel(label)
    axes.set_title(title)


def _plot_gain_bins(
    axes: Axes, frame: pd.DataFrame, looks: Mapping[str, style.Look], *, counted: bool
) -> None:
    """Panel (c): recovery at one k in bins of L_short - L_long, and with ``counted`` how many targets each has.

    A point without a bar comes from too few documents for an interval.
    """
    edges = ["from_nats", "to_nats"]
    frame = frame.assign(place=frame.groupby(edges).ngroup())
    frame = frame[frame["far_context"] != NET]
    step = min(0.13, 0.4 / len(looks))
    style.draw(axes, frame, looks, "curve", "place", joined=False, step=step)
    bins = frame.groupby(edges)["n_targets"].first()
    labels = []
    for (low, high), n_targets in bins.items():
        label = f"{low:g}–{high:g}"
        if math.isinf(high):
            label = f"> {low:g}"
        if counted:
            label += f"\nn={n_targets:,}"
        labels.append(label)
    axes.set_xticks(range(len(bins)), labels)
    axes.set(xlim=(-0.5, len(bins) - 0.5), xlabel=r"$L_{short} - L_{long}$ of the target [nats]")
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(f"recovery\n{style.OF_GAIN}")
    style.recovery_lines(axes)


def describe(results: Mapping[str, Measurement]) -> str:
    """What was measured, for headings: context lengths, targets, documents, tau, and what intervals are by."""
    texts = []
    for name, result in results.items():
        text = _describe(result)
        if name:
            text = f"{name}: {text}"
        texts.append(text)
    return "; ".join(texts)


def _describe(result: Measurement) -> str:
    """N, M and what is not as usual: B, and the prefix (docs/method.md, 2.1); then how much was measured."""
    settings = result.settings
    counts = numbers.counts(result)
    lengths = settings.contexts
    block = lengths.targets_per_block
    prefix = settings.model.prefix
    share = numbers.shares(result, resamples=2).set_index("name")["value"]
    said = f"N = {lengths.n_long}, M = {lengths.n_short}"
    if block > 1:
        said += f", B = {block}"
    for name, value in lengths.unusual.items():
        said += f", {name} = {value:,}"
    if prefix:
        said += f", prefix {' '.join(map(str, prefix))}"
    said += "; "
    runs = counts["runs"]
    if runs > 1:
        said += f"{runs} runs × "
    said += f"{counts['targets'] // runs:,} targets of {counted(counts['documents'], 'document')}, "
    tau = nats(settings.choices.tau_nats)
    said += rf"{counts['targets_over_tau']:,} with $L_{{short}}-L_{{long}}>\tau$ = {tau} "
    below = 100 * share["share_below_minus_tau"]
    said += rf"({100 * share['share_over_tau']:.1f} %; {below:.1f} % below $-\tau$)"
    held = share["share_of_gain"]
    if counts["targets_over_tau"] == 0:
        said += largest_gain(result)
    elif np.isfinite(held):
        said += f"; {100 * held:.0f} % of the net gain"
        if held > 1:
            said += ", as others lose"
    if result.selectors and counts["targets_measured"] < counts["targets_over_tau"]:
        said += f"; {counts['targets_measured']:,} measured so far"
    if settings.selected_by is not None:
        chosen = "by another model"
        if settings.selected_by.untrained:
            chosen = "with untrained weights"
        said += f"; cross-fit: chosen {chosen}"
    return f"{said}; {interval_caption('bars: 95 %,', counts)}"
