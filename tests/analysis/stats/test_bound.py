"""The bound: what it starts from, its constant from the shorter lengths, and whether it holds at the longer ones."""

import pytest

from analysis.stats.bound import improved_bound, theorem_bound, trained_error, try_bounds
from analysis.stats.exact_match import curves_json
from olmo_sparsity.util.errors import UserError
from tests.analysis.stats.test_exact_match import Z, pooled, wilson_by_hand
from tests.support.made_up_exact_match import record, row


class TestBound:
    def test_against_hand_arithmetic(self):
        assert improved_bound([50, 100, 200, 500], 50, 0.02) == pytest.approx([0.02, 0.08, 0.32, 2])
        assert theorem_bound([50, 100], 50, 1e-6) == pytest.approx([0.125, 0.5])

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
        written = start.as_dict()
        assert written["delta"] == start.delta and not written["delta_is_upper_limit"]
        assert (written["trained_length"], written["error"]) == (50, start.error.as_dict())

    def test_does_not_start_from_a_k_below_the_trained_ones(self, tmp_path):
        rows = [row(length, 199, k, (1, 0, 0)) for k in (1, 4) for length in (50, 60, 70)]
        task = {"k_train": 4, "k_train_min": 2}
        assert trained_error(pooled(tmp_path / "both", record(rows, task_changes=task))[0]).k == 4
        with pytest.raises(UserError, match="no trained k was measured"):
            trained_error(pooled(tmp_path / "one", record(rows[:3], task_changes=task))[0])

    def test_without_an_error_delta_is_the_upper_limit(self, tmp_path):
        group = self.group(tmp_path, *(row(length, 200, 4) for length in (20, 40, 100, 200)))
        start = trained_error(group)
        assert start.is_limit and (start.measured_length, start.trained_length) == (40, 50)
        assert start.delta == pytest.approx(Z**2 / (200 + Z**2))
        _, improved = try_bounds([start])[0].fits.values()
        assert improved.constant == pytest.approx(start.delta / (4 * start.delta)), "the upper limits"

    def test_starts_from_the_worst_trained_length(self, tmp_path):
        start = trained_error(
            self.group(
                tmp_path,
                row(20, 190, 4, (10, 0, 0)),
                row(50, 199, 4, (1, 0, 0)),
                row(60, 9, 4),
                row(70, 9, 4),
            )
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
        [test] = try_bounds(self.starts(tmp_path))
        theorem, improved = test.fits.values()
        assert test.label == "RoPE + PoSE" and [start.trained_length for start in test.starts] == [50, 100]
        assert (improved.fitted, improved.tested, improved.held, improved.empty) == (4, 4, 4, 0)
        assert improved.constant == pytest.approx(0.3) and improved.slack == pytest.approx(1)
        assert improved.fitted_to == 3
        assert theorem.constant == pytest.approx(0.3 / 50**3)
        # of L = 100 it is 8 times too high, and of L = 50 exact
        assert theorem.slack == pytest.approx(8**0.5) and theorem.held == 4

    def test_an_error_that_grows_faster_breaks_a_bound(self, tmp_path):
        [test] = try_bounds(self.starts(tmp_path, error=lambda times: 0.05 * times**4))
        improved = test.fits["improved"]
        assert (improved.tested, improved.held) == (4, 0)

    def test_a_bound_above_the_error_of_guessing_is_not_tried(self, tmp_path):
        """A model that guesses at every length beyond L: no bound can fail there, so none is said to hold."""
        [test] = try_bounds(self.starts(tmp_path, error=lambda times: 1e6))
        for fit in test.fits.values():
            assert fit.tested < 2 and fit.empty > 2

    def test_of_an_odd_number_of_lengths_the_middle_one_is_fitted(self, tmp_path):
        [test] = try_bounds(self.starts(tmp_path, times=(2, 3, 4))[:1])
        for fit in test.fits.values():
            assert (fit.fitted, fit.tested + fit.empty, fit.fitted_to) == (2, 1, 3)

    def test_a_bound_is_broken_only_where_the_whole_interval_is_above_it(self, tmp_path):
        def error(times):
            return 0.3 * times**2 * (1.03 if times > 3 else 1)

        [test] = try_bounds(self.starts(tmp_path, error=error))
        improved = test.fits["improved"]
        assert improved.slack < 1 and (improved.tested, improved.held) == (4, 4)

    def test_a_bound_between_the_error_of_guessing_and_1_says_nothing_either(self, tmp_path):
        [test] = try_bounds(self.starts(tmp_path, error=lambda times: 5.2 * times**2))
        improved = test.fits["improved"]
        assert (improved.tested, improved.empty) == (3, 1)  # one is 0.52

    def test_models_whose_locality_grows_with_the_length_share_a_constant(self, tmp_path):
        starts = []
        for longest in (50, 100):
            rows = [row(longest * times, 900, 4, (100, 0, 0)) for times in (1, 2, 3)]
            task = {"train_length": [20, longest], "locality": longest // 4}
            options = {"model.tuples.locality": longest // 4}
            made = record(rows, "planted", task_changes=task, family="tuples", options=options)
            starts.append(trained_error(pooled(tmp_path / str(longest), made)[0]))
        assert [len(test.starts) for test in try_bounds(starts)] == [2]

    def test_only_models_that_differ_in_length_alone_share_a_constant(self, tmp_path):
        starts = self.starts(tmp_path)
        other = record([row(n, 9000, 4, (1000, 0, 0)) for n in (50, 100, 200)], scheme="contiguous")
        starts.append(trained_error(pooled(tmp_path / "other", other)[0]))
        longer = record([row(n, 9000, 4, (1000, 0, 0)) for n in (50, 100, 200)], task_changes={"tokens": 9})
        starts.append(trained_error(pooled(tmp_path / "longer", longer)[0]))  # another task of the same name
        found = [(test.label, len(test.starts)) for test in try_bounds(starts)]
        assert found == [("RoPE + PoSE", 2), ("RoPE", 1), ("RoPE + PoSE, tokens 9", 1)]

    def test_tuples_share_a_constant_though_their_tables_grow_with_the_length(self, tmp_path):
        starts = []
        for longest, weights in ((50, 1000), (100, 2000)):
            rows = [row(longest * times, 900, 4, (100, 0, 0)) for times in (1, 2, 3)]
            task = {"train_length": [20, longest]}
            made = record(rows, task_changes=task, family="tuples", parameters=weights)
            starts.append(trained_error(pooled(tmp_path / str(longest), made)[0]))
        [test] = try_bounds(starts)
        assert [fit.fitted + fit.tested + fit.empty for fit in test.fits.values()] == [4, 4]

    def test_the_expected_error_comes_first_where_records_have_it(self, tmp_path):
        rows = [
            {**row(n, 200, 4), "mean_probability": p, "std_probability": 0.1}
            for n, p in ((50, 0.99), (100, 0.9), (200, 0.8))
        ]
        group = self.group(tmp_path, *rows)
        start = trained_error(group)
        assert start.delta == pytest.approx(0.01) and not start.is_limit
        _, far, _ = group.curves[0].points
        assert far.expected_error.value == pytest.approx(0.1)
        half = 1.96 * 0.1 / 200**0.5
        assert far.expected_error.low == pytest.approx(0.1 - half, abs=0.002)
        assert far.expected_error.high == pytest.approx(0.1 + half, abs=0.002)
        assert curves_json([group])[0]["points"][1]["expected_error"]["value"] == pytest.approx(0.1)

    def test_is_refused_where_nothing_was_both_trained_and_tested(self, tmp_path):
        with pytest.raises(UserError, match="no trained k was measured"):
            trained_error(self.group(tmp_path / "a", row(20, 3, 6)))
        with pytest.raises(UserError, match="no length from 20 to 50 was measured for k 4.*measure 50"):
            trained_error(self.group(tmp_path / "b", row(100, 3, 4)))
        with pytest.raises(UserError, match="fewer than two lengths above 50"):
            trained_error(self.group(tmp_path / "c", row(50, 3, 4), row(60, 3, 4)))
        certain = {"mean_probability": 1.0, "std_probability": 0.0}
        start = trained_error(
            self.group(tmp_path / "d", *({**row(n, 200, 4), **certain} for n in (50, 100, 200)))
        )
        assert start.is_limit and start.delta == pytest.approx(Z**2 / (200 + Z**2)), "no sample was wrong"
