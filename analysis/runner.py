"""Parts of a measurement: batches of targets, resumed after an interruption, shared by several jobs, put together.

A folder that is written holds `parts/`, one folder for each finished batch, which is a saved `Result`, until a run
without a shard makes them its result. Batches are the same whoever measures them, so that the whole is that of one
uninterrupted run. A whole result with no target over tau lends its losses to a run with another tau, and stays until
that is whole.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.arguments import whole_numbers
from analysis.measurement import FRAMES, RESULT_NAME, Measurement
from analysis.settings import Settings
from analysis.work import Work
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import folder_lock, read_json, remove, write_json
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import provenance

log = logging.getLogger(__name__)

PARTS = "parts"


@dataclass(frozen=True)
class Run:
    """One run over batches of targets, with the parts that it and other runs have written."""

    measure_batch: Callable[[pd.DataFrame, Work, pd.DataFrame | None], dict[str, pd.DataFrame]]
    """The frames of some places, by name, given the work to tell of, and the targets with losses where these are known
    from another tau."""
    size: int
    """Targets of a batch, in whole blocks."""
    places: pd.DataFrame
    """Of all targets."""
    settings: Settings
    out: Path | None
    progress: bool

    def measure(self, shard: str | None, batches: Sequence[int] | None) -> Measurement:
        """Measure the batches that are not finished, and return all that are."""
        count = max(self.places["target_id"]) // self.size + 1
        mine = _batches_of(shard, count) if batches is None else _checked_batches(batches, count)
        if self.out is None:
            return self._joined([part for _, part in self._measured(mine, None)])
        known = None
        if (self.out / RESULT_NAME).is_file():
            whole = Measurement.load(self.out)
            if not self._differs_in_tau_alone(whole):
                self._check(whole.settings)
                log.info("%s is complete already", self.out)
                return whole
            known = self._known(whole)
        parts = self.out / PARTS
        begun = self.out / PARTS / "settings.json"
        parts.mkdir(parents=True, exist_ok=True)
        # shares side by side, but not beside a run without one, which may measure the same batches
        with folder_lock(parts, part=None if shard is None else shard.replace("/", "-of-")):
            if begun.is_file():
                self._check(Settings.from_json(read_json(begun, "remove the folder, or give another")), parts)
            write_json(begun, self.settings.to_json())
            # without its result.json, written last, a part was left by a killed process
            todo = [batch for batch in mine if not (parts / f"batch-{batch:06d}" / RESULT_NAME).is_file()]
            if len(todo) < len(mine):
                done = len(mine) - len(todo)
                log.info("%s goes on: %s of %s batches are finished", self.out, done, len(mine))
            for batch, part in self._measured(todo, known):
                part.save(parts / f"batch-{batch:06d}")
            finished = sorted(parts.glob(f"batch-*/{RESULT_NAME}"))
            result = self._joined([Measurement.load(path.parent) for path in finished])
            if result.settings.complete and shard is None:
                result.save(self.out)
                remove(parts)
            return result

    def _measured(
        self, batches: Sequence[int], known: pd.DataFrame | None
    ) -> Iterator[tuple[int, Measurement]]:
        """Measure batches, and give each when it is finished; ``known``: all targets where they have losses."""
        made = provenance()
        made["created"] = made.pop("started")
        batch_of_target = self.places["target_id"] // self.size
        total = int(batch_of_target.isin(batches).sum())
        shown = {"enabled": self.progress, "steady": False}
        with show_progress("targets measured", total, "targets", **shown) as advance:
            work = Work(total, advance)
            for batch in batches:
                began = time.monotonic()
                of_batch = batch_of_target == batch
                before = None if known is None else known[of_batch]
                frames = self.measure_batch(self.places[of_batch], work, before)
                seconds = time.monotonic() - began
                yield batch, Measurement(self.settings, provenance={**made, "seconds": seconds}, **frames)

    def _check(self, there: Settings, parts: Path | None = None) -> None:
        """Raise `UserError` where ``out``, or unfinished ``parts`` in it, were begun with other settings."""
        if not (differing := there.differences(self.settings, when="resumed")):
            return
        if parts is None:
            raise UserError(f"{self.out} was measured with other settings: {differing}; give another folder")
        raise UserError(
            f"{self.out} was begun with other settings, and is not finished: {differing}; give another folder, or "
            f"remove {parts} to begin anew"
        )

    def _differs_in_tau_alone(self, there: Measurement) -> bool:
        """Whether a result has no choices and another tau: then its losses are those of this measurement, too."""
        return (
            there.settings.choices.tau_nats != self.settings.choices.tau_nats
            and there.settings.complete
            and not len(there.over)
            and not there.settings.differences(self.settings, when="resumed", but_for=("tau_nats",))
        )

    def _known(self, there: Measurement) -> pd.DataFrame:
        """The targets of a result, row by row those of ``places``. Raises `UserError` where they are others."""
        of_place = ["target_id", "text", "position"]
        if not np.array_equal(there.targets[of_place], self.places[of_place]):
            raise UserError(f"{self.out} has other targets than are sampled now; give another folder")
        log.info("no target is over tau in %s: its losses are used again", self.out)
        return there.targets

    def _joined(self, parts: Sequence[Measurement]) -> Measurement:
        """The parts as one result."""
        frames = {name: stacked([getattr(part, name) for part in parts]) for name in FRAMES}
        complete = len(frames["targets"]) == len(self.places)
        provenance = {**parts[0].provenance, "seconds": sum(part.provenance["seconds"] for part in parts)}
        return Measurement(replace(self.settings, complete=complete), provenance=provenance, **frames)


def stacked(frames: Sequence[pd.DataFrame | None]) -> Any:
    """Frames one below the other; None where there are none."""
    filled = [frame for frame in frames if frame is not None and len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]


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
