"""The fields of a run's configuration: OLMo's `TrainConfig` and our sections. Load one with `config.load_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from olmo import config as olmo


@dataclass
class ModelConfig(olmo.ModelConfig):
    """OLMo's model configuration, the one position encoding that OLMo lacks, and the other architecture."""

    family: str = "olmo"
    """
    olmo, or gpt_neox: transformers' GPT-NeoX with rotary embedding over the whole head. Of this section GPT-NeoX
    reads d_model, n_heads, n_layers, rope_theta, max_sequence_length, vocab_size, embedding_size and the three
    dropouts, which must be equal.
    """

    nope: bool = False
    """
    No position information at all; needs `rope: false` and `alibi: false`. Without it OLMo gives such a model
    learned absolute position embeddings.
    """


@dataclass
class TokenizerConfig(olmo.TokenizerConfig):
    identifier: str | None = None  # type: ignore[assignment]
    """
    A file, a tokenizer that OLMo ships, or a name on the Hugging Face Hub. Null: the corpus's own tokenizer.
    """


@dataclass
class DataConfig(olmo.DataConfig):
    drop_last: bool = True
    """
    Always true: every step trains on a whole global batch.
    """


@dataclass
class PositionsConfig(olmo.BaseConfig):
    """Which position ids the tokens of a training window get."""

    scheme: str = "contiguous"
    """
    A name of `olmo_sparsity.positions.SCHEMES`: contiguous, random_start, pose; and, for tasks whose tokens are
    coupled, coupled (the ids of the response are given at test, by an oracle) and predicted (Predictive Position
    Coupling).
    """

    chunks: int = 2
    """
    PoSE: into how many chunks a window is cut.
    """

    target_length: int | None = None
    """
    T': the position ids stay below it. Null: `model.max_sequence_length`. PoSE needs a longer one. Not read by coupled
    and predicted, whose ids stay below `table_size`.
    """

    table_size: int | None = None
    """
    coupled, predicted: how many ids there are, of the embedding and of the id head. The longest test sample must fit.
    """

    skip_probability: float = 0.0
    """
    coupled, predicted: in this share of the training samples the coupled ids jump ahead once, at a uniform place, by a
    uniform distance that the table has room for: PoSE of coupled ids [ours]. Without it a model never sees two ids
    farther apart than the longest training sample has them.
    """

    rotate: str = "ids"
    """
    What RoPE rotates by: ids (of the scheme), index (the place among the tokens that are no padding), none (NoPE).
    """

    id_weight: float = 1.0
    """
    predicted: weight of the id's cross-entropy beside the token's.
    """

    content: str = "contiguous"
    """
    PoSE: whether the text of the chunks is contiguous, or skips as their ids do (contiguous | skip).
    """

    doc_mask: bool = False
    """
    A token attends only to its own document; an EOS belongs to the document it ends. What OLMo's
    `data.generate_doc_lengths` asks for; here it needs no flash-attn.
    """

    restart_at_documents: bool = False
    """
    With `doc_mask` and `scheme: contiguous`: ids count from 0 in every document instead of in every window. RoPE
    and ALiBi see differences of ids only, so it changes nothing for them; learned embeddings it does change.
    """


@dataclass
class StreamConfig(olmo.BaseConfig):
    """
    Text that is tokenized while it is trained on. Needs `tokenizer.identifier`; is resumed exactly. Documents come
    in their order within a shard or file, those in an order drawn from the seed, a window at a time from each reader.
    """

    source: str = "c4"
    """
    c4: a data set on the Hugging Face Hub, or a copy of its folder; text: `files`.
    """

    files: list[str] = field(default_factory=list)
    """
    text: JSON lines with a `text` field or .txt, gzipped or not, as `scripts/prepare_data.py` takes them.
    """

    dataset: str = "allenai/c4"
    """
    c4: a name on the hub, or a folder of the same layout.
    """

    dataset_config: str = "en"
    """
    c4: its configuration.
    """

    split: str = "train"
    """
    c4: its split.
    """

    readers: int = 16
    """
    How many shards are read at the same time; decides the order of the windows, whatever the number of processes.
    Best a multiple of the processes times `data.num_workers`: each then tokenizes nothing but what it trains on.
    """


@dataclass
class CorpusConfig(olmo.BaseConfig):
    """The corpus to train on."""

    path: str | None = None
    """
    A folder made by `scripts/prepare_data.py`; `data.paths`, `data.memmap_dtype` and the tokenizer then come
    from its manifest.
    """

    train_split: str = "train"
    """
    The split of the corpus that is trained on.
    """

    heldout_split: str = "heldout"
    """
    The split of the corpus that is measured on and never trained on.
    """

    verify_checksums: bool = True
    """
    Compare the token files with the checksums in the manifest before training; once in a run, as long as they
    are not touched.
    """

    stream: StreamConfig | None = None
    """
    Text to tokenize while training, with no preparation, in place of `path` and of `data.paths`.
    """


@dataclass
class DeepSpeedConfig(olmo.BaseConfig):
    """Training with DeepSpeed's ZeRO."""

    config: str | None = None
    """
    A JSON of `configs/deepspeed`, or your own. Null: no DeepSpeed. What this YAML decides (batch sizes, clipping,
    precision, optimizer) is "auto" or absent there.
    """

    offload_optimizer: bool = False
    """
    Keep the optimizer's state in the memory of the host (ZeRO 1 to 3).
    """


@dataclass
class CheckpointsConfig(olmo.BaseConfig):
    """Which checkpoints are kept, besides the last `save_num_checkpoints_to_keep`."""

    keep_every: int | None = None
    """
    Also keep every checkpoint whose step is a multiple of this. Null: none.
    """


@dataclass
class TaskConfig(olmo.BaseConfig):
    """A synthetic task to train on, in place of text."""

    name: str | None = None
    """
    A name of `olmo_sparsity.tasks.TASKS`: planted, sparse_parity, scratchpad_parity, variable_assignment, addition,
    copy. Null: text.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    """
    The fields of the task that differ from their defaults, such as `train_length: [5, 20]`.
    """


@dataclass
class EvaluationConfig(olmo.BaseConfig):
    """
    Held-out measures while training. Text: the loss, in windows of the training length and by position in long
    documents. A task: exact match by length, free-running, on test samples; of this section it reads interval, windows
    (how many samples of a length), batch_size and seed.
    """

    interval: int | None = None
    """
    Measured every so many steps, and at the last one. Null: never.
    """

    windows: int = 64
    """
    How many windows each of the two measures reads, fewer where the held-out text has fewer.
    """

    batch_size: int | None = None
    """
    Windows of the training length that one process reads at a time; of longer ones as many as have no more
    tokens. Null: `device_train_microbatch_size`; for a task, as many samples as have 32,768 tokens.
    """

    position_length: int | None = None
    """
    Tokens of the windows that are measured by position, each inside one document. Null: T',
    `positions.target_length`, or the training length where that is null.
    """

    position_bins: int = 16
    """
    Into how many bins of equal width the positions 0 … `position_length` - 1 are put.
    """

    paths: list[str] | None = None
    """
    Held-out token files, of type `data.memmap_dtype`. Null: the `corpus.heldout_split` of the corpus.
    """

    seed: int = 0
    """
    Chooses the windows; apart from the run's own `seed`, so that runs are compared on the same windows.
    """


@dataclass
class Config(olmo.TrainConfig):
    """Everything that decides a run. Load it with `load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """
    Shape of the model and its position encoding.
    """

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """
    Tokenizer, where it is not the corpus's own.
    """

    data: DataConfig = field(default_factory=DataConfig)
    """
    Token files and how they are read.
    """

    positions: PositionsConfig = field(default_factory=PositionsConfig)
    """
    Position ids of the training windows.
    """

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """
    A prepared corpus, in place of `data.paths`.
    """

    task: TaskConfig = field(default_factory=TaskConfig)
    """
    A synthetic task, in place of a corpus.
    """

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """
    Held-out loss while training.
    """

    tensorboard: bool = False
    """
    Metrics also go to TensorBoard event files in the run's folder `tensorboard`. (Weights & Biases: OLMo's own
    section `wandb`.)
    """

    @property
    def masks_documents(self) -> bool:
        """Whether a token attends only to its own document, asked for by our name of it or by OLMo's."""
        return self.positions.doc_mask or self.data.generate_doc_lengths

    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """
    DeepSpeed's ZeRO, where its `config` is set.
    """

    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    """
    Which checkpoints are kept.
    """
