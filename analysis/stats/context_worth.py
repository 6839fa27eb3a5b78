"""What the far context is worth, of all targets: losses by the length of the context, and a row a text.

Shapes: n sampled targets.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arguments import finite_number
from analysis.contexts import PLACEBO, placebo_column
from analysis.measurement import Measurement, context_lengths
from analysis.stats.numbers import ENOUGH_NATS, frame_of_targets, ratios_of_targets
from analysis.stats.recovery import over_tau_column, selecting_gain_nats
from olmo_sparsity.util.errors import UserError

LARGEST_SHARE = 0.1
"""Of the targets of a text, those with the largest gains: `documents` says what they hold. [ours]"""


@frame_of_targets("name", "length")
def contexts(
    result: Measurement,
    *,
    reference: int | None = None,
    tau_nats: float | None = None,
    control: Measurement | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Losses given the last ``length`` tokens, where lengths were measured: name, length, value, low, high.

    L_n is the loss given n tokens, R that given ``reference`` of them, by default L_long; L_short is at the position
    ids of either. Of all targets; length is NaN of the first two names, and M and N are lengths, too:

        gap_cost_nats, gap_cost_over_tau_nats      mean L_short at its original ids minus at ids from 0, of all targets
                                                   and of those over tau; where faithfulness was measured
        loss_nats, gain_nats                       means of L_n and of L_short - L_n
        share_of_gain                              Σ (L_short - L_n) / Σ (L_short - R)
        rise_nats                                  mean of L_n - R
        share_enough                               L_n is at most `ENOUGH_NATS` above R
        share_within_tau, share_over_tau, share_below_minus_tau
                                                   L_n - R is within tau of 0, above tau, below -tau

    ``tau_nats``: by default that of the result. ``control``: a result of the same targets, such as of untrained
    weights; the column ``of`` then says "model" or "control". A result made smaller, which keeps mean losses, has no
    shares by tau, and share_enough beside L_long only. Raises `UserError` for a length that was not measured, and for a
    control of other targets or contexts.
    """
    tau_nats = result.settings.choices.tau_nats if tau_nats is None else finite_number("tau_nats", tau_nats)
    frame = _contexts(result, reference, tau_nats, resamples, seed)
    if control is None:
        return frame
    _check_control(result, control)
    of_control = _contexts(control, reference, tau_nats, resamples, seed)
    both = pd.concat([frame.assign(of="model"), of_control.assign(of="control")], ignore_index=True)
    return both[["of", *frame.columns]]


def _contexts(
    result: Measurement, reference: int | None, tau_nats: float, resamples: int, seed: int
) -> pd.DataFrame:
    """`contexts` of one result."""
    targets = result.targets
    over = over_tau_column(result)
    one = np.ones(len(targets))
    rows: list[tuple[str, float, np.ndarray, np.ndarray]] = []
    if "loss_short_from_0_nats" in targets:
        cost = (targets["loss_short_nats"] - targets["loss_short_from_0_nats"]).to_numpy()
        rows.append(("gap_cost_nats", np.nan, cost, one))
        rows.append(("gap_cost_over_tau_nats", np.nan, cost * over, over))
    losses = losses_by_length(result)
    n_context = result.settings.contexts.n_context
    compared_with = n_context if reference is None else reference
    if compared_with not in losses:
        measured = ", ".join(map(str, losses)) or "none"
        raise UserError(f"length {compared_with} was not measured; choose from {measured}")
    of_reference, short_of_reference = losses[compared_with]
    # of a result made smaller, on either side of `ENOUGH_NATS` above L_long
    are_means = result.settings.losses_not_over_tau is not None
    if context_lengths(targets):
        for length, (loss, short) in losses.items():
            rise = loss - of_reference
            rows.append(("loss_nats", length, loss, one))
            if length != result.settings.contexts.n_short:
                rows.append(("gain_nats", length, short - loss, one))
            if length == compared_with:
                continue
            if length != result.settings.contexts.n_short:
                rows.append(("share_of_gain", length, short - loss, short_of_reference - of_reference))
            rows.append(("rise_nats", length, rise, one))
            if not are_means or compared_with == n_context:
                rows.append(("share_enough", length, loss <= of_reference + ENOUGH_NATS, one))
            if are_means:
                continue
            rows.append(("share_within_tau", length, np.abs(rise) <= tau_nats, one))
            rows.append(("share_over_tau", length, rise > tau_nats, one))
            rows.append(("share_below_minus_tau", length, rise < -tau_nats, one))
    ratios = [(name, above, below) for name, _, above, below in rows]
    frame = ratios_of_targets(result, ratios, resamples, seed)
    frame.insert(1, "length", [length for _, length, *_ in rows])
    return frame


def losses_by_length(result: Measurement) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Of every length of context, ascending, the loss of all targets, and L_short at the same ids, (n,) nats both."""
    targets = result.targets
    settings = result.settings.contexts
    short = targets["loss_short_nats"].to_numpy(np.float64)
    long = targets["loss_long_nats"].to_numpy(np.float64)
    losses = {settings.n_short: (short, short), settings.n_context: (long, short)}
    for length in context_lengths(targets):
        loss = targets[f"loss_of_{length}_nats"].to_numpy(np.float64)
        short_there = targets.get(f"loss_short_at_{length}_nats", targets["loss_short_nats"])
        losses[length] = (loss, short_there.to_numpy(np.float64))
    return dict(sorted(losses.items()))


def _check_control(result: Measurement, control: Measurement) -> None:
    """Raise `UserError` where a control is of other contexts or targets than a result."""
    places = [one.targets[["text", "position"]].drop_duplicates() for one in (result, control)]
    what_is_read = []
    for settings in (result.settings, control.settings):
        what_is_read.append((settings.contexts, settings.texts.sha256, settings.model.prefix))
    if what_is_read[0] != what_is_read[1] or not np.array_equal(*places):
        raise UserError(
            "the control was measured on other targets or in other contexts; measure it with the texts and settings of "
            "the result"
        )


def documents(result: Measurement) -> pd.DataFrame:
    """What the far context of every text is worth (docs/method.md, 2.1b): a row a text, the largest net gain first.

    Without losses in the placebo, the largest gain first. Of joined runs a target's values are the means of all runs.
    Columns:

        text, [group], tokens, n_targets      its number and group; its tokens; how many of them are targets
        gain_nats, gain_error_nats            mean of L_short - L_long, and its standard error
        net_gain_nats, net_gain_error_nats    the same of L(placebo) - L_long; NaN where that was not measured
        share_over_tau, share_below_minus_tau of its targets, by their gain under the model that selects
        share_of_largest                      of the sum of its positive gains, what the tenth of its targets with the
                                              largest holds, one at least; NaN where no target gains

    Standard errors take targets of a text to be independent, and are NaN of one target. Raises `UserError` for a result
    made smaller, which keeps mean losses.
    """
    if result.settings.losses_not_over_tau is not None:
        raise UserError(
            "the result keeps mean losses of targets not over tau, so that texts cannot be compared; measure again"
        )
    targets = result.targets
    values = targets[["text", "position"]].assign(
        gain=result.gain_nats,
        net_gain=np.nan,
        over=over_tau_column(result),
        below=(selecting_gain_nats(result) < -result.settings.choices.tau_nats).astype(np.float64),
        tokens=targets.get("text_tokens", np.nan),
    )
    if placebo_column(PLACEBO) in targets:
        values["net_gain"] = result.net_gain_nats
    if "group" in targets:
        values["group"] = targets["group"]
    keys = [name for name in ("text", "group") if name in values]
    of_targets = values.groupby([*keys, "position"], as_index=False, sort=False).mean()
    frame = of_targets.groupby(keys, as_index=False).agg(
        tokens=("tokens", "first"),
        n_targets=("gain", "size"),
        gain_nats=("gain", "mean"),
        gain_error_nats=("gain", "sem"),
        net_gain_nats=("net_gain", "mean"),
        net_gain_error_nats=("net_gain", "sem"),
        share_over_tau=("over", "mean"),
        share_below_minus_tau=("below", "mean"),
        share_of_largest=("gain", _held_by_largest),
    )
    if frame["tokens"].notna().all():
        frame["tokens"] = frame["tokens"].astype(np.int64)
    return frame.sort_values(
        ["net_gain_nats", "gain_nats"], ascending=False, kind="stable", ignore_index=True
    )


def _held_by_largest(gains: pd.Series) -> float:
    """Of the sum of the positive gains, what the `LARGEST_SHARE` of all with the largest holds, one at least."""
    positive = np.sort(np.maximum(gains, 0.0))[::-1]
    total = positive.sum()
    if total == 0:
        return np.nan
    largest = max(1, round(LARGEST_SHARE * len(gains)))
    return float(positive[:largest].sum() / total)
