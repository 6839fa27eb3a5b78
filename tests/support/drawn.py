"""What a figure shows."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D


def curve(axes: Axes, label: str) -> Line2D:
    """The one line of that label."""
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def container(axes: Axes, label: str) -> Any:
    """The bars, or points with error bars, of that label."""
    (found,) = [each for each in axes.containers if each.get_label() == label]
    return found


def intervals_drawn(axes: Axes, label: str, direction: str) -> np.ndarray:
    """Value, lower and upper end of each error bar of that label, (bars, 3); ``direction`` is x or y."""
    points, _, (bars,) = container(axes, label).lines
    part = "xy".index(direction)
    ends = np.array([path.vertices[:, part] for path in bars.get_paths()])
    # without a marker there is no line of points, and the bar has no value but that of what it stands on
    middle = ends.mean(axis=1) if points is None else np.array(points.get_data()[part], dtype=float)
    return np.column_stack([middle, ends])


def legend_names(figure: Figure) -> list[str]:
    """What the legend below all panels says, in its order."""
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]
