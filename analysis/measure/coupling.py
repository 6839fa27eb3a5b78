"""Which tokens of a task belong together, read off a trained model without ids (docs/method.md 3.5) [ours].

For each training length, the model reads training samples of it. Of every token of the prompt that differs between them
its *influence* on every token of the response is measured: leave-one-out-kl, or the attention that it is given. It is
coupled to the token that it influences most, and takes that token's id. Of each segment of the prompt (the stretches
between tokens that never change) the two ways to count, from its start or its end, are tried, each with its commonest
id of the token counted first; the better one is the segment's coupling. *Agreement*: the share of the segment's tokens,
over all lengths, whose id it gives. So the coupling is known for prompts longer than any in training.

Shapes: S samples of a length, T tokens of each, P of the prompt, R of the response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from analysis.measure.settings import CouplingSettings
from analysis.model.load import load_for_analysis
from analysis.model.scorer import Scorer
from analysis.records.results import COUPLING
from analysis.text.contexts import Contexts
from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
from olmo_sparsity.data.task_batches import task_of
from olmo_sparsity.tasks import Task, TaskBatch
from olmo_sparsity.tasks.coupling import ENDS, FIRST_OF_RESPONSE, Segment, found_ids, segments_of
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit


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
        found = scorer.last_attention(contexts, contexts.all_targets)[:, columns]
    else:
        without = np.array([np.delete(np.arange(start), column) for column in columns])
        found = scorer.measures(contexts, without, ("kl",))[..., 0]
    return found.reshape(*targets.shape, len(columns)).mean(axis=0)


@dataclass(frozen=True)
class Layout:
    """The samples of one length, and the ids that the model couples their prompts with."""

    batch: TaskBatch
    coupled: np.ndarray
    """(T,) ids of the columns that differ between samples; 0 of the others."""


def lay_out(
    scorer: Scorer, task: Task, length: int, settings: CouplingSettings
) -> tuple[Layout, set[int], set[int]]:
    """What is coupled in samples of one length; the tokens of columns that never change, and those of the others.

    Raises `UserError` where samples of a length differ in their layout, or in nothing.
    """
    of_length = replace(task, train_length=(length, length))
    batch = of_length.sample("train", settings.seed, np.arange(settings.samples))
    start = int(batch.response_start[0])
    if len(set(batch.lengths.tolist())) > 1 or (batch.response_start != start).any():
        raise UserError(
            f"{task.name}: samples of length {length} differ in their layout, so that no column is coupled"
        )
    prompt = batch.tokens[:, :start]
    varies = (prompt != prompt[:1]).any(axis=0)
    if not varies.any():
        raise UserError(f"{settings.samples} samples of length {length} are all the same; raise --samples")
    columns = np.flatnonzero(varies)
    influence = influence_on_response(scorer, batch, columns, settings.by)
    coupled = np.zeros(batch.tokens.shape[1], dtype=np.int64)
    # The last token, which ends the response, is coupled to nothing.
    coupled[columns] = influence[:-1].argmax(axis=0) + FIRST_OF_RESPONSE
    return Layout(batch, coupled), set(prompt[0, ~varies].tolist()), set(prompt[:, varies].ravel().tolist())


def fit_segments(layouts: list[Layout], marks: list[int]) -> Iterator[tuple[Segment, float]]:
    """The coupling of each segment, and the share of its tokens that it explains.

    Raises `UserError` where prompts differ in the number of segments, or a segment never differs between samples.
    """
    places = [segments_of(layout.batch, marks) for layout in layouts]
    numbers = {int(each.number[0].max()) for each in places}
    if len(numbers) > 1:
        raise UserError(
            f"prompts have {sorted(numbers)} segments between the same tokens; their coupling cannot be found"
        )
    for segment in range(1, numbers.pop() + 1):
        fitted = []
        for counted_from in ENDS:
            firsts: Counter[int] = Counter()
            for layout, place in zip(layouts, places, strict=True):
                own = (place.number[0] == segment) & (layout.coupled > 0)
                counted = (place.from_start if counted_from == "start" else place.from_end)[0, own]
                firsts.update((layout.coupled[own] - counted).tolist())
            if not firsts:
                raise UserError(
                    f"the tokens of segment {segment} are the same in all samples; raise --samples"
                )
            first_id, explained = firsts.most_common(1)[0]
            fitted.append((Segment(counted_from, first_id), explained / firsts.total()))
        yield max(fitted, key=lambda each: each[1])


def measure_coupling(settings: CouplingSettings) -> Path:
    """Find the coupling of the task that a model was trained on; writes `coupling.json`, returns its path.

    Raises `UserError` for a checkpoint that was not trained on a task with a response of several tokens, and as
    `lay_out` and `fit_segments` do.
    """
    folder, out = resolve_checkpoint(settings.checkpoint), settings.out
    config = config_of(folder)
    if config.task.name is None:
        raise UserError(f"{folder} was trained on text, which couples no tokens; give a run on a task")
    task = task_of(config)
    if task.end_id is None:
        raise UserError(
            f"the response of {task.name} is one label, which couples no tokens; give a run on another task"
        )
    loaded = load_for_analysis(folder)
    scorer = Scorer(loaded.model)
    shortest, longest = task.train_length
    layouts, constant, varying = [], set(), set()
    with progress("coupling", longest - shortest + 1, "lengths") as advance:
        for length in range(shortest, longest + 1):
            layout, fixed, others = lay_out(scorer, task, length, settings)
            layouts.append(layout)
            constant |= fixed
            varying |= others
            advance(1)
    marks = sorted(constant - varying)
    fitted = list(fit_segments(layouts, marks))
    segments = [segment for segment, _ in fitted]
    COUPLING.save(
        out / COUPLING.name,
        {
            "checkpoint": str(folder),
            "step": load_state(folder).step,
            "weights_sha256": loaded.weights_sha256,
            "commit": current_commit(),
            "task": task.name,
            "lengths": [shortest, longest],
            "samples": settings.samples,
            "seed": settings.seed,
            "by": settings.by,
            "marks": marks,
            "segments": [
                {"counted_from": one.counted_from, "first_id": one.first_id, "agreement": agreement}
                for one, agreement in fitted
            ],
            "as_the_task_says": _same_as_the_task(layouts, marks, segments, task.end_id),
        },
    )
    return out / COUPLING.name


def _same_as_the_task(
    layouts: list[Layout], marks: list[int], segments: list[Segment], end_id: int | None
) -> float | None:
    """The share of tokens that differ between samples to which the task gives the same id; None: it couples none."""
    same: list[bool] = []
    for layout in layouts:
        if layout.batch.coupled_ids is None:
            return None
        own = found_ids(layout.batch, marks, segments, end_id)[0] == layout.batch.coupled_ids[0]
        same += own[layout.coupled > 0].tolist()
    return float(np.mean(same))
