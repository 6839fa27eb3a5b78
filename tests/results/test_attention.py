"""The attention at each length (`results/encodings/attention.py`) against transformers' weights."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import entropy

from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.probes.length import LengthProbe
from analysis.probes.segments import sample_segments
from tests.support import small_measurement
from tests.support.families import random_model
from tests.support.small_measurement import TEXTS

STUDY = runpy.run_path(str(Path(__file__).parents[2] / "results" / "encodings" / "attention.py"))
PROBE = STUDY["AttentionProbe"](lengths=(8, 16, 40), windows=9, resamples=300)
HOW = {"labels": ["one", "other"], "device": "cpu", "progress": False}


def two_models():
    return [small_measurement.model(), small_measurement.model(1)]


def test_entropy_and_zeros_are_those_of_transformers_weights_and_losses_those_of_length(tmp_path):
    measured = PROBE.measure(two_models(), TEXTS, out=tmp_path, **HOW)
    texts = open_texts(TEXTS, open_model(small_measurement.model()).reader)
    tokens = sample_segments(texts, 9, length=40, seed=0).tokens
    model = random_model("llama", initializer_range=0.3, attn_implementation="eager")
    of_one = measured.numbers[measured.numbers["model"] == "one"]
    for row, length in zip(of_one[of_one["name"] == "entropy_nats"].itertuples(), (8, 16, 40), strict=True):
        with torch.no_grad():
            layers = model(torch.from_numpy(tokens[:, :length]), output_attentions=True).attentions
        weights = torch.stack(layers).double()[..., -min(16, length) :, :].numpy()
        assert row.value == pytest.approx(entropy(weights, axis=-1).mean(), abs=1e-5)
        assert (row.from_tokens, row.to_tokens) == (length - min(16, length), length)
    # above the diagonal a softmax is not counted, below it none of its weights is 0
    assert [*of_one["value"][of_one["name"] == "zero_share"]] == [0, 0, 0]
    assert "entropy of the attention" in str(type(measured).load(tmp_path))
    assert "zero_share" in {row["name"] for row in json.loads((tmp_path / "length.json").read_text())["runs"]}
    plain = LengthProbe(lengths=PROBE.lengths, windows=9, resamples=300).measure(two_models(), TEXTS, **HOW)
    losses = measured.numbers[~measured.numbers["name"].isin(["entropy_nats", "zero_share"])]
    key = ["model", "name", "from_tokens"]
    pd.testing.assert_frame_equal(
        losses.sort_values(key, ignore_index=True), plain.numbers.sort_values(key, ignore_index=True)
    )


def test_of_sparse_attention_the_zeros_before_the_query_count():
    sparse = STUDY["entropy_and_zeros"](torch.tensor([[[[[0.5, 0.5, 0, 0]]]], [[[[0, 0, 0, 1.0]]]]]))
    np.testing.assert_allclose(sparse[0], [[np.log(2), 1 / 3], [0, 3 / 4]], atol=1e-6)
