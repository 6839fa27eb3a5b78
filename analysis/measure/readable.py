"""What people read of a target: its kind of dependency and the text around it (METHOD 2.6).

Shapes: n targets, m of them over tau, N tokens of long context, F far tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.records.schema import Examples
from analysis.text.contexts import Contexts
from analysis.text.decode import TextDecoder
from analysis.text.kinds import classify
from olmo_sparsity.data.tokens import TokenFiles

TOKENS_AFTER = 12
"""Tokens behind the target that are read to complete its word, and shown."""


@dataclass(frozen=True)
class Reader:
    """Reads the text of targets."""

    tokens: TokenFiles
    decoder: TextDecoder

    def kinds(self, contexts: Contexts, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Kind of dependency of every target, (n,) strings; ``document`` and ``position`` (n,) say where it stands."""
        kinds = []
        for row in range(len(contexts)):
            pieces, after = self._pieces(contexts, row, int(document[row]), int(position[row]))
            far, short = pieces[: contexts.n_far], pieces[contexts.n_far : contexts.n_long]
            kinds.append(classify("".join(far), "".join(short), pieces[-1], after))
        return np.array(kinds)

    def examples(
        self, contexts: Contexts, placebo: Contexts, document: np.ndarray, position: np.ndarray
    ) -> Examples:
        """The text of targets (m,), their contexts and their placebo far contexts."""
        context, target, placebo_far, after = [], [], [], []
        for row in range(len(contexts)):
            pieces, rest = self._pieces(contexts, row, int(document[row]), int(position[row]))
            context.append(pieces[:-1])
            target.append(pieces[-1])
            placebo_far.append(self.decoder.pieces(placebo.tokens[row, : contexts.n_far].tolist()))
            after.append(rest)
        return Examples(contexts.target_id, context, target, placebo_far, after)

    def _pieces(self, contexts: Contexts, row: int, document: int, position: int) -> tuple[list[str], str]:
        """Pieces of the N context tokens and the target, and the text behind it."""
        behind = self.tokens.document(document)[position + 1 : position + 1 + TOKENS_AFTER]
        window = [*contexts.tokens[row].tolist(), int(contexts.targets[row])]
        pieces = self.decoder.pieces([*window, *behind.tolist()])
        return pieces[: len(window)], "".join(pieces[len(window) :])
