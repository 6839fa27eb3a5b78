"""Whether a model can be measured on contexts of N tokens, by what its configuration says and by a trial.

Shapes: N tokens of long context, V vocabulary (logits).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from analysis.model.adapters import Adapter, PositionedCausalLM, Prefixed
from olmo_sparsity.util.errors import UserError, first_line

log = logging.getLogger(__name__)

_RELATIVE_TOLERANCE = 1e-3
_HALF = (torch.bfloat16, torch.float16)


def check_long_context(
    model: Adapter,
    n_long: int,
    targets_per_block: int = 1,
    *,
    name: str,
    option: str,
    reach_factor: float = 1.0,
) -> None:
    """Raise `UserError` where a model cannot be measured on N tokens of long context, in blocks of B targets.

    Its learned positions or a window may not reach so far, or in long texts its positions be others from the first
    token on, so that what is behind a token changes how it reads; or its position ids may have no effect, it may read
    ahead, or dropping tokens may not equal hiding them (a recurrent layer), as a trial on random tokens shows. Beyond
    the length that a rotary model's configuration names it is measured, with a warning.

    Args:
        model: in evaluation mode, on any device.
        n_long: N.
        targets_per_block: B; the last target of a block has B - 1 tokens more.
        name: what messages call the model.
        option: what sets N, for the remedy.
        reach_factor: how many times as far its RoPE is scaled to reach.
    """
    more = targets_per_block - 1
    if isinstance(model, Prefixed):
        more += len(model.prefix)
        model = model.unprefixed
    at_most, what = min(_ends(model), default=(None, ""))
    if at_most is not None and n_long + more > at_most:
        with_more = f" with {more:,} more tokens of block and prefix" if more else ""
        lower = (
            f"lower {option} to at most {at_most - more:,}"
            if at_most > more
            else "lower the targets per block"
        )
        raise UserError(f"N = {n_long:,}{with_more} is beyond the {at_most:,} {what} {name}; {lower}")
    # This project's own models are shown to be right by its tests.
    if isinstance(model, PositionedCausalLM):
        if (reach := model.max_positions) is not None and n_long + more > reach * reach_factor:
            log.warning("%s is measured beyond the %d positions that its configuration names", name, reach)
        try:
            with _in_fp32(model):
                _try_positions(model, n_long + more, name, option)
        except torch.OutOfMemoryError:
            log.warning("no memory to try %s in fp32: it is taken to be right", name)


def _ends(model: Adapter) -> Iterator[tuple[int, str]]:
    """The most tokens of one text that a model can be measured on, for each thing that ends there."""
    config: Any = model.model.config.get_text_config() if isinstance(model, PositionedCausalLM) else None
    rope = getattr(config, "rope_parameters", None) or {}
    if model.max_positions is not None and not rope:
        yield model.max_positions, "positions of"
    kinds = getattr(config, "layer_types", None) or ["sliding", "chunked"]
    for kind, field in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
        window = getattr(config, field, None)  # a query's own token is one of them
        if window and any(kind in each for each in kinds):
            yield window, f"tokens of a {kind} window in"
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        at_most = each.get("original_max_position_embeddings") or model.max_positions
        if (scheme := each.get("rope_type")) in ("longrope", "dynamic") and at_most:
            yield at_most, f"tokens after which {scheme} changes all positions of"


@torch.inference_mode()
def _try_positions(model: PositionedCausalLM, n_long: int, name: str, option: str) -> None:
    """Drop every second of N random tokens, and hide the same ones: the logits must be equal, and depend on the ids.

    They must also be those behind a prefix that was read alone.
    """
    device = model.model.get_input_embeddings().weight.device
    # drawn on the CPU, so that they are the same everywhere
    tokens = torch.randint(model.vocabulary_size, (1, n_long), generator=torch.Generator().manual_seed(0))
    tokens, ids = tokens.to(device), torch.arange(n_long, device=device)[None]
    kept = ids[0] % 2 == (n_long - 1) % 2  # the last token is one of them
    kept[0] = True  # the first that a window ends before
    few, at = tokens[:, kept], ids[:, kept]
    half = few.shape[1] // 2
    try:
        dropped, moved, hidden = (
            model(each, where, logits_to_keep=1, attention_mask=mask).logits[:, -1]
            for each, where, mask in (
                (few, at, None),
                (few, ids[:, : few.shape[1]], None),
                (tokens, ids, kept[None].long()),
            )
        )
        past = model.key_values(few[:, :half], at[:, :half]) if half else []
        behind = model.logits_after(past, few[:, half:], at, 1)[:, -1] if half else dropped
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a cache of its own kind, an option that must be set
        raise UserError(
            f"{name} cannot read random tokens behind a prefix ({first_line(error)}); give another model"
        ) from error
    if not torch.isfinite(hidden).all():
        raise UserError(
            f"{name}: its logits are not finite (fp16 overflows, or training diverged); give another dtype or model"
        )
    if not _nearly_equal(dropped, behind):
        raise UserError(
            f"{name} reads a prefix otherwise than a whole text (it looks ahead, as BERT does, or caches no keys); "
            "give another model"
        )
    if n_long > 2 and torch.equal(dropped, moved):
        raise UserError(
            f"{name} does not read its position ids (ALiBi, or no positions at all), so that no token can be dropped "
            "from its context; give a model with rotary or learned positions"
        )
    if not _nearly_equal(dropped, hidden):
        raise UserError(
            f"{name}: dropping tokens from a context of N = {n_long:,} does not equal hiding them (a window or a "
            f"recurrent layer does that); lower {option}, or give another model"
        )


def _nearly_equal(dropped: Tensor, hidden: Tensor) -> bool:
    """Whether logits (1, V) in fp32 differ by no more than rounding."""
    return float((dropped - hidden).abs().max()) <= _RELATIVE_TOLERANCE * float(hidden.std())


@contextmanager
def _in_fp32(model: nn.Module) -> Iterator[None]:
    """Weights of half precision are in fp32 while it runs: in bf16 rounding may be a third of the logits' spread."""
    half = [(each, each.dtype) for each in (*model.parameters(), *model.buffers()) if each.dtype in _HALF]
    try:
        for each, _ in half:
            each.data = each.data.float()
        yield
    finally:
        for each, dtype in half:
            each.data = each.data.to(dtype)
