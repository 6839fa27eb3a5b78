"""Models that are measured side by side on the same text: what is asked of them, and what identifies them.

Checkpoints with the same label are training seeds of one model. Shapes: L tokens of the longest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from analysis.measure.settings import MeasurementSettings
from analysis.model.load import OWN_FAMILY, LoadedModel
from analysis.model.rope_scaling import load_scaled, split_checkpoint
from olmo_sparsity.checkpoint import CONFIG
from olmo_sparsity.config.load import load_config
from olmo_sparsity.export import position_reach
from olmo_sparsity.model.rope_scaling import RopeScaling
from olmo_sparsity.util.errors import UserError

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(MeasurementSettings):
    """Which models are measured, on what text, and how."""

    checkpoints: tuple[str, ...]
    """Checkpoint folders, runs (then their last ones), or directories of causal language models of transformers; with
    ``@scheme:factor`` behind it RoPE is scaled (`olmo_sparsity.model.rope_scaling`)."""
    labels: tuple[str, ...]
    """A name for each, in figures and tables; checkpoints that share one are seeds of one model."""

    def told(self) -> Json:
        """What a result says of its settings: all but what stands elsewhere in it, or has no effect."""
        untold = ("checkpoints", "labels", "out", "device", "tokens_per_batch")
        return {name: value for name, value in asdict(self).items() if name not in untold}


def check_models(checkpoints: Sequence[str], labels: Sequence[str]) -> None:
    """Raise `UserError` where labels are missing, a checkpoint is none, or one of two seeds is the other."""
    if len(labels) != len(checkpoints):
        raise UserError(
            f"{len(checkpoints)} checkpoints need as many labels, not {', '.join(labels)}; mend --labels"
        )
    seen = set()
    for label, checkpoint in zip(labels, checkpoints, strict=True):
        meant = label, *split_checkpoint(checkpoint)
        if meant in seen:
            raise UserError(f"{checkpoint} is given twice as {label}; give each seed once")
        seen.add(meant)


def load_model_of(checkpoint: str, corpus: str, length: int) -> tuple[LoadedModel, RopeScaling | None]:
    """Load ``CKPT`` or ``CKPT@scheme:factor``. Raises `UserError` where it cannot read L tokens of the corpus."""
    loaded, scaling = load_scaled(checkpoint)
    loaded.check_corpus(corpus)
    check_reach(loaded, length)
    return loaded, scaling


def describe(loaded: LoadedModel, scaling: RopeScaling | None) -> Json:
    """What identifies a checkpoint, and what lengths it was trained on, where it is one of this project."""
    described: Json = {
        "checkpoint": str(loaded.checkpoint),
        "checkpoint_sha256": loaded.weights_sha256,
        "family": loaded.family,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "rope_scaling": None if scaling is None else asdict(scaling),
        "training_seed": loaded.training_seed,
        "training_length": None,
        "position_scheme": None,
        "position_target": None,
    }
    if loaded.family == OWN_FAMILY:
        config = load_config(loaded.checkpoint / CONFIG, warn=False)
        window, reach = config.model.max_sequence_length, position_reach(config)
        described["training_length"] = window
        described["position_scheme"] = config.positions.scheme
        described["position_target"] = reach if reach > window else None
    return described


def check_reach(loaded: LoadedModel, length: int) -> None:
    """Raise `UserError` where the model has no position embedding for ids up to L - 1.

    A rotary model is measured past the length that its configuration names: that is what is asked. Only a table of
    learned positions has an end, as one token at the last id shows.
    """
    if loaded.max_positions is None or length <= loaded.max_positions:
        return
    last = torch.tensor([[length - 1]])
    try:
        with torch.inference_mode():
            loaded.model(torch.zeros_like(last), position_ids=last)
    except (IndexError, RuntimeError) as error:
        raise UserError(
            f"{length:,} tokens are beyond the {loaded.max_positions:,} learned positions of {loaded.checkpoint} "
            f"({loaded.family}); lower --lengths to at most {loaded.max_positions:,}"
        ) from error
