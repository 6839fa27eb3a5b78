"""Exact selectors find every token that a hand-built model depends on (docs/method.md 2.6)."""

import numpy as np
import pytest
import torch

from analysis.contexts import Contexts
from analysis.model.adapter import Adapter, Output
from analysis.model.losses import Scorer
from analysis.selectors import SelectorInput, find_selector

N, M = 40, 8
COLUMNS = [3, 4, 11, 17, 20, 26, 30, 31]


class PlantedModel(Adapter):
    """Predicts token 1 out of two; how surely depends on which columns of the context it can see.

    ``rule``: ``sum``: the logit is the sum of what each present planted token gives; ``all``: the planted tokens give
    something only if all are present, as an earlier match and what followed it do for a model that copies. Every other
    token gives a little noise, of either sign.
    """

    vocabulary_size, max_positions = 2, None
    baseline_token = -1  # a token that is not there

    def __init__(self, planted, n_long, *, rule, strength_nats=4.0, noise_nats=0.02):
        super().__init__()
        self.planted, self.rule, self.strength = torch.as_tensor(planted), rule, strength_nats
        noise = np.random.default_rng(0).normal(scale=noise_nats, size=n_long)
        noise[list(planted)] = 0
        self.noise = torch.from_numpy(noise).float()

    def embed(self, input_ids):
        """The presence of each token, (R, L, 1): all that the model reads of it."""
        return (input_ids >= 0).float()[..., None]

    def read(self, inputs, position_ids, logits_to_keep, *, bias=None, **options):
        """Nothing is worth caching: only the position ids decide. A bias of log p is presence p."""
        empty = torch.zeros(*position_ids.shape, 1)[:, None]
        presence = inputs[..., 0] if inputs.ndim == 3 else 1.0
        present = self.present(position_ids, presence) if bias is None else bias[:, -1].exp()
        return Output(self.logits(present), [(empty, empty)])

    def read_attention(self, input_ids, position_ids, queries, read):
        """A softmax of how far each token bears on the answer, of one layer and head, whatever the query."""
        weight = self.noise.abs().index_fill(0, self.planted, self.strength / len(self.planted))
        weights = weight[position_ids].softmax(dim=-1)[:, None, None]
        return [read(weights.expand(-1, -1, queries, -1))]

    def present(self, position_ids, presence=1.0):
        """(R, N) presence of every column, that of tokens (R, L) or of what is read."""
        given = torch.as_tensor(presence).expand(position_ids.shape)
        return torch.zeros(len(position_ids), len(self.noise)).scatter(1, position_ids, given)

    def logits(self, presence):
        """(R, 1, 2) logits from the presence, 0 to 1, of every column (R, N)."""
        planted = presence[:, self.planted]
        together = planted.mean(dim=1) if self.rule == "sum" else planted.prod(dim=1)
        logit = self.strength * together + presence @ self.noise
        return torch.stack([torch.zeros_like(logit), logit], dim=1)[:, None]


def planted_context():
    """The one for `PlantedModel`, whose target is token 1; the tokens themselves say nothing."""
    zero = np.zeros((1, 1), dtype=np.int64)
    return Contexts(np.zeros((1, N), dtype=np.int64), zero + 1, zero, M)


def select(name, planted, rule, k):
    scorer = Scorer(PlantedModel(planted, N, rule=rule))
    return find_selector(name)(SelectorInput(scorer, planted_context(), 0, k)).columns


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("leave-one-out", "sum"),
        ("leave-one-out", "all"),
        ("leave-one-in", "sum"),
        ("greedy", "sum"),
        ("gradient", "sum"),
        ("gradient", "all"),
        ("leave-one-out@gradient:12", "all"),
        ("leave-one-out-kl", "all"),
        ("leave-one-out-tv", "sum"),
        ("leave-one-in-kl", "sum"),
        ("greedy-kl", "sum"),
        ("saliency", "all"),
        ("integrated-gradients", "sum"),
        ("attention", "sum"),
    ],
)
def test_the_planted_set_comes_first(name, rule, count):
    planted = COLUMNS[:count]
    assert set(select(name, planted, rule, 16)[0, :count]) == set(planted)


@pytest.mark.parametrize("name", ["leave-one-in", "greedy"])
def test_adding_single_tokens_cannot_see_a_conjunction(name):
    """What needs all of its tokens at once is invisible to selectors that add one at a time (docs/method.md 4)."""
    assert set(select(name, COLUMNS[:4], "all", 4)[0]) != set(COLUMNS[:4])
