"""What a selector reads and returns, and how one is registered that ranks by influences.

A *measure* says how bad a prediction is: the target's loss, for signed and absolute influence; or how far the predicted
distribution is from that of the long context, for target-blind influence, which never looks at the target.
Shapes: n blocks, m targets, N long and M short context length, F = N - M far tokens, C candidates among them, k
selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from analysis.contexts import Contexts
from analysis.policies.policy import Keep
from analysis.selectors.names import AS_TEXT, RankedIn, Screen, SelectorName
from analysis.selectors.registry import ABSOLUTE, FORMS, register

if TYPE_CHECKING:  # the names of selectors are known without torch
    from analysis.model.losses import Scorer


@dataclass(frozen=True)
class SelectorInput:
    """What a selector reads: it returns the k most influential of the candidates, for every target."""

    scorer: Scorer
    contexts: Contexts
    seed: int
    """Seed of selectors that draw."""
    k: int
    targets: np.ndarray | None = None
    """(m, 2) block and place in it of each target; None means all, block by block."""
    columns: np.ndarray | None = None
    """Candidates, (m, C) columns of the far context, ascending; None means all of it but the sinks."""
    screen: Screen | None = None
    """Who proposed them and how many; None: nobody."""
    ranked_in: RankedIn = AS_TEXT
    """Where subsets are read that rank tokens, with which sinks."""
    names: tuple[SelectorName, ...] = ()
    """Of all selectors that will run on this input: what they read off the same passes is computed once."""
    shared: dict[tuple[SelectorName, str], np.ndarray] = field(default_factory=dict)
    """What was read off such passes, (m, C) by selector and measure."""
    proposals: dict[tuple[Screen, int], np.ndarray] = field(default_factory=dict)
    """What was proposed, (m, C) columns by screen and number of sinks that are no candidates."""
    proposing: Scorer | None = None
    """Of the smaller model that proposes for screened selectors; None: ``scorer`` does."""
    other_near: SelectorInput | None = None
    """What selectors whose names are ``other_near`` read instead, with their names without it; None: nothing."""
    encode: Callable[[str], np.ndarray] | None = None
    """Token ids of a text, for policies that read a prompt; None: there is no tokenizer."""

    @property
    def target_index(self) -> np.ndarray:
        """(m, 2) block and place."""
        if self.targets is None:
            return self.contexts.all_targets
        return self.targets

    @property
    def sinks(self) -> np.ndarray:
        """The first far tokens, which every subset has and which are no candidates, (s,) columns."""
        return np.arange(self.ranked_in.sinks)

    @property
    def all_candidates(self) -> np.ndarray:
        """Columns of all far tokens but the sinks, (F - s,)."""
        return np.arange(len(self.sinks), self.contexts.n_far)

    @property
    def candidates(self) -> np.ndarray:
        """(m, C) columns of the far context, ascending: all but the sinks, or in a screened form those proposed."""
        if self.columns is not None:
            return self.columns
        open_ = self.all_candidates
        return np.broadcast_to(open_, (len(self.target_index), len(open_)))

    def with_sinks(self, chosen: np.ndarray) -> np.ndarray:
        """Subsets, (…, s + j) columns that ascend, of the sinks and of chosen candidates, (…, j)."""
        sinks = np.broadcast_to(self.sinks, (*chosen.shape[:-1], len(self.sinks)))
        return np.concatenate([sinks, np.sort(chosen, axis=-1)], axis=-1)

    def losses(self, far: np.ndarray) -> np.ndarray:
        """Losses given subsets of the far context and the short context, (m, C) nats.

        ``far``: columns, (m, C, j), or (C, j) for all targets, which takes one pass a block. Those of a subset ascend,
        and none is there twice. Raises `ValueError` for others, whose losses would be of no text.
        """
        return self.evaluate("loss", far)

    def evaluate(self, measure: str, far: np.ndarray) -> np.ndarray:
        """One of `analysis.model.losses.MEASURES` of subsets as in `losses`, (m, C)."""
        return self._measures((measure,), far)[..., 0]

    def evaluate_shared(
        self, base: str, measure: str, subsets_of: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """`evaluate` of one subset for each candidate, those of the selector ``base``, (m, C).

        What is proposed to a screened form has the same subsets in the form that is not screened. Where that one's
        values are known, or its passes will be made, a screened form reads its values there.

        Args:
            subsets_of: from candidates, (C,) or (m, C) columns, to subsets as in `losses`.
        """
        of_base = SelectorName(base, ranked_in=self.ranked_in, screen=self.screen)
        of_all = replace(of_base, screen=None)
        known = {of_measure for name, of_measure in self.shared if name == of_all}
        if self.screen is not None and (measure in known or (self._measures_of(of_all) and not known)):
            values = replace(self, columns=None, screen=None).evaluate_shared(base, measure, subsets_of)
            return np.take_along_axis(values, self.candidates - len(self.sinks), axis=1)
        if (of_base, measure) not in self.shared:
            needed = {measure} | self._measures_of(of_base)
            if self.screen is None:  # what is screened reads its measures off these passes, too
                for name in self.names:
                    needed |= self._measures_of(replace(of_base, screen=name.screen))
            measures = sorted(needed)
            candidates = self.all_candidates if self.columns is None else self.columns
            values = self._measures(measures, subsets_of(candidates))
            for column, of_column in enumerate(measures):
                self.shared[of_base, of_column] = values[..., column]
        return self.shared[of_base, measure]

    def _measures_of(self, of_base: SelectorName) -> set[str]:
        """The measures of those `FORMS` of a selector that are among ``names``."""
        return {
            measure
            for form, (_, measure) in FORMS.items()
            if replace(of_base, base=of_base.base + form) in self.names
        }

    def _measures(self, names: Sequence[str], far: np.ndarray) -> np.ndarray:
        """Measures of subsets as in `losses`, (m, C, number of names)."""
        self._check_subsets(far)
        if self.ranked_in.level == "text":
            return self.scorer.measures(self.contexts, far, names, self.target_index)
        from analysis.model import far_cache  # the names of selectors are known without torch

        masks = far_cache.subset_masks(far, self.contexts.n_far)
        return far_cache.measures(self.scorer, self.contexts, masks, names, self.target_index)

    def _check_subsets(self, far: np.ndarray) -> None:
        """Raise `ValueError` where a subset is no ascending columns of the far context."""
        if far.size and (far.min() < 0 or far.max() >= self.contexts.n_far):
            raise ValueError(f"a far column is not in 0 … {self.contexts.n_far - 1}")
        if (np.diff(far, axis=-1) <= 0).any():
            raise ValueError(
                "the columns of a subset must ascend, each once: sort them, and drop what is there twice"
            )

    def at_candidates(self, values: np.ndarray) -> np.ndarray:
        """Values of the far tokens, (m, F), at the candidates, (m, C)."""
        return np.take_along_axis(values, self.candidates, axis=1)


@dataclass(frozen=True)
class Selection:
    """S_k of every target, most influential first."""

    columns: np.ndarray
    """(m, k) columns of the far context."""
    influence: np.ndarray
    """(m, k) influence of each in the selector's unit: nats, a share of probability or attention, or a norm."""
    scores: np.ndarray | None = None
    """(m, F) influence of every far token, NaN where the selector gives it none; None of a sequential one (`greedy`),
    whose influence is that of a token given those before it."""
    by_head: np.ndarray | None = None
    """(m, G, F) the same for every head of keys, layer after layer, of a policy that keeps other tokens in each."""
    keep: Keep | None = None
    """Which keys are kept by ``by_head``, where heads keep unequal numbers; None: the first k of every head."""


Selector = Callable[[SelectorInput], Selection]
Influence = Callable[[SelectorInput], np.ndarray]
"""From these inputs to the influence of every candidate, (m, C)."""
InfluenceBy = Callable[[SelectorInput, str], np.ndarray]
"""The same by a measure."""
_Influence = TypeVar("_Influence", bound=Influence)


def register_influence(
    name: str, family: str, *, method: str = "", **flags: bool
) -> Callable[[_Influence], _Influence]:
    """Make the selector available by name that takes the candidates of largest influence; see `register`."""

    def add(influence: _Influence) -> _Influence:
        @wraps(influence)  # which says where it was defined
        def choose(inputs: SelectorInput) -> Selection:
            return most_influential(inputs, influence(inputs))

        register(name, family, method=method, **flags)(choose)
        return influence

    return add


def register_forms(base: str) -> Callable[[InfluenceBy], InfluenceBy]:
    """Make the `FORMS` available of an influence by a measure: ``base`` by the target's loss, ``base-kl`` and so on."""

    def add(influence: InfluenceBy) -> InfluenceBy:
        for form, (family, measure) in FORMS.items():
            change = np.abs if family == ABSOLUTE else np.asarray

            @wraps(influence)
            def of_form(
                inputs: SelectorInput, measure: str = measure, change: Callable[..., np.ndarray] = change
            ) -> np.ndarray:
                return change(influence(inputs, measure))

            register_influence(base + form, family, method=base, by_subsets=True)(of_form)
        return influence

    return add


def most_influential(inputs: SelectorInput, influence: np.ndarray) -> Selection:
    """The k candidates of largest influence (m, C); equal influences keep the order of the text."""
    candidates = inputs.candidates
    order = np.argsort(-influence, axis=1, kind="stable")[:, : inputs.k]
    columns = np.take_along_axis(candidates, order, axis=1)
    finite = np.where(np.isfinite(influence), influence, np.nan)
    scores = np.full((len(influence), inputs.contexts.n_far), np.nan)
    np.put_along_axis(scores, candidates, finite, axis=1)
    return Selection(columns, np.take_along_axis(influence, order, axis=1), scores)
