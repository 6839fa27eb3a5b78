"""What each benchmark measures on what: its command-line arguments. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from olmo_sparsity.util.arguments import argument, out_folder, positive_number, seed_number
from olmo_sparsity.util.errors import UserError

ROUNDS = "how often each is timed"


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
class InfluenceSettings(ModelSettings):
    """Targets per second of influence: a plain loop, the engine, and blocks of targets."""

    out: Path = field(metadata=argument("folder of what is written", type=out_folder, metavar="DIR"))
    texts: str | None = field(
        default=None,
        metadata=argument("prepared corpus or file of text (default: random tokens)", name="text"),
    )
    n_long: int = field(default=256, metadata=argument("N"))
    n_short: int = field(default=32, metadata=argument("M"))
    targets: int = field(default=2, metadata=argument("targets of the comparison with the plain loop"))
    targets_per_block: int = field(default=32, metadata=argument("B"))
    sampled_targets: int = field(default=640, metadata=argument("of the whole measurement, with --text"))
    tau_nats: float = field(default=1.0, metadata=argument("threshold on the gain, in nats", name="tau"))
    repeats: int = field(default=3, metadata=argument("how often each is timed"))
    seed: int = field(default=0, metadata=argument("seed of the targets", type=seed_number))


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
    "influence": InfluenceSettings,
    "gpu": GpuSettings,
}
"""By the name of the module whose ``run`` measures it."""
