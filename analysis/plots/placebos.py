"""What a recovery consists of, from a summary: luck, common context and the specific rest (docs/method.md, 2.3)."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.plots import style
from analysis.plots.figure2 import describe
from analysis.records.schema import SHUFFLED
from analysis.stats.placebos import LARGEST
from analysis.stats.recovery import BEST
from olmo_sparsity.util.result_files import Json

# from the target's own text to the most distant one
_FAR_CONTEXTS = {
    "true": "own text",
    SHUFFLED: "own text,\nshuffled",
    "same-group": "same group,\nelsewhere",
    "placebo": "another\ngroup",
}
_PARTS: dict[str, Json] = {
    "luck": {"facecolor": "white", "hatch": "//////"},
    "common context": {"facecolor": "0.75"},
    "specific": {"facecolor": "0.35"},
}
_EDGE: Json = {"edgecolor": "0.2", "linewidth": 0.6}
_OF_GAIN = r"recovery [fraction of $L_{short} - L_{long}$]"


def placebos_figure(summary: Json, *, width: float = style.PAGE, heading: bool = True) -> Figure | None:
    """(a) recovery of every selector in every far context at one k, (b) luck, common context and specific rest of the
    first signed selector whose target-blind form was measured; None where only one placebo was."""
    found = summary.get("placebos")
    if not found:
        return None
    styles = style.selector_styles(summary["selectors"])
    shown = {name: styles[name] for name in found["recovery"] if name != BEST}
    panels = 2 if found["parts"] else 1
    columns = min(style.columns_in(width, 3.2), panels)
    rows = panels // columns
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, 2.7 * rows + 1.1)
        axes = figure.subplots(rows, columns, squeeze=False).flat
        _plot_far_contexts(axes[0], found, shown, str(summary["gain_bins"]["k"]), "groups" in summary)
        handles: list[Any] = [*style.marker_handles(shown)]
        if found["parts"]:
            _plot_parts(axes[1], found["parts"][0])
            handles += [Patch(label=name, **look, **_EDGE) for name, look in _PARTS.items()]
        style.add_legend(figure, handles)
        if heading:
            shown_targets = f"; shown: the {found['targets']:,} over $\\tau$ that have every far context"
            style.add_heading(figure, describe(summary) + shown_targets)
    return figure


def _plot_far_contexts(
    axes: Axes, found: Json, shown: dict[str, style.Style], k: str, has_groups: bool
) -> None:
    contexts = [context for context in _FAR_CONTEXTS if context in found["far_contexts"]]
    step = min(0.14, 0.8 / len(shown))
    for number, (name, look) in enumerate(shown.items()):
        places = [place + step * (number - (len(shown) - 1) / 2) for place in range(len(contexts))]
        intervals = [found["recovery"][name][context][k] for context in contexts]
        style.draw_points(axes, places[:1], intervals[:1], f"{name} recovery", look)
        style.draw_points(axes, places[1:], intervals[1:], f"{name} placebo_recovery", look)
    labels = [_FAR_CONTEXTS[context] for context in contexts]
    if not has_groups:
        labels = [label.replace("same group", "same text").replace("group", "document") for label in labels]
    axes.set_xticks(range(len(contexts)), labels)
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.axhline(0.0, **style.REFERENCE)
    axes.axhline(1.0, linestyle=":", **style.REFERENCE)
    axes.set_ylabel(_OF_GAIN)
    axes.set_title(f"(a) Recovery by far context, k = {k}", loc="left")


def _plot_parts(axes: Axes, pair: Json) -> None:
    """Bars side by side, not stacked: luck may be negative, and every part has an interval of its own."""
    values = {
        "luck": [each["luck"] for each in pair["ks"].values()],
        "common context": [each["common_context"][LARGEST] for each in pair["ks"].values()],
        "specific": [each["specific"] for each in pair["ks"].values()],
    }
    for number, (name, intervals) in enumerate(values.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(intervals))]
        heights = style.numbers_of(intervals)
        axes.bar(places, heights, 0.25, label=name, **_PARTS[name], **_EDGE)
        bars: Json = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(places, heights, style.bar_lengths(intervals), label=f"{name} interval", **bars)
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.set_xticks(range(len(pair["ks"])), list(pair["ks"]))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("k [far tokens added to the short context]")
    axes.set_ylabel(_OF_GAIN)
    axes.set_title(f"(b) Parts of {pair['signed']};\nblind form: {pair['blind']}", loc="left")
