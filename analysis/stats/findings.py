"""The main findings of records in one line."""

from __future__ import annotations

from analysis.records.store import Records
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, by_clusters, count_clusters
from analysis.stats.recovery import (
    ALL,
    MeasuredTargets,
    SumsBootstrap,
    default_selector,
    nats,
    refuse_without_gain,
)
from analysis.stats.summary import choose_k
from olmo_sparsity.util.errors import UserError


def describe_findings(records: Records) -> str:
    """Targets over tau, and what the default selector recovers of their gain, as the summary has it."""
    targets, manifest = records.targets, records.manifest
    count, gain = len(records.over_tau), targets.gain_nats
    under = (targets.selecting_gain_nats < -manifest.tau_nats).mean()
    found = (
        f"{count:,} of {len(targets):,} targets ({count / len(targets):.1%}) gain more than {nats(manifest.tau_nats)} "
        f"from the long context, {under:.1%} lose more"
    )
    if count and gain.sum() > 0:
        found += f"; the former hold {gain[records.over_tau].sum() / gain.sum():.0%} of the net gain of all"
    try:
        refuse_without_gain(records)
    except UserError:
        return found
    k = choose_k(manifest.ks)
    selector = default_selector(manifest.selectors)
    columns = MeasuredTargets(records).of_group(ALL, [k])
    sums = SumsBootstrap(columns, targets.document, DEFAULT_RESAMPLES, 0, targets.document_group)
    recoveries = sums.recoveries(selector, k)
    net = recoveries["net_recovery"]
    true, placebo = (f"{100 * recoveries[name]['value']:.0f}" for name in ("recovery", "placebo_recovery"))
    interval = " (no interval: too few documents)"
    if net["low"] is not None and net["high"] is not None:
        clusters = count_clusters(targets.document[records.over], targets.groups_of(records.over))
        interval = f" [{100 * net['low']:.0f}, {100 * net['high']:.0f}] {by_clusters(clusters)}"
    return (
        f"{found}; {selector}: net recovery at k = {k} is {100 * net['value']:.0f} %{interval}, of a recovery of "
        f"{true} % and a placebo of {placebo} %"
    )
