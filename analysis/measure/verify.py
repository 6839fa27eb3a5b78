"""Some targets of records, measured again from the weights and the text: how far the numbers are from the records.

Everything is made anew: which targets are sampled, their losses, what every selector chooses, and L_k of it. Shapes: n
targets measured again, K values of k.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.measure.influence import open_measurement, selection_rounds
from analysis.measure.settings import InfluenceSettings, VerifySettings
from analysis.model.load import OF_WEIGHTS
from analysis.records.schema import (
    FURTHER,
    PREFIX,
    PROPOSER,
    SUBSETS,
    UNTRAINED,
    SelectionRow,
    Targets,
    setting_differences,
)
from analysis.records.store import Records, load_records
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.result_files import Json
from olmo_sparsity.util.streams import Stream

TOLERANCE_NATS = 1e-3
"""Of a loss in fp32: rounding on another processor is a hundredth of it. [ours]"""
LEAST_SAME = 0.95
"""Share of the choices that must be of the same tokens: rounding decides between equal influences. [ours]"""


def verify(settings: VerifySettings) -> Json:
    """Measure some of the recorded targets over tau again.

    The result has the largest differences in nats of ``loss_long``, ``loss_short`` and, over the choices of the same
    tokens, ``loss_k``; how many ``choices`` (a target, selector, far context and k) there are, and the share that are
    of the ``same`` tokens; and whether all is ``verified``, see `TOLERANCE_NATS` and `LEAST_SAME`.

    Raises `UserError` where weights, text or settings are not those of the records, or records cannot be verified.
    """
    records = load_records(settings.records)
    asked = open_measurement(_settings_of(records, settings))
    # the text that was measured decides; the training text may be another Python's, say
    manifest = replace(asked.manifest, corpus_manifest_sha256=records.manifest.corpus_manifest_sha256)
    if manifest.fingerprint != records.manifest.fingerprint:
        raise UserError(
            f"{settings.records} cannot be verified with what is given: "
            f"{setting_differences(records.manifest, manifest)}; give the records' own --checkpoint and --corpus"
        )
    drawn = np.stack([asked.sampled.document, asked.sampled.position])
    if not np.array_equal(drawn, np.stack([records.targets.document, records.targets.position])):
        raise _other_text(records, asked.text.corpus)
    engine = replace(asked.engine, faithfulness=None)
    found: list[SelectionRow] = []
    again: list[Targets] = []
    rounds = _some_rounds(records, settings.targets, settings.seed)
    with progress("measuring again", sum(map(len, rounds)), "targets") as advance:
        for rows in rounds:
            again.append(engine.measure_gains(asked.sampled, rows, records.targets.target_id[rows]))
            found += engine.select(records.targets, rows, records.manifest.far_contexts)
            advance(len(rows))
            if not np.array_equal(again[-1].token, records.targets.token[rows]):
                raise _other_text(records, asked.text.corpus)
    return _compared(records, np.concatenate(rounds), Targets.joined(again), found)


def _other_text(records: Records, corpus: str) -> UserError:
    return UserError(
        f"{records.folder} holds other targets than are sampled from {corpus}; prepare the text of the records, "
        "docstrings with the package versions of constraints.txt"
    )


def _settings_of(records: Records, settings: VerifySettings) -> InfluenceSettings:
    """What made the records, with the checkpoint and the corpus that are given."""
    manifest = records.manifest
    refused = {
        "are cross-fitted": manifest.crossfit,
        "were proposed by another model": PROPOSER in manifest.options,
        "were chosen with untrained weights": UNTRAINED in manifest.options,
        "are one shard of several": "shard" in manifest.options,
    }
    if what := next((words for words, is_so in refused.items() if is_so), None):
        raise UserError(f"{records.folder} {what}; verify records of one checkpoint")
    unscaled = manifest.checkpoint.rpartition("@")[0] or manifest.checkpoint
    for option, given, paths in (
        ("--checkpoint", settings.checkpoint, (manifest.checkpoint, unscaled)),
        ("--corpus", settings.corpus, (manifest.corpus,)),
    ):
        if given is None and not any(Path(path).exists() for path in paths):
            raise UserError(
                f"{paths[0]}, of which {records.folder} are, is not there; say where it is: {option}"
            )
    return InfluenceSettings(
        checkpoint=settings.checkpoint or manifest.checkpoint,
        corpus=settings.corpus or manifest.corpus,
        out=records.folder,
        split=manifest.split,
        seed=manifest.seed,
        n_long=manifest.n_long,
        n_short=manifest.n_short,
        tau_nats=manifest.tau_nats,
        ks=tuple(manifest.ks),
        selectors=tuple(manifest.selectors),
        targets=manifest.targets_asked,
        targets_per_block=manifest.targets_per_block,
        subsets=manifest.options.get(SUBSETS, 0),
        only_recovery=SUBSETS not in manifest.options,
        further_placebos=tuple(manifest.options.get(FURTHER, ())),
        prefix=",".join(map(str, manifest.options.get(PREFIX, ()))) or "none",
        bf16=manifest.dtype == "bf16",
        dtype=manifest.dtype.removesuffix(OF_WEIGHTS) if manifest.dtype.endswith(OF_WEIGHTS) else "fp32",
        device=settings.device,
        tokens_per_batch=settings.tokens_per_batch,
    )


def _some_rounds(records: Records, count: int, seed: int) -> list[np.ndarray]:
    """Rounds of targets over tau, in random order, until they have ``count`` targets."""
    rounds = selection_rounds(records.targets, records.over, records.manifest.targets_per_block)
    order = np.random.default_rng([Stream.VERIFIED, seed]).permutation(len(rounds))
    enough = np.searchsorted(np.cumsum([len(rounds[number]) for number in order]), count) + 1
    return [rounds[number] for number in order[:enough]]


def _compared(records: Records, rows: np.ndarray, again: Targets, found: list[SelectionRow]) -> Json:
    """How far what was measured again, of the targets in these rows, is from the records; see `verify`."""
    place = {target: at for at, target in enumerate(records.targets.target_id[records.over].tolist())}
    largest = {
        name: float(
            np.abs(getattr(again, f"{name}_nats") - getattr(records.targets, f"{name}_nats")[rows]).max()
        )
        for name in ("loss_long", "loss_short")
    }
    same, apart = 0, [0.0]
    for each in found:
        at = place[each.target_id]
        chosen = records.selected[each.selector][each.far_context][at]
        losses = records.loss_nats[each.selector][each.far_context][at]
        for column, k in enumerate(records.manifest.ks):
            if set(each.selected[:k]) == set(chosen[:k].tolist()):
                same += 1
                apart.append(abs(each.loss_nats[column] - losses[column]))
    choices = len(found) * len(records.manifest.ks)
    largest["loss_k"] = float(max(apart))
    return {
        "targets": len(again),
        "largest_difference_nats": largest,
        "choices": choices,
        "same": same / choices,
        "verified": max(largest.values()) <= TOLERANCE_NATS and same >= LEAST_SAME * choices,
    }
