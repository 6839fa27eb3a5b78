"""A measurement that takes a second: a random model of transformers, words as tokens, and what plain passes give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from analysis.api import Result
from analysis.engine import Engine
from analysis.measuring import measure
from olmo_sparsity.checkpoint import TOKENIZER
from olmo_sparsity.util.rng import Stream
from tests.support.families import random_model
from tests.support.plain import plain_loss

N, M, KS = 40, 5, (1, 2, 4)
F = N - M
LENGTHS = {"book": (80, 60, 90), "letter": (80,), "site": (130, 45)}
"""Tokens of the texts of each group. Targets in the middle of the letter have no F tokens besides what they read."""
TEXTS = {
    group: [
        " ".join(f"w{token}" for token in np.random.default_rng(length).integers(1, 50, length))
        for length in lengths
    ]
    for group, lengths in LENGTHS.items()
}
SMALL: dict[str, Any] = {
    "n_long": N,
    "n_short": M,
    "targets": 150,
    "targets_per_block": 1,
    "tau_nats": 1.5,
    "ks": KS,
    "selectors": ("leave-one-out", "random"),
    "device": "cpu",
    "tokens_per_batch": 2048,
    "progress": False,
}


@cache
def model(seed: int = 0) -> tuple[Any, Tokenizer]:
    """A model with random weights that takes the far context seriously, and its tokenizer."""
    words = {"unknown": 0, **{f"w{token}": token for token in range(1, 50)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return random_model("llama", initializer_range=0.3 + 0.01 * seed), tokenizer


def saved(folder: Path) -> Path:
    """The folder, in which `model()` and its tokenizer are written."""
    weights, tokenizer = model()
    weights.save_pretrained(folder)
    tokenizer.save(str(folder / TOKENIZER))
    return folder


def small(measured: Any = None, **changes: Any) -> Result:
    """What is measured of a model, by default `model()`, with these settings."""
    return measure(measured or model(), TEXTS, **{**SMALL, **changes})


def interrupted_losses(patch: pytest.MonkeyPatch) -> list[int]:
    """Have the losses of the second batch interrupted by Ctrl-C, once; gives a list that grows with every batch."""
    original = Engine.with_losses
    begun: list[int] = []

    def interrupted(self: Engine, *arguments: Any) -> pd.DataFrame:
        begun.append(1)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return original(self, *arguments)

    patch.setattr(Engine, "with_losses", interrupted)
    return begun


def read(result: Result, target: Any) -> int:
    """How many tokens of long context a target has: N, and in a block its place more."""
    return N + int(target.target_id) % result.settings.contexts.targets_per_block


def window(result: Result, target: Any, tokens: Sequence[np.ndarray], far_context: str) -> np.ndarray | None:
    """The tokens that a target is given, with the far ones of a far context; None where it has none."""
    text = tokens[target.text][target.position - read(result, target) : target.position]
    if far_context == "shuffled":
        block = target.target_id // result.settings.contexts.targets_per_block
        order = np.random.default_rng([Stream.SHUFFLED, result.settings.contexts.seed, block]).permutation(F)
        return np.concatenate([text[:F][order], text[F:]])
    if far_context == "true":
        return text
    if far_context == "other-target":
        size = result.settings.contexts.targets_per_block
        of_block = result.targets.iloc[result.over]["target_id"] // size == target.target_id // size
        return text if of_block.sum() > 1 else None
    name = far_context.replace("-", "_")
    number, start = getattr(target, f"{name}_text"), getattr(target, f"{name}_start")
    return None if number < 0 else np.concatenate([tokens[number][start : start + F], text[F:]])


def small_tokens() -> list[np.ndarray]:
    """Token ids of every text."""
    return [np.array(model()[1].encode(text).ids) for texts in TEXTS.values() for text in texts]


def assert_losses_are_plain(
    result: Result, inner: Any, tokens: Sequence[np.ndarray], rows: Sequence[int]
) -> None:
    """Losses of the targets ``rows`` of `Result.over` again, one subsequence at a time; ``inner`` evaluates."""
    for row in rows:
        target = result.targets.iloc[result.over[row]]
        for far_context in result.far_contexts:
            text = window(result, target, tokens, far_context)
            for selector in result.selectors:
                losses = result.loss_nats(selector, far_context)[row]
                chosen = result.selected(selector, far_context)[row]
                if text is None:
                    assert np.isnan(losses).all() and (chosen == -1).all()
                    continue
                kept = [[*sorted(chosen[:k].tolist()), *range(F, len(text))] for k in result.ks]
                expected = [plain_loss(inner, text, columns, target.token) for columns in kept]
                np.testing.assert_allclose(losses, expected, atol=1e-4)
        text = tokens[target.text][target.position - read(result, target) : target.position]
        assert tokens[target.text][target.position] == target.token
        long, short = (plain_loss(inner, text, range(start, len(text)), target.token) for start in (0, F))
        np.testing.assert_allclose([target.loss_long_nats, target.loss_short_nats], [long, short], atol=1e-4)


def assert_same(a: Result, b: Result) -> None:
    """The same rows to the last bit."""
    for name in ("targets", "choices", "scores", "texts"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None), name
        if one is not None:
            columns = sorted(one)
            assert columns == sorted(other), name
            as_lists = (
                frame[columns].map(lambda value: np.asarray(value).tolist()) for frame in (one, other)
            )
            pd.testing.assert_frame_equal(*as_lists, check_dtype=False)
