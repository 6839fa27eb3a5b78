"""Do influence selectors find the needle that a prediction needs (METHOD 2.6)? It joins retrieval to the k influential
tokens of a prediction.

The target is the first value token; the short context is the second key, and everything before it is far. The needle's
own tokens are the earlier key and its first value token, q + 1 far columns. The placebo [ours] is the far context of
another sample, with its own needle, whose value is not the target: a selector that finds those tokens as often goes by
their looks, not by what they do for the target.

Shapes: n samples, N tokens of context, q of the key, F = N - q far tokens, K values of how many are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.measure.needles import Cell, Needles
from analysis.measure.planted import KS, chance_recall, found_at
from analysis.measure.selectors import Question, check_selector, find_selector
from analysis.model.load import LoadedModel
from analysis.model.scorer import Scorer
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, ratio_of_sums
from analysis.text.contexts import Contexts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress

Json = dict[str, Any]


@dataclass(frozen=True)
class RecallOptions:
    """Which selectors are asked, of how many needles."""

    selectors: tuple[str, ...]
    length: int
    """N."""
    depth: float
    samples: int


def check_recall(options: RecallOptions, key_tokens: int) -> None:
    """Raise `UserError` for a selector that there is not, or a placebo that nobody could give."""
    if options.samples < 2:
        raise UserError("--recall-samples must be 2 or more: the placebo is another sample")
    if options.length < 2 * key_tokens + 2:
        raise UserError(
            f"--recall-length {options.length} does not hold a needle of 1 with its key of {key_tokens} twice and "
            f"text; raise it to at least {2 * key_tokens + 2}"
        )
    for name in options.selectors:
        check_selector(name, k_max=max(KS), n_far=options.length - key_tokens)


def needle_contexts(needles: Needles, options: RecallOptions) -> tuple[Contexts, Contexts, np.ndarray]:
    """True and placebo contexts of the first n samples, and the needle's far columns, (q + 1,)."""
    q, cell = needles.key.shape[1], Cell(1, options.length, options.depth)
    rows = needles.contexts(cell)[: options.samples]
    contexts = Contexts(rows[:, :-1], rows[:, -1], np.arange(len(rows)), q)
    donors = np.roll(np.arange(len(rows)), 1)
    columns = needles.start(cell) + np.arange(q + 1)
    return contexts, contexts.with_far(contexts.tokens[donors, : contexts.n_far]), columns


def recall_of_needles(
    loaded: LoadedModel, needles: Needles, options: RecallOptions, *, device: str, label: str, seed: int
) -> Json:
    """Recall of the needle's q + 1 tokens by selector and k, true and placebo, with intervals over documents."""
    contexts, placebos, columns = needle_contexts(needles, options)
    loaded.check_context(options.length)
    scorer = Scorer(loaded.model.to(device), device=device)
    planted = np.tile(columns, (len(contexts), 1))
    ks = [k for k in KS if k <= contexts.n_far]
    document = needles.segments.document[: len(contexts)]
    found: Json = {}
    with progress(f"recall, {label}", 2 * len(options.selectors), "selectors") as advance:
        for name in options.selectors:
            shares = []
            for some in (contexts, placebos):
                selected = find_selector(name)(Question(scorer, some, seed, max(ks))).columns
                shares.append(found_at(selected, planted, ks).mean(axis=2))
                advance(1)
            found[name] = _intervals(shares, ks, document, seed)
    chance = {str(k): chance_recall(k, contexts.n_far) for k in ks}
    return {
        "ks": ks,
        "needle_columns": len(columns),
        "samples": len(contexts),
        "chance": chance,
        "selectors": found,
    }


def _intervals(shares: list[np.ndarray], ks: list[int], document: np.ndarray, seed: int) -> Json:
    """Mean true and placebo recall (n, K) of every k."""
    columns = np.concatenate([np.ones((len(document), 1)), *shares], axis=1)
    bootstrap = ClusterBootstrap(columns, document, resamples=DEFAULT_RESAMPLES, seed=seed)
    return {
        str(k): {
            name: bootstrap.interval(ratio_of_sums(1 + which * len(ks) + place, 0)).as_dict()
            for which, name in enumerate(("recall", "placebo_recall"))
        }
        for place, k in enumerate(ks)
    }
