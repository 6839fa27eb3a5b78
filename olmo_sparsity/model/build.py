"""The model of a config: OLMo, GPT-NeoX or tuples, alone or inside a `PositionPredictor`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from olmo_sparsity.config.schema import Config, PositionsConfig
from olmo_sparsity.model.neox import PositionedNeoX
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.predictive import PositionPredictor
from olmo_sparsity.model.tuples import TupleAttention
from olmo_sparsity.util.rng import Stream

Decoder = PositionedOLMo | PositionedNeoX | TupleAttention
Model = Decoder | PositionPredictor


def build_model(config: Config) -> Model:
    """The model of ``config`` with freshly drawn weights on the CPU, the same for a seed on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        decoder = _decoder(config, init_device="cpu", init_params=True)
    return _wrap(decoder, config)


def empty_model(config: Config, device: str | torch.device = "cpu") -> Model:
    """A model of this shape, on ``device``, whose weights are about to be loaded: nothing is drawn, nothing is written.

    Buffers have their values, also those that no checkpoint holds, such as frequencies of rotation. ``meta``: shapes
    alone, no memory.
    """
    device = torch.device(device)
    init_device = "meta" if device.type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), _WithoutMemory():
        model = _wrap(_decoder(config, init_device=init_device, init_params=False), config)
    assert not any(buffer.is_meta for buffer in model.buffers()), "a buffer made by torch.empty has no values"
    weights = {
        name: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


class _WithoutMemory(TorchFunctionMode):
    """`torch.empty`, of which PyTorch's modules make their weights, gives tensors on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function is torch.empty:
            options = {**options, "device": "meta"}
        return function(*args, **options)


def as_predictor(model: Model) -> PositionPredictor:
    """The model itself, or a `PositionPredictor` without tables around a bare decoder: there is one way to decode."""
    if isinstance(model, PositionPredictor):
        return model
    return PositionPredictor(model, PositionsConfig(), seed=0).train(model.training)


def decoder_of(model: Model) -> Decoder:
    """The decoder inside, or the model itself."""
    return model.decoder if isinstance(model, PositionPredictor) else model


def token_embedding(model: Model) -> nn.Embedding:
    """The table in which the model looks its tokens up; of tuples, that of what they predict."""
    decoder = decoder_of(model)
    if isinstance(decoder, TupleAttention):
        return decoder.values
    if isinstance(decoder, PositionedNeoX):
        return decoder.model.gpt_neox.embed_in
    modules: Any = decoder.transformer
    return modules["wte"]


def _decoder(config: Config, *, init_device: str, init_params: bool) -> Decoder:
    model = config.model
    if model.family == "olmo":
        return PositionedOLMo(replace(model, init_device=init_device), init_params=init_params)
    if model.family == "tuples":
        return TupleAttention(model, config.num_tuple_ids)
    return PositionedNeoX(model)


def _wrap(decoder: Decoder, config: Config) -> Model:
    """The decoder in a `PositionPredictor`; where that adds nothing, alone, so that its weights keep their names."""
    positions = config.positions
    if isinstance(decoder, TupleAttention) or (not positions.is_coupled and positions.rotate == "ids"):
        return decoder
    return PositionPredictor(decoder, positions, seed=config.seed ^ Stream.ID_TABLE)
