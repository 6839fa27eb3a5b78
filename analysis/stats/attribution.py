"""Faithfulness of selectors, as the attribution field measures it (docs/method.md, 2.8).

Shapes: m targets over tau with finished choices, K values of k.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analysis.contexts import TRUE
from analysis.faithfulness import EXACT, row_pearson, row_spearman
from analysis.stats.numbers import OF_CHOICE, frame_of, overlap
from analysis.stats.recovery import BEST, Measured, Row

CHANCE = "chance"
"""Stands beside the selectors in `faithfulness`: two random choices."""


@frame_of("name", *OF_CHOICE, in_nats=True)
def faithfulness(measured: Measured) -> Iterator[Row]:
    """Means over the targets over tau for which a measure is defined; of what was measured.

    far_context "true" and "placebo"; k is NaN of what has none. Names:

        sufficiency_nats, comprehensiveness_nats              by k; the first relative to L_long of the true context
        sufficiency_aopc_nats, comprehensiveness_aopc_nats    their means over the k's: ERASER's AOPC, over numbers of
                                                              tokens, not shares
        lds, r2                                               summed influence against the loss on random subsets
        overlap (by k), spearman                              against `EXACT`; the overlap of selector `CHANCE` is k / F
    """
    least = {"overlap": 0.0, "r2": 0.0, "lds": -1.0, "spearman": -1.0}  # which no mean leaves, nor 1
    for selector in measured.names:
        of_true = _measures_of(measured, selector, TRUE)
        for context in measured.far_contexts:
            for (name, k), values in _measures_of(measured, selector, context).items():
                if not np.isfinite(of_true[name, k]).any():
                    continue
                defined = np.isfinite(values)
                draws = measured.draws(np.where(defined, values, 0.0), defined)
                row = measured.interval(draws)
                if name in least:
                    row["low"] = float(np.clip(row["low"], least[name], 1.0))
                    row["high"] = float(np.clip(row["high"], least[name], 1.0))
                yield {"name": name, "selector": selector, "far_context": context, "k": k, **row}
    for k in measured.ks:
        value = k / measured.result.n_far
        yield {"name": "overlap", "selector": CHANCE, "far_context": TRUE, "k": k, "value": value}


def _measures_of(measured: Measured, selector: str, context: str) -> dict[tuple[str, int | None], np.ndarray]:
    """Values of one selector in one far context by name and k, (m,) each, NaN where undefined."""
    there: set[str] = set()
    if selector != BEST:
        there = set(measured.result.choices)
    ks = measured.ks
    of_ks = {"sufficiency": measured.losses[selector, context] - measured.long_nats[:, None]}
    if "comprehensiveness_nats" in there:
        of_ks["comprehensiveness"] = measured.of_choices("comprehensiveness_nats", selector, context)
    values: dict[tuple[str, int | None], np.ndarray] = {}
    for name, columns in of_ks.items():
        for k, column in zip(ks, columns.T, strict=True):
            values[f"{name}_nats", k] = column
        values[f"{name}_aopc_nats", None] = columns.mean(axis=1)
    if "subset_loss_nats" in there:
        influence = measured.of_choices("subset_influence", selector, context)
        losses = measured.of_choices("subset_loss_nats", selector, context)
        values["lds", None] = row_spearman(influence, -losses)
        values["r2", None] = row_pearson(influence, losses) ** 2
    for name in ("lds", "r2"):  # of a result without the losses of the subsets
        if name in there:
            values[name, None] = measured.of_choices(name, selector, context)
    if EXACT in measured.selectors and selector not in (EXACT, BEST):
        chosen = measured.of_choices("selected", selector, context)
        exact = measured.of_choices("selected", EXACT, context)
        for k in ks:
            values["overlap", k] = overlap(chosen[:, :k], exact[:, :k])
        if "leave_one_out_spearman" in there:
            values["spearman", None] = measured.of_choices("leave_one_out_spearman", selector, context)
    return values
