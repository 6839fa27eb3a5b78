"""The coupling of a task, found in a model by `results/synthetic/couple.py`: against models that answer by hand."""

import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.model.losses import Scorer
from olmo_sparsity.checkpoint import weights_sha256
from olmo_sparsity.tasks import make_task, task
from olmo_sparsity.util.files import EXACT_MATCH_NAME, read_exact_match
from tests.support import tiny_task
from tests.support.refusals import refused

COUPLE = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "results" / "synthetic" / "couple.py"))
)
Segment, found_ids = COUPLE.Segment, COUPLE.found_ids
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
            before = [c for c in range(1, start) if coupled[c] == coupled[column] and coupled[c] > 1]
            key = sum(
                (there[:, c] * 20**place for place, c in enumerate(before)),
                torch.zeros(len(there), dtype=torch.long),
            )
            rows.append(self.table[key % 2000])
        return SimpleNamespace(logits=torch.stack(rows, dim=1))


class Attending(ByHand):
    """Attends as it would predict."""

    def attention(self, input_ids, position_ids, queries, reduce):
        length = int(position_ids[0, -1]) + 2
        coupled, start = self.ids[length]
        same = torch.tensor(coupled[start:, None] == coupled[None, : length - 1]).float()
        return [reduce([same[None, None, -queries:].expand(len(input_ids), 1, -1, -1)])]


@pytest.mark.parametrize("by", ["leave-one-out-kl", "attention"])
@pytest.mark.parametrize("name", TASKS)
def test_what_a_model_reads_is_coupled(name, by):
    task, (marks, expected) = small(name), TASKS[name]
    model = (Attending if by == "attention" else ByHand)(task)
    scorer = Scorer(model, share_prefixes=False)
    layouts = [COUPLE.lay_out(scorer, task, length, by=by) for length in range(3, 7)]
    assert COUPLE.marks_between(layouts) == [1, *marks]
    fitted = list(COUPLE.fit_segments(layouts, [1, *marks]))
    assert [agreement for _, agreement in fitted] == [1.0] * len(expected)
    assert [segment.first_id for segment, _ in fitted] == [segment.first_id for segment in expected]
    # One digit is its own first and last: either way of counting it is right.
    counted = [s.counted_from for (s, _), e in zip(fitted, expected, strict=True) if e != Segment("start", 2)]
    assert counted == [e.counted_from for e in expected if e != Segment("start", 2)]


@pytest.mark.parametrize("name", TASKS)
def test_a_coupling_gives_the_ids_of_the_task_at_any_length(name):
    task, (marks, segments) = small(name), TASKS[name]
    for split in ("train", "test"):
        batch = task.sample(split, 4, np.arange(50))
        np.testing.assert_array_equal(found_ids(batch, [1, *marks], segments, task.end_id), batch.coupled_ids)
    with refused("1 segments, and a prompt has" if len(segments) > 1 else "2 segments, and a prompt has 1"):
        found_ids(batch, [1, *marks], segments[:1] if len(segments) > 1 else segments * 2, task.end_id)


def test_training_takes_a_coupling_in_the_place_of_the_tasks_own(tmp_path, monkeypatch, run_here, one_thread):
    def train(name, *values):
        options = [f"--save_folder={tmp_path / name}", *(f"--task.parameters.{value}" for value in values)]
        return run_here("results/synthetic/couple.py", "train", tiny_task.write(tmp_path), *options)

    for name, of_package in task.TASKS.items():  # the script puts tasks of its own in their place
        monkeypatch.setitem(task.TASKS, name, of_package)
    coupling, weights = ("marks=[1,3]", "counted_from=[start]"), {}
    for name, values in {
        "told": [],
        "own": [*coupling, "first_ids=[2]"],
        "off": [*coupling, "first_ids=[3]"],
    }.items():
        done = train(name, *values)
        assert done.returncode == 0, done.stderr
        weights[name] = weights_sha256(tmp_path / name)
    assert weights["told"] == weights["own"] != weights["off"]
    measured = run_here("results/synthetic/couple.py", "exact_match", tmp_path / "off", "--samples", 2)
    record = read_exact_match(tmp_path / "off" / EXACT_MATCH_NAME)
    assert measured.returncode == 0 and record["task"]["parameters"]["first_ids"] == [3]
    for message, *values in (
        ("first_ids: give ids", *coupling),
        ("2 segments, and a prompt has 1", "marks=[1,3]", "counted_from=[start,end]", "first_ids=[2,2]"),
        ("need ids up to 36", *coupling, "first_ids=[22]"),
    ):
        assert message in train("refused", *values).stderr


def test_the_command_prints_what_train_takes():
    segment = {"counted_from": "start", "first_id": 2, "agreement": 0.9}
    coupling = {"marks": [1, 3], "segments": [segment], "as_the_task_says": 1.0}
    _, same, command = COUPLE.outcome(coupling)
    assert same.startswith("100 % of the tokens")
    options = [
        f"--task.parameters.{value}" for value in ("marks=[1,3]", "counted_from=[start]", "first_ids=[2]")
    ]
    assert shlex.split(command) == ["train", "with", *options]
    nothing = {"marks": [], "segments": [{**segment, "agreement": 0.2}], "as_the_task_says": None}
    assert "no coupling was found" in [*COUPLE.outcome(nothing)][-1]
