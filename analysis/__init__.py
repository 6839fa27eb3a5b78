"""Measure what a far context gives a language model, and how few of its tokens give it.

    from analysis import influential_tokens, load_records

Both are loaded when they are asked for: records are read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.notebook import influential_tokens
    from analysis.records.store import load_records

__all__ = ["influential_tokens", "load_records"]


def __getattr__(name: str) -> Any:
    if name == "influential_tokens":
        from analysis.notebook import influential_tokens

        return influential_tokens
    if name == "load_records":
        from analysis.records.store import load_records

        return load_records
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
