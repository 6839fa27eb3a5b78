"""Every number of a Result, as tidy frames with 95 % intervals: one row a number, in the columns value, low and high.

Shares and recoveries are fractions, losses nats per token. ``low`` and ``high`` are NaN where the data support no
interval. Of a Result joined of several trainings the numbers are those of all together, and the intervals also say how
much trainings differ. Every function takes ``resamples`` (2,000) and ``seed`` (0) of the bootstrap; all intervals of a
Result rest on the same resamples. Recoveries are of the targets over tau.

    recovery(k)     Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20, docs/method.md 2.2)
    placebo         the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net             recovery(k) - max(0, placebo(k))                                           [ours]

``selector`` may be ``best``: the lowest L_k of all selectors. ``far_context`` may be ``net``. Where a frame is of one k
only, its function takes ``k``, by default 4 or the closest that was measured. `recovery` and `losses` have every level
(level, unit and sinks of the choices); the others are of one, as text where it was measured, and `of_each_level` has
them of each. All raise `UserError` where recovery is undefined: no target over tau, or gains that sum to nothing.
Shapes: n sampled targets, m of them over tau with finished choices, K values of k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from analysis.faithfulness import CONTEXT_LENGTHS, EXACT, row_pearson, row_spearman
from analysis.kinds import KINDS, KINDS_BY_THEMSELVES, kinds_of_tokens
from analysis.result import SELECTION, Result
from analysis.stats.bootstrap import count_clusters
from analysis.stats.measured import (
    BEST,
    NET,
    PLACEBO,
    TRUE,
    Measured,
    bootstrap_of,
    choose_k,
    default_selector,
    each_level,
    finished_rows,
    over_tau_column,
    selecting_gain_nats,
)

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
FAR = "all far tokens"
"""Stands beside the selectors in what they choose."""
DISTANCE_BINS = 8
"""At most so many bins of the distance, equally wide on a logarithmic scale. [ours]"""
SHARE_NEEDED = 0.9
"""Of L_short - L_long: a target has what it needs when k tokens recover so much. [ours]"""
BLIND_FORMS = ("kl", "tv")
"""What the name of a selector's target-blind forms ends with."""
LARGEST = "largest"
"""Name of the largest positive placebo, beside those that it is taken from."""
ENOUGH_NATS = 0.1
"""A context is enough where its loss is at most so much above L_long. [ours]"""
CHANCE = "chance"
"""Stands beside the selectors in `faithfulness`: two random choices."""
INTERVAL = ["value", "low", "high"]
OF_CHOICE = ["selector", "far_context", "k"]


def counts(result: Result) -> dict[str, int]:
    """How much was measured: targets (of all trainings together), targets_over_tau, targets_measured (finished),
    documents, documents_over_tau, and where the texts have groups groups, groups_over_tau; trainings.

    What captions say, and `analysis.stats.bootstrap.by_clusters` reads.
    """
    targets, finished = result.targets, finished_rows(result)
    sizes = {"targets": len(targets), "targets_over_tau": len(result.over), "targets_measured": len(finished)}
    for rows, suffix in ((targets, ""), (targets.iloc[finished], "_over_tau")):
        groups = rows["group"].to_numpy() if "group" in rows else None
        sizes |= count_clusters(rows["text"].to_numpy(), groups, suffix)
    return sizes | {"trainings": len(result.trainings)}


def of_trainings(numbers: Callable[..., pd.DataFrame], result: Result, **options: Any) -> pd.DataFrame:
    """``numbers`` of each training by itself, with the columns training and training_seed before them."""
    frames = []
    for number, training in enumerate(result.trainings):
        frame = numbers(training, **options)
        frame.insert(0, "training", number)
        frame.insert(1, "training_seed", training.settings["training_seed"])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def of_each_level(numbers: Callable[..., pd.DataFrame], result: Result, **options: Any) -> pd.DataFrame:
    """``numbers`` at each level, in the columns level, unit and sinks: how chosen tokens were given back."""
    frames = [numbers(at_level, **options).assign(**level) for level, at_level in each_level(result)]
    return pd.concat(frames, ignore_index=True)


def recovery(result: Result, **bootstrap: int) -> pd.DataFrame:
    """selector, far_context ("true", "placebo", "net"), level, unit, sinks, k, value, low, high."""
    rows = []
    for level, at_level in each_level(result):
        measured = Measured(at_level, **bootstrap)
        rows += measured.recovery_rows(level, measured.names, measured.ks)
    return _frame(rows, *SELECTION, "k")


def losses(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Mean L_k in nats over the targets over tau: columns of `recovery`, far_context "true" and "placebo"."""
    rows = []
    for level, at_level in each_level(result):
        measured = Measured(at_level, **bootstrap)
        for selector in measured.names:
            means = {
                context: measured.draws(measured.losses[selector, context])
                for context in measured.far_contexts
            }
            for column, k in enumerate(measured.ks):
                for context, draws in means.items():
                    interval = measured.bootstrap.interval(draws[:, column])
                    keys = {"selector": selector, "far_context": context, "k": k}
                    rows.append(level | keys | asdict(interval))
    return _frame(rows, *SELECTION, "k")


def shares(result: Result, **bootstrap: int) -> pd.DataFrame:
    """name, value, low, high; no target need be over tau. Names:

    loss_short_nats, loss_long_nats, gain_nats, absolute_gain_nats     means of all targets
    share_over_tau, share_below_minus_tau                              the tail, and its mirror (docs/method.md, 2.4)
    share_of_gain                                                      of the net gain of all, held by those over tau
    loss_short_over_tau_nats, loss_long_over_tau_nats                  means of the targets over tau
    """
    targets, gain, over = result.targets, result.gain_nats, over_tau_column(result)
    short, long = (targets[f"loss_{name}_nats"].to_numpy(np.float64) for name in ("short", "long"))
    one, finished = np.ones(len(targets)), over
    if len(result.choices):
        finished = np.isin(np.arange(len(targets)), finished_rows(result)).astype(np.float64)
    below_minus_tau = selecting_gain_nats(result) < -result.settings["tau_nats"]
    ratios = {
        "loss_short_nats": (short, one),
        "loss_long_nats": (long, one),
        "gain_nats": (gain, one),
        "absolute_gain_nats": (np.abs(gain), one),
        "share_over_tau": (over, one),
        "share_below_minus_tau": (below_minus_tau, one),
        "share_of_gain": (gain * over, gain),
        "loss_short_over_tau_nats": (short * finished, finished),
        "loss_long_over_tau_nats": (long * finished, finished),
    }
    return _of_targets(result, ratios, **bootstrap)


def persistence(result: Result, **bootstrap: int) -> pd.DataFrame:
    """What is left of the gain that targets were chosen for, where results are cross-fitted; no rows otherwise.

    name, value, low, high. Names: selecting_gain_nats, gain_nats (means over the targets over tau, under the model that
    selects and the one that evaluates), share_still_over_tau (under the one that evaluates).
    """
    if not result.crossfit:
        return _frame([], "name")
    over, gain = over_tau_column(result), result.gain_nats
    ratios = {
        "selecting_gain_nats": (over * selecting_gain_nats(result), over),
        "gain_nats": (over * gain, over),
        "share_still_over_tau": (over * (gain > result.settings["tau_nats"]), over),
    }
    return _of_targets(result, ratios, **bootstrap)


def differences(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """The default selector minus every other, paired: first, second, far_context ("net", "true"), k, value, low,
    high."""
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    names, column = measured.names, measured.ks.index(k)
    first = default_selector(names)
    of_first = measured.recoveries(first)
    rows = []
    for second in names if NET in of_first else ():
        if second != first:
            of_second = measured.recoveries(second)
            for context in (NET, TRUE):
                draws = of_first[context][:, column] - of_second[context][:, column]
                keys = {"first": first, "second": second, "far_context": context, "k": k}
                rows.append(keys | asdict(measured.bootstrap.interval(draws)))
    return _frame(rows, "first", "second", "far_context", "k")


def gain_bins(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Recovery by gain of the target: from_nats, to_nats (inclusive; inf), n_targets, n_documents, selector,
    far_context, k, value, low, high.

    The selecting model's gain decides, as it does for tau. A bin of the evaluating model's gain would hold targets by
    chance of that model, which cross-fitting is to avoid.
    """
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    gain = selecting_gain_nats(result)[measured.over]
    rows = []
    for low, high in pairwise(gain_edges(result.settings["tau_nats"])):
        inside = (gain > low) & (gain <= high)
        keys = {"from_nats": low, "to_nats": high, "n_targets": int(inside.sum())}
        keys["n_documents"] = len(np.unique(measured.document[inside]))
        rows += measured.recovery_rows(keys, measured.names, [k], inside)
    return _frame(rows, "from_nats", "to_nats", "n_targets", "n_documents", *OF_CHOICE)


def gain_edges(tau_nats: float) -> list[float]:
    """Edges of the bins of L_short - L_long in nats, from tau to infinity."""
    return [tau_nats, *(edge for edge in GAIN_EDGES_NATS if edge > tau_nats), float("inf")]


def near_copies(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Targets in near copies of training text, and recovery without them; no rows where copies are unknown.

    name, selector, far_context, k, n_targets, value, low, high. Names: share (of all targets), share_over_tau,
    recovery.
    """
    names = ("name", *OF_CHOICE, "n_targets")
    if "near_copy" not in result.targets:
        return _frame([], *names)
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    copies, over = result.targets["near_copy"].to_numpy(np.float64), over_tau_column(result)
    ratios = {"share": (copies, np.ones(len(copies))), "share_over_tau": (copies * over, over)}
    rows: list[dict[str, Any]] = [
        {"name": name, "n_targets": int(above.sum())}
        | asdict(measured.bootstrap.ratio_interval(above, below))
        for name, (above, below) in ratios.items()
    ]
    others = 1 - copies[measured.over]
    keys = {"name": "recovery", "n_targets": int(others.sum())}
    return _frame(rows + measured.recovery_rows(keys, measured.selectors, [k], others), *names)


# --- which dependencies the far context carries [ours] (docs/method.md, 2.6) ---


def kinds(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Numbers of every kind of dependency that was sampled.

    kind, n_targets, n_targets_over_tau, n_documents_over_tau, n_groups_over_tau (NaN without groups), name, selector,
    far_context, k, value, low, high. Names: share (of all targets), share_over_tau (of those over tau), gain_nats (mean
    of all of the kind), recovery (with selector, far_context and k).
    """
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    targets, over = result.targets, over_tau_column(result)
    kind_of_target = targets["kind"].to_numpy()
    rows: list[dict[str, Any]] = []
    for kind in sorted(set(kind_of_target), key=lambda kind: (*KINDS, kind).index(kind)):
        members = (kind_of_target == kind).astype(np.float64)
        of_kind = targets[(kind_of_target == kind) & targets["over_tau"]]
        keys = {
            "kind": kind,
            "n_targets": int(members.sum()),
            "n_targets_over_tau": len(of_kind),
            "n_documents_over_tau": of_kind["text"].nunique(),
            "n_groups_over_tau": of_kind["group"].nunique() if "group" in targets else np.nan,
        }
        for name, above, below in (
            ("share", members, np.ones(len(targets))),
            ("share_over_tau", members * over, over),
            ("gain_nats", members * result.gain_nats, members),
        ):
            interval = measured.bootstrap.ratio_interval(above, below)
            rows.append(keys | {"name": name} | asdict(interval))
        keys["name"] = "recovery"
        rows += measured.recovery_rows(keys, measured.names, [k], members[measured.over])
    return _frame(rows, *keys, *OF_CHOICE)


def distance_edges(n_long: int, n_short: int) -> list[int]:
    """Edges of the bins in tokens back from the target, ascending: M + 1 … N + 1; a bin excludes its upper edge.

    In a block (docs/method.md, 2.1) from its first target, so that uniform choice has the same share for all.
    """
    edges = np.geomspace(n_short + 1, n_long + 1, DISTANCE_BINS + 1)
    return np.unique(np.rint(edges).astype(int)).tolist()


def distances(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """How far back the first k chosen tokens stand, as a share of them per bin; position id c is N - c tokens back.

    selector, far_context, k, from_tokens, to_tokens (not included), uniform (share of tokens drawn uniformly), value,
    low, high.
    """
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    n_long = result.settings["n_long"]
    edges = distance_edges(n_long, result.settings["n_short"])
    rows = []
    for selector in measured.selectors:
        for context in measured.far_contexts:
            back = n_long - measured.of_choices("selected", selector, context)[:, :k]
            for low, high in pairwise(edges):
                inside = ((back >= low) & (back < high)).sum(axis=1)
                keys = {"selector": selector, "far_context": context, "k": k, "from_tokens": low}
                keys |= {"to_tokens": high, "uniform": (high - low) / result.n_far}
                rows.append(keys | measured.ratio(inside, k))
    return _frame(rows, *OF_CHOICE, "from_tokens", "to_tokens", "uniform")


def picks(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """What kind of tokens the first k are, and all far tokens (selector `FAR`), of the targets whose text is there.

    selector, far_context, k, kind, value, low, high; no rows without texts. What stands out from all far tokens in the
    placebo too is a taste of the selector, not a need of the target.
    """
    texts = [training.texts for training in result.trainings]
    if any(frame is None or frame.empty for frame in texts):
        return _frame([], *OF_CHOICE, "kind")
    measured, k = Measured(result, **bootstrap), choose_k(result.ks, k)
    pieces = pd.concat(texts).drop_duplicates("block").set_index("block")
    block = result.targets["target_id"].to_numpy()[measured.over] // result.settings["targets_per_block"]
    has_text = np.isin(block, pieces.index)
    rows = []
    for context in measured.far_contexts:
        of_block = {
            number: np.array(kinds_of_tokens(strings)[: result.n_far])
            for number, strings in pieces["pieces" if context == TRUE else "placebo_pieces"].items()
        }
        far = np.array([of_block[number] for number in block[has_text]]).reshape(-1, result.n_far)
        for selector in (FAR, *measured.selectors):
            of_tokens = far
            if selector != FAR:
                first = measured.of_choices("selected", selector, context)[has_text, :k].astype(int)
                of_tokens = np.take_along_axis(far, first, axis=1)
            for kind in KINDS_BY_THEMSELVES:
                share = np.zeros(len(block))
                share[has_text] = (of_tokens == kind).mean(axis=1)
                keys = {"selector": selector, "far_context": context, "k": k, "kind": kind}
                rows.append(keys | measured.ratio(share, has_text))
    return _frame(rows, *OF_CHOICE, "kind")


def tokens_needed(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Share of the targets that have `SHARE_NEEDED` of their gain from k tokens, or a smaller measured k.

    name, selector, far_context, k, n_targets, value, low, high. Names: reached; never (not from the largest k; true far
    context only). Only targets that gain anything count: under cross-fitting a target may lose by the long context of
    the model that evaluates, and has then nothing to recover.
    """
    measured = Measured(result, **bootstrap)
    gains = measured.gain_nats > 0
    rows = []
    for selector in measured.names:
        for context in measured.far_contexts:
            saved = measured.short_nats[:, None] - measured.losses[selector, context]
            enough = saved >= SHARE_NEEDED * measured.gain_nats[:, None]
            reached = np.logical_or.accumulate(enough, axis=1) & gains[:, None]
            keys = {"selector": selector, "far_context": context, "n_targets": int(gains.sum())}
            for column, k in enumerate(measured.ks):
                rows.append({"name": "reached", **keys, "k": k} | measured.ratio(reached[:, column], gains))
            if context == TRUE:
                never = gains & ~reached[:, -1]
                rows.append({"name": "never", **keys, "k": measured.ks[-1]} | measured.ratio(never, gains))
    return _frame(rows, "name", *OF_CHOICE, "n_targets")


# --- the parts of a recovery (docs/method.md, 2.3) ---


def placebos(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Recovery in every far context, and its parts, of the targets that have every far context.

    name, selector, blind (name of its target-blind form; of parts only), far_context, k, n_targets, value, low, high.
    No rows without a further placebo. Names:

        recovery          by selector and far_context
        selection_bias    what the signed selector has more than the blind one in the placebo (winner's curse)
        common_context    what the blind one has in each placebo, and `LARGEST`: the largest of these that is positive
        specific          what the blind one has in its own text beyond the largest
    """
    names = ("name", "selector", "blind", "far_context", "k", "n_targets")
    contexts = result.far_contexts
    if set(contexts) <= {TRUE, PLACEBO}:
        return _frame([], *names)
    measured = Measured(result, **bootstrap)
    of_contexts = [measured.losses[measured.selectors[0], context] for context in contexts]
    comparable = np.isfinite(of_contexts).all(axis=(0, 2))
    if not comparable.any():
        return _frame([], *names)
    recoveries = {name: measured.recoveries(name, comparable, contexts) for name in measured.names}
    parts = [
        ("recovery", selector, None, context, draws)
        for selector, of_selector in recoveries.items()
        for context, draws in of_selector.items()
        if context != NET
    ]
    for signed in measured.selectors:
        for blind in (f"{signed}-{form}" for form in BLIND_FORMS if f"{signed}-{form}" in recoveries):
            common = {context: recoveries[blind][context] for context in contexts if context != TRUE}
            bias = recoveries[signed][PLACEBO] - common[PLACEBO]
            common[LARGEST] = np.maximum(np.max(list(common.values()), axis=0), 0.0)
            specific = recoveries[blind][TRUE] - common[LARGEST]
            parts.append(("selection_bias", signed, blind, PLACEBO, bias))
            parts += [("common_context", signed, blind, context, draws) for context, draws in common.items()]
            parts.append(("specific", signed, blind, TRUE, specific))
    rows = [
        dict(zip(names, (*keys, k, int(comparable.sum())), strict=True))
        | asdict(measured.bootstrap.interval(draws[:, column]))
        for *keys, draws in parts
        for column, k in enumerate(measured.ks)
    ]
    return _frame(rows, *names)


# --- faithfulness, as the attribution field measures it (docs/method.md, 2.8) ---


def faithfulness(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Means over the targets over tau for which a measure is defined; of what was measured.

    name, selector, far_context ("true", "placebo"), k (NaN of what has none), value, low, high. Names:

        sufficiency_nats, comprehensiveness_nats              by k; the first relative to L_long of the true context
        sufficiency_aopc_nats, comprehensiveness_aopc_nats    their means over the k's: ERASER's AOPC, over numbers of
                                                              tokens, not shares
        lds, r2                                               summed influence against the loss on random subsets
        overlap (by k), spearman                              against `EXACT`; the overlap of selector `CHANCE` is k / F
    """
    measured = Measured(result, **bootstrap)
    rows = []
    for selector in measured.names:
        of_contexts = {
            context: _measures_of(measured, selector, context) for context in measured.far_contexts
        }
        for context, measures in of_contexts.items():
            for (name, k), values in measures.items():
                if np.isfinite(of_contexts[TRUE][name, k]).any():
                    defined = np.isfinite(values)
                    draws = measured.draws(np.where(defined, values, 0.0), defined)
                    keys = {"name": name, "selector": selector, "far_context": context, "k": k}
                    rows.append(keys | asdict(measured.bootstrap.interval(draws)))
    frame = _frame(rows, "name", *OF_CHOICE)
    for names, least in ((("overlap", "r2"), 0.0), (("lds", "spearman"), -1.0)):  # which no mean leaves
        of_names = frame["name"].isin(names)
        frame.loc[of_names, ["low", "high"]] = frame.loc[of_names, ["low", "high"]].clip(least, 1.0)
    chance = pd.DataFrame({"name": "overlap", "selector": CHANCE, "far_context": TRUE, "k": measured.ks})
    chance["value"] = chance["k"] / result.n_far
    return pd.concat([frame, chance], ignore_index=True)


def _measures_of(measured: Measured, selector: str, context: str) -> dict[tuple[str, int | None], np.ndarray]:
    """Values of one selector in one far context by name and k, (m,) each, NaN where undefined."""
    there, ks = measured.result.choices.columns, measured.ks
    of_ks = {"sufficiency": measured.losses[selector, context] - measured.long_nats[:, None]}
    if "comprehensiveness_nats" in there and selector != BEST:
        of_ks["comprehensiveness"] = measured.of_choices("comprehensiveness_nats", selector, context)
    values: dict[tuple[str, int | None], np.ndarray] = {}
    for name, columns in of_ks.items():
        values |= {(f"{name}_nats", k): column for k, column in zip(ks, columns.T, strict=True)}
        values[f"{name}_aopc_nats", None] = columns.mean(axis=1)
    if "subset_loss_nats" in there and selector != BEST:
        subsets = (
            measured.of_choices(name, selector, context) for name in ("subset_influence", "subset_loss_nats")
        )
        influence, losses = subsets
        values["lds", None] = row_spearman(influence, -losses)
        values["r2", None] = row_pearson(influence, losses) ** 2
    if EXACT in measured.selectors and selector not in (EXACT, BEST):
        chosen, exact = (measured.of_choices("selected", name, context) for name in (selector, EXACT))
        values |= {("overlap", k): overlap(chosen[:, :k], exact[:, :k]) for k in ks}
        if "leave_one_out_spearman" in there:
            values["spearman", None] = measured.of_choices("leave_one_out_spearman", selector, context)
    return values


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Share of the k tokens of one choice that are in the other, (m,); both (m, k). By chance it is k / F."""
    return (first[:, :, None] == second[:, None, :]).any(axis=2).mean(axis=1)


def contexts(result: Result, **bootstrap: int) -> pd.DataFrame:
    """What needs no selector, where it was measured: name, length (NaN of what has none), value, low, high.

    Names: gap_cost_nats, gap_cost_over_tau_nats (mean L_short at its original ids minus at ids from 0, of all targets
    and of those over tau), share_enough (of all targets: loss with the last ``length`` tokens within `ENOUGH_NATS` of
    L_long).
    """
    targets, over = result.targets, over_tau_column(result)
    one, ratios = np.ones(len(targets)), {}
    if "loss_short_from_0_nats" in targets:
        cost = (targets["loss_short_nats"] - targets["loss_short_from_0_nats"]).to_numpy()
        ratios["gap_cost_nats"] = (cost, one)
        ratios["gap_cost_over_tau_nats"] = (cost * over, over)
    frame = _of_targets(result, ratios, **bootstrap)
    enough = {
        length: ((targets[name] <= targets["loss_long_nats"] + ENOUGH_NATS).to_numpy(np.float64), one)
        for length in CONTEXT_LENGTHS
        if (name := f"loss_of_{length}_nats") in targets
    }
    shares = _of_targets(result, enough, **bootstrap).rename(columns={"name": "length"})
    frame = pd.concat([frame, shares.assign(name="share_enough")], ignore_index=True)
    return frame[["name", "length", *INTERVAL]]


def _of_targets(
    result: Result, ratios: Mapping[Any, tuple[np.ndarray, np.ndarray]], **bootstrap: int
) -> pd.DataFrame:
    """name, value, low, high: of each name the sum of values over all targets over the sum of others, (n,) both."""
    of_all = bootstrap_of(result, **bootstrap)
    rows = [{"name": name, **asdict(of_all.ratio_interval(*pair))} for name, pair in ratios.items()]
    return _frame(rows, "name")


def _frame(rows: Sequence[Mapping[str, Any]], *names: str) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*names, *INTERVAL])
