"""The configs of the ladder and of the encodings: what is said to be the same in them is the same."""

from dataclasses import asdict
from pathlib import Path

import pytest

from olmo_sparsity.config.durations import parse_duration
from olmo_sparsity.config.load import load_config
from olmo_sparsity.model.build import empty_model

CONFIGS = Path(__file__).parents[3] / "configs"
RUNGS = sorted(path for path in (CONFIGS / "ladder").glob("*.yaml") if path.name != "base.yaml")
BESIDE = sorted(path for path in (CONFIGS / "length").glob("*.yaml") if path.name != "base.yaml")
LATER = [path for path in BESIDE if "initial_weights" in path.read_text()]
ENCODINGS = [path for path in BESIDE if path not in LATER]
OF_MODEL = ("rope", "nope", "alibi", "attention", "nope_layer_interval", "rope_window")


def values_of(path: Path) -> dict:
    return asdict(load_config(path, warn=False))


def without(values: dict, *names: str) -> dict:
    kept = {name: value for name, value in values.items() if name not in ("run_name", "save_folder", *names)}
    parts = {part: {k: v for k, v in kept[part].items() if k not in names} for part in ("model", "optimizer")}
    return {**kept, **parts}


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_every_rung_has_five_tokens_per_parameter_and_the_size_it_is_named_after(path):
    config = load_config(path, warn=False)
    parameters = sum(parameter.numel() for parameter in empty_model(config, "meta").parameters())
    steps, unit = parse_duration(config.max_duration)
    tokens = steps * config.global_train_batch_size * config.model.max_sequence_length
    assert unit == "steps" and tokens / parameters == pytest.approx(5, abs=0.01)
    assert f"{parameters / 1e6:.1f}m" == path.stem
    assert path.read_text().startswith(f"# {parameters:,} parameters")


ALIKE = {
    "rungs": (RUNGS, ("d_model", "n_heads", "n_layers", "max_duration")),
    "encodings": (ENCODINGS, ("positions", "learning_rate", *OF_MODEL)),
    "switched on after training": (
        [CONFIGS / "length" / "rope.yaml", *LATER],
        ("initial_weights", "max_duration", "scheduler", "positions", "learning_rate", *OF_MODEL),
    ),
    "pose, and the rung of its size": (
        [CONFIGS / "length" / "pose.yaml", CONFIGS / "ladder" / "1.0m.yaml"], ("learning_rate",)
    ),
}  # fmt: skip
"""Configs, and what they may differ in."""


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_compared_differs_in_nothing_else(name):
    paths, names = ALIKE[name]
    first, *others = (without(values_of(path), *names) for path in paths)
    assert others and all(other == first for other in others)
