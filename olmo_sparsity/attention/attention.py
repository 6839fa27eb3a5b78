"""What an attention in the place of the softmax is, and where each is registered.

Shapes: B batch, H heads, Q queries, K keys (the last Q of them are the queries' own tokens), D head dimension, W width
of the model, E numbers that an attention keeps of each token and head beside its value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from olmo_sparsity.util.registry import Registry

SOFTMAX = "softmax"
"""The usual one, which OLMo's blocks compute themselves."""
ATTENTIONS: Registry[type[Attention]] = Registry("attention")
"""Every other attention by its name."""


@dataclass(frozen=True)
class Shape:
    """What an attention must know of the model."""

    width: int
    """W."""
    heads: int
    """H."""
    window_length: int
    """Tokens of a training window."""


@dataclass(frozen=True)
class AttentionMask:
    """Where the queries and keys of a forward pass are, and who sees whom."""

    query_ids: Tensor
    """(B or 1, Q) position ids."""
    key_ids: Tensor
    """(B or 1, K) position ids."""
    seen: Tensor
    """(B or 1, 1, Q, K) bool: what a query sees. Later keys it does not."""
    bias: Tensor
    """(B or 1, 1 or H, Q, K): added to the scores of what is seen, last of all."""

    @property
    def distance(self) -> Tensor:
        """How far before its query a key is, in ids: (B or 1, 1, Q, K) float; 0 for the query's own token."""
        return (self.query_ids[:, None, :, None] - self.key_ids[:, None, None, :]).float()

    @property
    def context_length(self) -> Tensor:
        """n, the tokens up to the query, itself included, by its id: (B or 1, 1, Q, 1) float.

        By id [ours], where papers count keys: so that a token that is dropped from a context changes n no more than one
        that is hidden.
        """
        return (self.query_ids + 1)[:, None, :, None].float()


class Attention(nn.Module):
    """The attention of one layer, from queries and keys that are rotated already where the model has RoPE.

    Scores and weights are float32, whatever the precision of the rest.
    """

    extras = 0
    """E: `per_token` computes them from the layer's input, and they are cached with the values."""
    fades = True
    """Whether a token whose scores are lowered without end is the same as one that is dropped."""
    reads_ids = False
    """Whether ids count tokens or measure distances, other than by RoPE; coupled ids do neither."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape

    def reset_parameters(self) -> None:
        """Draw the attention's own weights; called once the model has drawn its own."""

    def per_token(self, inputs: Tensor) -> Tensor:
        """(B, H, T, E) of the layer's normed input (B, T, W); none where `extras` is 0."""
        return inputs.new_empty(len(inputs), self.shape.heads, inputs.shape[1], 0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q · k / sqrt(D), (B, H, Q, K) float32."""
        return (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5

    @abstractmethod
    def weights(self, q: Tensor, k: Tensor, extras: Tensor, mask: AttentionMask) -> Tensor:
        """Attention (B, H, Q, K) float32 of queries (B, H, Q, D) to keys (B, H, K, D) with extras (B, H, K, E)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
        """What the queries read of the values, (B, H, Q, D); ``v`` is (B, H, K, D + E)."""
        values, extras = v.split((q.shape[-1], self.extras), dim=-1)
        weights = nn.functional.dropout(self.weights(q, k, extras, mask), dropout)
        return weights.to(values.dtype) @ values
