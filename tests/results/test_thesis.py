"""The study of need and loss beyond the window (`results/thesis`): simulated seeds with a planted slope, plain loops,
cells of a tiny model, and the texts of the positive control."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem

from analysis import Result
from analysis.sampling import texts_before
from analysis.stats.permutation import permuted_slopes
from analysis.texts import TextReader, Texts
from olmo_sparsity.data.tokens import CorpusManifest
from tests.support import small_measurement, tiny
from tests.support.small_measurement import small

collect = import_module("results.thesis.collect")
study = import_module("results.thesis.study")
planted = import_module("results.thesis.planted")
trial = import_module("results.thesis.trial")

SIZES = np.array([140, 60, 40, *[20] * 8, *[6] * 10])
"""Targets of every package, as unequal as those of the docstrings."""
NEEDS = np.array([1, 2, 3, 4, 5, 6, 8, 16, np.inf])


def simulated(
    rng: np.random.Generator,
    slope: float = 0.0,
    *,
    sizes: np.ndarray = SIZES,
    noise: float = 0.0,
    differ: float = 0.1,
) -> Any:
    """Records of three seeds of one model, in which the rise has a slope on log2 of the need that the other seed needs.

    ``noise``: the share of targets whose measured need has nothing to do with the true one. ``differ``: standard
    deviation over packages of the slope, and of the mean rise.
    """
    count = int(sizes.sum())
    group = np.repeat(np.arange(len(sizes)), sizes)
    true_need = rng.choice(NEEDS, count)
    targets = pd.DataFrame(
        {
            "of": "all",
            "target_id": np.arange(count),
            "text": group * 3 + rng.integers(3, size=count),
            "group": [f"package {number}" for number in group],
            "kind": rng.choice(["repeat", "name"], count),
            "token": 5,
            "log_frequency": rng.normal(size=count),
        }
    )
    gain = 1 + rng.exponential(1.0, count)
    gain[rng.random(count) < 0.3] = 0.05
    inside = rng.exponential(1.0, count)
    of_package = slope + differ * rng.normal(size=len(sizes))
    usual = differ * rng.normal(size=len(sizes))
    needs = []
    losses = []
    for seed in (1, 2, 3):
        of_seed = inside + np.abs(rng.normal(0, 0.3, count))
        need = np.where(rng.random(count) < noise, rng.choice(NEEDS, count), true_need)
        frame = pd.DataFrame({"target_id": np.arange(count), "short": of_seed + gain, "inside": of_seed})
        farthest = 40 + 10 * study.log2_need(need) + rng.normal(0, 20, count)
        for name in ("text", "cache"):
            frame[f"need_{name}"] = np.where(gain > 1, need, np.nan)
            frame[f"farthest_{name}"] = np.where(gain > 1, farthest, np.nan)
        needs.append(frame.assign(of="all", model="pose", seed=seed))
        for windows in (2, 3, 4):
            rise = usual[group] + of_package[group] * study.log2_need(true_need) + 0.2 * gain
            rise += rng.normal(0, 0.5, count)
            beyond = pd.DataFrame(
                {"target_id": np.arange(count), "short": of_seed + gain, "beyond": of_seed + rise}
            )
            keys = {"of": "all", "model": "pose", "seed": seed, "context": "behind", "windows": windows}
            losses.append(beyond.assign(**keys))
    return study.Records(targets, pd.concat(needs), pd.concat(losses, ignore_index=True), {})


def simulated_pairs(
    rng: np.random.Generator,
    slope: float = 0.0,
    *,
    sizes: np.ndarray = SIZES,
    noise: float = 0.0,
    differ: float = 0.1,
) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows as those of `pair_rows`, all over tau, and their rise, as `simulated` has them."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    true_need = rng.choice(NEEDS, len(group))
    of_package = slope + differ * rng.normal(size=len(sizes))
    usual = differ * rng.normal(size=len(sizes))
    frames = []
    rises = []
    for pair in ("12", "23", "31"):
        is_noise = rng.random(len(group)) < noise
        need = np.where(is_noise, rng.choice(NEEDS, len(group)), true_need)
        gain = 1 + rng.exponential(1.0, len(group))
        frame = pd.DataFrame(
            {"pair": pair, "text": group, "group": group, "need_text": need, "gain_of_a": gain}
        )
        frame["inside_of_a"] = rng.exponential(1.0, len(group))
        frame["farthest_text"] = 40 + 10 * study.log2_need(need) + rng.normal(0, 20, len(group))
        frame["log_frequency"] = rng.normal(size=len(group))
        frames.append(frame)
        rise = usual[group] + of_package[group] * study.log2_need(true_need) + 0.2 * gain
        rises.append(rise + rng.normal(0, 0.5, len(group)))
    return pd.concat(frames, ignore_index=True), np.concatenate(rises)


def rows_of(records: Any) -> pd.DataFrame:
    """The pairs of the targets over tau."""
    return study.over_tau(study.pair_rows(records, "pose"))


def slow_slope(rows: pd.DataFrame, outcome: np.ndarray, covariates: list[str]) -> float:
    """The coefficient of log2 of the need, row by row."""
    design = []
    for row in rows.itertuples():
        need = 16 if row.need_text > 8 else row.need_text
        values = [1.0, np.log2(need), *(getattr(row, name) for name in covariates)]
        design.append([*values, row.pair == "23", row.pair == "31"])
    return float(np.linalg.lstsq(np.array(design, dtype=float), outcome, rcond=None)[0][1])


def test_a_pair_has_the_need_of_one_seed_and_the_losses_of_another() -> None:
    records = simulated(np.random.default_rng(0), 0.2)
    rows = study.pair_rows(records, "pose")
    needs = records.needs.set_index(["seed", "target_id"])
    losses = records.losses.set_index(["seed", "windows", "target_id"])
    for row in rows.sample(40, random_state=0).itertuples():
        first, second = map(int, row.pair)
        of_a = needs.loc[(first, row.target_id)]
        of_b = needs.loc[(second, row.target_id)]
        beyond = losses.loc[(second, 3, row.target_id)]
        assert row.gain_of_a == pytest.approx(of_a["short"] - of_a["inside"])
        assert row.inside_of_a == of_a["inside"]
        assert row.need_text == of_a["need_text"] or np.isnan(row.need_text)
        assert row.rise_behind_3 == pytest.approx(beyond["beyond"] - of_b["inside"])
        assert row.kept_behind_3 == pytest.approx(beyond["short"] - beyond["beyond"])
    assert sorted(set(rows["pair"])) == ["12", "23", "31"]


def test_the_slope_and_its_interval_equal_a_plain_loop_that_leaves_a_package_out() -> None:
    rows = rows_of(simulated(np.random.default_rng(1), 0.1))
    outcome = (rows["rise_behind_3"] + rows["rise_behind_4"]).to_numpy() / 2
    slope = study.slope_of(rows, outcome, permutations=10)
    covariates = ["gain_of_a", "inside_of_a", "farthest_text", "log_frequency"]
    value = slow_slope(rows, outcome, covariates)
    changes = []
    for group in sorted(set(rows["group"])):
        others = (rows["group"] != group).to_numpy()
        changes.append(slow_slope(rows[others], outcome[others], covariates) - value)
    squares = np.array(changes) ** 2
    effective = squares.sum() ** 2 / (squares**2).sum()
    assert slope.value == pytest.approx(value, rel=1e-6)
    assert slope.effective_groups == pytest.approx(effective, rel=1e-4)
    error = ((len(squares) - 1) / len(squares) * squares.sum()) ** 0.5
    assert (slope.high - slope.low) / 2 > 1.96 * error
    assert slope.n_groups == len(squares) and slope.n_targets == len(rows)


@pytest.mark.parametrize("sizes", [SIZES, np.full(21, 20), np.array([400, *[10] * 20])])
def test_a_planted_slope_is_found_without_bias_and_its_interval_holds_it(sizes: np.ndarray) -> None:
    """Packages of unequal size, of equal size, and one that dominates: three pairs of seeds are one unit a package."""
    rng = np.random.default_rng(2)
    slopes = []
    for _ in range(60):
        rows, rise = simulated_pairs(rng, 0.15, sizes=sizes)
        slopes.append(study.slope_of(rows, rise, permutations=2))
    values = np.array([slope.value for slope in slopes])
    assert values.mean() == pytest.approx(0.15, abs=4 * sem(values))
    assert np.mean([slope.low <= 0.15 <= slope.high for slope in slopes]) >= 0.88


def test_without_a_slope_p_is_uniform_and_need_that_is_noise_has_none() -> None:
    rng = np.random.default_rng(3)
    p_values = []
    null_values = []
    for _ in range(80):
        rows, rise = simulated_pairs(rng, 0.0, sizes=np.full(12, 12))
        p_values.append(study.slope_of(rows, rise, permutations=2).p)
        rows, rise = simulated_pairs(rng, 0.3, sizes=np.full(12, 12), noise=1.0)
        null_values.append(study.slope_of(rows, rise, permutations=2).value)
    for level in (0.05, 0.25, 0.5, 0.75):
        assert np.mean(np.array(p_values) < level) == pytest.approx(level, abs=0.15)
    assert np.mean(null_values) == pytest.approx(0, abs=4 * sem(null_values))


def test_need_that_is_half_noise_shows_about_half_of_the_slope() -> None:
    """So the slope on record is a lower bound of that on the true need."""
    rng = np.random.default_rng(4)
    values = []
    for _ in range(20):
        rows, rise = simulated_pairs(rng, 0.4, noise=0.5, differ=0.0)
        values.append(study.slope_of(rows, rise, permutations=2).value)
    assert 0.12 < np.mean(values) < 0.3


def test_permuted_needs_have_no_slope_and_equal_fits_one_by_one() -> None:
    rows, rise = simulated_pairs(np.random.default_rng(5), 0.3, sizes=np.full(10, 300))
    cells = study.cells_of(rows)
    assert set(np.bincount(cells)) == {30} and len(set(cells)) == 300
    for name, spread in (("gain_of_a", 0.4), ("inside_of_a", 0.4)):  # a tenth is narrow, but for the last one
        within = rows.groupby(cells)[name].transform("std").median()
        assert within < spread * rows[name].std()
    design = study.design_of(rows, "text", study.COVARIATES)
    null = permuted_slopes(rise, design, study.cells_of(rows), 60)
    assert null.mean() == pytest.approx(0.3 / 30, abs=4 * null.std() / 60**0.5 + 0.005)
    assert study.slope_of(rows, rise, permutations=60).null_p == pytest.approx(1 / 61)
    generator = np.random.default_rng(0)
    need = design[:, 0].copy()
    for cell in range(300):
        [places] = np.nonzero(cells == cell)
        need[places] = generator.permutation(need[places])
    with_intercept = np.column_stack([np.ones(len(rows)), need, design[:, 1:]])
    assert null[0] == pytest.approx(np.linalg.lstsq(with_intercept, rise, rcond=None)[0][1])


def test_a_permuted_need_keeps_its_distance() -> None:
    """So that the null of a slope spreads as a fitted slope does, whose need is like the distance."""
    rows, rise = simulated_pairs(np.random.default_rng(11), 0.3, sizes=np.full(10, 60))
    design = study.design_of(rows, "text", study.COVARIATES)
    null = permuted_slopes(rise, design, study.cells_of(rows), 3, together=[0, 3])
    cells = study.cells_of(rows)
    generator = np.random.default_rng(0)
    permuted = design.copy()
    for cell in range(cells.max() + 1):
        [places] = np.nonzero(cells == cell)
        order = generator.permutation(places)
        permuted[places, 0] = design[order, 0]
        permuted[places, 3] = design[order, 3]
    with_intercept = np.column_stack([np.ones(len(rows)), permuted])
    assert null[0] == pytest.approx(np.linalg.lstsq(with_intercept, rise, rcond=None)[0][1])
    alone = permuted_slopes(rise, design, study.cells_of(rows), 200)
    together = permuted_slopes(rise, design, study.cells_of(rows), 200, together=[0, 3])
    assert together.std() > 1.1 * alone.std()


def test_a_slope_that_is_not_determined_has_no_p_of_the_null() -> None:
    rows, rise = simulated_pairs(np.random.default_rng(12), sizes=np.full(6, 10))
    slope = study.slope_of(rows.assign(need_text=4.0), rise, permutations=5)
    assert np.isnan(slope.value) and np.isnan(slope.null_p)


def with_gains_that_fall_back(rng: np.random.Generator) -> Any:
    """Every gain of B is lost to the same share, but those of targets that need many tokens fell back from A to B."""
    records = simulated(rng, sizes=np.full(12, 40), differ=0.0)
    needs = records.needs.copy()
    many = study.log2_need(needs["need_text"].fillna(1))
    # what A and B do not share: more of it where more tokens are needed
    needs["short"] += rng.normal(0, 0.1 + 0.25 * many)
    by_target = needs.set_index(["seed", "target_id"])
    of_loss = pd.MultiIndex.from_frame(records.losses[["seed", "target_id"]])
    inside = by_target["inside"].loc[of_loss].to_numpy()
    short = by_target["short"].loc[of_loss].to_numpy()
    lost = 0.8 * (short - inside) + rng.normal(0, 0.1, len(short))
    return replace(records, needs=needs, losses=records.losses.assign(short=short, beyond=inside + lost))


def test_gains_that_are_not_there_again_make_a_slope_which_is_gone_given_them() -> None:
    slopes = study.slope_frame(with_gains_that_fall_back(np.random.default_rng(13)), 5)
    of_h2 = slopes[(slopes["hypothesis"] == "H2") & (slopes["model"] == "pose")].set_index("targets")
    primary = slopes[(slopes["test"] == "primary") & (slopes["hypothesis"] == "H2")].iloc[0]
    assert primary["high"] < 0
    given = of_h2.loc["all, given what B gains"]
    assert given["low"] < 0 < given["high"] and abs(given["value"]) < abs(primary["value"]) / 5
    pairs = slopes[slopes["targets"].isin(["pair 12", "pair 23", "pair 31"])]
    assert len(pairs) == 6 and pairs["n_targets"].sum() == 2 * primary["n_targets"]


@pytest.mark.slow
def test_how_often_gains_that_are_not_there_again_make_a_slope() -> None:
    """Prints the shares that protocol.md gives (pytest -s)."""
    rng = np.random.default_rng(17)
    shown = []
    for _ in range(100):
        rows = rows_of(with_gains_that_fall_back(rng))
        outcome = study.outcome_of(rows, "behind", (3, 4))
        alone = study.slope_of(rows, outcome, permutations=1)
        given = study.slope_of(rows, outcome, covariates=study.COVARIATES + study.OF_B, permutations=1)
        shown.append([alone.high < 0, alone.high < 0 and given.high < 0])
    alone, both = np.mean(shown, axis=0)
    print(
        f"H2 of a model that keeps the same share of every gain: {alone:.0%}, given what B gains {both:.0%}"
    )
    assert alone > 0.3 and both < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("differ", [0.0, 0.1])
def test_how_often_the_interval_and_the_null_show_a_slope_that_is_not_there(differ: float) -> None:
    """Prints the shares that protocol.md gives (pytest -s): with packages that are alike, and that differ."""
    rng = np.random.default_rng(18)
    shown = []
    for _ in range(200):
        rows, rise = simulated_pairs(rng, differ=differ)
        design = study.design_of(rows, "text", study.COVARIATES)
        of_interval = study.slope_of(rows, rise, permutations=1)
        row = [of_interval.p < 0.05]
        for of_need in ([0], [0, 3]):
            null = permuted_slopes(rise, design, study.cells_of(rows), 99, of_need)
            beyond = np.abs(null - null.mean()) >= abs(of_interval.value - null.mean())
            row.append((1 + beyond.sum()) / 100 <= 0.05)
        shown.append(row)
    interval, alone, together = np.mean(shown, axis=0)
    print(f"packages differ by {differ}: interval {interval:.1%}, need permuted alone {alone:.1%}, ", end="")
    print(f"with its distance {together:.1%}")
    assert interval < 0.1 and together <= alone


def test_the_model_whose_answer_is_known_is_no_test() -> None:
    records = simulated(np.random.default_rng(14), sizes=np.full(6, 20))
    as_window = replace(
        records, needs=records.needs.assign(model="window"), losses=records.losses.assign(model="window")
    )
    assert study.slope_frame(as_window, 3).empty


def test_what_is_left_equals_sums_over_targets() -> None:
    records = simulated(np.random.default_rng(6), 0.2, sizes=8 * SIZES)
    frame = study.retention_frame(records, "pose")
    rows = study.pair_rows(records, "pose")
    over = rows["gain_of_a"] > 1
    member = over & rows["need_text"].between(3, 4)
    is_bin = (frame["bin"] == "3-4") & (frame["windows"] == 3)
    of_bin = frame[is_bin].set_index("name")
    retention = rows["kept_behind_3"][member].sum() / rows["gain"][member].sum()
    assert of_bin.loc["retention", "value"] == pytest.approx(retention)
    assert of_bin.loc["rise_nats", "value"] == pytest.approx(rows["rise_behind_3"][member].mean())
    net = []
    for pair, of_pair in rows[member].groupby("pair"):
        edges = np.quantile(rows["inside_of_a"][over & (rows["pair"] == pair)], np.arange(1, 10) / 10)
        for row in of_pair.itertuples():
            net.append((np.searchsorted(edges, row.inside_of_a, side="right"), row.rise_behind_3))
    nothing = rows[(rows["gain_of_a"].abs() <= 0.1) & (rows["target_id"] % 4 == 0)]
    usual: dict[int, list[float]] = {decile: [] for decile in range(10)}
    for pair, of_pair in nothing.groupby("pair"):
        edges = np.quantile(rows["inside_of_a"][over & (rows["pair"] == pair)], np.arange(1, 10) / 10)
        for row in of_pair.itertuples():
            usual[int(np.searchsorted(edges, row.inside_of_a, side="right"))].append(row.rise_behind_3)
    expected = np.mean([rise - np.mean(usual[int(decile)]) for decile, rise in net])
    assert of_bin.loc["net_rise_nats", "value"] == pytest.approx(expected)
    assert of_bin["low"].notna().all() and of_bin["n_targets"].iloc[0] == member.sum()


def test_few_packages_have_values_and_no_intervals() -> None:
    records = simulated(np.random.default_rng(7), 0.2, sizes=np.array([60, 40, 30]))
    slopes = study.slope_frame(records, permutations=5)
    is_given = slopes["targets"] == "all, given what B gains"  # that of A, in these records
    assert slopes["value"].isna().equals(is_given)
    assert slopes[["low", "high", "p", "p_holm", "detectable"]].isna().all(axis=None)


def test_tests_are_adjusted_by_kind_and_everything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = simulated(np.random.default_rng(8), 0.2, sizes=np.full(8, 20))
    frames = {name: getattr(records, name) for name in ("targets", "needs", "losses")}
    collect.write_records(tmp_path, {}, **frames)
    options = ["--permutations", "20", "--figures", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv")]
    study.main(["--records", str(tmp_path), *options])
    printed = capsys.readouterr().out
    assert "primary: slope in nats a doubling of the need" in printed
    assert (tmp_path / "retention.png").is_file()
    slopes = study.slope_frame(study.Records.load(tmp_path), 20)
    primary = slopes[slopes["test"] == "primary"].sort_values("p")
    assert primary["hypothesis"].tolist() == ["H2", "H1"] or primary["hypothesis"].tolist() == ["H1", "H2"]
    assert primary["p_holm"].iloc[0] == pytest.approx(2 * primary["p"].iloc[0])
    assert slopes[slopes["test"] == "beside"]["p_holm"].isna().all()
    written = pd.read_csv(tmp_path / "numbers.csv", low_memory=False)
    assert {"slopes", "left", "agreement"} <= set(written["of"])
    seeds = written[(written["of"] == "agreement") & (written["spearman"].notna())]
    assert (seeds["spearman"] > 0.99).all()  # the simulated needs have no noise


# --- cells of a tiny model ---


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """A folder as run.sh leaves it, of three seeds with small settings, and its results by cell."""
    out = tmp_path_factory.mktemp("out")
    tiny.write_corpus(out / "data", {"train": [[1, 2, 3, 3], [4, 3]], "heldout": [[1, 2]]})
    alike: dict[str, Any] = {"targets_per_block": 5, "targets": 40, "placebos": (), "n_long": 24}
    exact = {"selectors": ("leave-one-out-kl",), "ks": (1, 2, 3, 4, 5, 6, 8, 16), "tau_nats": 1.0}
    in_cache = exact | {"selectors": ("leave-one-out-kl/cache:4",), "keep_as": ("cache:4",), "ks": (1, 2, 8)}
    cells = {}
    for seed in (1, 2, 3):
        model = small_measurement.model(seed)
        cells[f"need-pose-{seed}"] = small(model, **alike, **exact)
        cells[f"cache-pose-{seed}"] = small(model, **alike, **in_cache)
        for windows in (2, 3, 4):
            further = 24 * (windows - 1)
            losses = alike | {"selectors": ()}
            if windows == 2:
                cells[f"losses-pose-{seed}-behind-2"] = small(model, **losses, before=further)
            cells[f"losses-pose-{seed}-gap-{windows}"] = small(model, **losses, gap=further)
        cells[f"own-pose-{seed}"] = small(model, **alike, **exact, lengths=(53,))  # two windows, less a block
    for cell, result in cells.items():
        result.save(out / cell)
    greedy = {"selectors": ("leave-one-out-kl", "greedy-kl"), "ks": (1, 2), "tau_nats": 1.0, "batches": (0,)}
    part = small(small_measurement.model(1), **alike, **greedy)
    part.save(out / "greedy-pose-1" / "parts" / "targets-00000000")
    return out, cells | {"greedy-pose-1": part}


def collected(out: Path, records: Path, first_targets: Sequence[tuple[int, int]] = ()) -> Any:
    """The records of the cells in a folder, without blocks of two targets that a first look drew."""
    [heldout] = CorpusManifest.load(out / "data").splits["heldout"]
    trial = {"heldout_sha256": heldout.sha256, "targets_per_block": 2, "first_targets": first_targets}
    records.mkdir(exist_ok=True)
    (records / "trial.json").write_text(json.dumps(trial))
    collect.main([str(out), "--records", str(records), "--trial", str(records / "trial.json")])
    return study.Records.load(records)


def test_cells_are_collected_and_printed(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cells = measured
    records = collected(out, tmp_path)
    targets = records.targets.set_index(["of", "target_id"])
    needs = records.needs.set_index(["of", "model", "seed", "target_id"])
    losses = records.losses.set_index(["of", "seed", "context", "windows", "target_id"])
    result = cells["need-pose-2"]
    counts = {1: 1, 2: 1, 3: 3, 4: 1}
    for row, place in enumerate(result.over):
        target = result.targets.iloc[place]
        of_record = needs.loc[("all", "pose", 2, target.target_id)]
        gain = target.loss_short_nats - target.loss_long_nats
        saved = target.loss_short_nats - result.loss_nats("leave-one-out-kl")[row]
        enough = [k for k, value in zip(result.ks, saved, strict=True) if value >= 0.9 * gain]
        need = enough[0] if enough else np.inf
        chosen = result.selected("leave-one-out-kl")[row][: int(min(need, 16))]
        assert of_record["need_text"] == need
        distance = 24 + target.target_id % 5 - chosen.min()
        assert of_record["farthest_text"] == distance
        assert of_record["short"] - of_record["inside"] == pytest.approx(gain, abs=2e-4)
        frequency = np.log1p(counts.get(target.token, 0))
        assert targets.loc[("all", target.target_id), "log_frequency"] == pytest.approx(frequency)
    gap = cells["losses-pose-2-gap-3"].targets.set_index("target_id")
    own = cells["own-pose-3"].targets.set_index("target_id")
    for target_id in targets.loc["all"].index[:10]:
        there = losses.loc[("all", 2, "gap", 3, target_id)]
        assert there["beyond"] == pytest.approx(gap.loc[target_id, "loss_long_nats"], abs=1e-4)
        assert there["short"] == pytest.approx(gap.loc[target_id, "loss_short_nats"], abs=1e-4)
    for target_id in targets.loc["own"].index[:5]:
        there = losses.loc[("own", 3, "own", 2, target_id)]
        assert there["beyond"] == pytest.approx(own.loc[target_id, "loss_of_53_nats"], abs=1e-4)
        assert there["short"] == pytest.approx(own.loc[target_id, "loss_short_at_53_nats"], abs=1e-4)
    greedy = cells["greedy-pose-1"]
    known = needs.loc[("all", "pose", 1)]["need_greedy"].dropna()
    assert sorted(known.index) == sorted(greedy.targets.iloc[greedy.over]["target_id"])
    assert needs.loc[("all", "pose", 2)]["need_greedy"].isna().all()
    kept = set(targets.loc["all"].index)
    assert all(target_id in kept for target_id in range(0, 40, 4))
    head = (tmp_path / "records.json").read_text(encoding="utf8")
    assert str(out) not in head and str(tmp_path) not in head
    study.main(["--records", str(tmp_path), "--permutations", "3"])
    assert "RoPE + PoSE, need as cache" in capsys.readouterr().out


def test_cells_of_other_targets_are_refused(measured: tuple[Path, dict[str, Result]], tmp_path: Path) -> None:
    out, cells = measured
    for name in ("data", "need-pose-1"):
        (tmp_path / name).symlink_to(out / name)
    one = cells["losses-pose-1-gap-2"]
    replace(one, targets=one.targets.assign(position=one.targets["position"] + 1)).save(
        tmp_path / "losses-pose-1-gap-2"
    )
    with pytest.raises(SystemExit, match="need-pose-1 was measured on other targets"):
        collected(tmp_path, tmp_path / "records")
    with pytest.raises(SystemExit, match="no complete cells"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "data").symlink_to(out / "data")
        collected(tmp_path / "empty", tmp_path / "records")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_sha256": "of another"}, "another model than losses-pose-1-gap-2"),
        ({"texts_sha256": "of another"}, "another corpus than losses-pose-1-gap-2"),
        ({"n_short": 4}, "another lengths than losses-pose-1-gap-2"),
        ({"training_seed": 2}, "a model trained from seed 2"),
        ({"model": "train-pose-1/step00000007"}, "another last step of training than losses-pose-1-gap-2"),
        ({"gap": 24}, "another window than losses-pose-1-gap-2"),
        ({"before": 24}, "measured with behind of 24 tokens"),
    ],
)
def test_cells_that_do_not_go_together_are_refused(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    out, cells = measured
    for name in ("data", "need-pose-1", "losses-pose-1-gap-2"):
        (tmp_path / name).symlink_to(out / name)
    one = cells["losses-pose-1-gap-3"]
    replace(one, settings=one.settings.but(**changes)).save(tmp_path / "losses-pose-1-gap-3")
    with pytest.raises(SystemExit, match=f"losses-pose-1-gap-3 .*{message}"):
        collected(tmp_path, tmp_path / "records")


def test_a_cell_without_targets_over_tau_has_no_needs(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path
) -> None:
    out, cells = measured
    for name in ("data", "losses-pose-1-gap-2"):
        (tmp_path / name).symlink_to(out / name)
    result = cells["need-pose-1"]
    targets = result.targets.assign(over_tau=False)
    replace(result, targets=targets, choices=result.choices[:0]).save(tmp_path / "need-pose-1")
    needs = collected(tmp_path, tmp_path / "records").needs
    assert len(needs) and "need_text" not in needs


def test_targets_over_tau_under_any_seed_are_kept_and_one_in_four_of_the_others(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path
) -> None:
    out, cells = measured
    records = collected(out, tmp_path)
    for of, kind in {"all": "need", "own": "own"}.items():
        over = []
        for seed in (1, 2, 3):
            targets = cells[f"{kind}-pose-{seed}"].targets
            over.append({row.target_id for row in targets.itertuples() if gain_of(row) > 1})
        expected = set.union(*over, set(range(0, len(targets), 4)))
        assert set.intersection(*over) < set.union(*over) and len(expected) < len(targets)
        for frame in (records.targets, records.needs, records.losses):
            assert set(frame.loc[frame["of"] == of, "target_id"]) == expected


def test_targets_of_the_first_look_are_left_out_and_counted(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cells = measured
    targets = cells["need-pose-1"].targets
    row = targets[targets["target_id"] == 8].iloc[0]
    usual = collected(out, tmp_path / "usual")
    capsys.readouterr()
    records = collected(out, tmp_path / "without", [(int(row["text"]), int(row["position"]))])
    places = {(row["text"], row["position"]), (row["text"], row["position"] + 1)}
    left_out = {
        target.target_id for target in targets.itertuples() if (target.text, target.position) in places
    }
    assert left_out == {8, 9}
    own = cells["own-pose-1"].targets
    of_own = {target.target_id for target in own.itertuples() if (target.text, target.position) in places}
    printed = capsys.readouterr().out
    assert "2 of 40 targets (all) are of the first look: left out" in printed
    assert f"{len(of_own)} of {len(own)} targets (own) are of the first look: left out" in printed
    for name in ("targets", "needs", "losses"):
        for of, gone in {"all": left_out, "own": of_own}.items():
            frame = getattr(usual, name)
            before = frame[(frame["of"] == of) & ~frame["target_id"].isin(gone)]
            frame = getattr(records, name)
            pd.testing.assert_frame_equal(
                before.reset_index(drop=True), frame[frame["of"] == of].reset_index(drop=True)
            )


def test_a_first_look_at_another_corpus_is_refused(
    measured: tuple[Path, dict[str, Result]], tmp_path: Path
) -> None:
    """The one that is shipped is of the docstrings, whose texts are counted otherwise."""
    with pytest.raises(SystemExit, match="has other held-out text"):
        collect.main([str(measured[0]), "--records", str(tmp_path)])


def test_the_blocks_of_the_first_look_are_drawn_as_in_its_script() -> None:
    """That script counts tokens through the whole split, with an end of text behind every document."""
    rng = np.random.default_rng(16)
    lengths = rng.integers(600, 3000, 40)
    lengths[:2] = [1024 + 17, 1024 + 18]
    groups = np.array([f"package {number}" for number in rng.integers(5, size=40)])
    ends = np.cumsum(lengths + 1) - 1
    starts = ends - lengths
    documents = [
        (number, starts[number], ends[number]) for number in range(40) if lengths[number] > 1024 + 17
    ]
    generator = np.random.default_rng(0)
    expected = []
    for _ in range(200):
        number, start, end = documents[generator.integers(len(documents))]
        position = int(generator.integers(start + 1024, end - 16))
        expected.append((number, position - start))
        while True:
            other, other_start, other_end = documents[generator.integers(len(documents))]
            if groups[other] != groups[number]:
                break
        generator.integers(other_start, other_end - 1024)
    assert trial.blocks_of(lengths, groups) == expected
    shipped = json.loads(collect.TRIAL.read_text(encoding="utf8"))
    assert len(shipped["first_targets"]) == trial.BLOCKS and shipped["targets_per_block"] == trial.BLOCK


def test_the_first_look_is_written_with_the_text_that_it_is_of(tmp_path: Path) -> None:
    texts = [[number % 40 + 1 for number in range(1100 + 10 * text)] for text in range(4)]
    corpus = tiny.write_corpus(tmp_path / "data", {"train": [[1, 2]], "heldout": texts})
    tiny.add_groups(corpus, ["a", "b", "a", "b"])
    trial.main([str(corpus), "--out", str(tmp_path / "trial.json")])
    blocks = trial.blocks_of(np.array([1100, 1110, 1120, 1130]), np.array(["a", "b", "a", "b"]))
    expected = {(text, first + offset) for text, first in blocks for offset in range(16)}
    assert collect.targets_of_trial(tmp_path / "trial.json", corpus) == expected


def gain_of(row: Any) -> float:
    """L_short - L_long of a row of targets."""
    return float(row.loss_short_nats - row.loss_long_nats)


def test_yarn_has_the_need_of_rope_and_its_own_losses(tmp_path: Path) -> None:
    """Cells of YaRN have losses alone, those inside the window in a cell of their own."""
    tiny.write_corpus(tmp_path / "data", {"train": [[1, 2, 3, 3], [4, 3]], "heldout": [[1, 2]]})
    alike: dict[str, Any] = {"targets_per_block": 5, "targets": 40, "placebos": (), "n_long": 24}
    exact = {"selectors": ("leave-one-out-kl",), "ks": (1, 2, 3, 4, 5, 6, 8, 16), "tau_nats": 1.0}
    of_rope = small(small_measurement.model(1), **alike, **exact)
    of_second = small(small_measurement.model(2), **alike, **exact)
    # a model that is scaled loses something else, with the same weights
    inside = small(small_measurement.model(3), **alike, selectors=())
    behind = small(small_measurement.model(3), **alike, selectors=(), before=24)
    weights = {"model_sha256": of_second.settings.model.sha256}
    cells = {"need-rope-1": of_rope, "need-rope-2": of_second}
    cells["losses-yarn2-2-inside"] = replace(inside, settings=inside.settings.but(**weights))
    cells["losses-yarn2-2-behind-2"] = replace(behind, settings=behind.settings.but(**weights))
    for cell, result in cells.items():
        result.save(tmp_path / cell)
    records = collected(tmp_path, tmp_path / "records")
    rows = study.pair_rows(records, "yarn2").set_index("target_id")
    assert set(rows["pair"]) == {"12"}
    needs = collect.needs_of(of_rope, collect.AS_TEXT).set_index("target_id")["need_text"].dropna()
    assert rows["need_text"].dropna().to_dict() == needs.to_dict() and len(needs) > 3
    of_inside = inside.targets.set_index("target_id")
    of_behind = behind.targets.set_index("target_id")
    for target_id, row in rows.iterrows():
        assert row["gain"] == pytest.approx(gain_of(of_inside.loc[target_id]), abs=2e-4)
        assert row["inside"] == pytest.approx(of_inside["loss_long_nats"].loc[target_id], abs=1e-4)
        rise = of_behind["loss_long_nats"].loc[target_id] - of_inside["loss_long_nats"].loc[target_id]
        assert row["rise_behind_2"] == pytest.approx(rise, abs=2e-4)


def test_cells_of_the_control_keep_all_targets_with_planted_bits(tmp_path: Path) -> None:
    tiny.write_corpus(tmp_path / "data", {"train": [[1, 2, 3, 3], [4, 3]], "heldout": [[1, 2]]})
    alike: dict[str, Any] = {"targets_per_block": 1, "targets": 60, "placebos": (), "n_long": 24}
    exact = {"selectors": ("leave-one-out-kl",), "ks": (1, 2, 3, 4, 5, 6, 8, 16), "tau_nats": 0.35}
    cells = {
        "need-control-1": small(small_measurement.model(1), **alike, **exact),
        "losses-control-1-behind-2": small(small_measurement.model(1), **alike, selectors=(), before=24),
    }
    for cell, result in cells.items():
        result.save(tmp_path / cell)
    ks = [1, 2, 4, 0, 1, 2]
    rows = [{"k": k, "farthest": 10 + number} for number, k in enumerate(ks)]
    (tmp_path / "texts-control").mkdir()
    (tmp_path / "texts-control" / "planted.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    records = collected(tmp_path, tmp_path / "records")
    planted_texts = cells["need-control-1"].targets.query("text != 3")
    gains = [gain_of(row) for row in planted_texts.itertuples()]
    assert min(gains) < 0.35 < max(gains)
    assert records.targets["target_id"].tolist() == planted_texts["target_id"].tolist()
    assert records.targets["k"].tolist() == [ks[text] for text in planted_texts["text"]]
    assert records.targets["farthest"].tolist() == [10 + text for text in planted_texts["text"]]
    assert set(planted_texts["target_id"]) <= set(records.needs["target_id"])
    beyond = records.losses.set_index("target_id")["beyond"]
    of_cell = cells["losses-control-1-behind-2"].targets.set_index("target_id")["loss_long_nats"]
    for target_id in planted_texts["target_id"]:
        assert beyond[target_id] == pytest.approx(of_cell[target_id], abs=1e-4)


def test_a_cell_of_own_text_has_two_three_four_and_eight_windows() -> None:
    """Of 11 tokens and a block of 5 a window has 16; the lengths are without the block, as in run.sh."""
    lengths = (27, 43, 59, 123)
    settings = {"targets_per_block": 5, "targets": 5, "placebos": (), "n_long": 11, "selectors": ()}
    result = small(small_measurement.model(1), **settings, lengths=lengths)
    match = collect.CELL.fullmatch("own-pose-1")
    beyond = list(collect.losses_beyond(result, match))
    assert [(context, windows) for context, windows, _, _ in beyond] == [("own", n) for n in (2, 3, 4, 8)]
    for length, (_, _, short, long) in zip(lengths, beyond, strict=True):
        np.testing.assert_array_equal(short, result.targets[f"loss_short_at_{length}_nats"])
        np.testing.assert_array_equal(long, result.targets[f"loss_of_{length}_nats"])


def test_known_answers_are_the_largest_differences() -> None:
    records = simulated(np.random.default_rng(9), sizes=np.full(6, 10))
    as_window = replace(
        records, needs=records.needs.assign(model="window"), losses=records.losses.assign(model="window")
    )
    answers = study.known_answers(as_window)
    rows = study.pair_rows(as_window, "window")
    of_two = answers[(answers["context"] == "behind") & (answers["windows"] == 2)]
    assert of_two["largest_nats"].tolist() == [rows["rise_behind_2"].abs().max()]


# --- the positive control ---


def test_planted_texts_have_the_parity_of_bits_in_the_far_context() -> None:
    """Between the bits stand tokens of a document; every stretch has the same tokens for every k."""
    tokens = {group: [np.arange(start, start + 600) % 90 for start in (0, 7)] for group in ("a", "b")}
    reader = TextReader(lambda text: np.array(list(map(int, text.split()))))
    written = [(group, " ".join(map(str, text))) for group, texts in tokens.items() for text in texts]
    rows = list(planted.rows(Texts(reader, written, "texts"), 90, stretches=30))
    tokenizer = planted.words(90)
    far = planted.N_LONG - planted.N_SHORT
    labels = []
    for number, row in enumerate(rows[:90]):
        ids = np.array(tokenizer.encode(row["text"]).ids)
        assert len(ids) == planted.N_LONG + 1 and row["k"] == (1, 2, 4)[number % 3]
        [places] = np.nonzero(ids[:-1] > 90)
        assert len(places) == row["k"] and places.max() < far
        assert row["farthest"] == planted.N_LONG - places.min()
        assert ids[-1] - 91 == (ids[places] - 91).sum() % 2
        labels.append(ids[-1] - 91)
        plain = np.delete(ids[:-1] - 1, places)
        steps = np.delete(np.arange(planted.N_LONG), places)
        assert len(set((plain - steps) % 90)) == 1
    assert 0.3 < np.mean(labels) < 0.7
    assert [row["k"] for row in rows[90:]] == [0, 0] and {row["group"] for row in rows[90:]} == {"a", "b"}


@pytest.mark.parametrize("windows", [2, 3, 4, 8])
def test_no_planted_bits_stand_before_a_context(windows: int) -> None:
    tokens = {group: [np.arange(600) % 90] for group in ("a", "b", "c")}
    reader = TextReader(lambda text: np.array(list(map(int, text.split()))))
    written = [(group, " ".join(map(str, text))) for group, texts in tokens.items() for text in texts]
    rows = list(planted.rows(Texts(reader, written, "texts"), 90, stretches=30))
    tokenizer = planted.words(90)
    of_words = TextReader(lambda text: np.array(tokenizer.encode(text).ids))
    texts = Texts(of_words, [(row["group"], row["text"]) for row in rows], "planted")
    before = planted.WINDOW * (windows - 1)
    drawn = texts_before(texts, np.arange(len(rows)), np.full(len(rows), -1), before, seed=0)
    assert {rows[text]["k"] for text in drawn[:, 0]} == {0}


def test_the_control_is_fitted_on_planted_bits(tmp_path: Path) -> None:
    """k is known; a rise that grows with it is seen, whatever the needs that were measured."""
    rng = np.random.default_rng(10)
    records = simulated(rng, sizes=np.full(10, 30))
    k = rng.choice([1, 2, 4], 300)
    rise = 0.25 * np.log2(k)[records.losses["target_id"]] + rng.normal(0, 0.3, len(records.losses))
    inside = records.needs.set_index(["seed", "target_id"])["inside"]
    of_loss = pd.MultiIndex.from_frame(records.losses[["seed", "target_id"]])
    control = study.Records(
        records.targets.assign(of="control", k=k, farthest=rng.integers(9, 64, 300)),
        records.needs.assign(of="control", model="control"),
        records.losses.assign(of="control", model="control", beyond=inside.loc[of_loss].to_numpy() + rise),
        {},
    )
    slopes = study.slope_frame(control, 20)
    assert slopes["test"].unique().tolist() == ["control"]
    planted_bits = slopes[slopes["targets"] == "planted"]
    assert planted_bits["value"].to_numpy() == pytest.approx(0.25, abs=0.06)
    assert (planted_bits["p"] < 1e-3).all()
    # the measured needs have nothing to do with the bits: then the text half would be read with a caution
    measured = slopes[(slopes["need"] == "text") & (slopes["hypothesis"] == "3 windows")]
    assert measured["value"].to_numpy() == pytest.approx(0, abs=0.06)


def test_rows_of_planted_texts_are_found_by_the_number_of_the_text(tmp_path: Path) -> None:
    rows = [{"k": 2, "farthest": 30}, {"k": 0, "farthest": 0}, {"k": 4, "farthest": 50}]
    path = tmp_path / "planted.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    targets = pd.DataFrame({"of": ["all", *["control"] * 3], "target_id": [0, 0, 1, 2], "text": [2, 0, 1, 2]})
    found = collect.with_planted(targets, path)
    assert found["target_id"].tolist() == [0, 0, 2]
    np.testing.assert_array_equal(found["k"], [np.nan, 2, 4])
