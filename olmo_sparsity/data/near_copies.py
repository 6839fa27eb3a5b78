"""Near copies: held-out tokens in runs that also stand in the training text (docs/method.md, 2.4 [ours]).

A model may have memorized such a run, so the gain from its far context says little there. Runs are compared by 64-bit
hashes: of a million held-out runs and ten billion training ones, one in two thousand corpora has a wrong match.
Shapes: n tokens of one file, L tokens of a run, R stretches of near copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.tokens import TokenFiles, check_sum, companion
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.rng import GAMMA, mix

NEAR_COPIES_SUFFIX = ".near-copies"
CHUNK_TOKENS = 1 << 16
"""Hashed at once: what is made on the way fits in a processor's cache."""


def find_near_copies(
    heldout: Path, train: Sequence[Path], dtype: str, eos_token_id: int, length: int, workers: int
) -> np.ndarray:
    """Stretches of the held-out file that runs of L = ``length`` training tokens cover: first and one past the last
    token, (R, 2) int64, ascending.

    A run lies within one document. Reads every training file once; memory grows with the held-out file only.
    """
    tokens = np.fromfile(heldout, dtype=dtype)
    ends = np.cumsum(np.append(0, tokens == eos_token_id))
    starts = np.flatnonzero(ends[length:] == ends[:-length])  # of runs without the end of a document
    hashes = run_hashes(tokens, length)[starts]
    heldout_hashes = np.unique(hashes)
    jobs = [partial(_runs_in, heldout_hashes, dtype, length, path) for path in train]
    in_training = np.logical_or.reduce(run_jobs(jobs, workers, "looking for near copies"))
    copied = starts[in_training[np.searchsorted(heldout_hashes, hashes)]]
    depth = np.zeros(len(tokens) + 1, dtype=np.int64)
    depth[copied] += 1
    depth[copied + length] -= 1
    return np.flatnonzero(np.diff(np.cumsum(depth) > 0, prepend=False)).reshape(-1, 2)


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """64-bit hash of the run of L tokens that begins at each token, (n - L + 1,) uint64; none where n < L."""
    hashes = mix(tokens.astype(np.uint64) + GAMMA)
    done = 1
    while done < length:  # a run is two shorter ones, which overlap where L is no power of two
        step = min(done, length - done)
        hashes = mix(hashes[:-step] * GAMMA + hashes[step:])
        done += step
    return hashes


def _runs_in(heldout_hashes: np.ndarray, dtype: str, length: int, path: Path) -> np.ndarray:
    """Which of the ``heldout_hashes`` (H,), ascending, are hashes of runs in a token file, (H,) bool."""
    tokens = np.memmap(path, dtype=dtype, mode="r")
    is_in = np.zeros(len(heldout_hashes), dtype=bool)
    for start in range(0, len(tokens) if len(heldout_hashes) else 0, CHUNK_TOKENS):
        hashes = run_hashes(np.asarray(tokens[start : start + CHUNK_TOKENS + length - 1]), length)
        indices = np.minimum(np.searchsorted(heldout_hashes, hashes), len(heldout_hashes) - 1)
        is_in[indices[heldout_hashes[indices] == hashes]] = True
    return is_in


def write_near_copies(token_file: Path, near_copies: np.ndarray) -> str:
    """Write the result of `find_near_copies` next to its token file; returns the checksum."""
    path = companion(token_file, NEAR_COPIES_SUFFIX)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, near_copies)
    return sha256_file(path)


def in_near_copy(files: TokenFiles, document: np.ndarray, position: np.ndarray) -> np.ndarray | None:
    """Whether each token lies in a near copy, (n,) bool; None where they were not looked for.

    Raises `UserError` where the file of near copies is missing or damaged.
    """
    if not files.described or any(file.near_copies_sha256 is None for file in files.described):
        return None
    inside = np.zeros(len(document), dtype=bool)
    for index, (path, described) in enumerate(zip(files.paths, files.described, strict=True)):
        near_copies = np.load(check_sum(companion(path, NEAR_COPIES_SUFFIX), described.near_copies_sha256))
        rows = np.flatnonzero(files.document_bounds[document, 0] == index)
        token = files.document_bounds[document[rows], 1] + position[rows]
        begun, ended = (np.searchsorted(bounds, token, side="right") for bounds in near_copies.T)
        inside[rows] = begun > ended
    return inside
