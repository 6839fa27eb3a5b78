"""A checkpoint folder that is being written: by all processes at once, and renamed to its name when it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from olmo_sparsity.checkpoint import (
    CHECKSUMS,
    CONFIG,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    WEIGHTS,
    TrainState,
    checkpoints,
    index_of,
    shard_of,
)
from olmo_sparsity.config.schema import Config
from olmo_sparsity.tensor_files import write_tensors
from olmo_sparsity.util.errors import UserError, first_line, is_full_disk
from olmo_sparsity.util.files import begin_path, put_in_place, remove, sha256_file


@dataclass(frozen=True)
class Share:
    """The tensors that one of ``count`` processes writes. They are on the CPU and change no more."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rank: int = 0
    count: int = 1


@dataclass(frozen=True)
class TensorFile:
    """A file that one process has written."""

    of: str
    """`WEIGHTS` or `OPTIMIZER`."""
    name: str
    sha256: str
    tensors: list[str]
    bytes_of_tensors: int


@dataclass(frozen=True)
class NewCheckpoint:
    """One process begins it, every process writes its share, the first one finishes or drops it.

    Each of these raises `UserError` where the disk is full.
    """

    folder: Path
    """What it will be."""
    temporary: Path
    """Where it is written; all processes see it."""

    @classmethod
    def begin(cls, folder: Path) -> NewCheckpoint:
        """Make the temporary folder, beside ``folder``."""
        with _full_disk_named(folder):
            temporary = begin_path(folder)
            temporary.mkdir()
        return cls(folder, temporary)

    def write(self, share: Share) -> list[TensorFile]:
        """Write the files of one process to disk."""
        with _full_disk_named(self.folder):
            return [
                self._write(share, WEIGHTS, share.weights),
                self._write(share, OPTIMIZER, share.optimizer),
            ]

    def _write(self, share: Share, of: str, tensors: dict[str, Tensor]) -> TensorFile:
        name = shard_of(of, share.rank, share.count)
        sha256 = write_tensors(self.temporary / name, tensors)
        return TensorFile(of, name, sha256, list(tensors), sum(tensor.nbytes for tensor in tensors.values()))

    def finish(
        self, files: Iterable[TensorFile], state: TrainState, config: Config, tokenizer: bytes | None
    ) -> None:
        """Write what is left, and put the folder in its place.

        ``files``: of all processes. ``tokenizer``: the content of a tokenizer.json, if known.
        """
        files = list(files)
        noted = {file.name: file.sha256 for file in files}
        with _full_disk_named(self.folder):
            config.save(self.temporary / CONFIG)
            if tokenizer is not None:
                (self.temporary / TOKENIZER).write_bytes(tokenizer)
            (self.temporary / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf8")
            for of in (WEIGHTS, OPTIMIZER):
                if of not in noted:
                    index = _index([file for file in files if file.of == of])
                    (self.temporary / index_of(of)).write_text(index, encoding="utf8")
            others = [path for path in self.temporary.iterdir() if path.name not in noted]
            noted = {path.name: sha256_file(path) for path in others} | noted
            text = json.dumps({name: {"sha256": sha256} for name, sha256 in noted.items()})
            (self.temporary / CHECKSUMS).write_text(text + "\n", encoding="utf8")
            put_in_place(self.temporary, self.folder)

    def drop(self) -> None:
        """Remove what is written."""
        remove(self.temporary)


def _index(files: list[TensorFile]) -> str:
    """Which shard has a tensor, as transformers writes it."""
    index = {
        "metadata": {"total_size": sum(file.bytes_of_tensors for file in files)},
        "weight_map": {tensor: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


@contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Say of a full disk that ``folder`` cannot be saved, and which checkpoint is whole."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        earlier = [path.name for path in checkpoints(folder.parent)]
        kept = f"{earlier[-1]} is whole" if earlier else "there is no checkpoint before it"
        raise UserError(
            f"{folder} cannot be saved: the disk is full, or a quota is reached ({first_line(error)}); {kept}: "
            "make room, and go on with --resume"
        ) from error
