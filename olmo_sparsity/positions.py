"""Position schemes: which position id each token of a training window, or of a task's sample, gets.

A scheme knows nothing of the model. Those of `SCHEMES` know nothing of the task either; those of `COUPLED_SCHEMES`
start from the ids that a task couples. Ids are a pure function of (seed, epoch, example index), so that resuming a run,
or another number of processes, changes nothing. Shapes: T tokens of a window, C chunks; T' is the target length that
the ids stay below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.util.registry import Registry
from olmo_sparsity.util.rng import Stream


@dataclass(frozen=True)
class SchemeOptions:
    """What a scheme may depend on besides the window length."""

    target_length: int
    """T': every id is below it."""
    chunks: int = 2
    """C, the number of chunks of PoSE."""


Scheme = Callable[[int, SchemeOptions, np.random.Generator], np.ndarray]
SCHEMES: Registry[Scheme] = Registry("position scheme")
COUPLED_SCHEMES = {
    "coupled": "tokens that belong together share an id; at test those of the response are given, by an oracle",
    "predicted": "the same ids; at test those of the response are predicted (Predictive Position Coupling)",
}
"""Schemes of tasks whose tokens are coupled; `draw_shift` and `apply_shift` give their ids."""


@SCHEMES.register("contiguous")
def contiguous(length: int, options: SchemeOptions, generator: np.random.Generator) -> np.ndarray:
    """0 … T-1, (T,): plain RoPE."""
    return np.arange(length, dtype=np.int64)


@SCHEMES.register("random_start")
def random_start(length: int, options: SchemeOptions, generator: np.random.Generator) -> np.ndarray:
    """s … s+T-1, (T,), s uniform on {0 … T'-T} (Cho et al. 2024)."""
    return np.arange(length, dtype=np.int64) + generator.integers(
        0, options.target_length - length, endpoint=True
    )


@SCHEMES.register("pose")
def pose(length: int, options: SchemeOptions, generator: np.random.Generator) -> np.ndarray:
    """PoSE, (T,): C chunks that each skip ahead of the one before, up to T' (Zhu et al. 2023, arXiv 2309.10400).

    C = 2 is drawn as the authors' code draws it: the first chunk has r ~ U{1 … ceil(T/2)} tokens and starts at 0, the
    second is shifted by s ~ U{0 … T'-T}. For more chunks [ours] the C-1 cuts are a uniform subset of {1 … T-1} and
    the C-1 shifts are sorted uniform draws from {0 … T'-T}. Ids are strictly increasing and below T'.
    """
    if options.chunks == 2:
        # The same without arrays of one number, which took most of the time that a task's batch is made in.
        cut = generator.integers(1, (length + 1) // 2, endpoint=True)
        ids = np.arange(length, dtype=np.int64)
        ids[cut:] += generator.integers(0, options.target_length - length, endpoint=True)
        return ids
    cuts = np.sort(generator.choice(length - 1, size=options.chunks - 1, replace=False)) + 1
    skips = np.sort(
        generator.integers(0, options.target_length - length, size=options.chunks - 1, endpoint=True)
    )
    shifts = np.concatenate([[0], skips])
    chunk_lengths = np.diff(np.concatenate([[0], cuts, [length]]))
    return np.arange(length, dtype=np.int64) + np.repeat(shifts, chunk_lengths)


@SCHEMES.register("random_float")
def random_float(length: int, options: SchemeOptions, generator: np.random.Generator) -> np.ndarray:
    """Random Float Sampling, (T,) float32: sorted uniform draws from [0, T') (Shimizu et al. 2026, arXiv 2602.14050).

    The paper draws ids at test, too; here they are 0, 1, … there, as for every scheme [ours].
    """
    return np.sort(generator.random(length, dtype=np.float32)) * options.target_length


def draw_shift(
    largest: int,
    largest_of_prompt: int,
    table_size: int,
    generator: np.random.Generator,
    *,
    skip_probability: float,
) -> tuple[int, int, int]:
    """How the coupled ids of one sample are moved in training: start, last id before the skip, and skip.

    The start is uniform over what the table of ids 0 … ``table_size`` - 1 has room for (Cho et al. 2024): every id is
    trained, and none is bound to a position. With ``skip_probability`` the ids above a uniform one jump ahead by a
    uniform distance that fits: PoSE of coupled ids [ours]. They jump between two ids of the prompt, which range from 1
    to ``largest_of_prompt``: an id of the response beyond those, as a sum's carry has it, could not be predicted after
    a jump that the prompt does not show.
    """
    room = table_size - 1 - largest
    assert room >= 0, "the config was checked: the table holds every sample"
    start = int(generator.integers(0, room, endpoint=True))
    if not generator.random() < skip_probability:
        return start, 0, 0
    last_before = int(generator.integers(1, max(largest_of_prompt, 2)))
    return start, last_before, int(generator.integers(0, room - start, endpoint=True))


def apply_shift(
    coupled: np.ndarray, start: np.ndarray | int, last_before: np.ndarray | int, skip: np.ndarray | int
) -> np.ndarray:
    """Coupled ids, 1 and upwards, moved as `draw_shift` says: (T,) and numbers, or (B, T) and a column (B, 1) of each.

    0, the id of beginning, end and padding, stays 0. Tokens that share an id go on sharing it.
    """
    return np.where(coupled > 0, coupled + start + skip * (coupled > last_before), 0)


def position_ids(
    name: str, length: int, options: SchemeOptions, *, seed: int, epoch: int, index: int
) -> np.ndarray:
    """Position ids of example ``index`` at its visit in ``epoch``, (T,), increasing, below T'.

    int64 and strictly increasing, but of `random_float`, where they are float32.
    """
    assert options.target_length >= length, "the config was checked"
    return SCHEMES[name](length, options, np.random.default_rng([Stream.POSITIONS, seed, epoch, index]))
