"""The tables, correlations and figure of this folder's page, from the records in it; no model is needed.

    python results/encodings/study.py [TIMES]     TIMES the window at which the rise of the loss is taken (4)

Rise: loss at TIMES the window minus loss at the window. Use and change: mean gain and mean |gain| of all targets from
512 tokens over the last 128. Needles: exact match of the shortest at TIMES the window, mean over depths, of models
trained to find them. Correlations: Spearman's with the rise over models, each the mean of its seeds; the interval
resamples models and, of each, seeds. Losses are in nats per token.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import Result, load_study
from analysis.faithfulness import row_spearman
from analysis.stats.bootstrap import percentile_interval
from analysis.stats.numbers import recovery, shares, tokens_needed

HERE = Path(__file__).parent
SELECTOR, K, RESAMPLES = "leave-one-out-kl", 4, 2000
RELATED = ("net", "suffice", "over_tau", "use", "change", "needles", "entropy")
NO_ROPE = ("FoX", "NoPE", "DroPE", "ALiBi")


def read(name):
    """A result file of `olmo-sparsity length` or `needle`; empty where it is missing."""
    path = HERE / name
    return json.loads(path.read_text()) if path.is_file() else {}


def pick(rows, **keys):
    """The interval of the one row with these keys; None without one."""
    for row in rows:
        if all(row[name] == value for name, value in keys.items()):
            return {name: row[name] for name in ("value", "low", "high")}
    return None


def measures(inside, beyond):
    """Intervals of one model, or of one seed of it."""
    of_all = {row["name"]: row for row in shares(inside).to_dict("records")}
    at_k = {"selector": SELECTOR, "k": K}
    told = {
        "gain": of_all["gain_nats"],
        "over_tau": of_all["share_over_tau"],
        "net": pick(recovery(inside).to_dict("records"), far_context="net", **at_k),
        "suffice": pick(tokens_needed(inside).to_dict("records"), name="reached", far_context="true", **at_k),
    }
    further = {row["name"]: row for row in shares(beyond).to_dict("records")}
    return told | {"use": further["gain_nats"], "change": further["absolute_gain_nats"]}


def by_position(rows, times, **keys):
    """Loss by length, and the rise and the attention, of one model or one seed."""
    own = [row for row in rows if all(row[name] == value for name, value in keys.items())]
    window = min(row["to_tokens"] for row in own if row["name"] == "loss_at_length_nats")
    at = {row["to_tokens"]: row["value"] for row in own if row["name"] == "loss_at_length_nats"}
    told = {"at": at, "rise": pick(own, name="rise_nats", to_tokens=times * window)}
    return told | {
        name: pick(own, name=column, to_tokens=window)
        for name, column in (("entropy", "entropy_nats"), ("zeros", "zero_share"))
    }


def models_of(times):
    """Everything of each model by its label, and under ``seeds`` of each training."""
    study = load_study(HERE)
    needles = read("needle.json").get("cells", [])
    lost = [row for row in needles if row["name"] == "exact" and row["depth"] in (None, "NaN")]
    found = {}
    for name in ("length.json", "length-mesa/length.json"):
        length = read(name)
        labels = dict.fromkeys(one["label"] for one in length["models"])
        for label in labels:
            own = [(number, one) for number, one in enumerate(length["models"]) if one["label"] == label]
            model = by_position(length["numbers"], times, model=label) | {"seeds": [], "first": own[0][1]}
            cells = []
            for number, one in own:
                for cell, result in study.items():
                    weights = (result.settings.model.sha256, result.settings.model.rope_scaling)
                    if cell.startswith("inside/") and weights == (one["model_sha256"], one["rope_scaling"]):
                        cells.append(cell.removeprefix("inside/"))
                model["seeds"].append(by_position(length["trainings"], times, number=number))
            if cells:
                pairs = [[study[f"{part}/{cell}"] for cell in cells] for part in ("inside", "beyond")]
                model |= {"cells": cells} | measures(*map(Result.join, pairs))
                for seed, inside, beyond in zip(model["seeds"], *pairs, strict=True):
                    seed |= measures(inside, beyond)
            at = [row for row in lost if row["model"] == label and row["length"] == 128 * times]
            if at and cells:
                first = min(at, key=lambda row: row["value_tokens"])
                model["needles"] = first
                for seed in model["seeds"]:
                    seed["needles"] = first
            found[label] = model
    return found


def correlation(models, name):
    """Value and interval, and of how many models; None of fewer than four."""
    pairs = [
        np.array([(seed[name]["value"], seed["rise"]["value"]) for seed in model["seeds"]], float)
        for model in sorted(models, key=lambda model: model.get("cells", []))
        if model.get(name) and "net" in model
    ]
    if len(pairs) < 4:
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
    interval = percentile_interval(value, row_spearman(drawn[..., 0], drawn[..., 1]))
    return {"value": interval.value, "low": interval.low, "high": interval.high, "models": len(pairs)}


def text(interval, scale=1.0, digits=2):
    """``value [low, high]``; a dash for None."""
    if not interval:
        return "–"
    zero = f"{0:.{digits}f}"
    texts = [f"{scale * interval[name]:.{digits}f}" for name in ("value", "low", "high")]
    return "{} [{}, {}]".format(*(zero if one == f"-{zero}" else one for one in texts))


def print_tables(models, times):
    """The two tables of the page."""
    costs = {Path(name).stem: row for name, row in read("cost.json").get("results", {}).items()}
    rows = []
    for label, model in models.items():
        config = re.search(r"config=([^,/]*)", model["first"]["model"])
        cost = {} if model["first"]["rope_scaling"] or config is None else costs.get(config[1], {})
        rows.append(
            {"": label}
            | {f"{length:,}": f"{loss:.2f}" for length, loss in sorted(model["at"].items())}
            | {
                f"at {128 * times} − at 128": text(model["rise"]),
                "use": text(model.get("use"), digits=3),
                "change": text(model.get("change"), digits=3),
                "needles [%]": text(model.get("needles"), 100, 0),
                "gain inside": text(model.get("gain"), digits=3),
                "over tau [%]": text(model.get("over_tau"), 100, 1),
                "net [%]": text(model.get("net"), 100, 0),
                "4 suffice [%]": text(model.get("suffice"), 100, 0),
                "entropy": f"{model['entropy']['value']:.2f}" if model["entropy"] else "–",
                "zeros [%]": f"{100 * model['zeros']['value']:.0f}" if model["zeros"] else "–",
                "speed": f"{cost['ratio']:.2f}" if cost else "–",
                "memory [MB]": f"{cost['step_bytes'] / 1e6:.0f}" if cost else "–",
            }
        )
    table = pd.DataFrame(rows)
    split = list(table).index("gain inside")
    for names in (list(table)[:split], ["", *list(table)[split:]]):
        print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in table[names].to_numpy()) + "\n")


def draw(models, times):
    """joint.png: the rise against net recovery, use and needles; letters in the order of the legend."""
    shown = {label: model for label, model in models.items() if "net" in model}
    panels = {"net": ("net recovery at k = 4 [%]", 100), "use": ("mean gain of 512 over 128 [nats]", 1)}
    panels["needles"] = (f"needles found at {times} × the window [%]", 100)
    figure, axes = plt.subplots(1, len(panels), sharey=True, figsize=(9, 5), layout="constrained")
    for one, (name, (label, scale)) in zip(axes, panels.items(), strict=True):
        for place, (model_label, model) in enumerate(shown.items()):
            if not model.get(name):
                continue
            x, y = ({part: model[key][part] for part in ("value", "low", "high")} for key in (name, "rise"))
            x = {part: scale * value for part, value in x.items()}
            bars = [[[v["value"] - v["low"]], [v["high"] - v["value"]]] for v in (x, y)]
            letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place]
            look = {"color": plt.get_cmap("tab20")(place % 20), "marker": "o", "ms": 3, "lw": 0.5}
            named = f"{letter}  {model_label}"
            one.errorbar(x["value"], y["value"], yerr=bars[1], xerr=bars[0], label=named, **look)
            one.annotate(letter, (x["value"], y["value"]), (4, 4), textcoords="offset points", weight="bold")
        related = correlation(list(models.values()), name)
        one.set_xlabel(f"{label}\nrank correlation of\n{related['models']} models: {text(related)}")
        one.set_yscale("symlog", linthresh=0.1)
        if name == "use":
            one.set_xscale("symlog", linthresh=0.1)
            one.set_xticks([-1, -0.1, 0, 0.1, 1], ["-1", "-0.1", "0", "0.1", "1"])
            across = np.array([-1, -0.5, -0.2, -0.1, 0, 0.05])
            one.plot(across, -across, ":", color="0.6", zorder=0)  # rise = -gain
    axes[0].set_ylabel(f"loss at {times} × the window - at the window\n[nats per token]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(HERE / "joint.png", dpi=110)


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    models = models_of(times)
    print_tables(models, times)
    for title, some in (
        ("all", list(models.values())),
        ("with RoPE", [model for label, model in models.items() if label not in NO_ROPE]),
    ):
        for name in RELATED:
            related = correlation(some, name)
            print(f"{title}: {name} with the rise: {text(related)}, {related and related['models']} models")
    if times == 4:
        draw(models, times)
