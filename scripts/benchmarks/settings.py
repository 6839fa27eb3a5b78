"""What each benchmark measures on what: its command-line arguments. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from olmo_sparsity.util.arguments import argument, out_folder, positive_number, seed_number
from olmo_sparsity.util.errors import UserError

ROUNDS = "how often each is timed"
PARTS = ("speed", "blocks", "agreement", "screened", "cost")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all benchmarks."""

    overrides: tuple[str, ...] = ()
    """Of the config: ``--path.to.key=value``."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Tokens per second of a training step: ours, unmodified OLMo's, and transformers' Trainer's."""

    config: str = field(default="configs/demo.yaml", metadata=argument("its shape, batch and precision"))
    rounds: int = field(default=12, metadata=argument(ROUNDS))
    steps: int = field(default=4, metadata=argument("steps per timing"))


@dataclass(frozen=True, kw_only=True)
class EncodingsSettings(Settings):
    """Tokens per second and memory of training with each position encoding or attention, against the first."""

    configs: tuple[str, ...] = field(
        metadata=argument(
            "configs of one window and batch; the first is the baseline", positional=True, nargs="+"
        )
    )
    rounds: int = field(default=5, metadata=argument(ROUNDS))
    steps: int = field(default=2, metadata=argument("steps per timing"))


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """Where the time of a training step goes: operations on a CPU, kernels on a GPU, the longest first."""

    config: str = field(
        default="configs/demo.yaml",
        metadata=argument("its shape, batch and precision, or task; text is random tokens"),
    )
    steps: int = field(
        default=8, metadata=argument("steps that are timed, and as many more that are profiled")
    )
    longest: int = field(default=20, metadata=argument("how many operations are listed"))


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Tokens per second of preparing text, ours against `datasets.map`."""

    files: tuple[str, ...] = field(
        default=(), metadata=argument("text in C4's layout (default: some is made up)", nargs="+")
    )
    rounds: int = field(default=5, metadata=argument(ROUNDS))

    def __post_init__(self) -> None:
        if self.overrides:
            raise UserError(f"{self.overrides[0]} is not for benchmark data")


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings(Settings):
    """Synthetic tasks: samples per second and their share of a step; steps per second, ours against the Trainer's."""

    config: str = field(
        default="configs/synthetic/scratchpad_parity.yaml",
        metadata=argument("task, shape, batch and precision; on a CPU take its -small"),
    )
    rounds: int = field(default=7, metadata=argument(ROUNDS))
    steps: int = field(default=4, metadata=argument("steps per timing"))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which model is measured, and where; small enough to be handed to a fresh process."""

    checkpoint: str | None = field(
        default=None, metadata=argument("checkpoint, run, or transformers directory", positional=True)
    )
    config: str = field(
        default="configs/demo.yaml",
        metadata=argument("shape of random weights where no checkpoint is given"),
    )
    device: str | None = field(
        default=None, metadata=argument("default: a GPU where there is one", choices=["cpu", "cuda"])
    )

    @property
    def model(self) -> str:
        """What is measured, for people."""
        return self.checkpoint or f"{self.config}, random weights"


@dataclass(frozen=True, kw_only=True)
class LengthSettings(ModelSettings):
    """Tokens per second of loss by position: one forward pass a window against one a position."""

    length: int = field(default=256, metadata=argument("tokens of a window"))
    windows: int = field(default=4, metadata=argument("windows of random tokens"))
    rounds: int = field(default=3, metadata=argument(ROUNDS))

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"--length {self.length}: no token stands before another; give 2 or more")


@dataclass(frozen=True, kw_only=True)
class InfluenceSettings(ModelSettings):
    """Seconds of the influence analysis: its engine against a plain loop, screened against exact selectors."""

    out: Path = field(metadata=argument("folder of what is written", type=out_folder, metavar="DIR"))
    corpus: str | None = field(
        default=None,
        metadata=argument(
            "prepared corpus of the checkpoint, which agreement and screened need (default: random tokens)"
        ),
    )
    parts: tuple[str, ...] = field(default=PARTS, metadata=argument("comma-separated"))
    n_long: int = field(default=256, metadata=argument("N"))
    n_short: int = field(default=32, metadata=argument("M"))
    targets: int = field(default=2, metadata=argument("targets of the comparison with the plain loop"))
    targets_per_block: int = field(default=32, metadata=argument("B of the parts blocks and agreement"))
    sampled_targets: int = field(
        default=640,
        metadata=argument("targets of the parts agreement and screened, which select for those over tau"),
    )
    selectors: tuple[str, ...] = field(
        default=(),
        metadata=argument(
            "of the parts screened and cost, comma-separated (default: all that are compared there)"
        ),
    )
    propose_with: str | None = field(
        default=None,
        metadata=argument(
            "config of a smaller model, whose random weights propose for screened selectors in the part cost",
            metavar="CONFIG",
        ),
    )
    tau_nats: float = field(
        default=1.0, metadata=argument("threshold on the gain in these parts, in nats", name="tau")
    )
    repeats: int = field(
        default=3,
        metadata=argument("how often each is timed against the plain loop, at most how often for cost"),
    )
    seed: int = field(default=0, metadata=argument("seed of the targets", type=seed_number))
    lengths: tuple[int, ...] = field(
        default=(64, 128, 256, 512), metadata=argument("N whose cost is measured")
    )
    ks: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16), metadata=argument("k whose cost is measured", name="k")
    )
    counts: tuple[int, ...] = field(
        default=(1, 2, 4), metadata=argument("numbers of targets whose cost is measured")
    )

    def __post_init__(self) -> None:
        """Raise `UserError` for anything that would fail later."""
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise UserError(f"--parts has no {unknown[0]!r}; choose among {', '.join(PARTS)}")
        if self.targets_per_block < 2 and {"blocks", "agreement"} & {*self.parts}:
            raise UserError(f"--targets-per-block {self.targets_per_block} is no block; give 2 or more")
        lengths = self.lengths if "cost" in self.parts else ()
        if self.n_short >= min((self.n_long, *lengths)):
            raise UserError(f"--n-short {self.n_short} must be smaller than --n-long and --lengths")
        if "cost" in self.parts and max(self.ks) > self.n_long - self.n_short:
            raise UserError(
                f"--k {max(self.ks)} is more than the {self.n_long - self.n_short} far tokens; raise --n-long"
            )

    @property
    def longest(self) -> int:
        """The most positions that any part needs."""
        blocks = self.n_long + self.targets_per_block - 1 if {"blocks", "agreement"} & {*self.parts} else 0
        return max(self.n_long, blocks, *(self.lengths if "cost" in self.parts else ()))


@dataclass(frozen=True, kw_only=True)
class GpuSettings(Settings):
    """A CUDA machine in parts: agreement with the CPU, speed, a model and its Figure 2; each with its own file."""

    out: Path = field(metadata=argument("folder of what is written", type=out_folder, metavar="DIR"))
    data: str | None = field(
        default=None,
        metadata=argument("prepared corpus of the model (default: docstrings, prepared here)", metavar="DIR"),
    )
    minutes: float = field(
        default=28.0,
        metadata=argument("of all parts together; the model trains for what is left", type=positive_number),
    )
    tiny: bool = field(default=False, metadata=argument("the same parts on the CPU, with tiny shapes"))
    part: str | None = field(default=None, metadata=argument("this part alone, in this process"))

    def __post_init__(self) -> None:
        if self.overrides:
            raise UserError(f"{self.overrides[0]} is not for benchmark gpu, which has its own configs")


BENCHMARKS: dict[str, type[Settings]] = {
    "train": TrainSettings,
    "encodings": EncodingsSettings,
    "profile": ProfileSettings,
    "data": DataSettings,
    "synthetic": SyntheticSettings,
    "length": LengthSettings,
    "influence": InfluenceSettings,
    "gpu": GpuSettings,
}
"""By the name of the module whose ``run`` measures it."""
