"""The registry of selectors: each is registered by its name where it is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from analysis.parameters import written
from olmo_sparsity.util.registry import Registry

SIGNED, ABSOLUTE, BLIND, CONTROL = "signed", "absolute", "target-blind", "control"
FORMS = {"": (SIGNED, "loss"), "-absolute": (ABSOLUTE, "loss"), "-kl": (BLIND, "kl"), "-tv": (BLIND, "tv")}
"""Forms of leaving one out and in: what stands behind the name, the family, and the measure that their passes give."""
FAMILIES: dict[str, list[str]] = {SIGNED: [], ABSOLUTE: [], BLIND: [], CONTROL: []}
"""Names of selectors by what they look at (docs/method.md, 2.2 [ours])."""
BY_SUBSETS: list[str] = []
"""Names of selectors that rank by what the model predicts from subsets, as text or in the cache (`RankedIn`)."""
SELECTORS: Registry[Callable[..., Any]] = Registry("selector", ", or EXACT@PROPOSER:m")
"""By name; one with parameters is a dataclass, whose fields they are, as in snapkv:window=64:pool=7, or a `Policy`."""
_Selector = TypeVar("_Selector", bound=Callable[..., Any])


def register(name: str, family: str, *, by_subsets: bool = False) -> Callable[[_Selector], _Selector]:
    """Make a selector available by name, as one of a family of `FAMILIES`; ``by_subsets``: see `BY_SUBSETS`."""

    def add(selector: _Selector) -> _Selector:
        SELECTORS[name] = selector
        FAMILIES[family].append(name)
        if by_subsets:
            BY_SUBSETS.append(name)
        return selector

    return add


def list_selectors() -> list[str]:
    """Names of all selectors, with their parameters as they are by default; screened forms put two together."""
    listed = []
    for name, selector in SELECTORS.items():
        listed.append(":".join([name, *written(selector)]))
    return listed
