"""Exact match as one frame: what is read and pooled, the intervals, and what curves are called."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem, t

from analysis.synthetic.exact_match import (
    GROUP,
    NAME,
    exact_interval,
    load,
    save,
    wilson,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import EXACT_MATCH, EXACT_MATCH_NAME, write_json
from tests.analysis.synthetic.made_up import SPARSE, pooled, record, row, rows
from tests.support.refusals import refused

PARITY = "scratchpad_parity"
Z = 1.959963984540054


def wilson_by_hand(successes, trials):
    """Wilson's closed formula."""
    share, scale = successes / trials, 1 + Z**2 / trials
    middle = (share + Z**2 / (2 * trials)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return middle - half, middle + half


def labels(*frames):
    return pooled(*frames).groupby(GROUP, sort=False)["model"].first().tolist()


class TestReading:
    def test_a_frame_is_read_as_it_was_written(self, tmp_path):
        frame = pd.concat(
            [
                rows([row(20, 3, 4, p=1 - 1e-9)]),
                rows([row(9, 1)], PARITY, skip_probability=0.5, rotate="ids", seed=2),
            ]
        ).reset_index(drop=True)
        save(tmp_path / "a" / NAME, frame.assign(folder="c"))
        pd.testing.assert_frame_equal(load([tmp_path]), frame.assign(folder="a/c"))
        pd.testing.assert_frame_equal(load([tmp_path / "a" / NAME]), frame.assign(folder="c"))
        pd.testing.assert_frame_equal(load([tmp_path, tmp_path]), frame.assign(folder="a/c"))  # each row once

    def test_runs_and_frames_are_read_together_and_parts_of_them_alone(self, tmp_path):
        one_row = [row(20, 3, 4, p=0.5)]
        of_run = record(one_row, options={"b": 1, "a": 2}, initial_weights=True, seed=7, parameters=9)
        write_json(tmp_path / "run" / EXACT_MATCH_NAME, {**EXACT_MATCH, **of_run})
        save(tmp_path / "study" / NAME, rows([row(20, 4, 4)]).assign(folder="text/x"))
        assert [*load([tmp_path])["seed"]] == [7, 1]
        of_run = load([tmp_path], ["run"]).iloc[0]
        assert (of_run["options"], of_run["rotate"], of_run["weights"]) == (
            '{"a": 2, "b": 1, "initial_weights": true}', "", 9,
        )  # fmt: skip
        assert np.isnan(of_run["skip_probability"]) and of_run["mean_probability"] == 0.5
        assert [*load([tmp_path], ["study/text"])["seed"]] == [1]
        with pytest.raises(UserError, match="no rows of tex; there are run, study/text/x"):
            load([tmp_path], ["tex"])

    @pytest.mark.parametrize("field", ["rows", "task", "options"])
    def test_a_record_that_lacks_a_field_is_refused_with_the_remedy(self, tmp_path, field):
        whole = {**EXACT_MATCH, **record([row(20, 3, 4)])}
        for damaged in (
            {name: value for name, value in whole.items() if name != field},
            {**whole, field: None},
        ):
            write_json(tmp_path / EXACT_MATCH_NAME, damaged)
            with refused(f"{EXACT_MATCH_NAME} is damaged: .*; make it with olmo-sparsity exact_match"):
                load([tmp_path])


class TestPooling:
    def test_groups_differ_in_anything_but_the_seed(self):
        one_row = [row(20, 3)]
        points = pooled(
            rows(one_row, PARITY, seed=2, step=10, evaluation_seed=3, commit="x"),
            rows(one_row, PARITY, seed=1),
            rows(one_row, PARITY, scheme="contiguous"),
            rows(one_row, PARITY, rotate="none"),
            rows(one_row, PARITY, family="olmo"),
            rows(one_row, PARITY, parameters=7),
            rows(one_row, PARITY, task_changes={"train_length": [5, 21]}),
            rows(one_row, PARITY, initial_weights=True),
            rows(one_row, PARITY, options={"positions.id_noise": 0.1}),
            rows(one_row, PARITY, skip_probability=0.5),
        )
        groups = points.groupby(GROUP, sort=False)
        assert [*groups["seeds"].first()].count(2) == 1 and len(groups) == 9
        assert points["scheme"][0] == "contiguous"

    def test_the_same_seed_twice_is_refused(self):
        far = rows([row(80, 5, 4, (5, 0, 0))])
        points = pooled(rows([row(20, 9, 4)]), far)  # other lengths of the same weights
        assert [*points["length"]] == [20, 80] and [*points["seeds"]] == [1, 1]
        for other in (far.assign(weights_sha256="b"), far.assign(length=20)):
            with pytest.raises(UserError, match="seed 1 of one setting occurs twice"):
                pooled(rows([row(20, 9, 4)]), other)

    def test_each_length_over_the_seeds_that_have_it(self):
        points = pooled(
            rows([row(20, 90, 4, (10, 0, 0)), row(50, 30, 4, (20, 0, 0)), row(20, 5, 6, (5, 0, 0))], seed=1),
            rows([row(20, 30, 4, (10, 0, 0)), row(80, 7, 4, (3, 0, 0))], seed=2),
        )
        assert {k: [*curve["length"]] for k, curve in points.groupby("k")} == {4: [20, 50, 80], 6: [20]}
        first, second, third = points[points["k"] == 4].itertuples()
        assert first.value == pytest.approx((0.9 + 0.75) / 2)  # mean over seeds, not over samples
        assert (first.seeds, first.samples, first.of_seeds) == (2, 140, [0.9, 0.75])
        assert (second.value, second.seeds, second.samples) == (0.6, 1, 50)
        assert (second.low, second.high) == pytest.approx(wilson_by_hand(30, 50))
        assert third.value == 0.7

    def test_shares_of_error_sorts_are_means_over_seeds(self):
        [point] = pooled(
            rows([row(20, 5, None, (3, 1, 1))], PARITY, seed=1),
            rows([row(20, 14, None, (0, 2, 4))], PARITY, seed=2),
        ).itertuples()
        shares = point.wrong_token, point.wrong_id, point.wrong_stop
        assert shares == pytest.approx((0.15, 0.1, 0.15)) and point.value + sum(shares) == pytest.approx(1)

    def test_trained_lengths_are_those_of_training_and_not_of_the_test(self):
        far = {"task_changes": {"train_length": [300, 300], "k_train": 6}}
        trained = {**SPARSE, "train_length": [20, 50], "k_train": 4}
        frame = rows([row(300, 3, 4)], **far, trained=trained)
        [point] = pooled(frame).itertuples()
        assert (point.shortest, point.longest, point.k_train, point.chance) == (20, 50, 4, 0.5)
        other = rows([row(300, 3, 4)], **far, trained={**trained, "train_length": [20, 40]})
        named = [f"RoPE + PoSE, trained train_length {lengths}" for lengths in ("20–40", "20–50")]
        assert labels(frame, other) == named


class TestNames:
    def test_options_skips_and_other_weights_are_named(self):
        one_row, predicted = [row(20, 3)], {"scheme": "predicted", "rotate": "ids"}
        noise = [{}, {"positions.id_noise": 0.1}]
        assert labels(*(rows(one_row, PARITY, **predicted, options=options) for options in noise)) == [
            "Predictive Position Coupling",
            "Predictive Position Coupling, id_noise 0.1",
        ]
        assert labels(
            *(rows(one_row, PARITY, **predicted, skip_probability=probability) for probability in (0.0, 1.0))
        ) == [
            "Predictive Position Coupling, skip_probability 1.0",
            "Predictive Position Coupling, skip_probability 0.0",
        ]
        continued = [rows(one_row, PARITY, initial_weights=continues) for continues in (False, True)]
        assert labels(*continued) == ["RoPE + PoSE", "RoPE + PoSE, initial_weights True"]


class TestIntervals:
    @pytest.mark.parametrize(("successes", "trials"), [(0, 200), (1, 7), (150, 200), (200, 200)])
    def test_one_seed_has_wilsons_formula(self, successes, trials):
        interval = exact_interval(np.array([successes]), np.array([trials]))
        low, high = wilson_by_hand(successes, trials)
        assert interval.value == successes / trials
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-12)

    @pytest.mark.parametrize("share", [0, 1])
    def test_where_all_samples_agree_counts_are_pooled(self, share):
        samples = np.array([100, 200, 300])
        interval = exact_interval(share * samples, samples)
        assert interval == wilson(share * 600, 600)
        assert (interval.low, interval.high) == pytest.approx(wilson_by_hand(share * 600, 600), abs=1e-12)

    def test_several_seeds_have_students_t(self):
        shares = np.array([12 / 20, 17 / 25, 30 / 32])
        interval = exact_interval(np.array([12, 17, 30]), np.array([20, 25, 32]))
        low, high = t.interval(0.95, 2, shares.mean(), sem(shares))
        assert interval.value == pytest.approx(shares.mean())
        assert (interval.low, interval.high) == pytest.approx((low, min(high, 1)))

    def test_seeds_that_agree_by_chance_have_the_interval_of_their_samples(self):
        interval = exact_interval(np.array([150, 150]), np.array([200, 200]))
        assert (interval.low, interval.high) == pytest.approx(wilson_by_hand(300, 400))
