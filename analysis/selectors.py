"""Selectors: how much each far token influences a prediction (METHOD 2.2). Each is registered beside its definition.

Shapes: n targets, N long and M short context length, F = N - M far tokens (the candidates).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.contexts import Contexts
from analysis.scorer import Scorer, long_columns, short_columns
from olmo_sparsity.errors import UserError

_RANDOM_STREAM = 3


@dataclass(frozen=True)
class Question:
    """What a selector is asked: the influence of every far token of these contexts."""

    scorer: Scorer
    contexts: Contexts
    seed: int
    """Seed of selectors that draw."""


Selector = Callable[[Question], np.ndarray]
SELECTORS: dict[str, Selector] = {}
CONTROLS = ("random", "nearest")
"""Selectors that do not look at the model: what any choice of k tokens recovers."""


def register(name: str) -> Callable[[Selector], Selector]:
    """Make a selector available by name."""

    def add(selector: Selector) -> Selector:
        SELECTORS[name] = selector
        return selector

    return add


def find_selector(name: str) -> Selector:
    """The selector of that name. Raises `UserError` that lists the choices."""
    if name not in SELECTORS:
        near = difflib.get_close_matches(name, SELECTORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown selector {name!r}; choose among {', '.join(SELECTORS)}{hint}")
    return SELECTORS[name]


@register("leave-one-out")
def leave_one_out(question: Question) -> np.ndarray:
    """loss(t | C_long without i) - L_long, (n, F) nats: our Eq. 20 [ours; its text is not public]."""
    contexts = question.contexts
    candidates = np.arange(contexts.n_far)
    columns = np.arange(contexts.n_long - 1)
    keep = columns[None] + (columns[None] >= candidates[:, None])  # row i is 0 … N-1 without i
    without = question.scorer.losses(contexts, keep)
    return without - question.scorer.losses(contexts, long_columns(contexts))


@register("leave-one-in")
def leave_one_in(question: Question) -> np.ndarray:
    """L_short - loss(t | C_short and i), (n, F) nats."""
    contexts = question.contexts
    candidates = np.arange(contexts.n_far)[:, None]
    short = short_columns(contexts)
    keep = np.concatenate([candidates, np.broadcast_to(short, (contexts.n_far, contexts.n_short))], axis=1)
    return question.scorer.losses(contexts, short) - question.scorer.losses(contexts, keep)


@register("random")
def random(question: Question) -> np.ndarray:
    """A random order, (n, F), a pure function of (seed, target): the control for choosing at all."""
    draws = [
        np.random.default_rng([_RANDOM_STREAM, question.seed, target]).random(question.contexts.n_far)
        for target in question.contexts.target_id
    ]
    return np.stack(draws)


@register("nearest")
def nearest(question: Question) -> np.ndarray:
    """The later the more, (n, F): the far tokens closest to the short context come first."""
    order = np.arange(question.contexts.n_far, dtype=float)
    return np.broadcast_to(order, (len(question.contexts), len(order)))


def most_influential(influence: np.ndarray, k: int) -> np.ndarray:
    """S_k in order of influence, (n, k) columns; equal influences keep the order of the text."""
    return np.argsort(-influence, axis=1, kind="stable")[:, :k]
