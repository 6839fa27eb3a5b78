"""Training on text that is tokenized on the way, with no preparation, and resumed exactly.

    shards ──dealt──► readers ──► tokens of one shard after another ──► windows, one from each reader in turn

Window k of a run comes from reader k mod R and is that reader's window k div R, so it is a function of the config
and the text alone: any number of processes reads the same global batches, and a resumed run needs its step and
nothing else. Marks beside the run say how many tokens lie before a document, so that it need not tokenize again what
it has trained on. Windows are those of the prepared corpus: they do not cross shards, whose last tokens are left out.

Shapes: T tokens of a window; R readers.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from olmo_sparsity.config.schema import Config, StreamConfig
from olmo_sparsity.corpus.tokens import dtype_name
from olmo_sparsity.data.encode import Encoding, encode_documents
from olmo_sparsity.data.sources import check_files, file_units, hub_units
from olmo_sparsity.data.text import Unit
from olmo_sparsity.data.tokenizers import usual_eos
from olmo_sparsity.data.windows import (
    Batch,
    TrainingBatches,
    WindowMaker,
    collate,
    fitting_tokenizer,
    run_tokenizer,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.machine import available_cores
from olmo_sparsity.util.signals import leave_signals_to_main_process
from olmo_sparsity.util.streams import Stream

log = logging.getLogger(__name__)

MARKS_NAME = "stream"
"""Folder in the run's."""
MARK_TOKENS = 1 << 20
"""About a second of tokenizing lies between two marks."""


@dataclass(frozen=True)
class StreamText:
    """The text of a run, and how it becomes tokens."""

    units: tuple[Unit, ...]
    encoding: Encoding
    identity: str
    """Changes with the text or the tokenizer, as far as that is seen without reading all of it."""
    readers: int
    """R."""


def open_stream(config: Config) -> StreamText:
    """Find the text and tokenizer of ``config``. Raises `UserError` where one is missing or they do not fit."""
    assert config.corpus.stream is not None
    stream = config.corpus.stream
    path = run_tokenizer(config)
    assert path is not None, "the config check asks for one"
    tokenizer = fitting_tokenizer(config, path)
    eos_id, usual = config.model.eos_token_id, usual_eos(tokenizer)
    if usual not in (eos_id, None):
        raise UserError(
            f"the tokenizer {path} has eos_token_id {usual}, the model has {eos_id}; "
            f"set --model.eos_token_id={usual} or name the model's tokenizer"
        )
    if tokenizer.id_to_token(eos_id) is None:
        raise UserError(
            f"the tokenizer {path} has no token {eos_id}; set --model.eos_token_id to the one that ends documents"
        )
    units, about = _units(stream)
    encoding = Encoding(str(path), config.model.eos_token_id, dtype_name(config.model.vocab_size))
    words = json.dumps([about, sha256_file(path), config.model.eos_token_id])
    identity = sha256(words.encode()).hexdigest()[:16]
    return StreamText(tuple(units), encoding, identity, min(stream.readers, len(units)))


def _units(stream: StreamConfig) -> tuple[list[Any], list[Any]]:
    """The units, and what identifies them when a run is resumed."""
    if stream.source == "text":
        check_files(stream.files)
        return file_units(stream.files), [
            [Path(path).name, Path(path).stat().st_size] for path in stream.files
        ]
    units, _ = hub_units(stream.dataset, stream.dataset_config, stream.split)
    return units, [stream.dataset, stream.dataset_config, stream.split, len(units)]


class Marks:
    """How many tokens lie before some documents of a unit, and in units that were read to their end.

    These are facts of the text: it does not matter which process or run found them, only that a line is whole and of
    this text, as the checksum at its end says. Every process appends to a file of its own and has read all of them
    when it starts.
    """

    def __init__(self, folder: Path, identity: str, writer: str):
        self.folder, self.identity, self.writer = folder, identity, writer
        self.known: dict[int, list[tuple[int, int]]] = {}
        self.ends: dict[int, int] = {}
        for path in sorted(folder.glob("marks-*.jsonl")):
            for line in path.read_bytes().splitlines():
                self._read(line)
        for marks in self.known.values():
            marks.sort()

    def _read(self, line: bytes) -> None:
        """Keep a mark; ignore a line that is unfinished or damaged, or of other text."""
        with suppress(ValueError, TypeError, RecursionError):
            *mark, seal = json.loads(line)
            if seal == self._seal(mark):
                self._keep(*mark)

    def _seal(self, mark: list[Any]) -> str:
        return sha256(json.dumps([self.identity, *mark]).encode()).hexdigest()[:16]

    def _keep(self, unit: int, documents: int, tokens: int, is_end: bool) -> None:
        if is_end:
            self.ends[unit] = tokens
        else:
            self.known.setdefault(unit, []).append((tokens, documents))

    def before(self, unit: int, token: int) -> tuple[int, int]:
        """(documents, tokens) of the last mark at or before ``token``."""
        marks = self.known.get(unit, [])
        place = bisect_right(marks, (token, math.inf))
        return (marks[place - 1][1], marks[place - 1][0]) if place else (0, 0)

    def add(self, unit: int, documents: int, tokens: int, *, is_end: bool = False) -> None:
        """Write a mark if it is far enough from the last one, or the end of a unit."""
        last = self.known[unit][-1][0] if unit in self.known else 0
        if self.ends.get(unit) == tokens if is_end else tokens < last + MARK_TOKENS:
            return
        mark: list[Any] = [unit, documents, tokens, is_end]
        self._keep(*mark)
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps([*mark, self._seal(mark)])
        with open(self.folder / f"marks-{self.writer}.jsonl", "a", encoding="utf8") as file:
            file.write(f"\n{line}")  # first the break: the last line may be one that a kill has torn


class Reader:
    """One of R readers: its share of the units, one after the other, again and again, in a new order each time."""

    def __init__(
        self, text: StreamText, marks: Marks, units: np.ndarray, seed: list[int], maker: WindowMaker
    ):
        """``units`` are numbers of `text.units`; ``seed`` decides their order."""
        self.text, self.marks, self.units, self.seed = text, marks, units, seed
        self.length, self.reach = maker.length, maker.reach

    def stretches(self, first: int) -> Iterator[np.ndarray]:
        """The text at the start of each window from the reader's window ``first`` on: `reach` tokens, or at least T."""
        skip = first
        for visit in count():
            windows = 0
            for unit in np.random.default_rng([*self.seed, visit]).permutation(self.units).tolist():
                if unit not in self.marks.ends or self.marks.ends[unit] // self.length > skip:
                    yield from self._stretches_of(unit, skip)
                found = self.marks.ends[unit] // self.length
                windows, skip = windows + found, max(0, skip - found)
            if not windows:
                raise UserError(
                    f"corpus.stream: a reader's share of the text has no window of {self.length} tokens; give more "
                    "or longer files, or lower corpus.stream.readers or model.max_sequence_length"
                )

    def _stretches_of(self, unit: int, first: int) -> Iterator[np.ndarray]:
        """The same for one unit, from its window ``first`` on."""
        start = first * self.length
        documents, tokens = self.marks.before(unit, start)
        to_skip = start - tokens
        kept = np.empty(0, self.text.encoding.dtype)  # what was read of the text from the next window on
        unread = islice(self.text.units[unit].documents(), documents, None)
        for _, ids in encode_documents(unread, self.text.encoding):
            documents, tokens = documents + 1, tokens + len(ids)
            self.marks.add(unit, documents, tokens)
            skipped = min(to_skip, len(ids))
            to_skip -= skipped
            kept = np.concatenate([kept, ids[skipped:]])
            while len(kept) >= self.reach:
                yield kept[: self.reach]
                kept = kept[self.length :]
        self.marks.add(unit, documents, tokens, is_end=True)
        while len(kept) >= self.length:
            yield kept[: self.reach]
            kept = kept[self.length :]


class WindowStream(IterableDataset[dict[str, Any]]):
    """The windows of one process in the order it trains on them, from its window ``first`` on.

    A loader's worker is a finer process: worker w of n gives the windows w, w + n, …, which is the order in which a
    loader takes single items from its workers.
    """

    def __init__(self, config: Config, text: StreamText, *, rank: int, world_size: int, first: int):
        self.config, self.text = config, text
        self.rank, self.world_size, self.first = rank, world_size, first

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        windows = self._windows(number, workers)
        if worker is None:
            yield from windows
            return
        try:
            yield from windows
        except (UserError, OSError) as error:  # as an item: a loader would wrap the one line in its traceback
            yield error

    def _windows(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Windows ``first + worker``, and every ``workers``-th after it, of this process."""
        maker, epoch = WindowMaker(self.config), self.config.epoch or 0
        folder = Path(self.config.save_folder) / MARKS_NAME
        marks = Marks(folder, self.text.identity, f"{self.rank:05d}-{worker:02d}")
        readers, seed = self.text.readers, self.config.data_seed
        order = np.random.default_rng([Stream.STREAMED_TEXT, seed, epoch]).permutation(len(self.text.units))
        streams: dict[int, tuple[int, Iterator[np.ndarray]]] = {}
        begin = (self.first + worker) * self.world_size + self.rank
        for index in count(begin, workers * self.world_size):
            window, number = divmod(index, readers)
            if number not in streams:
                reader = Reader(
                    self.text,
                    marks,
                    order[number::readers],
                    [Stream.STREAMED_TEXT, seed, epoch, number],
                    maker,
                )
                streams[number] = window, reader.stretches(window)
            following, stretches = streams[number]
            stretch = next(islice(stretches, window - following, None))
            streams[number] = window + 1, stretches
            yield maker.make(stretch, epoch=epoch, index=index)


class StreamedData(TrainingBatches):
    """Batches of a stream; the number of tokens in an epoch is not known."""

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1):
        super().__init__(config, rank=rank, world_size=world_size)
        self.text = open_stream(config)
        self.identity = self.text.identity
        self._warn_of_repeated_work()

    def batches(self, first_step: int) -> Iterator[Batch]:
        windows = self._windows(first_step * self.share)
        while True:
            items = list(islice(windows, self.share))
            if error := next((item for item in items if isinstance(item, Exception)), None):
                raise error
            batch = collate(items)
            yield batch.pin_memory() if self.pin_memory else batch

    def _windows(self, first: int) -> Iterator[Any]:
        data = self.config.data
        stream = WindowStream(self.config, self.text, rank=self.rank, world_size=self.world_size, first=first)
        if not data.num_workers:
            return iter(stream)
        # Single windows are what workers can share evenly; they are put together here.
        loader = self._loader(
            stream,
            batch_size=None,
            collate_fn=_as_it_is,
            prefetch_factor=max(2, (data.prefetch_factor or 2) * self.share // data.num_workers),
            multiprocessing_context=_fork_server(),
            worker_init_fn=_share_cores,
        )
        return iter(loader)

    def _warn_of_repeated_work(self) -> None:
        parts = self.world_size * max(1, self.config.data.num_workers)
        times = parts // math.gcd(self.text.readers, parts)
        if times > 1 and self.rank == 0:
            log.warning(
                "corpus.stream: every token is tokenized by %d processes or workers; make corpus.stream.readers (at "
                "most %d, the number of shards or files) a multiple of %d to do it once",
                times,
                len(self.text.units),
                parts,
            )


def _fork_server() -> Any:
    """A context for workers: a fork of this process would copy the running threads of the hub's client."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the imports take seconds; once is enough
    return context


def _as_it_is(item: Any) -> Any:
    return item


def _share_cores(worker: int) -> None:
    """Limit the tokenizer's threads in a worker to its share of the cores."""
    leave_signals_to_main_process()
    info = get_worker_info()
    assert info is not None
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * info.num_workers
    os.environ["RAYON_NUM_THREADS"] = str(max(1, available_cores() // processes))
