"""The tables of the report, as HTML, from the summary and from the JSON of scripts/longppl.py and scripts/compare.py.

Everything that is put between tags here is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.plots.style import selector_label
from analysis.report.foreign_text import foreign_html, text_html
from analysis.report.words import bounds, number, p_value, plural
from analysis.stats.recovery import default_selector

Json = dict[str, Any]
Rows = Sequence[Sequence[str]]
"""Cells as HTML; the first of a row is its heading."""

PERCENT: Json = {"scale": 100, "digits": 0}


def all_tables(summary: Json, longppl: Json | None, comparison: Json | None) -> str:
    """Every table, each under its heading."""
    parts = [
        ("Selectors by k", selectors_table(summary)),
        ("Kinds of dependency", kinds_table(summary)),
        ("Tokens needed", tokens_needed_table(summary)),
    ]
    if summary["comparisons"]:
        parts.append(("Selectors against each other", comparisons_table(summary)))
    if comparison:
        parts.append(("Two checkpoints", checkpoints_table(comparison)))
    if longppl:
        parts.append(("LongPPL", longppl_table(longppl)))
    return "\n".join(f"<h3>{title}</h3>\n{table}" for title, table in parts)


def selectors_table(summary: Json) -> str:
    """L_k, recovery, placebo, net recovery and the permutation test's p, by selector and k."""
    head = ["k", "L<sub>k</sub> [nats]", "recovery [%]", "placebo [%]", "net [%]", "p"]
    groups = [
        (
            text_html(selector_label(name)),
            [
                [
                    text_html(k),
                    cell(values["loss"]),
                    *(cell(values[f"{kind}recovery"], **PERCENT) for kind in ("", "placebo_", "net_")),
                    p_value(values["permutation_p"]),
                ]
                for k, values in per_k.items()
            ],
        )
        for name, per_k in summary["selectors"].items()
    ]
    caption = (
        "Over the targets over tau. Net, recovery minus placebo, is the figure to quote; p: permutation test of "
        "own text against placebo."
    )
    return table(caption, head, groups, key_column=4)


def kinds_table(summary: Json) -> str:
    """Share, gain and recovery of each kind of dependency, for the default selector."""
    kinds = summary["kinds"]
    name = default_selector(summary["selectors"])
    head = [
        "kind",
        "targets over tau",
        "share of these [%]",
        "of all [%]",
        "mean gain, all [nats]",
        "recovery [%]",
    ]
    head += ["placebo [%]", "net [%]"]
    rows = []
    for each in kinds["kinds"]:
        found = each["selectors"][name]
        documents = each["documents_over_tau"]
        over = f"{each['targets_over_tau']:,}<small>{documents:,} {plural(documents, 'document')}</small>"
        rows.append(
            [
                text_html(each["kind"]),
                over,
                cell(each["share_over_tau"], **PERCENT),
                cell(each["share"], **PERCENT),
                cell(each["gap_short_minus_long"]),
                *(cell(found[f"{kind}recovery"], **PERCENT) for kind in ("", "placebo_", "net_")),
            ]
        )
    by = f"{kinds['k']} tokens of {foreign_html(name)}"
    caption = f"Recovery with the {by}; the mean gain runs over all targets of the kind."
    return table(caption, head, [("", rows)], key_column=7, stacked=True)


def tokens_needed_table(summary: Json) -> str:
    """Share of the targets that at most k tokens suffice for, own text and placebo."""
    needed = summary["tokens_needed"]
    head = ["selector", *(f"k ≤ {k}" for k in needed["ks"]), f"more than {needed['ks'][-1]}"]
    rows = []
    for name, found in needed["selectors"].items():
        censored = cell(found["censored"], **PERCENT)
        rows.append([foreign_html(name), *(cell(each, **PERCENT) for each in found["true"]), censored])
        rows.append(
            [f"{foreign_html(name)}, placebo", *(cell(each, **PERCENT) for each in found["placebo"]), ""]
        )
    share = number(needed["share"], **PERCENT)
    caption = (
        f"Targets [%] for which so many tokens bring back {share} % of the gain, and those that need more."
    )
    return table(caption, head, [("", rows)], stacked=True)


def comparisons_table(summary: Json) -> str:
    """Paired differences of the other selectors to the default one."""
    rows = [
        [
            f"{foreign_html(each['first'])} − {foreign_html(each['second'])}",
            cell(each["recovery_difference"], **PERCENT),
            cell(each["net_recovery_difference"], **PERCENT),
        ]
        for each in summary["comparisons"]
    ]
    k = summary["comparisons"][0]["k"]
    head = ["difference", "recovery [points]", "net [points]"]
    caption = f"Paired on the same targets, k = {k}, in percentage points."
    return table(caption, head, [("", rows)], key_column=2)


def checkpoints_table(comparison: Json) -> str:
    """Two checkpoints on the same targets (`analysis.stats.compare`): A, B and A - B."""
    sides = ("first", "second", "difference")
    head = ["", "A", "B", "A − B"]
    overall = [
        ["share over tau [%]", *(cell(comparison["share_over_tau"][s], scale=100, digits=1) for s in sides)],
        ["mean gain of all targets [nats]", *(cell(comparison["gap_short_minus_long"][s]) for s in sides)],
    ]
    groups: list[tuple[str, Rows]] = [("", overall)]
    for selector, per_k in comparison["selectors"].items():
        rows = [
            [f"k = {foreign_html(k)}", *(cell(values["net_recovery"][s], **PERCENT) for s in sides)]
            for k, values in per_k.items()
        ]
        groups.append((f"net recovery of {foreign_html(selector)} [%]", rows))
    a, b = (foreign_html(comparison[side]["checkpoint"]) for side in sides[:2])
    caption = f"A: {a}. B: {b}. Differences are paired on the same targets."
    return table(caption, head, groups, key_column=3)


def longppl_table(longppl: Json) -> str:
    """Key tokens and LongPPL (Fang et al. 2024), the exact form beside the published one."""
    settings, agreement, forms = longppl["settings"], longppl["agreement"], longppl["forms"]
    wanted: list[tuple[str, str, Json]] = [
        ("key tokens", "key_tokens", {"digits": 0}),
        ("share of the targets [%]", "share", {"scale": 100, "digits": 1}),
        ("LongPPL", "longppl", {"digits": 2}),
        ("perplexity, short context", "ppl_short", {"digits": 2}),
        ("mean LSD [nats]", "mean_lsd_nats", {"digits": 3}),
    ]
    names = ("exact", "published")
    rows = [[title, *(cell(forms[form][key], **looks) for form in names)] for title, key, looks in wanted]
    rows.append(["tokens read", *(f"{forms[form]['tokens_read']:,}" for form in names)])
    jaccard = number(agreement["jaccard"]["value"], **PERCENT)
    caption = (
        f"{longppl['targets']:,} targets of {longppl['documents']:,} documents, N {settings['n_long']}, M "
        f"{settings['n_short']}, windows {settings['sliding_window']} apart in the published form. Key tokens: LSD "
        f"&gt; {settings['alpha_nats']:g} and L_long &lt; {settings['beta_nats']:g} nats. Perplexity of all of them "
        f"{number(longppl['ppl']['value'])}. {jaccard} % of the key tokens of either form are key tokens of both."
    )
    return table(caption, ["", *names], [("", rows)])


def cell(interval: Json, *, scale: float = 1.0, digits: int = 2) -> str:
    """A value with its interval behind or below it; a dash where there is no value."""
    if interval["value"] is None:
        return "–"
    value = number(interval["value"], scale=scale, digits=digits)
    return f"{value}<small>{bounds(interval, scale=scale, digits=digits)}</small>"


def table(
    caption: str,
    head: Sequence[str],
    groups: Sequence[tuple[str, Rows]],
    *,
    key_column: int | None = None,
    stacked: bool = False,
) -> str:
    """A table of HTML: caption, head, cells and the titles of groups.

    ``key_column`` is the column to read first, set in bold. A group without a title has no heading row. On a narrow
    screen a ``stacked`` table becomes a block per row, whose cells repeat their heading; that must be text then.
    """

    def mark(column: int) -> str:
        label = f' data-label="{head[column]}"' if stacked else ""
        return f' class="key"{label}' if column == key_column else label

    heads = "".join(f'<th scope="col"{mark(column)}>{each}</th>' for column, each in enumerate(head))
    bodies = []
    for title, rows in groups:
        lines = [
            f'<tr><th scope="row">{row[0]}</th>'
            + "".join(f"<td{mark(column)}>{each}</td>" for column, each in enumerate(row[1:], 1))
            + "</tr>"
            for row in rows
        ]
        if title:
            span = f'<tr><th class="group" scope="rowgroup" colspan="{len(head)}">{title}</th></tr>'
            lines.insert(0, span)
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    looks = "table stacked" if stacked else "table"
    return (
        f'<div class="{looks}"><table><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"{''.join(bodies)}</table></div>"
    )
