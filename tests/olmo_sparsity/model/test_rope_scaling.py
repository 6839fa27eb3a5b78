"""RoPE scaled at evaluation time: against transformers on copied weights, and what cannot be scaled."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from analysis.model.rope_scaling import load_scaled, split_checkpoint
from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.rope_scaling import LOG_N, MESA, ROPE_SCALINGS, RopeScaling
from tests.analysis.model.test_load import directory
from tests.support.refusals import refused
from tests.support.tiny import checkpoint

LENGTH, REACH = 192, 64  # tokens read; the ids of the training config stay below 64
TOKENS = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
IDS = torch.arange(LENGTH)[None].expand(2, -1)


@pytest.fixture(scope="module", params=[8, 64], ids="head of {}".format)
def made(request, tmp_path_factory):
    """A checkpoint whose heads have so many dimensions, and its export."""
    folder = tmp_path_factory.mktemp("scaled")
    source, _ = checkpoint(folder, d_model=2 * request.param, n_heads=2)
    export_checkpoint(source, folder / "hf")
    return source, folder / "hf"


@torch.inference_mode()
def logits(path):
    return load_scaled(str(path)).model(TOKENS, position_ids=IDS).logits


@torch.inference_mode()
def logits_of_transformers(folder, name, factor):
    """Its "dynamic" with a factor of 1 is NTK-aware scaling to the length it reads, once that is beyond its own."""
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == REACH
    rope = {"rope_type": name, "rope_theta": config.rope_parameters["rope_theta"], "factor": factor}
    if name == "yarn":
        rope["original_max_position_embeddings"] = REACH
    if name == "ntk":
        rope |= {"rope_type": "dynamic", "factor": 1.0}
        config.max_position_embeddings = round(LENGTH / factor)
    config.rope_parameters = rope
    return AutoModelForCausalLM.from_pretrained(folder, config=config).eval()(TOKENS, position_ids=IDS).logits


@pytest.mark.parametrize("name", [name for name in ROPE_SCALINGS if name not in (LOG_N, MESA)])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_logits_are_those_of_transformers_on_copied_weights(made, name, factor):
    source, exported = made
    expected = logits_of_transformers(exported, name, factor)
    tolerance = 1e-5 * float(expected.abs().max())
    for path in (source, exported):
        torch.testing.assert_close(logits(f"{path}@{name}:{factor}"), expected, rtol=0, atol=tolerance)
        assert (logits(path) - expected).abs().max() > 100 * tolerance, "unscaled it is another model"


def test_log_n_after_training_is_the_attention_of_that_name(made):
    """The same weights with ``model.attention: log-n`` and the window that the ids reached in training."""
    source, exported = made
    plain = load_scaled(str(source)).model.model
    trained = PositionedOLMo(replace(plain.config, attention="log-n", max_sequence_length=REACH)).eval()
    trained.load_state_dict(plain.state_dict())
    found = logits(f"{source}@log-n:3")
    tolerance = 1e-5 * float(found.abs().max())
    with torch.inference_mode():
        torch.testing.assert_close(found, trained(TOKENS, position_ids=IDS).logits, rtol=0, atol=tolerance)
    assert (found - logits(source))[:, REACH:].abs().max() > 100 * tolerance
    torch.testing.assert_close(found[:, :REACH], logits(source)[:, :REACH], rtol=0, atol=tolerance)
    with refused("transformers' attention has no place for log-n"):
        load_scaled(f"{exported}@log-n:3")


def test_what_was_scaled_is_told(made):
    source, exported = made
    for path in (source, exported):
        loaded = load_scaled(f"{path}@yarn:2.5")
        scaling = loaded.rope_scaling
        assert scaling == RopeScaling("yarn", 2.5, REACH) and str(scaling) == "yarn:2.5"
        assert loaded.checkpoint == path
        assert load_scaled(str(path)).rope_scaling is None


def test_a_folder_whose_name_looks_like_a_scheme_is_a_folder(made, tmp_path):
    folder = tmp_path / "copy@yarn:2"
    shutil.copytree(made[1], folder)
    assert split_checkpoint(str(folder)) == (folder, None)
    assert split_checkpoint(f"{folder}@ntk:4") == (folder, ("ntk", 4.0))


def test_what_cannot_be_scaled_is_one_line(made, tmp_path):
    nope, _ = checkpoint(tmp_path, rope=False, nope=True)
    entmax, _ = checkpoint(tmp_path / "entmax", attention="entmax")
    hybrid, _ = checkpoint(tmp_path / "hybrid", nope_layer_interval=2)
    learned = directory(tmp_path / "gpt2", "gpt2")
    scaled = tmp_path / "scaled"
    shutil.copytree(made[1], scaled)
    config = AutoConfig.from_pretrained(scaled)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    config.save_pretrained(scaled)
    for text, message in (
        (f"{nope}@yarn:2", "was not trained with RoPE: there is nothing to scale"),
        (f"{entmax}@mesa:2", "mesa is for softmax attention with RoPE in every layer"),
        (f"{hybrid}@log-n:2", "log-n is for softmax attention with RoPE in every layer"),
        (f"{learned}@yarn:2", "this model has no RoPE, and only plain RoPE can be scaled"),
        (f"{scaled}@yarn:2", "this model has linear, and only plain RoPE can be scaled"),
        (f"{made[0]}@yern:2", "there is no RoPE scaling yern; choose linear, ntk, yarn, log-n, mesa"),
        (f"{made[0]}@yarn:0.5", "the factor 0.5 is below 1"),
    ):
        with refused(message):
            load_scaled(text)
