"""What stands in a figure, read back from it."""

import numpy as np


def line(axes, label):
    """(x, y) of the curve of this label, each (n,)."""
    [curve] = [one for one in axes.lines if one.get_label() == label]
    return np.asarray(curve.get_xdata(), dtype=float), np.asarray(curve.get_ydata(), dtype=float)


def points(axes, label):
    """The container of the points with bars of this label."""
    [container] = [one for one in axes.containers if one.get_label() == label and hasattr(one, "has_yerr")]
    return container


def bars(axes, label):
    """Ends of the error bars of this label, (n, 2, 2): lower and upper end, x and y."""
    [collection] = points(axes, label)[2]
    return np.array(collection.get_segments())


def legend(figure):
    """The names in the legend below all panels."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def assert_readable(figure):
    """Every panel has a title, and the legend is inside the figure."""
    figure.canvas.draw()
    for axes in figure.axes:
        assert axes.get_title(loc="left")
    for legend_box in figure.legends:
        box = legend_box.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0
