"""The numbers and the figures of the study: what far context gives real models, and how much of it a few tokens hold.

    python results/models/study.py collect runs/models     adds the batches that are measured to this folder
    python results/models/study.py                         prints the tables and draws a figure of each cell
    python results/models/study.py brackets MODEL          recovery of SmolLM2's targets that are brackets

A run folder of a measurement in shards holds parts/*, each a saved result; those of every fifth batch are spread
over all texts. Intervals are 95 %, by group and text.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import load, load_study
from analysis.figures.figure2 import levels_figure
from analysis.figures.style import save_figure
from analysis.measurement import FRAMES, RESULT_NAME, save_study
from analysis.parquet import read_parquet, stacked
from analysis.stats import numbers
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.numbers import SHARE_NEEDED
from analysis.stats.tables import show

HERE = Path(__file__).parent
TAUS = (1, 2, 4)
SMOLLM2 = ("books-n256", "code-n256", "releases-n256", "releases-n1024")
FIGURES = (*(f"smollm2-{name}" for name in SMOLLM2), "gemma-releases-n256")
SHARES = ("share_over_tau", "share_below_minus_tau", "share_of_gain")


def collect(runs):
    """Add what is measured of every run to its cell of this study, without the texts."""
    study = load_study(HERE) if (HERE / RESULT_NAME).is_file() else {}
    for folder in sorted(Path(runs).glob("*-n*")):
        before = [study[folder.name]] if folder.name in study else []
        parts = [load(path.parent) for path in sorted(folder.glob(f"parts/*/{RESULT_NAME}"))]
        known = set().union(*(part.targets["target_id"] for part in before))
        new = [part for part in parts if not known & {*part.targets["target_id"]}]
        if not new:
            continue
        joined = [*before, *new]
        if different := joined[0].settings.differences(new[0].settings, but_for=("complete",)):
            raise SystemExit(f"{folder} was measured with other settings: {different}")
        frames = {name: stacked([getattr(part, name) for part in joined]) for name in FRAMES[:2]}
        # the keys of random tokens say nothing, and cannot be made smaller; those of weak targets would take most room
        drawn = (frames["choices"]["selector"] == "random") | (joined[0].settings.choices.tau_nats < 1)
        keys = frames["choices"].loc[drawn, "influence"]
        frames["choices"].loc[drawn, "influence"] = keys.map(np.zeros_like)
        seconds = sum(part.provenance["seconds"] for part in joined)
        commits = dict.fromkeys(commit for part in joined for commit in part.provenance["commit"].split(" "))
        provenance = {**joined[0].provenance, "seconds": seconds, "commit": " ".join(commits)}
        study[folder.name] = replace(joined[0], provenance=provenance, texts=None, **frames)
    save_study(HERE, study)


def shares_by_tau(result):
    """Tidy: how many targets gain more than tau, and lose more, for several tau; the first is that of the choices."""
    of_taus = []
    for tau in TAUS:
        at_tau = replace(
            result,
            settings=result.settings.but(tau_nats=tau),
            targets=result.targets.assign(over_tau=result.gain_nats > tau),
            choices=result.choices.iloc[:0],
        )
        of_taus.append(numbers.shares(at_tau).assign(tau_nats=tau))
    shares = pd.concat(of_taus)
    return shares[shares["name"].isin(SHARES)]


def beyond_same_group(result):
    """Tidy: how much more the true context recovers than another place of the same document, paired, by k."""
    over = result.targets[result.targets["over_tau"]].reset_index(drop=True)
    gain, bootstrap = (
        (over["loss_short_nats"] - over["loss_long_nats"]).to_numpy(float),
        ClusterBootstrap.of(over),
    )
    rows = []
    for level, choices in result.choices.groupby("level", sort=False):
        losses = {
            context: np.stack(of_context.set_index("target_id").loc[over["target_id"], "loss_nats"])
            for context, of_context in choices.groupby("far_context")
        }
        for k, more in zip(result.ks, (losses["same-group"] - losses["true"]).T, strict=True):
            interval = vars(bootstrap.interval(bootstrap.ratio(more.astype(float), gain)))
            rows.append({"name": "true_minus_same_group", "level": level, "k": k, **interval})
    return pd.DataFrame(rows)


def kept_by_others(result):
    """Tidy: the share of the first selector's k tokens that are among the k of another; ``chance`` is k of F."""
    bootstrap, rows, (first, *others) = (
        ClusterBootstrap.of(result.targets.iloc[result.over]),
        [],
        result.selectors,
    )
    levels = result.choices[["level", "sinks"]].drop_duplicates().itertuples(index=False)
    for (level, sinks), selector, k in product(levels, others, result.ks):
        one, other = (result.selected(name, level=level, sinks=sinks)[:, :k] for name in (first, selector))
        kept = (one[:, :, None] == other[:, None, :]).any(axis=2).sum(axis=1)
        row = {"name": "kept", "level": level, "sinks": sinks, "first": first, "selector": selector, "k": k}
        row["chance"] = k / result.n_far
        rows.append(row | vars(bootstrap.ratio_interval(kept, np.full(len(kept), k))))
    return pd.DataFrame(rows)


def net_differences(result):
    """Tidy: how much more the first selector recovers, net of the placebo, than another, paired, by k."""
    over = result.targets.iloc[result.over]
    bootstrap, gain = ClusterBootstrap.of(over), result.gain_nats[result.over].astype(float)
    short, rows = over["loss_short_nats"].to_numpy(float), []
    for level, sinks in result.choices[["level", "sinks"]].drop_duplicates().itertuples(index=False):
        net = {}
        for selector in result.selectors:
            recovered = [
                bootstrap.ratio(
                    short[:, None] - result.loss_nats(selector, far, level=level, sinks=sinks), gain
                )
                for far in ("true", "placebo")
            ]
            net[selector] = recovered[0] - np.maximum(recovered[1], 0)
        first, *others = net
        for selector, (column, k) in product(others, enumerate(result.ks)):
            interval = vars(bootstrap.interval(net[first][:, column] - net[selector][:, column]))
            keys = {"name": "net_difference", "level": level, "sinks": sinks, "first": first}
            rows.append({**keys, "second": selector, "k": k, **interval})
    return pd.DataFrame(rows)


def held_by_few(result):
    """Tidy: the share of the gain of all targets, net, that those hold which k tokens give nine tenths of their own."""
    bootstrap, rows, selector = ClusterBootstrap.of(result.targets), [], result.selectors[0]
    gains = result.gain_nats.astype(float)
    for level, sinks in result.choices[["level", "sinks"]].drop_duplicates().itertuples(index=False):
        losses = result.loss_nats(selector, level=level, sinks=sinks)
        short = result.targets["loss_short_nats"].to_numpy(float)[result.over]
        enough = short[:, None] - losses >= SHARE_NEEDED * gains[result.over, None]
        for k, reached in zip(result.ks, np.logical_or.accumulate(enough, axis=1).T, strict=True):
            of_few = np.zeros(len(gains))
            of_few[result.over[reached]] = gains[result.over[reached]]
            interval = vars(bootstrap.interval(bootstrap.ratio(of_few, gains)))
            rows.append({"name": "held_by_few", "level": level, "sinks": sinks, "k": k} | interval)
    return pd.DataFrame(rows)


def within(result, nats=0.1):
    """Tidy: the share of the targets over tau whose loss given k tokens is at most ``nats`` above L_long.

    ``k_or_fewer``: given k, or one of the smaller k that were measured, which is the smallest k that does it.
    """
    over = result.targets.iloc[result.over]
    bootstrap, rows = ClusterBootstrap.of(over), []
    most = over["loss_long_nats"].to_numpy(float)[:, None] + nats
    levels = result.choices[["level", "sinks"]].drop_duplicates().itertuples(index=False)
    for (level, sinks), selector, far in product(levels, result.selectors, result.far_contexts):
        enough = result.loss_nats(selector, far, level=level, sinks=sinks) <= most
        ways = {"at_k": enough, "k_or_fewer": np.logical_or.accumulate(enough, axis=1)}
        for way, (column, k) in product(ways, enumerate(result.ks)):
            keys = {
                "name": way,
                "level": level,
                "sinks": sinks,
                "selector": selector,
                "far_context": far,
                "k": k,
            }
            rows.append(keys | vars(bootstrap.ratio_interval(ways[way][:, column], np.ones(len(over)))))
    return pd.DataFrame(rows)


def chosen(result, which, tau_nats):
    """The same measurement with other targets in the place of those over tau, as far as tokens were chosen for them.

    ``provenance["without_choices"]``: for how many none were.
    """
    targets = result.targets.assign(over_tau=which & result.targets["over_tau"])
    ids = targets.loc[targets["over_tau"], "target_id"]
    choices = result.choices[result.choices["target_id"].isin(ids)]
    return replace(
        result,
        settings=result.settings.but(tau_nats=tau_nats),
        targets=targets,
        choices=choices,
        provenance=result.provenance | {"without_choices": int(which.sum()) - len(ids)},
    )


def by_half(result, losses):
    """Targets that the odd half of their far context gives more than 1 nat, whatever the whole gives; see halves.py."""
    places = result.targets[["text", "position"]].merge(
        losses, on=["text", "position"], how="left", validate="1:1"
    )
    gains = (places["short"] - places["odd"]).to_numpy(float) > 1
    return chosen(result, gains, 0.1)


def sinks_add(result):
    """Tidy: how much more is recovered as cache with four sinks than without, paired, by selector and k."""
    over = result.targets.iloc[result.over]
    bootstrap, gain, rows = ClusterBootstrap.of(over), result.gain_nats[result.over].astype(float), []
    for selector, far in product(result.selectors, result.far_contexts):
        with_sinks, without = (result.loss_nats(selector, far, level="cache", sinks=n) for n in (4, 0))
        for k, more in zip(result.ks, (without - with_sinks).astype(float).T, strict=True):
            interval = vars(bootstrap.interval(bootstrap.ratio(more, gain)))
            keys = {"name": "sinks_add", "selector": selector, "far_context": far, "k": k}
            rows.append(keys | interval)
    return pd.DataFrame(rows)


def near(result, k=4, tokens=38):
    """Tidy: the share of the first selector's k tokens that are among the far tokens nearest to the block."""
    bootstrap, rows = ClusterBootstrap.of(result.targets.iloc[result.over]), []
    levels = result.choices[["level", "sinks"]].drop_duplicates().itertuples(index=False)
    for (level, sinks), far in product(levels, result.far_contexts):
        columns = result.selected(result.selectors[0], far, level=level, sinks=sinks)[:, :k]
        count = (columns >= result.n_far - tokens).sum(axis=1)
        interval = vars(bootstrap.ratio_interval(count, np.full(len(count), k)))
        rows.append({"name": "near", "level": level, "sinks": sinks, "far_context": far} | interval)
    return pd.DataFrame(rows)


def at_ks(result, ks):
    """The same measurement with fewer counts of tokens."""
    columns = [result.ks.index(k) for k in ks]
    choices = result.choices.assign(
        selected=[each[: max(ks)] for each in result.choices["selected"]],
        influence=[each[: max(ks)] for each in result.choices["influence"]],
        loss_nats=[each[columns] for each in result.choices["loss_nats"]],
    )
    return replace(result, settings=result.settings.but(ks=list(ks)), choices=choices)


def of_both_seeds(first, second):
    """The targets of two draws as one measurement with the counts of the first; none twice."""
    second, place = at_ks(second, first.ks), ["text", "position"]
    drawn = pd.MultiIndex.from_frame(first.targets[place])
    new = second.targets[~pd.MultiIndex.from_frame(second.targets[place]).isin(drawn)]
    behind = first.targets["target_id"].max() + 1
    choices = second.choices[second.choices["target_id"].isin(new["target_id"])]
    choices = choices.assign(target_id=choices["target_id"] + behind)
    targets = stacked([first.targets, new.assign(target_id=new["target_id"] + behind)])
    return replace(first, targets=targets, choices=stacked([first.choices, choices]))


def beside(one, other):
    """The choices of both at the targets and counts of the other, so that they are compared in pairs."""
    one, ids = at_ks(one, other.ks), other.targets["target_id"]
    settings = one.settings.but(selectors=[*one.selectors, *other.selectors])
    choices = stacked([one.choices[one.choices["target_id"].isin(ids)], other.choices])
    return replace(other, settings=settings, choices=choices)


def cells():
    """The measurements of this study by name, with what is compared of several."""
    study = load_study(HERE)
    first, second, screened = (
        study.get(f"smollm2-{name}-n256") for name in ("releases", "releases-seed-1", "screened")
    )
    if first and screened:
        study["smollm2-screened-n256"] = beside(first, screened)
    joined, screened = (study.get(f"smollm2-joined-{name}n4096") for name in ("", "screened-"))
    if joined and screened:
        study["smollm2-joined-screened-n4096"] = beside(screened, at_ks(joined, screened.ks))
    for name in [name for name in study if "tau-0.1" in name]:
        weak = study.pop(name)
        gain = weak.gain_nats
        study[f"{name}, 0.1 to 1 nat"] = chosen(weak, (gain > 0.1) & (gain <= 1), 0.1)
        study[f"{name}, over 1 nat"] = chosen(weak, gain > 1, 1.0)
        halves = read_parquet(HERE / f"halves-{name.removeprefix('smollm2-').removesuffix('-n256')}.parquet")
        study[f"{name}, by half"] = by_half(weak, halves)
    if first and second:
        study["smollm2-releases-n256"] = of_both_seeds(first, second)
    return study


def brackets(model):
    """Print the recovery of targets of nothing but brackets; MODEL gives the text of a token."""
    from analysis.open_model import open_model

    decode = open_model(model).decoder.pieces
    for cell, result in cells().items():
        if cell.removeprefix("smollm2-") not in SMOLLM2:
            continue
        texts = [decode([token])[0].strip() for token in result.targets["token"]]
        which = np.array([bool(text) and set(text) <= set("()[]{}<>") for text in texts])
        of_brackets = chosen(result, which, 1.0)
        over = of_brackets.targets[of_brackets.targets["over_tau"]]
        title = f"{cell}: {len(over)} of {which.sum()} brackets over tau, in {over['group'].nunique()} groups"
        print(f"\n{title}")
        if len(over):
            print(show(numbers.recovery(of_brackets), across="far_context", digits=0))


def main():
    """Print all tables of every cell, and draw its figure."""
    for cell, result in cells().items():
        tau = f"{result.settings.choices.tau_nats:g} nats"
        targets = f"{len(result.over)} of {len(result.targets):,} targets over {tau}"
        if without := result.provenance.get("without_choices"):
            targets += f"; for {without} more no token was chosen"
        print("\n" + show(shares_by_tau(result), across="tau_nats", title=f"{cell}: {targets}"))
        for _, recovery in numbers.recovery(result).groupby(["level", "unit", "sinks"], sort=False):
            print("\n" + show(recovery, across="far_context", digits=0, title=cell))
        if "tau-0.1" in cell:
            print("\n" + show(within(result), across="k", digits=0, title=cell))
            print("\n" + show(sinks_add(result), across="k", digits=0, title=cell))
            continue
        for what in (
            numbers.kinds,
            numbers.tokens_needed,
            numbers.differences,
            numbers.distances,
            numbers.placebos,
        ):
            tidy = what(result)
            if "far_context" in tidy and what is not numbers.placebos:
                tidy = tidy[tidy["far_context"].fillna("true") == "true"]
            if len(tidy):
                print("\n" + show(tidy, title=f"{cell}, {what.__name__}"))
        if result.choices["unit"].eq("token").all() and result.far_contexts == ["true", "placebo"]:
            print("\n" + show(held_by_few(result), title=f"{cell}, by {result.selectors[0]}"))
            print("\n" + show(within(result), across="k", digits=0, title=cell))
            print("\n" + show(near(result), title=cell))
            if len(result.selectors) > 1:
                print("\n" + show(kept_by_others(result), across="k", title=cell))
                print("\n" + show(net_differences(result), across="k", digits=0, title=cell))
        if "same-group" in result.far_contexts:
            print("\n" + show(beyond_same_group(result), title=cell))
        if cell in FIGURES:
            save_figure(levels_figure(result), HERE, f"{cell}.png")


if __name__ == "__main__":
    command, given = sys.argv[1:2], sys.argv[2:]
    {"collect": collect, "brackets": brackets}[command[0]](*given) if command else main()
