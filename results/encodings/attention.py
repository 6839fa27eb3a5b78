"""Loss by position, and the attention of the last tokens of each length: what `study.sh length` measures.

example:
  python results/encodings/attention.py runs/encodings/config=rope,seed=1 --lengths 128,256,512 --out runs/attention

The options, and what is written, are those of `olmo-sparsity length`. length.json has two names more: entropy_nats and
zero_share, at each length, are means over heads and layers of the entropy of attention and of the share of its weights
that are exactly 0 in float32. The weights of sparsek are taken as they are; they sum to 1 at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import torch

from analysis.probes.length import KEY, OF_BIN, LengthProbe, LossByPosition, rows_by_text
from analysis.probes.probe import draws_of_means, intervals_frame, run_probe
from olmo_sparsity.cli import run_script

ENTROPY, ZEROS = "entropy_nats", "zero_share"
QUERIES = 16
"""Last tokens of each length whose attention is measured."""
MEMORY = 4
"""Memory of a forward pass that returns its attention, in multiples of one that does not."""


@dataclass(frozen=True, kw_only=True)
class LossAndAttention(LossByPosition):
    """`LossByPosition` with two names more."""

    TITLES: ClassVar[dict[str, str]] = {
        **LossByPosition.TITLES,
        ENTROPY: "entropy of the attention of the last tokens of each length",
        ZEROS: "weights of it that are exactly 0, in per cent",
    }


@dataclass(kw_only=True)
class AttentionProbe(LengthProbe):
    """Loss by position and attention of models on the same windows of texts."""

    RESULT = LossAndAttention

    def measure_model(self, token_losses, sample, bar):
        """See `Probe`."""
        frames, tokens = [super().measure_model(token_losses, sample, bar)], sample.tokens
        spans = [(length - min(QUERIES, length), length) for length in self.lengths]
        statistics = np.empty((2, len(tokens), len(spans)))
        with bar(len(spans), "lengths") as advance:
            for number, (start, length) in enumerate(spans):
                for rows in token_losses.batches(len(tokens), MEMORY * length, length - start):
                    of_rows = attention_statistics(token_losses, tokens[rows, :length], length - start)
                    statistics[:, rows, number] = of_rows.T
                advance(1)
        for name, means in zip((ENTROPY, ZEROS), statistics, strict=True):
            frames.append(rows_by_text(name, sample, spans, means, np.ones(means.shape, dtype=int)))
        return pd.concat(frames)

    def numbers_of(self, rows, labels):
        """See `LengthProbe`."""
        is_loss = rows["name"] == OF_BIN
        numbers = [super().numbers_of(rows[is_loss], labels)]
        bootstrap, draws = draws_of_means(
            rows[~is_loss], KEY, labels, unit="text", resamples=self.resamples, seed=self.seed
        )
        of_first = rows[(rows["number"] == 0) & (rows["name"] == ZEROS)]
        windows = int(of_first["count"][of_first["to_tokens"] == self.lengths[0]].sum())
        for model in dict.fromkeys(labels):
            named = [(name, draws[model][name]) for name in (ENTROPY, ZEROS)]
            numbers.append(intervals_frame(model, bootstrap, named, {ZEROS: windows}))
        return pd.concat(numbers, ignore_index=True)


@torch.inference_mode()
def attention_statistics(token_losses, tokens, queries):
    """Entropy in nats and share of exact zeros of the attention of the last Q tokens of each row, (R, 2) float64.

    ``tokens``: (R, L) ids. Both of the tokens up to the query, means over heads, layers and queries.
    """
    ids = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    places = token_losses.tensor(tokens), token_losses.tensor(ids)
    by_query = token_losses.model.last_attention(*places, queries, entropy_and_zeros)
    return by_query.double().mean(dim=1).cpu().numpy()


def entropy_and_zeros(slices):
    """Of attention (R, H, Q, L) the entropy over the L tokens and the share of zeros up to the query, (R, Q, 2)."""
    attention = torch.cat(list(slices), dim=2)
    queries, length = attention.shape[2:]
    entropy = torch.special.entr(attention.float()).sum(dim=-1).mean(dim=1)
    seen = torch.arange(length - queries + 1, length + 1, device=attention.device)
    above = (attention > 0).sum(dim=-1).float().mean(dim=1)
    return torch.stack([entropy, 1 - above / seen], dim=-1)


if __name__ == "__main__":
    run_script(lambda: run_probe(AttentionProbe, __doc__))
