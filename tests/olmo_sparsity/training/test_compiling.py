"""What is compiled, into one graph, with the numbers of a run that is not; and what is said where it is not."""

from dataclasses import replace

import pytest
import torch

from olmo_sparsity.checkpoint import weights_sha256
from olmo_sparsity.config.schema import PositionsConfig
from olmo_sparsity.model.build import decoder_of
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.predictive import PositionPredictor
from olmo_sparsity.training import engine
from olmo_sparsity.training.build import chosen_compiler
from olmo_sparsity.training.loop import train
from tests.support import tiny
from tests.support.slow import slow_but


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()


def model_of(kind):
    if kind in tiny.ENCODINGS:
        return tiny.model(**tiny.ENCODINGS[kind])
    if kind == "ppc":
        return PositionPredictor(tiny.neox(), PositionsConfig("predicted", table_size=40), seed=0)
    return tiny.neox() if kind == "gpt_neox" else tiny.model()


@pytest.mark.parametrize("kind", slow_but([*tiny.ENCODINGS, "gpt_neox", "ppc"], "rope", "alibi", "ppc"))
def test_a_training_step_is_one_graph(kind):
    model, ids = model_of(kind).train(), torch.arange(0, 20, 2).expand(3, -1)
    decoder = decoder_of(model)
    if isinstance(decoder, PositionedOLMo):
        decoder.prepare_loss()
    batch = {"input_ids": ids, "position_ids": ids, "labels": ids}
    more = {"ppc": {"id_labels": ids}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explained = torch._dynamo.explain(model)(**batch, **more.get(kind, {}))
    assert (explained.graph_break_count, explained.graph_count) == (0, 1), explained.break_reasons


def test_another_flash_attention_is_chosen_by_name_alone(monkeypatch):
    activated = []
    monkeypatch.setattr(engine, "activate_flash_attention_impl", activated.append)
    engine.choose_flash_attention()
    monkeypatch.setenv("OLMO_SPARSITY_FLASH_ATTENTION", "FA3")
    engine.choose_flash_attention()
    assert activated == ["FA3"]


@pytest.mark.parametrize(
    ("changes", "is_compiled"),
    [
        ({"max_duration": f"{500 * 4 * 32}T"}, True),
        ({"max_duration": f"{499 * 4 * 32}T"}, False),
        ({"max_duration": 500, "compile": None}, False),
        ({"max_duration": 500, "activation_checkpointing": "whole_layer"}, True),
        ({"max_duration": 500, "activation_checkpointing": "fine_grained"}, False),
        ({"max_duration": 8, "compile": {"from_steps": 0}}, True),
    ],
)
def test_what_is_compiled(tmp_path, changes, is_compiled):
    config = tiny.train_config(tmp_path, **{"compile": {}, **changes})
    assert (chosen_compiler(config) is not None) == is_compiled


def test_without_a_compiler_training_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    config = tiny.train_config(tmp_path, compile={"from_steps": 1})
    train(config)
    assert "not compiled: compiling failed (" in caplog.text
    eager = replace(config, compile=None, save_folder=str(tmp_path / "eager"))
    train(eager)
    compiled, eager = (weights_sha256(tmp_path / name) for name in ("run", "eager"))
    assert compiled == eager
