"""Needles in held-out text: does a model find, at any depth, what it has read once?

A *needle of k tokens* [ours] is a random key of q tokens and behind it a random value of k. It stands at some depth of
a stretch of text of one document; the context ends with the key again, and the model is to go on with the value:

    text[:p]  key  value  text[p:]  key  ->  value         (L tokens before the first one that is predicted)

The tokens of a needle are drawn without replacement from those that occur in the split and not in the stretch, so that
neither the text nor knowledge of the world helps, and the earlier key is the only match. Depth is p over the tokens of
text: 0 puts the needle first, 1 right before the second key. The control, *absent*, has text in the needle's place.

All checkpoints read the same needles in the same stretches, and a needle is the same at every length and depth.
Teacher-forced: each value token is given the true ones before it. All of them likeliest is what a model that writes
greedily and reads itself needs to be right, so exact match is the same for it.

*Recall*: do influence selectors find the needle that a prediction needs? The target is the first value token; the short
context is the second key, and everything before it is far. The needle's own tokens are the earlier key and its first
value token, q + 1 far columns. The placebo [ours] is the far context of another sample, with its own needle, whose
value is not the target: a selector that finds those tokens as often goes by how they look, not by what they do.

    needle.json     settings; per model and cell (k, L, depth) loss and exact match, with intervals, and the recall
    needle.parquet  a row per (checkpoint, sample, cell)

Shapes: n samples, L tokens of context, q of the key, k of the value, C checkpoints; for the recall N tokens of context,
F = N - q far tokens, K values of how many are selected. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.measure.measurement import check_models, measure_models, open_text, write_result
from analysis.measure.planted import KS, chance_recall, found_at, selected_columns
from analysis.measure.selectors import check_selector
from analysis.measure.settings import NeedleSettings, RecallOptions
from analysis.model.load import LoadedModel
from analysis.model.rope_scaling import split_checkpoint
from analysis.model.scorer import Scorer
from analysis.model.token_losses import TokenLosses
from analysis.records.results import NEEDLE
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    Statistic,
    count_clusters,
    difference,
    interval_words,
    mean_of,
)
from analysis.stats.recovery import Columns, SumsBootstrap
from analysis.text.contexts import Contexts
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.checkpoint import CONFIG
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.data.needles import is_held_out
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.result_files import Json
from olmo_sparsity.util.streams import Stream


def measure_needle(settings: NeedleSettings) -> Path:
    """Measure the checkpoints one after the other and write `needle.json`; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    check_models(settings)
    if not all(0 <= depth <= 1 for depth in settings.depths):
        raise UserError(f"--depths are from 0 (first) to 1 (last), not {list(settings.depths)}")
    if settings.recall is not None:
        check_recall(settings.recall, settings)
    for checkpoint in () if settings.unseen_keys else settings.checkpoints:
        _refuse_seen_keys(checkpoint)
    text = open_text(settings, settings.checkpoints[0])
    needles = _draw_asked(settings, text.tokens)
    cells = cells_of(settings.ks, settings.lengths, settings.depths)

    def measure(losses: TokenLosses, label: str) -> Json:
        values = []
        with progress(f"needles, {label}", len(cells), "cells") as advance:
            for cell in cells:
                values.append([each.tolist() for each in measure_cell(losses, needles, cell)])
                advance(1)
        recall = None
        if settings.recall is not None:
            recall = recall_of_needles(losses, needles, settings.recall, label, settings.seed)
        return {"recall": recall, "values": values}

    def check(loaded: LoadedModel) -> None:
        loaded.check_reach(settings.lengths[-1], max(settings.ks) - 1)
        if settings.recall is not None:
            loaded.check_context(settings.recall.length, option="--recall-length")

    described = measure_models(settings, text, check, measure)
    loss_nats, exact = np.moveaxis(np.array([one.pop("values") for one in described]), 2, 0)
    models = _summarize(settings, needles, cells, loss_nats, exact)
    for each in models:
        own = [one for one in described if one["label"] == each["label"]]
        each["checkpoints"] = [{name: one[name] for name in one if name != "label"} for one in own]
    return write_result(
        NEEDLE,
        settings,
        text,
        found={"models": models},
        measured={
            "samples_measured": len(needles),
            **count_clusters(needles.segments.document, needles.segments.group),
            "tokens_to_draw_from": needles.vocabulary,
            "interval": f"{interval_words(needles.segments.group)}, and by seed where a model has several",
        },
        rows=_rows(settings.labels, needles, cells, loss_nats, exact.astype(bool)),
    )


def _draw_asked(settings: NeedleSettings, tokens: TokenFiles) -> Needles:
    """The needles of the settings. Raises `UserError` as `draw_needles` does, and where none is another's placebo."""
    needles = draw_needles(
        tokens,
        settings.samples,
        lengths=settings.lengths,
        ks=settings.ks,
        key_tokens=settings.key_tokens,
        seed=settings.seed,
        unseen_keys=settings.unseen_keys,
    )
    if settings.recall is not None and len(needles) < 2:
        raise UserError(
            "there is 1 needle, and the placebo of --selectors is another one; raise --samples, or lower --lengths for "
            "more stretches of text"
        )
    return needles


def _refuse_seen_keys(checkpoint: str) -> None:
    """Raise `UserError` for a run of ours whose training windows had needles; of others it is not known."""
    config = split_checkpoint(checkpoint)[0] / CONFIG
    if config.is_file() and _needles_share(config):
        raise UserError(
            f"{checkpoint} was trained on text with needles; add --unseen-keys, for keys that it never saw"
        )


@dataclass(frozen=True)
class Cell:
    """What kind of context is measured."""

    value_tokens: int
    """k."""
    length: int
    """L."""
    depth: float | None
    """0 … 1; None: the needle is absent."""


@dataclass(frozen=True)
class Needles:
    """n stretches of text with a needle for each."""

    segments: Segments
    """Where the stretches stand; as long as the largest context."""
    text: np.ndarray
    """(n, largest L) token ids."""
    key: np.ndarray
    """(n, q) token ids."""
    value: np.ndarray
    """(n, largest k) token ids; a needle of fewer tokens has the first of them."""
    vocabulary: int
    """Different tokens of the split, of which those are drawn that a stretch does not have."""

    def __len__(self) -> int:
        return len(self.text)

    def start(self, cell: Cell) -> int:
        """p: column of the needle's first token."""
        assert cell.depth is not None
        room = cell.length - 2 * self.key.shape[1] - cell.value_tokens
        return round(cell.depth * room)

    def contexts(self, cell: Cell) -> np.ndarray:
        """Context and value of every sample, (n, L + k)."""
        q, value = self.key.shape[1], self.value[:, : cell.value_tokens]
        if cell.depth is None:
            return np.concatenate([self.text[:, : cell.length - q], self.key, value], axis=1)
        place = self.start(cell)
        text = self.text[:, : cell.length - 2 * q - cell.value_tokens]
        return np.concatenate([text[:, :place], self.key, value, text[:, place:], self.key, value], axis=1)


def draw_needles(
    tokens: TokenFiles,
    count: int,
    *,
    lengths: Sequence[int],
    ks: Sequence[int],
    key_tokens: int,
    seed: int,
    unseen_keys: bool = False,
) -> Needles:
    """Up to ``count`` stretches and needles, a pure function of the arguments and the split.

    With ``unseen_keys`` the keys are such as `olmo_sparsity.data.needles` never weaves into training windows.

    Raises `UserError` where a context does not hold its needle, no document is long enough, or the split has too few
    different tokens.
    """
    needed = 2 * key_tokens + max(ks) + 1
    if lengths[0] < needed:
        raise UserError(
            f"a context of {lengths[0]} tokens does not hold a needle of {max(ks)} with its key of {key_tokens} twice "
            f"and text; raise --lengths to at least {needed}"
        )
    segments = sample_segments(tokens, count, length=lengths[-1], seed=seed, option="--lengths")
    text = segments.read(tokens).astype(np.int64)
    vocabulary = _tokens_that_occur(tokens)
    needles = []
    for number, row in enumerate(text):
        others = np.setdiff1d(vocabulary, row)
        if len(others) < key_tokens + max(ks):
            raise UserError(
                f"only {len(others)} tokens of the split do not occur in a stretch of {lengths[-1]:,} tokens; lower "
                "--ks or --lengths"
            )
        generator = np.random.default_rng([Stream.NEEDLES, seed, number])
        drawn = generator.choice(others, key_tokens + max(ks), replace=False)
        while unseen_keys and not is_held_out(drawn[:key_tokens]):
            drawn = generator.choice(others, key_tokens + max(ks), replace=False)
        needles.append(drawn)
    tokens_of = np.array(needles)
    return Needles(segments, text, tokens_of[:, :key_tokens], tokens_of[:, key_tokens:], len(vocabulary))


def _needles_share(config: Path) -> float:
    """Share of training windows with needles, of a checkpoint's configuration."""
    from olmo_sparsity.config.load import load_config

    return load_config(config, warn=False).needles.share


def _tokens_that_occur(tokens: TokenFiles) -> np.ndarray:
    """Ids of the split, ascending, without end-of-text."""
    found = np.unique(np.concatenate([np.unique(tokens.read(file)) for file in range(len(tokens.lengths))]))
    return found[found != tokens.eos_token_id].astype(np.int64)


def cells_of(ks: Sequence[int], lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """Every kind of context, the control last for each k and length."""
    return [Cell(k, length, depth) for k in ks for length in lengths for depth in (*depths, None)]


def measure_cell(losses: TokenLosses, needles: Needles, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of the k value tokens [nats per token], and whether all are likeliest, both (n,)."""
    rows, k = needles.contexts(cell), cell.value_tokens
    loss, exact = np.empty(len(rows)), np.empty(len(rows), dtype=bool)
    for some in losses.batches(len(rows), rows.shape[1] - 1, k):
        of_tokens, likeliest = losses.last_losses_and_likeliest(rows[some], k)
        loss[some] = of_tokens.mean(axis=1)
        exact[some] = (likeliest == rows[some, -k:]).all(axis=1)
    return loss, exact


def _summarize(
    settings: NeedleSettings,
    needles: Needles,
    cells: Sequence[Cell],
    loss_nats: np.ndarray,
    exact: np.ndarray,
) -> list[Json]:
    """Of each model the means of every cell that has a needle, beside those without it, over samples and seeds.

    ``loss_nats`` and ``exact`` are (C, cells, n).
    """
    columns: Columns = {"one": np.ones(len(needles))}
    for name, values in (("loss", loss_nats), ("exact", exact)):
        columns |= {(c, (name, cells[at])): values[c, at] for c, at in np.ndindex(values.shape[:2])}
    segments = needles.segments
    sums = SumsBootstrap(
        columns, segments.document, settings.resamples, settings.seed, segments.group, labels=settings.labels
    )

    def mean(number: int, name: str, cell: Cell) -> Statistic:
        return sums.mean_over_seeds(number, (name, cell), "one")

    models = []
    for number, label in enumerate(dict.fromkeys(settings.labels)):
        found = []
        for cell in cells:
            if cell.depth is None:
                continue
            absent = Cell(cell.value_tokens, cell.length, None)
            loss, absent_loss = (mean(number, "loss", each) for each in (cell, absent))
            found.append(
                {
                    "value_tokens": cell.value_tokens,
                    "length": cell.length,
                    "depth": cell.depth,
                    "distance": cell.length - needles.start(cell) - settings.key_tokens,
                    "loss_nats": sums.interval(loss),
                    "absent_loss_nats": sums.interval(absent_loss),
                    "gain_nats": sums.interval(difference(absent_loss, loss)),
                    "exact": sums.share(mean(number, "exact", cell), "one"),
                    "absent_exact": sums.share(mean(number, "exact", absent), "one"),
                }
            )
        over_depths = []
        for k, length in dict.fromkeys((cell.value_tokens, cell.length) for cell in cells):
            like = [cell for cell in cells if (cell.value_tokens, cell.length) == (k, length)]
            of_depths = [mean(number, "exact", cell) for cell in like if cell.depth is not None]
            exact_match = sums.share(mean_of(of_depths), "one")
            over_depths.append({"value_tokens": k, "length": length, "exact": exact_match})
        models.append({"label": label, "cells": found, "over_depths": over_depths})
    return models


def _rows(
    labels: Sequence[str], needles: Needles, cells: Sequence[Cell], loss_nats: np.ndarray, exact: np.ndarray
) -> pa.Table:
    """The rows of `needle.parquet`; ``checkpoint`` counts from 0, ``depth`` is null where the needle is absent."""
    checkpoint, cell, sample = (index.ravel() for index in np.indices(loss_nats.shape))
    depths = np.array([each.depth for each in cells], dtype=object)
    return pa.table(
        {
            "label": pa.array(np.array(labels, dtype=object)[checkpoint], pa.string()),
            "checkpoint": checkpoint,
            "document": needles.segments.document[sample],
            "sample": sample,
            "value_tokens": np.array([each.value_tokens for each in cells])[cell],
            "length": np.array([each.length for each in cells])[cell],
            "depth": pa.array(depths[cell], pa.float64()),
            "loss_nats": loss_nats.ravel(),
            "exact": exact.ravel(),
        }
    )


def check_recall(options: RecallOptions, settings: NeedleSettings) -> None:
    """Raise `UserError` for a selector that there is not, a context that is too long or short, or no placebo."""
    key_tokens = settings.key_tokens
    if options.length > settings.lengths[-1]:
        raise UserError(
            f"--recall-length {options.length} is beyond the largest of --lengths; lower it, or raise those"
        )
    if options.samples < 2:
        raise UserError("--recall-samples must be 2 or more: the placebo is another sample")
    if options.length < 2 * key_tokens + 2:
        raise UserError(
            f"--recall-length {options.length} does not hold a needle of 1 with its key of {key_tokens} twice and "
            f"text; raise it to at least {2 * key_tokens + 2}"
        )
    for name in options.selectors:
        check_selector(name, k_max=max(KS), n_far=options.length - key_tokens)


def needle_contexts(needles: Needles, options: RecallOptions) -> tuple[Contexts, Contexts, np.ndarray]:
    """True and placebo contexts of n samples, and the needle's far columns, (q + 1,)."""
    q, cell = needles.key.shape[1], Cell(1, options.length, options.depth)
    rows = needles.contexts(cell)[_recall_rows(needles, options)]
    contexts = Contexts(rows[:, :-1], rows[:, -1:], np.arange(len(rows))[:, None], q)
    donors = np.roll(np.arange(len(rows)), 1)
    columns = needles.start(cell) + np.arange(q + 1)
    return contexts, contexts.with_far(contexts.tokens[donors, : contexts.n_far]), columns


def _recall_rows(needles: Needles, options: RecallOptions) -> np.ndarray:
    """The samples that recall is measured on, (n,): spread over all of them, which stand document by document."""
    return np.linspace(0, len(needles) - 1, min(options.samples, len(needles))).round().astype(int)


def recall_of_needles(
    losses: TokenLosses, needles: Needles, options: RecallOptions, label: str, seed: int
) -> Json:
    """Recall of the needle's q + 1 tokens by selector and k, true and placebo, with intervals over documents."""
    contexts, placebos, columns = needle_contexts(needles, options)
    scorer = Scorer(
        losses.model, device=losses.device, bf16=losses.bf16, tokens_per_batch=losses.tokens_per_batch
    )
    planted = np.tile(columns, (len(contexts), 1))
    segments, rows = needles.segments, _recall_rows(needles, options)
    document, group = segments.document[rows], None if segments.group is None else segments.group[rows]
    ks = [k for k in KS if k <= contexts.n_far]
    found: Json = {}
    with progress(f"recall, {label}", 2 * len(options.selectors), "selectors") as advance:
        for name in options.selectors:
            shares = []
            for some in (contexts, placebos):
                selected = selected_columns(name, scorer, some, seed, max(ks))
                shares.append(found_at(selected, planted, ks).mean(axis=2))
                advance(1)
            found[name] = _intervals(shares, ks, document, group, seed)
    chance = {str(k): chance_recall(k, contexts.n_far) for k in ks}
    return {
        "ks": ks,
        "needle_columns": len(columns),
        "samples": len(contexts),
        **count_clusters(document, group),
        "chance": chance,
        "selectors": found,
    }


def _intervals(
    shares: list[np.ndarray], ks: list[int], document: np.ndarray, group: np.ndarray | None, seed: int
) -> Json:
    """Mean true and placebo recall (n, K) of every k, with intervals by document (n,) and group (n,)."""
    names = ("recall", "placebo_recall")
    columns: Columns = {"one": np.ones(len(document))}
    for name, share in zip(names, shares, strict=True):
        columns |= {(name, k): of_k for k, of_k in zip(ks, share.T, strict=True)}
    sums = SumsBootstrap(columns, document, DEFAULT_RESAMPLES, seed, group)
    return {str(k): {name: sums.ratio((name, k), "one") for name in names} for k in ks}
