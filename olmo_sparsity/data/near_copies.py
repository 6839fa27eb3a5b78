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
from olmo_sparsity.data.tokens import TokenFiles, beside, check_sum
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.rng import GAMMA, mix

NEAR_COPIES_SUFFIX = ".near-copies"
CHUNK_TOKENS = 1 << 20
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def find_near_copies(
    heldout: Path, train: Sequence[Path], *, dtype: np.dtype, eos_token_id: int, length: int, workers: int
) -> np.ndarray:
    """Stretches of the held-out file that runs of L = ``length`` training tokens cover: first and one past the last
    token, (R, 2) int64, ascending.

    A run lies within one document. Reads every training file once; memory grows with the held-out file only.
    """
    tokens = np.fromfile(heldout, dtype=dtype)
    hashes = run_hashes(tokens, length)
    starts = np.flatnonzero(~_crosses(tokens, eos_token_id, length))
    if not len(starts):
        return stretches(starts, length)
    wanted = np.unique(hashes[starts])
    seen = run_jobs(
        partial(_runs_in, wanted, dtype=dtype, length=length),
        train,
        workers=workers,
        description="looking for near copies",
        unit="files",
    )
    copied = np.logical_or.reduce(seen)[np.searchsorted(wanted, hashes[starts])]
    return stretches(starts[copied], length)


def write_near_copies(token_file: Path, near_copies: np.ndarray) -> str:
    """Write what `find_near_copies` gives beside its token file; returns the checksum."""
    path = beside(token_file, NEAR_COPIES_SUFFIX)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, near_copies)
    return sha256_file(path)


def in_near_copy(files: TokenFiles, document: np.ndarray, position: np.ndarray) -> np.ndarray | None:
    """Whether each token lies in a near copy, (n,) bool; None where they were not looked for.

    Raises `UserError` where the file that tells is missing or damaged.
    """
    if not files.described or any(file.near_copies_sha256 is None for file in files.described):
        return None
    inside = np.zeros(len(document), dtype=bool)
    for number, (path, described) in enumerate(zip(files.paths, files.described, strict=True)):
        near_copies = np.load(check_sum(beside(path, NEAR_COPIES_SUFFIX), described.near_copies_sha256))
        rows = np.flatnonzero(files.document_bounds[document, 0] == number)
        token = files.document_bounds[document[rows], 1] + position[rows]
        begun, ended = (np.searchsorted(bounds, token, side="right") for bounds in near_copies.T)
        inside[rows] = begun > ended
    return inside


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """64-bit hash of the run of L tokens that begins at each token, (n - L + 1,) uint64; none where n < L."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.uint64)
    powers = np.ones(len(tokens), dtype=np.uint64)
    np.cumprod(np.full(len(tokens) - 1, _BASE, dtype=np.uint64), out=powers[1:])
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    # Of hashes (SplitMix64), because sums of the ids themselves would collide.
    np.cumsum(mix(tokens.astype(np.uint64) + GAMMA) * powers, out=sums[1:])
    number = len(tokens) - length + 1
    back = np.ones(number, dtype=np.uint64)
    np.cumprod(np.full(number - 1, _INVERSE, dtype=np.uint64), out=back[1:])
    return (sums[length:] - sums[:number]) * back  # modulo 2^64, where the base has an inverse


def stretches(starts: np.ndarray, length: int) -> np.ndarray:
    """What runs of L tokens at ``starts``, ascending, cover: (R, 2) first and one past the last token."""
    if not len(starts):
        return np.empty((0, 2), dtype=np.int64)
    begins = np.flatnonzero(np.diff(starts, prepend=starts[0] - length - 1) > length)
    ends = np.append(starts[begins[1:] - 1], starts[-1]) + length
    return np.stack([starts[begins], ends], axis=1)


def _crosses(tokens: np.ndarray, eos_token_id: int, length: int) -> np.ndarray:
    """Whether the run that begins at each token contains the end of a document, (n - L + 1,)."""
    ends = np.cumsum(np.append(0, tokens == eos_token_id))
    return ends[length:] > ends[: max(0, len(ends) - length)]


def _runs_in(wanted: np.ndarray, path: Path, *, dtype: np.dtype, length: int) -> np.ndarray:
    """Which of the hashes ``wanted``, ascending, are those of runs in a token file, (W,) bool."""
    tokens = np.memmap(path, dtype=dtype, mode="r")
    seen = np.zeros(len(wanted), dtype=bool)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS + length - 1])
        hashes = run_hashes(chunk, length)
        places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        seen[places[wanted[places] == hashes]] = True
    return seen
