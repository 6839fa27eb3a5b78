"""The parts of a recovery: luck, common context, and what is specific to the target's own text (docs/method.md, 2.3).

Of records that have more far contexts than the true one and the placebo. All numbers are of the targets over tau that
have every far context, so that they can be compared; their intervals are those of the summary's bootstrap.
Shapes: m targets over tau with finished selections.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from analysis.records.schema import FAR_CONTEXTS
from analysis.records.store import Records
from analysis.stats.bootstrap import Statistic, count_clusters, difference
from analysis.stats.recovery import Columns, MeasuredTargets, SumsBootstrap, net_recovery
from olmo_sparsity.util.result_files import Json

COMPARABLE = "has every far context"
"""The group of the targets that this is about."""
BLIND_FORMS = ("kl", "tv")
"""What the name of a selector's target-blind forms ends with."""
LARGEST = "largest"
"""Name of the largest positive placebo, beside those that it is taken from."""


def placebo_columns(records: Records, measured: MeasuredTargets) -> Columns:
    """What the numbers of this module are sums of; none without a further placebo."""
    if records.manifest.far_contexts == FAR_CONTEXTS:
        return {}
    return measured.of_group(
        COMPARABLE, measured.ks, _comparable(records) * 1.0, records.manifest.far_contexts
    )


def _comparable(records: Records) -> np.ndarray:
    """Which targets over tau have every far context, (m,) bool."""
    has = [records.targets.having(context)[records.over] for context in records.manifest.far_contexts]
    return np.all(has, axis=0)


def placebo_numbers(bootstrap: SumsBootstrap, records: Records, measured: MeasuredTargets) -> Json | None:
    """Recovery in every far context by selector, and the parts of each signed one whose target-blind form is there.

    None where only one placebo was measured, or no target has every far context.
    """
    contexts, comparable = records.manifest.far_contexts, _comparable(records)
    if contexts == FAR_CONTEXTS or not comparable.any():
        return None
    rows, selectors = records.over[comparable], records.manifest.selectors
    return {
        "far_contexts": list(contexts),
        "targets": len(rows),
        **count_clusters(records.targets.document[rows], records.targets.groups_of(rows)),
        "recovery": {
            selector: {
                context: {
                    str(k): bootstrap.interval(_recovery(bootstrap, selector, context, k))
                    for k in measured.ks
                }
                for context in contexts
            }
            for selector in measured.loss_nats
        },
        "parts": [
            {
                "signed": signed,
                "blind": blind,
                "ks": {str(k): _parts(bootstrap, signed, blind, contexts[1:], k) for k in measured.ks},
            }
            for signed in selectors
            for blind in (f"{signed}-{form}" for form in BLIND_FORMS)
            if blind in selectors
        ],
    }


def _recovery(bootstrap: SumsBootstrap, selector: str, context: str, k: int) -> Statistic:
    return bootstrap.statistic(("saved", selector, context, k, COMPARABLE), ("gain", COMPARABLE))


def _parts(bootstrap: SumsBootstrap, signed: str, blind: str, placebos: Iterable[str], k: int) -> Json:
    """``luck``: what the signed selector has more than the blind one where there is nothing to find, in another group.
    ``common_context``: what the blind one has in each placebo. ``specific``: what it has in its own text beyond the
    largest of these that is positive."""
    luck = difference(*(_recovery(bootstrap, each, FAR_CONTEXTS[1], k) for each in (signed, blind)))
    common = {context: _recovery(bootstrap, blind, context, k) for context in placebos}
    of_placebos = list(common.values())

    def largest(sums: np.ndarray) -> np.ndarray:
        return np.maximum(np.max([each(sums) for each in of_placebos], axis=0), 0.0)

    own = _recovery(bootstrap, blind, FAR_CONTEXTS[0], k)
    intervals = {name: bootstrap.interval(each) for name, each in {**common, LARGEST: largest}.items()}
    return {
        "luck": bootstrap.interval(luck),
        "common_context": intervals,
        "specific": bootstrap.interval(net_recovery(own, largest)),
    }
