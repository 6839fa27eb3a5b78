"""Loss by position in one forward pass a window, against one forward pass a position.

Shapes: n windows, L tokens of each.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from analysis.model.token_losses import TokenLosses
from benchmarks.influence import Subject
from benchmarks.timing import summarise, time_in_turn
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import current_commit

PLAIN, OURS = "one forward pass a position", "one forward pass a window"
LARGEST_DIFFERENCE = 1e-4
"""In nats; beyond it nothing is timed."""

Json = dict[str, Any]


def run_length_benchmark(subject: Subject, *, length: int, windows: int, rounds: int, seed: int = 0) -> Json:
    """Tokens per second of both on the same random windows, and the largest difference of their losses.

    Raises `UserError` where they differ: then there is nothing to compare.
    """
    if min(windows, rounds) < 1 or length < 2:
        raise UserError("--windows and --rounds take 1 or more, --length 2 or more")
    load = os.getloadavg()[0]  # first, so that the load of the machine is not our own
    losses = TokenLosses(subject.load(), device=subject.device)
    tokens = np.random.default_rng(seed).integers(0, losses.vocabulary, (windows, length))
    ways = {PLAIN: partial(plain_losses, losses, tokens), OURS: partial(window_losses, losses, tokens)}
    difference = float(np.abs(ways[PLAIN]() - ways[OURS]()).max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            f"the losses differ by {difference:.1e} nats, more than {LARGEST_DIFFERENCE:.0e}, so that their speed is "
            "not compared; look for what makes a token depend on those behind it"
        )
    seconds = time_in_turn(
        {name: partial(_discard, way) for name, way in ways.items()}, rounds, _synchroniser(losses.device)
    )
    return {
        **summarise(seconds, baseline=PLAIN, amount=windows * (length - 1), unit="tokens/s"),
        "benchmark": "length",
        "model": str(subject.checkpoint or subject.config),
        "length": length,
        "windows": windows,
        "device": torch.cuda.get_device_name() if losses.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "load_average_before": load,
        "largest_difference_nats": difference,
        "commit": current_commit(),
    }


@torch.inference_mode()
def plain_losses(losses: TokenLosses, tokens: np.ndarray) -> np.ndarray:
    """Losses (n, L - 1) of all tokens but the first, all windows at a time up to each position."""
    on_device = torch.from_numpy(tokens).to(losses.device)
    ids = torch.arange(tokens.shape[1], device=losses.device).expand(len(tokens), -1)
    found = []
    for position in range(1, tokens.shape[1]):
        logits = losses.model(
            on_device[:, :position], position_ids=ids[:, :position], last_logits_only=True
        ).logits[:, -1]
        found.append(F.cross_entropy(logits.float(), on_device[:, position], reduction="none"))
    return torch.stack(found, dim=1).cpu().numpy()


def window_losses(losses: TokenLosses, tokens: np.ndarray) -> np.ndarray:
    """The same losses as scripts/length.py computes them."""
    scored = tokens.shape[1] - 1
    return np.concatenate(
        [losses.last_losses(tokens[rows], scored) for rows in losses.batches(len(tokens), scored, scored)]
    )


def _discard(way: partial[np.ndarray]) -> None:
    way()


def _synchroniser(device: torch.device) -> Any:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
