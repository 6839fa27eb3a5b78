"""Several models, lengths or corpora side by side: everything but influence records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.stats.bootstrap import by_clusters, by_clusters_and_seeds
from analysis.stats.bound import BOUNDS, BoundTest
from analysis.stats.exact_match import Group as ExactMatchGroup
from analysis.stats.exact_match import curve_names
from analysis.stats.longppl import FORMS
from analysis.stats.recovery import RECOVERIES, and_prefix
from analysis.tables.cells import below, interval_cell, percent_text, plain_table
from olmo_sparsity.util.result_files import Json


def render_length(length_json: Json) -> list[Table]:
    """The loss at each length, a row per model, and mean loss per bin, a column per model; for a terminal."""
    models, interval = length_json["models"], f"95 % interval {by_clusters_and_seeds(length_json)}"
    told = "attention" in models[0]["at_lengths"][0]
    attention = [_table_of_attention(models, interval)] if told else []
    return [_table_of_lengths(models, interval), *attention, _table_of_bins(models, interval)]


def _table_of_lengths(models: Sequence[Json], interval: str) -> Table:
    table = plain_table("", "seeds", *(f"{one['length']:,}" for one in models[0]["at_lengths"]))
    table.title = Text("held-out loss at each length [nats per token]")
    table.caption = Text(
        f"[{interval}]; the loss at L is that of the half octave (or less) below L; second line: difference to the "
        "first length, paired; in parentheses: each seed"
    )
    for each in models:
        first, *others = each["at_lengths"]
        cells = [interval_cell(first["loss_nats"])]
        cells += [f"{interval_cell(one['loss_nats'])}\n{interval_cell(one['rise_nats'])}" for one in others]
        of_seeds = zip(*(seed["at_lengths"] for seed in each["checkpoints"]), strict=True)
        cells = [
            cell + below(one["loss_nats"]["value"] for one in seeds)
            for cell, seeds in zip(cells, of_seeds, strict=True)
        ]
        table.add_row(Text(each["label"]), str(len(each["checkpoints"])), *cells)
    return table


def _table_of_attention(models: Sequence[Json], interval: str) -> Table:
    table = plain_table("", *(f"{one['length']:,}" for one in models[0]["at_lengths"]))
    table.title = Text("entropy of the attention [nats]")
    table.caption = Text(
        f"[{interval}]; of the last tokens of each length; second line: weights that are exactly 0 [%]"
    )
    for each in models:
        found = [one["attention"] for one in each["at_lengths"]]
        cells = [
            f"{interval_cell(one['entropy_nats'])}\n{percent_text(one['zero_share'], 1)}" for one in found
        ]
        table.add_row(Text(each["label"]), *cells)
    return table


def _table_of_bins(models: Sequence[Json], interval: str) -> Table:
    table = plain_table("position", "tokens", *(each["label"] for each in models))
    table.title = Text("held-out loss by position [nats per token]")
    paired = "; second line: difference to the first model, paired" if len(models) > 1 else ""
    table.caption = Text(f"[{interval}]{paired}")
    for bins in zip(*(each["bins"] for each in models), strict=True):
        cells = [interval_cell(bins[0]["loss_nats"])]
        for each in bins[1:]:
            change = interval_cell(each["difference_to_first_nats"])
            cells.append(f"{interval_cell(each['loss_nats'])}\n{change}")
        table.add_row(f"{bins[0]['from']:,}–{bins[0]['to'] - 1:,}", f"{bins[0]['tokens']:,}", *cells)
    return table


def render_needle(needle_json: Json) -> Iterator[Table]:
    """Exact match by length and depth, a table per model; and the recall of the needle, where it was measured."""
    settings = needle_json["settings"]
    lengths, interval = settings["lengths"], f"95 % interval {by_clusters_and_seeds(needle_json)}"
    for model in needle_json["models"]:
        yield _table_of_cells(model, lengths, interval)
    for model in needle_json["models"]:
        for checkpoint in model["checkpoints"]:
            if checkpoint["recall"] is not None:
                yield _table_of_recall(model["label"], checkpoint)


def _table_of_cells(model: Json, lengths: list[int], interval: str) -> Table:
    table = plain_table("k", "depth", *(f"{length:,}" for length in lengths))
    table.title = Text(f"{model['label']}: exact match [%, {interval}] by context")
    by_row: dict[tuple[int, Any], dict[int, str]] = {}
    for cell in model["cells"]:
        k, length = cell["value_tokens"], cell["length"]
        by_row.setdefault((k, cell["depth"]), {})[length] = percent_text(cell["exact"], 0)
        by_row.setdefault((k, "absent"), {})[length] = percent_text(cell["absent_exact"], 0)
    last = None
    for k, depth in sorted(by_row, key=lambda row: (row[0], row[1] == "absent", str(row[1]))):
        told = depth if isinstance(depth, str) else f"{depth:g}"
        cells = [by_row[k, depth][length] for length in lengths]
        table.add_row(str(k) if k != last else "", told, *cells)
        last = k
    return table


def _table_of_recall(label: str, checkpoint: Json) -> Table:
    recall = checkpoint["recall"]
    table = plain_table("selector", "context", *(f"k = {k}" for k in recall["ks"]))
    table.title = Text(f"{label}, seed {checkpoint['training_seed']}: recall of the needle's tokens")
    for name, by_k in recall["selectors"].items():
        for context, kind in (("true", "recall"), ("placebo", "placebo_recall")):
            values = [f"{each[kind]['value']:.2f}" for each in by_k.values()]
            table.add_row(name if context == "true" else "", context, *values)
    table.add_row("chance", "", *(f"{each:.2f}" for each in recall["chance"].values()))
    return table


def render_curves(groups: Sequence[ExactMatchGroup]) -> Table:
    """All curves as one table for a terminal, a section each; shares in per cent, below them those of each seed."""
    table = plain_table("curve", "length", "seeds", "samples", "exact [%]")
    for group, curve, name in curve_names(groups):
        cells = [group.settings.task, *name.split("; ")]
        cells += [""] * (len(curve.points) - len(cells))
        for number, point in enumerate(curve.points):
            last = number == len(curve.points) - 1
            # what has no row of its own is joined in the last one
            cell = "; ".join(each for each in cells[number:] if each) if last else cells[number]
            numbers = (f"{point.length:,}", str(point.seeds), f"{point.samples:,}")
            exact = percent_text(point.exact.as_dict(), 1) + below(point.of_seeds, scale=100, digits=1)
            table.add_row(Text(cell), *numbers, exact)
    return table


def render_bounds(tests: Sequence[BoundTest]) -> Table:
    """A row for each setting and bound: its constant from the shorter lengths, tried at the longer ones."""
    table = plain_table("bound", "constant", "fitted on", "holds at", "above guessing", "bound / error")
    for test in tests:
        start = test.starts[0]
        for bound, fit in test.fits.items():
            slack = "–" if fit.slack is None else f"{fit.slack:.3g}"
            planted = f"K_train {start.group.settings.k_train}, k {start.k}"
            name = f"{start.group.settings.task}, {test.label}, {planted}: {BOUNDS[bound][0]}"
            held = f"{fit.held} of {fit.tested} lengths"
            numbers = f"{fit.constant:.3g}", f"{fit.fitted} lengths", held, f"{fit.empty} lengths"
            table.add_row(Text(name), *numbers, slack)
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
    for each in corpora_json["corpora"]:
        loss = each["loss_at_lengths"][0]
        shares = (each[name] for name in (*RECOVERIES, "k_suffices"))
        table.add_row(
            Text(each["label"]),
            str(each["trainings"]),
            f"{each['bytes_per_token']:.2f}",
            f"{each['targets_over_tau']:,}",
            percent_text(each["share_over_tau"], 1),
            *(percent_text(one) for one in shares),
            interval_cell(each["gain_nats_per_token"], digits=3),
            interval_cell(each["gain_nats_per_byte"], digits=4),
            interval_cell(loss["loss_nats"]),
            interval_cell(loss["loss_nats_per_byte"], digits=3),
        )
    return table


def render_ladder(ladder_json: Json) -> Table:
    """A row for each point of `ladder.json`: sparsity, use of the far context and rise of the loss."""
    settings, points = ladder_json["settings"], ladder_json["points"]
    k, times = settings["k"], settings["times"]
    names = ("recovery [%]", "placebo [%]", "net [%]", f"{k} suffice [%]", "rise [nats]")
    further: dict[str, tuple[str, str, Json]] = {
        "use_nats": (
            "use [nats]",
            f"mean gain of {settings.get('n_beyond', 0):,} tokens over the last {settings.get('window')}",
            {"digits": 3},
        ),
        "change_nats": ("change [nats]", "mean absolute gain of those", {"digits": 3}),
        "needle_exact": (
            "needles [%]",
            f"needles found at {times} times the window",
            {"scale": 100, "digits": 0},
        ),
    }
    further = {name: told for name, told in further.items() if any(name in point for point in points)}
    table = plain_table(
        *("model", "seeds", "parameters", "over tau [%]", "gain [nats]", *names),
        *(title for title, _, _ in further.values()),
    )
    table.caption = Text(
        f"targets over tau; mean gain of {settings['n_long']:,} tokens over the last {settings['n_short']:,} of all; "
        f"recovery, placebo and net recovery at k = {k}; share of those for which {k} tokens give 90 % of the gain; "
        f"loss at {times} times the training window minus at the window; "
        + "".join(f"{told}; " for _, told, _ in further.values())
        + "[95 % interval]; in parentheses: each seed"
    )
    for point in sorted(points, key=lambda point: (point["crossfit"], point["parameters"])):
        table.add_row(
            Text(point["label"] + (", cross-fit" if point["crossfit"] else "")),
            ", ".join(str(one["training_seed"]) for one in point["seeds"]),
            f"{point['parameters']:,}",
            percent_text(point["share_over_tau"], 1),
            interval_cell(point["gain_nats"], digits=3),
            *(
                percent_text(point[name])
                + below((one[name]["value"] for one in point["seeds"]), scale=100, digits=0)
                for name in (*RECOVERIES, "k_suffices")
            ),
            interval_cell(point["rise_nats"]) + below(one["rise_nats"]["value"] for one in point["seeds"]),
            *(
                interval_cell(point[name], **looks) if name in point else ""
                for name, (_, _, looks) in further.items()
            ),
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
        "change_nats": "change beyond the window",
        "needle_exact": "needles beyond the window",
        "entropy_nats": "entropy of the attention",
    }
    table = plain_table("rank correlation with the rise", "models", "Spearman", "without one of them", "")
    for name, found in ladder_json["correlations"].items():
        without = [each for each in found["without"].values() if each is not None]
        reach = f"{min(without):.2f} to {max(without):.2f}" if without else "–"
        undefined = (
            f"undefined in {100 * found['undefined']:.0f} % of the resamples" if found["low"] is None else ""
        )
        table.add_row(names[name], str(found["models"]), interval_cell(found), reach, undefined)
    return table


def render_longppl(found: Json) -> Group:
    """Both forms side by side, and how they agree, for a terminal."""
    settings, forms = found["settings"], found["forms"]
    head = Text.assemble(
        (f"{found['targets']:,} targets", "bold"),
        f" of {found['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}, "
        f"S {settings['sliding_window']}{and_prefix(found.get('prefix'))}; "
        f"PPL of all of them {interval_cell(found['ppl'])}\n"
        f"key tokens: LSD > {settings['alpha_nats']:g} nats and L_long < {settings['beta_nats']:g} nats",
    )
    table = plain_table("", *FORMS)
    rows: list[tuple[str, str, Json]] = [
        ("key tokens", "key_tokens", {"digits": 0}),
        ("share of the targets [%]", "share", {"scale": 100}),
        ("LongPPL", "longppl", {"digits": 3}),
        ("PPL with the short context", "ppl_short", {}),
        ("mean LSD [nats]", "mean_lsd_nats", {"digits": 3}),
    ]
    for title, name, looks in rows:
        cells = [
            "undefined" if forms[form][name]["value"] is None else interval_cell(forms[form][name], **looks)
            for form in FORMS
        ]
        table.add_row(Text(title), *cells)
    table.add_row("tokens read", *(f"{forms[form]['tokens_read']:,}" for form in FORMS))
    return Group(head, Text(), table, Text(), _words(found))


def _words(found: Json) -> Text:
    """How the forms agree; where there are no key tokens, that LongPPL is undefined and what to change."""
    settings, agreement, forms = found["settings"], found["agreement"], found["forms"]
    if without := [form for form in FORMS if forms[form]["longppl"]["value"] is None]:
        which = "either form" if len(without) == len(FORMS) else f"the {without[0]} form"
        return Text(
            f"there are no key tokens in {which}, so LongPPL is undefined: no target gains more than "
            f"{settings['alpha_nats']:g} nats from the long context and has L_long below {settings['beta_nats']:g} "
            "nats; lower --alpha, raise --beta or --segments, or measure a model trained for longer"
        )
    shares = ("jaccard", "share_of_exact_found_by_published", "share_of_published_confirmed_by_exact")
    jaccard, of_exact, of_published = (interval_cell(agreement[name], scale=100, digits=0) for name in shares)
    return Text.assemble(
        f"key tokens of both forms: {jaccard} % of those of either (Jaccard), {of_exact} % of exact, "
        f"{of_published} % of published\n"
        f"correlation of LSD {interval_cell(agreement['lsd_correlation'], digits=3)}; LongPPL exact - published "
        f"{interval_cell(agreement['longppl_difference'], digits=3)}\n",
        (f"[95 % interval] {by_clusters(found)}", "dim"),
    )
