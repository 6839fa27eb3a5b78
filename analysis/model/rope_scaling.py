"""Checkpoints that are changed when they are loaded.

``CKPT@yarn:4`` is CKPT with RoPE scaled by YaRN to 4 times its length; ``CKPT@untrained`` has its architecture and
freshly drawn weights (docs/method.md, 2.8). Shapes: D dimensions of a head that are rotated.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analysis.model.adapters import OlmoForAnalysis, PositionedCausalLM
from analysis.model.load import TRANSFORMERS_CONFIG, LoadedModel, adapter_of, find_model, load_for_analysis
from analysis.model.mesa import MesaForAnalysis
from analysis.records.schema import UNTRAINED
from olmo_sparsity.checkpoint import config_of
from olmo_sparsity.model.rope_scaling import LOG_N, MESA, RopeScaling, split_scaling
from olmo_sparsity.util.errors import UserError

_USUAL = "default"  # transformers' name of RoPE as it was trained
UNTRAINED_SEED = 0
"""Of freshly drawn weights."""


def split_checkpoint(text: str) -> tuple[Path, tuple[str, float] | None]:
    """The folder that ``CKPT`` or ``CKPT@scheme:factor`` means, see `find_model`, and the scheme with its factor.

    Of ``CKPT@untrained`` it is `UNTRAINED` with its seed. Raises `UserError` where there is no such folder or scheme.
    """
    if Path(text).exists():
        return find_model(text), None
    path, at, what = text.rpartition("@")
    if at and what == UNTRAINED:
        return find_model(path), (UNTRAINED, UNTRAINED_SEED)
    path, asked = split_scaling(text)
    return find_model(path), asked


def load_scaled(text: str, prefix: str = "none", dtype: str = "fp32") -> LoadedModel:
    """Load ``CKPT``, ``CKPT@scheme:factor`` or ``CKPT@untrained``, behind a prefix, see `prefix_of`.

    The original length of a scaled one is what its position ids reached in training.

    Raises `UserError` as `load_for_analysis` does, and where the model has no RoPE that could be scaled.
    """
    return _load_scaled(text, dtype).behind(prefix)


def _load_scaled(text: str, dtype: str) -> LoadedModel:
    folder, asked = split_checkpoint(text)
    loaded = load_for_analysis(folder, dtype)
    if asked is None:
        return loaded
    if asked[0] == UNTRAINED:
        return _untrained(loaded)
    scaling = RopeScaling(*asked, original_length=_original_length(loaded, asked[0], text))
    if not isinstance(loaded.model, OlmoForAnalysis):
        assert isinstance(loaded.model, PositionedCausalLM)
        _scale_transformers(loaded.model, scaling, text)
        return replace(loaded, rope_scaling=scaling)
    loaded.model.model.rope_scaling = scaling
    model = MesaForAnalysis(loaded.model.model, scaling).eval() if scaling.name == MESA else loaded.model
    return replace(loaded, model=model, rope_scaling=scaling)


def _untrained(loaded: LoadedModel) -> LoadedModel:
    """The same architecture with weights as they are before the first step, drawn with `UNTRAINED_SEED`."""
    if (loaded.checkpoint / TRANSFORMERS_CONFIG).is_file():
        inner: Any = loaded.model.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(UNTRAINED_SEED)
            fresh: nn.Module = type(inner)(inner.config)
    else:
        from olmo_sparsity.model.build import build_model

        config = config_of(loaded.checkpoint)
        fresh = build_model(replace(config, seed=UNTRAINED_SEED))
    digest = hashlib.sha256()
    for name, tensor in fresh.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    model = adapter_of(fresh, str(loaded.checkpoint)).eval().requires_grad_(False)
    return replace(loaded, model=model, weights_sha256=digest.hexdigest(), training_seed=None, untrained=True)


def _original_length(loaded: LoadedModel, name: str, text: str) -> int:
    if isinstance(loaded.model, OlmoForAnalysis):
        from olmo_sparsity.attention import SOFTMAX
        from olmo_sparsity.export import position_reach

        config = loaded.model.model.config
        if not config.encoding.rotates:
            raise UserError(
                f"{text}: {loaded.checkpoint} was not trained with RoPE: there is nothing to scale; leave @… out"
            )
        if name in (LOG_N, MESA) and (config.attention != SOFTMAX or config.nope_layer_interval is not None):
            raise UserError(
                f"{text}: {name} is for softmax attention with RoPE in every layer, and {loaded.checkpoint} has "
                f"model.attention {config.attention} and model.nope_layer_interval {config.nope_layer_interval}; leave "
                "@… out"
            )
        return position_reach(config_of(loaded.checkpoint))
    if loaded.model.max_positions is None:
        raise UserError(
            f"{text}: the configuration of {loaded.checkpoint} names no max_position_embeddings, the length to start "
            "from; leave @… out"
        )
    return loaded.model.max_positions


def _scale_transformers(model: PositionedCausalLM, scaling: RopeScaling, text: str) -> None:
    """Change the frequencies that a transformers model keeps in its rotary modules."""
    if scaling.name in (LOG_N, MESA):
        raise UserError(
            f"{text}: transformers' attention has no place for {scaling.name}; give the checkpoint it was exported from"
        )
    rotary = [module for module in model.model.modules() if hasattr(module, "inv_freq")]
    parameters = getattr(model.model.config.get_text_config(), "rope_parameters", None) or {}
    if not rotary or parameters.get("rope_type") != _USUAL:
        has = parameters.get("rope_type", "no RoPE") if rotary else "no RoPE"
        raise UserError(f"{text}: this model has {has}, and only plain RoPE can be scaled; leave @… out")
    for module in rotary:
        module.inv_freq, module.attention_scaling = scaling.apply(module.inv_freq, parameters["rope_theta"])
