"""The registry of selectors: each is registered by its name where it is defined, with what holds of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from analysis.parameters import defaults, written
from analysis.policies.policy import Policy
from olmo_sparsity.util.registry import Registry, check_name

SIGNED, ABSOLUTE, BLIND, CONTROL = "signed", "absolute", "target-blind", "control"
FAMILIES = (SIGNED, ABSOLUTE, BLIND, CONTROL)
"""What selectors look at (docs/method.md, 2.2 [ours])."""
FORMS = {"": (SIGNED, "loss"), "-absolute": (ABSOLUTE, "loss"), "-kl": (BLIND, "kl"), "-tv": (BLIND, "tv")}
"""Forms of leaving one out and in: what stands behind the name, the family, and the measure that their passes give."""


@dataclass(frozen=True)
class Registered:
    """A selector as it was registered, and what holds of it whatever its parameters are."""

    item: Any
    """A dataclass whose fields are its parameters, as in snapkv:window=64; or the selector or `Policy` itself."""
    family: str
    """One of `FAMILIES`."""
    method: str
    """The name that its forms by other measures share, such as leave-one-out of leave-one-out-kl."""
    by_subsets: bool = False
    """It ranks by what the model predicts from subsets, as text or in the cache (`analysis.selectors.names.RankedIn`).
    """
    hides_tokens: bool = False
    """It hides tokens from all queries, which is right where that equals dropping them from the text."""
    changes_embeddings: bool = False
    """It reads embeddings in the place of tokens."""
    ranks_only_k: bool = False
    """It ranks no tokens beyond k."""
    scores_only_k: bool = False
    """Its ranking says nothing of tokens that were not chosen (`analysis.selectors.Selection.scores`)."""

    @property
    def chooses_by_head(self) -> bool:
        """Whether it ranks the tokens of every head of keys: an eviction policy does."""
        return isinstance(self.item, Policy) or (
            isinstance(self.item, type) and issubclass(self.item, Policy)
        )


SELECTORS: Registry[Registered] = Registry("selector", ", or EXACT@PROPOSER:m")
_Selector = TypeVar("_Selector", bound=Callable[..., Any])


def register(name: str, family: str, *, method: str = "", **flags: bool) -> Callable[[_Selector], _Selector]:
    """Make a selector available by name, as one of a family of `FAMILIES`.

    ``method`` and ``flags`` are fields of `Registered`; a selector without other forms is its own method. Raises
    `UserError` as `Registry.register` does.
    """
    assert family in FAMILIES, family

    def add(selector: _Selector) -> _Selector:
        former = SELECTORS.get(name)
        check_name(SELECTORS.kind, name, selector, former and former.item)
        SELECTORS[name] = Registered(selector, family, method or name, **flags)
        return selector

    return add


def list_selectors(family: str | None = None) -> list[str]:
    """Names of all selectors, or of those of one family of `FAMILIES`, with their parameters as they are by default.

    Screened forms put two together.
    """
    listed = []
    for name, registered in SELECTORS.items():
        if family in (None, registered.family):
            listed.append(":".join([name, *written(defaults(registered.item))]))
    return listed
