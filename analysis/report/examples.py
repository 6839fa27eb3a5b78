"""The examples of the report's browser: which targets are shown, and what the page is told about each.

Shapes: m targets over tau with finished selections, N long and M short context length, F = N - M far tokens, k_max
selected tokens, K values of k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.records.schema import FAR_CONTEXTS, Examples
from analysis.records.store import Records
from analysis.report.foreign_text import DIRECTION_CONTROLS
from analysis.stats.recovery import CONTROLS
from analysis.text.kinds import KINDS

Json = dict[str, Any]

_LOSS_DIGITS = 3
_INFLUENCE_DIGITS = 3


def choose_examples(records: Records, count: int) -> np.ndarray:
    """Rows (indices into ``records.over``, ascending) of at most ``count`` targets that have text.

    Where there are more, every so-many-th of them, ordered by kind and then by gain, so that each kind and each size
    of gain keeps its proportion [ours]. No chance is involved.
    """
    if records.examples is None or count <= 0:
        return np.zeros(0, dtype=np.int64)
    targets = records.targets
    rows = np.flatnonzero(np.isin(targets.target_id[records.over], records.examples.target_id))
    if len(rows) <= count:
        return rows
    over = records.over[rows]
    kinds = np.array([KINDS.index(kind) for kind in targets.kind[over]])
    ordered = rows[np.lexsort((targets.selecting_gain_nats[over], kinds))]
    middle_of_each_share = ((np.arange(count) + 0.5) * len(rows) / count).astype(np.int64)
    return np.sort(ordered[middle_of_each_share])


def page_data(records: Records, rows: np.ndarray, k: int) -> Json:
    """All that page.js reads, as plain JSON.

    Args:
        records: with examples, unless ``rows`` is empty.
        rows: of `choose_examples`.
        k: the k that is shown first.

    A selection is ``[positions, influences, losses]``; an influence that does not exist is None. ``gain`` is that of
    the model that evaluates, ``selecting_gain`` the one that put the target over tau.
    """
    manifest = records.manifest
    kinds = [kind for kind in KINDS if kind in set(records.targets.kind[records.over[rows]].tolist())]
    return {
        "ks": manifest.ks,
        "k": k,
        "n_long": manifest.n_long,
        "n_short": manifest.n_short,
        "crossfit": manifest.crossfit,
        "selectors": manifest.selectors,
        "units": [influence_unit(name) for name in manifest.selectors],
        "kinds": kinds,
        "controls": DIRECTION_CONTROLS,
        "examples": _examples(records, records.examples, rows, kinds) if records.examples else [],
    }


def influence_unit(selector: str) -> str:
    """Unit of a selector's influence; empty for the controls, whose order says nothing about the model."""
    name = selector.partition("@")[0]  # EXACT@PROPOSER:m measures as EXACT does
    if name in CONTROLS:
        return ""
    return "of the attention" if name == "attention" else "nats"


def _examples(records: Records, texts: Examples, rows: np.ndarray, kinds: list[str]) -> list[Json]:
    targets = records.targets
    row_of_text = {int(target): row for row, target in enumerate(texts.target_id)}
    found = []
    for row in rows.tolist():
        i = records.over[row]
        text = row_of_text[int(targets.target_id[i])]
        found.append(
            {
                "id": int(targets.target_id[i]),
                "document": int(targets.document[i]),
                "position": int(targets.position[i]),
                "kind": kinds.index(str(targets.kind[i])),
                "short": round(float(targets.loss_short_nats[i]), _LOSS_DIGITS),
                "long": round(float(targets.loss_long_nats[i]), _LOSS_DIGITS),
                "gain": round(float(targets.gain_nats[i]), _LOSS_DIGITS),
                "selecting_gain": round(float(targets.selecting_gain_nats[i]), _LOSS_DIGITS),
                "context": texts.context_pieces[text],
                "target": texts.target_piece[text],
                "after": texts.after[text],
                "placebo": texts.placebo_pieces[text],
                "placebo_document": int(targets.placebo_document[i]),
                "placebo_start": int(targets.placebo_start[i]),
                "selections": [
                    [_selection(records, selector, context, row) for context in FAR_CONTEXTS]
                    for selector in records.manifest.selectors
                ],
            }
        )
    return found


def _selection(records: Records, selector: str, context: str, row: int) -> list[list]:
    influence = [
        float(f"{x:.{_INFLUENCE_DIGITS}g}") if np.isfinite(x) else None
        for x in records.influence[selector][context][row].tolist()
    ]
    losses = [round(x, _LOSS_DIGITS) for x in records.loss_nats[selector][context][row].tolist()]
    return [records.selected[selector][context][row].tolist(), influence, losses]
