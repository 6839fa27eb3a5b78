"""Selectors: which far tokens influence a prediction most (docs/method.md, 2.2), each registered at its definition."""

from analysis.selectors import subsets, internals, controls, by_policy  # isort: skip  (help lists them in this order)
from analysis.selectors.find import check_selector, find_selector
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
    "by_policy",
    "check_selector",
    "controls",
    "find_selector",
    "internals",
    "list_selectors",
    "most_influential",
    "register",
    "register_forms",
    "register_influence",
    "subsets",
]
