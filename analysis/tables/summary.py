"""The summary of influence records."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.records.schema import FAR_CONTEXTS, UNTRAINED
from analysis.stats.bootstrap import by_clusters, few_clusters
from analysis.stats.dependencies import FAR
from analysis.stats.faithfulness import AOPC
from analysis.stats.placebos import LARGEST
from analysis.stats.recovery import RECOVERIES, and_blocks, default_selector, nats
from analysis.tables.cells import interval_cell, name_lines, percent_text, plain_table
from olmo_sparsity.util.result_files import Json


def render_summary(summary: Json) -> Group:
    """The summary as tables for a terminal of 80 columns; recoveries and shares in per cent."""
    note = (
        f"[95 % interval] {by_clusters(summary)}"
        f"{'' if 'groups' in summary else ' (no groups are known)'}"
        f"{'' if 'trainings' in summary else ' of one training (what another would change is not in it)'}; "
        "net = recovery - placebo, where that is positive"
    )
    tables = [
        part
        for heading, table in (
            *_training_tables(summary),
            _kinds_table(summary),
            _needed_table(summary),
            *_pick_tables(summary),
            *_faithfulness_tables(summary),
            *_placebo_tables(summary),
        )
        for part in (Text(), Text(heading), table)
    ]
    return Group(_head(summary), Text(), _selectors_table(summary), *tables, Text(note, style="dim"))


def _head(summary: Json) -> Text:
    settings = summary["settings"]
    over, tail = summary["share_over_tau"], summary["thresholding"]
    head = Text.assemble(
        (f"{summary['targets']:,} targets", "bold"),
        f" of {summary['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}",
        f"{and_blocks(settings)}\n",
        (f"{summary['targets_over_tau']:,} over tau", "bold"),
        f" (L_short - L_long > {nats(settings['tau_nats'])}): {percent_text(over, 1)} %, and\n",
        f"below -tau (the mirror tail): {percent_text(tail['share_under_minus_tau'], 1)} %; those over tau hold "
        f"{percent_text(tail['share_of_net_gain'])} % of the net gain of all;\nover these ",
        f"L_short {interval_cell(summary['loss_short'])}   L_long {interval_cell(summary['loss_long'])} nats per token",
    )
    if trainings := summary.get("trainings"):
        head.append(
            f"\n{len(trainings)} trainings together, each on the same {trainings[0]['targets']:,} targets"
        )
    if copies := summary.get("near_copies"):
        selector, k = default_selector(copies["selectors_without"]), copies["k"]
        net = percent_text(copies["selectors_without"][selector]["net_recovery"])
        head.append(
            f"\nnear copies of training text: {percent_text(copies['share'], 1)} % of targets, "
            f"{percent_text(copies['share_over_tau'], 1)} % of those over tau;\nwithout them {selector}'s net recovery "
            f"at k = {k} is {net} %"
        )
    if settings.get("options", {}).get(UNTRAINED):
        head.append("\nsanity check: untrained weights chose tokens for the targets of the trained model")
    elif settings["crossfit"]:
        head.append("\ncross-fitted: one model chose targets and tokens, another's losses are shown")
    if kept := tail["persistence"]:
        head.append(
            f"\nchosen for a gain of {interval_cell(kept['selecting_gain_nats'])} nats, they gain "
            f"{interval_cell(kept['gain_nats'])} here; {percent_text(kept['share_still_over_tau'])} % over tau, too"
        )
    if not settings["complete"]:
        head.append(f"\nunfinished: {settings['targets_measured']:,} measured so far", "yellow")
    if few := few_clusters(settings, "_over_tau"):
        head.append(f"\nonly {few} with targets over tau: rough intervals", "yellow")
    return head


def _selectors_table(summary: Json) -> Table:
    table = plain_table("selector", "k", "L_k [nats]", "recovery [%]", "placebo [%]", "net [%]")
    for selector, per_k in summary["selectors"].items():
        names = name_lines(selector, len(per_k))
        for name, (k, values) in zip(names, per_k.items(), strict=True):
            shares = (percent_text(values[recovery]) for recovery in RECOVERIES)
            table.add_row(name, k, interval_cell(values["loss"]), *shares)
    return table


def _training_tables(summary: Json) -> Iterator[tuple[str, Table]]:
    """The main numbers of each training, where there are several."""
    selector, k = default_selector(summary["selectors"]), str(summary["gain_bins"]["k"])
    table = plain_table("seed", "over tau [%]", "recovery [%]", "placebo [%]", "net [%]")
    for each in summary.get("trainings", ()):
        found = each["selectors"][selector][k]
        table.add_row(
            str(each["training_seed"]),
            percent_text(each["share_over_tau"], 1),
            *(percent_text(found[recovery]) for recovery in RECOVERIES),
        )
    if table.row_count:
        yield f"each training by itself ({selector}, k = {k})", table


def _kinds_table(summary: Json) -> tuple[str, Table]:
    selector = default_selector(summary["selectors"])
    table = plain_table("kind", "over tau", "share [%]", "mean gain [nats]", "net [%]")
    for each in summary["kinds"]["kinds"]:
        table.add_row(
            each["kind"],
            f"{each['targets_over_tau']:,} of {each['targets']:,}",
            percent_text(each["share_over_tau"]),
            interval_cell(each["gap_short_minus_long"]),
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


def _pick_tables(summary: Json) -> Iterator[tuple[str, Table]]:
    """Where the chosen tokens stand and of which kind they are, true beside placebo: what both have is a taste of the
    selector."""
    distances, picks = summary["distances"], summary["picks"]
    selector, k, edges = default_selector(distances["selectors"]), distances["k"], distances["edges"]
    table = plain_table("distance", "true [%]", "placebo [%]", "all far tokens [%]")
    for number, (low, high) in enumerate(pairwise(edges)):
        chosen = (distances["selectors"][selector][context][number] for context in FAR_CONTEXTS)
        uniform = 100 * (high - low) / (edges[-1] - edges[0])
        table.add_row(f"{low:,}–{high - 1:,}", *map(percent_text, chosen), f"{uniform:.0f}")
    yield f"how far back the first {k} tokens of {selector} stand", table
    if picks is None:
        return
    table = plain_table("kind", "true [%]", "placebo [%]", "all far [%]", "all placebo [%]")
    for kind in picks["kinds"]:
        shares = (
            picks["shares"][name][context][kind] for name in (selector, FAR) for context in FAR_CONTEXTS
        )
        table.add_row(kind, *map(percent_text, shares))
    yield f"what kind of tokens the first {k} of {selector} are", table


def _faithfulness_tables(summary: Json) -> Iterator[tuple[str, Table]]:
    found, k = summary["faithfulness"], summary["gain_bins"]["k"]
    selectors, subsets = found["selectors"], found["subsets"]
    yield (
        "sufficiency S and comprehensiveness C, means over k (AOPC)",
        _by_far_context(
            selectors,
            {"S [nats]": ("sufficiency_nats", AOPC), "C [nats]": ("comprehensiveness_nats", AOPC)},
        ),
    )
    if subsets:
        heading = f"summed influence against the loss, on {subsets['number']} random subsets"
        yield heading, _by_far_context(selectors, {"LDS": ("lds", None), "R²": ("r2", None)})
    others = {name: each for name, each in selectors.items() if each["overlap"]}
    if others:
        chance = found["overlap_by_chance"][str(k)]
        yield (
            f"against leave-one-out: the first {k} in common ({chance:.2f} by chance); rank correlation",
            _by_far_context(others, {"overlap": ("overlap", str(k)), "Spearman": ("spearman", None)}),
        )
    if summary["contexts"]["gap_cost_nats"] or summary["contexts"]["enough"]:
        yield "what needs no selector, of all targets", _contexts_table(summary["contexts"])


def _placebo_tables(summary: Json) -> Iterator[tuple[str, Table]]:
    """Recovery in every far context at one k, and the parts of it at every k, where they were measured."""
    found, k = summary.get("placebos"), str(summary["gain_bins"]["k"])
    if not found:
        return
    table = plain_table("selector", *found["far_contexts"])
    for selector, by_context in found["recovery"].items():
        names = name_lines(selector, 1 + selector.count("@"))
        table.add_row("\n".join(names), *(percent_text(each[k]) for each in by_context.values()))
    yield (
        f"recovery at k = {k} [%] of the {found['targets']:,} targets that have every far context",
        table,
    )
    if not found["parts"]:
        return
    table = plain_table("signed / blind", "k", "luck [%]", "common [%]", "specific [%]")
    for pair in found["parts"]:
        name = f"{pair['signed']}\n{pair['blind']}"
        for each_k, parts in pair["ks"].items():
            shown = (parts["luck"], parts["common_context"][LARGEST], parts["specific"])
            table.add_row(name, each_k, *map(percent_text, shown))
            name = ""
    yield "parts of a recovery (common: the largest placebo of the blind selector)", table


def _by_far_context(selectors: Json, measures: dict[str, tuple[str, str | None]]) -> Table:
    """Two rows for each selector, true and placebo, of measures given by their name, and the key of one of several; a
    dash for what was not measured."""
    table = plain_table("selector", "far context", *measures)
    for selector, each in selectors.items():
        names = name_lines(selector, 2)
        for first, context in zip(names, FAR_CONTEXTS, strict=True):
            cells = []
            for name, key in measures.values():
                value = each[name] and each[name][context]
                value = value[key] if value and key else value
                cells.append(interval_cell(value) if value else "–")
            table.add_row(first, context, *cells)
    return table


def _contexts_table(contexts: Json) -> Table:
    table = plain_table("measure", "value")
    if cost := contexts["gap_cost_nats"]:
        table.add_row(
            "L_short at its ids minus at ids from 0, nats", interval_cell(cost["all_targets"], digits=3)
        )
    if enough := contexts["enough"]:
        for length, share in enough["shares"].items():
            name = f"last {length} tokens within {enough['within_nats']:g} nats of L_long, %"
            table.add_row(name, percent_text(share, 1))
    return table
