"""The influence map of a text: which earlier tokens every token needs, and by how much (docs/method.md, 2.7 [ours]).

A forward pass over a text without token i predicts every later token, so one pass for each i gives the exact
leave-one-out influence of all pairs. A text longer than N tokens is read in windows that overlap by half.
Shapes: T tokens of the text, N the most tokens of context, M short context length, W tokens of a window, B targets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.measure.influence import build_scorer, check_finite
from analysis.measure.settings import MapSettings
from analysis.model.adapters import Adapter, OlmoForAnalysis, Prefixed
from analysis.model.device import pick_device
from analysis.model.load import LoadedModel, check_vocabulary
from analysis.model.rope_scaling import load_scaled
from analysis.model.scorer import Scorer
from analysis.model.token_losses import LOGITS_PER_BATCH
from analysis.records.influence_map import MAP_NAME, MapRecord
from analysis.text.contexts import Contexts
from analysis.text.decode import TextDecoder
from olmo_sparsity.checkpoint import CONFIG, config_of
from olmo_sparsity.data.tokenizers import load_tokenizer
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance, progress
from olmo_sparsity.util.provenance import current_commit

MOST_CONTEXT = 1024
"""N where none is given and the model reads more."""


@dataclass(frozen=True)
class Window:
    """A stretch of the text that is read from position id 0 on."""

    start: int
    """The first token that is read."""
    first: int
    """The first target."""
    end: int
    """One past the last target."""

    def passes(self, n_short: int) -> int:
        """How many tokens are left out, one forward pass each."""
        return max(0, self.end - 1 - n_short - self.start)


def windows(length: int, n_long: int) -> list[Window]:
    """The windows in which a text of so many tokens is read; each token but the first is a target in one of them."""
    found = [Window(0, 1, min(n_long + 1, length))]
    step = (n_long + 1) // 2
    while (first := found[-1].end) < length:
        found.append(Window(first + step - 1 - n_long, first, min(first + step, length)))
    return found


def context_length(length: int, n_long: int | None, n_short: int, reads: int | None) -> int:
    """N: what is asked, or what the model ``reads`` and at most `MOST_CONTEXT`; no more than the text has.

    Raises `UserError` where a text of so many tokens has no far tokens, or N and M do not go together.
    """
    n_long = n_long or min(reads or MOST_CONTEXT, MOST_CONTEXT)
    if n_short < 1 or 2 * n_short > n_long:
        raise UserError(
            f"N = {n_long:,} must be at least twice M, and M = {n_short:,} must be at least 1; change what does not fit"
        )
    if length < n_short + 2:
        raise UserError(
            f"the text has {length:,} tokens, too few for M = {n_short:,}, a far token and a target; give a longer "
            "text, or lower M"
        )
    return min(length - 1, n_long)


def trained_length(model: Adapter) -> int | None:
    """How many tokens a model reads, as far as its configuration tells."""
    inner = model.unprefixed if isinstance(model, Prefixed) else model
    return (
        inner.model.config.max_sequence_length if isinstance(inner, OlmoForAnalysis) else model.max_positions
    )


def map_scorer(model: Adapter, device: torch.device, n_long: int, **options: Any) -> Scorer:
    """A scorer as `build_scorer` makes it, whose batches leave room for the logits of all targets of a window."""
    scorer = build_scorer(model, device, n_long, **options)
    most = LOGITS_PER_BATCH[device.type] // model.vocabulary_size
    scorer.tokens_per_batch = max(1, min(scorer.tokens_per_batch, most))
    return scorer


def measure_map(
    scorer: Scorer,
    tokens: np.ndarray,
    pieces: list[str],
    about: dict[str, Any],
    *,
    show: Callable[[int], AbstractContextManager[Advance]],
) -> MapRecord:
    """L_long, L_short and the leave-one-out influence of every far token, of all T tokens of a text.

    Args:
        scorer: the model.
        tokens: (T,) ids.
        pieces: text of each.
        about: ``n_long`` and ``n_short`` and what else the record tells, see `MapRecord.about`.
        show: shows the progress of so many forward passes.

    Raises `UserError` where a loss is not finite.
    """
    n_short, parts = about["n_short"], windows(len(tokens), about["n_long"])
    long, short = np.full((2, len(tokens)), np.nan)
    first_far = np.zeros(len(tokens), dtype=np.int64)
    influence = [np.empty(0, dtype=np.float32)] * len(tokens)
    with show(sum(each.passes(n_short) for each in parts)) as advance:
        for window in parts:
            targets, read = slice(window.first, window.end), tokens[window.start : window.end]
            first = window.first - window.start
            long[targets] = _block(read, 0, first, scorer)[:, 0]
            short[targets] = _short_losses(scorer, read, first, long[targets], n_short)
            without = _losses_without(scorer, read, first, n_short, advance)
            first_far[targets] = window.start
            for t in range(window.first, window.end):
                far = max(0, t - window.start - n_short)
                found = without[t - window.first, :far] - long[t]
                check_finite(found)
                influence[t] = found.astype(np.float32)
    check_finite(long[1:], short[1:])
    return MapRecord(tokens, pieces, long, short, first_far, influence, about)


def _losses_without(
    scorer: Scorer, read: np.ndarray, first: int, n_short: int, advance: Advance
) -> np.ndarray:
    """loss(t | all before t without i) of the targets from ``first`` on, (B, W) nats; NaN where i is no far token.

    M tokens that follow one another are left out in turn of one block, whose targets begin where the first of them
    becomes a far token.
    """
    found = np.full((len(read) - first, len(read)), np.nan)
    last = len(read) - 1 - n_short
    for start in range(0, last, n_short):
        end = min(start + n_short, last)
        begin = max(first, start + n_short + 1)
        kept = np.arange(end - 1)
        far = kept + (kept >= np.arange(start, end)[:, None])
        found[begin - first :, start:end] = _block(read, end, begin, scorer, far)
        advance(end - start)
    return found


def _block(
    read: np.ndarray, n_far: int, first: int, scorer: Scorer, far: np.ndarray | None = None
) -> np.ndarray:
    """Losses of all tokens of a window from ``first`` on, (B, C), given subsets ``far`` (C, j) of its first tokens and
    all tokens behind these; by default all tokens."""
    targets = read[None, first:]
    contexts = Contexts(read[None, :-1], targets, np.arange(targets.size)[None], first - n_far)
    return scorer.losses(contexts, contexts.all_far if far is None else far)


def _short_losses(scorer: Scorer, read: np.ndarray, first: int, long: np.ndarray, n_short: int) -> np.ndarray:
    """L_short of the targets from ``first`` on, (B,): given M tokens at their position ids in the window."""
    place = np.arange(max(first, n_short + 1), len(read))
    # every target is a block by itself, whose far context is the whole window: its short context is one subset
    rows = np.broadcast_to(read[:-1], (len(place), len(read) - 1))
    contexts = Contexts(rows, read[place, None], place[:, None], 0)
    columns = place[:, None, None] + np.arange(-n_short, 0)
    return np.concatenate([long[: len(long) - len(place)], scorer.losses(contexts, columns)[:, 0]])


def measure_text_map(settings: MapSettings) -> Path:
    """Measure the map of a text file under a checkpoint and write its record; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    assert settings.text and settings.out
    text = _read_text(settings.text)
    device = pick_device(settings.device)
    loaded = load_scaled(settings.checkpoint, settings.prefix, settings.dtype)
    if not loaded.tokenizer_file.is_file():
        raise UserError(f"{loaded.tokenizer_file} is missing; copy the tokenizer of the model there")
    tokens = np.array(
        load_tokenizer(loaded.tokenizer_file).encode(text, add_special_tokens=False).ids, dtype=np.int64
    )
    check_vocabulary(loaded.model, tokens)
    n_long = context_length(len(tokens), settings.n_long, settings.n_short, _reads(loaded))
    loaded.check_context(n_long)
    scorer = map_scorer(
        loaded.model,
        device,
        n_long,
        bf16=settings.bf16,
        tokens_per_batch=settings.tokens_per_batch,
        memory_limit_gb=settings.memory_limit_gb,
    )
    about = {
        "model": loaded.name,
        "model_sha256": loaded.weights_sha256,
        "text": str(settings.text),
        "n_long": n_long,
        "n_short": settings.n_short,
        "prefix": list(loaded.prefix),
        "tau_nats": settings.tau_nats,
        "dtype": "bf16" if settings.bf16 else loaded.dtype,
        "device": str(device),
        "commit": current_commit(),
    }
    pieces = TextDecoder.from_file(loaded.tokenizer_file).pieces(tokens.tolist())
    found = measure_map(
        scorer,
        tokens,
        pieces,
        about,
        show=lambda total: progress("leaving tokens out", total, "tokens"),
    )
    return found.save(settings.out / MAP_NAME)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file with --text") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _reads(loaded: LoadedModel) -> int | None:
    """How many tokens a checkpoint reads: what its position ids reached in training, times the factor of its RoPE."""
    if not (loaded.checkpoint / CONFIG).is_file():
        return loaded.model.max_positions  # beyond which transformers is not asked to read
    from olmo_sparsity.export import position_reach

    reach = position_reach(config_of(loaded.checkpoint))
    return int(reach * loaded.rope_scaling.factor) if loaded.rope_scaling else reach
