"""The influence map against a plain loop of one forward pass per pair of tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.api import Result
from analysis.model.losses import Scorer
from analysis.xray import InfluenceMap, influence_map, xray
from analysis.xray.map import Window, measure_map, windows
from olmo_sparsity.util.errors import UserError
from tests.support import small_measurement
from tests.support.families import random_model, tiny_adapter
from tests.support.plain import plain_loss
from tests.support.refusals import refused
from tests.support.results import made_result
from tests.support.xrays import made_map

N, M = 20, 4


def measured(name: str, length: int, **options) -> tuple:
    """A model, random tokens, and their map."""
    model = tiny_adapter(name)
    tokens = np.random.default_rng(length).integers(1, 50, length)
    parts = windows(length, min(N, length - 1))
    frame = measure_map(Scorer(model, **options), tokens, parts, M, lambda count: None)
    about = {"n_long": N, "n_short": M, "tau_nats": 1.0}
    return model, tokens, InfluenceMap(frame.assign(piece="x"), about)


@pytest.mark.parametrize("length", [N + 1, 2 * N + 4], ids=["one window", "four windows, the last partial"])
@pytest.mark.parametrize("name", ["rope", "llama", "gpt2"])
def test_every_pair_equals_one_plain_forward_pass(name: str, length: int) -> None:
    model, tokens, influences = measured(name, length)
    assert np.isnan(influences.tokens["loss_long_nats"][0]) and not len(influences.tokens["influence"][0])
    for t in range(1, length):
        start = int(influences.tokens["first_far"][t])
        read = list(range(t - start))

        def loss(kept: list[int], t: int = t, start: int = start) -> float:
            return plain_loss(model, tokens[start:], kept, tokens[t])

        long, influence = loss(read), influences.tokens["influence"][t]
        assert influences.tokens["loss_long_nats"][t] == pytest.approx(long, abs=5e-5)
        assert influences.tokens["loss_short_nats"][t] == pytest.approx(loss(read[-M:]), abs=5e-5)
        assert len(influence) == len(read[:-M])
        for i in read[:-M][:: 1 if t % 7 == 0 else 5]:
            assert influence[i] == pytest.approx(loss([j for j in read if j != i]) - long, abs=1e-4)


def test_a_model_object_is_returned_as_it_was() -> None:
    model = random_model("llama").train()
    text = small_measurement.TEXTS["letter"][0]
    of_model = (model, small_measurement.model()[1])
    influence_map(of_model, text, n_long=8, n_short=2, device="cpu", progress=False)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("n_long", [8, 9, 20])
@pytest.mark.parametrize("length", [6, 9, 10, 11, 24, 57])
def test_every_token_is_a_target_once_with_half_of_n_or_all_before_it(length: int, n_long: int) -> None:
    parts = windows(length, n_long)
    assert parts[0] == Window(0, 1, min(length, n_long + 1))
    assert [t for part in parts for t in range(part.first, part.end)] == list(range(1, length))
    for part in parts[1:]:
        assert part.start >= 0
        read = np.arange(part.first, part.end) - part.start
        assert n_long / 2 < read.min() and read.max() <= n_long


def test_a_saved_map_comes_back_and_knows_what_is_strongest(tmp_path: Path) -> None:
    made_map(60).save(tmp_path)
    again, saved = InfluenceMap.load(tmp_path), made_map(60)
    assert again.about == saved.about and again.tokens["piece"].equals(saved.tokens["piece"])
    assert np.array_equal(again.matrix(), saved.matrix(), equal_nan=True)
    np.testing.assert_allclose(again.gain_nats, saved.gain_nats, atol=1e-6)
    row = np.nan_to_num(saved.matrix()[40])
    places = np.argsort(-np.abs(row), kind="stable")[:3]
    assert again.strongest(40, 3) == [(int(i), float(row[i])) for i in places]
    with pytest.raises(UserError, match="missing"):
        InfluenceMap.load(tmp_path / "none")
    head = tmp_path / "xray.json"
    about = json.loads(head.read_text())
    for name in ("n_long", "tau_nats"):
        head.write_text(json.dumps({key: value for key, value in about.items() if key != name}))
        with refused(f"xray.json is damaged: it has no {name}; make it with"):
            InfluenceMap.load(tmp_path)


def test_what_a_token_needs_most_is_its_largest_influence_above_0_and_not_the_largest_magnitude() -> None:
    rows = [[]] * 17 + [[-0.3], [0.5, -2.0], [-5.0, 4.0, 0.1]]
    made = made_map(len(rows))
    made.tokens["influence"] = pd.Series([np.array(row, dtype=np.float32) for row in rows])
    made.tokens.loc[19, "first_far"] = 1
    assert made.needed_most(5) == [(4.0, 2, 19), (0.5, 0, 18)]
    assert made.needed_most(1) == [(4.0, 2, 19)]
    assert "at 19 needs '(no text)' at 2 most, by 4.00 nats" in repr(made)
    made.tokens["influence"] = [-np.abs(row) for row in made.tokens["influence"]]
    assert made.needed_most(1) == [] and "needs" not in repr(made)


def test_a_result_shows_the_block_with_the_most_targets_over_tau() -> None:
    result = made_result(texts=5)
    blocks = result.targets.groupby(result.targets["target_id"] // 4)
    pieces = [[f" w{i}" for i in range(128 + 4 + 12)]] * len(blocks)
    texts = pd.DataFrame({"block": np.arange(len(blocks)), "text": blocks["text"].first(), "pieces": pieces})
    result = replace(result, texts=texts)
    most = int(blocks["over_tau"].sum().idxmax())
    of_result = xray(result, selector="greedy")
    of_block = blocks.get_group(most)
    assert np.array_equal(of_result.over, 128 + of_block["target_id"][of_block["over_tau"]] % 4)
    [first, *_] = of_block["target_id"][of_block["over_tau"]]
    row = int(np.flatnonzero(result.over == first)[0])
    selected, influence = result.selected("greedy")[row], result.influence("greedy")[row]
    assert of_result.strongest(128 + first % 4, 8) == [
        *zip(selected.tolist(), influence.tolist(), strict=True)
    ]
    assert of_result.to_html().count("</html>") == 1
    without = replace(result, choices=result.choices.drop(columns="influence"))
    assert xray(without, selector="greedy").strongest(128 + first % 4, 8) == []
    joined = Result.join([result, replace(made_result(texts=5, run=1), texts=texts)])
    assert xray(joined, selector="greedy").strongest(int(of_result.over[0]), 8) == of_result.strongest(
        int(of_result.over[0]), 8
    )
    with pytest.raises(ValueError, match="texts"):
        xray(replace(result, texts=None))
