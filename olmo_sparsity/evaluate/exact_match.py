"""Exact match by length on a task's test samples, free-running (docs/method.md 3.5), and teacher-forced counts.

Free-running: the model reads its own output, and a response is exact where every token is right, and every id where it
predicts ids. Teacher-forced: one forward pass over the true sample. Up to its first error a free-running model reads
the truth, so rounding aside the same responses are exact either way, and the two counts check each other; what teacher
forcing adds is how many tokens are right after an error. Where the response is a single label the two are one pass.

Shapes: B samples, T tokens of the longest of them, P of the longest prompt, S of the longest response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.config.validate import small_tables
from olmo_sparsity.data.task_data import TaskPositions
from olmo_sparsity.evaluate.heldout import ReduceSum
from olmo_sparsity.model.build import Model, as_predictor
from olmo_sparsity.model.predictive import PositionPredictor, compare, decode
from olmo_sparsity.tasks import Task, TaskBatch
from olmo_sparsity.util.errors import UserError

BATCH_TOKENS = 1 << 15
"""Tokens decoded at a time, where nothing else is said: 1,024 ids to choose from take 128 MiB of logits."""
MULTIPLES = (0.5, 1, 1.5, 2, 3, 5, 7.5, 10)
"""Of the longest training length, where a checkpoint is measured if nothing else is said [ours]."""
MULTIPLES_IN_TRAINING = (1, 2, 3)
"""Likewise, while a run trains [ours]."""

Size = tuple[int, int | None]
"""The length of samples, and k where the task plants tokens."""


@dataclass(frozen=True)
class LengthResult:
    """The result for one length and k: a row of the record. ``exact`` and the errors add up to ``samples``."""

    length: int
    """In the task's own unit."""
    k: int | None
    """Planted tokens of every sample; None: the task plants none."""
    samples: int
    exact: int
    wrong_token: int
    """Responses whose first error is a token."""
    wrong_id: int
    """Likewise an id."""
    wrong_stop: int
    """Likewise an end too early, or none where there should be one."""
    teacher_forced_exact: int
    """Samples whose every token, and id where the model predicts ids, is right when the true ones before are read."""
    response_tokens: int
    """Tokens of all true responses, end tokens included."""
    teacher_forced_tokens: int
    """Of them, how many are predicted right when the true ones before are read."""
    teacher_forced_ids: int | None
    """Likewise of their ids; None: the model predicts none."""
    mean_probability: float
    """Probability of the true tokens of a response given its prompt, mean over samples; 1 minus it: expected error."""
    std_probability: float
    """Standard deviation of that probability over samples."""


_COUNTS = [field.name for field in fields(LengthResult)][3:-2]
"""What is summed over samples; Σ p and Σ p² follow."""


def measure_exact_match(
    model: PositionPredictor,
    task: Task,
    positions: TaskPositions,
    sizes: Sequence[Size],
    *,
    samples: int,
    seed: int,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    rank: int = 0,
    world_size: int = 1,
    reduce_sum: ReduceSum = lambda tensor: tensor,
    advance: Callable[[int], None] = lambda count: None,
) -> list[LengthResult]:
    """Exact match on ``samples`` test samples of each of these sizes, of `grid`, in their order.

    Sample i of a size is a function of (seed, length, k, i), whichever others are decoded with it. This process decodes
    its share, samples rank, rank + world_size, …, at most ``batch_tokens`` tokens at a time (at least one sample), and
    ``reduce_sum`` adds up the shares: a collective call, the only one; the forward passes of two processes may differ
    in number. ``advance`` gets how many samples were decoded.

    The model is on ``device``, in evaluation mode. Ids of the response are given unless the model predicts them, so an
    oracle is one, and elsewhere they go on as contiguous ones do. Decoding takes as many steps as the longest true
    response of a batch has: a response that does not end where the true one does is wrong at that step already, so
    that no id beyond the true response affects the result.
    """
    sums = torch.zeros(len(sizes), len(_COUNTS) + 2, dtype=torch.float64, device=device)
    for row, (length, k) in enumerate(sizes):
        sized = task.at_length(length, k)
        batch_size = max(1, batch_tokens // sized.max_tokens(length))
        share = np.arange(rank, samples, world_size)
        for indices in (share[first : first + batch_size] for first in range(0, len(share), batch_size)):
            batch = sized.sample("test", seed, indices)
            ids = positions.ids(batch, split="test", seed=seed, indices=indices)
            forced = _forced_counts(model, batch, ids, device)
            if task.end_id is None:  # one label: nothing is read back, so that free-running is teacher-forced
                exact, labels, right = forced[:3]
                decoded = [exact, labels - right, right - exact, 0.0]
            else:
                decoded = _decoded_counts(model, batch, ids, task.end_id, device)
            sums[row] += torch.tensor(decoded + forced, dtype=sums.dtype, device=device)
            advance(len(indices))
    results = []
    for (length, k), (*summed, p, p_squared) in zip(sizes, reduce_sum(sums).tolist(), strict=True):
        counts: dict[str, Any] = {name: int(value) for name, value in zip(_COUNTS, summed, strict=True)}
        if not model.options.predicts_ids:
            counts["teacher_forced_ids"] = None
        mean = p / samples
        std = max(0.0, p_squared / samples - mean**2) ** 0.5
        result = LengthResult(length, k, samples, **counts, mean_probability=mean, std_probability=std)
        assert result.exact + result.wrong_token + result.wrong_id + result.wrong_stop == samples
        results.append(result)
    return results


def grid(
    positions: TaskPositions, task: Task, lengths: Sequence[int], ks: Sequence[int] | None = None
) -> list[Size]:
    """The lengths at which a task is measured, for one k after the other where it has one.

    Without ``ks`` a task that has a k is measured for every one of its test split, each at the lengths that hold it.
    Raises `UserError` for lengths that the task refuses, ``ks`` of a task without, a k that a length does not hold, and
    an id table too small for a length.
    """
    ks_of_task = sorted(set(task.ks("test")))
    if not ks_of_task and ks is not None:
        raise UserError(f"{task.name} plants no tokens, so that there is no k to choose; leave ks out")
    measured_ks: list[int | None] = [*(ks or ks_of_task)] or [None]
    sizes = [
        (length, k) for k in measured_ks for length in lengths if ks or k is None or task.holds(length, k)
    ]
    if not sizes:
        raise UserError(f"nothing of {task.name} fits into lengths {list(lengths)}; give longer ones, or ks")
    for length, k in sizes:
        sized = task.at_length(length, k)
        for name, largest in (
            small_tables(positions.settings, sized, length) if positions.settings.is_coupled else ()
        ):
            raise UserError(
                f"{task.name} at length {length}: {name} is too small for ids up to {largest}; leave this length out"
            )
    return sizes


def multiples_of_training_length(task: Task, multiples: Sequence[float] = MULTIPLES) -> list[int]:
    """Multiples of the longest training length, ascending, none twice, as lengths to measure at.

    What is below the training range or beyond `test_length` moves to its edge: a table of ids holds the longest test
    sample, as the configuration is checked for that.
    """
    unit = task.tokens_per_position
    shortest = max(task.train_length[0], task.test_length[0])
    longest = task.test_length[1]
    lengths = [int(multiple * task.train_length[1]) // unit * unit for multiple in multiples]
    return sorted({min(max(length, shortest), longest) for length in lengths})


class TaskEvaluation:
    """Exact match of a run on a task while it trains, on the same samples every time.

    At 1, 2 and 3 times the longest training length, ``samples`` samples of each; where the task has a k, with the
    largest of training.
    """

    def __init__(
        self,
        task: Task,
        positions: TaskPositions,
        *,
        samples: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        """Raises `UserError` where the task refuses those lengths."""
        self.task = task
        self.positions = positions
        self.samples = samples
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        lengths = multiples_of_training_length(task, MULTIPLES_IN_TRAINING)
        self.sizes = grid(positions, task, lengths, task.ks("train")[-1:] or None)

    def run(self, model: Model, reduce_sum: ReduceSum, device: torch.device | str = "cpu") -> dict[str, Any]:
        """A row of `metrics.jsonl`: `exact_match`, a list of `LengthResult` as dicts.

        ``model`` is on ``device``, whole and in evaluation mode. Every process calls this at the same step and gets the
        same result; what they do in between is not in step, so ZeRO 3 must have gathered the weights.
        """
        rows = measure_exact_match(
            as_predictor(model),
            self.task,
            self.positions,
            self.sizes,
            samples=self.samples,
            seed=self.seed,
            device=device,
            rank=self.rank,
            world_size=self.world_size,
            reduce_sum=reduce_sum,
        )
        return {"exact_match": [asdict(row) for row in rows]}


def exact_share(row: dict[str, Any]) -> float:
    """The share of exact responses at the longest training length, of what `TaskEvaluation.run` gave."""
    first = row["exact_match"][0]
    return first["exact"] / first["samples"]


def _decoded_counts(
    model: PositionPredictor,
    batch: TaskBatch,
    ids: np.ndarray,
    end_token: int,
    device: torch.device | str,
) -> list[float]:
    """How many responses are exact, and have a token, an id, a stop as their first error; ``ids``: (B, T)."""
    prompt = int(batch.response_start.max())
    true_lengths = batch.lengths - batch.response_start
    steps = int(true_lengths.max())
    # Columns past a shorter response are not compared; their ids are fed only to a response that is wrong already.
    columns = np.minimum(batch.response_start[:, None] + np.arange(steps), batch.tokens.shape[1] - 1)
    true_tokens, true_ids = (
        _on(np.take_along_axis(values, columns, axis=1), device) for values in (batch.tokens, ids)
    )
    predicts_ids = model.options.predicts_ids
    decoded = decode(
        model,
        _on(batch.tokens[:, :prompt], device),
        _on(ids[:, :prompt], device),
        end_token=end_token,
        max_tokens=steps,
        prompt_lengths=_on(batch.response_start, device),
        response_ids=None if predicts_ids else true_ids,
    )
    kinds = compare(
        decoded,
        true_tokens,
        _on(true_lengths, device),
        end_token=end_token,
        true_ids=true_ids if predicts_ids else None,
    )
    counts = Counter(kinds)
    return [float(counts[kind]) for kind in (None, "token", "id", "stop")]


@torch.no_grad()
def _forced_counts(
    model: PositionPredictor, batch: TaskBatch, ids: np.ndarray, device: torch.device | str
) -> list[float]:
    """Of the true samples: exact ones, tokens of the responses, of those the right tokens, the right ids; Σ p, Σ p²."""
    tokens = _on(batch.tokens, device)
    true_ids = _on(ids, device)
    first = int(batch.response_start.min())
    true_tokens = tokens[:, first:]
    in_response = _on(batch.loss_mask[:, first:], device)
    output = model(tokens[:, :-1], true_ids[:, :-1], logits_to_keep=true_tokens.shape[1])
    right_tokens = output.logits.argmax(dim=-1) == true_tokens
    right_ids = torch.ones_like(right_tokens)
    if output.id_logits is not None:
        right_ids = output.id_logits.argmax(dim=-1) == true_ids[:, first:]
    exact = ((right_tokens & right_ids) | ~in_response).all(dim=1)
    true_logits = output.logits.gather(-1, true_tokens[..., None])[..., 0]
    log_p = true_logits.double() - output.logits.float().logsumexp(dim=-1).double()
    p = torch.where(in_response, log_p, 0).sum(dim=1).exp()
    summed = (exact, in_response, right_tokens & in_response, right_ids & in_response, p, p**2)
    return [float(values.sum()) for values in summed]


def _on(values: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
