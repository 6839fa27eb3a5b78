"""Records of several trainings of one model that were measured on the same targets, as one (docs/method.md, 2.4)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from analysis.records.schema import Examples, Targets, setting_differences
from analysis.records.store import Records
from olmo_sparsity.util.errors import UserError

Label = TypeVar("Label", bound=Hashable)
_BySelector = dict[str, dict[str, np.ndarray]]


def join_trainings(trainings: Sequence[Records]) -> Records:
    """The targets of S trainings, one training behind the other: a target of the text is there S times.

    Manifest and folder are the first's, ``trainings`` all of them. One alone is returned as it is. Raises `UserError`
    where they were not measured on the same targets with the same settings, where two have the same weights, or where
    they are cross-fitted.
    """
    first = trainings[0]
    if len(trainings) == 1:
        return first
    for number, other in enumerate(trainings[1:], start=1):
        _refuse_what_differs(trainings[:number], other)
    size, block = len(first.targets), first.manifest.targets_per_block
    # by whole blocks, so that an id still tells its target's place in the block
    apart = -(-(int(first.targets.target_id.max(initial=0)) + 1) // block) * block
    targets = [
        replace(each.targets, target_id=each.targets.target_id + apart * number)
        for number, each in enumerate(trainings)
    ]
    further = [name for name in first.further if all(name in each.further for each in trainings)]
    return replace(
        first,
        targets=Targets.joined(targets),
        over=np.concatenate([each.over + size * number for number, each in enumerate(trainings)]),
        loss_nats=_joined([each.loss_nats for each in trainings]),
        selected=_joined([each.selected for each in trainings]),
        influence=_joined([each.influence for each in trainings]),
        further={name: _joined([each.further[name] for each in trainings]) for name in further},
        examples=_joined_examples(trainings, apart),
        trainings=tuple(trainings),
    )


def joined_by_label(
    labels: Sequence[Label], records: Sequence[Records], *, of_all_targets: bool = False
) -> dict[Label, Records]:
    """Records by label, trainings of one label joined. Raises `UserError` where they cannot be compared.

    ``of_all_targets``: what is compared is of all targets, so that tau may differ between labels.
    """
    names = {"n_long": "N", "n_short": "M", "tau_nats": "tau", "targets_per_block": "targets per block"}
    if of_all_targets:
        del names["tau_nats"]
    shapes = {tuple(getattr(each.manifest, name) for name in names) for each in records}
    if len(shapes) > 1:
        *most, last = names.values()
        raise UserError(
            f"the records have different {', '.join(most)} and {last}, {sorted(shapes)}; give those of one"
        )
    return {
        label: join_trainings([each for own, each in zip(labels, records, strict=True) if own == label])
        for label in dict.fromkeys(labels)
    }


def _refuse_what_differs(before: Sequence[Records], other: Records) -> None:
    first = before[0]
    pair = f"{first.folder} and {other.folder}"
    for records in (first, other):
        if records.manifest.crossfit:
            raise UserError(
                f"{records.folder} is cross-fitted: two of these trainings may share a model; "
                "give records without --select-with"
            )
    for each in before:
        if each.manifest.checkpoint_sha256 == other.manifest.checkpoint_sha256:
            raise UserError(
                f"{each.folder} and {other.folder} are of the same weights; give each training once"
            )
    # all settings but the weights
    alike = replace(other.manifest, checkpoint_sha256=first.manifest.checkpoint_sha256)
    if alike.fingerprint != first.manifest.fingerprint:
        raise UserError(
            f"{pair} were measured with different settings: {setting_differences(first.manifest, alike)}; "
            "measure one of them again with the other's"
        )
    same = (
        np.array_equal(getattr(first.targets, n), getattr(other.targets, n)) for n in ("document", "position")
    )
    if not all(same):
        raise UserError(f"{pair} hold different targets; measure one of them again with --overwrite")


def _joined(parts: Sequence[_BySelector]) -> _BySelector:
    return {
        selector: {
            context: np.concatenate([part[selector][context] for part in parts]) for context in by_context
        }
        for selector, by_context in parts[0].items()
    }


def _joined_examples(trainings: Sequence[Records], apart: int) -> Examples | None:
    """The texts of all, at the ids of the joined targets; None where one has none."""
    found = [each.examples for each in trainings if each.examples is not None]
    if len(found) < len(trainings):
        return None
    ids = np.concatenate([each.target_id + apart * number for number, each in enumerate(found)])
    names = ("context_pieces", "target_piece", "placebo_pieces", "after")
    return Examples(ids, *([text for each in found for text in getattr(each, name)] for name in names))
