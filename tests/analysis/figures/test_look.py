"""Styles, layout and files of figures: each name has its look, files are whole and the same each time."""

import numpy as np
import pandas as pd
import pytest

from analysis.figures import style
from analysis.figures.figure2 import figure2
from tests.analysis.figures.drawn import line
from tests.support.refusals import refused
from tests.support.results import made_result


def small_figure():
    figure = style.new_figure(2, 1)
    figure.subplots().plot([1, 2], [3, 4], color="#D01C8B")
    return figure


def test_no_two_selectors_share_a_look():
    names = ["leave-one-out", "greedy", "mine", "leave-one-out@attention:32", "random", "best"]
    styles = style.selector_styles(names)
    assert list(styles) == names
    for part in ("color", "marker"):
        assert len({styles[name][part] for name in names}) == len(names)
    assert styles["greedy"] == style.selector_styles(["greedy"])["greedy"]


def test_no_two_models_look_alike():
    styles = style.model_styles(map(str, range(10)))
    assert len(styles) == len({tuple(look.values()) for look in styles.values()}) == 10


def test_curves_have_the_values_of_their_frame_a_little_apart():
    rows = [("a", 1, 0.1), ("a", 2, 0.2), ("a", 4, 0.3), ("b", 1, 0.4), ("b", 2, 0.5), ("b", 4, 0.6)]
    frame = pd.DataFrame(rows, columns=["selector", "k", "value"]).assign(
        low=0.0, high=[0.5, 0.5, np.nan] * 2
    )
    axes = small_figure().axes[0]
    look = {"color": "red", "marker": "o", "linestyle": "-"}
    both = pd.concat([frame.assign(far_context=context) for context in ("true", "placebo")])
    style.draw(axes, both, {"a": look, "b": look}, "selector", "k")
    for number, label in enumerate(("a", "a placebo", "b", "b placebo")):
        x, y = line(axes, label)
        np.testing.assert_allclose(x, np.array([1, 2, 4]) * 2 ** (0.03 * (number - 1.5)))
        assert y.tolist() == frame["value"][frame["selector"] == label[0]].tolist()


def test_bars_are_never_negative_and_absent_without_an_interval():
    frame = pd.DataFrame({"value": [1.0, 2.0, 3.0], "low": [0.5, 2.5, np.nan], "high": [1.5, 3.0, np.nan]})
    np.testing.assert_array_equal(style.bar_lengths(frame), [[0.5, 0, np.nan], [0.5, 1, np.nan]])


def with_bars(value, half, *, band=False):
    """A figure of these values with intervals of ``half`` to both sides, and its panel."""
    value, half = np.array(value), np.broadcast_to(half, len(value))
    frame = pd.DataFrame({"name": "a", "x": np.arange(len(value)), "value": value})
    frame = frame.assign(low=value - half, high=value + half)
    figure = style.new_figure(2, 1)
    axes, look = figure.subplots(), {"color": "red", "marker": "o", "linestyle": "-"}
    if band:
        style.draw_band(axes, frame["x"], frame, "a", look)
    else:
        style.draw(axes, frame, {"a": look}, "name", "x", joined=False)
    return figure, axes


@pytest.mark.parametrize("band", [False, True])
def test_axes_follow_the_points_and_cut_what_is_out_of_proportion(band):
    """An axis from -40 to 60 nats once showed losses of 2 to 5 nats as one line."""
    figure, axes = with_bars([5.0, 3.0, 2.0], [40.0, 50.0, 1.5], band=band)
    axes.axhline(6.0)
    figure.canvas.draw()
    low, high = axes.get_ylim()
    assert low == pytest.approx(0.5 - 0.08 * 5.5) and high == pytest.approx(6.0 + 0.08 * 5.5)
    [collection] = axes.collections
    drawn = np.concatenate([path.vertices for path in collection.get_paths()])[:, 1]
    assert drawn.min() == -47.0 and drawn.max() == 53.0  # cut by the edge of the panel, not shortened
    assert collection.get_clip_on()


@pytest.mark.parametrize("half", [0.0, 0.4, 3.0, np.nan])
def test_axes_hold_intervals_in_proportion(half):
    figure, axes = with_bars([5.0, 3.0, 2.0], half)
    before = axes.get_xlim(), axes.get_ylim()
    figure.canvas.draw()
    assert (axes.get_xlim(), axes.get_ylim()) == before
    assert np.isnan(half) or (before[1][0] <= 2 - half and before[1][1] >= 5 + half)


def test_limits_that_were_set_stay_and_panels_that_share_an_axis_show_the_points_of_all():
    figure, axes = with_bars([5.0, 3.0], 90.0)
    axes.set_ylim(-100, 100)
    figure.canvas.draw()
    assert axes.get_ylim() == (-100, 100)
    figure = style.new_figure(4, 1)
    look = {"color": "red", "marker": "o", "linestyle": "-"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, value in zip(panels, (1.0, 9.0), strict=True):
        frame = pd.DataFrame({"name": "a", "x": [0], "value": value, "low": -99.0, "high": 99.0})
        style.draw(axes, frame, {"a": look}, "name", "x", joined=False)
    figure.canvas.draw()
    for axes in panels:
        assert axes.get_ylim() == pytest.approx((1 - 0.08 * 8, 9 + 0.08 * 8))


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_a_figure_drawn_again_is_the_same_file(tmp_path, ending):
    """So that a figure of `results` changes in Git only where its numbers do."""
    for name in ("a", "b"):
        style.save_figure(small_figure(), tmp_path / f"{name}.{ending}")
    first, again = (tmp_path / f"{name}.{ending}" for name in ("a", "b"))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("width", [0, -1, 1, float("nan"), float("inf"), 1000])
def test_a_width_at_which_nothing_can_be_drawn(width):
    with refused("inches wide; give a width from 2 to 100"):
        figure2({"": made_result(40)}, width=width)
    with refused("inches wide"):
        style.small_panels(["a"], "x", "y", width=width)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.xyz", r"are not written as \.xyz; end the name in \.png, \.pdf, \.svg"),
        (".", "is a folder; name a file"),
    ],
)
def test_a_name_that_no_figure_can_have(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        style.save_figure(small_figure(), name)
    assert not list(tmp_path.iterdir())


def test_a_width_is_refused_before_the_summary_is_printed(tmp_path, call_main, capsys):
    made_result(40).save(tmp_path)
    with refused("inches wide"):
        call_main("figure2", tmp_path, "--width", 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [3.4, 7.0, 8.6])
def test_a_legend_is_no_wider_than_its_figure(width):
    names = [f"{model}, N {n_long:,}" for model in ("SmolLM2", "Gemma 3") for n_long in (256, 1024, 4096)]
    for count in range(1, len(names) + 1):
        figure = style.new_figure(width, 3.0)
        figure.subplots(1, 1)
        style.add_legend(figure, style.model_styles(dict.fromkeys(names[:count])))
        [legend] = figure.legends
        figure.canvas.draw()
        extent = legend.get_window_extent()
        assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width
        assert len(legend.get_texts()) == count
