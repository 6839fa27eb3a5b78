"""Seconds of selectors: the engine against a plain loop over candidates, and screened forms against exact ones.

Shapes: n targets, N long and M short context length, F = N - M far tokens, k selected ones, K values of k.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from analysis.measure.influence import TARGETS_PER_ROUND, selected_losses
from analysis.measure.selectors import Question, Selection, find_selector
from analysis.model.scorer import Scorer
from analysis.stats.bootstrap import ClusterBootstrap, ratio_of_sums
from analysis.text.contexts import Contexts
from benchmarks.influence import BenchmarkTargets, Json
from benchmarks.plain_loop import PLAIN_SELECTORS, plain_selection
from benchmarks.timing import paired_ratio, summarise, time_in_turn
from olmo_sparsity.util.progress import progress

PLAIN = "plain loop"
K = 8
"""Tokens that are selected."""
RECOVERY_KS = (4, 8)
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
Rounds = Sequence[Sequence[Contexts]]
"""What every selector chooses from in each round; a round is timed as a whole."""


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
        seconds, chosen = run_in_turn(choosers, [[contexts]] * repeats, device, f"{name}, plain and engine")
        timed = summarise(seconds, baseline=PLAIN, amount=len(contexts), unit="targets/s")
        compared = {label: compare_selections(chosen[PLAIN], chosen[label], k) for label in scorers}
        selectors[name] = {**timed, "seconds": seconds, "selections": compared}
    return {"k": k, "targets": len(contexts), "selectors": selectors}


def measure_screened(model: Any, device: str, targets: BenchmarkTargets, count: int) -> Json:
    """What screened forms cost, and keep of net recovery, in relation to their exact selectors.

    A round is what a measurement selects at once: a few targets, true and placebo far context. Net recovery needs a
    placebo: without one only the cost is measured.
    """
    n_far = targets.contexts.n_far
    scorer, k = Scorer(model, device=device), min(K, n_far)
    forms = {exact: [form for form in names if k <= _m(form) <= n_far] for exact, names in SCREENS.items()}
    parts = [part.take(slice(count)) for part in (targets.contexts, targets.placebo) if part is not None]
    tokens: dict[str, int] = {}
    choosers: dict[str, Choose] = {
        name: partial(_select_counting, name, scorer, k, tokens)
        for exact, screens in forms.items()
        for name in (exact, *screens)
    }
    starts = range(0, len(parts[0]), TARGETS_PER_ROUND)
    rounds = [[part.take(slice(start, start + TARGETS_PER_ROUND)) for part in parts] for start in starts]
    seconds, chosen = run_in_turn(choosers, rounds, device, "screened and exact selectors")
    contexts_read = 1 + sum(len(part) for part in parts)  # the warm-up reads one
    rows = {
        name: {
            "exact": exact,
            "seconds_per_context": sum(seconds[name]) / (contexts_read - 1),
            "tokens_per_context": tokens[name] / contexts_read,
            "tokens_ratio": tokens[name] / tokens[exact],
            "seconds_ratio": paired_ratio(seconds[name], seconds[exact]),
        }
        for exact, screens in forms.items()
        for name in (exact, *screens)
    }
    if targets.placebo is not None:
        ks = [each for each in RECOVERY_KS if each <= k]
        columns = {
            name: [np.concatenate([one[i].columns for one in each]) for i in range(2)]
            for name, each in chosen.items()
        }
        recovered = net_recoveries(scorer, parts, columns, ks, targets, forms)
        rows = {name: {**row, **recovered[name]} for name, row in rows.items()}
    documents = len(np.unique(targets.document[:count]))
    return {
        "k": k,
        "targets": len(parts[0]),
        "documents": documents,
        "rounds": len(rounds),
        "selectors": rows,
    }


def run_in_turn(
    choosers: dict[str, Choose], rounds: Rounds, device: str, description: str
) -> tuple[dict[str, list[float]], dict[str, list[list[Selection]]]]:
    """Seconds and selections of each chooser, round by round, after a warm-up on one target."""
    todo = [[rounds[0][0].take(slice(1))], *rounds]
    chosen: dict[str, list[list[Selection]]] = {name: [] for name in choosers}
    with progress(description, len(todo) * len(choosers), "runs") as advance:

        def runner(name: str) -> Callable[[], None]:
            upcoming = iter(todo)

            def run() -> None:
                chosen[name].append([choosers[name](contexts) for contexts in next(upcoming)])
                advance()

            return run

        runners = {name: runner(name) for name in choosers}
        seconds = time_in_turn(runners, len(rounds), partial(synchronise, device), warm_up=1)
    return seconds, {name: found[1:] for name, found in chosen.items()}


def synchronise(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def compare_selections(
    plain: Sequence[Sequence[Selection]], engine: Sequence[Sequence[Selection]], k: int
) -> Json:
    """Shares of targets whose first k tokens are the same, as a set and in order, over all rounds.

    The largest difference of influence [nats] is over every token that both rank, also where they rank it differently.
    """
    same_set, same_order, differences = [], [], [0.0]
    for first, second in zip(plain, engine, strict=True):
        for a, b in zip(first, second, strict=True):
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


def net_recoveries(
    scorer: Scorer,
    parts: Sequence[Contexts],
    columns: dict[str, list[np.ndarray]],
    ks: Sequence[int],
    targets: BenchmarkTargets,
    forms: dict[str, list[str]],
) -> dict[str, Json]:
    """Net recovery of each selector at each k, and its ratio to that of the exact selector, with 95 % intervals.

    ``parts``: true and placebo contexts; ``columns``: what each selector chose from both, (n, k). Net recovery is
    Σ (placebo L_k - L_k) / Σ (L_short - L_long) (METHOD 2.3): L_short cancels. Where the exact one is not positive
    the ratio is undefined.
    """
    count = len(parts[0])
    gain = targets.gain_nats[:count, None]
    net = {}
    for name, (true, placebo) in columns.items():
        true_nats, placebo_nats = (
            selected_losses(scorer, part, each, ks) for part, each in zip(parts, (true, placebo), strict=True)
        )
        net[name] = placebo_nats - true_nats
    bootstrap = ClusterBootstrap(np.concatenate([*net.values(), gain], axis=1), targets.document[:count])
    first = {name: number * len(ks) for number, name in enumerate(net)}

    def interval(above: int, below: int) -> Json:
        return bootstrap.interval(ratio_of_sums(above, below)).as_dict()

    return {
        name: {
            "net_recovery": {str(k): interval(first[name] + i, len(net) * len(ks)) for i, k in enumerate(ks)},
            "net_recovery_kept": {
                str(k): interval(first[name] + i, first[exact] + i) for i, k in enumerate(ks)
            },
        }
        for exact, screens in forms.items()
        for name in (exact, *screens)
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
