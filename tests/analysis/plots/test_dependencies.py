"""Kinds, distances and tokens needed: what is drawn is what the summary says."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.plots.dependencies import distances_figure, kinds_figure, tokens_needed_figure
from analysis.plots.style import panel_title, selector_styles
from tests.support.drawn import container, curve, intervals_drawn, legend_names
from tests.support.made_up_summary import EVERY_SELECTOR, FEW_SELECTORS, KS, made_up_summary

CONTEXTS = ("true", "placebo")


@pytest.fixture(scope="module")
def summary() -> dict:
    return made_up_summary()


def expected(intervals: list[dict]) -> np.ndarray:
    return np.array([[each[bound] for bound in ("value", "low", "high")] for each in intervals])


def patches_of(axes: Axes, label: str) -> list[Rectangle]:
    return list(container(axes, label).patches)


def test_bars_of_kinds_are_the_summary(summary: dict) -> None:
    panels = kinds_figure(summary).axes
    kinds = summary["kinds"]["kinds"]
    for axes, key in zip(
        (panels[0], panels[0], panels[1]), ("share", "share_over_tau", "gap_short_minus_long"), strict=True
    ):
        wanted = expected([each[key] for each in kinds])
        assert [bar.get_width() for bar in patches_of(axes, key)] == wanted[:, 0].tolist()
        np.testing.assert_allclose(intervals_drawn(axes, f"{key} interval", "x"), wanted)
    for name in ("leave-one-out", "random", "nearest"):
        net = expected([each["selectors"][name]["net_recovery"] for each in kinds])
        assert [bar.get_width() for bar in patches_of(panels[3], f"{name} net_recovery")] == net[
            :, 0
        ].tolist()
        np.testing.assert_allclose(intervals_drawn(panels[3], f"{name} net_recovery interval", "x"), net)
        for key in ("recovery", "placebo_recovery"):
            wanted = expected([each["selectors"][name][key] for each in kinds])
            np.testing.assert_allclose(intervals_drawn(panels[2], f"{name} {key}", "x"), wanted)


def test_every_bar_stands_in_the_row_of_its_kind(summary: dict) -> None:
    figure = kinds_figure(summary)
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    for label, each in zip(labels, summary["kinds"]["kinds"], strict=True):
        counts = f"{each['targets_over_tau']} of n = {each['targets']} over"
        assert label.startswith(f"{each['kind']}\n{counts}")
        assert label.endswith(f"in {each['documents_over_tau']} documents")
    for axes in figure.axes:
        for each in axes.containers:
            patches: Any = getattr(each, "patches", [])
            rows = [bar.get_y() + bar.get_height() / 2 for bar in patches]
            assert [round(row) for row in rows] == list(range(len(rows)))
    top, bottom = figure.axes[0].get_ylim()[::-1]
    assert top < bottom  # the first kind is the topmost


def test_kinds_of_few_documents_are_hatched(summary: dict) -> None:
    """30 documents are enough, 29 are not."""
    documents = [each["documents_over_tau"] for each in summary["kinds"]["kinds"]]
    assert {29, 30} <= set(documents)
    figure = kinds_figure(summary)
    for axes in figure.axes:
        rows = [each for each in axes.patches if each.get_hatch()]
        assert [each.get_y() + 0.5 for each in rows] == [row for row, n in enumerate(documents) if n < 30]
    assert any("fewer than 30 documents" in text for text in legend_names(figure))


def test_a_kind_without_targets_over_tau_has_no_recovery() -> None:
    """Its recoveries are None in the summary; its row stays, and nothing but the marks of recovery is missing."""
    summary = made_up_summary(FEW_SELECTORS)
    nothing = {"value": None, "low": None, "high": None}
    kind = summary["kinds"]["kinds"][1]
    kind["selectors"] = {
        name: dict.fromkeys(recoveries, nothing) for name, recoveries in kind["selectors"].items()
    }
    drawn = intervals_drawn(kinds_figure(summary).axes[2], "random recovery", "x")
    assert np.isnan(drawn[1]).all() and np.isfinite(np.delete(drawn, 1, axis=0)).all()


def test_distances_are_the_summary_over_uniform(summary: dict) -> None:
    panels = distances_figure(summary).axes
    distances = summary["distances"]
    edges = np.array(distances["edges"])
    uniform = np.diff(edges) / 112  # of 112 far tokens, as many per bin as it is wide
    assert [axes.get_title("left").replace("\n", "") for axes in panels] == list(distances["selectors"])
    styles = selector_styles(EVERY_SELECTOR)
    for axes, (name, shares) in zip(panels, distances["selectors"].items(), strict=True):
        for context in CONTEXTS:
            wanted = expected(shares[context]) / uniform[:, None]
            np.testing.assert_allclose(intervals_drawn(axes, context, "y"), wanted)
            line = container(axes, context).lines[0]
            assert (line.get_color(), line.get_marker()) == styles[name][:2]
            assert line.is_dashed() == (line.get_markerfacecolor() == "white") == (context == "placebo")
            x = np.asarray(line.get_xdata())
            assert (edges[:-1] < x).all() and (x < edges[1:]).all()
        assert [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2] == [[1, 1]]


def test_the_nearest_control_does_not_flatten_the_others(summary: dict) -> None:
    """All its tokens fall into one bin: that point is above the panel, and its value written into a corner."""
    panels = {axes.get_title("left"): axes for axes in distances_figure(summary).axes}
    (top,) = {axes.get_ylim()[1] for axes in panels.values()}
    assert top < 10 and [text.get_text() for text in panels["nearest"].texts] == ["from 17: 16"]  # 112 / 7
    assert not panels["greedy"].texts
    alone = distances_figure(made_up_summary(("nearest",))).axes[0]
    assert alone.get_ylim()[1] > 16 and not alone.texts


def test_tokens_needed_are_the_summary(summary: dict) -> None:
    panels = tokens_needed_figure(summary).axes
    needed = summary["tokens_needed"]["selectors"]
    assert [axes.get_title("left") for axes in panels] == list(map(panel_title, needed))
    for axes, shares in zip(panels, needed.values(), strict=True):
        for context in CONTEXTS:
            line = curve(axes, context)
            wanted = expected(shares[context])
            assert np.asarray(line.get_xdata()).tolist() == list(KS)
            assert np.asarray(line.get_ydata()).tolist() == wanted[:, 0].tolist()
            assert line.get_drawstyle() == "steps-post" and line.is_dashed() == (context == "placebo")
            (bars,) = container(axes, f"{context} interval").lines[2]
            ends = np.array([path.vertices for path in bars.get_paths()])
            np.testing.assert_allclose(ends[:, :, 1], wanted[:, 1:])
            np.testing.assert_allclose(ends[:, 0, 0], KS)


def test_the_censored_share_is_written_above_the_curves(summary: dict) -> None:
    panels = dict(zip(summary["tokens_needed"]["selectors"], tokens_needed_figure(summary).axes, strict=True))
    # leave-one-out: 0.62 · 1.11 = 0.688 have enough with 8 tokens, hence 31 % [27, 35] have not
    assert [text.get_text() for text in panels["leave-one-out"].texts] == ["more than 8: 31 [27, 35] %"]
    for axes in panels.values():
        assert axes.get_ylim()[1] > 1.1  # nothing is above 100 %, so the text is clear of every curve
