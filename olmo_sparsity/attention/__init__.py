"""Attentions in the place of the softmax, one file for each family.

Every module of this folder is imported here, so that a new attention is one new file, which registers what it defines.
"""

from importlib import import_module
from pkgutil import iter_modules

from olmo_sparsity.attention.base import ATTENTIONS, SOFTMAX, Attention, Places, Shape

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ATTENTIONS", "SOFTMAX", "Attention", "Places", "Shape"]
