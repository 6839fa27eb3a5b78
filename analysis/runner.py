"""The run of a measurement: batches of targets, resumed after an interruption, shared by several jobs, put together.

A folder that is written holds `parts/` until a run without a shard makes them its result. Batches are the same whoever
measures them, so that the whole is that of one uninterrupted run. A whole result in which nothing was chosen lends its
losses to a run with another tau, and stays until that is whole.

What is measured together, from large to small: a shard is every n-th batch; a batch is 64 targets in whole blocks,
whose losses share passes; a round is a block, for which tokens are chosen at once (or some blocks of one target). A
part is one round, or several that were finished within two seconds: a saved measurement of their targets.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.arguments import whole_numbers
from analysis.engine import Engine, targets_per_batch
from analysis.measurement import FRAMES, PARTS, RESULT_NAME, Measurement
from analysis.saved import Parts, Rounds, open_parts, remove_finished_parts
from analysis.settings import Settings
from analysis.work import (
    Work,
    likely_tokens_to_choose,
    tokens_of_effects,
    tokens_of_losses,
    tokens_to_choose,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import remove_leftovers
from olmo_sparsity.util.progress import progress as show_progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runner:
    """Measures the targets of a measurement that are not measured yet, batch by batch, and keeps what is finished."""

    engine: Engine
    sampled: pd.DataFrame
    """Of all targets."""
    out: Path | None
    """The folder; None: all stays in memory."""
    progress: bool

    @property
    def settings(self) -> Settings:
        """Of the measurement."""
        return self.engine.settings

    def run(self, shard: str | None, batches: Sequence[int] | None) -> Measurement:
        """Measure the batches of a shard, or those that are named, and return all targets that are measured."""
        count = self._batch_numbers().max() + 1
        mine = _batches_of(shard, count) if batches is None else _checked_batches(batches, count)
        if self.out is None:
            in_memory: list[Measurement] = []
            self._measure(mine, in_memory.append)
            return self._joined(in_memory)
        there = self._result_there()
        if there is not None and there.settings.choices.tau_nats == self.settings.choices.tau_nats:
            if not self.sampled["target_id"].isin(there.targets["target_id"]).all():
                raise UserError(
                    f"{self.out} holds a result of {len(there.targets):,} of the {len(self.sampled):,} targets; give "
                    "another folder"
                )
            log.info("%s is complete already", self.out)
            remove_finished_parts(self.out / PARTS, differences=self._differences)
            return there
        known = None if there is None else self._known(there)
        return self._run_in_folder(self.out, mine, shard, known)

    def _run_in_folder(
        self, out: Path, batches: Sequence[int], shard: str | None, known: pd.DataFrame | None
    ) -> Measurement:
        """Go on with the parts in ``out``; ``known``: all targets, where they have losses of another tau."""
        share = None if shard is None else shard.replace("/", "-of-")
        with self._open_parts(out, share) as parts:
            kept = self._finished(parts)
            measured = {target for part in kept for target in part.targets["target_id"]}
            sampled = self._targets_of(batches)
            if done := int(sampled["target_id"].isin(measured).sum()):
                log.info("%s goes on: %s of %s targets are measured", out, f"{done:,}", f"{len(sampled):,}")

            def keep(part: Measurement) -> None:
                first = f"targets-{part.targets['target_id'].min():08d}"
                part.save(parts.path(first if share is None else f"{first}-{share}").parent)
                kept.append(part)

            self._measure(batches, keep, measured, known)
            if shard is not None:  # others may have finished theirs
                kept = self._finished(parts)
            result = self._joined(kept)
            if result.settings.complete and shard is None:
                remove_leftovers(out, [RESULT_NAME, *(f"{name}.parquet" for name in FRAMES)])
                result.save(out)
                parts.remove()
            return result

    def _measure(
        self,
        batches: Sequence[int],
        keep: Callable[[Measurement], None],
        measured: Collection[int] = (),
        known: pd.DataFrame | None = None,
    ) -> None:
        """Measure what is not measured of some batches, and have it kept, part by part.

        Args:
            batches: their numbers.
            keep: is given every part when it is finished, also those that Ctrl-C or an error leaves.
            measured: ids of targets that are measured already.
            known: all targets, where they have losses of another tau.
        """
        sampled = self._targets_of(batches)
        done = int(sampled["target_id"].isin(measured).sum())
        if done == len(sampled):
            return
        bar = partial(show_progress, "targets measured", len(sampled), "targets", done=done, estimates=False)
        with bar(enabled=self.progress) as advance:
            work = Work(len(sampled) - done, advance)
            self.engine.on_read(work.read)

            def write(frames: dict[str, pd.DataFrame], about: dict[str, Any]) -> None:
                keep(Measurement(self.settings, provenance=about, **frames))
                work.keep(len(frames["targets"]))

            rounds = Rounds(write)
            try:
                for batch in batches:
                    of_batch = self._batch_numbers() == batch
                    to_measure = self.sampled[of_batch]
                    if to_measure["target_id"].isin(measured).all():
                        continue
                    before = None if known is None else known[of_batch]
                    self._measure_batch(to_measure, before, measured, rounds, work)
                    rounds.keep()  # the losses of the next batch may take minutes
            finally:
                rounds.keep()

    def _measure_batch(
        self,
        sampled: pd.DataFrame,
        known: pd.DataFrame | None,
        measured: Collection[int],
        rounds: Rounds,
        work: Work,
    ) -> None:
        """Measure one batch: the losses of all its targets, and then round by round what is not ``measured``."""
        size = self.settings.contexts.targets_per_block
        blocks = _blocks(sampled, size)
        work.begin_batch(
            int((~sampled["target_id"].isin(measured)).sum()),
            0.0 if known is not None else tokens_of_losses(self.settings, blocks),
            likely_tokens_to_choose(self.settings, len(sampled), blocks),
        )
        targets = self.engine.with_losses(sampled, known)
        todo = [
            of_round
            for of_round in self.engine.rounds(targets)
            if not of_round["target_id"].isin(measured).all()
        ]
        expected = []
        for of_round in todo:
            over = of_round[of_round["over_tau"]]
            to_choose = tokens_to_choose(self.settings, len(over), _blocks(over, size))
            expected.append(to_choose + tokens_of_effects(self.settings, _blocks(of_round, size)))
        work.begin_steps(expected)
        for of_round in todo:
            frames = {"targets": of_round, **self.engine.choose(of_round)}
            work.finish_step()
            rounds.add(frames)
        work.finish_batch()

    def _open_parts(self, out: Path, share: str | None) -> AbstractContextManager[Parts]:
        """The parts in ``out``. Raises `UserError` where they were begun with other settings."""
        # shares side by side, but not beside a run without one, which may measure the same batches
        return open_parts(
            out / PARTS, RESULT_NAME, self.settings.to_json(), differences=self._differences, share=share
        )

    def _differences(self, there: dict[str, Any]) -> str:
        """How the settings that parts were begun with differ from these, as text."""
        return Settings.from_json(there).differences(self.settings, when="resumed")

    def _finished(self, parts: Parts) -> list[Measurement]:
        """The parts that are finished. Raises `UserError` where one is damaged, or of other settings."""
        finished = []
        for head in parts.finished():
            part = parts.read(head, Measurement.load)
            if differing := part.settings.differences(self.settings, when="resumed"):
                raise UserError(
                    f"{head.parent} was measured with other settings: {differing}; remove it, or give another folder"
                )
            finished.append(part)
        return finished

    def _batch_numbers(self) -> pd.Series:
        """Of every target, the number of its batch."""
        return self.sampled["target_id"] // targets_per_batch(self.settings.contexts.targets_per_block)

    def _targets_of(self, batches: Sequence[int]) -> pd.DataFrame:
        return self.sampled[self._batch_numbers().isin(batches)]

    def _result_there(self) -> Measurement | None:
        """The whole result in ``out``, None where there is none: of this measurement, or of one with another tau in
        which nothing was chosen, so that its losses are those of this one, too.

        Raises `UserError` for any other.
        """
        if self.out is None or not (self.out / RESULT_NAME).is_file():
            return None
        there = Measurement.load(self.out)
        differing = there.settings.differences(self.settings, when="resumed")
        but_for_tau = there.settings.differences(self.settings, when="resumed", but_for=("tau_nats",))
        lends_losses = there.settings.complete and there.choices.empty and not but_for_tau
        if differing and not lends_losses:
            raise UserError(f"{self.out} was measured with other settings: {differing}; give another folder")
        return there

    def _known(self, there: Measurement) -> pd.DataFrame:
        """The targets of a result, row by row those of ``sampled``. Raises `UserError` where they are others."""
        of_place = ["target_id", "text", "position"]
        if not np.array_equal(there.targets[of_place], self.sampled[of_place]):
            raise UserError(f"{self.out} has other targets than are sampled now; give another folder")
        log.info("nothing was chosen in %s: its losses are used again", self.out)
        return there.targets

    def _joined(self, parts: Sequence[Measurement]) -> Measurement:
        """The parts as one result."""
        whole = Measurement.of_parts(parts)
        targets = whole.targets
        lacking = [name for name in targets if any(name not in part.targets for part in parts)]
        if lacking:
            log.warning("parts of an earlier version lack %s: the result does, too", ", ".join(lacking))
            targets = targets.drop(columns=lacking)
        complete = len(targets) == len(self.sampled)
        return replace(whole, settings=replace(self.settings, complete=complete), targets=targets)


def _blocks(targets: pd.DataFrame, targets_per_block: int) -> int:
    """How many blocks some targets are of."""
    return (targets["target_id"] // targets_per_block).nunique()


def _checked_batches(batches: Any, count: int) -> list[int]:
    """The numbers of batches, ascending, each once. Raises `UserError` for those of which there is none."""
    numbers = sorted(set(whole_numbers("batches", batches, least=0)))
    if not numbers or numbers[-1] >= count:
        raise UserError(
            f"batches={list(numbers)}: there are {count} batches of targets, from 0 to {count - 1}"
        )
    return numbers


def _batches_of(shard: str | None, count: int) -> list[int]:
    """The batches of a shard "i/n": every n-th of ``count``."""
    if shard is None:
        return list(range(count))
    match = re.fullmatch(r"(\d+)/(\d+)", shard) if isinstance(shard, str) else None
    number, shards = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= shards <= count:
        raise UserError(
            f"shard {shard!r}: give i/n with i from 1 to n, and n at most the {count} batches of targets"
        )
    return list(range(number - 1, count, shards))
