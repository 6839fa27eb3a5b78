"""All numbers of a Result as text: what `print(result)` and `olmo-sparsity figure2` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import by_clusters
from analysis.stats.measured import AS_TEXT, NET, TRUE, choose_k, default_selector, each_level, nats
from analysis.stats.show import interval_text, show
from olmo_sparsity.util.errors import UserError

ACROSS = "far_context"
OF_TARGETS = ("shares", "persistence", "contexts")
OF_CHOICES = ("recovery", "losses", "tokens_needed", "placebos", "faithfulness")
AT_K = ("differences", "gain_bins", "near_copies", "kinds", "distances", "picks")
"""The frames of `analysis.stats.numbers`: of the targets alone; of every level, by k and at one k."""


def findings(result: Result) -> str:
    """The main numbers in a few lines, and what to call next: what `print(result)` shows."""
    settings, size = result.settings, numbers.counts(result)
    block = settings.get("targets_per_block", 1)
    said = [
        f"{settings['model']} on {settings['texts']}: N {settings['n_long']}, M {settings['n_short']}, B {block}; "
        f"{size['targets']:,} targets of {size['documents']:,} documents"
    ]
    if size["trainings"] > 1:
        said[0] += f", {size['trainings']} trainings together"
    if len(result.targets) == 0:
        return said[0]
    of_targets = pd.concat([numbers.shares(result), numbers.persistence(result)])
    share = {row["name"]: interval_text(row, percent=True) for row in of_targets.to_dict("records")}
    said.append(
        f"{size['targets_over_tau']:,} gain more than {nats(settings['tau_nats'])} from the long context: "
        f"{share['share_over_tau']} % of all; {share['share_below_minus_tau']} % lose more"
    )
    if result.gain_nats.sum() > 0:
        said.append(f"they hold {share['share_of_gain']} % of the net gain of all")
    if result.crossfit:
        said.append(f"under the model that evaluates {share['share_still_over_tau']} % of them do")
    if size["targets_measured"] < size["targets_over_tau"]:
        said.append(f"unfinished: {size['targets_measured']:,} measured so far")
    try:
        recoveries = [(level, numbers.recovery(one)) for level, one in each_level(result)]
    except UserError as error:
        return "\n".join([*said, str(error)])
    k = choose_k(result.ks)
    for level, frame in recoveries:
        selector = default_selector(frame["selector"])
        rows = frame[(frame["selector"] == selector) & (frame["k"] == k)]
        of_contexts = [
            f"{'recovery' if row[ACROSS] == TRUE else row[ACROSS]} {interval_text(row, percent=True)} %"
            for row in rows.to_dict("records")
        ]
        given_back = "" if level == AS_TEXT else f" ({level_text(level)})"
        said.append(f"{selector}, k = {k}{given_back}: {', '.join(of_contexts)}")
    by = by_clusters(size, "_over_tau")
    return "\n".join(
        [
            *said,
            f"[95 % interval] {by}; net: recovery minus the placebo, where positive",
            'next: .recovery(), .kinds(), .distances() and more are frames; .figure2("figure2.png"); .xray(0)',
        ]
    )


def level_text(level: Mapping[str, Any]) -> str:
    """``level cache, unit token, sinks 4``."""
    return ", ".join(f"{name} {value}" for name, value in level.items())


def summary(result: Result, k: int | None = None, **bootstrap: int) -> str:
    """The findings, then a table for each frame of numbers, at each level; recoveries and shares in per cent.

    ``k``: of what is shown at one k. Raises `UserError` where recovery is undefined.
    """
    k = choose_k(result.ks, k)
    parts = [findings(result)]
    for level, at_level in each_level(result):
        parts += [] if level == AS_TEXT else [f"--- {level_text(level)} ---"]
        parts += _tables(at_level, k, bootstrap)
    return "\n\n".join(parts)


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
    """All frames of `analysis.stats.numbers` of some results, by label, as one tidy frame.

    Its columns ``result`` and ``frame`` say which; level, unit and sinks are those of the choices. A column that a
    frame does not have is empty.
    """
    frames = []
    for label, result in results.items():
        of_result = {name: getattr(numbers, name)(result, **bootstrap) for name in OF_TARGETS}
        for name in (*OF_CHOICES, *AT_K):
            options = {**bootstrap, "k": k} if name in AT_K else bootstrap
            of_result[name] = numbers.of_each_level(getattr(numbers, name), result, **options)
        frames += [frame.assign(result=label, frame=name) for name, frame in of_result.items()]
    whole = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    return whole[["result", "frame", *(name for name in whole if name not in ("result", "frame"))]]
