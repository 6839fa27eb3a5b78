"""The tables of sizes and of the longer context of this folder's page; no model is needed.

    python results/length/study.py                           prints the numbers
    python results/length/study.py --numbers results/length/numbers.csv      writes them, too
    python results/length/study.py --figures results/length  draws sizes/ladder.png

Rise: loss at four times the window minus loss at the window, of `ladder` and `together` (nats per token). Recoveries
are of leave-one-out at k = 4. Cross-fitted records (1-2: chosen by seed 1, measured by seed 2) are open points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis import Result, load_study
from analysis.figures.style import bar_lengths
from analysis.probes.length import OF_LENGTH, RISE, LossByPosition
from analysis.stats.numbers import recovery, shares, tokens_needed
from analysis.stats.tables import INTERVAL, OF_RUNS, interval_text, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
SELECTOR, K, TIMES = "leave-one-out", 4, 4
SIZES = ("0.3m", "0.6m", "pose", "1.9m")
SCHEMES = ("rope", "random_start", "pose", "pose4", "pose16", "nope", "alibi")
NUMBERS = {
    "share_over_tau": "over_tau",
    "share_below_minus_tau": "below_minus_tau",
    "share_of_gain": "of_gain",
    "gain_nats": "gain",
    "net": "net",
    "reached": "suffice",
}
"""What numbers of a result are called here, in their order."""
COLUMNS = [*INTERVAL, *OF_RUNS]
percent = partial(interval_text, percent=True, digits=0)
nats = partial(interval_text, digits=1)


@dataclass(frozen=True)
class Point:
    """A model, its seeds joined, or a cross-fitted record."""

    crossfit: bool
    label: str
    parameters: int
    losses: pd.DataFrame
    """A row a length, in nats per token."""
    numbers: pd.DataFrame
    """Rows named as in `NUMBERS`, and rise."""
    seeds: list[pd.DataFrame]


def numbers_of(result: Result) -> pd.DataFrame:
    """Share over tau, gain, net recovery and share that K tokens suffice for, by name."""
    net = recovery(result, selector=SELECTOR, far_context="net", k=K).assign(name="net")
    needed = tokens_needed(result, selector=SELECTOR, far_context="true", k=K)
    frame = pd.concat([shares(result), net, needed]).set_index("name")
    return frame.filter(COLUMNS).loc[[*NUMBERS]].rename(NUMBERS)


def point_of(result: Result, length: LossByPosition) -> Point:
    """The numbers of a result, and the losses and rise of the model that it evaluates."""
    weights = (result.settings.model.sha256, result.settings.model.rope_scaling)
    model = next(one for one in length.models if (one["model_sha256"], one["rope_scaling"]) == weights)
    of_model = length.numbers[length.numbers["model"] == model["label"]]
    longest = TIMES * model["training_length"]
    is_rise = (of_model["name"] == RISE) & (of_model["to_tokens"] == longest)
    rise = of_model[is_rise].assign(name="rise").set_index("name")
    numbers = numbers_of(result)
    return Point(
        crossfit=result.crossfit,
        label=model["label"],
        parameters=model["parameters"],
        losses=of_model.loc[of_model["name"] == OF_LENGTH, ["name", "to_tokens", *COLUMNS]],
        numbers=pd.concat([numbers, rise.filter(COLUMNS)]),
        seeds=[numbers_of(run) for run in result.runs] or [numbers],
    )


def points(study: Mapping[str, Result], names: Sequence[str], length: LossByPosition) -> list[Point]:
    """A point for every model, its seeds joined, and for every cross-fitted record of it."""
    of_models = []
    for name in names:
        of_name = [result for cell, result in study.items() if cell.startswith(f"influence/config={name},")]
        together = Result.join([result for result in of_name if not result.crossfit])
        crossfit = [result for result in of_name if result.crossfit]
        of_models += [point_of(result, length) for result in (together, *crossfit)]
    return of_models


def print_point(point: Point) -> None:
    """Print the numbers of every seed, those of both together, and the loss by position."""
    shown = {"over_tau": 1, "net": 0, "suffice": 0}
    seeds = [
        f"{name} {', '.join(percent(seed.loc[name], digits=digits) for seed in point.seeds)} %"
        for name, digits in shown.items()
    ]
    gains = ", ".join(nats(seed.loc["gain"], digits=2) for seed in point.seeds)
    suffix = " (cross-fit)" if point.crossfit else ""
    print(f"{point.label}{suffix}, {point.parameters:,}: {'; '.join(seeds)}; gain {gains} nats")
    if not point.crossfit:
        losses = " | ".join(f"{row['to_tokens']}: {nats(row)}" for row in point.losses.to_dict("records"))
        print(f"    {losses} | rise {nats(point.numbers.loc['rise'])}")
        below = percent(point.numbers.loc["below_minus_tau"], digits=2)
        of_gain = percent(point.numbers.loc["of_gain"])
        print(f"    together: below -tau {below} %, of the net gain {of_gain} %")


def frame_of(point: Point) -> pd.DataFrame:
    """All numbers of a point: of its seeds together, of each seed, and its losses by length."""
    by_seed = {str(number): seed for number, seed in enumerate(point.seeds, 1)}
    of_seeds = pd.concat({"together": point.numbers, **by_seed}, names=["of_seed"]).reset_index()
    frame = pd.concat([of_seeds, point.losses])
    return frame.assign(model=point.label, crossfit=point.crossfit, parameters=point.parameters)


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
        for place, point in enumerate(ladder):
            if not (point.crossfit and name in ("over_tau", "rise")):
                x = point.parameters / 1e6 * (1 + 0.03 * (place % 3))  # beside each other
                fill = "white" if point.crossfit else "#332288"
                number = point.numbers.loc[name]
                panel.errorbar(
                    x,
                    scale * number["value"],
                    yerr=scale * bar_lengths(number.to_frame().T),
                    color="#332288",
                    markerfacecolor=fill,
                    marker="o",
                    ms=4,
                    lw=0.8,
                    capsize=2,
                )
        panel.set(xscale="log", xlabel="parameters [millions]", ylabel=label)
        panel.set_xticks([0.34, 0.58, 1.0, 1.9], ["0.34", "0.58", "1", "1.9"])
        panel.minorticks_off()
    figure.suptitle("open points: chosen by one seed, measured by the other", fontsize=9)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers, and draw the figure where a folder for it is given."""
    given = study_parser(__doc__, HERE, figures=True).parse_args(arguments)
    study = load_study(given.records)
    ladder = points(study, SIZES, LossByPosition.load(given.records / "ladder"))
    not_crossfit = {cell: result for cell, result in study.items() if not result.crossfit}
    schemes = points(not_crossfit, SCHEMES, LossByPosition.load(given.records / "together"))
    for point in ladder + schemes:
        print_point(point)
    longer = []
    for cell, result in study.items():
        if cell.startswith("influence-512-128/"):
            of_all = shares(result)
            longer.append(of_all.assign(cell=cell))
            gain = of_all.set_index("name").loc["gain_nats"]
            print(f"{cell}: gain {nats(gain, digits=2)} nats of {len(result.targets):,} targets")
    if given.numbers:
        tables = {
            "sizes": pd.concat(map(frame_of, ladder)),
            "encodings": pd.concat(map(frame_of, schemes)),
            "512 tokens over the last 128": pd.concat(longer),
        }
        save_numbers(given.numbers, tables)
    if given.figures:
        sizes = given.figures / "sizes"
        sizes.mkdir(parents=True, exist_ok=True)
        draw_ladder(ladder, sizes / "ladder.png")


if __name__ == "__main__":
    main()
