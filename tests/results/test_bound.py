"""The bound (`results/theory/bound.py`): what it starts from, what constant it has, where it holds, what is drawn."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from scipy.stats import t

from analysis.synthetic.exact_match import NAME
from olmo_sparsity.util.errors import UserError
from tests.analysis.synthetic.made_up import row, rows
from tests.analysis.synthetic.test_exact_match import Z, wilson_by_hand

THEORY = Path(__file__).parents[2] / "results" / "theory"
BOUND = SimpleNamespace(**runpy.run_path(str(THEORY / "bound.py")))


def points_of(*frames):
    """Points of rows, with their errors."""
    return BOUND.with_errors(pd.concat(frames, ignore_index=True))


def start_of(*rows_of_run, **changes):
    """What the bounds of one model start from."""
    [start] = BOUND.trained_frame(
        BOUND.errors_frame(points_of(rows(list(rows_of_run), **changes)))
    ).itertuples()
    return start


def fits_of(frames):
    """The fit of each bound, of models that share a constant."""
    return BOUND.fit_bounds(BOUND.errors_frame(points_of(*frames))).itertuples()


def starts(times=(2, 3, 4, 5), error=lambda times: 0.3 * times**2):
    """Errors of 0.3 (L'/L)^2 delta: the improved bound needs one constant for both L, the theorem's does not."""
    frames = []
    for longest, delta in ((50, 40), (100, 10)):
        wrong = [min(5000, round(error(ratio) * delta)) for ratio in times]
        longer = [
            row(ratio * longest, 10_000 - n, 4, (n, 0, 0)) for ratio, n in zip(times, wrong, strict=True)
        ]
        task = {"train_length": [20, longest], "test_length": [20, 500]}
        frames.append(rows([row(longest, 10_000 - delta, 4, (delta, 0, 0)), *longer], task_changes=task))
    return frames


def test_bounds_against_hand_arithmetic():
    assert BOUND.improved_bound([50, 100, 200, 500], 50, 0.02) == pytest.approx([0.02, 0.08, 0.32, 2])
    assert BOUND.theorem_bound([50, 100], 50, 1e-6) == pytest.approx([0.125, 0.5])


def test_it_starts_from_the_worst_trained_length_and_the_largest_trained_k():
    start = start_of(
        row(20, 190, 4, (10, 0, 0)),
        *(row(length, 196, 4, (4, 0, 0)) for length in (30, 50)),
        *(row(length, 150, 4, (50, 0, 0)) for length in (51, 100)),
        row(50, 100, 6, (100, 0, 0)),
        *(row(length, 199, 2, (1, 0, 0)) for length in (20, 50)),
    )
    assert (start.k, start.longest, start.measured_length) == (4, 50, 20)
    assert start.delta == pytest.approx(0.05) and not start.delta_is_upper_limit
    assert start.error_high == pytest.approx(wilson_by_hand(10, 200)[1])
    with pytest.raises(UserError, match="needs a trained k measured at a length from 20 to 50"):
        below = [row(length, 199, 1, (1, 0, 0)) for length in (50, 60, 70)]
        start_of(*below, task_changes={"k_train": 4, "k_train_min": 2})


def test_without_an_error_delta_is_the_upper_limit():
    without_errors = [row(length, 200, 4) for length in (20, 40, 100, 200)]
    start = start_of(*without_errors)
    assert start.delta_is_upper_limit and (start.measured_length, start.longest) == (40, 50)
    assert start.delta == pytest.approx(Z**2 / (200 + Z**2))
    _, improved = fits_of([rows(without_errors)])
    assert improved.constant == pytest.approx(start.delta / (4 * start.delta)), "the upper limits"


def test_a_constant_is_fitted_at_the_shorter_lengths_and_tried_at_the_longer_ones():
    theorem, improved = fits_of(starts())
    assert improved.model == "RoPE + PoSE"
    assert (improved.fitted, improved.tested, improved.held, improved.empty) == (4, 4, 4, 0)
    assert improved.constant == pytest.approx(0.3) and improved.slack == pytest.approx(1)
    assert improved.fitted_to == 3
    assert theorem.constant == pytest.approx(0.3 / 50**3)
    # of L = 100 it is 8 times too high, and of L = 50 exact
    assert theorem.slack == pytest.approx(8**0.5) and theorem.held == 4
    trained = BOUND.trained_frame(BOUND.errors_frame(points_of(*starts())))
    assert [*trained["longest"]] == [50, 100] and [*trained["delta"]] == pytest.approx([0.004, 0.001])


def test_an_error_that_grows_faster_breaks_a_bound():
    _, improved = fits_of(starts(error=lambda times: 0.05 * times**4))
    assert (improved.tested, improved.held) == (4, 0)


def test_the_recorded_bounds_are_those_of_the_recorded_rows(tmp_path, monkeypatch):
    """Of expected errors, of models that share a constant, some of whose bounds are above the error of guessing."""
    (tmp_path / "figure1.json").write_text('{"points": [1], "bounds": []}')
    rows_of = [str(THEORY / NAME), str(tmp_path), "records/bound/tuples"]
    monkeypatch.setattr(sys, "argv", ["bound", *rows_of])
    BOUND.main()
    written, recorded = (json.loads((path / "figure1.json").read_text()) for path in (tmp_path, THEORY))
    assert written["points"] == [1] and (tmp_path / "figure1-planted-bound.png").is_file()
    now_called = {"name": "model", "trained_length": "longest"}
    for name in ("bounds", "trained"):
        expected = pd.DataFrame(recorded[name]).rename(columns=now_called)
        pd.testing.assert_frame_equal(pd.DataFrame(written[name]), expected, check_like=True)


def test_expected_errors_of_seeds_have_students_t_and_of_one_a_normal_interval():
    frame = rows([row(20, 50, p=mean) for mean in (0.9, 0.7, 0.5)])
    error = BOUND.expected_error(frame)
    assert error.value == pytest.approx(0.3)
    half = t.ppf(0.975, 2) * 0.2 / 3**0.5
    assert (error.low, error.high) == pytest.approx((max(0, 0.3 - half), 0.3 + half))
    one = BOUND.expected_error(frame[:1])
    assert (one.low, one.high) == pytest.approx((0.1 - Z * 0.1 / 50**0.5, 0.1 + Z * 0.1 / 50**0.5))
    assert BOUND.expected_error(rows([row(20, 50), row(20, 50, p=0.5)])) is None


def test_errors_of_a_run_and_of_each_seed():
    """The two seeds of one folder together, beside another run of the same setting."""
    frames = [
        rows([row(100, 50, 2, (50, 0, 0))]).assign(
            folder=f"records/{run},seed={seed}", seed=seed, mean_probability=right, std_probability=0.1
        )
        for run, seed, right in (("a", 1, 0.9), ("a", 2, 0.7), ("b", 1, 0.5))
    ]
    errors = BOUND.errors_by_run(pd.concat(frames, ignore_index=True)).set_index("run")
    assert errors["value"].to_dict() == pytest.approx({"a": 0.2, "b": 0.5})
    assert errors["of_seeds"].to_dict() == {"a": "0.1 0.3", "b": "0.5"}
    half = Z * (0.1**2 / 100 + 0.1**2 / 100) ** 0.5 / 2
    assert errors.loc["a", "samples_half_width"] == pytest.approx(half)
