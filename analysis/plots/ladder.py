"""Sparsity and length generalization against model size and against each other, from `ladder.json` alone: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

import matplotlib
import matplotlib.scale
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox

from analysis.plots import style
from analysis.stats.bootstrap import by_clusters
from analysis.stats.recovery import nats
from olmo_sparsity.util.result_files import Json

_COLOUR = "#332288"
_MOST_MARKERS = 8
_BESIDE_LETTER: Json = {"markersize": 2.5, "linewidth": 0.5, "capsize": 0}
_LETTER: Json = {"textcoords": "offset points", "ha": "center", "va": "center", "weight": "bold"}
_BESIDE = [
    (round(distance * np.cos(angle), 1), round(distance * np.sin(angle), 1))
    for distance in (6, 11)
    for angle in np.pi / 4 * np.array([1, 3, -1, -3, 0, 4, 2, -2])
]
"""Points of 1/72 inch from a point to the middle of its letter, the best first."""
_LINEAR_BELOW = 0.1
"""Nats, of axes on which models that fail are far from the others."""
_TICKS = (-2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2)
_FEWER_TICKS = (-2, -0.5, -0.1, 0, 0.1, 0.5, 2)
_EQUAL: Json = {"color": "0.6", "linewidth": 0.8, "linestyle": ":", "zorder": 0}
_OPEN: Json = {"markerfacecolor": "white", "markeredgewidth": 1.0}


def ladder_figure(ladder_json: Json) -> Figure:
    """(a) share over tau, (b) net recovery, (c) share that k tokens suffice for, (d) rise, each against size.

    A point for each model with its 95 % interval; open points: tokens chosen by another seed (cross-fit). Lines join
    the means of a size, whose points stand a little to the right of each other.
    """
    settings, points = ladder_json["settings"], ladder_json["points"]
    far = f"far context helps\n[% of targets: by more than {nats(settings['tau_nats'])}]"
    suffice = f"{settings['k']} tokens give 90 % of the gain\n[% of those targets]"
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 5.0)
        for axes, (name, scale, title, label) in zip(
            figure.subplots(2, 2).flat,
            (
                ("share_over_tau", 100.0, "(a) Use of the far context", far),
                ("net_recovery", 100.0, "(b) Sparsity", _net_label(ladder_json)),
                ("k_suffices", 100.0, "(c) Tokens needed", suffice),
                ("rise_nats", 1.0, "(d) Length generalization", _rise_label(ladder_json)),
            ),
            strict=True,
        ):
            _against_size(axes, points, name, scale)
            axes.set_title(title, loc="left")
            axes.set_ylabel(label)
        style.add_heading(figure, _told(ladder_json))
    return figure


def joint_figure(ladder_json: Json) -> Figure:
    """Rise against net recovery, and where they were measured against use beyond the window and needles found there.

    Does what is sparse generalize to length, and does what holds its loss use what is far? A point for each model, as
    above; where there are many, each has a letter, and nats are linear up to 0.1 and logarithmic beyond.
    Text that is alike at all positions would put use on the dotted line, where rise and use are of as many tokens.
    """
    points = ladder_json["points"]
    labels = {
        "net_recovery": ("Sparsity", _net_label(ladder_json), 100.0),
        "use_nats": ("Use", _use_label(ladder_json), 1.0),
        "needle_exact": ("Needles", _needle_label(ladder_json), 100.0),
    }
    shown = [name for name in labels if any(name in point for point in points)]
    styles = _joint_styles(points)
    with matplotlib.rc_context(style.STYLE):
        many = len(styles) > _MOST_MARKERS
        figure = style.new_figure(4.6 if len(shown) == 1 else style.PAGE, 5.0 if many else 3.8)
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False).flat
        for letter, axes, name in zip(ascii_lowercase, panels, shown, strict=False):
            title, label, scale = labels[name]
            _jointly(axes, points, styles, name, scale)
            alone = f"Length generalization against {title.lower()}"
            axes.set_title(f"({letter}) {title}" if len(shown) > 1 else alone, loc="left")
            axes.set_xlabel(label + _correlated(ladder_json, name))
            if many and name == "use_nats":
                _spread(axes, "x", _TICKS if len(shown) < len(labels) else _FEWER_TICKS)
        figure.axes[0].set_ylabel(_rise_label(ladder_json))
        if many:
            _spread(figure.axes[0], "y")
        if "use_nats" in shown and _at_the_same_length(ladder_json["settings"]):
            axes = figure.axes[shown.index("use_nats")]
            limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
            # on both scales a straight line
            axes.axline((_LINEAR_BELOW, -_LINEAR_BELOW), (-_LINEAR_BELOW, _LINEAR_BELOW), **_EQUAL)
            axes.set(**limits)
        letters = {look[1]: rf"$\mathbf{{{look[1]}}}$" for look in styles.values() if many}
        shown_as = {label: (look[0], letters.get(look[1], look[1]), "none") for label, look in styles.items()}
        style.add_legend(figure, style.line_handles(shown_as))
        style.add_heading(figure, _told(ladder_json))
        if many:
            figure.draw_without_rendering()  # so that everything is where it will be
            for axes in figure.axes:
                _part_letters(axes)
    return figure


def _part_letters(axes: Axes) -> None:
    """Put each letter on the side of its point where it covers no other letter and no other point, if there is one."""
    letters: list[Annotation] = [each for each in axes.texts if isinstance(each, Annotation)]
    points = axes.transData.transform([each.xy for each in letters])
    taken: list[Bbox] = []
    for letter, point in zip(letters, points, strict=True):
        tried: list[tuple[int, int, tuple[float, float], Bbox]] = []
        for place in _BESIDE:
            letter.set_position(place)
            box = letter.get_window_extent()
            others = sum(box.contains(*each) for each in points if not np.array_equal(each, point))
            tried.append((box.count_overlaps(taken) + others, len(tried), place, box))
        _, _, place, box = min(tried, key=lambda each: each[:2])
        letter.set_position(place)
        taken.append(box)


def _spread(axes: Axes, name: str, ticks: Sequence[float] = _TICKS) -> None:
    """Make room about 0 on the x or y axis, which is in nats."""
    axis, limits = getattr(axes, f"{name}axis"), getattr(axes, f"get_{name}lim")()
    ticks = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
    axes.set(**{f"{name}scale": matplotlib.scale.SymmetricalLogScale(axis, linthresh=_LINEAR_BELOW)})
    axes.set(**{f"{name}lim": limits})
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def _at_the_same_length(settings: Json) -> bool:
    """Whether rise and use are of as many tokens: use is the rise with the other sign then, where texts are alike."""
    return "window" in settings and settings["n_beyond"] == settings["times"] * settings["window"]


def _use_label(ladder_json: Json) -> str:
    settings = ladder_json["settings"]
    dotted = "\ndotted: rise = -gain" if _at_the_same_length(settings) else ""
    return f"mean gain of {settings.get('n_beyond')} tokens over the last {settings.get('window')} [nats]{dotted}"


def _needle_label(ladder_json: Json) -> str:
    return f"needles found at\n{ladder_json['settings']['times']} × the window [%]"


def _correlated(ladder_json: Json, name: str) -> str:
    """A line with the rank correlation, where there is one."""
    found = ladder_json.get("correlations", {}).get(name)
    if not found or found["value"] is None:
        return ""
    between = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"\nrank correlation of {found['models']} models:\n{found['value']:.2f}{between}"


def _net_label(ladder_json: Json) -> str:
    return f"net recovery at k = {ladder_json['settings']['k']} [%]"


def _rise_label(ladder_json: Json) -> str:
    return f"loss at {ladder_json['settings']['times']} × the window - at the window\n[nats per token]"


def _told(ladder_json: Json) -> str:
    settings, points = ladder_json["settings"], ladder_json["points"]
    crossfit = "open: chosen by another seed; " if any(point["crossfit"] for point in points) else ""
    # the words for the fewest groups, and of models of several seeds if there are any
    of = min(points, key=lambda each: (-len(each["seeds"]), each.get("groups_over_tau", 0)))
    bars = f"bars: 95 %, {by_clusters(of, '_over_tau')}"
    return f"{settings['selector']}, N {settings['n_long']}, M {settings['n_short']}; {crossfit}{bars}"


def _against_size(axes: Axes, points: Sequence[Json], name: str, scale: float) -> None:
    if name in ("share_over_tau", "rise_nats"):  # they do not depend on who chose
        points = [point for point in points if not point["crossfit"]] or points
    for crossfit in (False, True):
        some = [point for point in points if point["crossfit"] == crossfit]
        for number, point in enumerate(some):
            before = sum(other["parameters"] == point["parameters"] for other in some[:number])
            x = point["parameters"] * 1.025 ** (2 * before + crossfit)  # beside each other, not on top
            y, bars = scale * style.numbers_of([point[name]]), scale * style.bar_lengths([point[name]])
            axes.errorbar([x], y, yerr=bars, color=_COLOUR, marker="o", **_looks(crossfit))
        sizes = sorted({point["parameters"] for point in some})
        means = [np.mean([p[name]["value"] for p in some if p["parameters"] == size]) for size in sizes]
        axes.plot(
            sizes, scale * np.array(means), color=_COLOUR, linestyle="--" if crossfit else "-", alpha=0.7
        )
    sizes = sorted({point["parameters"] for point in points})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [f"{size / 1e6:.2g}" for size in sizes])
    axes.set_xlabel("parameters [millions]")


def _joint_styles(points: Sequence[Json]) -> dict[str, style.Style]:
    """The looks of the models; where there are many each has a letter for its marker."""
    styles = style.model_styles(
        {each["label"]: style.encoding_of(each["label"], each["position_scheme"]) for each in points}
    )
    if len(styles) <= _MOST_MARKERS:
        return styles
    letters = ascii_uppercase + ascii_lowercase
    return {
        label: (colour, letter, line)
        for letter, (label, (colour, _, line)) in zip(letters, styles.items(), strict=False)
    }


def _jointly(
    axes: Axes, points: Sequence[Json], styles: dict[str, style.Style], name: str, scale: float
) -> None:
    for point in points:
        if name not in point:  # cross-fitted ones have no use
            continue
        colour, marker, _ = styles[point["label"]]
        across, up = [point[name]], [point["rise_nats"]]
        x, y = scale * style.numbers_of(across), style.numbers_of(up)
        bars: Json = {"xerr": scale * style.bar_lengths(across), "yerr": style.bar_lengths(up)}
        looks = _looks(point["crossfit"]) | {"marker": marker}
        if len(styles) > _MOST_MARKERS:
            looks |= {**_BESIDE_LETTER, "marker": "o"}
            axes.annotate(marker, (x[0], y[0]), _BESIDE[0], **_LETTER, color=colour)
        axes.errorbar(x, y, color=colour, **bars, **looks)


def _looks(is_open: bool) -> Json:
    looks: Json = {"markersize": 4, "linewidth": 0.8, "capsize": 2}
    return looks | (_OPEN if is_open else {})
