"""Presses of kvpress (github.com/NVIDIA/kvpress) as policies, in an environment that has it.

Shapes: R rows, G heads of keys in all layers, L tokens that are seen, F far tokens, m choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.policies.policy import Keep, Policy, by_layer, first_of_each_head, highest
from olmo_sparsity.util.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from analysis.model.layer_states import LayerStates
    from analysis.policies.seen import Seen

_ROUNDED = 1e-6
"""Of a key: keeps what is rounded down from a share of all keys from losing one."""


def from_kvpress(press: Any, *, blind: bool = True) -> KVPress:
    """A press with a ``score()`` as a policy: it sees what it sees in kvpress, and the highest scores are kept.

    PyramidKV has a budget of its own for each layer (``get_layer_budget()``). The press scores anew at each budget,
    with its ``compression_ratio`` set to it, since some, such as CriticalKV, look at it.

    Args:
        press: of any class; of kvpress, one of those that keep by their scores.
        blind: whether it sees the far context alone, as kvpress compresses a context before the question comes.

    Raises `UserError` for a press without a ``score()``, and for one that keeps in a way of its own.
    """
    name = type(press).__name__
    if not callable(getattr(press, "score", None)):
        remedy = "give a press that scores keys"
        inner = getattr(press, "press", None)
        if callable(getattr(inner, "score", None)):
            remedy = f"give its press, {type(inner).__name__}"
        raise UserError(f"{name} has no score(), so that it is no policy here; {remedy}")
    if not hasattr(press, "get_layer_budget") and not _keeps_by_score(press):
        raise UserError(
            f"{name} compresses in a way of its own, so that its score() is not all it keeps by; give another press"
        )
    return KVPress(press, blind)


@dataclass(frozen=True)
class KVPress(Policy):
    """See `from_kvpress`."""

    press: Any
    blind: bool = True

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F). Raises `UserError` where they are others at another budget: then `kept` scores at each."""
        few, many = self.scores_at(seen, [max(1, share * seen.n_far // 4) for share in (1, 3)])
        if not np.array_equal(few, many):
            raise UserError(
                f"{type(self.press).__name__} scores anew at each budget, or at random, so that it has no one ranking; "
                "call kept() of the policy with the budgets"
            )
        return many

    def scores_at(self, seen: Seen, counts: Sequence[int]) -> list[np.ndarray]:
        """See `Policy`."""
        return [self._scores(seen, count) for count in counts]

    def keeping(self, seen: Seen) -> Keep:
        """See `Policy`."""
        if not hasattr(self.press, "get_layer_budget"):
            return first_of_each_head
        modules: list[Any] = []

        def of_layer(layer: LayerStates) -> Tensor:
            modules.append(layer.module)
            return layer.keys.new_zeros(layer.keys.shape[:3])

        first = replace(seen, contexts=seen.contexts.take(slice(1)), targets=np.zeros((1, 2), dtype=np.int64))
        first.of_layers(of_layer)

        def keep(scores: np.ndarray, count: int) -> np.ndarray:
            """The far keys are what is shared out, as if there were no others: so all counts have the same total."""
            n_far = scores.shape[-1]
            layers = []
            with self._keeping_keys(count, n_far):
                for of_layer, module in zip(by_layer(scores, seen.key_heads), modules, strict=True):
                    budget = self.press.get_layer_budget(module, n_far)
                    layers.append(highest(of_layer, max(0, budget)))
            return np.concatenate(layers, axis=1)

        return keep

    def _scores(self, seen: Seen, count: int) -> np.ndarray:
        """(m, G, F) where ``count`` far keys are kept, and all others."""
        adapter = seen.scorer.model
        model = adapter.model
        press = self.press

        def of_layer(layer: LayerStates) -> Tensor:
            """(R, G, L)."""
            if layer.module is None or layer.hidden is None:
                raise UserError(
                    "a press reads a model of transformers; convert this one with olmo-sparsity export_hf"
                )
            length = layer.keys.shape[2]
            kept = count + length - seen.n_far
            named = {
                "hidden_states": layer.hidden,
                "position_embeddings": layer.rotation,
                "past_key_values": None,
                "attention_mask": None,
            }
            try:
                with self._keeping_keys(kept, length):
                    scores: Tensor = press.score(
                        layer.module, layer.hidden, layer.keys, layer.values, layer.attention(), named
                    )
            except (AssertionError, NotImplementedError) as error:
                raise UserError(f"{type(press).__name__}: {first_line(error)}") from error
            return scores

        inner = getattr(model, "model", None)
        inner = getattr(inner, "language_model", inner)
        rotary = getattr(inner, "rotary_emb", None)
        if hasattr(press, "post_init_from_model"):
            try:
                press.post_init_from_model(model)
            # each press raises its own errors, such as those that download statistics of a model
            except Exception as error:
                raise UserError(
                    f"{type(press).__name__} is not to be had for this model ({first_line(error)}); give another press"
                ) from error
        with _with_rotary(model, rotary):
            return seen.of_layers(of_layer, with_prefix=True)

    @contextmanager
    def _keeping_keys(self, kept: int, length: int) -> Iterator[None]:
        """While it runs, the press is one that keeps so many of all keys."""
        if not hasattr(self.press, "compression_ratio"):
            yield
            return
        before = self.press.compression_ratio
        self.press.compression_ratio = max(0.0, 1 - (kept + _ROUNDED) / length)
        try:
            yield
        finally:
            self.press.compression_ratio = before


@contextmanager
def _with_rotary(model: Any, rotary: Any) -> Iterator[None]:
    """While it runs, every attention has the module of the model that makes rotations, as in kvpress."""
    changed = []
    if rotary is not None:
        for module in list(model.modules()):
            if hasattr(module, "layer_idx") and not hasattr(module, "rotary_emb"):
                module.rotary_emb = rotary
                changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.rotary_emb


def _keeps_by_score(press: Any) -> bool:
    """Whether nothing but its score() says what a press keeps."""
    for kind in type(press).__mro__:
        if "compress" in vars(kind):
            return kind.__name__ == "ScorerPress"
    return True
