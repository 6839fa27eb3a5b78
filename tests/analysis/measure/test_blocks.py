"""Blocks of targets against one plain forward pass per target and subset, for every selector and model family."""

import numpy as np
import pytest

from analysis.measure.influence import measure_influence, selected_losses
from analysis.measure.selectors import SELECTORS, Question, find_selector
from analysis.model import scorer as scorer_module
from analysis.model.scorer import Scorer, long_and_short_losses, total_variation
from analysis.plots.figure2 import describe
from analysis.records.store import load_records
from analysis.stats.summary import summarize
from analysis.text.contexts import Contexts, sample_targets
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from tests.analysis.model.test_scorer import OWN, build
from tests.support import measured
from tests.support.families import FAMILIES
from tests.support.measured import arrays
from tests.support.measured import influence_settings as settings
from tests.support.refusals import refused

N, M, B, VOCABULARY = 20, 5, 6, 50
FAR = N - M


def make_blocks(count=2, seed=0):
    text = np.random.default_rng(seed).integers(1, VOCABULARY, (count, N + B))
    target_id = np.arange(count * B).reshape(count, B)
    return Contexts(text[:, :-1], text[:, N:], target_id, M)


def plain_log_p(model, contexts, block, place, far):
    return measured.plain_log_p(model, contexts.tokens[block], [*far, *range(FAR, N + place)])


def plain_loss(model, contexts, block, place, far):
    return -plain_log_p(model, contexts, block, place, far)[contexts.targets[block, place]]


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
@pytest.mark.parametrize("tokens_per_batch", [30, 10_000])
def test_one_pass_predicts_every_target_of_a_block_from_a_subset(name, tokens_per_batch, monkeypatch):
    """Losses, and divergences from the long context: of all targets at once, and some rows of logits at a time."""
    monkeypatch.setattr(scorer_module, "LOGITS_PER_SLICE", 3 * B * 128)
    model, contexts = build(name), make_blocks()
    left_out = np.arange(FAR - 1) + (np.arange(FAR - 1) >= np.arange(FAR)[:, None])
    scorer = Scorer(model, tokens_per_batch=tokens_per_batch)
    losses = scorer.losses(contexts, left_out)
    both = scorer.measures(contexts, left_out, ("kl", "tv"))
    divergences = {"kl": both[..., 0], "tv": both[..., 1]}
    assert losses.shape == divergences["kl"].shape == (2 * B, FAR)
    for row, (block, place) in enumerate(contexts.all_targets):
        long = plain_log_p(model, contexts, block, place, range(FAR))
        for number in (0, 3, FAR - 1):
            log_p = plain_log_p(model, contexts, block, place, left_out[number])
            expected = -log_p[contexts.targets[block, place]]
            assert losses[row, number] == pytest.approx(expected, abs=5e-5)
            for kind, found in divergences.items():
                expected = measured.plain_divergence(kind, long, log_p)
                assert found[row, number] == pytest.approx(expected, abs=5e-5)


def test_distributions_are_read_a_slice_at_a_time(monkeypatch):
    """Of a pass over many rows no more than a slice, and kept are those of the long contexts alone."""
    sizes = []

    def spy(log_p, logits):
        sizes.append(max(log_p.numel(), logits.numel()))
        return total_variation(log_p, logits)

    monkeypatch.setattr(scorer_module, "LOGITS_PER_SLICE", 4 * B * 128)
    monkeypatch.setitem(scorer_module.DIVERGENCES, "tv", spy)
    Scorer(build("rope")).measures(make_blocks(), np.arange(FAR)[:, None], ("tv",))
    assert max(sizes) == 4 * B * 128
    assert sum(sizes) == 2 * FAR * B * 128


def test_subsets_of_single_targets_are_those_of_the_block():
    model, contexts = build("rope"), make_blocks(3)
    asked = np.array([[2, 5], [0, 1], [0, 4], [2, 0]])
    far = np.sort(np.random.default_rng(1).permuted(np.tile(np.arange(FAR), (4, 3, 1)), axis=2)[:, :, :4])
    losses = Scorer(model, tokens_per_batch=40).losses(contexts, far, asked)
    for row, (block, place) in enumerate(asked):
        for number in range(3):
            expected = plain_loss(model, contexts, block, place, far[row, number])
            assert losses[row, number] == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("name", [*SELECTORS, "leave-one-out@gradient:8", "greedy-kl@leave-one-out-tv:8"])
def test_a_selector_chooses_in_a_block_what_it_chooses_for_each_target_alone(name):
    scorer, contexts = Scorer(build("rope")), make_blocks()
    asked = np.array([[0, 0], [0, 3], [1, 2], [1, 5]])
    together = find_selector(name)(Question(scorer, contexts, 7, 3, asked))
    losses = selected_losses(scorer, contexts, asked, together.columns, (1, 3))
    long, short = long_and_short_losses(scorer, contexts, asked)
    for row, (block, place) in enumerate(asked):
        by_itself, first = contexts.alone(block, place), np.array([[0, 0]])
        selection = find_selector(name)(Question(scorer, by_itself, 7, 3))
        assert together.columns[row].tolist() == selection.columns[0].tolist()
        np.testing.assert_allclose(together.influence[row], selection.influence[0], atol=5e-5)
        expected = selected_losses(scorer, by_itself, first, selection.columns, (1, 3))
        np.testing.assert_allclose(losses[row], expected[0], atol=5e-5)
        assert (long[row], short[row]) == pytest.approx(
            [float(each[0]) for each in long_and_short_losses(scorer, by_itself)], abs=5e-5
        )


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
def test_attention_of_a_block_is_that_of_each_target(name):
    scorer, contexts = Scorer(build(name)), make_blocks()
    together = scorer.last_attention(contexts, contexts.all_targets)
    for row, (block, place) in enumerate(contexts.all_targets):
        alone = scorer.last_attention(contexts.alone(block, place), np.array([[0, 0]]))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


@pytest.mark.slow
def test_recorded_choices_of_blocks_are_those_of_the_whole(two_seeds, tmp_path):
    changes = {"targets_per_block": 20, "targets": 160}
    measure_influence(settings(two_seeds, tmp_path / "whole", **changes))
    by_model, by_records = (
        load_records(
            measure_influence(
                settings(two_seeds, tmp_path / name, chooser, evaluate_with="second", **changes)
            )
        )
        for name, chooser in (("model", "run"), ("records", tmp_path / "whole"))
    )
    for x, y in zip(arrays(by_model), arrays(by_records), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    with refused("targets_per_block 20 -> None"):
        measure_influence(settings(two_seeds, tmp_path / "whole", targets=160))
    with refused(r"--targets-per-block 20 \(here 1\)"):
        alone = settings(two_seeds, tmp_path / "no", tmp_path / "whole", evaluate_with="second", targets=160)
        measure_influence(alone)


def test_blocks_are_drawn_whole_apart_and_evenly(trained):
    tokens = TokenFiles.of_split(trained / "corpus", "heldout")
    drawn = set()
    for seed in range(5):
        sampled = sample_targets(tokens, 50, n_long=20, n_short=5, seed=seed, targets_per_block=6)
        assert len(sampled.position) == 54  # whole blocks
        blocks = sampled.position.reshape(-1, 6)
        assert (np.diff(blocks, axis=1) == 1).all()
        for each in (sampled.document, sampled.placebo_document, sampled.placebo_start):
            assert (np.diff(each.reshape(-1, 6), axis=1) == 0).all()
        places = set(zip(sampled.document.tolist(), sampled.position.tolist(), strict=True))
        assert len(places) == 54
        counts = np.unique(sampled.document, return_counts=True)[1] // 6
        assert counts.max() - counts.min() <= 1
        assert not (sampled.document == sampled.placebo_document).any()
        drawn.add(tuple(sampled.position))
    assert len(drawn) == 5
    with pytest.raises(UserError, match="70 targets that follow one another with N = 20"):
        sample_targets(tokens, 50, n_long=20, n_short=5, seed=0, targets_per_block=70)


def test_captions_and_commands_name_the_size_of_blocks(trained, tmp_path):
    records = load_records(measure_influence(settings(trained, tmp_path, targets_per_block=6)))
    summary = summarize(records, resamples=1000)
    assert "N = 20, M = 5, B = 6;" in describe(summary)
    assert records.manifest.targets_per_block == 6
