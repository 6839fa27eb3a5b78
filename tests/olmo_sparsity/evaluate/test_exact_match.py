"""Exact match against one sample at a time without a cache."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch

from olmo_sparsity.data.build import task_of, task_positions
from olmo_sparsity.evaluate.build import open_evaluation
from olmo_sparsity.evaluate.exact_match import (
    LengthResult,
    grid,
    measure_exact_match,
    multiples_of_training_length,
)
from olmo_sparsity.model.build import as_predictor, build_model
from olmo_sparsity.tasks import make_task
from olmo_sparsity.tasks.scratchpads import Copy
from olmo_sparsity.tasks.task import Sizes
from tests.support import tiny_task
from tests.support.refusals import refused
from tests.support.tiny_task import answer_slowly

TABLE = 40
SORTS = ("exact", "wrong_token", "wrong_id", "wrong_stop")
PROBABILITIES = ("mean_probability", "std_probability")


@dataclass(frozen=True)
class Mixed(Copy):
    """Copies of many sizes at one length: of 3 … length symbols."""

    train_length: tuple[int, int] = (4, 6)
    test_length: tuple[int, int] = (4, 20)
    num_symbols: int = 3

    def _sizes(self, split, draws):
        sizes = super()._sizes(split, draws)
        return Sizes(sizes.length, 3 + draws.named("k").integer(sizes.length - 2))

    def _smallest(self, split):
        return Sizes(np.array([4]), np.array([4]))

    def _make(self, sizes, draws):
        return replace(super()._make(Sizes(sizes.k, sizes.k), draws), task_length=sizes.length)


def make_config(folder, task="scratchpad_parity", scheme="predicted", family="gpt_neox", **changes):
    """A config of a tiny model on a task."""
    parameters = changes.pop("parameters", {"train_length": [4, 6], "test_length": [4, 20]})
    sizes = {"d_model": 32, "max_sequence_length": 64, "eos_token_id": 2, "pad_token_id": 0}
    sizes["vocab_size"] = len(make_task(task, parameters).vocabulary)
    positions = {"scheme": scheme, "table_size": TABLE, "rotate": "index", "target_length": None}
    positions |= changes.pop("positions", {})
    values = {"model": {"family": family, **sizes}, "positions": positions, **changes}
    return tiny_task.config(folder, task={"name": task, "parameters": parameters}, **values)


def learned(config, batch, ids, steps):
    """The model of a config after some steps on one batch: it knows part of it by heart."""
    model = as_predictor(build_model(config))
    model.options = replace(model.options, id_weight=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    tokens, ids = torch.from_numpy(batch.tokens), torch.from_numpy(ids)
    counts = torch.from_numpy(batch.loss_mask)[:, 1:]
    for _ in range(steps):
        labels = {"labels": tokens[:, 1:].masked_fill(~counts, -100)}
        if model.options.predicts_ids:
            labels["id_labels"] = ids[:, 1:].masked_fill(~counts, -100)
        loss_nats = model(tokens[:, :-1], ids[:, :-1], **labels)["loss_nats"] / counts.sum()
        optimizer.zero_grad()
        loss_nats.backward()
        optimizer.step()
    return model.eval()


def first_error(tokens, ids, true_tokens, true_ids, end):
    """In plain Python; ``ids`` None where they are no part of the answer."""
    for step, truth in enumerate(true_tokens):
        if step == len(tokens) or (tokens[step] == end) != (truth == end):
            return "wrong_stop"
        if tokens[step] != truth:
            return "wrong_token"
        if ids is not None and ids[step] != true_ids[step]:
            return "wrong_id"
    return "exact" if len(tokens) == len(true_tokens) else "wrong_stop"


@torch.no_grad()
def forced_slowly(model, tokens, ids, start):
    """Of each token from ``start`` on, given the true ones before: predicted token and id, probability of the true."""
    for column in range(start, len(tokens)):
        output = model(torch.tensor([tokens[:column]]), torch.tensor([ids[:column]]))
        id_ = None if output.id_logits is None else int(output.id_logits[0, -1].argmax())
        probabilities = output.logits[0, -1].softmax(dim=-1)
        yield int(probabilities.argmax()), id_, float(probabilities[tokens[column]])


def alike(one, other):
    """Rows whose counts are the same, and the rounding of sums aside their probabilities."""
    near = {name: pytest.approx(getattr(other, name), rel=1e-4, abs=1e-6) for name in PROBABILITIES}
    return asdict(one) == {**asdict(other), **near}


def measured_slowly(model, task, positions, samples, seed):
    """A record's row, a sample at a time, three tokens further than the truth goes."""
    counts, predicts, probabilities = Counter(), model.options.predicts_ids, []
    for index in map(np.array, [[i] for i in range(samples)]):
        sample = task.sample("test", seed, index)
        ids = positions.ids(sample, split="test", seed=seed, indices=index)[0].tolist()
        tokens, start = sample.tokens[0].tolist(), int(sample.response_start[0])
        further = 3 if task.end_id is not None else 0
        then = (
            [0] * further if model.options.scheme == "coupled" else range(ids[-1] + 1, ids[-1] + 1 + further)
        )
        predicted_ids = [None] * (len(tokens) - start + further) if predicts else [*ids[start:], *then]
        answer = answer_slowly(model, tokens[:start], ids[:start], predicted_ids, task.end_id)
        answered_ids = answer[1] if predicts else None
        sort = first_error(answer[0], answered_ids, tokens[start:], ids[start:], task.end_id)
        forced = list(forced_slowly(model, tokens, ids, start))
        right = [token == truth for (token, *_), truth in zip(forced, tokens[start:], strict=True)]
        right_ids = [id_ == truth for (_, id_, _), truth in zip(forced, ids[start:], strict=True)]
        counts[sort] += 1
        counts["response_tokens"] += len(right)
        counts["teacher_forced_tokens"] += sum(right)
        counts["teacher_forced_ids"] += sum(right_ids)
        counts["teacher_forced_exact"] += all(right) and (all(right_ids) or not predicts)
        probabilities.append(np.prod([p for *_, p in forced]))
    counts["mean_probability"], counts["std_probability"] = np.mean(probabilities), np.std(probabilities)
    return counts


CASES = [
    ("gpt_neox", "predicted", Mixed(), 6, 45, ["wrong_id"]),
    ("olmo", "coupled", Mixed(), 6, 25, ["wrong_token"]),
    ("gpt_neox", "contiguous", Mixed(), 5, 25, ["wrong_token", "wrong_stop"]),
    ("olmo", "contiguous", make_task("planted", {"k_test": [2], "k_train": 2}), 20, 1, ["wrong_token"]),
]


@pytest.mark.parametrize(("family", "scheme", "task", "length", "steps", "sorts"), CASES)
def test_counts_of_a_slow_loop_whatever_the_batch_or_the_process(
    tmp_path, family, scheme, task, length, steps, sorts
):
    samples, seed = 24, 5
    config = make_config(tmp_path, "scratchpad_parity", scheme, family)
    config.model.vocab_size = len(task.vocabulary)
    positions, sized = task_positions(config), task.at_length(length)
    indices = np.arange(samples)
    batch = sized.sample("test", seed, indices)
    ids = positions.ids(batch, split="test", seed=seed, indices=indices)
    model = learned(config, batch, ids, steps)
    expected = measured_slowly(model, sized, positions, samples, seed)

    def measured_row(batch_tokens=1000, **share):
        cells = grid(positions, task, [length])
        options = {"samples": samples, "seed": seed, "batch_tokens": batch_tokens}
        (row,) = measure_exact_match(model, task, positions, cells, **options, **share)
        return row

    row = measured_row()
    assert 0 < row.exact < samples, "a model that is right and wrong"
    assert all(expected[sort] > 0 for sort in sorts), "errors of these sorts are counted"
    assert (row.length, row.k, row.samples) == (length, 2 if task.name == "planted" else None, samples)
    for name in (*SORTS, "teacher_forced_exact", "response_tokens", "teacher_forced_tokens"):
        assert getattr(row, name) == expected[name], name
    assert row.teacher_forced_ids == (expected["teacher_forced_ids"] if scheme == "predicted" else None)
    assert row.teacher_forced_exact == row.exact  # up to its first error a model reads the truth either way
    for name in PROBABILITIES:
        assert getattr(row, name) == pytest.approx(expected[name], rel=1e-4), name
    assert alike(measured_row(batch_tokens=1), row) and alike(measured_row(batch_tokens=77), row)
    shares = []
    for rank in range(5):
        with pytest.raises(AssertionError):  # a share alone is not all samples
            measured_row(rank=rank, world_size=5, reduce_sum=lambda tensor: shares.append(tensor) or tensor)
    assert alike(measured_row(rank=2, world_size=5, reduce_sum=lambda tensor: sum(shares)), row)


def test_a_length_or_k_that_cannot_be_measured_is_refused(tmp_path):
    config = make_config(tmp_path, "copy", parameters={"train_length": [15, 20], "test_length": [15, 30]})
    with refused("copy at length 60: positions.table_size is too small for ids up to 61; "):
        grid(task_positions(config), make_task("copy", {}), [10, 60])
    parameters = {"train_length": [1, 2], "test_length": [1, 4], "k_train": 2, "k_test": [2, 3]}
    positions = {"table_size": 20, "second_table_size": 4}
    config = make_config(tmp_path, "multi_addition", parameters=parameters, positions=positions)
    with refused("positions.second_table_size is too small for ids up to 6; .*$"):
        grid(task_positions(config), task_of(config), [4], [6])


def test_lengths_and_k(tmp_path):
    positions = task_positions(make_config(tmp_path, "sparse_parity", "contiguous", parameters={}))

    def cells(task, parameters, *lengths_ks):
        return grid(positions, make_task(task, parameters), *lengths_ks)

    parity = {"k_train": 6, "k_test": [8, 2, 12]}
    assert cells("sparse_parity", parity, [20, 24]) == [(20, 2), (24, 2), (20, 8), (24, 8), (24, 12)]
    assert cells("sparse_parity", parity, [20, 40], [4, 6]) == [(20, 4), (40, 4), (20, 6), (40, 6)]
    short = {"test_length": [20, 22], "k_test": [4], "k_train": 4}
    # though no test sample of its own could hold so many
    assert cells("sparse_parity", short, [60], [30]) == [(60, 30)]
    with refused("no room for k = 12"):
        cells("sparse_parity", parity, [20, 40], [4, 12])
    with refused("nothing of sparse_parity fits into lengths"):
        cells("sparse_parity", parity, [2])
    assert cells("addition", {}, [3, 9]) == [(3, None), (9, None)]


def test_default_lengths_go_from_the_training_range_as_far_as_test_samples_do():
    parity = make_task("sparse_parity", {})
    assert multiples_of_training_length(parity) == [24, 50, 74, 100, 150, 250, 374, 500]
    assert multiples_of_training_length(parity, (1, 2, 3)) == [50, 100, 150]
    copy = make_task("copy", {"train_length": [15, 20], "test_length": [15, 50]})
    assert multiples_of_training_length(copy) == [15, 20, 30, 40, 50]


@pytest.mark.parametrize("task", ["scratchpad_parity", "sparse_parity"])
def test_evaluation_while_training_is_the_same_measure(tmp_path, task):
    parameters = {"train_length": [8, 10], "test_length": [8, 24]}
    if task == "sparse_parity":
        parameters.update({"k_train": 3, "k_test": [4]})
    changes = {"parameters": parameters, "evaluation": {"windows": 7, "seed": 4}}
    scheme = "predicted" if task == "scratchpad_parity" else "random_start"
    config = make_config(tmp_path, task, scheme, **changes)
    model = build_model(config).eval()
    row = open_evaluation(config).run(model, lambda tensor: tensor)
    cells = [(length, 3 if task == "sparse_parity" else None) for length in (10, 20, 24)]
    arguments = as_predictor(model), make_task(task, parameters), task_positions(config)
    expected = measure_exact_match(*arguments, cells, samples=7, seed=4)
    assert row.keys() == {"exact_match"}
    measured = [LengthResult(**values) for values in row["exact_match"]]
    assert all(alike(one, other) for one, other in zip(measured, expected, strict=True))
    json.dumps(row)
