"""All numbers of a Result as text: what `olmo-sparsity figure2` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.measured import NET, choose_k, default_selector
from analysis.stats.show import show

ACROSS = "far_context"


def summary(result: Result, k: int | None = None, **bootstrap: int) -> str:
    """The findings, then a table for each frame of numbers; recoveries and shares in per cent.

    ``k``: of what is shown at one k. Raises `UserError` where recovery is undefined.
    """
    return "\n\n".join([numbers.findings(result), *_tables(result, choose_k(result.ks, k), bootstrap)])


def _tables(result: Result, k: int, bootstrap: dict[str, int]) -> Iterator[str]:
    default = default_selector(result.selectors)

    def at_k(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["k"] == k]

    def of_default(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["selector"] == default]

    def table(frame: pd.DataFrame, title: str, **looks: Any) -> Iterator[str]:
        if len(frame):
            yield show(frame, title=title, **looks)

    yield from table(numbers.recovery(result, **bootstrap), "recovery [%]", across=ACROSS, digits=0)
    yield from table(numbers.losses(result, **bootstrap), "mean L_k [nats]", across=ACROSS, percent=False)
    yield from table(numbers.shares(result, **bootstrap), "losses [nats] and shares [%]")
    yield from table(numbers.persistence(result, **bootstrap), "what is left under the model that evaluates")
    if len(result.trainings) > 1:
        frame = numbers.of_trainings(numbers.recovery, result, **bootstrap)
        title = f"each training by itself, recovery of {default} [%]"
        yield from table(at_k(of_default(frame)), title, across=ACROSS, digits=0)
    yield from table(numbers.differences(result, k, **bootstrap), "differences [points]", across=ACROSS)
    frame = numbers.gain_bins(result, k, **bootstrap)
    yield from table(of_default(frame), "recovery by gain [%]", across=ACROSS, digits=0)
    frame = numbers.near_copies(result, k, **bootstrap)
    frame = frame[frame["selector"].isna() | (frame["selector"] == default)]
    yield from table(frame, "near copies of training text, and recovery without them [%]")
    frame = numbers.kinds(result, k, **bootstrap)
    shares = frame["name"] != "recovery"
    yield from table(frame[shares], "kinds: shares [%], mean gain [nats]", across="name")
    net = of_default(frame)[of_default(frame)[ACROSS] == NET]
    yield from table(net[["kind", "selector", "k", *numbers.INTERVAL]], "net recovery of kinds [%]", digits=0)
    frame = numbers.tokens_needed(result, **bootstrap)
    title = f"targets with {numbers.SHARE_NEEDED:.0%} of their gain from k tokens [%]"
    yield from table(of_default(frame), title, across=ACROSS)
    yield from table(of_default(numbers.distances(result, k, **bootstrap)), "distance [%]", across=ACROSS)
    frame = numbers.picks(result, k, **bootstrap)
    frame = frame[frame["selector"].isin([default, numbers.FAR])]
    yield from table(frame, "kinds of chosen tokens [%]", across=ACROSS)
    frame = numbers.faithfulness(result, **bootstrap)
    frame = frame[frame["k"].isna() | ((frame["name"] == "overlap") & (frame["k"] == k))].sort_values(
        "name", kind="stable"
    )
    yield from table(frame.drop(columns="k"), "faithfulness", across=ACROSS, percent=False)
    yield from table(numbers.contexts(result, **bootstrap), "what needs no selector [nats, %]")
    frame = numbers.placebos(result, **bootstrap)
    is_part = frame["blind"].notna()
    yield from table(at_k(frame[~is_part]), "recovery in every far context [%]", across=ACROSS, digits=0)
    yield from table(frame[is_part], "parts of a recovery [%], by k", across="k", digits=0)


def every_number(results: Mapping[str, Result], k: int | None = None, **bootstrap: int) -> pd.DataFrame:
    """All frames of `analysis.stats.numbers` of some results, by label, as one tidy frame: its columns ``result`` and
    ``frame`` say which; a column that a frame does not have is empty."""
    at_k = ("differences", "gain_bins", "near_copies", "kinds", "distances", "picks")
    others = (
        "recovery",
        "losses",
        "shares",
        "persistence",
        "tokens_needed",
        "placebos",
        "faithfulness",
        "contexts",
    )
    frames = []
    for label, result in results.items():
        for name in (*others, *at_k):
            options = {**bootstrap, "k": k} if name in at_k else bootstrap
            frames.append(getattr(numbers, name)(result, **options).assign(result=label, frame=name))
    whole = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    return whole[["result", "frame", *(name for name in whole if name not in ("result", "frame"))]]
