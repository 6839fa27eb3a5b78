"""The manifest of a records folder: what was measured on what, with which settings.

Paths, commit and versions are written down beside the settings; only the settings decide whether records may be
added to a folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError, printable
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.provenance import library_versions
from olmo_sparsity.util.result_files import CHECKSUM, json_checksum, misfit

KIND = "olmo-sparsity records"
FORMAT_VERSION = 3
FORMAT_WITHOUT_CHECKSUMS = 2
"""Is read, and not gone on with."""
MANIFEST_NAME = "manifest.json"
ROPE_SCALING = "rope_scaling"
"""Option of a manifest: how RoPE was scaled, the fields of `RopeScaling`; absent where it was not."""

# Every other field of the manifest decides numbers, and a folder never mixes two values of it. A run may go
# on after these changed: a moved checkpoint is known by its checksum.
_NOT_SETTINGS = {
    "checkpoint",
    "training_seed",
    "evaluation_checkpoint",
    "evaluation_training_seed",
    "corpus",
    "device",
    "commit",
    "versions",
    "created",
    "complete",
    "version",
}
_SHAPE = {
    **dict.fromkeys(("checkpoint", "corpus", "device", "commit", "created"), str),
    **dict.fromkeys(("training_seed", "evaluation_training_seed"), (int, None)),
    "evaluation_checkpoint": (str, None),
    "versions": {...: str},
    "complete": bool,
}
"""Of what no fingerprint protects."""
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
    """Path of the checkpoint that evaluates what the other one selected (cross-fitting, METHOD 2.3); else None."""
    evaluation_checkpoint_sha256: str | None = None
    """Checksum of its weights."""
    evaluation_training_seed: int | None = None
    """Seed it was trained with, where it is known."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any further setting that changes the numbers, such as `ROPE_SCALING`."""
    versions: dict[str, str] = field(default_factory=library_versions)
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
    def crossfit(self) -> bool:
        """Whether one checkpoint selected and another evaluated."""
        return self.evaluation_checkpoint_sha256 is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the settings that decide the numbers."""
        return _sha256(_settings(asdict(self)))

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
        if version not in (FORMAT_VERSION, FORMAT_WITHOUT_CHECKSUMS):
            raise UserError(
                f"{folder} has records of format version {version}, this code reads {FORMAT_WITHOUT_CHECKSUMS} and "
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
            f"{path.parent} is no records folder: its {path.name} is of another kind; give another --out"
        )
    return raw


def _what_is_wrong(raw: dict[str, Any], names: set[str]) -> str | None:
    """What does not fit in a manifest of either format, in words."""
    has_checksum = raw["version"] != FORMAT_WITHOUT_CHECKSUMS
    own = {"kind", "settings_fingerprint", *([CHECKSUM] if has_checksum else [])}
    if odd := raw.keys() ^ (names | own):
        return f"wrong fields: {printable(', '.join(sorted(odd)))}"
    settings = _settings({name: raw[name] for name in names})
    if not has_checksum:
        settings["version"] = raw["version"]  # which the fingerprint of format 2 counts
    if raw["settings_fingerprint"] != _sha256(settings):
        return "its settings do not fit their fingerprint"
    if has_checksum and raw[CHECKSUM] != json_checksum(raw):
        return "it does not fit its checksum"
    return misfit(raw, _SHAPE)


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in _NOT_SETTINGS}


def _sha256(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
