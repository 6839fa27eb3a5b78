"""The numbers and the figures of the study: what far context gives real models, and how much of it a few tokens hold.

    python results/models/study.py                           prints the tables of all cells
    python results/models/study.py --cells smollm2-releases-n256,gemma-books-n256   prints those of some
    python results/models/study.py --figures results/models  draws a figure of the main cells, too
    python results/models/study.py --numbers results/models/numbers.csv   writes all numbers, too
    python results/models/study.py collect runs/models       adds the batches that are measured to this folder

Intervals are 95 %, by group and text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import InfluenceMap, Result, load, load_study
from analysis.figures.figure2 import kept_as_figure
from analysis.figures.style import save_figure
from analysis.measurement import save_study
from analysis.parquet import read_parquet, stacked
from analysis.probes.length import LossByPosition
from analysis.stats import comparisons, numbers
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.recovery import BEST, KEPT_AS_COLUMNS, Measured, with_over_tau
from analysis.stats.tables import Tables, interval_frame, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
TAUS = (1, 2, 4)
FIGURES = (
    "smollm2-books-n256",
    "smollm2-code-n256",
    "smollm2-releases-n256",
    "smollm2-releases-n1024",
    "gemma-releases-n256",
)
"""Cells that have a picture."""
SHARES = ("share_over_tau", "share_below_minus_tau", "share_of_gain")
NOT_WRITTEN = ", distances"
"""Numbers that are printed and no page shows: they would be a seventh of the CSV file."""
WITH_SINKS = {"level": "cache", "unit": "token", "sinks": 4}
WITHOUT_SINKS = {"level": "cache", "unit": "token", "sinks": 0}


def collect(runs: str) -> None:
    """Add what is measured of every run to its cell of this study, without the texts."""
    study = load_study(HERE)
    for folder in sorted(Path(runs).glob("*-n*")):
        before = [study[folder.name]] if folder.name in study else []
        known: set[int] = set().union(*(part.targets["target_id"] for part in before))
        new = [part for part in Result.load_parts(folder) if not known & {*part.targets["target_id"]}]
        if not new:
            continue
        joined = Result.of_parts([*before, *new])
        # the keys of random tokens say nothing, and cannot be made smaller; those of weak targets would take most room
        drawn = (joined.choices["selector"] == "random") | (joined.settings.choices.tau_nats < 1)
        keys = joined.choices.loc[drawn, "influence"]
        joined.choices.loc[drawn, "influence"] = keys.map(np.zeros_like)
        commits = dict.fromkeys(
            commit for part in [*before, *new] for commit in part.provenance["commit"].split(" ")
        )
        provenance = joined.provenance | {"commit": " ".join(commits)}
        study[folder.name] = replace(joined, provenance=provenance, texts=None)
    save_study(HERE, study)


def chosen(result: Result, which: np.ndarray, tau_nats: float) -> Result:
    """The same measurement with other targets in the place of those over tau, as far as tokens were chosen for them.

    ``provenance["without_choices"]``: for how many none were.
    """
    is_over = which & result.targets["over_tau"].to_numpy(bool)
    provenance = result.provenance | {"without_choices": int(which.sum() - is_over.sum())}
    settings = result.settings.but(tau_nats=tau_nats)
    of_which = with_over_tau(result, lambda _: is_over)
    return Result.of(replace(of_which, settings=settings, provenance=provenance))


def by_half(result: Result, losses: pd.DataFrame) -> Result:
    """Targets that the odd half of their far context gives more than 1 nat, whatever the whole gives; see halves.py."""
    places = result.targets[["text", "position"]].merge(
        losses, on=["text", "position"], how="left", validate="1:1"
    )
    gains = (places["short"] - places["odd"]).to_numpy(float) > 1
    return chosen(result, gains, 0.1)


def near(result: Result) -> pd.DataFrame:
    """Tidy: the share of the first selector's four tokens that are among the 38 far tokens nearest to the block."""
    rows = []
    for measured in Measured.of_all_ways(result):
        for far in measured.far_contexts:
            columns = measured.of_choices("selected", measured.selectors[0], far)[:, :4]
            count = (columns >= result.n_far - 38).sum(axis=1)
            rows.append({"name": "near", **measured.way, "far_context": far, **measured.ratio(count, 4)})
    return pd.DataFrame(rows)


def net_differences(result: Result) -> pd.DataFrame:
    """`numbers.differences` of net recovery at every k, without the best of all selectors."""
    of_ks = pd.concat([numbers.differences(result, k=k, far_context="net") for k in result.ks])
    in_order = of_ks.sort_values(
        [*KEPT_AS_COLUMNS, "k"], kind="stable", key=lambda column: pd.factorize(column)[0]
    )
    return in_order[in_order["second"] != BEST]


def sinks_add(result: Result) -> pd.DataFrame:
    """What four sinks add to what is recovered as cache, paired, in the true far context and in the placebo."""
    frame = comparisons.kept_as_differences(result, WITH_SINKS, WITHOUT_SINKS)
    return frame[frame["far_context"] != "net"]


def at_ks(result: Result, ks: Sequence[int]) -> Result:
    """The same measurement with fewer counts of tokens."""
    columns = [result.ks.index(k) for k in ks]
    choices = result.choices.assign(
        selected=[row[: max(ks)] for row in result.choices["selected"]],
        influence=[row[: max(ks)] for row in result.choices["influence"]],
        loss_nats=[row[columns] for row in result.choices["loss_nats"]],
    )
    return replace(result, settings=result.settings.but(ks=list(ks)), choices=choices)


def of_both_seeds(first: Result, second: Result) -> Result:
    """The targets of two draws as one measurement with the counts of the first; none twice."""
    second = at_ks(second, first.ks)
    place = ["text", "position"]
    drawn = pd.MultiIndex.from_frame(first.targets[place])
    new = second.targets[~pd.MultiIndex.from_frame(second.targets[place]).isin(drawn)]
    behind = first.targets["target_id"].max() + 1
    choices = second.choices[second.choices["target_id"].isin(new["target_id"])]
    choices = choices.assign(target_id=choices["target_id"] + behind)
    targets = stacked([first.targets, new.assign(target_id=new["target_id"] + behind)])
    return replace(first, targets=targets, choices=stacked([first.choices, choices]))


def beside(one: Result, other: Result) -> Result:
    """The choices of both at the targets and counts of the other, so that they are compared in pairs."""
    one = at_ks(one, other.ks)
    ids = other.targets["target_id"]
    settings = one.settings.but(selectors=[*one.selectors, *other.selectors])
    choices = stacked([one.choices[one.choices["target_id"].isin(ids)], other.choices])
    return replace(other, settings=settings, choices=choices)


def cells(records: Path) -> dict[str, Result]:
    """The measurements of this study by name, with what is compared of several."""
    study = load_study(records)
    first = study.get("smollm2-releases-n256")
    second = study.get("smollm2-releases-seed-1-n256")
    screened = study.get("smollm2-screened-n256")
    if first and screened:
        study["smollm2-screened-n256"] = beside(first, screened)
    joined = study.get("smollm2-joined-n4096")
    of_joined = study.get("smollm2-joined-screened-n4096")
    if joined and of_joined:
        study["smollm2-joined-screened-n4096"] = beside(of_joined, at_ks(joined, of_joined.ks))
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


def chosen_cells(study: Mapping[str, Result], names: Sequence[str]) -> dict[str, Result]:
    """Those cells of a study that have these names, and what was made of them ("NAME, by half")."""
    by_name: dict[str, dict[str, Result]] = {}
    for cell, result in study.items():
        by_name.setdefault(cell.partition(", ")[0], {})[cell] = result
    for name in names:
        if name not in by_name:
            raise SystemExit(f"there is no cell {name}; choose among {', '.join(by_name)}")
    return {cell: result for name in names for cell, result in by_name[name].items()}


def add_cell(tables: Tables, cell: str, result: Result) -> None:
    """All tables of a cell."""
    tau = f"{result.settings.choices.tau_nats:g} nats"
    targets = f"{len(result.over)} of {len(result.targets):,} targets over {tau}"
    if without := result.provenance.get("without_choices"):
        targets += f"; for {without} more no token was chosen"
    shares = comparisons.by_tau(numbers.shares, result, TAUS)
    tables.add(f"{cell}: {targets}", shares[shares["name"].isin(SHARES)], across="tau_nats")
    recovery = numbers.recovery(result)
    tables.add(f"{cell}, recovery", recovery, by=KEPT_AS_COLUMNS, across="far_context", digits=0)
    if "tau-0.1" in cell:
        tables.add(f"{cell}, near L_long", comparisons.within(result), across="k", digits=0)
        tables.add(f"{cell}, sinks add", sinks_add(result), across="k", digits=0)
        return
    for name in ("kinds", "tokens_needed", "differences", "distances", "placebos"):
        tidy = numbers.NUMBERS[name].frame(result)
        if name != "placebos":
            tidy = tidy[tidy["far_context"].fillna("true") == "true"]
        if len(tidy):
            tables.add(f"{cell}, {name}", tidy)
    if result.choices["unit"].eq("token").all() and result.far_contexts == ["true", "placebo"]:
        tables.add(f"{cell}, held by few", comparisons.held_by_few(result))
        tables.add(f"{cell}, near L_long", comparisons.within(result), across="k", digits=0)
        tables.add(f"{cell}, chosen near the block", near(result))
        if len(result.selectors) > 1:
            tables.add(f"{cell}, the same tokens", comparisons.overlaps(result), across="k")
            differences = net_differences(result)
            tables.add(f"{cell}, net recovery less that of", differences, across="k", digits=0)
    if "same-group" in result.far_contexts:
        tables.add(f"{cell}, elsewhere in the document", comparisons.elsewhere(result), across="k")


def add_sinks(tables: Tables, cell: str, result: Result) -> None:
    """Which share of four chosen tokens is another where sinks are not kept by themselves."""
    chosen_at = [Measured(result, way=way) for way in (WITH_SINKS, WITHOUT_SINKS)]
    rows = []
    for selector in chosen_at[0].selectors:
        columns = [one.of_choices("selected", selector, "true")[:, :4] for one in chosen_at]
        others = 4 - np.rint(4 * numbers.overlap(*columns))
        rows.append({"name": "other tokens", "selector": selector, **chosen_at[0].ratio(others, 4)})
    tables.add(f"{cell}, without sinks of their own", pd.DataFrame(rows))


def add_neighbors(tables: Tables, cell: str, result: Result) -> None:
    """How many tokens the first four choices are with the token before and the one behind."""
    measured = Measured(result, way={"level": "text", "unit": "neighbors", "sinks": 0})
    selected = measured.of_choices("selected", "leave-one-out-kl", "true")[:, :4].astype(int)
    with_neighbors = np.concatenate([selected - 1, selected, selected + 1], axis=1)
    counts = [len({*row} & {*range(result.n_far)}) for row in with_neighbors]
    frame = interval_frame([{"name": "tokens", "value": np.mean(counts)}], ["name"])
    tables.add(f"{cell}, four choices with their neighbors, mean", frame, percent=False)


def add_loss_by_position(tables: Tables, records: Path) -> None:
    """What YaRN costs up to 8,192 tokens, and its loss in the last bin without celery, whose log stands twice."""
    rows = LossByPosition.load(records / "length").rows
    rows = rows[rows["name"] == "loss_nats"]
    inside = rows[rows["to_tokens"] <= 8192].groupby(["text", "group", "number"])[["sum", "count"]].sum()
    of_models = inside.unstack("number").reset_index()
    bootstrap = ClusterBootstrap.of(of_models)
    draws = [bootstrap.ratio(of_models["sum", number], of_models["count", number]) for number in (0, 1)]
    cost = {"name": "YaRN less none, up to 8,192", **vars(bootstrap.interval(draws[1] - draws[0]))}
    last = rows[(rows["number"] == 1) & (rows["to_tokens"] == rows["to_tokens"].max())]
    last = last[last["group"] != "celery"]
    of_last = {"name": "YaRN, the last bin, without celery", "value": last["sum"].sum() / last["count"].sum()}
    tables.add("loss by position [nats]", interval_frame([cost, of_last], ["name"]), percent=False)


def add_costs(tables: Tables, study: Mapping[str, Result]) -> None:
    """The seconds that a sampled target took, of every measurement."""
    rows = []
    for cell, result in study.items():
        contexts = result.settings.contexts
        seconds = result.provenance["seconds"] / len(result.targets)
        row = {"cell": cell, "N": contexts.n_long, "M": contexts.n_short, "B": contexts.targets_per_block}
        machine = result.provenance["machine"]
        features = " ".join(machine["features"])
        rows.append(row | {"seconds a target": seconds, "processor": f"{machine['processor']} {features}"})
    costs = pd.DataFrame(rows)
    print("\nwhat it cost\n" + costs.to_string(index=False, float_format="{:.1f}".format))
    tables.frames["what it cost, seconds a target"] = costs.rename(
        columns={"cell": "name", "seconds a target": "value"}
    )[["name", "value"]]


def add_xray(tables: Tables, story: InfluenceMap) -> None:
    """How many tokens of the story gain and lose, and the 20 strongest influences."""
    tokens = story.tokens
    gain = tokens["loss_short_nats"] - tokens["loss_long_nats"]
    gains = gain > 1
    of_all = {
        "tokens": gain.notna().sum(),
        "gain more than 1 nat": gains.sum(),
        "together": gain[gains].sum(),
        "lose more": (gain < -1).sum(),
        "all together": gain.sum(),
    }
    rows = [{"name": name, "value": float(value)} for name, value in of_all.items()]
    tables.add("the story", interval_frame(rows, ["name"]), percent=False)
    influence = np.nan_to_num(story.matrix())
    rows = []
    for place in np.argsort(influence, axis=None)[:-21:-1]:
        target, source = np.unravel_index(place, influence.shape)
        pieces = {"token": tokens["piece"][target], "needs": tokens["piece"][source]}
        nats = {"influence": influence[target, source], "gain": gain[target]}
        rows.append({"position": target, **pieces, "tokens back": target - source, **nats})
    print("\n" + pd.DataFrame(rows).to_string(index=False, float_format="{:.1f}".format))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables of every cell; write them, and draw the figures, where that is asked for."""
    parser = study_parser(__doc__, HERE, figures=True)
    parser.add_argument("command", nargs="?", choices=("collect",), metavar="COMMAND")
    parser.add_argument("runs", nargs="?", metavar="RUNS")
    parser.add_argument(
        "--cells", metavar="NAMES", help="names of cells, by comma (default: all, and what is no cell)"
    )
    given = parser.parse_args(arguments)
    if given.command:
        collect(given.runs)
        return
    study = cells(given.records)
    if given.cells:
        study = chosen_cells(study, given.cells.split(","))
    tables = Tables()
    for cell, result in study.items():
        add_cell(tables, cell, result)
        if cell.endswith(", over 1 nat"):
            add_sinks(tables, cell, result)
        if cell == "smollm2-units-n256":
            add_neighbors(tables, cell, result)
        if given.figures and cell in FIGURES:
            figure = kept_as_figure(result)
            assert figure is not None, f"{cell} was kept in one way"
            save_figure(figure, given.figures, f"{cell}.png")
    if not given.cells:
        add_loss_by_position(tables, given.records)
        measured = load_study(given.records)
        add_costs(tables, {**measured, "checkpoint": load(given.records / "checkpoint")})
        add_xray(tables, InfluenceMap.load(given.records / "story"))
    if given.numbers:
        written = {title: frame for title, frame in tables.frames.items() if not title.endswith(NOT_WRITTEN)}
        save_numbers(given.numbers, written)


if __name__ == "__main__":
    main()
