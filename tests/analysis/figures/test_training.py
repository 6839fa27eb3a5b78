"""Loss curves from metrics.jsonl: what is drawn is what was logged."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.figures.training import main, read_rows, training_figure
from olmo_sparsity.util.errors import UserError
from tests.analysis.figures.drawn import assert_readable, legend


def rows(steps=100, evaluated=(20, 40)):
    logged = []
    for step in range(1, steps + 1):
        place = {"step": step, "tokens": 100 * step}
        logged.append({**place, "loss_nats": 3 + 5 / step})
        if step in evaluated:
            logged.append({**place, "heldout_loss_nats": 3.1 + 5 / step})
    return logged


@pytest.mark.parametrize(
    ("x", "scale", "name"), [("tokens", 100, "training tokens"), ("steps", 1, "optimizer steps")]
)
def test_curves_are_the_logged_values(x, scale, name):
    figure = training_figure({"a": pd.DataFrame(rows()), "b": pd.DataFrame(rows(evaluated=()))}, x=x)
    assert_readable(figure)
    [axes] = figure.axes
    steps = np.arange(1, 101)
    raw, smoothed, heldout, *_ = axes.lines
    np.testing.assert_allclose(raw.get_xydata(), np.stack([scale * steps, 3 + 5 / steps], axis=1))
    loss = raw.get_ydata()
    np.testing.assert_allclose(smoothed.get_ydata()[1:], (loss[1:] + loss[:-1]) / 2)  # 2 % of 100 rows
    np.testing.assert_allclose(heldout.get_xydata(), [[20 * scale, 3.35], [40 * scale, 3.225]])
    assert axes.get_xlabel() == name and axes.get_ylabel() == "loss [nats per token]"
    assert legend(figure) == ["a", "b"]


def test_a_loss_that_is_not_finite_leaves_a_gap():
    data = pd.DataFrame(rows(evaluated=()))
    data.loc[9, "loss_nats"] = np.nan
    y = training_figure({"a": data}).axes[0].lines[1].get_ydata()
    assert len(y) == 99 and np.isfinite(y).all()


def test_the_command_draws_runs_by_short_names(tmp_path, monkeypatch, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows())
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 41, "lo')  # being written
    assert len(read_rows(tmp_path / "a" / "metrics.jsonl")) == 102
    for arguments, path in (
        (["--out", tmp_path / "loss.png", "--x", "steps"], tmp_path / "loss.png"),
        ([], tmp_path / "a" / "loss.png"),
    ):
        given = ["plot_metrics", tmp_path / "a", tmp_path / "b", *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, given)])
        main()
        assert capsys.readouterr().out == f"wrote {path}\n" and path.is_file()
    monkeypatch.setattr(sys, "argv", ["plot_metrics", str(tmp_path / "none")])
    with pytest.raises(UserError, match="name folders that training wrote"):
        main()
