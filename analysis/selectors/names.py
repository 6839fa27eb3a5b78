"""What the name of a selector says: where it ranks, who proposes for it, with what near tokens it chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from analysis.policies.policy import POLICIES
from analysis.selectors.registry import BY_SUBSETS
from olmo_sparsity.util.errors import UserError

OTHER_NEAR = "/other-near"
"""Ends the name of a selector that chooses with other tokens in place of the first half of the short context
(docs/method.md, 2.3 [ours]): what it chooses cannot rest on luck with exactly these."""


@dataclass(frozen=True)
class RankedIn:
    """Where a selector reads the subsets by which it ranks, written LEVEL[:SINKS], such as ``cache:4``."""

    level: str
    """``text``: the subsequence is read; ``cache``: keys and values of what was read whole (docs/method.md, 2.2b)."""
    sinks: int = 0
    """So many of the first far tokens are in every subset, and are no candidates."""

    @classmethod
    def parse(cls, text: str) -> RankedIn:
        """Raises `UserError` where the text is none of these."""
        match = re.fullmatch(r"(text|cache)(?::(\d+))?", text)
        if not match:
            raise UserError(
                f"{text!r}: subsets are ranked in text or cache, with sinks such as cache:4; {OTHER_NEAR} ends a name"
            )
        level, sinks = match.groups()
        return cls(level, int(sinks or 0))

    def __str__(self) -> str:
        return f"{self.level}:{self.sinks}" if self.sinks else self.level


def ranked_in(name: str) -> RankedIn | None:
    """Where the selector of a name ranks; None: it reads no subsets, or those without sinks, as text."""
    name = name.removesuffix(OTHER_NEAR)
    _, slash, where = name.partition("@")[0].partition("/")
    return RankedIn.parse(where) if slash else None


def reads_subsequences(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, drops tokens from a text that is read.

    `gradient` does: presence hides a token from all queries, as dropping it does.
    """
    exact, _, screen = name.removesuffix(OTHER_NEAR).partition("@")
    for part in (exact, screen):
        base, _, where = part.partition("/")
        base = base.partition(":")[0]
        if (base in BY_SUBSETS and not where.startswith("cache")) or base == "gradient":
            return True
    return False


def ranks_in_cache(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, leaves keys and values out of the cache."""
    exact, _, screen = name.removesuffix(OTHER_NEAR).partition("@")
    return any(part.partition("/")[2].startswith("cache") for part in (exact, screen))


def chooses_by_head(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, ranks the tokens of every head of keys."""
    parts = re.split("[@:/]", name)
    return any(part in POLICIES for part in parts)


def changes_embeddings(name: str) -> bool:
    """Whether the selector of a name, or who proposes for it, reads embeddings in the place of tokens."""
    parts = re.split("[@:/]", name)
    return any(part in ("saliency", "input-x-gradient", "integrated-gradients") for part in parts)
