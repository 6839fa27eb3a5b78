"""The records of one text's influence map: which earlier tokens every token needs, in one Parquet file.

A row per token of the text; the schema's metadata say what was measured of which model with which settings, and carry
a checksum of it all. Reading and drawing need neither the model nor torch.
Shapes: T tokens of the text, N and M as in docs/method.md, 2.7.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import atomic_path, file_in
from olmo_sparsity.util.result_files import CHECKSUM, Json, misfit

MAP_NAME = "xray.parquet"
KIND, VERSION = "olmo-sparsity influence map", 1
_ABOUT = b"olmo-sparsity"
_HEAD = ("kind", "version", CHECKSUM)
_SHAPE = {
    **dict.fromkeys(("n_long", "n_short"), int),
    "tau_nats": float,
    **dict.fromkeys((CHECKSUM, "model", "dtype", "device", "commit"), str),
    **dict.fromkeys(("text", "model_sha256"), (str, None)),
}
_SCHEMA = pa.schema(
    [
        ("token", pa.int64()),
        ("piece", pa.string()),
        ("loss_long_nats", pa.float64()),
        ("loss_short_nats", pa.float64()),
        ("first_far", pa.int64()),
        ("influence_nats", pa.list_(pa.float32())),
    ]
)
_AGAIN = "make it with scripts/xray.py"


@dataclass(frozen=True, eq=False, repr=False)
class MapRecord:
    """Losses and influences of every token of a text (docs/method.md, 2.7)."""

    tokens: np.ndarray
    """(T,) token ids, int64."""
    pieces: list[str]
    """Text of each; joined they are the text."""
    loss_long_nats: np.ndarray
    """(T,) L_long; the first is NaN, for nothing predicts it."""
    loss_short_nats: np.ndarray
    """(T,) L_short; L_long where the context has no more than M tokens."""
    first_far: np.ndarray
    """(T,) place in the text of the first far token, int64."""
    influence_nats: list[np.ndarray]
    """T arrays, float32: leave-one-out influence of each far token, from ``first_far`` on; may be empty."""
    about: Json
    """What was measured: ``model``, ``model_sha256``, ``text``, ``n_long``, ``n_short``, ``prefix`` (token ids; older
    files have none), ``tau_nats``, ``dtype``, ``device``, ``commit``."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def gain_nats(self) -> np.ndarray:
        """(T,) L_short - L_long."""
        return self.loss_short_nats - self.loss_long_nats

    @property
    def over(self) -> np.ndarray:
        """Places of the tokens that gain more than tau, ascending."""
        return np.flatnonzero(self.gain_nats > self.about["tau_nats"])

    def matrix(self) -> np.ndarray:
        """Influence of token i on token t at [t, i], (T, T) float32; NaN where i is no far token of t."""
        found = np.full((len(self), len(self)), np.nan, dtype=np.float32)
        for t, (first, row) in enumerate(zip(self.first_far, self.influence_nats, strict=True)):
            found[t, first : first + len(row)] = row
        return found

    def strongest(self, t: int, count: int) -> list[tuple[int, float]]:
        """Place and influence of the ``count`` far tokens of largest magnitude for token t, the strongest first."""
        row = self.influence_nats[t]
        order = np.argsort(-np.abs(row), kind="stable")[:count]
        return [(int(self.first_far[t] + i), float(row[i])) for i in order]

    def needed_most(self, count: int) -> list[tuple[float, int, int]]:
        """The ``count`` largest influences above 0, one for each token t at most: (nats, place i, t), descending."""
        largest = [(float(row.max()), t) for t, row in enumerate(self.influence_nats) if len(row)]
        found = sorted(((nats, t) for nats, t in largest if nats > 0), reverse=True)[:count]
        return [(nats, int(self.first_far[t] + self.influence_nats[t].argmax()), t) for nats, t in found]

    def save(self, path: str | Path) -> Path:
        """Write the file, atomically, and return its path; into a folder, as `MAP_NAME`."""
        path = file_in(path, MAP_NAME)
        table = pa.Table.from_pydict(
            {
                "token": self.tokens,
                "piece": self.pieces,
                "loss_long_nats": self.loss_long_nats,
                "loss_short_nats": self.loss_short_nats,
                "first_far": self.first_far,
                "influence_nats": self.influence_nats,
            },
            schema=_SCHEMA,
        )
        about = {"kind": KIND, "version": VERSION, CHECKSUM: self._checksum(), **self.about}
        table = table.replace_schema_metadata({_ABOUT: json.dumps(about)})
        with atomic_path(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote, given its file or folder. Raises `UserError` where it is none, or damaged."""
        path = file_in(path, MAP_NAME)
        try:
            table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read()
        except FileNotFoundError:
            raise UserError(f"{path} is missing; {_AGAIN}") from None
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} holds no influence map ({first_line(error)}); {_AGAIN}") from error
        about = _read_about((table.schema.metadata or {}).get(_ABOUT, b""))
        if about is None or not table.schema.equals(_SCHEMA):
            raise UserError(f"{path} holds no influence map of format version {VERSION}; {_AGAIN}")
        rows = table["influence_nats"].combine_chunks()
        read = cls(
            tokens=table["token"].to_numpy(),
            pieces=table["piece"].to_pylist(),
            loss_long_nats=table["loss_long_nats"].to_numpy(),
            loss_short_nats=table["loss_short_nats"].to_numpy(),
            first_far=table["first_far"].to_numpy(),
            influence_nats=np.split(rows.flatten().to_numpy(), rows.offsets.to_numpy()[1:-1]),
            about={name: value for name, value in about.items() if name not in _HEAD},
        )
        if misfit(about, _SHAPE) or about[CHECKSUM] != read._checksum():
            raise UserError(f"{path} was edited or damaged (it does not fit its checksum); {_AGAIN}")
        return read

    def _checksum(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        digest = hashlib.sha256(json.dumps([self.about, self.pieces], sort_keys=True).encode())
        numbers = (self.tokens, self.loss_long_nats, self.loss_short_nats, self.first_far)
        lengths = np.array([len(row) for row in self.influence_nats])
        for array in (*numbers, lengths, *self.influence_nats):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def _read_about(text: bytes) -> Any:
    """The metadata, or None where they are not those of a map of this version."""
    try:
        about = json.loads(text)
    except ValueError:
        return None
    says = isinstance(about, dict) and (about.get("kind"), about.get("version")) == (KIND, VERSION)
    return about if says else None
