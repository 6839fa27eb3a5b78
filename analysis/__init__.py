"""Measure what far context gives a language model, and how few of its tokens give it.

    from analysis import measure

    result = measure("HuggingFaceTB/SmolLM2-135M", texts, n_long=1024, n_short=32)

Each name is loaded when it is asked for: results are read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.api import Result, load, load_study
    from analysis.cache_eviction.result import EvictionResult
    from analysis.cache_eviction.run import eviction
    from analysis.measurement import save_study
    from analysis.measuring import measure
    from analysis.selectors import list_selectors
    from analysis.xray import InfluenceMap, influence_map
    from olmo_sparsity.util.text_files import TextFiles

__all__ = [
    "EvictionResult",
    "InfluenceMap",
    "Result",
    "TextFiles",
    "eviction",
    "influence_map",
    "list_selectors",
    "load",
    "load_study",
    "measure",
    "save_study",
]

_HOMES = {
    "measure": "analysis.measuring",
    "eviction": "analysis.cache_eviction.run",
    "EvictionResult": "analysis.cache_eviction.result",
    **dict.fromkeys(("Result", "load", "load_study"), "analysis.api"),
    "save_study": "analysis.measurement",
    **dict.fromkeys(("InfluenceMap", "influence_map"), "analysis.xray"),
    "list_selectors": "analysis.selectors",
    "TextFiles": "olmo_sparsity.util.text_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
