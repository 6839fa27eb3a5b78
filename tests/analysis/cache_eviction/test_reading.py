"""What is predicted after one choice of far keys, against one whole masked pass a choice."""

import numpy as np
import pytest

from analysis.cache_eviction.reading import BlockReading
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.losses import Scorer
from tests.support.families import WINDOWED, random_model, tiny_adapter
from tests.support.plain import block_pass_by_head, plain_divergence, random_blocks, whole_pass

N, M, B = 24, 6, 4
FAR = N - M


@pytest.mark.parametrize("near", [NEAR_KEPT, NEAR_REREAD])
@pytest.mark.parametrize("name", ["llama", "rope", "xglm"])
def test_what_comes_behind_the_choice_does_not_see_dropped_keys(name, near):
    """Near tokens that are kept have seen all far ones, up to the last, whose query comes behind the choice."""
    adapter = tiny_adapter(name)
    contexts = random_blocks(N, M, B, count=1)
    kept = np.random.default_rng(0).random((3, FAR)) < 0.4
    reading = BlockReading.of(Scorer(adapter), contexts, near)
    measured = reading.measures(kept, ("loss", "kl"))

    sees_all_far = N - 1 if near == NEAR_KEPT else FAR
    log_p_of = [
        whole_pass(adapter, contexts.tokens[0], sees_all_far, [*of_far, *range(FAR, sees_all_far)])[-B:]
        for of_far in (range(FAR), *map(np.flatnonzero, kept))
    ]
    for place, token in enumerate(contexts.targets[0]):
        with_all, *after_choices = (log_p[place] for log_p in log_p_of)
        for choice, log_p in enumerate(after_choices):
            expected = [-log_p[token], plain_divergence("kl", with_all, log_p)]
            assert measured[place, choice] == pytest.approx(expected, abs=3e-5)


@pytest.mark.parametrize("near", [NEAR_KEPT, NEAR_REREAD])
@pytest.mark.parametrize("prefix", [(), (3, 1)])
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_every_head_hides_keys_of_its_own_behind_a_prefix_and_within_windows(name, prefix, near):
    """Far keys that a head keeps are still outside of the window of some layers."""
    model = TransformersAdapter(random_model(name, **WINDOWED[name])).requires_grad_(False)
    adapter = with_prefix(model, prefix)
    adapter.shares_far_keys = True
    scorer = Scorer(adapter)
    contexts = random_blocks(N, M, B, count=1)
    heads = sum(scorer.key_heads(contexts))
    kept = np.random.default_rng(0).random((2, heads, FAR)) < 0.4
    measured = BlockReading.of(scorer, contexts, near).measures(kept, ("loss", "kl"))

    first_query = N - 1 if near == NEAR_KEPT else FAR
    every_key = np.ones((heads, FAR), dtype=bool)
    for place, token in enumerate(contexts.targets[0]):
        with_all, *after_choices = (
            block_pass_by_head(adapter, contexts, place, by_head, first_query)
            for by_head in (every_key, *kept)
        )
        for choice, log_p in enumerate(after_choices):
            expected = [-log_p[token], plain_divergence("kl", with_all, log_p)]
            assert measured[place, choice] == pytest.approx(expected, abs=5e-5)
