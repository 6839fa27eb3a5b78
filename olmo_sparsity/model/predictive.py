"""Predictive Position Coupling: a decoder that reads coupled position ids, and predicts the id of its next token.

Golowich et al. 2025 (arXiv 2502.16792) train a model on the coupled ids of prompt and response to predict each response
token *and its id*; at test only the prompt's ids are given, token and id are both decoded and both fed back. That the
ids enter through a learned embedding, and what RoPE sees, are our own choices [ours] (docs/method.md 3.5).

Shapes: B batch, T tokens, P past tokens in a key-value cache, S response tokens, D width, V vocabulary (logits),
I ids in the table, and J in a second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.config.schema import PositionsConfig
from olmo_sparsity.model.linear_loss import IGNORE_INDEX, Head, linear_cross_entropy, losses
from olmo_sparsity.model.olmo import PositionedOLMo

ERROR_KINDS = ("token", "id", "stop")
_EMBEDDING_STD = 0.02  # that of GPT-NeoX's own embedding


class PredictorOutput(NamedTuple):
    """The result of a forward pass."""

    logits: Tensor
    """(B, T, V), of the next token; of the last positions only with ``logits_to_keep``."""
    id_logits: Tensor | None
    """(B, T, I), or (B, T, I J) for two levels, of the next token's id, likewise; None without an id head."""
    attn_key_values: Any
    """The decoder's own cache, with ``use_cache``."""


class PositionPredictor(nn.Module):
    """A decoder with an embedding of the ids added to that of the tokens, and an id head on its final hidden state.

    Called as the decoder alone is called, so that the training loop need not distinguish them. With position coupling
    of two levels (multi-level, arXiv 2410.15787) an id is i + I j, with i of the first level and j of the second. Each
    level has a table and a head: embeddings are added (as there), logits and cross-entropies too [ours].
    """

    def __init__(self, decoder: Any, options: PositionsConfig, *, seed: int):
        """Embedding and head have new random weights, the same for a seed on every machine.

        ``decoder``: `PositionedOLMo`, `PositionedNeoX`, or, for schemes without coupling, any that is called as they
        are. ``options``: its scheme matters only for whether ids are coupled.
        """
        super().__init__()
        self.decoder = decoder
        width = decoder.config.d_model
        self.options = options
        self.id_embedding: nn.Embedding | None = None
        self.id_head: nn.Linear | None = None
        self.second_embedding: nn.Embedding | None = None
        self.second_head: nn.Linear | None = None
        first = options.table_size or 0
        second = options.second_table_size or 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if options.is_coupled:
                self.id_embedding = _table(first, width)
            if options.predicts_ids:
                self.id_head = _head(width, first)
            if options.is_coupled and second:
                self.second_embedding = _table(second, width)
            if options.predicts_ids and second:
                self.second_head = _head(width, second)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        labels: Tensor | None = None,
        id_labels: Tensor | None = None,
        z_weight: float = 0.0,
    ) -> Any:
        """Logits of the next token and of its id, a `PredictorOutput`.

        ``input_ids``: (B, T). ``position_ids``: (B, P + T), those of cached tokens included, below the table's size.
        ``attention_mask``: (B, P + T), 0 at padding, on whichever side; None where there is none, and for padding on
        the right without a cache, which no token before it sees. With ``labels`` (B, T), and ``id_labels`` where there
        is an id head, the sums of their cross-entropies instead; labels of -100 do not count (`_loss_sums`).
        """
        inputs: dict[str, Any] = {
            "position_ids": self._rotary_ids(position_ids, attention_mask),
            **self._embeddings(input_ids, position_ids[:, -input_ids.shape[1] :]),
            **self._mask_options(attention_mask, input_ids.shape[1]),
        }
        if labels is not None:
            hidden = self.decoder.final_hidden(input_ids, **inputs)
            return self._loss_sums(hidden, labels, id_labels, z_weight)
        output = self.decoder(
            input_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_hidden_states=self.id_head is not None,
            **inputs,
        )
        id_logits = None if self.id_head is None else self._id_logits(output.hidden_states[-1])
        return PredictorOutput(output.logits, id_logits, output.attn_key_values)

    def _loss_sums(
        self, hidden: Tensor, labels: Tensor, id_labels: Tensor | None, z_weight: float
    ) -> dict[str, Tensor]:
        """As `losses`; with an id head ``loss_nats`` is token_loss_nats + id_weight · id_loss_nats (paper)."""
        if self.id_head is None:
            return losses(hidden, self.decoder.head(), labels, z_weight)
        assert id_labels is not None and not z_weight, "the config was checked"
        tokens, _ = linear_cross_entropy(hidden, self.decoder.head(), labels)
        first, second = self._split_levels(id_labels)
        ids, _ = linear_cross_entropy(hidden, Head(self.id_head.weight, self.id_head.bias), first)
        if self.second_head is not None:
            head = Head(self.second_head.weight, self.second_head.bias)
            ids = ids + linear_cross_entropy(hidden, head, second)[0]
        loss = tokens + self.options.id_weight * ids
        return {"loss_nats": loss, "token_loss_nats": tokens, "id_loss_nats": ids}

    def _split_levels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """i and j of ids, each of the same shape; j is 0 where there is one level, and `IGNORE_INDEX` stays so."""
        if self.second_embedding is None:
            return ids, torch.zeros_like(ids)
        known = ids != IGNORE_INDEX
        size = self.options.table_size or 0
        return torch.where(known, ids % size, ids), torch.where(known, ids // size, ids)

    def _embeddings(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        """In place of the decoder's own embeddings, with those of the ids where there are any."""
        if self.id_embedding is None:
            return {}
        first, second = self._split_levels(position_ids)
        embeddings = self.decoder.embed(input_ids) + self.id_embedding(first)
        if self.second_embedding is not None:
            embeddings = embeddings + self.second_embedding(second)
        return {"input_embeddings": embeddings}

    def _id_logits(self, hidden: Tensor) -> Tensor:
        """(…, I), or (…, I J), from (…, D)."""
        assert self.id_head is not None
        first = self.id_head(hidden)
        if self.second_head is None:
            return first
        return (self.second_head(hidden)[..., :, None] + first[..., None, :]).flatten(-2)

    def _rotary_ids(self, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """What RoPE sees of (B, P + T) ids, of the same shape."""
        if self.options.rotate == "ids":
            return position_ids
        if self.options.rotate == "none":
            return torch.zeros_like(position_ids)
        real = torch.ones_like(position_ids) if attention_mask is None else attention_mask.long()
        return (real.cumsum(dim=1) - 1).clamp_min(0)

    def _mask_options(self, attention_mask: Tensor | None, length: int) -> dict[str, Tensor]:
        """The mask as an argument of the decoder."""
        if attention_mask is None:
            return {}
        if length > 1 or not isinstance(self.decoder, PositionedOLMo) or self.decoder.config.alibi:
            return {"attention_mask": attention_mask}
        # For a single query OLMo reads one row of a square bias, yet makes the square from the mask at every step. A
        # view that repeats the row costs nothing; a single query comes after all keys, so it is causal too.
        bias = torch.zeros(attention_mask.shape, device=attention_mask.device)
        bias = bias.masked_fill(attention_mask == 0, torch.finfo(bias.dtype).min)
        return {"attention_bias": bias[:, None, None].expand(-1, -1, bias.shape[1], -1)}


def _table(size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(size, width)
    nn.init.normal_(table.weight, std=_EMBEDDING_STD)
    return table


def _head(width: int, size: int) -> nn.Linear:
    head = nn.Linear(width, size)
    nn.init.normal_(head.weight, std=_EMBEDDING_STD)
    nn.init.zeros_(head.bias)
    return head


@dataclass(frozen=True)
class Decoded:
    """Responses, decoded greedily."""

    tokens: Tensor
    """(B, S) int64; after a response's end the end token is repeated."""
    ids: Tensor
    """(B, S) int64, the id that was predicted for, or given to, each token; 0 after a response's end."""
    lengths: Tensor
    """(B,) int64, tokens of each response, the end token included."""


@torch.no_grad()
def decode(
    model: PositionPredictor,
    prompt_tokens: Tensor,
    prompt_ids: Tensor,
    *,
    end_token: int,
    max_tokens: int,
    prompt_lengths: Tensor | None = None,
    response_ids: Tensor | None = None,
) -> Decoded:
    """Decode token and id greedily, feeding both back, until the end token or ``max_tokens``.

    ``prompt_tokens``, ``prompt_ids``: (B, P) integers, of which the first ``prompt_lengths`` (B,) count; None: all. A
    row decodes as it would alone. ``response_ids``: (B, at least max_tokens), the ids of an oracle, which are then fed
    back instead of predicted ones. Without either, ids go on from the prompt's last id by steps of one. The model must
    be in evaluation mode, and its tables have all ids.
    """
    assert not model.training, "decoding with dropout is no greedy decoding; call .eval() first"
    assert max_tokens >= 1 and (response_ids is None or response_ids.shape[1] >= max_tokens)
    assert model.options.scheme != "coupled" or response_ids is not None, "coupled reads given ids"
    tokens = prompt_tokens
    ids = prompt_ids
    mask = torch.ones_like(prompt_tokens)
    if prompt_lengths is not None:
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < prompt_lengths[:, None]).long()
    last = mask.sum(dim=1, keepdim=True) - 1
    assert bool((last >= 0).all()), "a prompt without tokens"
    if response_ids is None and not model.options.predicts_ids:
        response_ids = ids.gather(1, last) + torch.arange(1, max_tokens + 1, device=ids.device)
    output = model(tokens, ids, use_cache=True)  # padding comes after every token, so nothing sees it
    stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    while True:
        oracle_ids = None if response_ids is None else response_ids[:, len(steps)]
        token, id_ = _greedy(output, last, oracle_ids)
        token, id_ = token.masked_fill(stopped, end_token), id_.masked_fill(stopped, 0)
        steps.append((token, id_, ~stopped))
        stopped = stopped | (token == end_token)
        if len(steps) == max_tokens or bool(stopped.all()):
            break
        ids = torch.cat([ids, id_[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        past = output.attn_key_values
        output = model(token[:, None], ids, attention_mask=mask, past_key_values=past, use_cache=True)
        last = torch.zeros_like(last)  # the only column there is
    all_tokens, all_ids, running = (torch.stack(columns, dim=1) for columns in zip(*steps, strict=True))
    return Decoded(all_tokens, all_ids, running.sum(dim=1))


def _greedy(output: PredictorOutput, column: Tensor, oracle_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The likeliest next token and id, or the oracle's id, each (B,), after the token in ``column`` (B, 1)."""
    rows = torch.arange(len(column), device=column.device)
    token = output.logits[rows, column[:, 0]].argmax(dim=-1)
    if oracle_ids is not None:
        return token, oracle_ids
    assert output.id_logits is not None
    return token, output.id_logits[rows, column[:, 0]].argmax(dim=-1)


def compare(
    decoded: Decoded,
    true_tokens: Tensor,
    true_lengths: Tensor,
    *,
    end_token: int,
    true_ids: Tensor | None = None,
) -> list[str | None]:
    """The kind of each response's first error, (B,) of `ERROR_KINDS`; None where the response is exactly right.

    ``true_tokens``: (B, S') integers, of which ``true_lengths`` (B,) count, the end token included. ``true_ids``:
    (B, S'); None where ids are no part of the answer. A response is wrong from its first step that differs [ours]:
    "stop" where one of the two has ended or ends there and the other does not, else "token" where the tokens differ,
    else "id". A wrong id is an error whatever tokens follow (paper), that of the end token too [ours].
    """
    width = max(decoded.tokens.shape[1], true_tokens.shape[1])
    tokens = _widened(decoded.tokens, width)
    truth = _widened(true_tokens, width)
    step = torch.arange(width, device=tokens.device)
    in_decoded = step < decoded.lengths[:, None]
    in_truth = step < true_lengths[:, None]
    in_both = in_decoded & in_truth
    wrong_stop = (in_decoded != in_truth) | (in_both & ((tokens == end_token) != (truth == end_token)))
    wrong_token = in_both & (tokens != truth)
    wrong_id = torch.zeros_like(wrong_token)
    if true_ids is not None:
        wrong_id = in_both & (_widened(decoded.ids, width) != _widened(true_ids, width))
    wrong = wrong_stop | wrong_token | wrong_id
    kind = torch.where(wrong_stop, 2, torch.where(wrong_token, 0, 1))
    of_first = kind.gather(1, wrong.long().argmax(dim=1, keepdim=True))[:, 0]
    return [
        ERROR_KINDS[code] if is_wrong else None
        for is_wrong, code in zip(wrong.any(dim=1).tolist(), of_first.tolist(), strict=True)
    ]


def _widened(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[1]))
