"""Chosen far tokens as text: the rows of `Result.choices` beside the texts of their blocks.

Shapes: N tokens of long context, F far tokens, blocks of B targets, k_max tokens of a choice.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.pieces import readable
from olmo_sparsity.util.errors import UserError

PIECES = {"true": "pieces", "placebo": "placebo_pieces"}
"""The column of `Result.texts` that has the far tokens of a far context. Those of others are not recorded."""


def chosen_tokens(
    choices: pd.DataFrame, texts: pd.DataFrame, far_context: str, *, n_long: int, targets_per_block: int
) -> pd.DataFrame:
    """The frame of `Result.chosen`, of some rows of `Result.choices` in one far context.

    Raises `UserError` where the text of a choice is not recorded.
    """
    if far_context not in PIECES:
        raise UserError(
            f"the text of the far context {far_context!r} is not recorded; choose among {', '.join(PIECES)}"
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
