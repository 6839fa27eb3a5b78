"""Every number of a Result, as tidy frames with 95 % intervals: one row a number, in the columns value, low and high.

Shares and recoveries are fractions, losses nats per token. ``low`` and ``high`` are NaN where the data support no
interval. Of a Result joined of several trainings the numbers are those of all together, and the intervals also say how
much trainings differ. Every function takes ``resamples`` (2,000) and ``seed`` (0) of the bootstrap; all intervals of a
Result rest on the same resamples. Recoveries are of the targets over tau.

    recovery(k)     Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20, docs/method.md 2.2)
    placebo         the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net             recovery(k) - max(0, placebo(k))                                           [ours]

``selector`` may be ``best``: the lowest L_k of all selectors. ``far_context`` may be ``net``. Where a frame is of one k
only, its function takes ``k``, by default 4 or the closest that was measured. All raise `UserError` where recovery is
undefined: no target over tau, or gains that sum to nothing.
Shapes: n sampled targets, m of them over tau with finished choices, K values of k.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from analysis.faithfulness import CONTEXT_LENGTHS, EXACT, row_pearson, row_spearman
from analysis.kinds import KINDS, KINDS_BY_THEMSELVES, kinds_of_tokens
from analysis.result import SELECTION, Result
from analysis.stats.bootstrap import (
    Statistic,
    by_clusters,
    count_clusters,
    difference,
)
from analysis.stats.measured import (
    ALL,
    BEST,
    NET,
    PLACEBO,
    TRUE,
    Measured,
    choose_k,
    default_selector,
    mean_loss,
    nats,
    over_tau_column,
    recoveries,
    recovery_of,
    refuse_without_gain,
    selecting_gain_nats,
    sums_of,
)
from analysis.stats.show import interval_text
from analysis.stats.sums import Columns, Sums
from olmo_sparsity.util.errors import UserError

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
NO_COPIES = "no near copy"
"""The group of the targets over tau that are no near copies of training text."""
FAR = "all far tokens"
"""Stands beside the selectors in what they choose."""
DISTANCE_BINS = 8
"""At most so many bins of the distance, equally wide on a logarithmic scale. [ours]"""
SHARE_NEEDED = 0.9
"""Of L_short - L_long: a target has what it needs when k tokens recover so much. [ours]"""
COMPARABLE = "has every far context"
"""The group of the targets that `placebos` is about."""
BLIND_FORMS = ("kl", "tv")
"""What the name of a selector's target-blind forms ends with."""
LARGEST = "largest"
"""Name of the largest positive placebo, beside those that it is taken from."""
ENOUGH_NATS = 0.1
"""A context is enough where its loss is at most so much above L_long. [ours]"""
CHANCE = "chance"
"""Stands beside the selectors in `faithfulness`: two random choices."""
INTERVAL = ["value", "low", "high"]


def counts(result: Result) -> dict[str, int]:
    """How much was measured: targets (of all trainings together), targets_over_tau, targets_measured (finished),
    documents, documents_over_tau, and where the texts have groups groups, groups_over_tau; trainings.

    What captions say, and `analysis.stats.bootstrap.by_clusters` and `few_clusters` read.
    """
    targets = result.targets
    over = targets.iloc[Measured(result).over if len(result.choices) else []]
    clusters = {
        suffix: count_clusters(
            rows["text"].to_numpy(), rows["group"].to_numpy() if "group" in rows else None, suffix
        )
        for rows, suffix in ((targets, ""), (over, "_over_tau"))
    }
    sizes = {"targets": len(targets), "targets_over_tau": len(result.over), "targets_measured": len(over)}
    return sizes | clusters[""] | clusters["_over_tau"] | {"trainings": len(result.trainings)}


def of_trainings(numbers: Callable[..., pd.DataFrame], result: Result, **options: Any) -> pd.DataFrame:
    """``numbers`` of each training by itself, with the columns training and training_seed before them."""
    frames = []
    for number, training in enumerate(result.trainings):
        frame = numbers(training, **options)
        frame.insert(0, "training", number)
        frame.insert(1, "training_seed", training.settings["training_seed"])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def findings(result: Result) -> str:
    """The main numbers in a few lines, and what to call next: what `print(result)` shows."""
    settings, size = result.settings, counts(result)
    block = settings.get("targets_per_block", 1)
    said = [
        f"{settings['model']} on {settings['texts']}: N {settings['n_long']}, M {settings['n_short']}, B {block}; "
        f"{size['targets']:,} targets of {size['documents']:,} documents"
    ]
    if size["trainings"] > 1:
        said[0] += f", {size['trainings']} trainings together"
    if len(result.targets) == 0:
        return said[0]
    share = {name: interval_text(row, percent=True) for name, row in _by_name(shares(result))}
    said.append(
        f"{size['targets_over_tau']:,} gain more than {nats(settings['tau_nats'])} from the long context: "
        f"{share['share_over_tau']} % of all; {share['share_below_minus_tau']} % lose more"
    )
    if result.gain_nats.sum() > 0:
        said.append(f"they hold {share['share_of_gain']} % of the net gain of all")
    for name, row in _by_name(persistence(result)):
        if name == "share_still_over_tau":
            said.append(f"under the model that evaluates {interval_text(row, percent=True)} % of them do")
    if size["targets_measured"] < size["targets_over_tau"]:
        said.append(f"unfinished: {size['targets_measured']:,} measured so far")
    try:
        frame = recovery(result)
    except UserError as error:
        return "\n".join([*said, str(error)])
    selector, k = default_selector(result.selectors), choose_k(result.ks)
    rows = frame[(frame["selector"] == selector) & (frame["k"] == k) & (frame["level"] == "text")]
    of_contexts = [
        f"{'recovery' if row['far_context'] == TRUE else row['far_context']} {interval_text(row, percent=True)} %"
        for row in rows.to_dict("records")
    ]
    by = by_clusters(size, "_over_tau")
    said += [
        f"{selector}, k = {k}: {', '.join(of_contexts)}",
        f"[95 % interval] {by}; net: recovery minus the placebo, where positive",
        'next: .recovery(), .kinds(), .distances() and more are frames; .figure2("figure2.png"); .xray(0)',
    ]
    return "\n".join(said)


def _by_name(frame: pd.DataFrame) -> list[tuple[str, dict[str, float]]]:
    return [(row["name"], row) for row in frame.to_dict("records")]


def recovery(result: Result, **bootstrap: int) -> pd.DataFrame:
    """selector, far_context ("true", "placebo", "net"), level, unit, sinks, k, value, low, high."""
    rows = [
        row
        for given_back, measured, sums in _of_each_level(result, bootstrap)
        for row in _recovery_rows(given_back, sums, measured.names, measured.ks, ALL)
    ]
    return _frame(rows, *SELECTION, "k")


def losses(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Mean L_k in nats over the targets over tau: columns of `recovery`, far_context "true" and "placebo"."""
    rows = [
        {**given_back, "selector": selector, "far_context": context, "k": k}
        | asdict(sums.interval(mean_loss(sums, selector, context, k)))
        for given_back, measured, sums in _of_each_level(result, bootstrap)
        for selector in measured.names
        for k in measured.ks
        for context in measured.far_contexts
    ]
    return _frame(rows, *SELECTION, "k")


def _of_each_level(
    result: Result, bootstrap: Mapping[str, int]
) -> Iterator[tuple[dict[str, Any], Measured, Sums]]:
    """For each way in which chosen tokens were given back: level, unit and sinks, what was measured, and its sums."""
    refuse_without_gain(result)
    for given_back in result.choices[SELECTION[2:]].drop_duplicates().to_dict("records"):
        measured = Measured(result, **given_back)
        columns = measured.of_group(ALL, measured.ks)
        columns["short over tau"] = measured.column(measured.short_nats)
        yield given_back, measured, sums_of(result, columns, **bootstrap)


def shares(result: Result, **bootstrap: int) -> pd.DataFrame:
    """name, value, low, high; no target need be over tau. Names:

    loss_short_nats, loss_long_nats, gain_nats, absolute_gain_nats     means of all targets
    share_over_tau, share_below_minus_tau                              the tail, and its mirror (docs/method.md, 2.4)
    share_of_gain                                                      of the net gain of all, held by those over tau
    loss_short_over_tau_nats, loss_long_over_tau_nats                  means of the targets over tau
    """
    targets, gain, over = result.targets, result.gain_nats, over_tau_column(result)
    short, long = (targets[f"loss_{name}_nats"].to_numpy(np.float64) for name in ("short", "long"))
    table = _Ratios(result, {"one": np.ones(len(targets)), "gain": gain})
    table.columns["measured"] = Measured(result).column(1.0) if len(result.choices) else over
    below_minus_tau = selecting_gain_nats(result) < -result.settings["tau_nats"]
    for name, values, denominator in (
        ("loss_short_nats", short, "one"),
        ("loss_long_nats", long, "one"),
        ("gain_nats", gain, "one"),
        ("absolute_gain_nats", np.abs(gain), "one"),
        ("share_over_tau", over, "one"),
        ("share_below_minus_tau", below_minus_tau, "one"),
        ("share_of_gain", gain * over, "gain"),
        ("loss_short_over_tau_nats", short * table.columns["measured"], "measured"),
        ("loss_long_over_tau_nats", long * table.columns["measured"], "measured"),
    ):
        table.add(values, denominator, name=name)
    return table.frame("name", **bootstrap)


def persistence(result: Result, **bootstrap: int) -> pd.DataFrame:
    """What is left of the gain that targets were chosen for, where results are cross-fitted; no rows otherwise.

    name, value, low, high. Names: selecting_gain_nats, gain_nats (means over the targets over tau, under the model that
    selects and the one that evaluates), share_still_over_tau (under the one that evaluates).
    """
    over = over_tau_column(result)
    table = _Ratios(result, {"over": over})
    if result.crossfit:
        still_over = result.gain_nats > result.settings["tau_nats"]
        table.add(over * selecting_gain_nats(result), "over", name="selecting_gain_nats")
        table.add(over * result.gain_nats, "over", name="gain_nats")
        table.add(over * still_over, "over", name="share_still_over_tau")
    return table.frame("name", **bootstrap)


def differences(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """The default selector minus every other, paired: first, second, far_context ("net", "true"), k, value, low,
    high."""
    measured, k = _measured(result, k)
    sums = sums_of(result, measured.of_group(ALL, [k]), **bootstrap)
    first = default_selector(measured.names)
    rows = []
    for second in measured.names:
        for context in (NET, TRUE) if second != first and PLACEBO in measured.far_contexts else ():
            pair = [recovery_of(sums, selector, context, k) for selector in (first, second)]
            keys = {"first": first, "second": second, "far_context": context, "k": k}
            rows.append(keys | asdict(sums.interval(difference(*pair))))
    return _frame(rows, "first", "second", "far_context", "k")


def gain_bins(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Recovery by gain of the target: from_nats, to_nats (inclusive; inf), n_targets, n_documents, selector,
    far_context, k, value, low, high.

    The selecting model's gain decides, as it does for tau. A bin of the evaluating model's gain would hold targets by
    chance of that model, which cross-fitting is to avoid.
    """
    measured, k = _measured(result, k)
    gain = selecting_gain_nats(result)[measured.over]
    edges = gain_edges(result.settings["tau_nats"])
    members = {pair: (gain > pair[0]) & (gain <= pair[1]) for pair in pairwise(edges)}
    columns: Columns = {}
    for pair, inside in members.items():
        columns |= measured.of_group(pair, [k], inside)
    sums = sums_of(result, columns, **bootstrap)
    rows = []
    for pair, inside in members.items():
        keys = {"from_nats": pair[0], "to_nats": pair[1], "n_targets": int(inside.sum())}
        keys["n_documents"] = len(np.unique(measured.document[inside]))
        rows += _recovery_rows(keys, sums, measured.names, [k], pair)
    return _frame(rows, "from_nats", "to_nats", "n_targets", "n_documents", "selector", "far_context", "k")


def gain_edges(tau_nats: float) -> list[float]:
    """Edges of the bins of L_short - L_long in nats, from tau to infinity."""
    return [tau_nats, *(edge for edge in GAIN_EDGES_NATS if edge > tau_nats), float("inf")]


def near_copies(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Targets in near copies of training text, and recovery without them; no rows where copies are unknown.

    name, selector, far_context, k, n_targets, value, low, high. Names: share (of all targets), share_over_tau,
    recovery.
    """
    names = ("name", "selector", "far_context", "k", "n_targets")
    if "near_copy" not in result.targets:
        return _frame([], *names)
    measured, k = _measured(result, k)
    copies, over = result.targets["near_copy"].to_numpy(np.float64), over_tau_column(result)
    columns: Columns = {
        "one": np.ones(len(copies)), "over": over, "copies": copies, "copies over": copies * over,
        **measured.of_group(NO_COPIES, [k], 1 - copies[measured.over]),
    }  # fmt: skip
    sums = sums_of(result, columns, **bootstrap)
    rows: list[dict[str, Any]] = [
        {"name": name, "n_targets": int(columns[above].sum())} | asdict(sums.ratio(above, below))
        for name, above, below in (("share", "copies", "one"), ("share_over_tau", "copies over", "over"))
    ]
    rest = {"name": "recovery", "n_targets": int(sums.total(("targets", NO_COPIES)))}
    return _frame(rows + _recovery_rows(rest, sums, measured.selectors, [k], NO_COPIES), *names)


# --- which dependencies the far context carries [ours] (docs/method.md, 2.6) ---


def kinds(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """Numbers of every kind of dependency that was sampled.

    kind, n_targets, n_targets_over_tau, n_documents_over_tau, n_groups_over_tau (NaN without groups), name, selector,
    far_context, k, value, low, high. Names: share (of all targets), share_over_tau (of those over tau), gain_nats (mean
    of all of the kind), recovery (with selector, far_context and k).
    """
    measured, k = _measured(result, k)
    targets, over = result.targets, over_tau_column(result)
    kind_of_target = targets["kind"].to_numpy()
    present = sorted(set(kind_of_target), key=lambda kind: (*KINDS, kind).index(kind))
    columns: Columns = {"one": np.ones(len(targets)), "over": over}
    for kind in present:
        members = (kind_of_target == kind).astype(np.float64)
        columns["share", kind], columns["share_over_tau", kind] = members, members * over
        columns["gain_nats", kind] = members * result.gain_nats
        columns |= measured.of_group(kind, [k], members[measured.over])
    sums = sums_of(result, columns, **bootstrap)
    rows: list[dict[str, Any]] = []
    for kind in present:
        of_kind = targets[(kind_of_target == kind) & targets["over_tau"]]
        keys = {
            "kind": kind,
            "n_targets": int((kind_of_target == kind).sum()),
            "n_targets_over_tau": len(of_kind),
            "n_documents_over_tau": of_kind["text"].nunique(),
            "n_groups_over_tau": of_kind["group"].nunique() if "group" in targets else np.nan,
        }
        for name, below in (("share", "one"), ("share_over_tau", "over"), ("gain_nats", ("share", kind))):
            rows.append(keys | {"name": name} | asdict(sums.ratio((name, kind), below)))
        rows += _recovery_rows(keys | {"name": "recovery"}, sums, measured.names, [k], kind)
    return _frame(rows, *keys, "name", "selector", "far_context", "k")


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
    measured, k = _measured(result, k)
    n_long = result.settings["n_long"]
    edges = distance_edges(n_long, result.settings["n_short"])
    table = _Ratios(result, {"selected": measured.column(float(k))})
    for selector in measured.selectors:
        for context in measured.far_contexts:
            back = n_long - measured.of_choices("selected", selector, context)[:, :k]
            for low, high in pairwise(edges):
                inside = ((back >= low) & (back < high)).sum(axis=1)
                keys = {"selector": selector, "far_context": context, "k": k, "from_tokens": low}
                keys |= {"to_tokens": high, "uniform": (high - low) / result.n_far}
                table.add(measured.column(inside), "selected", **keys)
    return table.frame(**bootstrap)


def picks(result: Result, k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """What kind of tokens the first k are, and all far tokens (selector `FAR`), of the targets whose text is there.

    selector, far_context, k, kind, value, low, high; no rows without texts. What stands out from all far tokens in the
    placebo too is a taste of the selector, not a need of the target.
    """
    names = ("selector", "far_context", "k", "kind")
    texts = [training.texts for training in result.trainings]
    if any(frame is None or frame.empty for frame in texts):
        return _frame([], *names)
    measured, k = _measured(result, k)
    pieces = pd.concat(texts).drop_duplicates("block").set_index("block")
    block = result.targets["target_id"].to_numpy()[measured.over] // result.settings["targets_per_block"]
    has_text = np.isin(block, pieces.index)
    table = _Ratios(result, {"has_text": measured.column(has_text)})
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
                table.add(measured.column(share), "has_text", **keys)
    return table.frame(**bootstrap)


def tokens_needed(result: Result, **bootstrap: int) -> pd.DataFrame:
    """Share of the targets that have `SHARE_NEEDED` of their gain from k tokens, or a smaller measured k.

    name, selector, far_context, k, n_targets, value, low, high. Names: reached; never (not from the largest k; true far
    context only). Only targets that gain anything count: under cross-fitting a target may lose by the long context of
    the model that evaluates, and has then nothing to recover.
    """
    measured, _ = _measured(result)
    gains = measured.gain_nats > 0
    table = _Ratios(result, {"gains": measured.column(gains)})
    for selector in measured.names:
        for context in measured.far_contexts:
            saved = measured.short_nats[:, None] - measured.losses[selector, context]
            enough = saved >= SHARE_NEEDED * measured.gain_nats[:, None]
            reached = np.logical_or.accumulate(enough, axis=1) & gains[:, None]
            keys = {"selector": selector, "far_context": context, "n_targets": int(gains.sum())}
            for column, k in enumerate(measured.ks):
                table.add(measured.column(reached[:, column]), "gains", name="reached", k=k, **keys)
            if context == TRUE:
                never = gains & ~reached[:, -1]
                table.add(measured.column(never), "gains", name="never", k=measured.ks[-1], **keys)
    return table.frame("name", "selector", "far_context", "k", "n_targets", **bootstrap)


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
    measured, _ = _measured(result)
    has = [np.isfinite(measured.losses[measured.selectors[0], context]).all(axis=1) for context in contexts]
    comparable = np.all(has, axis=0)
    if not comparable.any():
        return _frame([], *names)
    columns = measured.of_group(COMPARABLE, measured.ks, comparable * 1.0, contexts)
    sums = sums_of(result, columns, **bootstrap)
    rows: list[dict[str, Any]] = []

    def add(
        name: str, selector: str, context: str, k: int, statistic: Statistic, blind: str | None = None
    ) -> None:
        keys = {"name": name, "selector": selector, "blind": blind, "far_context": context, "k": k}
        rows.append(keys | {"n_targets": int(comparable.sum())} | asdict(sums.interval(statistic)))

    for selector in measured.names:
        for context in contexts:
            for k in measured.ks:
                add("recovery", selector, context, k, recovery_of(sums, selector, context, k, COMPARABLE))
    pairs = [(signed, f"{signed}-{form}") for signed in measured.selectors for form in BLIND_FORMS]
    for signed, blind in pairs:
        for k in measured.ks if blind in measured.selectors else ():
            of_blind = {context: recovery_of(sums, blind, context, k, COMPARABLE) for context in contexts}
            of_signed = recovery_of(sums, signed, PLACEBO, k, COMPARABLE)
            own = of_blind.pop(TRUE)
            largest = _largest_positive(list(of_blind.values()))
            add("selection_bias", signed, PLACEBO, k, difference(of_signed, of_blind[PLACEBO]), blind)
            for context, statistic in (of_blind | {LARGEST: largest}).items():
                add("common_context", signed, context, k, statistic, blind)
            add("specific", signed, TRUE, k, difference(own, largest), blind)
    return _frame(rows, *names)


def _largest_positive(statistics: Sequence[Statistic]) -> Statistic:
    return lambda sums: np.maximum(np.max([statistic(sums) for statistic in statistics], axis=0), 0.0)


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
    measured, _ = _measured(result)
    table = _Ratios(result, {}, cut=False)
    for selector in measured.names:
        of_contexts = {
            context: _measures_of(measured, selector, context) for context in measured.far_contexts
        }
        for context, measures in of_contexts.items():
            for (name, k), values in measures.items():
                if np.isfinite(of_contexts[TRUE][name, k]).any():
                    defined = np.isfinite(values)
                    keys = {"name": name, "selector": selector, "far_context": context, "k": k}
                    table.columns["defined", *keys.values()] = measured.column(defined)
                    values = measured.column(np.where(defined, values, 0.0))
                    table.add(values, ("defined", *keys.values()), **keys)
    frame = table.frame(**bootstrap)
    for names, least in ((("overlap", "r2"), 0.0), (("lds", "spearman"), -1.0)):  # which no mean leaves
        rows = frame["name"].isin(names)
        frame.loc[rows, ["low", "high"]] = frame.loc[rows, ["low", "high"]].clip(least, 1.0)
    chance = {"name": "overlap", "selector": CHANCE, "far_context": TRUE, "k": measured.ks}
    return pd.concat(
        [frame, pd.DataFrame(chance).assign(value=np.array(measured.ks) / result.n_far)], ignore_index=True
    )


def _measures_of(measured: Measured, selector: str, context: str) -> dict[tuple[str, int | None], np.ndarray]:
    """Values of one selector in one far context by name and k, (m,) each, NaN where undefined."""
    values = _of_ks(
        "sufficiency", measured.ks, measured.losses[selector, context] - measured.long_nats[:, None]
    )
    if selector == BEST:
        return values
    there = measured.result.choices.columns
    if "comprehensiveness_nats" in there:
        drops = measured.of_choices("comprehensiveness_nats", selector, context)
        values |= _of_ks("comprehensiveness", measured.ks, drops)
    if "subset_loss_nats" in there:
        influence, losses = (
            measured.of_choices(name, selector, context) for name in ("subset_influence", "subset_loss_nats")
        )
        values["lds", None] = row_spearman(influence, -losses)
        values["r2", None] = row_pearson(influence, losses) ** 2
    if EXACT in measured.selectors and selector != EXACT:
        chosen, exact = (measured.of_choices("selected", name, context) for name in (selector, EXACT))
        values |= {("overlap", k): overlap(chosen[:, :k], exact[:, :k]) for k in measured.ks}
        if "leave_one_out_spearman" in there:
            values["spearman", None] = measured.of_choices("leave_one_out_spearman", selector, context)
    return values


def _of_ks(name: str, ks: Sequence[int], values: np.ndarray) -> dict[tuple[str, int | None], np.ndarray]:
    """Each column of values (m, K), and their mean: ERASER's AOPC."""
    of_ks: dict[tuple[str, int | None], np.ndarray] = {
        (f"{name}_nats", k): values[:, column] for column, k in enumerate(ks)
    }
    return of_ks | {(f"{name}_aopc_nats", None): values.mean(axis=1)}


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
    table = _Ratios(result, {"one": np.ones(len(targets)), "over": over})
    if "loss_short_from_0_nats" in targets:
        cost = (targets["loss_short_nats"] - targets["loss_short_from_0_nats"]).to_numpy()
        table.add(cost, "one", name="gap_cost_nats")
        table.add(cost * over, "over", name="gap_cost_over_tau_nats")
    for length in CONTEXT_LENGTHS:
        if (name := f"loss_of_{length}_nats") in targets:
            enough = targets[name] <= targets["loss_long_nats"] + ENOUGH_NATS
            table.add(enough.to_numpy(), "one", name="share_enough", length=length)
    return table.frame("name", "length", **bootstrap)


class _Ratios:
    """Rows whose numbers are a sum over all targets divided by another one, a column of ``denominators``.

    ``cut``: intervals of shares, at 0 and 1 (`Sums.ratio`).
    """

    def __init__(self, result: Result, denominators: Columns, *, cut: bool = True):
        self.result, self.columns, self.cut = result, denominators, cut
        self.rows: list[tuple[dict[str, Any], Hashable]] = []

    def add(self, values: np.ndarray, denominator: Hashable, **keys: Any) -> None:
        """A row with these keys; ``values``: (n,)."""
        self.columns[len(self.rows)] = np.asarray(values, dtype=np.float64)
        self.rows.append((keys, denominator))

    def frame(self, *names: str, **bootstrap: int) -> pd.DataFrame:
        """All rows, their keys in the order of ``names`` or, without, in that of the first row."""
        sums = sums_of(self.result, self.columns, **bootstrap)
        rows = []
        for place, (keys, below) in enumerate(self.rows):
            interval = sums.ratio(place, below) if self.cut else sums.interval(sums.statistic(place, below))
            rows.append(keys | asdict(interval))
        return _frame(rows, *(names or self.rows[0][0]))


def _measured(result: Result, k: int | None = None) -> tuple[Measured, int]:
    """The losses as text, and the k that is shown. Raises `UserError` where recovery is undefined."""
    refuse_without_gain(result)
    return Measured(result), choose_k(result.ks, k)


def _recovery_rows(
    keys: Mapping[str, Any], sums: Sums, selectors: Iterable[str], ks: Sequence[int], group: Hashable
) -> list[dict[str, Any]]:
    """The rows of every selector, k and far context, of one group."""
    return [
        {**keys, "selector": selector, "far_context": context, "k": k} | asdict(interval)
        for selector in selectors
        for k in ks
        for context, interval in recoveries(sums, selector, k, group).items()
    ]


def _frame(rows: Sequence[Mapping[str, Any]], *names: str) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*names, *INTERVAL])
