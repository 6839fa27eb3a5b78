"""Loss by position of checkpoints that read long texts by Mesa-Extrapolation: what `study.sh length` measures apart.

    python results/encodings/mesa.py CHECKPOINT... --factor 16 --labels ... --corpus DIR --out DIR

The other options are those of `olmo-sparsity length`. Shapes: R rows, L tokens, Q positions whose logits are kept, V
vocabulary, H heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from analysis.model.adapter import KeyValues
from analysis.model.loaded import LoadedModel
from analysis.open_model import open_model
from analysis.project import OlmoAdapter
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.rope_scaling import LOG_N, RopeScaling
from olmo_sparsity.util.arguments import Parser, texts, whole_numbers


class MesaAdapter(OlmoAdapter):
    """This project's OLMo with RoPE, reading a text in chunks. Tokens cannot be dropped: the chunks would move.

    Ma et al. 2024 (NeurIPS, "Mesa-Extrapolation: A Weave Position Encoding Method for Enhanced Extrapolation in LLMs"),
    without training. A chunk reads itself and the first chunk, at ids next to each other, so its keys and values never
    saw an id beyond those of training. The chunk whose logits are kept reads everything before it: its own tokens at
    their ids, those before it at ids of which each is repeated E times ("stair"), so that no distance exceeds what was
    trained. Its scores are sharpened by log n, as in the authors' code. The first T_train tokens are read as usual.
    Every chunk is read so in its turn [ours], so that a loss by position costs about two passes.

    Chunks are of T_train / 16, then T_train / 2 tokens, and E is the least at which s · T_train tokens fit [ours].

    Args:
        model: with softmax attention and RoPE in every layer; its scores are sharpened from now on.
        factor: s, how many times T_train it is to reach.
        trained: T_train: ids were below it in training.
    """

    def __init__(self, model: PositionedOLMo, factor: float, trained: int):
        super().__init__(model)
        model.rope_scaling = RopeScaling(LOG_N, factor, trained)
        self.trained = trained
        self.first_chunk, self.other_chunks = max(1, trained // 16), max(1, trained // 2)
        room = max(1, trained - self.other_chunks - 1)
        self.repeated = max(1, math.ceil((factor * trained - self.other_chunks) / room))

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Where each chunk of a text begins and ends."""
        begins = [0, *range(self.first_chunk, length, self.other_chunks)]
        return list(zip(begins, [*begins[1:], length], strict=True))

    def woven_ids(self, begin: int, end: int) -> Tensor:
        """(end,) ids at which the chunk from ``begin`` on reads itself and what is before it.

        Token i, of those before the chunk, has id begin - 1 - floor((begin - 1 - i) / E).
        """
        ids = torch.arange(end)
        back = begin - 1 - ids[:begin]
        return torch.cat([begin - 1 - back // self.repeated, ids[begin:]])

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> Any:
        """See `Adapter`; tokens are read from id 0 on, whatever their ids: RoPE knows differences only."""
        length = input_ids.shape[1]
        keep_from = length - (logits_to_keep or length)
        logits = []
        if keep_from < self.trained:
            usual = input_ids[:, : self.trained]
            logits.append(self.model(usual, logits_to_keep=usual.shape[1] - keep_from).logits)
        past: KeyValues = []
        first: KeyValues = []
        for begin, end in self.spans(length) if length > self.trained else ():
            chunk = input_ids[:, begin:end]
            keep = end - max(begin, keep_from, self.trained)
            if keep > 0:
                ids = self.woven_ids(begin, end).to(chunk.device)[None]
                kept = self.model(chunk, position_ids=ids, past_key_values=past, logits_to_keep=keep)
                logits.append(kept.logits)
            read = self._read_alone(first, chunk)
            past = _joined(past, read) if past else read
            first = first or past
        return SimpleNamespace(logits=torch.cat(logits, dim=1))

    def _read_alone(self, first: KeyValues, chunk: Tensor) -> KeyValues:
        """Keys and values of a chunk that reads itself and the first chunk."""
        options = {"use_cache": True, "logits_to_keep": 1}
        layers = self.model(chunk, past_key_values=first or None, **options).attn_key_values
        of_chunk = slice(-chunk.shape[1], None)
        return [(keys[:, :, of_chunk], values[:, :, of_chunk]) for keys, values in layers]


def _joined(past: KeyValues, more: KeyValues) -> KeyValues:
    """Keys and values of both, one behind the other."""
    return [
        (torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2))
        for (k, v), (more_k, more_v) in zip(past, more, strict=True)
    ]


def read_by_mesa(checkpoint: str, factor: float) -> LoadedModel:
    """A checkpoint of this project, reading in chunks."""
    loaded = open_model(f"{checkpoint}@{LOG_N}:{factor:g}")  # refuses what is not plain attention with RoPE
    inner: Any = loaded.model.model
    adapter = MesaAdapter(inner, factor, inner.rope_scaling.original_length)
    scaling = f"mesa:{factor:g}"
    name = f"{loaded.name.rpartition('@')[0]}@{scaling}"
    return replace(loaded, model=adapter, name=name, rope_scaling=scaling)


def main() -> None:
    """Measure, write, draw and print."""
    from analysis.probes.length import LengthProbe

    parser = Parser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument(
        "--factor", type=float, required=True, help="how many times the trained length to reach"
    )
    parser.add_argument("--labels", type=texts, required=True, help="one for each, with commas")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--lengths", type=whole_numbers, required=True, help="with commas")
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    measured = LengthProbe(lengths=given.lengths, windows=given.windows).measure(
        [read_by_mesa(checkpoint, given.factor) for checkpoint in given.checkpoints],
        given.corpus,
        labels=given.labels,
        out=given.out,
    )
    measured.draw(given.out)
    print(measured)


if __name__ == "__main__":
    main()
