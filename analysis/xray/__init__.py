"""The X-ray of a text: which earlier tokens every token needs, and by how much, as numbers, a figure and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.chosen import check_measured
from analysis.stats.recovery import of_one_way, usual_way, why_no_recovery
from analysis.xray.map import InfluenceMap, influence_map
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from analysis.measurement import Measurement

__all__ = ["InfluenceMap", "influence_map", "xray"]


def xray(result: Measurement, text_number: int | None = None, *, selector: str | None = None) -> InfluenceMap:
    """The block of a Result with the most targets over tau, of one text or of all, to be read: nothing is measured.

    What a target over tau needs are the far tokens that the selector (by default the first) scored, all of them where
    the Result has scores, else the chosen ones, kept as text where it has this way, else in its first; `influence_map`
    measures every token of a text.
    Raises `UserError` where no target is over tau, the selector was not measured, or the Result has no text of such a
    block.
    """
    result = (result.runs or (result,))[0]
    if not result.selectors or len(result.over) == 0:
        raise UserError(why_no_recovery(result))
    if result.texts is None:
        raise UserError(
            "the result holds no texts; measure again to have them, or take analysis.influence_map"
        )
    settings = result.settings
    size = settings.contexts.targets_per_block
    selector = selector or result.selectors[0]
    check_measured(selector, result.selectors)
    targets = result.targets.assign(block=result.targets["target_id"] // size)
    shown = targets["block"].isin(result.texts["block"])
    if text_number is not None:
        shown &= targets["text"] == text_number
    if not shown.any():
        there = ", ".join(str(number) for number in sorted(set(result.texts["text"])))
        raise UserError(
            f"no block of text {text_number!r} has a target over tau; give the number of a text, of {there}"
        )
    block = targets[shown].groupby("block")["over_tau"].sum().idxmax()
    text = result.texts.set_index("block").loc[block]
    tokens = pd.DataFrame({"token": -1, "piece": text["pieces"]})
    tokens[["loss_long_nats", "loss_short_nats"]] = np.nan
    tokens["first_far"] = 0
    of_block = targets[targets["block"] == block].set_index("target_id")
    places = settings.contexts.n_long + of_block.index % size
    for name in ("loss_long_nats", "loss_short_nats"):
        tokens.loc[places, name] = of_block[name].to_numpy()
    influence = [np.empty(0, dtype=np.float32)] * len(tokens)
    table = result.scores
    if table is None:
        table = of_one_way(result, usual_way(result)).choices
    of_selector = (table["selector"] == selector) & (table["far_context"] == "true")
    for row in table[of_selector & table["target_id"].isin(of_block.index)].itertuples():
        scores = np.full(result.n_far, np.nan, dtype=np.float32)
        of_chosen = getattr(row, "influence", np.nan)  # which not every result keeps
        scores[slice(None) if result.scores is not None else row.selected] = of_chosen
        influence[places[of_block.index.get_loc(row.target_id)]] = scores
    names = ("model", "model_sha256", "n_long", "n_short", "prefix", "tau_nats", "dtype")
    saved = settings.to_json()
    about = {name: saved[name] for name in names}
    about |= {"text": f"text {text['text']}", "selector": selector}
    about["commit"] = result.provenance.get("commit", "")
    return InfluenceMap(tokens.assign(influence=influence), about)
