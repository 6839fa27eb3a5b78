"""The settings of each measurement. A field with a help text is an argument of its command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.records.schema import FURTHER_PLACEBOS
from analysis.records.shards import MeasurementShard
from analysis.stats.bootstrap import DEFAULT_RESAMPLES
from olmo_sparsity.util.arguments import (
    argument,
    out_folder,
    positive_number,
    seed_number,
    whole_number_or_zero,
)
from olmo_sparsity.util.errors import UserError

CHECKPOINT = (
    "checkpoint, run (then its last one), transformers directory, or id of a model on the Hugging Face hub"
)
_BF16 = argument("measure in bf16: faster, coarser")
_DEVICE = argument("cpu, cuda, cuda:1, … (default: a GPU where there is one)")
_TOKENS_PER_BATCH = argument("tokens of one forward pass; lower it when memory runs out")
_MEMORY_LIMIT = argument(
    "what a batch may take (default: half the memory, or 80 %% of what is free on the GPU)",
    name="memory_limit",
    type=positive_number,
    metavar="GB",
)
_PREFIX = argument(
    "tokens that stand before every context: auto (what the model's tokenizer puts before a text), none, bos, eos, or "
    "ids such as 2",
    metavar="TOKENS",
)
_DTYPE = argument(
    "load a transformers model's weights in this type, for less memory, and compute in it; auto: as stored",
    choices=("fp32", "bf16", "fp16", "auto"),
)
_UNTOLD = ("checkpoint", "checkpoints", "labels", "out", "device", "tokens_per_batch")


def _refuse_two_types(bf16: bool, dtype: str) -> None:
    if bf16 and dtype != "fp32":
        raise UserError(
            f"--bf16 computes in bf16 with weights in fp32, and --dtype {dtype} in the weights' own; give one"
        )


@dataclass(frozen=True, kw_only=True)
class MeasurementSettings:
    """Settings that every measurement has."""

    corpus: str | None = field(
        default=None,
        metadata=argument(
            "folder made by scripts/prepare_data.py with the same tokenizer (default: the one that the run was "
            "trained on)"
        ),
    )
    """Prepared corpus; None: the run's own."""
    out: str | Path = field(metadata=argument("folder for what is written", type=out_folder, metavar="DIR"))
    split: str = field(default="heldout", metadata=argument("split of the corpus"))
    seed: int = field(default=0, metadata=argument("seed of everything that is drawn", type=seed_number))
    prefix: str = field(default="auto", metadata=_PREFIX)
    """Of every context, and never a candidate, left out or a target (docs/method.md, 2.1 [ours])."""
    bf16: bool = field(default=False, metadata=_BF16)
    """About twice as fast where the machine has it, but influences below 0.01 nats are noise."""
    dtype: str = field(default="fp32", metadata=_DTYPE)
    """``bf16`` instead keeps weights in fp32 and computes by autocast; one of the two is given."""
    device: str | None = field(default=None, metadata=_DEVICE)
    tokens_per_batch: int | None = field(default=None, metadata=_TOKENS_PER_BATCH)
    """None: what fits. Results depend on it by rounding only."""
    resamples: int = DEFAULT_RESAMPLES
    """Of the bootstrap that makes intervals, where the result has any."""

    def __post_init__(self) -> None:
        _refuse_two_types(self.bf16, self.dtype)

    def told(self) -> dict[str, Any]:
        """The settings that a result records: all but those that stand elsewhere in it, or have no effect."""
        return {name: value for name, value in asdict(self).items() if name not in _UNTOLD}


@dataclass(frozen=True, kw_only=True)
class CouplingSettings:
    """`analysis.measure.coupling`: which tokens of a task belong together."""

    checkpoint: str = field(
        metadata=argument(
            "a run (then its last checkpoint) or checkpoint on a task", positional=True, metavar="RUN"
        )
    )
    out: Path = field(metadata=argument("where coupling.json goes", type=out_folder, metavar="DIR"))
    by: str = field(
        default="leave-one-out-kl",
        metadata=argument("what tells influence", choices=("leave-one-out-kl", "attention")),
    )
    samples: int = field(default=64, metadata=argument("training samples of each length"))
    seed: int = field(default=0, metadata=argument("of the samples", type=seed_number))


@dataclass(frozen=True, kw_only=True)
class InfluenceSettings(MeasurementSettings):
    """`analysis.measure.influence`: what k influential far tokens recover of the long context's gain."""

    checkpoint: str
    """`CHECKPOINT`, maybe with ``@scheme:factor``, see `load_scaled`. Under cross-fitting it selects, and may be a
    records folder: then what was selected there is evaluated anew."""
    evaluate_with: str | None = field(
        default=None, metadata=argument("cross-fitting: the checkpoint that measures", metavar="B")
    )
    """Checkpoint that evaluates what ``checkpoint`` selected; None for the same one."""
    propose_with: str | None = field(
        default=None,
        metadata=argument(
            "a smaller checkpoint of the same tokenizer, which proposes the tokens for screened selectors",
            metavar="SMALL",
        ),
    )
    n_long: int = field(default=128, metadata=argument("N, tokens of the long context"))
    n_short: int = field(default=16, metadata=argument("M, tokens of the short context"))
    tau_nats: float = field(
        default=1.0, metadata=argument("threshold on L_short - L_long, in nats", name="tau")
    )
    """Selectors run on targets with L_short - L_long > tau."""
    ks: tuple[int, ...] = field(
        default=(1, 2, 4, 8), metadata=argument("numbers of tokens, comma-separated", name="k")
    )
    selectors: tuple[str, ...] = field(
        default=("leave-one-out", "leave-one-out-kl", "leave-one-in", "random", "nearest"),
        metadata=argument("comma-separated"),
    )
    targets: int = field(default=1000, metadata=argument("targets to sample"))
    targets_per_block: int = field(
        default=1,
        metadata=argument(
            "B, targets that follow one another and share a far context: faster, see docs/method.md"
        ),
    )
    subsets: int = field(
        default=32,
        metadata=argument(
            "random subsets of the far tokens, each half of them, on which summed influence is compared with the loss "
            "(LDS); 0 turns that off",
            type=whole_number_or_zero,
        ),
    )
    only_recovery: bool = field(
        default=False,
        metadata=argument(
            "leave the other measures of faithfulness out, too: a quarter to a third less to compute"
        ),
    )
    """Nothing but L_long, L_short and L_k."""
    further_placebos: tuple[str, ...] = field(
        default=(),
        metadata=argument(
            f"far contexts to measure beside the true one and the placebo, of {', '.join(FURTHER_PLACEBOS)} "
            "(default: none)",
            metavar="NAMES",
        ),
    )
    limit: int | None = field(
        default=None,
        metadata=argument(
            "measure n targets over tau now; the same command goes on with the rest", metavar="n"
        ),
    )
    memory_limit_gb: float | None = field(default=None, metadata=_MEMORY_LIMIT)
    """Used where ``tokens_per_batch`` is None."""
    overwrite: bool = field(default=False, metadata=argument("remove records that are in --out"))
    shard: MeasurementShard | None = None
    """The part of the targets to measure, into a folder of its own beneath ``out``; None for all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.further_placebos if name not in FURTHER_PLACEBOS]:
            raise UserError(
                f"{unknown[0]!r} is no further placebo; give --further-placebos some of {', '.join(FURTHER_PLACEBOS)}"
            )

    @property
    def folder(self) -> Path:
        """Where this measurement's records go."""
        return self.shard.folder(self.out) if self.shard else Path(self.out)


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(MeasurementSettings):
    """Models that are measured side by side on the same text."""

    checkpoints: tuple[str, ...] = field(
        metadata=argument(
            f"{CHECKPOINT}; maybe with @SCHEME:FACTOR, which scales its RoPE; others are compared with the first",
            positional=True,
            nargs="+",
            metavar="CKPT",
        )
    )
    labels: tuple[str, ...] = field(
        default=(),
        metadata=argument(
            "a name for each checkpoint, comma-separated; seeds of one model share one (default: from their paths)"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LengthSettings(ComparisonSettings):
    """`analysis.measure.length`: loss by position."""

    lengths: tuple[int, ...] = field(
        default=(128, 256, 512, 1024), metadata=argument("tokens, comma-separated")
    )
    """Every one is an edge of bins; the largest is L."""
    windows: int = field(default=256, metadata=argument("windows to sample, at most"))
    attention: bool = field(
        default=False, metadata=argument("also the entropy of attention at each length, and its exact zeros")
    )


@dataclass(frozen=True, kw_only=True)
class LongPPLSettings(MeasurementSettings):
    """`analysis.measure.longppl`: perplexity on key tokens."""

    checkpoint: str = field(metadata=argument(CHECKPOINT, positional=True, metavar="CKPT"))
    n_long: int = field(metadata=argument("N, tokens of a segment"))
    n_short: int = field(metadata=argument("M, tokens of the short context"))
    sliding_window: int | None = field(
        default=None,
        metadata=argument(
            "tokens that share a window in the published form (default: M / 4, as in the authors' code)",
            metavar="S",
        ),
    )
    segments: int = field(default=256, metadata=argument("segments to sample, at most"))
    documents: int | None = field(
        default=None,
        metadata=argument(
            "documents that they are drawn from, at most (default: all that are long enough)", metavar="D"
        ),
    )
    alpha_nats: float = field(
        default=2.0,
        metadata=argument("L_short - L_long of a key token is above it", name="alpha", metavar="NATS"),
    )
    beta_nats: float = field(
        default=2.0, metadata=argument("L_long of a key token is below it", name="beta", metavar="NATS")
    )

    @property
    def window(self) -> int:
        """S; where it is not given, a quarter of M: the authors' code has M = 4096 and S = 1024."""
        return max(1, self.n_short // 4) if self.sliding_window is None else self.sliding_window


@dataclass(frozen=True)
class RecallOptions:
    """Which selectors look for the needle, and in how many samples."""

    selectors: tuple[str, ...]
    length: int
    """N."""
    depth: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class NeedleSettings(ComparisonSettings):
    """`analysis.measure.needle`: needles in held-out text, and their recall by influence selectors."""

    lengths: tuple[int, ...] = field(
        default=(64, 128, 256, 512), metadata=argument("tokens of context, comma-separated")
    )
    """L."""
    ks: tuple[int, ...] = field(default=(1, 2, 4, 8), metadata=argument("tokens of a value"))
    """k."""
    depths: tuple[float, ...] = field(default=(0.0, 0.25, 0.5, 0.75, 1.0), metadata=argument("from 0 to 1"))
    samples: int = field(default=100, metadata=argument("needles of each cell, at most"))
    """n."""
    key_tokens: int = field(default=2, metadata=argument("tokens of a key"))
    """q."""
    unseen_keys: bool = field(
        default=False,
        metadata=argument("only keys that training never weaves into its windows (config: needles)"),
    )
    selectors: tuple[str, ...] = field(
        default=(),
        metadata=argument("to ask for the needle, comma-separated, as in influence (default: none)"),
    )
    recall_length: int | None = field(
        default=None, metadata=argument("tokens of context for --selectors (default: the smallest length)")
    )
    recall_samples: int = field(default=40, metadata=argument("needles for --selectors, at the middle depth"))

    @property
    def recall(self) -> RecallOptions | None:
        """None where no selectors are given."""
        if not self.selectors:
            return None
        length = self.recall_length or self.lengths[0]
        return RecallOptions(self.selectors, length, self.depths[len(self.depths) // 2], self.recall_samples)

    def told(self) -> dict[str, Any]:
        """See `MeasurementSettings`; the options of the recall stand together."""
        told = super().told()
        for name in ("selectors", "recall_length", "recall_samples"):
            del told[name]
        return {**told, "recall": self.recall and asdict(self.recall)}


PLANTED_SELECTORS = ("leave-one-out", "leave-one-in", "greedy", "gradient", "attention", "random", "nearest")


@dataclass(frozen=True, kw_only=True)
class HandBuiltRecallSettings:
    """`analysis.measure.planted`: recall of planted tokens by models that are built by hand."""

    out: Path = field(metadata=argument("where recall.json goes", type=out_folder, metavar="DIR"))
    n_long: int = field(default=128, metadata=argument("N (default: 128 tokens)"))
    n_short: int = field(default=16, metadata=argument("M in tokens (default: 16; of a checkpoint 2)"))
    models: int = field(default=20, metadata=argument("each with its own planted tokens"))
    selectors: tuple[str, ...] = field(
        default=(*PLANTED_SELECTORS[:-2], "leave-one-out@gradient:32", *PLANTED_SELECTORS[-2:]),
        metadata=argument(
            f"comma-separated (default: {','.join(PLANTED_SELECTORS)}; of models built by hand a screened one, too)"
        ),
    )
    seed: int = field(default=0, metadata=argument("of planted tokens, noise and samples", type=seed_number))


@dataclass(frozen=True, kw_only=True)
class TrainedRecallSettings:
    """`analysis.measure.planted`: the same by a model that was trained on a planted task. Fields without a help text
    are options of models built by hand, too, and described there."""

    checkpoint: str
    """A run, then its last checkpoint, or a checkpoint."""
    out: Path
    n_short: int = 2
    length: int | None = field(
        default=None, metadata=argument("N: tokens of every prompt (default: the longest of training)")
    )
    ks: tuple[int, ...] | None = field(
        default=None,
        metadata=argument(
            "numbers of planted tokens of a sample, comma-separated (default: powers of 2 up to training's k_train)"
        ),
    )
    samples: int = field(default=100, metadata=argument("test samples for each of --ks"))
    selectors: tuple[str, ...] = PLANTED_SELECTORS
    seed: int = 0
    device: str | None = field(default=None, metadata=_DEVICE)


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """`analysis.measure.verify`: recorded targets, measured again."""

    records: Path = field(
        metadata=argument("folder that influence wrote", positional=True, type=Path, metavar="RECORDS")
    )
    checkpoint: str | None = field(
        default=None, metadata=argument("where its checkpoint is now (default: where it was)", metavar="CKPT")
    )
    corpus: str | None = field(
        default=None, metadata=argument("where its corpus is now (default: where it was)", metavar="DIR")
    )
    targets: int = field(default=100, metadata=argument("targets over tau to measure again, at least"))
    seed: int = field(default=0, metadata=argument("which of them", type=seed_number))
    device: str | None = field(default=None, metadata=_DEVICE)
    tokens_per_batch: int | None = field(default=None, metadata=_TOKENS_PER_BATCH)


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """`analysis.measure.influence_map`: which earlier tokens every token of a text needs."""

    checkpoint: str = field(
        metadata=argument(
            f"{CHECKPOINT}; maybe with @SCHEME:FACTOR; or records, which are drawn again",
            positional=True,
            metavar="CKPT",
        )
    )
    text: Path | None = field(
        default=None, metadata=argument("the text to measure, UTF-8", type=Path, metavar="FILE")
    )
    out: Path | None = field(
        default=None,
        metadata=argument(
            "folder for what is written (default: FILE-xray, or that of the records)",
            type=out_folder,
            metavar="DIR",
        ),
    )
    n_long: int | None = field(
        default=None,
        metadata=argument(
            "N, the most tokens of context (default: what the model was trained to read, up to 1,024); a longer "
            "text is read in windows"
        ),
    )
    n_short: int = field(
        default=16, metadata=argument("M, tokens of the short context; nearer tokens are not measured")
    )
    tau_nats: float = field(
        default=1.0, metadata=argument("tokens that gain more, in nats, are marked", name="tau")
    )
    prefix: str = field(default="auto", metadata=_PREFIX)
    bf16: bool = field(default=False, metadata=_BF16)
    dtype: str = field(default="fp32", metadata=_DTYPE)
    device: str | None = field(default=None, metadata=_DEVICE)
    tokens_per_batch: int | None = field(default=None, metadata=_TOKENS_PER_BATCH)
    memory_limit_gb: float | None = field(default=None, metadata=_MEMORY_LIMIT)

    def __post_init__(self) -> None:
        _refuse_two_types(self.bf16, self.dtype)
