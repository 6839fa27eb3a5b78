"""From records to the numbers of Figure 2: L_k, recovery, placebo recovery and net recovery, with intervals.

    recovery(k)         = Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20 as METHOD 2.2 reads it)
    placebo recovery(k) = the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net recovery(k)     = recovery(k) - placebo recovery(k)                                          [ours]

The sums run over the targets with L_short - L_long > tau; under cross-fitting the selecting model decides which
these are, and every loss is the evaluating model's. Losses are means in nats per token; recoveries are fractions of
the gain. Every interval is a 95 % cluster bootstrap by document, and all share their resamples.
Shapes: n sampled targets, m of them over tau.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.records.store import Records
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, difference
from analysis.stats.dependencies import (
    distance_columns,
    distance_numbers,
    kind_columns,
    kind_numbers,
    needed_columns,
    needed_numbers,
)
from analysis.stats.sums import (
    ALL,
    Columns,
    Json,
    MeasuredTargets,
    SumsBootstrap,
    default_selector,
    nats,
    over_tau_column,
    refuse_without_gain,
)
from analysis.stats.tables import interval_cell
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
DEFAULT_K = 4
"""The k of everything that is shown at one k only, where it was measured."""
FEW_DOCUMENTS = 30
"""Below this many documents with a target over tau, percentile intervals are known to be too narrow."""


def summarize(
    records: Records, resamples: int = DEFAULT_RESAMPLES, seed: int = 0, *, k_of_bins: int | None = None
) -> Json:
    """All numbers of the figures as one JSON value.

    Args:
        records: of one checkpoint on one corpus, or of two that are cross-fitted.
        resamples: bootstrap resamples, at least 1,000 for what is shown; also patterns of the permutation test.
        seed: of both.
        k_of_bins: the k of ``gain_bins``, ``comparisons``, ``kinds`` and ``distances``; by default 4, or the
            closest k that was measured.

    Raises `UserError` if no target is over tau, the gains over tau sum to nothing, or ``k_of_bins`` was not measured.
    """
    targets, manifest = records.targets, records.manifest
    refuse_without_gain(records)
    k = _choose_k(manifest.ks, k_of_bins)
    measured = MeasuredTargets(records)
    bins = gain_bins(manifest.tau_nats)
    in_bins = _members_of_bins(records, bins)
    columns = _columns(records, measured, in_bins, k)
    bootstrap = SumsBootstrap(columns, targets.document, resamples, seed)
    return {
        "targets": len(targets),
        "targets_over_tau": len(targets.over(manifest.tau_nats)),
        "documents": len(np.unique(targets.document)),
        "share_over_tau": bootstrap.ratio("over", "one"),
        "loss_short": bootstrap.ratio("short over tau", ("targets", ALL)),
        "loss_long": bootstrap.ratio("long over tau", ("targets", ALL)),
        "all_targets": {
            "loss_short": bootstrap.ratio("short", "one"),
            "loss_long": bootstrap.ratio("long", "one"),
            "gap_short_minus_long": bootstrap.ratio("gain", "one"),
        },
        "selectors": _per_selector(bootstrap, measured, resamples, seed),
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
        "tokens_needed": needed_numbers(bootstrap, measured),
        "settings": _settings(records, resamples, seed),
    }


def gain_bins(tau_nats: float) -> list[tuple[float, float]]:
    """Bins of L_short - L_long in nats, from tau upwards: above the lower edge, up to and with the upper."""
    edges = [tau_nats, *(edge for edge in GAIN_EDGES_NATS if edge > tau_nats), float("inf")]
    return list(pairwise(edges))


def write_summary(summary: Json, path: str | Path) -> None:
    """Write the summary as JSON, atomically."""
    write_json(path, summary)


def _columns(records: Records, measured: MeasuredTargets, in_bins: list[np.ndarray], k: int) -> Columns:
    """What is summed over targets, each (n,); zero where a target does not belong to the sum."""
    targets = records.targets
    columns: Columns = {
        "one": np.ones(len(targets)),
        "short": targets.loss_short_nats,
        "long": targets.loss_long_nats,
        "gain": targets.gain_nats,
        "over": over_tau_column(records),
        "short over tau": measured.column(measured.short_nats),
        "long over tau": measured.column(measured.long_nats),
        **measured.of_group(ALL, measured.ks),
    }
    for number, members in enumerate(in_bins):
        columns |= measured.of_group(("bin", number), [k], members)
    return (
        columns
        | kind_columns(records, measured, k)
        | distance_columns(records, measured, k)
        | needed_columns(measured)
    )


def _members_of_bins(records: Records, bins: list[tuple[float, float]]) -> list[np.ndarray]:
    """Which targets over tau belong to each bin, (m,) each.

    The selecting model's gain decides, as it does for tau. A bin of the evaluating model's gain would hold targets
    for being lucky with that model, which is what cross-fitting is to avoid.
    """
    gain = records.targets.selecting_gain_nats[records.over]
    return [(gain > low) & (gain <= high) for low, high in bins]


def _per_selector(bootstrap: SumsBootstrap, measured: MeasuredTargets, resamples: int, seed: int) -> Json:
    p_values = measured.permutation_p(resamples, seed)
    return {
        selector: {
            str(k): {
                **_mean_losses(bootstrap, selector, k),
                **bootstrap.recoveries(selector, k),
                "permutation_p": p_values[selector][k],
            }
            for k in measured.ks
        }
        for selector in measured.loss_nats
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


def _choose_k(ks: list[int], wanted: int | None) -> int:
    if wanted is None:
        return min(ks, key=lambda k: abs(k - DEFAULT_K))
    if wanted not in ks:
        raise UserError(f"k = {wanted} was not measured; choose one of {', '.join(map(str, ks))}")
    return wanted


def _settings(records: Records, resamples: int, seed: int) -> Json:
    manifest = records.manifest
    return {
        **{name: value for name, value in asdict(manifest).items() if name != "version"},
        "crossfit": manifest.crossfit,
        "complete": len(records.over) == len(records.targets.over(manifest.tau_nats)),
        "targets_measured": len(records.over),
        "documents_over_tau": len(np.unique(records.targets.document[records.over])),
        "resamples": resamples,
        "bootstrap_seed": seed,
        "interval": "95 % percentile, cluster bootstrap by document",
        "permutation_test": "true against placebo, signs flipped by document, two-sided",
    }


def render_table(summary: Json) -> Group:
    """The summary as tables for a terminal of 80 columns; recoveries and shares in per cent."""
    note = (
        f"[95 % interval]: {summary['settings']['resamples']:,} resamples of documents; "
        "net = recovery - placebo"
    )
    tables = [
        part
        for heading, table in (
            _p_table(summary),
            _kinds_table(summary),
            _needed_table(summary),
        )
        for part in (Text(), Text(heading), table)
    ]
    return Group(_head(summary), Text(), _selectors_table(summary), *tables, Text(note, style="dim"))


def _head(summary: Json) -> Text:
    settings = summary["settings"]
    over = summary["share_over_tau"]
    head = Text.assemble(
        (f"{summary['targets']:,} targets", "bold"),
        f" of {summary['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}\n",
        (f"{summary['targets_over_tau']:,} over tau", "bold"),
        f" (L_short - L_long > {nats(settings['tau_nats'])}): {percent_text(over, 1)} %; over these\n",
        f"L_short {loss_text(summary['loss_short'])}   L_long {loss_text(summary['loss_long'])} nats per token",
    )
    if settings["crossfit"]:
        head.append("\ncross-fitted: one model chose targets and tokens, another's losses are shown")
    if not settings["complete"]:
        head.append(f"\nunfinished: {settings['targets_measured']:,} measured so far", "yellow")
    if settings["documents_over_tau"] < FEW_DOCUMENTS:
        head.append(
            f"\nonly {settings['documents_over_tau']} documents bear on this: rough intervals", "yellow"
        )
    return head


def _selectors_table(summary: Json) -> Table:
    table = plain_table("selector", "k", "L_k [nats]", "recovery [%]", "placebo [%]", "net [%]")
    for selector, per_k in summary["selectors"].items():
        names = name_lines(selector, len(per_k))
        for number, (k, values) in enumerate(per_k.items()):
            shares = [percent_text(values[f"{kind}recovery"]) for kind in ("", "placebo_", "net_")]
            last = number == len(per_k) - 1
            table.add_row(names[number], k, loss_text(values["loss"]), *shares, end_section=last)
    return table


def _p_table(summary: Json) -> tuple[str, Table]:
    ks = [str(k) for k in summary["settings"]["ks"]]
    table = plain_table("selector", *(f"k = {k}" for k in ks))
    for selector, per_k in summary["selectors"].items():
        table.add_row(selector, *(f"{per_k[k]['permutation_p']:.4f}" for k in ks))
    return "p-value of true against placebo (permutation by document)", table


def _kinds_table(summary: Json) -> tuple[str, Table]:
    selector = default_selector(summary["selectors"])
    table = plain_table("kind", "over tau", "share [%]", "mean gain [nats]", "net [%]")
    for each in summary["kinds"]["kinds"]:
        table.add_row(
            each["kind"],
            f"{each['targets_over_tau']:,} of {each['targets']:,}",
            percent_text(each["share_over_tau"]),
            loss_text(each["gap_short_minus_long"]),
            percent_text(each["selectors"][selector]["net_recovery"]),
        )
    k = summary["kinds"]["k"]
    return f"kinds (share: of those over tau; mean gain: of all; net: {selector}, k = {k})", table


def _needed_table(summary: Json) -> tuple[str, Table]:
    needed = summary["tokens_needed"]
    selector = default_selector(needed["selectors"])
    found = needed["selectors"][selector]
    table = plain_table("far tokens", "true [%]", "placebo [%]")
    for k, true, placebo in zip(needed["ks"], found["true"], found["placebo"], strict=True):
        table.add_row(f"up to {k}", percent_text(true), percent_text(placebo))
    table.add_row(f"more than {needed['ks'][-1]}", percent_text(found["censored"]), "")
    share = f"{100 * needed['share']:.0f} %"
    return f"targets that have {share} of their gain from k far tokens of {selector}", table


def plain_table(first: str, *further: str) -> Table:
    """A table without lines: text in the first column, numbers at the right of the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(Text(first), no_wrap=True)
    for name in further:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def name_lines(selector: str, rows: int) -> list[str]:
    """First cells of ``rows`` rows: a screened form's proposer goes below its exact selector, to save width."""
    parts = selector.replace("@", "\n@").split("\n", rows - 1)
    return parts + [""] * (rows - len(parts))


def loss_text(interval: Json) -> str:
    """``value [low, high]`` in nats."""
    return interval_cell(interval)


def percent_text(interval: Json, digits: int = 0) -> str:
    """``value [low, high]`` in per cent, without the sign."""
    return interval_cell(interval, scale=100.0, digits=digits)
