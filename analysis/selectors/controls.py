"""Controls, which do not look at the model: what choosing at all gives, and choosing what is near.

Shapes: m targets, C candidates among the far tokens.
"""

from __future__ import annotations

import numpy as np

from analysis.selectors.registry import CONTROL
from analysis.selectors.selector import SelectorInput, register_influence
from olmo_sparsity.util.rng import Stream


@register_influence("random", CONTROL)
def random(inputs: SelectorInput) -> np.ndarray:
    """A random order, (m, C), a pure function of (seed, target): the control for choosing at all."""
    block, offset = inputs.target_index.T
    draws = []
    for target in inputs.contexts.target_id[block, offset]:
        generator = np.random.default_rng([Stream.RANDOM_SELECTOR, inputs.seed, target])
        draws.append(generator.random(inputs.contexts.n_far))
    return inputs.at_candidates(np.stack(draws))


@register_influence("nearest", CONTROL)
def nearest(inputs: SelectorInput) -> np.ndarray:
    """The later the more, (m, C): the far tokens closest to the short context come first."""
    return inputs.candidates.astype(float)
