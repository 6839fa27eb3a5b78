"""What a comparison of eviction policies measured: settings, three frames, and how they are saved. No torch.

A saved one is a folder:

    eviction.json               settings, and what made it
    eviction-targets.parquet    a row a target
    eviction-losses.parquet     a row a target, policy, way of the near tokens and budget
    eviction-choices.parquet    a row a block, policy, way of the near tokens and budget

Losses and divergences are float32, in nats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from analysis.cache_eviction.settings import EvictionSettings
from analysis.parquet import read_parquet, stacked, write_rows
from analysis.saved import read_head, write_saved
from analysis.settings import TextsIdentity
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path

KIND, VERSION = "olmo-sparsity eviction", 1
HEAD = "eviction.json"
PARTS = "eviction-parts"
"""The folder of the blocks of a comparison that is not finished."""
FRAMES = ("targets", "losses", "choices")
FULL, SINKS, NONE = "full", "sinks", "none"
"""Caches beside those of policies, in the column policy of the losses: with all far keys, with the sinks alone, and
without any."""
AWARE, BLIND, NOTHING, TARGETS = "far and near", "far", "nothing", "targets"
"""What a policy, control or reference has seen when it chooses."""


@dataclass(frozen=True, repr=False)
class EvictionRecord:
    """Frames, by column; a column in brackets is there where it was measured:

    targets   target_id (block · B + place), block, place (in the block, from 0: how many targets stand between it and
              the choice), text (its number), [group], position, token, loss_full_nats (with the full cache),
              loss_short_nats (without far keys), [placebo_text, placebo_start]
    losses    target_id, far_context ("true" or "placebo"), policy (also references and `FULL`, `SINKS`, `NONE`), near
              ("kept" or "reread"), budget (share of the far keys), keys (K), loss_nats, kl_nats (to the full cache)
    choices   block, far_context, policy, sees (what it has seen), near, budget, keys, spearman (of its scores, mean
              over heads, with the exact effects; NaN without leave-one-out-kl), overlap (with the keys that the first
              reference keeps, without sinks), [kept_share (F): the share of all layers and heads that keep each key]
    """

    settings: EvictionSettings
    targets: pd.DataFrame
    losses: pd.DataFrame
    choices: pd.DataFrame
    provenance: dict[str, Any] = field(default_factory=dict)
    """Command, commit, versions, machine and time."""

    @property
    def policies(self) -> pd.DataFrame:
        """Policy, sees and near of everything that was judged, in its order."""
        return self.choices[["policy", "sees", "near"]].drop_duplicates(ignore_index=True)

    @property
    def nears(self) -> list[str]:
        """The ways of the near tokens in which policies were judged."""
        return list(self.choices["near"].unique())

    @property
    def far_contexts(self) -> list[str]:
        """``true`` and, where it was measured, ``placebo``."""
        return list(self.losses["far_context"].unique())

    @property
    def counts(self) -> dict[str, int]:
        """How many targets, blocks, documents and, where they are known, groups there are."""
        from analysis.stats.bootstrap import count_clusters  # not above: a command begins without SciPy

        counts = {"targets": len(self.targets), "blocks": self.targets["block"].nunique()}
        return counts | count_clusters(self.targets)

    def save(self, folder: str | Path) -> Path:
        """Write the files; returns the path of the JSON file."""
        path = user_path(folder) / HEAD
        about = {
            "kind": KIND,
            "version": VERSION,
            "settings": self.settings.to_json(),
            "provenance": self.provenance,
        }
        frames = {f"eviction-{name}": getattr(self, name) for name in FRAMES}
        write_saved(path, about, frames, write=write_rows)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote into this folder, or this JSON file. Raises `UserError` for any other file."""
        path = user_path(path)
        if path.is_dir():
            path = path / HEAD
        remedy = "measure again, or give the folder of a result"
        if (path.parent / PARTS).is_dir():
            remedy = "it is not finished: the same call that began it goes on"
        about = read_head(path, KIND, VERSION, remedy)
        frames = {name: read_parquet(path.parent / f"eviction-{name}.parquet") for name in FRAMES}
        settings = EvictionSettings.from_json(about.get("settings", {}))
        return cls(settings, provenance=about.get("provenance", {}), **frames)

    @classmethod
    def of_parts(cls, parts: Sequence[Self]) -> Self:
        """Parts of one measurement, whose rows are put into the order of their blocks.

        Raises `UserError` where they are of different settings, or two have the same block.
        """
        blocks: set[int] = set()
        for part in parts:
            if differing := parts[0].settings.differences(part.settings, when="resumed"):
                raise UserError(
                    f"parts that are joined need the same settings: {differing}; measure one again, or pool results on "
                    "other texts"
                )
            of_part = set(part.targets["block"].tolist())
            if twice := blocks & of_part:
                raise UserError(f"block {min(twice)} is in two of the parts; give each block once")
            blocks |= of_part
        size = parts[0].settings.contexts.targets_per_block
        frames = {}
        for name in FRAMES:
            frame = stacked([getattr(part, name) for part in parts])
            block = frame["block"] if "block" in frame else frame["target_id"] // size
            frames[name] = frame.iloc[np.argsort(block, kind="stable")].reset_index(drop=True)
        seconds = sum(part.provenance["seconds"] for part in parts)
        return cls(parts[0].settings, provenance={**parts[0].provenance, "seconds": seconds}, **frames)

    @classmethod
    def pool(cls, records: Mapping[str, Self]) -> Self:
        """Comparisons on other texts as one, by a name of each; targets, blocks and texts are numbered on.

        Groups of two records are never the same. Commits are those of all, versions and machine those of the first.
        Raises `UserError` where settings but texts and the number of blocks differ, or some have groups and some none.
        """
        first, *others = records.values()
        for other in others:
            same_texts = replace(
                other.settings, texts=first.settings.texts, blocks_requested=first.settings.blocks_requested
            )
            if differing := first.settings.differences(same_texts, when="resumed"):
                raise UserError(f"comparisons that are pooled need the same settings: {differing}")
            if ("group" in first.targets) != ("group" in other.targets):
                raise UserError("some of the comparisons have groups and some none; give all of them groups")
        frames: dict[str, list[pd.DataFrame]] = {name: [] for name in FRAMES}
        size = first.settings.contexts.targets_per_block
        blocks = 0
        texts = 0
        for name, record in records.items():
            targets = record.targets.copy()
            of_texts = [column for column in ("text", "placebo_text") if column in targets]
            targets[of_texts] += texts
            if "group" in targets:
                targets["group"] = [f"{name}: {group}" for group in targets["group"]]
            losses = record.losses.copy()
            choices = record.choices.copy()
            for frame in (targets, losses):
                frame["target_id"] += blocks * size
            for frame in (targets, choices):
                frame["block"] += blocks
            for of_name, frame in zip(FRAMES, (targets, losses, choices), strict=True):
                frames[of_name].append(frame)
            blocks = int(targets["block"].max()) + 1
            texts = int(targets[of_texts].to_numpy().max()) + 1
        identities = [record.settings.texts for record in records.values()]
        digest = hashlib.sha256("".join(texts.sha256 for texts in identities).encode()).hexdigest()
        settings = replace(
            first.settings,
            texts=TextsIdentity(", ".join(records), digest, identities[0].split),
            blocks_requested=sum(record.settings.blocks_requested for record in records.values()),
        )
        made: dict[str, Any] = {
            name: first.provenance[name] for name in ("versions", "machine") if name in first.provenance
        }
        made["seconds"] = sum(record.provenance.get("seconds", 0.0) for record in records.values())
        commits = [record.provenance.get("commit", "") for record in records.values()]
        made["commit"] = " ".join(dict.fromkeys(filter(None, commits)))
        stacked_frames = {name: stacked(parts) for name, parts in frames.items()}
        return cls(settings, provenance=made, **stacked_frames)
