"""What a measurement measures on what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.records.shards import MeasurementShard
from analysis.stats.bootstrap import DEFAULT_RESAMPLES


@dataclass(frozen=True, kw_only=True)
class MeasurementSettings:
    """What a measurement is told whose intervals are made with it; its models and lengths are added by each."""

    corpus: str
    """Prepared corpus."""
    out: str | Path
    """Folder of the results."""
    split: str = "heldout"
    seed: int = 0
    """Of everything that is drawn, and of the bootstrap."""
    bf16: bool = False
    device: str | None = None
    """cpu, cuda, or None for a GPU where there is one."""
    tokens_per_batch: int | None = None
    """Tokens of one forward pass; None chooses. Results do not depend on it but for rounding."""
    resamples: int = DEFAULT_RESAMPLES


@dataclass(frozen=True)
class InfluenceSettings:
    """What one influence measurement measures on what."""

    checkpoint: str
    """Checkpoint folder, run (then its last), transformers directory, or hub id, maybe with ``@scheme:factor``, see
    `load_scaled`. Under cross-fitting it selects, and may be a records folder: then what was selected there is
    evaluated anew."""
    corpus: str
    """Prepared corpus."""
    out: str | Path
    """Folder of the records."""
    evaluate_with: str | None = None
    """Checkpoint that evaluates what ``checkpoint`` selected (cross-fitting, METHOD 2.3); None for the same one."""
    split: str = "heldout"
    n_long: int = 128
    """N."""
    n_short: int = 16
    """M."""
    tau_nats: float = 1.0
    """Selectors run on targets with L_short - L_long > tau."""
    ks: tuple[int, ...] = (1, 2, 4, 8)
    selectors: tuple[str, ...] = ("leave-one-out", "leave-one-in", "random", "nearest")
    targets: int = 1000
    """Targets to sample."""
    limit: int | None = None
    """Targets over tau to measure in this call; the rest is left to the next. None for all."""
    seed: int = 0
    bf16: bool = False
    """Score in bf16: about twice as fast where the machine has it, but influences below 0.01 nats are noise."""
    device: str | None = None
    """cpu, cuda, cuda:1, …, or None for a GPU where there is one."""
    tokens_per_batch: int | None = None
    """Tokens of one forward pass; None chooses what fits. Results do not depend on it but for rounding."""
    memory_limit_gb: float | None = None
    """What a batch may take when ``tokens_per_batch`` is chosen; None: half the memory, or 80 % of the free GPU's."""
    overwrite: bool = False
    shard: MeasurementShard | None = None
    """The part of the targets to measure, into a folder of its own beneath ``out``; None for all of them."""

    @property
    def folder(self) -> Path:
        """Where this measurement's records go."""
        return self.shard.folder(self.out) if self.shard else Path(self.out)
