"""The heat map of a text, against its numbers."""

import numpy as np
import pytest

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
