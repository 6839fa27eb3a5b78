"""Selectors that look inside the model while it reads the long context: gradients and attention.

Shapes: m targets, C candidates among the far tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.selectors.registry import ABSOLUTE, BLIND, SIGNED, register
from analysis.selectors.selector import Selection, SelectorInput, most_influential, register_influence


@register_influence("gradient", SIGNED, hides_tokens=True)
def gradient(inputs: SelectorInput) -> np.ndarray:
    """-∂ loss / ∂ (presence of i) in the long context, (m, C) nats: `Scorer.presence_gradient`, one backward pass."""
    slopes = inputs.scorer.presence_gradient(inputs.contexts, inputs.target_index)
    return inputs.at_candidates(slopes)


@register_influence("saliency", ABSOLUTE, changes_embeddings=True)
def saliency(inputs: SelectorInput) -> np.ndarray:
    """L2 norm of ∂ log p(x_t) / ∂ (embedding of i) in the long context, (m, C); Simonyan et al., arXiv 1312.6034."""
    norms = inputs.scorer.input_gradients(inputs.contexts, inputs.target_index)
    return inputs.at_candidates(norms)


@register_influence("input-x-gradient", ABSOLUTE, changes_embeddings=True)
def input_x_gradient(inputs: SelectorInput) -> np.ndarray:
    """L2 norm of embedding times gradient, element by element, (m, C), as inseq aggregates; arXiv 1605.01713."""
    norms = inputs.scorer.input_gradients(inputs.contexts, inputs.target_index, times_input=True)
    return inputs.at_candidates(norms)


@register("integrated-gradients", ABSOLUTE, changes_embeddings=True)
@dataclass(frozen=True)
class IntegratedGradients:
    """L2 norm of the integrated gradient of p(x_t), from the embedding of the end of text, (m, C); arXiv 1703.01365.

    As inseq has it. Embeddings of zero are no place to start from: there the gradient of a norm layer has no bound, and
    the sum does not converge (docs/method.md, 2.2).
    """

    steps: int = 50
    """Points of the path, as captum chooses them by default."""

    def __call__(self, inputs: SelectorInput) -> Selection:
        """S_k by that norm."""
        points, weights = np.polynomial.legendre.leggauss(self.steps)  # on [-1, 1]
        points = (1 + points) / 2
        weights = weights / 2
        path = list(zip(points.tolist(), weights.tolist(), strict=True))
        norms = inputs.scorer.integrated_gradients(inputs.contexts, inputs.target_index, path=path)
        return most_influential(inputs, inputs.at_candidates(norms))


@register_influence("attention", BLIND)
def attention(inputs: SelectorInput) -> np.ndarray:
    """Attention of the last position to i in the long context, mean over heads and layers, (m, C)."""
    from analysis.model.attention_to_far import last_attention  # the names are known without torch

    received = last_attention(inputs.scorer, inputs.contexts, inputs.target_index)
    return inputs.at_candidates(received)
