"""The k influential far tokens of targets: L_long and L_short, what selectors choose, and what the choice is worth.

`InfluenceEngine` measures targets of any documents; `measure_influence` has it measure sampled targets of a prepared
corpus, and `analysis.notebook` those of one text. Shapes: n targets in blocks of B, m of them over tau, N long and M
short context length, F = N - M far tokens, K values of k, k_max the largest of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.measure.crossfit import Chooser, ModelChooser, RecordedChooser, open_records
from analysis.measure.faithfulness import SUBSET_KEEP_RATE, Faithfulness
from analysis.measure.measurement import MeasuredText, load_checked, open_text
from analysis.measure.selectors import check_selector
from analysis.measure.settings import InfluenceSettings
from analysis.model.device import GB, chunks, default_limit_bytes, pick_device, tokens_that_fit
from analysis.model.load import LoadedModel
from analysis.model.rope_scaling import split_checkpoint
from analysis.model.scorer import Scorer, long_and_short_losses
from analysis.records.schema import (
    CHOICES,
    FAR_CONTEXTS,
    FURTHER,
    FURTHER_PLACEBOS,
    KEEP_RATE,
    PREFIX,
    PROPOSER,
    PROPOSER_SCALING,
    ROPE_SCALING,
    SAME_GROUP,
    SHUFFLED,
    SUBSETS,
    TARGETS_PER_BLOCK,
    UNTRAINED,
    Examples,
    Manifest,
    SelectionRow,
    Targets,
)
from analysis.records.store import MANIFEST_NAME, Records, RecordWriter
from analysis.text.contexts import (
    Contexts,
    Documents,
    SampledTargets,
    long_contexts,
    placebo_contexts,
    sample_targets,
    shuffled_contexts,
    with_same_group,
)
from analysis.text.decode import TextDecoder
from analysis.text.kinds import classify
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.streams import Stream

log = logging.getLogger(__name__)

TARGETS_PER_BATCH = 64
"""Targets whose gains are measured as one batch, in whole blocks. Shards take whole batches, so that every forward pass
of a shard is one of the unsharded measurement: a batch of another size could differ in the last bits of a loss."""
TARGETS_PER_ROUND = 4
"""Targets that selectors choose for at once where B = 1; otherwise those of one block."""
SECONDS_BETWEEN_PARTS = 20.0
EXAMPLES_FROM_TARGETS = 20_000
"""With more targets than these only a share of those over tau keeps its text, which is for people to read."""
TOKENS_AFTER = 12
"""Tokens behind the target that are read to complete its word, and shown."""


@dataclass(frozen=True)
class InfluenceEngine:
    """Measures targets of documents."""

    documents: Documents
    decoder: TextDecoder
    evaluator: Scorer
    """Computes L_long, L_short and L_k."""
    chooser: Chooser
    """Chooses targets and tokens."""
    n_long: int
    n_short: int
    ks: Sequence[int]
    selectors: Sequence[str]
    targets_per_block: int = 1
    """B. Targets whose numbers have the same quotient by B are one block, and the remainder is the place in it."""
    crossfit: bool = False
    """Whether the model that chooses is another one than the evaluator."""
    faithfulness: Faithfulness | None = None
    """What measures the further columns of the records; None: they have none."""
    seed: int = 0
    """Of the order of shuffled far contexts."""

    def measure_gains(self, sampled: SampledTargets, rows: np.ndarray, target_id: np.ndarray) -> Targets:
        """L_long and L_short of some of the sampled targets, and their kinds of dependency."""
        contexts, asked = self._contexts(sampled, rows, target_id)
        long, short = long_and_short_losses(self.evaluator, contexts, asked)
        gain = self.chooser.gains_nats(contexts, asked) if self.crossfit else short - long
        further = self.faithfulness.of_targets(contexts, asked) if self.faithfulness else {}
        drawn = {name: column[rows] for name, column in vars(sampled).items() if column is not None}
        check_finite(long, short, gain, *further.values())
        return Targets(
            target_id=target_id,
            token=contexts.targets[tuple(asked.T)],
            loss_long_nats=long,
            loss_short_nats=short,
            selecting_gain_nats=gain,
            kind=self._kinds(sampled, rows, target_id),
            **drawn,
            **further,
        )

    def select(
        self, targets: Targets, rows: np.ndarray, far_contexts: Sequence[str] = FAR_CONTEXTS
    ) -> list[SelectionRow]:
        """What every selector chooses for some of the targets in each far context that they have, and L_k of it."""
        true, asked = self._contexts(targets, rows, targets.target_id[rows])
        found = self._selections(true, asked, "true")
        if "placebo" in far_contexts:
            place = targets.placebo_document, targets.placebo_start
            found += self._select_elsewhere(targets, rows, *place, "placebo")
        if SAME_GROUP in far_contexts and len(having := rows[targets.having(SAME_GROUP)[rows]]):
            assert targets.same_group_document is not None and targets.same_group_start is not None
            place = targets.same_group_document, targets.same_group_start
            found += self._select_elsewhere(targets, having, *place, SAME_GROUP)
        if SHUFFLED in far_contexts:
            found += self._selections(shuffled_contexts(true, self.seed), asked, SHUFFLED)
        return found

    def _select_elsewhere(
        self, targets: Targets, rows: np.ndarray, document: np.ndarray, start: np.ndarray, far_context: str
    ) -> list[SelectionRow]:
        """The same in far contexts that stand at ``start`` of ``document``, (n,) as the targets."""
        contexts, asked = self._contexts(targets, rows, targets.target_id[rows])
        of_blocks = rows[np.unique(asked[:, 0], return_index=True)[1]]
        moved = placebo_contexts(self.documents, contexts, document[of_blocks], start[of_blocks])
        return self._selections(moved, asked, far_context)

    def examples(self, targets: Targets, rows: np.ndarray) -> Examples:
        """The text of some of the targets, their contexts and their placebo far contexts."""
        texts = [self._pieces(targets, row, targets.target_id[row]) for row in rows]
        at = zip(targets.placebo_document[rows], targets.placebo_start[rows], strict=True)
        placebos = [self.documents.document(int(d))[start : start + self.n_far] for d, start in at]
        return Examples(
            targets.target_id[rows],
            [pieces[:-1] for pieces, _ in texts],
            [pieces[-1] for pieces, _ in texts],
            [self.decoder.pieces(far.tolist()) for far in placebos],
            [after for _, after in texts],
        )

    @property
    def n_far(self) -> int:
        """F."""
        return self.n_long - self.n_short

    def _contexts(
        self, at: SampledTargets | Targets, rows: np.ndarray, target_id: np.ndarray
    ) -> tuple[Contexts, np.ndarray]:
        """The blocks that hold some targets, and where each target stands in them, (m, 2)."""
        place = target_id % self.targets_per_block
        first_id, first, block = np.unique(target_id - place, return_index=True, return_inverse=True)
        contexts = long_contexts(
            self.documents,
            at.document[rows[first]],
            at.position[rows[first]] - place[first],
            first_id,
            n_long=self.n_long,
            n_short=self.n_short,
            targets_per_block=self.targets_per_block,
        )
        return contexts, np.stack([block, place], axis=1)

    def _selections(self, contexts: Contexts, asked: np.ndarray, far_context: str) -> list[SelectionRow]:
        k_max = max(self.ks)
        target_id = contexts.target_id[tuple(asked.T)].tolist()
        chosen = self.chooser.select(self.selectors, contexts, asked, far_context)
        further = self.faithfulness.of_selections(contexts, asked, chosen) if self.faithfulness else {}
        found = []
        for name, each in chosen.items():
            columns, influence = each.columns[:, :k_max], each.influence[:, :k_max]
            losses = selected_losses(self.evaluator, contexts, asked, columns, self.ks)
            more = further.get(name, {})
            check_finite(losses, *(values for column, values in more.items() if column.endswith("_nats")))
            found += [
                SelectionRow(
                    *(target, name, far_context, columns[i], influence[i], losses[i]),
                    further={column: values[i] for column, values in more.items()},
                )
                for i, target in enumerate(target_id)
            ]
        return found

    def _kinds(self, sampled: SampledTargets, rows: np.ndarray, target_id: np.ndarray) -> np.ndarray:
        """Kind of dependency of every target, (n,) strings."""
        kinds = []
        for row, number in zip(rows, target_id, strict=True):
            pieces, after = self._pieces(sampled, row, number)
            far, short = pieces[: self.n_far], pieces[self.n_far : -1]
            kinds.append(classify("".join(far), "".join(short), pieces[-1], after))
        return np.array(kinds)

    def _pieces(self, at: SampledTargets | Targets, row: int, target_id: int) -> tuple[list[str], str]:
        """Pieces of the context tokens and the target, and the text behind it."""
        position, read = int(at.position[row]), self.n_long + int(target_id) % self.targets_per_block
        document = self.documents.document(int(at.document[row]))
        pieces = self.decoder.pieces(document[position - read : position + 1 + TOKENS_AFTER].tolist())
        return pieces[: read + 1], "".join(pieces[read + 1 :])


def selected_losses(
    scorer: Scorer, contexts: Contexts, asked: np.ndarray, selected: np.ndarray, ks: Sequence[int]
) -> np.ndarray:
    """L_k = loss(t | C_short and the first k selected tokens), (m, K) nats (Eq. 20, docs/method.md, 2.2).

    ``asked``: (m, 2) as in `Scorer.losses`. ``selected``: (m, k_max) columns of far tokens, most influential first.
    """
    losses = [scorer.losses(contexts, np.sort(selected[:, :k], axis=1)[:, None], asked) for k in ks]
    return np.concatenate(losses, axis=1)


def check_finite(*losses: np.ndarray) -> None:
    """Raise `UserError` where a loss is not finite."""
    if not all(np.isfinite(each).all() for each in losses):
        raise UserError(
            "a loss of the model is not finite (fp16 and bf16 may overflow); measure in fp32, or another checkpoint"
        )


def build_scorer(
    model: torch.nn.Module,
    device: torch.device,
    n_long: int,
    targets_per_block: int = 1,
    *,
    bf16: bool = False,
    tokens_per_batch: int | None = None,
    memory_limit_gb: float | None = None,
) -> Scorer:
    """A scorer whose batches of blocks, N and B, fit the memory limit.

    None means half the memory, or 80 % of what is free on the GPU.
    """
    model, limit = model.to(device), None
    if tokens_per_batch is None:
        limit = default_limit_bytes(device) if memory_limit_gb is None else memory_limit_gb * GB
        tokens_per_batch = tokens_that_fit(
            model, device, n_long + targets_per_block - 1, limit, asked=targets_per_block
        )
    return Scorer(model, device=device, bf16=bf16, tokens_per_batch=tokens_per_batch, limit_bytes=limit)


def targets_per_batch(targets_per_block: int) -> int:
    """`TARGETS_PER_BATCH` in whole blocks."""
    return targets_per_block * max(1, TARGETS_PER_BATCH // targets_per_block)


def selection_rounds(targets: Targets, over: np.ndarray, targets_per_block: int) -> list[np.ndarray]:
    """Rows of the targets over tau that selectors choose for at once: those of a block, or a few of one batch."""
    together = size = targets_per_block
    if targets_per_block == 1:
        together, size = TARGETS_PER_BATCH, TARGETS_PER_ROUND
    group = targets.target_id[over] // together
    return [rows for number in np.unique(group) for rows in chunks(over[group == number], size)]


@dataclass(frozen=True)
class Measurement:
    """What is about to be measured: all input was read and checked."""

    text: MeasuredText
    sampled: SampledTargets
    engine: InfluenceEngine
    manifest: Manifest


def open_measurement(settings: InfluenceSettings) -> Measurement:
    """Read what the settings name. Raises `UserError` for bad input."""
    for name in settings.selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_long - settings.n_short)
    device = pick_device(settings.device)
    recorded = open_records(settings.checkpoint)
    if recorded and settings.corpus is None:
        settings = replace(settings, corpus=recorded.manifest.corpus)
    checkpoints = _checkpoints(settings, recorded)
    _check_proposer(settings, recorded)
    text = open_text(settings, settings.checkpoint)
    drawing = {name: getattr(settings, name) for name in ("n_long", "n_short", "seed", "targets_per_block")}
    sampled = sample_targets(text.tokens, settings.targets, **drawing)
    if SAME_GROUP in settings.further_placebos:
        sampled = with_same_group(sampled, text.tokens, **drawing)
    if settings.shard:
        settings.shard.check(len(sampled.document), targets_per_batch(settings.targets_per_block))

    def load(checkpoint: str) -> LoadedModel:
        sizes = settings.n_long, settings.targets_per_block
        return load_checked(
            checkpoint, settings.prefix, text, lambda each: each.check_context(*sizes), settings.dtype
        )

    models = [load(path) for path in checkpoints]
    proposer = load(settings.propose_with) if settings.propose_with else None
    engine, manifest = _assign_roles(settings, text, models, recorded, proposer, device)
    return Measurement(text, sampled, engine, manifest)


def measure_influence(settings: InfluenceSettings) -> Path:
    """Measure, writing records as they are finished; returns their folder.

    Run again with the same settings, it goes on where an interrupted run stopped. Raises `UserError` for bad input, and
    where another process writes to that folder.
    """
    asked = open_measurement(settings)
    with folder_lock(settings.folder):
        writer = RecordWriter(settings.folder, asked.manifest, overwrite=settings.overwrite)
        if writer.manifest.complete:
            log.info("%s is complete already", settings.folder)
            return settings.folder
        try:
            _Run(settings, asked.engine, writer).run(asked.sampled)
        finally:
            if (settings.folder / MANIFEST_NAME).is_file():  # else it was discarded: no target gains enough
                asked.text.verified.save()
    return settings.folder


def _checkpoints(settings: InfluenceSettings, recorded: Records | None) -> list[str]:
    """The checkpoints to load: who selects, unless records of it do, and who evaluates, where it is another."""
    if recorded and not settings.evaluate_with:
        raise UserError(
            f"{settings.checkpoint} is a records folder; give a checkpoint, or another one with --evaluate-with"
        )
    given = [path for path in (None if recorded else settings.checkpoint, settings.evaluate_with) if path]
    for path in given:
        name, _ = split_checkpoint(path)[1] or (None, None)
        if not settings.evaluate_with:
            continue
        if name == UNTRAINED and path == settings.evaluate_with:
            raise UserError(f"{path}: untrained weights gain nothing; have them choose, with --select-with")
        if name not in (None, UNTRAINED):
            raise UserError(f"{path}: RoPE cannot be scaled in cross-fitting; leave @… out")
    return given


def _check_proposer(settings: InfluenceSettings, recorded: Records | None) -> None:
    """Raise `UserError` where a model is to propose and nothing is proposed."""
    if settings.propose_with and recorded:
        raise UserError(f"{settings.checkpoint} has chosen already; leave --propose-with out")
    if settings.propose_with and not any("@" in name for name in settings.selectors):
        raise UserError(
            "--propose-with is for screened selectors; name one in --selectors, such as leave-one-out@gradient:32"
        )


def _assign_roles(
    settings: InfluenceSettings,
    text: MeasuredText,
    models: list[LoadedModel],
    recorded: Records | None,
    proposer: LoadedModel | None,
    device: torch.device,
) -> tuple[InfluenceEngine, Manifest]:
    """Who selects and who evaluates, and how the manifest names them; of two models the second evaluates."""
    scorers = [_scorer_of(each, settings, device) for each in models]
    chooser: Chooser
    if recorded:
        chooser = RecordedChooser(recorded)
        chooser.check(settings, text.manifest_sha256)
        named = recorded.manifest
        selects = (named.checkpoint, named.checkpoint_sha256, named.training_seed)
    else:
        chooser = ModelChooser(
            scorers[0],
            seed=settings.seed,
            k_max=max(settings.ks),
            proposing=None if proposer is None else _scorer_of(proposer, settings, device),
        )
        selects = (models[0].name, models[0].weights_sha256, models[0].training_seed)
    evaluating = models[-1]
    if settings.evaluate_with and evaluating.weights_sha256 == selects[1]:
        raise UserError(
            f"{selects[0]} would select and evaluate (the weights are the same); cross-fitting takes "
            "checkpoints trained from two seeds"
        )
    engine = InfluenceEngine(
        text.tokens,
        TextDecoder.from_file(evaluating.tokenizer_file),
        scorers[-1],
        chooser,
        settings.n_long,
        settings.n_short,
        settings.ks,
        settings.selectors,
        settings.targets_per_block,
        # untrained weights gain nothing: the targets are those of the model that measures
        crossfit=bool(settings.evaluate_with) and not models[0].untrained,
        faithfulness=None
        if settings.only_recovery
        else Faithfulness(scorers[-1], settings.ks, settings.subsets, settings.seed),
        seed=settings.seed,
    )
    proposed_by = _proposed_by(settings, recorded, proposer)
    manifest = _manifest(
        settings, text, selects, evaluating, proposed_by, device, recorded=recorded is not None
    )
    return engine, manifest


def _proposed_by(
    settings: InfluenceSettings, recorded: Records | None, proposer: LoadedModel | None
) -> dict[str, str]:
    """Options of the manifest that name the model which proposed for screened selectors, now or in the records."""
    if recorded and any("@" in name for name in settings.selectors):
        options = recorded.manifest.options
        return {name: options[name] for name in (PROPOSER, PROPOSER_SCALING) if name in options}
    if proposer is None:
        return {}
    scaling = {PROPOSER_SCALING: str(proposer.rope_scaling)} if proposer.rope_scaling else {}
    return {PROPOSER: proposer.weights_sha256, **scaling}


def _scorer_of(loaded: LoadedModel, settings: InfluenceSettings, device: torch.device) -> Scorer:
    return build_scorer(
        loaded.model,
        device,
        settings.n_long,
        settings.targets_per_block,
        bf16=settings.bf16,
        tokens_per_batch=settings.tokens_per_batch,
        memory_limit_gb=settings.memory_limit_gb,
    )


def _manifest(
    settings: InfluenceSettings,
    text: MeasuredText,
    selects: tuple[str, str, int | None],
    evaluating: LoadedModel,
    proposed_by: dict[str, str],
    device: torch.device,
    *,
    recorded: bool,
) -> Manifest:
    options: dict[str, Any] = {}
    if not settings.only_recovery:
        options = {SUBSETS: settings.subsets, KEEP_RATE: SUBSET_KEEP_RATE}
    if settings.shard:
        options["shard"] = str(settings.shard)
    if settings.further_placebos:
        options[FURTHER] = [each for each in FURTHER_PLACEBOS if each in settings.further_placebos]
    if settings.targets_per_block > 1:
        options[TARGETS_PER_BLOCK] = settings.targets_per_block
    if selects[0].endswith(f"@{UNTRAINED}"):
        options[UNTRAINED] = True
    if recorded and not settings.only_recovery:
        options[CHOICES] = "recorded"
    if evaluating.prefix:
        options[PREFIX] = list(evaluating.prefix)
    if evaluating.rope_scaling:
        options[ROPE_SCALING] = asdict(evaluating.rope_scaling)
    options |= proposed_by
    crossed = bool(settings.evaluate_with)
    return Manifest(
        checkpoint=selects[0],
        checkpoint_sha256=selects[1],
        training_seed=selects[2],
        evaluation_checkpoint=evaluating.name if crossed else None,
        evaluation_checkpoint_sha256=evaluating.weights_sha256 if crossed else None,
        evaluation_training_seed=evaluating.training_seed if crossed else None,
        tokenizer_sha256=sha256_file(evaluating.tokenizer_file),
        corpus=text.corpus,
        corpus_manifest_sha256=text.manifest_sha256,
        split=settings.split,
        n_long=settings.n_long,
        n_short=settings.n_short,
        tau_nats=settings.tau_nats,
        ks=list(settings.ks),
        selectors=list(settings.selectors),
        seed=settings.seed,
        targets_asked=settings.targets,
        dtype="bf16" if settings.bf16 else evaluating.dtype,
        device=str(device),
        commit=current_commit(),
        options=options,
    )


@dataclass(frozen=True)
class _Run:
    """One run over the targets of a records folder, or of one shard of it."""

    settings: InfluenceSettings
    engine: InfluenceEngine
    writer: RecordWriter

    def run(self, sampled: SampledTargets) -> None:
        """Targets first, then the selections of those over tau that are not finished yet."""
        targets = self.writer.targets or self._measure_gains(sampled)
        over = targets.over(self.settings.tau_nats)
        if len(over) == 0 and not self.settings.shard:  # another shard may hold some
            self.writer.discard()
            raise UserError(
                f"none of {len(targets):,} targets gains more than tau = {self.settings.tau_nats} nats from the long "
                f"context (the most is {targets.selecting_gain_nats.max():.2f}); lower --tau, raise --targets, or "
                "train the model for longer"
            )
        if not self.writer.has_examples:
            shown = self._shown(targets, over, len(sampled.document))
            self.writer.write_examples(self.engine.examples(targets, shown))
        if self._select(targets, over):
            self.writer.finish()

    def _measure_gains(self, sampled: SampledTargets) -> Targets:
        ids = np.arange(len(sampled.document))
        batches = enumerate(chunks(ids, targets_per_batch(self.settings.targets_per_block)))
        shard, parts = self.settings.shard, []
        mine = [rows for number, rows in batches if shard is None or shard.has(number)]
        with progress("long and short losses", sum(map(len, mine)), "targets") as advance:
            for rows in mine:
                parts.append(self.engine.measure_gains(sampled, rows, rows))
                advance(len(rows))
        targets = Targets.joined(parts)
        self.writer.write_targets(targets)
        return targets

    def _shown(self, targets: Targets, over: np.ndarray, of: int) -> np.ndarray:
        """Rows of the targets over tau whose text is kept; of a large measurement, ``of`` many, a random part.

        Whether a target is shown depends on itself alone, so that shards show what the whole run does.
        """
        share, seed = EXAMPLES_FROM_TARGETS / of, self.settings.seed
        draws = [
            np.random.default_rng([Stream.EXAMPLES, seed, target]).random()
            for target in targets.target_id[over].tolist()
        ]
        return over[np.array(draws) < share]

    def _select(self, targets: Targets, over: np.ndarray) -> bool:
        """Run every selector on every far context, a few targets at a time; True if all are."""
        finished = self.writer.finished_targets()
        rounds = [
            rows
            for rows in selection_rounds(targets, over, self.settings.targets_per_block)
            if not finished.issuperset(targets.target_id[rows].tolist())
        ]
        left = sum(map(len, rounds))
        if self.settings.limit is not None:
            sizes = np.cumsum([len(rows) for rows in rounds])
            rounds = rounds[: int(np.searchsorted(sizes, self.settings.limit)) + 1]
        now = sum(map(len, rounds))
        pending: list[SelectionRow] = []
        written = time.monotonic()
        done = len(over) - left
        with progress("selecting tokens", done + now, "targets", done=done) as advance:
            try:
                for rows in rounds:
                    pending += self.engine.select(targets, rows, self.writer.manifest.far_contexts)
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
