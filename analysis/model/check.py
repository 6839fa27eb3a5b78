"""Whether a model can be measured on contexts of N tokens, by what its configuration says and by a trial.

Shapes: N tokens of long context, B targets of a block, V vocabulary (logits).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from analysis.model.adapter import Adapter, TransformersAdapter, with_prefix
from analysis.model.on_device import is_out_of_memory
from olmo_sparsity.util.errors import UserError, first_line

log = logging.getLogger(__name__)

_RELATIVE_TOLERANCE = 1e-3
_NEAR_TOKENS = 8
"""Tokens behind those that the trial leaves out of the cache."""


def check_long_context(
    model: Adapter,
    n_long: int,
    targets_per_block: int = 1,
    *,
    name: str,
    reach: int | None = None,
    length_name: str = "N",
    gap: int = 0,
    drops_tokens: bool = True,
    in_cache: bool = False,
    may_keep_in_cache: bool = False,
    by_head: Collection[str] | None = None,
    changes_embeddings: bool = False,
) -> None:
    """Raise `UserError` where a model cannot be measured on N tokens of long context, in blocks of B targets.

    Its learned positions or a window may not reach so far, or in long texts its positions be others from the first
    token on, so that what is behind a token changes how it reads; or its position ids may have no effect, it may read
    ahead, or dropping tokens may not equal hiding them (a recurrent layer), as a trial on random tokens shows. Beyond
    what it was trained to reach it is measured, with a warning.

    Where far keys are left out of the cache the trial also says whether rows may share them
    (`Adapter.shares_far_keys`), or each reads a copy.

    Args:
        model: in evaluation mode, on any device.
        n_long: N.
        targets_per_block: B; the last target of a block has B - 1 tokens more.
        name: what messages call the model.
        reach: how many position ids it was trained on, or its configuration names; None: not known.
        length_name: what messages call ``n_long``, which may be of another context than the long one.
        gap: position ids between tokens that none has. A window of transformers counts tokens, not ids, so that it must
            reach beyond both.
        drops_tokens: whether subsequences are read. A window counts the tokens it is given, so that in these it is
            another one; where nothing is dropped it may end within the context.
        in_cache: whether far keys and values are left out.
        may_keep_in_cache: whether messages may name this as the remedy.
        by_head: the selectors that rank tokens, and maybe keep them, by each head of keys, which messages want left
            out; where none are named, as all would have to be, another model. None: nothing ranks so.
        changes_embeddings: whether logits are read of embeddings that are none of the table's.
    """
    more = targets_per_block - 1 + len(model.prefix)
    tried = with_prefix(model, ())
    drops_tokens = drops_tokens or gap > 0
    _check_limits(tried, n_long, more, gap, name, length_name, drops_tokens, may_keep_in_cache)
    _warn_of_length(n_long + more + gap, reach, name, length_name)
    if not isinstance(tried, TransformersAdapter):
        return  # this project's own models are shown to be right by its tests
    length = n_long + more  # of tokens: a wide gap takes no memory
    with _trial(tried, name):
        _try_positions(tried, length, name, drops_tokens)
        if changes_embeddings:
            _try_embeddings(tried, name)
        if in_cache:
            model.shares_far_keys = _try_cache(tried, length, name)
        if by_head is not None:
            gathers = in_cache and not model.shares_far_keys
            _try_heads(tried, length, name, by_head, gathers)


def _check_limits(
    model: Adapter,
    n_long: int,
    more: int,
    gap: int,
    name: str,
    length_name: str,
    drops_tokens: bool,
    may_keep_in_cache: bool,
) -> None:
    """Raise `UserError` where N tokens, those of block and prefix, and a gap are beyond the first of `limits`."""
    limit, what = min(limits(model, drops_tokens), default=(None, ""))
    if limit is None or n_long + more + gap <= limit:
        return
    further = f"{more:,} more tokens of block and prefix"
    remedy = f"lower {length_name} or B"
    if gap:
        further += f" and a gap of {gap:,}"
        remedy = f"lower {length_name}, B or the gap"
    elif may_keep_in_cache and what.endswith("sliding window"):
        remedy += ", or rank and keep in the cache: leave-one-out-kl/cache:4, kept as cache:4"
    raise UserError(
        f"{length_name} = {n_long:,} with {further} is beyond the {limit:,} {what} of {name}; {remedy}"
    )


def _warn_of_length(ids: int, reach: int | None, name: str, length_name: str) -> None:
    """Say where contexts have more position ids than a model was trained on, or its configuration names."""
    if reach is not None and ids > reach:
        log.warning(
            "the last target of a block has %s position ids before it, and %s is made for %s: what it loses may be "
            "the length; lower %s or B where that is not meant",
            f"{ids:,}",
            name,
            f"{reach:,}",
            length_name,
        )


@contextmanager
def _trial(model: nn.Module, name: str) -> Iterator[None]:
    """While it runs, weights are in fp32; where memory does not suffice it ends, and the model is taken to be right."""
    try:
        with _in_fp32(model):
            yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        log.warning("no memory to try %s in fp32: it is taken to be right", name)


def limits(model: Adapter, drops_tokens: bool) -> Iterator[tuple[int, str]]:
    """The most tokens of one text that a model can be measured on, for each thing that ends there."""
    config = _text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    positions = learned_positions(model)
    if positions is not None:
        yield positions, "positions"
    layers = getattr(config, "layer_types", None) or ["sliding", "chunked"]
    for kind, field in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
        window = getattr(config, field, None)  # a query's own token is one of them
        # of chunks transformers counts from the first column that is not hidden: in the cache they would move as well
        moves = drops_tokens or kind == "chunked"
        if moves and window and any(kind in layer for layer in layers):
            yield window, f"tokens of a {kind} window"
    # one set of parameters, or one for each kind of layer
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        limit = parameters.get("original_max_position_embeddings") or model.max_positions
        if (scheme := parameters.get("rope_type")) in ("longrope", "dynamic") and limit:
            yield limit, f"tokens after which {scheme} changes all positions"


def learned_positions(model: Adapter) -> int | None:
    """How many positions a model has learned; None of one that rotates, which can be read beyond its length."""
    if getattr(_text_config(model), "rope_parameters", None):
        return None
    return model.max_positions


def _text_config(model: Adapter) -> Any:
    """The configuration of a language model of transformers; None of another model."""
    return model.model.config.get_text_config() if isinstance(model, TransformersAdapter) else None


@torch.inference_mode()
def _try_positions(model: TransformersAdapter, n_long: int, name: str, drops_tokens: bool) -> None:
    """Drop every second of N random tokens, and hide the same ones: the logits must be equal, and depend on the ids.

    They must also be those behind a prefix that was read alone. Equal they need not be where none is to be dropped.
    """
    tokens = _random_tokens(model, n_long)
    ids = torch.arange(n_long, device=tokens.device)[None]
    kept = ids[0] % 2 == (n_long - 1) % 2  # the last token is one of them
    kept[0] = True  # the first that a window ends before
    kept_tokens = tokens[:, kept]
    kept_ids = ids[:, kept]
    count = kept_tokens.shape[1]

    def last_logits(tokens: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return model(tokens, ids, logits_to_keep=1, attention_mask=mask).logits[:, -1]

    try:
        dropped = last_logits(kept_tokens, kept_ids)
        moved = last_logits(kept_tokens, ids[:, :count])
        hidden = last_logits(tokens, ids, kept[None].long())
        behind = dropped
        if half := count // 2:
            past = model.key_values(kept_tokens[:, :half], kept_ids[:, :half])
            behind = model.logits_after(past, kept_tokens[:, half:], kept_ids, 1)[:, -1]
    except Exception as error:  # a cache of its own kind, an option that must be set
        if is_out_of_memory(error):
            raise
        raise UserError(f"{name} cannot read random tokens behind a prefix ({first_line(error)})") from error
    tolerance = _RELATIVE_TOLERANCE * float(hidden.std())
    wrong = ""
    if (dropped - behind).abs().max() > tolerance:
        wrong = (
            "gives other logits after a cached prefix than without a cache: it looks ahead, as BERT does, or "
            "caches no keys"
        )
    elif n_long > 2 and torch.equal(dropped, moved):
        wrong = (
            "does not read its position ids: ALiBi, or no positions at all, so that no token can be dropped"
        )
    elif drops_tokens and (dropped - hidden).abs().max() > tolerance:
        wrong = f"is another with tokens dropped from N = {n_long:,} than with them hidden: a window, or a recurrence"
    if wrong:
        raise UserError(f"{name} {wrong}; lower N, or give another model")


@torch.inference_mode()
def _try_embeddings(model: TransformersAdapter, name: str) -> None:
    """Read a token's embedding in the place of the token, and one between two embeddings."""
    tokens = _random_tokens(model, 2)
    ids = torch.arange(2, device=tokens.device)[None]
    embeddings = model.embed(tokens)
    expected = model(tokens, ids, logits_to_keep=1).logits
    try:
        wrong = (model.embedded_logits(embeddings, ids, 1) - expected).abs().max()
        model.embedded_logits(embeddings / 2, ids, 1)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        wrong = torch.tensor(torch.inf)
    if wrong > _RELATIVE_TOLERANCE * float(expected.std()):
        raise UserError(
            f"{name} looks tokens up in layers, too, so that an embedding does not stand for its token; leave "
            "saliency, input-x-gradient and integrated-gradients out"
        )


@torch.inference_mode()
def _try_cache(model: TransformersAdapter, n_long: int, name: str) -> bool:
    """Hide random tokens from those behind them: whether rows that share the rest give what rows with copies give.

    With all the logits must be those of the whole text, and with none those of the last tokens alone.
    """
    tokens = _random_tokens(model, n_long)
    near = min(_NEAR_TOKENS, n_long - 1)
    num_far = n_long - near
    visible = torch.ones(3, num_far, dtype=torch.bool, device=tokens.device)
    visible[1] = False
    visible[2, 1::2] = False

    def near_logits(shares_far_keys: bool) -> Tensor:
        reading = with_prefix(model, ())
        reading.shares_far_keys = shares_far_keys
        far = reading.far_key_values(tokens[:, :num_far])
        return reading.near_logits(far, visible, tokens[:, num_far:].expand(3, -1), near)

    try:
        copied = near_logits(shares_far_keys=False)
    except Exception as error:  # a state, or keys that layers share
        if is_out_of_memory(error):
            raise
        raise UserError(f"{name} has no keys and values to leave out ({first_line(error)})") from error
    ids = torch.arange(n_long, device=tokens.device)[None]
    whole = model(tokens, ids, logits_to_keep=near).logits[0]
    alone = model(tokens[:, num_far:], ids[:, num_far:], logits_to_keep=near).logits[0]
    tolerance = _RELATIVE_TOLERANCE * float(whole.std())
    if (copied[0] - whole).abs().max() > tolerance or (copied[1] - alone).abs().max() > tolerance:
        raise UserError(
            f"{name} is another with a far context in its cache than with the whole text: a state beside keys and "
            "values, or keys that layers share; rank and keep as text, or give another model"
        )
    if not model.model._can_set_attn_implementation():
        return False
    try:
        shared = near_logits(shares_far_keys=True)
    except Exception as error:  # arguments or shapes of its own
        if is_out_of_memory(error):
            raise
        log.info(
            "%s has an attention of its own (%s): far keys are copied for every row", name, first_line(error)
        )
        return False
    if (shared - copied).abs().max() > tolerance:
        log.info(
            "%s has an attention of its own: far keys are copied for every row, which takes longer", name
        )
        return False
    return True


@torch.inference_mode()
def _try_heads(
    model: TransformersAdapter, n_long: int, name: str, by_head: Collection[str], gathers: bool
) -> None:
    """Count layers of keys and of attention; where each head's keys are gathered, also take every second key away."""
    tokens = _random_tokens(model, n_long)
    near = min(_NEAR_TOKENS, n_long - 1)
    num_far = n_long - near
    ids = torch.arange(n_long, device=tokens.device)[None]
    reading = with_prefix(model, ())
    reading.shares_far_keys = False
    far = reading.far_key_values(tokens[:, :num_far])
    of_attention = reading.attention(tokens[:, :near], ids[:, :near], 1)
    remedy = f"leave {', '.join(by_head)} out" if by_head else "give another model"
    if len(of_attention) != len(far):
        raise UserError(
            f"{name} has keys of {len(far)} layers and attention of {len(of_attention)}, so that heads of keys have no "
            f"attention of their own; {remedy}"
        )
    if not gathers:
        return
    kept = ids[0, :num_far] % 2 == 0
    hidden = reading.near_logits(far, kept[None], tokens[:, num_far:], 1)
    fewer = [(keys[:, :, kept], values[:, :, kept]) for keys, values in far]
    kept_ids = torch.cat([ids[:, :num_far][:, kept], ids[:, num_far:]], dim=1)
    gathered = reading.logits_after(fewer, tokens[:, num_far:], kept_ids, 1)
    if (gathered - hidden).abs().max() > _RELATIVE_TOLERANCE * float(hidden.std()):
        raise UserError(
            f"{name} counts the keys that are left in its cache (a window), so that heads cannot keep tokens of their "
            f"own at N = {n_long:,}; lower N, or {remedy}"
        )


def _random_tokens(model: TransformersAdapter, count: int) -> Tensor:
    """(1, count), drawn on the CPU, so that they are the same everywhere."""
    tokens = torch.randint(model.vocabulary_size, (1, count), generator=torch.Generator().manual_seed(0))
    return tokens.to(model.model.get_input_embeddings().weight.device)


@contextmanager
def _in_fp32(model: nn.Module) -> Iterator[None]:
    """Weights of half precision are in fp32 while it runs: in bf16 rounding may be a third of the logits' spread."""
    weights = [*model.parameters(), *model.buffers()]
    half = [(weight, weight.dtype) for weight in weights if weight.dtype in (torch.bfloat16, torch.float16)]
    try:
        for weight, _ in half:
            weight.data = weight.data.float()
        yield
    finally:
        for weight, dtype in half:
            weight.data = weight.data.to(dtype)
