"""The idealised transformer of the theory: one softmax over tuples of k tokens (Golowich et al. 2025, Definition 3.3).

Where a head of a transformer attends to single tokens, this one attends to all tuples S of k tokens that it has read:

    p(next token | x) = sum over S of w_S g(x_S),    w = softmax over S of a(x_S) + b(positions of S)

a and b are any functions, and g gives any distribution, so all three are tables [ours]. What the theory assumes about
positions are options: b may see differences of position ids alone (relativity), and tuples whose ids are far apart may
have no weight (locality). The cost grows with T^k, and the tables with V^k.

Shapes: B batch, P past tokens, T tokens, C = P + T columns, A columns that are the last of a tuple, S tuples of each of
them, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from olmo.model import OLMoOutput
from torch import Tensor, nn

from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.model.linear_loss import IGNORE_INDEX

_TUPLES_AT_ONCE = 1 << 22
_NO_WEIGHT = -1e9  # added to scores; finite, so that a column without any tuple has no NaN
_INIT_STD = 0.02
_SMALLEST = 1e-30  # of a probability, so that its logarithm is finite


class TupleAttention(nn.Module):
    """Attention over tuples with the interface of `PositionedOLMo`, as far as synthetic tasks need it.

    ``logits`` are log probabilities. A column before which there is no tuple has a uniform distribution.
    """

    def __init__(self, config: ModelConfig, num_ids: int):
        """With freshly drawn weights. Ids are distinguished up to ``num_ids`` - 1; larger ones count as that one."""
        super().__init__()
        self.config = config
        options = config.tuples
        vocabulary = config.embedding_rows
        self.size = options.size
        self.locality = options.locality
        self.anchored = options.anchored
        self.vocabulary = vocabulary
        self.num_ids = num_ids
        self.farthest = num_ids - 1 if options.locality is None else options.locality
        gaps = (2 * self.farthest + 1) ** (self.size - 1)
        self.relative = options.relative
        self.content = nn.Embedding(vocabulary**self.size, 1)
        self.positions = nn.Embedding(gaps * (1 if options.relative else num_ids), 1)
        self.values = nn.Embedding(vocabulary**self.size, vocabulary)
        for table in (self.content, self.positions, self.values):
            nn.init.normal_(table.weight, std=_INIT_STD)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        labels: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """``logits`` (B, T, V), or of the last ``logits_to_keep`` columns; with ``labels`` the sum of their losses.

        ``input_ids``: (B, T). ``position_ids``: (B, C) integers; None means 0 … C-1. ``attention_mask``: (B, C), 0 at
        padding. The cache is simply the past tokens, (B, P): scores of tuples cannot be reused.
        """
        tokens = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], dim=1)
        ids = torch.arange(tokens.shape[1], device=tokens.device) if position_ids is None else position_ids
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask
        if labels is not None:
            real = real * _up_to_last_label(labels)  # what follows it, padding, changes nothing
        # In float32 whatever the precision of training: near 1 a probability has few digits in bf16.
        with torch.autocast(tokens.device.type, enabled=False):
            p = self._mixture(tokens, ids.expand_as(tokens), real.bool(), input_ids.shape[1])
            logits = p.clamp_min(_SMALLEST).log()
        if labels is not None:
            loss = F.nll_loss(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            return {"loss_nats": loss}
        last_logits: Any = logits[:, -logits_to_keep:]  # -0: all
        cache: Any = tokens if use_cache else None
        return OLMoOutput(logits=last_logits, attn_key_values=cache, hidden_states=None)

    def _mixture(self, tokens: Tensor, ids: Tensor, real: Tensor, length: int) -> Tensor:
        """p of the next token, (B, T, V), for the last T = ``length`` of the C columns."""
        columns = tokens.shape[1]
        first = columns - length if self.anchored else 0  # else a tuple may end anywhere
        is_local = self.locality is not None and _grow(ids, real)
        members = self._members(columns, tokens.device, is_local)
        probabilities = self.values.weight.float().softmax(dim=-1)
        step = max(1, _TUPLES_AT_ONCE // (len(tokens) * members.shape[1]))
        outputs = []
        totals = []
        for start in range(first, columns, step):
            last = torch.arange(start, min(start + step, columns), device=tokens.device)
            output, total = self._of_tuples(tokens, ids, real, last, members, is_local, probabilities)
            outputs.append(output)
            totals.append(total)
        output = torch.cat(outputs, dim=1)
        total = torch.cat(totals, dim=1)
        has_tuple = total > _NO_WEIGHT / 2
        if not self.anchored:
            later = torch.ones(columns, columns, dtype=torch.bool, device=tokens.device).triu(1)
            weights = (
                total[:, None].expand(-1, columns, -1).masked_fill(later, 2 * _NO_WEIGHT).softmax(dim=-1)
            )
            output, has_tuple = weights @ output, has_tuple.cummax(dim=1).values
        return torch.where(has_tuple[..., None], output, 1 / self.vocabulary)[:, -length:]

    def _members(self, columns: int, device: torch.device, is_local: bool) -> Tensor:
        """The other columns of the tuples, (k - 1, S) ascending; with ``is_local`` their distances to the last column.

        Ids that grow with every token leave no tuple within `locality` that has more columns than ids between.
        """
        if self.size == 1:
            return torch.empty(0, 1, dtype=torch.int64, device=device)  # one tuple: the last column alone
        # At least one tuple, which does not count where there are too few columns for it.
        count = max(min(columns - 1, self.farthest) if is_local else columns, self.size - 1)
        others = torch.combinations(torch.arange(count, device=device), self.size - 1).T
        return count - others if is_local else others  # distances, the farthest first

    def _of_tuples(
        self,
        tokens: Tensor,
        ids: Tensor,
        real: Tensor,
        last: Tensor,
        members: Tensor,
        is_local: bool,
        probabilities: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the tuples that end in the columns ``last`` (A,) predict, (B, A, V), and log Σ exp of scores, (B, A).

        ``members``, ``is_local``: see `_members`. ``probabilities``: g, (V^k, V).
        """
        code = tokens[:, last, None] * self.vocabulary ** (self.size - 1)
        gap_code = torch.zeros_like(ids[:, last, None])
        is_tuple = real[:, last, None]
        lowest = highest = torch.zeros_like(gap_code)
        for index, member in enumerate(members):
            columns = last[:, None] - member if is_local else member.expand(len(last), -1)
            is_tuple = is_tuple & (columns >= 0) & (columns < last[:, None])
            columns = columns.clamp(0, tokens.shape[1] - 1)
            is_tuple = is_tuple & real[:, columns]
            gap = ids[:, last, None] - ids[:, columns]
            lowest, highest = torch.minimum(lowest, gap), torch.maximum(highest, gap)
            code = code + tokens[:, columns] * self.vocabulary**index
            gap_index = (gap + self.farthest).clamp(0, 2 * self.farthest)
            gap_code = gap_code * (2 * self.farthest + 1) + gap_index
        if self.locality is not None:
            is_tuple = is_tuple & (highest - lowest <= self.locality)
        if not self.relative:
            gap_code = gap_code * self.num_ids + ids[:, last, None].clamp_max(self.num_ids - 1)
        scores = self.content(code)[..., 0].float() + self.positions(gap_code)[..., 0].float()
        scores = scores.masked_fill(~is_tuple, _NO_WEIGHT)
        weights = scores.softmax(dim=-1)
        summed = F.embedding_bag(
            code.flatten(0, 1), probabilities, per_sample_weights=weights.flatten(0, 1), mode="sum"
        )
        return summed.view(*weights.shape[:2], -1), scores.logsumexp(dim=-1)


def _up_to_last_label(labels: Tensor) -> Tensor:
    """(B, T) 1 up to the last column that has a label, 0 after it."""
    return (labels != IGNORE_INDEX).int().flip(1).cummax(dim=1).values.flip(1)


def _grow(ids: Tensor, real: Tensor) -> bool:
    """Whether ids grow with every token, and all padding comes after the tokens."""
    is_last = real.int().cummin(dim=1).values.bool().eq(real).all()
    return bool(is_last & ((ids.diff(dim=1) > 0) | ~real[:, 1:]).all())
