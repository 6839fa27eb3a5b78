"""From sums of losses per document and bin of positions to means with intervals: what `length.json` says.

Checkpoints that share a label are seeds of one *model*: its loss is the mean over them. Intervals are by group and
document, the same for all, and for a model of several seeds by seed too [ours].
Shapes: D documents, B bins of positions, C checkpoints, S seeds of a model, R resamples. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from analysis.stats.bootstrap import Statistic, difference
from analysis.stats.recovery import Columns, SumsBootstrap
from olmo_sparsity.util.result_files import Json


@dataclass(frozen=True)
class PositionSums:
    """Losses of C checkpoints on the same windows, summed over the windows of a document and the tokens of a bin."""

    edges: list[int]
    """Bin b holds positions edges[b] … edges[b + 1] - 1; ascending, (B + 1,)."""
    document: np.ndarray
    """Number of each document in the split, ascending, (D,)."""
    tokens: np.ndarray
    """Number of losses in each sum, (D, B); the same for every checkpoint."""
    loss_nats: np.ndarray
    """Sums of losses, (C, D, B)."""
    group: np.ndarray | None = None
    """Group of each document, (D,) strings; None where the corpus has no groups."""

    def to_table(self, labels: Sequence[str]) -> pa.Table:
        """The rows of `length.parquet`; ``checkpoint`` counts from 0."""
        checkpoint, document, bin_ = (index.ravel() for index in np.indices(self.loss_nats.shape))
        edges = np.array(self.edges)
        groups = {} if self.group is None else {"group": self.group[document]}
        return pa.table(
            {
                "label": pa.array(np.array(labels, dtype=object)[checkpoint], pa.string()),
                "checkpoint": checkpoint,
                "document": self.document[document],
                **groups,
                "from": edges[bin_],
                "to": edges[bin_ + 1],
                "loss_sum_nats": self.loss_nats.ravel(),
                "tokens": self.tokens[document, bin_],
            }
        )


def summarize_length(
    sums: PositionSums, labels: Sequence[str], lengths: Sequence[int], *, resamples: int, seed: int
) -> list[Json]:
    """What is known of each model, in the order of first appearance of its label among the C ``labels``.

    ``bins``: of each the mean loss and its paired difference to the first model's. ``at_lengths``: the same of the last
    bin below each length, half an octave or less, which is called the loss at that length [ours], and how far it lies
    above the loss at the smallest length.
    """
    models = list(dict.fromkeys(labels))
    columns: Columns = {("tokens", bin_): of_bin for bin_, of_bin in enumerate(sums.tokens.T)}
    for c, losses in enumerate(sums.loss_nats):
        columns |= {(c, bin_): of_bin for bin_, of_bin in enumerate(losses.T)}
    bootstrap = SumsBootstrap(columns, sums.document, resamples, seed, sums.group, labels=labels)

    def mean(number: int, bin_: int) -> Statistic:
        return bootstrap.mean_over_seeds(number, bin_, ("tokens", bin_))

    def measured(number: int, bin_: int) -> Json:
        of_model, of_first = mean(number, bin_), mean(0, bin_)
        return {
            "loss_nats": bootstrap.interval(of_model),
            "difference_to_first_nats": bootstrap.interval(difference(of_model, of_first)),
        }

    last_below = {length: sums.edges.index(length) - 1 for length in lengths}
    found = []
    for number in range(len(models)):
        bins = [
            {"from": start, "to": end, "tokens": int(sums.tokens[:, bin_].sum()), **measured(number, bin_)}
            for bin_, (start, end) in enumerate(pairwise(sums.edges))
        ]
        at_lengths = []
        for length, bin_ in last_below.items():
            rise = difference(mean(number, bin_), mean(number, last_below[lengths[0]]))
            at_lengths.append(
                {
                    "length": length,
                    **{name: bins[bin_][name] for name in ("from", "loss_nats", "difference_to_first_nats")},
                    "rise_nats": bootstrap.interval(rise),
                }
            )
        found.append({"label": models[number], "bins": bins, "at_lengths": at_lengths})
    return found


def summarize_attention(
    values: np.ndarray,
    document: np.ndarray,
    labels: Sequence[str],
    group: np.ndarray | None,
    *,
    resamples: int,
    seed: int,
) -> list[list[Json]]:
    """Of each model, at each length, the mean entropy of its attention and the share of zeros, with intervals.

    Args:
        values: (C, n, lengths, 2) of C checkpoints and n windows: entropy and share.
        document: (n,) of each window.
        labels: of the C checkpoints; those of one label are seeds of one model.
        group: (n,) of each window; None where the corpus has no groups.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    checkpoints, windows, lengths, _ = values.shape
    columns: Columns = {"one": np.ones(windows)}
    for c, number, which in np.ndindex(checkpoints, lengths, 2):
        columns[c, (number, which)] = values[c, :, number, which]
    sums = SumsBootstrap(columns, document, resamples, seed, group, labels=labels)

    def mean(model: int, length: int, which: int) -> Json:
        statistic = sums.mean_over_seeds(model, (length, which), "one")
        return sums.share(statistic, "one") if which else sums.interval(statistic)

    return [
        [
            {"entropy_nats": mean(model, length, 0), "zero_share": mean(model, length, 1)}
            for length in range(lengths)
        ]
        for model in range(len(set(labels)))
    ]
