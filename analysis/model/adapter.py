"""One interface to the models that are analysed, and the adapter for causal language models of transformers.

Beyond logits at explicit position ids, the analysis needs the keys and values of a prefix (so that many contexts share
it), logits under a bias on the attention (so that the presence of a token can be differentiated), logits of embeddings
(so that these can), and the attention of the last positions.
Shapes: R rows, L tokens, P tokens whose keys and values are cached, Q positions at the end whose logits are kept, p
tokens of a prefix, V vocabulary (logits), W width, H heads, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olmo_sparsity.util.errors import UserError

KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values of tokens, each (R, H, P, D), a pair per layer."""
ReadAttention = Callable[[Tensor], Tensor]
"""From the attention of a layer, (R, H, Q, L) float32, to what is wanted of it."""


def mean_over_heads(attention: Tensor) -> Tensor:
    """(R, Q, L) of attention (R, H, Q, L)."""
    return attention.mean(dim=1)


class Adapter(nn.Module, ABC):
    """What every model offers to the analysis. Position ids are explicit: a token is read at the id it is given."""

    prefix: tuple[int, ...] = ()
    """Tokens that are read before every context (docs/method.md, 2.1a [ours])."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """The number below which position ids must stay, or stayed in training; None where the model names none."""

    @property
    @abstractmethod
    def baseline_token(self) -> int:
        """The token whose embedding stands for no token: the end of text, or 0 where the model names none."""

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        logits_to_keep: int = 0,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """An object whose ``logits`` are those of the last Q = ``logits_to_keep`` positions, (R, Q, V); 0: of all L.

        ``input_ids`` and ``position_ids`` are (R, L). ``attention_mask``: (R, L), 0 hides a token from every query.
        """

    @abstractmethod
    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Keys and values of tokens (R, P) at their position ids (R, P)."""

    @abstractmethod
    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), for tokens (R, L) behind ``past``; ``position_ids`` (R, P + L)."""

    @abstractmethod
    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), with ``bias`` (R, L, L) added to every head's attention scores.

        The causal mask is not part of ``bias``; gradients flow back to it. Raises `UserError` where they cannot.
        """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, (R, L, W), before those of positions are added."""

    @abstractmethod
    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), from what `embed` gives; gradients flow back to it."""

    @abstractmethod
    def attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> list[Tensor]:
        """What ``read`` gives of the attention of the last Q = ``queries`` positions to every token, of each layer.

        (R, Q, L) by default.
        """

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """`attention`, mean over layers, (R, Q, L) by default."""
        return torch.stack(self.attention(input_ids, position_ids, queries, read)).mean(dim=0)

    @property
    def caches_rotated_keys(self) -> bool:
        """Whether a cached key needs no position id any more, so that every head may keep tokens of its own."""
        return True


class TransformersAdapter(Adapter):
    """A causal language model of transformers that rotates by, or looks up, the position ids it is given.

    Its attention must be "eager" or "sdpa": flash attention drops a mask of ones, and with it the guard of `forward`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def vocabulary_size(self) -> int:
        """See `Adapter`."""
        return len(self.model.get_input_embeddings().weight)

    @property
    def max_positions(self) -> int | None:
        """See `Adapter`; rotary models can be read beyond it."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    @property
    def baseline_token(self) -> int:
        """See `Adapter`; some models name several ends of text, or one that is not in their table."""
        ends = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        end = ends[0] if isinstance(ends, list) else ends
        return end if end is not None and end < self.model.get_input_embeddings().num_embeddings else 0

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        logits_to_keep: int = 0,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        """See `Adapter`. With cached keys ``attention_mask`` is (R, P + L); or (R, 1, L, L), added to the scores."""
        if attention_mask is None:
            # Without a mask transformers takes an id jump for the beginning of another packed document, and cuts
            # attention there without a word.
            cached = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = input_ids.new_ones(len(input_ids), cached + input_ids.shape[1])
        return self.model(
            input_ids=input_ids.contiguous(),
            position_ids=position_ids.contiguous(),  # XGLM views it, so that it may not be expanded
            attention_mask=attention_mask,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **({} if past_key_values is None else {"past_key_values": past_key_values}),
        )

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """See `Adapter`; transformers caches keys after it rotated them."""
        from transformers import DynamicCache

        cache = DynamicCache()
        self(input_ids, position_ids, logits_to_keep=1, past_key_values=cache, use_cache=True)
        layers: Any = cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        from transformers import DynamicCache

        return self(
            input_ids,
            position_ids[:, -input_ids.shape[1] :],
            logits_to_keep=logits_to_keep,
            past_key_values=DynamicCache(past),
            use_cache=True,
        ).logits

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        mask = (bias[:, None] + causal_bias(bias)).to(self.model.dtype)
        logits = self(input_ids, position_ids, logits_to_keep=logits_to_keep, attention_mask=mask).logits
        if bias.requires_grad and not logits.requires_grad:
            raise UserError(
                f"the attention of {self.model.config.model_type} takes no bias, so that the selector gradient does "
                "not apply to it; leave it out"
            )
        return logits

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.get_input_embeddings()(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`."""
        return self.model(
            inputs_embeds=embeddings.clone(),  # CTRL scales it in place
            position_ids=position_ids.contiguous(),
            attention_mask=torch.ones_like(position_ids),  # see `forward`
            use_cache=False,
            logits_to_keep=logits_to_keep,
        ).logits

    def attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> list[Tensor]:
        """See `Adapter`. Only the plain ("eager") attention of transformers gives its weights."""

        def keep_last(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            """Cut the weights to the last Q queries before transformers keeps the (R, H, L, L) of every layer."""
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[2:] != (length, length):
                return None
            return output[0], weights[:, :, -queries:].clone(), *output[2:]

        length, implementation = input_ids.shape[1], self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        hooks = [part.register_forward_hook(keep_last, prepend=True) for part in self.model.modules()]
        try:
            weights = self.model(
                input_ids=input_ids,
                position_ids=position_ids.contiguous(),
                attention_mask=torch.ones_like(input_ids),
                use_cache=False,
                output_attentions=True,
                logits_to_keep=1,
            ).attentions
        finally:
            for hook in hooks:
                hook.remove()
            self.model.set_attn_implementation(implementation)
        return [read(layer[:, :, -queries:].float()) for layer in weights]


class PrefixedAdapter(Adapter):
    """A model that reads a prefix at ids 0 … p - 1 of every context (docs/method.md, 2.1a [ours]).

    What it is given stands behind the prefix, at its ids plus p, and so does what it gives back: nothing of the prefix
    is a candidate, left out or a target.
    """

    def __init__(self, unprefixed: Adapter, prefix: Sequence[int]):
        super().__init__()
        assert not unprefixed.prefix, "one prefix"
        self.unprefixed, self.prefix = unprefixed, tuple(prefix)
        self._prefix_cache: KeyValues = []  # of one row; written by `key_values`, read by `logits_after`

    @property
    def model(self) -> Any:
        """The model inside the adapter without a prefix."""
        return self.unprefixed.model

    @property
    def vocabulary_size(self) -> int:
        """See `Adapter`."""
        return self.unprefixed.vocabulary_size

    @property
    def max_positions(self) -> int | None:
        """See `Adapter`; the ids are those behind the prefix."""
        limit = self.unprefixed.max_positions
        return None if limit is None else limit - len(self.prefix)

    @property
    def baseline_token(self) -> int:
        """See `Adapter`."""
        return self.unprefixed.baseline_token

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """The prefix and the tokens behind it, (R, p + L)."""
        prefix = input_ids.new_tensor(self.prefix).expand(len(input_ids), -1)
        return torch.cat([prefix, input_ids], dim=1)

    def _ids(self, position_ids: Tensor) -> Tensor:
        """The ids of the prefix and of the tokens behind it, (R, p + L)."""
        first = torch.arange(len(self.prefix), device=position_ids.device)
        return torch.cat([first.expand(len(position_ids), -1), position_ids + len(self.prefix)], dim=1)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        logits_to_keep: int = 0,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """See `Adapter`."""
        if attention_mask is not None:
            attention_mask = nn.functional.pad(attention_mask, (len(self.prefix), 0), value=1)
        return self.unprefixed(
            self._tokens(input_ids),
            position_ids=self._ids(position_ids),
            logits_to_keep=logits_to_keep or input_ids.shape[1],
            attention_mask=attention_mask,
        )

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """See `Adapter`; those of the prefix are kept for `logits_after`."""
        p = len(self.prefix)
        layers = self.unprefixed.key_values(self._tokens(input_ids), self._ids(position_ids))
        self._prefix_cache = [(keys[:1, :, :p], values[:1, :, :p]) for keys, values in layers]
        return [(keys[:, :, p:], values[:, :, p:]) for keys, values in layers]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        whole = [
            (
                torch.cat([first_keys.expand(len(keys), -1, -1, -1), keys], dim=2),
                torch.cat([first_values.expand(len(values), -1, -1, -1), values], dim=2),
            )
            for (first_keys, first_values), (keys, values) in zip(self._prefix_cache, past, strict=True)
        ]
        return self.unprefixed.logits_after(whole, input_ids, self._ids(position_ids), logits_to_keep)

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        p = len(self.prefix)
        bias = nn.functional.pad(bias, (p, 0, p, 0))
        return self.unprefixed.biased_logits(
            self._tokens(input_ids), self._ids(position_ids), bias, logits_to_keep
        )

    @property
    def caches_rotated_keys(self) -> bool:
        """See `Adapter`."""
        return self.unprefixed.caches_rotated_keys

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.unprefixed.embed(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`."""
        prefix = self.embed(torch.tensor(self.prefix, device=embeddings.device))
        whole = torch.cat([prefix.expand(len(embeddings), -1, -1), embeddings], dim=1)
        return self.unprefixed.embedded_logits(whole, self._ids(position_ids), logits_to_keep)

    def attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> list[Tensor]:
        """See `Adapter`; the prefix is the first of the tokens that ``read`` sees: (R, Q, p + L) by default."""
        return self.unprefixed.attention(self._tokens(input_ids), self._ids(position_ids), queries, read)


def with_prefix(model: Adapter, prefix: Sequence[int]) -> Adapter:
    """The model behind a prefix; itself where that is empty."""
    return PrefixedAdapter(model, prefix) if prefix else model


def causal_bias(bias: Tensor) -> Tensor:
    """(L, L) for a bias (…, L): the least number of its type where a query would see a later token, else 0."""
    length = bias.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(diagonal=1)
    return torch.zeros(length, length, device=bias.device).masked_fill(future, torch.finfo(bias.dtype).min)
