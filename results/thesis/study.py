"""The numbers of the study of need and loss beyond the window: one prediction at a time, as the protocol has them.

    python results/thesis/study.py                            prints the tables
    python results/thesis/study.py --figures results/thesis   draws the figure, too
    python results/thesis/study.py --numbers numbers.csv      writes all numbers, too

`collect.py` makes the records of what run.sh has measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from analysis.figures.style import (
    REFERENCE,
    Look,
    add_heading,
    add_legend,
    draw,
    log_axis,
    model_styles,
    new_figure,
    save_figure,
    says_intervals,
    shades,
)
from analysis.saved import read_head
from analysis.stats.bootstrap import ClusterBootstrap, effective_units, holm
from analysis.stats.permutation import permuted_slopes
from analysis.stats.tables import INTERVAL, save_numbers, show
from analysis.study_options import study_parser

HERE = Path(__file__).parent
HEAD, KIND, VERSION = "records.json", "olmo-sparsity thesis records", 1
KEPT_ONE_IN, TAU_NATS = 4, 1.0
"""As in `collect.py`: scripts of a study do not import one another, and a test reads what that one writes."""
MODELS = {
    "pose": "RoPE + PoSE",
    "rope": "RoPE",
    "yarn2": "RoPE, YaRN x 2",
    "yarn4": "RoPE, YaRN x 4",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "window": "RoPE, 56 tokens",
}
PRIMARY = "pose"
NEED_OF = {"yarn2": "rope", "yarn4": "rope"}
"""Models that are not trained, and whose need is that of another one."""
UNTOUCHED = "window"
"""The model whose rise behind other text is 0 by construction: that tests the measurement, and no hypothesis."""
PAIRS = ((1, 2), (2, 3), (3, 1))
"""Seed that need is measured by, and seed that everything else is."""
MANY, COUNTED_AS = 8, 16
"""A need of more tokens counts as so many."""
NONE_NATS = 0.1
"""A target needs nothing that gains at most so much, and loses at most so much."""
FEW = 4
"""A need of at most so many tokens is few, where seeds are compared."""
LEAST_LEFT, MOST_LEFT = 0.1, 0.9
"""The control is read at windows where one bit keeps a share of its gain between these, in the mean over seeds."""
DECILES, PERMUTATIONS = 10, 1000
BINS = {
    "text": {"1-2": (1, 2), "3-4": (3, 4), "5-8": (5, 8), "more": (9, np.inf)},
    "cache": {"1": (1, 1), "2-4": (2, 4), "more": (5, np.inf)},
}
CONTEXTS = {"behind": "behind other text", "gap": "ids apart", "own": "own text"}
HYPOTHESES = {"H1": (2,), "H2": (3, 4)}
"""Windows over whose rises the outcome of each is the mean."""
COVARIATES = ("gain_of_a", "inside_of_a", "farthest", "log_frequency")
OF_B = ("gain", "inside")
"""Further ones. Where gains of targets that need many tokens are less often there under B, too, a model that keeps the
same share of every gain has a slope below 0; given what B gained it has none."""


# --- records ---


@dataclass(frozen=True)
class Records:
    """What is kept of all cells. ``of``: "all" targets, "own" those with eight windows of text, or "control"."""

    targets: pd.DataFrame
    """of, target_id, text, group, kind, token, log_frequency; of the control also k and farthest (tokens)."""
    needs: pd.DataFrame
    """of, model, seed, target_id, short, inside (nats); where over tau need_text, need_cache (inf: more than 16),
    farthest_text, farthest_cache (tokens), and where it was measured need_greedy."""
    losses: pd.DataFrame
    """of, model, seed, context, windows, target_id, short, beyond (nats), both at the ids of the longer context."""
    about: dict[str, Any]
    """Command, commit, machine, time and settings of every cell."""

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Those of a folder."""
        head = read_head(folder / HEAD, KIND, VERSION, "collect.py makes it")
        frames = {
            name: pd.read_parquet(folder / f"{name}.parquet") for name in ("targets", "needs", "losses")
        }
        return cls(**frames, about=head["cells"])


# --- pairs of seeds ---


def pair_rows(records: Records, model: str, of: str = "all") -> pd.DataFrame:
    """A row for each pair of seeds and target: what seed A says of its need, and losses of seed B.

    Columns: pair, target_id, text, group, kind, log_frequency, [k, farthest_known]; gain_of_a, inside_of_a, need_text,
    need_cache, farthest_text, farthest_cache; gain, inside, and for each context beyond rise_CONTEXT_WINDOWS (L_beyond
    - L_inside) and kept_CONTEXT_WINDOWS (L_short - L_beyond). Only pairs of which both seeds are measured.
    """
    targets = records.targets[records.targets["of"] == of].drop(columns="of")
    targets = targets.rename(columns={"farthest": "farthest_known"})
    frames = []
    for first, second in PAIRS:
        of_a = _of_seed(records.needs, NEED_OF.get(model, model), first, of)
        of_b = _of_seed(records.needs, model, second, of)
        beyond = _of_seed(records.losses, model, second, of)
        if of_a.empty or of_b.empty or beyond.empty:
            continue
        of_a["gain_of_a"] = of_a.pop("short") - of_a["inside"]
        of_a = of_a.rename(columns={"inside": "inside_of_a"})
        of_b["gain"] = of_b["short"] - of_b["inside"]
        frame = targets.merge(of_a, on="target_id").merge(
            of_b[["target_id", "gain", "inside"]], on="target_id"
        )
        for (context, windows), rows in beyond.groupby(["context", "windows"]):
            losses = rows.set_index("target_id").loc[frame["target_id"]]
            rise = losses["beyond"].to_numpy() - frame["inside"].to_numpy()
            frame[f"rise_{context}_{windows}"] = rise
            frame[f"kept_{context}_{windows}"] = (losses["short"] - losses["beyond"]).to_numpy()
        frames.append(frame.assign(pair=f"{first}{second}"))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _of_seed(frame: pd.DataFrame, model: str, seed: int, of: str) -> pd.DataFrame:
    is_one = (frame["of"] == of) & (frame["model"] == model) & (frame["seed"] == seed)
    return frame[is_one].drop(columns=["of", "model", "seed"]).dropna(axis="columns", how="all")


def log2_need(need: pd.Series | np.ndarray) -> np.ndarray:
    """log2 of the tokens needed, of which more than `MANY` count as `COUNTED_AS`."""
    need = np.asarray(need, dtype=float)
    return np.log2(np.where(need > MANY, COUNTED_AS, need))


def outcome_of(rows: pd.DataFrame, context: str, windows: Sequence[int]) -> np.ndarray | None:
    """Mean rise over some lengths, (n,) nats; None where one is not measured."""
    names = [f"rise_{context}_{number}" for number in windows]
    if not set(names) <= set(rows):
        return None
    return rows[names].to_numpy(dtype=float).mean(axis=1)


def over_tau(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose target gains more than 1 nat under seed A."""
    return rows[rows["gain_of_a"] > TAU_NATS].reset_index(drop=True)


# --- the statistic ---


@dataclass(frozen=True)
class Slope:
    """A slope on log2 of the need, in nats a doubling, with what the protocol prints beside it."""

    value: float
    low: float
    high: float
    p: float
    detectable: float
    """The smallest slope that would have been shown in four of five cases, at the first step of Holm for two tests."""
    null_low: float
    null_high: float
    """95 % of the slopes where the need is permuted within `cells_of` gain and L_inside."""
    null_p: float
    n_targets: int
    n_groups: int
    effective_groups: float
    """Student's t has so many degrees of freedom, about."""


def design_of(rows: pd.DataFrame, need: str, covariates: Sequence[str]) -> np.ndarray:
    """Predictors of the fit, (n, P): log2 of the need first, then covariates, then a column for each pair but one."""
    columns = [log2_need(rows["k"] if need == "k" else rows[f"need_{need}"])]
    for name in covariates:
        column = name
        if name == "farthest":
            column = "farthest_known" if need == "k" else f"farthest_{'text' if need == 'lesser' else need}"
        columns.append(rows[column].to_numpy(dtype=float))
    for pair in sorted(set(rows["pair"]))[1:]:
        columns.append((rows["pair"] == pair).to_numpy(dtype=float))
    return np.stack(columns, axis=1)


def slope_of(
    rows: pd.DataFrame,
    outcome: np.ndarray,
    *,
    need: str = "text",
    covariates: Sequence[str] = COVARIATES,
    permutations: int = PERMUTATIONS,
) -> Slope:
    """The slope of an outcome (n,) on log2 of the need, all rows being in the fit; units are packages."""
    design = design_of(rows, need, covariates)
    bootstrap = ClusterBootstrap.of(rows)
    draws = bootstrap.slopes(outcome, design)[:, 0]
    interval = bootstrap.interval(draws)
    of_two = ClusterBootstrap.of(rows, confidence=1 - 0.05 / len(HYPOTHESES))
    of_need = [0]
    if "farthest" in covariates:
        of_need.append(1 + list(covariates).index("farthest"))
    null = permuted_slopes(outcome, design, cells_of(rows), permutations, of_need)
    null_low, null_high = np.quantile(null, [0.025, 0.975])
    beyond = np.abs(null - null.mean()) >= abs(draws[0] - null.mean())
    null_p = np.nan
    if np.isfinite(draws[0]):
        null_p = (1 + beyond.sum()) / (1 + len(null))
    return Slope(
        interval.value,
        interval.low,
        interval.high,
        bootstrap.p_value(draws),
        of_two.detectable(draws),
        float(null_low),
        float(null_high),
        float(null_p),
        len(rows),
        rows["group"].nunique(),
        effective_units(draws[1:] - draws[0]),
    )


def cells_of(rows: pd.DataFrame) -> np.ndarray:
    """Of each target, its cell: a tenth, by L_inside, of a tenth, by gain, of the targets of a pair, (n,).

    Deciles of both, crossed, would have cells of one target, which no permutation changes.
    """
    by_gain = rows.groupby("pair")["gain_of_a"].rank(method="first", pct=True)
    tenth = np.ceil(DECILES * by_gain).astype(int)
    by_inside = rows.groupby([rows["pair"], tenth])["inside_of_a"].rank(method="first", pct=True)
    of_tenth = np.ceil(DECILES * by_inside).astype(int)
    return rows.groupby([rows["pair"], tenth, of_tenth]).ngroup().to_numpy()


def deciles(rows: pd.DataFrame, name: str, edges_of: pd.DataFrame | None = None) -> np.ndarray:
    """The decile of a column within each pair, (n,) 0 … 9; ``edges_of``: the rows whose deciles they are, or these."""
    edges_of = rows if edges_of is None else edges_of
    decile = np.zeros(len(rows), dtype=int)
    for pair, of_pair in rows.groupby("pair"):
        values = edges_of.loc[edges_of["pair"] == pair, name]
        edges = np.quantile(values, np.arange(1, DECILES) / DECILES)
        decile[rows.index.get_indexer(of_pair.index)] = np.searchsorted(edges, of_pair[name], side="right")
    return decile


# --- frames ---


@dataclass(frozen=True)
class Fit:
    """Targets whose slopes are asked for, and how."""

    test: str
    """primary, secondary, beside, or control."""
    rows: pd.DataFrame
    model: str = PRIMARY
    context: str = "behind"
    need: str = "text"
    targets: str = "all"
    covariates: Sequence[str] = COVARIATES
    windows_of: Mapping[str, Sequence[int]] | None = None
    """Over which windows' rises the outcome of each slope is the mean; None: `HYPOTHESES`."""


def slope_frame(records: Records, permutations: int = PERMUTATIONS) -> pd.DataFrame:
    """All tests of the protocol, and what it prints beside them.

    Columns: test, model, hypothesis (of the control: the windows), context, need, targets, value, low, high, p, p_holm
    (over the tests of its kind), and further fields of `Slope`.
    """
    rows = []
    for fit in fits_of(records):
        for hypothesis, windows in (fit.windows_of or HYPOTHESES).items():
            outcome = None if fit.rows.empty else outcome_of(fit.rows, fit.context, windows)
            if outcome is not None:
                slope = slope_of(
                    fit.rows, outcome, need=fit.need, covariates=fit.covariates, permutations=permutations
                )
                keys = {"test": fit.test, "model": fit.model, "hypothesis": hypothesis}
                keys |= {"context": fit.context, "need": fit.need, "targets": fit.targets}
                rows.append(keys | vars(slope))
    names = ["test", "model", "hypothesis", "context", "need", "targets"]
    frame = pd.DataFrame(rows, columns=[*names, *(field.name for field in fields(Slope))])
    frame.insert(frame.columns.get_loc("p") + 1, "p_holm", np.nan)
    for test in ("primary", "secondary"):
        is_test = frame["test"] == test
        frame.loc[is_test, "p_holm"] = holm(frame.loc[is_test, "p"].to_numpy())
    return frame


def fits_of(records: Records) -> Iterator[Fit]:
    """All fits for which there are records."""
    for model in MODELS:
        of_pairs = pair_rows(records, model)
        if of_pairs.empty or model == UNTOUCHED:
            continue
        of_pairs = over_tau(of_pairs)
        if model == PRIMARY:
            yield from fits_of_primary(of_pairs)
        else:
            yield Fit("secondary", of_pairs, model)
    own = pair_rows(records, PRIMARY, "own")
    if len(own):
        yield Fit("secondary", over_tau(own), context="own", targets="own text of eight windows")
    control = pair_rows(records, "control", "control")
    if len(control):
        yield from fits_of_control(control, windows_read(control_left(records)))


def fits_of_control(control: pd.DataFrame, read: Sequence[int]) -> Iterator[Fit]:
    """Those of the control: by its planted bits, and by what is measured to be needed, of the targets of which it is.

    ``read``: the windows at which it is read. Their mean comes first, then each of all windows by itself.
    """
    windows_of: dict[str, Sequence[int]] = {"windows that are read": read} if read else {}
    for column in control:
        if column.startswith("rise_behind_"):
            windows = int(column.removeprefix("rise_behind_"))
            windows_of[f"{windows} windows"] = (windows,)
    covariates = [name for name in COVARIATES if name != "log_frequency"]
    how: dict[str, Any] = {"model": "control", "covariates": covariates, "windows_of": windows_of}
    yield Fit("control", control, need="k", targets="planted", **how)
    if "need_text" in control:
        measured = control[control["need_text"].notna()].reset_index(drop=True)
        for need in ("k", "text"):
            yield Fit("control", measured, need=need, targets="planted, need measured", **how)


def fits_of_primary(of_pairs: pd.DataFrame) -> Iterator[Fit]:
    """Those of the primary model, of its targets over 1 nat."""
    yield Fit("primary", of_pairs)
    if "need_cache" in of_pairs:
        in_cache = of_pairs[of_pairs["need_cache"].notna()].reset_index(drop=True)
        yield Fit("secondary", in_cache, need="cache")
    yield Fit("secondary", of_pairs, context="gap")
    no_repeats = of_pairs[of_pairs["kind"] != "repeat"].reset_index(drop=True)
    yield Fit("secondary", no_repeats, targets="no verbatim repeats")
    without_distance = [name for name in COVARIATES if name != "farthest"]
    yield Fit("beside", of_pairs, targets="all, distance left out", covariates=without_distance)
    yield Fit("beside", of_pairs, targets="all, given what B gains", covariates=COVARIATES + OF_B)
    few = of_pairs[of_pairs["need_text"] <= MANY].reset_index(drop=True)
    yield Fit("beside", few, targets=f"at most {MANY} needed")
    largest = of_pairs["group"].mode()[0]
    others = of_pairs[of_pairs["group"] != largest].reset_index(drop=True)
    yield Fit("beside", others, targets=f"without {largest}, the largest package")
    for pair, of_pair in of_pairs.groupby("pair"):
        yield Fit("beside", of_pair.reset_index(drop=True), targets=f"pair {pair}")
    if "need_greedy" in of_pairs:
        known = of_pairs[of_pairs["need_greedy"].notna()].reset_index(drop=True)
        known["need_lesser"] = np.minimum(known["need_text"], known["need_greedy"])
        yield Fit("beside", known, targets="greedy known")
        yield Fit("beside", known, targets="greedy known", need="lesser")


def retention_frame(records: Records, model: str, need: str = "text") -> pd.DataFrame:
    """What is left of the gain by bin of need: model, context, windows, need, bin, n_targets, name, value, low, high.

    Names: retention (Σ (L_short - L_beyond) / Σ (L_short - L_inside)), rise_nats (mean L_beyond - L_inside), and
    net_rise_nats: that less the rise of targets of the same decile of L_inside that need nothing.
    """
    frames = []
    for of in ("all", "own"):
        rows = pair_rows(records, model, of)
        if f"need_{need}" in rows:
            frames.append(_retention(rows, need))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return frame.assign(model=model, need=need)


def _retention(rows: pd.DataFrame, need: str) -> pd.DataFrame:
    bootstrap = ClusterBootstrap.of(rows)
    over = (rows["gain_of_a"] > TAU_NATS).to_numpy()
    # targets that are not one in so many are there because another seed, perhaps B, has them over tau
    is_one_in = (rows["target_id"] % KEPT_ONE_IN == 0).to_numpy()
    nothing = is_one_in & (rows["gain_of_a"].abs() <= NONE_NATS).to_numpy()
    decile = deciles(rows, "inside_of_a", rows[over])
    in_decile = decile[:, None] == np.arange(DECILES)
    needed = rows[f"need_{need}"].to_numpy(dtype=float)
    numbers = []
    for name in [column for column in rows if column.startswith("rise_")]:
        _, context, windows = name.split("_")
        rise = rows[name].to_numpy(dtype=float)
        kept = rows[f"kept_{context}_{windows}"].to_numpy(dtype=float)
        of_nothing = bootstrap.ratio((rise * nothing)[:, None] * in_decile, nothing[:, None] * in_decile)
        for label, (least, most) in BINS[need].items():
            member = over & (needed >= least) & (needed <= most)
            keys = {"context": context, "windows": int(windows), "bin": label, "n_targets": int(member.sum())}
            shares = bootstrap.ratio(member[:, None] * in_decile, member.astype(float))
            usual = np.where(shares > 0, of_nothing, 0.0)
            mean_rise = bootstrap.ratio(rise * member, member.astype(float))
            draws = {
                "retention": bootstrap.ratio(kept * member, rows["gain"].to_numpy(dtype=float) * member),
                "rise_nats": mean_rise,
                "net_rise_nats": mean_rise - (shares * usual).sum(axis=1),
            }
            for number, of_number in draws.items():
                numbers.append({**keys, "name": number, **vars(bootstrap.interval(of_number))})
    columns = ["context", "windows", "bin", "n_targets", "name", *INTERVAL]
    return pd.DataFrame(numbers, columns=columns)


def known_answers(records: Records) -> pd.DataFrame:
    """What the measurement must give: model, context, windows, name, largest_nats. All are 0 but for rounding.

    Names: rise (|L_beyond - L_inside|): NoPE with ids apart, and the model of 56 tokens behind other text, whose four
    layers reach 220 tokens back; left (|L_short - L_beyond|): the model of 56 tokens with ids apart.
    """
    rows = []
    for model, context, name in (
        ("nope", "gap", "rise"),
        ("window", "behind", "rise"),
        ("window", "gap", "left"),
    ):
        of_pairs = pair_rows(records, model)
        column = {"rise": f"rise_{context}_", "left": f"kept_{context}_"}[name]
        for measured in [measured for measured in of_pairs if measured.startswith(column)]:
            keys = {"model": model, "context": context, "windows": int(measured.split("_")[2]), "name": name}
            rows.append(keys | {"largest_nats": float(of_pairs[measured].abs().max())})
    return pd.DataFrame(rows, columns=["model", "context", "windows", "name", "largest_nats"])


def control_learned(records: Records) -> pd.DataFrame:
    """What the control has learned inside its window, by seed, k and label ("0", "1", and "all").

    Further columns: n_targets; short_nats, inside_nats and gain_nats (means); right (the share whose bit is more likely
    than not; one that is guessed costs log 2 = 0.69 nats); n_needs and median_need (of those whose need is measured).
    """
    columns = ["seed", "k", "label", "n_targets", "short_nats", "inside_nats", "gain_nats", "right"]
    columns += ["n_needs", "median_need"]
    rows = _of_control(records)
    if rows.empty:
        return pd.DataFrame(columns=columns)
    if "need_text" not in rows:
        rows["need_text"] = np.nan
    label = rows["token"] - rows["token"].min()
    rows = pd.concat([rows.assign(label=label.astype(str)), rows.assign(label="all")])
    rows["gain"] = rows["short"] - rows["inside"]
    rows["right"] = rows["inside"] < np.log(2)
    numbers = {
        "n_targets": ("inside", "size"),
        "short_nats": ("short", "mean"),
        "inside_nats": ("inside", "mean"),
        "gain_nats": ("gain", "mean"),
        "right": ("right", "mean"),
        "n_needs": ("need_text", "count"),
        "median_need": ("need_text", "median"),
    }
    return rows.groupby(["seed", "k", "label"], as_index=False).agg(**numbers)[columns]


def _of_control(records: Records) -> pd.DataFrame:
    """A row for each seed and target of the control: its needs and losses inside the window, token and k."""
    needs = records.needs[records.needs["of"] == "control"].drop(columns=["of", "model"])
    targets = records.targets[records.targets["of"] == "control"]
    if needs.empty:
        return needs
    return needs.merge(targets[["target_id", "token", "k"]], on="target_id")


def control_left(records: Records) -> pd.DataFrame:
    """What the control keeps of its gain behind other text: k, windows, seed ("mean" over them, too), left.

    As retention: Σ (L_short - L_beyond) / Σ (L_short - L_inside).
    """
    rows = _of_control(records)
    losses = records.losses[(records.losses["of"] == "control") & (records.losses["context"] == "behind")]
    if rows.empty or losses.empty:
        return pd.DataFrame(columns=["k", "windows", "seed", "left"])
    rows["gain"] = rows["short"] - rows["inside"]
    losses = losses.assign(kept=losses["short"] - losses["beyond"])[["seed", "target_id", "windows", "kept"]]
    rows = losses.merge(rows[["seed", "target_id", "k", "gain"]], on=["seed", "target_id"])
    sums = rows.groupby(["k", "windows", "seed"], as_index=False)[["kept", "gain"]].sum()
    sums["left"] = sums["kept"] / sums["gain"]
    means = sums.groupby(["k", "windows"], as_index=False)["left"].mean().assign(seed="mean")
    return pd.concat([sums.astype({"seed": str}), means], ignore_index=True)[["k", "windows", "seed", "left"]]


def windows_read(left: pd.DataFrame) -> list[int]:
    """The windows at which the control is read: where one bit keeps part of its gain, neither all nor nothing."""
    of_one = left[(left["k"] == 1) & (left["seed"] == "mean")]
    is_read = of_one["left"].between(LEAST_LEFT, MOST_LEFT)
    return [int(windows) for windows in of_one.loc[is_read, "windows"]]


def seed_agreement(records: Records) -> pd.DataFrame:
    """How like seed A is seed B, of the targets that gain more than 1 nat in A: a row a model and pair.

    Columns: model, pair, n_targets; gain_of_a_nats, gain_of_b_nats (means); b_over_tau (the share that gains more than
    1 nat in B, too). Of these n_both: few_given_few and few_given_not_few, the share that needs few tokens (at most
    `FEW`, as text) in B among those that do in A, and among the others.
    """
    rows = []
    for model in MODELS:
        by_seed = {seed: _of_seed(records.needs, model, seed, "all") for pair in PAIRS for seed in pair}
        for first, second in PAIRS:
            of_a = by_seed[first]
            of_b = by_seed[second]
            if "need_text" not in of_a or "need_text" not in of_b:
                continue
            both = of_a.merge(of_b, on="target_id", suffixes=("_a", "_b"))
            for seed in ("a", "b"):
                both[f"gain_{seed}"] = both[f"short_{seed}"] - both[f"inside_{seed}"]
            both = both[both["gain_a"] > TAU_NATS]
            is_again = both["gain_b"] > TAU_NATS
            again = both[is_again]
            is_few = again["need_text_a"] <= FEW
            few_in_b = again["need_text_b"] <= FEW
            rows.append(
                {
                    "model": model,
                    "pair": f"{first}{second}",
                    "n_targets": len(both),
                    "gain_of_a_nats": both["gain_a"].mean(),
                    "gain_of_b_nats": both["gain_b"].mean(),
                    "b_over_tau": is_again.mean(),
                    "n_both": len(again),
                    "few_given_few": few_in_b[is_few].mean(),
                    "few_given_not_few": few_in_b[~is_few].mean(),
                }
            )
    columns = ["model", "pair", "n_targets", "gain_of_a_nats", "gain_of_b_nats", "b_over_tau", "n_both"]
    return pd.DataFrame(rows, columns=[*columns, "few_given_few", "few_given_not_few"])


def need_agreement(records: Records) -> pd.DataFrame:
    """How alike needs are: model, of, n_targets, spearman.

    ``of``: "seeds", "text and cache", "text and greedy"; of the control, too, "measured and planted" (bits). Of targets
    whose need is measured, under both seeds or under the one. What this noise hides of a slope is of the order of 1
    less the correlation.
    """
    rows = []
    needs = records.needs[records.needs["of"].isin(["all", "control"])]
    for model, of_model in needs.groupby("model"):
        if "need_text" not in of_model or of_model["need_text"].isna().all():
            continue
        by_seed = {seed: of_seed.set_index("target_id") for seed, of_seed in of_model.groupby("seed")}
        for first, second in PAIRS:
            if first in by_seed and second in by_seed:
                both = (
                    by_seed[first][["need_text"]].join(by_seed[second][["need_text"]], rsuffix="_b").dropna()
                )
                rows.append(_rank_correlation(model, f"seeds {first} and {second}", both))
        for other in ("cache", "greedy"):
            if f"need_{other}" in of_model:
                both = of_model[["need_text", f"need_{other}"]].dropna()
                if len(both):
                    rows.append(_rank_correlation(model, f"text and {other}", both))
    of_control = _of_control(records)
    if "need_text" in of_control and of_control["need_text"].notna().any():
        both = of_control[["need_text", "k"]].dropna()
        rows.append(_rank_correlation("control", "measured and planted", both))
    return pd.DataFrame(rows, columns=["model", "of", "n_targets", "spearman"])


def _rank_correlation(model: str, of: str, both: pd.DataFrame) -> dict[str, Any]:
    correlation = spearmanr(log2_need(both.iloc[:, 0]), log2_need(both.iloc[:, 1])).statistic
    return {"model": model, "of": of, "n_targets": len(both), "spearman": float(correlation)}


# --- output ---


def figure(retention: pd.DataFrame, of_control: pd.DataFrame) -> Figure | None:
    """What the control keeps (`control_left`) by windows and, a panel a context, what text does by bin of need.

    None where nothing of the primary model is measured.
    """
    is_shown = (retention["name"] == "retention") & (retention["need"] == "text")
    shown = retention[is_shown & retention["model"].isin([PRIMARY, "rope"])].copy()
    panels = [("behind", (2,), "other text, 2 windows"), ("behind", (3, 4), "other text, 3 and 4")]
    panels.append(("gap", (2, 3, 4), "ids apart, 2 to 4"))
    shown = shown[shown["context"].isin(["behind", "gap"]) & (shown["windows"] <= 4)]
    if shown.empty:
        return None
    shown[["value", "low", "high"]] *= 100
    labels = {model: MODELS[model] for model in (PRIMARY, "rope")}
    shown["curve"] = [f"{labels[row.model]}, {int(row.windows)} windows" for row in shown.itertuples()]
    places = {name: place for place, name in enumerate(BINS["text"])}
    shown["place"] = shown["bin"].map(places)
    looks = model_styles(sorted(set(shown["curve"])))
    drawn = new_figure(6.75, 3.1)
    in_panels = [
        shown[(shown["context"] == context) & shown["windows"].isin(windows)]
        for context, windows, _ in panels
    ]
    measured = [(rows, title) for rows, (_, _, title) in zip(in_panels, panels, strict=True) if len(rows)]
    n_panels = len(measured) + (1 if len(of_control) else 0)
    all_axes = drawn.subplots(1, n_panels, sharey=True, squeeze=False)[0]
    if len(of_control):
        looks |= draw_control(all_axes[0], of_control)
    for axes, (rows, title) in zip(all_axes[-len(measured) :], measured, strict=True):
        draw(axes, rows, looks, "curve", "place", joined=False, step=0.08)
        axes.set_xticks(range(len(places)), list(places))
        axes.set_xlabel("tokens needed")
        axes.set_title(title, loc="left", fontsize=8)
    for axes in all_axes:
        axes.axhline(0, **REFERENCE)
        axes.axhline(100, linestyle=":", **REFERENCE)
    all_axes[0].set_ylabel("gain that is left [%]")
    add_legend(drawn, looks)
    add_heading(drawn, "docstrings, RoPE + PoSE; dots: seeds of the control", says_intervals("bars", shown))
    return drawn


def draw_control(axes: Axes, of_control: pd.DataFrame) -> dict[str, Look]:
    """What is left of the control's gain by windows, a line for each number of bits, its seeds as dots; the looks."""
    rows = of_control.assign(low=np.nan, high=np.nan, value=100 * of_control["left"])
    rows["curve"] = [f"{k} planted bit{'s' if k > 1 else ''}" for k in rows["k"].astype(int)]
    looks = shades(rows["curve"].unique())
    is_mean = rows["seed"] == "mean"
    draw(axes, rows[is_mean], looks, "curve", "windows", step=0)
    for name, of_seeds in rows[~is_mean].groupby("curve"):
        axes.plot(of_seeds["windows"], of_seeds["value"], ".", color=looks[name]["color"], markersize=3)
    log_axis(axes, sorted(set(rows["windows"]) - {3}))
    axes.set_xlabel("windows of text")
    axes.set_title("control: other text", loc="left", fontsize=8)
    return looks


def print_left(left: pd.DataFrame) -> None:
    """Print what is left of gains, a table for each model, way of needing and number."""
    for (model, need), of_model in left.groupby(["model", "need"], sort=False):
        print(f"\n{MODELS[model]}, need as {need}")
        for name, of_name in of_model.groupby("name", sort=False):
            keys = ["context", "windows", "n_targets"]
            table = of_name[[*keys, "bin", *INTERVAL]].assign(name=name)
            print(show(table.drop(columns="n_targets"), across="bin", digits=1))


def print_all(records: Records, numbers: Path | None, permutations: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Print all tables, and write them; returns what is left of gains, in text and in the control."""
    models = [model for model in MODELS if model in set(records.needs["model"])]
    slopes = slope_frame(records, permutations)
    retention = [retention_frame(records, model) for model in models]
    if PRIMARY in models:
        retention.append(retention_frame(records, PRIMARY, "cache"))
    left = pd.concat(retention, ignore_index=True) if retention else pd.DataFrame()
    further = {
        "answers": ("known answers, 0 but for rounding", known_answers(records)),
        "agreement": ("agreement of needs", need_agreement(records)),
        "seeds": ("seeds A and B, of the targets over 1 nat in A", seed_agreement(records)),
        "learned": ("what the control has learned inside its window", control_learned(records)),
        "control_left": ("what is left of the control's gain", control_left(records)),
    }
    for test, of_test in slopes.groupby("test", sort=False):
        print(f"\n{test}: slope in nats a doubling of the need")
        print(of_test.drop(columns="test").to_string(index=False, float_format="{:.3g}".format))
    if len(left):
        print_left(left)
    for title, frame in further.values():
        print(f"\n{title}\n{frame.to_string(index=False, float_format='{:.3g}'.format)}")
    if len(further["control_left"][1]):
        read = windows_read(further["control_left"][1])
        between = f"{100 * LEAST_LEFT:g} to {100 * MOST_LEFT:g} %"
        print(
            f"\nwindows at which one bit keeps {between} of its gain: {', '.join(map(str, read)) or 'none'}"
        )
    if numbers:
        frames = {name: frame for name, (_, frame) in further.items()}
        save_numbers(numbers, {"slopes": slopes, "left": left} | frames)
    return left, further["control_left"][1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables, and draw the figure where a folder for it is given."""
    parser = study_parser(__doc__, HERE, figures=True)
    permutations = f"permutations of the need (default: {PERMUTATIONS:,})"
    parser.add_argument("--permutations", type=int, default=PERMUTATIONS, metavar="COUNT", help=permutations)
    options = parser.parse_args(arguments)
    left, of_control = print_all(Records.load(options.records), options.numbers, options.permutations)
    drawn = figure(left, of_control) if options.figures and len(left) else None
    if drawn is not None:
        save_figure(drawn, options.figures / "retention.png")


if __name__ == "__main__":
    main()
