"""Do selectors find the tokens that an answer depends on, where they are known?

Two kinds of models are asked: one built by hand (`PlantedModel`), and one trained on a task with planted tokens
(docs/method.md, 3.1 and 3.2). Of a trained one the context is the prompt of a test sample, the target its label. The
short context is the last M tokens, and only samples with all of their planted tokens before it are measured [ours]:
then the whole planted set is among the candidates, and the short context says nothing about the label.

    token recall(k)   share of the p planted columns among the first k selected; chance is k / F
    place recall(k)   [ours] share of the planted places with a token among the first k selected

A place of sparse parity is a pair (selector, bit). What is planted is the bit, but the answer depends on both of its
tokens, so place recall counts either. In the task `planted` a place is a token, and there is no place recall.

The placebo [ours] is the far context of another test sample, as long, with as many planted tokens, and *another label*;
the target stays the true one. (With the same label it would be no placebo but a second true context.) Placebo recall is
the recall of the placebo's own planted columns: a selector that goes by what a token does for the target has no reason
to put them first; one that goes by how a token looks finds them as often as in the true context.

Recall of a model that is always right need not reach 1: where it reads an absent bit as 0, nothing changes when a
planted 0 is dropped or added. So recall is given by planted symbol, too: of the planted tokens 0 and of those 1.

Shapes: n samples or targets, R rows, L tokens, N long and M short context length, F = N - M far tokens, p planted
tokens of each sample, k_max selected tokens, K values of k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from analysis.measure.selectors import Question, check_selector, find_selector
from analysis.measure.settings import HandBuiltRecallSettings, TrainedRecallSettings
from analysis.model.adapters import KeyValues, ReadAttention, mean_over_heads
from analysis.model.device import pick_device
from analysis.model.load import LoadedModel, load_for_analysis
from analysis.model.scorer import Scorer
from analysis.records.results import RECALL
from analysis.stats.bootstrap import DEFAULT_RESAMPLES
from analysis.stats.exact_match import wilson
from analysis.stats.recovery import Columns, SumsBootstrap
from analysis.text.contexts import Contexts
from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import Advance, progress
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.result_files import Json
from olmo_sparsity.util.streams import Stream

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.tasks.sparse import SparseTask

KS = (1, 2, 4, 8, 16)
"""Numbers of selected tokens for which recall is given."""
HAND_PLANTED = (1, 2, 4, 8)
"""Numbers of planted tokens of models built by hand."""
RULES = ("sum", "all")
"""How planted tokens bear on the answer: each by itself, or only all of them together."""


class PlantedModel:
    """Predicts token 1 out of two; how surely depends on which columns of the context it can see [ours].

    Args:
        planted: columns whose tokens decide, (p,).
        n_long: N.
        rule: ``sum``: the logit is the sum of what each present planted token gives; ``all``: the planted tokens give
            something only if all are present, as an earlier match and what followed it do for a model that copies.
        strength_nats: logit that all planted tokens give together.
        noise_nats: scale of what every other token gives, alone: normal, and of either sign.
        seed: of the noise.
    """

    def __init__(
        self,
        planted: Sequence[int],
        n_long: int,
        *,
        rule: str,
        strength_nats: float = 4.0,
        noise_nats: float = 0.02,
        seed: int = 0,
    ):
        assert rule in RULES
        self.planted, self.rule, self.strength = torch.as_tensor(planted), rule, strength_nats
        noise = np.random.default_rng(seed).normal(scale=noise_nats, size=n_long)
        noise[list(planted)] = 0
        self.noise = torch.from_numpy(noise).float()

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *, logits_to_keep: int) -> Any:
        """An object whose ``logits`` are (R, 1, 2)."""
        return SimpleNamespace(logits=self._logits(self._present(position_ids))[:, None])

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Nothing is worth caching: only the position ids decide, and those come with every call."""
        empty = torch.zeros(*position_ids.shape, 1)[:, None]
        return [(empty, empty)]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `analysis.model.adapters.AnalysedModel`."""
        return self._logits(self._present(position_ids))[:, None]

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `analysis.model.adapters.AnalysedModel`; a bias of log p is presence p."""
        return self._logits(bias[:, -1].exp())[:, None]

    @property
    def blank_token(self) -> int:
        """A token that is not there."""
        return -1

    def embed(self, input_ids: Tensor) -> Tensor:
        """The presence of each token, (R, L, 1): all that the model reads of it."""
        return (input_ids >= 0).float()[..., None]

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `analysis.model.adapters.AnalysedModel`."""
        return self._logits(self._present(position_ids, embeddings[..., 0]))[:, None]

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """A softmax of how far each token bears on the answer, of one head, (R, 1, L)."""
        weight = self.noise.abs().index_fill(0, self.planted, self.strength / len(self.planted))
        return read(weight[position_ids].softmax(dim=-1)[:, None, None])

    def _present(self, position_ids: Tensor, presence: Tensor | float = 1.0) -> Tensor:
        """(R, N) presence of every column, that of tokens (R, L) or of what is read."""
        given = torch.as_tensor(presence).expand(position_ids.shape)
        return torch.zeros(len(position_ids), len(self.noise)).scatter(1, position_ids, given)

    def _logits(self, presence: Tensor) -> Tensor:
        """(R, 2) logits from the presence, 0 to 1, of every column (R, N)."""
        planted = presence[:, self.planted]
        together = planted.mean(dim=1) if self.rule == "sum" else planted.prod(dim=1)
        logit = self.strength * together + presence @ self.noise
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


def planted_context(n_long: int, n_short: int) -> Contexts:
    """The one for `PlantedModel`, whose target is token 1; the tokens themselves say nothing."""
    return Contexts(
        tokens=np.zeros((1, n_long), dtype=np.int64),
        targets=np.ones((1, 1), dtype=np.int64),
        target_id=np.zeros((1, 1), dtype=np.int64),
        n_short=n_short,
    )


def found_at(
    selected: np.ndarray, planted: np.ndarray, ks: Sequence[int], tokens_per_place: int = 1
) -> np.ndarray:
    """Whether each planted token (n, p) is among the first k selected (n, k_max), (n, K, p) bool.

    With ``tokens_per_place`` u > 1 the columns form places 0 … u-1, u … 2u-1, …, each with one planted token at most,
    and a planted place is found by any of its tokens.
    """
    found = selected[:, :, None] // tokens_per_place == planted[:, None, :] // tokens_per_place
    return np.stack([found[:, :k].any(axis=1) for k in ks], axis=1)


def chance_recall(k: int, n_far: int, tokens_per_place: int = 1) -> float:
    """Recall of k far tokens drawn at random: k / F; of places of u tokens 1 - C(F-u, k) / C(F, k)."""
    return 1 - math.comb(n_far - tokens_per_place, k) / math.comb(n_far, k)


_DRAWS_PER_SAMPLE = 64
_SUBSET_ELEMENTS = 1 << 22  # columns of all subsets of one call: 32 MiB of int64


@dataclass(frozen=True)
class RecallSettings:
    """What is measured; `checked_settings` makes one that fits the task."""

    length: int
    """N: tokens of every prompt."""
    planted: tuple[int, ...]
    """Numbers of planted tokens, p: a cell for each."""
    n_short: int
    """M, whole places."""
    samples: int
    """n, of each cell."""
    selectors: tuple[str, ...]
    seed: int
    """Of the samples, their placebos, selectors that draw, and the bootstrap."""

    @property
    def n_far(self) -> int:
        """F."""
        return self.length - self.n_short

    @property
    def ks(self) -> tuple[int, ...]:
        """`KS`, as far as there are so many far tokens."""
        return tuple(k for k in KS if k <= self.n_far)


@dataclass(frozen=True)
class PlantedSamples:
    """The samples of a cell with their placebos."""

    contexts: Contexts
    """n prompts with their labels as targets; target_id is the index of the sample."""
    planted: np.ndarray
    """(n, p) columns of the far context."""
    donors: np.ndarray
    """(n,) row of the sample whose far context is the placebo; its label is another one."""
    drawn: int
    """How many samples were drawn to find n with all planted tokens in the far context."""

    @property
    def placebos(self) -> Contexts:
        """The same targets and short contexts behind the far contexts of the donors."""
        return self.contexts.with_far(self.contexts.tokens[self.donors, : self.contexts.n_far])


def planted_task(folder: Path) -> tuple[Config, SparseTask]:
    """Configuration and task of a checkpoint folder. Raises `UserError` where its task plants no tokens."""
    from olmo_sparsity.data.task_batches import task_of
    from olmo_sparsity.tasks.sparse import SparseTask

    config = config_of(folder)
    task = None if config.task.name is None else task_of(config)
    if not isinstance(task, SparseTask):
        trained_on = "text" if task is None else f"the task {task.name}"
        raise UserError(
            f"{folder} was trained on {trained_on}, which has no planted tokens; give a run on sparse_parity or "
            "planted, or leave --checkpoint out to measure models built by hand"
        )
    return config, task


def checked_settings(task: SparseTask, asked: TrainedRecallSettings) -> RecallSettings:
    """Settings that fit the task: where nothing else is asked for, N of the longest training prompt, and those of `KS`
    that training had and the far context holds.

    Raises `UserError` for a length that does not hold a p, an M without far tokens or with part of a place, fewer than
    two samples (the placebo is another one), and selectors that do not exist or screen too few tokens.
    """
    length = task.train_length[1] if asked.length is None else asked.length
    planted, n_short, unit = asked.ks, asked.n_short, task.tokens_per_place
    if planted is None:
        planted = tuple(p for p in KS if p in task.ks("train") and p * unit <= length - n_short)
    settings = RecallSettings(length, planted, n_short, asked.samples, asked.selectors, asked.seed)
    if not 0 < n_short < length or n_short % unit:
        raise UserError(
            f"--n-short {n_short} must be a multiple of {unit} (the tokens of one place of {task.name}), above 0 and "
            f"below --length {length}"
        )
    if asked.samples < 2:
        raise UserError(
            f"--samples {asked.samples} is too few: the placebo is another sample; give 2 or more"
        )
    if not planted or max(planted) * unit > settings.n_far:
        raise UserError(
            f"--length {length} without its last {n_short} tokens does not hold k = {max(planted, default=1)} planted "
            f"tokens of {task.name}; raise --length, or lower --ks"
        )
    for p in planted:
        task.at_length(length, p)
    for name in settings.selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_far)
    return settings


def draw_samples(task: SparseTask, settings: RecallSettings, planted: int) -> PlantedSamples:
    """The first n test samples with p planted tokens, all of them in the far context, and a placebo for each.

    The donor of a placebo is drawn uniformly among those of the n samples that have another label. A pure function of
    the settings. Raises `UserError` where such samples are too rare, or all have the same label.
    """
    sized = task.at_length(settings.length, planted)
    kept = np.empty(0, dtype=np.int64)
    for first in range(0, _DRAWS_PER_SAMPLE * settings.samples, settings.samples):
        indices = np.arange(first, first + settings.samples)
        columns = sized.sample("test", settings.seed, indices).planted
        assert columns is not None
        kept = np.append(kept, indices[columns.max(axis=1) < settings.n_far])
        if len(kept) >= settings.samples:
            break
    else:
        raise UserError(
            f"{task.name}: of {_DRAWS_PER_SAMPLE * settings.samples:,} samples of length {settings.length} with "
            f"{planted} planted tokens only {len(kept):,} have none among the last {settings.n_short}; lower --ks or "
            "--n-short, or raise --length (stretched planted positions need a locality)"
        )
    kept = kept[: settings.samples]
    batch = sized.sample("test", settings.seed, kept)
    assert batch.planted is not None and batch.label is not None
    contexts = Contexts(
        batch.tokens[:, : settings.length], batch.label[:, None], kept[:, None], settings.n_short
    )
    return PlantedSamples(contexts, batch.planted, _donors(batch.label, settings.seed), int(kept[-1]) + 1)


def _donors(labels: np.ndarray, seed: int) -> np.ndarray:
    """For every label (n,) the row of another one, (n,)."""
    if (labels == labels[0]).all():
        raise UserError(
            f"all {len(labels)} samples have the same label, so that none is a placebo for another; raise --samples"
        )
    generator = np.random.default_rng([Stream.PLANTED_PLACEBOS, seed])
    return np.array([generator.choice(np.flatnonzero(labels != label)) for label in labels])


def measure_recall(
    scorer: Scorer,
    task: SparseTask,
    settings: RecallSettings,
    *,
    advance: Advance = lambda count: None,
) -> list[Json]:
    """Accuracy of the model and recall of every selector: a dict for each p, as `recall.json` has it.

    ``advance`` is called with the number of contexts that a selector has finished, true and placebo.
    """
    drawn = [draw_samples(task, settings, planted) for planted in settings.planted]
    return [_measure_cell(scorer, task, settings, samples, advance) for samples in drawn]


def _measure_cell(
    scorer: Scorer,
    task: SparseTask,
    settings: RecallSettings,
    samples: PlantedSamples,
    advance: Advance,
) -> Json:
    right = scorer.measures(samples.contexts, samples.contexts.all_far, ("correct",))[:, 0, 0] == 1
    selectors = {}
    for name in settings.selectors:
        true, placebo = (
            selected_columns(name, scorer, contexts, settings.seed, max(settings.ks), advance)
            for contexts in (samples.contexts, samples.placebos)
        )
        selectors[name] = _recalls(samples, true, placebo, right, task, settings)
    return {
        "planted": samples.planted.shape[1],
        "samples": len(right),
        "samples_drawn": samples.drawn,
        "accuracy": wilson(int(right.sum()), len(right)).as_dict(),
        "selectors": selectors,
    }


def selected_columns(
    name: str,
    scorer: Scorer,
    contexts: Contexts,
    seed: int,
    k_max: int,
    advance: Advance = lambda count: None,
) -> np.ndarray:
    """The far columns that a selector chooses, most influential first, (n, k_max)."""
    size = max(1, _SUBSET_ELEMENTS // (contexts.n_far * contexts.n_long))
    chosen = []
    for first in range(0, len(contexts), size):
        some = contexts.take(slice(first, first + size))
        question = Question(scorer, some, seed, k_max)
        chosen.append(find_selector(name)(question).columns)
        advance(len(some))
    return np.concatenate(chosen)


def _recalls(
    samples: PlantedSamples,
    true: np.ndarray,
    placebo: np.ndarray,
    right: np.ndarray,
    task: SparseTask,
    settings: RecallSettings,
) -> Json:
    """By k, then by kind: intervals of the recall of what was chosen (n, k_max) in true and placebo contexts.

    ``right``: (n,) bool, samples that the model answers correctly: those that ``…_recall_right`` is over. Recalls are
    means over samples, but those of one symbol are shares of all such planted tokens.
    """
    ks, everyone = settings.ks, np.ones(len(right))
    symbols = np.take_along_axis(samples.contexts.tokens, samples.planted, axis=1)
    ratios: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # numerators (n, K) over denominators (n,)
    for what, unit in _countings(task).items():
        found = found_at(true, samples.planted, ks, unit)
        recall = found.mean(axis=2)
        placebo_recall = found_at(placebo, samples.planted[samples.donors], ks, unit).mean(axis=2)
        ratios[f"{what}_recall"] = recall, everyone
        ratios[f"{what}_recall_right"] = recall * right[:, None], right
        ratios[f"{what}_placebo_recall"] = placebo_recall, everyone
        for symbol in np.unique(symbols):
            own = symbols == symbol
            name = f"{what}_recall_of_{task.vocabulary[symbol]}"
            ratios[name] = (found & own[:, None]).sum(axis=2), own.sum(axis=1)
    columns: Columns = {}
    for kind, (above, below) in ratios.items():
        columns |= {(kind, k): of_k for k, of_k in zip(ks, above.T, strict=True)} | {(kind, "of"): below}
    sums = SumsBootstrap(columns, np.arange(len(right)), DEFAULT_RESAMPLES, settings.seed)
    return {str(k): {kind: sums.ratio((kind, k), (kind, "of")) for kind in ratios} for k in ks}


def _countings(task: SparseTask) -> dict[str, int]:
    """How planted tokens are counted, and the tokens of a place in each."""
    unit = task.tokens_per_place
    return {"token": 1} if unit == 1 else {"token": 1, "place": unit}


def recall_record(
    loaded: LoadedModel, config: Config, task: SparseTask, settings: RecallSettings, cells: list[Json]
) -> Json:
    """What `recall.json` says of a checkpoint."""
    return {
        "run": loaded.checkpoint.resolve().parent.name,
        "checkpoint": str(loaded.checkpoint),
        "step": load_state(loaded.checkpoint).step,
        "weights_sha256": loaded.weights_sha256,
        "commit": current_commit(),
        "task": {"name": task.name, "parameters": asdict(task)},
        "scheme": config.positions.scheme,
        "family": config.model.family,
        "seed": loaded.training_seed,
        "n_long": settings.length,
        "n_short": settings.n_short,
        "n_far": settings.n_far,
        "ks": settings.ks,
        "samples": settings.samples,
        "sample_seed": settings.seed,
        "resamples": DEFAULT_RESAMPLES,
        "tokens_per_place": task.tokens_per_place,
        "chance": {
            what: {str(k): chance_recall(k, settings.n_far, tokens) for k in settings.ks}
            for what, tokens in _countings(task).items()
        },
        "cells": cells,
    }


def measure_trained(asked: TrainedRecallSettings) -> Path:
    """Measure a model that was trained on a task with planted tokens and write `recall.json`; returns its path.

    Errors are those of `checked_settings` and `planted_task`.
    """
    folder = resolve_checkpoint(asked.checkpoint)
    config, task = planted_task(folder)
    settings = checked_settings(task, asked)
    place = pick_device(asked.device)
    loaded = load_for_analysis(folder)
    scorer = Scorer(loaded.model.to(place), device=place)
    loaded.check_context(settings.length, option="--length")
    contexts = 2 * settings.samples * len(settings.selectors) * len(settings.planted)
    with progress("recall", contexts, "contexts") as advance:
        cells = measure_recall(scorer, task, settings, advance=advance)
    path = asked.out / RECALL.name
    RECALL.save(path, recall_record(loaded, config, task, settings, cells))
    return path


def measure_hand_built(settings: HandBuiltRecallSettings) -> Path:
    """Mean recall over models built by hand, each with its own planted tokens; writes `recall.json`, returns its path.

    Raises `UserError` where the far context is too short.
    """
    n_long, n_short, selectors = settings.n_long, settings.n_short, settings.selectors
    n_far = n_long - n_short
    if not 0 < n_short < n_long - max(KS):
        raise UserError(f"--n-long must exceed --n-short by more than {max(KS)}, the largest k")
    for name in selectors:
        check_selector(name, k_max=max(KS), n_far=n_far)
    rows = []
    for rule, planted in itertools.product(RULES, HAND_PLANTED):
        generator = np.random.default_rng([settings.seed, planted])
        recalls: dict[str, list[np.ndarray]] = {name: [] for name in selectors}
        for number in range(settings.models):
            columns = np.sort(generator.choice(n_far, planted, replace=False))
            scorer = Scorer(PlantedModel(columns.tolist(), n_long, rule=rule, seed=number))
            contexts = planted_context(n_long, n_short)
            for name in selectors:
                chosen = selected_columns(name, scorer, contexts, settings.seed + number, max(KS))
                recalls[name].append(found_at(chosen, columns[None], KS).mean(axis=2)[0])
        rows += [
            {"rule": rule, "planted": planted, "selector": name, "recall": np.mean(each, axis=0).tolist()}
            for name, each in recalls.items()
        ]
    # not stamped as `RECALL` is: it is printed and not read again
    found = {"format": 2, "measured": "hand-built models", "n_long": n_long, "n_short": n_short}
    found |= {"models": settings.models, "ks": KS, "commit": current_commit(), "rows": rows}
    path = settings.out / RECALL.name
    write_json(path, found)
    return path
