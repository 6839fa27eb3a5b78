"""The coupling of a task, found in a model by `results/synthetic/couple.py`: against models that answer by hand."""

import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.model.losses import Scorer
from olmo_sparsity.data.batches import TaskPositions
from olmo_sparsity.evaluate.records import further_options
from olmo_sparsity.tasks import make_task
from olmo_sparsity.tasks.samples import Segment, found_ids
from tests.support import tiny_task
from tests.support.refusals import refused

COUPLE = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "results" / "synthetic" / "couple.py"))
)
TASKS = {
    "scratchpad_parity": ([3], [Segment("start", 2)]),
    "copy": ([3], [Segment("start", 2)]),
    "addition": ([3, 4], [Segment("end", 2), Segment("end", 2)]),
    "digit_multiplication": ([3, 4], [Segment("end", 2), Segment("start", 2)]),
}
"""Marks between the segments of each prompt, and the coupling that the task gives them."""


def small(name):
    return make_task(name, {"train_length": [3, 6], "test_length": [3, 9]})


class ByHand:
    """Predicts each token of the response from the tokens of the prompt that the task couples with it.

    Its logits are a fixed random function of them; a token that is not there is a token of its own.
    """

    def __init__(self, task):
        self.ids = {}
        for length in range(3, 7):
            sized = make_task(task.name, {"train_length": [length, length], "test_length": [3, 9]})
            batch = sized.sample("train", 0, np.arange(2))
            self.ids[int(batch.lengths[0])] = batch.coupled_ids[0], int(batch.response_start[0])
        self.table = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids, position_ids, *, logits_to_keep):
        length = int(position_ids[0, -1]) + 2
        coupled, start = self.ids[length]
        there = torch.full((len(input_ids), length), 19)
        there.scatter_(1, position_ids, input_ids)
        rows = []
        for column in range(start, length):
            own = [c for c in range(1, start) if coupled[c] == coupled[column] and coupled[c] > 1]
            key = sum(
                (there[:, c] * 20**place for place, c in enumerate(own)),
                torch.zeros(len(there), dtype=torch.long),
            )
            rows.append(self.table[key % 2000])
        return SimpleNamespace(logits=torch.stack(rows, dim=1))


class Attending(ByHand):
    """Attends as it would predict."""

    def last_attention(self, input_ids, position_ids, queries):
        length = int(position_ids[0, -1]) + 2
        coupled, start = self.ids[length]
        same = torch.tensor(coupled[start:, None] == coupled[None, : length - 1]).float()
        return same.expand(len(input_ids), -1, -1)


@pytest.mark.parametrize("by", ["leave-one-out-kl", "attention"])
@pytest.mark.parametrize("name", TASKS)
def test_what_a_model_reads_is_coupled(name, by):
    task, (marks, expected) = small(name), TASKS[name]
    model = (Attending if by == "attention" else ByHand)(task)
    scorer = Scorer(model, share_prefixes=False)
    layouts = [COUPLE.lay_out(scorer, task, length, by=by) for length in range(3, 7)]
    assert COUPLE.marks_between(layouts) == [1, *marks]
    found = list(COUPLE.fit_segments(layouts, [1, *marks]))
    assert [agreement for _, agreement in found] == [1.0] * len(expected)
    assert [segment.first_id for segment, _ in found] == [each.first_id for each in expected]
    # One digit is its own first and last: either way of counting it is right.
    counted = [s.counted_from for (s, _), e in zip(found, expected, strict=True) if e != Segment("start", 2)]
    assert counted == [e.counted_from for e in expected if e != Segment("start", 2)]


@pytest.mark.parametrize("name", TASKS)
def test_a_coupling_gives_the_ids_of_the_task_at_any_length(name):
    task, (marks, segments) = small(name), TASKS[name]
    for split in ("train", "test"):
        batch = task.sample(split, 4, np.arange(50))
        np.testing.assert_array_equal(found_ids(batch, [1, *marks], segments, task.end_id), batch.coupled_ids)
    with refused("1 segments, and a prompt has" if len(segments) > 1 else "2 segments, and a prompt has 1"):
        found_ids(batch, [1, *marks], segments[:1] if len(segments) > 1 else segments * 2, task.end_id)


def test_training_takes_a_coupling_in_the_place_of_the_tasks_own(tmp_path):
    found = "--positions.found.marks=[1,3]", "--positions.found.counted_from=[start]"
    batch, indices = make_task("scratchpad_parity", tiny_task.PARITY["task"]["parameters"]), np.arange(30)
    samples = batch.sample("train", 3, indices)

    def ids(*overrides):
        positions = TaskPositions(tiny_task.config(tmp_path, *overrides))
        return positions.ids(samples, split="train", seed=3, indices=indices)

    own = "--positions.found.first_ids=[2]"
    np.testing.assert_array_equal(ids(*found, own), ids())
    plain = further_options(tiny_task.config(tmp_path))
    told = further_options(tiny_task.config(tmp_path, *found, own))
    assert told == {**plain, "positions.found": "start 2"} and "positions.found" not in plain
    shifted = ids(*found, "--positions.found.first_ids=[3]")
    assert (shifted != ids()).any()
    with refused("positions.found.first_ids: give"):
        tiny_task.config(tmp_path, *found)
    with refused("not with pose"):
        tiny_task.config(tmp_path, *found, own, "--positions.scheme=pose")
    with refused("need ids up to"):
        ids(*found, "--positions.found.first_ids=[22]")


def test_train_takes_what_the_command_prints(tmp_path):
    segment = {"counted_from": "start", "first_id": 2, "agreement": 0.9}
    found = {"marks": [1, 3], "segments": [segment], "as_the_task_says": 1.0}
    _, same, told = COUPLE.outcome(found)
    assert same.startswith("100 % of the tokens")
    taken = tiny_task.config(tmp_path, *shlex.split(told)[2:]).positions.found
    assert (taken.marks, taken.counted_from, taken.first_ids) == ([1, 3], ["start"], [2])
    nothing = {"marks": [], "segments": [{**segment, "agreement": 0.2}], "as_the_task_says": None}
    assert "no coupling was found" in [*COUPLE.outcome(nothing)][-1]
