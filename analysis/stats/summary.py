"""All numbers of a Result as text: what `print(result)` and `olmo-sparsity figure2` print."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd

from analysis.contexts import PLACEBO, TRUE
from analysis.measurement import Measurement
from analysis.stats import attribution, context_worth, numbers  # noqa: F401 (attribution registers its frame)
from analysis.stats.bootstrap import counted, interval_caption
from analysis.stats.numbers import NUMBERS
from analysis.stats.recovery import (
    AS_TEXT,
    BEST,
    KEPT_AS_COLUMNS,
    NET,
    choose_k,
    default_selector,
    nats,
    none_over_tau,
    of_one_way,
    way_in_words,
    ways_kept,
    why_no_recovery,
)
from analysis.stats.tables import INTERVAL, interval_text, show

RANKED = 20
"""So many texts are printed of a ranking."""
IN_RECOVERY = {numbers.OWN, PLACEBO, numbers.RANDOM}
"""Rungs of the ladder of specificity that the table of recoveries has as well."""


def findings(result: Measurement, **bootstrap: int) -> str:
    """The main numbers in a few lines, and what to call next: what `print(result)` shows.

    ``bootstrap``: resamples and seed of the intervals, as of `numbers.recovery`.
    """
    settings = result.settings
    size = numbers.counts(result)
    lengths = settings.contexts
    runs = size["runs"]
    lines = [
        f"{settings.model.name} on {settings.texts.name}: "
        f"N {lengths.n_long}, M {lengths.n_short}, B {lengths.targets_per_block}"
        f"{''.join(f', {name} {value:,}' for name, value in lengths.unusual.items())}; "
        f"{size['targets']:,} targets of {counted(size['documents'], 'document')}"
        f"{f', {runs} runs together' if runs > 1 else ''}"
    ]
    if len(result.targets):
        by = interval_caption("[95 % interval]", size)
        of_kind = _of_gains if len(result.over) else _of_losses
        if not result.selectors:
            of_kind = _of_losses_alone
        lines += of_kind(result, size, by, bootstrap)
    return "\n".join(lines)


def _of_losses(
    result: Measurement, size: Mapping[str, int], by: str, bootstrap: Mapping[str, int]
) -> list[str]:
    """What is said where no target is over tau; ``by``: what intervals are by."""
    rows = numbers.shares(result, **bootstrap).to_dict("records")
    share = {row["name"]: interval_text(row, percent=True) for row in rows}
    loss = {row["name"]: interval_text(row) for row in rows}
    return [
        f"{none_over_tau(result)}; {share['share_below_minus_tau']} % lose more",
        *_of_documents(result, bootstrap),
        _mean_losses(loss),
        *_measured_in(result),
        by,
        'next: .shares() and .contexts(); .figure2("a.png"); a lower tau, which uses the losses in the same folder '
        "(out) again",
    ]


def _mean_losses(loss: Mapping[str, str]) -> str:
    """L_long and L_short, means of all targets, by the texts of their intervals."""
    long = loss["loss_long_nats"]
    short = loss["loss_short_nats"]
    return f"mean loss in nats: {long} given the long context, {short} given the short one"


def _of_losses_alone(
    result: Measurement, size: Mapping[str, int], by: str, bootstrap: Mapping[str, int]
) -> list[str]:
    """What is said where nothing was chosen: losses, gains, and the texts whose far context is worth most."""
    shares = numbers.shares(result, **bootstrap)
    loss = {row["name"]: interval_text(row) for row in shares.to_dict("records")}
    rows = pd.concat([shares, numbers.persistence(result, **bootstrap)]).to_dict("records")
    share = {row["name"]: interval_text(row, percent=True) for row in rows}
    lines = [
        _mean_losses(loss),
        f"mean gain in nats: {loss['gain_nats']}",
    ]
    if "net_gain_nats" in loss:
        lines[-1] += f", beyond that of another text {loss['net_gain_nats']}"
    tau = nats(result.settings.choices.tau_nats)
    lines.append(
        f"{share['share_over_tau']} % gain more than {tau}, {share['share_below_minus_tau']} % lose more"
    )
    if result.crossfit and len(result.over):
        lines.append(f"under the model that evaluates {share['share_still_over_tau']} % of them do")
    lines += [
        *_of_documents(result, bootstrap),
        *_measured_in(result),
        by,
        _ranking(context_worth.documents(result)),
    ]
    return [*lines, "next: .shares(), .documents() and .contexts(); selectors, to choose tokens"]


def _ranking(documents: pd.DataFrame) -> str:
    """The texts of largest net gain as a table, `RANKED` at most."""
    shown = documents.head(RANKED).dropna(axis="columns", how="all")
    title = "texts by what their far context is worth:"
    if len(documents) > RANKED:
        title = f"the first {RANKED} of {len(documents):,} texts by what their far context is worth:"
    table = shown.to_string(index=False, float_format=lambda value: f"{value:.3f}")
    return f"{title}\n{table}"


def _of_gains(
    result: Measurement, size: Mapping[str, int], by: str, bootstrap: Mapping[str, int]
) -> list[str]:
    """What is said of targets over tau, and of their recovery; ``size``: how much was measured."""
    settings = result.settings
    lines = []
    frames = [numbers.shares(result, **bootstrap), numbers.persistence(result, **bootstrap)]
    of_targets = pd.concat(frames).to_dict("records")
    share = {row["name"]: interval_text(row, percent=True) for row in of_targets}
    lines.append(
        f"{size['targets_over_tau']:,} gain more than {nats(settings.choices.tau_nats)} from the long context: "
        f"{share['share_over_tau']} % of all; {share['share_below_minus_tau']} % lose more"
    )
    if result.gain_nats.sum() > 0:
        [held] = (row["value"] for row in of_targets if row["name"] == "share_of_gain")
        as_others = ", as others lose" if held > 1 else ""
        lines.append(f"they hold {share['share_of_gain']} % of all gains summed{as_others}")
    if result.crossfit:
        lines.append(f"under the model that evaluates {share['share_still_over_tau']} % of them do")
    if size["targets_measured"] < size["targets_over_tau"]:
        lines.append(f"unfinished: {size['targets_measured']:,} measured so far")
    if reason := why_no_recovery(result):
        return [*lines, *_of_documents(result, bootstrap), reason]
    lines += _recoveries(result, bootstrap)
    lines += _of_selectors(result, bootstrap)
    lines += _of_documents(result, bootstrap) + _measured_in(result)
    lines.append(f"{by}; net: recovery minus the placebo, where positive")
    following = 'next: .recovery() and more frames; .figure2("a.png")'
    if result.has_xray:
        of_result = result.targets["text"].iloc[result.over]
        first = (result.runs or (result,))[0]
        of_first = first.targets["text"].iloc[first.over]
        following += f"; .chosen() as text; .xray({np.intersect1d(of_result, of_first).min()})"
    return [*lines, following]


def _recoveries(result: Measurement, bootstrap: Mapping[str, int]) -> list[str]:
    """Recovery of the default selector at the usual k, a line for every way of keeping."""
    lines = []
    recovery = numbers.recovery(result, **bootstrap)
    k = choose_k(result.ks)
    recovery = recovery[recovery["k"] == k].replace({"far_context": {TRUE: "recovery"}})
    for way, of_way in recovery.groupby([*KEPT_AS_COLUMNS], sort=False):
        selector = default_selector(of_way["selector"])
        rows = of_way[of_way["selector"] == selector].to_dict("records")
        texts = [f"{row['far_context']} {interval_text(row, percent=True)} %" for row in rows]
        kept_as = "" if way == (*AS_TEXT.values(),) else f", as {way_in_words(*way)}"
        lines.append(f"{selector}, k = {k}{kept_as}: {', '.join(texts)}")
    return lines


def _of_selectors(result: Measurement, bootstrap: Mapping[str, int]) -> list[str]:
    """Net recovery at every k, a line for every selector, the largest at the usual k first; nothing of one alone.

    Tokens are kept in one way: as text, or as was measured first. Without a placebo it is recovery.
    """
    if len(result.selectors) == 1:
        return []
    one_way = of_one_way(result)
    recovery = numbers.recovery(one_way, **bootstrap)
    is_net = PLACEBO in result.far_contexts
    is_shown = (recovery["far_context"] == (NET if is_net else TRUE)) & (recovery["selector"] != BEST)
    shown = recovery.loc[is_shown, ["selector", "k", *INTERVAL]]
    at_usual_k = shown[shown["k"] == choose_k(result.ks)].set_index("selector")["value"]
    in_order = shown.sort_values("selector", key=lambda names: -names.map(at_usual_k), kind="stable")
    title = "net recovery by k" if is_net else "recovery by k"
    if ways_kept(result) != [AS_TEXT]:
        [way] = ways_kept(one_way)
        title += f", as {way_in_words(**way)}"
    return [show(in_order, across="k", digits=0, title=f"{title} [%]")]


def _measured_in(result: Measurement) -> list[str]:
    """The time that measuring took, and on what; nothing where that is unknown."""
    if not (seconds := result.provenance.get("seconds")):
        return []
    machine = result.provenance["machine"]
    return [f"measured in {seconds:,.0f} s on {machine['gpu'] or machine['processor']}"]


def _of_documents(result: Measurement, bootstrap: Mapping[str, int]) -> list[str]:
    """Whether the texts were divided into documents, and that special tokens are no targets; nothing without any."""
    lines = []
    texts = result.settings.texts
    if documents := texts.documents:
        lines.append(f"tokens that end or begin a document divide the texts into {documents:,} documents")
    if special := texts.special_tokens:
        lines.append(
            f"{special:,} special tokens in the texts are no targets{_chosen_special(result, bootstrap)}"
        )
    return lines


def _chosen_special(result: Measurement, bootstrap: Mapping[str, int]) -> str:
    """How many of the chosen tokens are special, of the default selector at the usual k; empty without choices."""
    if why_no_recovery(result):
        return ""
    shares = numbers.special_tokens(result, **bootstrap)
    if shares.empty:
        return ""
    selector = default_selector(shares["selector"])
    row = shares[(shares["selector"] == selector) & (shares["far_context"] == TRUE)].to_dict("records")[0]
    chosen = f"the first {row['k']} that {selector} chose"
    return f"; of {chosen} {interval_text(row, percent=True)} % are special"


def summary(result: Measurement, k: int | None = None, **bootstrap: int) -> str:
    """The findings, then a table for each frame of numbers, of every way of keeping; recoveries and shares in per cent.

    ``k``: of what is shown at one k. Where no recovery is defined the frames are those that need none.
    """
    k = choose_k(result.ks, k)
    if why_no_recovery(result):
        frames = {name: _frame(name, result, k, bootstrap) for name in _defined(result)}
        tables = [_table(frame, name, name, "far_context") for name, frame in frames.items() if len(frame)]
        return "\n\n".join([findings(result, **bootstrap), *tables])
    default = default_selector(result.choices["selector"])
    hidden = [*KEPT_AS_COLUMNS] if ways_kept(result) == [AS_TEXT] else []
    tables = [findings(result, **bootstrap)]
    for name in _defined(result):
        frame = _frame(name, result, k, bootstrap).drop(columns=hidden, errors="ignore")
        across = "far_context"
        title = name
        if NUMBERS[name].printed == "default":
            frame = frame[frame["selector"].isna() | (frame["selector"] == default)]
        if name == "specificity" and set(frame["name"]) <= IN_RECOVERY:
            continue
        if name in ("faithfulness", "placebos", "specificity", "target_bins"):
            frame = frame[frame["k"].isna() | (frame["k"] == k)]
        if name == "target_bins":  # those of the gain are gain_bins
            frame = frame[(frame["by"] == "p_long") & (frame["n_targets"] > 0)]
            if frame["above"].nunique() < 2:
                continue
        if name == "kinds":
            frame = frame[frame["far_context"].isna() | (frame["far_context"] == NET)]
            frame, across = frame.drop(columns=list(numbers.OF_CHOICE)), "name"
            title = "kinds, with net recovery"
        if len(frame):
            tables.append(_table(frame, name, title, across))
    for run in result.runs:
        of_run = run.settings.model.name
        if run.settings.model.training_seed is not None:  # not known of models that others trained
            of_run = f"training seed {run.settings.model.training_seed}"
        title = f"recovery, {of_run} by itself"
        if reason := why_no_recovery(run):
            tables.append(f"{title}: {reason}")
            continue
        frame = numbers.recovery(run, **bootstrap).drop(columns=hidden)
        frame = frame[(frame["selector"] == default) & (frame["k"] == k)]
        tables.append(_table(frame, "recovery", title, "far_context"))
    return "\n\n".join(tables)


def _table(frame: pd.DataFrame, name: str, title: str, across: str) -> str:
    in_nats = NUMBERS[name].in_nats
    unit = "%"
    if in_nats:
        unit = "nats"
    elif "name" in frame and frame["name"].str.endswith("_nats").any():
        unit = "%, or nats where a name ends so"
    title += f" [{unit}]" + (", best: the lowest loss of all selectors" if title == "recovery" else "")
    return show(frame, across=across if across in frame else None, percent=not in_nats, title=title)


def _defined(result: Measurement) -> list[str]:
    """Names of the numbers that a result has: those of all targets alone where no recovery is defined."""
    has_recovery = not why_no_recovery(result)
    return [name for name, of_name in NUMBERS.items() if has_recovery or not of_name.of_choices]


def _frame(name: str, result: Measurement, k: int | None, bootstrap: Mapping[str, int]) -> pd.DataFrame:
    at_k = {"k": k} if NUMBERS[name].one_k else {}
    return NUMBERS[name].frame(result, **at_k, **bootstrap)


def every_number(
    results: Mapping[str, Measurement],
    k: int | None = None,
    *,
    without: Collection[str] = (),
    **bootstrap: int,
) -> pd.DataFrame:
    """All frames of `analysis.stats.numbers` of some results, by label, as one tidy frame.

    Its columns ``result`` and ``frame`` say which. A column that a frame does not have is empty. Of a result without
    recovery there are the frames that need none. ``without``: names of frames that are left out.
    """
    frames = [
        _frame(name, result, k, bootstrap).assign(result=label, frame=name)
        for label, result in results.items()
        for name in _defined(result)
        if name not in without
    ]
    all_frames = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    return all_frames[["result", "frame", *all_frames.columns.drop(["result", "frame"])]]
