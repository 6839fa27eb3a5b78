"""Needles: where they stand, a copy head built by hand that finds them all, plain forward passes, and the script."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from analysis.measure.needle import (
    cells_of,
    draw_needles,
    measure_cell,
    measure_needle,
    needle_contexts,
    recall_of_needles,
)
from analysis.measure.settings import NeedleSettings, RecallOptions
from analysis.model.load import load_for_analysis
from analysis.model.token_losses import TokenLosses
from analysis.plots.needle import needle_figure, needle_lengths_figure, recall_figure
from analysis.records.results import NEEDLE
from olmo_sparsity.checkpoint import CONFIG, TOKENIZER, TrainState, save_checkpoint
from olmo_sparsity.config.load import load_config as read_config
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.model.build import build_model
from tests.support import tiny
from tests.support.families import directory
from tests.support.measured import plain_loss, write_models
from tests.support.refusals import refused

LENGTHS, KS, DEPTHS, Q = (12, 24), (1, 3), (0.0, 0.5, 1.0), 2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needle")
    return write_models(folder, (24, 30, 80, 100, 10), one={}, two={"d_model": 16})


@pytest.fixture(scope="module")
def needles(made):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    return draw_needles(tokens, 8, lengths=LENGTHS, ks=KS, key_tokens=Q, seed=0)


class CopyHead(nn.Module):
    """One attention head: a place is looked up by the q tokens before it, and its own token is written out."""

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


def losses_of(model):
    by_hand = SimpleNamespace(model=model, checkpoint=Path("by-hand"), check_context=lambda length: None)
    return TokenLosses(by_hand, device="cpu")


def test_a_needle_stands_where_it_was_asked_and_nowhere_else(needles):
    assert len(needles) == 8
    for cell in cells_of(KS, LENGTHS, DEPTHS):
        rows, k = needles.contexts(cell), cell.value_tokens
        assert rows.shape == (8, cell.length + k)
        for number, row in enumerate(rows.tolist()):
            key, value = needles.key[number].tolist(), needles.value[number, :k].tolist()
            text = needles.text[number].tolist()
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


def test_needles_are_a_function_of_their_seed(made, needles):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    again = draw_needles(tokens, 8, lengths=LENGTHS, ks=KS, key_tokens=Q, seed=0)
    other = draw_needles(tokens, 8, lengths=LENGTHS, ks=KS, key_tokens=Q, seed=1)
    assert np.array_equal(again.key, needles.key) and np.array_equal(again.value, needles.value)
    assert not np.array_equal(other.key, needles.key)


def test_keys_that_training_never_weaves_can_be_asked_for(made):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    unseen = draw_needles(tokens, 8, lengths=LENGTHS, ks=KS, key_tokens=Q, seed=0, unseen_keys=True)
    assert (unseen.key.sum(axis=1) % 8 == 0).all()


@pytest.mark.parametrize("family", ["olmo", "gpt_neox"])
def test_a_model_that_saw_needles_is_asked_for_unseen_keys(made, tmp_path, family):
    read = read_config(made / "one" / "run" / "step00000001" / CONFIG)
    model = tiny.model_config(max_sequence_length=24, family=family)
    few = replace(read.needles, share=0.5, key_tokens=1)
    config = replace(read, model=model, needles=few)
    weights = build_model(config).state_dict()
    save_checkpoint(
        tmp_path / "run", config, TrainState(1, 1), weights, {}, (made / "corpus" / TOKENIZER).read_bytes()
    )
    asked = {
        "corpus": str(made / "corpus"),
        "out": tmp_path / "out",
        "lengths": LENGTHS,
        "ks": KS,
        "samples": 2,
    }
    with refused("was trained on text with needles; add --unseen-keys"):
        measure_needle(NeedleSettings(checkpoints=(str(tmp_path / "run"),), labels=("one",), **asked))


def test_a_copy_head_finds_every_needle_and_none_that_is_absent(needles):
    for cell in cells_of(KS, LENGTHS, DEPTHS):
        loss, exact = measure_cell(losses_of(CopyHead()), needles, cell)
        if cell.depth is None:
            assert not exact.any() and (loss > 1).all()
        else:
            assert exact.all() and (loss < 1e-6).all(), cell


def test_loss_and_exact_match_are_those_of_one_forward_pass_a_token(made, needles):
    loaded = load_for_analysis(made / "one" / "run")
    for cell in cells_of((3,), LENGTHS, (0.5,)):
        loss, exact = measure_cell(TokenLosses(loaded, device="cpu"), needles, cell)
        for number, row in enumerate(needles.contexts(cell).tolist()):
            places = range(cell.length, cell.length + 3)
            losses = [plain_loss(loaded.model, row, range(place), row[place]) for place in places]
            with torch.no_grad():
                guesses = loaded.model(torch.tensor([row])).logits[0, cell.length - 1 : -1].argmax(-1)
            assert loss[number] == pytest.approx(np.mean(losses), abs=1e-4)
            assert exact[number] == (guesses.tolist() == row[cell.length :])


def test_leave_one_out_finds_the_needle_of_a_copy_head_and_not_the_placebos(needles):
    options = RecallOptions(("leave-one-out", "random"), 24, 0.5, 8)
    contexts, placebos, columns = needle_contexts(needles, options)
    for number in range(8):
        needle = [*needles.key[number], needles.value[number, 0]]
        assert contexts.tokens[number, columns].tolist() == needle
        assert contexts.targets[number] == needle[-1]
        assert placebos.tokens[number, columns].tolist() == [
            *needles.key[number - 1],
            needles.value[number - 1, 0],
        ]
        assert placebos.tokens[number, -Q:].tolist() == contexts.tokens[number, -Q:].tolist()
    found = recall_of_needles(losses_of(CopyHead()), needles, options, label="x", seed=0)
    recall = found["selectors"]["leave-one-out"]
    assert recall["4"]["recall"]["value"] == 1 and recall["1"]["recall"]["value"] == pytest.approx(1 / 3)
    assert recall["4"]["placebo_recall"]["value"] < 0.6
    assert found["chance"]["4"] == pytest.approx(4 / 22)


def test_recall_is_measured_on_samples_of_all_documents(needles):
    few = RecallOptions(("random",), 24, 0.5, 3)
    contexts, _, _ = needle_contexts(needles, few)
    every, _, _ = needle_contexts(needles, RecallOptions(("random",), 24, 0.5, len(needles)))
    assert np.array_equal(contexts.tokens, every.tokens[[0, round((len(needles) - 1) / 2), -1]])
    found = recall_of_needles(losses_of(CopyHead()), needles, few, label="x", seed=0)
    last = len(needles) - 1
    assert found["documents"] == len(
        {int(needles.segments.document[row]) for row in (0, round(last / 2), last)}
    )


def settings(made, out, **changes):
    paths = tuple(str(made / name / "run") for name in ("one", "two"))
    values = {"corpus": str(made / "corpus"), "out": str(out), "device": "cpu", "resamples": 300}
    values |= {"checkpoints": paths, "labels": ("one", "two")}
    values |= {"lengths": LENGTHS, "ks": KS, "depths": DEPTHS, "samples": 8}
    return NeedleSettings(**{**values, **changes})


def test_cells_are_means_over_samples_and_seeds(made, tmp_path):
    found = NEEDLE.load(measure_needle(settings(made, tmp_path, labels=("both", "both"))))
    rows = pq.read_table(tmp_path / "needle.parquet").to_pylist()
    (model,) = found["models"]
    assert len(model["checkpoints"]) == 2
    assert len(model["cells"]) == len(KS) * len(LENGTHS) * len(DEPTHS)
    for one in model["cells"]:
        like = [row for row in rows if all(row[name] == one[name] for name in ("value_tokens", "length"))]
        present = [row for row in like if row["depth"] == one["depth"]]
        absent = [row for row in like if row["depth"] is None]
        assert len(present) == len(absent) == 2 * 8
        loss, absent_loss = (np.mean([row["loss_nats"] for row in each]) for each in (present, absent))
        assert one["loss_nats"]["value"] == pytest.approx(loss)
        assert one["absent_loss_nats"]["value"] == pytest.approx(absent_loss)
        assert one["gain_nats"]["value"] == pytest.approx(absent_loss - loss)
        assert one["exact"]["value"] == pytest.approx(np.mean([row["exact"] for row in present]))
        assert one["loss_nats"]["low"] <= one["loss_nats"]["value"] <= one["loss_nats"]["high"]
        room = one["length"] - 2 * Q - one["value_tokens"]
        assert one["distance"] == one["length"] - Q - round(one["depth"] * room)
    assert len(model["over_depths"]) == len(KS) * len(LENGTHS)
    for one in model["over_depths"]:
        like = [row for row in rows if all(row[name] == one[name] for name in ("value_tokens", "length"))]
        assert one["exact"]["value"] == pytest.approx(
            np.mean([row["exact"] for row in like if row["depth"] is not None])
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (7, 24)}, "a context of 7 tokens does not hold a needle of 3 with its key of 2 twice and text"),
        ({"lengths": (12, 200)}, "no held-out document has 200 tokens, the longest has 100"),
        ({"depths": (0.5, 1.5)}, "--depths are from 0"),
        ({"labels": ("one",)}, "2 checkpoints need as many labels"),
        ({"lengths": (12, 100), "ks": (1, 40)}, "does not hold a needle of 40"),
        ({"lengths": (90, 100), "ks": (1, 40)}, "tokens of the split do not occur in a stretch of 100"),
        ({"selectors": ("nearby",)}, "nearby"),
        ({"selectors": ("random",), "recall_samples": 1}, "--recall-samples must be 2 or more"),
        ({"selectors": ("random",), "samples": 1}, "there is 1 needle, and the placebo of --selectors is another"),
        ({"selectors": ("random",), "recall_length": 5}, "--recall-length 5 does not hold a needle of 1"),
        ({"selectors": ("random",), "recall_length": 25}, "--recall-length 25 is beyond the largest of --lengths"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_before_anything_is_written(made, tmp_path, changes, message):
    with refused(message):
        measure_needle(settings(made, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_what_no_selector_can_measure_is_refused_before_anything_is_measured(made, tmp_path, monkeypatch):
    one = str(made / "one" / "run")
    scaled = {
        "checkpoints": (one, f"{one}@mesa:2"),
        "selectors": ("random",),
        "recall_samples": 4,
        "recall_length": 20,
    }
    monkeypatch.setattr("analysis.measure.needle.measure_cell", None)
    with refused("no token can be dropped from a context that is read in chunks"):
        measure_needle(settings(made, tmp_path / "out", **scaled))
    assert not (tmp_path / "out").exists()


def test_a_table_of_positions_that_ends_is_refused(tmp_path):
    gpt2 = directory(tmp_path / "gpt2", "gpt2")  # 64 positions
    corpus = tiny.write_corpus(tmp_path / "longer", {"heldout": tiny.random_documents(3, 80)})
    asked = {"checkpoints": (str(gpt2),), "labels": ("gpt2",), "corpus": str(corpus), "device": "cpu"}
    asked |= {"lengths": (12, 63), "depths": (0.5,), "samples": 2, "resamples": 100, "out": tmp_path / "out"}
    measure_needle(NeedleSettings(**asked, ks=(1, 2)))  # the last value token is not read
    with refused("65 tokens are beyond the 64 learned positions .* lower --lengths to at most 62"):
        measure_needle(NeedleSettings(**asked, ks=(1, 3)))


def test_the_script_measures_draws_and_prints(made, tmp_path, run_here):
    """On the corpus that the run was trained on, as none is named."""
    run = made / "one" / "run"
    command = ["scripts/needle.py", run, f"{run}@yarn:2", "--labels", "plain,YaRN", "--out", tmp_path]
    command += ["--lengths", "24,16", "--depths", "0,1", "--samples", 6, "--ks", "1,3", "--device", "cpu"]
    command += ["--selectors", "random,gradient", "--recall-samples", 4, "--recall-length", 20]
    refused_ = run_here(*command, "--depths", "0,2")
    assert refused_.returncode == 1 and "--depths are from 0 (first) to 1 (last), not" in refused_.stderr
    done = run_here(*command)
    assert done.returncode == 0, done.stderr
    found = NEEDLE.load(tmp_path)
    assert found["settings"]["corpus"] == str(made / "corpus")
    assert [each["label"] for each in found["models"]] == ["plain", "YaRN"]
    assert found["models"][1]["checkpoints"][0]["rope_scaling"]["name"] == "yarn"
    for name in ("needle", "needle_gain", "needle_lengths", "needle_recall"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (tmp_path / f"{name}.pdf").is_file()
    assert "plain: exact match" in done.stdout and "recall of the needle's tokens" in done.stdout
    drawn = needle_figure(found, "exact").axes
    assert [axes.get_title("left").split("\n")[0] for axes in drawn[:2]] == ["plain", "YaRN"]
    cells = {
        (c["depth"], c["length"]): c["exact"]["value"]
        for c in found["models"][0]["cells"]
        if c["value_tokens"] == 1
    }
    expected = [[cells[depth, length] for length in (16, 24)] for depth in (0, 1)]
    assert np.allclose(drawn[0].images[0].get_array(), 100 * np.array(expected))
    assert len(recall_figure(found).axes) == 2
    for axes, model in zip(needle_lengths_figure(found).axes, found["models"], strict=True):
        exact = [one["exact"]["value"] for one in model["over_depths"] if one["value_tokens"] == 3]
        assert axes.lines[1].get_label() == "k = 3 exact" and list(axes.lines[1].get_ydata()) == exact


@pytest.mark.parametrize(("gain", "text"), [(-0.2, "-0.20"), (-0.001, "0.00")])
def test_the_colours_go_upwards_where_no_model_gains_anything(gain, text):
    """And what rounds to nothing has no sign."""
    cell = {"value_tokens": 1, "length": 16, "depth": 0.5, "gain_nats": {"value": gain}}
    models = [{"label": "x", "checkpoints": [{"training_length": None}], "cells": [cell]}]
    settings = {"ks": [1], "lengths": [16], "depths": [0.5], "key_tokens": 2}
    settings |= {"samples_measured": 4, "documents": 2}
    drawn = needle_figure({"models": models, "settings": settings}, "gain_nats")
    assert [each.get_text() for each in drawn.axes[0].texts] == [text]
    assert drawn.axes[0].images[0].get_clim() == (0, 0.1)


def test_more_models_than_ks_stand_one_below_the_other():
    def cells(exact):
        return [{"value_tokens": 1, "length": 16, "depth": 0.5, "exact": {"value": exact}}]

    models = [
        {"label": label, "checkpoints": [{"training_length": None}], "cells": cells(exact)}
        for label, exact in (("x", 0.25), ("y", 0.75))
    ]
    settings = {
        "ks": [1],
        "lengths": [16],
        "depths": [0.5],
        "key_tokens": 2,
        "samples_measured": 4,
        "documents": 2,
    }
    panels = needle_figure({"models": models, "settings": settings}, "exact").axes[:2]
    assert [axes.get_ylabel().split("\n")[0] for axes in panels] == ["x", "y"]
    assert [axes.texts[0].get_text() for axes in panels] == ["25", "75"]
    assert panels[0].get_title("left") == "k = 1" and panels[1].get_title("left") == ""
