"""Selectors that compare how good predictions are from subsets of the far context.

Leaving one out, leaving one in, forward selection and what is built of them.
Shapes: n blocks, m targets, N long and M short context length, F = N - M far tokens, C candidates among them, k
selected tokens.
"""

from __future__ import annotations

import math

import numpy as np

from analysis.contexts import NO_FAR
from analysis.selectors.registry import BLIND, SIGNED, register
from analysis.selectors.selector import Selection, SelectorInput, most_influential, register_forms

_SPLIT, _SHORTEST = 4, 4
"""Parts that a span is cut into, and tokens of the shortest spans."""


@register_forms("leave-one-out")
def leave_one_out(inputs: SelectorInput, measure: str = "loss") -> np.ndarray:
    """loss(t | C_long without i) - L_long, (m, C) nats: our Eq. 20 [ours; its text was not at hand].

    Of another measure the same: a divergence from p_long is 0 given C_long.
    """

    def without_each(left_out: np.ndarray) -> np.ndarray:
        columns = np.arange(inputs.contexts.n_far - 1, dtype=np.int32)
        return columns + (columns >= left_out[..., None])

    without = inputs.evaluate_shared("leave-one-out", measure, without_each)
    return without - inputs.evaluate(measure, inputs.contexts.all_far)


@register_forms("leave-one-in")
def leave_one_in(inputs: SelectorInput, measure: str = "loss") -> np.ndarray:
    """L_short - loss(t | C_short and i), (m, C) nats; of a divergence, how much nearer to p_long i brings C_short.

    Where tokens are ranked with sinks, both are given these too.
    """

    def with_each(added: np.ndarray) -> np.ndarray:
        return inputs.with_sinks(added[..., None])

    beside = inputs.evaluate_shared("leave-one-in", measure, with_each)
    return inputs.evaluate(measure, inputs.with_sinks(NO_FAR)) - beside


@register("greedy", SIGNED, by_subsets=True, ranks_only_k=True, scores_only_k=True)
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


@register("greedy-kl", BLIND, method="greedy", by_subsets=True, ranks_only_k=True, scores_only_k=True)
def greedy_kl(inputs: SelectorInput) -> Selection:
    """Forward selection: each round adds the token that brings the prediction nearest to p_long in KL, nats."""
    return greedy(inputs, "kl")


@register("halving", SIGNED, by_subsets=True, scores_only_k=True)
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


@register("halving-kl", BLIND, method="halving", by_subsets=True, scores_only_k=True)
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
