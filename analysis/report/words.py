"""What the numbers of a summary say, in plain words, and how the report writes numbers. Reads the summary only."""

from __future__ import annotations

from typing import Any

from analysis.stats.recovery import CONTROLS, default_selector, nats
from analysis.stats.summary import FEW_DOCUMENTS

Json = dict[str, Any]

NO_BREAK = "\u00a0"
"""A space at which no line ends."""


def number(value: float | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """``value`` times ``scale`` with a true minus sign; a dash for what does not exist."""
    if value is None:
        return "–"
    text = f"{value * scale:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def bounds(interval: Json, *, scale: float = 1.0, digits: int = 2) -> str:
    """``[low, high]``, or ``no interval`` where the data support none."""
    if interval["low"] is None and interval["high"] is None:
        return "no interval"
    low, high = (number(interval[name], scale=scale, digits=digits) for name in ("low", "high"))
    return f"[{low},{NO_BREAK}{high}]"


def percent(interval: Json, digits: int = 0) -> str:
    """``90 % [82, 98]``."""
    value = number(interval["value"], scale=100, digits=digits)
    return f"{value}{NO_BREAK}% {bounds(interval, scale=100, digits=digits)}"


def p_value(value: float) -> str:
    """Two significant digits."""
    return f"{value:.2g}"


def far_tokens(count: int, selector: str) -> str:
    """The ``count`` far tokens that a selector puts first, as a noun phrase."""
    if selector == "random":
        return f"{count} far {plural(count, 'token')} drawn at random"
    if selector == "nearest":
        return f"the {count} far {plural(count, 'token')} nearest to the short context"
    return f"the {count} far {plural(count, 'token')} that {selector} ranks first"


def reading(summary: Json) -> list[str]:
    """Paragraphs of plain text: what was found, how sure it is, and what it does not show."""
    return [
        " ".join([*_what_was_measured(summary), *_what_came_back(summary)]),
        " ".join([*_controls(summary), *_how_many(summary), *_which_kinds(summary)]),
        *_reservations(summary),
    ]


def _what_was_measured(summary: Json) -> list[str]:
    settings = summary["settings"]
    over = summary["targets_over_tau"]
    reader = "the model that selects" if settings["crossfit"] else "the model"
    return [
        f"Of {summary['targets']:,} tokens sampled from {summary['documents']:,} held-out documents, {over:,} "
        f"({percent(summary['share_over_tau'], 1)}) are predicted better by more than {nats(settings['tau_nats'])} "
        f"when {reader} reads the {settings['n_long']} tokens before them instead of the last "
        f"{settings['n_short']} only.",
        f"On these, the far text lowers the mean loss from {number(summary['loss_short']['value'])} "
        f"{bounds(summary['loss_short'])} to {number(summary['loss_long']['value'])} {bounds(summary['loss_long'])} "
        "nats per token.",
    ]


def _what_came_back(summary: Json) -> list[str]:
    name = default_selector(summary["selectors"])
    k = summary["gain_bins"]["k"]
    found = summary["selectors"][name][str(k)]
    n_far = summary["settings"]["n_long"] - summary["settings"]["n_short"]
    chosen = far_tokens(k, name)
    recover = "recovers" if k == 1 else "recover"
    return [
        f"{chosen[0].upper()}{chosen[1:]}, of {n_far}, {recover} {percent(found['recovery'])} of that gain. The same "
        f"search in the text of another document, the placebo, recovers {percent(found['placebo_recovery'])}. The "
        f"difference, the net recovery, is {percent(found['net_recovery'])} (permutation test of own text against "
        f"placebo: p = {p_value(found['permutation_p'])}).",
        _verdict(found["net_recovery"]),
    ]


def _verdict(net: Json) -> str:
    if net["low"] is None or net["high"] is None:
        return "It has no interval, so nothing can be concluded."
    if net["low"] > 0:
        return "Its interval lies above zero: these tokens carry more than those of the placebo."
    if net["high"] < 0:
        return "Its interval lies below zero: own text gave less than the text of another document."
    return "Its interval includes zero: these tokens are not shown to carry more than those of the placebo."


def _controls(summary: Json) -> list[str]:
    k = summary["gain_bins"]["k"]
    said = [
        f"{far_tokens(k, name)}, {percent(summary['selectors'][name][str(k)]['net_recovery'])}"
        for name in ("random", "nearest")
        if name in summary["selectors"]
    ]
    return [f"Net recovery of the controls: {'; '.join(said)}."] if said else []


def _how_many(summary: Json) -> list[str]:
    needed = summary["tokens_needed"]
    name = default_selector(needed["selectors"])
    found, k_max = needed["selectors"][name], needed["ks"][-1]
    share = f"{number(needed['share'], scale=100, digits=0)}{NO_BREAK}%"
    return [
        f"At most {k_max} {plural(k_max, 'token')} of {name} recover {share} of the gain of "
        f"{percent(found['true'][-1])} of these targets (placebo: {percent(found['placebo'][-1])}). "
        f"The others, {percent(found['censored'])}, need more."
    ]


def _which_kinds(summary: Json) -> list[str]:
    kinds = [each for each in summary["kinds"]["kinds"] if each["targets_over_tau"]]
    if not kinds:
        return []
    largest = max(kinds, key=lambda each: each["targets_over_tau"])
    sampled = number(largest["share"]["value"], scale=100, digits=0)
    return [
        f"The most frequent kind among them is “{largest['kind']}”: {percent(largest['share_over_tau'])} of them, "
        f"against {sampled} % of all sampled tokens."
    ]


def _reservations(summary: Json) -> list[str]:
    settings = summary["settings"]
    said = []
    if settings["crossfit"]:
        said.append(
            "Cross-fitted: one checkpoint chose targets and far tokens. All losses are those of another one, trained "
            "from another seed, so that chance in the choice does not favour them."
        )
    if not settings["complete"]:
        said.append(
            f"Unfinished: {settings['targets_measured']:,} of {summary['targets_over_tau']:,} targets are measured "
            "so far."
        )
    if settings["documents_over_tau"] < FEW_DOCUMENTS:
        said.append(
            f"Only {settings['documents_over_tau']} documents have targets over tau: the intervals are rough."
        )
    return said


def plural(count: int, noun: str) -> str:
    """The noun, with an s unless there is one of it."""
    return noun if count == 1 else f"{noun}s"


def influence_unit(selector: str) -> str:
    """Unit of a selector's influence; empty for the controls, whose order says nothing about the model."""
    name = selector.partition("@")[0]  # EXACT@PROPOSER:m measures as EXACT does
    if name in CONTROLS:
        return ""
    return "of the attention" if name == "attention" else "nats"
