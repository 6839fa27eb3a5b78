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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import Result, load_study
from analysis.faithfulness import row_spearman
from analysis.figures.style import bar_lengths
from analysis.probes.length import OF_LENGTH, RISE, LossByPosition
from analysis.probes.needle import Needles
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
NUMBERS = [*INTERVAL, *OF_RUNS]
INSIDE = {"gain_nats": "gain", "share_over_tau": "over_tau", "net": "net", "reached": "suffice"}
BEYOND = {"gain_nats": "use", "absolute_gain_nats": "change"}
"""What numbers of results are called here, in their order: given 128 tokens, and given 512."""
Row = Mapping[str, Any]


@dataclass
class Model:
    """Everything of one model, or of one seed of it."""

    loss_at: dict[int, float]
    """In nats per token, by length."""
    numbers: dict[str, Row]
    """Intervals by their names, of those that were measured: rise, entropy, zeros, and those of `numbers_of`."""
    cells: list[str] = field(default_factory=list)
    seeds: list[Model] = field(default_factory=list)

    def text(self, name: str, **options: Any) -> str:
        """A number with its interval, as `interval_text` has it; a dash for what was not measured."""
        return interval_text(self.numbers[name], **options) if name in self.numbers else "–"


def named(frame: pd.DataFrame, names: Mapping[str, str]) -> dict[str, Row]:
    """Some numbers of a frame, under other names, in their order."""
    rows = frame.set_index("name").filter(NUMBERS).to_dict("index")
    return {name: rows[of_frame] for of_frame, name in names.items()}


def numbers_of(inside: Result, beyond: Result) -> dict[str, Row]:
    """Intervals of one model, or of one seed of it."""
    net = recovery(inside, selector=SELECTOR, far_context="net", k=K).assign(name="net")
    needed = tokens_needed(inside, selector=SELECTOR, far_context="true", k=K)
    return named(pd.concat([shares(inside), net, needed]), INSIDE) | named(shares(beyond), BEYOND)


def by_position(rows: pd.DataFrame, times: int) -> Model:
    """Loss by length, and the rise and the attention, of one model or one seed."""
    loss_at = rows[rows["name"] == OF_LENGTH].set_index("to_tokens")["value"].to_dict()
    window = min(loss_at)
    by_length = rows.set_index(["name", "to_tokens"]).filter(NUMBERS).to_dict("index")
    keys = {
        "rise": (RISE, times * window),
        "entropy": ("entropy_nats", window),
        "zeros": ("zero_share", window),
    }
    return Model(loss_at, {name: by_length[key] for name, key in keys.items() if key in by_length})


def models_of(records: Path, study: Mapping[str, Result], times: int) -> dict[str, Model]:
    """Every model by its label, with its seeds."""
    needles = Needles.load(records).cells
    exact = needles[
        (needles["name"] == "exact") & needles["depth"].isna() & (needles["length"] == 128 * times)
    ]
    shortest = exact.sort_values("value_tokens", kind="stable").drop_duplicates("model")
    found = shortest.set_index("model").filter(NUMBERS).to_dict("index")
    models = {}
    for folder in (records, records / "length-mesa"):
        length = LossByPosition.load(folder)
        for label, of_model in length.numbers.groupby("model", sort=False):
            model = by_position(of_model, times)
            for number, checkpoint in enumerate(length.models):
                if checkpoint["label"] == label:
                    model.cells += cells_of(study, checkpoint)
                    model.seeds.append(by_position(length.runs[length.runs["number"] == number], times))
            if model.cells:
                add_numbers(model, study)
                for one in (model, *model.seeds) if label in found else ():
                    one.numbers["needles"] = found[label]
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
    return f"{interval_text(vars(interval))}, {models} models"


def print_tables(models: Mapping[str, Model], times: int) -> None:
    """Print the two tables of the page."""
    rows = []
    for label, model in models.items():
        entropy = model.numbers.get("entropy")
        zeros = model.numbers.get("zeros")
        rows.append(
            {"": label}
            | {f"{length:,}": f"{loss:.2f}" for length, loss in sorted(model.loss_at.items())}
            | {
                f"at {128 * times} − at 128": model.text("rise"),
                "use": model.text("use", digits=2),
                "change": model.text("change", digits=2),
                "needles [%]": model.text("needles", percent=True, digits=0),
                "gain inside": model.text("gain", digits=2),
                "over tau [%]": model.text("over_tau", percent=True),
                "net [%]": model.text("net", percent=True, digits=0),
                "4 suffice [%]": model.text("suffice", percent=True, digits=0),
                "entropy": f"{entropy['value']:.2f}" if entropy else "–",
                "zeros [%]": f"{100 * zeros['value']:.0f}" if zeros else "–",
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
            rows += [keys | {"name": name, **row} for name, row in one.numbers.items()]
            rows += [
                keys | {"name": OF_LENGTH, "to_tokens": length, "value": loss}
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
                rows.append({"models": title, "name": name, "n_models": count, **vars(interval)})
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
            number, rise = model.numbers[name], model.numbers["rise"]
            x, y = scale * number["value"], rise["value"]
            letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place]
            panel.errorbar(
                x,
                y,
                xerr=scale * bar_lengths(pd.DataFrame([number])),
                yerr=bar_lengths(pd.DataFrame([rise])),
                label=f"{letter}  {model_label}",
                color=plt.get_cmap("tab20")(place % 20),
                marker="o",
                ms=3,
                lw=0.5,
            )
            panel.annotate(letter, (x, y), (4, 4), textcoords="offset points", weight="bold")
        related = correlation(list(models.values()), name)
        shown_as = "–" if related is None else interval_text(vars(related[0]))
        count = "few" if related is None else related[1]
        panel.set_xlabel(f"{label}\nrank correlation of\n{count} models: {shown_as}")
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
    print_tables(models, given.times)
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
