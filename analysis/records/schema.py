"""The rows of a records folder: sampled targets, what selectors chose for them, and their text for readers.

Shapes: n sampled targets, m targets over tau, K values of k, k_max the largest of them, N long and M short context
length, F = N - M far tokens. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.text.kinds import KINDS

FAR_CONTEXTS = ("true", "placebo")
"""The target's own far context, and that of another held-out document (METHOD 2.3, [ours])."""


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])


TARGETS_SCHEMA = _schema(
    target_id=pa.int64(),
    document=pa.int64(),
    position=pa.int64(),
    token=pa.int32(),
    loss_long_nats=pa.float64(),
    loss_short_nats=pa.float64(),
    gap_long_minus_short_nats=pa.float64(),
    selecting_gain_nats=pa.float64(),
    kind=pa.string(),
    placebo_document=pa.int64(),
    placebo_start=pa.int64(),
)
SELECTIONS_SCHEMA = _schema(
    target_id=pa.int64(),
    selector=pa.string(),
    far_context=pa.string(),
    selected=pa.list_(pa.int32()),
    influence=pa.list_(pa.float32()),
    loss_nats=pa.list_(pa.float64()),
)
EXAMPLES_SCHEMA = _schema(
    target_id=pa.int64(),
    context_pieces=pa.list_(pa.string()),
    target_piece=pa.string(),
    placebo_pieces=pa.list_(pa.string()),
    after=pa.string(),
)


@dataclass(frozen=True)
class Targets:
    """The sampled targets; every array is (n,), and row i of each belongs to the same target."""

    target_id: np.ndarray
    """Unique and stable number of the target, int64."""
    document: np.ndarray
    """Number of its document in the split, int64: the unit of resampling."""
    position: np.ndarray
    """t, index of the target token in its document, int64."""
    token: np.ndarray
    """The target's token id, int32."""
    loss_long_nats: np.ndarray
    """L_long of the model that evaluates, float64."""
    loss_short_nats: np.ndarray
    """L_short of the model that evaluates, float64."""
    selecting_gain_nats: np.ndarray
    """L_short - L_long of the model that selects, float64: another one's only under cross-fitting (METHOD 2.3)."""
    kind: np.ndarray
    """What kind of dependency the target is, one of `analysis.text.kinds.KINDS` (METHOD 2.6), strings."""
    placebo_document: np.ndarray
    """Document that the placebo far context is taken from, int64."""
    placebo_start: np.ndarray
    """Index in that document of the placebo far context's first token, int64."""

    def __post_init__(self) -> None:
        for each in fields(self):
            dtype = None if each.name == "kind" else TARGETS_SCHEMA.field(each.name).type.to_pandas_dtype()
            array = np.ascontiguousarray(getattr(self, each.name), dtype=dtype)
            object.__setattr__(self, each.name, array)  # frozen: callers may pass lists or other widths
            if array.ndim != 1 or len(array) != len(self.target_id):
                raise ValueError(f"{each.name} has shape {array.shape}, target_id {self.target_id.shape}")
        if len(np.unique(self.target_id)) != len(self.target_id):
            raise ValueError("target ids repeat")
        if not np.isfinite([self.loss_long_nats, self.loss_short_nats, self.selecting_gain_nats]).all():
            raise ValueError("a target's loss is not finite")
        if unknown := set(self.kind.tolist()) - set(KINDS):
            raise ValueError(f"unknown kinds of dependency: {', '.join(map(str, sorted(unknown)))}")

    def __len__(self) -> int:
        return len(self.target_id)

    @property
    def gap_long_minus_short_nats(self) -> np.ndarray:
        """L_long - L_short of the model that evaluates, (n,): negative where the long context helps."""
        return self.loss_long_nats - self.loss_short_nats

    def over(self, tau_nats: float) -> np.ndarray:
        """Indices, ascending, of targets whose gain under the selecting model exceeds tau: selectors run on those."""
        return np.flatnonzero(self.selecting_gain_nats > tau_nats)

    def to_table(self) -> pa.Table:
        """The rows of `targets.parquet`."""
        arrays = [pa.array(getattr(self, name)) for name in TARGETS_SCHEMA.names]
        return pa.Table.from_arrays(arrays, schema=TARGETS_SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table) -> Targets:
        """The inverse of `to_table`."""
        return cls(**{each.name: table[each.name].to_numpy() for each in fields(cls)})


@dataclass(frozen=True)
class Examples:
    """Text of targets over tau, for people to read; every field has an entry per target that is shown."""

    target_id: np.ndarray
    """Ascending, int64."""
    context_pieces: list[list[str]]
    """Text of each of the N context tokens."""
    target_piece: list[str]
    """Text of the target token."""
    placebo_pieces: list[list[str]]
    """Text of each of the F tokens of the placebo far context."""
    after: list[str]
    """Text that follows the target."""

    def __len__(self) -> int:
        return len(self.target_id)

    def to_table(self) -> pa.Table:
        """The rows of `examples.parquet`."""
        return pa.Table.from_pydict(
            {name: getattr(self, name) for name in EXAMPLES_SCHEMA.names}, schema=EXAMPLES_SCHEMA
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> Examples:
        """The inverse of `to_table`."""
        texts = {each.name: table[each.name].to_pylist() for each in fields(cls) if each.name != "target_id"}
        return cls(target_id=table["target_id"].to_numpy(), **texts)

    def check(self, target_ids: np.ndarray, *, n_long: int, n_far: int) -> None:
        """Raise `ValueError` where they are not of ascending ones of these targets, or not as long as the contexts."""
        if (np.diff(self.target_id) <= 0).any():
            raise ValueError("target ids repeat or do not ascend")
        if not np.isin(self.target_id, target_ids).all():
            raise ValueError("it has text of what is no target")
        for name, pieces, length in (
            ("context_pieces", self.context_pieces, n_long),
            ("placebo_pieces", self.placebo_pieces, n_far),
        ):
            if any(len(each) != length or None in each for each in pieces):
                raise ValueError(f"{name} are not {length} texts for every target")


@dataclass(frozen=True)
class SelectionRow:
    """What one selector chose for one target in one far context, and what the choice is worth."""

    target_id: int
    selector: str
    far_context: str
    """`true` or `placebo`."""
    selected: Sequence[int] | np.ndarray
    """Position ids, in 0..N-M-1, of the first k_max tokens, most influential first, (k_max,)."""
    influence: Sequence[float] | np.ndarray
    """Influence of each in the selector's unit (nats; attention: share of the attention), same order, (k_max,)."""
    loss_nats: Sequence[float] | np.ndarray
    """L_k for each k of the manifest's ``ks``, (K,)."""


def check_selections(
    table: pa.Table, target_ids: np.ndarray, *, selectors: Sequence[str], ks: int, k_max: int, n_far: int
) -> None:
    """Raise `ValueError` where rows of `SELECTIONS_SCHEMA` cannot be of this measurement."""
    for name, width in (("selected", k_max), ("influence", k_max), ("loss_nats", ks)):
        if not pc.all(pc.equal(pc.list_value_length(table[name]), width)).as_py() and len(table):
            raise ValueError(f"{name} is not {width} long in every row")
    if not np.isin(table["target_id"].to_numpy(), target_ids).all():
        raise ValueError("it has a row of what is no target")
    for name, known in (("selector", selectors), ("far_context", FAR_CONTEXTS)):
        if odd := set(pc.unique(table[name]).to_pylist()) - set(known):
            raise ValueError(f"it has the {name} {min(odd)!r}, which was not measured")
    if not np.isfinite(_flat(table["loss_nats"])).all():
        raise ValueError("a loss is not finite")
    selected = np.sort(_flat(table["selected"]).reshape(-1, k_max), axis=1)
    if not ((selected >= 0) & (selected < n_far)).all():
        raise ValueError("a selected token is not in the far context")
    if (np.diff(selected, axis=1) == 0).any():
        raise ValueError("a token is selected twice")


def _flat(lists: pa.ChunkedArray) -> np.ndarray:
    """The values of lists one behind the other; a null is NaN."""
    return pc.list_flatten(lists).to_numpy()
