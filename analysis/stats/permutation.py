"""What a least-squares slope would be by chance: predictors permuted among rows of one cell [ours].

Shapes: n rows, P predictors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def permuted_slopes(
    outcome: np.ndarray,
    design: np.ndarray,
    cells: np.ndarray,
    permutations: int,
    together: Sequence[int] = (0,),
    seed: int = 0,
) -> np.ndarray:
    """Slopes of an outcome (n,) on the first of ``together`` where these predictors are permuted, (permutations,).

    Args:
        design: predictors, (n, P), without a constant, which the fit has, too.
        cells: number of each row's cell, (n,): rows of one cell are exchanged.
        together: columns of predictors that are permuted as one. Alone, a permuted one would no longer be like those
            that go with it, so that its slopes would spread less than one that is fitted does.

    By Frisch, Waugh and Lovell: the outcome and what is permuted, less what the other predictors explain. In a cell of
    m rows one in m stays where it is, so that the mean of the slopes is that part of the slope.
    """
    members = [np.flatnonzero(cells == cell) for cell in np.unique(cells)]
    others = np.column_stack([np.ones(len(outcome)), np.delete(design, together, axis=1)])
    basis, _ = np.linalg.qr(others)
    left = outcome - basis @ (basis.T @ outcome)
    generator = np.random.default_rng(seed)
    slopes = []
    for _ in range(permutations):
        order = np.arange(len(outcome))
        for places in members:
            order[places] = generator.permutation(places)
        permuted = design[order][:, list(together)]
        permuted -= basis @ (basis.T @ permuted)
        coefficients, *_ = np.linalg.lstsq(permuted, left, rcond=None)
        slopes.append(coefficients[0])
    return np.array(slopes)
