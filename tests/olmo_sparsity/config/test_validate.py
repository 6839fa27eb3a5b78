"""What is refused because it would silently train something else, or lose a run's work."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from olmo.config import TrainConfig

from olmo_sparsity.config.durations import parse_duration
from olmo_sparsity.config.fields import MAY_CHANGE_ON_RESUME, leaves
from olmo_sparsity.config.load import load_config
from olmo_sparsity.config.olmo_fields import IGNORED, REFUSED
from olmo_sparsity.config.schema import Config
from tests.olmo_sparsity.config.conftest import BASE, ROOT, refusal
from tests.support.refusals import refused

FLOATS = [name for name, value in leaves(Config()).items() if isinstance(value, float)]


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_every_number_is_finite(value: str) -> None:
    message = refusal(BASE, *(f"--{name}={value}" for name in FLOATS))
    assert len(FLOATS) > 15 and all(f"{name}: {value[1:]} is no finite number" in message for name in FLOATS)


# Overrides of configs/base.yaml (PoSE, window 1024, target 4096, 12 heads of 64), and the field that is refused.
INVALID = {
    # values
    "positions.scheme=poes": "positions.scheme",
    "max_grad_norm=0": "max_grad_norm",
    "auxiliary_loss_multiplier=-1": "auxiliary_loss_multiplier",
    r"tokenizer.identifier=\${seed}": "tokenizer.identifier",
    "optimizer.betas=[1.5,0.9]": "optimizer.betas",
    "data.num_workers=-1": "data.num_workers",
    "data.prefetch_factor=0": "data.prefetch_factor",
    "time_limit=-5": "time_limit",
    "stop_at=0": "stop_at",
    "stop_after=0": "stop_after",
    "seed=18446744073709551616": "seed",
    "data.seed=-1": "data.seed",
    "model.n_layers=1001": "model.n_layers",
    "model.embedding_size=50279": "model.embedding_size",
    "model.family=gpt_neox model.embedding_size=50279": "model.embedding_size",
    # heads
    "model.n_heads=5": "model.n_heads",
    "model.n_kv_heads=5": "model.n_kv_heads",
    "model.d_model=36": "model.n_heads",
    "model.family=gpt_neox model.n_heads=5": "model.n_heads",
    # what OLMo has and this engine does not
    "restore_dataloader=false": "restore_dataloader",
    "load_path=runs/a": "load_path",
    "data.label_mask_paths=[a]": "data.label_mask_paths",
    # what does not go together
    "model.alibi=true": "model.rope",
    "model.rope=false": "model.rope",
    "model.nope_layer_interval=99": "model.nope_layer_interval",
    "model.attention=fox model.block_type=llama": "model.block_type",
    "model.rope_window=8 model.block_type=llama": "model.block_type",
    "model.rope=false model.nope=true model.rope_window=8": "model.rope_window",
    "positions.scheme=random_float model.attention=dape-v2": "positions.scheme",
    "positions.target_length=1024": "positions.target_length",
    "positions.scheme=random_start positions.target_length=1023": "positions.target_length",
    "positions.chunks=513": "positions.chunks",
    "positions.scheme=contiguous positions.content=skip": "positions.content",
    "positions.coupled_share=0": "positions.coupled_share",
    "positions.rotate=none": "positions.rotate",
    "positions.scheme=coupled": "positions.scheme",
    "model.family=gpt_neox model.attention=fox": "model.attention",
    "needles.share=0.5 needles.per_window=30 needles.value_tokens=[12]": "needles.per_window",
    "corpus.path=null data.datasets.b=[c]": "data.datasets",
    "data.paths=[a]": "corpus.path",
    "task.parameters.k=2": "task.parameters",
    "evaluation.until=0.9 evaluation.interval=9": "evaluation.until",
    "evaluation.until=0 evaluation.interval=9": "evaluation.until",
    "deepspeed.config=a.json scheduler.grad_clip_warmup_steps=10": "scheduler.grad_clip_warmup_steps",
    "scheduler.t_warmup=3e9 scheduler.units=tokens max_duration=2e9T": "scheduler.t_warmup",
    "scheduler.t_warmup=5242881 scheduler.units=tokens max_duration=10": "scheduler.t_warmup",
    "scheduler.t_warmup=11 max_duration=5242880T": "scheduler.t_warmup",
    "corpus.path=null data.paths=[a] evaluation.interval=5": "evaluation.interval",
    "scheduler.name=inverse_sqrt_with_warmup scheduler.t_warmup=0": "scheduler.t_warmup",
}
ACCEPTED = [
    ("base", "positions.scheme=random_start positions.target_length=null positions.chunks=1"),
    ("base", "positions.chunks=512 positions.target_length=1025 positions.content=skip"),
    ("base", "scheduler.t_warmup=10001 max_duration=2ep"),
    ("base", "scheduler.t_warmup=5242880 scheduler.units=tokens max_duration=10"),
    ("base", "scheduler.t_warmup=10 max_duration=5242880T"),
    ("base", "scheduler.t_warmup=11 scheduler.name=constant max_duration=10"),
    ("base", "model.rope=false model.nope=true model.d_model=36 positions.scheme=contiguous"),
    ("base", "seed=18446744073709551615 data.seed=18446744073709551615"),
    ("base", "corpus.path=null data.paths=[a] evaluation.interval=5 evaluation.paths=[b]"),
    ("synthetic/planted-tuples", "model.n_heads=5 model.d_model=32"),
    # attention that takes ids for positions has ids that are
    ("synthetic/addition-small", "model.family=olmo model.attention=ssmax positions.rotate=index"),
    ("synthetic/addition-small", "model.family=olmo model.attention=ssmax positions.scheme=random_start"),
]


def options(overrides: str) -> list[str]:
    return [f"--{override}" for override in overrides.split()]


@pytest.mark.parametrize("overrides", INVALID)
def test_refused_by_name(overrides: str) -> None:
    assert refusal(BASE, *options(overrides)).startswith(f"FILE: {INVALID[overrides]}: ")


@pytest.mark.parametrize(("name", "overrides"), ACCEPTED)
def test_accepted(name: str, overrides: str) -> None:
    load_config(ROOT / "configs" / f"{name}.yaml", options(overrides))


# Overrides of configs/synthetic, and the field that is refused.
OF_TASKS = [
    ("planted-tuples", "model.tuples.size=4", "model.tuples.size"),
    ("planted-tuples", "model.attention=ssmax", "model.attention"),
    ("planted-tuples", "activation_checkpointing=whole_layer", "activation_checkpointing"),
    ("addition-small", "model.family=olmo model.attention=ssmax positions.rotate=none", "model.attention"),
    ("addition-small", "model.vocab_size=100", "model.vocab_size"),
    ("addition-small", "model.max_sequence_length=8", "model.max_sequence_length"),
    ("addition-small", "positions.table_size=20", "positions.table_size"),
    (
        "copy-small",  # of 20 symbols a sample has 43 tokens, and coupled ids up to 21
        "task.parameters.test_length=[2,20] positions.table_size=42 positions.coupled_share=0.5",
        "positions.table_size",
    ),
    ("addition-small", "max_duration=2ep", "max_duration"),
    ("addition-small", "positions.scheme=contiguous positions.id_noise=0.1", "positions.id_noise"),
    ("multi_addition-small", "positions.scheme=pose positions.rotate=ids positions.chunks=6", "positions"),
    ("multi_addition-small", "positions.second_table_size=4", "positions.second_table_size"),
    ("multi_addition-small", "positions.second_table_size=null", "positions.second_table_size"),
    ("multi_addition-small", "positions.scheme=coupled positions.rotate=ids", "positions.rotate"),
    ("multi_addition-small", "positions.id_noise=0.1", "positions"),
    ("addition-small", "positions.second_table_size=4", "positions.second_table_size"),
    ("sparse_parity-small", "positions.scheme=predicted positions.table_size=99", "positions.scheme"),
]


@pytest.mark.parametrize(("name", "overrides", "field"), OF_TASKS)
def test_of_tasks(name: str, overrides: str, field: str) -> None:
    lines = refusal(ROOT / "configs" / "synthetic" / f"{name}.yaml", *options(overrides)).splitlines()
    assert any(line.removeprefix("FILE: ").strip().startswith(field) for line in lines)


def olmo_fields(values: Any, prefix: str = "") -> set[str]:
    """The fields of OLMo's config with its sections opened, but for those that are ignored as a whole."""
    names = set()
    for item in fields(values):
        name, value = prefix + item.name, getattr(values, item.name)
        opened = is_dataclass(value) and name not in IGNORED
        names |= olmo_fields(value, f"{name}.") if opened else {name}
    return names


def test_every_field_of_olmo_is_read_ignored_or_refused() -> None:
    """A new version of OLMo changes the number: decide of a new field whether it is read, `IGNORED` or `REFUSED`."""
    names = olmo_fields(TrainConfig())
    assert (
        len(names) == 139
        and {*IGNORED, *REFUSED} <= names
        and not {*MAY_CHANGE_ON_RESUME} & {*IGNORED, *REFUSED}
    )


def test_duration() -> None:
    expected = {10: (10, "steps"), "1e4": (10_000, "steps"), "2e12T": (2e12, "tokens"), "2ep": (2, "epochs")}
    assert {value: parse_duration(value) for value in expected} == expected


@pytest.mark.parametrize("value", ["T", "nan", "infT", 0, "1.5ep", "2t"])
def test_no_duration(value: int | str) -> None:
    with refused("is no duration; give"):
        parse_duration(value)
