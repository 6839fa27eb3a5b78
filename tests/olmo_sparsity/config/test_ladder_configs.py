"""The configs of the ladder and of the encodings: what is said to be the same in them is the same."""

from dataclasses import asdict
from pathlib import Path

import pytest

from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import parse_duration
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


def tokens_of_run(config: Config) -> int:
    steps, unit = parse_duration(config.max_duration)
    assert unit == "steps"
    return int(steps) * config.global_train_batch_size * config.model.max_sequence_length


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_every_rung_has_five_tokens_per_parameter_and_the_size_it_is_named_after(path):
    config = load_config(path, warn=False)
    parameters = sum(parameter.numel() for parameter in empty_model(config, "meta").parameters())
    assert tokens_of_run(config) / parameters == pytest.approx(5, abs=0.01)
    assert f"{parameters / 1e6:.1f}m" == path.stem
    assert path.read_text().startswith(f"# {parameters:,} parameters")


def test_rungs_differ_in_shape_and_steps_only():
    assert len(RUNGS) >= 4
    alike = [without(values_of(path), "d_model", "n_heads", "n_layers", "max_duration") for path in RUNGS]
    assert all(each == alike[0] for each in alike)


def test_encodings_differ_in_positions_and_learning_rate_only():
    alike = [without(values_of(path), "positions", "learning_rate", *OF_MODEL) for path in ENCODINGS]
    assert all(each == alike[0] for each in alike)
    ways = {str((each["positions"], [each["model"][name] for name in OF_MODEL]))
            for each in map(values_of, ENCODINGS)}  # fmt: skip
    assert len(ways) == len(ENCODINGS) >= 15


def test_what_is_switched_on_after_training_goes_on_from_rope_for_an_eighth_as_long():
    rope = values_of(CONFIGS / "length" / "rope.yaml")
    own = ("initial_weights", "max_duration", "scheduler", "positions", "learning_rate", *OF_MODEL)
    assert [path.stem for path in LATER] == ["drope", "ssmax-late"]
    for values in map(values_of, LATER):
        assert without(values, *own) == without(rope, *own)
        assert values["initial_weights"].startswith("runs/encodings/config=rope,seed=")
        assert int(values["max_duration"]) == round(int(rope["max_duration"]) / 8)


def test_the_encoding_pose_is_the_rung_of_its_size():
    encoding, rung = (values_of(CONFIGS / name) for name in ("length/pose.yaml", "ladder/1.0m.yaml"))
    assert without(encoding, "learning_rate") == without(rung, "learning_rate")
