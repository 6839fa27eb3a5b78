"""Held-out loss while training: in windows of the training length, and by position in long documents.

Every evaluation of every run reads the same windows, whatever the number of processes. No random state is touched.
Shapes: B windows, T tokens of a training window, T' tokens of a window measured by position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles
from olmo_sparsity.data.windows import Batch, check_corpus_matches, collate
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

log = logging.getLogger(__name__)

Losses = Callable[[Batch], Tensor]
"""-log p(label) in nats of a batch that is on the device already, (B, T) float32, 0 where the loss mask is not set."""
ReduceSum = Callable[[Tensor], Tensor]
"""The sum over all processes of a tensor that each of them has; the identity for one process."""


class HeldoutEvaluation:
    """The held-out loss of a run, measured on the same windows every time.

    Two measures, both with contiguous position ids from 0: the mean loss in windows of the training length T, packed
    as training packs them; and the loss by position in windows of T' tokens that lie inside one document, so that
    every token before a target is its own document's.
    """

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1):
        """Opens the held-out token files and chooses the windows.

        Raises `UserError` where there is no held-out text, or too little for one window. Where no document is long
        enough to measure by position, warns once and leaves that out.
        """
        options = config.evaluation
        self.config, self.rank, self.world_size = config, rank, world_size
        self.length = config.model.max_sequence_length
        self.position_length = options.position_length or config.target_length
        self.batch_size = options.batch_size or config.device_train_microbatch_size
        self.tokens = open_heldout_tokens(config)
        of_files = [(file, 0, length) for file, length in enumerate(self.tokens.lengths)]
        self.windows = self._windows(of_files, self.length, number=0)
        self.document_windows = self._windows(
            self.tokens.document_bounds.tolist(), self.position_length, number=1
        )
        if not len(self.windows):
            raise UserError(
                f"the held-out text has {self.tokens.num_tokens:,} tokens, fewer than one window of {self.length}; "
                "hold more text out, or set evaluation.interval: null"
            )
        if not len(self.document_windows) and rank == 0:
            log.warning(
                "loss by position is left out: no held-out document has %d tokens; lower evaluation.position_length",
                self.position_length,
            )

    def _windows(self, stretches: Iterable[tuple[int, int, int]], length: int, number: int) -> np.ndarray:
        """At most `evaluation.windows` windows of ``length`` tokens as (file, first token), (n, 2).

        They are chosen without repetition, by the seed and the text alone, of those that stand one after the other in
        the stretches (file, first token, end).
        """
        options = self.config.evaluation
        windows = [
            (file, start)
            for file, first, end in stretches
            for start in range(first, end - length + 1, length)
        ]
        generator = np.random.default_rng([Stream.HELDOUT_WINDOWS, options.seed, number])
        chosen = generator.permutation(len(windows))[: options.windows]
        return np.array(windows, dtype=np.int64).reshape(-1, 2)[np.sort(chosen)]

    def run(
        self, losses: Losses, reduce_sum: ReduceSum, device: torch.device | str = "cpu"
    ) -> dict[str, Any]:
        """Measure; every process calls this at the same step, and gets the same result.

        ``losses`` is called equally often in every process, as ZeRO 3 needs it. Returns a row of `metrics.jsonl`:
        `heldout_loss_nats` (mean per token), `heldout_tokens` (how many), `heldout_window_tokens` (T) and, where
        documents are long enough, `heldout_loss_by_position`: of each bin `from`, `to` (position ids of the tokens
        that predict the next one, `to` excluded), `loss_nats` and `tokens`.
        """

        how = losses, reduce_sum, device
        sums, counts = self._measure(self.windows, self.length, *how)
        row: dict[str, Any] = {
            "heldout_loss_nats": float(sums.sum() / counts.sum()),
            "heldout_tokens": int(counts.sum()),
            "heldout_window_tokens": self.length,
        }
        if len(self.document_windows):
            sums, counts = self._measure(self.document_windows, self.position_length, *how)
            row["heldout_loss_by_position"] = position_bins(sums, counts)
        return row

    @torch.no_grad()
    def _measure(
        self,
        windows: np.ndarray,
        length: int,
        losses: Losses,
        reduce_sum: ReduceSum,
        device: torch.device | str,
    ) -> Tensor:
        """Sums of losses [nats] and their number at each position, over all processes, (2, length) float64."""
        sums_counts = torch.zeros(2, length, dtype=torch.float64, device=device)
        for batch in self._batches(windows, length):
            batch = batch.to(torch.device(device))
            sums_counts[0] += losses(batch).double().sum(0)
            sums_counts[1] += batch.loss_mask.double().sum(0)
        return reduce_sum(sums_counts).cpu()

    def _batches(self, windows: np.ndarray, length: int) -> Iterator[Batch]:
        """This process's share; a process with fewer windows repeats one that does not count, to keep step."""
        size = max(1, self.batch_size * min(self.length, length) // length)
        share = -(-len(windows) // self.world_size)
        for first in range(0, share, size):
            steps = range(first, min(first + size, share))
            numbers = [step * self.world_size + self.rank for step in steps]
            yield collate([self._item(windows, number, length) for number in numbers])

    def _item(self, windows: np.ndarray, number: int, length: int) -> dict[str, Any]:
        file, start = windows[number % len(windows)]
        window = self.tokens.read(file, start, start + length).astype(np.int64)
        ids = np.arange(length, dtype=np.int64)
        return {"input_ids": window, "position_ids": ids, "counts": number < len(windows)}


def position_bins(sums: Tensor, counts: Tensor, number: int = 16) -> list[dict[str, Any]]:
    """Mean loss [nats per token] in ``number`` bins of equal width over the positions; empty bins are left out."""
    edges = np.linspace(0, len(sums), number + 1).round().astype(int).tolist()
    rows = []
    for start, end in pairwise(edges):
        if tokens := int(counts[start:end].sum()):
            loss = float(sums[start:end].sum()) / tokens
            rows.append({"from": start, "to": end, "loss_nats": loss, "tokens": tokens})
    return rows


def open_heldout_tokens(config: Config) -> TokenFiles:
    """The held-out token files: `evaluation.paths`, else the split of the corpus. Raises `UserError` for neither."""
    if config.evaluation.paths:
        return TokenFiles(config.evaluation.paths, config.data.memmap_dtype, config.model.eos_token_id)
    if config.corpus.path is None:
        raise UserError(
            "there is no held-out text; set evaluation.paths to token files, or evaluation.interval: null"
        )
    check_corpus_matches(config, CorpusManifest.load(config.corpus.path))
    return TokenFiles.of_split(config.corpus.path, "heldout")
