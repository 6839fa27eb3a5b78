"""What all tasks promise: pure functions of (split, seed, index), exact distributions, splits that never coincide."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from olmo_sparsity.tasks import TASKS, make_task
from olmo_sparsity.tasks.assemble import labelled_batch
from olmo_sparsity.tasks.task import _in_test
from tests.support.refusals import refused

SMALL = {
    "addition": {"train_length": (4, 10), "test_length": (4, 20)},
    "copy": {"train_length": (4, 20), "test_length": (4, 40)},
    "digit_multiplication": {"train_length": (4, 10), "test_length": (4, 20)},
    "multi_addition": {"train_length": (3, 8), "test_length": (3, 12)},
    "planted": {"test_length": (20, 60)},
    "scratchpad_parity": {"train_length": (12, 20), "test_length": (12, 40)},
    "sparse_parity": {"test_length": (20, 60)},
    "variable_assignment": {},
}


def is_uniform(values, choices):
    counts = Counter(values)
    assert set(counts) == set(choices)
    return stats.chisquare(list(counts.values())).pvalue > 1e-3


def small(name):
    return make_task(name, SMALL[name])


def samples(batch):
    """All that is said of each sample, without padding, as values that can be compared."""
    samples = []
    levels = [ids for ids in (batch.coupled_ids, batch.second_ids) if ids is not None]
    for row, length in enumerate(batch.lengths):
        planted = [] if batch.planted is None else [c for c in batch.planted[row] if c >= 0]
        ids = [value for level in levels for value in level[row, :length]]
        label = [] if batch.label is None else [batch.label[row]]
        start, task_length = batch.response_start[row], batch.task_length[row]
        samples.append((*map(tuple, (batch.tokens[row, :length], ids, planted, label)), start, task_length))
    return samples


def prompts(batch):
    rows = zip(batch.tokens.tolist(), batch.response_start, strict=True)
    return [tuple(tokens[:start]) for tokens, start in rows]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", TASKS)
def test_a_sample_depends_on_nothing_but_split_seed_and_index(name, split):
    everything = samples(small(name).sample(split, 4, range(100)))
    order = np.random.default_rng(0).permutation(100)
    assert samples(small(name).sample(split, 4, order)) == [everything[i] for i in order]
    for index in (0, 17, 99):
        assert samples(small(name).sample(split, 4, [index])) == [everything[index]]
    again = samples(small(name).sample(split, 4, [5, 5]))
    assert again == [everything[5]] * 2
    assert len(set(everything)) > 95
    for other in (small(name).sample(split, 5, range(100)), small(name).sample(split, 4, range(100, 200))):
        assert len({*samples(other)} & {*everything}) < 5


@pytest.mark.parametrize("name", TASKS)
def test_lengths_are_uniform(name):
    task = replace(small(name), k_test=(3,)) if small(name).end_id is None else small(name)
    if name != "variable_assignment":
        task = replace(task, test_length=(20, 26))
    shortest, longest = task.test_length
    lengths = task.sample("test", 0, range(3000)).task_length
    assert is_uniform(lengths, range(shortest, longest + 1, getattr(task, "tokens_per_position", 1)))


@pytest.mark.parametrize("name", ["sparse_parity", "planted"])
def test_k_is_uniform_and_then_the_length(name):
    lengths = {"train_length": (10, 18), "test_length": (12, 20)}
    task = make_task(name, {"k_train": 5, "k_test": (2, 4, 9), **lengths})
    for split, ks in (("train", range(1, 6)), ("test", (2, 4, 9))):
        batch = task.sample(split, 0, range(6000))
        k = (batch.planted >= 0).sum(axis=1)
        assert is_uniform(k, ks)
        for number in ks:
            shortest = max(getattr(task, f"{split}_length")[0], number * task.tokens_per_position)
            allowed = range(shortest, getattr(task, f"{split}_length")[1] + 1, task.tokens_per_position)
            assert is_uniform(batch.task_length[k == number], allowed)


def spans(task):
    planted = task.sample("train", 0, range(3000)).planted
    last = np.where(planted >= 0, planted, -1).max(axis=1)
    return last - planted[:, 0], (planted >= 0).sum(axis=1), planted


def test_locality_bounds_the_span_of_the_planted_columns():
    options = {"train_length": (20, 30), "k_train": 4, "k_test": (4,)}
    for positions in ("uniform", "stretched", "adjacent"):
        task = make_task("planted", {**options, "locality": 7, "position_distribution": positions})
        span, k, planted = spans(task)
        assert span.max() == {"uniform": 7, "stretched": 7, "adjacent": 3}[positions]
        if positions == "stretched":
            assert (span[k > 1] == 7).all()
        if positions == "adjacent":
            assert (span == k - 1).all()
        assert (np.diff(planted, axis=1)[planted[:, 1:] >= 0] > 0).all()
    span, k, _ = spans(make_task("planted", {**options, "position_distribution": "stretched"}))
    assert (span[k > 1] >= 19).all()
    assert spans(make_task("planted", options))[0].max() > 25


# --- the two splits ---

TINY = {  # name: parameters, number of different prompts
    "addition": ({}, 100),
    "copy": ({"train_length": (3, 3), "test_length": (3, 3), "num_symbols": 3}, 27),
    "digit_multiplication": ({}, 100),
    "multi_addition": ({"k_train": 2, "k_test": (2,)}, 100),
    "planted": ({"train_length": (4, 4), "test_length": (4, 4), "k_train": 1, "k_test": (1,), "num_background": 2},
                4 * 2 * 2**3),
    "scratchpad_parity": ({"train_length": (5, 5), "test_length": (5, 5)}, 32),
    "sparse_parity": ({"train_length": (6, 6), "test_length": (6, 6), "k_train": 1, "k_test": (1,)}, 3 * 8),
    "variable_assignment": ({"chains": 1, "distractors": 0, "num_variables": 10}, 10 * 10),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_the_splits_of_a_tiny_space_share_no_prompt_and_leave_none_out(name):
    parameters, count = TINY[name]
    task = make_task(name, {"train_length": (1, 1), "test_length": (1, 1), **parameters})
    train, other_seed, test = (
        prompts(task.sample(split, seed, range(3000)))
        for split, seed in (("train", 0), ("train", 9), ("test", 0))
    )
    assert set(train) == set(other_seed)
    assert not set(train) & set(test)
    assert len({*train, *test}) == count
    assert 0 < len(set(test)) < 0.35 * count
    for drawn in (train, test):
        assert is_uniform(drawn, set(drawn))  # drawing again favours no prompt


# --- what would give wrong samples is refused ---


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("sparse_parity", {"k_test": [4, 300]}, r"test_length \[20, 500\] has no room for k = 300; lower k_test"),
        ("sparse_parity", {"k_train_min": 5}, r"k of train \[\] must be 1 or more"),
        ("sparse_parity", {"train_length": [20, 51]}, "must be multiples of 2"),
        ("multi_addition", {"k_train": 11}, "k_train 11 is not from 2 to 10"),
        ("planted", {"locality": 5}, "16 planted tokens do not fit in locality 5; raise it to 15"),
        ("planted", {"distance": [0, 40]}, "must be 1 or more tokens before the label"),
        ("variable_assignment", {"num_variables": 25}, "chains of length 12 .* need 36 variables.*raise it"),
        ("copy", {"symbols": 3}, "Key 'symbols' not in 'Copy'.*; it has train_length, test_length, num_symbols"),
        ("scratchpad_parity", {"test_length": (1, 30)}, "length 1 has so few different prompts.*raise the lower end"),
        ("parity", {}, "unknown task 'parity'; choose from addition, "),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_in_one_line(name, parameters, message):
    with refused(message):
        make_task(name, parameters)


def test_planted_tokens_stand_at_the_distance_that_is_asked_for():
    task = make_task("planted", {"distance": [10, 30], "k_train": 3, "k_test": [3], "train_length": [12, 50]})
    assert not task.holds(11, 3) and task.holds(12, 3)
    for split in ("train", "test"):
        batch = task.sample(split, 0, range(500))
        distances = (batch.response_start[:, None] - batch.planted)[batch.planted >= 0]
        assert distances.min() == 10 and distances.max() == 30
    assert min(task.sample("train", 0, range(500)).response_start) == 12


def test_the_split_of_a_prompt_never_changes():
    """Else checkpoints of another version were tested on prompts that they trained on."""
    prompt = 1 + np.arange(216)[:, None] // 6 ** np.arange(3) % 6
    batch = labelled_batch(
        prompt, np.full(216, 3), np.ones(216, dtype=int), np.zeros(prompt.shape, dtype=bool)
    )
    assert np.flatnonzero(_in_test(batch)).tolist() == [
        0, 5, 19, 23, 25, 28, 31, 32, 38, 41, 68, 69, 72, 78, 85, 87, 94, 112, 136, 161, 172, 173, 177, 178, 184, 190,
        193, 194, 196, 198, 208,
    ]  # fmt: skip
