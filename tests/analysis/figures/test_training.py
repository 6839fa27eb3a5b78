"""Loss curves from metrics.jsonl: what is drawn is what was logged."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.figures.training import SMOOTHED, main, read_runs, smooth, training_figure
from olmo_sparsity.util.errors import UserError
from tests.analysis.figures.drawn import assert_readable, legend, line


def rows(steps=40, evaluated=(20, 40), by_position=True, offset=0.0):
    logged = []
    for step in range(1, steps + 1):
        place = {"step": step, "tokens": 100 * step}
        logged.append({**place, "loss_nats": offset + 3 + 5 / step})
        if step in evaluated:
            bins = [{"from": 8 * i, "to": 8 * i + 8, "loss_nats": offset + step + i} for i in range(4)]
            extra = {"heldout_loss_by_position": bins, "heldout_window_tokens": 16} if by_position else {}
            logged.append({**place, "heldout_loss_nats": offset + 3.1 + 5 / step, **extra})
    return logged


def frame(**options):
    return pd.DataFrame(rows(**options))


@pytest.mark.parametrize(
    ("x", "scale", "name"), [("tokens", 100, "training tokens"), ("step", 1, "optimizer steps")]
)
def test_curves_are_the_logged_values(x, scale, name):
    figure = training_figure({"a": frame()}, x=x)
    axes = figure.axes[0]
    steps = np.arange(1, 41)
    raw, _, heldout = axes.lines
    np.testing.assert_allclose(raw.get_xydata(), np.stack([scale * steps, 3 + 5 / steps], axis=1))
    np.testing.assert_allclose(line(axes, "a")[1], smooth(3 + 5 / steps, SMOOTHED))
    np.testing.assert_allclose(heldout.get_xydata(), [[20 * scale, 3.35], [40 * scale, 3.225]])
    assert axes.get_xlabel() == name and axes.get_ylabel() == "loss [nats per token]"


def test_a_loss_that_is_not_finite_leaves_a_gap():
    data = frame(evaluated=())
    data.loc[9, "loss_nats"] = np.nan
    _, y = line(training_figure({"a": data}).axes[0], "a")
    assert len(y) == 39 and np.isfinite(y).all()
    with pytest.raises(UserError, match="a has no training loss in its metrics.jsonl yet"):
        training_figure({"a": frame(steps=0)})


def test_by_position_at_the_last_evaluation():
    figure = training_figure({"a": frame(), "b": frame(offset=2)})
    assert_readable(figure)
    axes = figure.axes[1]
    assert np.stack(line(axes, "a"), axis=1).tolist() == [[4, 40], [12, 41], [20, 42], [28, 43]]
    assert line(axes, "b")[1].tolist() == [42, 43, 44, 45]
    assert axes.texts[0].get_text() == "trained on windows\nof 16 tokens"
    assert "[tokens]" in axes.get_xlabel() and "[nats per token]" in axes.get_ylabel()
    assert legend(figure) == ["a", "b"]


def test_without_evaluation_there_is_one_panel():
    assert len(training_figure({"a": frame(evaluated=())}).axes) == 1
    assert len(training_figure({"a": frame(by_position=False)}).axes) == 1
    assert len(training_figure({"a": frame(), "b": frame(evaluated=())}).axes) == 2


class TestSmooth:
    def test_nothing(self):
        values = np.random.default_rng(0).normal(size=50)
        np.testing.assert_allclose(smooth(values, 0), values)

    def test_a_mean_around_each(self):
        values = np.random.default_rng(0).normal(size=100)
        smoothed = smooth(values, 0.1)
        assert smoothed[50] == pytest.approx(values[45:56].mean())
        assert smoothed[-1] == pytest.approx(values[-6:].mean())

    def test_the_start_is_not_dragged_down(self):
        values = 1 / np.arange(1, 1001)
        np.testing.assert_allclose(smooth(values, 0.1)[:3], values[:3])
        np.testing.assert_allclose(smooth(values, 0.1), values, rtol=0.12)


class TestCommand:
    @pytest.fixture
    def runs(self, tmp_path):
        for name in "ab":
            (tmp_path / name).mkdir()
            text = "".join(json.dumps(row) + "\n" for row in rows())
            (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 41, "lo')  # being written
        return tmp_path

    def test_runs_by_short_names(self, runs):
        read = read_runs([runs / "a", runs / "b" / "metrics.jsonl"])
        assert list(read) == ["a", "b"] and len(read["a"]) == 42
        with pytest.raises(UserError, match="a run is named twice"):
            read_runs([runs / "a", runs / "a"])
        with pytest.raises(UserError, match="is no run: it has no metrics.jsonl"):
            read_runs([runs / "none"])

    def test_the_figure_is_written(self, runs, monkeypatch, capsys):
        for arguments, path in (
            (["--out", runs / "loss.png", "--x", "steps"], runs / "loss.png"),
            ([], runs / "a" / "loss.png"),
        ):
            monkeypatch.setattr(
                sys, "argv", ["plot_metrics", *map(str, (runs / "a", runs / "b", *arguments))]
            )
            main()
            assert capsys.readouterr().out == f"wrote {path}\n" and path.is_file()
