"""From records to the numbers of Figure 2: L_k, recovery, placebo recovery and net recovery, with intervals.

    recovery(k)         = Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20, docs/method.md 2.2)
    placebo recovery(k) = the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net recovery(k)     = recovery(k) - max(0, placebo recovery(k))                                  [ours]

The sums run over the targets with L_short - L_long > tau; under cross-fitting the selecting model decides which
these are, and every loss is the evaluating model's. Losses are means in nats per token; recoveries are fractions of
the gain. Every interval is a 95 % one by group and document (`analysis.stats.bootstrap`), and all share their
resamples.
Shapes: n sampled targets, m of them over tau.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import numpy as np

from analysis.records.schema import Targets
from analysis.records.store import Records
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, count_clusters, difference, interval_words
from analysis.stats.dependencies import (
    distance_columns,
    distance_numbers,
    kind_columns,
    kind_numbers,
    needed_columns,
    needed_numbers,
    pick_columns,
    pick_numbers,
)
from analysis.stats.faithfulness import context_numbers, faithfulness_columns, faithfulness_numbers
from analysis.stats.placebos import placebo_columns, placebo_numbers
from analysis.stats.recovery import (
    ALL,
    Columns,
    MeasuredTargets,
    SumsBootstrap,
    default_selector,
    over_tau_column,
    refuse_without_gain,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
NO_COPIES = "no near copy"
"""The group of the targets over tau that are no near copies of training text."""
DEFAULT_K = 4
"""The k of everything that is shown at one k only, where it was measured."""


def summarize(
    records: Records, resamples: int = DEFAULT_RESAMPLES, seed: int = 0, *, k_of_bins: int | None = None
) -> Json:
    """All numbers of the figures as one JSON value.

    Args:
        records: of one checkpoint on one corpus, of two that are cross-fitted, or of several trainings
            (`join_trainings`); then numbers of targets are sums over the trainings.
        resamples: bootstrap resamples, at least 1,000 for what is shown.
        seed: of the bootstrap.
        k_of_bins: the k of ``gain_bins``, ``comparisons``, ``kinds`` and ``distances``; by default 4, or the
            closest k that was measured.

    Raises `UserError` if no target is over tau, the gains over tau sum to nothing, or ``k_of_bins`` was not measured.
    """
    targets, manifest = records.targets, records.manifest
    refuse_without_gain(records)
    k = choose_k(manifest.ks, k_of_bins)
    measured = MeasuredTargets(records)
    bins = gain_bins(manifest.tau_nats)
    in_bins = _members_of_bins(records, bins)
    columns = _columns(records, measured, in_bins, k)
    bootstrap = SumsBootstrap(
        columns, targets.document, resamples, seed, targets.document_group, records.training
    )
    return {
        **_trainings(records, resamples, seed),
        "targets": len(targets),
        "targets_over_tau": len(records.over_tau),
        **count_clusters(targets.document, targets.document_group),
        "share_over_tau": bootstrap.ratio("over", "one"),
        "thresholding": _thresholding(bootstrap, manifest.crossfit),
        "loss_short": bootstrap.ratio("short over tau", ("targets", ALL)),
        "loss_long": bootstrap.ratio("long over tau", ("targets", ALL)),
        "all_targets": _numbers_of_all(bootstrap),
        "near_copies": _near_copies(bootstrap, records, k),
        "selectors": _per_selector(bootstrap, measured),
        "comparisons": _comparisons(bootstrap, measured, k),
        "gain_bins": {
            "k": k,
            "bins": [
                _of_bin(bootstrap, measured, number, edges, in_bins[number], k)
                for number, edges in enumerate(bins)
            ],
        },
        "kinds": kind_numbers(bootstrap, records, measured, k),
        "distances": distance_numbers(bootstrap, records, k),
        "picks": pick_numbers(bootstrap, records, k),
        "tokens_needed": needed_numbers(bootstrap, measured),
        "faithfulness": faithfulness_numbers(bootstrap, records, measured),
        "contexts": context_numbers(bootstrap, records),
        "placebos": placebo_numbers(bootstrap, records, measured),
        "settings": _settings(records, resamples, seed),
    }


def summarize_all_targets(records: Records, resamples: int, seed: int) -> Json:
    """``all_targets`` of `summarize` alone, for which no target need be over tau."""
    targets = records.targets
    columns = _columns_of_all(targets)
    return _numbers_of_all(
        SumsBootstrap(columns, targets.document, resamples, seed, targets.document_group, records.training)
    )


def _columns_of_all(targets: Targets) -> Columns:
    return {
        "one": np.ones(len(targets)),
        "short": targets.loss_short_nats,
        "long": targets.loss_long_nats,
        "gain": targets.gain_nats,
        "absolute gain": np.abs(targets.gain_nats),
    }


def _numbers_of_all(bootstrap: SumsBootstrap) -> Json:
    return {
        "loss_short": bootstrap.ratio("short", "one"),
        "loss_long": bootstrap.ratio("long", "one"),
        "gap_short_minus_long": bootstrap.ratio("gain", "one"),
        "absolute_gap": bootstrap.ratio("absolute gain", "one"),
    }


def _thresholding(bootstrap: SumsBootstrap, crossfit: bool) -> Json:
    """What tau does (docs/method.md, 2.4): the mirror tail, what targets over tau hold of the net gain of all, and, of
    cross-fitted records, what is left of the gain that they were chosen for; None: one model alone."""
    return {
        "share_under_minus_tau": bootstrap.ratio("under", "one"),
        "share_of_net_gain": bootstrap.ratio("gain over tau", "gain"),
        "persistence": {
            "selecting_gain_nats": bootstrap.ratio("selecting gain over tau", "over"),
            "gain_nats": bootstrap.ratio("gain over tau", "over"),
            "share_still_over_tau": bootstrap.ratio("still over", "over"),
        }
        if crossfit
        else None,
    }


def _trainings(records: Records, resamples: int, seed: int) -> Json:
    """Of several trainings, the main numbers of each; nothing where there is one."""
    of_manifest = ("checkpoint", "checkpoint_sha256", "training_seed", "device", "machine", "commit")
    of_own = (
        *("targets", "targets_over_tau", "share_over_tau", "thresholding"),
        *("all_targets", "selectors", "tokens_needed"),
    )
    found = []
    for each in records.trainings:
        own = summarize(each, resamples, seed)
        found.append(
            {name: getattr(each.manifest, name) for name in of_manifest}
            | {name: own[name] for name in of_own}
        )
    return {"trainings": found} if found else {}


def gain_bins(tau_nats: float) -> list[tuple[float, float]]:
    """Bins of L_short - L_long in nats, from tau upwards: above the lower edge, up to and with the upper."""
    edges = [tau_nats, *(edge for edge in GAIN_EDGES_NATS if edge > tau_nats), float("inf")]
    return list(pairwise(edges))


def _columns(records: Records, measured: MeasuredTargets, in_bins: list[np.ndarray], k: int) -> Columns:
    """What is summed over targets, each (n,); zero where a target does not belong to the sum."""
    targets, tau, over = records.targets, records.manifest.tau_nats, over_tau_column(records)
    columns: Columns = {
        **_columns_of_all(targets),
        "over": over,
        "under": (targets.selecting_gain_nats < -tau) * 1.0,
        "gain over tau": targets.gain_nats * over,
        "selecting gain over tau": targets.selecting_gain_nats * over,
        "still over": over * (targets.gain_nats > tau),
        "short over tau": measured.column(measured.short_nats),
        "long over tau": measured.column(measured.long_nats),
        **measured.of_group(ALL, measured.ks),
    }
    if targets.near_copy is not None:
        copies = targets.near_copy * 1.0
        columns |= {"near copy": copies, "near copy over tau": copies * columns["over"]}
        columns |= measured.of_group(NO_COPIES, [k], 1 - copies[measured.over])
    for number, members in enumerate(in_bins):
        columns |= measured.of_group(("bin", number), [k], members)
    return (
        columns
        | kind_columns(records, measured, k)
        | distance_columns(records, measured, k)
        | pick_columns(records, measured, k)
        | needed_columns(measured)
        | faithfulness_columns(records, measured)
        | placebo_columns(records, measured)
    )


def _members_of_bins(records: Records, bins: list[tuple[float, float]]) -> list[np.ndarray]:
    """Which targets over tau belong to each bin, (m,) each.

    The selecting model's gain decides, as it does for tau. A bin of the evaluating model's gain would hold targets
    by chance of that model, which cross-fitting is to avoid.
    """
    gain = records.targets.selecting_gain_nats[records.over]
    return [(gain > low) & (gain <= high) for low, high in bins]


def _per_selector(bootstrap: SumsBootstrap, measured: MeasuredTargets) -> Json:
    return {
        selector: {
            str(k): {**_mean_losses(bootstrap, selector, k), **bootstrap.recoveries(selector, k)}
            for k in measured.ks
        }
        for selector in measured.loss_nats
    }


def _near_copies(bootstrap: SumsBootstrap, records: Records, k: int) -> Json | None:
    """How many targets lie in near copies of training text, and the recoveries without them; None: not known."""
    near_copy = records.targets.near_copy
    if near_copy is None:
        return None
    return {
        "k": k,
        "targets": int(near_copy.sum()),
        "targets_over_tau": int(near_copy[records.over].sum()),
        "share": bootstrap.ratio("near copy", "one"),
        "share_over_tau": bootstrap.ratio("near copy over tau", "over"),
        "selectors_without": {
            selector: bootstrap.recoveries(selector, k, NO_COPIES) for selector in records.manifest.selectors
        },
    }


def _mean_losses(bootstrap: SumsBootstrap, selector: str, k: int) -> Json:
    """Mean L_k over the targets over tau: what is left of L_short."""
    short = bootstrap.statistic("short over tau", ("targets", ALL))
    saved = {
        name: bootstrap.statistic(("saved", selector, context, k, ALL), ("targets", ALL))
        for name, context in (("loss", "true"), ("placebo_loss", "placebo"))
    }
    return {name: bootstrap.interval(difference(short, each)) for name, each in saved.items()}


def _comparisons(bootstrap: SumsBootstrap, measured: MeasuredTargets, k: int) -> list[Json]:
    """The default selector minus every other one, on the same targets and the same resamples."""
    first = default_selector(measured.loss_nats)
    of_first = bootstrap.recovery_statistics(first, k)
    found = []
    for second in measured.loss_nats:
        if second != first:
            of_second = bootstrap.recovery_statistics(second, k)
            differences = {
                f"{name}_difference": bootstrap.interval(difference(of_first[name], of_second[name]))
                for name in ("net_recovery", "recovery")
            }
            found.append({"first": first, "second": second, "k": k, **differences})
    return found


def _of_bin(
    bootstrap: SumsBootstrap,
    measured: MeasuredTargets,
    number: int,
    edges: tuple[float, float],
    members: np.ndarray,
    k: int,
) -> Json:
    return {
        "low": edges[0],
        "high": edges[1] if np.isfinite(edges[1]) else None,
        "targets": int(members.sum()),
        "documents": len(np.unique(measured.document[members])),
        "selectors": {
            selector: bootstrap.recoveries(selector, k, ("bin", number)) for selector in measured.loss_nats
        },
    }


def choose_k(ks: list[int], wanted: int | None = None) -> int:
    """The k of what is shown at one k only: ``wanted``, else `DEFAULT_K`, else the closest (the smallest of two)."""
    if wanted is None:
        return min(ks, key=lambda k: (abs(k - DEFAULT_K), k))
    if wanted not in ks:
        raise UserError(f"k = {wanted} was not measured; choose one of {', '.join(map(str, ks))}")
    return wanted


def _settings(records: Records, resamples: int, seed: int) -> Json:
    manifest, targets, over = records.manifest, records.targets, records.over
    groups = targets.groups_of(over)
    several = {"trainings": len(records.trainings)} if records.trainings else {}
    return {
        **{name: value for name, value in asdict(manifest).items() if name != "version"},
        **several,
        "crossfit": manifest.crossfit,
        "complete": len(over) == len(records.over_tau),
        "targets_measured": len(over),
        **count_clusters(targets.document[over], groups, "_over_tau"),
        "resamples": resamples,
        "bootstrap_seed": seed,
        "interval": interval_words(groups, records.training),
    }
