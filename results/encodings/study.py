"""The tables and correlations of this folder's page, from the records in it; no model is needed.

    python results/encodings/study.py [TIMES]     TIMES the window at which the rise of the loss is taken (4)
    python results/encodings/study.py --numbers results/encodings/numbers.csv    writes those of all TIMES, too
    python results/encodings/study.py --figures results/encodings      draws joint.png, too

Rise: loss at TIMES the window minus loss at the window. Use and change: mean gain and mean |gain| of all targets from
512 tokens over the last 128; of `control` they are those of RoPE trained on 512. Needles: exact match of the shortest
at TIMES the window, mean over depths, of models trained to find them. Correlations: Spearman's with the rise over
models, each the mean of its seeds; the interval resamples models and, of each, seeds. Losses are in nats per token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import Result, load_study
from analysis.faithfulness import row_spearman
from analysis.older_records import renamed_frames
from analysis.stats.bootstrap import Interval, percentile_interval
from analysis.stats.numbers import recovery, shares, tokens_needed
from analysis.stats.tables import INTERVAL, OF_RUNS, interval_text, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
SELECTOR, K, RESAMPLES = "leave-one-out-kl", 4, 2000
ALL_TIMES = (2, 4, 8, 16)
RELATED = ("net", "suffice", "over_tau", "use", "change", "needles", "entropy")
NO_ROPE = ("FoX", "NoPE", "DroPE", "ALiBi")
LEAST_MODELS = 4
"""A correlation is of so many models at least."""
Row = Mapping[str, Any]


@dataclass
class Model:
    """Everything of one model, or of one seed of it."""

    loss_at: dict[int, float]
    """In nats per token, by length."""
    numbers: dict[str, Row]
    """Intervals by their names, of those that were measured: rise, entropy, zeros, and those of `numbers_of`."""
    about: Row = field(default_factory=dict)
    """Its first checkpoint, as the record of the loss by position has it."""
    cells: list[str] = field(default_factory=list)
    seeds: list[Model] = field(default_factory=list)


def read(path: Path) -> dict[str, Any]:
    """A result file of `olmo-sparsity length` or `needle`; empty where it is missing."""
    return json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}


def numbers_of(inside: Result, beyond: Result) -> dict[str, Row]:
    """Intervals of one model, or of one seed of it."""
    of_all = {row["name"]: row for row in shares(inside).to_dict("records")}
    [net] = recovery(inside, selector=SELECTOR, far_context="net", k=K).to_dict("records")
    needed = tokens_needed(inside, selector=SELECTOR, far_context="true", k=K)
    [suffice] = needed[needed["name"] == "reached"].to_dict("records")
    further = {row["name"]: row for row in shares(beyond).to_dict("records")}
    return {
        "gain": of_all["gain_nats"],
        "over_tau": of_all["share_over_tau"],
        "net": net,
        "suffice": suffice,
        "use": further["gain_nats"],
        "change": further["absolute_gain_nats"],
    }


def by_position(rows: Sequence[Row], times: int) -> Model:
    """Loss by length, and the rise and the attention, of one model or one seed."""
    loss_at = {row["to_tokens"]: row["value"] for row in rows if row["name"] == "loss_at_length_nats"}
    window = min(loss_at)
    columns = {"rise": "rise_nats", "entropy": "entropy_nats", "zeros": "zero_share"}
    numbers: dict[str, Row] = {}
    for name, column in columns.items():
        length = times * window if name == "rise" else window
        for row in rows:
            if row["name"] == column and row["to_tokens"] == length:
                numbers[name] = number_of(row)
    return Model(loss_at, numbers)


def number_of(row: Row) -> Row:
    """Value, interval and values of runs of a row of JSON, where NaN is null."""
    names = [name for name in (*INTERVAL, *OF_RUNS) if name in row]
    return {name: np.nan if row[name] is None else row[name] for name in names}


def models_of(records: Path, study: Mapping[str, Result], times: int) -> dict[str, Model]:
    """Every model by its label, with its seeds."""
    needles = read(records / "needle.json").get("cells", [])
    exact = [row for row in needles if row["name"] == "exact" and row["depth"] in (None, "NaN")]
    models = {}
    for name in ("length.json", "length-mesa/length.json"):
        length = read(records / name)
        for label in dict.fromkeys(one["label"] for one in length["models"]):
            checkpoints = {
                number: one for number, one in enumerate(length["models"]) if one["label"] == label
            }
            model = by_position([row for row in length["numbers"] if row["model"] == label], times)
            model.about = next(iter(checkpoints.values()))
            for number, one in checkpoints.items():
                model.cells += cells_of(study, one)
                rows = [row for row in renamed_frames(length)["runs"] if row["number"] == number]
                model.seeds.append(by_position(rows, times))
            if model.cells:
                add_numbers(model, study)
                at_length = [row for row in exact if row["model"] == label and row["length"] == 128 * times]
                for one_of_them in (model, *model.seeds) if at_length else ():
                    shortest = min(at_length, key=lambda row: row["value_tokens"])
                    one_of_them.numbers["needles"] = number_of(shortest)
            models[label] = model
    return models


def cells_of(study: Mapping[str, Result], checkpoint: Row) -> list[str]:
    """The cells that were measured with a checkpoint's weights, without "inside/"."""
    weights = (checkpoint["model_sha256"], checkpoint["rope_scaling"])
    return [
        cell.removeprefix("inside/")
        for cell, result in study.items()
        if cell.startswith("inside/")
        and (result.settings.model.sha256, result.settings.model.rope_scaling) == weights
    ]


def add_numbers(model: Model, study: Mapping[str, Result]) -> None:
    """Add what was measured of a model, and of each of its seeds."""
    inside = [study[f"inside/{cell}"] for cell in model.cells]
    beyond = [study[f"beyond/{cell}"] for cell in model.cells]
    model.numbers |= numbers_of(Result.join(inside), Result.join(beyond))
    for seed, of_inside, of_beyond in zip(model.seeds, inside, beyond, strict=True):
        seed.numbers |= numbers_of(of_inside, of_beyond)


def correlation(models: Sequence[Model], name: str) -> tuple[Interval, int] | None:
    """Rank correlation of a number with the rise, and of how many models; None of fewer than `LEAST_MODELS`."""
    pairs = [
        np.array(
            [(seed.numbers[name]["value"], seed.numbers["rise"]["value"]) for seed in model.seeds], float
        )
        for model in sorted(models, key=lambda model: model.cells)
        if name in model.numbers and "net" in model.numbers
    ]
    if len(pairs) < LEAST_MODELS:
        return None
    rng = np.random.default_rng(0)
    drawn = np.array(
        [
            [
                pairs[model][rng.integers(len(pairs[model]), size=len(pairs[model]))].mean(axis=0)
                for model in rng.integers(len(pairs), size=len(pairs))
            ]
            for _ in range(RESAMPLES)
        ]
    )
    means = np.stack([pair.mean(axis=0) for pair in pairs])[None]
    value = float(row_spearman(means[..., 0], means[..., 1])[0])
    return percentile_interval(value, row_spearman(drawn[..., 0], drawn[..., 1])), len(pairs)


def correlation_text(related: tuple[Interval, int] | None) -> str:
    """``value [low, high], N models``; a dash for None."""
    if related is None:
        return "–, None models"
    interval, models = related
    return f"{interval_text(asdict(interval))}, {models} models"


def print_tables(models: Mapping[str, Model], costs: Mapping[str, Row], times: int) -> None:
    """Print the two tables of the page."""

    def nats(model: Model, name: str, digits: int = 2) -> str:
        return interval_text(model.numbers[name], digits=digits - 1) if name in model.numbers else "–"

    def percent(model: Model, name: str, digits: int = 0) -> str:
        return (
            interval_text(model.numbers[name], percent=True, digits=digits) if name in model.numbers else "–"
        )

    rows = []
    for label, model in models.items():
        config = re.search(r"config=([^,/]*)", model.about["model"])
        cost: Row = {}
        if config is not None and not model.about["rope_scaling"]:
            cost = costs.get(config[1], {})
        entropy = model.numbers.get("entropy")
        zeros = model.numbers.get("zeros")
        rows.append(
            {"": label}
            | {f"{length:,}": f"{loss:.2f}" for length, loss in sorted(model.loss_at.items())}
            | {
                f"at {128 * times} − at 128": nats(model, "rise"),
                "use": nats(model, "use", 3),
                "change": nats(model, "change", 3),
                "needles [%]": percent(model, "needles"),
                "gain inside": nats(model, "gain", 3),
                "over tau [%]": percent(model, "over_tau", 1),
                "net [%]": percent(model, "net"),
                "4 suffice [%]": percent(model, "suffice"),
                "entropy": f"{entropy['value']:.2f}" if entropy else "–",
                "zeros [%]": f"{100 * zeros['value']:.0f}" if zeros else "–",
                "speed": f"{cost['ratio']:.2f}" if cost else "–",
                "memory [MB]": f"{cost['step_bytes'] / 1e6:.0f}" if cost else "–",
            }
        )
    table = pd.DataFrame(rows)
    split = list(table).index("gain inside")
    for names in (list(table)[:split], ["", *list(table)[split:]]):
        print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in table[names].to_numpy()) + "\n")


def frame_of(models: Mapping[str, Model]) -> pd.DataFrame:
    """All numbers of all models, of the seeds together and of each."""
    rows = []
    for label, model in models.items():
        by_seed = {"together": model}
        by_seed |= {str(number): seed for number, seed in enumerate(model.seeds, 1)}
        for of_seed, one in by_seed.items():
            keys = {"model": label, "of_seed": of_seed}
            rows += [keys | {"name": name, **number_of(row)} for name, row in one.numbers.items()]
            rows += [
                keys | {"name": "loss_at_length_nats", "to_tokens": length, "value": loss}
                for length, loss in one.loss_at.items()
            ]
    return pd.DataFrame(rows)


def related_frame(models: Mapping[str, Model]) -> pd.DataFrame:
    """The rank correlation of every number with the rise, over all models and over those with RoPE."""
    rows = []
    for title, some in groups_of(models).items():
        for name in RELATED:
            related = correlation(some, name)
            if related is not None:
                interval, count = related
                rows.append({"models": title, "name": name, "n_models": count, **asdict(interval)})
    return pd.DataFrame(rows)


def groups_of(models: Mapping[str, Model]) -> dict[str, list[Model]]:
    """All models, and those with RoPE."""
    with_rope = [model for label, model in models.items() if label not in NO_ROPE]
    return {"all": list(models.values()), "with RoPE": with_rope}


def print_control(study: Mapping[str, Result]) -> pd.DataFrame:
    """Print what RoPE trained on 512 tokens gains from 512 over the last 128; returns the numbers."""
    control = Result.join([study[f"control/rope-512,seed={seed}"] for seed in (1, 2)])
    frame = shares(control)
    for row in frame[frame["name"].isin(["gain_nats", "absolute_gain_nats"])].to_dict("records"):
        print(f"control, RoPE trained on 512 tokens: {row['name']} {interval_text(row, digits=2)}")
    print()
    return frame


def draw(models: Mapping[str, Model], times: int, path: Path) -> None:
    """joint.png: the rise against net recovery, use and needles; letters in the order of the legend."""
    shown = {label: model for label, model in models.items() if "net" in model.numbers}
    panels = {
        "net": ("net recovery at k = 4 [%]", 100),
        "use": ("mean gain of 512 over 128 [nats]", 1),
        "needles": (f"needles found at {times} × the window [%]", 100),
    }
    figure, axes = plt.subplots(1, len(panels), sharey=True, figsize=(9, 5), layout="constrained")
    for panel, (name, (label, scale)) in zip(axes, panels.items(), strict=True):
        for place, (model_label, model) in enumerate(shown.items()):
            if name not in model.numbers:
                continue
            x = {bound: scale * model.numbers[name][bound] for bound in INTERVAL}
            y = model.numbers["rise"]
            letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place]
            panel.errorbar(
                x["value"],
                y["value"],
                xerr=[[x["value"] - x["low"]], [x["high"] - x["value"]]],
                yerr=[[y["value"] - y["low"]], [y["high"] - y["value"]]],
                label=f"{letter}  {model_label}",
                color=plt.get_cmap("tab20")(place % 20),
                marker="o",
                ms=3,
                lw=0.5,
            )
            panel.annotate(
                letter, (x["value"], y["value"]), (4, 4), textcoords="offset points", weight="bold"
            )
        related = correlation(list(models.values()), name)
        shown_as = "–" if related is None else interval_text(asdict(related[0]))
        number = "few" if related is None else related[1]
        panel.set_xlabel(f"{label}\nrank correlation of\n{number} models: {shown_as}")
        panel.set_yscale("symlog", linthresh=0.1)
        if name == "use":
            panel.set_xscale("symlog", linthresh=0.1)
            panel.set_xticks([-1, -0.1, 0, 0.1, 1], ["-1", "-0.1", "0", "0.1", "1"])
            across = np.array([-1, -0.5, -0.2, -0.1, 0, 0.05])
            panel.plot(across, -across, ":", color="0.6", zorder=0)  # rise = -gain
    axes[0].set_ylabel(f"loss at {times} × the window - at the window\n[nats per token]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers, and draw the figure where a folder for it is given."""
    parser = study_parser(__doc__, HERE, figures=True)
    parser.add_argument("times", type=int, nargs="?", default=4, metavar="TIMES")
    given = parser.parse_args(arguments)
    study = load_study(given.records)
    models = models_of(given.records, study, given.times)
    costs = read(given.records / "cost.json").get("results", {})
    print_tables(models, {Path(name).stem: row for name, row in costs.items()}, given.times)
    frames = {"RoPE trained on 512 tokens": print_control(study)}
    for title, some in groups_of(models).items():
        for name in RELATED:
            print(f"{title}: {name} with the rise: {correlation_text(correlation(some, name))}")
    if given.numbers:
        for times in ALL_TIMES:
            at_length = models_of(given.records, study, times)
            frames[f"rise at {times} windows"] = frame_of(at_length)
            frames[f"correlation with the rise at {times} windows"] = related_frame(at_length)
        save_numbers(given.numbers, frames)
    if given.figures:
        given.figures.mkdir(parents=True, exist_ok=True)
        draw(models, given.times, given.figures / "joint.png")


if __name__ == "__main__":
    main()
