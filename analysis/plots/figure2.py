"""Figure 2 (METHOD 2.5), and what all figures from a summary (`analysis.stats.summary`) share: no records, no torch.

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) where it
was measured, loss against position. Selectors differ by colour and marker, `best` and screened forms by line style
too, and placebos are dashed and hollow: the figures survive grey printing and colour-blind eyes (palette: Okabe and
Ito 2008). All intervals are 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plots.style import (
    MANY_SELECTORS,
    STYLE,
    add_heading,
    add_legend,
    bar_lengths,
    draw_curves,
    k_axis,
    legend_handles,
    new_figure,
    selector_styles,
    shown_selectors,
    to_number,
)
from analysis.stats.recovery import Json, nats


def plot_loss(axes: Axes, summary: Json) -> None:
    """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
    styles = selector_styles(list(summary["selectors"]))
    draw_curves(axes, summary["selectors"], "placebo_loss", styles, placebo=True)
    draw_curves(axes, summary["selectors"], "loss", styles)
    for key, text in (("loss_short", r"$L_{short}$"), ("loss_long", r"$L_{long}$")):
        _reference_line(axes, summary[key], key, text)
    k_axis(axes, summary["settings"]["ks"])
    axes.margins(y=0.08)
    axes.set_ylabel("mean loss [nats per token]")
    axes.set_title("(a) Loss with k influential far tokens", loc="left")


def plot_net_recovery(axes: Axes, summary: Json) -> None:
    """Panel (b): recovery minus placebo recovery against k [fraction of L_short - L_long]."""
    draw_curves(axes, summary["selectors"], "net_recovery", selector_styles(list(summary["selectors"])))
    axes.axhline(0.0, color="0.3", linewidth=0.8, zorder=1.5)
    k_axis(axes, summary["settings"]["ks"])
    axes.set_ylabel(r"net recovery [fraction of $L_{short} - L_{long}$]")
    axes.set_title("(b) Net recovery (recovery − placebo)", loc="left")


def plot_gain_bins(axes: Axes, summary: Json) -> None:
    """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

    Shows the default selector and the controls. A point without a bar comes from too few documents for an interval.
    """
    bins = summary["gain_bins"]["bins"]
    styles = selector_styles(list(summary["selectors"]))
    names = shown_selectors(list(summary["selectors"]))
    kinds = [(name, kind) for name in names for kind in ("recovery", "placebo_recovery")]
    for number, (name, kind) in enumerate(kinds):
        colour, marker, _ = styles[name]
        values = [each["selectors"][name][kind] for each in bins]
        shift = 0.14 * (number - (len(kinds) - 1) / 2)
        looks: Json = {"markerfacecolor": "white"} if kind == "placebo_recovery" else {}
        axes.errorbar(
            [place + shift for place in range(len(bins))],
            [to_number(value["value"]) for value in values],
            bar_lengths(values),
            fmt=marker,
            color=colour,
            capsize=2,
            elinewidth=1,
            label=f"{name} {kind}",
            **looks,
        )
    axes.axhline(0.0, color="0.3", linewidth=0.8, zorder=1.5)
    axes.axhline(1.0, color="0.3", linewidth=0.8, linestyle=":", zorder=1.5)
    axes.set_xticks(range(len(bins)), [f"{_bin_label(each)}\nn = {each['targets']:,}" for each in bins])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(r"$L_{short} - L_{long}$ of the target [nats]")
    axes.set_ylabel(r"recovery [fraction of $L_{short} - L_{long}$]")
    axes.set_title(f"(c) Recovery by size of the gain, k = {summary['gain_bins']['k']}", loc="left")


Panel = Callable[[Axes, Json], None]
PANELS: tuple[Panel, ...] = (plot_loss, plot_net_recovery, plot_gain_bins)


def figure2(summary: Json, length: Json | None = None) -> Figure:
    """Panels (a) to (c) side by side, or with ``length`` (`analysis.measure.length`) and its panel (d) two by two."""
    panels = list(PANELS)
    if length is not None:
        from analysis.plots.length import plot_length  # which needs this module's styles

        panels.append(lambda axes, _: plot_length(axes, length))
    columns = 2 if len(panels) > 3 else 3
    width, height = (4.6, 3.7) if columns == 2 or len(summary["selectors"]) > MANY_SELECTORS else (3.7, 3.3)
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width * columns, height * rows + 0.9)
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
            panel(axes, summary)
        add_legend(figure, legend_handles(selector_styles(list(summary["selectors"]))))
        add_heading(figure, describe(summary))
    return figure


def describe(summary: Json) -> str:
    """One line on what was measured: context lengths, tau, targets, documents."""
    settings = summary["settings"]
    unfinished = "" if settings["complete"] else f" ({settings['targets_measured']:,} measured so far)"
    crossfit = "; cross-fit: chosen by one model, measured by another" if settings["crossfit"] else ""
    return (
        f"N = {settings['n_long']}, M = {settings['n_short']}; {summary['targets']:,} targets of "
        f"{summary['documents']:,} documents, {summary['targets_over_tau']:,} with "
        rf"$L_{{short}} - L_{{long}} > \tau$ = {nats(settings['tau_nats'])} "
        f"({100 * summary['share_over_tau']['value']:.1f} %){unfinished}{crossfit}; "
        "bands and bars: 95 % bootstrap by document"
    )


def _reference_line(axes: Axes, interval: Json, key: str, text: str) -> None:
    """A dotted line across the panel; its interval and name stand to the right, clear of the curves."""
    value = interval["value"]
    axes.axhline(value, color="black", linewidth=1.0, linestyle=":", label=key, zorder=2.0)
    right: Json = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    axes.errorbar([1.03], [value], bar_lengths([interval]), color="black", elinewidth=1, capsize=2, **right)
    axes.text(1.06, value, text, va="center", **right)


def _bin_label(each: Json) -> str:
    return f"> {each['low']:g}" if each["high"] is None else f"{each['low']:g}–{each['high']:g}"
