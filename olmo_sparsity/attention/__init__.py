"""Attentions in the place of the softmax, one file for each family."""

from olmo_sparsity.attention import entmax, feature_map, forgetting, scaled, sparsek
from olmo_sparsity.attention.base import ATTENTIONS, SOFTMAX, Attention, Places, Shape

__all__ = ["ATTENTIONS", "SOFTMAX", "Attention", "Places", "Shape"]
__all__ += ["entmax", "feature_map", "forgetting", "scaled", "sparsek"]
