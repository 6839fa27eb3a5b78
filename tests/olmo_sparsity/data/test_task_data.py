"""Batches and position ids of synthetic tasks."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from olmo_sparsity import positions
from olmo_sparsity.data.build import open_training_data, task_of, task_positions
from tests.support import tiny_task
from tests.support.refusals import refused

INDICES = np.arange(40)


def ids_of(config, split="train", seed=5):
    samples = task_of(config).sample(split, seed, INDICES)
    return samples, task_positions(config).ids(samples, split=split, seed=seed, indices=INDICES)


def test_a_step_is_the_same_on_any_number_of_processes_workers_and_restarts(tmp_path):
    config = tiny_task.config(tmp_path)
    alone = [batch for batch, _ in zip(open_training_data(config).batches(0), range(4), strict=False)]
    for rank in range(2):
        shared = open_training_data(config, rank=rank, world_size=2).batches(2)
        for step in (2, 3):
            part = next(shared)
            assert torch.equal(part.input_ids, alone[step].input_ids[rank::2])
            assert torch.equal(part.position_ids, alone[step].position_ids[rank::2])
    config.data.num_workers, config.data.prefetch_factor = 1, 2
    with_workers = open_training_data(config).batches(1)
    assert torch.equal(next(with_workers).input_ids, alone[1].input_ids)
    with_workers.close()  # else Python ends the worker in a later test, which waits ten seconds for it
    assert not torch.equal(alone[0].input_ids, alone[1].input_ids)
    with refused("cannot be shared by 3 processes"):
        open_training_data(config, rank=0, world_size=3)


@pytest.mark.parametrize("scheme", ["coupled", "predicted"])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_coupled_ids_stay_coupled_after_the_random_start(tmp_path, scheme, skip):
    config = tiny_task.config(tmp_path, positions={"scheme": scheme, "skip_probability": skip})
    samples, ids = ids_of(config)
    for shifted, coupled in zip(ids, samples.coupled_ids, strict=True):
        pairs = {(int(a), int(b)) for a, b in zip(coupled, shifted, strict=True)}
        assert len(pairs) == len(set(coupled.tolist())), "one id each, so tokens that shared an id still do"
        after = [new for _, new in sorted(pairs)]
        assert after[0] == 0 and (np.diff(after) > 0).all() and after[-1] < 24
        jumps = int((np.diff(after[1:]) > 1).sum())
        assert jumps <= (1 if skip else 0)
    of_test = task_positions(config).ids(samples, split="test", seed=5, indices=INDICES)
    gaps = [np.diff(np.unique(row[row > 0])) for row in of_test]
    assert all((gap == 1).all() for gap in gaps), "test samples do not skip"
    assert (ids != of_test).any(axis=1).mean() > 0.6, "the same samples start elsewhere in the test"


def test_two_levels_start_apart_and_make_one_id(tmp_path):
    parameters = {"train_length": [2, 2], "test_length": [1, 8], "k_train": 3, "k_test": [2, 4]}
    config = tiny_task.config(
        tmp_path,
        task={"name": "multi_addition", "parameters": parameters},
        model={"vocab_size": 15, "max_sequence_length": 22},
        positions={"table_size": 16, "second_table_size": 7, "rotate": "index", "skip_probability": 0.0},
    )
    samples, ids = ids_of(config)
    second, first = np.divmod(ids, 16)
    marked = samples.coupled_ids > 0
    assert not ids[~marked].any() and (second < 7).all()
    starts = set()
    for row in range(len(ids)):
        shifts = {
            (int(a), int(b))
            for a, b in zip(
                (first - samples.coupled_ids)[row, marked[row]],
                (second - samples.second_ids)[row, marked[row]],
                strict=True,
            )
        }
        assert len(shifts) == 1, "each level is shifted as a whole"
        starts |= shifts
    assert {start for start, _ in starts} == set(range(12)), (
        "the longest sample has id 4, the last of the table is 15"
    )
    assert {start for _, start in starts} == set(range(5)), "two or three numbers"


def test_a_share_of_the_samples_has_contiguous_ids_and_no_labels_of_ids(tmp_path):
    plain = tiny_task.config(tmp_path, "global_train_batch_size=400")
    config = tiny_task.config(tmp_path, "global_train_batch_size=400", "positions.coupled_share=0.25")
    batch, whole = (next(open_training_data(config_of_run).batches(0)) for config_of_run in (config, plain))
    has_id = (batch.id_labels != -100).any(dim=1)
    assert 70 < int(has_id.sum()) < 130
    assert torch.equal(batch.position_ids[has_id], whole.position_ids[has_id])
    assert torch.equal(batch.id_labels[has_id], whole.id_labels[has_id])
    assert torch.equal(batch.labels, whole.labels)
    starts = set()
    for ids, mask in zip(batch.position_ids[~has_id], batch.loss_mask[~has_id], strict=True):
        length = int(mask.nonzero().max()) + 2  # the last place whose next token counts, that token
        start = int(ids[0])
        assert ids.tolist() == [*range(start, start + length)] + [0] * (13 - length)
        starts.add(start)
    assert starts >= {0, 5, 10} and max(starts) <= 23
    _, of_test = ids_of(config, split="test")
    assert (of_test == ids_of(plain, split="test")[1]).all()


def test_noise_replaces_ids_by_others_of_the_sample(tmp_path):
    config = tiny_task.config(tmp_path, "positions.id_noise=0.3", "positions.skip_probability=0")
    _, noisy = ids_of(config)
    _, clean = ids_of(tiny_task.config(tmp_path, "positions.skip_probability=0"))
    assert ((noisy == 0) == (clean == 0)).all(), "beginning, end and padding stay what they are"
    changed = 0
    for one, other in zip(noisy, clean, strict=True):
        assert set(one[one > 0]) <= set(range(min(other[other > 0]), max(other) + 1))
        changed += int((one != other).sum())
    # An id that is drawn anew is the same one now and then.
    assert 0.15 < changed / int((clean > 0).sum()) < 0.3
    task, scheme = task_of(config), task_positions(config)
    for index in range(40):  # whatever it is batched with, and so on any number of processes
        alone = scheme.ids(
            task.sample("train", 5, [index]), split="train", seed=5, indices=np.array([index])
        )[0]
        assert alone.tolist() == noisy[index, : len(alone)].tolist()
    assert (ids_of(config, split="test")[1] == ids_of(tiny_task.config(tmp_path), split="test")[1]).all()


def test_starts_and_skips_are_uniform():
    coupled = np.array([0, 1, 2, 3, 0])
    rows = [
        positions.apply_shift(
            coupled, *positions.draw_shift(3, 3, 8, np.random.default_rng(seed), skip_probability=1.0)
        )
        for seed in range(6000)
    ]
    starts = Counter(int(row[1]) for row in rows)
    assert sorted(starts) == [1, 2, 3, 4, 5]
    assert stats.chisquare(list(starts.values())).pvalue > 1e-3
    at_start = [row for row in rows if row[1] == 1]
    # Start 0 leaves room for a skip of 0 … 4, after id 1 or after id 2; a skip of 0 looks the same at both.
    kinds = Counter(tuple(int(value) for value in row[1:4]) for row in at_start)
    expected = {(1, 2, 3): 0.2} | {(1, 2, 3 + skip): 0.1 for skip in range(1, 5)}
    expected |= {(1, 2 + skip, 3 + skip): 0.1 for skip in range(1, 5)}
    assert set(kinds) == set(expected)
    shares = [expected[kind] * len(at_start) for kind in kinds]
    assert stats.chisquare(list(kinds.values()), shares).pvalue > 1e-3


def test_ids_skip_only_where_the_prompt_shows_it(tmp_path):
    """A sum's carry has an id that no digit of the prompt has: behind a jump it could only be guessed."""
    config = tiny_task.config(
        tmp_path,
        task={"name": "addition", "parameters": {"train_length": [1, 4], "test_length": [1, 8]}},
        model={"vocab_size": 15, "max_sequence_length": 17},
        positions={"skip_probability": 1.0},
    )
    samples, ids = ids_of(config)
    of_prompt = np.where(samples.loss_mask, 0, ids).max(axis=1)
    of_response = np.where(samples.loss_mask, ids, 0).max(axis=1)
    assert (of_response == of_prompt + 1).all()
    assert any((np.diff(np.unique(row[row > 0])) > 1).any() for row in ids), "and skip they do"


@pytest.mark.parametrize("scheme", ["contiguous", "random_start", "pose", "random_float"])
def test_other_schemes_number_each_sample_by_its_own_length(tmp_path, scheme):
    config = tiny_task.config(tmp_path, positions={"scheme": scheme})
    samples, ids = ids_of(config)
    options = positions.SchemeOptions(40, 2)
    for index, (row, length) in enumerate(zip(ids, samples.lengths, strict=True)):
        expected = positions.position_ids(scheme, int(length), options, seed=5, epoch=0, index=index)
        assert row[:length].tolist() == expected.tolist()
        assert not row[length:].any()
    tested, test_ids = ids_of(config, split="test")
    for row, length in zip(test_ids, tested.lengths, strict=True):
        assert row[:length].tolist() == list(range(length))
