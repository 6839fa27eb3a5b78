"""One measurement in several corpora side by side, from `corpora.json` alone: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.plots import style
from analysis.plots.length import draw_bins
from analysis.stats.bootstrap import by_clusters, divided
from analysis.stats.corpora import KINDS
from analysis.stats.recovery import nats
from olmo_sparsity.util.result_files import Json

_APART = 0.13
"""Between the points of two corpora at one place of an axis."""


def corpora_figure(corpora_json: Json) -> Figure:
    """Six panels, a colour and marker for each corpus, 95 % intervals.

    (a) share of the targets over tau, small: each training; (b) net recovery against k; (c) share of the targets over
    tau that k tokens suffice for; (d) what kind they are; (e) how far back the chosen tokens stand, over uniform
    choice; (f) loss by position. (e) and (f) are per byte.
    """
    settings, corpora = corpora_json["settings"], corpora_json["corpora"]
    styles = style.model_styles({each["label"]: None for each in corpora})
    share = corpora[0]["tokens_needed"]["share"]
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 5.4)
        panels = figure.subplots(2, 3).flat
        _plot_shares(panels[0], corpora, styles)
        _plot_recoveries(panels[1], corpora, styles)
        _plot_needed(panels[2], corpora, styles)
        _plot_kinds(panels[3], corpora, styles)
        _plot_distances(panels[4], corpora, styles)
        _plot_loss(panels[5], corpora, styles)
        for axes, title, label in zip(
            panels,
            (
                "(a) Use of the far context",
                "(b) Sparsity",
                "(c) Tokens needed",
                "(d) Kinds of target",
                f"(e) Distance, first {settings['k']}",
                "(f) Loss by position",
            ),
            (
                f"targets that gain more than {nats(settings['tau_nats'])}",
                "net recovery",
                f"targets with {100 * share:g} % of the gain",
                r"share of the targets over $\tau$",
                "share of chosen tokens over uniform",
                "held-out loss [nats per byte]",
            ),
            strict=True,
        ):
            axes.set_title(title, loc="left")
            axes.set_ylabel(label)
        for axes in panels[:4]:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        style.add_legend(figure, style.line_handles(styles))
        style.add_heading(figure, _told(corpora_json))
    return figure


def _told(corpora_json: Json) -> str:
    settings, corpora = corpora_json["settings"], corpora_json["corpora"]
    fewest = min(corpora, key=lambda each: each.get("groups_over_tau", math.inf))
    trainings = sorted({each["trainings"] for each in corpora})
    several = f"{' or '.join(map(str, trainings))} trainings each; " if trainings != [1] else ""
    return (
        f"{settings['selector']}, N {settings['n_long']}, M {settings['n_short']}, "
        f"$\\tau$ {nats(settings['tau_nats'])}; {several}bars: 95 %, {by_clusters(fewest, '_over_tau')}"
    )


def _plot_shares(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    for place, each in enumerate(corpora):
        look = styles[each["label"]]
        style.draw_points(axes, [place], [each["share_over_tau"]], each["label"], look)
        own = each["share_over_tau_of_trainings"]
        beside = place + _APART * (2 + np.arange(len(own)))
        axes.plot(
            beside,
            [one["value"] for one in own],
            linestyle="none",
            marker=look[1],
            markersize=2,
            color=look[0],
        )
    axes.set_xticks(range(len(corpora)), [each["label"] for each in corpora], rotation=30, ha="right")
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")


def _plot_recoveries(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    style.draw_curves(axes, {each["label"]: each["recoveries"] for each in corpora}, "net_recovery", styles)
    axes.axhline(0.0, **style.REFERENCE)
    style.k_axis(axes, [int(k) for k in corpora[0]["recoveries"]])
    axes.set_xlabel("k [far tokens]")


def _plot_needed(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    needed = {
        each["label"]: {
            k: {"reached": reached}
            for k, reached in zip(each["tokens_needed"]["ks"], each["tokens_needed"]["true"], strict=True)
        }
        for each in corpora
    }
    style.draw_curves(axes, needed, "reached", styles)
    style.k_axis(axes, corpora[0]["tokens_needed"]["ks"])
    axes.set_xlabel("k [far tokens]")
    axes.set_ylim(0, 1.03)


def _plot_kinds(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    kinds = list(KINDS.values())
    for number, each in enumerate(corpora):
        places = [kinds.index(one["kind"]) for one in each["kinds"]]
        beside = [place + _APART * (number - (len(corpora) - 1) / 2) for place in places]
        shares = [one["share_over_tau"] for one in each["kinds"]]
        style.draw_points(axes, beside, shares, each["label"], styles[each["label"]])
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")


def _plot_distances(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    for each in corpora:
        colour, marker, line = styles[each["label"]]
        edges = np.array(each["distances"]["edges"])
        uniform = np.diff(edges) / (edges[-1] - edges[0])
        centres = each["bytes_per_token"] * np.sqrt(edges[:-1] * (edges[1:] - 1))
        found = list(map(divided, each["distances"]["true"], uniform.tolist()))
        values = style.numbers_of(found)
        axes.errorbar(
            centres,
            values,
            style.bar_lengths(found),
            color=colour,
            marker=marker,
            linestyle=line,
            elinewidth=0.8,
        )
    axes.axhline(1.0, **style.REFERENCE)
    _bytes_axis(axes, "distance [bytes]")
    axes.set_ylim(bottom=0)


def _plot_loss(axes: Axes, corpora: Sequence[Json], styles: dict[str, style.Style]) -> None:
    for each in corpora:
        bins, per_token = each["loss_by_position"], each["bytes_per_token"]
        draw_bins(axes, bins, "loss_nats_per_byte", each["label"], styles, per_token)
    _bytes_axis(axes, "position [bytes before it]")


def _bytes_axis(axes: Axes, label: str) -> None:
    """A logarithmic axis of bytes, with a mark at every second power of two inside what is drawn."""
    low, high = axes.dataLim.intervalx
    first = math.ceil(math.log2(low))
    style.log_axis(axes, [2.0**power for power in range(first, math.floor(math.log2(high)) + 1, 2)])
    axes.set_xlabel(label)
