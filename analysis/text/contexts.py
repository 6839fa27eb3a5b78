"""Targets with their long contexts: which are measured, and the placebo that stands in for the far part.

Shapes: n targets, N long and M short context length, F = N - M far tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream


class Documents(Protocol):
    """Texts as token ids, by number."""

    def document(self, number: int) -> np.ndarray:
        """Token ids of one text, (T,)."""


@dataclass(frozen=True)
class Contexts:
    """Long contexts of n targets (docs/method.md, 2.1). The token at column j has position id j, always."""

    tokens: np.ndarray
    """(n, N) int64; the first F columns are the far context, the last M the short one."""
    targets: np.ndarray
    """(n,) int64, the token that follows each context."""
    target_id: np.ndarray
    """(n,) int64, stable number of each target."""
    n_short: int
    """M."""

    @property
    def n_long(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def n_far(self) -> int:
        """F, the number of far tokens: the candidates."""
        return self.n_long - self.n_short

    @property
    def long_columns(self) -> np.ndarray:
        """C_long as one subset, (1, N)."""
        return np.arange(self.n_long)[None]

    @property
    def short_columns(self) -> np.ndarray:
        """C_short as one subset, (1, M)."""
        return np.arange(self.n_far, self.n_long)[None]

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: np.ndarray | slice) -> Contexts:
        """The contexts of some of the targets."""
        return replace(
            self, tokens=self.tokens[rows], targets=self.targets[rows], target_id=self.target_id[rows]
        )

    def with_far(self, far: np.ndarray) -> Contexts:
        """The same targets and short contexts behind another far context, (n, F)."""
        return replace(self, tokens=np.concatenate([far, self.tokens[:, self.n_far :]], axis=1))


@dataclass(frozen=True)
class SampledTargets:
    """Where the sampled targets and their placebo far contexts stand in the split; every array is (n,) int64."""

    document: np.ndarray
    position: np.ndarray
    placebo_document: np.ndarray
    placebo_start: np.ndarray


def sample_targets(tokens: TokenFiles, count: int, *, n_long: int, n_short: int, seed: int) -> SampledTargets:
    """Draw ``count`` targets whose N context tokens all come from their own document, and a placebo for each.

    Stratified by document [ours]: every document that offers a target gives the same number, as far as it has so many;
    positions are drawn without replacement. The placebo is a stretch of F tokens at a uniform place of another
    uniformly drawn document. A pure function of (seed, split, N, M, count); fewer are returned where the split offers
    fewer. Raises `UserError` where N must be smaller.
    """
    if not 0 < n_short < n_long:
        raise UserError(f"N = {n_long} must be larger than M = {n_short}; raise --n-long or lower --n-short")
    lengths = np.diff(tokens.document_bounds[:, 1:], axis=1)[:, 0]
    offered = np.maximum(lengths - n_long, 0)
    if not offered.any():
        raise UserError(
            f"no held-out document offers a target with N = {n_long} tokens before it: the longest has "
            f"{lengths.max()} tokens; lower --n-long to at most {lengths.max() - 1}"
        )
    document, position = _stratified(offered, count, n_long, seed)
    placebo_document, placebo_start = _draw_placebos(document, lengths, n_long - n_short, seed)
    return SampledTargets(document, position, placebo_document, placebo_start)


def _stratified(offered: np.ndarray, count: int, n_long: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(document, position) of each target; the last, partial round over documents takes a random subset of them."""
    quota = np.zeros_like(offered)
    generator = np.random.default_rng([Stream.TARGETS, seed])
    left = min(count, int(offered.sum()))
    while left:
        open_documents = np.flatnonzero(quota < offered)
        each = max(1, left // len(open_documents))
        if left < len(open_documents):
            open_documents = generator.choice(open_documents, size=left, replace=False)
        grant = np.minimum(each, offered[open_documents] - quota[open_documents])
        quota[open_documents] += grant
        left -= int(grant.sum())
    documents = np.flatnonzero(quota)
    positions = [
        np.sort(
            np.random.default_rng([Stream.TARGETS, seed, d]).choice(offered[d], size=quota[d], replace=False)
        )
        for d in documents
    ]
    return np.repeat(documents, quota[documents]), np.concatenate(positions) + n_long


def _draw_placebos(
    document: np.ndarray, lengths: np.ndarray, n_far: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    able = np.flatnonzero(lengths >= n_far)
    generator = np.random.default_rng([Stream.PLACEBOS, seed])
    if len(able) < 2:
        raise UserError(
            f"the placebo needs a second held-out document of at least {n_far} tokens; hold out more documents "
            "or lower --n-long"
        )
    # Drawing among the others: skip the target's own document in the list by shifting what lies behind it.
    own = np.searchsorted(able, document)
    listed = (own < len(able)) & (able[np.minimum(own, len(able) - 1)] == document)
    drawn = generator.integers(0, len(able) - listed)
    drawn += listed & (drawn >= own)
    chosen = able[drawn]
    return chosen, generator.integers(0, lengths[chosen] - n_far, endpoint=True)


def long_contexts(
    documents: Documents,
    document: np.ndarray,
    position: np.ndarray,
    target_id: np.ndarray,
    *,
    n_long: int,
    n_short: int,
) -> Contexts:
    """The long contexts of targets at ``position`` of ``document``."""
    windows = np.stack(
        [
            documents.document(int(d))[t - n_long : t + 1].astype(np.int64)
            for d, t in zip(document, position, strict=True)
        ]
    )
    return Contexts(windows[:, :-1], windows[:, -1], np.asarray(target_id), n_short)


def placebo_contexts(
    documents: Documents, contexts: Contexts, document: np.ndarray, start: np.ndarray
) -> Contexts:
    """The same targets behind the F tokens that stand at ``start`` of ``document`` (docs/method.md, 2.3 [ours])."""
    far = [
        documents.document(int(d))[s : s + contexts.n_far].astype(np.int64)
        for d, s in zip(document, start, strict=True)
    ]
    return contexts.with_far(np.stack(far))
