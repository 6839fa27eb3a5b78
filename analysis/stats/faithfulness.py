"""Faithfulness of a choice of tokens, as the attribution field measures it, true beside placebo (docs/method.md, 2.8).

Every number is a mean over targets over tau, or over all sampled ones for what has no selector, with the bootstrap of
the summary. A measure that records do not have is None.
Shapes: n sampled targets, m of them over tau with finished selections, K values of k, s random subsets of far tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from analysis.records.schema import CONTEXT_LENGTHS, FAR_CONTEXTS, KEEP_RATE, SUBSETS, length_column
from analysis.records.store import Records
from analysis.stats.bootstrap import Statistic, difference, mean_of
from analysis.stats.correlation import row_pearson, row_spearman
from analysis.stats.recovery import ALL, Columns, MeasuredTargets, SumsBootstrap
from olmo_sparsity.util.result_files import Json

ENOUGH_NATS = 0.1
"""A context is enough where its loss is at most so much above L_long. [ours]"""
EXACT = "leave-one-out"
"""The selector that others are compared with: the exact influence of every single token."""
AOPC = "aopc"
"""Name of the mean over the k's, beside them."""


def faithfulness_columns(records: Records, measured: MeasuredTargets) -> Columns:
    """What the numbers of this module are sums of; sufficiency needs no columns of its own."""
    columns: Columns = {}
    for selector in records.manifest.selectors:
        for context in FAR_CONTEXTS:
            for name, values in _of_selector(records, selector, context).items():
                defined = np.isfinite(values)
                columns["value", name, selector, context] = measured.column(np.where(defined, values, 0.0))
                columns["defined", name, selector, context] = measured.column(defined)
    return columns | _of_contexts(records, measured)


def _of_selector(records: Records, selector: str, context: str) -> dict[Hashable, np.ndarray]:
    """Values of one selector in one far context by target, (m,) each, NaN where undefined; of what was measured."""
    found: dict[Hashable, np.ndarray] = {}
    further = {name: each[selector][context] for name, each in records.further.items()}
    if "comprehensiveness_nats" in further:
        for column, k in enumerate(records.manifest.ks):
            found["comprehensiveness", k] = further["comprehensiveness_nats"][:, column]
    if "subset_loss_nats" in further:
        influence, losses = further["subset_influence"], further["subset_loss_nats"]
        found["lds"] = row_spearman(influence, -losses)
        found["r2"] = row_pearson(influence, losses) ** 2
    if EXACT in records.manifest.selectors and selector != EXACT:
        chosen, exact = (records.selected[name][context] for name in (selector, EXACT))
        for k in records.manifest.ks:
            found["overlap", k] = overlap(chosen[:, :k], exact[:, :k])
        if "leave_one_out_spearman" in further:
            found["spearman"] = further["leave_one_out_spearman"]
    return found


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Share of the k tokens of one choice that are in the other, (m,); both (m, k). By chance it is k / F."""
    return (first[:, :, None] == second[:, None, :]).any(axis=2).mean(axis=1)


def _of_contexts(records: Records, measured: MeasuredTargets) -> Columns:
    """What needs no selector: the cost of the gap in position ids, and whether a shorter context is enough."""
    targets = records.targets
    columns: Columns = {}
    if targets.loss_short_from_0_nats is not None:
        cost = targets.loss_short_nats - targets.loss_short_from_0_nats
        columns |= {"gap cost": cost, "gap cost over tau": measured.column(cost[records.over])}
    for length in CONTEXT_LENGTHS:
        losses = getattr(targets, length_column(length))
        if losses is not None:
            columns["enough", length] = losses <= targets.loss_long_nats + ENOUGH_NATS
    return columns


def faithfulness_numbers(bootstrap: SumsBootstrap, records: Records, measured: MeasuredTargets) -> Json:
    """The measures of every selector; those against leave-one-out of all but itself.

    Sufficiency is relative to L_long of the true context in both far contexts, as recovery is; comprehensiveness to the
    loss with the whole far context that the tokens are taken from.
    """
    manifest = records.manifest
    subsets = manifest.options.get(SUBSETS)
    return {
        "ks": list(measured.ks),
        "subsets": {"number": subsets, "keep_rate": manifest.options[KEEP_RATE]} if subsets else None,
        "overlap_by_chance": {str(k): k / manifest.n_far for k in measured.ks},
        "selectors": {
            selector: {
                "sufficiency_nats": _sufficiency(bootstrap, measured.ks, selector),
                "comprehensiveness_nats": _of_ks(
                    bootstrap, measured.ks, "comprehensiveness", selector, aopc=True
                ),
                "lds": _single(bootstrap, "lds", selector),
                "r2": _single(bootstrap, "r2", selector),
                "overlap": _of_ks(bootstrap, measured.ks, "overlap", selector),
                "spearman": _single(bootstrap, "spearman", selector),
            }
            for selector in measured.loss_nats
        },
    }


def _sufficiency(bootstrap: SumsBootstrap, ks: Sequence[int], selector: str) -> Json:
    """Mean L_k - L_long, which is the gain without what was saved."""
    targets = ("targets", ALL)
    gain = bootstrap.statistic(("gain", ALL), targets)

    def missing(context: str, k: int) -> Statistic:
        return difference(gain, bootstrap.statistic(("saved", selector, context, k, ALL), targets))

    return {
        context: _at_ks(bootstrap, {k: missing(context, k) for k in ks}, aopc=True)
        for context in FAR_CONTEXTS
    }


def _of_ks(
    bootstrap: SumsBootstrap, ks: Sequence[int], name: str, selector: str, *, aopc: bool = False
) -> Json | None:
    if not _is_there(bootstrap, (name, ks[0]), selector):
        return None
    return {
        context: _at_ks(bootstrap, {k: _mean(bootstrap, (name, k), selector, context) for k in ks}, aopc=aopc)
        for context in FAR_CONTEXTS
    }


def _single(bootstrap: SumsBootstrap, name: str, selector: str) -> Json | None:
    if not _is_there(bootstrap, name, selector):
        return None
    return {
        context: bootstrap.interval(_mean(bootstrap, name, selector, context)) for context in FAR_CONTEXTS
    }


def _is_there(bootstrap: SumsBootstrap, name: Hashable, selector: str) -> bool:
    """Whether the measure is defined for any target in the true far context."""
    column = bootstrap.index.get(("defined", name, selector, FAR_CONTEXTS[0]))
    return column is not None and bool(bootstrap.bootstrap.sums[column] > 0)


def _mean(bootstrap: SumsBootstrap, name: Hashable, selector: str, context: str) -> Statistic:
    """Over the targets for which the measure is defined."""
    return bootstrap.statistic(*((part, name, selector, context) for part in ("value", "defined")))


def _at_ks(bootstrap: SumsBootstrap, of_ks: dict[int, Statistic], *, aopc: bool) -> Json:
    """An interval for each k, and where ``aopc`` for their mean: ERASER's AOPC, over numbers of tokens, not shares."""

    found = {str(k): bootstrap.interval(each) for k, each in of_ks.items()}
    return {**found, AOPC: bootstrap.interval(mean_of(list(of_ks.values())))} if aopc else found


def context_numbers(bootstrap: SumsBootstrap, records: Records) -> Json:
    """``gap_cost_nats``: L_short at its original ids minus at ids from 0. ``enough``: share of all sampled targets for
    which the last M' tokens are, see `ENOUGH_NATS`."""
    measured = [length for length in CONTEXT_LENGTHS if ("enough", length) in bootstrap.index]
    return {
        "gap_cost_nats": {
            "all_targets": bootstrap.ratio("gap cost", "one"),
            "over_tau": bootstrap.ratio("gap cost over tau", ("targets", ALL)),
        }
        if "gap cost" in bootstrap.index
        else None,
        "enough": {
            "within_nats": ENOUGH_NATS,
            "shares": {str(length): bootstrap.ratio(("enough", length), "one") for length in measured},
        }
        if measured
        else None,
    }
