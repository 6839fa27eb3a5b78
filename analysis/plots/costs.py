"""What the influence analysis costs, drawn from the JSON of `scripts/benchmark.py influence`: no model, no torch.

Seconds per target above, peak memory below, each against N, k and the number of targets, on logarithmic axes: a
straight line is a power law.
"""

from __future__ import annotations

import math

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.plots import style
from analysis.stats.bootstrap import by_clusters
from analysis.stats.recovery import nats
from olmo_sparsity.util.result_files import Json

MEGABYTE = 1e6

_SWEEPS = {"n_long": "N [tokens of long context]", "k": "k [selected tokens]", "targets": "targets at once"}
"""What varies, and the name of its axis."""
_QUANTITIES = {
    "seconds_per_target": ("seconds per target", 1.0),
    "peak_bytes": ("peak memory [MB]", MEGABYTE),
}
"""What is drawn: the name of its axis, and the unit in the JSON's units."""


def cost_figure(result: Json) -> Figure:
    """Seconds per target and peak memory against N, k and the number of targets, a curve per selector."""
    sweeps = result["cost"]["sweeps"]
    styles = style.selector_styles(dict.fromkeys(p["selector"] for points in sweeps.values() for p in points))
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 4.4)
        panels = figure.subplots(len(_QUANTITIES), len(_SWEEPS), sharex="col", sharey="row", squeeze=False)
        for row, quantity in zip(panels, _QUANTITIES, strict=True):
            for axes, varied in zip(row, _SWEEPS, strict=True):
                _draw_sweep(axes, sweeps[varied], varied, quantity, styles)
            row[0].set_ylabel(_QUANTITIES[quantity][0])
        for column, (varied, name) in zip(panels.T, _SWEEPS.items(), strict=True):
            column[0].set_title(_held_fixed(sweeps[varied], varied), loc="left")
            column[-1].set_xlabel(name)
        style.add_legend(figure, style.selector_handles(styles, placebo=False))
        style.add_heading(figure, describe_cost(result))
    return figure


def pareto_figure(result: Json) -> Figure:
    """Net recovery against processor time, a point per selector; a line joins those that no other one beats in both."""
    screened = result["screened"]
    k, rows = str(screened["k"]), screened["selectors"]
    styles = style.selector_styles(rows)
    seconds = {name: row["seconds_per_target"] for name, row in rows.items()}
    intervals = {name: row["net_recovery"][k] for name, row in rows.items()}
    net = dict(zip(rows, 100 * style.numbers_of(list(intervals.values())), strict=True))
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 4.6)
        axes = figure.subplots()
        for name, (colour, marker, _) in styles.items():
            axes.errorbar(
                seconds[name],
                net[name],
                yerr=100 * style.bar_lengths([intervals[name]]),
                color=colour,
                marker=marker,
                capsize=2,
                label=name,
            )
        best = [
            name for name in rows if not any(seconds[o] < seconds[name] and net[o] >= net[name] for o in rows)
        ]
        best.sort(key=seconds.__getitem__)
        axes.plot(
            [seconds[name] for name in best], [net[name] for name in best], color="0.7", zorder=0, label=""
        )
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_xlabel("processor seconds per target, true and placebo far context")
        axes.set_ylabel(f"net recovery with k = {k} tokens [%]")
        style.add_legend(figure, style.selector_handles(styles, placebo=False))
        style.add_heading(
            figure,
            f"{result['model']}; {screened['over_tau']} of {screened['targets']} targets gain more than "
            f"{nats(screened['tau_nats'])}, {screened['documents']} documents; 95 % intervals "
            f"{by_clusters(screened)}; "
            "line: no other selector is both faster and better",
        )
    return figure


def describe_cost(result: Json) -> str:
    """One line on what was measured on what."""
    machine = result["machine"]
    where = (
        machine["gpu"] or f"{machine['cores']} {machine['processor']} cores, threads: {machine['threads']}"
    )
    memory = "allocated on the GPU" if machine["gpu"] else "growth of the resident set"
    return (
        f"{result['model']}, {result['parameters']:,} parameters, fp32, random tokens; {where}; "
        f"peak memory: {memory}, a fresh process per point, weights not counted"
    )


def _draw_sweep(axes: Axes, points: list[Json], varied: str, quantity: str, styles: Json) -> None:
    _, unit = _QUANTITIES[quantity]
    for selector, (colour, marker, line) in styles.items():
        own = [point for point in points if point["selector"] == selector]
        # nothing on a logarithmic axis stands for "no growth": such a point is left out
        values = [(point[quantity] or math.nan) / unit for point in own]
        label = f"{selector} {quantity}"
        axes.plot([p[varied] for p in own], values, color=colour, marker=marker, linestyle=line, label=label)
    ticks = sorted({point[varied] for point in points})
    style.log_axis(axes, ticks)
    axes.set_yscale("log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(FuncFormatter(_tick_label))


def _tick_label(value: float, place: int) -> str:
    """1, 2 and 5 times a power of ten as plain numbers; what stands between them has no label."""
    leading = f"{value:e}"[0]
    return f"{value:g}" if leading in "125" else ""


def _held_fixed(points: list[Json], varied: str) -> str:
    """What does not vary along a sweep, such as N = 256, k = 8."""
    names = {"n_long": "N", "n_short": "M", "k": "k", "targets": "targets"}
    return ", ".join(f"{name} = {points[0][key]}" for key, name in names.items() if key != varied)
