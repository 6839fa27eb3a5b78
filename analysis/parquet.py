"""Frames as Parquet files: float32, packed with zstd, with a checksum in every page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, user_path

_INT64 = (
    "target_id",
    "text",
    "position",
    "text_tokens",
    "placebo_text",
    "placebo_start",
    "same_group_text",
    "same_group_start",
    "before_text",
    "before_start",
    "block",
    "first_position",
)
_STRINGS = ("group", "placebo_group", "kind", "cell", "selector", "far_context", "level", "unit")
_FLOAT_LISTS = (
    "influence",
    "loss_nats",
    "comprehensiveness_nats",
    "subset_loss_nats",
    "subset_influence",
)
_TYPES = {
    **dict.fromkeys(_INT64, pa.int64()),
    **dict.fromkeys(("token", "run", "sinks"), pa.int32()),
    **dict.fromkeys(("over_tau", "near_copy"), pa.bool_()),
    **dict.fromkeys(_STRINGS, pa.string()),
    **dict.fromkeys(_FLOAT_LISTS, pa.list_(pa.float32())),
    **dict.fromkeys(("selected", "tokens_read", "tokens_kept"), pa.list_(pa.int32())),
    "selected_special": pa.list_(pa.bool_()),
    **dict.fromkeys(("pieces", "placebo_pieces"), pa.list_(pa.string())),
}
"""Types of the columns that a measurement has, by name; other floats are float32, and others what Arrow takes."""


def empty_frame(columns: Sequence[str]) -> pd.DataFrame:
    """No rows, with the types that the columns have in a saved result."""
    no_values = pd.Series(dtype=float)
    schema = pa.schema([(name, _type(name, no_values)) for name in columns])
    return schema.empty_table().to_pandas()


def stacked(frames: Sequence[pd.DataFrame | None]) -> Any:
    """Frames one below the other; None where there are none."""
    filled = [frame for frame in frames if frame is not None and len(frame)]
    if not filled:
        return frames[0]
    return pd.concat(filled, ignore_index=True)


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as Parquet, atomically: float32, zstd, a checksum in every page."""
    columns = {}
    for name in frame:
        values = frame[name]
        columns[name] = pa.array(list(values), _type(name, values), from_pandas=True)
    table = pa.table(columns)
    write_table(path, table, compression_level=9, write_page_checksum=True, **_encodings(table.schema))


def write_rows(path: Path, rows: pd.DataFrame) -> None:
    """Write a frame as Parquet, atomically, with the types that it has: sums stay float64."""
    table = pa.Table.from_pandas(rows, preserve_index=False)
    write_table(path, table, compression_level=9, **_encodings(table.schema))


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """How the values of every column are written: the bytes of float32 apart from one another, a third smaller."""
    floats: list[str] = []
    others: list[str] = []
    for column in schema:
        path_of_values = column.name
        type_of_values = column.type
        if pa.types.is_list(column.type):
            path_of_values += ".list.element"
            type_of_values = column.type.value_type
        if type_of_values == pa.float32():
            floats.append(path_of_values)
        else:
            others.append(path_of_values)
    return {"use_dictionary": others, "use_byte_stream_split": floats}


def write_table(path: str | Path, table: pa.Table, **options: Any) -> None:
    """Write a table of Arrow as Parquet, atomically, with zstd."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:  # Arrow would take a:b for an address
        pq.write_table(table, file, compression="zstd", **options)


def read_frame(path: Path) -> pd.DataFrame:
    """The frame of a Parquet file, its losses float64. Raises `UserError` where it is missing or damaged."""
    frame = read_parquet(path)
    floats = [name for name in frame if frame[name].dtype == np.float32]
    return frame.astype(dict.fromkeys(floats, np.float64))


def read_parquet(path: str | Path) -> pd.DataFrame:
    """The frame of a Parquet file, its checksums compared. Raises `UserError` where it is missing or damaged.

    Without Arrow's threads: on a busy machine they may abort a process that is done (exit code 134).
    """
    options: Any = {"use_threads": False, "pre_buffer": False, "page_checksum_verification": True}
    try:
        with open(user_path(path), "rb") as file:  # Arrow would take a:b for an address
            return pq.read_table(file, **options).to_pandas(use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); restore it or measure again"
        ) from error


def _type(name: str, values: pd.Series) -> pa.DataType | None:
    if name in _TYPES:
        return _TYPES[name]
    if pd.api.types.is_float_dtype(values):
        return pa.float32()
    return None
