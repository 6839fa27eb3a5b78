"""What selected tokens recover of the sampled targets over tau, as columns of a `SumsBootstrap`."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from analysis.measure.influence import InfluenceEngine, selection_rounds, targets_per_batch
from analysis.records.schema import FAR_CONTEXTS, Targets
from analysis.stats.recovery import ALL, Columns
from analysis.text.contexts import SampledTargets
from olmo_sparsity.util.progress import progress

KS = (1, 2, 4, 8)


def gains_of(engine: InfluenceEngine, sampled: SampledTargets) -> Targets:
    """L_long and L_short of all sampled targets, numbered from 0 on."""
    count, size = len(sampled.position), targets_per_batch(engine.targets_per_block)
    ids = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    return Targets.joined([engine.measure_gains(sampled, rows, rows) for rows in ids])


def recovered_columns(
    engine: InfluenceEngine, targets: Targets, over: np.ndarray, description: str, group: Hashable = ALL
) -> Columns:
    """What `SumsBootstrap.recovery_statistics` needs at `KS`: gains and L_short - L_k, 0 where not over tau, (n,)."""
    saved = [("saved", name, far, k, group) for name in engine.selectors for far in FAR_CONTEXTS for k in KS]
    columns: Columns = {name: np.zeros(len(targets)) for name in [("gain", group), *saved]}
    columns["gain", group][over] = targets.gain_nats[over]
    with progress(description, len(over), "targets") as advance:
        for rows in selection_rounds(targets, over, engine.targets_per_block):
            for row in engine.select(targets, rows):
                for k, loss in zip(KS, row.loss_nats, strict=True):
                    column = columns["saved", row.selector, row.far_context, k, group]
                    column[row.target_id] = targets.loss_short_nats[row.target_id] - loss
            advance(len(rows))
    return columns
