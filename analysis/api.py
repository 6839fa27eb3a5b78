"""A `Result` with its numbers and pictures, written out, and how results are read; `measure` gives one.

The numbers stand in `analysis.stats.numbers`, each defined once; pictures in `analysis.figures` and `analysis.xray`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from analysis.chosen import chosen_tokens
from analysis.measurement import Measurement
from analysis.stats import attribution, comparisons, context_worth, numbers, summary
from analysis.xray import InfluenceMap, xray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = str | Sequence[str] | None
Ks = int | Sequence[int] | None


@dataclass(repr=False)
class Result(Measurement):
    """One measurement of one model on one set of targets, or of several runs of it (`join`).

    ``print(result)`` says what was found. Every number is a method that gives a tidy frame: a row a number, with its
    95 % interval in the columns ``value``, ``low`` and ``high``, which is NaN where the data support none. Shares and
    recoveries are fractions, losses and gains nats per token. Columns that most frames have:

        level, unit, sinks   how chosen tokens were kept, see `analysis.kept`
        selector             what chose them, or "best": the lowest L_k of all selectors
        far_context          "true", a placebo, or "net": recovery minus the placebo's where that is positive
        k                    how many far tokens were kept

    ``selector``, ``far_context`` and ``k`` of a method take one value or several, and leave out the rows of others.
    ``resamples`` and ``seed`` are of the bootstrap; all intervals of a result rest on the same resamples. What is
    of the targets over tau raises `UserError` where there is none, or where their gains sum to nothing.

    The data are in the frames `targets`, `choices`, `scores` and `texts`, see `analysis.measurement.Measurement`.
    """

    # --- numbers of all targets ---

    def shares(self, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
        """Mean losses and gains in nats, and the shares of targets over tau and below -tau: name, value, low, high."""
        return numbers.shares(self, resamples=resamples, seed=seed)

    def persistence(self, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
        """What the model that evaluates leaves of the gain that targets were chosen for, in nats and as a share.

        Columns: name, value, low, high; no rows where one model selects and evaluates.
        """
        return numbers.persistence(self, resamples=resamples, seed=seed)

    def contexts(
        self,
        *,
        reference: int | None = None,
        tau_nats: float | None = None,
        control: Result | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Losses given contexts of other lengths: their means, and shares of targets with more, less and as much loss.

        Columns: name, length (tokens), value, low, high; with a control also ``of``. No rows where neither ``lengths``
        nor ``faithfulness`` were measured. `analysis.stats.context_worth.contexts` defines the names.

        Args:
            reference: the length that others are compared with; None: the long context.
            tau_nats: what shares are within, above and below; None: tau of the result.
            control: a result of the same targets and contexts, such as of ``MODEL@untrained``: what noise gives.
            resamples: of the bootstrap.
            seed: of the bootstrap.
        """
        return context_worth.contexts(
            self, reference=reference, tau_nats=tau_nats, control=control, resamples=resamples, seed=seed
        )

    def documents(self) -> pd.DataFrame:
        """What the far context of every text is worth, a row a text, the largest net gain first.

        Columns: text, group (where there are groups), tokens, n_targets, gain_nats and net_gain_nats with their
        standard errors gain_error_nats and net_gain_error_nats, share_over_tau, share_below_minus_tau, share_of_largest
        (of the positive gains, what the tenth of the targets with the largest holds).
        """
        return context_worth.documents(self)

    # --- numbers of the targets over tau ---

    def recovery(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """The share of L_short - L_long that the first k tokens of every selector recover (Eq. 20).

        Columns: level, unit, sinks, selector, far_context ("true", "placebo" and "net"), k, value, low, high.
        """
        return numbers.recovery(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def losses(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Mean L_k in nats.

        Columns: level, unit, sinks, selector, far_context ("true" and "placebo"), k, value, low, high.
        """
        return numbers.losses(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def differences(
        self, *, far_context: Names = None, k: int | None = None, resamples: int = 2000, seed: int = 0
    ) -> pd.DataFrame:
        """Recovery of the default selector, ``first``, minus that of every other, ``second``, paired; of one k.

        Columns: level, unit, sinks, first, second, far_context ("net" and "true"), k (by default 4, or the closest that
        was measured), value, low, high.
        """
        return numbers.differences(self, far_context=far_context, k=k, resamples=resamples, seed=seed)

    def tokens_needed(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Share of the targets that have 90 % of their gain from k tokens or fewer.

        Columns: level, unit, sinks, name ("reached"; "never": not from the largest k), selector, far_context, k,
        n_targets, value, low, high.
        """
        return numbers.tokens_needed(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def gain_bins(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: int | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Recovery by the gain of the target in nats, in bins; of one k.

        Columns: level, unit, sinks, from_nats, to_nats (inclusive), n_targets, n_documents, selector, far_context, k
        (by default 4, or the closest), value, low, high.
        """
        return numbers.gain_bins(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def target_bins(
        self,
        *,
        by: Names = None,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Recovery at every k in bins of the targets by their gain, and by their probability given the long context.

        Columns: level, unit, sinks, by ("gain_nats", "p_long"), above, up_to (inclusive), n_targets, n_documents,
        selector, far_context ("true", "placebo" and "net"), k, value, low, high.
        """
        frame = numbers.target_bins(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )
        return numbers.rows_with(frame, by=by)

    def kinds(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: int | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """How frequent every kind of dependency is, what it gains in nats, and its recovery at one k.

        Columns: level, unit, sinks, kind, n_targets, n_targets_over_tau, n_documents_over_tau, n_groups_over_tau, name
        ("share", "share_over_tau", "gain_nats", "recovery"), selector, far_context, k (by default 4, or the closest),
        value, low, high.
        """
        return numbers.kinds(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def distances(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: int | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """How far before the target the first k chosen tokens stand, as a share of them in bins of the distance.

        Columns: level, unit, sinks, selector, far_context, k (by default 4, or the closest), from_tokens, to_tokens
        (exclusive), uniform (the share of tokens drawn uniformly), value, low, high.
        """
        return numbers.distances(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def near_copies(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: int | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Share of the targets in near copies of training text, and recovery without them; no rows if unknown.

        Columns: level, unit, sinks, name ("share", "share_over_tau", "recovery"), selector, far_context, k (by default
        4, or the closest), n_targets, value, low, high.
        """
        return numbers.near_copies(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def special_tokens(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: int | None = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Share of special tokens among the first k that were chosen; no rows where the texts have none.

        Columns: level, unit, sinks, selector, far_context, k (by default 4, or the closest), value, low, high.
        """
        return numbers.special_tokens(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def placebos(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Recovery in every placebo, and the parts of a recovery (docs/method.md, 2.3); no rows with one placebo.

        Columns: level, unit, sinks, name ("recovery", "selection_bias", "common_context", "specific"), selector, blind
        (the selector's target-blind form), far_context, k, n_targets, value, low, high.
        """
        return numbers.placebos(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    def specificity(
        self,
        *,
        by: str | None = None,
        selector: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """The ladder of specificity: recovery of a target's own tokens, beside every null (docs/method.md, 2.3).

        Columns: level, unit, sinks, name ("own", "other-target", "same-group", "shuffled", "placebo", "random",
        "sinks": the sinks alone), selector, k, n_targets (those that have every rung), value, low, high. With ``by``
        "gain_nats" or "p_long" there is a ladder for each bin of `target_bins`, and by, above, up_to come first.
        """
        if by is None:
            return numbers.specificity(self, selector=selector, k=k, resamples=resamples, seed=seed)
        return comparisons.by_bins(
            numbers.specificity, self, by, selector=selector, k=k, resamples=resamples, seed=seed
        )

    def faithfulness(
        self,
        *,
        selector: Names = None,
        far_context: Names = None,
        k: Ks = None,
        resamples: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Sufficiency and comprehensiveness in nats, LDS, and agreement with exact leave-one-out (docs/method.md, 2.8).

        Columns: level, unit, sinks, name, selector, far_context, k (NaN of what has none), value, low, high.
        """
        return attribution.faithfulness(
            self, selector=selector, far_context=far_context, k=k, resamples=resamples, seed=seed
        )

    # --- all together, as text and as pictures ---

    def counts(self) -> dict[str, int]:
        """How many targets, documents, groups and runs were measured, and how many of them are over tau."""
        return numbers.counts(self)

    def findings(self) -> str:
        """The main numbers in a few lines, and what to call next: what ``print(result)`` shows."""
        return summary.findings(self)

    def summary(self, k: int | None = None, *, resamples: int = 2000, seed: int = 0) -> str:
        """The findings, then every number in a table; ``k``: of what is shown at one k."""
        return summary.summary(self, k, resamples=resamples, seed=seed)

    def figure2(self, path: str | Path | None = None) -> Figure:
        """Figure 2 of this result; written to ``path``, whose ending says the format, where one is given."""
        from analysis.figures.figure2 import figure2  # not above: numbers are read without matplotlib

        return figure2({"": self}, path)

    def xray(self, text_number: int | None = None, *, selector: str | None = None) -> InfluenceMap:
        """The block with the most targets over tau, of one text or of all, to be pointed at: nothing is measured.

        What a target needs are the far tokens that the selector, by default the first, scored or chose. Raises
        `UserError` where no target is over tau, the selector was not measured, or the result has no text of such a
        block.
        """
        return xray(self, text_number, selector=selector)

    def chosen(
        self,
        target_id: int | None = None,
        *,
        selector: str | None = None,
        far_context: str = "true",
        level: str | None = None,
        unit: str | None = None,
        sinks: int | None = None,
    ) -> pd.DataFrame:
        """The far tokens that a selector chose, as text: of one target, or of all targets over tau.

        A row for each token: target_id, target (its text), rank (1: the most influential), piece (the chosen token's
        text), distance_tokens (how many tokens before the target it stands), influence (in the selector's unit; NaN
        where it was not kept) and position_id. A token that is a part of a character is shown as "é (1/2)".

        A position id c of `selected` is element c of ``pieces`` in the row of `texts` of the target's block, block =
        target_id // B; in the placebo far context, of ``placebo_pieces``. The target itself is element N + target_id %
        B of ``pieces``, which is its position id.

        Args:
            target_id: of `targets`; None: all targets over tau, one after the other.
            selector: by default the first of `selectors`.
            far_context: true or placebo; the text of other far contexts is not recorded.
            level: how the tokens were kept, see `analysis.kept`; by default "text" where this was measured, else
                the first that was.
            unit: likewise, by default "token"; of words, the token stands for its word.
            sinks: likewise, by default 0.

        Raises `UserError`, one line with the remedy, where there is no such choice or its text is not recorded.
        """
        return chosen_tokens(
            self,
            target_id,
            selector=selector,
            far_context=far_context,
            level=level,
            unit=unit,
            sinks=sinks,
        )

    def __repr__(self) -> str:
        return self.findings()

    def _repr_html_(self) -> str:
        """In Jupyter: the findings, and the block with the most targets over tau, to be read."""
        shown = f"<pre>{escape(repr(self))}</pre>"
        return shown + self.xray()._repr_html_() if self.has_xray else shown


def load(folder: str | Path) -> Result:
    """The result that was saved in a folder. Raises `UserError` where there is none, or several (see `load_study`)."""
    return Result.load(folder)


def load_study(folder: str | Path) -> dict[str, Result]:
    """The results that were saved in a folder, by the name of their cell; one alone has the name "".

    Raises `UserError` for a folder without a result, of another version, or damaged.
    """
    return Result.load_study(folder)
