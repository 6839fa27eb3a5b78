"""Devices and types as a GPU would meet them while a model is measured, found without one."""

import pytest
import torch

from analysis.model.adapter import with_prefix
from analysis.model.losses import Scorer
from analysis.selectors import SELECTORS, SelectorInput, find_selector
from olmo_sparsity.attention import ATTENTIONS
from tests.support.fake_cuda import DEVICE, fake_cuda, on_fake_cuda
from tests.support.families import tiny_adapter
from tests.support.plain import encode, random_blocks
from tests.support.slow import slow_but
from tests.support.tiny import ENCODINGS

WITH_ALL_SELECTORS = ("rope", "gpt_neox", "llama")
WAYS_TO_SCORE = ("leave-one-out", "leave-one-in", "gradient", "input-x-gradient", "attention")
"""Selectors that between them call all that a scorer has; the others are made of these, as an encoding cannot see."""


@pytest.fixture(autouse=True)
def without_backward_passes(monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, of: (torch.zeros_like(of),))


@pytest.mark.parametrize("name", slow_but([*ENCODINGS, "gpt_neox", "llama"], "alibi", "fox"))
def test_scoring_stays_on_the_device(name):
    model, contexts = tiny_adapter(name), random_blocks(20, 4, 2, count=3)
    with fake_cuda():
        scorer = Scorer(on_fake_cuda(model).requires_grad_(False), device=DEVICE)
        for selector in SELECTORS if name in WITH_ALL_SELECTORS else WAYS_TO_SCORE:
            if selector == "gradient" and name in ATTENTIONS and not ATTENTIONS[name].supports_presence:
                continue  # refused by name
            steps = ":steps=2" if selector == "integrated-gradients" else ""  # all alike
            given = SelectorInput(scorer, contexts, seed=0, k=3, encode=encode)
            selection = find_selector(selector + steps)(given)
            assert selection.columns.shape == (6, 3)


@pytest.mark.parametrize("name", ["rope", "llama"])
def test_a_prefix_stays_on_the_device(name):
    model, contexts = tiny_adapter(name), random_blocks(20, 4, 2, count=3)
    with fake_cuda():
        behind = with_prefix(on_fake_cuda(model).requires_grad_(False), (7, 3))
        for selector in WAYS_TO_SCORE:
            selection = find_selector(selector)(
                SelectorInput(Scorer(behind, device=DEVICE), contexts, seed=0, k=3)
            )
            assert selection.columns.shape == (6, 3)
