import numpy as np
import pytest
from scipy import stats

from olmo_sparsity.positions import SCHEMES, SchemeOptions, position_ids

LENGTH, TARGET = 16, 40


def draw(name, count, chunks=2, length=LENGTH, target=TARGET, **where):
    options = SchemeOptions(target_length=target, chunks=chunks)
    return np.stack(
        [
            position_ids(name, length, options, **{"seed": 7, "epoch": 0, "index": i, **where})
            for i in range(count)
        ]
    )


def test_random_start_is_uniform_and_contiguous():
    ids = draw("random_start", 5000)
    assert (np.diff(ids, axis=1) == 1).all()
    counts = np.bincount(ids[:, 0], minlength=TARGET - LENGTH + 1)
    assert len(counts) == TARGET - LENGTH + 1
    assert stats.chisquare(counts).pvalue > 1e-3


def test_random_floats_are_sorted_uniform_draws():
    ids = draw("random_float", 3000)
    assert (np.diff(ids, axis=1) >= 0).all() and ids.min() >= 0 and ids.max() < TARGET
    for rank in (1, LENGTH // 2, LENGTH):
        of_rank = stats.beta(rank, LENGTH + 1 - rank)  # of this order statistic
        assert stats.kstest(ids[:, rank - 1] / TARGET, of_rank.cdf).pvalue > 1e-3


@pytest.mark.parametrize("chunks", [2, 3, 5, 16])
def test_pose_increases_strictly_and_stays_below_target(chunks):
    ids = draw("pose", 3000, chunks=chunks)
    assert (np.diff(ids, axis=1) >= 1).all()
    assert ids[:, 0].max() == 0
    assert ids.max() == TARGET - 1  # reached, never exceeded
    assert ((np.diff(ids, axis=1) > 1).sum(axis=1) <= chunks - 1).all()


@pytest.mark.parametrize(("length", "target"), [(LENGTH, TARGET), (5, 20)])
def test_pose_of_two_chunks_has_the_distribution_of_the_authors_code(length, target):
    """Zhu et al.: first chunk U{1 … ceil(T/2)} tokens, second shifted by U{0 … T'-T}, independent of each other."""
    ids = draw("pose", 20_000, length=length, target=target)
    shift = ids[:, -1] - (length - 1)
    counts = np.bincount(shift, minlength=target - length + 1)
    assert len(counts) == target - length + 1
    assert stats.chisquare(counts).pvalue > 1e-3
    jumped = ids[shift > 0]
    first_chunk = (np.diff(jumped, axis=1) > 1).argmax(axis=1) + 1
    counts = np.bincount(first_chunk, minlength=-(-length // 2) + 1)[1:]
    assert len(counts) == -(-length // 2)
    assert stats.chisquare(counts).pvalue > 1e-3
    assert abs(stats.spearmanr(first_chunk, shift[shift > 0]).statistic) < 0.03


def test_pose_of_many_chunks_cuts_uniformly():
    ids = draw("pose", 20_000, chunks=4, target=2000)  # jumps of 0 are rare, so nearly every cut is seen
    cuts = (np.diff(ids, axis=1) > 1).sum(axis=0)
    assert stats.chisquare(cuts).pvalue > 1e-3


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_ids_are_a_pure_function_of_seed_epoch_and_index(name):
    assert (draw(name, 5) == draw(name, 5)).all()
    if name != "contiguous":
        everything = draw(name, 50)
        assert (everything != draw(name, 50, epoch=1)).any()
        assert (everything != draw(name, 50, seed=8)).any()
        assert len(np.unique(everything, axis=0)) > 10
