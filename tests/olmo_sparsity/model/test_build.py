"""Models whose weights are drawn, and empty ones, of every kind that the configs describe."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from olmo.config import ModelConfig as OLMoModelConfig
from olmo.model import OLMo

from olmo_sparsity.config.load import load_config
from olmo_sparsity.model.build import build_model, empty_model
from tests.support import tiny

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = "--model.d_model=32", "--model.n_heads=4", "--model.n_layers=2"


def kinds():
    """A tiny config for each way of encoding positions, attention, and family, by the name of the first file."""
    configs = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        config = load_config(path, TINY, warn=False)
        model = config.model
        encoding = (
            model.family,
            model.attention,
            model.rope,
            model.alibi,
            model.nope,
            model.nope_layer_interval,
        )
        kind = (
            *encoding,
            model.weight_tying,
            config.positions.scheme,
            config.positions.second_table_size is None,
        )
        configs.setdefault(kind, (str(path.relative_to(CONFIGS)), config))
    return dict(configs.values())


KINDS = kinds()


@pytest.fixture(params=KINDS)
def config(request):
    return KINDS[request.param]


def test_an_empty_model_draws_nothing_and_has_the_names_shapes_and_buffers_of_a_drawn_one(config):
    before = torch.get_rng_state()
    empty = empty_model(config)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = build_model(config)
    assert [(name, weight.shape, weight.dtype) for name, weight in empty.named_parameters()] == [
        (name, weight.shape, weight.dtype) for name, weight in drawn.named_parameters()
    ]
    buffers = dict(empty.named_buffers())
    for name, buffer in drawn.named_buffers():
        assert torch.equal(buffers.pop(name), buffer)
    assert not buffers
    assert all(tensor.is_meta for tensor in empty_model(config, "meta").state_dict().values())


@torch.no_grad()
def test_an_empty_model_with_the_weights_of_a_drawn_one_computes_the_same(config):
    drawn = build_model(config).eval()
    empty = empty_model(config).eval()
    for weight in empty.parameters():
        weight.fill_(torch.nan)  # as its memory may be
    empty.load_state_dict(drawn.state_dict())
    ids = tiny.tokens(2, 16) % config.model.embedding_rows
    position_ids = torch.arange(16).expand(2, -1) * 3
    assert torch.equal(empty(ids, position_ids).logits, drawn(ids, position_ids).logits)


@pytest.mark.parametrize("encoding", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("cutoff", [None, 3.0])
def test_the_weights_are_those_that_olmo_draws(tmp_path, encoding, cutoff):
    shape = tiny.model_config(**tiny.ENCODINGS[encoding], init_cutoff_factor=cutoff)
    config = replace(tiny.train_config(tmp_path), model=shape)
    values = {field.name: getattr(shape, field.name) for field in fields(OLMoModelConfig)}
    torch.manual_seed(config.seed)
    expected = OLMo(OLMoModelConfig(**values)).state_dict()
    drawn = build_model(config).state_dict()
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[name], expected[name]) for name in drawn)


def test_a_buffer_that_torch_empty_makes_is_noticed(tmp_path, monkeypatch):
    """Its values would be those of whatever was in memory."""
    register = torch.nn.Embedding.__init__

    def with_buffer(module, *sizes, **options):
        register(module, *sizes, **options)
        module.register_buffer("filled", torch.empty(2).fill_(1.0), persistent=False)

    monkeypatch.setattr(torch.nn.Embedding, "__init__", with_buffer)
    with pytest.raises(AssertionError, match="has no values"):
        empty_model(tiny.train_config(tmp_path))
