"""Attentions in the place of the softmax, one file for each family."""

from olmo_sparsity.attention import entmax, forgetting, scaled
from olmo_sparsity.attention.base import ATTENTIONS, SOFTMAX, Attention, Places, Shape

__all__ = ["ATTENTIONS", "SOFTMAX", "Attention", "Places", "Shape", "entmax", "forgetting", "scaled"]
