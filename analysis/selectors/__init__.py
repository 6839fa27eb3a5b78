"""Selectors: which far tokens influence a prediction most (docs/method.md, 2.2), each registered at its definition."""

from analysis.selectors import subsets, internals, controls, by_policy  # isort: skip  (help lists them in this order)
from analysis.selectors.find import find_selector, selector_of
from analysis.selectors.names import SelectorName
from analysis.selectors.registry import (
    ABSOLUTE,
    BLIND,
    CONTROL,
    FAMILIES,
    FORMS,
    SELECTORS,
    SIGNED,
    list_selectors,
    register,
)
from analysis.selectors.selector import (
    Selection,
    SelectorInput,
    most_influential,
    register_forms,
    register_influence,
)

__all__ = [
    "ABSOLUTE",
    "BLIND",
    "CONTROL",
    "FAMILIES",
    "FORMS",
    "SELECTORS",
    "SIGNED",
    "Selection",
    "SelectorInput",
    "SelectorName",
    "by_policy",
    "controls",
    "find_selector",
    "internals",
    "list_selectors",
    "most_influential",
    "register",
    "register_forms",
    "register_influence",
    "selector_of",
    "subsets",
]
