"""Which options of a measurement go together: checked before a model is opened, and before a job waits in a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis import arguments
from analysis.contexts import OTHER_TARGET, PLACEBO, SAME_GROUP, SHUFFLED
from analysis.faithfulness import SUBSET_KEEP_RATE, SUBSETS
from analysis.kept import KeptAs
from analysis.parameters import definitions
from analysis.selectors import SELECTORS, SelectorName
from analysis.selectors.names import parse_names
from analysis.settings import ChoiceSettings, ContextSettings
from olmo_sparsity.util.errors import UserError

DEFAULT_SELECTORS = ("leave-one-out", "leave-one-out-kl", "leave-one-in", "random", "nearest")
PLACEBOS = (PLACEBO, SAME_GROUP, SHUFFLED, OTHER_TARGET)
"""Far contexts beside the true one: of another text, from elsewhere in the target's own group, the true one with its
tokens in random order, and the true one with the tokens that were chosen for another target of the block [ours]."""


def tokens_to_rank(name: SelectorName, keep_as: Sequence[KeptAs], k_max: int, n_far: int) -> int:
    """How many far tokens a selector must rank for the largest k, kept in all these ways."""
    return max(kept_as.ranks(k_max, n_far, name.ranked_in.sinks) for kept_as in keep_as)


def far_contexts(placebos: Sequence[str]) -> tuple[str, ...]:
    """The true far context and these placebos, each once, in the order of `PLACEBOS`. Raises `UserError` for others."""
    if unknown := [name for name in placebos if name not in PLACEBOS]:
        raise UserError(f"{unknown[0]!r} is no placebo; choose from {', '.join(PLACEBOS)}")
    return "true", *(name for name in PLACEBOS if name in placebos)


def choice_settings(
    *,
    tau_nats: Any,
    ks: Any,
    selectors: Any,
    placebos: Any,
    keep_as: Any,
    scores: bool,
    effects: bool,
    faithfulness: bool,
) -> ChoiceSettings:
    """How tokens are chosen and kept. Raises `UserError`, which names the argument, where one is not of its kind."""
    selectors = tuple(arguments.names("selectors", selectors))
    registered = {name: one.item for name, one in SELECTORS.items()}
    return ChoiceSettings(
        tau_nats=arguments.finite_number("tau_nats", tau_nats),
        ks=tuple(arguments.whole_numbers("ks", ks)),
        selectors=selectors,
        far_contexts=far_contexts(arguments.names("placebos", placebos)),
        keep_as=tuple(arguments.names("keep_as", keep_as)),
        scores=scores,
        effects=effects,
        faithfulness=faithfulness,
        subsets=SUBSETS if faithfulness else None,
        keep_rate=SUBSET_KEEP_RATE if faithfulness else None,
        definitions=definitions(registered, selectors),
    )


def drops_tokens(choices: ChoiceSettings) -> bool:
    """Whether the model reads subsequences: to rank tokens, to keep them, or to judge the choice."""
    if not choices.selectors:
        return False
    return (
        choices.faithfulness
        or any(name.reads_subsequences for name in parse_names(choices.selectors).values())
        or any(not KeptAs.parse(text).reads_all for text in choices.keep_as)
    )


def leaves_out_of_cache(choices: ChoiceSettings) -> bool:
    """Whether far keys and values are left out of the cache, to rank tokens or to keep them."""
    if choices.effects:
        return True
    if not choices.selectors:
        return False
    levels = [KeptAs.parse(text).level for text in choices.keep_as]
    return "cache" in levels or any(name.ranks_in_cache for name in parse_names(choices.selectors).values())


def check_options(contexts: ContextSettings, choices: ChoiceSettings) -> None:
    """Raise `UserError` for settings that do not go together, before a model is opened."""
    if OTHER_TARGET in choices.far_contexts and contexts.targets_per_block == 1:
        raise UserError(
            f"{OTHER_TARGET} takes the tokens of another target of the block: give a targets_per_block of 2 or more, "
            "or leave it out"
        )
    selectors = parse_names(choices.selectors)
    if contexts.before and (selectors or choices.effects):
        what = "selectors (--selectors none, selectors=())" if selectors else "effects"
        raise UserError(
            f"before = {contexts.before:,}: no tokens are chosen or left out behind other text; leave out {what}, or "
            "before"
        )
    if not selectors:
        if not choices.ks:
            raise UserError(
                "ks takes one number of tokens at least; without selectors it counts nothing: leave it out"
            )
        return
    half = contexts.n_short // 2
    for text, name in selectors.items():
        if name.other_near and not 1 <= half <= contexts.n_far:
            raise UserError(
                f"{text} replaces half of the short context by tokens of another far context, of which there are "
                f"{contexts.n_far}: give an n_short of 2 or more, and n_long at least one and a half times as large"
            )
    ks = choices.ks
    n_far = contexts.n_far
    if not ks or list(ks) != sorted(set(ks)) or not 1 <= ks[0] <= ks[-1] <= n_far:
        raise UserError(f"ks must ascend from 1 to at most the {n_far} far tokens, not {list(ks)}")
    keep_as = {text: KeptAs.parse(text) for text in choices.keep_as}
    _check_each_once("selector", choices.selectors, selectors)
    _check_each_once("way to keep tokens", choices.keep_as, keep_as)
    for text, kept_as in keep_as.items():
        if ks[-1] + kept_as.sinks > n_far:
            raise UserError(
                f"{text}: k = {ks[-1]} and {kept_as.sinks} sinks are more than the {n_far} far tokens; lower either, "
                "or raise n_long"
            )
    for text, name in selectors.items():
        _check_ranking(text, name, keep_as, ks[-1], n_far)


def _check_each_once(kind: str, texts: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise `UserError` where there is none, or two texts say the same; ``values``: what each text says."""
    if not texts:
        raise UserError(f"name at least one {kind}, and each once")
    first: dict[Any, str] = {}
    for text in texts:
        if values[text] in first:
            raise UserError(f"name at least one {kind}, and each once: {text} is {first[values[text]]} again")
        first[values[text]] = text


def _check_ranking(
    text: str, name: SelectorName, keep_as: Mapping[str, KeptAs], k_max: int, n_far: int
) -> None:
    """Raise `UserError` where a selector does not rank the tokens that a way of keeping may need."""
    ways = list(keep_as.values())
    goes_on = [kept_as.name for kept_as in ways if kept_as.windows == "ranked" and kept_as.width]
    if goes_on and name.registered.ranks_only_k:
        raise UserError(
            f"{text} chooses step by step and ranks no tokens beyond k, which the unit {goes_on[0]} needs; leave "
            "one of them out"
        )
    if name.registered.scores_only_k and any(kept_as.unit == "word" for kept_as in ways):
        raise UserError(
            f"{text} scores only the k tokens that it chooses, which may be of fewer than k words; leave it or the "
            "unit word out"
        )
    name.check_candidates(k_max=max(k_max, tokens_to_rank(name, ways, k_max, n_far)), n_far=n_far)
    sinks = name.ranked_in.sinks
    ranked = n_far - sinks
    for way, kept_as in keep_as.items():
        may_need = k_max * (1 + kept_as.width)
        if kept_as.windows == "ranked" and kept_as.sinks < sinks and may_need > ranked:
            raise UserError(
                f"{way} may need more tokens for k = {k_max} than the {ranked} that {text} ranks, which does not "
                f"rank its {sinks} sinks; lower k or the windows, or keep {sinks} sinks"
            )
