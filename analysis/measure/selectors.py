"""Selectors: which far tokens influence a prediction most (docs/method.md, 2.2), each registered at its definition.

Shapes: n targets, N long and M short context length, F = N - M far tokens, C candidates among them, k selected tokens.
"""

from __future__ import annotations

import difflib
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
    """What a selector is asked: the k most influential of the candidates, of every context."""

    scorer: Scorer
    contexts: Contexts
    seed: int
    """Seed of selectors that draw."""
    k: int
    columns: np.ndarray | None = None
    """Candidates, (n, C) columns of the far context, ascending; None means all of it."""

    @property
    def candidates(self) -> np.ndarray:
        """(n, C) columns, ascending."""
        if self.columns is not None:
            return self.columns
        return np.broadcast_to(np.arange(self.contexts.n_far), (len(self.contexts), self.contexts.n_far))


@dataclass(frozen=True)
class Selection:
    """S_k of every context, most influential first."""

    columns: np.ndarray
    """(n, k) columns of the far context."""
    influence: np.ndarray
    """(n, k) influence of each in the selector's unit: nats, or a share of the attention."""


Selector = Callable[[Question], Selection]
Influence = Callable[[Question], np.ndarray]
"""From a question to the influence of every candidate, (n, C)."""
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
    """The k candidates of largest influence (n, C); equal influences keep the order of the text."""
    order = np.argsort(-influence, axis=1, kind="stable")[:, : question.k]
    return Selection(
        np.take_along_axis(question.candidates, order, axis=1), np.take_along_axis(influence, order, axis=1)
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
    """loss(t | C_long without i) - L_long, (n, C) nats: our Eq. 20 [ours; its text is not public]."""
    contexts = question.contexts
    columns = np.arange(contexts.n_long - 1)
    keep = columns + (columns >= question.candidates[:, :, None])  # row i is 0 … N-1 without i
    without = question.scorer.losses(contexts, keep)
    return without - question.scorer.losses(contexts, contexts.long_columns)


@register_influence("leave-one-in")
def leave_one_in(question: Question) -> np.ndarray:
    """L_short - loss(t | C_short and i), (n, C) nats."""
    with_it = question.scorer.losses(
        question.contexts, _beside_short(question, question.candidates[:, :, None])
    )
    return question.scorer.losses(question.contexts, question.contexts.short_columns) - with_it


@register("greedy")
def greedy(question: Question) -> Selection:
    """Forward selection: each round adds the token that lowers the loss most, given those already chosen.

    Influence: what the token took off the loss in its round, nats; it may be negative, since k tokens are chosen.
    """
    contexts = question.contexts
    count = len(contexts)
    open_ = question.candidates
    chosen = np.empty((count, 0), dtype=np.int64)
    loss = question.scorer.losses(contexts, contexts.short_columns)
    gains = []
    for _ in range(question.k):
        beside = np.broadcast_to(chosen[:, None], (*open_.shape, chosen.shape[1]))
        far = np.sort(np.concatenate([beside, open_[:, :, None]], axis=2), axis=2)
        losses = question.scorer.losses(contexts, _beside_short(question, far))
        best = losses.argmin(axis=1)[:, None]
        chosen = np.concatenate([chosen, np.take_along_axis(open_, best, axis=1)], axis=1)
        gains.append(loss - np.take_along_axis(losses, best, axis=1))
        loss = np.take_along_axis(losses, best, axis=1)
        left = np.arange(open_.shape[1]) != best
        open_ = open_[left].reshape(count, -1)
    return Selection(chosen, np.concatenate(gains, axis=1))


@register_influence("gradient")
def gradient(question: Question) -> np.ndarray:
    """-∂ loss / ∂ (presence of i) in the long context, (n, C) nats: `Scorer.presence_gradient`, one backward pass."""
    return np.take_along_axis(
        question.scorer.presence_gradient(question.contexts), question.candidates, axis=1
    )


@register_influence("attention")
def attention(question: Question) -> np.ndarray:
    """Attention of the last position to i in the long context, mean over heads and layers, (n, C)."""
    return np.take_along_axis(question.scorer.last_attention(question.contexts), question.candidates, axis=1)


@register_influence("random")
def random(question: Question) -> np.ndarray:
    """A random order, (n, C), a pure function of (seed, target): the control for choosing at all."""
    draws = [
        np.random.default_rng([Stream.RANDOM_SELECTOR, question.seed, target]).random(question.contexts.n_far)
        for target in question.contexts.target_id
    ]
    return np.take_along_axis(np.stack(draws), question.candidates, axis=1)


@register_influence("nearest")
def nearest(question: Question) -> np.ndarray:
    """The later the more, (n, C): the far tokens closest to the short context come first."""
    return question.candidates.astype(float)


def _beside_short(question: Question, far: np.ndarray) -> np.ndarray:
    """Subsets of the far tokens ``far`` (n, C, j), ascending, and the short context: (n, C, j + M)."""
    short = question.contexts.short_columns
    return np.concatenate([far, np.broadcast_to(short, (*far.shape[:2], short.shape[1]))], axis=2)
