"""Find which tokens of a task belong together, in a model that was not told them in training (docs/method.md, 3.5).

    python results/synthetic/couple.py runs/parity-rope --out runs/parity-rope/coupling
    python results/synthetic/couple.py runs/addition-nope --by attention --samples 128 --out runs/addition-nope/coupling

In training samples of each length it measures the influence of every token of the prompt that differs between them on
every token of the response. A token is coupled to the one that it influences most, and takes its id [ours]. Of each
segment of the prompt (between tokens that never change) it keeps whether ids are counted from its start or its end,
and the first id; agreement is the share of the segment's tokens whose id that gives. So the coupling is known for
prompts of any length. Writes coupling.json and prints the coupling, for how many tokens it is what the task itself
says, and the options with which train takes it. Where agreement is below 50 %, none was found.

Shapes: S samples of a length, T tokens of each, P of the prompt, R of the response.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.contexts import Contexts
from analysis.model.loading import open_model
from analysis.model.losses import Scorer
from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
from olmo_sparsity.data.batches import task_of
from olmo_sparsity.tasks import Task, TaskBatch
from olmo_sparsity.tasks.samples import ENDS, FIRST_OF_RESPONSE, Segment, found_ids, segments_of
from olmo_sparsity.util.arguments import Parser, out_folder, whole_number, whole_number_or_zero
from olmo_sparsity.util.errors import UserError, run_script
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import provenance

NAME = "coupling.json"
BY = ("leave-one-out-kl", "attention")
LEAST_AGREEMENT = 0.5
"""Below it no coupling was found [ours]: some rule is the commonest in a model that has learned nothing, too."""


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
        influence = scorer.last_attention(contexts, contexts.all_targets)[:, columns]
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


def lay_out(
    scorer: Scorer, task: Task, length: int, *, by: str = BY[0], samples: int = 64, seed: int = 0
) -> Layout:
    """What is coupled in samples of one length. Raises `UserError` where they differ in their layout, or in nothing."""
    batch = replace(task, train_length=(length, length)).sample("train", seed, np.arange(samples))
    start = int(batch.response_start[0])
    if len({*batch.lengths}) > 1 or (batch.response_start != start).any():
        raise UserError(
            f"{task.name}: samples of length {length} differ in their layout, so that no column is coupled"
        )
    prompt = batch.tokens[:, :start]
    columns = np.flatnonzero((prompt != prompt[:1]).any(axis=0))
    if not len(columns):
        raise UserError(f"{samples} samples of length {length} are all the same; raise --samples")
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
    places = [segments_of(layout.batch, marks) for layout in layouts]
    numbers = {int(place.number[0].max()) for place in places}
    if len(numbers) > 1:
        raise UserError(
            f"prompts have {sorted(numbers)} segments between the same tokens, hence no one coupling"
        )
    for segment in range(1, numbers.pop() + 1):
        fitted = []
        for counted_from in ENDS:
            firsts: Counter[int] = Counter()
            for layout, place in zip(layouts, places, strict=True):
                members = (place.number[0] == segment) & (layout.coupled > 0)
                counted = (place.from_start if counted_from == "start" else place.from_end)[0, members]
                firsts.update((layout.coupled[members] - counted).tolist())
            if not firsts:
                raise UserError(
                    f"the tokens of segment {segment} are the same in all samples; raise --samples"
                )
            first_id, explained = firsts.most_common(1)[0]
            fitted.append((Segment(counted_from, first_id), explained / firsts.total()))
        yield max(fitted, key=lambda fit: fit[1])


def measure_coupling(checkpoint: str, *, by: str = BY[0], samples: int = 64, seed: int = 0) -> dict[str, Any]:
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
            layouts.append(lay_out(scorer, task, length, by=by, samples=samples, seed=seed))
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
        **{"samples": samples, "seed": seed, "by": by, "marks": marks},
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
    options = [f"--positions.found.{name}=[{','.join(map(str, value))}]" for name, value in values.items()]
    yield f"train with {shlex.join(options)}"


def main() -> None:
    """Measure, write and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", metavar="RUN", help="a run on a task, or one of its checkpoints")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
    parser.add_argument("--by", choices=BY, default=BY[0], help="what tells influence (default: %(default)s)")
    parser.add_argument(
        "--samples", type=whole_number, default=64, help="of each length (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole_number_or_zero, default=0, help="of the samples (default: 0)")
    options = vars(parser.parse_args())
    path = options.pop("out") / NAME
    coupling = measure_coupling(options.pop("checkpoint"), **options)
    write_json(path, coupling)
    print("\n".join([*outcome(coupling), f"wrote {path}"]))


if __name__ == "__main__":
    run_script(main)
