"""Seconds of selectors: the engine against a plain loop over candidates, and screened forms against exact ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from analysis.measure.selectors import Question, Selection, find_selector
from analysis.model.scorer import Scorer
from analysis.text.contexts import Contexts
from benchmarks.plain_loop import PLAIN_SELECTORS, plain_selection
from benchmarks.timing import Json, paired_ratio, summarise, synchroniser, time_in_turn
from olmo_sparsity.util.progress import progress

PLAIN = "plain loop"
K = 8
"""Tokens that are selected."""
TARGETS_PER_ROUND = 4
SCREENS = {
    "leave-one-out": [
        f"leave-one-out@{proposer}:{m}"
        for proposer in ("gradient", "attention", "leave-one-in")
        for m in (8, 16, 32)
    ],
    "greedy": ["greedy@gradient:32", "greedy@leave-one-out:32"],
}
"""Exact selectors, and the screened forms that stand in for them."""
_BACKWARD_FORWARDS = 2  # a backward pass computes about twice what its forward pass does

Choose = Callable[[Contexts], Selection]


def measure_speed(model: Any, device: str, contexts: Contexts, repeats: int) -> Json:
    """Targets per second of each selector, plain and by the engine, and whether both choose the same tokens.

    The plain loop computes in fp32. All candidates are ranked where the selector ranks them anyway; the first
    `K` count as selected.
    """
    scorers = {
        "engine": Scorer(model, device=device),
        "engine, bf16": Scorer(model, device=device, bf16=True),
        "engine, prefixes not shared": Scorer(model, device=device, share_prefixes=False),
    }
    k = min(K, contexts.n_far)
    selectors = {}
    for name in PLAIN_SELECTORS:
        ranked = k if name == "greedy" else contexts.n_far
        choosers: dict[str, Choose] = {PLAIN: partial(_plain, name, model, device, ranked)}
        choosers |= {label: partial(select, name, scorer, ranked) for label, scorer in scorers.items()}
        seconds, chosen = run_in_turn(choosers, [contexts] * repeats, device, f"{name}, plain and engine")
        timed = summarise(seconds, baseline=PLAIN, amount=len(contexts), unit="targets/s")
        compared = {label: compare_selections(chosen[PLAIN], chosen[label], k) for label in scorers}
        selectors[name] = {**timed, "seconds": seconds, "selections": compared}
    return {"k": k, "targets": len(contexts), "selectors": selectors}


def measure_screened(model: Any, device: str, contexts: Contexts) -> Json:
    """What screened forms cost in relation to their exact selectors, a few targets a round."""
    scorer, k = Scorer(model, device=device), min(K, contexts.n_far)
    exact_of = {
        name: exact
        for exact, forms in SCREENS.items()
        for name in (exact, *(form for form in forms if k <= _m(form) <= contexts.n_far))
    }
    tokens: dict[str, int] = {}
    choosers: dict[str, Choose] = {
        name: partial(_select_counting, name, scorer, k, tokens) for name in exact_of
    }
    starts = range(0, len(contexts), TARGETS_PER_ROUND)
    rounds = [contexts.take(slice(start, start + TARGETS_PER_ROUND)) for start in starts]
    seconds, _ = run_in_turn(choosers, rounds, device, "screened and exact selectors")
    rows = {
        name: {
            "exact": exact,
            "seconds_per_context": sum(seconds[name]) / len(contexts),
            "tokens_per_context": tokens[name] / (1 + len(contexts)),  # the warm-up reads one
            "tokens_ratio": tokens[name] / tokens[exact],
            "seconds_ratio": paired_ratio(seconds[name], seconds[exact]),
        }
        for name, exact in exact_of.items()
    }
    return {"k": k, "targets": len(contexts), "rounds": len(rounds), "selectors": rows}


def run_in_turn(
    choosers: dict[str, Choose], rounds: Sequence[Contexts], device: str, description: str
) -> tuple[dict[str, list[float]], dict[str, list[Selection]]]:
    """Seconds and selections of each chooser, round by round, after a warm-up on one target."""
    todo = [rounds[0].take(slice(1)), *rounds]
    chosen: dict[str, list[Selection]] = {name: [] for name in choosers}
    with progress(description, len(todo) * len(choosers), "runs") as advance:

        def run(name: str) -> None:
            contexts = todo[len(chosen[name])]
            chosen[name].append(choosers[name](contexts))
            advance()

        runners = {name: partial(run, name) for name in choosers}
        seconds = time_in_turn(runners, len(rounds), synchroniser(device), warm_up=1)
    return seconds, {name: found[1:] for name, found in chosen.items()}


def compare_selections(plain: Sequence[Selection], engine: Sequence[Selection], k: int) -> Json:
    """Shares of targets whose first k tokens are the same, as a set and in order, over all rounds.

    The largest difference of influence [nats] is over every token that both rank, also where they rank it differently.
    """
    same_set, same_order, differences = [], [], [0.0]
    for a, b in zip(plain, engine, strict=True):
        for row in range(len(a.columns)):
            x, y = a.columns[row], b.columns[row]
            same_order.append(np.array_equal(x[:k], y[:k]))
            same_set.append(set(x[:k].tolist()) == set(y[:k].tolist()))
            _, at_x, at_y = np.intersect1d(x, y, assume_unique=True, return_indices=True)
            apart = np.abs(a.influence[row][at_x] - b.influence[row][at_y])
            differences.append(float(apart.max(initial=0.0)))
    return {
        "same_set": statistics.mean(map(float, same_set)),
        "same_order": statistics.mean(map(float, same_order)),
        "largest_influence_difference_nats": max(differences),
    }


def select(name: str, scorer: Scorer, k: int, contexts: Contexts) -> Selection:
    """The k tokens that a selector of the engine puts first."""
    return find_selector(name)(Question(scorer, contexts, seed=0, k=k))


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """While it runs, every forward pass of an `AnalysedModel` appends the tokens that it computes.

    A pass that is differentiated counts three times, for its backward pass [ours].
    """
    counts: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input_ids = args[0] if args else kwargs["input_ids"]
        counts.append(input_ids.numel() * (1 + _BACKWARD_FORWARDS * torch.is_grad_enabled()))

    handle = model.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def _select_counting(
    name: str, scorer: Scorer, k: int, tokens: dict[str, int], contexts: Contexts
) -> Selection:
    with counted_tokens(scorer.model) as counts:
        selection = select(name, scorer, k, contexts)
    tokens[name] = tokens.get(name, 0) + sum(counts)
    return selection


def _plain(name: str, model: Any, device: str, k: int, contexts: Contexts) -> Selection:
    return Selection(*plain_selection(name, model, device, contexts, k))


def _m(form: str) -> int:
    """m of EXACT@PROPOSER:m."""
    return int(form.rpartition(":")[2])
