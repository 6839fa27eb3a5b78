"""Sparsity and length generalization against model size and against each other, from `ladder.json` alone: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.plots import STYLE
from analysis.training_plots import curve_style

Json = dict[str, Any]

_OPEN: Json = {"markerfacecolor": "white", "markeredgewidth": 1.0}


def ladder_figure(ladder_json: Json) -> Figure:
    """(a) net recovery, (b) share that k tokens suffice for, (c) rise, all against size; (d) rise against net recovery.

    A point for each checkpoint with its 95 % interval; open points: tokens chosen by another seed (cross-fit). Lines
    join the means over the seeds of a size.
    """
    settings, points = ladder_json["settings"], ladder_json["points"]
    k, times = settings["k"], settings["times"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 6.6), layout="constrained")
        FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
        (a, b), (c, d) = figure.subplots(2, 2)
        rise = f"loss at {times} × the window - at the window\n[nats per token]"
        for axes, name, scale, title, label in (
            (a, "net_recovery", 100.0, "(a) Sparsity", f"net recovery at k = {k} [%]"),
            (
                b,
                "k_suffices",
                100.0,
                "(b) Tokens needed",
                f"{k} tokens give 90 % of the gain\n[% of targets]",
            ),
            (c, "rise_nats", 1.0, "(c) Length generalization", rise),
        ):
            _against_size(axes, points, name, scale)
            axes.set_title(title, loc="left")
            axes.set_ylabel(label)
            axes.set_xlabel("parameters")
        _jointly(d, points)
        d.set_title("(d) Length generalization against sparsity", loc="left")
        d.set_xlabel(f"net recovery at k = {k} [%]")
        d.set_ylabel(rise)
        figure.suptitle(_told(ladder_json), fontsize=8.5, color="0.25", x=0.01, ha="left")
    return figure


def _told(ladder_json: Json) -> str:
    settings = ladder_json["settings"]
    return (
        f"{settings['selector']}, N {settings['n_long']}, M {settings['n_short']}; open: chosen by another seed; "
        "bars: 95 %, over documents"
    )


def _against_size(axes: Axes, points: Sequence[Json], name: str, scale: float) -> None:
    for crossfit in (False, True):
        if crossfit and name == "rise_nats":
            continue  # it does not depend on who chose
        some = [point for point in points if point["crossfit"] == crossfit]
        for point in some:
            y, error = _scaled(point[name], scale)
            axes.errorbar([point["parameters"]], y, yerr=error, color="C0", marker="o", **_looks(crossfit))
        sizes = sorted({point["parameters"] for point in some})
        means = [np.mean([p[name]["value"] for p in some if p["parameters"] == size]) for size in sizes]
        axes.plot(sizes, scale * np.array(means), color="C0", linestyle="--" if crossfit else "-", alpha=0.7)
    axes.set_xscale("log")


def _jointly(axes: Axes, points: Sequence[Json]) -> None:
    labels = list(dict.fromkeys(point["label"] for point in points))
    for point in points:
        colour, marker, _ = curve_style(labels.index(point["label"]))
        (x, x_error), (y, y_error) = _scaled(point["net_recovery"], 100.0), _scaled(point["rise_nats"], 1.0)
        axes.errorbar(
            x, y, xerr=x_error, yerr=y_error, color=colour, marker=marker, **_looks(point["crossfit"])
        )
    for number, label in enumerate(labels):
        colour, marker, _ = curve_style(number)
        axes.plot([], [], color=colour, marker=marker, linestyle="none", label=label)
    axes.legend(frameon=False, fontsize=7)


def _looks(is_open: bool) -> Json:
    looks: Json = {"markersize": 4, "linewidth": 0.9, "capsize": 2}
    return looks | (_OPEN if is_open else {})


def _scaled(interval: Json, scale: float) -> tuple[np.ndarray, np.ndarray | None]:
    """A value, (1,), and the distances of its bounds, (2, 1); None where there is no interval."""
    value = np.array([interval["value"]])
    if interval["low"] is None or interval["high"] is None:
        return scale * value, None
    return scale * value, scale * np.array([value - interval["low"], interval["high"] - value])
