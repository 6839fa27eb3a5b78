"""The tables of sizes and of the longer context, and the figures of this folder's page; no model is needed.

    python results/length/study.py

Rise: loss at four times the window minus loss at the window, of `ladder` and `together` (nats per token). Recoveries
are of leave-one-out at k = 4. Cross-fitted records (1-2: chosen by seed 1, measured by seed 2) are open points.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from analysis import Result, load_study
from analysis.stats.numbers import recovery, shares, tokens_needed

HERE = Path(__file__).parent
SELECTOR, K, TIMES = "leave-one-out", 4, 4
SIZES, SCHEMES = (
    ("0.3m", "0.6m", "pose", "1.9m"),
    ("rope", "random_start", "pose", "pose4", "pose16", "nope", "alibi"),
)


def text(interval, scale=1.0, digits=0):
    """``value [low, high]``."""
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(
        *(scale * interval[name] for name in ("value", "low", "high")), d=digits
    )


def measures(result):
    """Share over tau, gain, net recovery and share that K tokens suffice for."""
    of_all = shares(result).set_index("name").to_dict("index")
    net = recovery(result).query("selector == @SELECTOR and k == @K and far_context == 'net'")
    needed = tokens_needed(result).query(
        "name == 'reached' and selector == @SELECTOR and k == @K and far_context == 'true'"
    )
    return {"over_tau": of_all["share_over_tau"], "gain": of_all["gain_nats"]} | {
        name: frame.iloc[0].to_dict() for name, frame in (("net", net), ("suffice", needed))
    }


def by_position(folder, result):
    """Label, parameters, and the losses and rise of the model that a result evaluates."""
    length = json.loads((HERE / folder / "length.json").read_text())
    weights = ("model_sha256", "rope_scaling")
    settings = result.settings.to_json()
    one = next(m for m in length["models"] if all(m[name] == settings[name] for name in weights))
    rows = [row for row in length["numbers"] if row["model"] == one["label"]]
    window = one["training_length"]
    losses = [row for row in rows if row["name"] == "loss_at_length_nats"]
    rise = next(row for row in rows if row["name"] == "rise_nats" and row["to_tokens"] == TIMES * window)
    return {"label": one["label"], "parameters": one["parameters"], "losses": losses, "rise": rise}


def points(study, names, folder):
    """A point for every model, its seeds joined, and for every cross-fitted record."""
    found = []
    for name in names:
        cells = {
            cell: result for cell, result in study.items() if cell.startswith(f"influence/config={name},")
        }
        joined = [result for result in cells.values() if not result.crossfit]
        crossfit = [result for result in cells.values() if result.crossfit] if folder == "ladder" else []
        for result in (Result.join(joined), *crossfit):
            keys = {"name": name, "crossfit": result.crossfit}
            seeds = [measures(training) for training in result.trainings]
            found.append(keys | by_position(folder, result) | measures(result) | {"seeds": seeds})
    return found


def bars(axes, x, y, scale, **look):
    """A point with its interval in y, and in x where that is an interval."""
    lengths = [
        [[s * (v["value"] - v["low"])], [s * (v["high"] - v["value"])]] if isinstance(v, dict) else None
        for v, s in ((x, scale[0]), (y, scale[1]))
    ]
    values = [s * (v["value"] if isinstance(v, dict) else v) for v, s in ((x, scale[0]), (y, scale[1]))]
    axes.errorbar(*values, xerr=lengths[0], yerr=lengths[1], marker="o", ms=4, lw=0.8, capsize=2, **look)


def ladder_figure(ladder):
    """Use, sparsity, tokens needed and rise against size; open points are cross-fitted."""
    figure, axes = plt.subplots(2, 2, figsize=(7, 5), layout="constrained")
    panels = (
        ("over_tau", 100, "targets over 1 nat [%]"),
        ("net", 100, f"net recovery at k = {K} [%]"),
        ("suffice", 100, f"{K} tokens give 90 % of the gain\n[% of targets over 1 nat]"),
        ("rise", 1, f"loss at {TIMES} × the window - at the window\n[nats per token]"),
    )
    for one, (name, scale, label) in zip(axes.flat, panels, strict=True):
        for number, point in enumerate(ladder):
            if not (point["crossfit"] and name in ("over_tau", "rise")):
                x = point["parameters"] / 1e6 * (1 + 0.03 * (number % 3))  # beside each other
                fill = "white" if point["crossfit"] else "#332288"
                bars(one, x, point[name], (1, scale), color="#332288", markerfacecolor=fill)
        one.set(xscale="log", xlabel="parameters [millions]", ylabel=label)
        one.set_xticks([0.34, 0.58, 1.0, 1.9], ["0.34", "0.58", "1", "1.9"])
        one.minorticks_off()
    figure.savefig(HERE / "sizes" / "ladder.png", dpi=90)


def joint_figure(some, folder):
    """Rise against net recovery."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for number, label in enumerate(dict.fromkeys(point["label"] for point in some)):
        for place, point in enumerate(point for point in some if point["label"] == label):
            color = f"C{number}"
            look = {"markerfacecolor": "white" if point["crossfit"] else color, "color": color}
            bars(axes, point["net"], point["rise"], (100, 1), label="_" * place + label, **look)
    axes.set_xlabel(f"net recovery at k = {K} [%]   (open: chosen by another seed)")
    axes.set_ylabel(f"loss at {TIMES} × the window - at the window\n[nats per token]")
    axes.legend(fontsize=7)
    figure.savefig(HERE / folder / "joint.png", dpi=90)


if __name__ == "__main__":
    study = load_study(HERE)
    ladder, schemes = points(study, SIZES, "ladder"), points(study, SCHEMES, "together")
    for point in ladder + schemes:
        shown = {name: (100, 1 if name == "over_tau" else 0) for name in ("over_tau", "net", "suffice")}
        seeds = [
            f"{name} {', '.join(text(seed[name], *shown[name]) for seed in point['seeds'])} %"
            for name in shown
        ]
        gains = ", ".join(text(seed["gain"], 1, 3) for seed in point["seeds"])
        how = " (cross-fit)" if point["crossfit"] else ""
        print(f"{point['label']}{how}, {point['parameters']:,}: {'; '.join(seeds)}; gain {gains} nats")
        if not point["crossfit"]:
            losses = " | ".join(f"{row['to_tokens']}: {text(row, 1, 2)}" for row in point["losses"])
            print(f"    {losses} | rise {text(point['rise'], 1, 2)}")
    for cell, result in study.items():
        if cell.startswith("influence-512-128/"):
            gain = shares(result).set_index("name").loc["gain_nats"]
            print(f"{cell}: gain {text(gain, 1, 3)} nats of {len(result.targets):,} targets")
    ladder_figure(ladder)
    joint_figure(ladder, "sizes")
    joint_figure(schemes, "schemes")
