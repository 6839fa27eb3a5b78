"""Adapters of tiny random models: this project's encodings and attentions, and families of transformers."""

from __future__ import annotations

from analysis.model.adapter import Adapter, TransformersAdapter
from analysis.ours import OlmoAdapter
from tests.support import tiny
from tests.support.families import random_model

OURS = {**tiny.ENCODINGS, "grouped": {"n_kv_heads": 2}}
"""Names of this project's models, with what is changed in their configuration."""


def tiny_adapter(name: str) -> Adapter:
    """The model of a name in `OURS`, or of a family of transformers, with frozen weights."""
    if name in OURS:
        return OlmoAdapter(tiny.model(**OURS[name])).requires_grad_(False)
    return TransformersAdapter(random_model(name)).requires_grad_(False)
