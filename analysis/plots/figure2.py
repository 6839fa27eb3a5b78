"""Figure 2 (docs/method.md, 2.5), from a summary (`analysis.stats.summary`).

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) where it
was measured, loss against position. The other selectors have a figure of their own, `further_figure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plots import style
from analysis.plots.length import plot_length
from analysis.records.schema import UNTRAINED
from analysis.stats.bootstrap import by_clusters
from analysis.stats.recovery import CONTROLS, SIGNED_SELECTOR, and_blocks, default_selector, nats
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

_OF_GAIN = r"[fraction of $L_{short} - L_{long}$]"


def figure2(
    summary: Json,
    length: Json | None = None,
    *,
    selectors: Sequence[str] | None = None,
    width: float = style.PAGE,
    heading: bool = True,
) -> Figure:
    """Panels (a) to (c), and with ``length`` (`length.json`) panel (d).

    Args:
        summary: of `summarize`.
        length: loss by position.
        selectors: of panels (a) and (b); by default those of `main_selectors`.
        width: in inches.
        heading: whether a line above the panels says what was measured.
    """
    shown = main_selectors(summary, selectors)
    panels: list[Callable[[Axes], None]] = [
        lambda axes: plot_loss(axes, summary, shown),
        lambda axes: plot_net_recovery(axes, summary, shown),
        lambda axes: plot_gain_bins(axes, summary),
    ]
    if length is not None:
        panels.append(lambda axes: plot_length(axes, length))
    return _panels(summary, panels, shown, width, heading)


def further_figure(
    summary: Json, *, selectors: Sequence[str] | None = None, width: float = style.PAGE, heading: bool = True
) -> Figure | None:
    """Panels (a) and (b) of the selectors that `figure2` leaves out, beside the default one; None without any."""
    default = default_selector(summary["selectors"])
    left_out = [name for name in summary["selectors"] if name not in main_selectors(summary, selectors)]
    if not left_out:
        return None
    shown = [default, *(name for name in left_out if name != default)]
    panels: list[Callable[[Axes], None]] = [
        lambda axes: plot_loss(axes, summary, shown),
        lambda axes: plot_net_recovery(axes, summary, shown),
    ]
    return _panels(summary, panels, shown, width, heading)


def main_selectors(summary: Json, wanted: Sequence[str] | None = None) -> list[str]:
    """``wanted``, or of what was measured the default selector, its signed form, attention and the controls.

    Raises `UserError` for a selector that was not measured.
    """
    measured = summary["selectors"]
    if wanted is None:
        usual = (default_selector(measured), SIGNED_SELECTOR, "attention", *CONTROLS)
        return [name for name in dict.fromkeys(usual) if name in measured]
    return check_selectors(wanted, measured)


def check_selectors(wanted: Sequence[str], measured: Iterable[str]) -> list[str]:
    """``wanted``. Raises `UserError` for a selector that was not measured."""
    if unknown := [name for name in wanted if name not in measured]:
        raise UserError(f"no records of selector {', '.join(unknown)}; choose from {', '.join(measured)}")
    return list(wanted)


def _panels(
    summary: Json, panels: Sequence[Callable[[Axes], None]], shown: Sequence[str], width: float, heading: bool
) -> Figure:
    styles = style.selector_styles(summary["selectors"])
    columns = min(style.columns_in(width, 3.2), len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, 2.6 * rows + (0.9 if heading else 0.6))
        grid = figure.add_gridspec(rows, columns)
        for number, draw in enumerate(panels):
            row, column = divmod(number, columns)
            last = number == len(panels) - 1
            draw(figure.add_subplot(grid[row, column:] if last else grid[row, column]))
        in_bins = style.shown_selectors(styles) if len(panels) > 2 else []
        style.add_legend(
            figure, style.selector_handles({name: styles[name] for name in dict.fromkeys([*shown, *in_bins])})
        )
        if heading:
            style.add_heading(figure, describe(summary))
        figure.draw_without_rendering()  # panel (d) has a legend of its own: the layout takes two passes
    return figure


def plot_loss(axes: Axes, summary: Json, shown: Sequence[str]) -> None:
    """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
    styles = style.selector_styles(summary["selectors"])
    found = {name: summary["selectors"][name] for name in shown}
    style.draw_curves(axes, found, "placebo_loss", styles, placebo=True)
    style.draw_curves(axes, found, "loss", styles)
    low, high = summary["loss_short"]["low"], summary["loss_long"]["high"]
    _reference_line(axes, summary["loss_short"], "loss_short", r"$L_{short}$")
    overlap = low is not None and high is not None and high >= low
    _reference_line(axes, summary["loss_long"], "loss_long", r"$L_{long}$", 1.055 if overlap else 1.03)
    style.k_axis(axes, summary["settings"]["ks"])
    axes.margins(y=0.08)
    axes.set_ylabel("mean loss [nats per token]")
    axes.set_title("(a) Loss with k influential far tokens", loc="left")


def plot_net_recovery(axes: Axes, summary: Json, shown: Sequence[str]) -> None:
    """Panel (b): net recovery (docs/method.md, 2.3) against k [fraction of L_short - L_long]."""
    styles = style.selector_styles(summary["selectors"])
    style.draw_curves(axes, {name: summary["selectors"][name] for name in shown}, "net_recovery", styles)
    axes.axhline(0.0, **style.REFERENCE)
    style.k_axis(axes, summary["settings"]["ks"])
    axes.set_ylabel(f"net recovery\n{_OF_GAIN}")
    axes.set_title("(b) Net recovery (recovery − placebo$^+$)", loc="left")


def plot_gain_bins(axes: Axes, summary: Json) -> None:
    """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

    Shows the default selector and the controls. A point without a bar comes from too few documents for an
    interval.
    """
    bins = summary["gain_bins"]["bins"]
    styles = style.selector_styles(summary["selectors"])
    names = style.shown_selectors(summary["selectors"])
    kinds = [(name, kind) for name in names for kind in ("recovery", "placebo_recovery")]
    for number, (name, kind) in enumerate(kinds):
        shift = 0.13 * (number - (len(kinds) - 1) / 2)
        places = [place + shift for place in range(len(bins))]
        intervals = [each["selectors"][name][kind] for each in bins]
        style.draw_points(axes, places, intervals, f"{name} {kind}", styles[name])
    axes.axhline(0.0, **style.REFERENCE)
    axes.axhline(1.0, linestyle=":", **style.REFERENCE)
    axes.set_xticks(range(len(bins)), [f"{_bin_label(each)}\nn={each['targets']:,}" for each in bins])
    axes.set_xlim(-0.5, len(bins) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(r"$L_{short} - L_{long}$ of the target [nats]")
    axes.set_ylabel(f"recovery\n{_OF_GAIN}")
    shown = ", ".join(names)
    axes.set_title(f"(c) Recovery by size of the gain, k = {summary['gain_bins']['k']}\n{shown}", loc="left")


def describe(summary: Json) -> str:
    """One line on what was measured: context lengths, tau, targets, documents."""
    settings = summary["settings"]
    unfinished = "" if settings["complete"] else f" ({settings['targets_measured']:,} measured so far)"
    crossfit = "; cross-fit: chosen by one model, measured by another" if settings["crossfit"] else ""
    if settings.get("options", {}).get(UNTRAINED):
        crossfit = "; sanity check: chosen with untrained weights"
    trainings = settings.get("trainings", 1)
    targets = f"{summary['targets'] // trainings:,} targets of {summary['documents']:,} documents"
    if trainings > 1:
        targets = f"{trainings} trainings × {targets}"
    return (
        f"N = {settings['n_long']}, M = {settings['n_short']}{and_blocks(settings)}; {targets}, "
        f"{summary['targets_over_tau']:,} with "
        rf"$L_{{short}} - L_{{long}} > \tau$ = {nats(settings['tau_nats'])} "
        f"({100 * summary['share_over_tau']['value']:.1f} %; {_tails(summary['thresholding'])}){unfinished}{crossfit}; "
        f"bars: 95 %, {by_clusters(summary['settings'], '_over_tau')}"
    )


def _tails(thresholding: Json) -> str:
    under, held = (thresholding[name]["value"] for name in ("share_under_minus_tau", "share_of_net_gain"))
    words = rf"{100 * under:.1f} % below $-\tau$"
    if held is None:
        return words
    return f"{words}; {100 * held:.0f} % of the net gain{', as others lose' if held > 1 else ''}"


def _reference_line(axes: Axes, interval: Json, key: str, text: str, place: float = 1.03) -> None:
    """A dotted line across the panel; its interval, at ``place``, and name stand to the right, clear of the curves."""
    value = interval["value"]
    axes.axhline(value, color="black", linewidth=1.0, linestyle=":", label=key, zorder=2.0)
    right: Json = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    axes.errorbar(
        [place], [value], style.bar_lengths([interval]), color="black", elinewidth=1, capsize=2, **right
    )
    axes.text(place + 0.03, value, text, va="center", **right)


def _bin_label(each: Json) -> str:
    return f"> {each['low']:g}" if each["high"] is None else f"{each['low']:g}–{each['high']:g}"
