"""Loss by position in one forward pass a window, against one forward pass a position.

Shapes: n windows, L tokens of each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from analysis.model.token_losses import TokenLosses
from benchmarks.influence import load_model
from benchmarks.settings import LengthSettings
from benchmarks.timing import Json, about_this_run, chosen_device, summarise, time_in_turn
from olmo_sparsity.util.errors import UserError

PLAIN, OURS = "one forward pass a position", "one forward pass a window"
LARGEST_DIFFERENCE = 1e-4
"""In nats; beyond it nothing is timed."""


def run(settings: LengthSettings) -> Json:
    """Tokens per second of both on the same random windows, and the largest difference of their losses.

    Raises `UserError` where they differ: then there is nothing to compare.
    """
    device = chosen_device(settings.device)
    made = about_this_run(device)
    losses = TokenLosses(load_model(replace(settings, device=device)), device=device)
    shape = (settings.windows, settings.length)
    tokens = np.random.default_rng(0).integers(0, losses.vocabulary, shape)
    ways = {PLAIN: partial(plain_losses, losses, tokens), OURS: partial(window_losses, losses, tokens)}
    difference = float(np.abs(ways[PLAIN]() - ways[OURS]()).max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            f"the losses differ by {difference:.1e} nats, more than {LARGEST_DIFFERENCE:.0e}, so that their speed is "
            "not compared; look for what makes a token depend on those behind it"
        )
    seconds = time_in_turn(ways, settings.rounds, device)
    return {
        "benchmark": "length",
        "model": settings.model,
        "length": settings.length,
        "windows": settings.windows,
        "largest_difference_nats": difference,
        **made,
        **summarise(seconds, baseline=PLAIN, amount=shape[0] * (shape[1] - 1), unit="tokens/s"),
    }


@torch.inference_mode()
def plain_losses(losses: TokenLosses, tokens: np.ndarray) -> np.ndarray:
    """Losses (n, L - 1) of all tokens but the first, all windows at a time up to each position."""
    on_device = torch.from_numpy(tokens).to(losses.device)
    ids = torch.arange(tokens.shape[1], device=losses.device).expand(len(tokens), -1)
    found = []
    for position in range(1, tokens.shape[1]):
        logits = losses.model(
            on_device[:, :position], position_ids=ids[:, :position], logits_to_keep=1
        ).logits[:, -1]
        found.append(F.cross_entropy(logits.float(), on_device[:, position], reduction="none"))
    return torch.stack(found, dim=1).cpu().numpy()


def window_losses(losses: TokenLosses, tokens: np.ndarray) -> np.ndarray:
    """The same losses as the length command computes them."""
    scored = tokens.shape[1] - 1
    return np.concatenate(
        [losses.last_losses(tokens[rows], scored) for rows in losses.batches(len(tokens), scored, scored)]
    )
