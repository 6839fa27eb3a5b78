"""The heat map of a text, against its numbers."""

import json
import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Annotation, Text

from analysis.xray import InfluenceMap
from analysis.xray.figure import MOST_CELLS, map_figure
from tests.support.xrays import made_map


@pytest.mark.parametrize("length", [100, 800])
def test_a_cell_is_the_strongest_influence_in_it_on_a_symmetric_scale(length: int) -> None:
    xray = made_map(length)
    figure = map_figure(xray)
    axes, _, bar = figure.axes
    image = axes.images[0]
    drawn, matrix = np.ma.filled(image.get_array().astype(float), np.nan), xray.matrix()
    step = -(-length // MOST_CELLS)
    assert drawn.shape == (-(-length // step),) * 2
    for row, column in np.random.default_rng(0).integers(len(drawn), size=(200, 2)):
        cell = matrix[row * step : (row + 1) * step, column * step : (column + 1) * step].ravel()
        seen = cell[~np.isnan(cell)]
        value = drawn[row, column]
        assert np.isnan(value) if not len(seen) else value == seen[np.argmax(np.abs(seen))]
    low, high = image.get_clim()
    assert -low == high == max(1, np.nanmax(np.abs(matrix)))
    assert ("strongest of" in bar.get_xlabel()) == (step > 1)


def with_strongest(places: list[tuple[int, int]], length: int) -> InfluenceMap:
    """A map whose largest influences are of i on t, for all places (i, t), descending."""
    xray = made_map(length)
    rows = [np.zeros(max(0, t - 16), dtype=np.float32) for t in range(length)]
    for number, (i, t) in enumerate(places):
        rows[t][i] = 9 - number
    xray.tokens["influence"] = pd.Series(rows)
    return xray


@pytest.mark.parametrize(
    "places",
    [
        [(40, 70), (41, 71), (40, 72), (42, 73), (41, 74)],
        [(0, 17), (1, 18), (0, 19), (1, 20), (0, 21)],
        [(0, 995), (1, 996), (2, 997), (3, 998), (4, 999)],
        [(970, 995), (971, 996), (972, 997), (973, 998), (974, 999)],
        [(i, 500) for i in range(1)],
    ],
    ids=["in the middle", "above on the left", "below on the left", "below on the right", "alone"],
)
@pytest.mark.parametrize("length", [1000, 100])
def test_numbers_of_the_strongest_influences_hide_no_other_number(
    places: list[tuple[int, int]], length: int
) -> None:
    figure = map_figure(with_strongest([(i, t) for i, t in places if t < length], length))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    numbers = [text for text in axes.texts if isinstance(text, Annotation)]
    boxes = [Text.get_window_extent(text) for text in numbers]  # without their lines
    assert [text.get_text() for text in numbers] == [
        str(n + 1) for n, (_, t) in enumerate(places) if t < length
    ]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    (named,) = [text.get_window_extent() for text in axes.texts if not isinstance(text, Annotation)]
    for text, box in zip(numbers, boxes, strict=True):
        assert axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
        assert axes.bbox.containsy(box.y0) and axes.bbox.containsy(box.y1)
        assert not box.overlaps(named)
        assert np.hypot(*text.xyann) < 50


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (" the", "“the”"),
        ("Привет", "“Привет”"),
        (" λόγος", "“λόγος”"),
        ("中文", "“U+4E2DU+6587”"),
        ("中文字", "“U+4E2DU+6587…”"),
        ("a\u200bb", "“aU+200Bb”"),
        (");\n\n}", "“);\\n\\n}”"),
        ("  ", "“␣␣”"),
        ("\n", "“\\n”"),
        ("$x^2$", "“$x^2$”"),
        ("internationalization", "“international…”"),
    ],
)
def test_a_letter_that_the_font_does_not_have_is_shown_by_its_code_point(piece: str, shown: str) -> None:
    xray = with_strongest([(40, 70)], 100)
    xray.tokens.loc[40, "piece"] = piece
    xray.tokens.loc[70, "piece"] = "target"
    [text] = [text for text in map_figure(xray).axes[0].texts if not isinstance(text, Annotation)]
    assert text.get_text() == f"needed → predicted\n1  {shown} → “target”: 9.0 nats"


def test_a_part_of_a_character_is_named_in_every_display() -> None:
    xray = with_strongest([(40, 70)], 100)
    xray.tokens.loc[[40, 41, 42, 70], "piece"] = ["", "", "家", "é"]
    [text] = [text for text in map_figure(xray).axes[0].texts if not isinstance(text, Annotation)]
    assert "“U+5BB6 (1/3)” → “é”" in text.get_text()
    assert "'é' at 70 needs '家 (1/3)' at 40 most" in repr(xray)
    data = re.search(r'id="data">(.*?)</script>', xray.to_html())
    labels = json.loads(data[1])["labels"]  # type: ignore[index]
    assert {place: labels[place] for place in ("40", "41", "42")} == {
        "40": "家 (1/3)",
        "41": "家 (2/3)",
        "42": "家 (3/3)",
    }
