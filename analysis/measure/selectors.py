"""Selectors: which far tokens influence a prediction most (docs/method.md, 2.2), each registered at its definition.

Shapes: n blocks, m targets that are asked for, N long and M short context length, F = N - M far tokens, C candidates
among them, k selected tokens.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.text.contexts import Contexts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream

if TYPE_CHECKING:  # the names of selectors are known without torch
    from analysis.model.scorer import Scorer


@dataclass(frozen=True)
class Question:
    """What a selector is asked: the k most influential of the candidates, of every target that is asked for."""

    scorer: Scorer
    contexts: Contexts
    seed: int
    """Seed of selectors that draw."""
    k: int
    asked: np.ndarray | None = None
    """(m, 2) block and place in it of each target; None means all, block by block."""
    columns: np.ndarray | None = None
    """Candidates, (m, C) columns of the far context, ascending; None means all of it."""

    @property
    def targets(self) -> np.ndarray:
        """(m, 2) block and place."""
        return self.contexts.all_targets if self.asked is None else self.asked

    @property
    def candidates(self) -> np.ndarray:
        """(m, C) columns, ascending."""
        if self.columns is not None:
            return self.columns
        return np.broadcast_to(np.arange(self.contexts.n_far), (len(self.targets), self.contexts.n_far))

    def losses(self, far: np.ndarray) -> np.ndarray:
        """`Scorer.losses` of subsets (m, C, j) or (C, j) for the targets, (m, C)."""
        return self.scorer.losses(self.contexts, far, self.targets)


@dataclass(frozen=True)
class Selection:
    """S_k of every target, most influential first."""

    columns: np.ndarray
    """(m, k) columns of the far context."""
    influence: np.ndarray
    """(m, k) influence of each in the selector's unit: nats, or a share of the attention."""
    scores: np.ndarray | None = None
    """(m, F) influence of every far token, NaN where the selector gives it none; None of a sequential one (`greedy`),
    whose influence is that of a token given those before it."""


_SPLIT, _SHORTEST = 4, 4
"""Parts that a span is cut into, and tokens of the shortest spans."""

Selector = Callable[[Question], Selection]
Influence = Callable[[Question], np.ndarray]
"""From a question to the influence of every candidate, (m, C)."""
SELECTORS: dict[str, Selector] = {}


def register(name: str) -> Callable[[Selector], Selector]:
    """Make a selector available by name."""

    def add(selector: Selector) -> Selector:
        SELECTORS[name] = selector
        return selector

    return add


def register_influence(name: str) -> Callable[[Influence], Influence]:
    """Make the selector available by name that takes the candidates of largest influence."""

    def add(influence: Influence) -> Influence:
        SELECTORS[name] = lambda question: most_influential(question, influence(question))
        return influence

    return add


def most_influential(question: Question, influence: np.ndarray) -> Selection:
    """The k candidates of largest influence (m, C); equal influences keep the order of the text."""
    order = np.argsort(-influence, axis=1, kind="stable")[:, : question.k]
    scores = np.full((len(influence), question.contexts.n_far), np.nan)
    np.put_along_axis(
        scores, question.candidates, np.where(np.isfinite(influence), influence, np.nan), axis=1
    )
    return Selection(
        np.take_along_axis(question.candidates, order, axis=1),
        np.take_along_axis(influence, order, axis=1),
        scores,
    )


def find_selector(name: str) -> Selector:
    """The selector of that name, screened forms (`screened`) included. Raises `UserError` that lists the choices."""
    exact, at, screen = name.partition("@")
    if at:
        proposer, _, count = screen.rpartition(":")
        if not count.isdecimal() or not proposer:
            raise UserError(
                f"{name!r} is no screened selector; write EXACT@PROPOSER:m, such as leave-one-out@gradient:32"
            )
        return screened(_registered(exact), _registered(proposer), int(count), name)
    return _registered(name)


def _registered(name: str) -> Selector:
    if name not in SELECTORS:
        near = difflib.get_close_matches(name, SELECTORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"unknown selector {name!r}; choose among {', '.join(SELECTORS)}, or EXACT@PROPOSER:m{hint}"
        )
    return SELECTORS[name]


def check_selector(name: str, *, k_max: int, n_far: int) -> None:
    """Raise `UserError` where a selector does not exist, or is screened by fewer than k or more than F candidates."""
    find_selector(name)
    if "@" in name and not k_max <= (m := int(name.rpartition(":")[2])) <= n_far:
        raise UserError(f"{name}: m = {m} must be at least k = {k_max} and at most the {n_far} far tokens")


def screened(exact: Selector, proposer: Selector, count: int, name: str) -> Selector:
    """The choice of ``exact`` among the ``count`` tokens that ``proposer`` puts first (m of the screened forms).

    Costs what the proposer costs and count / F of what the exact selector costs.
    """

    def select(question: Question) -> Selection:
        proposed = proposer(replace(question, k=count)).columns
        return exact(replace(question, columns=np.sort(proposed, axis=1)))

    select.__name__ = name
    return select


@register_influence("leave-one-out")
def leave_one_out(question: Question) -> np.ndarray:
    """loss(t | C_long without i) - L_long, (m, C) nats: our Eq. 20 [ours; its text is not public]."""
    n_far = question.contexts.n_far
    left_out = np.arange(n_far) if question.columns is None else question.columns
    columns = np.arange(n_far - 1)
    without = question.losses(columns + (columns >= left_out[..., None]))  # 0 … F-1 without each candidate
    return without - question.losses(np.arange(n_far)[None])


@register_influence("leave-one-in")
def leave_one_in(question: Question) -> np.ndarray:
    """L_short - loss(t | C_short and i), (m, C) nats."""
    each = np.arange(question.contexts.n_far) if question.columns is None else question.columns
    return _short_losses(question) - question.losses(each[..., None])


@register("greedy")
def greedy(question: Question) -> Selection:
    """Forward selection: each round adds the token that lowers the loss most, given those already chosen.

    Influence: what the token took off the loss in its round, nats; it may be negative, since k tokens are chosen.
    """
    open_ = question.candidates
    count = len(open_)
    chosen = np.empty((count, 0), dtype=np.int64)
    loss = _short_losses(question)
    gains = []
    for number in range(question.k):
        if number == 0 and question.columns is None:
            losses = question.losses(
                np.arange(question.contexts.n_far)[:, None]
            )  # shared by the targets of a block
        else:
            beside = np.broadcast_to(chosen[:, None], (*open_.shape, chosen.shape[1]))
            losses = question.losses(np.sort(np.concatenate([beside, open_[:, :, None]], axis=2), axis=2))
        best = losses.argmin(axis=1)[:, None]
        chosen = np.concatenate([chosen, np.take_along_axis(open_, best, axis=1)], axis=1)
        gains.append(loss - np.take_along_axis(losses, best, axis=1))
        loss = np.take_along_axis(losses, best, axis=1)
        left = np.arange(open_.shape[1]) != best
        open_ = open_[left].reshape(count, -1)
    return Selection(chosen, np.concatenate(gains, axis=1))


@register("spans")
def spans(question: Question) -> Selection:
    """The tokens of the spans without which the loss is highest: leave-one-out of spans, from coarse to fine [ours].

    Spans of the candidates are left out one at a time. The best are cut into `_SPLIT` parts, which are left out in
    their turn, down to `_SHORTEST` tokens: the hierarchy of AttriBoT (arXiv 2411.15102), at about log F instead of F
    passes. Every level keeps spans of at least 2 k tokens, two at least. Influence of a token: that of its span, nats.
    """
    candidates, n_far = question.candidates, question.contexts.n_far
    count, number = candidates.shape
    shared = question.columns is None  # then the targets of a block share the passes of the first level
    width = _SHORTEST * _SPLIT ** max(0, math.floor(math.log(number / (2 * _SHORTEST), _SPLIT)))
    width = min(width, number)
    long = question.losses(np.arange(n_far)[None])
    starts = np.broadcast_to(np.arange(0, number, width), (count, -(-number // width)))
    while True:
        starts = np.minimum(starts, number - width)
        asked = candidates[:1] if shared else candidates
        without = _without_spans(asked, starts[: len(asked)], width, n_far)
        influence = question.losses(without[0] if shared else without) - long
        order = np.argsort(-influence, axis=1, kind="stable")
        if width <= _SHORTEST:
            break
        kept = np.take_along_axis(starts, order[:, : max(2, -(-2 * question.k // width))], axis=1)
        width //= _SPLIT
        starts = (kept[..., None] + width * np.arange(_SPLIT)).reshape(count, -1)
        shared = False
    best = np.full((count, number), -np.inf)
    for start, gain in zip(starts.T, influence.T, strict=True):
        columns = start[:, None] + np.arange(width)
        own = np.maximum(np.take_along_axis(best, columns, axis=1), gain[:, None])
        np.put_along_axis(best, columns, own, axis=1)
    return most_influential(question, best)


def _without_spans(candidates: np.ndarray, starts: np.ndarray, width: int, n_far: int) -> np.ndarray:
    """The far context without each span of candidates (m, C) that begins at ``starts`` (m, n), (m, n, F - width)."""
    rows = np.arange(len(candidates))[:, None, None]
    dropped = candidates[rows, starts[..., None] + np.arange(width)]
    kept = np.ones((*starts.shape, n_far), dtype=bool)
    np.put_along_axis(kept, dropped, False, axis=2)
    return np.nonzero(kept)[2].reshape(*starts.shape, n_far - width)


@register_influence("gradient")
def gradient(question: Question) -> np.ndarray:
    """-∂ loss / ∂ (presence of i) in the long context, (m, C) nats: `Scorer.presence_gradient`, one backward pass."""
    slopes = question.scorer.presence_gradient(question.contexts, question.targets)
    return np.take_along_axis(slopes, question.candidates, axis=1)


@register_influence("attention")
def attention(question: Question) -> np.ndarray:
    """Attention of the last position to i in the long context, mean over heads and layers, (m, C)."""
    weights = question.scorer.last_attention(question.contexts, question.targets)
    return np.take_along_axis(weights, question.candidates, axis=1)


@register_influence("random")
def random(question: Question) -> np.ndarray:
    """A random order, (m, C), a pure function of (seed, target): the control for choosing at all."""
    draws = [
        np.random.default_rng([Stream.RANDOM_SELECTOR, question.seed, target]).random(question.contexts.n_far)
        for target in question.contexts.target_id[tuple(question.targets.T)]
    ]
    return np.take_along_axis(np.stack(draws), question.candidates, axis=1)


@register_influence("nearest")
def nearest(question: Question) -> np.ndarray:
    """The later the more, (m, C): the far tokens closest to the short context come first."""
    return question.candidates.astype(float)


def _short_losses(question: Question) -> np.ndarray:
    """L_short, (m, 1) nats."""
    return question.losses(np.empty((1, 0), dtype=np.int64))
