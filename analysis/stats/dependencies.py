"""Which dependencies the far context carries: by kind of target, by distance, and by how many tokens they need.

All [ours] (docs/method.md, 2.6). Each part has a function that makes its columns and one that reads its numbers from
the bootstrap over all columns, so that every interval of a summary shares its resamples.
Shapes: n sampled targets, m of them over tau with finished selections, K values of k.
"""

from __future__ import annotations

import numpy as np

from analysis.records.schema import FAR_CONTEXTS, Targets
from analysis.records.store import Records
from analysis.stats.bootstrap import Statistic, count_clusters
from analysis.stats.recovery import Columns, MeasuredTargets, SumsBootstrap, over_tau_column
from analysis.text.kinds import KINDS, KINDS_BY_THEMSELVES, kinds_of_tokens
from olmo_sparsity.util.result_files import Json

FAR = "all far tokens"
"""Stands beside the selectors in what they choose."""
DISTANCE_BINS = 8
"""At most so many bins of the distance, equally wide on a logarithmic scale. [ours]"""
SHARE_NEEDED = 0.9
"""Of L_short - L_long: a target has what it needs when k tokens recover so much. [ours]"""


def kind_columns(records: Records, measured: MeasuredTargets, k: int) -> Columns:
    """What the numbers per kind are sums of."""
    targets = records.targets
    gain = targets.gain_nats
    over = over_tau_column(records)
    columns: Columns = {}
    for kind in _present(targets):
        members = (targets.kind == kind).astype(np.float64)
        columns["of kind", kind] = members
        columns["over of kind", kind] = members * over
        columns["gain of kind", kind] = members * gain
        columns |= measured.of_group(("kind", kind), [k], members[records.over])
    return columns


def kind_numbers(bootstrap: SumsBootstrap, records: Records, measured: MeasuredTargets, k: int) -> Json:
    """Share of targets, gap and recoveries of every kind of dependency that was sampled."""
    targets, over = records.targets, records.over_tau
    kinds = []
    for kind in _present(targets):
        of_kind = over[targets.kind[over] == kind]
        kinds.append(
            {
                "kind": kind,
                "targets": int((targets.kind == kind).sum()),
                "targets_over_tau": len(of_kind),
                **count_clusters(targets.document[of_kind], targets.groups_of(of_kind), "_over_tau"),
                "share": bootstrap.ratio(("of kind", kind), "one"),
                "share_over_tau": bootstrap.ratio(("over of kind", kind), "over"),
                "gap_short_minus_long": bootstrap.ratio(("gain of kind", kind), ("of kind", kind)),
                "selectors": {
                    selector: bootstrap.recoveries(selector, k, ("kind", kind))
                    for selector in measured.loss_nats
                },
            }
        )
    return {"k": k, "kinds": kinds}


def distance_edges(n_long: int, n_short: int) -> list[int]:
    """Edges of the bins in tokens back from the target, ascending: M + 1 … N + 1; a bin excludes its upper edge.

    In a block (docs/method.md, 2.1) from its first target, so that uniform choice has the same share for all.
    """
    edges = np.geomspace(n_short + 1, n_long + 1, DISTANCE_BINS + 1)
    return np.unique(np.rint(edges).astype(int)).tolist()


def distance_columns(records: Records, measured: MeasuredTargets, k: int) -> Columns:
    """How many of each target's first k tokens fall into each bin; position id c is N - c tokens back."""
    edges = distance_edges(records.manifest.n_long, records.manifest.n_short)
    columns: Columns = {"selected": measured.column(float(k))}
    for selector in records.manifest.selectors:
        for context in FAR_CONTEXTS:
            distance = records.manifest.n_long - records.selected[selector][context][:, :k]
            bins = np.searchsorted(edges, distance, side="right") - 1
            for number in range(len(edges) - 1):
                inside = (bins == number).sum(axis=1)
                columns["selected", selector, context, number] = measured.column(inside)
    return columns


def distance_numbers(bootstrap: SumsBootstrap, records: Records, k: int) -> Json:
    """How far back the first k selected tokens are, as a share of them per bin."""
    edges = distance_edges(records.manifest.n_long, records.manifest.n_short)
    return {
        "k": k,
        "edges": edges,
        "selectors": {
            selector: {
                context: [
                    bootstrap.ratio(("selected", selector, context, number), "selected")
                    for number in range(len(edges) - 1)
                ]
                for context in FAR_CONTEXTS
            }
            for selector in records.manifest.selectors
        },
    }


def pick_columns(records: Records, measured: MeasuredTargets, k: int) -> Columns:
    """Share of each kind of token among the first k tokens, and among all far ones, of the targets that have text."""
    if records.examples is None:
        return {}
    row_of_text = {target: row for row, target in enumerate(records.examples.target_id.tolist())}
    ids = records.targets.target_id[records.over].tolist()
    rows = [row for row, target in enumerate(ids) if target in row_of_text]
    texts = [row_of_text[ids[row]] for row in rows]
    columns: Columns = {"has text": measured.column(np.isin(np.arange(len(ids)), rows))}
    for context in FAR_CONTEXTS:
        pieces = records.examples.context_pieces if context == "true" else records.examples.placebo_pieces
        kinds = [kinds_of_tokens(pieces[text])[: records.manifest.n_far] for text in texts]
        found = np.array(kinds).reshape(len(rows), records.manifest.n_far)
        chosen = {
            name: np.take_along_axis(found, each[context][rows, :k], axis=1)
            for name, each in records.selected.items()
        }
        for name, of_tokens in {FAR: found, **chosen}.items():
            for kind in KINDS_BY_THEMSELVES:
                shares = np.zeros(len(ids))
                shares[rows] = (of_tokens == kind).mean(axis=1)
                columns["picked", name, context, kind] = measured.column(shares)
    return columns


def pick_numbers(bootstrap: SumsBootstrap, records: Records, k: int) -> Json | None:
    """What kind of tokens selectors choose, in the true and the placebo far context, beside all of them (`FAR`).

    What stands out from all far tokens in the placebo too is a taste of the selector, not a need of the target. None
    where no target has text.
    """
    if "has text" not in bootstrap.index:
        return None
    return {
        "k": k,
        "kinds": list(KINDS_BY_THEMSELVES),
        "shares": {
            name: {
                context: {
                    kind: bootstrap.ratio(("picked", name, context, kind), "has text")
                    for kind in KINDS_BY_THEMSELVES
                }
                for context in FAR_CONTEXTS
            }
            for name in (FAR, *records.manifest.selectors)
        },
    }


def needed_columns(measured: MeasuredTargets) -> Columns:
    """Whether `SHARE_NEEDED` of the gain is recovered at each k or a smaller measured one.

    Only targets that gain anything count: under cross-fitting a target may lose by the long context of the model
    that evaluates, and has then nothing to recover.
    """
    gains = measured.gain_nats > 0
    wanted = SHARE_NEEDED * measured.gain_nats[:, None]
    columns: Columns = {"gains": measured.column(gains)}
    for selector, losses in measured.loss_nats.items():
        for context in FAR_CONTEXTS:
            enough = measured.short_nats[:, None] - losses[context] >= wanted
            reached = np.logical_or.accumulate(enough, axis=1) & gains[:, None]
            for column, k in enumerate(measured.ks):
                columns["reached", selector, context, k] = measured.column(reached[:, column])
    return columns


def needed_numbers(bootstrap: SumsBootstrap, measured: MeasuredTargets) -> Json:
    """Share of targets that k tokens suffice for, cumulative in k; ``censored`` need more than the largest k."""

    def never(selector: str) -> Statistic:
        reached = bootstrap.statistic(("reached", selector, "true", measured.ks[-1]), "gains")
        return lambda sums: 1 - reached(sums)

    return {
        "share": SHARE_NEEDED,
        "ks": list(measured.ks),
        "targets": int((measured.gain_nats > 0).sum()),
        "selectors": {
            selector: {
                **{
                    context: [
                        bootstrap.ratio(("reached", selector, context, k), "gains") for k in measured.ks
                    ]
                    for context in FAR_CONTEXTS
                },
                "censored": bootstrap.share(never(selector), "gains"),
            }
            for selector in measured.loss_nats
        },
    }


def _present(targets: Targets) -> list[str]:
    """The kinds that were sampled, in the order of `KINDS`."""
    found = set(targets.kind.tolist())
    return [kind for kind in KINDS if kind in found]
