"""Cross-fitting: one model chooses, another measures; and what is refused."""

import numpy as np
import pytest

from tests.support.families import random_model
from tests.support.refusals import refused
from tests.support.small_measurement import assert_losses_are_plain, assert_same, model, small, small_tokens

SELECTORS = ("leave-one-out", "greedy", "gradient", "random")
SETTINGS = {"selectors": SELECTORS, "targets": 32}
"""Two batches."""
pytestmark = pytest.mark.usefixtures("small_batches")


def crossed(**changes):
    """The second model evaluates what ``select_with`` chooses."""
    return small(model(1), **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def first(small_batches):
    """What the first model chooses and measures."""
    return small(**SETTINGS)


@pytest.fixture(scope="module")
def by_model(small_batches):
    return crossed(select_with=model())


def test_a_chooses_and_b_measures(first, by_model):
    assert by_model.crossfit and not first.crossfit
    named = by_model.settings.selected_by
    assert named.sha256 == first.settings.model.sha256 != by_model.settings.model.sha256
    assert np.array_equal(
        by_model.over, first.over
    )  # the targets are those over tau for the model that chooses
    gain = first.gain_nats.astype(np.float32)
    assert np.array_equal(by_model.targets["selecting_gain_nats"], gain)
    for selector in SELECTORS:
        for far_context in ("true", "placebo"):
            chosen = (result.selected(selector, far_context) for result in (by_model, first))
            assert np.array_equal(*chosen)
    assert_losses_are_plain(by_model, model(1)[0], small_tokens(), range(5))


def test_a_model_does_not_cross_itself():
    with refused("the weights are the same"):
        small(select_with=model(), selectors=SELECTORS)


def test_shards_can_be_cross_fitted(by_model, tmp_path):
    for shard in ("1/2", "2/2"):
        result = crossed(select_with=model(), out=tmp_path, shard=shard)
    assert_same(result, by_model)
    with refused("was begun with other settings, and is not finished: selected_by"):
        crossed(out=tmp_path)


def test_a_smaller_model_proposes(first):
    """Among as many candidates as are chosen nothing is left to decide: the set is what the other model ranks first."""
    screened = "leave-one-out@gradient:4"
    result = small(**{**SETTINGS, "selectors": (screened, "random")}, propose_with=model(1))
    proposed = crossed(selectors=("gradient",))
    assert result.settings.proposed_by.sha256 == proposed.settings.model.sha256
    assert np.array_equal(result.over, first.over)
    _, ours, theirs = np.intersect1d(result.over, proposed.over, return_indices=True)
    assert len(ours) >= 3
    for far_context in ("true", "placebo"):
        chosen = np.sort(result.selected(screened, far_context)[ours])
        assert np.array_equal(chosen, np.sort(proposed.selected("gradient", far_context)[theirs]))
        assert not np.array_equal(chosen, np.sort(first.selected("gradient", far_context)[ours]))


def test_untrained_weights_choose_for_the_targets_of_the_trained_model(first, tmp_path):
    """Adebayo et al. 2018: what they choose is measured on the trained model, and differs from what that chooses."""
    random_model("gpt_neox").save_pretrained(tmp_path)
    model()[1].save(str(tmp_path / "tokenizer.json"))
    result = small(**SETTINGS, select_with=f"{tmp_path}@untrained")
    assert result.settings.selected_by.untrained
    assert "selecting_gain_nats" not in result.targets
    assert np.array_equal(result.over, first.over)
    for far_context in ("true", "placebo"):
        same, differ = (
            result.selected(name, far_context) == first.selected(name, far_context)
            for name in ("random", "leave-one-out")
        )
        assert same.all() and differ[:, 0].mean() < 0.7
