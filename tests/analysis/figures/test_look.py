"""Styles, layout and files of figures: each name has its look, files are whole and the same each time."""

import numpy as np
import pandas as pd
import pytest

from analysis.figures import style
from tests.analysis.figures.drawn import line


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


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_a_figure_drawn_again_is_the_same_file(tmp_path, ending):
    """So that a figure of `results` changes in Git only where its numbers do."""
    for name in ("a", "b"):
        style.save_figure(small_figure(), tmp_path / f"{name}.{ending}")
    first, again = (tmp_path / f"{name}.{ending}" for name in ("a", "b"))
    assert first.read_bytes() == again.read_bytes()
