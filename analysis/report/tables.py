"""The tables of the report as data, from the summary and from the JSON of scripts/longppl.py and scripts/compare.py.

A cell is text, which the template escapes, or `Markup` that `value_cell` and `foreign` made of escaped text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from analysis.plots.style import selector_label
from analysis.records.results import SIDES
from analysis.report.foreign_text import foreign_html
from analysis.report.words import bounds, number, p_value, plural
from analysis.stats.recovery import default_selector

Json = dict[str, Any]
Row = Sequence[str]
"""Cells; the first is the heading of the row."""

PERCENT: Json = {"scale": 100, "digits": 0}


@dataclass(frozen=True)
class Table:
    """What stands in one table of the page."""

    caption: str
    head: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Row]]]
    """Title and rows; a group without a title has no heading row."""
    key_column: int | None = None
    """The column to read first."""


@dataclass(frozen=True)
class Section:
    """A heading, its table, and a table that is folded away below it, if there is one."""

    title: str
    table: Table
    folded: Table | None = None
    folded_title: str = ""


def all_sections(summary: Json, longppl: Json | None, comparison: Json | None) -> list[Section]:
    """Every table of the page, in its order."""
    sections = [_selectors(summary), _kinds(summary), _tokens_needed(summary)]
    if summary["comparisons"]:
        sections.append(_comparisons(summary))
    if comparison:
        sections.append(_checkpoints(comparison, summary["gain_bins"]["k"]))
    if longppl:
        sections.append(_longppl(longppl))
    return sections


def value_cell(interval: Json, *, scale: float = 1.0, digits: int = 2) -> str:
    """A value with its interval behind or below it; a dash where there is no value."""
    if interval["value"] is None:
        return "–"
    looks: Json = {"scale": scale, "digits": digits}
    return Markup("{}<small>{}</small>").format(number(interval["value"], **looks), bounds(interval, **looks))


def foreign(name: str) -> Markup:
    """A name that others chose, among words of ours."""
    return Markup(foreign_html(name))


def _selectors(summary: Json) -> Section:
    """Loss, recovery, placebo, net recovery and p: at the k of the page, and folded away at every k."""
    head = ["loss [nats]", "recovery [%]", "placebo [%]", "net [%]", "p"]
    k = summary["gain_bins"]["k"]

    def cells(values: Json) -> list[str]:
        recoveries = (value_cell(values[f"{kind}recovery"], **PERCENT) for kind in ("", "placebo_", "net_"))
        return [value_cell(values["loss"]), *recoveries, p_value(values["permutation_p"])]

    at_k = [
        [foreign(selector_label(name)), *cells(per_k[str(k)])] for name, per_k in summary["selectors"].items()
    ]
    every = [
        (foreign(selector_label(name)), [[each, *cells(values)] for each, values in per_k.items()])
        for name, per_k in summary["selectors"].items()
    ]
    caption = (
        f"Over the targets over tau, with k = {k} far tokens. Net recovery is recovery minus placebo. p: permutation "
        "test of own text against placebo."
    )
    return Section(
        "Selectors",
        Table(caption, ["selector", *head], [("", at_k)], key_column=4),
        Table("The same at every measured k.", ["k", *head], every, key_column=4),
        "All values of k",
    )


def _kinds(summary: Json) -> Section:
    """Share, gain and recovery of each kind of dependency, for the default selector."""
    kinds = summary["kinds"]
    name = default_selector(summary["selectors"])
    head = ["kind", "targets over tau", "share of these [%]", "of all [%]", "mean gain, all [nats]"]
    rows = []
    for each in kinds["kinds"]:
        found, documents = each["selectors"][name], each["documents_over_tau"]
        targets = f"{each['targets_over_tau']:,}"
        rows.append(
            [
                each["kind"],
                Markup("{}<small>{}</small>").format(
                    targets, f"{documents:,} {plural(documents, 'document')}"
                ),
                value_cell(each["share_over_tau"], **PERCENT),
                value_cell(each["share"], **PERCENT),
                value_cell(each["gap_short_minus_long"]),
                *(value_cell(found[f"{kind}recovery"], **PERCENT) for kind in ("", "placebo_", "net_")),
            ]
        )
    caption = Markup(
        "Recovery with the {} tokens of {}. The mean gain is over all targets of the kind."
    ).format(kinds["k"], foreign(name))
    recoveries = ["recovery [%]", "placebo [%]", "net [%]"]
    return Section("Kinds of dependency", Table(caption, [*head, *recoveries], [("", rows)], key_column=7))


def _tokens_needed(summary: Json) -> Section:
    """Share of the targets that at most k tokens suffice for, own text and placebo."""
    needed = summary["tokens_needed"]
    head = ["selector", *(f"k ≤ {k}" for k in needed["ks"]), f"more than {needed['ks'][-1]}"]
    rows = []
    for name, found in needed["selectors"].items():
        own = [value_cell(each, **PERCENT) for each in found["true"]]
        rows.append([foreign(name), *own, value_cell(found["censored"], **PERCENT)])
        placebo = [value_cell(each, **PERCENT) for each in found["placebo"]]
        rows.append([Markup("{}, placebo").format(foreign(name)), *placebo, ""])
    share = number(needed["share"], **PERCENT)
    caption = f"Targets [%] for which k tokens recover {share} % of the gain, and those that need more."
    return Section("Tokens needed", Table(caption, head, [("", rows)]))


def _comparisons(summary: Json) -> Section:
    """Paired differences of the other selectors to the default one."""
    rows = [
        [
            Markup("{} − {}").format(foreign(each["first"]), foreign(each["second"])),
            value_cell(each["recovery_difference"], **PERCENT),
            value_cell(each["net_recovery_difference"], **PERCENT),
        ]
        for each in summary["comparisons"]
    ]
    caption = f"Paired on the same targets, k = {summary['comparisons'][0]['k']}, in percentage points."
    head = ["difference", "recovery [points]", "net [points]"]
    return Section("Selectors against each other", Table(caption, head, [("", rows)], key_column=2))


def _checkpoints(comparison: Json, k: int) -> Section:
    """Two checkpoints on the same targets (`analysis.stats.compare`): at one k, and folded away at every k."""
    sides = (*SIDES, "difference")
    head = ["", "A", "B", "A − B"]
    rows = [
        [
            "share over tau [%]",
            *(value_cell(comparison["share_over_tau"][s], scale=100, digits=1) for s in sides),
        ],
        [
            "mean gain of all targets [nats]",
            *(value_cell(comparison["gap_short_minus_long"][s]) for s in sides),
        ],
    ]

    def net(values: Json) -> list[str]:
        return [value_cell(values["net_recovery"][side], **PERCENT) for side in sides]

    selectors = comparison["selectors"]
    at_k = [
        [Markup("net recovery of {} [%]").format(foreign(name)), *net(per_k[str(k)])]
        for name, per_k in selectors.items()
        if str(k) in per_k
    ]
    every = [
        (
            Markup("net recovery of {} [%]").format(foreign(name)),
            [[Markup("k = {}").format(foreign(each)), *net(values)] for each, values in per_k.items()],
        )
        for name, per_k in selectors.items()
    ]
    first, second = (foreign(comparison[side]["checkpoint"]) for side in SIDES)
    caption = Markup("A: {}. B: {}. Differences are paired on the same targets; k = {}.").format(
        first, second, k
    )
    return Section(
        "Two checkpoints",
        Table(caption, head, [("", [*rows, *at_k])], key_column=3),
        Table("Net recovery at every k.", head, every, key_column=3),
        "All values of k",
    )


def _longppl(longppl: Json) -> Section:
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
    rows = [
        [title, *(value_cell(forms[form][key], **looks) for form in names)] for title, key, looks in wanted
    ]
    rows.append(["tokens read", *(f"{forms[form]['tokens_read']:,}" for form in names)])
    jaccard = number(agreement["jaccard"]["value"], **PERCENT)
    caption = (
        f"{longppl['targets']:,} targets of {longppl['documents']:,} documents, N {settings['n_long']}, M "
        f"{settings['n_short']}; windows {settings['sliding_window']} apart in the published form. Key tokens have "
        f"LSD > {settings['alpha_nats']:g} and L_long < {settings['beta_nats']:g} nats. The perplexity of all "
        f"targets is {number(longppl['ppl']['value'])}. Of the key tokens of either form, {jaccard} % are key "
        "tokens of both."
    )
    return Section("LongPPL", Table(caption, ["", *names], [("", rows)]))
