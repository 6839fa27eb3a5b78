"""What an attention in the place of the softmax is, and where it is registered.

Shapes: B batch, H heads, Q queries, K keys (the last Q of them are those of the queries' tokens), D head dimension,
W width of the model, E further numbers that an attention caches for each token and head, with its value.
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
    """Positions of the queries and keys of a forward pass, and which keys each query sees."""

    query_ids: Tensor
    """(B or 1, Q) position ids."""
    key_ids: Tensor
    """(B or 1, K) position ids."""
    seen: Tensor
    """(B or 1, 1, Q, K) bool: whether a query sees a key; later keys it never sees."""
    bias: Tensor
    """(B or 1, 1 or H, Q, K): added to the scores of keys that are seen, last of all."""

    @property
    def distance(self) -> Tensor:
        """How far before its query a key is, in ids: (B or 1, 1, Q, K) float; 0 for the query's own token."""
        return (self.query_ids[:, None, :, None] - self.key_ids[:, None, None, :]).float()

    @property
    def context_length(self) -> Tensor:
        """n, the number of tokens up to the query and with it, by its id: (B or 1, 1, Q, 1) float.

        By id [ours], where papers count keys: dropping a token from a context then changes n no more than hiding it.
        """
        return (self.query_ids + 1)[:, None, :, None].float()


class Attention(nn.Module):
    """The attention of one layer, from queries and keys that are rotated already where the model has RoPE.

    Scores and weights are float32, whatever the precision of the rest.
    """

    cached_dims = 0
    """E: how many numbers `per_token` computes from the layer's input, to be cached with the values."""
    supports_presence = True
    """Whether lowering a token's scores without bound equals dropping it, so that presence has a gradient."""
    ids_are_positions = False
    """Whether ids must be positions in the text, to count tokens or measure distances (RoPE apart); coupled ids are
    none."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape

    def reset_parameters(self) -> None:
        """Draw the attention's weights; called once the rest of the model has drawn its own."""

    def per_token(self, inputs: Tensor) -> Tensor:
        """(B, H, T, E) of the layer's normed input (B, T, W); none where `cached_dims` is 0."""
        return inputs.new_empty(len(inputs), self.shape.heads, inputs.shape[1], 0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q · k / sqrt(D), (B, H, Q, K) float32."""
        return (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5

    @abstractmethod
    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """Attention (B, H, Q, K) float32 of queries (B, H, Q, D) to keys (B, H, K, D).

        ``cached``: (B, H, K, E), what `per_token` gave for the keys' tokens.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
        """The values that each query attends to, averaged, (B, H, Q, D); ``v`` is (B, H, K, D + E)."""
        values, cached = v.split((q.shape[-1], self.cached_dims), dim=-1)
        weights = nn.functional.dropout(self.weights(q, k, cached, mask), dropout)
        return weights.to(values.dtype) @ values
