"""What a records folder holds: its manifest, and the rows of its files.

Paths, commit and versions are written down beside the settings; only the settings decide whether records may be added
to a folder. Shapes: n sampled targets, m targets over tau, K values of k, k_max the largest of them, N long and M short
context length, F = N - M far tokens. Losses are in nats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.text.kinds import KINDS
from olmo_sparsity.util.errors import UserError, printable
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.machine import machine
from olmo_sparsity.util.provenance import library_versions
from olmo_sparsity.util.result_files import CHECKSUM, json_checksum, misfit

KIND = "olmo-sparsity records"
FORMAT_VERSION = 5
WITHOUT_CHECKSUMS, WITH_GAPS, WITHOUT_FURTHER = 2, 3, 4
"""Older formats, which are read but not continued. Format 2 has no checksums; until format 3 `targets.parquet` had
the gain's negative, see `targets_schema`; until format 4 there were no `FURTHER_TARGETS` and
`FURTHER_SELECTIONS`."""
MANIFEST_NAME = "manifest.json"
ROPE_SCALING = "rope_scaling"
PREFIX = "prefix"
"""Option of a manifest: how RoPE was scaled, the fields of `RopeScaling`; absent where it was not."""
TARGETS_PER_BLOCK = "targets_per_block"
"""Option of a manifest: B, where it is not 1."""
PROPOSER = "proposer_sha256"
"""Option of a manifest: checksum of the weights that proposed for screened selectors, where another model did."""
PROPOSER_SCALING = "proposer_rope_scaling"
"""Option of a manifest: how that model's RoPE was scaled, such as ``yarn:4``; absent where it was not."""
UNTRAINED = "untrained"
"""Option of a manifest: true where freshly drawn weights chose the tokens of the evaluating model's targets."""
CHOICES = "choices"
"""Option of a manifest: ``recorded`` where the chosen tokens were read from other records, and more than recovery was
measured, for such a choice has no LDS (docs/method.md, 2.8)."""
SUBSETS, KEEP_RATE = "subsets", "keep_rate"
"""Options of a manifest: how many random subsets of the far tokens were measured, 0 for none, and the share that each
keeps; absent where nothing but recovery was measured, as in older records (docs/method.md, 2.8)."""
CONTEXT_LENGTHS = (32, 96, 256)
"""M': lengths of context below N whose loss is measured, to see whether they are enough. [ours]"""
FAR_CONTEXTS = ("true", "placebo")
"""The target's own far context, and that of another held-out document [ours]."""
SAME_GROUP, SHUFFLED = "same-group", "shuffled"
FURTHER_PLACEBOS = (SAME_GROUP, SHUFFLED)
"""Far contexts that are measured where they are asked for: from elsewhere in the target's own group, and the true one
with its tokens in random order [ours]."""
FURTHER = "further_placebos"
"""Option of a manifest: those of `FURTHER_PLACEBOS` that were asked for, in that order; absent where none was."""

# Every other field of the manifest decides numbers, and a folder never mixes two values of it. A run may go on after
# these changed: a moved checkpoint is known by its checksum.
_NOT_SETTINGS = {
    "checkpoint",
    "training_seed",
    "evaluation_checkpoint",
    "evaluation_training_seed",
    "corpus",
    "device",
    "commit",
    "versions",
    "machine",
    "created",
    "complete",
    "version",
}
_SHAPE = {
    **dict.fromkeys(("checkpoint", "corpus", "device", "commit", "created"), str),
    **dict.fromkeys(("training_seed", "evaluation_training_seed"), (int, None)),
    "evaluation_checkpoint": (str, None),
    "versions": {...: str},
    "machine": dict,
    "complete": bool,
}
"""Shape of the fields that no fingerprint protects."""
_SELECTOR = re.compile(r"[\w@:.<>+-]+", re.ASCII)


def check_measured(n_long: int, n_short: int, ks: Sequence[int], selectors: Sequence[str]) -> None:
    """Raise `UserError` for contexts, values of k or selectors that do not go together."""
    if not 0 < n_short < n_long:
        raise UserError(f"the short context ({n_short}) must be shorter than the long ({n_long})")
    if not ks or list(ks) != sorted(set(ks)) or ks[0] < 1:
        raise UserError(f"the values of k must be ascending and at least 1, not {list(ks)}")
    if ks[-1] > n_long - n_short:
        raise UserError(
            f"k = {ks[-1]} is more than the {n_long - n_short} far tokens; "
            "give a smaller k or a longer long context"
        )
    if not selectors or len(set(selectors)) != len(selectors):
        raise UserError(f"name each selector once and at least one, not {list(selectors)}")
    if odd := [name for name in selectors if not _SELECTOR.fullmatch(name)]:
        raise UserError(f"{odd[0]!r} cannot be the name of a selector")


@dataclass(frozen=True)
class Manifest:
    """What one records folder holds and how it was measured."""

    checkpoint: str
    """Path of the checkpoint, as it was given."""
    checkpoint_sha256: str
    """Checksum of its weights."""
    training_seed: int | None
    """Seed the checkpoint was trained with, where it is known."""
    tokenizer_sha256: str
    corpus: str
    """Path of the prepared corpus, as it was given."""
    corpus_manifest_sha256: str
    split: str
    n_long: int
    """N, tokens of long context."""
    n_short: int
    """M, tokens of short context."""
    tau_nats: float
    """Selectors run on the targets with L_short - L_long > tau."""
    ks: list[int]
    """Numbers of influential tokens at which L_k is measured, ascending."""
    selectors: list[str]
    seed: int
    """Seed of the sampled targets, the placebos and the random control."""
    targets_asked: int
    """Number of targets asked for; a small split may hold fewer."""
    dtype: str
    """Number format of the forward passes."""
    device: str
    commit: str
    """Commit of this code, empty where it is unknown."""
    evaluation_checkpoint: str | None = None
    """Path of the checkpoint that evaluates what the other one selected (cross-fitting); else None."""
    evaluation_checkpoint_sha256: str | None = None
    """Checksum of its weights."""
    evaluation_training_seed: int | None = None
    """Seed it was trained with, where it is known."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any further setting that changes the numbers, such as `ROPE_SCALING`."""
    versions: dict[str, str] = field(default_factory=library_versions)
    machine: dict[str, Any] = field(default_factory=machine)
    """What it was begun on (`olmo_sparsity.util.machine`); nothing in records of older formats."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When the folder was begun, UTC."""
    complete: bool = False
    """Whether every target over tau has all its rows."""
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_measured(self.n_long, self.n_short, self.ks, self.selectors)

    @property
    def n_far(self) -> int:
        """F = N - M, tokens that only the long context has."""
        return self.n_long - self.n_short

    @property
    def k_max(self) -> int:
        """The largest k: so many tokens of every selection are recorded."""
        return self.ks[-1]

    @property
    def targets_per_block(self) -> int:
        """B: a target whose number has the remainder b by B has the short context of M + b tokens."""
        return self.options.get(TARGETS_PER_BLOCK, 1)

    @property
    def far_contexts(self) -> tuple[str, ...]:
        """All that were measured: `FAR_CONTEXTS`, and what was asked for beside them."""
        return (*FAR_CONTEXTS, *self.options.get(FURTHER, ()))

    @property
    def crossfit(self) -> bool:
        """Whether one checkpoint selected and another evaluated."""
        return self.evaluation_checkpoint_sha256 is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the settings that decide the numbers."""
        return json_checksum(_settings(asdict(self)))

    def save(self, folder: str | Path) -> None:
        """Write `manifest.json`, atomically."""
        assert self.version == FORMAT_VERSION, "records of an older format are read only"
        value = {"kind": KIND, "settings_fingerprint": self.fingerprint, **asdict(self)}
        write_json(Path(folder) / MANIFEST_NAME, {CHECKSUM: json_checksum(value), **value})

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read `manifest.json`. Raises `UserError` for a missing, damaged, edited or older one."""
        path = Path(folder) / MANIFEST_NAME
        raw = read_manifest(path)
        version = raw.get("version")
        if version not in (WITHOUT_CHECKSUMS, WITH_GAPS, WITHOUT_FURTHER, FORMAT_VERSION):
            raise UserError(
                f"{folder} has records of format version {version}, this code reads {WITHOUT_CHECKSUMS} to "
                f"{FORMAT_VERSION}; measure again into another --out, or with --overwrite"
            )
        try:
            what = _what_is_wrong(raw, {each.name for each in fields(cls)})
        except RecursionError:
            what = "it is nested too deeply"
        if what:
            raise UserError(
                f"{path} was edited or damaged ({what}); restore it, or measure again with "
                "scripts/influence.py --overwrite"
            )
        raw = {"machine": {}, **raw}
        return cls(**{each.name: raw[each.name] for each in fields(cls)})


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's JSON, version and fields not yet checked. Raises `UserError` if it is none of ours."""
    if not path.is_file():
        raise UserError(
            f"{path.parent} has no records ({path.name} is missing); make them with scripts/influence.py"
        )
    raw: dict[str, Any] = read_json(path, "give another --out, or remove the folder to measure again")
    if raw.get("kind") != KIND:
        raise UserError(
            f"{path.parent} is no records folder: its {path.name} is of another kind; give one that "
            "scripts/influence.py wrote, or another --out"
        )
    return raw


def _what_is_wrong(raw: dict[str, Any], names: set[str]) -> str | None:
    """What does not fit in a manifest of any format, in words."""
    has_checksum = raw["version"] != WITHOUT_CHECKSUMS
    own = {"kind", "settings_fingerprint", *([CHECKSUM] if has_checksum else [])}
    later = {"machine"} if raw["version"] <= WITHOUT_FURTHER else set()
    if odd := raw.keys() ^ ((names - later) | own):
        return f"wrong fields: {printable(', '.join(sorted(odd)))}"
    settings = _settings({name: raw[name] for name in names - later})
    if not has_checksum:
        settings["version"] = raw["version"]  # which the fingerprint of format 2 counts
    if raw["settings_fingerprint"] != json_checksum(settings):
        return "its settings do not fit their fingerprint"
    if has_checksum and raw[CHECKSUM] != json_checksum(raw):
        return "it does not fit its checksum"
    return misfit({"machine": {}, **raw}, _SHAPE)


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in _NOT_SETTINGS}


def setting_differences(old: Manifest, new: Manifest) -> str:
    """``setting old -> new`` for every setting that differs; of a checksum, the path and its first digits."""
    pair = [(each, {**_settings(asdict(each)), **each.options}) for each in (old, new)]
    found = []
    for name in dict.fromkeys([*pair[0][1], *pair[1][1]]):
        values = [settings.get(name) for _, settings in pair]
        if values[0] == values[1] or name == "options":
            continue
        if name.endswith("sha256"):
            name = name.removesuffix("_sha256").removesuffix("_manifest")
            values = [
                f"{getattr(each, name, '')} ({checksum[:12]})".strip()
                for (each, _), checksum in zip(pair, map(str, values), strict=True)
            ]
        found.append(f"{name} {values[0]} -> {values[1]}")
    return ", ".join(found)


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])


TARGETS_SCHEMA = _schema(
    target_id=pa.int64(),
    document=pa.int64(),
    position=pa.int64(),
    token=pa.int32(),
    loss_long_nats=pa.float64(),
    loss_short_nats=pa.float64(),
    gain_nats=pa.float64(),
    selecting_gain_nats=pa.float64(),
    kind=pa.string(),
    placebo_document=pa.int64(),
    placebo_start=pa.int64(),
)


def length_column(length: int) -> str:
    """Column of the loss given the last M' tokens, M' one of `CONTEXT_LENGTHS`."""
    return f"loss_of_{length}_nats"


FURTHER_TARGETS = _schema(
    near_copy=pa.bool_(),
    document_group=pa.string(),
    placebo_group=pa.string(),
    loss_short_from_0_nats=pa.float64(),
    **{length_column(length): pa.float64() for length in CONTEXT_LENGTHS},
    same_group_document=pa.int64(),
    same_group_start=pa.int64(),
)
"""Columns that `targets.parquet` has where the corpus, or the settings, provide for them; last, in this order."""
SELECTIONS_SCHEMA = _schema(
    target_id=pa.int64(),
    selector=pa.string(),
    far_context=pa.string(),
    selected=pa.list_(pa.int32()),
    influence=pa.list_(pa.float32()),
    loss_nats=pa.list_(pa.float64()),
)
FURTHER_SELECTIONS = _schema(
    comprehensiveness_nats=pa.list_(pa.float64()),
    subset_loss_nats=pa.list_(pa.float32()),
    subset_influence=pa.list_(pa.float32()),
    leave_one_out_spearman=pa.float64(),
)
"""Columns that the parts of the selections have where the settings provide for them; last, in this order.

    comprehensiveness_nats   C for each k of the manifest's ``ks``, (K,)
    subset_loss_nats         loss with each random subset of the far tokens, the same in all rows of a target and far
                             context, (s,)
    subset_influence         the selector's summed influence of each subset, (s,); NaN where it ranks no single tokens
    leave_one_out_spearman   rank correlation of its influence with leave-one-out's over all far tokens; NaN where there
                             is none
"""
EXAMPLES_SCHEMA = _schema(
    target_id=pa.int64(),
    context_pieces=pa.list_(pa.string()),
    target_piece=pa.string(),
    placebo_pieces=pa.list_(pa.string()),
    after=pa.string(),
)
_GAP = pa.field("gap_long_minus_short_nats", pa.float64(), nullable=False)


def targets_schema(version: int) -> pa.Schema:
    """The columns of `targets.parquet` in a format: until format 3 the gain stood there with its sign reversed."""
    place = TARGETS_SCHEMA.get_field_index("gain_nats")
    return TARGETS_SCHEMA.set(place, _GAP) if version <= WITH_GAPS else TARGETS_SCHEMA


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
    """L_short - L_long of the model that selects, float64: another one's only under cross-fitting."""
    kind: np.ndarray
    """What kind of dependency the target is, one of `analysis.text.kinds.KINDS`, strings."""
    placebo_document: np.ndarray
    """Document that the placebo far context is taken from, int64."""
    placebo_start: np.ndarray
    """Index in that document of the placebo far context's first token, int64."""
    near_copy: np.ndarray | None = None
    """Whether the target lies in a near copy of training text, bool; None where the corpus does not say it."""
    document_group: np.ndarray | None = None
    """Book, site or package that the document is a part of, strings; None where the corpus has no groups."""
    placebo_group: np.ndarray | None = None
    """That of the document of the placebo far context, strings."""
    loss_short_from_0_nats: np.ndarray | None = None
    """L_short with position ids from 0 on, float64."""
    loss_of_32_nats: np.ndarray | None = None
    """Loss given the last 32 tokens, float64; None where N is not above that."""
    loss_of_96_nats: np.ndarray | None = None
    """As `loss_of_32_nats`."""
    loss_of_256_nats: np.ndarray | None = None
    """As `loss_of_32_nats`."""
    same_group_document: np.ndarray | None = None
    """Document of the far context from the same group, int64; -1: there is none, None: it was not asked for."""
    same_group_start: np.ndarray | None = None
    """Index in that document of its first token, int64."""

    def __post_init__(self) -> None:
        types = {each.name: each.type.to_pandas_dtype() for each in (*TARGETS_SCHEMA, *FURTHER_TARGETS)}
        for each in fields(self):
            if each.default is None and getattr(self, each.name) is None:
                continue
            dtype = None if types[each.name] is np.object_ else types[each.name]
            array = np.ascontiguousarray(getattr(self, each.name), dtype=dtype)
            object.__setattr__(self, each.name, array)  # frozen: callers may pass lists or other widths
            if array.ndim != 1 or len(array) != len(self.target_id):
                raise ValueError(f"{each.name} has shape {array.shape}, target_id {self.target_id.shape}")
        if len(np.unique(self.target_id)) != len(self.target_id):
            raise ValueError("target ids repeat")
        losses = [each for name, each in vars(self).items() if name.endswith("_nats") and each is not None]
        if not np.isfinite(losses).all():
            raise ValueError("a target's loss is not finite")
        if unknown := set(self.kind.tolist()) - set(KINDS):
            raise ValueError(f"unknown kinds of dependency: {', '.join(map(str, sorted(unknown)))}")

    def __len__(self) -> int:
        return len(self.target_id)

    @property
    def gain_nats(self) -> np.ndarray:
        """L_short - L_long of the model that evaluates, (n,): positive where the long context helps."""
        return self.loss_short_nats - self.loss_long_nats

    def over(self, tau_nats: float) -> np.ndarray:
        """Indices, ascending, of targets whose gain under the selecting model exceeds tau: selectors run on those."""
        return np.flatnonzero(self.selecting_gain_nats > tau_nats)

    def having(self, far_context: str) -> np.ndarray:
        """Which targets have a far context of this name, (n,) bool: all but for `SAME_GROUP`."""
        if far_context != SAME_GROUP:
            return np.ones(len(self), dtype=bool)
        assert self.same_group_document is not None, "it is drawn with the targets"
        return self.same_group_document >= 0

    def to_table(self) -> pa.Table:
        """The rows of `targets.parquet`."""
        further = [each for each in FURTHER_TARGETS if getattr(self, each.name) is not None]
        schema = pa.schema([*TARGETS_SCHEMA, *further])
        return pa.Table.from_arrays([pa.array(getattr(self, name)) for name in schema.names], schema=schema)

    @classmethod
    def from_table(cls, table: pa.Table) -> Targets:
        """The inverse of `to_table`, of any format. Raises `ValueError` where the gain is not L_short - L_long."""
        names = [each.name for each in fields(cls) if each.name in table.column_names]
        targets = cls(**{name: table[name].to_numpy() for name in names})
        gain = (
            -table[_GAP.name].to_numpy() if _GAP.name in table.column_names else table["gain_nats"].to_numpy()
        )
        if not np.array_equal(gain, targets.gain_nats):
            raise ValueError("gain is not L_short - L_long")
        return targets

    @classmethod
    def joined(cls, parts: Sequence[Targets]) -> Targets:
        """The targets of several parts, in their order, with the columns that all of them have."""
        columns: dict[str, Any] = {}
        for each in fields(cls):
            arrays = [getattr(part, each.name) for part in parts]
            columns[each.name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
        return cls(**columns)

    def groups_of(self, rows: np.ndarray) -> np.ndarray | None:
        """Groups of the documents of some of the targets; None where they are not known."""
        return None if self.document_group is None else self.document_group[rows]

    def take(self, rows: np.ndarray) -> Targets:
        """Some of the targets."""
        return Targets(**{name: each[rows] for name, each in vars(self).items() if each is not None})


@dataclass(frozen=True)
class Examples:
    """Text of targets over tau, for people to read; every field has an entry per target that is shown."""

    target_id: np.ndarray
    """Ascending, int64."""
    context_pieces: list[list[str]]
    """Text of each of the N + b context tokens; b is the target's place in its block."""
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

    def check(self, target_ids: np.ndarray, manifest: Manifest) -> None:
        """Raise `ValueError` where they are not of ascending ones of these targets, or not as long as the contexts."""
        if (np.diff(self.target_id) <= 0).any():
            raise ValueError("target ids repeat or do not ascend")
        if not np.isin(self.target_id, target_ids).all():
            raise ValueError("it has text of what is no target")
        read = manifest.n_long + self.target_id % manifest.targets_per_block
        for name, pieces, lengths in (
            ("context_pieces", self.context_pieces, read),
            ("placebo_pieces", self.placebo_pieces, np.full(len(self), manifest.n_far)),
        ):
            if any(len(each) != length or None in each for each, length in zip(pieces, lengths, strict=True)):
                raise ValueError(f"{name} are not one text for every token")


@dataclass(frozen=True)
class SelectionRow:
    """What one selector chose for one target in one far context, and what the choice is worth."""

    target_id: int
    selector: str
    far_context: str
    """One of the manifest's ``far_contexts``."""
    selected: Sequence[int] | np.ndarray
    """Position ids, in 0..N-M-1, of the first k_max tokens, most influential first, (k_max,)."""
    influence: Sequence[float] | np.ndarray
    """Influence of each in the selector's unit (nats; attention: share of the attention), same order, (k_max,)."""
    loss_nats: Sequence[float] | np.ndarray
    """L_k for each k of the manifest's ``ks``, (K,)."""
    further: Mapping[str, np.ndarray | float] = field(default_factory=dict)
    """Of `FURTHER_SELECTIONS`, what was measured; the same columns in every row."""


def selection_widths(manifest: Manifest) -> dict[str, int]:
    """Length of each list of a selection, by column."""
    of_ks, of_subsets = len(manifest.ks), manifest.options.get(SUBSETS, 0)
    return {
        "selected": manifest.k_max,
        "influence": manifest.k_max,
        "loss_nats": of_ks,
        "comprehensiveness_nats": of_ks,
        "subset_loss_nats": of_subsets,
        "subset_influence": of_subsets,
    }


def check_selections(table: pa.Table, target_ids: np.ndarray, manifest: Manifest) -> None:
    """Raise `ValueError` where rows of `SELECTIONS_SCHEMA` cannot be of this measurement of these targets."""
    k_max = manifest.k_max
    widths = {name: width for name, width in selection_widths(manifest).items() if name in table.column_names}
    for name, width in widths.items():
        if not pc.all(pc.equal(pc.list_value_length(table[name]), width)).as_py() and len(table):
            raise ValueError(f"{name} is not {width} long in every row")
    if not np.isin(table["target_id"].to_numpy(), target_ids).all():
        raise ValueError("it has a row of what is no target")
    for name, known in (("selector", manifest.selectors), ("far_context", manifest.far_contexts)):
        if odd := set(pc.unique(table[name]).to_pylist()) - set(known):
            raise ValueError(f"it has the {name} {min(odd)!r}, which was not measured")
    for name in ("loss_nats", "comprehensiveness_nats", "subset_loss_nats"):
        if name in widths and not np.isfinite(_flat(table[name])).all():
            raise ValueError("a loss is not finite")
    selected = np.sort(_flat(table["selected"]).reshape(-1, k_max), axis=1)
    if not ((selected >= 0) & (selected < manifest.n_far)).all():
        raise ValueError("a selected token is not in the far context")
    if (np.diff(selected, axis=1) == 0).any():
        raise ValueError("a token is selected twice")


def _flat(lists: pa.ChunkedArray) -> np.ndarray:
    """The values of lists one behind the other; a null is NaN."""
    return pc.list_flatten(lists).to_numpy()
