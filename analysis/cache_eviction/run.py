"""`eviction`: blocks of targets are drawn and judged one by one, kept as they are finished, and put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import arguments
from analysis.cache_eviction.contenders import ALL, Contest
from analysis.cache_eviction.judge import BlockJudge, Judged
from analysis.cache_eviction.known_effects import KnownEffects, measured_effects
from analysis.cache_eviction.record import FRAMES, FULL, HEAD, NONE, PARTS
from analysis.cache_eviction.result import EvictionResult
from analysis.cache_eviction.settings import BUDGETS, DEFAULT_REFERENCES, NEARS, EvictionSettings
from analysis.contexts import PLACEBO, TRUE, Contexts, blocks_of, placebo_contexts
from analysis.measuring import identity_of
from analysis.model.losses import Scorer
from analysis.model.tokenizer import TextDecoder
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.parameters import definitions
from analysis.policies import POLICIES
from analysis.sampling import sample_targets
from analysis.saved import Rounds, open_parts, remove_finished_parts
from analysis.settings import ContextSettings
from analysis.texts import Texts
from analysis.token_kinds import kinds_of
from analysis.work import Work
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import remove_leftovers
from olmo_sparsity.util.progress import progress as show_progress

log = logging.getLogger(__name__)


def eviction(
    model: Any,
    texts: Any,
    *,
    n_long: int = 256,
    n_short: int = 32,
    targets_per_block: int = 32,
    blocks: int = 50,
    budgets: Sequence[float] = BUDGETS,
    policies: str | Sequence[str] = ALL,
    sinks: int = 4,
    references: Sequence[str] = DEFAULT_REFERENCES,
    near: str | Sequence[str] = NEARS,
    placebo: bool = False,
    kept_sets: bool = False,
    effects: Any = None,
    only_blocks: Sequence[int] | None = None,
    prefix: str = "auto",
    seed: int = 0,
    tokenizer: Any = None,
    dtype: str = "fp32",
    device: str | None = None,
    attn_implementation: str | None = None,
    tokens_per_batch: int | None = None,
    out: str | Path | None = None,
    split: str = "heldout",
    progress: bool = True,
) -> EvictionResult:
    """Which eviction policy keeps what the next predictions need, judged by exact effect (docs/eviction.md).

    In every block a policy chooses once, before the first target, which far keys are left; then all B targets are read
    with these. What they lose to the full cache is measured at equal budgets, beside references that see the targets.

    Args:
        model: as for `analysis.measure`; its rows must share far keys, as those of most models do.
        texts: as for `analysis.measure`.
        n_long: N.
        n_short: M.
        targets_per_block: B, 2 or more: the targets behind a choice; 512 shows what it does to later ones.
        blocks: how many to draw; small texts offer fewer.
        budgets: shares of the F = N - M far keys that a head keeps in the mean, sinks included; ascending.
        policies: names of eviction policies, such as ``snapkv``, ``snapkv:window=64`` or ``h2o:blind=1``, and of the
            controls ``random``, ``random-by-head`` and ``nearest``; or ``all``: every policy, aware and blind, that the
            model has.
        sinks: first far tokens that all of them keep.
        references: names of `analysis.cache_eviction.reference`, such as ``leave-one-out-kl:first=16``; overlap is with
            the first of them.
        near: the ways of the near tokens in which policies are judged, ``kept`` and ``reread``.
        placebo: judge all in the placebo far context, too: what shrinking any context costs.
        kept_sets: also save what share of layers and heads keep each far key, for `EvictionResult.keeps`.
        effects: a result of `analysis.measure` with ``effects=True``, or its folder, of the same model, texts and
            contexts: where the near tokens are read again, ``leave-one-out-kl`` is read from it for the blocks that it
            has, to float32, in place of F passes a block.
        only_blocks: numbers from 0 of the drawn blocks to judge, so that several processes judge parts for
            `EvictionResult.of_parts`. In ``out`` they stay parts, and the same call without it judges the others.
        prefix: what stands before every context, see `analysis.measure`; so for all that is not named here.
        seed: of everything that is drawn.
        out: folder to write to as blocks are finished: the same call goes on after an interruption.
        progress: show it on standard error.

    Raises `UserError` before anything is measured, where model, texts and settings do not go together, or ``out`` has
    another measurement.
    """
    contexts = arguments.context_settings(
        n_long=n_long, n_short=n_short, targets_per_block=targets_per_block, seed=seed
    )
    blocks = arguments.whole_number("blocks", blocks)
    contest = checked_contest(contexts, budgets, policies, sinks, references, near)
    placebo = arguments.true_or_false("placebo", placebo)
    kept_sets = arguments.true_or_false("kept_sets", kept_sets)
    measured = None if effects is None else measured_effects(effects)
    if tokens_per_batch is not None:
        tokens_per_batch = arguments.whole_number("tokens_per_batch", tokens_per_batch)
    folder = None if out is None else arguments.folder("out", out)
    opening: dict[str, Any] = {
        "tokenizer": tokenizer,
        "prefix": prefix,
        "dtype": dtype,
        "device": device,
        "attn_implementation": attn_implementation,
    }
    with ExitStack() as stack:
        loaded = stack.enter_context(open_model(model, **opening))
        source = open_texts(texts, loaded.reader, split=split)
        loaded.check_texts(source)
        count = blocks * contexts.targets_per_block
        sampled = sample_targets(source, count, **contexts.drawn_by, placebo=placebo)
        loaded.check_context(
            contexts.n_long, contexts.targets_per_block, drops_tokens=False, in_cache=True, by_head=()
        )
        scorer = Scorer(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)
        judge = BlockJudge(scorer, contest, loaded.encode, kept_sets)
        sampled["block"] = sampled["target_id"] // contexts.targets_per_block
        if only_blocks is not None:
            sampled = _of_blocks(sampled, only_blocks)
        first, _ = blocks_of(source, sampled[sampled["block"] == sampled["block"].min()], contexts)
        log.info("all policies choose on the first block, which shows what the model has for them to look at")
        judge = judge.of_those_that_can(first, leave_out=ALL in arguments.names("policies", policies))
        settings = EvictionSettings(
            model=loaded.identity,
            texts=identity_of(source, split),
            contexts=contexts,
            blocks_requested=blocks,
            budgets=contest.budgets,
            sinks=contest.sinks,
            policies=tuple(policy.name for policy in judge.contest.policies),
            references=tuple(reference.name for reference in contest.references),
            placebo=placebo,
            near=contest.near,
            kept_sets=kept_sets,
            definitions=definitions(POLICIES, [policy.name for policy in judge.contest.policies]),
        )
        known = None
        if measured is not None:
            known = KnownEffects.of(measured, settings, sampled)
        log.info(
            "%d blocks, %s targets; %s tokens a pass",
            sampled["block"].nunique(),
            f"{len(sampled):,}",
            f"{scorer.tokens_per_batch:,}",
        )
        comparison = _Comparison(judge, source, sampled, settings, loaded.check_losses, loaded.decoder, known)
        return comparison.run(folder, progress, is_part=only_blocks is not None)


def checked_contest(
    contexts: ContextSettings, budgets: Any, policies: Any, sinks: Any, references: Any, near: Any
) -> Contest:
    """What the arguments of `eviction` ask for. Raises `UserError` where they make no sense."""
    is_list = isinstance(budgets, Iterable) and not isinstance(budgets, str)
    numbers = list(budgets) if is_list else [budgets]
    return Contest.of(
        contexts,
        budgets=[arguments.finite_number("budgets", budget) for budget in numbers],
        sinks=arguments.whole_number("sinks", sinks, least=0),
        policies=arguments.names("policies", policies),
        references=arguments.names("references", references),
        near=arguments.names("near", near),
    )


def _of_blocks(sampled: pd.DataFrame, only_blocks: Sequence[int]) -> pd.DataFrame:
    """The targets of some blocks. Raises `UserError` where one was not drawn."""
    drawn = sampled["block"].unique()
    wanted = np.unique(np.asarray(only_blocks))
    if not len(wanted) or not np.isin(wanted, drawn).all():
        raise UserError(
            f"only_blocks takes numbers from 0 to {drawn.max()}, as blocks are drawn, not {only_blocks}"
        )
    return sampled[sampled["block"].isin(wanted)].reset_index(drop=True)


@dataclass(frozen=True)
class _Comparison:
    """Judges all blocks, those that a folder has not yet."""

    judge: BlockJudge
    source: Texts
    sampled: pd.DataFrame
    """Of all targets, with their block."""
    settings: EvictionSettings
    check_losses: Callable[[np.ndarray], Any]
    """Is given the losses of the first block with the full cache."""
    decoder: TextDecoder
    known: KnownEffects | None

    def run(self, out: Path | None, progress: bool, *, is_part: bool = False) -> EvictionResult:
        """All blocks, or what is judged so far; ``out``: the folder, None: all stays in memory.

        ``is_part``: other blocks are to be judged, too, so that those of the folder stay parts.
        """
        if out is None:
            in_memory: list[EvictionResult] = []
            self._judge((), in_memory.append, progress)
            return EvictionResult.of_parts(in_memory)
        if (out / HEAD).is_file():
            there = EvictionResult.load(out)
            if differing := there.settings.differences(self.settings, when="resumed"):
                raise UserError(f"{out} was measured with other settings: {differing}; give another folder")
            blocks = self.sampled["block"].unique()
            if not np.isin(blocks, there.targets["block"]).all():
                raise UserError(
                    f"{out} holds a result of {there.targets['block'].nunique()} of the {len(blocks)} blocks; give "
                    "another folder"
                )
            log.info("%s is complete already", out)
            remove_finished_parts(out / PARTS, differences=self._differences)
            return there
        with open_parts(out / PARTS, HEAD, self.settings.to_json(), differences=self._differences) as parts:
            kept = [parts.read(head, EvictionResult.load) for head in parts.finished()]
            judged = {block for part in kept for block in part.targets["block"]}
            if judged:
                blocks = set(self.sampled["block"])
                log.info("%s goes on: %d of %d blocks are judged", out, len(judged & blocks), len(blocks))

            def keep(part: EvictionResult) -> None:
                part.save(parts.path(f"block-{part.targets['block'].min():08d}").parent)
                kept.append(part)

            self._judge(judged, keep, progress)
            result = EvictionResult.of_parts(kept)
            if is_part:
                return result
            remove_leftovers(out, [HEAD, *(f"eviction-{name}.parquet" for name in FRAMES)])
            result.save(out)
            parts.remove()
        return result

    def _differences(self, there: dict[str, Any]) -> str:
        """How the settings that parts were begun with differ from these, as text."""
        return EvictionSettings.from_json(there).differences(self.settings, when="resumed")

    def _judge(self, judged: Collection[int], keep: Callable[[EvictionResult], None], progress: bool) -> None:
        """Judge all blocks but some, and have them kept, also those that Ctrl-C or an error leaves."""
        to_judge = self.sampled[~self.sampled["block"].isin(judged)]
        done = len(self.sampled) - len(to_judge)
        bar = partial(show_progress, "targets read", len(self.sampled), "targets", done=done, estimates=False)
        with bar(enabled=progress) as advance:
            work = Work(len(to_judge), advance)
            self.judge.scorer.on_read = work.read

            def write(frames: dict[str, pd.DataFrame], about: dict[str, Any]) -> None:
                keep(EvictionResult(self.settings, provenance=about, **frames))
                work.keep(len(frames["targets"]))

            rounds = Rounds(write)
            try:
                for _, targets in to_judge.groupby("block"):
                    contexts, _ = blocks_of(self.source, targets, self.settings.contexts)
                    work.begin_batch(len(targets), 0.0, 0.0)
                    effects_nats = None
                    if self.known is not None:
                        effects_nats = self.known.of_block(targets, contexts)
                    work.begin_steps([self._tokens(targets, contexts, effects_nats)])
                    rounds.add(self._frames(targets, contexts, effects_nats))
                    work.finish_step()
                    work.finish_batch()
            finally:
                rounds.keep()

    def _tokens(self, targets: pd.DataFrame, contexts: Contexts, effects_nats: np.ndarray | None) -> int:
        """About how many tokens are read for one block in all far contexts."""
        place = targets["target_id"] % contexts.targets_per_block
        are_known = effects_nats is not None and bool(np.isfinite(effects_nats[place]).all())
        tokens = self.judge.tokens(contexts, are_known)
        if self.settings.placebo:
            tokens += self.judge.tokens(contexts)
        return tokens

    def _frames(
        self, targets: pd.DataFrame, contexts: Contexts, effects_nats: np.ndarray | None
    ) -> dict[str, pd.DataFrame]:
        """`FRAMES` of one block; ``effects_nats``: see `BlockReading`."""
        place = (targets["target_id"] % contexts.targets_per_block).to_numpy()
        judged = {TRUE: self.judge.judge(contexts, place, effects_nats)}
        if self.settings.placebo:
            first = targets.iloc[:1]
            elsewhere = placebo_contexts(
                self.source, contexts, first["placebo_text"].to_numpy(), first["placebo_start"].to_numpy()
            )
            judged[PLACEBO] = self.judge.judge(elsewhere, place)
        losses = []
        choices = []
        for far_context, of_context in judged.items():
            rows = of_context.losses[of_context.losses["place"].isin(place)]
            target_id = contexts.target_id[0, rows["place"]]
            rows = rows.drop(columns="place")
            losses.append(_with_first(rows, target_id=target_id, far_context=far_context))
            block = targets["block"].iloc[0]
            choices.append(_with_first(of_context.choices, block=block, far_context=far_context))
        return {
            "targets": self._targets(targets, contexts, place, judged[TRUE]),
            "losses": pd.concat(losses, ignore_index=True),
            "choices": pd.concat(choices, ignore_index=True),
        }

    def _targets(
        self, targets: pd.DataFrame, contexts: Contexts, place: np.ndarray, judged: Judged
    ) -> pd.DataFrame:
        """The frame `targets` of one block."""
        full = judged.loss_nats(FULL)[place]
        if targets["block"].iloc[0] == self.sampled["block"].min():
            self.check_losses(full)
        columns = ["text", "position"]
        if "group" in targets:
            columns.insert(1, "group")
        if self.settings.placebo:
            columns += ["placebo_text", "placebo_start"]
        frame = targets[["target_id", "block"]].assign(place=place)
        frame = frame.join(targets[columns])
        return frame.assign(
            token=contexts.targets[0, place],
            kind=kinds_of(targets, self.source, self.decoder, self.settings.contexts),
            loss_full_nats=full,
            loss_short_nats=judged.loss_nats(NONE)[place],
        )


def _with_first(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The frame with these columns before its own."""
    names = list(frame)
    return frame.assign(**columns)[[*columns, *names]]
