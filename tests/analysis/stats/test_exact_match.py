"""Records of exact match: what is read, refused and pooled, the intervals, and the bound that starts from them."""

import json
import math

import numpy as np
import pytest

from analysis.stats.bound import bounds_json, fit_bounds, improved_bound, theorem_bound, trained_error
from analysis.stats.exact_match import (
    BOOTSTRAP,
    POOLED,
    WILSON,
    curves_json,
    exact_interval,
    load_records,
    pool,
    scheme_labels,
    wilson,
)
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_exact_match import record, row, write

PARITY = "scratchpad_parity"
Z = 1.959963984540054


def wilson_by_hand(successes, trials):
    """Wilson's closed formula."""
    share, scale = successes / trials, 1 + Z**2 / trials
    middle = (share + Z**2 / (2 * trials)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return middle - half, middle + half


def pooled(folder, *values, **options):
    for number, value in enumerate(values):
        write(folder / str(number), value)
    return pool(load_records([folder]), **options)


class TestReading:
    def test_folders_and_files_each_record_once(self, tmp_path):
        file = write(tmp_path / "a" / "step3", record([row(20, 3, 4)], seed=1))
        write(tmp_path / "b" / "c", record([row(20, 4, 4)], seed=2))
        found = load_records([tmp_path, file, tmp_path / "b"])
        assert [(each.seed, each.rows[0].exact) for each in found] == [(1, 3), (2, 4)]
        assert (
            found[0].path == file and found[0].source["commit"] == "abc" and found[0].source["step"] == 3000
        )
        settings = found[0].settings
        assert (settings.k_train, settings.train_length, settings.chance) == (4, (20, 50), 0.5)

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("{", "damaged"),
            (json.dumps({"format": 2}), "holds no exact match of format version 2"),
            ([1], "holds no dict"),
            ({"seed": None}, "seed is None"),
            ({"seed": True}, "seed is True"),
            ({"rows": []}, "rows is empty"),
            ({"rows": [row(20, 3, 4), row(20, 4, 4)]}, "length 20, k 4 twice"),
            (
                {"rows": [{**row(20, 3, 4), "wrong_id": 1}]},
                r"3 of 3 exact leaves 0 wrong, but 0 \(token\) \+ 1",
            ),
            ({"rows": [{**row(20, 3, 4), "exact": 4, "wrong_stop": -1}]}, "negative"),
            ({"rows": [row(20, 0, 4)]}, "nothing was sampled"),
            ({"rows": [row(20, 3)]}, "k is None, but sparse_parity has a k"),
            ({"rows": [3]}, "an entry of rows is 3"),
            ({"task": {"name": "sparse_parity", "parameters": {}}}, "parameters has no train_length"),
        ],
    )
    def test_what_is_no_record_is_refused_in_one_line(self, tmp_path, value, said):
        if isinstance(value, dict):
            value = record(**{"rows": [row(20, 3, 4)], **value}) if "task" not in value else {
                **record([row(20, 3, 4)]), **value
            }  # fmt: skip
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / "exact_match.json").write_text(text)
        with pytest.raises(UserError, match=said) as caught:
            load_records([tmp_path])
        assert "\n" not in str(caught.value) and str(tmp_path / "exact_match.json") in str(caught.value)
        assert str(caught.value).endswith(" with scripts/exact_match.py")

    def test_a_missing_field_a_k_too_many_and_missing_files(self, tmp_path):
        value = record([row(20, 3, 4)])
        del value["scheme"]
        with pytest.raises(UserError, match="it has no scheme"):
            load_records([write(tmp_path / "a", value)])
        with pytest.raises(UserError, match="k is 4, but scratchpad_parity has no k"):
            load_records([write(tmp_path / "b", record([row(20, 3, 4)], PARITY))])
        with pytest.raises(UserError, match=r"nothing\.json is missing"):
            load_records([tmp_path / "nothing.json"])
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match="empty holds no exact_match.json"):
            load_records([tmp_path / "empty"])


class TestPooling:
    def test_groups_differ_in_anything_but_the_seed(self, tmp_path):
        rows = [row(20, 3)]
        groups = pooled(
            tmp_path,
            record(rows, PARITY, seed=2, step=10, evaluation_seed=3, commit="x"),
            record(rows, PARITY, seed=1),
            record(rows, PARITY, scheme="contiguous"),
            record(rows, PARITY, rotate="none"),
            record(rows, PARITY, family="olmo"),
            record(rows, PARITY, parameters=7),
            record(rows, PARITY, task_changes={"train_length": [5, 21]}),
        )
        assert [[each.seed for each in group.records] for group in groups].count([1, 2]) == 1
        assert len(groups) == 6
        assert groups[0].settings.scheme == "contiguous"

    def test_the_same_seed_twice_is_refused_with_both_files(self, tmp_path):
        values = [record([row(20, 3, 4)], step=step) for step in (1, 2)]
        with pytest.raises(
            UserError, match=r"0/exact_match\.json and .*1/exact_match\.json are both seed 1"
        ) as e:
            pooled(tmp_path, *values)
        assert "steps 1 and 2" in str(e.value) and "\n" not in str(e.value)

    def test_parts_of_one_measurement_are_put_together(self, tmp_path):
        near, far = record([row(20, 9, 4)]), record([row(80, 5, 4, (5, 0, 0))])
        (group,) = pooled(tmp_path / "a", near, far)
        assert [(point.length, point.seeds) for point in group.curves[0].points] == [(20, 1), (80, 1)]
        for other in ({**far, "weights_sha256": "b" * 64}, {**far, "rows": [*far["rows"], row(20, 9, 4)]}):
            with pytest.raises(UserError, match="both seed 1"):
                pooled(tmp_path / other["weights_sha256"][:2], near, other)

    def test_each_length_over_the_seeds_that_have_it(self, tmp_path):
        (group,) = pooled(
            tmp_path,
            record(
                [row(20, 90, 4, (10, 0, 0)), row(50, 30, 4, (20, 0, 0)), row(20, 5, 6, (5, 0, 0))], seed=1
            ),
            record([row(20, 30, 4, (10, 0, 0)), row(80, 7, 4, (3, 0, 0))], seed=2),
        )
        four, six = group.curves
        assert (four.k, four.lengths, six.k, six.lengths) == (4, [20, 50, 80], 6, [20])
        assert group.lengths == [20, 50, 80]
        first, second, third = four.points
        assert first.exact.value == pytest.approx((0.9 + 0.75) / 2)  # mean over seeds, not over samples
        assert (first.seeds, first.samples, first.interval) == (2, 140, BOOTSTRAP)
        assert (second.exact.value, second.seeds, second.samples, second.interval) == (0.6, 1, 50, WILSON)
        assert (second.exact.low, second.exact.high) == pytest.approx(wilson_by_hand(30, 50))
        assert third.exact.value == 0.7

    def test_shares_of_error_sorts_are_means_over_seeds(self, tmp_path):
        (group,) = pooled(
            tmp_path,
            record([row(20, 5, None, (3, 1, 1))], PARITY, seed=1),
            record([row(20, 14, None, (0, 2, 4))], PARITY, seed=2),
        )
        (point,) = group.curves[0].points
        assert point.wrong == pytest.approx({"token": 0.15, "id": 0.1, "stop": 0.15})
        assert point.exact.value + sum(point.wrong.values()) == pytest.approx(1)

    def test_labels_say_no_more_than_needed(self, tmp_path):
        rows = [row(20, 3)]
        groups = pooled(
            tmp_path,
            record(rows, PARITY, scheme="pose", parameters=5),
            record(rows, PARITY, scheme="predicted", rotate="ids", parameters=6),
            record(rows, PARITY, scheme="predicted", rotate="none", parameters=6),
            record(rows, PARITY, scheme="coupled", rotate="ids", parameters=1000),
            record(rows, PARITY, scheme="coupled", rotate="ids", parameters=2000),
            record(rows, "variable_assignment", scheme="pose", parameters=9),
            record(rows, "variable_assignment", scheme="random_start", family="olmo"),
            record(rows, "variable_assignment", scheme="random_start", family="gpt_neox"),
        )
        assert scheme_labels([group.settings for group in groups]) == [
            "RoPE + PoSE",
            "coupled ids (oracle), 1,000 weights",
            "coupled ids (oracle), 2,000 weights",
            "Predictive Position Coupling, rotate ids",
            "Predictive Position Coupling, rotate none",
            "RoPE, random start, gpt_neox",
            "RoPE, random start, olmo",
            "RoPE + PoSE",
        ]

    def test_runs_with_and_without_skips_are_not_pooled(self, tmp_path):
        options = {"scheme": "predicted", "rotate": "ids"}
        records = [record([row(20, 3)], PARITY, **options, skip_probability=each) for each in (0.0, 1.0)]
        groups = pooled(tmp_path, *records)
        assert scheme_labels([group.settings for group in groups]) == [
            "Predictive Position Coupling, skips in 100 %",
            "Predictive Position Coupling, no skips",
        ]

    def test_runs_of_other_options_are_not_pooled(self, tmp_path):
        options = {"scheme": "predicted", "rotate": "ids"}
        asked = [
            {},
            {"options": {}},
            {"options": {"positions.id_noise": 0.1}},
            {"options": {"positions.id_noise": 0.2}},
        ]
        values = [
            record([row(20, 3)], PARITY, **options, **each, seed=seed) for seed, each in enumerate(asked)
        ]
        groups = pooled(tmp_path, *values, record([row(20, 3)], PARITY, scheme="contiguous", family="tuples"))
        assert scheme_labels([group.settings for group in groups]) == [
            "tuples",
            "Predictive Position Coupling",
            "Predictive Position Coupling, id_noise 0.1",
            "Predictive Position Coupling, id_noise 0.2",
        ]
        assert len(groups[1].records) == 2  # an older record names no options
        write(tmp_path / "odd", record([row(20, 3)], PARITY, options=[1]))
        with pytest.raises(UserError, match=r"options is \[1\]"):
            load_records([tmp_path])


class TestIntervals:
    @pytest.mark.parametrize(("successes", "trials"), [(0, 200), (1, 7), (150, 200), (200, 200)])
    def test_one_seed_has_wilsons_formula(self, successes, trials):
        found, name = exact_interval(np.array([successes]), np.array([trials]))
        low, high = wilson_by_hand(successes, trials)
        assert name == WILSON and found.value == successes / trials
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)

    @pytest.mark.parametrize("share", [0, 1])
    def test_where_all_samples_agree_counts_are_pooled(self, share):
        samples = np.array([100, 200, 300])
        found, name = exact_interval(share * samples, samples)
        assert name == POOLED and found.value == share
        assert (found.low, found.high) == pytest.approx(wilson_by_hand(share * 600, 600), abs=1e-12)
        assert found == wilson(share * 600, 600)

    def test_bootstrap_is_that_of_a_direct_simulation(self):
        """A seed, then each of its samples, drawn one after the other."""
        exact, samples = np.array([12, 17, 30]), np.array([20, 25, 32])
        rng = np.random.default_rng(5)
        outcomes = [np.arange(n) < x for x, n in zip(exact, samples, strict=True)]
        means = []
        for _ in range(3000):
            drawn = [outcomes[seed] for seed in rng.integers(3, size=3)]
            means.append(np.mean([rng.choice(each, len(each)).mean() for each in drawn]))
        found, name = exact_interval(exact, samples, resamples=20_000, seed=1)
        assert name == BOOTSTRAP and found.value == pytest.approx((12 / 20 + 17 / 25 + 30 / 32) / 3)
        assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.02)

    def test_bootstrap_holds_the_truth_about_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        truth, held, trials = 0.7, 0, 300
        for trial in range(trials):
            exact = rng.binomial(100, np.clip(rng.normal(truth, 0.05, size=6), 0, 1))
            found, _ = exact_interval(exact, np.full(6, 100), resamples=1000, seed=trial)
            held += found.low <= truth <= found.high
        assert 0.91 < held / trials < 0.99


class TestBound:
    def test_against_hand_arithmetic(self):
        assert improved_bound([50, 100, 200, 500], 50, 0.02).tolist() == [0.02, 0.08, 0.32, 1.0]
        assert theorem_bound([50, 100], 50, 1e-6) == pytest.approx([0.125, 0.5])
        assert theorem_bound([50], 50, 0.01).tolist() == [1.0]

    def group(self, folder, *rows):
        return pooled(folder, record(rows))[0]

    def test_starts_from_the_longest_trained_length_and_largest_trained_k(self, tmp_path):
        group = self.group(
            tmp_path,
            *(row(length, 196, 4, (4, 0, 0)) for length in (20, 50)),
            *(row(length, 150, 4, (50, 0, 0)) for length in (51, 100)),
            row(50, 100, 6, (100, 0, 0)),
            *(row(20, 199, 2, (1, 0, 0)), row(50, 199, 2, (1, 0, 0))),
        )
        start = trained_error(group)
        assert (start.k, start.trained_length, start.measured_length, start.samples) == (4, 50, 50, 200)
        assert start.delta == pytest.approx(0.02) and not start.is_limit
        assert (start.error.low, start.error.high) == pytest.approx(wilson_by_hand(4, 200))
        found = bounds_json(start)
        assert found["lengths"] == [50, 51, 100] and found["constant"] == 1
        assert found["improved"]["value"] == pytest.approx([0.02, 0.020808, 0.08])
        assert found["improved"]["high"][2] == pytest.approx(4 * wilson_by_hand(4, 200)[1])
        assert found["theorem_4_3"]["value"] == [1, 1, 1]

    def test_without_an_error_delta_is_the_upper_limit(self, tmp_path):
        group = self.group(tmp_path, row(20, 200, 4), row(40, 200, 4), row(100, 200, 4))
        start = trained_error(group)
        assert start.is_limit and (start.measured_length, start.trained_length) == (40, 50)
        assert start.delta == pytest.approx(Z**2 / (200 + Z**2))
        assert bounds_json(start)["improved"]["value"] == pytest.approx([4 * start.delta])

    def test_starts_from_the_worst_trained_length(self, tmp_path):
        start = trained_error(
            self.group(tmp_path, row(20, 190, 4, (10, 0, 0)), row(50, 199, 4, (1, 0, 0)), row(60, 9, 4))
        )
        assert (start.measured_length, start.trained_length, start.delta) == (20, 50, pytest.approx(0.05))

    def starts(self, folder, times=(2, 3, 4, 5), error=lambda times: 0.3 * times**2):
        """Errors of 0.3 (L'/L)^2 delta: the improved bound needs one constant for both L, the theorem's does not."""
        found = []
        for longest, delta in ((50, 40), (100, 10)):
            rows = [row(longest, 10_000 - delta, 4, (delta, 0, 0))]
            for each in times:
                wrong = min(5000, round(error(each) * delta))
                rows.append(row(each * longest, 10_000 - wrong, 4, (wrong, 0, 0)))
            task = {"train_length": [20, longest], "test_length": [20, 500]}
            found.append(trained_error(pooled(folder / str(longest), record(rows, task_changes=task))[0]))
        return found

    def test_a_constant_is_fitted_at_the_shorter_lengths_and_tried_at_the_longer_ones(self, tmp_path):
        theorem, improved = fit_bounds(self.starts(tmp_path))
        assert improved.settings == "RoPE + PoSE, K_train 4, k 4"
        assert (improved.fitted, improved.tested, improved.held, improved.empty) == (4, 4, 4, 0)
        assert improved.constant == pytest.approx(0.3) and improved.slack == pytest.approx(1)
        assert theorem.constant == pytest.approx(0.3 / 50**3)
        # of L = 100 it is 8 times too high, and of L = 50 exact
        assert theorem.slack == pytest.approx(8**0.5) and theorem.held == 4
        alone = trained_error(
            self.group(tmp_path / "one", row(50, 196, 4, (4, 0, 0)), row(60, 150, 4, (50, 0, 0)))
        )
        assert fit_bounds([alone]) == [], "there is no length to try it at"

    def test_an_error_that_grows_faster_breaks_a_bound(self, tmp_path):
        _, improved = fit_bounds(self.starts(tmp_path, error=lambda times: 0.05 * times**4))
        assert (improved.tested, improved.held) == (4, 0)

    def test_a_bound_above_the_error_of_guessing_is_not_tried(self, tmp_path):
        """A model that guesses at every length beyond L: no bound can fail there, so none is said to hold."""
        for fit in fit_bounds(self.starts(tmp_path, error=lambda times: 1e6)):
            assert fit.tested < 2 and fit.empty > 2

    def test_only_models_that_differ_in_length_alone_share_a_constant(self, tmp_path):
        starts = self.starts(tmp_path)
        other = record([row(n, 9000, 4, (1000, 0, 0)) for n in (50, 100, 200)], scheme="contiguous")
        starts.append(trained_error(pooled(tmp_path / "other", other)[0]))
        longer = record([row(n, 9000, 4, (1000, 0, 0)) for n in (50, 100, 200)], task_changes={"tokens": 9})
        starts.append(trained_error(pooled(tmp_path / "longer", longer)[0]))  # another task of the same name
        assert [fit.settings for fit in fit_bounds(starts)][::2] == [
            "RoPE + PoSE, K_train 4, k 4",
            "RoPE, K_train 4, k 4",
            "RoPE + PoSE, K_train 4, k 4",
        ]

    def test_tuples_share_a_constant_though_their_tables_grow_with_the_length(self, tmp_path):
        starts = []
        for longest, weights in ((50, 1000), (100, 2000)):
            rows = [row(longest * times, 900, 4, (100, 0, 0)) for times in (1, 2, 3)]
            task = {"train_length": [20, longest]}
            made = record(rows, task_changes=task, family="tuples", parameters=weights)
            starts.append(trained_error(pooled(tmp_path / str(longest), made)[0]))
        assert [fit.fitted + fit.tested + fit.empty for fit in fit_bounds(starts)] == [4, 4]

    def test_the_expected_error_comes_first_where_records_have_it(self, tmp_path):
        rows = [
            {**row(n, 200, 4), "mean_probability": p, "std_probability": 0.1}
            for n, p in ((50, 0.99), (100, 0.9))
        ]
        group = self.group(tmp_path, *rows)
        start = trained_error(group)
        assert start.delta == pytest.approx(0.01) and not start.is_limit
        _, far = group.curves[0].points
        assert far.expected_error.value == pytest.approx(0.1)
        half = 1.96 * 0.1 / 200**0.5
        assert far.expected_error.low == pytest.approx(0.1 - half, abs=0.002)
        assert far.expected_error.high == pytest.approx(0.1 + half, abs=0.002)
        assert curves_json([group])[0]["points"][1]["expected_error"]["value"] == pytest.approx(0.1)

    def test_is_refused_where_nothing_was_both_trained_and_tested(self, tmp_path):
        with pytest.raises(UserError, match="every measured k is larger"):
            trained_error(self.group(tmp_path / "a", row(20, 3, 6)))
        with pytest.raises(UserError, match="no length from 20 to 50 was measured for k 4.*measure 50"):
            trained_error(self.group(tmp_path / "b", row(100, 3, 4)))
        with pytest.raises(UserError, match="nothing longer than 50"):
            trained_error(self.group(tmp_path / "c", row(50, 3, 4)))
