"""Which number of the study of need answers which hypothesis (`results/thesis/study.py`): every fit against a filter of
rows and a regression in plain loops, on records whose needs, contexts and models all say something else."""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from analysis.stats.bootstrap import ClusterBootstrap
from tests.support.frames import row_of
from tests.support.jackknife import assert_jackknife, jackknife

study = import_module("results.thesis.study")

SIZES = np.array([30, 14, 12, 10, 10, 10, 8, 8])
"""Targets of every package; the first is the largest."""
NEEDS = np.array([1, 2, 3, 4, 5, 6, 8, 16, np.inf])
WINDOWS = (2, 3, 4)
ALL = ("pose", "rope", "yarn2", "yarn4", "nope", "alibi", "window")
SEEDS = (1, 2, 3)
PAIRS = ((1, 2), (2, 3), (3, 1))
"""The seed whose need is read, and that whose losses are."""
PLAIN = ("gain_of_a", "inside_of_a", "farthest", "log_frequency")
LOST_BY_CONTROL = {2: 0.5, 3: 0.6, 4: 0.97}
"""What share of its gains the control loses behind other text: at four windows too much to be read."""


def needs_of_seed(rng: np.random.Generator, count: int, ways: Sequence[str]) -> pd.DataFrame:
    """L_short and L_inside of one seed, and where it gains more than 1 nat a need of its own in each of these ways."""
    inside = rng.exponential(1.0, count)
    gain = np.where(rng.random(count) < 0.3, 0.05, 1.01 + rng.exponential(1.0, count))
    frame = pd.DataFrame({"target_id": np.arange(count), "short": inside + gain, "inside": inside})
    for way in ways:
        frame[f"need_{way}"] = np.where(gain > 1, rng.choice(NEEDS, count), np.nan)
        frame[f"farthest_{way}"] = np.where(gain > 1, rng.integers(32, 256, count), np.nan)
    return frame


def records(rng: np.random.Generator) -> Any:
    """Records of all models, contexts and kinds of targets, all of whose needs and losses are drawn by themselves."""
    count = int(SIZES.sum())
    group = np.repeat([f"package {number}" for number in range(len(SIZES))], SIZES)
    targets = []
    needs = []
    losses = []

    def add(of: str, model: str, seed: int, of_seed: pd.DataFrame, contexts: Sequence[str]) -> None:
        keys = {"of": of, "model": model, "seed": seed}
        needs.append(of_seed.assign(**keys))
        for context in contexts:
            for windows in WINDOWS:
                beyond = of_seed[["target_id"]].assign(short=of_seed["short"] + rng.normal(0, 0.1, count))
                rise = rng.normal(windows, 1, count)
                if of == "control":
                    gain = of_seed["short"] - of_seed["inside"]
                    rise = LOST_BY_CONTROL[windows] * gain + rng.normal(0, 0.1, count)
                beyond["beyond"] = of_seed["inside"] + rise
                losses.append(beyond.assign(**keys, context=context, windows=windows))

    for of in ("all", "own", "control"):
        frame = pd.DataFrame({"of": of, "target_id": np.arange(count), "text": np.arange(count) // 3})
        frame["group"] = group
        frame["kind"] = rng.choice(["repeat", "name", "word"], count)
        frame["token"] = rng.integers(2, size=count)
        frame["log_frequency"] = rng.normal(size=count)
        if of == "control":
            frame["k"] = rng.choice([1, 2, 4], count)
            frame["farthest"] = rng.integers(9, 57, count)
        targets.append(frame)
    for seed in SEEDS:
        for model in ALL:
            ways = {"pose": ("text", "cache"), "yarn2": (), "yarn4": ()}.get(model, ("text",))
            of_seed = needs_of_seed(rng, count, ways)
            if model == "pose":
                is_known = rng.random(count) < 0.6
                greedy = np.where(is_known, rng.choice([1, 2, 3, 4, np.inf], count), np.nan)
                of_seed["need_greedy"] = np.where(of_seed["need_text"].notna(), greedy, np.nan)
            contexts = ("behind",) if model.startswith("yarn") else ("behind", "gap")
            add("all", model, seed, of_seed, contexts)
        add("own", "pose", seed, needs_of_seed(rng, count, ("text",)), ("own",))
        add("control", "control", seed, needs_of_seed(rng, count, ("text",)), ("behind",))
    frames = [pd.concat(frames, ignore_index=True) for frames in (targets, needs, losses)]
    return study.Records(*frames, {})


@pytest.fixture(scope="module")
def drawn():
    return records(np.random.default_rng(0))


@pytest.fixture(scope="module")
def slopes(drawn):
    return study.slope_frame(drawn, permutations=2)


# --- the plain way ---


def plain_rows(drawn: Any, model: str, of: str = "all") -> list[dict[str, Any]]:
    """A dict for every pair of seeds and target: what one seed needs, and what another loses."""
    of_targets = {row["target_id"]: row for row in drawn.targets.to_dict("records") if row["of"] == of}
    needs = {}
    for row in drawn.needs.to_dict("records"):
        if row["of"] == of:
            needs[row["model"], row["seed"], row["target_id"]] = row
    losses = {}
    for row in drawn.losses.to_dict("records"):
        if row["of"] == of:
            key = row["model"], row["seed"], row["target_id"], row["context"], row["windows"]
            losses[key] = row
    contexts = [(context, windows) for context in ("behind", "gap", "own") for windows in WINDOWS]
    rows = []
    for first, second in PAIRS:
        for target_id, target in of_targets.items():
            of_a = needs["rope" if model.startswith("yarn") else model, first, target_id]
            of_b = needs[model, second, target_id]
            row = {**target, "pair": f"{first}{second}"}
            row |= {name: value for name, value in of_a.items() if name.startswith(("need", "farthest_"))}
            row |= {"gain_of_a": of_a["short"] - of_a["inside"], "inside_of_a": of_a["inside"]}
            row |= {"gain": of_b["short"] - of_b["inside"], "inside": of_b["inside"]}
            for context, windows in contexts:
                beyond = losses.get((model, second, target_id, context, windows))
                if beyond is not None:
                    row[f"rise_{context}_{windows}"] = beyond["beyond"] - of_b["inside"]
                    row[f"kept_{context}_{windows}"] = beyond["short"] - beyond["beyond"]
            rows.append(row)
    return rows


def plain_slope(
    rows: list[dict[str, Any]], context: str, windows: Sequence[int], need: str, covariates: Sequence[str]
) -> float:
    """The coefficient of log2 of the need, of which more than eight tokens count as sixteen."""
    farthest = {"k": "farthest", "need_cache": "farthest_cache"}.get(need, "farthest_text")
    design = []
    outcome = []
    for row in rows:
        needed = row[need]
        if needed > 8:
            needed = 16
        values = [1.0, np.log2(needed)]
        for name in covariates:
            values.append(row[farthest if name == "farthest" else name])
        pairs = sorted({row["pair"] for row in rows})
        values += [float(row["pair"] == pair) for pair in pairs[1:]]
        design.append(values)
        outcome.append(np.mean([row[f"rise_{context}_{number}"] for number in windows]))
    return float(np.linalg.lstsq(np.array(design, dtype=float), np.array(outcome), rcond=None)[0][1])


def every(row: dict[str, Any]) -> bool:
    return True


Filter = Callable[[dict[str, Any]], bool]
SECONDARY: list[tuple[str, str, str, str, Filter]] = [
    ("pose", "behind", "cache", "all", every),
    ("pose", "gap", "text", "all", every),
    ("pose", "behind", "text", "no verbatim repeats", lambda row: row["kind"] != "repeat"),
    ("rope", "behind", "text", "all", every),
    ("yarn2", "behind", "text", "all", every),
    ("yarn4", "behind", "text", "all", every),
    ("nope", "behind", "text", "all", every),
    ("alibi", "behind", "text", "all", every),
    ("pose", "own", "text", "own text of eight windows", every),
]
"""Model, context, need, targets of every secondary test, and which of the targets over 1 nat it is of."""
BESIDE: list[tuple[str, str, Sequence[str], Filter]] = [
    ("all, distance left out", "text", ("gain_of_a", "inside_of_a", "log_frequency"), every),
    ("all, given what B gains", "text", (*PLAIN, "gain", "inside"), every),
    ("at most 8 needed", "text", PLAIN, lambda row: row["need_text"] <= 8),
    (
        "without package 0, the largest package",
        "text",
        PLAIN,
        lambda row: row["group"] != "package 0",
    ),
    ("pair 12", "text", PLAIN, lambda row: row["pair"] == "12"),
    ("pair 23", "text", PLAIN, lambda row: row["pair"] == "23"),
    ("pair 31", "text", PLAIN, lambda row: row["pair"] == "31"),
    ("greedy known", "text", PLAIN, lambda row: not np.isnan(row["need_greedy"])),
    ("greedy known", "lesser", PLAIN, lambda row: not np.isnan(row["need_greedy"])),
]
"""Targets, need and covariates of every fit beside the primary one, and which of the targets over 1 nat it is of."""
OF_HYPOTHESIS = {"H1": [2], "H2": [3, 4]}


def over_one_nat(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["gain_of_a"] > 1]


def test_a_pair_has_the_need_of_one_seed_and_the_losses_of_another(drawn):
    expected = pd.DataFrame(plain_rows(drawn, "pose")).drop(columns=["of", "farthest"])
    rows = study.pair_rows(drawn, "pose")
    pd.testing.assert_frame_equal(rows[expected.columns], expected, check_dtype=False)


@pytest.mark.parametrize("hypothesis", ["H1", "H2"])
def test_the_primary_slope_is_that_of_need_as_text_behind_other_text(drawn, slopes, hypothesis):
    """H1 at two windows, H2 as the mean of three and four; packages are left out with all pairs of seeds at once."""
    rows = over_one_nat(plain_rows(drawn, "pose"))
    row = row_of(slopes, test="primary", hypothesis=hypothesis)
    assert (row.model, row.context, row.need, row.targets) == ("pose", "behind", "text", "all")

    def slope(places: np.ndarray) -> float:
        some = [rows[place] for place in places]
        return plain_slope(some, "behind", OF_HYPOTHESIS[hypothesis], "need_text", PLAIN)

    packages = [row["group"] for row in rows]
    assert_jackknife(row, slope, packages)
    _, _, freedom = jackknife(slope, packages)
    assert 2 < freedom < 7 and row.effective_groups == pytest.approx(freedom)
    assert row.n_targets == len(rows) and row.n_groups == len(SIZES)


@pytest.mark.parametrize(("model", "context", "need", "targets", "is_of"), SECONDARY)
def test_every_secondary_slope_is_that_of_its_targets_need_and_context(
    drawn, slopes, model, context, need, targets, is_of
):
    rows = plain_rows(drawn, model, "own" if context == "own" else "all")
    rows = [row for row in over_one_nat(rows) if is_of(row)]
    keys = {"test": "secondary", "model": model, "context": context, "need": need, "targets": targets}
    for hypothesis, windows in OF_HYPOTHESIS.items():
        row = row_of(slopes, **keys, hypothesis=hypothesis)
        assert row.value == pytest.approx(
            plain_slope(rows, context, windows, f"need_{need}", PLAIN), rel=1e-6
        )
        assert row.n_targets == len(rows)


@pytest.mark.parametrize(("targets", "need", "covariates", "is_of"), BESIDE)
def test_every_slope_beside_is_that_of_its_targets_and_covariates(
    drawn, slopes, targets, need, covariates, is_of
):
    rows = [row for row in over_one_nat(plain_rows(drawn, "pose")) if is_of(row)]
    for row in rows:
        row["need_lesser"] = min(row["need_text"], row["need_greedy"])
    for hypothesis, windows in OF_HYPOTHESIS.items():
        row = row_of(slopes, test="beside", hypothesis=hypothesis, targets=targets, need=need)
        assert (row.model, row.context) == ("pose", "behind")
        expected = plain_slope(rows, "behind", windows, f"need_{need}", covariates)
        assert row.value == pytest.approx(expected, rel=1e-6)
        assert row.n_targets == len(rows)


# --- the positive control ---

OF_CONTROL: list[tuple[str, str, Filter]] = [
    ("planted", "k", every),
    ("planted, need measured", "k", lambda row: not np.isnan(row["need_text"])),
    ("planted, need measured", "text", lambda row: not np.isnan(row["need_text"])),
]
"""Targets and need of its fits, and which of its targets each is of."""


@pytest.mark.parametrize(("targets", "need", "is_of"), OF_CONTROL)
def test_the_control_is_fitted_by_planted_bits_and_by_measured_need_without_frequency(
    drawn, slopes, targets, need, is_of
):
    rows = [row for row in plain_rows(drawn, "control", "control") if is_of(row)]
    covariates = ("gain_of_a", "inside_of_a", "farthest")
    read = {"windows that are read": (2, 3), "2 windows": (2,), "3 windows": (3,), "4 windows": (4,)}
    of_fit = slopes[(slopes["test"] == "control") & (slopes["targets"] == targets) & (slopes["need"] == need)]
    assert of_fit["hypothesis"].tolist() == list(read)
    for row in of_fit.itertuples():
        column = "k" if need == "k" else "need_text"
        expected = plain_slope(rows, "behind", read[row.hypothesis], column, covariates)
        assert row.value == pytest.approx(expected, rel=1e-6)
        assert (row.model, row.context, row.n_targets) == ("control", "behind", len(rows))


@pytest.fixture(scope="module")
def control_rows(drawn):
    """A row for every seed and target of the control, with its planted bits."""
    targets, needs = (frame[frame["of"] == "control"] for frame in (drawn.targets, drawn.needs))
    rows = needs.merge(targets[["target_id", "k", "token"]], on="target_id")
    return rows.assign(gain=rows["short"] - rows["inside"])


def test_what_is_left_of_the_control_is_a_ratio_of_sums(drawn, control_rows):
    left = study.control_left(drawn).set_index(["k", "windows", "seed"])["left"]
    losses = drawn.losses[drawn.losses["of"] == "control"].set_index(["windows", "seed", "target_id"])
    kept = (losses["short"] - losses["beyond"]).sort_index()
    for k, windows in product((1, 2, 4), WINDOWS):
        of_seeds = []
        for seed in SEEDS:
            rows = control_rows[(control_rows["k"] == k) & (control_rows["seed"] == seed)]
            of_seeds.append(kept.loc[windows, seed].loc[rows["target_id"]].sum() / rows["gain"].sum())
            assert left[k, windows, str(seed)] == pytest.approx(of_seeds[-1])
        assert left[k, windows, "mean"] == pytest.approx(np.mean(of_seeds))
    assert len(left) == 3 * len(WINDOWS) * 4


def test_the_control_is_read_where_one_bit_keeps_part_of_its_gain():
    rows = []
    for windows, of_one in {2: 0.95, 3: 0.9, 4: 0.5, 8: 0.05}.items():
        for k, value in {1: of_one, 2: 0.5, 4: 0.5}.items():
            rows += [{"k": k, "windows": windows, "seed": seed, "left": 0.5} for seed in ("1", "2", "3")]
            rows.append({"k": k, "windows": windows, "seed": "mean", "left": value})
    left = pd.DataFrame(rows)
    assert study.windows_read(left) == [3, 4]
    assert study.windows_read(left[left["windows"] == 2]) == []


def test_where_the_control_is_not_read_only_single_windows_are_shown(drawn):
    control = study.pair_rows(drawn, "control", "control")
    for fit in study.fits_of_control(control, []):
        assert list(fit.windows_of) == ["2 windows", "3 windows", "4 windows"]


def test_what_the_control_has_learned_stands_by_seed_bits_and_label(drawn, control_rows):
    learned = study.control_learned(drawn).set_index(["seed", "k", "label"])
    assert len(learned) == 3 * 3 * 3
    for (seed, k, label), shown in learned.iterrows():
        rows = control_rows[(control_rows["seed"] == seed) & (control_rows["k"] == k)]
        if label != "all":
            rows = rows[rows["token"] == int(label)]
        needs = rows["need_text"].dropna()
        expected = [len(rows), *rows[["short", "inside", "gain"]].mean(), (rows["inside"] < np.log(2)).mean()]
        assert shown.tolist() == pytest.approx([*expected, len(needs), np.median(needs)])


def test_the_measured_need_of_the_control_is_compared_with_its_bits(drawn, control_rows):
    rows = control_rows.dropna(subset="need_text")
    [row] = study.need_agreement(drawn).query("of == 'measured and planted'").itertuples()
    assert (row.model, row.n_targets) == ("control", len(rows))
    assert row.spearman == pytest.approx(spearmanr(rows["need_text"].clip(upper=9), rows["k"]).statistic)


# --- everything that is printed beside ---


def test_no_slopes_are_there_but_these_and_holm_is_over_those_of_a_kind(slopes):
    assert slopes["test"].value_counts().to_dict() == {
        "primary": 2,
        "secondary": 2 * len(SECONDARY),
        "beside": 2 * len(BESIDE),
        "control": 4 * len(OF_CONTROL),
    }
    for test, of_kind in slopes.groupby("test"):
        if test in ("primary", "secondary"):
            least = of_kind["p"].min()
            assert of_kind["p_holm"].min() == pytest.approx(min(1, len(of_kind) * least))
        else:
            assert of_kind["p_holm"].isna().all()


def test_the_detectable_slope_is_that_of_a_test_at_half_of_five_per_cent(drawn, slopes):
    """At the first step of Holm for two tests the interval is of 97.5 %."""
    rows = study.over_tau(study.pair_rows(drawn, "pose"))
    outcome = rows["rise_behind_2"].to_numpy()
    columns = [study.log2_need(rows["need_text"]), rows["gain_of_a"], rows["inside_of_a"]]
    columns += [rows["farthest_text"], rows["log_frequency"], rows["pair"] == "23", rows["pair"] == "31"]
    bootstrap = ClusterBootstrap.of(rows, confidence=0.975)
    draws = bootstrap.slopes(outcome, np.stack([np.asarray(column, float) for column in columns], axis=1))
    row = row_of(slopes, test="primary", hypothesis="H1")
    assert row.detectable == pytest.approx(bootstrap.detectable(draws[:, 0]))


def test_a_known_answer_that_is_wrong_at_one_target_is_shown(drawn):
    """NoPE loses nothing with ids apart; the model of 56 tokens nothing behind other text, and all with ids apart."""
    inside = drawn.needs.set_index(["of", "model", "seed", "target_id"])["inside"]
    losses = drawn.losses.copy()
    of_loss = pd.MultiIndex.from_frame(losses[["of", "model", "seed", "target_id"]])
    losses["beyond"] = inside.loc[of_loss].to_numpy()
    is_left = (losses["model"] == "window") & (losses["context"] == "gap")
    losses.loc[is_left, "beyond"] = losses.loc[is_left, "short"]
    errors = {
        ("nope", "gap", 4, "rise"): 0.3,
        ("window", "behind", 3, "rise"): -0.2,
        ("window", "gap", 2, "left"): 0.5,
    }
    for (model, context, windows, _), error in errors.items():
        is_wrong = (losses["model"] == model) & (losses["context"] == context)
        is_wrong &= (losses["windows"] == windows) & (losses["seed"] == 2) & (losses["target_id"] == 17)
        assert is_wrong.sum() == 1
        losses.loc[is_wrong, "beyond"] += error
    answers = study.known_answers(study.Records(drawn.targets, drawn.needs, losses, {}))
    shown = answers.set_index(["model", "context", "windows", "name"])["largest_nats"]
    assert len(shown) == 3 * len(WINDOWS)
    for key, largest in shown.items():
        assert largest == pytest.approx(abs(errors.get(key, 0)), abs=1e-9), key


def test_agreement_of_needs_is_the_rank_correlation_of_targets_that_have_both(drawn):
    agreement = study.need_agreement(drawn).set_index(["model", "of"])
    assert not any(model.startswith("yarn") for model, _ in agreement.index)
    needs = drawn.needs[drawn.needs["of"] == "all"].set_index(["model", "seed", "target_id"]).sort_index()
    pairs = {}
    for model, (first, second) in product(("pose", "rope", "nope", "alibi", "window"), PAIRS):
        of_seeds = [needs["need_text"].loc[model, seed] for seed in (first, second)]
        pairs[model, f"seeds {first} and {second}"] = of_seeds
    for other in ("cache", "greedy"):
        pairs["pose", f"text and {other}"] = [needs.loc["pose", f"need_{way}"] for way in ("text", other)]
    for key, of_both in pairs.items():
        both = pd.concat(of_both, axis=1).dropna().clip(upper=9)
        assert agreement.loc[key, "n_targets"] == len(both)
        assert agreement.loc[key, "spearman"] == pytest.approx(spearmanr(both).statistic)


def test_seeds_are_compared_on_the_targets_over_one_nat_in_the_first(drawn):
    shown = study.seed_agreement(drawn).set_index(["model", "pair"])
    assert len(shown) == 5 * 3  # YaRN has no need of its own
    needs = drawn.needs[drawn.needs["of"] == "all"].set_index(["model", "seed", "target_id"])
    needs = needs.assign(gain=needs["short"] - needs["inside"]).sort_index()
    for (model, pair), row in shown.iterrows():
        of_a, of_b = (needs.loc[(model, int(seed))] for seed in pair)
        of_a = of_a[of_a["gain"] > 1]
        of_b = of_b.loc[of_a.index]
        again = of_b["gain"] > 1
        is_few = of_a["need_text"][again] <= 4
        few_again = of_b["need_text"][again] <= 4
        expected = [len(of_a), of_a["gain"].mean(), of_b["gain"].mean(), again.mean(), again.sum()]
        assert row.tolist() == pytest.approx([*expected, few_again[is_few].mean(), few_again[~is_few].mean()])
