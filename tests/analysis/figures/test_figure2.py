"""Figure 2 draws the values of the frames of numbers, of one Result by selector, of several by their names."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.figures.figure2 import describe, figure2, kept_as_figure
from analysis.stats import numbers
from olmo_sparsity.util.errors import UserError
from tests.analysis.figures.drawn import assert_readable, legend, line, points
from tests.support.results import made_result

FEW = {"resamples": 50}
SELECTORS = ("leave-one-out", "leave-one-out-kl", "greedy", "random")


@pytest.fixture(scope="module")
def result():
    return made_result(selectors=SELECTORS)


@pytest.fixture(scope="module")
def figure(result):
    return figure2({"": result}, **FEW)


def values_of(frame, selector, far_context):
    return frame[(frame["selector"] == selector) & (frame["far_context"] == far_context)]["value"]


def test_loss_and_net_recovery_are_those_of_the_frames(result, figure):
    losses, recovery = numbers.losses(result, **FEW), numbers.recovery(result, **FEW)
    for selector in ("leave-one-out-kl", "leave-one-out", "random"):
        for label, context in ((selector, "true"), (f"{selector} placebo", "placebo")):
            x, y = line(figure.axes[0], label)
            np.testing.assert_array_equal(y, values_of(losses, selector, context))
            np.testing.assert_allclose(x, result.ks, rtol=0.1)
        _, net = line(figure.axes[1], selector)
        np.testing.assert_array_equal(net, values_of(recovery, selector, "net"))
    over = result.targets.iloc[result.over]
    for name in ("short", "long"):
        _, y = line(figure.axes[0], f"$L_{{{name}}}$")
        np.testing.assert_allclose(y, over[f"loss_{name}_nats"].mean())


def test_gain_bins_are_those_of_the_frame(result, figure):
    bins = numbers.gain_bins(result, **FEW)
    for selector in ("leave-one-out-kl", "random"):
        drawn = points(figure.axes[2], f"{selector} placebo")
        np.testing.assert_array_equal(drawn[0].get_ydata(), values_of(bins, selector, "placebo"))
        assert drawn[0].get_markerfacecolor() == "white"
        np.testing.assert_array_equal(
            points(figure.axes[2], selector)[0].get_ydata(), values_of(bins, selector, "true")
        )
    n = bins["n_targets"].groupby(bins["from_nats"]).first()
    labels = [text.get_text() for text in figure.axes[2].get_xticklabels()]
    ranges = ("1–2", "2–3", "3–5", "> 5")
    assert labels == [f"{gain}\nn={count}" for gain, count in zip(ranges, n, strict=True)]


def test_several_results_have_their_names_in_the_legend():
    results = {"base": made_result(run=1), "tuned": made_result(run=2, tau_nats=0.5)}
    figure = figure2(results, **FEW)
    assert_readable(figure)
    assert legend(figure)[:2] == ["base", "tuned"]
    for name, result in results.items():
        recovery = numbers.recovery(result, **FEW)
        _, net = line(figure.axes[1], name)
        np.testing.assert_array_equal(net, values_of(recovery, "leave-one-out", "net"))
    labels = [text.get_text() for text in figure.axes[2].get_xticklabels()]
    assert labels == ["0.5–1", "1–2", "2–3", "3–5", "> 5"]
    assert len(points(figure.axes[2], "base")[0].get_xdata()) == 4  # it has no targets below its tau
    two = figure2(results, selectors=["greedy", "random"], **FEW)
    assert legend(two)[:2] == ["base, greedy", "base, random"]


def test_several_results_have_one_selector_in_all_panels():
    signed = made_result(selectors=("leave-one-out", "greedy", "random"))
    figure = figure2({"base": made_result(selectors=SELECTORS), "tuned": signed}, **FEW)
    assert legend(figure)[:2] == ["base", "tuned"]
    assert figure.axes[2].get_title("left").endswith("k = 4\nleave-one-out")


@pytest.mark.parametrize("texts", [2, 60])
def test_the_heading_says_whether_there_are_bars(texts):
    heading = describe({"": made_result(texts=texts)})
    assert ("bars: 95 %" in heading) == (texts == 60)
    assert ("2 documents: too few for an interval" in heading) == (texts == 2)


def test_wide_intervals_of_the_losses_are_cut_at_the_panel():
    """Those of L_short and L_long, too, which stand beside it."""
    result = made_result(texts=4)
    over = result.targets.iloc[result.over]
    of_text = over["text"].to_numpy()
    long = over["loss_long_nats"] + np.where(of_text == of_text.min(), 60.0, 0.0)
    targets = result.targets.copy()
    targets.loc[over.index, "loss_long_nats"] = long
    targets.loc[over.index, "loss_short_nats"] += long - over["loss_long_nats"]
    choices = result.choices.copy()
    choices["loss_nats"] += (long - over["loss_long_nats"])[choices["target_id"]].to_numpy()
    figure = figure2({"": replace(result, targets=targets, choices=choices)})
    panel = figure.axes[0]
    figure.canvas.draw()
    _, values = line(panel, "leave-one-out")
    low, high = panel.get_ylim()
    assert low < values.min() and high > values.max() and high - low < 4 * np.ptp(values)
    beside = [bar for bar in panel.collections if not bar.get_clip_on()]
    assert not beside


def test_what_is_missing():
    figure = figure2({"": made_result(far_contexts=("true",))}, **FEW)
    assert figure.axes[1].get_title("left") == "(b) Recovery" and "placebo" not in " ".join(legend(figure))
    with pytest.raises(UserError, match="mine was not measured; choose from leave-one-out"):
        figure2({"": made_result()}, selectors=["mine"], **FEW)
    assert "cross-fit" in describe({"": made_result(crossfit=True)})


def test_ways_of_keeping_stand_side_by_side(result):
    """A panel for each, of its own rows; Figure 2 shows the first that was measured where none is plain text."""
    cache = result.choices.assign(level="cache", sinks=4)
    cache["loss_nats"] = cache["loss_nats"].map(lambda values: values + 0.5)
    both = replace(result, choices=pd.concat([cache, result.choices], ignore_index=True))
    assert kept_as_figure(result, **FEW) is None
    figure = kept_as_figure(both, **FEW)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["as cache, 4 sinks", "as text"]
    recovery = numbers.recovery(both, **FEW)
    for axes, kept_at in zip(figure.axes, ("cache", "text"), strict=True):
        _, y = line(axes, "leave-one-out")
        of_way = recovery[recovery["level"] == kept_at]
        np.testing.assert_array_equal(y, values_of(of_way, "leave-one-out", "true"))
    units = [
        "before:16",
        "ranked:16",
        "drawn:16",
        "read:16",
        "read-behind:16",
        "read-ranked:16",
        "read-drawn:16",
    ]
    windows = [cache.assign(unit=unit) for unit in units]
    many = replace(result, choices=pd.concat([cache, *windows], ignore_index=True))
    assert_readable(kept_as_figure(many, **FEW))
    only = replace(result, choices=cache)
    _, net = line(figure2({"": only}, **FEW).axes[1], "random")
    np.testing.assert_array_equal(net, values_of(numbers.recovery(only, **FEW), "random", "net"))
