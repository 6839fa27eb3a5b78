"""What a figure shows."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D


def curve(axes: Axes, label: str) -> Line2D:
    """The one line of that label."""
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def container(axes: Axes, label: str) -> Any:
    """The bars, or points with error bars, of that label."""
    (found,) = [each for each in axes.containers if each.get_label() == label]
    return found
