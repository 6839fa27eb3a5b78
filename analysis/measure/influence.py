"""The whole measurement: check the input, sample targets, find their gaps, let every selector choose, write records."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from analysis.measure.crossfit import Chooser, ModelChooser, RecordedChooser, recorded_manifest
from analysis.measure.measurement import TARGETS_PER_BLOCK, Measurement
from analysis.measure.readable import Reader
from analysis.measure.selectors import check_selector
from analysis.measure.settings import InfluenceSettings
from analysis.model.load import LoadedModel
from analysis.model.memory import GB, default_limit_bytes, tokens_that_fit
from analysis.model.rope_scaling import load_scaled, split_checkpoint
from analysis.model.scorer import TOKENS_PER_BATCH, Scorer
from analysis.records.manifest import ROPE_SCALING, Manifest
from analysis.records.store import RecordWriter
from analysis.text.contexts import sample_targets
from analysis.text.decode import TextDecoder
from olmo_sparsity.data.tokens import MANIFEST_NAME, Verified
from olmo_sparsity.model.rope_scaling import RopeScaling
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.provenance import current_commit

log = logging.getLogger(__name__)


def measure_influence(settings: InfluenceSettings) -> Path:
    """Measure, writing records as they are finished; returns their folder.

    Run again with the same settings, it goes on where an interrupted run stopped. Raises `UserError` for bad input, and
    where another process writes to that folder.
    """
    _check_settings(settings)
    recorded = recorded_manifest(settings.checkpoint)
    if recorded and not settings.evaluate_with:
        raise UserError(
            f"{settings.checkpoint} is a records folder; give a checkpoint, or another one with --evaluate-with"
        )
    given = [path for path in (None if recorded else settings.checkpoint, settings.evaluate_with) if path]
    for path in given:
        _, scaling = split_checkpoint(path)
        if scaling and settings.evaluate_with:
            raise UserError(f"{path}: RoPE cannot be scaled in cross-fitting; leave @… out")
    verified = Verified(settings.out)
    tokens = verified.open_split(settings.corpus, settings.split)
    sampled = sample_targets(
        tokens, settings.targets, n_long=settings.n_long, n_short=settings.n_short, seed=settings.seed
    )
    if settings.shard:
        settings.shard.check(len(sampled.document), TARGETS_PER_BLOCK)
    roles = _assign_roles(settings, given, recorded)
    reader = Reader(tokens, TextDecoder.from_file(roles.tokenizer_file))
    # all input is checked by now
    with folder_lock(settings.folder):
        writer = RecordWriter(settings.folder, roles.manifest, overwrite=settings.overwrite)
        if writer.manifest.complete:
            log.info("%s is complete already", settings.folder)
            return settings.folder
        run = Measurement(settings, tokens, reader, roles.evaluator, roles.chooser, roles.crossfit, writer)
        try:
            run.run(sampled)
        finally:
            if (settings.folder / MANIFEST_NAME).is_file():  # else it was discarded: no target gains enough
                verified.save()
    return settings.folder


@dataclass(frozen=True)
class _Roles:
    """Who selects, who evaluates, and how records name them."""

    chooser: Chooser
    evaluator: Scorer
    crossfit: bool
    manifest: Manifest
    tokenizer_file: Path


def _assign_roles(settings: InfluenceSettings, given: list[str], recorded: Manifest | None) -> _Roles:
    """Load and check the models; ``recorded`` stands in for the first where records of it select."""
    scaled = [_load_checked(path, settings) for path in given]
    loaded = [model for model, _ in scaled]
    scorers = [_build_scorer(settings, model) for model in loaded]
    chooser: Chooser
    if recorded:
        chooser = RecordedChooser(settings.checkpoint)
        chooser.check(settings, sha256_file(Path(settings.corpus) / MANIFEST_NAME))
        selects = (recorded.checkpoint, recorded.checkpoint_sha256, recorded.training_seed)
    else:
        chooser = ModelChooser(scorers[0], seed=settings.seed, k_max=max(settings.ks))
        selects = _identity(*scaled[0])
    evaluates = _identity(*scaled[-1]) if settings.evaluate_with else (None, None, None)
    if evaluates[1] == selects[1]:
        raise UserError(
            f"{selects[0]} would select and evaluate (the weights are the same); cross-fitting takes "
            "checkpoints trained from two seeds"
        )
    manifest = _manifest(settings, selects, evaluates, loaded[-1].tokenizer_file)
    scaling = scaled[0][1]
    if scaling:
        manifest = replace(manifest, options={**manifest.options, ROPE_SCALING: asdict(scaling)})
    return _Roles(chooser, scorers[-1], bool(settings.evaluate_with), manifest, loaded[-1].tokenizer_file)


def _check_settings(settings: InfluenceSettings) -> None:
    for name in settings.selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_long - settings.n_short)
    try:
        device = torch.device(_device(settings))
    except RuntimeError as error:
        raise UserError(
            f"there is no device {settings.device!r}; give cpu, cuda, or cuda:1 and so on"
        ) from error
    if device.type not in TOKENS_PER_BATCH or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"the device {settings.device!r} cannot be used here; give another --device, such as cpu"
        )
    if settings.limit is not None and settings.limit < 1:
        raise UserError(f"--limit {settings.limit} leaves nothing to measure; give 1 or more")


def _load_checked(checkpoint: str, settings: InfluenceSettings) -> tuple[LoadedModel, RopeScaling | None]:
    loaded, scaling = load_scaled(checkpoint)
    loaded.check_corpus(settings.corpus)
    loaded.check_context(settings.n_long)
    return loaded, scaling


def _device(settings: InfluenceSettings) -> str:
    return settings.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _build_scorer(settings: InfluenceSettings, loaded: LoadedModel) -> Scorer:
    device = torch.device(_device(settings))
    model = loaded.model.to(device)
    asked = settings.memory_limit_gb
    limit_bytes = default_limit_bytes(device) if asked is None else asked * GB
    tokens_per_batch = settings.tokens_per_batch or tokens_that_fit(
        model, device, settings.n_long, limit_bytes
    )
    return Scorer(model, device=str(device), bf16=settings.bf16, tokens_per_batch=tokens_per_batch)


_Identity = tuple[str | None, str | None, int | None]
"""Path, checksum of the weights, training seed."""


def _identity(loaded: LoadedModel, scaling: RopeScaling | None) -> tuple[str, str, int | None]:
    given = f"{loaded.checkpoint}@{scaling}" if scaling else str(loaded.checkpoint)
    return given, loaded.weights_sha256, loaded.training_seed


def _manifest(
    settings: InfluenceSettings,
    selects: tuple[str, str, int | None],
    evaluates: _Identity,
    tokenizer_file: Path,
) -> Manifest:
    manifest = Manifest(
        checkpoint=selects[0],
        checkpoint_sha256=selects[1],
        training_seed=selects[2],
        evaluation_checkpoint=evaluates[0],
        evaluation_checkpoint_sha256=evaluates[1],
        evaluation_training_seed=evaluates[2],
        tokenizer_sha256=sha256_file(tokenizer_file),
        corpus=settings.corpus,
        corpus_manifest_sha256=sha256_file(Path(settings.corpus) / MANIFEST_NAME),
        split=settings.split,
        n_long=settings.n_long,
        n_short=settings.n_short,
        tau_nats=settings.tau_nats,
        ks=list(settings.ks),
        selectors=list(settings.selectors),
        seed=settings.seed,
        targets_asked=settings.targets,
        dtype="bf16" if settings.bf16 else "fp32",
        device=_device(settings),
        commit=current_commit(),
    )
    return replace(manifest, options={**settings.shard.options}) if settings.shard else manifest
