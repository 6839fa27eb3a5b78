"""What `analysis.notebook` measured on one text: numbers, tables, and a display for Jupyter. Needs no torch.

Shapes: T tokens of the text, n targets, m of them over tau, N long and M short context length, F = N - M far tokens, k
selected tokens. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.records.schema import Targets
from analysis.stats.recovery import nats

if TYPE_CHECKING:
    import pandas

Json = dict[str, Any]

NO_INTERVAL = "one text is one document, and documents are what is resampled: there are no intervals"
TARGET_COLUMNS = ("position", "token", "kind", "loss_short_nats", "loss_long_nats", "gain_nats")


@dataclass(frozen=True, eq=False)
class Choices:
    """What one selector chose for the targets over tau in one far context."""

    selected: np.ndarray
    """Position ids 0..F-1 of the chosen tokens, most influential first, (m, k)."""
    influence: np.ndarray
    """Influence of each in the selector's unit: nats, or a share of the attention, (m, k)."""
    loss_nats: np.ndarray
    """L_1 … L_k: the loss given the short context and the first 1 … k of them, (m, k)."""


@dataclass(frozen=True, eq=False, repr=False)
class InfluentialTokens:
    """The result of `analysis.notebook.influential_tokens`. In Jupyter it shows itself."""

    pieces: list[str]
    """Text of every token, T; joined they are the text, with the special tokens that the tokenizer added."""
    targets: Targets
    """All measured targets; ``position`` counts tokens of the text. ``document`` is 0; ``placebo_document`` is 0 for
    the text itself and 1 for another one; ``placebo_start`` is -1 where a target has no placebo."""
    choices: dict[str, dict[str, Choices]]
    """By selector, then ``true`` and, where there is one, ``placebo``."""
    placebo_pieces: list[list[str]]
    """Text of the F tokens of the placebo far context of each target over tau; empty where there is no placebo."""
    placebo: str
    """Where the placebo comes from, or why there is none."""
    n_long: int
    n_short: int
    tau_nats: float
    k: int

    @property
    def over(self) -> np.ndarray:
        """Indices into ``targets``, ascending, of those over tau, (m,)."""
        return self.targets.over(self.tau_nats)

    @property
    def gain_nats(self) -> np.ndarray:
        """L_short - L_long of every target, (n,)."""
        return self.targets.selecting_gain_nats

    @property
    def summary(self) -> Json:
        """Number and share of targets over tau; by selector and k: recovery, placebo recovery, net recovery.

        The definitions are METHOD's (2.2, 2.3). None stands for what does not exist. There are no intervals: those of
        `analysis.stats.summary` come from resampling documents, and one text is one document.
        """
        return {
            "tokens": len(self.pieces),
            "targets": len(self.targets),
            "targets_over_tau": len(self.over),
            "share_over_tau": len(self.over) / len(self.targets),
            "selectors": {
                name: {k: self._recoveries(name, k) for k in range(1, self.k + 1)} for name in self.choices
            },
            "placebo": self.placebo,
            "intervals": NO_INTERVAL,
        }

    def _recoveries(self, selector: str, k: int) -> dict[str, float | None]:
        """Eq. 20 over the targets over tau: Σ (L_short - L_k) / Σ (L_short - L_long)."""
        over = self.over
        gain = float(self.gain_nats[over].sum())
        found: dict[str, float | None] = {"recovery": None, "placebo_recovery": None, "net_recovery": None}
        if len(over) == 0 or gain == 0:
            return found
        short = self.targets.loss_short_nats[over]
        for far_context, key in (("true", "recovery"), ("placebo", "placebo_recovery")):
            if far_context in self.choices[selector]:
                loss = self.choices[selector][far_context].loss_nats[:, k - 1]
                found[key] = float((short - loss).sum()) / gain
        if found["recovery"] is not None and found["placebo_recovery"] is not None:
            found["net_recovery"] = found["recovery"] - found["placebo_recovery"]
        return found

    def targets_frame(self) -> pandas.DataFrame:
        """A row per target, over tau or not, with `TARGET_COLUMNS` and ``over_tau``."""
        import pandas

        over = set(self.over.tolist())
        rows = [{**self._target(row), "over_tau": row in over} for row in range(len(self.targets))]
        return pandas.DataFrame(rows, columns=[*TARGET_COLUMNS, "over_tau"])

    def to_pandas(self) -> pandas.DataFrame:
        """A row per target over tau, selector and k.

        Columns: `TARGET_COLUMNS`; ``selector``; ``k``, the rank of the chosen token; ``selected_position`` in the text
        and ``selected_token``, its text; ``distance_tokens`` back from the target; ``influence`` in the selector's
        unit; ``loss_k_nats``, L_k of the first k tokens together; ``placebo_selected_token``, ``placebo_influence``
        and ``placebo_loss_k_nats`` for the placebo far context, missing where there is none.
        """
        import pandas

        placebo = ["placebo_selected_token", "placebo_influence", "placebo_loss_k_nats"]
        chosen = ["selected_position", "selected_token", "distance_tokens", "influence", "loss_k_nats"]
        columns = [*TARGET_COLUMNS, "selector", "k", *chosen, *placebo]
        return pandas.DataFrame(list(self._rows()), columns=columns)

    def _rows(self) -> Iterator[Json]:
        for number, row in enumerate(self.over.tolist()):
            target = self._target(row)
            for selector, found in self.choices.items():
                for rank in range(self.k):
                    yield {**target, "selector": selector, "k": rank + 1, **self._choice(found, number, rank)}

    def _target(self, row: int) -> Json:
        position = int(self.targets.position[row])
        return {
            "position": position,
            "token": self.pieces[position],
            "kind": str(self.targets.kind[row]),
            "loss_short_nats": float(self.targets.loss_short_nats[row]),
            "loss_long_nats": float(self.targets.loss_long_nats[row]),
            "gain_nats": float(self.gain_nats[row]),
        }

    def _choice(self, found: dict[str, Choices], number: int, rank: int) -> Json:
        """The columns of one chosen token; ``number`` counts targets over tau."""
        true = found["true"]
        column = int(true.selected[number, rank])
        position = int(self.targets.position[self.over[number]]) - self.n_long + column
        row: Json = {
            "selected_position": position,
            "selected_token": self.pieces[position],
            "distance_tokens": self.n_long - column,
            "influence": float(true.influence[number, rank]),
            "loss_k_nats": float(true.loss_nats[number, rank]),
        }
        if "placebo" in found:
            placebo = found["placebo"]
            piece = self.placebo_pieces[number][int(placebo.selected[number, rank])]
            row["placebo_selected_token"] = piece
            row["placebo_influence"] = float(placebo.influence[number, rank])
            row["placebo_loss_k_nats"] = float(placebo.loss_nats[number, rank])
        return row

    def __repr__(self) -> str:
        """One line: how many targets are over tau, and what k tokens bring back."""
        head = (
            f"InfluentialTokens: {len(self.over):,} of {len(self.targets):,} targets gain more than "
            f"{nats(self.tau_nats)} (N = {self.n_long}, M = {self.n_short})"
        )
        if len(self.over) == 0:
            return f"{head}; the most is {self.gain_nats.max():.2f}, lower tau_nats"
        return "; ".join([head, *(self._in_words(name) for name in self.choices)])

    def _in_words(self, selector: str) -> str:
        names = {"recovery": "recovery", "placebo_recovery": "placebo", "net_recovery": "net"}
        values = {names[key]: value for key, value in self._recoveries(selector, self.k).items()}
        said = [f"{name} {value:.0%}" for name, value in values.items() if value is not None]
        if "placebo" not in self.choices[selector]:
            said.append("no placebo")
        return f"{selector}, k = {self.k}: {', '.join(said)}"

    def _repr_html_(self) -> str:
        """The display in Jupyter, see `analysis.report.notebook_display.page`."""
        from analysis.report.notebook_display import page  # which shows this class

        return page(self)
