"""Styles, layout and files of figures: each name has its look, files are whole and the same each time."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

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


def test_rows_are_as_full_as_they_can_be():
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_panels("abcde", "k", "recovery", least=1.6)
    assert panels == figure.axes and [axes.get_title("left") for axes in panels] == list("abcde")
    places = [axes.get_subplotspec() for axes in panels]
    columns = [(place.rowspan.start, place.colspan.start) for place in places]
    assert columns == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [axes.get_xlabel() for axes in panels] == ["", "", "k", "k", "k"]


def test_a_heading_breaks_where_the_figure_ends():
    figure = small_figure()
    style.add_heading(figure, "", "a first part that is long", "a second one, and a third")
    assert figure.get_suptitle() == "a first part that is long; a second one, and a third"
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert box.x0 > 0 and box.x1 < figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert box.y0 > figure.axes[0].get_tightbbox().y1


class TestFiles:
    def test_a_png_has_a_palette_and_both_files_the_same_bytes_each_time(self, tmp_path):
        first = style.save_figure(small_figure(), tmp_path, "a")
        again = style.save_figure(small_figure(), tmp_path / "again")
        assert [path.name for path in first + again] == ["a.png", "again.png"]
        for one, other in zip(first, again, strict=True):
            assert one.read_bytes() == other.read_bytes()
        with Image.open(first[0]) as image:
            assert image.mode == "P" and image.size == (400, 200)
            colours = image.convert("RGB").getcolors(maxcolors=256)
        drawn = np.array([colour for _, colour in colours])
        assert np.abs(drawn - [0xD0, 0x1C, 0x8B]).max(axis=1).min() <= 4  # the line keeps its colour

    @pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
    def test_an_ending_says_what_to_write(self, tmp_path, ending):
        assert style.save_figure(small_figure(), tmp_path / f"a.{ending}") == [tmp_path / f"a.{ending}"]
        first = (tmp_path / f"a.{ending}").read_bytes()
        style.save_figure(small_figure(), tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes() == first
