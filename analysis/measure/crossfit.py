"""Who selects: a model, or records of what a model selected before (cross-fitting, docs/method.md, 2.3).

Shapes: m targets, F far tokens, k selected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from analysis.measure.selectors import Question, Selection, SharedPasses, find_selector
from analysis.measure.settings import InfluenceSettings
from analysis.model.load import TRANSFORMERS_CONFIG
from analysis.model.scorer import Scorer, long_and_short_losses
from analysis.records.schema import MANIFEST_NAME, ROPE_SCALING, UNTRAINED
from analysis.records.store import Records, load_records
from analysis.text.contexts import Contexts
from olmo_sparsity.checkpoint import checkpoints
from olmo_sparsity.util.errors import UserError


class Chooser(Protocol):
    """Chooses the targets and their influential tokens."""

    def gains_nats(self, contexts: Contexts, asked: np.ndarray) -> np.ndarray:
        """L_short - L_long of the model that selects, (m,); ``asked``: (m, 2) as in `Scorer.losses`."""

    def select(
        self, selectors: Sequence[str], contexts: Contexts, asked: np.ndarray, far_context: str
    ) -> dict[str, Selection]:
        """S_k of every target that is asked for, by selector."""


@dataclass(frozen=True)
class ModelChooser:
    """A model chooses by the losses that its scorer computes."""

    scorer: Scorer
    seed: int
    k_max: int
    proposing: Scorer | None = None
    """Of the model that proposes for screened selectors; None: the same one."""

    def gains_nats(self, contexts: Contexts, asked: np.ndarray) -> np.ndarray:
        """See `Chooser`."""
        long, short = long_and_short_losses(self.scorer, contexts, asked)
        return short - long

    def select(
        self, selectors: Sequence[str], contexts: Contexts, asked: np.ndarray, far_context: str
    ) -> dict[str, Selection]:
        """See `Chooser`."""
        passes = SharedPasses(tuple(selectors))
        question = Question(
            self.scorer, contexts, self.seed, self.k_max, asked, passes=passes, proposing=self.proposing
        )
        return {name: find_selector(name)(question) for name in selectors}


class RecordedChooser:
    """What another measurement chose, looked up in its records."""

    def __init__(self, records: Records):
        self.records = records
        targets = records.targets
        self._row_of_target = {target: row for row, target in enumerate(targets.target_id.tolist())}
        self._row_of_selection = {
            target: row for row, target in enumerate(targets.target_id[records.over].tolist())
        }

    def check(self, settings: InfluenceSettings, corpus_manifest_sha256: str) -> None:
        """Raise `UserError` where the records are unfinished, or of other targets or selectors than are asked for."""
        folder, manifest = self.records.folder, self.records.manifest
        what = None
        if manifest.crossfit:
            what = "are cross-fitted themselves"
        elif ROPE_SCALING in manifest.options:
            what = "are of a checkpoint with scaled RoPE"
        elif UNTRAINED in manifest.options:
            what = "are of the targets of untrained weights, not of those of the model that measures"
        elif not manifest.complete:
            what = "are unfinished"
        if what:
            raise UserError(
                f"the records in {folder} {what}; select with a checkpoint, or with finished records of one"
            )
        wanted = {
            "corpus": (manifest.corpus_manifest_sha256, corpus_manifest_sha256),
            "--split": (manifest.split, settings.split),
            "--n-long": (manifest.n_long, settings.n_long),
            "--n-short": (manifest.n_short, settings.n_short),
            "--tau": (manifest.tau_nats, settings.tau_nats),
            "--targets": (manifest.targets_asked, settings.targets),
            "--targets-per-block": (manifest.targets_per_block, settings.targets_per_block),
            "--seed": (manifest.seed, settings.seed),
        }
        if differing := [
            f"{name} {there} (here {asked})" for name, (there, asked) in wanted.items() if there != asked
        ]:
            raise UserError(f"the records in {folder} have {', '.join(differing)}; give the same here")
        if unmeasured := [each for each in settings.further_placebos if each not in manifest.far_contexts]:
            raise UserError(
                f"the records in {folder} have no far context {', '.join(unmeasured)}; leave it out of "
                "--further-placebos, or select with a checkpoint"
            )
        absent = [name for name in settings.selectors if name not in manifest.selectors]
        if absent or max(settings.ks) > manifest.k_max:
            raise UserError(
                f"the records in {folder} hold up to k = {manifest.k_max} of the selectors "
                f"{', '.join(manifest.selectors)}; ask for those with --selectors and --k"
            )

    def gains_nats(self, contexts: Contexts, asked: np.ndarray) -> np.ndarray:
        """See `Chooser`."""
        rows = [self._row_of_target[target] for target in contexts.target_id[tuple(asked.T)].tolist()]
        return self.records.targets.selecting_gain_nats[rows]

    def select(
        self, selectors: Sequence[str], contexts: Contexts, asked: np.ndarray, far_context: str
    ) -> dict[str, Selection]:
        """See `Chooser`."""
        rows = [self._row_of_selection[target] for target in contexts.target_id[tuple(asked.T)].tolist()]
        return {
            name: Selection(
                self.records.selected[name][far_context][rows].astype(np.int64),
                self.records.influence[name][far_context][rows].astype(np.float64),
            )
            for name in selectors
        }


def open_records(path: str | Path) -> Records | None:
    """The records in ``path``; None where it has none, or is the folder of a model or a run, which may have some."""
    path = Path(path)
    is_model = (path / TRANSFORMERS_CONFIG).is_file() or bool(checkpoints(path))
    return load_records(path) if (path / MANIFEST_NAME).is_file() and not is_model else None
