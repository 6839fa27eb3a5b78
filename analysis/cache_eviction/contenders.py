"""What is judged: eviction policies, three controls, and references, by name (docs/eviction.md [ours]).

Shapes: m choices, G heads of keys in all layers, F far tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.cache_eviction.record import AWARE, BLIND, NOTHING, TARGETS
from analysis.cache_eviction.reference import REFERENCES, Reference, find_reference
from analysis.cache_eviction.settings import NEAR_REREAD, NEARS, check_contexts, keys_of
from analysis.parameters import defaults
from analysis.policies import POLICIES, Policy, find_policy
from analysis.settings import ContextSettings
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

if TYPE_CHECKING:
    from analysis.policies.seen import Seen

ALL = "all"
"""Stands for every policy, aware and blind, and the controls; for no blind one where near tokens are not read again."""


@dataclass(frozen=True)
class Random(Policy):
    """The control `random`: a random order of the far tokens, the same in all heads, by block."""

    seed: int = 0

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        heads = sum(seen.key_heads)
        orders = [
            np.tile(generator.permutation(seen.n_far), (heads, 1))
            for generator in _generators(seen, Stream.RANDOM_EVICTION, self.seed)
        ]
        return np.stack(orders).astype(float)


@dataclass(frozen=True)
class RandomByHead(Policy):
    """The control `random-by-head`: as `random`, in another order in every head, as kvpress's RandomPress."""

    seed: int = 0

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        shape = (sum(seen.key_heads), seen.n_far)
        generators = _generators(seen, Stream.RANDOM_EVICTION_BY_HEAD, self.seed)
        return np.stack([generator.random(shape) for generator in generators])


@dataclass(frozen=True)
class Nearest(Policy):
    """The control `nearest`: the last far tokens."""

    seed: int = 0
    """It draws nothing."""

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        shape = (len(seen.targets), sum(seen.key_heads), seen.n_far)
        return np.broadcast_to(np.arange(seen.n_far, dtype=float), shape)


def _generators(seen: Seen, stream: Stream, seed: int) -> list[np.random.Generator]:
    """A generator for each block."""
    first_targets = seen.contexts.target_id[seen.targets[:, 0], 0]
    return [np.random.default_rng([stream, seed, target]) for target in first_targets]


CONTROLS: dict[str, type[Random | RandomByHead | Nearest]] = {
    "random": Random,
    "random-by-head": RandomByHead,
    "nearest": Nearest,
}


@dataclass(frozen=True)
class Contender:
    """A policy or control, or a reference: one of the two is there."""

    name: str
    sees: str
    """`AWARE`, `BLIND`, `NOTHING` or `TARGETS`."""
    policy: Policy | None = None
    reference: Reference | None = None


def policy_names(names: Sequence[str], near: Sequence[str]) -> list[str]:
    """The names with what `ALL` stands for in its place. Raises `UserError` where one comes twice.

    ``near``: the ways of the near tokens in which they are judged.
    """
    listed: list[str] = []
    for name in names:
        if name == ALL:
            listed += every_policy(blind=NEAR_REREAD in near)
        else:
            listed.append(name)
    check_once("policy", listed)
    return listed


def every_policy(*, blind: bool = True) -> list[str]:
    """Names of all policies, those that may be blind in both ways, and of the controls; or without the blind ones."""
    names = []
    for name, item in POLICIES.items():
        if blind or not find_policy(name).blind:
            names.append(name)
        if blind and "blind" in defaults(item):
            names.append(f"{name}:blind=1")
    return [*names, *CONTROLS]


def find_contender(name: str, seed: int) -> Contender:
    """The policy or control of this name. Raises `UserError` that lists the choices."""
    if name in CONTROLS:
        return Contender(name, NOTHING, policy=CONTROLS[name](seed))
    if name.partition(":")[0] not in POLICIES:
        raise UserError(
            f"unknown eviction policy {name!r}; choose from {', '.join([*POLICIES, *CONTROLS, ALL])}"
        )
    policy = find_policy(name)
    return Contender(name, BLIND if policy.blind else AWARE, policy=policy)


def find_ranking(name: str, keys: Sequence[int], targets_per_block: int) -> Contender:
    """The reference of this name, such as ``leave-one-out-kl:first=16``, for budgets of so many keys.

    Raises `UserError` that lists the choices, where it ranks by more targets than a block has, and where it ranks for
    none of the budgets.
    """
    if name.partition(":")[0] not in REFERENCES:
        raise UserError(f"unknown reference {name!r}; choose from {', '.join(REFERENCES)}")
    reference = find_reference(name)
    if reference.first is not None and reference.first > targets_per_block:
        raise UserError(
            f"{name}: it ranks by more than the {targets_per_block} targets of a block; lower first, or raise "
            "targets_per_block"
        )
    most = reference.most_keys
    if most is not None and most < keys[0]:
        raise UserError(
            f"{name} ranks for budgets of at most {most} keys, and the smallest is {keys[0]}; give keys={keys[0]} or "
            "more, a smaller budget, or leave it out"
        )
    return Contender(name, TARGETS, reference=reference)


def check_once(kind: str, names: Sequence[str]) -> None:
    """Raise `UserError` where a name comes twice."""
    for name in names:
        if list(names).count(name) > 1:
            raise UserError(f"the {kind} {name} is given twice; give it once")


@dataclass(frozen=True)
class Contest:
    """Who is judged at which budgets."""

    policies: Sequence[Contender]
    """And controls."""
    references: Sequence[Contender]
    budgets: tuple[float, ...]
    keys: tuple[int, ...]
    """K of every budget: how many far keys a head keeps in the mean, sinks included."""
    sinks: int
    near: tuple[str, ...] = NEARS
    """The ways of the near tokens in which they are judged."""

    @classmethod
    def of(
        cls,
        contexts: ContextSettings,
        *,
        budgets: Sequence[float],
        sinks: int,
        policies: Sequence[str],
        references: Sequence[str],
        near: Sequence[str] = NEARS,
    ) -> Contest:
        """By names. Raises `UserError`, before a model is opened, where there is no such name, or no such budget."""
        check_contexts(contexts)
        keys = keys_of(budgets, contexts.n_far, sinks)
        names = policy_names(policies, near)
        check_once("reference", references)
        if not names:
            raise UserError(f"there is no policy to judge; name some, or {ALL}")
        check_once("way of the near tokens", near)
        for way in near:
            if way not in NEARS:
                raise UserError(f"unknown way of the near tokens {way!r}; choose from {', '.join(NEARS)}")
        if not near:
            raise UserError(f"there is no way of the near tokens; choose from {', '.join(NEARS)}")
        contenders = [find_contender(name, contexts.seed) for name in names]
        for contender in contenders:
            if contender.sees == BLIND and NEAR_REREAD not in near:
                raise UserError(
                    f"{contender.name} has not seen the near tokens, which are read again behind it; add {NEAR_REREAD} "
                    "to near, or leave it out"
                )
        return cls(
            policies=contenders,
            references=[find_ranking(name, keys, contexts.targets_per_block) for name in references],
            budgets=tuple(budgets),
            keys=keys,
            sinks=sinks,
            near=tuple(way for way in NEARS if way in near),
        )
