"""What measurements print: tables of numbers with their 95 % intervals, from results as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from analysis.records.results import SIDES
from analysis.records.schema import FAR_CONTEXTS, UNTRAINED
from analysis.stats.bootstrap import by_clusters, few_clusters
from analysis.stats.dependencies import FAR
from analysis.stats.exact_match import Group as ExactMatchGroup
from analysis.stats.exact_match import curve_names
from analysis.stats.faithfulness import AOPC
from analysis.stats.placebos import LARGEST
from analysis.stats.recovery import and_blocks, default_selector, nats
from olmo_sparsity.util.result_files import Json

_UNLIMITED = 10_000
_NAME_WIDTH = 16


def plain_table(first: str, *further: str) -> Table:
    """A table without lines: text in the first column, numbers at the right of the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(Text(first), no_wrap=True)
    for name in further:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def interval_cell(interval: dict[str, Any], *, scale: float = 1.0, digits: int = 2) -> str:
    """``value [low, high]`` of an `Interval.as_dict`, times ``scale``; a dash for what does not exist."""
    texts = [
        "–" if interval[name] is None else f"{interval[name] * scale:,.{digits}f}"
        for name in ("value", "low", "high")
    ]
    zero = f"{0:.{digits}f}"
    return "{} [{}, {}]".format(*(zero if text == f"-{zero}" else text for text in texts))


def percent_text(interval: Json, digits: int = 0) -> str:
    """``value [low, high]`` in per cent, without the sign."""
    return interval_cell(interval, scale=100.0, digits=digits)


def name_lines(selector: str, rows: int) -> list[str]:
    """First cells of ``rows`` rows: a screened form's proposer, and the end of a long name, go below, to save width."""
    lines = [line for part in selector.replace("@", "\n@").split("\n") for line in wrap(part, _NAME_WIDTH)]
    lines[rows - 1 :] = ["\n".join(lines[rows - 1 :])]
    return lines + [""] * (rows - len(lines))


def print_whole(console: Console, table: Table) -> None:
    """Print a table; outside a terminal, as in a log, as wide as its cells, so that none is broken."""
    if console.is_terminal:
        console.print(table)
        return
    unlimited = Console(width=_UNLIMITED)
    width = Measurement.get(unlimited, unlimited.options, table).maximum
    Console(width=max(width, console.width), highlight=False).print(table)


def print_result(parts: Iterable[RenderableType], paths: Iterable[Path]) -> None:
    """Print what was found, and which files were written. Titles and captions of tables are whole lines."""
    console = Console(highlight=False, soft_wrap=True)
    for part in parts:
        if isinstance(part, Table):
            title, caption, part.title, part.caption = part.title, part.caption, None, None
            if title is not None:
                console.print(title, style="italic")
            print_whole(console, part)
            if caption is not None:
                console.print(caption, style="dim")
        else:
            console.print(part)
        console.print()
    if written := ", ".join(map(str, paths)):
        console.print(f"wrote {written}", markup=False)


def render_table(summary: Json) -> Group:
    """The summary as tables for a terminal of 80 columns; recoveries and shares in per cent."""
    note = (
        f"[95 % interval]: {summary['settings']['resamples']:,} resamples {by_clusters(summary)}"
        f"{'' if 'groups' in summary else ' (no groups are known)'}"
        f"{'' if 'trainings' in summary else ' of one training (what another would change is not in it)'}; "
        "net = recovery - placebo, where that is positive"
    )
    tables = [
        part
        for heading, table in (
            *_training_tables(summary),
            _p_table(summary),
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
    over = summary["share_over_tau"]
    head = Text.assemble(
        (f"{summary['targets']:,} targets", "bold"),
        f" of {summary['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}",
        f"{and_blocks(settings)}\n",
        (f"{summary['targets_over_tau']:,} over tau", "bold"),
        f" (L_short - L_long > {nats(settings['tau_nats'])}): {percent_text(over, 1)} %; over these\n",
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
    if not settings["complete"]:
        head.append(f"\nunfinished: {settings['targets_measured']:,} measured so far", "yellow")
    if few := few_clusters(settings, "_over_tau"):
        head.append(f"\nonly {few} with targets over tau: rough intervals", "yellow")
    return head


def _selectors_table(summary: Json) -> Table:
    table = plain_table("selector", "k", "L_k [nats]", "recovery [%]", "placebo [%]", "net [%]")
    for selector, per_k in summary["selectors"].items():
        names = name_lines(selector, len(per_k))
        for number, (k, values) in enumerate(per_k.items()):
            shares = [percent_text(values[f"{kind}recovery"]) for kind in ("", "placebo_", "net_")]
            last = number == len(per_k) - 1
            table.add_row(names[number], k, interval_cell(values["loss"]), *shares, end_section=last)
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
            *(percent_text(found[f"{kind}recovery"]) for kind in ("", "placebo_", "net_")),
        )
    if table.row_count:
        yield f"each training by itself ({selector}, k = {k})", table


def _p_table(summary: Json) -> tuple[str, Table]:
    ks = [str(k) for k in summary["settings"]["ks"]]
    table = plain_table("selector", *(f"k = {k}" for k in ks))
    for selector, per_k in summary["selectors"].items():
        table.add_row(selector, *(f"{per_k[k]['permutation_p']:.4f}" for k in ks))
    return (
        f"p-value of true against placebo (permutation by {'group' if 'groups' in summary else 'document'})",
        table,
    )


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
        for number, context in enumerate(FAR_CONTEXTS):
            cells = []
            for name, key in measures.values():
                value = each[name] and each[name][context]
                value = value[key] if value and key else value
                cells.append(interval_cell(value) if value else "–")
            table.add_row(names[number], context, *cells, end_section=bool(number))
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


def render_comparison(comparison: Json) -> Group:
    """The comparison as tables for a terminal of 80 columns; recoveries and shares in per cent."""
    settings = comparison["settings"]
    head = Text.assemble(
        (f"{comparison['targets']:,} targets", "bold"),
        f" of {comparison['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}; "
        f"tau {nats(settings['tau_nats'])}",
    )
    for letter, side in zip("AB", SIDES, strict=True):
        head.append(f"\n{letter}: {comparison[side]['records']}")
        if not comparison[side]["complete"]:
            head.append(" (unfinished)", "yellow")
    overall = plain_table("", "A", "B", "A - B")
    for name, key, text in (
        ("share over tau [%]", "share_over_tau", lambda interval: percent_text(interval, 1)),
        ("mean gain [nats]", "gap_short_minus_long", interval_cell),
    ):
        overall.add_row(Text(name), *(text(comparison[key][side]) for side in (*SIDES, "difference")))
    note = Text(
        f"[95 % interval]: {settings['resamples']:,} resamples {by_clusters(comparison)}, the same for A and B; "
        f"in common: A - B over the {comparison['targets_over_tau_in_both']:,} targets that are over tau under both",
        style="dim",
    )
    tables = [
        _recovery_table(comparison, name, title)
        for name, title in (
            ("recovery", "recovery [%]"),
            ("placebo_recovery", "placebo [%]"),
            ("net_recovery", "net recovery [%]"),
        )
    ]
    tables += _agreement_tables(comparison)
    return Group(head, Text(), overall, Text(), *(part for table in tables for part in (table, Text())), note)


def _recovery_table(comparison: Json, name: str, title: str) -> Table:
    """A recovery of both and their difference, over each one's targets and over those in common."""
    table = plain_table(title, "k", "A", "B", "A - B", "in common")
    for selector, per_k in comparison["selectors"].items():
        names = name_lines(selector, len(per_k))
        for number, (k, values) in enumerate(per_k.items()):
            common = comparison["selectors_on_common_targets"][selector][k][name]
            table.add_row(
                names[number],
                k,
                *(percent_text(values[name][side]) for side in (*SIDES, "difference")),
                percent_text(common["difference"]),
                end_section=number == len(per_k) - 1,
            )
    return table


def _agreement_tables(comparison: Json) -> Iterator[Table]:
    """Tokens that both chose, and how alike their losses on random subsets are."""
    table = plain_table("same tokens chosen [%]", "k", "true", "placebo", "chance")
    for selector, per_k in comparison["overlap"].items():
        names = name_lines(selector, len(per_k))
        for number, (k, values) in enumerate(per_k.items()):
            shares = (percent_text(values[context]) for context in FAR_CONTEXTS)
            last = number == len(per_k) - 1
            table.add_row(names[number], k, *shares, f"{100 * values['chance']:.1f}", end_section=last)
    yield table
    if ceiling := comparison["lds_ceiling"]:
        table = plain_table("", "true", "placebo")
        cells = (interval_cell(ceiling[context]) for context in FAR_CONTEXTS)
        table.add_row("ceiling of LDS (losses of A and B)", *cells)
        yield table


def render_length(length_json: Json) -> list[Table]:
    """The loss at each length, a row per model, and mean loss per bin, a column per model; for a terminal."""
    models, interval = length_json["models"], _interval_note(length_json["settings"])
    told = "attention" in models[0]["at_lengths"][0]
    attention = [_table_of_attention(models, interval)] if told else []
    return [_table_of_lengths(models, interval), *attention, _table_of_bins(models, interval)]


def _interval_note(settings: Json) -> str:
    """What brackets hold, and where groups are known, that the interval goes by them."""
    return "95 % interval" + (f" {by_clusters(settings)}" if "groups" in settings else "")


def _table_of_lengths(models: Sequence[Json], interval: str) -> Table:
    table = _table(
        "held-out loss at each length [nats per token]",
        f"[{interval}]; the loss at L is that of the half octave below L; second line: difference to the first "
        "length, paired",
    )
    table.add_column("", no_wrap=True)
    table.add_column("seeds", justify="right")
    for one in models[0]["at_lengths"]:
        table.add_column(f"{one['length']:,}", justify="right")
    for each in models:
        first, *others = each["at_lengths"]
        cells = [interval_cell(first["loss_nats"])]
        cells += [f"{interval_cell(one['loss_nats'])}\n{interval_cell(one['rise_nats'])}" for one in others]
        table.add_row(Text(each["label"]), str(len(each["checkpoints"])), *cells)
    return table


def _table_of_attention(models: Sequence[Json], interval: str) -> Table:
    table = _table(
        "entropy of the attention [nats]",
        f"[{interval}]; of the last tokens of each length; second line: weights that are exactly 0 [%]",
    )
    table.add_column("", no_wrap=True)
    for one in models[0]["at_lengths"]:
        table.add_column(f"{one['length']:,}", justify="right")
    for each in models:
        found = [one["attention"] for one in each["at_lengths"]]
        cells = [
            f"{interval_cell(one['entropy_nats'])}\n{percent_text(one['zero_share'], 1)}" for one in found
        ]
        table.add_row(Text(each["label"]), *cells)
    return table


def _table_of_bins(models: Sequence[Json], interval: str) -> Table:
    table = _table(
        "held-out loss by position [nats per token]",
        f"[{interval}]" + ("; second line: difference to the first model, paired" if len(models) > 1 else ""),
    )
    table.add_column("position", no_wrap=True)
    table.add_column("tokens", justify="right")
    for each in models:
        table.add_column(Text(each["label"]), justify="right")
    for bins in zip(*(each["bins"] for each in models), strict=True):
        cells = [interval_cell(bins[0]["loss_nats"])]
        for each in bins[1:]:
            change = interval_cell(each["difference_to_first_nats"])
            cells.append(f"{interval_cell(each['loss_nats'])}\n{change}")
        table.add_row(f"{bins[0]['from']:,}–{bins[0]['to'] - 1:,}", f"{bins[0]['tokens']:,}", *cells)
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title=Text(title),
        caption=Text(caption),
        title_justify="left",
        caption_justify="left",
    )


def render_needle(needle_json: Json) -> Iterator[Table]:
    """Exact match by length and depth, a table per model; and the recall of the needle, where it was measured."""
    lengths, interval = needle_json["settings"]["lengths"], _interval_note(needle_json["settings"])
    for model in needle_json["models"]:
        yield _table_of_cells(model, lengths, interval)
    for model in needle_json["models"]:
        for checkpoint in model["checkpoints"]:
            if checkpoint["recall"] is not None:
                yield _table_of_recall(model["label"], checkpoint)


def _table_of_cells(model: Json, lengths: list[int], interval: str) -> Table:
    table = plain_table("k", "depth", *(f"{length:,}" for length in lengths))
    table.title, table.title_justify = (
        Text(f"{model['label']}: exact match [%, {interval}] by context"),
        "left",
    )
    by_row: dict[tuple[int, Any], dict[int, str]] = {}
    for cell in model["cells"]:
        k, length = cell["value_tokens"], cell["length"]
        by_row.setdefault((k, cell["depth"]), {})[length] = percent_text(cell["exact"], 0)
        by_row.setdefault((k, "absent"), {})[length] = percent_text(cell["absent_exact"], 0)
    last = None
    for k, depth in sorted(by_row, key=lambda row: (row[0], row[1] == "absent", str(row[1]))):
        told = depth if isinstance(depth, str) else f"{depth:g}"
        cells = [Text(by_row[k, depth][length]) for length in lengths]
        table.add_row(str(k) if k != last else "", told, *cells)
        last = k
    return table


def _table_of_recall(label: str, checkpoint: Json) -> Table:
    recall = checkpoint["recall"]
    table = plain_table("selector", "context", *(f"k = {k}" for k in recall["ks"]))
    table.title = Text(f"{label}, seed {checkpoint['training_seed']}: recall of the needle's tokens")
    table.title_justify = "left"
    for name, by_k in recall["selectors"].items():
        for context, kind in (("true", "recall"), ("placebo", "placebo_recall")):
            values = [f"{each[kind]['value']:.2f}" for each in by_k.values()]
            table.add_row(name if context == "true" else "", context, *values)
    table.add_row("chance", "", *(f"{each:.2f}" for each in recall["chance"].values()))
    return table


def render_curves(groups: Sequence[ExactMatchGroup]) -> Table:
    """All curves as one table for a terminal, a section each; shares in per cent."""
    table = plain_table("curve", "length", "seeds", "samples", "exact [%]")
    for group, curve, name in curve_names(groups):
        cells = [group.settings.task, *name.split("; ")]
        cells += [""] * (len(curve.points) - len(cells))
        for number, point in enumerate(curve.points):
            last = number == len(curve.points) - 1
            # what has no row of its own is joined in the last one
            cell = "; ".join(each for each in cells[number:] if each) if last else cells[number]
            numbers = (f"{point.length:,}", str(point.seeds), f"{point.samples:,}")
            table.add_row(Text(cell), *numbers, percent_text(point.exact.as_dict(), 1), end_section=last)
    return table


def render_corpora(corpora_json: Json) -> Table:
    """A row for each corpus of `corpora.json`: use of the far context, sparsity and loss, per token and per byte."""
    k, share = corpora_json["settings"]["k"], corpora_json["corpora"][0]["tokens_needed"]["share"]
    length = corpora_json["corpora"][0]["loss_at_lengths"][0]["length"]
    names = ("recovery [%]", "placebo [%]", "net [%]", f"{k} suffice [%]")
    losses = ("gain", "gain / byte", f"loss at {length:,}", "/ byte")
    table = plain_table("corpus", "trainings", "bytes / token", "over tau", "over tau [%]", *names, *losses)
    table.caption = Text(
        f"targets over tau; recovery, placebo and net recovery at k = {k}; share of those for which {k} tokens give "
        f"{100 * share:g} % of the gain; mean gain of all targets and held-out loss in nats per token and per byte; "
        "[95 % interval]"
    )
    table.caption_justify = "left"
    for each in corpora_json["corpora"]:
        loss = each["loss_at_lengths"][0]
        shares = (each[name] for name in ("recovery", "placebo_recovery", "net_recovery", "k_suffices"))
        table.add_row(
            Text(each["label"]),
            str(each["trainings"]),
            f"{each['bytes_per_token']:.2f}",
            f"{each['targets_over_tau']:,}",
            Text(percent_text(each["share_over_tau"], 1)),
            *(Text(percent_text(one)) for one in shares),
            Text(interval_cell(each["gain_nats_per_token"], digits=3)),
            Text(interval_cell(each["gain_nats_per_byte"], digits=4)),
            Text(interval_cell(loss["loss_nats"])),
            Text(interval_cell(loss["loss_nats_per_byte"], digits=3)),
        )
    return table


def render_ladder(ladder_json: Json) -> Table:
    """A row for each point of `ladder.json`: sparsity, use of the far context and rise of the loss."""
    k, times = ladder_json["settings"]["k"], ladder_json["settings"]["times"]
    recoveries = ("recovery", "placebo_recovery", "net_recovery")
    names = ("recovery [%]", "placebo [%]", "net [%]", f"{k} suffice [%]", "rise [nats]")
    used = "n_beyond" in ladder_json["settings"]
    table = plain_table(
        "model", "seed", "parameters", "over tau [%]", *names, *(["use [nats]"] if used else [])
    )
    table.caption = Text(
        f"targets over tau; recovery, placebo and net recovery at k = {k}; share of those for which {k} tokens give "
        f"90 % of the gain; loss at {times} times the training window minus at the window; "
        + (f"mean gain of {ladder_json['settings']['n_beyond']:,} tokens over the window; " if used else "")
        + "[95 % interval]"
    )
    table.caption_justify = "left"
    for point in sorted(ladder_json["points"], key=lambda point: (point["crossfit"], point["parameters"])):
        table.add_row(
            Text(point["label"] + (", cross-fit" if point["crossfit"] else "")),
            str(point["training_seed"]),
            f"{point['parameters']:,}",
            Text(percent_text(point["share_over_tau"], 1)),
            *(Text(percent_text(point[name])) for name in recoveries),
            Text(percent_text(point["k_suffices"])),
            Text(interval_cell(point["rise_nats"])),
            *([Text(interval_cell(point["use_nats"], digits=3))] if used else []),
        )
    return table


def render_correlations(ladder_json: Json) -> Table:
    """A row for each correlation of `ladder.json` with the rise, and how far it moves without one of the models."""
    k = ladder_json["settings"]["k"]
    names = {
        "net_recovery": f"net recovery at k = {k}",
        "k_suffices": f"{k} tokens suffice",
        "share_over_tau": "share over tau",
        "use_nats": "use beyond the window",
    }
    table = plain_table("rank correlation with the rise", "models", "Spearman", "without one of them")
    for name, found in ladder_json["correlations"].items():
        without = [each for each in found["without"].values() if each is not None]
        reach = f"{min(without):.2f} to {max(without):.2f}" if without else "–"
        table.add_row(names[name], str(found["models"]), interval_cell(found), reach)
    return table
