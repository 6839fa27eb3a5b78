"""The fields of a run's configuration: OLMo's `TrainConfig`, and our sections.

Load a configuration with `config.load.load_config`.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from olmo import config as olmo

from olmo_sparsity.attention import SOFTMAX
from olmo_sparsity.config.rules import EVERY_FAMILY, checked
from olmo_sparsity.positions import COUPLED_SCHEMES


@dataclass
class TuplesConfig(olmo.BaseConfig):
    """The idealised transformer of the theory, `model.family: tuples`: one attention over tuples of tokens."""

    size: Literal[1, 2, 3] = 2
    """k: tokens of a tuple. Time grows with the k-th power of the length, memory with that of the vocabulary."""

    locality: int | None = checked(None, at_least=1)
    """Tuples whose position ids span more than this have no weight. Null: all have."""

    relative: bool = True
    """Whether the weight of a tuple depends on its position ids by their differences alone."""

    anchored: bool = False
    """Whether a tuple must contain the last token that was read, as where a response goes on from its last token."""


@dataclass
class ModelConfig(olmo.ModelConfig):
    """OLMo's model configuration, the one position encoding that OLMo lacks, and the other architectures."""

    # OLMo's fields, which it describes.
    d_model: int = checked(768, at_least=1, families=EVERY_FAMILY)
    n_heads: int = checked(12, at_least=1, families=EVERY_FAMILY)
    n_kv_heads: int | None = checked(None, at_least=1)
    clip_qkv: float | None = checked(None, above=0)
    n_layers: int = checked(12, at_least=1, at_most=1000, families=EVERY_FAMILY)
    mlp_ratio: int = checked(4, at_least=1, in_neox=4)
    mlp_hidden_size: int | None = checked(None, at_least=1)
    activation_type: olmo.ActivationType = checked(olmo.ActivationType.swiglu, in_neox="gelu")
    block_group_size: int = checked(1, at_least=1)
    alibi_bias_max: float = checked(8.0, above=0)
    rope: bool = checked(False, families=EVERY_FAMILY)
    rope_theta: int = checked(10_000, at_least=1, families=EVERY_FAMILY)
    attention_dropout: float = checked(0.1, at_least=0, at_most=1, families=EVERY_FAMILY)
    residual_dropout: float = checked(0.1, at_least=0, at_most=1, families=EVERY_FAMILY)
    embedding_dropout: float = checked(0.1, at_least=0, at_most=1, families=EVERY_FAMILY)
    layer_norm_type: olmo.LayerNormType = checked(olmo.LayerNormType.default, in_neox="default")
    layer_norm_with_affine: bool = checked(True, in_neox=True)
    layer_norm_eps: float = checked(1e-5, at_least=0, families=EVERY_FAMILY)
    max_sequence_length: int = checked(1024, at_least=2, families=EVERY_FAMILY)
    include_bias: bool = checked(True, in_neox=True)
    bias_for_layer_norm: bool | None = checked(None, in_neox=True)
    vocab_size: int = checked(50257, at_least=1, families=EVERY_FAMILY)
    embedding_size: int | None = checked(50304, at_least=0, families=EVERY_FAMILY)
    weight_tying: bool = checked(True, in_neox=False)
    eos_token_id: int = checked(50256, at_least=0, families=EVERY_FAMILY)
    pad_token_id: int = checked(50256, at_least=0, families=EVERY_FAMILY)
    init_device: str | None = checked(None, families=EVERY_FAMILY)
    init_fn: olmo.InitFnType = checked(olmo.InitFnType.normal, in_neox="normal")
    init_std: float = checked(0.02, at_least=0, families=EVERY_FAMILY)
    init_cutoff_factor: float | None = checked(None, above=0, in_neox=None)
    precision: str | None = checked(None, families=EVERY_FAMILY)
    emb_init_std: float | None = checked(None, at_least=0)

    family: Literal["olmo", "gpt_neox", "tuples"] = checked("olmo", families=EVERY_FAMILY)
    """
    olmo; or gpt_neox: transformers' GPT-NeoX with rotary embedding over the whole head; or, for tasks, tuples: the
    idealised transformer of the theory. Of this section GPT-NeoX reads d_model, n_heads, n_layers, rope_theta,
    max_sequence_length, vocab_size, embedding_size, layer_norm_eps, init_std and the three dropouts, which must be
    equal. Tuples reads max_sequence_length, vocab_size, embedding_size and `tuples`; the rest may stay as it is for
    GPT-NeoX.
    """

    tuples: TuplesConfig = checked(default_factory=TuplesConfig, families=("tuples",))
    """Of `family: tuples`."""

    nope: bool = False
    """
    No position information at all; needs `rope: false` and `alibi: false`. Without it OLMo gives such a model
    learned absolute position embeddings.
    """

    attention: str = SOFTMAX
    """softmax, or a name of `olmo_sparsity.attention.ATTENTIONS` (docs/method.md 1)."""

    nope_layer_interval: int | None = checked(None, at_least=1)
    """
    RNoPE: a layer whose number, from 1, is a multiple of this has no rotation; needs `rope: true`. Null: all rotate.
    """

    rope_window: int | None = checked(None, at_least=1)
    """
    Layers with RoPE see only tokens whose ids differ from the query's by less than this. Null: all.
    """

    @property
    def learns_positions(self) -> bool:
        """Whether ids are looked up in a table of `max_sequence_length` rows: OLMo's, where no other encoding is on."""
        return not (self.rope or self.alibi or self.nope)

    @property
    def embedding_rows(self) -> int:
        """Tokens that the model tells apart: the vocabulary, and the rows that pad it."""
        return self.embedding_size or self.vocab_size


@dataclass
class OptimizerConfig(olmo.OptimizerConfig):
    """OLMo's fields, which it describes."""

    learning_rate: float = checked(1e-4, at_least=0, recorded_on_resume=True)
    weight_decay: float = checked(0.01, at_least=0)
    betas: tuple[float, float] = checked((0.9, 0.95), at_least=0, below=1)
    eps: float = checked(1e-5, at_least=0)


@dataclass
class SchedulerConfig(olmo.SchedulerConfig):
    """OLMo's fields, which it describes."""

    t_warmup: int | float = checked(100, at_least=0)
    t_max: int | float | None = checked(None, at_least=0)
    alpha_f: float = checked(0.1, at_least=0)
    grad_clip_warmup_steps: int | float | None = checked(None, at_least=0)
    grad_clip_warmup_factor: float | None = checked(None, at_least=0)
    warmup_min_lr: float | None = checked(None, at_least=0)


@dataclass
class TokenizerConfig(olmo.TokenizerConfig):
    identifier: str | None = checked(  # type: ignore[assignment]
        None, may_change_on_resume=True, about_text=True
    )
    """A file, a tokenizer that OLMo ships, or a name on the Hugging Face Hub. Null: the corpus's own tokenizer."""


@dataclass
class InstanceFilterConfig(olmo.InstanceFilterConfig):
    """OLMo's fields: the periods that are looked for, and from how many repetitions on a window is left out."""

    repetition_max_period: int = checked(13, at_least=1)
    repetition_min_period: int = checked(1, at_least=1)
    repetition_max_count: int = checked(32, at_least=1)


@dataclass
class DataConfig(olmo.DataConfig):
    """OLMo's fields, which it describes but for two."""

    paths: list[str] | None = checked(None, may_change_on_resume=True, about_text=True)
    num_workers: int = checked(0, at_least=0, at_most=1024, may_change_on_resume=True)
    pin_memory: bool = checked(False, may_change_on_resume=True)
    prefetch_factor: int | None = checked(None, at_least=1, at_most=1024, may_change_on_resume=True)
    persistent_workers: bool = checked(False, may_change_on_resume=True)
    timeout: int = checked(0, at_least=0, at_most=1_000_000, may_change_on_resume=True)
    seed: int | None = checked(None, at_least=0, at_most=2**64 - 1)
    instance_filter: InstanceFilterConfig | None = checked(None, about_text=True)

    drop_last: bool = True
    """Always true: every step trains on a whole global batch."""

    skip_steps: str | None = checked(None, recorded_on_resume=True)
    """
    Steps that are counted and not trained: 1200:1210 leaves out steps 1200 to 1209; more ranges follow after commas.
    For the batches that a run diverged on: data and schedule go on as if they had been trained. Quoted in YAML.
    """


@dataclass
class PositionsConfig(olmo.BaseConfig):
    """Which position ids the tokens of a training window get."""

    scheme: str = "contiguous"
    """
    A name of `olmo_sparsity.positions.SCHEMES`: contiguous, random_start, pose, random_float; and, for tasks whose
    tokens are coupled, coupled (the ids of the response are given at test, by an oracle) and predicted (Predictive
    Position Coupling).
    """

    chunks: int = checked(2, at_least=1)
    """PoSE: into how many chunks a window is cut."""

    target_length: int | None = checked(None, at_least=1)
    """
    T': the position ids stay below it. Null: `model.max_sequence_length`. PoSE needs a longer one. Not read by coupled
    and predicted, whose ids stay below `table_size`.
    """

    table_size: int | None = checked(None, at_least=1)
    """coupled, predicted: rows of the id embedding and of the id head. The longest test sample must fit."""

    second_table_size: int | None = checked(None, at_least=1)
    """coupled, predicted: the same of the second level, for tasks whose tokens are coupled on two; null for others."""

    skip_probability: float = checked(0.0, at_least=0, at_most=1)
    """
    coupled, predicted: in this share of the training samples the coupled ids jump ahead once, at a uniform place, by a
    uniform distance that the table has room for: PoSE of coupled ids [ours]. Without it a model never sees two ids
    farther apart than the longest training sample has them.
    """

    coupled_share: float = checked(1.0, at_least=0, at_most=1)
    """
    predicted: the share of the training samples whose coupled ids are given. The others have contiguous ids after a
    random start, and train the next token alone [ours].
    """

    id_noise: float = checked(0.0, at_least=0, at_most=1)
    """
    coupled, predicted: each coupled id of a training sample is, with this probability, one of the sample's range,
    uniformly drawn [ours].
    """

    rotate: Literal["ids", "index", "none"] = "ids"
    """What RoPE rotates by: ids (of the scheme), index (the place among the tokens without padding), none (NoPE)."""

    id_weight: float = checked(1.0, at_least=0)
    """predicted: weight of the id's cross-entropy, which is added to the token's."""

    content: Literal["contiguous", "skip"] = checked("contiguous", about_text=True)
    """PoSE: whether the text of the chunks is contiguous, or skips as their ids do (contiguous | skip)."""

    @property
    def is_coupled(self) -> bool:
        """Whether tokens that belong together share an id, which the model looks up in a table."""
        return self.scheme in COUPLED_SCHEMES

    @property
    def predicts_ids(self) -> bool:
        """Whether the model has an id head, and at test predicts the ids of the response."""
        return self.scheme == "predicted"


@dataclass
class CorpusConfig(olmo.BaseConfig):
    """The corpus to train on. Which text it is, is compared by its content when a run is resumed."""

    path: str | None = checked(None, may_change_on_resume=True, about_text=True)
    """
    A folder made by `olmo-sparsity prepare_data`; `data.paths`, `data.memmap_dtype` and the tokenizer then come
    from its manifest.
    """


@dataclass
class NeedlesConfig(olmo.BaseConfig):
    """
    Needles woven into training windows of text: a random key followed by a value, and further on the same key with
    its value again, at positions drawn from the seed [ours]. For models that are to find what they have read once.
    """

    share: float = checked(0.0, at_least=0, at_most=1, about_text=True)
    """Of the windows that get needles. 0: none."""

    per_window: int = checked(1, at_least=1)
    """Needles of such a window."""

    key_tokens: int = checked(2, at_least=1)
    """Tokens of a key. One key in eight is never woven, so that tests can use it."""

    value_tokens: list[int] = checked(default_factory=lambda: [1], at_least=1)
    """Tokens of a value, drawn from these for each needle."""


@dataclass
class DeepSpeedConfig(olmo.BaseConfig):
    """Training with DeepSpeed's ZeRO."""

    config: str | None = None
    """
    A JSON of `configs/deepspeed`, or your own. Null: no DeepSpeed. What this YAML decides (batch sizes, clipping,
    precision, optimizer) is "auto" or absent there.
    """


@dataclass
class CompilerConfig(olmo.CompilerConfig):
    """How `torch.compile` is called."""

    from_steps: int = checked(500, at_least=0)
    """
    A run of fewer steps is not compiled, which takes tens of seconds; nor one with fine-grained activation
    checkpointing. 0: compiled in any case.
    """


@dataclass
class CheckpointsConfig(olmo.BaseConfig):
    """Which checkpoints are kept, besides the last `save_num_checkpoints_to_keep`."""

    keep_every: int | None = checked(None, at_least=1)
    """Also keep every checkpoint whose step is a multiple of this. Null: none."""


@dataclass
class TaskConfig(olmo.BaseConfig):
    """A synthetic task to train on, in place of text."""

    name: str | None = None
    """A name of `olmo_sparsity.tasks.TASKS`, such as sparse_parity. Null: text."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """The fields of the task that differ from their defaults, such as `train_length: [5, 20]`."""

    length_groups: int | None = checked(None, at_least=1)
    """
    A minimax objective over lengths: a step's samples are grouped by length into this many groups, and the step trains
    on the group whose mean loss is largest [ours; the paper's improved bound assumes such an objective]. Null: the mean
    over all samples.
    """


@dataclass
class EvaluationConfig(olmo.BaseConfig):
    """
    Held-out measures while training. Text: the loss, in windows of the training length. A task: exact match by length,
    free-running, on test samples; of this section it reads interval, windows (how many samples of a length) and seed.
    """

    paths: list[str] | None = checked(None, about_text=True)
    """Text: held-out token files, of type `data.memmap_dtype`. Null: the held-out split of `corpus.path`."""

    interval: int | None = checked(None, at_least=1)
    """Steps between two measurements; one is made at the last step, too. Null: never."""

    windows: int = checked(64, at_least=1)
    """How many windows are read, fewer where the held-out text has fewer."""

    until: float | None = checked(None, above=0, at_most=1)
    """
    A task: the run is finished before `max_duration` when the exact match at the longest training length reaches this.
    The learning rate is the one that the longer run has there. Null: it goes on to the end.
    """

    seed: int = checked(0, at_least=0, at_most=2**64 - 1)
    """Chooses the windows; apart from the run's own `seed`, so that runs are compared on the same windows."""


@dataclass
class WandbConfig(olmo.WandbConfig):
    """OLMo's fields, which it describes."""

    log_interval: int = checked(1, at_least=1)


@dataclass
class SpeedMonitorConfig(olmo.SpeedMonitorConfig):
    """OLMo's fields, which it describes."""

    window_size: int = checked(100, at_least=1, at_most=1_000_000)
    gpu_flops_available: float | int | None = checked(None, above=0)


_REMOVED_FIELDS: dict[str, Any] = {
    "corpus.stream": None,
    "corpus.train_split": "train",
    "corpus.heldout_split": "heldout",
    "positions.doc_mask": False,
    "positions.restart_at_documents": False,
    "positions.found": {"marks": [], "counted_from": [], "first_ids": []},
}
"""Fields of older checkpoints that were removed, and the value that had no effect; any other is refused."""
_REMOVED_WITHOUT_EFFECT = (
    "corpus.verify_checksums",
    "deepspeed.offload_optimizer",
    "evaluation.position_bins",
    "evaluation.position_length",
    "evaluation.batch_size",
    "tensorboard",
)
"""Removed fields that never had an effect on a model."""


@dataclass
class Config(olmo.TrainConfig):
    """Everything that decides a run. Load it with `load_config`."""

    # OLMo's fields, which it describes.
    run_name: str | None = checked(None, may_change_on_resume=True)
    seed: int = checked(6198, at_least=0, at_most=2**64 - 1)
    epoch: int | None = checked(None, at_least=0)
    dry_run: bool = checked(False, may_change_on_resume=True)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    save_folder: str = checked("./", may_change_on_resume=True)
    save_interval: int | None = checked(1000, at_least=1, may_change_on_resume=True)
    save_num_checkpoints_to_keep: int = checked(-1, unbounded=True, may_change_on_resume=True)
    save_overwrite: bool = checked(False, may_change_on_resume=True)
    max_duration: int | str = checked(10000, unbounded=True, recorded_on_resume=True)  # see `parse_duration`
    global_train_batch_size: int = checked(512, at_least=1, at_most=10_000_000)
    device_train_microbatch_size: int = checked(16, at_least=1, may_change_on_resume=True)
    max_grad_norm: float | None = checked(None, above=0, recorded_on_resume=True)
    wandb: WandbConfig | None = checked(None, may_change_on_resume=True)
    speed_monitor: SpeedMonitorConfig = checked(default_factory=SpeedMonitorConfig, may_change_on_resume=True)
    console_log_interval: int = checked(1, at_least=1, may_change_on_resume=True)
    softmax_auxiliary_loss: bool = checked(False, recorded_on_resume=True)
    auxiliary_loss_multiplier: float | None = checked(1e-4, at_least=0, recorded_on_resume=True)
    time_limit: float | None = checked(None, above=0, may_change_on_resume=True)
    stop_at: int | None = checked(None, at_least=1, may_change_on_resume=True)
    stop_after: int | None = checked(None, at_least=1, may_change_on_resume=True)
    activation_checkpointing: olmo.ActivationCheckpointingStrategy | None = checked(
        None, may_change_on_resume=True
    )
    gen1_gc_interval: int | None = checked(1, at_least=1, may_change_on_resume=True)

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model and its position encoding."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer, where it is not the corpus's own."""

    data: DataConfig = field(default_factory=DataConfig)
    """Token files and how they are read."""

    positions: PositionsConfig = field(default_factory=PositionsConfig)
    """Position ids of the training windows."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """A prepared corpus, in place of `data.paths`."""

    needles: NeedlesConfig = field(default_factory=NeedlesConfig)
    """Needles in the training windows of text."""

    task: TaskConfig = field(default_factory=TaskConfig)
    """A synthetic task, in place of a corpus."""

    evaluation: EvaluationConfig = checked(default_factory=EvaluationConfig, may_change_on_resume=True)
    """Held-out measures while training."""

    compile: CompilerConfig | None = checked(default_factory=CompilerConfig, may_change_on_resume=True)
    """The training step is compiled, in runs that are long enough, where a compiler is installed. Null: never."""

    precision: Literal["amp_bf16", "fp32"] | None = checked(None, may_change_on_resume=True)
    """Null: bf16 where the machine has it."""

    deepspeed: DeepSpeedConfig = checked(default_factory=DeepSpeedConfig, may_change_on_resume=True)
    """DeepSpeed's ZeRO, where its `config` is set."""

    profile: int | None = checked(None, at_least=1, at_most=100, may_change_on_resume=True)
    """
    How many steps of this start PyTorch's profiler watches in rank 0, after ten others; the run's folder `profile` gets
    a table of where their time goes, and a trace. Null: none.
    """

    checkpoints: CheckpointsConfig = checked(default_factory=CheckpointsConfig, may_change_on_resume=True)
    """Which checkpoints are kept."""

    initial_weights: str | None = None
    """Checkpoint, or run (then its last one), of the same shape and tokenizer, whose weights training starts from;
    optimizer, schedule and data start anew. For a longer window, say, or PoSE on a trained model."""

    @classmethod
    def update_legacy_settings(cls, config: Any) -> Any:
        """As OLMo's; also drops the fields of older checkpoints that were removed, where they had no effect."""
        config = super().update_legacy_settings(config)
        for name in (*_REMOVED_FIELDS, *_REMOVED_WITHOUT_EFFECT):
            section, _, key = name.rpartition(".")
            values = config.get(section) if section else config
            if not isinstance(values, MutableMapping) or key not in values:
                continue
            if name in _REMOVED_WITHOUT_EFFECT or values[key] == _REMOVED_FIELDS[name]:
                if values[key] and name in _REMOVED_WITHOUT_EFFECT:
                    logging.getLogger(__name__).warning("%s is gone, and ignored", name)
                del values[key]
        return config

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch, padding included."""
        return self.global_train_batch_size * self.model.max_sequence_length

    @property
    def target_length(self) -> int:
        """T' of the position schemes of windows: the length of a window where none is given."""
        return self.positions.target_length or self.model.max_sequence_length

    @property
    def max_positions(self) -> int:
        """One more than the largest position id of training: T' of the position scheme, or the window's length."""
        if self.positions.scheme == "contiguous":  # it ignores the target length
            return self.model.max_sequence_length
        return self.target_length

    @property
    def num_tuple_ids(self) -> int:
        """How many position ids ``model.family: tuples`` tells apart, from 0 on."""
        coupled = self.positions.table_size if self.positions.is_coupled else None
        return coupled or self.target_length
