"""One block judged: what every contender keeps after one choice, and what the targets behind it lose by that.

A policy chooses before the first target, and sees no token of it or behind it. Then all targets are read with what is
left (`analysis.cache_eviction.reading`). References see the targets.
Shapes: one block of B targets, G heads of keys in all layers, F far tokens, C choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.cache_eviction.agreement import kept_overlap, rank_correlation
from analysis.cache_eviction.contenders import Contender, Contest
from analysis.cache_eviction.reading import BlockReading
from analysis.cache_eviction.record import AWARE, BLIND, FULL, NONE, SINKS
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD, NEARS
from analysis.contexts import Contexts
from analysis.model.far_cache import subset_masks
from analysis.model.losses import Scorer
from analysis.policies.policy import Keep, first_of_each_head
from analysis.policies.seen import Seen
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

EXACT = "leave-one-out-kl"
"""The reference whose scores are the exact effects of single keys."""
LOSS_COLUMNS = ("place", "policy", "near", "budget", "keys", "loss_nats", "kl_nats")
CHOICE_COLUMNS = ("policy", "sees", "near", "budget", "keys", "spearman", "overlap")


@dataclass(frozen=True)
class Choice:
    """What one contender keeps at every budget."""

    contender: Contender
    scores: list[np.ndarray]
    """(F,) or (G, F) of every budget: the same at all, but of a policy that looks at the budget."""
    kept: list[np.ndarray]
    """(F,) or (G, F) bool of every budget; of the smallest ones, where a reference ranks for these alone."""


@dataclass(frozen=True)
class Judged:
    """The two frames of a block."""

    losses: pd.DataFrame
    """A row for each target, contender (or `FULL`, `SINKS`, `NONE`), way of the near tokens and budget: `LOSS_COLUMNS`,
    of which ``place`` is the target's place in the block."""
    choices: pd.DataFrame
    """A row for each contender, way of the near tokens and budget: `CHOICE_COLUMNS`."""

    def loss_nats(self, policy: str) -> np.ndarray:
        """Loss of all targets with one of the caches beside those of contenders, near tokens read again, (B,)."""
        losses = self.losses
        rows = losses[(losses["policy"] == policy) & (losses["near"] == NEAR_REREAD)]
        return rows["loss_nats"].to_numpy()


@dataclass(frozen=True)
class BlockJudge:
    """Judges contenders, block by block."""

    scorer: Scorer
    contest: Contest
    encode: Callable[[str], np.ndarray] | None = None
    """Token ids of a text, for policies that read a prompt."""
    kept_sets: bool = False
    """Whether choices say which far keys are kept."""
    tried: Mapping[bytes, list[Choice]] = field(default_factory=dict)
    """What the policies chose on a trial (`of_those_that_can`), by its block."""

    def __post_init__(self) -> None:
        if not self.scorer.model.shares_far_keys:
            raise UserError(
                "this model reads copies of far keys, so that its heads cannot keep tokens of their own as policies "
                "have them do; give another model, such as a Llama, Qwen, Gemma or OLMo"
            )

    @cached_property
    def nears(self) -> list[str]:
        """The ways of the near tokens, of those that are asked for: they are kept where a policy has seen them, or only
        references choose."""
        sees = [contender.sees for contender in self.contest.policies]
        if AWARE not in sees and BLIND in sees:
            return [NEAR_REREAD]
        return [near for near in NEARS if near in self.contest.near]

    def tokens(self, contexts: Contexts, effects_known: bool = False) -> int:
        """About how many tokens are read for one block; ``effects_known``: as those of `judge` are, of all targets."""
        behind = contexts.targets_per_block - 1
        read = len(self.contest.policies) * contexts.n_long
        for near in self.nears:
            length = behind + (1 if near == NEAR_KEPT else contexts.n_short)
            judged = [contender for contender in self.contest.policies if near in _nears_of(contender)]
            read += len(self.contest.budgets) * (len(judged) + len(self.contest.references)) * length
            for contender in self.contest.references:
                assert contender.reference is not None
                rows_of_key = _ROWS_OF_A_KEY.get(contender.name.partition(":")[0], 1)
                if effects_known and near == NEAR_REREAD:
                    rows_of_key = max(0, rows_of_key - 1)
                first = contender.reference.first
                unread = 0 if first is None else max(0, contexts.targets_per_block - first)
                read += rows_of_key * contexts.n_far * (length - unread)
        return read

    def judge(
        self,
        contexts: Contexts,
        places: np.ndarray | None = None,
        effects_nats: np.ndarray | None = None,
    ) -> Judged:
        """``contexts``: of one block; ``places`` in it of the targets that references rank by, (m,), by default all.

        ``effects_nats``: see `BlockReading`, where they are known.
        """
        losses = []
        choices = []
        with self.scorer.keeping_far():
            of_policies = self._chosen(contexts)
            if NEAR_REREAD not in self.nears:  # a gain is over the near tokens alone, which are read again
                again = BlockReading.of(self.scorer, contexts, NEAR_REREAD)
                losses.append(self._losses(again, []).assign(near=NEAR_REREAD))
            for near in self.nears:
                reading = BlockReading.of(self.scorer, contexts, near, effects_nats)
                of_references = [
                    self._rank(reference, reading, places) for reference in self.contest.references
                ]
                judged = [one for one in of_policies if near in _nears_of(one.contender)]
                judged += of_references
                losses.append(self._losses(reading, judged).assign(near=near))
                choices.append(self._agreement(judged, of_references).assign(near=near))
        columns = list(CHOICE_COLUMNS)
        if self.kept_sets:
            columns.append("kept_share")
        return Judged(pd.concat(losses)[list(LOSS_COLUMNS)], pd.concat(choices)[columns])

    def of_those_that_can(self, contexts: Contexts, *, leave_out: bool) -> BlockJudge:
        """The judge of those policies that the model has what they look at for, as a trial on one block shows.

        ``leave_out``: others are left out with a warning; without it they raise `UserError`.
        """
        seen = self._seen(contexts)
        choices = []
        with self.scorer.keeping_far():
            for policy in self.contest.policies:
                try:
                    choices.append(self._choose(policy, seen))
                except UserError as error:
                    if not leave_out:
                        raise
                    log.warning("%s is left out: %s", policy.name, error)
        policies = [choice.contender for choice in choices]
        return replace(
            self,
            contest=replace(self.contest, policies=policies),
            tried={_name_of(contexts): choices},
        )

    # --- what is kept ---

    def _chosen(self, contexts: Contexts) -> list[Choice]:
        """The choices of all policies and controls."""
        tried = self.tried.get(_name_of(contexts))
        if tried is not None:
            self.scorer.on_read(len(tried) * contexts.n_long)
            return tried
        seen = self._seen(contexts)
        choices = []
        for policy in self.contest.policies:
            choices.append(self._choose(policy, seen))
            self.scorer.on_read(contexts.n_long)
        return choices

    def _seen(self, contexts: Contexts) -> dict[bool, Seen]:
        """What aware policies see of a block before its first target, and what blind ones do, read once for all."""
        before = Contexts(
            contexts.tokens[:, : contexts.n_long],
            contexts.targets[:, :1],
            contexts.target_id[:, :1],
            contexts.n_short,
        )
        return {
            blind: Seen.of(self.scorer, before, blind=blind, encode=self.encode) for blind in (False, True)
        }

    def _choose(self, contender: Contender, seen: Mapping[bool, Seen]) -> Choice:
        """The choice of a policy or control; ``seen``: by whether it is blind."""
        try:
            return self._choice_of(contender, seen)
        except Exception as error:
            error.add_note(f"in the eviction policy {contender.name}")
            raise

    def _choice_of(self, contender: Contender, seen: Mapping[bool, Seen]) -> Choice:
        """See `_choose`."""
        assert contender.policy is not None
        of_policy = seen[contender.policy.blind]
        keep = contender.policy.keeping(of_policy)
        shape = (1, sum(of_policy.key_heads), of_policy.n_far)
        scores = [
            checked_scores(contender.name, of_budget, shape)[0]
            for of_budget in contender.policy.scores_at(of_policy, self.contest.keys)
        ]
        kept = [
            self._keep(contender.name, keep, of_budget, count)
            for of_budget, count in zip(scores, self.contest.keys, strict=True)
        ]
        return Choice(contender, scores, kept)

    def _rank(self, contender: Contender, reading: BlockReading, places: np.ndarray | None) -> Choice:
        """The choice of a reference, at the budgets that it ranks for."""
        reference = contender.reference
        assert reference is not None
        if places is not None and reference.first is not None and not (places < reference.first).any():
            places = None  # special tokens are all that it may rank by here
        scores = reference.scores(reading, self.contest.sinks, places)
        most = reference.most_keys
        kept = []
        for count in self.contest.keys:
            if most is None or count <= most:
                kept.append(self._keep(contender.name, first_of_each_head, np.atleast_2d(scores), count))
        return Choice(contender, [scores] * len(kept), kept)

    def _keep(self, name: str, keep: Keep, scores: np.ndarray, count: int) -> np.ndarray:
        """Which far keys of scores (G, F) are left, the sinks and ``count`` in the mean: (G, F) or, if alike, (F,)."""
        beyond = count - self.contest.sinks
        kept = np.ones(scores.shape, dtype=bool)
        candidates = scores[:, self.contest.sinks :]
        chosen = np.asarray(keep(candidates[None], beyond)[0])
        if chosen.shape != candidates.shape:
            raise UserError(
                f"{name}: keeping() gives {chosen.shape}, not which of {candidates.shape} keys are kept; leave it out, "
                "or mend its keeping()"
            )
        kept[:, self.contest.sinks :] = with_total(name, chosen, candidates, beyond)
        if (kept == kept[0]).all():
            return kept[0]
        return kept

    # --- what that does ---

    def _losses(self, reading: BlockReading, choices: Sequence[Choice]) -> pd.DataFrame:
        """Loss of all targets, and KL to the full cache, after every choice."""
        rows = list(self._caches(reading))
        for choice in choices:
            for place, kept in enumerate(choice.kept):
                rows.append(
                    (choice.contender.name, self.contest.budgets[place], self.contest.keys[place], kept)
                )
        alike = [row for row in rows if row[-1].ndim == 1]
        by_head = [row for row in rows if row[-1].ndim == 2]
        frames = []
        for some in (alike, by_head):
            if not some:
                continue
            distinct, places = _distinct([kept for *_, kept in some])
            measured = reading.measures(distinct, ("loss", "kl"))
            for (name, budget, count, _), place in zip(some, places, strict=True):
                losses, divergences = measured[:, place].T
                of_targets = {
                    "place": np.arange(len(losses)),
                    "policy": name,
                    "budget": budget,
                    "keys": count,
                    "loss_nats": losses.astype(np.float32),
                    "kl_nats": divergences.astype(np.float32),
                }
                frames.append(pd.DataFrame(of_targets))
        return pd.concat(frames)

    def _caches(self, reading: BlockReading) -> Iterator[tuple[str, float, int, np.ndarray]]:
        """`FULL`, `NONE` and, where there are any, `SINKS`: name, share of the far keys, their number, and which."""
        n_far = reading.n_far
        for name, count in ((FULL, n_far), (NONE, 0), (SINKS, self.contest.sinks)):
            if name == SINKS and not count:
                continue
            yield name, count / n_far, count, subset_masks(np.arange(count), n_far)

    def _agreement(self, choices: Sequence[Choice], references: Sequence[Choice]) -> pd.DataFrame:
        """Rank correlation of scores with the exact effects, and overlap with the set of the first reference."""
        exact = [one.scores[0] for one in references if one.contender.name.partition(":")[0] == EXACT]
        sets_of_first = references[0].kept if references else []
        rows = []
        for choice in choices:
            for place, kept in enumerate(choice.kept):
                row = {
                    "policy": choice.contender.name,
                    "sees": choice.contender.sees,
                    "budget": self.contest.budgets[place],
                    "keys": self.contest.keys[place],
                    "spearman": np.nan,
                    "overlap": np.nan,
                }
                if exact:
                    row["spearman"] = rank_correlation(choice.scores[place], exact[0], self.contest.sinks)
                if place < len(sets_of_first):
                    row["overlap"] = kept_overlap(kept, sets_of_first[place], self.contest.sinks)
                if self.kept_sets:
                    row["kept_share"] = np.atleast_2d(kept).mean(axis=0).astype(np.float32)
                rows.append(row)
        return pd.DataFrame(rows).astype({"spearman": np.float32, "overlap": np.float32})


_ROWS_OF_A_KEY = {"halving-kl": 2, "greedy-kl": 16, "presence-gradient": 0}
"""How often a reference reads the near tokens for each far key, for the time left; others once. One time is the exact
effect of single keys."""


def _name_of(contexts: Contexts) -> bytes:
    """What one block has that no other has."""
    return contexts.tokens.tobytes() + contexts.target_id.tobytes()


def _nears_of(contender: Contender) -> tuple[str, ...]:
    """The ways of the near tokens behind a choice: one that saw the far context alone has them read again."""
    return (NEAR_REREAD,) if contender.sees == BLIND else (NEAR_KEPT, NEAR_REREAD)


def _distinct(choices: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """The choices without repeats, and which of these every choice is: equal ones are read once, and are equal then."""
    numbers: dict[bytes, int] = {}
    distinct: list[np.ndarray] = []
    places: list[int] = []
    for kept in choices:
        key = np.packbits(kept).tobytes()
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(kept)
        places.append(numbers[key])
    return np.stack(distinct), places


def checked_scores(name: str, scores: Any, shape: tuple[int, ...]) -> np.ndarray:
    """What a policy gives as scores, as floats of this shape. Raises `UserError` where they are no such numbers."""
    given = np.asarray(scores)
    if given.shape != shape:
        raise UserError(
            f"{name}: scores() gives {given.shape}, not {shape}, a score for every choice, head of keys and far token; "
            "leave it out, or mend its scores()"
        )
    if np.iscomplexobj(given):
        raise UserError(f"{name}: scores() gives complex numbers, which have no order; mend its scores()")
    numbers = given.astype(np.float64)  # unsigned and yes-or-no scores have no order from the highest
    undefined = np.count_nonzero(np.isnan(numbers))
    if undefined:
        raise UserError(
            f"{name}: scores() gives NaN, which has no rank, for {undefined:,} of {numbers.size:,} keys; leave it out, "
            "or mend its scores()"
        )
    return numbers


def with_total(name: str, kept: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """The kept keys, (G, F), ``count`` a head in the mean to the last key.

    A press may share out a budget up to rounding. Then heads that keep the most give up those of their lowest scores,
    or those that keep the fewest get more. Raises `UserError` where more is amiss than rounding.
    """
    heads = len(kept)
    missing = count * heads - int(kept.sum())
    if not missing:
        return kept
    if abs(missing) > heads:
        raise UserError(
            f"{name} keeps {kept.sum() / heads:.1f} keys a head where {count} are asked for; leave it out, or mend its "
            "keeping()"
        )
    order = np.argsort(-scores, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable").ravel()
    changed = kept.ravel().copy()
    if missing > 0:
        dropped = np.flatnonzero(~changed)
        changed[dropped[np.argsort(rank[dropped], kind="stable")[:missing]]] = True
    else:
        left = np.flatnonzero(changed)
        changed[left[np.argsort(-rank[left], kind="stable")[:-missing]]] = False
    return changed.reshape(kept.shape)
