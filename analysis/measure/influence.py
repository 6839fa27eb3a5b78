"""The whole measurement: check the input, sample targets, find their gaps, let every selector choose, write records."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from analysis.measure.crossfit import Chooser, ModelChooser, RecordedChooser, recorded_manifest
from analysis.measure.selectors import check_selector
from analysis.measure.settings import InfluenceSettings
from analysis.model.load import LoadedModel
from analysis.model.memory import GB, default_limit_bytes, tokens_that_fit
from analysis.model.rope_scaling import load_scaled, split_checkpoint
from analysis.model.scorer import TOKENS_PER_BATCH, Scorer, long_and_short_losses, short_columns
from analysis.records.schema import ROPE_SCALING, Examples, Manifest, SelectionRow, Targets
from analysis.records.store import RecordWriter
from analysis.text.contexts import Contexts, SampledTargets, long_contexts, placebo_contexts, sample_targets
from analysis.text.decode import TextDecoder
from analysis.text.kinds import classify
from olmo_sparsity.data.tokens import MANIFEST_NAME, TokenFiles, Verified
from olmo_sparsity.model.rope_scaling import RopeScaling
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.streams import Stream

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


log = logging.getLogger(__name__)

TARGETS_PER_BLOCK = 64
"""Targets whose gaps are one batch. Shards take whole blocks, so that every forward pass of a shard is one of the
unsharded measurement: a batch of another size could differ in the last bits of a loss."""
TARGETS_PER_ROUND = 4
SECONDS_BETWEEN_PARTS = 20.0
EXAMPLES_FROM_TARGETS = 20_000
"""With more targets than these, only such a share of those over tau keeps its text: it is for people to read."""


@dataclass(frozen=True)
class Measurement:
    """Measures the targets of one records folder, or of one shard of it."""

    settings: InfluenceSettings
    tokens: TokenFiles
    reader: Reader
    evaluator: Scorer
    """Computes L_long, L_short and L_k."""
    chooser: Chooser
    """Chooses targets and tokens."""
    crossfit: bool
    """Whether that is another model than the one that evaluates."""
    writer: RecordWriter

    def run(self, sampled: SampledTargets) -> bool:
        """Targets first, then the selections of those over tau that are not finished yet; True when all are."""
        targets = self.writer.targets or self._measure_gaps(sampled)
        over = targets.over(self.settings.tau_nats)
        if len(over) == 0 and not self.settings.shard:  # another shard may hold some
            self.writer.discard()
            raise UserError(
                f"none of {len(targets):,} targets gains more than tau = {self.settings.tau_nats} nats from the long "
                f"context (the most is {targets.selecting_gain_nats.max():.2f}); lower --tau, raise --targets, or "
                "train the model for longer"
            )
        if not self.writer.has_examples:
            self.writer.write_examples(self._examples(targets, over))
        if not self._select(targets, over):
            return False
        self.writer.finish()
        return True

    def _measure_gaps(self, sampled: SampledTargets) -> Targets:
        mine = list(self._blocks(len(sampled.document)))
        parts: list[tuple[np.ndarray, ...]] = []
        target_id = np.concatenate(mine)
        with progress("long and short losses", len(target_id), "targets") as advance:
            for rows in mine:
                contexts = self._contexts(sampled, rows, rows)
                long, short = long_and_short_losses(self.evaluator, contexts)
                gain = self.chooser.gains_nats(contexts) if self.crossfit else short - long
                _check_finite(long, short, gain)
                kind = self.reader.kinds(contexts, sampled.document[rows], sampled.position[rows])
                parts.append((contexts.targets, long, short, gain, kind))
                advance(len(rows))
        token, long, short, gain, kind = (np.concatenate(column) for column in zip(*parts, strict=True))
        targets = Targets(
            target_id=target_id,
            document=sampled.document[target_id],
            position=sampled.position[target_id],
            token=token,
            loss_long_nats=long,
            loss_short_nats=short,
            selecting_gain_nats=gain,
            kind=kind,
            placebo_document=sampled.placebo_document[target_id],
            placebo_start=sampled.placebo_start[target_id],
        )
        self.writer.write_targets(targets)
        return targets

    def _blocks(self, count: int) -> Iterator[np.ndarray]:
        """Target ids of each block that is measured here: every block, or this shard's."""
        for number, start in enumerate(range(0, count, TARGETS_PER_BLOCK)):
            if self.settings.shard is None or self.settings.shard.has(number):
                yield np.arange(start, min(start + TARGETS_PER_BLOCK, count))

    def _rounds(self, targets: Targets, over: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of the unfinished targets over tau, a few of one block at a time."""
        finished = self.writer.finished_targets()
        block = targets.target_id[over] // TARGETS_PER_BLOCK
        for number in np.unique(block):
            rows = over[block == number]
            for start in range(0, len(rows), TARGETS_PER_ROUND):
                together = rows[start : start + TARGETS_PER_ROUND]
                if not finished.issuperset(targets.target_id[together].tolist()):
                    yield together

    def _contexts(self, at: SampledTargets | Targets, rows: np.ndarray, target_id: np.ndarray) -> Contexts:
        return long_contexts(
            self.tokens,
            at.document[rows],
            at.position[rows],
            target_id,
            n_long=self.settings.n_long,
            n_short=self.settings.n_short,
        )

    def _both_contexts(self, targets: Targets, rows: np.ndarray) -> tuple[Contexts, Contexts]:
        """The true contexts of some targets, and the placebo ones."""
        contexts = self._contexts(targets, rows, targets.target_id[rows])
        placebo = placebo_contexts(
            self.tokens, contexts, targets.placebo_document[rows], targets.placebo_start[rows]
        )
        return contexts, placebo

    def _examples(self, targets: Targets, over: np.ndarray) -> Examples:
        """Text of the targets over tau; of a large measurement, of a random part of them.

        Whether a target is shown depends on itself alone, so that shards show what the whole run does.
        """
        share = EXAMPLES_FROM_TARGETS / self.settings.targets
        seed = self.settings.seed
        ids = targets.target_id[over].tolist()
        over = over[[np.random.default_rng([Stream.EXAMPLES, seed, each]).random() < share for each in ids]]
        if len(over) == 0:
            return Examples(np.empty(0, np.int64), [], [], [], [])
        contexts, placebo = self._both_contexts(targets, over)
        return self.reader.examples(contexts, placebo, targets.document[over], targets.position[over])

    def _select(self, targets: Targets, over: np.ndarray) -> bool:
        """Run every selector on the true and the placebo far context, a few targets at a time; True if all are."""
        rounds = list(self._rounds(targets, over))
        left = sum(map(len, rounds))
        if self.settings.limit is not None:
            sizes = np.cumsum([len(rows) for rows in rounds])
            rounds = rounds[: int(np.searchsorted(sizes, self.settings.limit)) + 1]
        now = sum(map(len, rounds))
        pending: list[SelectionRow] = []
        written = time.monotonic()
        with progress(
            "selecting tokens", len(over) - left + now, "targets", done=len(over) - left
        ) as advance:
            try:
                for rows in rounds:
                    contexts, placebo = self._both_contexts(targets, rows)
                    pending += self._selections(contexts, "true") + self._selections(placebo, "placebo")
                    advance(len(rows))
                    if time.monotonic() - written > SECONDS_BETWEEN_PARTS:
                        self.writer.append(pending)
                        pending, written = [], time.monotonic()
            finally:  # on Ctrl-C too: what is finished stays
                self.writer.append(pending)
        if now < left:
            log.info(
                "%d of %d targets over tau are left; the same command goes on with them",
                left - now,
                len(over),
            )
        return now == left

    def _selections(self, contexts: Contexts, far_context: str) -> list[SelectionRow]:
        ks = self.settings.ks
        rows = []
        for name in self.settings.selectors:
            chosen = self.chooser.select(name, contexts, far_context)
            columns, influence = chosen.columns[:, : max(ks)], chosen.influence[:, : max(ks)]
            losses = selected_losses(self.evaluator, contexts, columns, ks)
            _check_finite(losses)
            rows += [
                SelectionRow(
                    int(contexts.target_id[i]), name, far_context, columns[i], influence[i], losses[i]
                )
                for i in range(len(contexts))
            ]
        return rows


def _check_finite(*losses: np.ndarray) -> None:
    if not all(np.isfinite(each).all() for each in losses):
        raise UserError(
            "a loss of the model is not finite; measure in fp32 (without --bf16), or another checkpoint"
        )


TOKENS_AFTER = 12
"""Tokens behind the target that are read to complete its word, and shown."""


@dataclass(frozen=True)
class Reader:
    """Reads the text of targets."""

    tokens: TokenFiles
    decoder: TextDecoder

    def kinds(self, contexts: Contexts, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Kind of dependency of every target, (n,) strings; ``document`` and ``position`` (n,) say where it stands."""
        kinds = []
        for row in range(len(contexts)):
            pieces, after = self._pieces(contexts, row, int(document[row]), int(position[row]))
            far, short = pieces[: contexts.n_far], pieces[contexts.n_far : contexts.n_long]
            kinds.append(classify("".join(far), "".join(short), pieces[-1], after))
        return np.array(kinds)

    def examples(
        self, contexts: Contexts, placebo: Contexts, document: np.ndarray, position: np.ndarray
    ) -> Examples:
        """The text of targets (m,), their contexts and their placebo far contexts."""
        context, target, placebo_far, after = [], [], [], []
        for row in range(len(contexts)):
            pieces, rest = self._pieces(contexts, row, int(document[row]), int(position[row]))
            context.append(pieces[:-1])
            target.append(pieces[-1])
            placebo_far.append(self.decoder.pieces(placebo.tokens[row, : contexts.n_far].tolist()))
            after.append(rest)
        return Examples(contexts.target_id, context, target, placebo_far, after)

    def _pieces(self, contexts: Contexts, row: int, document: int, position: int) -> tuple[list[str], str]:
        """Pieces of the N context tokens and the target, and the text behind it."""
        behind = self.tokens.document(document)[position + 1 : position + 1 + TOKENS_AFTER]
        window = [*contexts.tokens[row].tolist(), int(contexts.targets[row])]
        pieces = self.decoder.pieces([*window, *behind.tolist()])
        return pieces[: len(window)], "".join(pieces[len(window) :])


def selected_losses(
    scorer: Scorer, contexts: Contexts, selected: np.ndarray, ks: Sequence[int]
) -> np.ndarray:
    """L_k = loss(t | C_short and the first k selected tokens), (n, K) nats.

    ``selected``: (n, k_max) columns of far tokens, most influential first.
    """
    short = np.broadcast_to(short_columns(contexts), (len(contexts), contexts.n_short))
    losses = [
        scorer.losses(contexts, np.concatenate([np.sort(selected[:, :k], axis=1), short], axis=1)[:, None])
        for k in ks
    ]
    return np.concatenate(losses, axis=1)
