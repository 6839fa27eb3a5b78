"""Attentions in the place of the softmax (docs/method.md 1). `ATTENTIONS` has them by name.

Every module of this folder is imported here, so that a new attention is one class, which registers itself.
"""

from importlib import import_module
from pkgutil import iter_modules

from olmo_sparsity.attention.attention import ATTENTIONS, SOFTMAX, Attention, AttentionMask, Shape

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ATTENTIONS", "SOFTMAX", "Attention", "AttentionMask", "Shape"]
