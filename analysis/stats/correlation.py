"""Correlations of the rows of two arrays. Shapes: m rows, n values of each."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata


def row_pearson(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson's correlation of row i of ``first`` with row i of ``second``, (m, n) both: (m,).

    NaN where a row is constant or has a value that is not finite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        # The mean of equal values may be rounded: what is left of them is then noise, not 0.
        constant = (np.ptp(first, axis=1) == 0) | (np.ptp(second, axis=1) == 0)
        first, second = (each - each.mean(axis=1, keepdims=True) for each in (first, second))
        products = (first * second).sum(axis=1)
        squares = (first**2).sum(axis=1) * (second**2).sum(axis=1)
        found = products / np.sqrt(squares)
    return np.where(np.isfinite(found) & ~constant, np.clip(found, -1, 1), np.nan)


def row_spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of the rows, (m,); equal values share their mean rank. NaN as in `row_pearson`."""
    finite = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    ranks = (rankdata(np.where(finite[:, None], each, 0.0), axis=1) for each in (first, second))
    return np.where(finite, row_pearson(*ranks), np.nan)
