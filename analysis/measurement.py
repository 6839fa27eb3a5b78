"""What a measurement found: settings, frames of targets and choices, and the one format in which they are saved.

Nothing here needs a model or torch. A saved result, or a study of many of them, is a folder:

    result.json        format version, and of every cell its settings and provenance
    targets.parquet    a row per sampled target
    choices.parquet    a row per target over tau, selector and far context
    effects.parquet   (optional) what leaving each far key and value out does to every target
    scores.parquet     (optional) the influence of every far token
    texts.parquet      (optional) the text of every block, for people to read

In a study, the column ``cell`` says which result a row belongs to. Numbers are float32; every page has a checksum.
Shapes: n sampled targets, m of them over tau, K values of k, k_max the largest, F = N - M far tokens. Losses in nats.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from analysis.contexts import PLACEBO, placebo_column
from analysis.older_records import renamed_choices
from analysis.parquet import read_frame, stacked
from analysis.saved import read_head, write_saved
from analysis.settings import Settings
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path

log = logging.getLogger(__name__)

KIND, VERSION = "olmo-sparsity result", 1
RESULT_NAME, PARTS = "result.json", "parts"
FRAMES = ("targets", "choices", "scores", "effects", "texts")
SELECTION = ["selector", "far_context", "level", "unit", "sinks"]
"""The columns of `Result.choices` that say what was chosen by what, and how it was kept."""


@dataclass(repr=False)
class Measurement:
    """One measurement of one model on one set of targets, or of several runs of it (`join`): the data alone.

    `analysis.api.Result` is this with its numbers and pictures.

    Frames, by column; a column in brackets is there where it was measured:

        targets   target_id (block · B + place in the block), text (its number), [group], position, token,
                  loss_long_nats, loss_short_nats, [selecting_gain_nats: of the selecting model], over_tau, kind,
                  [text_tokens: of the whole text], placebo_text, placebo_start, [placebo_group], [same_group_text,
                  same_group_start], [before_text, before_start], [near_copy], [run]; losses in other contexts:
                  [loss_placebo_nats, loss_same_group_nats, loss_shuffled_nats: given the long context with that
                  placebo in it], [loss_of_n_nats: given the last n tokens, such as loss_of_32_nats],
                  [loss_short_at_n_nats: L_short at the ids of n tokens, n above N], [loss_short_from_0_nats]
        choices   target_id, [run], selector, far_context, level, unit and sinks (see `analysis.kept`),
                  selected (k_max: position ids in 0 … F-1, most influential first), loss_nats (K),
                  [loss_base_nats: given the sinks alone, k = 0], [tokens_read (K), tokens_kept (K): how many far tokens
                  the model read, and how many were kept, sinks included], [influence (k_max)],
                  [selected_special (k_max): whether each is a special token; where the texts have some],
                  [comprehensiveness_nats (K), leave_one_out_spearman, subset_loss_nats and subset_influence, or in a
                  result made smaller their lds and r2]
        scores    target_id, selector, far_context, influence (F; NaN where the selector ranks no single tokens)
        effects   target_id (all targets of the blocks), kl_nats and loss_change_nats (F): KL to the prediction with all
                  far keys and values, and the change of the loss, without each of them (docs/method.md, 2.2b)
        texts     block, text, first_position, pieces (N + B tokens and some after), placebo_pieces (F)
    """

    settings: Settings
    """What was measured, on what and how."""
    targets: pd.DataFrame
    choices: pd.DataFrame
    scores: pd.DataFrame | None = None
    effects: pd.DataFrame | None = None
    texts: pd.DataFrame | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    """Command, commit, versions, machine and time."""
    runs: tuple[Self, ...] = ()
    """The results that `join` joined; empty of one alone."""

    @property
    def ks(self) -> list[int]:
        """Numbers of influential tokens at which the loss was measured, ascending."""
        return list(self.settings.choices.ks)

    @property
    def k_max(self) -> int:
        """The largest k: so many tokens of every choice are recorded."""
        return self.ks[-1]

    @property
    def n_far(self) -> int:
        """F = N - M, tokens that only the long context has."""
        return self.settings.contexts.n_far

    @property
    def selectors(self) -> list[str]:
        """Names of the selectors, as they were given."""
        return list(self.settings.choices.selectors)

    @property
    def far_contexts(self) -> list[str]:
        """``true``, ``placebo`` and further placebos."""
        return list(self.settings.choices.far_contexts)

    @property
    def has_xray(self) -> bool:
        """Whether there is a block to be read, with text and a target over tau, of the first run."""
        first = (self.runs or (self,))[0]
        return first.texts is not None and len(first.over) > 0

    @property
    def crossfit(self) -> bool:
        """Whether one model selected and another evaluated."""
        return self.settings.selected_by is not None

    @cached_property
    def gain_nats(self) -> np.ndarray:
        """L_short - L_long of the model that evaluates, (n,): positive where the long context helps."""
        return (self.targets["loss_short_nats"] - self.targets["loss_long_nats"]).to_numpy(dtype=np.float64)

    @cached_property
    def net_gain_nats(self) -> np.ndarray:
        """The loss given the long context with the placebo in it, less L_long, (n,): what this text alone gives.

        Raises `UserError` where the placebo's losses were not measured.
        """
        name = placebo_column(PLACEBO)
        if name not in self.targets:
            raise UserError(
                "the result has no losses in the placebo; measure again, with placebo among the placebos"
            )
        return (self.targets[name] - self.targets["loss_long_nats"]).to_numpy(dtype=np.float64)

    @cached_property
    def over(self) -> np.ndarray:
        """Rows of `targets` that gain more than tau (under the selecting model), ascending, (m,)."""
        return np.flatnonzero(self.targets["over_tau"].to_numpy())

    def loss_nats(self, selector: str, far_context: str = "true", **kept_as: Any) -> np.ndarray:
        """L_k of the targets in `over`, (m, K); NaN where a target has no such far context.

        ``kept_as``: ``level``, ``unit`` and ``sinks`` of the choice, by default "text", "token" and 0.
        """
        return self.of_choices("loss_nats", selector, far_context, **kept_as)

    def selected(self, selector: str, far_context: str = "true", **kept_as: Any) -> np.ndarray:
        """Position ids of the chosen far tokens, most influential first, (m, k_max); -1 where there is no choice.

        `chosen` gives the same as text.
        """
        values = self.of_choices("selected", selector, far_context, **kept_as)
        return np.nan_to_num(values, nan=-1).astype(np.int64)

    def influence(self, selector: str, far_context: str = "true", **kept_as: Any) -> np.ndarray:
        """Influence of each token of `selected`, in the selector's unit, (m, k_max)."""
        return self.of_choices("influence", selector, far_context, **kept_as)

    def of_choices(
        self,
        column: str,
        selector: str,
        far_context: str = "true",
        level: str = "text",
        unit: str = "token",
        sinks: int = 0,
    ) -> np.ndarray:
        """Any column of `choices` for the targets in `over`: (m,), or (m, length) where it holds lists."""
        key = (selector, far_context, level, unit, sinks)
        if key not in self.rows_of_choices:
            raise KeyError(f"no choice {key}; measured were {sorted(self.rows_of_choices)}")
        rows = self.rows_of_choices[key]
        values = self.choices[column].to_numpy()[rows]
        values = np.stack(values) if values.dtype == object else values
        aligned = np.full((len(self.over), *values.shape[1:]), np.nan)
        aligned[self.over_of_choice[rows]] = values
        return aligned

    @cached_property
    def rows_of_choices(self) -> dict[tuple[Any, ...], np.ndarray]:
        """Rows of `choices` by selector, far context, level, unit and sinks."""
        return dict(self.choices.groupby(SELECTION, observed=True).indices)

    @cached_property
    def over_of_choice(self) -> np.ndarray:
        """Of every row of `choices`, the place of its target in `over`, (rows,)."""
        keys = [name for name in ("run", "target_id") if name in self.choices]
        over = self.targets.iloc[self.over][keys].assign(place=np.arange(len(self.over)))
        return self.choices[keys].merge(over, how="left")["place"].to_numpy(dtype=np.int64)

    @classmethod
    def join(cls, results: Sequence[Self]) -> Self:
        """Several runs of one model on the same targets as one, with a column ``run`` (docs/method.md, 2.4).

        Raises `UserError` where they have different settings or targets, the same weights, or are cross-fitted.
        """
        if len(results) == 1:
            return results[0]
        first = results[0]
        if any(result.crossfit for result in results):
            raise UserError(
                "cross-fitted results may share a model, and cannot be joined; give those of one model each"
            )
        if len({result.settings.model.sha256 for result in results}) < len(results):
            raise UserError("two of the results are of the same weights; give each run once")
        for result in results[1:]:
            if differing := first.settings.differences(result.settings, when="joined"):
                raise UserError(
                    f"runs that are joined need the same settings: {differing}; measure one again"
                )
            if not first.targets[["text", "position"]].equals(result.targets[["text", "position"]]):
                raise UserError("the runs were measured on different targets; measure one of them again")

        def joined(name: str) -> pd.DataFrame:
            frames = [getattr(result, name).assign(run=number) for number, result in enumerate(results)]
            # one without choices has no columns of what may be measured of them
            filled = [frame for frame in frames if len(frame)] or frames[:1]
            return pd.concat(filled, ignore_index=True, join="inner")

        of_runs: dict[str, Any] = {"scores": None, "effects": None, "runs": tuple(results)}
        return replace(first, targets=joined("targets"), choices=joined("choices"), **of_runs)

    @classmethod
    def of_parts(cls, parts: Sequence[Self]) -> Self:
        """Parts of one measurement as one, in the order of their targets, each once; its time is that of all parts.

        Raises `UserError` where a part was measured with other settings than the first.
        """
        for part in parts[1:]:
            if differing := parts[0].settings.differences(part.settings, when="resumed"):
                raise UserError(f"a part was measured with other settings: {differing}; measure it again")
        parts = sorted(parts, key=lambda part: part.targets["target_id"].min())
        frames = {name: stacked([getattr(part, name) for part in parts]) for name in FRAMES}
        if frames["targets"]["target_id"].duplicated().any():
            keys = {"targets": ["target_id"], "texts": ["block"]}
            for name, frame in frames.items():
                if frame is not None:
                    of_row = keys.get(
                        name, [column for column in ("target_id", *SELECTION) if column in frame]
                    )
                    frames[name] = frame.drop_duplicates(of_row, ignore_index=True)
        provenance = {**parts[0].provenance, "seconds": sum(part.provenance["seconds"] for part in parts)}
        return replace(parts[0], provenance=provenance, **frames)

    @classmethod
    def of(cls, other: Measurement) -> Self:
        """Another one's data, in this class."""
        return cls(**{field.name: getattr(other, field.name) for field in fields(cls)})

    def save(self, folder: str | Path) -> None:
        """Write the result into a folder, each file whole or not at all; `load` reads it."""
        save_study(folder, {"": self})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The one that was saved in a folder. Raises `UserError` where there is none, or several (see `load_study`)."""
        study = cls.load_study(folder)
        if len(study) != 1:
            raise UserError(f"{folder} holds {len(study)} results; read them with analysis.load_study")
        return next(iter(study.values()))

    @classmethod
    def load_parts(cls, folder: str | Path) -> list[Self]:
        """The result that is in a folder alone or, as long as it is measured, the parts that are finished so far."""
        folder = user_path(folder)
        if (folder / RESULT_NAME).is_file():
            return [cls.load(folder)]
        return [cls.load(head.parent) for head in sorted(folder.glob(f"{PARTS}/*/{RESULT_NAME}"))]

    @classmethod
    def load_study(cls, folder: str | Path) -> dict[str, Self]:
        """The results that were saved in a folder, by the name of their cell; one alone has the name "".

        Raises `UserError` for a folder without a result, of another version, or damaged.
        """
        folder = user_path(folder)
        head = read_head(
            folder / RESULT_NAME,
            KIND,
            VERSION,
            "give a folder that `olmo-sparsity measure --out` or Result.save wrote",
        )
        cells = _cells_of(head, folder / RESULT_NAME)
        paths = {name: folder / f"{name}.parquet" for name in FRAMES}
        frames = {
            name: read_frame(path) for name, path in paths.items() if name in FRAMES[:2] or path.is_file()
        }
        frames["choices"] = renamed_choices(frames["choices"])
        by_cell = {name: frame.groupby("cell").indices for name, frame in frames.items() if "cell" in frame}
        if any(saved["settings"].get("losses_not_over_tau") for saved in cells.values()):
            log.warning("%s: targets not over tau have mean losses, so no histogram and no other tau", folder)
        study = {}
        for cell, saved in cells.items():
            of_cell = dict(frames)
            for name, rows in by_cell.items():
                part = frames[name].iloc[rows.get(cell, [])].drop(columns="cell").reset_index(drop=True)
                of_cell[name] = part.dropna(axis="columns", how="all") if len(part) else part
                if name not in FRAMES[:2] and part.empty:
                    del of_cell[name]
            try:
                settings = Settings.from_json(saved["settings"])
            except UserError as error:
                raise UserError(f"{folder / RESULT_NAME}: {error}") from error
            study[cell] = cls(settings, provenance=saved["provenance"], **of_cell)
        return study

    def __repr__(self) -> str:
        return f"Measurement({len(self.targets):,} targets, {len(self.over):,} over tau)"


def _cells_of(head: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Settings and provenance of every cell in the JSON file at ``path``. Raises `UserError` where they are missing."""
    cells = head.get("cells")
    if not isinstance(cells, dict) or not cells:
        raise UserError(f"{path} is damaged: it holds no cells; restore it, or measure again")
    for cell, saved in cells.items():
        which = f"cell {cell!r}" if cell else "it"  # one result alone has no name
        for name in ("settings", "provenance"):
            if not isinstance(saved, dict) or not isinstance(saved.get(name), dict):
                raise UserError(f"{path} is damaged: {which} has no {name}; restore it, or measure again")
    return cells


def save_study(folder: str | Path, study: Mapping[str, Measurement]) -> None:
    """Write several results, by the name of their cell, as one: `load_study` reads them."""
    folder = user_path(folder)
    study = {str(cell): result for cell, result in study.items()}
    for result in study.values():
        if result.runs:
            raise ValueError("save the results that were joined, each as a cell: join them after reading")
    frames: dict[str, pd.DataFrame | None] = dict.fromkeys(FRAMES)
    for name in FRAMES:
        parts = {cell: frame for cell, one in study.items() if (frame := getattr(one, name)) is not None}
        if list(study) != [""]:
            parts = {cell: frame.assign(cell=cell) for cell, frame in parts.items()}
        if parts:
            frames[name] = pd.concat(parts.values(), ignore_index=True)
    cells = {
        cell: {"settings": one.settings.to_json(), "provenance": one.provenance}
        for cell, one in study.items()
    }
    write_saved(folder / RESULT_NAME, {"kind": KIND, "version": VERSION, "cells": cells}, frames)


def losses_in_other_contexts(targets: pd.DataFrame) -> list[str]:
    """The columns of targets that are losses, but for L_long and L_short."""
    return [
        name
        for name in targets
        if name.startswith("loss_")
        and name.endswith("_nats")
        and name not in ("loss_long_nats", "loss_short_nats")
    ]


def context_lengths(targets: pd.DataFrame) -> list[int]:
    """The lengths of context n of which targets have the loss ``loss_of_n_nats``, ascending."""
    matches = [re.fullmatch(r"loss_of_(\d+)_nats", name) for name in targets]
    return sorted(int(match[1]) for match in matches if match)


def rounded(losses: np.ndarray) -> np.ndarray:
    """Losses as a saved result has them, float32, in float64. Raises `UserError` where one is not finite."""
    if not np.isfinite(losses).all():
        raise UserError(
            "a loss of the model is not finite (fp16 and bf16 may overflow); measure in fp32, or another model"
        )
    return losses.astype(np.float32).astype(np.float64)
