"""What the name of a selector says, such as ``leave-one-out-kl/cache:4@gradient:32/other-near``.

    NAME[:PARAMETER=NUMBER…][/LEVEL[:SINKS]][@PROPOSER:m][/other-near]

Settings and results have names as users wrote them. They are parsed where these are read, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from analysis.parameters import changed, made, written
from analysis.selectors.registry import CONTROL, SELECTORS, Registered
from olmo_sparsity.util.errors import UserError

OTHER_NEAR = "/other-near"
"""Ends the name of a selector that chooses with other tokens in place of the first half of the short context
(docs/method.md, 2.3 [ours]): what it chooses cannot rest on luck with exactly these."""


@dataclass(frozen=True)
class RankedIn:
    """Where a selector reads the subsets by which it ranks, written LEVEL[:SINKS], such as ``cache:4``."""

    level: str = "text"
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


AS_TEXT = RankedIn()
"""Where nothing else is said."""


@dataclass(frozen=True)
class SelectorName:
    """The name of a selector, taken apart: two are equal where they name the same selector.

    ``str()`` gives the one way to write it that leaves out what is so by default.
    """

    base: str
    """By which it is registered."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Those that are not as by default, in the order of its fields."""
    ranked_in: RankedIn = AS_TEXT
    """Where it ranks; of a selector that reads no subsets always the default."""
    screen: Screen | None = None
    """Who proposes the tokens that it decides among; None: nobody, all far tokens are candidates."""
    other_near: bool = False
    """Whether it chooses with other near tokens, see `OTHER_NEAR`."""

    @classmethod
    def parse(cls, text: str) -> SelectorName:
        """The name that a user wrote.

        Raises `UserError` where there is no such selector or parameter, or parts do not go together.
        """
        by_near = text.removesuffix(OTHER_NEAR)
        if by_near.endswith(OTHER_NEAR):
            raise UserError(f"{text}: {OTHER_NEAR} ends a name once; leave the second one out")
        exact, at, screen = by_near.partition("@")
        proposer, _, count = screen.rpartition(":")
        if at and not (proposer and count.isdecimal()):
            raise UserError(
                f"{text!r} is no screened selector; write EXACT@PROPOSER:m, such as leave-one-out@gradient:32"
            )
        name = cls._parse_unscreened(exact)
        if at:
            name = replace(name, screen=Screen(cls._parse_unscreened(proposer), int(count)))
        if by_near == text:
            return name
        if all(ranking.registered.family == CONTROL for ranking in name._ranking):
            raise UserError(f"{text}: {by_near} does not look at the near tokens; leave {OTHER_NEAR} out")
        return replace(name, other_near=True)

    @classmethod
    def _parse_unscreened(cls, text: str) -> SelectorName:
        """The name NAME[:PARAMETER=NUMBER…][/LEVEL[:SINKS]]."""
        named, slash, where = text.partition("/")
        base, *parameters = named.split(":")
        registered = SELECTORS[base]
        if slash and not registered.by_subsets:
            by_subsets = [name for name, other in SELECTORS.items() if other.by_subsets]
            raise UserError(f"{base} reads no subsets to rank by; in the cache rank {', '.join(by_subsets)}")
        selector = made(registered.item, named, parameters)
        not_default = tuple(changed(registered.item, selector).items())
        return cls(base, not_default, RankedIn.parse(where) if slash else AS_TEXT)

    def __str__(self) -> str:
        text = ":".join([self.base, *written(dict(self.parameters))])
        if self.ranked_in != AS_TEXT:
            text += f"/{self.ranked_in}"
        if self.screen is not None:
            text += f"@{self.screen}"
        if self.other_near:
            text += OTHER_NEAR
        return text

    @property
    def registered(self) -> Registered:
        """What holds of all selectors of its base."""
        return SELECTORS[self.base]

    @property
    def _ranking(self) -> list[SelectorName]:
        """The selectors that rank tokens: itself, and who proposes for it."""
        return [self] if self.screen is None else [self, self.screen.proposer]

    @property
    def reads_subsequences(self) -> bool:
        """Whether it, or who proposes for it, drops tokens from a text that is read, or hides them as if dropped."""
        for name in self._ranking:
            as_text = name.registered.by_subsets and name.ranked_in.level == "text"
            if as_text or name.registered.hides_tokens:
                return True
        return False

    @property
    def ranks_in_cache(self) -> bool:
        """Whether it, or who proposes for it, leaves keys and values out of the cache."""
        return any(name.ranked_in.level == "cache" for name in self._ranking)

    @property
    def chooses_by_head(self) -> bool:
        """Whether it, or who proposes for it, ranks the tokens of every head of keys."""
        return any(name.registered.chooses_by_head for name in self._ranking)

    @property
    def changes_embeddings(self) -> bool:
        """Whether it, or who proposes for it, reads embeddings in the place of tokens."""
        return any(name.registered.changes_embeddings for name in self._ranking)

    def check_candidates(self, *, k_max: int, n_far: int) -> None:
        """Raise `UserError` where it is to rank more tokens, of F far ones, than it has candidates.

        A screened form has those that were proposed, of which there are at most F without the sinks of both.
        """
        sinks = self.ranked_in.sinks
        candidates = n_far - sinks
        if k_max > candidates:
            raise UserError(
                f"{self}: {sinks} of the {n_far} far tokens are sinks, so that k = {k_max} cannot be chosen; lower k"
            )
        if self.screen is None:
            return
        candidates = min(candidates, n_far - self.screen.proposer.ranked_in.sinks)
        if not k_max <= self.screen.count <= candidates:
            raise UserError(
                f"{self}: m = {self.screen.count} must be at least k = {k_max} and at most the {candidates} far tokens"
            )


@dataclass(frozen=True)
class Screen:
    """Who proposes tokens to a selector, and how many, written PROPOSER:m, such as ``gradient:32``."""

    proposer: SelectorName
    count: int
    """m."""

    def __str__(self) -> str:
        return f"{self.proposer}:{self.count}"


def parse_names(texts: Iterable[str]) -> dict[str, SelectorName]:
    """The parsed names by what users wrote."""
    return {text: SelectorName.parse(text) for text in texts}
