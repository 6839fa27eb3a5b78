"""What all measurements share: text and models are opened once and described, and the result is written.

Checkpoints with the same label are training seeds of one model. Shapes: L tokens of the longest context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.measure.settings import ComparisonSettings, MeasurementSettings
from analysis.model.load import OWN_FAMILY, LoadedModel, own_corpus
from analysis.model.rope_scaling import load_scaled, split_checkpoint
from analysis.model.token_losses import TokenLosses
from olmo_sparsity.checkpoint import config_of
from olmo_sparsity.corpus.tokens import MANIFEST_NAME, TokenFiles, Verified
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, read_json, remove, sha256_file, write_json
from olmo_sparsity.util.machine import machine
from olmo_sparsity.util.provenance import current_commit, library_versions
from olmo_sparsity.util.result_files import Json, ResultFile, json_checksum

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredText:
    """The split of a prepared corpus that is measured on."""

    corpus: str
    """Path of the prepared corpus."""
    manifest_sha256: str
    """Checksum of its manifest."""
    tokens: TokenFiles
    """The split, verified."""
    verified: Verified
    """Once saved, remembers that the split was verified."""


def open_text(settings: MeasurementSettings, checkpoint: str) -> MeasuredText:
    """Open and verify the split; where no corpus is given, that of the run of ``checkpoint``. Raises `UserError`."""
    corpus = settings.corpus or own_corpus(split_checkpoint(checkpoint)[0])
    verified = Verified(settings.out)
    tokens = verified.open_split(corpus, settings.split)
    return MeasuredText(corpus, sha256_file(Path(corpus) / MANIFEST_NAME), tokens, verified)


def check_models(settings: ComparisonSettings) -> None:
    """Raise `UserError` where labels are missing, there is no such checkpoint, or a label has the same one twice."""
    checkpoints, labels = settings.checkpoints, settings.labels
    if len(labels) != len(checkpoints):
        raise UserError(
            f"{len(checkpoints)} checkpoints need as many labels, not {', '.join(labels)}; mend --labels"
        )
    seen = set()
    for label, checkpoint in zip(labels, checkpoints, strict=True):
        meant = label, *split_checkpoint(checkpoint)
        if meant in seen:
            raise UserError(f"{checkpoint} is given twice as {label}; give each seed once")
        seen.add(meant)


def load_losses(
    settings: MeasurementSettings,
    text: MeasuredText,
    checkpoint: str,
    check: Callable[[LoadedModel], None],
) -> tuple[Json, TokenLosses]:
    """What identifies a checkpoint, and its losses. Raises `UserError` where ``check`` or the text refuses it."""
    loaded = load_checked(checkpoint, settings.prefix, text, check, settings.dtype)
    losses = TokenLosses(
        loaded, device=settings.device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )
    return {**_describe(loaded), "device": str(losses.device)}, losses


def load_checked(
    checkpoint: str,
    prefix: str,
    text: MeasuredText,
    check: Callable[[LoadedModel], None],
    dtype: str = "fp32",
) -> LoadedModel:
    """A checkpoint behind a prefix, see `load_scaled`. Raises `UserError` where ``check`` or the text refuses it."""
    loaded = load_scaled(checkpoint, prefix, dtype)
    loaded.check_corpus(text.corpus)
    check(loaded)
    return loaded


def measure_models(
    settings: ComparisonSettings,
    text: MeasuredText,
    check: Callable[[LoadedModel], None],
    measure: Callable[[TokenLosses, str], Json],
) -> list[Json]:
    """What identifies each checkpoint, and what ``measure`` finds in it.

    All are loaded once before the first is measured: nobody waits for the first to learn that the last is refused.
    What was found is kept until `write_result`, so that the same command, interrupted, goes on with the next one.

    Args:
        settings: the checkpoints; what was found with other settings is not taken up again.
        text: that all are measured on.
        check: raises `UserError` for a checkpoint that cannot be measured.
        measure: from the losses and the label of a checkpoint to values that JSON can hold.
    """
    kept = [
        _kept_file(settings, text, load_checked(each, settings.prefix, text, check, settings.dtype))
        for each in settings.checkpoints
    ]
    found, commit = [], current_commit()
    for label, checkpoint, file in zip(settings.labels, settings.checkpoints, kept, strict=True):
        begun = file.is_file()
        if not begun:
            described, losses = load_losses(settings, text, checkpoint, check)
            write_json(file, {"commit": commit, **described, **measure(losses, label)})
        one = read_json(file, f"remove {file.parent}")
        if one.pop("commit") != commit:
            log.warning("%s was measured with another commit, before the interruption", checkpoint)
        elif begun:
            log.info("%s was measured before the interruption", checkpoint)
        found.append({"label": label, **one})
    return found


def _kept_file(settings: ComparisonSettings, text: MeasuredText, loaded: LoadedModel) -> Path:
    """Where what was found in a checkpoint is kept: its name is a hash of all that this depends on."""
    depends = {
        "settings": settings.told(),
        "corpus": text.manifest_sha256,
        "checkpoint": str(loaded.checkpoint),  # for equal weights can be those of different models
        "weights": loaded.weights_sha256,
        "rope_scaling": str(loaded.rope_scaling),
        "prefix": loaded.prefix,
    }
    return _kept_folder(settings) / f"{json_checksum(depends)[:16]}.json"


def _kept_folder(settings: MeasurementSettings) -> Path:
    """One for each kind of measurement that has the same ``out``."""
    sort = type(settings).__name__.removesuffix("Settings").lower()
    return Path(settings.out) / f"{sort}-unfinished"


def _describe(loaded: LoadedModel) -> Json:
    """What identifies a checkpoint, and what lengths it was trained on, where it is one of this project."""
    described: Json = {
        "checkpoint": str(loaded.checkpoint),
        "checkpoint_sha256": loaded.weights_sha256,
        "family": loaded.family,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "rope_scaling": None if loaded.rope_scaling is None else asdict(loaded.rope_scaling),
        "prefix": list(loaded.prefix),
        "training_seed": loaded.training_seed,
        "training_length": None,
        "position_scheme": None,
        "position_target": None,
    }
    if loaded.family == OWN_FAMILY:
        from olmo_sparsity.export import position_reach

        config = config_of(loaded.checkpoint)
        window, reach = config.model.max_sequence_length, position_reach(config)
        described["training_length"] = window
        described["position_scheme"] = config.positions.scheme
        described["position_target"] = reach if reach > window else None
    return described


def write_result(
    result: ResultFile,
    settings: MeasurementSettings,
    text: MeasuredText,
    *,
    found: Json,
    measured: Json,
    rows: pa.Table | None = None,
) -> Path:
    """Write a result and return its path; ``rows`` go into a Parquet file beside it.

    Args:
        result: the file.
        settings: recorded in the result.
        text: recorded in the result.
        found: the numbers.
        measured: what else belongs to the settings, such as how much text there was.
        rows: what the numbers were made from.
    """
    path = Path(settings.out) / result.name
    if rows is not None:
        with atomic_path(path.with_suffix(".parquet")) as temporary:
            pq.write_table(rows, temporary, compression="zstd")
    told = {**settings.told(), "corpus": text.corpus, "corpus_manifest_sha256": text.manifest_sha256}
    provenance = {"commit": current_commit(), "versions": library_versions(), "machine": machine()}
    result.save(path, {"settings": {**told, **measured}, **found, "provenance": provenance})
    text.verified.save()
    remove(_kept_folder(settings))
    return path
