"""The figure of what the influence analysis costs."""

import numpy as np

from analysis.plots.costs import cost_figure, pareto_figure


def made_up_result():
    def point(selector, n_long, k, targets, seconds, peak):
        shape = {"selector": selector, "n_long": n_long, "n_short": 32, "k": k, "targets": targets}
        return {**shape, "seconds_per_target": seconds, "peak_bytes": peak}

    sweeps = {
        "n_long": [point("leave-one-out", n, 8, 1, n / 100, n * 10**6) for n in (128, 256, 512)]
        + [point("greedy", n, 8, 1, n / 50, None) for n in (128, 256, 512)],
        "k": [point("leave-one-out", 256, k, 1, 2.56, 0) for k in (1, 4, 16)]
        + [point("greedy", 256, k, 1, 0.5 * k, 3 * 10**6) for k in (1, 4, 16)],
        "targets": [point("leave-one-out", 256, 8, n, 2.0 / n, 10**6 * n) for n in (1, 4)],
    }
    machine = {"gpu": None, "cores": 2, "processor": "x86_64", "threads": 1}
    return {
        "model": "a model",
        "parameters": 1000,
        "machine": machine,
        "cost": {"sweeps": sweeps},
    }


def test_the_figure_draws_the_json():
    figure = cost_figure(made_up_result())

    def curve(panel, selector):
        (line,) = [each for each in figure.axes[panel].lines if each.get_label().startswith(selector)]
        return line.get_xdata(), line.get_ydata()

    np.testing.assert_allclose(curve(0, "leave-one-out"), ([128, 256, 512], [1.28, 2.56, 5.12]))
    np.testing.assert_allclose(curve(1, "greedy"), ([1, 4, 16], [0.5, 2, 8]))
    np.testing.assert_allclose(curve(3, "leave-one-out")[1], [128, 256, 512])  # MB
    assert np.isnan(curve(3, "greedy")[1]).all()  # not measured
    assert np.isnan(curve(4, "leave-one-out")[1]).all()  # no growth has no place on a logarithmic axis
    np.testing.assert_allclose(curve(5, "leave-one-out"), ([1, 4], [1, 4]))
    figure.canvas.draw()
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == [
        "N [tokens of long context]",
        "k [selected tokens]",
        "targets at once",
    ]
    assert [figure.axes[panel].get_ylabel() for panel in (0, 3)] == ["seconds per target", "peak memory [MB]"]
    assert figure.axes[1].get_title(loc="left") == "N = 256, M = 32, targets = 1"


def test_an_interval_that_a_single_document_cannot_have_is_not_drawn():
    net = {
        "attention": {"value": 0.4, "low": 0.3, "high": 0.5},
        "leave-one-out": {"value": 0.6, "low": None, "high": None},
    }
    rows = {
        name: {"seconds_per_target": n, "net_recovery": {"4": each}}
        for n, (name, each) in enumerate(net.items(), 1)
    }
    screened = {"k": 4, "selectors": rows, "targets": 9, "over_tau": 9, "documents": 1, "tau_nats": 1.0}
    (axes,) = pareto_figure({"model": "a model", "screened": screened}).axes
    drawn = {bars.get_label(): bars.lines[0].get_ydata()[0] for bars in axes.containers}
    assert drawn == {"attention": 40, "leave-one-out": 60}
    segments = {bars.get_label(): bars.lines[2][0].get_segments()[0] for bars in axes.containers}
    np.testing.assert_allclose(segments["attention"], [[1, 30], [1, 50]])
    assert not len(segments["leave-one-out"])
