"""Loss curves from metrics.jsonl: what is drawn is what was logged."""

import json

import numpy as np
import pytest

from analysis.plots.training import RunMetrics, run_names, smooth, training_figure
from olmo_sparsity.util.errors import UserError
from tests.support.refusals import assert_refused, refused

SCRIPT = "scripts/plot_metrics.py"


def rows(steps=40, evaluated=(20, 40), by_position=True, offset=0.0):
    found = []
    for step in range(1, steps + 1):
        found.append({"step": step, "tokens": 100 * step, "loss_nats": offset + 3 + 5 / step})
        if step in evaluated:
            row = {"step": step, "tokens": 100 * step, "heldout_loss_nats": offset + 3.1 + 5 / step}
            bins = [
                {"from": 8 * i, "to": 8 * i + 8, "loss_nats": offset + step + i, "tokens": 9}
                for i in range(4)
            ]
            extra = {"heldout_loss_by_position": bins, "heldout_window_tokens": 16} if by_position else {}
            found.append({**row, **extra})
    return found


def lines_of(axes, count):
    """x and y of each line of ``count`` points or more."""
    return [line.get_xydata() for line in axes.lines if len(line.get_xdata()) >= count]


@pytest.mark.parametrize(("x", "scale"), [("tokens", 100), ("steps", 1)])
def test_curves_are_the_logged_values(x, scale):
    data = rows()
    figure = training_figure([RunMetrics("a", data)], x=x, fraction=0)
    raw, smoothed = lines_of(figure.axes[0], 40)
    expected = [[scale * row["step"], row["loss_nats"]] for row in data if "loss_nats" in row]
    assert raw.tolist() == expected
    np.testing.assert_allclose(smoothed, expected)
    assert np.array([[20 * scale, 3.35], [40 * scale, 3.225]]) == pytest.approx(
        np.array(figure.axes[0].lines[2].get_xydata())
    )
    assert figure.axes[0].get_xlabel() == ("training tokens" if x == "tokens" else "optimizer steps")
    assert "[nats per token]" in figure.axes[0].get_ylabel()


def test_a_loss_that_is_not_finite_leaves_a_gap_and_one_that_is_no_number_is_refused():
    data = [*rows(evaluated=()), {"step": 41, "tokens": 4100, "loss_nats": 3.0}]
    data[9] = {**data[9], "loss_nats": float("nan")}
    del data[10]["tokens"]
    _, smoothed = lines_of(training_figure([RunMetrics("a", data)]).axes[0], 39)
    assert len(smoothed) == 39 and np.isfinite(smoothed).all()
    data[9]["loss_nats"] = "much"
    with refused("^a: not every loss_nats and tokens in its metrics.jsonl is a number"):
        training_figure([RunMetrics("a", data)])


def test_by_position_at_the_last_evaluation():
    figure = training_figure([RunMetrics("a", rows()), RunMetrics("b", rows(offset=2))])
    axes = figure.axes[1]
    a, b = lines_of(axes, 4)
    assert a.tolist() == [[4, 40], [12, 41], [20, 42], [28, 43]]
    assert b[:, 1].tolist() == [42, 43, 44, 45]
    assert [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2] == [
        16
    ]  # trained length
    assert "[tokens]" in axes.get_xlabel() and "[nats per token]" in axes.get_ylabel()


def test_without_evaluation_there_is_one_panel():
    assert len(training_figure([RunMetrics("a", rows(evaluated=()))]).axes) == 1
    assert len(training_figure([RunMetrics("a", rows(by_position=False))]).axes) == 1
    mixed = [RunMetrics("a", rows()), RunMetrics("b", rows(evaluated=()))]
    assert len(training_figure(mixed).axes) == 2


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("evaluated", [(), (20,)])
def test_long_names_stay_inside_the_figure(count, evaluated):
    names = [f"{number}-a-run-with-a-long-name-of-40-letters" for number in range(count)]
    figure = training_figure([RunMetrics(name, rows(evaluated=evaluated)) for name in names])
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0
    assert figure.axes[0].get_window_extent().height > 0.3 * figure.bbox.height


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

    def test_a_line_stays_a_line(self):
        np.testing.assert_allclose(smooth(np.arange(100.0), 0.1)[:90], np.arange(90.0))


def test_names_are_as_short_as_they_may_be():
    assert run_names(["runs/a", "runs/b"]) == ["a", "b"]
    assert run_names(["x/1/a", "x/2/a"]) == ["1/a", "2/a"]
    with pytest.raises(UserError, match="named twice"):
        run_names(["runs/a", "runs/a"])


class TestScript:
    def write(self, folder, data):
        folder.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in data)
        (folder / "metrics.jsonl").write_text(text + '{"step": 41, "lo')  # killed while writing
        return folder

    def test_several_runs(self, tmp_path, run_here):
        folders = [self.write(tmp_path / name, rows()) for name in "ab"]
        result = run_here(SCRIPT, *folders, "--out", tmp_path / "loss.png", "--x", "steps", "--log-x")
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"wrote {tmp_path / 'loss.png'}\n"
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
        result = run_here(SCRIPT, folders[0], "--out", folders[1])
        assert result.stdout == f"wrote {folders[1] / 'loss.png'}\n", result.stderr
        assert {path.name for path in folders[1].iterdir()} == {"metrics.jsonl", "loss.png"}
        result = run_here(SCRIPT, folders[0] / "metrics.jsonl")
        assert (folders[0] / "loss.png").is_file(), result.stderr

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            (["none"], "none is no run: it has no metrics.jsonl"),
            (["a", "--out", "loss.jpeg"], "loss.jpeg has no ending of png, pdf, svg"),
            (["empty"], "empty has no training loss in its metrics.jsonl yet"),
            (["a", "--smooth", "3"], "--smooth 3.0 is no fraction"),
            (["a", "a"], "a run is named twice"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path, options, part, run_here):
        self.write(tmp_path / "a", rows())
        self.write(tmp_path / "empty", [])
        options = [tmp_path / each if each in ("a", "none", "empty") else each for each in options]
        assert_refused(run_here(SCRIPT, *options), part)
