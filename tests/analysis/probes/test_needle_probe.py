"""Needles: where they stand, a copy head built by hand that finds them all, plain forward passes, and the command."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from analysis.model.token_losses import TokenLosses
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.probes import needle as probe
from analysis.probes.needle import NeedleProbe, measure_cell
from olmo_sparsity.checkpoint import config_of
from olmo_sparsity.data.windows import is_held_out
from olmo_sparsity.model.build import build_model
from tests.support import small_measurement, tiny
from tests.support.families import random_model
from tests.support.plain import plain_loss
from tests.support.refusals import refused
from tests.support.small_measurement import TEXTS

LENGTHS, KS, DEPTHS, Q = (12, 24), (1, 3), (0.0, 0.5, 1.0), 2
PROBE = NeedleProbe(lengths=LENGTHS, ks=KS, key_tokens=Q, depths=DEPTHS, samples=8, resamples=300)
HOW = {"device": "cpu", "progress": False}
pytestmark = pytest.mark.usefixtures("few_are_enough")


@pytest.fixture(scope="module")
def texts():
    return open_texts(TEXTS, open_model(small_measurement.model()).reader)


@pytest.fixture(scope="module")
def samples(texts):
    return PROBE.draw_sample(texts)


class CopyHead(nn.Module):
    """One attention head: a place is looked up by the q tokens before it, and its token is written out."""

    def __init__(self, vocabulary=50, q=Q, sharpness=40.0):
        super().__init__()
        self.vocabulary, self.q, self.sharpness = vocabulary, q, sharpness

    def forward(self, input_ids, position_ids, *, logits_to_keep=0):
        one_hot = nn.functional.one_hot(input_ids, self.vocabulary).float()
        before = [one_hot.roll(shift, dims=1) for shift in range(1, self.q + 1)]
        here = [one_hot.roll(shift, dims=1) for shift in range(self.q)]
        scores = torch.cat(here, dim=-1) @ torch.cat(before, dim=-1).transpose(1, 2)
        length = input_ids.shape[1]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        scores[:, :, : self.q] = -1e9  # rolled around
        scores[:, :, 0] = self.q - 0.5  # attended to where no place has all q tokens before it
        logits = self.sharpness * (scores * self.sharpness).softmax(-1) @ one_hot
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_a_needle_stands_where_it_is_wanted_and_nowhere_else(samples):
    assert len(samples) == 8
    for cell in PROBE.cells():
        rows, k = samples.contexts(cell), cell.value_tokens
        assert rows.shape == (8, cell.length + k)
        for number, row in enumerate(rows.tolist()):
            key, value = samples.key[number].tolist(), samples.value[number, :k].tolist()
            text = samples.tokens[number].tolist()
            assert len({*key, *value}) == Q + k and not {*key, *value} & set(text)
            assert row[cell.length - Q :] == key + value
            inside = row[: cell.length - Q]
            if cell.depth is None:
                assert inside == text[: cell.length - Q]
                continue
            room = cell.length - 2 * Q - k
            start = {0.0: 0, 0.5: round(room / 2), 1.0: room}[cell.depth]
            assert inside[start : start + Q + k] == key + value
            assert inside[:start] + inside[start + Q + k :] == text[:room]


def test_needles_are_a_function_of_their_seed(texts, samples):
    again, other = (replace(PROBE, seed=seed).draw_sample(texts) for seed in (0, 1))
    assert np.array_equal(again.key, samples.key) and np.array_equal(again.value, samples.value)
    assert not np.array_equal(other.key, samples.key)


def test_unseen_keys_are_those_that_training_never_weaves(texts, samples):
    unseen = replace(PROBE, unseen_keys=True).draw_sample(texts)
    assert all(map(is_held_out, unseen.key)) and not all(map(is_held_out, samples.key))
    keys = np.random.default_rng(0).integers(0, 100, (200, Q))
    assert [key.sum() % probe.UNSEEN_ONE_IN == 0 for key in keys] == [is_held_out(key) for key in keys]


@pytest.mark.parametrize("family", ["olmo", "gpt_neox"])
def test_a_model_that_saw_needles_is_measured_with_unseen_keys(tmp_path, family):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(4, 30)})
    folder, _ = tiny.checkpoint(tmp_path, corpus=corpus)
    config = config_of(folder)
    needles = replace(config.needles, share=0.5, key_tokens=1)
    model = tiny.model_config(max_sequence_length=24, family=family)
    config = replace(config, model=model, needles=needles)
    tokenizer = (corpus / "tokenizer.json").read_bytes()
    run = tiny.save_model(tmp_path / "saw", config, build_model(config), tokenizer=tokenizer)
    with refused("was trained on text with needles; add --unseen-keys"):
        PROBE.measure(str(run), corpus, **HOW)
    few = replace(PROBE, samples=2, lengths=(12,), ks=(1,), unseen_keys=True)
    assert len(few.measure(str(run), corpus, **HOW).cells)


def test_keys_of_which_none_was_kept_out_of_training_are_refused():
    few = replace(PROBE, ks=(1,), key_tokens=1, unseen_keys=True)
    assert few._draw(0, np.array([1, 3, 8]))[0] == 8
    with refused("none of 10,000 keys of 1 tokens was kept out of training, of the 3 tokens"):
        few._draw(0, np.array([1, 3, 5]))


def test_a_copy_head_finds_every_needle_and_none_that_is_absent(samples):
    for cell in PROBE.cells():
        loss, exact = measure_cell(TokenLosses(CopyHead()), samples, cell)
        if cell.depth is None:
            assert not exact.any() and (loss > 1).all()
        else:
            assert exact.all() and (loss < 1e-6).all(), cell


def test_loss_and_exact_match_are_those_of_one_forward_pass_a_token(samples):
    model = small_measurement.model()[0]
    token_losses = TokenLosses(open_model(small_measurement.model()).model)
    for cell in replace(PROBE, ks=(3,), depths=(0.5,)).cells():
        loss, exact = measure_cell(token_losses, samples, cell)
        for number, row in enumerate(samples.contexts(cell).tolist()):
            places = range(cell.length, cell.length + 3)
            losses = [plain_loss(model, row, range(place), row[place]) for place in places]
            with torch.no_grad():
                guesses = model(torch.tensor([row])).logits[0, cell.length - 1 : -1].argmax(-1)
            assert loss[number] == pytest.approx(np.mean(losses), abs=1e-4)
            assert exact[number] == (guesses.tolist() == row[cell.length :])


def test_cells_are_means_over_samples_and_runs():
    models = [small_measurement.model(), small_measurement.model(1)]
    measured = PROBE.measure(models, TEXTS, labels=["both", "both"], **HOW)
    rows, cells = measured.rows, measured.cells
    assert len(rows) == 2 * 8 * len(KS) * len(LENGTHS) * (len(DEPTHS) + 1)
    assert len(cells) == len(KS) * len(LENGTHS) * (3 * len(DEPTHS) + 3)
    for cell in cells.itertuples():
        like = rows[(rows["value_tokens"] == cell.value_tokens) & (rows["length"] == cell.length)]
        absent, present = like[like["depth"].isna()], like[like["depth"].notna()]
        at_depth = present if np.isnan(cell.depth) else present[present["depth"] == cell.depth]
        expected = {
            "exact": at_depth["exact"].mean(),
            "loss_nats": at_depth["loss_nats"].mean(),
            "gain_nats": absent["loss_nats"].mean() - at_depth["loss_nats"].mean(),
            "absent_exact": absent["exact"].mean(),
            "absent_loss_nats": absent["loss_nats"].mean(),
        }
        assert cell.value == pytest.approx(expected[cell.name]) and cell.low <= cell.value <= cell.high
        if cell.name in (
            "exact",
            "absent_exact",
            "absent_loss_nats",
        ):  # which are of one context, not a difference
            of_run = (absent if cell.name.startswith("absent") else at_depth).groupby("number")
            column = cell.name.removeprefix("absent_")
            assert [cell.first_run, cell.second_run] == pytest.approx(of_run[column].mean().tolist())
        if not np.isnan(cell.depth):
            start = round(cell.depth * (cell.length - 2 * Q - cell.value_tokens))
            assert cell.distance_tokens == cell.length - Q - start
    by_depth, by_length = (figure.get_suptitle() for figure in measured.figures().values())
    assert "means of 2 runs" in by_depth and "two runs pooled" in by_length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (7, 24)}, "a context of 7 tokens does not hold a needle of 3 with its key of 2 twice and text"),
        ({"depths": (0.5, 1.5)}, "--depths are from 0"),
        ({"lengths": (90, 100), "ks": (1, 40)}, "tokens of the texts do not occur in a stretch of 100"),
        ({"lengths": (24, 12)}, "lengths must be ascending, each once"),
        ({"ks": (1, 3, 1)}, "--ks has a number twice"),
        ({"depths": (0.5, 0.5)}, "--depths has a number twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_it_is(monkeypatch, changes, message):
    monkeypatch.setattr(NeedleProbe, "measure_model", None)
    with refused(message):
        replace(PROBE, **changes).measure(small_measurement.model(), TEXTS, **HOW)


def test_a_table_of_positions_that_ends_is_refused():
    gpt2 = (random_model("gpt2"), small_measurement.model()[1])  # 64 positions
    few = replace(PROBE, lengths=(12, 63), depths=(0.5,), samples=2)
    replace(few, ks=(1, 2)).measure(gpt2, TEXTS, **HOW)  # the last value token is not read
    with refused("65 tokens are beyond the 64 learned positions .* lower --lengths to at most 62"):
        few.measure(gpt2, TEXTS, **HOW)
