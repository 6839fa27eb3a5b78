"""Policies against what kvpress gave on the same tokens: scores, and keys that were left (`tests/support/kvpress`)."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from analysis.contexts import Contexts
from analysis.model.adapter import TransformersAdapter
from analysis.model.losses import Scorer
from analysis.policies import find_policy, from_kvpress
from analysis.policies.seen import Seen

RECORDED = Path(__file__).parents[2] / "support" / "kvpress" / "reference.npz"
FAR, NEAR = 64, 32
OBSERVERS = {"blind": 16, "aware": NEAR}
"""Tokens that observe in SnapKV."""
SHARES_DROPPED = (0.5, 0.75)
PRESSES = {
    "h2o": "h2o:mean=1",
    "snapkv": "snapkv:window={observers}",
    "ada-snapkv": "ada-snapkv:window={observers}",
    "tova": "tova",
    "knorm": "knorm",
    "keydiff": "keydiff",
    "expected-attention": "expected-attention",
    "expected-attention-plain": "expected-attention:future=8:sinks=2:covariance=0:values=0",
    "streaming-llm": "streaming-llm",
    "kvzip": "kvzip",
    "kvzip-layerwise": "kvzip:layerwise=1",
    "kvzip-chunks": "kvzip:chunk=24",
}
"""The policy of each recorded press."""
ALWAYS_BLIND = ("streaming-llm", "kvzip", "kvzip-layerwise", "kvzip-chunks")


def prompt(text):
    """As `tests.support.kvpress.record.encode`."""
    return np.array([1 + byte % 49 for byte in text.encode()])


@cache
def recorded():
    return dict(np.load(RECORDED))


@cache
def scorer():
    values = recorded()
    model = LlamaForCausalLM(LlamaConfig(**json.loads(str(values["config"])))).eval()
    weights = {name: torch.tensor(values[f"weights/{name}"]).float() for name in model.state_dict()}
    model.load_state_dict(weights)
    return Scorer(TransformersAdapter(model).requires_grad_(False))


def seen_by(policy):
    """What stands before the choice of a policy on the recorded tokens."""
    tokens = recorded()["tokens"][None]
    contexts = Contexts(tokens, np.array([[1]]), np.array([[0]]), NEAR)
    return Seen.of(scorer(), contexts, blind=policy.blind, encode=prompt)


def policy_of(press, sees):
    text = PRESSES[press].format(observers=OBSERVERS[sees])
    policy = find_policy(text)
    if sees == "blind" and not policy.blind:
        policy = find_policy(f"{text}:blind=1")
    return policy


SCORED = [("blind", press) for press in PRESSES if press != "streaming-llm"]  # theirs are 0 and 1
SCORED += [("aware", press) for press in PRESSES if press not in ALWAYS_BLIND]


@pytest.mark.parametrize(("sees", "press"), SCORED)
def test_scores_are_those_of_kvpress(sees, press):
    policy = policy_of(press, sees)
    [scores] = policy.scores(seen_by(policy))
    expected = recorded()[f"{sees}/{press}/scores"][:, :FAR]
    if "snapkv" in press:
        scores = scores / OBSERVERS[sees]  # theirs is a mean
    observers = 0
    if sees == "blind":
        observers = {"snapkv": OBSERVERS[sees], "ada-snapkv": OBSERVERS[sees], "tova": 1}.get(press, 0)
    others = slice(0, FAR - observers)
    np.testing.assert_allclose(scores[:, others], expected[:, others], rtol=0, atol=1e-5)
    for ours, theirs in ((scores, "ours"), (expected, "theirs")):
        for layer in np.split(ours, 3):
            assert (layer[:, FAR - observers :] > layer[:, others].max()).all(), theirs


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("dropped", SHARES_DROPPED)
def test_the_keys_that_are_left_are_those_that_kvpress_leaves(press, dropped):
    policy = policy_of(press, "blind")
    count = int(FAR * (1 - dropped))
    [[kept]] = policy.kept(seen_by(policy), [count])
    expected = np.unpackbits(recorded()[f"blind/{press}/{dropped}/kept"], axis=1).astype(bool)
    assert kept.tolist() == expected.tolist()
    assert kept.sum() == count * len(kept)


@pytest.mark.parametrize("press", ["snapkv", "ada-snapkv"])
def test_an_aware_policy_leaves_what_kvpress_leaves_beside_the_near_tokens(press):
    """The window is the near tokens, which both keep."""
    policy = policy_of(press, "aware")
    dropped = SHARES_DROPPED[0]
    left = int((FAR + NEAR) * (1 - dropped))
    expected = np.unpackbits(recorded()[f"aware/{press}/{dropped}/kept"], axis=1).astype(bool)
    assert expected[:, FAR:].all()
    if press == "ada-snapkv":
        policy = replace(policy, safe=0)  # theirs counts the near tokens among what is safe
    [[kept]] = policy.kept(seen_by(policy), [left - NEAR])
    assert kept.tolist() == expected[:, :FAR].tolist()


# --- presses that are policies by `from_kvpress` alone ---


class OfRecordedScores:
    """A press whose scores on these tokens were recorded."""

    def __init__(self, name, sees):
        self.by_layer = np.split(recorded()[f"{sees}/{name}/scores"], 3)
        self.compression_ratio = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.tensor(self.by_layer[module.layer_idx])[None]


class Pyramid(OfRecordedScores):
    """The budgets of PyramidKV, of a window of 4 and beta 2, as kvpress shares them out."""

    def get_layer_budget(self, module, q_len):
        mean = q_len * (1 - self.compression_ratio)
        least = mean / 2
        most = 2 * mean - least
        if most > q_len - 4:
            most = q_len - 4
            least = 2 * mean - most
        return round(most - module.layer_idx * (most - least) / 2)


class Critical(OfRecordedScores):
    """CriticalKV: half of the budget by SnapKV, the rest by its score times the L1 norm of what a value adds."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
        added = torch.einsum("rgld,ohd->rghlo", values, module.o_proj.weight.view(32, 4, 8))
        norms = added.abs().sum(dim=-1)
        of_groups = torch.stack([norms[:, 0, :2].mean(dim=1), norms[:, 1, 2:].mean(dim=1)], dim=1)
        first = scores.topk(int((1 - self.compression_ratio) * keys.shape[2] / 2), dim=-1).indices
        return ((scores + 1e-4) * of_groups).scatter(-1, first, torch.finfo(scores.dtype).max)


@pytest.mark.parametrize("dropped", SHARES_DROPPED)
@pytest.mark.parametrize(
    ("press", "name"),
    [(Pyramid("pyramidkv", "blind"), "pyramidkv"), (Critical("snapkv", "blind"), "criticalkv")],
)
def test_a_press_leaves_the_keys_that_it_leaves_in_kvpress(press, name, dropped):
    policy = from_kvpress(press)
    count = int(FAR * (1 - dropped))
    [[kept]] = policy.kept(seen_by(policy), [count])
    expected = np.unpackbits(recorded()[f"blind/{name}/{dropped}/kept"], axis=1).astype(bool)
    assert kept.tolist() == expected.tolist()
    assert kept.sum() == count * len(kept)


def test_an_aware_press_that_scores_anew_leaves_what_it_leaves_in_kvpress():
    policy = from_kvpress(Critical("snapkv", "aware"), blind=False)
    expected = np.unpackbits(recorded()["aware/criticalkv/0.5/kept"], axis=1).astype(bool)
    [[kept]] = policy.kept(seen_by(policy), [(FAR + NEAR) // 2 - NEAR])
    assert kept.tolist() == expected[:, :FAR].tolist()


REAL = {
    "snapkv": ("SnapKVPress", {"window_size": OBSERVERS["blind"]}),
    "h2o": ("ObservedAttentionPress", {}),
    "tova": ("TOVAPress", {}),
    "knorm": ("KnormPress", {}),
    "keydiff": ("KeyDiffPress", {}),
    "expected-attention": ("ExpectedAttentionPress", {}),
    "streaming-llm": ("StreamingLLMPress", {}),
    "pyramidkv": ("PyramidKVPress", {"window_size": 4, "beta": 2}),
    "criticalkv": ("CriticalKVPress", {}),
}
"""The class of each press, and its parameters."""


@pytest.mark.parametrize("name", REAL)
def test_presses_of_kvpress_leave_what_they_leave_in_its_own_environment(name):
    """Where kvpress is installed, with whatever transformers: pip install --no-deps kvpress cachetools fire."""
    kvpress = pytest.importorskip("kvpress")
    kind, parameters = REAL[name]
    if name == "criticalkv":
        parameters = {"press": kvpress.SnapKVPress(window_size=OBSERVERS["blind"])}
    policy = from_kvpress(getattr(kvpress, kind)(**parameters))
    for dropped in SHARES_DROPPED:
        [[kept]] = policy.kept(seen_by(policy), [int(FAR * (1 - dropped))])
        expected = np.unpackbits(recorded()[f"blind/{name}/{dropped}/kept"], axis=1).astype(bool)
        assert kept.tolist() == expected.tolist()
