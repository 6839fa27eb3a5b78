"""Every number of a Result, as tidy frames with 95 % intervals: one row a number, in the columns value, low and high.

Shares and recoveries are fractions, losses nats per token. ``low`` and ``high`` are NaN where the data support no
interval. Of a Result joined of several trainings the numbers are those of all together, and the intervals also say how
much trainings differ. Every function takes ``resamples`` (default 2,000) and ``seed`` (0) of the bootstrap; all
intervals of a Result rest on the same resamples. Recoveries are of the targets over tau.

``selector`` may be ``best``: the lowest L_k of all selectors. ``far_context`` may be ``net``: true minus the placebo
where that is positive. Where a frame is of one k only it takes ``k``, by default 4 or the closest that was measured.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.result import Result
from analysis.stats.bootstrap import DEFAULT_RESAMPLES

BEST = "best"
NET = "net"


def counts(result: Result) -> dict[str, int]:
    """targets, targets_over_tau, targets_measured, documents, groups (where known), documents_over_tau,
    groups_over_tau, trainings: what `by_clusters` and the captions of figures read."""
    raise NotImplementedError


def recovery(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """selector, far_context ("true", "placebo", "net"), level, unit, sinks, k, value, low, high."""
    raise NotImplementedError


def losses(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean L_k in nats over the targets over tau: columns of `recovery` without "net"."""
    raise NotImplementedError


def shares(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """name, value, low, high. Names: loss_short_nats, loss_long_nats, gain_nats, absolute_gain_nats, share_over_tau,
    share_below_minus_tau, share_of_gain (of the net gain of all, held by those over tau); and of those over tau
    loss_short_over_tau_nats, loss_long_over_tau_nats."""
    raise NotImplementedError


def persistence(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """name, value, low, high of targets over tau under the selecting model, where results are cross-fitted:
    selecting_gain_nats, gain_nats, share_still_over_tau. No rows otherwise."""
    raise NotImplementedError


def differences(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """The default selector minus every other, paired: first, second, far_context ("true", "net"), k, value, low, high."""
    raise NotImplementedError


def gain_bins(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Recovery by gain of the target: from_nats, to_nats (inf), n_targets, n_documents, selector, far_context, k,
    value, low, high."""
    raise NotImplementedError


def near_copies(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """name, selector, far_context, k, n_targets, value, low, high; no rows where copies are unknown. Names: share (of
    all targets, that are near copies of training text), share_over_tau, recovery (without them)."""
    raise NotImplementedError


def kinds(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """kind, n_targets, n_targets_over_tau, n_documents_over_tau, n_groups_over_tau, name, selector, far_context, k,
    value, low, high. Names: share (of all targets), share_over_tau (of those over tau), gain_nats (mean of all of the
    kind), recovery (with selector, far_context and k)."""
    raise NotImplementedError


def distances(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """How far back the first k chosen tokens stand: selector, far_context, k, from_tokens, to_tokens (not included),
    uniform (share that tokens drawn uniformly would have), value, low, high."""
    raise NotImplementedError


def picks(
    result: Result, k: int | None = None, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """What kind of tokens the first k are: selector (or ``all far tokens``), far_context, k, kind, value, low, high.
    No rows where the result has no texts."""
    raise NotImplementedError


def tokens_needed(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Share of the targets that have 90 % of their gain from k tokens or fewer: name ("reached", "never": more than the
    largest k, true far context only), selector, far_context, k, n_targets, value, low, high."""
    raise NotImplementedError


def placebos(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Recovery in every far context, and its parts; no rows without a further placebo. Columns: name, selector, blind
    (name of its target-blind form; of parts only), far_context, k, n_targets, value, low, high. Names:

        recovery          of the targets that have every far context, by selector and far_context
        selection_bias    what the signed selector has more than the blind one in the placebo (winner's curse)
        common_context    what the blind one has in far_context, and "largest", the largest that is positive
        specific          what the blind one has in its own text beyond the largest
    """
    raise NotImplementedError


def faithfulness(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """name, selector, far_context ("true", "placebo"), k (NaN of what has none), value, low, high. Names:
    sufficiency_nats, comprehensiveness_nats, overlap (by k), sufficiency_aopc_nats, comprehensiveness_aopc_nats, lds,
    r2, spearman. The selector ``chance`` has the overlap of two random choices."""
    raise NotImplementedError


def contexts(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """What needs no selector: name, length, value, low, high. Names: gap_cost_nats (of all targets),
    gap_cost_over_tau_nats, share_enough (loss with the last ``length`` tokens within 0.1 nats of L_long)."""
    raise NotImplementedError


def of_trainings(numbers: Any, result: Result, **options: Any) -> pd.DataFrame:
    """``numbers(each training)``, with the columns training and training_seed before them."""
    raise NotImplementedError


def findings(result: Result) -> str:
    """The main numbers in a few lines, for `print(result)`, and what to call next."""
    raise NotImplementedError


def summary(result: Result, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> str:
    """All numbers as text, for a terminal: what `olmo-sparsity figure2` prints."""
    raise NotImplementedError
