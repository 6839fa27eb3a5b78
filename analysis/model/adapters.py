"""One interface to the models that are analysed: this project's OLMo, and causal language models of transformers.

Beyond logits at explicit position ids, the analysis asks a model for the keys and values of a prefix (so that many
contexts share it), for logits under a bias on its attention (so that the presence of a token can be differentiated),
for logits of embeddings (so that these can), and for the attention of the last position.
Shapes: R rows, L tokens, P tokens of a cached prefix, Q positions at the end that are asked, V vocabulary (logits), W
width, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.model.olmo import PositionedOLMo

KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values of a prefix, each (R, H, P, D), a pair per layer."""


ReadAttention = Callable[[Tensor], Tensor]
"""From the attention of a layer, (R, H, Q, L) float, to what is wanted of it."""


def mean_over_heads(attention: Tensor) -> Tensor:
    """(R, Q, L) of attention (R, H, Q, L)."""
    return attention.mean(dim=1)


class TokenModel(Protocol):
    """The least that a model must offer: logits for tokens at explicit position ids."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *, logits_to_keep: int) -> Any:
        """An object whose ``logits`` are those of the last Q = ``logits_to_keep`` positions, (R, Q, V)."""


class AnalysedModel(TokenModel, Protocol):
    """What the models that `analysis.model.load` loads offer beyond logits."""

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Keys and values of tokens (R, P) at their position ids (R, P)."""

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), for tokens (R, L) behind ``past``; ``position_ids`` (R, P + L)."""

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), with ``bias`` (R, L, L) added to every head's attention scores.

        The causal mask is not part of ``bias``; gradients flow back to it.
        """

    @property
    def blank_token(self) -> int:
        """The token whose embedding stands for no token: the end of text, or 0 where the model names none."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, (R, L, W), before those of positions are added."""

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), from what `embed` gives; gradients flow back to it."""

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """What ``read`` gives of the attention of the last Q positions to every token, mean over layers; (R, Q, L)."""


def is_analysed(model: TokenModel) -> TypeGuard[AnalysedModel]:
    """Whether a model offers what `AnalysedModel` does. By its class: no property is read, which could raise."""
    return hasattr(type(model), "logits_after")


class OlmoForAnalysis(nn.Module):
    """This project's OLMo, any of its position encodings."""

    def __init__(self, model: PositionedOLMo):
        super().__init__()
        self.model = model

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that it knows."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """The number below which position ids must stay; None where any do."""
        config = self.model.config
        return config.max_sequence_length if config.encoding.has_table else None

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Any:
        """As `PositionedOLMo.forward`."""
        return self.model(input_ids, position_ids=position_ids, **options)

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """See `AnalysedModel`; OLMo caches keys before it rotates them."""
        return self.model(
            input_ids, position_ids=position_ids, use_cache=True, logits_to_keep=1
        ).attn_key_values

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `AnalysedModel`."""
        return self.model(
            input_ids, position_ids=position_ids, past_key_values=past, logits_to_keep=logits_to_keep
        ).logits

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `AnalysedModel`."""
        if not getattr(self.model.blocks()[0].mixer, "fades", True):
            raise UserError(
                f"model.attention: {self.model.config.attention} has more than its scores to drop a token from, so "
                "that the selector gradient does not apply to it; leave it out"
            )
        own = self.model._attention_bias(position_ids, None)
        bias = bias[:, None] + (_causal(bias) if own is None else own)
        return self.model(
            input_ids, position_ids=position_ids, attention_bias=bias, logits_to_keep=logits_to_keep
        ).logits

    @property
    def blank_token(self) -> int:
        """See `AnalysedModel`."""
        return self.model.config.eos_token_id

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `AnalysedModel`."""
        return self.model.embed(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `AnalysedModel`."""
        return self.model(
            input_ids=None,
            position_ids=position_ids,
            input_embeddings=embeddings,
            logits_to_keep=logits_to_keep,
        ).logits

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """See `AnalysedModel`."""
        with _recording_attention(self.model, queries, read) as recorded:
            self.model(input_ids, position_ids=position_ids, logits_to_keep=queries)
        return torch.stack(recorded).mean(dim=0)


class PositionedCausalLM(nn.Module):
    """A causal language model of transformers that rotates by, or looks up, the position ids it is given."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def vocabulary_size(self) -> int:
        """See `OlmoForAnalysis`."""
        return len(self.model.get_input_embeddings().weight)

    @property
    def max_positions(self) -> int | None:
        """See `OlmoForAnalysis`."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) else None

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
        """An object whose ``logits`` are (R, L, V), or (R, Q, V) of the last Q = ``logits_to_keep`` positions.

        ``input_ids`` and ``position_ids`` are (R, L). ``attention_mask``: (R, P + L), 0 hides a token from every query;
        or (R, 1, L, L), added to the attention scores.
        """
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
        """See `AnalysedModel`; transformers caches keys after it rotated them."""
        from transformers import DynamicCache

        cache = DynamicCache()
        self(input_ids, position_ids, logits_to_keep=1, past_key_values=cache, use_cache=True)
        layers: Any = cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `AnalysedModel`."""
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
        """See `AnalysedModel`."""
        mask = (bias[:, None] + _causal(bias)).to(self.model.dtype)
        logits = self(input_ids, position_ids, logits_to_keep=logits_to_keep, attention_mask=mask).logits
        if bias.requires_grad and not logits.requires_grad:
            raise UserError(
                f"the attention of {self.model.config.model_type} takes no bias, so that the selector gradient does "
                "not apply to it; leave it out"
            )
        return logits

    @property
    def blank_token(self) -> int:
        """See `AnalysedModel`; some models have several ends of text, or one that is not in their table."""
        ends = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        end = ends[0] if isinstance(ends, list) else ends
        return end if end is not None and end < self.model.get_input_embeddings().num_embeddings else 0

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `AnalysedModel`."""
        return self.model.get_input_embeddings()(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `AnalysedModel`."""
        return self.model(
            inputs_embeds=embeddings.clone(),  # CTRL scales it in place
            position_ids=position_ids.contiguous(),
            attention_mask=torch.ones_like(position_ids),  # see `forward`
            use_cache=False,
            logits_to_keep=logits_to_keep,
        ).logits

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """See `AnalysedModel`. Only the plain ("eager") attention of transformers tells its weights."""

        def keep_last(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            """Before transformers keeps the (R, H, L, L) of every layer."""
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[2:] != (length, length):
                return None
            return output[0], weights[:, :, -queries:].clone(), *output[2:]

        length, usual = input_ids.shape[1], self.model.config._attn_implementation
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
            self.model.set_attn_implementation(usual)
        return torch.stack([read(layer[:, :, -queries:].float()) for layer in weights]).mean(dim=0)


class Prefixed(nn.Module):
    """A model that reads a prefix at ids 0 … p - 1 of every context (docs/method.md, 2.1 [ours]).

    What it is given stands behind the prefix, at its ids plus p, and so does what it gives back: nothing of the prefix
    is a candidate, left out or a target.
    """

    def __init__(self, model: OlmoForAnalysis | PositionedCausalLM, prefix: Sequence[int]):
        super().__init__()
        self.unprefixed, self.prefix = model, tuple(prefix)
        self._cached: KeyValues = []

    @property
    def model(self) -> Any:
        """As in the model without a prefix."""
        return self.unprefixed.model

    @property
    def vocabulary_size(self) -> int:
        """As in the model without a prefix."""
        return self.unprefixed.vocabulary_size

    @property
    def max_positions(self) -> int | None:
        """The number below which ids behind the prefix must stay; None where any do."""
        most = self.unprefixed.max_positions
        return None if most is None else most - len(self.prefix)

    def _behind(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens (R, p + L) and their ids."""
        prefix = input_ids.new_tensor(self.prefix).expand(len(input_ids), -1)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return torch.cat([prefix, input_ids], dim=1), self._ids(position_ids)

    def _ids(self, position_ids: Tensor) -> Tensor:
        """The ids of the prefix and of what is behind it, (R, p + L)."""
        first = torch.arange(len(self.prefix), device=position_ids.device)
        return torch.cat([first.expand(len(position_ids), -1), position_ids + len(self.prefix)], dim=1)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, *, logits_to_keep: int = 0
    ) -> Any:
        """See `TokenModel`; 0 keeps the logits of all L tokens."""
        tokens, ids = self._behind(input_ids, position_ids)
        return self.unprefixed(tokens, position_ids=ids, logits_to_keep=logits_to_keep or input_ids.shape[1])

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """See `AnalysedModel`; those of the prefix are kept for `logits_after`."""
        p, found = len(self.prefix), self.unprefixed.key_values(*self._behind(input_ids, position_ids))
        self._cached = [(keys[:1, :, :p], values[:1, :, :p]) for keys, values in found]
        return [(keys[:, :, p:], values[:, :, p:]) for keys, values in found]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `AnalysedModel`."""
        whole = [
            (
                torch.cat([k.expand(len(keys), -1, -1, -1), keys], 2),
                torch.cat([v.expand(len(keys), -1, -1, -1), values], 2),
            )
            for (k, v), (keys, values) in zip(self._cached, past, strict=True)
        ]
        return self.unprefixed.logits_after(whole, input_ids, self._ids(position_ids), logits_to_keep)

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `AnalysedModel`."""
        tokens, ids = self._behind(input_ids, position_ids)
        p = len(self.prefix)
        return self.unprefixed.biased_logits(
            tokens, ids, nn.functional.pad(bias, (p, 0, p, 0)), logits_to_keep
        )

    @property
    def blank_token(self) -> int:
        """See `AnalysedModel`."""
        return self.unprefixed.blank_token

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `AnalysedModel`."""
        return self.unprefixed.embed(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `AnalysedModel`."""
        prefix = self.embed(torch.tensor(self.prefix, device=embeddings.device))
        whole = torch.cat([prefix.expand(len(embeddings), -1, -1), embeddings], dim=1)
        return self.unprefixed.embedded_logits(whole, self._ids(position_ids), logits_to_keep)

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """See `AnalysedModel`; the prefix is the first of the tokens that ``read`` sees."""
        return self.unprefixed.last_attention(*self._behind(input_ids, position_ids), queries, read)


Adapter = OlmoForAnalysis | PositionedCausalLM | Prefixed


def with_prefix(model: Adapter, prefix: Sequence[int]) -> Adapter:
    """The model behind a prefix; itself where that is empty."""
    assert not isinstance(model, Prefixed), "one prefix"
    return Prefixed(model, prefix) if prefix else model


def _causal(bias: Tensor) -> Tensor:
    """(L, L): the least number where a query would see a later token, else 0."""
    length = bias.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(diagonal=1)
    return torch.zeros(length, length, device=bias.device).masked_fill(future, torch.finfo(bias.dtype).min)


@contextmanager
def _recording_attention(model: PositionedOLMo, queries: int, read: ReadAttention) -> Iterator[list[Tensor]]:
    """While it runs, every layer appends what is read of the attention of the last Q positions."""
    recorded: list[Tensor] = []

    def softmax_of(attend: Any) -> Any:
        def attend_and_record(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any
        ) -> Any:
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = (q[:, :, -queries:].float() @ keys.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
            mask = (
                _causal(scores[0, 0].new_zeros(keys.shape[2], keys.shape[2]))
                if attn_mask is None
                else attn_mask
            )
            scores = scores + mask[..., -queries:, :].float()
            recorded.append(read(scores.softmax(dim=-1)))
            return attend(q, k, v, attn_mask=attn_mask, **rest)

        return attend_and_record

    def own(weights: Any) -> Any:
        def weigh_and_record(*arguments: Any) -> Tensor:
            made = weights(*arguments)
            recorded.append(read(made[:, :, -queries:]))
            return made

        return weigh_and_record

    wrapped = [
        (block, "_scaled_dot_product_attention", softmax_of)
        if block.mixer is None
        else (block.mixer, "weights", own)
        for block in model.blocks()
    ]
    for holder, name, record in wrapped:
        setattr(holder, name, record(getattr(holder, name)))
    try:
        yield recorded
    finally:
        for holder, name, _ in wrapped:
            delattr(holder, name)  # the class's own is there again
