"""Mesa-Extrapolation: a text read in chunks, the last of which reads all others at woven position ids.

Ma et al. 2024 (NeurIPS, "Mesa-Extrapolation: A Weave Position Encoding Method for Enhanced Extrapolation in LLMs"),
without training. A chunk reads itself and the first chunk, at ids next to each other; so its keys and values never saw
an id beyond those of training. The chunk whose predictions are asked for reads everything before it: its own tokens at
their ids, and those before it at ids of which each is repeated E times ("stair"), so that no distance exceeds what was
trained. Its scores are sharpened by log n, as in the authors' code. The first T tokens are read as usual.

Every chunk is asked in its turn [ours], so that a loss by position costs about two passes. [ours: how long the chunks
are.] Shapes: R rows, L tokens, Q positions at the end that are asked, V vocabulary (logits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from analysis.model.adapters import KeyValues, OlmoForAnalysis
from olmo_sparsity.model.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from olmo_sparsity.model.olmo import PositionedOLMo


@dataclass(frozen=True)
class Chunks:
    """How a text is cut, and the ids at which a chunk reads what is before it."""

    trained: int
    """T: ids were below it in training."""
    first: int
    """Tokens of the first chunk."""
    others: int
    """Tokens of each other chunk."""
    repeated: int
    """E: how often an id before the chunk is repeated."""

    @classmethod
    def reaching(cls, scaling: RopeScaling) -> Chunks:
        """The first of T / 16 tokens, others of T / 2, and the least E at which s · T tokens fit into T ids [ours]."""
        trained = scaling.original_length
        others = max(1, trained // 2)
        room = max(1, trained - others - 1)
        repeated = max(1, math.ceil((scaling.factor * trained - others) / room))
        return cls(trained, max(1, trained // 16), others, repeated)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Where each chunk of a text begins and ends."""
        begins = [0, *range(self.first, length, self.others)]
        return list(zip(begins, [*begins[1:], length], strict=True))

    def woven_ids(self, begin: int, end: int) -> Tensor:
        """(end,) ids at which the chunk from ``begin`` on reads itself and what is before it.

        Token i, of those before the chunk, has id begin - 1 - floor((begin - 1 - i) / E).
        """
        ids = torch.arange(end)
        back = begin - 1 - ids[:begin]
        return torch.cat([begin - 1 - back // self.repeated, ids[begin:]])


class MesaForAnalysis(OlmoForAnalysis):
    """This project's OLMo with RoPE, which reads a text in chunks. Tokens cannot be dropped: the chunks would move."""

    def __init__(self, model: PositionedOLMo, scaling: RopeScaling):
        super().__init__(model)
        self.chunks = Chunks.reaching(scaling)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> Any:
        """An object whose ``logits`` are those of the last Q positions, (R, Q, V), of tokens (R, L); 0: of all.

        The tokens are read from id 0 on, whatever their position ids: RoPE knows differences only.
        """
        length, trained = input_ids.shape[1], self.chunks.trained
        asked_from = length - (logits_to_keep or length)
        logits = []
        if asked_from < trained:
            usual = input_ids[:, :trained]
            logits.append(self.model(usual, logits_to_keep=usual.shape[1] - asked_from).logits)
        past: KeyValues = []
        first: KeyValues = []
        for begin, end in self.chunks.spans(length) if length > trained else ():
            chunk = input_ids[:, begin:end]
            asked = end - max(begin, asked_from, trained)
            if asked > 0:
                ids = self.chunks.woven_ids(begin, end).to(chunk.device)[None]
                logits.append(self.logits_after(past, chunk, ids, asked))
            read = self._read_alone(first, chunk)
            past = _joined(past, read) if past else read
            first = first or past
        return SimpleNamespace(logits=torch.cat(logits, dim=1))

    def _read_alone(self, first: KeyValues, chunk: Tensor) -> KeyValues:
        """Keys and values of a chunk that reads itself and the first chunk."""
        read = self.model(
            chunk, past_key_values=first or None, use_cache=True, logits_to_keep=1
        ).attn_key_values
        own = slice(-chunk.shape[1], None)
        return [(keys[:, :, own], values[:, :, own]) for keys, values in read]


def _joined(past: KeyValues, more: KeyValues) -> KeyValues:
    """Keys and values of both, one behind the other."""
    return [
        (torch.cat([k, new_k], dim=2), torch.cat([v, new_v], dim=2))
        for (k, v), (new_k, new_v) in zip(past, more, strict=True)
    ]
