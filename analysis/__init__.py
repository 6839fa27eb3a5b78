"""Measure what a far context gives a language model, and how few of its tokens give it.

    from analysis import influence_map, influential_tokens, load_records

Each is loaded when it is asked for: records are read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.notebook import influence_map, influential_tokens
    from analysis.records.store import load_records

__all__ = ["influence_map", "influential_tokens", "load_records"]


def __getattr__(name: str) -> Any:
    if name in ("influence_map", "influential_tokens"):
        from analysis import notebook

        return getattr(notebook, name)
    if name == "load_records":
        from analysis.records.store import load_records

        return load_records
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
