"""Kinds, distances, tokens needed and placebos: figures with the values of their frames."""

import numpy as np
import pytest

from analysis.figures.breakdowns import (
    distances_figure,
    kinds_figure,
    placebos_figure,
    tokens_needed_figure,
)
from analysis.stats import numbers
from analysis.token_kinds import KINDS
from tests.analysis.figures.drawn import bars, line, points
from tests.support.frames import rows_of
from tests.support.results import made_result

FEW = {"resamples": 50}


@pytest.fixture(scope="module")
def result():
    return made_result(n=600, groups=12, kinds=KINDS[:3])


def test_kinds_are_points_with_their_intervals(result):
    figure, frame = kinds_figure(result, **FEW), numbers.kinds(result, **FEW)
    for panel, label, keys in (
        (0, "of all targets", {"name": "share"}),
        (0, r"of those over $\tau$", {"name": "share_over_tau"}),
        (1, "of all targets", {"name": "gain_nats"}),
        (2, "random", {"selector": "random", "far_context": "true"}),
        (2, "random placebo", {"selector": "random", "far_context": "placebo"}),
        (3, "leave-one-out", {"selector": "leave-one-out", "far_context": "net"}),
    ):
        rows = rows_of(frame, **keys)
        np.testing.assert_array_equal(line(figure.axes[panel], label)[0], rows["value"])
        ends = bars(figure.axes[panel], label)[:, :, 0]
        whole = np.isfinite(rows["low"]).to_numpy()
        np.testing.assert_allclose(ends[whole], rows[["low", "high"]][whole], atol=1e-12)


def test_distances_are_shares_over_the_uniform_share(result):
    figure = distances_figure(result, **FEW)
    frame = numbers.distances(result, **FEW)
    assert len(figure.axes) == 3
    for axes, selector in zip(figure.axes, result.selectors, strict=True):
        assert axes.get_title("left") == selector
        for context, label in (("true", selector), ("placebo", f"{selector} placebo")):
            rows = rows_of(frame, selector=selector, far_context=context)
            x, y = line(axes, label)
            np.testing.assert_allclose(y, rows["value"] / rows["uniform"])
            assert (x > rows["from_tokens"]).all() and (x < rows["to_tokens"]).all()


def test_tokens_needed_are_steps_and_the_rest_is_said(result):
    figure = tokens_needed_figure(result, **FEW)
    frame = numbers.tokens_needed(result, **FEW)
    for axes, selector in zip(figure.axes, dict.fromkeys(frame["selector"]), strict=True):
        for context, label in (("true", selector), ("placebo", f"{selector} placebo")):
            _, y = line(axes, label)
            np.testing.assert_array_equal(
                y, rows_of(frame, name="reached", selector=selector, far_context=context)["value"]
            )
        [never] = rows_of(frame, name="never", selector=selector)["value"]
        assert axes.texts[0].get_text().startswith(f"more than 8: {100 * never:.1f} [")


def test_parts_of_a_recovery():
    assert placebos_figure(made_result(), **FEW) is None
    result = made_result(
        far_contexts=("true", "placebo", "same-group", "shuffled"),
        selectors=("leave-one-out", "leave-one-out-kl", "random"),
    )
    figure = placebos_figure(result, **FEW)
    frame = numbers.placebos(result, **FEW)
    k_4 = rows_of(frame, name="recovery", selector="random", k=4).set_index("far_context")["value"]
    contexts, parts = figure.axes
    assert points(contexts, "random")[0].get_ydata().tolist() == [k_4["true"]]
    hollow = points(contexts, "random placebo")[0]
    assert hollow.get_ydata().tolist() == k_4[["shuffled", "same-group", "placebo"]].tolist()
    labels = [text.get_text().replace("\n", " ") for text in contexts.get_xticklabels()]
    assert labels == ["own text", "own text, shuffled", "same text, elsewhere", "another document"]
    of_first = {"selector": "leave-one-out", "blind": "leave-one-out-kl"}
    for label, keys in (
        ("selection bias (winner's curse)", {"name": "selection_bias"}),
        ("common context", {"name": "common_context", "far_context": numbers.LARGEST}),
        ("specific", {"name": "specific"}),
    ):
        rows = rows_of(frame, **keys, **of_first)
        np.testing.assert_array_equal(line(parts, label)[1], rows["value"])
        np.testing.assert_allclose(bars(parts, label)[:, :, 1], rows[["low", "high"]], atol=1e-12)
