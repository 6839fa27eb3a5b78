"""Find which tokens of a task belong together, in a model that was not told them in training (docs/method.md, 3.5).

    python results/synthetic/couple.py runs/parity-rope --out runs/parity-rope/coupling
    python results/synthetic/couple.py runs/addition-nope --by attention --out runs/addition-nope/coupling

In training samples of each length it measures the influence of every token of the prompt that differs between them on
every token of the response. A token is coupled to the one that it influences most, and takes its id [ours]. Of each
segment of the prompt (between tokens that never change) it keeps whether ids are counted from its start or its end,
and the first id; agreement is the share of the segment's tokens whose id that gives. So the coupling is known for
prompts of any length. Writes coupling.json and prints the coupling, for how many tokens it is what the task itself
says, and the parameters of a task that has it. Where agreement is below 50 %, none was found.

Tasks have these parameters in this script alone, which trains and measures as the commands do:

    python results/synthetic/couple.py train configs/synthetic/copy-small.yaml --save_folder=runs/found \\
        --task.parameters.marks=[1,3] --task.parameters.counted_from=[start] --task.parameters.first_ids=[1]
    python results/synthetic/couple.py exact_match runs/found

Shapes: S samples of a length, T tokens of each, P of the prompt, R of the response.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.contexts import Contexts
from analysis.model.attention_to_far import last_attention
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from olmo_sparsity import cli
from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
from olmo_sparsity.cli import run_script
from olmo_sparsity.data.build import task_of
from olmo_sparsity.tasks import TASKS, Task, TaskBatch
from olmo_sparsity.tasks.batch import between
from olmo_sparsity.tasks.task import Draws, Sizes
from olmo_sparsity.util.arguments import Parser, out_folder
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import provenance

NAME = "coupling.json"
BY = ("leave-one-out-kl", "attention")
SAMPLES = 64
"""Of each length, the first ones of training with seed 0."""
LEAST_AGREEMENT = 0.5
"""Below it no coupling was found [ours]: some rule is the commonest in a model that has learned nothing, too."""
ENDS = ("start", "end")
FIRST_OF_RESPONSE = 2
"""The id of the first token of a response."""
TRAINING = ("train", "exact_match")
"""The commands of the package that this script runs with a found coupling."""

# A prompt is read as *segments*, stretches of tokens that differ from sample to sample, between *marks*, which do not.
# The token of a segment that is counted first, from its start or its end, has some id, and those behind it the ids
# that follow. The response has 2, 3, … in its order; a mark behind the first segment has 1.


@dataclass(frozen=True)
class Segment:
    """How the tokens of a segment are numbered."""

    counted_from: str
    """One of `ENDS`."""
    first_id: int
    """Of the token counted first."""


@dataclass(frozen=True)
class SegmentOffsets:
    """The segment of each token of a batch of prompts, and its offsets in it."""

    segment: np.ndarray
    """(B, T): 1 in the first segment of a prompt, 2 in the second, …; 0 at marks, response and padding."""
    from_start: np.ndarray
    """(B, T): how many tokens of its segment stand before a token."""
    from_end: np.ndarray
    """(B, T): how many stand after it."""


def segments_of(batch: TaskBatch, marks: Sequence[int]) -> SegmentOffsets:
    """The segments between these token ids."""
    width = batch.tokens.shape[1]
    inside = between(0, batch.response_start, width) & ~np.isin(batch.tokens, marks)
    begins = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    ends = inside & ~np.pad(inside, ((0, 0), (0, 1)))[:, 1:]
    columns = np.arange(width)
    start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    end = np.minimum.accumulate(np.where(ends, columns, width)[:, ::-1], axis=1)[:, ::-1]
    segment = np.where(inside, begins.cumsum(axis=1), 0)
    return SegmentOffsets(segment, np.where(inside, columns - start, 0), np.where(inside, end - columns, 0))


def found_ids(
    batch: TaskBatch, marks: Sequence[int], segments: Sequence[Segment], end_id: int | None
) -> np.ndarray:
    """The ids of the samples, (B, T) int64, in the place of `TaskBatch.coupled_ids`.

    ``end_id``: the token that ends a response, which has id 0. Raises `UserError` where a prompt has another number of
    segments.
    """
    offsets = segments_of(batch, marks)
    counts = offsets.segment.max(axis=1, initial=0)
    if len(odd := counts[counts != len(segments)]):
        raise UserError(
            f"first_ids: {len(segments)} segments, and a prompt has {odd[0]} between the marks {list(marks)}; "
            "find the coupling of this task"
        )
    prompt = between(0, batch.response_start, batch.tokens.shape[1])
    begun = offsets.segment.cumsum(axis=1) > 0
    ids = (prompt & begun).astype(np.int64)  # 1, which marks keep
    for index, segment in enumerate(segments, start=1):
        counted = offsets.from_start if segment.counted_from == "start" else offsets.from_end
        ids = np.where(offsets.segment == index, counted + segment.first_id, ids)
    answers = batch.loss_mask if end_id is None else batch.loss_mask & (batch.tokens != end_id)
    column_in_response = np.arange(batch.tokens.shape[1]) - batch.response_start[:, None]
    return np.where(answers, column_in_response + FIRST_OF_RESPONSE, ids)


def with_found_coupling(task: type[Task]) -> None:
    """Let a task have the parameters that say which coupling was found, and then its ids in the place of its own."""

    @dataclass(frozen=True)
    class Found(task):  # type: ignore[valid-type, misc]
        marks: tuple[int, ...] = ()
        """Token ids that are the same in every prompt; between them are its segments."""
        counted_from: tuple[str, ...] = ()
        """Of each segment one of `ENDS`: where its lowest id is."""
        first_ids: tuple[int, ...] = ()
        """Of each segment: that id. Without them ids are the task's own."""

        def largest_id(self, length: int) -> int | None:
            largest_of_task = super().largest_id(length)
            if not self.first_ids:
                return largest_of_task
            batches = self.sample("train", 0, np.arange(64)), self.at_length(length).sample("test", 0, [0])
            return max(largest_of_task or 0, *(int(batch.coupled_ids.max()) for batch in batches))

        def _check(self) -> None:
            super()._check()
            unlike = len(self.first_ids) != len(self.counted_from) or not {*self.counted_from} <= {*ENDS}
            if unlike or min(self.first_ids, default=0) < 0 or (self.marks and not self.first_ids):
                raise UserError("first_ids: give ids from 0 up, and all that was printed")
            if self.first_ids and self.largest_second_id() is not None:
                raise UserError(f"first_ids: {self.name} couples on two levels; leave them out")

        def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
            batch = super()._make(sizes, draws)
            if not self.first_ids:
                return batch
            segments = [
                Segment(*start_and_id) for start_and_id in zip(self.counted_from, self.first_ids, strict=True)
            ]
            return replace(batch, coupled_ids=found_ids(batch, self.marks, segments, self.end_id))

    TASKS[task.name] = Found  # in the place of the package's, which cannot be registered twice


def influence_on_response(scorer: Scorer, batch: TaskBatch, columns: np.ndarray, by: str) -> np.ndarray:
    """Mean influence of the prompt's tokens at ``columns`` (C,) on every token of the response, (R, C), over samples.

    All samples have the same lengths. ``leave-one-out-kl``: KL from the model's prediction to that without the token,
    in nats. ``attention``: of the position that predicts, mean over heads and layers.
    """
    start, length = int(batch.response_start[0]), int(batch.lengths[0])
    targets = batch.tokens[:, start:length]
    numbers = np.arange(targets.size).reshape(targets.shape)
    # The response is a block of targets, and the whole prompt its far context.
    contexts = Contexts(batch.tokens[:, : length - 1], targets, numbers, n_short=0)
    if by == "attention":
        influence = last_attention(scorer, contexts, contexts.all_targets)[:, columns]
    else:
        without = np.array([np.delete(np.arange(start), column) for column in columns])
        influence = scorer.measures(contexts, without, ("kl",))[..., 0]
    return influence.reshape(*targets.shape, len(columns)).mean(axis=0)


@dataclass(frozen=True)
class Layout:
    """The samples of one length, and the ids that the model couples their prompts with."""

    batch: TaskBatch
    coupled: np.ndarray
    """(T,) ids of the columns that differ between samples; 0 of the others."""


def lay_out(scorer: Scorer, task: Task, length: int, *, by: str) -> Layout:
    """What is coupled in samples of one length. Raises `UserError` where they differ in their layout, or in nothing."""
    batch = replace(task, train_length=(length, length)).sample("train", 0, np.arange(SAMPLES))
    start = int(batch.response_start[0])
    if len({*batch.lengths}) > 1 or (batch.response_start != start).any():
        raise UserError(
            f"{task.name}: samples of length {length} differ in their layout, so that no column is coupled"
        )
    prompt = batch.tokens[:, :start]
    columns = np.flatnonzero((prompt != prompt[:1]).any(axis=0))
    if not len(columns):
        raise UserError(f"{SAMPLES} samples of length {length} are all the same")
    influence = influence_on_response(scorer, batch, columns, by)
    coupled = np.zeros(batch.tokens.shape[1], dtype=np.int64)
    # The last token, which ends the response, is coupled to nothing.
    coupled[columns] = influence[:-1].argmax(axis=0) + FIRST_OF_RESPONSE
    return Layout(batch, coupled)


def marks_between(layouts: Sequence[Layout]) -> list[int]:
    """The tokens that never change, which stand between the segments."""
    fixed: set[int] = set()
    varying: set[int] = set()
    for layout in layouts:
        prompt = layout.batch.tokens[:, : int(layout.batch.response_start[0])]
        varies = layout.coupled[: prompt.shape[1]] > 0
        fixed |= {*prompt[0, ~varies].tolist()}
        varying |= {*prompt[:, varies].ravel().tolist()}
    return sorted(fixed - varying)


def fit_segments(layouts: Sequence[Layout], marks: list[int]) -> Iterator[tuple[Segment, float]]:
    """The coupling of each segment, and the share of its tokens that it explains.

    Raises `UserError` where prompts differ in the number of segments, or a segment never differs between samples.
    """
    of_layouts = [segments_of(layout.batch, marks) for layout in layouts]
    counts = {int(offsets.segment[0].max()) for offsets in of_layouts}
    if len(counts) > 1:
        raise UserError(
            f"prompts have {sorted(counts)} segments between the same tokens, hence no one coupling"
        )
    for segment in range(1, counts.pop() + 1):
        fitted = []
        for counted_from in ENDS:
            firsts: Counter[int] = Counter()
            for layout, offsets in zip(layouts, of_layouts, strict=True):
                members = (offsets.segment[0] == segment) & (layout.coupled > 0)
                counted = (offsets.from_start if counted_from == "start" else offsets.from_end)[0, members]
                firsts.update((layout.coupled[members] - counted).tolist())
            if not firsts:
                raise UserError(f"the tokens of segment {segment} are the same in all samples")
            first_id, explained = firsts.most_common(1)[0]
            fitted.append((Segment(counted_from, first_id), explained / firsts.total()))
        yield max(fitted, key=lambda fit: fit[1])


def measure_coupling(checkpoint: str, *, by: str) -> dict[str, Any]:
    """The coupling of the task that a model was trained on: what `coupling.json` says.

    Raises `UserError` for a checkpoint that was not trained on a task with a response of more than one token, and as
    `lay_out` and `fit_segments` do.
    """
    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    task = None if config.task.name is None else task_of(config)
    if task is None or task.end_id is None:
        raise UserError(
            f"{folder} was trained on {config.task.name or 'text'}, which couples no tokens; give another run"
        )
    loaded = open_model(str(folder))
    scorer = Scorer(loaded.model, device=loaded.device)
    shortest, longest = task.train_length
    layouts = []
    with progress("coupling", longest - shortest + 1, "lengths") as advance:
        for length in range(shortest, longest + 1):
            layouts.append(lay_out(scorer, task, length, by=by))
            advance(1)
    marks = marks_between(layouts)
    fitted = list(fit_segments(layouts, marks))
    as_told = _same_as_the_task(layouts, marks, [segment for segment, _ in fitted], task.end_id)
    return {
        "checkpoint": str(folder),
        "step": load_state(folder).step,
        "weights_sha256": loaded.sha256,
        "task": task.name,
        "lengths": [shortest, longest],
        **{"samples": SAMPLES, "seed": 0, "by": by, "marks": marks},
        "segments": [{**vars(segment), "agreement": agreement} for segment, agreement in fitted],
        "as_the_task_says": as_told,
        "provenance": provenance(),
    }


def _same_as_the_task(
    layouts: Sequence[Layout], marks: list[int], segments: list[Segment], end_id: int
) -> float | None:
    """The share of tokens that differ between samples to which the task gives the same id; None: it couples none."""
    same: list[bool] = []
    for layout in layouts:
        if layout.batch.coupled_ids is None:
            return None
        ids = found_ids(layout.batch, marks, segments, end_id)[0] == layout.batch.coupled_ids[0]
        same += ids[layout.coupled > 0].tolist()
    return float(np.mean(same))


def outcome(coupling: Mapping[str, Any]) -> Iterator[str]:
    """The rule of each segment, how far it is the task's own, and how to train with it; or that there is none."""
    segments = coupling["segments"]
    for number, segment in enumerate(segments, start=1):
        yield (
            f"segment {number}: ids counted from its {segment['counted_from']}, the first is {segment['first_id']}; "
            f"agreement {100 * segment['agreement']:.0f} %"
        )
    if min(segment["agreement"] for segment in segments) < LEAST_AGREEMENT:
        yield f"no coupling was found: a rule explains less than {100 * LEAST_AGREEMENT:.0f} % of a segment"
        return
    if coupling["as_the_task_says"] is not None:
        yield f"{100 * coupling['as_the_task_says']:.0f} % of the tokens have the id that the task gives them"
    ends, firsts = ([segment[name] for segment in segments] for name in ("counted_from", "first_id"))
    values = {"marks": coupling["marks"], "counted_from": ends, "first_ids": firsts}
    options = [f"--task.parameters.{name}=[{','.join(map(str, value))}]" for name, value in values.items()]
    yield f"train with {shlex.join(options)}"


def main() -> None:
    """Measure, write and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", metavar="RUN", help="a run on a task, or one of its checkpoints")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
    parser.add_argument("--by", choices=BY, default=BY[0], help="what tells influence (default: %(default)s)")
    given = parser.parse_args()
    path = given.out / NAME
    coupling = measure_coupling(given.checkpoint, by=given.by)
    write_json(path, coupling)
    print("\n".join([*outcome(coupling), f"wrote {path}"]))


if __name__ == "__main__":
    if sys.argv[1:2] in [[name] for name in TRAINING]:
        for of_package in [task for task in TASKS.values() if task.end_id is not None]:
            with_found_coupling(of_package)
        command = sys.argv.pop(1)
        sys.argv[0] += f" {command}"
        cli.run(command)
    run_script(main)
