"""Figure 2, drawn from a summary (`analysis.summary`): no model, no records, no torch (METHOD 2.5).

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long.
Selectors differ by colour, marker and line style at once, so the figure survives grey printing and
colour-blind eyes (palette: Okabe and Ito 2008). All intervals are 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.summary import nats
from olmo_sparsity.files import atomic_path

Json = dict[str, Any]

CONTROLS = ("random", "nearest")
DEFAULT_SELECTOR = "leave-one-out"
DPI = 200

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
    "pdf.fonttype": 42,  # text stays text in the PDF
}
# colour, marker, line style; by name, so that a selector looks the same in every figure
_STYLES = {
    "leave-one-out": ("#0072B2", "o", "-"),
    "leave-one-in": ("#E69F00", "s", "-"),
    "greedy": ("#009E73", "^", "-"),
    "gradient": ("#CC79A7", "D", "-"),
    "attention": ("#D55E00", "v", "-"),
    "random": ("0.40", "d", "-."),
    "nearest": ("0.62", "<", "-."),
}
_FURTHER_STYLES = (("#56B4E9", "P", "-"), ("#000000", "*", "-"), ("#8C6D00", "h", "-"))
_PLACEBO_STYLE = (0, (4, 2))


def selector_styles(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and line style of each selector; unknown names get what is left, in their order."""
    unknown = [name for name in names if name not in _STYLES]
    further = {name: _FURTHER_STYLES[number % len(_FURTHER_STYLES)] for number, name in enumerate(unknown)}
    return {name: _STYLES.get(name) or further[name] for name in names}


def plot_loss(axes: Axes, summary: Json) -> None:
    """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
    styles = selector_styles(list(summary["selectors"]))
    for name, per_k in summary["selectors"].items():
        _curve(axes, per_k, "placebo_loss", styles[name], name, placebo=True)
        _curve(axes, per_k, "loss", styles[name], name)
    for key, text in (("loss_short", r"$L_{short}$"), ("loss_long", r"$L_{long}$")):
        _reference_line(axes, summary[key], key, text)
    _k_axis(axes, summary)
    axes.margins(y=0.08)
    axes.set_ylabel("mean loss [nats per token]")
    axes.set_title("(a) Loss with k influential far tokens", loc="left")


def plot_net_recovery(axes: Axes, summary: Json) -> None:
    """Panel (b): recovery minus placebo recovery against k [fraction of L_short - L_long]."""
    styles = selector_styles(list(summary["selectors"]))
    for name, per_k in summary["selectors"].items():
        _curve(axes, per_k, "net_recovery", styles[name], name)
    axes.axhline(0.0, color="0.3", linewidth=0.8, zorder=1.5)
    _k_axis(axes, summary)
    axes.set_ylabel(r"net recovery [fraction of $L_{short} - L_{long}$]")
    axes.set_title("(b) Net recovery (recovery − placebo)", loc="left")


def plot_gain_bins(axes: Axes, summary: Json) -> None:
    """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

    Shows the default selector and the random control, or the first of each kind that was measured. A point
    without a bar comes from too few documents for an interval.
    """
    bins = summary["gain_bins"]["bins"]
    names = _shown_in_bins(list(summary["selectors"]))
    styles = selector_styles(list(summary["selectors"]))
    kinds = [(name, kind) for name in names for kind in ("recovery", "placebo_recovery")]
    for number, (name, kind) in enumerate(kinds):
        colour, marker, _ = styles[name]
        values = [each["selectors"][name][kind] for each in bins]
        shift = 0.16 * (number - (len(kinds) - 1) / 2)
        x = [place + shift for place in range(len(bins))]
        points = [_number(value["value"]) for value in values]
        below, above = _bars(values)
        looks: Json = {"markerfacecolor": "white"} if kind == "placebo_recovery" else {}
        label = f"{name} {kind}"
        axes.errorbar(
            x,
            points,
            [below, above],
            None,
            marker,
            color=colour,
            capsize=2,
            elinewidth=1,
            label=label,
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


def figure2(summary: Json, panels: Sequence[Panel] = PANELS) -> Figure:
    """All panels, one legend below them, and what was measured above them."""
    columns = len(panels) if len(panels) <= 3 else 2
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.7 * columns, 3.3 * rows + 0.8), layout=ConstrainedLayoutEngine(w_pad=0.08))
        FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
            panel(axes, summary)
        handles = _legend_handles(list(summary["selectors"]))
        per_row = len(handles) if len(handles) <= 6 else math.ceil(len(handles) / 2)
        figure.legend(
            handles=handles, loc="outside lower center", ncols=per_row, frameon=False, handlelength=3
        )
        figure.suptitle(describe(summary), fontsize=8.5, color="0.25", x=0.01, ha="left")
    return figure


def describe(summary: Json) -> str:
    """One line on what was measured: context lengths, tau, targets, documents."""
    settings = summary["settings"]
    unfinished = "" if settings["complete"] else f" ({settings['targets_measured']:,} measured so far)"
    return (
        f"N = {settings['n_long']}, M = {settings['n_short']}; {summary['targets']:,} targets of "
        f"{summary['documents']:,} documents, {summary['targets_over_tau']:,} with "
        rf"$L_{{short}} - L_{{long}} > \tau$ = {nats(settings['tau_nats'])} "
        f"({100 * summary['share_over_tau']['value']:.1f} %){unfinished}; "
        "bands and bars: 95 % bootstrap by document"
    )


def save_figure(figure: Figure, folder: str | Path, name: str = "figure2") -> list[Path]:
    """Write ``name``.png (200 dpi) and ``name``.pdf into ``folder``, atomically; returns both paths.

    The same summary gives the same bytes: no date is written into them.
    """
    paths = [Path(folder) / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        kind = path.suffix[1:]
        metadata = {"CreationDate": None} if kind == "pdf" else None
        with atomic_path(path) as temporary, matplotlib.rc_context(STYLE):
            figure.savefig(temporary, format=kind, dpi=DPI, metadata=metadata)
    return paths


def _curve(
    axes: Axes, per_k: Json, key: str, style: tuple[str, str, str], name: str, *, placebo: bool = False
) -> None:
    colour, marker, line = style
    ks = [int(k) for k in per_k]
    values, low, high = ([_number(per_k[k][key][bound]) for k in per_k] for bound in ("value", "low", "high"))
    looks: Json = (
        {
            "linestyle": _PLACEBO_STYLE,
            "linewidth": 1,
            "marker": marker,
            "markersize": 3,
            "markerfacecolor": "white",
        }
        if placebo
        else {"linestyle": line, "marker": marker}
    )
    axes.plot(ks, values, color=colour, label=f"{name} {key}", zorder=2.5 if placebo else 3.0, **looks)
    axes.fill_between(ks, low, high, color=colour, alpha=0.06 if placebo else 0.13, linewidth=0)


def _reference_line(axes: Axes, interval: Json, key: str, text: str) -> None:
    """A dotted line across the panel; its interval and name stand to the right, clear of the curves."""
    value = interval["value"]
    axes.axhline(value, color="black", linewidth=1.0, linestyle=":", label=key, zorder=2.0)
    below, above = _bars([interval])
    right: Json = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    axes.errorbar([1.03], [value], [below, above], color="black", elinewidth=1, capsize=2, **right)
    axes.text(1.06, value, text, va="center", **right)


def _bars(intervals: list[Json]) -> tuple[list[float], list[float]]:
    """Lengths of the error bars below and above the values; NaN, hence no bar, where there is no interval."""
    below = [_number(each["value"]) - _number(each["low"]) for each in intervals]
    above = [_number(each["high"]) - _number(each["value"]) for each in intervals]
    # a percentile interval need not hold its value; a bar cannot be negative
    return [0.0 if x < 0 else x for x in below], [0.0 if x < 0 else x for x in above]


def _k_axis(axes: Axes, summary: Json) -> None:
    ks = summary["settings"]["ks"]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k [far tokens added to the short context]")


def _shown_in_bins(names: list[str]) -> list[str]:
    selectors = [name for name in names if name not in CONTROLS]
    controls = [name for name in CONTROLS if name in names]
    best = DEFAULT_SELECTOR if DEFAULT_SELECTOR in selectors else None
    return [*([best] if best else selectors[:1]), *controls[:1]]


def _bin_label(each: Json) -> str:
    return f"> {each['low']:g}" if each["high"] is None else f"{each['low']:g}–{each['high']:g}"


def _legend_handles(names: list[str]) -> list[Line2D]:
    styles = selector_styles(names)
    looks: list[Json] = [
        {"label": name, "color": colour, "marker": marker, "linestyle": line}
        for name, (colour, marker, line) in styles.items()
    ]
    looks.append(
        {
            "label": "placebo far context: dashed, hollow",
            "color": "0.2",
            "marker": "o",
            "markersize": 3,
            "markerfacecolor": "white",
            "linestyle": _PLACEBO_STYLE,
            "linewidth": 1,
        }
    )
    return [Line2D([], [], **each) for each in looks]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
