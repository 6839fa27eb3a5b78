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


def test_need_that_is_half_noise_shows_about_half_of_the_slope():
    """As protocol.md says, so that the slope on record is a lower bound of that on the true need."""
    rng = np.random.default_rng(4)
    values = []
    for _ in range(20):
        rows, rise = simulated_pairs(rng, 0.4, noise=0.5, differ=0.0)
        values.append(study.slope_of(rows, rise, permutations=2).value)
    assert 0.12 < np.mean(values) < 0.3


@pytest.mark.parametrize("together", [[0], [0, 3]])
def test_permuted_slopes_are_fits_of_needs_that_are_permuted_within_cells(together):
    """Alone, or with their distances."""
    rows, rise = simulated_pairs(np.random.default_rng(5), 0.3, sizes=np.full(10, 60))
    design = study.design_of(rows, "text", study.COVARIATES)
    cells = study.cells_of(rows)
    null = permuted_slopes(rise, design, cells, 3, together)
    generator = np.random.default_rng(0)
    permuted = design.copy()
    for cell in range(cells.max() + 1):
        [places] = np.nonzero(cells == cell)
        permuted[np.ix_(places, together)] = design[np.ix_(generator.permutation(places), together)]
    with_intercept = np.column_stack([np.ones(len(rows)), permuted])
    assert null[0] == pytest.approx(np.linalg.lstsq(with_intercept, rise, rcond=None)[0][1])


def test_a_slope_stands_beside_those_of_needs_permuted_with_their_distance():
    rows, rise = simulated_pairs(np.random.default_rng(5), 0.3, sizes=np.full(10, 300))
    cells = study.cells_of(rows)
    assert set(np.bincount(cells)) == {30} and len(set(cells)) == 300
    for name in ("gain_of_a", "inside_of_a"):  # a tenth is narrow, but for the last one
        assert rows.groupby(cells)[name].std().median() < 0.4 * rows[name].std()
    design = study.design_of(rows, "text", study.COVARIATES)
    alone = permuted_slopes(rise, design, cells, 60)
    assert alone.mean() == pytest.approx(0.3 / 30, abs=4 * alone.std() / 60**0.5 + 0.005)
    null = permuted_slopes(rise, design, cells, 60, [0, 3])
    slope = study.slope_of(rows, rise, permutations=60)
    assert [slope.null_low, slope.null_high] == pytest.approx(np.quantile(null, [0.025, 0.975]).tolist())
    assert slope.null_p == pytest.approx(1 / 61)


def test_a_slope_that_is_not_determined_has_no_p_of_the_null():
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


def test_gains_that_are_not_there_again_make_a_slope_which_is_gone_given_them():
    slopes = study.slope_frame(with_gains_that_fall_back(np.random.default_rng(13)), 5)
    of_h2 = slopes[(slopes["hypothesis"] == "H2") & (slopes["model"] == "pose")].set_index("targets")
    primary = slopes[(slopes["test"] == "primary") & (slopes["hypothesis"] == "H2")].iloc[0]
    assert primary["high"] < 0
    given = of_h2.loc["all, given what B gains"]
    assert given["low"] < 0 < given["high"] and abs(given["value"]) < abs(primary["value"]) / 5
    pairs = slopes[slopes["targets"].isin(["pair 12", "pair 23", "pair 31"])]
    assert len(pairs) == 6 and pairs["n_targets"].sum() == 2 * primary["n_targets"]


@pytest.mark.slow
def test_how_often_gains_that_are_not_there_again_make_a_slope():
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
def test_how_often_the_interval_and_the_null_show_a_slope_that_is_not_there(differ):
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


def test_what_is_left_equals_sums_over_targets():
    records = simulated(np.random.default_rng(6), 0.2, sizes=8 * SIZES)
    frame = study.retention_frame(records, "pose")
    of_bin = frame[(frame["bin"] == "3-4") & (frame["windows"] == 3)].set_index("name")
    rows = study.pair_rows(records, "pose")
    rows["over"] = rows["gain_of_a"] > 1
    for _, of_pair in rows.groupby("pair"):
        edges = np.quantile(of_pair.loc[of_pair["over"], "inside_of_a"], np.arange(1, 10) / 10)
        decile = np.searchsorted(edges, of_pair["inside_of_a"], side="right")
        rows.loc[of_pair.index, "decile"] = decile
    member = rows[rows["over"] & rows["need_text"].between(3, 4)]
    nothing = rows[(rows["gain_of_a"].abs() <= 0.1) & (rows["target_id"] % 4 == 0)]
    usual = nothing.groupby("decile")["rise_behind_3"].mean()
    rise = member["rise_behind_3"]
    assert of_bin["value"].to_dict() == pytest.approx(
        {
            "retention": member["kept_behind_3"].sum() / member["gain"].sum(),
            "rise_nats": rise.mean(),
            "net_rise_nats": (rise - member["decile"].map(usual)).mean(),
        }
    )
    assert of_bin["low"].notna().all() and set(of_bin["n_targets"]) == {len(member)}


def test_the_figure_has_a_panel_for_the_control_and_for_every_context_that_is_measured():
    records = simulated(np.random.default_rng(8), 0.2)
    left = study.retention_frame(records, "pose")
    titles = ["other text, 2 windows", "other text, 3 and 4"]
    drawn = study.figure(left, study.control_left(records))
    assert [axes.get_title(loc="left") for axes in drawn.axes] == titles
    of_control = pd.DataFrame(
        [(k, windows, seed, 1 / k) for k in (1, 2) for windows in (2, 8) for seed in ("1", "3", "mean")],
        columns=["k", "windows", "seed", "left"],
    )
    drawn = study.figure(left, of_control)
    first, *others = drawn.axes
    assert [axes.get_title(loc="left") for axes in others] == titles
    lines = [line.get_ydata() for line in first.lines if len(line.get_xdata()) in (2, 4)]
    assert sorted({float(value) for line in lines for value in line}) == [0, 50, 100]


def test_few_packages_have_values_and_no_intervals():
    records = simulated(np.random.default_rng(7), 0.2, sizes=np.array([60, 40, 30]))
    slopes = study.slope_frame(records, permutations=5)
    is_given = slopes["targets"] == "all, given what B gains"  # that of A, in these records
    assert slopes["value"].isna().equals(is_given)
    assert slopes[["low", "high", "p", "p_holm", "detectable"]].isna().all(axis=None)


# --- cells of a tiny model ---


ALIKE: dict[str, Any] = {"targets_per_block": 5, "targets": 40, "placebos": (), "n_long": 24}
EXACT: dict[str, Any] = {
    "selectors": ("leave-one-out-kl",),
    "ks": (1, 2, 3, 4, 5, 6, 8, 16),
    "tau_nats": 1.0,
}
LOSSES: dict[str, Any] = {"selectors": ()}
PLANTED = [1, 2, 4, 0, 1, 2]
"""Bits of every text of the control."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder as run.sh leaves it, of three seeds and the control with small settings, and its results by cell."""
    out = tmp_path_factory.mktemp("out")
    tiny.write_corpus(out / "data", {"train": [[1, 2, 3, 3], [4, 3]], "heldout": [[1, 2]]})
    in_cache = EXACT | {"selectors": ("leave-one-out-kl/cache:4",), "keep_as": ("cache:4",), "ks": (1, 2, 8)}
    cells = {}
    for seed in (1, 2, 3):
        model = small_measurement.model(seed)
        cells[f"need-pose-{seed}"] = small(model, **ALIKE, **EXACT)
        cells[f"cache-pose-{seed}"] = small(model, **ALIKE, **in_cache)
        cells[f"losses-pose-{seed}-behind-2"] = small(model, **ALIKE, **LOSSES, before=24)
        for windows in (2, 3, 4):
            gap = small(model, **ALIKE, **LOSSES, gap=24 * (windows - 1))
            cells[f"losses-pose-{seed}-gap-{windows}"] = gap
        # two windows, less a block
        cells[f"own-pose-{seed}"] = small(model, **ALIKE, **EXACT, lengths=(53,))
    of_control = ALIKE | {"targets_per_block": 1, "targets": 60}
    model = small_measurement.model(1)
    cells["need-control-1"] = small(model, **of_control, **EXACT | {"tau_nats": 0.35})
    cells["losses-control-1-behind-2"] = small(model, **of_control, **LOSSES, before=24)
    for cell, result in cells.items():
        result.save(out / cell)
    greedy = EXACT | {"selectors": ("leave-one-out-kl", "greedy-kl"), "ks": (1, 2), "batches": (0,)}
    part = small(small_measurement.model(1), **ALIKE, **greedy)
    part.save(out / "greedy-pose-1" / "parts" / "targets-00000000")
    rows = [{"k": k, "farthest": 10 + number} for number, k in enumerate(PLANTED)]
    (out / "texts-control").mkdir()
    (out / "texts-control" / "planted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out, cells | {"greedy-pose-1": part}


def linked(folder: Path, out: Path, *names: str) -> Path:
    """A folder that has the corpus and some cells of another one."""
    folder.mkdir(exist_ok=True)
    for name in ("data", *names):
        (folder / name).symlink_to(out / name)
    return folder


def collected(out: Path, records: Path, first_targets: Sequence[tuple[int, int]] = ()) -> Any:
    """The records of the cells in a folder, without blocks of two targets that a first look drew."""
    [heldout] = CorpusManifest.load(out / "data").splits["heldout"]
    trial = {"heldout_sha256": heldout.sha256, "targets_per_block": 2, "first_targets": first_targets}
    records.mkdir(exist_ok=True)
    (records / "trial.json").write_text(json.dumps(trial))
    collect.main([str(out), "--records", str(records), "--trial", str(records / "trial.json")])
    return study.Records.load(records)


def test_cells_are_collected_and_printed(measured, tmp_path, capsys):
    out, cells = measured
    records = collected(out, tmp_path)
    targets = records.targets.set_index(["of", "target_id"])
    needs = records.needs.set_index(["of", "model", "seed", "target_id"]).sort_index()
    losses = records.losses.set_index(["of", "seed", "context", "windows", "target_id"]).sort_index()
    result = cells["need-pose-2"]
    counts = {1: 1, 2: 1, 3: 3, 4: 1}
    for row, place in enumerate(result.over):
        target = result.targets.iloc[place]
        of_record = needs.loc[("all", "pose", 2, target.target_id)]
        gain = gain_of(target)
        saved = target.loss_short_nats - result.loss_nats("leave-one-out-kl")[row]
        need = min(
            [k for k, nats in zip(result.ks, saved, strict=True) if nats >= 0.9 * gain], default=np.inf
        )
        chosen = result.selected("leave-one-out-kl")[row][: int(min(need, 16))]
        assert of_record["need_text"] == need
        assert of_record["farthest_text"] == 24 + target.target_id % 5 - chosen.min()
        assert of_record["short"] - of_record["inside"] == pytest.approx(gain, abs=2e-4)
        frequency = np.log1p(counts.get(target.token, 0))
        assert targets.loc[("all", target.target_id), "log_frequency"] == pytest.approx(frequency)
    for of, seed, context, windows, cell, short, beyond in (
        ("all", 2, "gap", 3, "losses-pose-2-gap-3", "loss_short_nats", "loss_long_nats"),
        ("own", 3, "own", 2, "own-pose-3", "loss_short_at_53_nats", "loss_of_53_nats"),
    ):
        there = losses.loc[(of, seed, context, windows)]
        expected = cells[cell].targets.set_index("target_id")[[short, beyond]].loc[there.index]
        np.testing.assert_allclose(there[["short", "beyond"]], expected, atol=1e-4)
    greedy = cells["greedy-pose-1"]
    known = needs.loc[("all", "pose", 1)]["need_greedy"].dropna()
    assert sorted(known.index) == sorted(greedy.targets.iloc[greedy.over]["target_id"])
    assert needs.loc[("all", "pose", 2)]["need_greedy"].isna().all()
    head = (tmp_path / "records.json").read_text(encoding="utf8")
    assert str(out) not in head and str(tmp_path) not in head
    options = ["--permutations", "3", "--figures", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv")]
    study.main(["--records", str(tmp_path), *options])
    assert "RoPE + PoSE, need as cache" in capsys.readouterr().out
    assert (tmp_path / "retention.png").is_file()
    written = pd.read_csv(tmp_path / "numbers.csv", low_memory=False)
    assert {"slopes", "left", "agreement"} <= set(written["of"])


def test_cells_of_other_targets_are_refused(measured, tmp_path):
    out, cells = measured
    one = cells["losses-pose-1-gap-2"]
    moved = replace(one, targets=one.targets.assign(position=one.targets["position"] + 1))
    moved.save(linked(tmp_path / "moved", out, "need-pose-1") / "losses-pose-1-gap-2")
    with pytest.raises(SystemExit, match="need-pose-1 was measured on other targets"):
        collected(tmp_path / "moved", tmp_path / "records")
    with pytest.raises(SystemExit, match="no complete cells"):
        collected(linked(tmp_path / "empty", out), tmp_path / "records")


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
def test_cells_that_do_not_go_together_are_refused(measured, tmp_path, changes, message):
    out, cells = measured
    linked(tmp_path, out, "need-pose-1", "losses-pose-1-gap-2")
    one = cells["losses-pose-1-gap-3"]
    replace(one, settings=one.settings.but(**changes)).save(tmp_path / "losses-pose-1-gap-3")
    with pytest.raises(SystemExit, match=f"losses-pose-1-gap-3 .*{message}"):
        collected(tmp_path, tmp_path / "records")


def test_a_cell_without_targets_over_tau_has_no_needs(measured, tmp_path):
    out, cells = measured
    linked(tmp_path, out, "losses-pose-1-gap-2")
    result = cells["need-pose-1"]
    targets = result.targets.assign(over_tau=False)
    replace(result, targets=targets, choices=result.choices[:0]).save(tmp_path / "need-pose-1")
    needs = collected(tmp_path, tmp_path / "records").needs
    assert len(needs) and "need_text" not in needs


def test_targets_over_tau_under_any_seed_are_kept_and_one_in_four_of_the_others(measured, tmp_path):
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


def test_targets_of_the_first_look_are_left_out_and_counted(measured, tmp_path, capsys):
    """A block of two targets of it begins at target 8."""
    out, cells = measured
    first = cells["need-pose-1"].targets.set_index("target_id").loc[8, ["text", "position"]].tolist()
    usual = collected(out, tmp_path / "usual")
    capsys.readouterr()
    records = collected(out, tmp_path / "without", [tuple(first)])
    printed = capsys.readouterr().out
    for of, cell in {"all": "need-pose-1", "own": "own-pose-1"}.items():
        targets = cells[cell].targets
        is_gone = (targets["text"] == first[0]) & (targets["position"] - first[1]).isin([0, 1])
        gone = targets["target_id"][is_gone]
        assert of == "own" or gone.tolist() == [8, 9]
        assert f"{len(gone)} of {len(targets)} targets ({of}) are of the first look: left out" in printed
        for name in ("targets", "needs", "losses"):
            before, after = (getattr(one, name) for one in (usual, records))
            left = before[(before["of"] == of) & ~before["target_id"].isin(gone)]
            of_kind = after[after["of"] == of]
            pd.testing.assert_frame_equal(left.reset_index(drop=True), of_kind.reset_index(drop=True))


def test_a_first_look_at_another_corpus_is_refused(measured, tmp_path):
    """The one that is shipped is of the docstrings, whose texts are counted otherwise."""
    with pytest.raises(SystemExit, match="has other held-out text"):
        collect.main([str(measured[0]), "--records", str(tmp_path)])


def test_the_blocks_of_the_first_look_are_drawn_as_in_its_script():
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


def test_the_first_look_is_written_with_the_text_that_it_is_of(tmp_path):
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


def test_yarn_has_the_need_of_rope_and_its_own_losses(measured, tmp_path):
    """Cells of YaRN have losses alone, those inside the window in a cell of their own."""
    out, cells = measured
    of_rope = cells["need-pose-1"]
    weights = {"model_sha256": cells["need-pose-2"].settings.model.sha256}
    # a model that is scaled loses something else, with the same weights
    inside, behind = (
        replace(cells[cell], settings=cells[cell].settings.but(**weights))
        for cell in ("need-pose-3", "losses-pose-3-behind-2")
    )
    inside.save(linked(tmp_path, out) / "losses-yarn2-2-inside")
    behind.save(tmp_path / "losses-yarn2-2-behind-2")
    for seed in (1, 2):
        (tmp_path / f"need-rope-{seed}").symlink_to(out / f"need-pose-{seed}")
    rows = study.pair_rows(collected(tmp_path, tmp_path / "records"), "yarn2").set_index("target_id")
    assert set(rows["pair"]) == {"12"}
    needs = collect.needs_of(of_rope, collect.AS_TEXT).set_index("target_id")["need_text"].dropna()
    assert rows["need_text"].dropna().to_dict() == needs.to_dict() and len(needs) > 3
    of_inside, of_behind = (one.targets.set_index("target_id").loc[rows.index] for one in (inside, behind))
    gain = of_inside["loss_short_nats"] - of_inside["loss_long_nats"]
    rise = of_behind["loss_long_nats"] - of_inside["loss_long_nats"]
    np.testing.assert_allclose(rows["gain"], gain, atol=2e-4)
    np.testing.assert_allclose(rows["inside"], of_inside["loss_long_nats"], atol=1e-4)
    np.testing.assert_allclose(rows["rise_behind_2"], rise, atol=2e-4)


def test_cells_of_the_control_keep_all_targets_with_planted_bits(measured, tmp_path):
    out, cells = measured
    records = collected(out, tmp_path)
    of_text, of_control = (records.targets.query(f"of {sign} 'control'") for sign in ("!=", "=="))
    assert len(of_text) and of_text["k"].isna().all()
    expected = cells["need-control-1"].targets.query("text != 3")
    gains = expected["loss_short_nats"] - expected["loss_long_nats"]
    assert gains.min() < 0.35 < gains.max()
    assert of_control["target_id"].tolist() == expected["target_id"].tolist()
    assert of_control["k"].tolist() == [PLANTED[text] for text in expected["text"]]
    assert of_control["farthest"].tolist() == [10 + text for text in expected["text"]]
    needs, losses = (frame.query("of == 'control'") for frame in (records.needs, records.losses))
    assert set(expected["target_id"]) <= set(needs["target_id"])
    beyond = losses.set_index("target_id")["beyond"].loc[expected["target_id"]]
    of_cell = cells["losses-control-1-behind-2"].targets.set_index("target_id")["loss_long_nats"]
    np.testing.assert_allclose(beyond, of_cell.loc[expected["target_id"]], atol=1e-4)


def test_controls_may_be_trained_for_different_steps_and_a_seed_may_not(measured, tmp_path, capsys):
    out, cells = measured
    names = ["texts-control", "need-control-1", "losses-control-1-behind-2"]
    folder = linked(tmp_path / "out", out, *names)
    changes = {"model": "train-control-2/1-4:2000/step00002000", "training_seed": 2}
    for kind in ("need-control-{}", "losses-control-{}-behind-2"):
        one = cells[kind.format(1)]
        other = replace(one, settings=one.settings.but(**changes, model_sha256="of another"))
        other.save(folder / kind.format(2))
    records = collected(folder, tmp_path / "records")
    assert set(records.needs["seed"]) == {1, 2}
    study.main(["--records", str(tmp_path / "records"), "--permutations", "2"])
    assert "what is left of the control's gain" in capsys.readouterr().out
    longer = replace(one, settings=one.settings.but(model="train-control-1/1-4:2000/step00002000"))
    (folder / "losses-control-1-behind-2").unlink()
    longer.save(folder / "losses-control-1-behind-2")
    with pytest.raises(SystemExit, match="another last step of training than losses-control-1-behind-2"):
        collected(folder, tmp_path / "records")


def test_a_cell_of_own_text_has_two_three_four_and_eight_windows():
    """Of 11 tokens and a block of 5 a window has 16; the lengths are without the block, as in run.sh."""
    lengths = (27, 43, 59, 123)
    settings = ALIKE | LOSSES | {"targets": 5, "n_long": 11, "lengths": lengths}
    result = small(small_measurement.model(1), **settings)
    beyond = list(collect.losses_beyond(result, collect.CELL.fullmatch("own-pose-1")))
    assert [(context, windows) for context, windows, _, _ in beyond] == [("own", n) for n in (2, 3, 4, 8)]
    for length, (_, _, short, long) in zip(lengths, beyond, strict=True):
        np.testing.assert_array_equal(short, result.targets[f"loss_short_at_{length}_nats"])
        np.testing.assert_array_equal(long, result.targets[f"loss_of_{length}_nats"])


# --- the positive control ---


def planted_rows(*groups: str) -> list[dict[str, Any]]:
    """Texts of the control, made of one document of each group, whose tokens count up modulo 90."""
    reader = TextReader(lambda text: np.array(list(map(int, text.split()))))
    written = [(group, " ".join(str(token % 90) for token in range(600))) for group in groups]
    return list(planted.rows(Texts(reader, written, "texts"), 90, stretches=30))


def test_planted_texts_have_the_parity_of_bits_in_the_far_context():
    """Between the bits stand tokens of a document; every stretch has the same tokens for every k."""
    rows = planted_rows("a", "b")
    tokenizer = planted.words(90)
    labels = []
    for number, row in enumerate(rows[:90]):
        ids = np.array(tokenizer.encode(row["text"]).ids)
        assert len(ids) == planted.N_LONG + 1 and row["k"] == (1, 2, 4)[number % 3]
        [places] = np.nonzero(ids[:-1] > 90)
        assert len(places) == row["k"] and places.max() < planted.N_LONG - planted.N_SHORT
        assert row["farthest"] == planted.N_LONG - places.min()
        assert ids[-1] - 91 == (ids[places] - 91).sum() % 2
        labels.append(ids[-1] - 91)
        steps = np.delete(ids[:-1] - np.arange(planted.N_LONG), places)
        assert len(set(steps % 90)) == 1
    assert 0.3 < np.mean(labels) < 0.7
    assert [(row["k"], row["group"]) for row in rows[90:]] == [(0, "a"), (0, "b")]


@pytest.mark.parametrize("windows", [2, 3, 4, 8])
def test_no_planted_bits_stand_before_a_context(windows):
    rows = planted_rows("a", "b", "c")
    tokenizer = planted.words(90)
    of_words = TextReader(lambda text: np.array(tokenizer.encode(text).ids))
    texts = Texts(of_words, [(row["group"], row["text"]) for row in rows], "planted")
    before = planted.WINDOW * (windows - 1)
    drawn = texts_before(texts, np.arange(len(rows)), np.full(len(rows), -1), before, seed=0)
    assert {rows[text]["k"] for text in drawn[:, 0]} == {0}


def test_the_published_slopes_are_those_of_plain_least_squares_on_the_records():
    folder = Path(study.HERE)
    targets = pd.read_parquet(folder / "targets.parquet").query("of == 'all'").set_index("target_id")
    needs = pd.read_parquet(folder / "needs.parquet").query("of == 'all'")
    losses = pd.read_parquet(folder / "losses.parquet").query("of == 'all' and context == 'behind'")
    beyond = losses.set_index(["seed", "windows", "target_id"])["beyond"]
    of_seed = {seed: frame.set_index("target_id") for seed, frame in needs.groupby("seed")}
    predictors, rises = [], {"H1": [], "H2": []}
    for number, (first, second) in enumerate([(1, 2), (2, 3), (3, 1)]):
        for target, row in of_seed[first].iterrows():
            gain = row["short"] - row["inside"]
            if gain > 1:
                need = row["need_text"] if row["need_text"] <= 8 else 16
                intercepts = np.eye(3)[number]
                known = [row["inside"], row["farthest_text"], targets.at[target, "log_frequency"]]
                predictors.append([np.log2(need), gain, *known, *intercepts])
                inside = of_seed[second].at[target, "inside"]
                rises["H1"].append(beyond[second, 2, target] - inside)
                further = (beyond[second, 3, target] + beyond[second, 4, target]) / 2
                rises["H2"].append(further - inside)
    published = pd.read_csv(folder / "numbers.csv", low_memory=False).query("test == 'primary'")
    assert published["n_targets"].tolist() == [len(predictors)] * 2
    for hypothesis, rise in rises.items():
        slope = np.linalg.lstsq(np.array(predictors), np.array(rise), rcond=None)[0][0]
        row = published[published["hypothesis"] == hypothesis]
        assert slope == pytest.approx(row["value"].item(), abs=1e-6)
