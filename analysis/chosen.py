"""Chosen far tokens as text: the rows of `Result.choices` beside the texts of their blocks.

Shapes: N tokens of long context, F far tokens, blocks of B targets, k_max tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import OTHER_TARGET
from analysis.measurement import Measurement
from analysis.pieces import readable
from analysis.stats.recovery import why_no_recovery
from olmo_sparsity.util.errors import UserError

PIECES = {"true": "pieces", "placebo": "placebo_pieces", OTHER_TARGET: "pieces"}
"""The column of `Result.texts` that has the far tokens of a far context. Those of others are not recorded."""


def chosen_tokens(
    result: Measurement,
    target_id: int | None = None,
    *,
    selector: str | None = None,
    far_context: str = "true",
    level: str | None = None,
    unit: str | None = None,
    sinks: int | None = None,
) -> pd.DataFrame:
    """The frame of `Result.chosen`. Raises `UserError` where there is no such choice or its text is not recorded."""
    if result.runs:
        raise UserError(
            f"{len(result.runs)} runs are joined, and chose tokens of their own; take one of them, such as "
            "result.runs[0].chosen()"
        )
    if not result.selectors:
        raise UserError(why_no_recovery(result))
    if result.texts is None:
        raise UserError("the result holds no texts; measure again to have them")
    if len(result.over) == 0:
        raise UserError("no target is over tau, so no token was chosen; measure with a lower tau")
    selector = selector or result.selectors[0]
    check_measured(selector, result.selectors)
    check_measured(far_context, result.far_contexts)
    way = _way_of(result, {"level": level, "unit": unit, "sinks": sinks})
    choices = result.choices.iloc[result.rows_of_choices.get((selector, far_context, *way), [])]
    if target_id is not None:
        choices = choices[choices["target_id"] == target_id]
    if choices.empty:
        of_target = "any target" if target_id is None else f"target {target_id}"
        raise UserError(
            f"no token was chosen for {of_target} in the far context {far_context!r}; take a target_id of "
            "result.targets that is over_tau"
        )
    contexts = result.settings.contexts
    return _as_text(
        choices,
        result.texts,
        far_context,
        n_long=contexts.n_long,
        targets_per_block=contexts.targets_per_block,
    )


def check_measured(name: str, measured: Sequence[str]) -> None:
    """Raise `UserError` that lists the choices where a selector or far context is not among those measured."""
    if name not in measured:
        raise UserError(f"{name!r} was not measured; choose from {', '.join(measured)}")


def _way_of(result: Measurement, requested: dict[str, Any]) -> tuple[Any, ...]:
    """Level, unit and sinks of the choices that have the ``requested`` ones: text, token, 0, else the first measured.

    Raises `UserError` where no tokens were kept so.
    """
    ways = result.choices[[*requested]].drop_duplicates()
    for column, value in requested.items():
        if value is not None:
            ways = ways[ways[column] == value]
    if ways.empty:
        description = ", ".join(f"{name} {value!r}" for name, value in requested.items() if value is not None)
        raise UserError(
            f"no tokens were kept as {description}; choose what was measured: "
            f"{', '.join(result.settings.choices.keep_as)} (LEVEL[:SINKS][/UNIT[:W]])"
        )
    is_usual = (ways == ["text", "token", 0]).all(axis=1)
    return tuple(ways.iloc[is_usual.argmax()])  # the first where none is


def _as_text(
    choices: pd.DataFrame, texts: pd.DataFrame, far_context: str, *, n_long: int, targets_per_block: int
) -> pd.DataFrame:
    """The frame of `Result.chosen`, of some rows of `Result.choices` in one far context.

    Raises `UserError` where the text of a choice is not recorded.
    """
    if far_context not in PIECES:
        raise UserError(
            f"the text of the far context {far_context!r} is not recorded; choose from {', '.join(PIECES)}"
        )
    of_blocks = texts.set_index("block")
    blocks = choices["target_id"] // targets_per_block
    if missing := sorted(set(blocks) - set(of_blocks.index)):
        raise UserError(f"the text of block {missing[0]} is not recorded; measure again to have it")
    tables = []
    for block, of_block in choices.groupby(blocks):
        pieces = readable(of_blocks.at[block, "pieces"])
        far_pieces = readable(of_blocks.at[block, PIECES[far_context]])
        for choice in of_block.itertuples():
            # the first target of a block is at position id N
            target_position = n_long + choice.target_id % targets_per_block
            columns = {
                "target_id": choice.target_id,
                "target": pieces[target_position],
                "rank": range(1, len(choice.selected) + 1),
                "piece": [far_pieces[position] for position in choice.selected],
                "distance_tokens": [target_position - position for position in choice.selected],
                "influence": getattr(choice, "influence", np.nan),
                "position_id": choice.selected,
            }
            tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)
