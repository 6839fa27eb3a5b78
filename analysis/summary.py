"""From records to the numbers of Figure 2: L_k, recovery, placebo recovery and net recovery, with intervals.

    recovery(k)         = Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20 as METHOD 2.2 reads it)
    placebo recovery(k) = the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net recovery(k)     = recovery(k) - placebo recovery(k)                                          [ours]

The sums run over the targets with L_short - L_long > tau. Losses are means in nats per token; recoveries are
fractions of the gain. Every interval is a 95 % cluster bootstrap by document, and all share their resamples.
Shapes: n sampled targets, m of them over tau.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.records import FAR_CONTEXTS, Records
from analysis.statistics import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Interval,
    Statistic,
    difference,
    ratio_of_sums,
)
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import write_json

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
DEFAULT_K = 4
"""The k of the recovery by bins, where it was measured."""
FEW_DOCUMENTS = 30
"""Below this many documents with a target over tau, percentile intervals are known to be too narrow."""

Json = dict[str, Any]


def summarize(
    records: Records, resamples: int = DEFAULT_RESAMPLES, seed: int = 0, *, k_of_bins: int | None = None
) -> Json:
    """All numbers of Figure 2 as one JSON value.

    Args:
        records: of one checkpoint on one corpus.
        resamples: bootstrap resamples, at least 1,000 for what is shown.
        seed: of the bootstrap.
        k_of_bins: the k of ``gain_bins``; by default 4, or the closest k that was measured.

    Raises `UserError` if no target is over tau, or ``k_of_bins`` was not measured.
    """
    targets, manifest = records.targets, records.manifest
    _refuse_without_targets(records)
    k_of_bins = _choose_k(manifest.ks, k_of_bins)
    bins = gain_bins(manifest.tau_nats)
    columns = _columns(records, bins, k_of_bins)
    bootstrap = _NamedBootstrap(columns, targets.document, resamples, seed)
    documents_over = len(np.unique(targets.document[records.over]))
    return {
        "targets": len(targets),
        "targets_over_tau": len(targets.over(manifest.tau_nats)),
        "documents": len(np.unique(targets.document)),
        "share_over_tau": bootstrap.ratio("over", "one").as_dict(),
        "loss_short": bootstrap.ratio("short over tau", "measured").as_dict(),
        "loss_long": bootstrap.ratio("long over tau", "measured").as_dict(),
        "all_targets": {
            "loss_short": bootstrap.ratio("short", "one").as_dict(),
            "loss_long": bootstrap.ratio("long", "one").as_dict(),
            "gap_short_minus_long": bootstrap.ratio("gain", "one").as_dict(),
        },
        "selectors": {
            selector: {str(k): _of_selector(bootstrap, selector, k) for k in manifest.ks}
            for selector in manifest.selectors
        },
        "gain_bins": {
            "k": k_of_bins,
            "bins": [
                _of_bin(bootstrap, columns, records, number, edges) for number, edges in enumerate(bins)
            ],
        },
        "settings": _settings(records, documents_over, resamples, seed),
    }


def gain_bins(tau_nats: float) -> list[tuple[float, float]]:
    """Bins of L_short - L_long in nats, from tau upwards: above the lower edge, up to and with the upper."""
    edges = [tau_nats, *(edge for edge in GAIN_EDGES_NATS if edge > tau_nats), float("inf")]
    return list(pairwise(edges))


def write_summary(summary: Json, path: str | Path) -> None:
    """Write the summary as JSON, atomically."""
    write_json(path, summary)


def render_table(summary: Json) -> Group:
    """The summary as a table for a terminal of 80 columns; recoveries in per cent."""
    settings = summary["settings"]
    over = summary["share_over_tau"]
    head = Text.assemble(
        (f"{summary['targets']:,} targets", "bold"),
        f" of {summary['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}\n",
        (f"{summary['targets_over_tau']:,} over tau", "bold"),
        f" (L_short - L_long > {nats(settings['tau_nats'])}): {_percent(over, 1)} % of them; over these\n",
        f"L_short {_loss(summary['loss_short'])}   L_long {_loss(summary['loss_long'])} nats per token",
    )
    if not settings["complete"]:
        head.append(f"\nunfinished: {settings['targets_measured']:,} measured so far", "yellow")
    if settings["documents_over_tau"] < FEW_DOCUMENTS:
        head.append(
            f"\nonly {settings['documents_over_tau']} documents bear on this: rough intervals", "yellow"
        )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("selector", no_wrap=True)
    for name in ("k", "L_k [nats]", "recovery [%]", "placebo [%]", "net [%]"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for selector, per_k in summary["selectors"].items():
        for number, (k, values) in enumerate(per_k.items()):
            shares = [_percent(values[f"{kind}recovery"]) for kind in ("", "placebo_", "net_")]
            last = number == len(per_k) - 1
            table.add_row(
                selector if number == 0 else "", k, _loss(values["loss"]), *shares, end_section=last
            )
    note = f"[95 % interval]: {settings['resamples']:,} resamples of documents; net = recovery - placebo"
    return Group(head, Text(), table, Text(note, style="dim"))


class _NamedBootstrap:
    """A cluster bootstrap whose columns have names."""

    def __init__(self, columns: dict[Hashable, np.ndarray], documents: np.ndarray, resamples: int, seed: int):
        self.index = {name: number for number, name in enumerate(columns)}
        matrix = np.stack(list(columns.values()), axis=1)
        self.bootstrap = ClusterBootstrap(matrix, documents, resamples=resamples, seed=seed)

    def statistic(self, numerator: Hashable, denominator: Hashable) -> Statistic:
        return ratio_of_sums(self.index[numerator], self.index[denominator])

    def ratio(self, numerator: Hashable, denominator: Hashable) -> Interval:
        return self.bootstrap.interval(self.statistic(numerator, denominator))

    def recoveries(self, true: Hashable, placebo: Hashable, gain: Hashable) -> Json:
        """Recovery, its placebo and their paired difference."""
        of_true, of_placebo = self.statistic(true, gain), self.statistic(placebo, gain)
        statistics = {
            "recovery": of_true,
            "placebo_recovery": of_placebo,
            "net_recovery": difference(of_true, of_placebo),
        }
        return {name: self.bootstrap.interval(each).as_dict() for name, each in statistics.items()}


def _columns(records: Records, bins: list[tuple[float, float]], k_of_bins: int) -> dict[Hashable, np.ndarray]:
    """What is summed over targets, each (n,); zero where a target does not belong to the sum."""
    targets, manifest, over = records.targets, records.manifest, records.over
    gain = -targets.gap_long_minus_short_nats
    short = targets.loss_short_nats[over]

    def spread(values: np.ndarray | float) -> np.ndarray:
        """Values of the targets over tau, (m,), as a column of all targets."""
        column = np.zeros(len(targets))
        column[over] = values
        return column

    columns: dict[Hashable, np.ndarray] = {
        "one": np.ones(len(targets)),
        "short": targets.loss_short_nats,
        "long": targets.loss_long_nats,
        "gain": gain,
        "over": (gain > manifest.tau_nats).astype(np.float64),
        "measured": spread(1.0),
        "short over tau": spread(short),
        "long over tau": spread(targets.loss_long_nats[over]),
        "gain over tau": spread(gain[over]),
    }
    in_bin = [(gain[over] > low) & (gain[over] <= high) for low, high in bins]
    for number, members in enumerate(in_bin):
        columns["members", number] = spread(members)
        columns["gain", number] = spread(gain[over] * members)
    for selector in manifest.selectors:
        for context in FAR_CONTEXTS:
            for column, k in enumerate(manifest.ks):
                loss = records.loss_nats[selector][context][:, column]
                columns["loss", selector, context, k] = spread(loss)
                columns["saved", selector, context, k] = spread(short - loss)
                if k == k_of_bins:
                    for number, members in enumerate(in_bin):
                        columns["saved", selector, context, "bin", number] = spread((short - loss) * members)
    return columns


def _of_selector(bootstrap: _NamedBootstrap, selector: str, k: int) -> Json:
    return {
        "loss": bootstrap.ratio(("loss", selector, "true", k), "measured").as_dict(),
        "placebo_loss": bootstrap.ratio(("loss", selector, "placebo", k), "measured").as_dict(),
        **bootstrap.recoveries(
            ("saved", selector, "true", k), ("saved", selector, "placebo", k), "gain over tau"
        ),
    }


def _of_bin(
    bootstrap: _NamedBootstrap,
    columns: dict[Hashable, np.ndarray],
    records: Records,
    number: int,
    edges: tuple[float, float],
) -> Json:
    members = columns["members", number] > 0
    return {
        "low": edges[0],
        "high": edges[1] if np.isfinite(edges[1]) else None,
        "targets": int(members.sum()),
        "documents": len(np.unique(records.targets.document[members])),
        "selectors": {
            selector: bootstrap.recoveries(
                ("saved", selector, "true", "bin", number),
                ("saved", selector, "placebo", "bin", number),
                ("gain", number),
            )
            for selector in records.manifest.selectors
        },
    }


def _refuse_without_targets(records: Records) -> None:
    gain = -records.targets.gap_long_minus_short_nats
    tau = records.manifest.tau_nats
    if len(gain) == 0:
        raise UserError(
            f"{records.folder} has no targets; measure again with a shorter --n-long or longer documents"
        )
    if len(records.over) == 0:
        raise UserError(
            f"no target above tau: 0 % of the {len(gain):,} targets of {records.folder} gain more than "
            f"{nats(tau)} from the long context (the largest gain is {gain.max():.3g}); "
            "measure with a lower --tau, with more --targets, or with a model trained for longer"
        )
    if gain[records.over].sum() <= 0:
        raise UserError(
            f"recovery is undefined: with tau {tau:g} the gains sum to nothing; measure with tau >= 0"
        )


def _choose_k(ks: list[int], wanted: int | None) -> int:
    if wanted is None:
        return min(ks, key=lambda k: abs(k - DEFAULT_K))
    if wanted not in ks:
        raise UserError(f"k = {wanted} was not measured; choose one of {', '.join(map(str, ks))}")
    return wanted


def _settings(records: Records, documents_over: int, resamples: int, seed: int) -> Json:
    manifest = records.manifest
    return {
        **{name: value for name, value in asdict(manifest).items() if name != "version"},
        "complete": len(records.over) == len(records.targets.over(manifest.tau_nats)),
        "targets_measured": len(records.over),
        "documents_over_tau": documents_over,
        "resamples": resamples,
        "bootstrap_seed": seed,
        "interval": "95 % percentile, cluster bootstrap by document",
    }


def nats(value: float) -> str:
    """``1 nat``, ``0.5 nats``."""
    return f"{value:g} nat" if value == 1 else f"{value:g} nats"


def _loss(interval: Json) -> str:
    return _format(interval, 1.0, 2)


def _percent(interval: Json, digits: int = 0) -> str:
    return _format(interval, 100.0, digits)


def _format(interval: Json, scale: float, digits: int) -> str:
    """``value [low, high]``, a dash for what does not exist."""
    texts = [
        "–" if interval[name] is None else f"{interval[name] * scale:.{digits}f}"
        for name in ("value", "low", "high")
    ]
    return "{} [{}, {}]".format(*("0" if text == "-0" else text for text in texts))
