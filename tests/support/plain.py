"""Losses again by one plain pass each, and contexts of random tokens to compute them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import rel_entr

from analysis.contexts import Contexts
from analysis.model.adapter import Adapter, TransformersAdapter
from olmo_sparsity.model.rope import alibi_causal_bias


@torch.no_grad()
def plain_log_p(model, text: Sequence[int], kept: Sequence[int]) -> np.ndarray:
    """log p of every token after the tokens text[j] of all j in ``kept``, each with position id j: one forward pass."""
    ids = torch.tensor([[int(text[j]) for j in kept]])
    logits = model(ids, position_ids=torch.tensor([list(kept)]), attention_mask=torch.ones_like(ids)).logits
    return logits[0, -1].double().log_softmax(-1).numpy()


def encode(text: str) -> np.ndarray:
    """Token ids in the place of a tokenizer's, for policies that read a prompt."""
    return np.array([1 + byte % 8 for byte in text.encode()[:5]])


def single_target(contexts: Contexts, block: int, place: int) -> Contexts:
    """One target of a block as a block of its own, with the same far context and the longer short one."""
    rows, places = slice(block, block + 1), slice(place, place + 1)
    return Contexts(
        contexts.tokens[rows, : contexts.n_long + place],
        contexts.targets[rows, places],
        contexts.target_id[rows, places],
        contexts.n_short + place,
    )


def plain_loss(model, text: Sequence[int], kept: Sequence[int], token: int) -> float:
    """-log p of ``token``, see `plain_log_p`."""
    return -plain_log_p(model, text, kept)[int(token)]


def selected_losses(scorer, contexts: Contexts, targets, selected, ks) -> np.ndarray:
    """loss(t | C_short and the first k of the columns ``selected``), (m, K) nats; ``targets`` (m, 2)."""
    losses = [scorer.losses(contexts, np.sort(selected[:, :k], axis=1)[:, None], targets) for k in ks]
    return np.concatenate(losses, axis=1)


def plain_divergence(kind: str, log_p: np.ndarray, log_q: np.ndarray) -> float:
    """KL(p || q) by SciPy, or the most by which an event is likelier under p than under q: total variation."""
    p, q = np.exp(log_p), np.exp(log_q)
    return float(rel_entr(p, q).sum() if kind == "kl" else (p - q)[p > q].sum())


@torch.no_grad()
def whole_pass(adapter: Adapter, tokens: np.ndarray, n_far: int, kept: Sequence[int]) -> np.ndarray:
    """log p after every near token, (L, V), from one pass over prefix, far and near tokens (F + L,).

    Far queries see everything before them; near ones see the prefix, the far columns ``kept``, and one another. A
    layer with a window sees keys whose ids are less than that before the query's.
    """
    p = len(adapter.prefix)
    ids = torch.tensor([[*adapter.prefix, *tokens.tolist()]])
    index = torch.arange(ids.shape[1])
    distance = index[:, None] - index
    seen = distance >= 0
    dropped = np.setdiff1d(np.arange(n_far), kept)
    seen[p + n_far :, p + dropped] = False

    def bias(seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    if isinstance(adapter, TransformersAdapter):
        config = adapter.model.config.get_text_config()
        window = getattr(config, "sliding_window", None) or len(index)
        chunk = getattr(config, "attention_chunk_size", None) or len(index)
        masks = {
            "full_attention": bias(seen),
            "sliding_attention": bias(seen & (distance < window)),
            "chunked_attention": bias(seen & (index[:, None] // chunk == index // chunk)),
        }
        of_layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
        mask = masks if len(of_layers) > 1 else masks[of_layers.pop()]
        logits = adapter.model(ids, position_ids=index[None], attention_mask=mask, use_cache=False).logits
    else:
        mask = bias(seen)
        if adapter.model.config.alibi:
            mask = torch.minimum(mask, alibi_causal_bias(adapter.model.config, index[None]))
        logits = adapter.model(ids, position_ids=index[None], attention_bias=mask).logits
    return logits[0, p + n_far :].double().log_softmax(-1).numpy()


@torch.no_grad()
def whole_pass_by_head(
    model: Any, tokens: np.ndarray, n_far: int, kept: Sequence[np.ndarray] | np.ndarray
) -> np.ndarray:
    """log p after the last of far and near tokens (F + L,), (V,), by one pass of a model of transformers.

    Near queries see other far columns ``kept`` in every head of keys, G times (j,), layer after layer; in a layer with
    a window only those within it.
    """
    index = torch.arange(len(tokens))
    distance = index[:, None] - index
    layers = model.model.layers
    kinds = getattr(model.config, "layer_types", None) or len(layers) * ["full_attention"]
    heads = iter(kept)
    hooks = []
    for layer, kind in zip(layers, kinds, strict=True):
        attention = layer.self_attn
        num_queries = attention.q_proj.out_features // attention.head_dim
        num_keys = attention.k_proj.out_features // attention.head_dim
        seen = (distance >= 0).repeat(num_keys, 1, 1)
        if kind == "sliding_attention":
            seen &= distance < model.config.sliding_window
        for of_head in seen:
            dropped = np.setdiff1d(np.arange(n_far), next(heads))
            of_head[n_far:, dropped] = False
        seen = seen.repeat_interleave(num_queries // num_keys, dim=0)
        mask = torch.zeros(1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        hooks.append(attention.register_forward_pre_hook(partial(_with_mask, mask), with_kwargs=True))
    logits = model(torch.from_numpy(tokens)[None]).logits
    for hook in hooks:
        hook.remove()
    return logits[0, -1].double().log_softmax(-1).numpy()


def block_pass_by_head(
    adapter: TransformersAdapter, contexts: Contexts, place: int, kept: np.ndarray, first_query: int
) -> np.ndarray:
    """log p of one target of the first block, (V,), by `whole_pass_by_head` over its prefix and tokens.

    Queries from the column ``first_query`` on see the prefix, the far columns that their head keeps, (G, F) bool, and
    all behind the far context.
    """
    p = len(adapter.prefix)
    n_far = kept.shape[1]
    always = [*range(p), *range(p + n_far, p + first_query)]
    columns = [np.array([*always, *(p + np.flatnonzero(of_head))]) for of_head in kept]
    tokens = np.array([*adapter.prefix, *contexts.tokens[0, : contexts.n_long + place]])
    return whole_pass_by_head(adapter.model, tokens, p + first_query, columns)


def _with_mask(mask: torch.Tensor, _module: Any, positional: Any, named: Any) -> Any:
    """What a layer's attention is called with, with this mask (1, H, L, L) in place of another."""
    return positional, {**named, "attention_mask": mask}


def random_contexts(
    n_long: int, n_short: int, count: int = 3, seed: int = 0, vocabulary: int = 50
) -> Contexts:
    """Contexts of random tokens, each with one target."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, vocabulary, (count, n_long))
    targets = generator.integers(1, vocabulary, (count, 1))
    return Contexts(tokens, targets, 10 * np.arange(count)[:, None], n_short)


def random_blocks(n_long: int, n_short: int, size: int, count: int = 2, vocabulary: int = 50) -> Contexts:
    """The same with ``size`` targets in a block."""
    text = np.random.default_rng(0).integers(1, vocabulary, (count, n_long + size))
    target_id = np.arange(count * size).reshape(count, size)
    return Contexts(text[:, :-1], text[:, n_long:], target_id, n_short)


def plain_greedy(
    value: Callable[[Sequence[int]], float], candidates: Sequence[int], sinks: Sequence[int], count: int
) -> tuple[list[int], list[float]]:
    """Tokens chosen one by one, each the one that lowers ``value`` of all that are kept most, and by how much."""
    chosen: list[int] = []
    gains = []
    for _ in range(count):
        after = {i: value([*sinks, *chosen, i]) for i in candidates if i not in chosen}
        best = min(after, key=after.__getitem__)
        gains.append(value([*sinks, *chosen]) - after[best])
        chosen.append(best)
    return chosen, gains


def plain_halving(
    value: Callable[[Sequence[int]], float],
    candidates: Sequence[int],
    sinks: Sequence[int],
    others: Sequence[int] = (),
) -> list[tuple[int, float]]:
    """Tokens from the last survivor down, with the influence on ``value`` that each had when it was dropped.

    ``others``: what is kept beside the candidates in the first round.
    """
    order: list[tuple[int, float]] = []
    left = list(candidates)
    beside = [*sinks, *others]
    while left:
        whole = value([*beside, *left])
        influence = {i: value([*beside, *(j for j in left if j != i)]) - whole for i in left}
        ranked = sorted(left, key=lambda i: -influence[i])
        half = len(ranked) // 2
        order = [(i, influence[i]) for i in ranked[half:]] + order
        left = sorted(ranked[:half])
        beside = list(sinks)
    return order


def plain_spans(
    value: Callable[[Sequence[int]], float],
    candidates: Sequence[int],
    sinks: Sequence[int],
    count: int,
    *,
    width: int,
    split: int,
    shortest: int,
) -> dict[int, float]:
    """What ``value`` rises by without the shortest span that each token is in, or the larger number of two, by token.

    From coarse to fine: of the spans of every width, those without which it rises most, of ``2 * count`` tokens and at
    least two, are cut into ``split`` parts.
    """
    number = len(candidates)
    whole = value([*sinks, *candidates])
    starts = [min(start, number - width) for start in range(0, number, width)]
    while True:
        influence = {}
        for start in starts:
            left = [*candidates[:start], *candidates[start + width :]]
            influence[start] = value([*sinks, *left]) - whole
        if width <= shortest:
            break
        ranked = sorted(starts, key=lambda start: -influence[start])[: max(2, -(-2 * count // width))]
        width //= split
        starts = [start + part * width for start in ranked for part in range(split)]
    of_tokens: dict[int, float] = {}
    for start in starts:
        for i in candidates[start : start + width]:
            of_tokens[i] = max(of_tokens.get(i, -np.inf), influence[start])
    return of_tokens
