"""One interface to the models that are analysed, and the adapter for causal language models of transformers.

Beyond logits at explicit position ids, the analysis needs the keys and values of a prefix (so that many contexts share
it), logits under a bias on the attention (so that the presence of a token can be differentiated), logits of embeddings
(so that these can), and the attention of the last positions.
Shapes: R rows, L tokens, P tokens whose keys and values are cached, Q positions at the end whose logits are kept, p
tokens of a prefix, V vocabulary (logits), W width, H heads, D head dimension.
"""

from __future__ import annotations

import copy
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.model.far_attention import FarKeys, KeyValues, attending_to, attention_of
from analysis.model.layer_states import LayerStates, ReadLayer, reading_layers
from olmo_sparsity.util.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
ReduceAttention = Callable[[Iterable[Tensor]], Tensor]
"""From the attention of a layer to what is kept of it. It comes as slices (R, H, q, L) float32, a few queries after the
others, so that (R, H, Q, L) need not be there at once."""


def mean_over_heads(attention: Iterable[Tensor]) -> Tensor:
    """(R, Q, L) of slices of attention (R, H, q, L)."""
    return torch.cat([some.mean(dim=1) for some in attention], dim=1)


_ONE_PASS = threading.RLock()


def one_at_a_time(method: Callable[P, T]) -> Callable[P, T]:
    """Have threads make their passes one after the other: some change the attention of a model while they run."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _ONE_PASS:
            return method(*args, **kwargs)

    return run


@dataclass
class Output:
    """What a forward pass gives."""

    logits: Tensor
    """(R, Q, V)."""
    key_values: KeyValues
    """Of tokens, where they were to be kept."""


@dataclass(frozen=True)
class PassOptions:
    """What tokens attend to in a forward pass, beside all tokens before them."""

    attention_mask: Tensor | None = None
    """(R, L), 0 hides a token from every query."""
    bias: Tensor | None = None
    """See `Adapter.biased_logits`, (R, L, L)."""
    past: KeyValues | None = None
    """Keys and values of the P tokens before; an empty list keeps those of the L tokens."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model itself."""


PLAIN = PassOptions()


class Adapter(nn.Module, ABC):
    """What every model offers to the analysis. Position ids are explicit: a token is read at the id it is given.

    A model may read a prefix at ids 0 … p - 1 of every context (docs/method.md, 2.1a [ours]). What it is given stands
    behind the prefix, at its ids plus p, and so does what it returns: nothing of the prefix is a candidate, left out
    or a target. `raw_forward` and `raw_attention` know nothing of it.
    """

    model: Any
    """The model itself."""
    vocabulary_size: int
    """Number of token ids that it knows."""
    baseline_token: int
    """The token whose embedding stands for no token: the end of text, or 0 where the model names none."""
    last_position: int | None
    """The number below which position ids must stay, or stayed in training; None where the model names none."""
    caches_rotated_keys = True
    """Whether a cached key needs no position id any more, so that every head may keep tokens of its own."""
    shares_far_keys = False
    """Whether `near_logits` reads far keys that all rows share (`far_attention`), in place of copies of a row each."""
    prefix: tuple[int, ...] = ()
    _prefix_cache: KeyValues  # of one row; written by `key_values`, read by `logits_after`

    # --- what a kind of model defines ---

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, (R, L, W), before those of positions are added."""

    @abstractmethod
    def raw_forward(
        self, inputs: Tensor, position_ids: Tensor, logits_to_keep: int, options: PassOptions = PLAIN
    ) -> Output:
        """One forward pass.

        Args:
            inputs: tokens, (R, L), or what `embed` gives of them, (R, L, W).
            position_ids: (R, P + L).
            logits_to_keep: Q; 0: logits of all L positions.
            options: what tokens attend to.
        """

    @abstractmethod
    def raw_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention
    ) -> list[Tensor]:
        """See `attention`."""

    @abstractmethod
    def raw_layers(self, input_ids: Tensor, position_ids: Tensor, read: ReadLayer) -> list[Tensor]:
        """See `layers`."""

    def raw_near_logits(self, far: FarKeys, input_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `near_logits`, where far keys are shared; ``far`` has the prefix among its tokens."""
        raise NotImplementedError

    def rotated(self, far: KeyValues) -> KeyValues:
        """Cached keys and values of tokens at ids 0, 1, … as `far_attention` reads them."""
        return far

    # --- what the analysis calls ---

    @property
    def max_positions(self) -> int | None:
        """`last_position` behind the prefix."""
        return None if self.last_position is None else self.last_position - len(self.prefix)

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
        if self.prefix:
            logits_to_keep = logits_to_keep or input_ids.shape[1]
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (len(self.prefix), 0), value=1)
        ids = self._ids(position_ids)
        return self.raw_forward(self._tokens(input_ids), ids, logits_to_keep, PassOptions(attention_mask))

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Keys and values of tokens (R, P) at their position ids (R, P); those of the prefix are kept."""
        p = len(self.prefix)
        layers = self.raw_forward(
            self._tokens(input_ids), self._ids(position_ids), 1, PassOptions(past=[])
        ).key_values
        self._prefix_cache = [(keys[:1, :, :p], values[:1, :, :p]) for keys, values in layers]
        return [(keys[:, :, p:], values[:, :, p:]) for keys, values in layers]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), for tokens (R, L) behind ``past``; ``position_ids`` (R, P + L)."""
        if self.prefix:
            past = [
                (_behind(first_keys, keys), _behind(first_values, values))
                for (first_keys, first_values), (keys, values) in zip(self._prefix_cache, past, strict=True)
            ]
        return self.raw_forward(
            input_ids, self._ids(position_ids), logits_to_keep, PassOptions(past=past)
        ).logits

    def far_key_values(self, input_ids: Tensor) -> KeyValues:
        """Keys and values of one far context (1, F) at ids 0 … F - 1, behind those of the prefix, for `near_logits`."""
        ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        options = PassOptions(past=[])
        far = self.raw_forward(self._tokens(input_ids), self._ids(ids), 1, options).key_values
        return self.rotated(far) if self.shares_far_keys else far

    def near_logits(
        self,
        far: KeyValues,
        visible: Tensor | list[Tensor],
        input_ids: Tensor,
        logits_to_keep: int,
        first_id: int | None = None,
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), of near tokens (R, L) that follow a far context.

        They see one another, the prefix, and the far tokens that are visible in their row. All far keys stay where they
        are: a window is one of position ids.

        Args:
            far: `far_key_values`.
            visible: (R, F) bool, the same in all layers and heads; or for each layer (R, G, F), G heads of keys, where
                the adapter shares far keys: bool, or float, a presence to which gradients flow back (`FarKeys`).
            input_ids: at ids that follow one another.
            logits_to_keep: Q; at least 1.
            first_id: of the first near token; None: F.
        """
        p = len(self.prefix)
        length = input_ids.shape[1]
        num_far = far[0][0].shape[2]
        near_ids = self._near_ids(far, input_ids, first_id)
        if self.shares_far_keys:
            seen: Tensor | list[Tensor]
            if isinstance(visible, Tensor):
                seen = F.pad(visible, (p, 0), value=True)
            else:
                seen = [F.pad(of_layer, (p, 0), value=True) for of_layer in visible]
            return self.raw_near_logits(FarKeys.of(far, seen, near_ids), input_ids, logits_to_keep)
        assert isinstance(visible, Tensor), "masks by head need shared far keys"
        rows = len(input_ids)
        past = [(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in far]
        mask = F.pad(F.pad(visible.long(), (p, 0), value=1), (0, length), value=1)
        ids = torch.cat([torch.arange(num_far, device=input_ids.device), near_ids]).expand(rows, -1)
        options = PassOptions(attention_mask=mask, past=past)
        return self.raw_forward(input_ids, ids, logits_to_keep, options).logits

    def attention_of_near(
        self,
        far: KeyValues,
        input_ids: Tensor,
        reduce: ReduceAttention,
        first_id: int | None = None,
    ) -> list[Tensor]:
        """What ``reduce`` gives of the attention of all near tokens to the far ones, (R, H, L, F), of each layer.

        The other arguments are those of `near_logits`, of which this is one pass, where far keys are shared.
        """
        assert self.shares_far_keys
        layers: list[Tensor] = []

        def read(weights: Tensor) -> None:
            layers.append(reduce([weights[..., len(self.prefix) :]]))

        keys, _ = far[0]
        visible = torch.ones(len(input_ids), keys.shape[2], dtype=torch.bool, device=input_ids.device)
        seen = FarKeys.of(far, visible, self._near_ids(far, input_ids, first_id))
        self.raw_near_logits(replace(seen, read=read), input_ids, 0)
        return layers

    def _near_ids(self, far: KeyValues, input_ids: Tensor, first_id: int | None) -> Tensor:
        """(L,) ids of near tokens behind a prefix and a far context."""
        num_far = far[0][0].shape[2]
        first = num_far if first_id is None else len(self.prefix) + first_id
        return first + torch.arange(input_ids.shape[1], device=input_ids.device)

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), with ``bias`` (R, L, L) added to every head's attention scores.

        The causal mask is not part of ``bias``; gradients flow back to it. Raises `UserError` where they cannot.
        """
        bias = F.pad(bias, (len(self.prefix), 0, len(self.prefix), 0))
        tokens = self._tokens(input_ids)
        ids = self._ids(position_ids)
        return self.raw_forward(tokens, ids, logits_to_keep, PassOptions(bias=bias)).logits

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """Logits of the last Q positions, (R, Q, V), from what `embed` gives; gradients flow back to it."""
        if self.prefix:
            first = self.embed(torch.tensor(self.prefix, device=embeddings.device))
            embeddings = torch.cat([first.expand(len(embeddings), -1, -1), embeddings], dim=1)
        return self.raw_forward(embeddings, self._ids(position_ids), logits_to_keep).logits

    def attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention = mean_over_heads
    ) -> list[Tensor]:
        """What ``reduce`` gives of the attention of the last Q = ``queries`` positions to every token, of each layer.

        (R, Q, p + L) by default: the prefix is the first of the tokens that ``reduce`` sees.
        """
        return self.raw_attention(self._tokens(input_ids), self._ids(position_ids), queries, reduce)

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention = mean_over_heads
    ) -> Tensor:
        """`attention`, mean over layers, (R, Q, p + L) by default."""
        return torch.stack(self.attention(input_ids, position_ids, queries, reduce)).mean(dim=0)

    def layers(self, input_ids: Tensor, position_ids: Tensor, read: ReadLayer) -> list[Tensor]:
        """What ``read`` gives of queries, keys and values of all tokens (R, p + L), a layer after the other.

        Raises `UserError` for a model whose attention does not say them.
        """
        return self.raw_layers(self._tokens(input_ids), self._ids(position_ids), read)

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """The prefix and the tokens behind it, (R, p + L)."""
        prefix = torch.tensor(self.prefix, dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([prefix.expand(len(input_ids), -1), input_ids], dim=1)

    def _ids(self, position_ids: Tensor) -> Tensor:
        """The ids of the prefix and of the tokens behind it, (R, p + L)."""
        first = torch.arange(len(self.prefix), device=position_ids.device)
        return torch.cat([first.expand(len(position_ids), -1), position_ids + len(self.prefix)], dim=1)


def with_prefix(model: Adapter, prefix: Sequence[int]) -> Adapter:
    """The same model behind these tokens, instead of those before; the weights are shared."""
    behind = copy.copy(model)
    behind.prefix = tuple(prefix)
    return behind


def _behind(first: Tensor, rows: Tensor) -> Tensor:
    """Keys or values of a prefix, (1, H, p, D), and of the tokens of every row behind it, (R, H, P, D)."""
    return torch.cat([first.expand(len(rows), -1, -1, -1), rows], dim=2)


def causal_bias(bias: Tensor) -> Tensor:
    """(L, L) for a bias (…, L): the least number of its type where a query would see a later token, else 0."""
    length = bias.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(diagonal=1)
    return torch.zeros(length, length, device=bias.device).masked_fill(future, torch.finfo(bias.dtype).min)


class TransformersAdapter(Adapter):
    """A causal language model of transformers that rotates by, or looks up, the position ids it is given.

    Its attention must be "eager" or "sdpa": flash attention drops a mask of ones, and with it `raw_forward`'s guard.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        # transformers 5.24 has another name for it, and warns of the old one
        takes_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"
        config = model.config.get_text_config()
        self.vocabulary_size = len(model.get_input_embeddings().weight)
        limit = getattr(config, "max_position_embeddings", None)  # rotary models can be read beyond it
        self.last_position = limit if isinstance(limit, int) else None
        # there may be more than one, or one that is not in the table
        ends = getattr(config, "eos_token_id", None)
        end = ends[0] if isinstance(ends, list) else ends
        self.baseline_token = end if end is not None and end < self.vocabulary_size else 0

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.get_input_embeddings()(input_ids)

    @one_at_a_time
    def raw_forward(
        self, inputs: Tensor, position_ids: Tensor, logits_to_keep: int, options: PassOptions = PLAIN
    ) -> Output:
        """See `Adapter`; transformers caches keys after it rotated them."""
        from transformers import DynamicCache

        attention_mask = options.attention_mask
        arguments = dict(options.further)
        # a copy: XGLM views its tokens, so that they may not be expanded, and CTRL scales embeddings in place
        arguments["input_ids" if inputs.ndim == 2 else "inputs_embeds"] = inputs.clone()
        position_ids = position_ids[:, -inputs.shape[1] :]
        cache = DynamicCache(options.past or None)
        if options.past is not None:
            arguments[self._cache_argument] = cache
        if options.bias is not None:
            attention_mask = (options.bias[:, None] + causal_bias(options.bias)).to(self.model.dtype)
        elif attention_mask is None:
            # Without a mask transformers takes an id jump for the beginning of another packed document, and cuts
            # attention there without a word.
            length = cache.get_seq_length() + position_ids.shape[1]
            attention_mask = position_ids.new_ones(len(position_ids), length)
        output = self.model(
            position_ids=position_ids.contiguous(),
            attention_mask=attention_mask,
            use_cache=options.past is not None,
            logits_to_keep=logits_to_keep,
            **arguments,
        )
        if options.bias is not None and options.bias.requires_grad and not output.logits.requires_grad:
            raise UserError(
                f"the attention of {self.model.config.model_type} takes no bias, so that the selector gradient does "
                "not apply to it; leave it out"
            )
        layers: Any = cache.layers if options.past == [] else []
        key_values = [(layer.keys, layer.values) for layer in layers]
        return Output(output.logits, key_values)

    @one_at_a_time
    def raw_near_logits(self, far: FarKeys, input_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`: one pass over the near tokens alone, whose attention reads the far keys too."""
        ids = far.near_ids.expand(len(input_ids), -1)
        with attending_to(self.model, far):
            return self.raw_forward(input_ids, ids, logits_to_keep).logits

    @one_at_a_time
    def raw_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention
    ) -> list[Tensor]:
        """See `Adapter`."""

        def of_layer(layer: LayerStates) -> Tensor:
            return reduce(layer.attention_slices(queries))

        layers = self._read_layers(input_ids, position_ids, of_layer)
        return layers or self._eager_attention(input_ids, position_ids, queries, reduce)

    def _eager_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention
    ) -> list[Tensor]:
        """`raw_attention` of a model whose layers are not read: its plain ("eager") attention gives its weights."""
        recorded: list[Tensor] = []

        def record(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            """Read the weights that a layer gives, and let transformers keep none of the (R, H, L, L)."""
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[2:] != (length, length):
                return None
            recorded.append(reduce([weights[:, :, -queries:].float()]))
            return output[0], None, *output[2:]

        length = input_ids.shape[1]
        hooks = [part.register_forward_hook(record, prepend=True) for part in self.model.modules()]
        try:
            with attention_of(self.model, "eager"):
                self.raw_forward(input_ids, position_ids, 1, PassOptions(further={"output_attentions": True}))
        finally:
            for hook in hooks:
                hook.remove()
        return recorded

    def raw_layers(self, input_ids: Tensor, position_ids: Tensor, read: ReadLayer) -> list[Tensor]:
        """See `Adapter`; the model must call its attention through the interface of transformers."""
        layers = self._read_layers(input_ids, position_ids, read)
        if not layers:
            raise UserError(
                f"the attention of {self.model.config.model_type} does not hand over its queries and keys, so that "
                "policies cannot read them; leave out all policies but h2o, snapkv, ada-snapkv, tova and kvzip"
            )
        return layers

    def _read_layers(self, input_ids: Tensor, position_ids: Tensor, read: ReadLayer) -> list[Tensor]:
        """See `layers`; empty where the attention is not called through the interface of transformers."""
        if not self.model._can_set_attn_implementation():
            return []
        with reading_layers(self.model, read) as layers:
            self.raw_forward(input_ids, position_ids, 1)
        return layers
