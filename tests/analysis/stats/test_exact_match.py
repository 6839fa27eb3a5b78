"""Records of exact match: what is read, refused and pooled, the intervals, and the bound that starts from them."""

import json
import math

import numpy as np
import pytest
from scipy.stats import sem, t

from analysis.stats.exact_match import (
    POOLED,
    STUDENT,
    WILSON,
    Row,
    curve_names,
    exact_interval,
    expected_error,
    load_records,
    pool,
    scheme_labels,
    wilson,
)
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_exact_match import SPARSE, record, row, write

PARITY = "scratchpad_parity"
Z = 1.959963984540054


def wilson_by_hand(successes, trials):
    """Wilson's closed formula."""
    share, scale = successes / trials, 1 + Z**2 / trials
    middle = (share + Z**2 / (2 * trials)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return middle - half, middle + half


def pooled(folder, *values):
    for number, value in enumerate(values):
        write(folder / str(number), value)
    return pool(load_records([folder]))


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
            (
                {"task": {"name": "sparse_parity", "parameters": {"train_length": [20]}}},
                "train_length or k_train of the task is none",
            ),
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
        assert (first.seeds, first.samples, first.interval) == (2, 140, STUDENT)
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
            record(rows, "variable_assignment", scheme="contiguous", rotate="ids"),
            record(rows, "variable_assignment", scheme="contiguous", rotate="none"),
        )
        assert scheme_labels([group.settings for group in groups]) == [
            "RoPE + PoSE",
            "coupled ids (oracle), 1,000 weights",
            "coupled ids (oracle), 2,000 weights",
            "Predictive Position Coupling, rotate ids",
            "Predictive Position Coupling, rotate none",
            "RoPE",
            "NoPE",
            "RoPE, random start, gpt_neox",
            "RoPE, random start, olmo",
            "RoPE + PoSE",
        ]

    def test_options_of_another_family_are_not_named(self, tmp_path):
        few, tuples = {"max_duration": 500}, {"family": "tuples", "options": {"model.tuples.size": 2}}
        values = [
            record([row(20, 3)], PARITY, scheme=scheme, **each)
            for scheme in ("contiguous", "coupled")
            for each in (tuples, {"family": "olmo"}, {"family": "olmo", "options": few})
        ]
        assert {*scheme_labels([group.settings for group in pooled(tmp_path, *values)])} == {
            "RoPE, olmo",
            "RoPE, olmo, max_duration 500",
            "tuples",
            "coupled ids (oracle), olmo",
            "coupled ids (oracle), olmo, max_duration 500",
            "coupled ids (oracle), tuples",
        }

    def test_options_that_differ_with_k_train_are_not_named(self, tmp_path):
        """K_train tells them apart, and stands beside the label."""
        steps = {4: 1500, 6: 1500, 8: 2000}
        values = [
            record([row(20, 3, 4)], task_changes={"k_train": k}, options={"max_duration": each})
            for k, each in steps.items()
        ]
        assert {*scheme_labels([group.settings for group in pooled(tmp_path, *values)])} == {"RoPE + PoSE"}

    def test_curves_of_a_task_with_several_parameters_say_which_they_have(self, tmp_path):
        of_text = [{"distance": [1, 64]}, {"distance": [65, 128]}, {}]
        values = [record([row(20, 3, 4)], "planted", task_changes=each) for each in of_text]
        values += [record([row(20, 3)], PARITY, scheme=scheme) for scheme in ("pose", "coupled")]
        named = [name for _, _, name in curve_names(pooled(tmp_path, *values))]
        planted = "k = 4, K_train = 4; RoPE + PoSE"
        distances = [f"{planted}; distance 1–64", f"{planted}; distance 65–128"]
        assert sorted(named) == sorted([planted, *distances, "RoPE + PoSE", "coupled ids (oracle)"])

    def test_trained_lengths_are_those_of_training_and_not_of_the_test(self, tmp_path):
        far = {"task_changes": {"train_length": [300, 300], "k_train": 6}}
        own = {"train_length": [20, 50], "k_train": 4}
        rows = [row(300, 3, 4)]
        values = [record(rows, seed=1, **far), record(rows, seed=2, **far, trained={**SPARSE, **own})]
        (group,) = pooled(tmp_path / "together", *values)  # an older record does not tell
        assert (group.settings.train_length, group.settings.k_train) == ((20, 50), 4)
        assert pooled(tmp_path / "older", values[0])[0].settings.train_length == (300, 300)
        other = record(rows, **far, trained={**SPARSE, **own, "train_length": [20, 40]})
        named = [name for _, _, name in curve_names(pooled(tmp_path / "apart", values[1], other))]
        same = "k = 4, K_train = 4; RoPE + PoSE"
        assert named == [f"{same}; trained train_length {each}" for each in ("20–40", "20–50")]
        groups = pooled(tmp_path / "same", record(rows, seed=1), record(rows, seed=2, trained=SPARSE))
        assert [len(group.records) for group in groups] == [2]
        with pytest.raises(UserError, match="trained has no train_length"):
            load_records([write(tmp_path / "odd", record(rows, trained={"k_train": 4}))])

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

    def test_what_went_on_from_other_weights_is_apart_and_what_does_not_tell_joins_what_does(self, tmp_path):
        def names(folder, *told):
            fields = [{} if each is None else {"initial_weights": each} for each in told]
            values = [record([row(20, 3)], PARITY, seed=seed, **each) for seed, each in enumerate(fields)]
            groups = pooled(tmp_path / folder, *values)
            labels = scheme_labels([group.settings for group in groups])
            return [(label, len(group.records)) for label, group in zip(labels, groups, strict=True)]

        pose = "RoPE + PoSE"
        assert names("apart", False, True) == [(pose, 1), (f"{pose}, initial_weights True", 1)]
        assert names("older", None, None) == [(pose, 2)]
        assert names("with", None, True, True) == names("without", None, False, False) == [(pose, 3)]
        assert len(names("unclear", None, False, True)) == 3
        write(tmp_path / "odd", record([row(20, 3)], PARITY, initial_weights="runs/a"))
        with pytest.raises(UserError, match="initial_weights is 'runs/a'"):
            load_records([tmp_path / "odd"])


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

    def test_several_seeds_have_students_t(self):
        shares = np.array([12 / 20, 17 / 25, 30 / 32])
        found, name = exact_interval(np.array([12, 17, 30]), np.array([20, 25, 32]))
        low, high = t.interval(0.95, 2, shares.mean(), sem(shares))
        assert name == STUDENT and found.value == pytest.approx(shares.mean())
        assert (found.low, found.high) == pytest.approx((low, min(high, 1)))

    def test_seeds_that_agree_by_chance_have_the_interval_of_their_samples(self):
        found, _ = exact_interval(np.array([150, 150]), np.array([200, 200]))
        assert (found.low, found.high) == pytest.approx(wilson_by_hand(300, 400))

    @pytest.mark.parametrize("seeds", [2, 3, 6])
    @pytest.mark.parametrize("differ", [0, 0.05, 0.1])
    def test_the_interval_holds_the_truth_as_often_as_it_says(self, seeds, differ):
        rng = np.random.default_rng(0)
        truth, held, trials = 0.7, 0, 2000
        for _ in range(trials):
            exact = rng.binomial(200, np.clip(rng.normal(truth, differ, size=seeds), 0, 1))
            found, _ = exact_interval(exact, np.full(seeds, 200))
            held += found.low <= truth <= found.high
        assert held / trials >= 0.93

    def test_expected_errors_of_seeds_have_students_t_and_of_one_a_normal_interval(self):
        rows = [Row(20, None, 50, 50, 0, 0, 0, mean, 0.1) for mean in (0.9, 0.7, 0.5)]
        found = expected_error(rows)
        assert found.value == pytest.approx(0.3)
        half = t.ppf(0.975, 2) * 0.2 / 3**0.5
        assert (found.low, found.high) == pytest.approx((max(0, 0.3 - half), 0.3 + half))
        one = expected_error(rows[:1])
        assert (one.low, one.high) == pytest.approx((0.1 - Z * 0.1 / 50**0.5, 0.1 + Z * 0.1 / 50**0.5))

    @pytest.mark.parametrize("seeds", [1, 3])
    def test_an_expected_error_of_zero_has_the_bound_of_no_wrong_sample(self, seeds):
        rows = [Row(20, None, 200, 200, 0, 0, 0, 1.0, 0.0)] * seeds
        assert expected_error(rows) == wilson(0, 200 * seeds)

    def test_expected_errors_stay_between_0_and_1(self):
        sure, lost = (expected_error([Row(20, None, 4, 4, 0, 0, 0, p, 0.1)]) for p in (0.99, 0.01))
        assert sure.low == 0 and lost.high == 1
