"""Selectors: which far tokens influence a prediction most (docs/method.md, 2.2), each registered at its definition.

Leaving one out, leaving one in and forward selection compare how good predictions are from subsets of the far context.
A *measure* says how bad a prediction is: the target's loss, for signed and absolute influence; or how far the predicted
distribution is from that of the long context, for target-blind influence, which never looks at the target.
Shapes: n blocks, m targets, N long and M short context length, F = N - M far tokens, C candidates among them, k
selected tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from analysis.contexts import NO_FAR, Contexts
from analysis.parameters import made, written
from analysis.policies.policy import POLICIES, Keep, Policy, first_of_each_head
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.registry import Registry
from olmo_sparsity.util.rng import Stream

if TYPE_CHECKING:  # the names of selectors are known without torch
    from analysis.model.losses import Scorer


OTHER_NEAR = "/other-near"
"""Ends the name of a selector that chooses with other tokens in place of the first half of the short context
(docs/method.md, 2.3 [ours]): what it chooses cannot rest on luck with exactly these."""


@dataclass(frozen=True)
class RankedIn:
    """Where a selector reads the subsets by which it ranks, written LEVEL[:SINKS], such as ``cache:4``."""

    level: str
    """``text``: the subsequence is read; ``cache``: keys and values of what was read whole (docs/method.md, 2.2b)."""
    sinks: int = 0
    """So many of the first far tokens are in every subset, and are no candidates."""

    @classmethod
    def parse(cls, text: str) -> RankedIn:
        """Raises `UserError` where the text is none of these."""
        match = re.fullmatch(r"(text|cache)(?::(\d+))?", text)
        if not match:
            raise UserError(
                f"{text!r}: subsets are ranked in text or cache, with sinks such as cache:4; {OTHER_NEAR} ends a name"
            )
        level, sinks = match.groups()
        return cls(level, int(sinks or 0))

    def __str__(self) -> str:
        return f"{self.level}:{self.sinks}" if self.sinks else self.level


@dataclass(frozen=True)
class SelectorInput:
    """What a selector reads: it returns the k most influential of the candidates, for every target."""

    scorer: Scorer
    contexts: Contexts
    seed: int
    """Seed of selectors that draw."""
    k: int
    targets: np.ndarray | None = None
    """(m, 2) block and place in it of each target; None means all, block by block."""
    columns: np.ndarray | None = None
    """Candidates, (m, C) columns of the far context, ascending; None means all of it but the sinks."""
    screen: str = ""
    """Who proposed them and how many, as it ends the selector's name, such as ``@gradient:32``; empty: nobody."""
    ranked_in: RankedIn | None = None
    """Where subsets are read that rank tokens, with which sinks; None: as text, without."""
    names: tuple[str, ...] = ()
    """Of all selectors that will run on this input: what they read off the same passes is computed once."""
    shared: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    """What was read off such passes, (m, C) by selector and measure, and proposals, (m, C) columns by screen."""
    proposing: Scorer | None = None
    """Of the smaller model that proposes for screened selectors; None: ``scorer`` does."""
    other_near: SelectorInput | None = None
    """What selectors whose names end with `OTHER_NEAR` read instead, with their names without it; None: nothing."""
    encode: Callable[[str], np.ndarray] | None = None
    """Token ids of a text, for policies that read a prompt; None: there is no tokenizer."""

    @property
    def target_index(self) -> np.ndarray:
        """(m, 2) block and place."""
        if self.targets is None:
            return self.contexts.all_targets
        return self.targets

    @property
    def sinks(self) -> np.ndarray:
        """The first far tokens, which every subset has and which are no candidates, (s,) columns."""
        return np.arange(0 if self.ranked_in is None else self.ranked_in.sinks)

    @property
    def all_candidates(self) -> np.ndarray:
        """Columns of all far tokens but the sinks, (F - s,)."""
        return np.arange(len(self.sinks), self.contexts.n_far)

    @property
    def candidates(self) -> np.ndarray:
        """(m, C) columns of the far context, ascending: all but the sinks, or in a screened form those proposed."""
        if self.columns is not None:
            return self.columns
        open_ = self.all_candidates
        return np.broadcast_to(open_, (len(self.target_index), len(open_)))

    def with_sinks(self, chosen: np.ndarray) -> np.ndarray:
        """Subsets, (…, s + j) columns that ascend, of the sinks and of chosen candidates, (…, j)."""
        sinks = np.broadcast_to(self.sinks, (*chosen.shape[:-1], len(self.sinks)))
        return np.concatenate([sinks, np.sort(chosen, axis=-1)], axis=-1)

    def losses(self, far: np.ndarray) -> np.ndarray:
        """Losses given subsets of the far context and the short context, (m, C) nats.

        ``far``: columns, (m, C, j), or (C, j) for all targets, which takes one pass a block. Those of a subset ascend,
        and none is there twice. Raises `ValueError` for others, whose losses would be of no text.
        """
        return self.evaluate("loss", far)

    def evaluate(self, measure: str, far: np.ndarray) -> np.ndarray:
        """One of `analysis.model.losses.MEASURES` of subsets as in `losses`, (m, C)."""
        return self._measures((measure,), far)[..., 0]

    def evaluate_shared(self, base: str, measure: str, far: np.ndarray) -> np.ndarray:
        """`evaluate` of the subsets ``far``, which are those of the selector ``base`` for each candidate."""
        ending = self.screen
        if self.ranked_in is not None:
            ending = f"/{self.ranked_in}{self.screen}"
        of_base = base + ending
        if (of_base, measure) not in self.shared:
            needed = {measure}
            for form, (_, of_form) in FORMS.items():
                if base + form + ending in self.names:
                    needed.add(of_form)
            measures = sorted(needed)
            values = self._measures(measures, far)
            for column, name in enumerate(measures):
                self.shared[of_base, name] = values[..., column]
        return self.shared[of_base, measure]

    def _measures(self, names: Sequence[str], far: np.ndarray) -> np.ndarray:
        """Measures of subsets as in `losses`, (m, C, number of names)."""
        self._check_subsets(far)
        if self.ranked_in is None or self.ranked_in.level == "text":
            return self.scorer.measures(self.contexts, far, names, self.target_index)
        from analysis.model import far_cache  # the names of selectors are known without torch

        masks = far_cache.subset_masks(far, self.contexts.n_far)
        return far_cache.measures(self.scorer, self.contexts, masks, names, self.target_index)

    def _check_subsets(self, far: np.ndarray) -> None:
        """Raise `ValueError` where a subset is no ascending columns of the far context."""
        if far.size and (far.min() < 0 or far.max() >= self.contexts.n_far):
            raise ValueError(f"a far column is not in 0 … {self.contexts.n_far - 1}")
        if (np.diff(far, axis=-1) <= 0).any():
            raise ValueError(
                "the columns of a subset must ascend, each once: sort them, and drop what is there twice"
            )

    def at_candidates(self, values: np.ndarray) -> np.ndarray:
        """Values of the far tokens, (m, F), at the candidates, (m, C)."""
        return np.take_along_axis(values, self.candidates, axis=1)


@dataclass(frozen=True)
class Selection:
    """S_k of every target, most influential first."""

    columns: np.ndarray
    """(m, k) columns of the far context."""
    influence: np.ndarray
    """(m, k) influence of each in the selector's unit: nats, a share of probability or attention, or a norm."""
    scores: np.ndarray | None = None
    """(m, F) influence of every far token, NaN where the selector gives it none; None of a sequential one (`greedy`),
    whose influence is that of a token given those before it."""
    by_head: np.ndarray | None = None
    """(m, G, F) the same for every head of keys, layer after layer, of a policy that keeps other tokens in each."""
    keep: Keep | None = None
    """Which keys are kept by ``by_head``, where heads keep unequal numbers; None: the first k of every head."""


_SPLIT, _SHORTEST = 4, 4
"""Parts that a span is cut into, and tokens of the shortest spans."""

Selector = Callable[[SelectorInput], Selection]
Influence = Callable[[SelectorInput], np.ndarray]
"""From these inputs to the influence of every candidate, (m, C)."""
InfluenceBy = Callable[[SelectorInput, str], np.ndarray]
"""The same by a measure."""
SIGNED, ABSOLUTE, BLIND, CONTROL = "signed", "absolute", "target-blind", "control"
FORMS = {"": (SIGNED, "loss"), "-absolute": (ABSOLUTE, "loss"), "-kl": (BLIND, "kl"), "-tv": (BLIND, "tv")}
"""Forms of leaving one out and in: what stands behind the name, the family, and the measure that their passes give."""
FAMILIES: dict[str, list[str]] = {SIGNED: [], ABSOLUTE: [], BLIND: [], CONTROL: []}
"""Names of selectors by what they look at (docs/method.md, 2.2 [ours])."""
BY_SUBSETS: list[str] = []
"""Names of selectors that rank by what the model predicts from subsets, as text or in the cache (`RankedIn`)."""
SELECTORS: Registry[Callable[..., Any]] = Registry("selector", ", or EXACT@PROPOSER:m")
"""By name; one with parameters is a dataclass, whose fields they are, as in snapkv:window=64:pool=7, or a `Policy`."""
_Selector = TypeVar("_Selector", bound=Callable[..., Any])
_Influence = TypeVar("_Influence", bound=Influence)


def register(name: str, family: str, *, by_subsets: bool = False) -> Callable[[_Selector], _Selector]:
    """Make a selector available by name, as one of a family of `FAMILIES`; ``by_subsets``: see `BY_SUBSETS`."""

    def add(selector: _Selector) -> _Selector:
        SELECTORS[name] = selector
        FAMILIES[family].append(name)
        if by_subsets:
            BY_SUBSETS.append(name)
        return selector

    return add


def register_influence(
    name: str, family: str, *, by_subsets: bool = False
) -> Callable[[_Influence], _Influence]:
    """Make the selector available by name that takes the candidates of largest influence."""

    def add(influence: _Influence) -> _Influence:
        register(name, family, by_subsets=by_subsets)(
            lambda inputs: most_influential(inputs, influence(inputs))
        )
        return influence

    return add


def register_forms(base: str) -> Callable[[InfluenceBy], InfluenceBy]:
    """Make the `FORMS` available of an influence by a measure: ``base`` by the target's loss, ``base-kl`` and so on."""

    def add(influence: InfluenceBy) -> InfluenceBy:
        for form, (family, measure) in FORMS.items():
            change = np.abs if family == ABSOLUTE else np.asarray
            register_influence(base + form, family, by_subsets=True)(
                lambda inputs, measure=measure, change=change: change(influence(inputs, measure))
            )
        return influence

    return add


def most_influential(inputs: SelectorInput, influence: np.ndarray) -> Selection:
    """The k candidates of largest influence (m, C); equal influences keep the order of the text."""
    candidates = inputs.candidates
    order = np.argsort(-influence, axis=1, kind="stable")[:, : inputs.k]
    columns = np.take_along_axis(candidates, order, axis=1)
    finite = np.where(np.isfinite(influence), influence, np.nan)
    scores = np.full((len(influence), inputs.contexts.n_far), np.nan)
    np.put_along_axis(scores, candidates, finite, axis=1)
    return Selection(columns, np.take_along_axis(influence, order, axis=1), scores)


def find_selector(name: str) -> Selector:
    """The selector of that name, with where it ranks, screened (`screened`), and with what near tokens (`OTHER_NEAR`).

    Raises `UserError` for another name.
    """
    if name.endswith(OTHER_NEAR):
        return _with_other_near(name)
    exact, at, screen = name.partition("@")
    if at:
        proposer, _, count = screen.rpartition(":")
        if not count.isdecimal() or not proposer:
            raise UserError(
                f"{name!r} is no screened selector; write EXACT@PROPOSER:m, such as leave-one-out@gradient:32"
            )
        screened_selector = screened(_registered(exact), _ranking(proposer), int(count), at + screen)
        return _where(screened_selector, exact)
    return _ranking(name)


def _ranking(name: str) -> Selector:
    """The selector of NAME or NAME/LEVEL:SINKS."""
    return _where(_registered(name), name)


def _with_other_near(name: str) -> Selector:
    """The selector of a name that ends with `OTHER_NEAR`."""
    by_near = name.removesuffix(OTHER_NEAR)
    if by_near in FAMILIES[CONTROL]:
        raise UserError(f"{name}: {by_near} does not look at the near tokens; leave {OTHER_NEAR} out")
    if by_near.endswith(OTHER_NEAR):
        raise UserError(f"{name}: {OTHER_NEAR} ends a name once; leave the second one out")
    selector = find_selector(by_near)

    def select(inputs: SelectorInput) -> Selection:
        if inputs.other_near is None:
            raise UserError(f"{name}: there are no other near tokens here; leave {OTHER_NEAR} out")
        return selector(replace(inputs.other_near, k=inputs.k))

    return select


def ranked_in(name: str) -> RankedIn | None:
    """Where the selector of a name ranks; None: it reads no subsets, or those without sinks, as text."""
    name = name.removesuffix(OTHER_NEAR)
    _, slash, where = name.partition("@")[0].partition("/")
    return RankedIn.parse(where) if slash else None


def reads_subsequences(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, drops tokens from a text that is read.

    `gradient` does: presence hides a token from all queries, as dropping it does.
    """
    exact, _, screen = name.removesuffix(OTHER_NEAR).partition("@")
    for part in (exact, screen):
        base, _, where = part.partition("/")
        base = base.partition(":")[0]
        if (base in BY_SUBSETS and not where.startswith("cache")) or base == "gradient":
            return True
    return False


def ranks_in_cache(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, leaves keys and values out of the cache."""
    exact, _, screen = name.removesuffix(OTHER_NEAR).partition("@")
    return any(part.partition("/")[2].startswith("cache") for part in (exact, screen))


def chooses_by_head(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, ranks the tokens of every head of keys."""
    parts = re.split("[@:/]", name)
    return any(part in POLICIES for part in parts)


def changes_embeddings(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, reads embeddings in the place of tokens."""
    parts = re.split("[@:/]", name)
    return any(part in ("saliency", "input-x-gradient", "integrated-gradients") for part in parts)


def _where(selector: Selector, name: str) -> Selector:
    """The selector, ranking where its name says."""
    where = ranked_in(name)
    if where is None:
        return selector
    return lambda inputs: selector(replace(inputs, ranked_in=where))


def _registered(text: str) -> Selector:
    """The selector of NAME or NAME:PARAMETER=NUMBER:…, wherever it ranks. Raises `UserError` that lists the choices."""
    text, slash, _ = text.partition("/")
    name, *parts = text.split(":")
    selector = SELECTORS[name]
    if slash and name not in BY_SUBSETS:
        raise UserError(f"{name} reads no subsets to rank by; in the cache rank {', '.join(BY_SUBSETS)}")
    chosen = made(selector, text, parts)
    if isinstance(chosen, Policy):
        return ByPolicy(chosen)
    return cast("Selector", chosen)


def list_selectors() -> list[str]:
    """Names of all selectors, with their parameters as they are by default; screened forms put two together."""
    listed = []
    for name, selector in SELECTORS.items():
        listed.append(":".join([name, *written(selector)]))
    return listed


def check_selector(name: str, *, k_max: int, n_far: int) -> None:
    """Raise `UserError` where a selector does not exist, or is to rank more tokens than it has candidates.

    A screened form has those that were proposed, of which there are at most F without the sinks of both.
    """
    find_selector(name)
    where = ranked_in(name)
    sinks = 0 if where is None else where.sinks
    candidates = n_far - sinks
    if k_max > candidates:
        raise UserError(
            f"{name}: {sinks} of the {n_far} far tokens are sinks, so that k = {k_max} cannot be chosen; lower k"
        )
    if "@" not in name:
        return
    proposer, _, count = name.removesuffix(OTHER_NEAR).partition("@")[2].rpartition(":")
    where = ranked_in(proposer)
    if where is not None:
        candidates = min(candidates, n_far - where.sinks)
    m = int(count)
    if not k_max <= m <= candidates:
        raise UserError(
            f"{name}: m = {m} must be at least k = {k_max} and at most the {candidates} far tokens"
        )


def screened(exact: Selector, proposer: Selector, count: int, screen: str) -> Selector:
    """The choice of ``exact`` among the ``count`` tokens that ``proposer`` puts first (m of the screened forms).

    Costs what the proposer costs and count / F of what the exact selector costs.
    """

    def select(inputs: SelectorInput) -> Selection:
        sinks = len(inputs.sinks)
        of_screen = f"{screen} but {sinks} sinks"
        if (of_screen, "columns") not in inputs.shared:
            proposal = replace(inputs, k=min(count + sinks, inputs.contexts.n_far), ranked_in=None)
            if inputs.proposing is not None:
                proposal = replace(proposal, scorer=inputs.proposing, names=(), shared={})
            proposed = proposer(proposal).columns
            no_sinks = [row[row >= sinks][:count] for row in proposed]
            inputs.shared[of_screen, "columns"] = np.sort(np.stack(no_sinks), axis=1)
        of_proposed = replace(inputs, columns=inputs.shared[of_screen, "columns"], screen=screen)
        return exact(of_proposed)

    return select


@register_forms("leave-one-out")
def leave_one_out(inputs: SelectorInput, measure: str = "loss") -> np.ndarray:
    """loss(t | C_long without i) - L_long, (m, C) nats: our Eq. 20 [ours; its text was not at hand].

    Of another measure the same: a divergence from p_long is 0 given C_long.
    """
    left_out = inputs.all_candidates if inputs.columns is None else inputs.columns
    columns = np.arange(inputs.contexts.n_far - 1, dtype=np.int32)
    far = columns + (columns >= left_out[..., None])  # 0 … F-1 without each candidate
    without = inputs.evaluate_shared("leave-one-out", measure, far)
    return without - inputs.evaluate(measure, inputs.contexts.all_far)


@register_forms("leave-one-in")
def leave_one_in(inputs: SelectorInput, measure: str = "loss") -> np.ndarray:
    """L_short - loss(t | C_short and i), (m, C) nats; of a divergence, how much nearer to p_long i brings C_short.

    Where tokens are ranked with sinks, both are given these too.
    """
    added = inputs.all_candidates if inputs.columns is None else inputs.columns
    beside = inputs.evaluate_shared("leave-one-in", measure, inputs.with_sinks(added[..., None]))
    return inputs.evaluate(measure, inputs.with_sinks(NO_FAR)) - beside


@register("greedy", SIGNED, by_subsets=True)
def greedy(inputs: SelectorInput, measure: str = "loss") -> Selection:
    """Forward selection: each round adds the token that lowers the loss most, given those already chosen.

    Influence: what the token took off the loss in its round, nats; it may be negative, since k tokens are chosen. Of
    another measure the same.
    """
    open_ = inputs.candidates
    count = len(open_)
    chosen = np.empty((count, 0), dtype=np.int64)
    previous = inputs.evaluate(measure, inputs.with_sinks(NO_FAR))
    gains = []
    for round_index in range(min(inputs.k, open_.shape[1])):
        if round_index == 0 and inputs.columns is None:  # shared by the targets of a block
            after = inputs.evaluate(measure, inputs.with_sinks(inputs.all_candidates[:, None]))
        else:
            beside = np.broadcast_to(chosen[:, None], (*open_.shape, chosen.shape[1]))
            subsets = np.concatenate([beside, open_[:, :, None]], axis=2)
            after = inputs.evaluate(measure, inputs.with_sinks(subsets))
        best = after.argmin(axis=1)[:, None]
        added = np.take_along_axis(open_, best, axis=1)
        chosen = np.concatenate([chosen, added], axis=1)
        lowest = np.take_along_axis(after, best, axis=1)
        gains.append(previous - lowest)
        previous = lowest
        left = np.arange(open_.shape[1]) != best
        open_ = open_[left].reshape(count, -1)
    return Selection(chosen, np.concatenate(gains, axis=1))


@register("greedy-kl", BLIND, by_subsets=True)
def greedy_kl(inputs: SelectorInput) -> Selection:
    """Forward selection: each round adds the token that brings the prediction nearest to p_long in KL, nats."""
    return greedy(inputs, "kl")


@register("halving", SIGNED, by_subsets=True)
def halving(inputs: SelectorInput, measure: str = "loss") -> Selection:
    """Leave one out of what is left, drop the half of least influence, and again, until one is left [ours].

    So it sees tokens that stand in for one another: with both there neither has influence, without the one the other
    has. The first round is leave-one-out, whose passes the targets of a block share; the others cost about C passes a
    target. Influence: that of a token in the round that it was dropped in, nats, or of another measure.
    """
    left = inputs.candidates
    ranked = np.empty((len(left), 0), dtype=left.dtype)
    influences = np.empty(ranked.shape)
    by_leaving_one_out = leave_one_out(inputs, measure)
    while True:
        order = np.argsort(-by_leaving_one_out, axis=1, kind="stable")
        kept = order.shape[1] // 2
        last, rest = order[:, kept:], np.sort(order[:, :kept], axis=1)
        ranked = np.concatenate([np.take_along_axis(left, last, axis=1), ranked], axis=1)
        influences = np.concatenate(
            [np.take_along_axis(by_leaving_one_out, last, axis=1), influences], axis=1
        )
        if not kept:
            break
        left = np.take_along_axis(left, rest, axis=1)
        all_but_one = ~np.eye(kept, dtype=bool)
        without = np.stack([left[:, row] for row in all_but_one], axis=1)  # (m, kept, kept - 1)
        with_all = inputs.evaluate(measure, inputs.with_sinks(left[:, None]))
        by_leaving_one_out = inputs.evaluate(measure, inputs.with_sinks(without)) - with_all
    return Selection(ranked[:, : inputs.k], influences[:, : inputs.k])


@register("halving-kl", BLIND, by_subsets=True)
def halving_kl(inputs: SelectorInput) -> Selection:
    """`halving` by KL to p_long."""
    return halving(inputs, "kl")


@register("spans", SIGNED, by_subsets=True)
def spans(inputs: SelectorInput) -> Selection:
    """The tokens of the spans without which the loss is highest: leave-one-out of spans, from coarse to fine [ours].

    Spans of the candidates are left out one at a time. The best are cut into `_SPLIT` parts, which are left out in
    their turn, down to `_SHORTEST` tokens: the hierarchy of AttriBoT (arXiv 2411.15102), at about log F instead of F
    passes. Every level keeps spans of at least 2 k tokens, two at least. Influence of a token: that of its span, nats.
    """
    candidates = inputs.candidates
    n_far = inputs.contexts.n_far
    count, number = candidates.shape
    shared = inputs.columns is None  # then the targets of a block share the passes of the first level
    levels = math.floor(math.log(number / (2 * _SHORTEST), _SPLIT))
    width = _SHORTEST * _SPLIT ** max(0, levels)
    width = min(width, number)
    long = inputs.losses(inputs.contexts.all_far)
    starts = np.broadcast_to(np.arange(0, number, width), (count, -(-number // width)))
    while True:
        starts = np.minimum(starts, number - width)
        if shared:
            [without] = _without_spans(candidates[:1], starts[:1], width, n_far)
        else:
            without = _without_spans(candidates, starts, width, n_far)
        influence = inputs.losses(without) - long
        order = np.argsort(-influence, axis=1, kind="stable")
        if width <= _SHORTEST:
            break
        kept_spans = max(2, math.ceil(2 * inputs.k / width))
        kept = np.take_along_axis(starts, order[:, :kept_spans], axis=1)
        width //= _SPLIT
        starts = (kept[..., None] + width * np.arange(_SPLIT)).reshape(count, -1)
        shared = False
    best = np.full((count, number), -np.inf)
    for start, gain in zip(starts.T, influence.T, strict=True):
        columns = start[:, None] + np.arange(width)
        before = np.take_along_axis(best, columns, axis=1)
        larger = np.maximum(before, gain[:, None])
        np.put_along_axis(best, columns, larger, axis=1)
    return most_influential(inputs, best)


def _without_spans(candidates: np.ndarray, starts: np.ndarray, width: int, n_far: int) -> np.ndarray:
    """The far context without each span of candidates (m, C) that begins at ``starts`` (m, n), (m, n, F - width)."""
    rows = np.arange(len(candidates))[:, None, None]
    dropped = candidates[rows, starts[..., None] + np.arange(width)]
    kept = np.ones((*starts.shape, n_far), dtype=bool)
    np.put_along_axis(kept, dropped, False, axis=2)
    _, _, columns = np.nonzero(kept)
    return columns.reshape(*starts.shape, n_far - width)


@register_influence("gradient", SIGNED)
def gradient(inputs: SelectorInput) -> np.ndarray:
    """-∂ loss / ∂ (presence of i) in the long context, (m, C) nats: `Scorer.presence_gradient`, one backward pass."""
    slopes = inputs.scorer.presence_gradient(inputs.contexts, inputs.target_index)
    return inputs.at_candidates(slopes)


@register_influence("saliency", ABSOLUTE)
def saliency(inputs: SelectorInput) -> np.ndarray:
    """L2 norm of ∂ log p(x_t) / ∂ (embedding of i) in the long context, (m, C); Simonyan et al., arXiv 1312.6034."""
    norms = inputs.scorer.input_gradients(inputs.contexts, inputs.target_index)
    return inputs.at_candidates(norms)


@register_influence("input-x-gradient", ABSOLUTE)
def input_x_gradient(inputs: SelectorInput) -> np.ndarray:
    """L2 norm of embedding times gradient, element by element, (m, C), as inseq aggregates; arXiv 1605.01713."""
    norms = inputs.scorer.input_gradients(inputs.contexts, inputs.target_index, times_input=True)
    return inputs.at_candidates(norms)


@register("integrated-gradients", ABSOLUTE)
@dataclass(frozen=True)
class IntegratedGradients:
    """L2 norm of the integrated gradient of p(x_t), from the embedding of the end of text, (m, C); arXiv 1703.01365.

    As inseq has it. Embeddings of zero are no place to start from: there the gradient of a norm layer has no bound, and
    the sum does not converge (docs/method.md, 2.2).
    """

    steps: int = 50
    """Points of the path, as captum chooses them by default."""

    def __call__(self, inputs: SelectorInput) -> Selection:
        """S_k by that norm."""
        points, weights = np.polynomial.legendre.leggauss(self.steps)  # on [-1, 1]
        points = (1 + points) / 2
        weights = weights / 2
        path = list(zip(points.tolist(), weights.tolist(), strict=True))
        norms = inputs.scorer.integrated_gradients(inputs.contexts, inputs.target_index, path=path)
        return most_influential(inputs, inputs.at_candidates(norms))


@register_influence("attention", BLIND)
def attention(inputs: SelectorInput) -> np.ndarray:
    """Attention of the last position to i in the long context, mean over heads and layers, (m, C)."""
    received = inputs.scorer.last_attention(inputs.contexts, inputs.target_index)
    return inputs.at_candidates(received)


@register_influence("random", CONTROL)
def random(inputs: SelectorInput) -> np.ndarray:
    """A random order, (m, C), a pure function of (seed, target): the control for choosing at all."""
    block, offset = inputs.target_index.T
    draws = []
    for target in inputs.contexts.target_id[block, offset]:
        generator = np.random.default_rng([Stream.RANDOM_SELECTOR, inputs.seed, target])
        draws.append(generator.random(inputs.contexts.n_far))
    return inputs.at_candidates(np.stack(draws))


@register_influence("nearest", CONTROL)
def nearest(inputs: SelectorInput) -> np.ndarray:
    """The later the more, (m, C): the far tokens closest to the short context come first."""
    return inputs.candidates.astype(float)


# --- eviction policies, each defined in `analysis.policies` ---


@dataclass(frozen=True)
class ByPolicy:
    """The selector of an eviction policy: heads keep tokens of their own, and as text the mean over heads chooses."""

    policy: Policy

    def __call__(self, inputs: SelectorInput) -> Selection:
        """S_k, by head."""
        from analysis.policies.seen import Seen  # the names of selectors are known without torch

        seen = Seen.of(
            inputs.scorer,
            inputs.contexts,
            inputs.target_index,
            blind=self.policy.blind,
            encode=inputs.encode,
        )
        by_head = self.policy.scores(seen)
        keep = self.policy.keeping(seen)
        chosen = most_influential(inputs, inputs.at_candidates(by_head.mean(axis=1)))
        return replace(chosen, by_head=by_head, keep=None if keep is first_of_each_head else keep)


for _name, _policy in POLICIES.items():
    register(_name, BLIND)(_policy)
