"""The tables of sizes and of the longer context of this folder's page; no model is needed.

    python results/length/study.py                           prints the numbers
    python results/length/study.py --numbers results/length/numbers.csv      writes them, too
    python results/length/study.py --figures results/length  draws sizes/ladder.png, sizes/joint.png, schemes/joint.png

Rise: loss at four times the window minus loss at the window, of `ladder` and `together` (nats per token). Recoveries
are of leave-one-out at k = 4. Cross-fitted records (1-2: chosen by seed 1, measured by seed 2) are open points.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from analysis import Result, load_study
from analysis.stats.numbers import recovery, shares, tokens_needed
from analysis.stats.tables import INTERVAL, OF_RUNS, interval_text, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
SELECTOR, K, TIMES = "leave-one-out", 4, 4
SIZES = ("0.3m", "0.6m", "pose", "1.9m")
SCHEMES = ("rope", "random_start", "pose", "pose4", "pose16", "nope", "alibi")
Interval = Mapping[str, Any]
"""value, low and high."""


@dataclass(frozen=True)
class Point:
    """A model, its seeds joined, or a cross-fitted record."""

    crossfit: bool
    label: str
    parameters: int
    losses: list[Interval]
    """At each length, in nats per token."""
    rise: Interval
    numbers: dict[str, Interval]
    """Those of `numbers_of`, and rise."""
    seeds: list[dict[str, Interval]]


def percent(interval: Interval, digits: int = 0) -> str:
    """``value [low, high]`` in per cent."""
    return interval_text(interval, percent=True, digits=digits)


def nats(interval: Interval, digits: int) -> str:
    """``value [low, high]`` in nats."""
    return interval_text(interval, digits=digits - 1)


def numbers_of(result: Result) -> dict[str, Interval]:
    """Share over tau, gain, net recovery and share that K tokens suffice for."""
    of_all = {row["name"]: row for row in shares(result).to_dict("records")}
    [net] = recovery(result, selector=SELECTOR, far_context="net", k=K).to_dict("records")
    needed = tokens_needed(result, selector=SELECTOR, far_context="true", k=K)
    [suffice] = needed[needed["name"] == "reached"].to_dict("records")
    return {
        "over_tau": of_all["share_over_tau"],
        "below_minus_tau": of_all["share_below_minus_tau"],
        "of_gain": of_all["share_of_gain"],
        "gain": of_all["gain_nats"],
        "net": net,
        "suffice": suffice,
    }


def point_of(result: Result, records: Path, folder: str) -> Point:
    """The numbers of a result, and the losses and rise of the model that it evaluates."""
    length = json.loads((records / folder / "length.json").read_text(encoding="utf8"))
    weights = (result.settings.model.sha256, result.settings.model.rope_scaling)
    one = next(one for one in length["models"] if (one["model_sha256"], one["rope_scaling"]) == weights)
    rows = [row for row in length["numbers"] if row["model"] == one["label"]]
    longest = TIMES * one["training_length"]
    numbers = numbers_of(result)
    [rise] = [row for row in rows if row["name"] == "rise_nats" and row["to_tokens"] == longest]
    return Point(
        crossfit=result.crossfit,
        label=one["label"],
        parameters=one["parameters"],
        losses=[row for row in rows if row["name"] == "loss_at_length_nats"],
        rise=rise,
        numbers=numbers | {"rise": rise},
        seeds=[numbers_of(run) for run in result.runs] or [numbers],
    )


def points(study: Mapping[str, Result], records: Path, names: Sequence[str], folder: str) -> list[Point]:
    """A point for every model, its seeds joined, and for every cross-fitted record of the ladder."""
    of_models = []
    for name in names:
        of_name = [result for cell, result in study.items() if cell.startswith(f"influence/config={name},")]
        together = Result.join([result for result in of_name if not result.crossfit])
        crossfit = [result for result in of_name if result.crossfit] if folder == "ladder" else []
        of_models += [point_of(result, records, folder) for result in (together, *crossfit)]
    return of_models


def print_point(point: Point) -> None:
    """Print the numbers of every seed, those of both together, and the loss by position."""
    shown = {"over_tau": 1, "net": 0, "suffice": 0}
    seeds = [
        f"{name} {', '.join(percent(seed[name], digits) for seed in point.seeds)} %"
        for name, digits in shown.items()
    ]
    gains = ", ".join(nats(seed["gain"], 3) for seed in point.seeds)
    suffix = " (cross-fit)" if point.crossfit else ""
    print(f"{point.label}{suffix}, {point.parameters:,}: {'; '.join(seeds)}; gain {gains} nats")
    if not point.crossfit:
        losses = " | ".join(f"{row['to_tokens']}: {nats(row, 2)}" for row in point.losses)
        print(f"    {losses} | rise {nats(point.rise, 2)}")
        below = percent(point.numbers["below_minus_tau"], 2)
        print(f"    together: below -tau {below} %, of the net gain {percent(point.numbers['of_gain'])} %")


def frame_of(point: Point) -> pd.DataFrame:
    """All numbers of a point: of its seeds together, of each seed, and its losses by length."""
    rows = [{"of_seed": "together", "name": name} | number_of(row) for name, row in point.numbers.items()]
    for place, seed in enumerate(point.seeds, 1):
        rows += [{"of_seed": str(place), "name": name} | number_of(row) for name, row in seed.items()]
    for row in point.losses:
        rows.append({"name": row["name"], "to_tokens": row["to_tokens"]} | number_of(row))
    return pd.DataFrame(rows).assign(model=point.label, crossfit=point.crossfit, parameters=point.parameters)


def number_of(row: Interval) -> dict[str, Any]:
    """Value, interval and values of runs of a row."""
    return {name: row[name] for name in (*INTERVAL, *OF_RUNS) if name in row}


def bars(axes: Axes, x: Interval | float, y: Interval, x_scale: float, y_scale: float, **look: Any) -> None:
    """A point with its interval in y, and in x where that is an interval."""
    across = x if isinstance(x, Mapping) else {"value": x}
    x_bar = bar_of(across, x_scale) if "low" in across else None
    look |= {"marker": "o", "ms": 4, "lw": 0.8, "capsize": 2}
    axes.errorbar(
        x_scale * across["value"], y_scale * y["value"], xerr=x_bar, yerr=bar_of(y, y_scale), **look
    )


def bar_of(interval: Interval, scale: float) -> list[list[float]]:
    """How far an interval reaches below and above its value, as errorbar takes it."""
    below = interval["value"] - interval["low"]
    above = interval["high"] - interval["value"]
    return [[scale * below], [scale * above]]


def draw_ladder(ladder: Sequence[Point], path: Path) -> None:
    """Use, sparsity, tokens needed and rise against size; open points are cross-fitted."""
    figure, axes = plt.subplots(2, 2, figsize=(7, 5.6), layout="constrained")
    panels = (
        ("over_tau", 100, "targets over 1 nat [%]"),
        ("net", 100, f"net recovery at k = {K} [%]"),
        ("suffice", 100, f"targets with 90 % of the gain\nfrom {K} tokens [%]"),
        ("rise", 1, f"loss at {TIMES} × the window less\nthat at the window [nats]"),
    )
    for panel, (name, scale, label) in zip(axes.flat, panels, strict=True):
        for number, point in enumerate(ladder):
            if not (point.crossfit and name in ("over_tau", "rise")):
                x = point.parameters / 1e6 * (1 + 0.03 * (number % 3))  # beside each other
                fill = "white" if point.crossfit else "#332288"
                bars(panel, x, point.numbers[name], 1, scale, color="#332288", markerfacecolor=fill)
        panel.set(xscale="log", xlabel="parameters [millions]", ylabel=label)
        panel.set_xticks([0.34, 0.58, 1.0, 1.9], ["0.34", "0.58", "1", "1.9"])
        panel.minorticks_off()
    figure.suptitle("open points: chosen by one seed, measured by the other", fontsize=9)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def draw_joint(some: Sequence[Point], path: Path) -> None:
    """Rise against net recovery."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for number, label in enumerate(dict.fromkeys(point.label for point in some)):
        for place, point in enumerate(point for point in some if point.label == label):
            color = f"C{number}"
            fill = "white" if point.crossfit else color
            named = "_" * place + label
            bars(
                axes, point.numbers["net"], point.rise, 100, 1, color=color, markerfacecolor=fill, label=named
            )
    axes.set_xlabel(f"net recovery at k = {K} [%]   (open: chosen by another seed)")
    axes.set_ylabel(f"loss at {TIMES} × the window - at the window\n[nats per token]")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers, and draw the figures where a folder for them is given."""
    given = study_parser(__doc__, HERE, figures=True).parse_args(arguments)
    study = load_study(given.records)
    ladder = points(study, given.records, SIZES, "ladder")
    schemes = points(study, given.records, SCHEMES, "together")
    for point in ladder + schemes:
        print_point(point)
    longer = []
    for cell, result in study.items():
        if cell.startswith("influence-512-128/"):
            of_all = shares(result)
            longer.append(of_all.assign(cell=cell))
            gain = of_all.set_index("name").loc["gain_nats"].to_dict()
            print(f"{cell}: gain {nats(gain, 3)} nats of {len(result.targets):,} targets")
    if given.numbers:
        tables = {
            "sizes": pd.concat(map(frame_of, ladder)),
            "encodings": pd.concat(map(frame_of, schemes)),
            "512 tokens over the last 128": pd.concat(longer),
        }
        save_numbers(given.numbers, tables)
    if given.figures:
        for name in ("sizes", "schemes"):
            (given.figures / name).mkdir(parents=True, exist_ok=True)
        draw_ladder(ladder, given.figures / "sizes" / "ladder.png")
        draw_joint(ladder, given.figures / "sizes" / "joint.png")
        draw_joint(schemes, given.figures / "schemes" / "joint.png")


if __name__ == "__main__":
    main()
