"""What an eviction policy is: it scores every far key by head, and says which keys heads keep (docs/method.md, 2.2a).

No file here but `seen` needs torch, so that policies are known by name without it.
Shapes: m choices, G heads of keys in all layers, layer after layer, F far tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.parameters import find
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.registry import Registry

if TYPE_CHECKING:
    from analysis.policies.seen import Seen

Keep = Callable[[np.ndarray, int], np.ndarray]
"""From scores (m, G, F) and the mean number of keys that a head keeps to which are kept, (m, G, F) bool."""


class Policy(ABC):
    """An eviction policy, a dataclass of its authors' parameters."""

    blind: bool = False
    """Whether it sees the far context alone, before what comes behind it; otherwise it sees the near tokens, too."""

    @abstractmethod
    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F): the higher, the longer a key is kept."""

    def scores_at(self, seen: Seen, counts: Sequence[int]) -> list[np.ndarray]:
        """`scores` where a head keeps so many keys, in the mean, for every count: of most policies the same at all."""
        return [self.scores(seen)] * len(counts)

    def keeping(self, seen: Seen) -> Keep:
        """How keys are kept by their scores: in every head those of the highest."""
        return first_of_each_head

    def kept(self, seen: Seen, counts: Sequence[int]) -> list[np.ndarray]:
        """Which keys are left where a head keeps ``counts`` of them, in the mean: (m, G, F) bool of every count."""
        keep = self.keeping(seen)
        scored = self.scores_at(seen, counts)
        return [keep(scores, count) for scores, count in zip(scored, counts, strict=True)]


RESERVED = {
    **dict.fromkeys(("random", "random-by-head", "nearest"), "is a control"),
    **dict.fromkeys(("leave-one-out-kl", "halving-kl", "presence-gradient", "greedy-kl"), "is a reference"),
    **dict.fromkeys(("full", "sinks", "none"), "is a cache beside those of policies"),
    "all": "stands for all of them",
}
"""Names that no policy may have, and what they are."""


class _Policies(Registry[type[Policy]]):
    """Policies by name, refused as they are registered where they could not be judged."""

    def register(self, name: str) -> Callable[[Any], Any]:
        """See `Registry.register`; raises `UserError` for what is no policy, too."""
        add = super().register(name)

        def checked(item: Any) -> Any:
            if name in RESERVED:
                raise UserError(f"{name!r} {RESERVED[name]}; register the policy by another name")
            its_class = item if isinstance(item, type) else type(item)
            if not issubclass(its_class, Policy):
                raise UserError(f"{name}: an eviction policy is derived from analysis.policies.Policy")
            if missing := getattr(its_class, "__abstractmethods__", ()):
                raise UserError(f"{name}: the policy has no {', '.join(sorted(missing))}(); define it")
            if its_class is item and is_dataclass(item):
                for one in fields(item):
                    if one.default is MISSING:
                        raise UserError(f"{name}: the parameter {one.name} has no default; give it one")
            return add(item)

        return checked


POLICIES = _Policies("eviction policy")
"""By name, each registered where it is defined."""


def find_policy(text: str) -> Policy:
    """The policy of NAME or NAME:PARAMETER=NUMBER:…, such as ``snapkv:window=64:blind=1``.

    Raises `UserError` that lists the choices.
    """
    policy: Policy = find(POLICIES, text)
    return policy


def first_of_each_head(scores: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` keys of the highest scores in every head; equal ones in the order of the text."""
    return highest(scores, count)


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Which of the last axis are the ``count`` highest, bool; equal ones in their order."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def highest_together(scores: np.ndarray, count: int) -> np.ndarray:
    """The keys of the highest scores in all heads (m, g, F) together, ``count`` a head in the mean."""
    flat = scores.reshape(len(scores), -1)
    return highest(flat, count * scores.shape[1]).reshape(scores.shape)


def by_layer(scores: np.ndarray, key_heads: Sequence[int]) -> list[np.ndarray]:
    """The scores (m, G, F) of each layer, (m, g, F)."""
    return np.split(scores, np.cumsum(key_heads)[:-1], axis=1)


def check_at_most_1(name: str, value: float) -> None:
    """Raise `UserError` for a share of more than 1; ``name`` is that of policy and parameter."""
    if value > 1:
        raise UserError(f"{name}={value}: it is a share; give a number of at most 1")
