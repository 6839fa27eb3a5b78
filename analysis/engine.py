"""How much the far context helps a model on a batch of targets, and how much of that k influential far tokens recover.

The losses of targets are measured in batches of whole blocks, and tokens are chosen a block at a time;
`analysis.runner` says which, and keeps what is finished. Each forward pass is the same whatever came before it, so that
a measurement that was interrupted or shared is that of one run to the last bit.
Shapes: n targets in blocks of B, m of them over tau, N long and M short context length, F = N - M far tokens, K values
of k, k_max the largest of them. Losses are nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import (
    NO_FAR,
    OTHER_TARGET,
    PLACEBO,
    SAME_GROUP,
    SHUFFLED,
    Contexts,
    blocks_of,
    placebo_column,
    placebo_contexts,
    shuffled_contexts,
    stretches,
)
from analysis.faithfulness import Faithfulness, measured_lengths
from analysis.kept import KeptAs, word_numbers
from analysis.measurement import SELECTION, rounded
from analysis.model import far_cache
from analysis.model.losses import Scorer, long_and_short_losses
from analysis.model.tokenizer import TextDecoder
from analysis.options import tokens_to_rank
from analysis.parquet import empty_frame, stacked
from analysis.selectors import Selection, SelectorInput, SelectorName, selector_of
from analysis.selectors.names import parse_names
from analysis.settings import Settings
from analysis.texts import Texts
from analysis.token_kinds import TOKENS_AFTER, kinds_of

ELSEWHERE = {PLACEBO: "placebo", SAME_GROUP: "same_group"}
"""Far contexts that are read in another place: how the columns of the targets that say where begin."""
TARGETS_PER_BATCH = 64
"""Targets of a batch, in whole blocks. A batch of another size could differ in the last bits of a loss."""
TARGETS_PER_ROUND = 4
"""Targets over tau that selectors choose for at once where B = 1; otherwise those of one block."""
CHOICE_COLUMNS = (
    "target_id", *SELECTION, "selected", "influence", "loss_nats", "loss_base_nats", "tokens_read", "tokens_kept"
)  # fmt: skip
SCORE_COLUMNS = ("target_id", "selector", "far_context", "influence")
TEXT_COLUMNS = ("block", "text", "first_position", "pieces")
"""Columns of the frames of a `Result` where no target is over tau."""


def targets_per_batch(targets_per_block: int) -> int:
    """`TARGETS_PER_BATCH` in whole blocks."""
    return targets_per_block * max(1, TARGETS_PER_BATCH // targets_per_block)


@dataclass
class Engine:
    """Measures targets, given as rows of a frame: ``target_id, text, position``, and the places of their placebos.

    Targets whose ids have the same quotient by B are one block, and the remainder is the place in it.
    """

    settings: Settings
    texts: Texts
    decoder: TextDecoder
    scorer: Scorer
    """Computes L_long, L_short and L_k."""
    selecting: Scorer
    """Chooses tokens: the same one, or, cross-fitted, that of another model."""
    proposing: Scorer | None = None
    """Of a smaller model that proposes for screened selectors; None: ``selecting`` does."""
    encode: Callable[[str], np.ndarray] | None = None
    """Token ids of a text, for policies that read a prompt."""
    check_losses: Callable[[np.ndarray], Any] = lambda losses: None
    """Is given L_long of the first batch."""

    def __post_init__(self) -> None:
        self.lengths = self.settings.contexts
        self.choice_settings = self.settings.choices
        self.size = self.lengths.targets_per_block
        self.selectors = parse_names(self.choice_settings.selectors)
        self.keep_as = [KeptAs.parse(text) for text in self.choice_settings.keep_as]
        self.is_checked = False
        self.faithfulness: Faithfulness | None = None
        if self.choice_settings.faithfulness:
            self.faithfulness = Faithfulness(self.scorer, self.choice_settings.ks, self.lengths.seed)

    def on_read(self, read: Callable[[int], None]) -> None:
        """``read`` is told how many tokens a model has read, after every forward pass."""
        for scorer in (self.scorer, self.selecting, self.proposing):
            if scorer is not None:
                scorer.on_read = read

    def with_losses(self, sampled: pd.DataFrame, known: pd.DataFrame | None = None) -> pd.DataFrame:
        """The sampled targets of one batch as the frame `targets` of a `Result`, which `rounds` divides.

        ``known``: the same targets, measured before with another tau.
        """
        targets = self._measured(sampled) if known is None else self._with_tau(sampled, known)
        if not self.is_checked:
            self.is_checked = True
            self.check_losses(targets["loss_long_nats"].to_numpy())
        return targets

    def rounds(self, targets: pd.DataFrame) -> list[pd.DataFrame]:
        """The targets of a batch, divided into those that selectors choose for at once: blocks.

        Blocks of one target go together, with `TARGETS_PER_ROUND` over tau: of targets 0 to 9, of which 1, 3, 4, 6 and
        8 are over tau, the first round has 0 to 7 and the second 8 and 9.
        """
        target_id = targets["target_id"].to_numpy()
        round_index = target_id // self.size
        if self.size == 1:
            over = np.cumsum(targets["over_tau"].to_numpy())
            round_index = np.maximum(over - 1, 0) // TARGETS_PER_ROUND
        return [of_round for _, of_round in targets.groupby(round_index)]

    def choose(self, targets: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """The other frames of a `Result`, by name, of the targets of one round: what is chosen, and its losses."""
        with self.scorer.keeping_far():
            return self._choose(targets)

    def _choose(self, targets: pd.DataFrame) -> dict[str, pd.DataFrame]:
        effects = self._effects(targets) if self.choice_settings.effects else None
        frames = {"choices": empty_frame(CHOICE_COLUMNS)}
        if self.selectors:
            frames = self._chosen(targets, effects)
        if effects is not None:
            columns = {"kl_nats": effects["kl"], "loss_change_nats": effects["loss"] - effects["loss_long"]}
            columns = {name: values.astype(np.float32) for name, values in columns.items()}
            frames["effects"] = _rows({"target_id": targets["target_id"]}, columns)
        return frames

    def _chosen(
        self, targets: pd.DataFrame, effects: dict[str, np.ndarray] | None
    ) -> dict[str, pd.DataFrame]:
        """The frames of what selectors choose, by name; ``effects``: those of the same targets, where known."""
        over = targets[targets["over_tau"]]
        choices = [empty_frame(CHOICE_COLUMNS)]
        scores = [empty_frame(SCORE_COLUMNS)]
        following = next_in_block(over["target_id"].to_numpy() // self.size)
        chosen_of_true: dict[str, Selection] = {}
        for far_context in self.choice_settings.far_contexts:
            there = self._has_far_context(over, far_context)
            if far_context == OTHER_TARGET:
                there = following != np.arange(len(over))
            targets_there = over[there]
            if targets_there.empty:
                continue
            contexts, index = self._contexts(targets_there, far_context)
            if far_context == OTHER_TARGET:
                chosen = {name: _of_rows(one, following[there]) for name, one in chosen_of_true.items()}
                choices += self._choice_rows(targets_there, far_context, contexts, index, chosen, {})
                continue
            known = {}
            if effects is not None and far_context == "true" and self.selecting is self.scorer:
                known = self._passes_of(effects, targets_there)
            chosen = self._select(contexts, index, self._other_near(targets_there, contexts), known)
            if far_context == "true":
                chosen_of_true = chosen
            further = self.faithfulness.of_choices(contexts, index, chosen) if self.faithfulness else {}
            choices += self._choice_rows(targets_there, far_context, contexts, index, chosen, further)
            for name, choice in chosen.items():
                if choice.scores is not None:
                    keys = {
                        "target_id": targets_there["target_id"],
                        "selector": name,
                        "far_context": far_context,
                    }
                    scores.append(_rows(keys, {"influence": choice.scores.astype(np.float32)}))
        frames = {"choices": stacked(choices), "texts": self._texts(over)}
        if self.choice_settings.scores:
            frames["scores"] = stacked(scores)
        return frames

    def _effects(self, targets: pd.DataFrame) -> dict[str, np.ndarray]:
        """What is predicted of all targets of a round without each far key and value: ``kl`` and ``loss``, (m, F) nats.

        ``loss_long``, (m, 1), is the loss with all of them, by the same passes; ``target_id``, (m,).
        """
        contexts, index = self._contexts(targets)
        n_far = contexts.n_far
        all_but_one = ~np.eye(n_far, dtype=bool)
        visible = np.concatenate([all_but_one, np.ones((1, n_far), dtype=bool)])
        values = far_cache.measures(self.scorer, contexts, visible, ("kl", "loss"), index)
        kl, losses = np.moveaxis(values, 2, 0)
        target_id = targets["target_id"].to_numpy()
        return {"target_id": target_id, "kl": kl[:, :-1], "loss": losses[:, :-1], "loss_long": losses[:, -1:]}

    def _passes_of(
        self, effects: dict[str, np.ndarray], targets: pd.DataFrame
    ) -> dict[tuple[SelectorName, str], np.ndarray]:
        """`SelectorInput.shared` of leaving one out in the cache, for some of the targets whose effects are known."""
        rows = np.isin(effects["target_id"], targets["target_id"])
        shared = {}
        for name in self.selectors.values():
            where = name.ranked_in
            if where.level == "cache":
                of_one = SelectorName("leave-one-out", ranked_in=where)
                for measure in ("kl", "loss"):
                    shared[of_one, measure] = effects[measure][rows, where.sinks :]
        return shared

    def _with_tau(self, sampled: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
        """What `_measured` gives, with losses that were measured before."""
        columns = {name: known[name].to_numpy() for name in known if name not in sampled}
        gain = columns.get("selecting_gain_nats", known["loss_short_nats"] - known["loss_long_nats"])
        columns["over_tau"] = np.asarray(gain) > self.choice_settings.tau_nats
        return sampled.assign(**columns)

    def _measured(self, sampled: pd.DataFrame) -> pd.DataFrame:
        """The same rows with L_long and L_short, whether they are over tau, and their kinds of dependency."""
        contexts, index = self._contexts(sampled)
        long, short = map(rounded, long_and_short_losses(self.scorer, contexts, index))
        columns = {
            "token": contexts.targets[tuple(index.T)].astype(np.int32),
            "loss_long_nats": long,
            "loss_short_nats": short,
        }
        gain = short - long
        selected_by = self.settings.selected_by
        if selected_by is not None and not selected_by.untrained:  # untrained weights gain nothing
            long, short = map(rounded, long_and_short_losses(self.selecting, contexts, index))
            gain = rounded(short - long)
            columns["selecting_gain_nats"] = gain
        kinds = kinds_of(sampled, self.texts, self.decoder, self.lengths)
        columns |= {"over_tau": gain > self.choice_settings.tau_nats, "kind": kinds}
        columns |= self._placebo_losses(sampled)
        if self.faithfulness:
            further = self.faithfulness.of_targets(contexts, index)
            columns |= {name: rounded(losses) for name, losses in further.items()}
        columns |= self._losses_by_length(sampled, contexts, index)
        return sampled.assign(**columns)

    def _placebo_losses(self, sampled: pd.DataFrame) -> dict[str, np.ndarray]:
        """The loss given the long context with each placebo in place of the far one, (m,) nats, by column.

        NaN of targets that have no such placebo.
        """
        columns = {}
        for far_context in self.choice_settings.far_contexts:
            if far_context in ("true", OTHER_TARGET):
                continue
            there = self._has_far_context(sampled, far_context)
            losses = np.full(len(sampled), np.nan)
            if there.any():
                contexts, index = self._contexts(sampled[there], far_context)
                losses[there] = rounded(self.scorer.losses(contexts, contexts.all_far, index)[:, 0])
            columns[placebo_column(far_context)] = losses
        return columns

    def _losses_by_length(
        self, sampled: pd.DataFrame, contexts: Contexts, index: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The losses given contexts of other lengths, (m,) nats, by column (docs/method.md, 2.1b).

        Of a length beyond the long context there is L_short at the ids of that length, too.
        """
        columns = {}
        for length in measured_lengths(self.lengths, faithfulness=self.faithfulness is not None):
            if length <= self.lengths.n_context:
                # in a block target b is given n + b tokens, as its short context has M + b
                last = replace(contexts, n_short=length)
                columns[f"loss_of_{length}_nats"] = rounded(self.scorer.losses(last, NO_FAR, index)[:, 0])
            else:
                longer, _ = self._contexts(sampled, n_long=length)
                long, short = map(rounded, long_and_short_losses(self.scorer, longer, index))
                columns |= {f"loss_of_{length}_nats": long, f"loss_short_at_{length}_nats": short}
        return columns

    def _has_far_context(self, targets: pd.DataFrame, far_context: str) -> np.ndarray:
        """Whether each target has a far context that is read in another place, (m,) bool; any other it has."""
        if far_context not in ELSEWHERE:
            return np.ones(len(targets), dtype=bool)
        return targets[f"{ELSEWHERE[far_context]}_start"].to_numpy() >= 0

    def _other_near(self, targets: pd.DataFrame, contexts: Contexts) -> Contexts | None:
        """The contexts that selectors of ``other_near`` read, with the end of the placebo; None: none is measured."""
        if not any(name.other_near for name in self.selectors.values()):
            return None
        placebo, _ = self._contexts(targets, PLACEBO)
        return contexts.with_other_near(placebo.tokens[:, : contexts.n_far])

    def _select(
        self,
        contexts: Contexts,
        index: np.ndarray,
        other_near: Contexts | None,
        known: dict[tuple[SelectorName, str], np.ndarray],
    ) -> dict[str, Selection]:
        """What every selector chooses, by its name as it was written.

        ``other_near``: `_other_near` of the same targets; ``known``: passes that were made, `SelectorInput.shared`.
        """
        inputs = SelectorInput(
            self.selecting,
            contexts,
            self.lengths.seed,
            self.choice_settings.k_max,
            targets=index,
            names=tuple(self.selectors.values()),
            proposing=self.proposing,
            shared=known,
            encode=self.encode,
        )
        if other_near is not None:
            names = tuple(replace(name, other_near=False) for name in inputs.names if name.other_near)
            of_other_near = replace(inputs, contexts=other_near, names=names, shared={}, proposals={})
            inputs = replace(inputs, other_near=of_other_near)
        chosen = {}
        for text, name in self.selectors.items():
            count = tokens_to_rank(name, self.keep_as, inputs.k, self.lengths.n_far)
            chosen[text] = selector_of(name)(replace(inputs, k=count))
        return chosen

    def _choice_rows(
        self,
        targets: pd.DataFrame,
        far_context: str,
        contexts: Contexts,
        index: np.ndarray,
        chosen: Mapping[str, Selection],
        further: Mapping[str, dict[str, np.ndarray]],
    ) -> list[pd.DataFrame]:
        """Rows of `Result.choices` of what was ``chosen`` for some targets, by selector, kept in every way.

        ``further``: what faithfulness adds, by selector.
        """
        words = self._words(contexts)[index[:, 0]]
        bases = self._base_losses(targets, contexts, index)
        rows = []
        for name, choice in chosen.items():
            keys = {"target_id": targets["target_id"], "selector": name, "far_context": far_context}
            for kept_as in self.keep_as:
                columns = self._kept_columns(kept_as, choice, contexts, index, words)
                columns["loss_base_nats"] = bases[kept_as]
                if kept_as == KeptAs():
                    columns |= _rounded_nats(further.get(name, {}))
                rows.append(_rows(keys | kept_as.columns, columns))
        return rows

    def _kept_columns(
        self, kept_as: KeptAs, choice: Selection, contexts: Contexts, index: np.ndarray, words: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Columns of `Result.choices` of one choice kept in one way."""
        ks = self.choice_settings.ks
        first = kept_as.first(choice, words, ks[-1])
        if choice.scores is None:
            rank = (choice.columns[:, None] == first[:, :, None]).argmax(axis=-1)
            influence = np.take_along_axis(choice.influence, rank, axis=1)
        else:
            influence = np.take_along_axis(choice.scores, first, axis=1)
        seed = self.lengths.seed
        losses = kept_as.losses(self.scorer, contexts, index, choice, words, ks, seed)
        read, kept = kept_as.token_counts(contexts, index, choice, words, ks, seed)
        columns = {
            "selected": first.astype(np.int32),
            "influence": influence.astype(np.float32),
            "loss_nats": rounded(losses),
            "tokens_read": read.astype(np.int32),
            "tokens_kept": kept.astype(np.int32),
        }
        if self.settings.texts.special_tokens:
            columns["selected_special"] = self.texts.is_special(contexts.tokens[index[:, :1], first])
        return columns

    def _base_losses(
        self, targets: pd.DataFrame, contexts: Contexts, index: np.ndarray
    ) -> dict[KeptAs, np.ndarray]:
        """Loss of the targets given the sinks alone and the short context, (m,) nats, by the way of keeping."""
        # without sinks it is L_short, which is measured
        measured = {(False, 0): targets["loss_short_nats"].to_numpy()}
        bases = {}
        for kept_as in self.keep_as:
            key = (kept_as.reads_all and kept_as.sinks > 0, kept_as.sinks)
            if key not in measured:
                measured[key] = rounded(kept_as.base_losses(self.scorer, contexts, index))
            bases[kept_as] = measured[key]
        return bases

    def _words(self, contexts: Contexts) -> np.ndarray:
        """Number of the word that every far token is a part of, (n, F)."""
        far = contexts.tokens[:, : contexts.n_far]
        if all(kept_as.unit != "word" for kept_as in self.keep_as):
            return np.zeros_like(far)
        return np.stack([word_numbers(self.decoder.pieces(tokens.tolist())) for tokens in far])

    def _contexts(
        self, targets: pd.DataFrame, far_context: str = "true", *, n_long: int | None = None
    ) -> tuple[Contexts, np.ndarray]:
        """The blocks that hold some targets, and where each target stands in them, (m, 2).

        ``n_long``: N, where it is another one than that of the settings.
        """
        contexts, index = blocks_of(self.texts, targets, self.lengths, n_long=n_long)
        _, first = np.unique(index[:, 0], return_index=True)
        blocks = targets.iloc[first]
        if far_context in ELSEWHERE:
            text, start = _places(blocks, ELSEWHERE[far_context])
            contexts = placebo_contexts(self.texts, contexts, text, start)
        elif far_context == SHUFFLED:
            contexts = shuffled_contexts(contexts, self.lengths.seed)
        if self.lengths.before:
            text, start = _places(blocks, "before")
            contexts = contexts.behind(stretches(self.texts, text, start, self.lengths.before))
        if self.lengths.gap:
            contexts = contexts.with_gap(self.lengths.gap)
        return contexts, index

    def _pieces(self, text: int, start: int, end: int) -> list[str]:
        """The text of some tokens of a text, in pieces."""
        return self.decoder.pieces(self.texts.tokens(text)[start:end].tolist())

    def _texts(self, over: pd.DataFrame) -> pd.DataFrame:
        """The text of the blocks of some targets, for people to read."""
        rows = []
        for block, targets in over.groupby(over["target_id"] // self.size):
            target = targets.iloc[0]
            text = target["text"]
            first = target["position"] - target["target_id"] % self.size
            pieces = self._pieces(text, first - self.lengths.n_long, first + self.size + TOKENS_AFTER)
            row = {"block": block, "text": text, "first_position": first, "pieces": pieces}
            if PLACEBO in self.choice_settings.far_contexts:
                start = target["placebo_start"]
                row["placebo_pieces"] = self._pieces(
                    target["placebo_text"], start, start + self.lengths.n_far
                )
            rows.append(row)
        return pd.DataFrame(rows) if rows else empty_frame(TEXT_COLUMNS)


def _places(blocks: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Text and start of what is read from another place for some blocks, (n,) both, by the name of its columns."""
    return blocks[f"{name}_text"].to_numpy(), blocks[f"{name}_start"].to_numpy()


def _rows(keys: dict[str, Any], columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """A row a target: the keys, and a list or a number in each further column."""
    return pd.DataFrame(keys | {name: list(values) for name, values in columns.items()})


def _rounded_nats(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns, losses among them as a saved result has them."""
    return {name: rounded(values) if name.endswith("_nats") else values for name, values in columns.items()}


def next_in_block(block: np.ndarray) -> np.ndarray:
    """The row that comes next among those of the same block, the first one behind the last, (m,); alone the row itself.

    ``block``: the block of each row, (m,).
    """
    rows = np.arange(len(block))
    following = np.empty_like(rows)
    for number in np.unique(block):
        of_block = rows[block == number]
        following[of_block] = np.roll(of_block, -1)
    return following


def _of_rows(choice: Selection, rows: np.ndarray) -> Selection:
    """What was chosen for the targets of some rows."""
    scores = None if choice.scores is None else choice.scores[rows]
    by_head = None if choice.by_head is None else choice.by_head[rows]
    return replace(
        choice,
        columns=choice.columns[rows],
        influence=choice.influence[rows],
        scores=scores,
        by_head=by_head,
    )
