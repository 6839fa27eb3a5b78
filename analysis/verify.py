"""Some targets of a result, measured again from the weights and the text: how far the numbers are from the result.

Everything is made anew: which targets are sampled, their losses, what every selector chooses, and L_k of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from analysis.engine import targets_per_batch
from analysis.measurement import SELECTION, Measurement, losses_in_other_contexts
from analysis.measuring import measure
from analysis.open_texts import files_named
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream
from olmo_sparsity.util.text_files import TextFiles

TOLERANCE_NATS = 1e-3
"""Of a loss in fp32: rounding on another processor is a hundredth of it. [ours]"""
LEAST_SAME = 0.95
"""Share of the choices that must be of the same tokens: rounding decides between equal influences. [ours]"""


@dataclass(frozen=True)
class Comparison:
    """How far what was measured again is from the result."""

    targets: int
    largest_difference_nats: dict[str, float]
    """Of loss_long, loss_short, in other contexts together, and, over the choices of the same tokens, loss_k."""
    choices: int
    """Of a target, selector, far context and k."""
    same: float
    """Share of them that are of the same tokens; 1 where there are none."""

    @property
    def holds(self) -> bool:
        """Whether the result is what its weights and its text give, see `TOLERANCE_NATS` and `LEAST_SAME`."""
        return max(self.largest_difference_nats.values()) <= TOLERANCE_NATS and self.same >= LEAST_SAME

    def __str__(self) -> str:
        apart = ", ".join(f"{name} {nats:.1e}" for name, nats in self.largest_difference_nats.items())
        choices = "there are no choices"
        if self.choices:
            choices = f"{self.same:.2%} of {self.choices:,} choices are the same"
        verdict = "NOT verified"
        if self.holds:
            verdict = "verified"
        return f"{self.targets:,} targets measured again; largest difference in nats: {apart}; {choices}: {verdict}"


def verify(
    result: Measurement, model: Any, texts: Any, *, targets: int = 100, seed: int = 0, **options: Any
) -> Comparison:
    """Measure random batches of a result again until they hold so many ``targets`` over tau; ``options`` of `measure`.

    Where none is over tau, until they hold so many of all. Files are read with the fields and the encoding of the
    result, unless `TextFiles` names others.
    Raises `UserError` where weights, text or settings are not those of the result: where another model chose, too.
    """
    settings = result.settings
    target_id = result.targets["target_id"].to_numpy()
    counted = target_id[result.over] if len(result.over) else target_id
    batch = counted // targets_per_batch(settings.contexts.targets_per_block)
    order = np.random.default_rng([Stream.VERIFIED, seed]).permutation(np.unique(batch))
    held = np.cumsum([(batch == number).sum() for number in order])
    again = measure(
        model,
        _read_as_before(texts, settings.texts.read_with or {}),
        **asdict(settings.contexts),
        targets=settings.targets_requested,
        tau_nats=settings.choices.tau_nats,
        ks=settings.choices.ks,
        selectors=settings.choices.selectors,
        placebos=settings.choices.far_contexts[1:],
        keep_as=settings.choices.keep_as,
        prefix=",".join(map(str, settings.model.prefix)) or "none",
        dtype=settings.model.dtype.removesuffix("-weights"),
        split=settings.texts.split,
        batches=order[: np.searchsorted(held, targets) + 1].tolist(),
        **options,
    )
    differing = settings.differences(again.settings, when="verified")
    if differing:
        raise UserError(
            f"the result cannot be verified with what is given: {differing}; give its own model and text"
        )
    return compare(result, again)


def _read_as_before(texts: Any, read_with: Mapping[str, str]) -> Any:
    """The texts, of files with the fields and the encoding of the result where none are named."""
    files = None
    if read_with:
        files = files_named(texts)
    if files is None or files != TextFiles(files.paths):
        return texts
    return replace(files, **read_with)


def compare(result: Measurement, again: Measurement) -> Comparison:
    """How far ``again``, which has some of the targets of ``result``, is from it."""
    recorded = result.targets.set_index("target_id").reindex(again.targets["target_id"])
    measured = again.targets.set_index("target_id")
    target = ["text", "position", "token"]
    if not (recorded[target] == measured[target]).all(axis=None):
        raise UserError(
            "the result holds other targets than are sampled from this text; give the text of the result, docstrings "
            "with the package versions of constraints.txt"
        )
    placebo = ["placebo_text", "placebo_start"]
    if not (recorded[placebo] == measured[placebo]).all(axis=None):
        raise UserError(
            "the result has other placebos than are sampled from this text: it was grouped otherwise; name its groups "
            "as then, such as with --group-field"
        )
    largest = {}
    for name in ("loss_long", "loss_short"):
        difference = recorded[f"{name}_nats"] - measured[f"{name}_nats"]
        largest[name] = float(difference.abs().max())
    others = [name for name in losses_in_other_contexts(recorded) if name in measured]
    if others:
        differences = (recorded[others] - measured[others]).abs().fillna(0.0)  # NaN: there is no such placebo
        in_one_alone = recorded[others].isna() != measured[others].isna()
        differences = differences.mask(in_one_alone, np.inf)
        largest["other_contexts"] = float(differences.max(axis=None))
    # a choice of a target that was not over tau before is none of these pairs, and so counts as another
    pairs = again.choices.merge(result.choices, on=["target_id", *SELECTION], suffixes=("", "_before"))
    differences_nats = [0.0]
    same_choices = 0
    for row in pairs.itertuples():
        for column, k in enumerate(result.ks):
            if set(row.selected[:k]) == set(row.selected_before[:k]):
                same_choices += 1
                differences_nats.append(
                    abs(float(row.loss_nats[column]) - float(row.loss_nats_before[column]))
                )
    largest["loss_k"] = max(differences_nats)
    choices = len(again.choices) * len(result.ks)
    same = 1.0
    if choices:
        same = same_choices / choices
    return Comparison(len(measured), largest, choices, same)
