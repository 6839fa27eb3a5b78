"""RoPE past the length it was trained on, without training: other frequencies, or sharper scores, of the same weights.

Each scheme of `ROPE_SCALINGS` has a factor s, how many times the original length L the ids are to reach. It needs no
OLMo, as `rope.py` does: measuring other models reads this file.
Shapes: D dimensions of a head that are rotated, D / 2 frequencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.registry import Registry

LOG_N = "log-n"
_FAST, _SLOW = 32, 1  # YaRN's beta: rotations over the original length
Scheme = Callable[[Tensor, float, "RopeScaling"], tuple[Tensor, float]]
"""From 1 / frequencies (D / 2,), the base and the scaling to the new ones, and a factor of sines and cosines."""
ROPE_SCALINGS: Registry[Scheme] = Registry("RoPE scaling", ", as in CKPT@yarn:4")


@dataclass(frozen=True)
class RopeScaling:
    """A scheme, and how far it is to reach."""

    name: str
    """One of `ROPE_SCALINGS`."""
    factor: float
    """s, at least 1."""
    original_length: int
    """L: in training ids were below it."""

    def apply(self, inverse_frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """What RoPE's 1 / base^(2i/D), (D / 2,), become, and what sines and cosines are multiplied by."""
        return ROPE_SCALINGS[self.name](inverse_frequencies, base, self)

    def of_queries(self, ids: Tensor) -> Tensor | None:
        """What rotated queries are multiplied by, of the shape of ``ids``, float32; None: by nothing.

        With `LOG_N` max(1, log n / log L) at the n-th id (Su 2021), as the attention log-n has it.
        """
        if self.name != LOG_N:
            return None
        return ((ids + 1).float().log() / math.log(self.original_length)).clamp_min(1)

    def __str__(self) -> str:
        return f"{self.name}:{self.factor:g}"


@ROPE_SCALINGS.register("linear")
def position_interpolation(
    inverse_frequencies: Tensor, base: float, scaling: RopeScaling
) -> tuple[Tensor, float]:
    """Position interpolation: every id divided by s (Chen et al. 2023, arXiv 2306.15595)."""
    return inverse_frequencies / scaling.factor, 1.0


@ROPE_SCALINGS.register("ntk")
def ntk_aware(inverse_frequencies: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """NTK-aware scaling: base · s^(D / (D - 2)), so that the slowest frequency is divided by s, the fastest kept.

    It is due to bloc97, as Peng et al. 2023 (arXiv 2309.00071, section 3.1) have it.
    """
    half = len(inverse_frequencies)
    exponents = torch.arange(half, dtype=inverse_frequencies.dtype, device=inverse_frequencies.device) / half
    new_base = base * scaling.factor ** (half / (half - 1))
    return 1.0 / new_base**exponents, 1.0


@ROPE_SCALINGS.register("yarn")
def yarn(inverse_frequencies: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn often over L are kept, slow ones interpolated.

    In between a linear ramp from 32 to 1 rotations, its ends rounded outwards to whole dimensions; sines and cosines
    are multiplied by 0.1 ln s + 1.
    """
    half = len(inverse_frequencies)

    def dimension_of(rotations: float) -> float:
        """Where a frequency turns so often over L."""
        return half * math.log(scaling.original_length / (rotations * 2 * math.pi)) / math.log(base)

    first = max(math.floor(dimension_of(_FAST)), 0)
    last = min(math.ceil(dimension_of(_SLOW)), 2 * half - 1)
    dimensions = torch.arange(half, dtype=inverse_frequencies.dtype, device=inverse_frequencies.device)
    ramp = ((dimensions - first) / max(last - first, 1e-3)).clamp(0, 1)
    mixed = inverse_frequencies / scaling.factor * ramp + inverse_frequencies * (1 - ramp)
    return mixed, 0.1 * math.log(scaling.factor) + 1.0


@ROPE_SCALINGS.register(LOG_N)
def unchanged(inverse_frequencies: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """All frequencies are kept: `RopeScaling.of_queries` sharpens the scores instead."""
    return inverse_frequencies, 1.0


_WITH_SCALING = re.compile(r"(?P<path>.+)@(?P<name>[A-Za-z][\w-]*):(?P<factor>\d+(\.\d+)?)")


def split_scaling(text: str) -> tuple[str, tuple[str, float] | None]:
    """``runs/rope@yarn:4`` as its path and (name, factor); None without a scheme.

    Raises `UserError` for a scheme that there is not, and for a factor below 1.
    """
    match = _WITH_SCALING.fullmatch(text)
    if match is None:
        return text, None
    name = match["name"]
    factor = float(match["factor"])
    ROPE_SCALINGS[name]  # refuses an unknown one
    if factor < 1:
        raise UserError(f"{text}: the factor {factor:g} is below 1; give a multiple of the trained length")
    return match["path"], (name, factor)
