"""What a comparison of eviction policies is of: typed, frozen, and refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from analysis.settings import ContextSettings, ModelIdentity, Recorded, TextsIdentity
from olmo_sparsity.util.errors import UserError

NEARS = (NEAR_KEPT, NEAR_REREAD) = ("kept", "reread")
"""What becomes of the near tokens: their keys stay as they are, or they are read again with the reduced cache."""
BUDGETS = (0.03, 0.06, 0.12, 0.25, 0.5)
"""Shares of the far keys that are kept, by default."""
DEFAULT_REFERENCES = ("leave-one-out-kl",)


@dataclass(frozen=True)
class EvictionSettings(Recorded):
    """All settings of one comparison."""

    model: ModelIdentity = field(metadata={"group": ModelIdentity})
    texts: TextsIdentity = field(metadata={"group": TextsIdentity})
    contexts: ContextSettings = field(metadata={"group": ContextSettings})
    blocks_requested: int
    """Small texts offer fewer."""
    budgets: tuple[float, ...]
    """Shares of the far keys, ascending."""
    sinks: int
    """First far tokens that every policy keeps."""
    policies: tuple[str, ...]
    """Names of policies and controls."""
    references: tuple[str, ...]
    """Names of what ranks by exact effects; the first is the one whose sets others are compared with."""
    placebo: bool
    """Whether all is measured in the placebo far context, too."""
    near: tuple[str, ...] = NEARS
    """The ways of the near tokens that were asked for, in the order of `NEARS`."""
    kept_sets: bool = False
    """Whether the share of heads that keep each far key is saved."""
    definitions: tuple[str, ...] = ()
    """Of policies that a user defined, see `analysis.parameters.definitions`."""

    @property
    def keys(self) -> tuple[int, ...]:
        """K of every budget: far keys that a head keeps in the mean, sinks included."""
        return keys_of(self.budgets, self.contexts.n_far, self.sinks)

    @property
    def middle(self) -> int:
        """Which of the budgets tables show where they show one."""
        return len(self.budgets) // 2


def keys_of(budgets: Sequence[float], n_far: int, sinks: int) -> tuple[int, ...]:
    """K of every budget: so many of F far keys, sinks included, and one more than the sinks at least.

    Raises `UserError` for budgets that do not ascend within 0 … 1, hold no more than the sinks, or are the same K.
    """
    if sinks >= n_far:
        raise UserError(
            f"{sinks} sinks leave none of the {n_far} far tokens to choose from; lower sinks, or raise n_long"
        )
    if not budgets or list(budgets) != sorted(set(budgets)) or budgets[0] <= 0 or budgets[-1] > 1:
        shown = ", ".join(f"{100 * budget:g} %" for budget in budgets)
        raise UserError(
            f"budgets ascend, from more than 0 to at most 100 % of the far keys, not {shown or 'none'}"
        )
    keys = []
    for budget in budgets:
        count = round(budget * n_far)
        if count < sinks:
            raise UserError(
                f"a budget of {100 * budget:g} % of {n_far} far keys is {count}, and there are {sinks} sinks; raise "
                "the budget or n_long, or lower sinks"
            )
        keys.append(max(sinks + 1, count))
    for budget, count, before in zip(budgets[1:], keys[1:], keys, strict=False):
        if count == before:
            raise UserError(
                f"a budget of {100 * budget:g} % keeps {count} of {n_far} far keys, as the one before does; leave one "
                "of them out, or raise n_long"
            )
    return tuple(keys)


def check_contexts(contexts: ContextSettings) -> None:
    """Raise `UserError` for blocks in which a choice is followed by nothing."""
    if contexts.targets_per_block < 2:
        raise UserError(
            f"targets_per_block={contexts.targets_per_block}: a choice is judged by the targets that follow it; give 2 "
            "or more"
        )
