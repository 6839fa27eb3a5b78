"""Needles woven into training windows: a random key with a value, and further on the same key with its value again.

    text[:p]  key  value  text[p:p']  key  value  text[p':]        (T tokens; the end of the text is left out)

What stands behind the second key can only be known from the first one, so that a model which trains on such windows
has a reason to read far back [ours]. The gap p' - p is log-uniform over what the window holds: near ones teach a model
to look a key up at all, far ones how far back to look. `analysis.measure.needle` tests it with keys that are never
woven (`is_held_out`).
"""

from __future__ import annotations

import numpy as np

from olmo_sparsity.config.schema import Config
from olmo_sparsity.util.rng import Stream

_ONE_KEY_IN = 8


def is_held_out(key: np.ndarray) -> bool:
    """Whether a key, token ids (q,), is one of the eighth that training never sees: its ids sum to a multiple of 8."""
    return int(key.sum()) % _ONE_KEY_IN == 0


class NeedleWeaver:
    """Weaves the needles that `needles` of a config asks for; what a window gets is a pure function of
    (seed, epoch, index)."""

    def __init__(self, config: Config):
        self.settings, self.seed = config.needles, config.seed
        special = [config.model.eos_token_id, config.model.pad_token_id]
        self.vocabulary = np.setdiff1d(np.arange(config.model.vocab_size), special)

    def weave(self, window: np.ndarray, *, epoch: int, index: int) -> np.ndarray:
        """The window (T,) with needles, whose tokens do not occur in it elsewhere; or the window unchanged."""
        settings = self.settings
        if settings.share == 0:
            return window
        generator = np.random.default_rng([Stream.WOVEN_NEEDLES, self.seed, epoch, index])
        if generator.random() >= settings.share:
            return window
        lengths = settings.key_tokens + generator.choice(settings.value_tokens, settings.per_window)
        needles = self._draw(generator, np.setdiff1d(self.vocabulary, window), lengths)
        text = window[: len(window) - 2 * int(lengths.sum())]
        gaps = ((len(text) + 2) ** generator.random(len(needles))).astype(int) - 1
        first = generator.integers(0, len(text) - gaps + 1)
        places = np.stack([first, first + gaps], axis=1)
        at = np.concatenate([np.repeat(pair, len(each)) for pair, each in zip(places, needles, strict=True)])
        return np.insert(text, at, np.concatenate([np.tile(each, 2) for each in needles]))

    def _draw(
        self, generator: np.random.Generator, others: np.ndarray, lengths: np.ndarray
    ) -> list[np.ndarray]:
        """Key and value of each needle, no token twice in the window."""
        while True:
            drawn = generator.choice(others, int(lengths.sum()), replace=False)
            needles = np.split(drawn, np.cumsum(lengths)[:-1])
            if not any(is_held_out(needle[: self.settings.key_tokens]) for needle in needles):
                return needles
