"""Differences between models or texts of one study, each with an interval of its own; no model is needed.

    python results/differences.py

Two intervals that overlap do not show that two numbers are alike. Of each pair: the first minus the second, in the
share of targets over tau, in that share with equal weight of every group, and in net recovery at k = 4, in points.
Groups that both have are left out of both at once. First interval: 95 %, by group, for the trainings at hand. Second:
the same at 1 - 0.05 / pairs (Bonferroni).

Last, persistence: of the targets over tau under one training, the gain under another, and the share that is over tau
there, too; mean of all ordered pairs, 95 %, by group.
"""

from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import Result, load_study
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.recovery import PLACEBO, TRUE, Measured, over_tau_column

HERE = Path(__file__).parent
LANGUAGES = ("english", "french", "german", "spanish", "russian")
SIZES = ("0.3m", "0.6m", "pose", "1.9m")
BLIND, SIGNED = "leave-one-out-kl", "leave-one-out"
PROPOSED = f"{BLIND}@input-x-gradient:16"


def sums(result, selector):
    """Numerators and denominators, (n,), of the shares over tau and of the two recoveries at k = 4."""
    measured, over, targets = Measured(result, 4), over_tau_column(result), result.targets
    column = measured.ks.index(4)
    numbers = {"share": (over, np.ones(len(over)))}
    if "group" in targets:
        weight = 1 / targets.groupby([name for name in ("training", "group") if name in targets])[
            "text"
        ].transform("size")
        numbers["equal"] = over * weight.to_numpy(), weight.to_numpy()
    for context in (TRUE, PLACEBO):
        saved = np.nan_to_num(measured.short_nats - measured.losses[selector, context][:, column])
        numbers[context] = measured.column(saved), measured.column(measured.gain_nats)
    return numbers


def differences(first, second, confidence):
    """Bootstrap of both, and draws of the difference in each number."""
    (result_1, selector_1), (result_2, selector_2) = first, second
    targets = pd.concat([result_1.targets, result_2.targets], ignore_index=True)
    groups = targets["group"].to_numpy() if "group" in targets else None
    of_both = ClusterBootstrap(targets["text"].to_numpy(), groups=groups, confidence=confidence)
    draws = []
    ends = ((0, len(result_2.targets)), (len(result_1.targets), 0))
    for numbers, end in zip((sums(result_1, selector_1), sums(result_2, selector_2)), ends, strict=True):
        ratio = {name: of_both.ratio(*(np.pad(one, end) for one in pair)) for name, pair in numbers.items()}
        net = ratio.pop(TRUE) - np.maximum(ratio.pop(PLACEBO), 0)
        draws.append(ratio | {"net": net})
    return of_both, {name: draws[0][name] - draws[1][name] for name in draws[0]}


def show(title, pairs, tests):
    """A row for each pair of (name, result, selector)."""
    rows = []
    for (name_1, *first), (name_2, *second) in pairs:
        row = {"": f"{name_1} − {name_2}"}
        for confidence, label in ((0.95, "95 %"), (1 - 0.05 / tests, "corrected")):
            of_both, draws = differences(first, second, confidence)
            for name, one in draws.items():
                interval, digits = of_both.interval(one), 0 if name == "net" else 2
                value, low, high = (
                    f"{100 * x:.{digits}f}" for x in (interval.value, interval.low, interval.high)
                )
                row[f"{name}, {label}"] = f"{value} [{low}, {high}]"
        rows.append(row)
    print(f"\n{title}, corrected for {tests}\n{pd.DataFrame(rows).to_string(index=False)}")


def show_persistence(title, trainings):
    """What is left of the gain under another training; only where a result has the losses of all its targets."""
    pairs = list(permutations(trainings, 2))
    of_one = ClusterBootstrap.of(trainings[0].targets)
    over = sum(over_tau_column(one) for one, _ in pairs)
    numbers = {
        "still over tau [%]": (
            100,
            sum(over_tau_column(one) * over_tau_column(other) for one, other in pairs),
        )
    }
    if all(one.settings.losses_not_over_tau is None for one in trainings):
        numbers["gain there [nats]"] = 1, sum(over_tau_column(one) * one.gain_nats for one, _ in pairs)
        numbers["gain under the other [nats]"] = (
            1,
            sum(over_tau_column(one) * other.gain_nats for one, other in pairs),
        )
    for name, (scale, above) in numbers.items():
        interval = of_one.interval(of_one.ratio(above, over))
        value, low, high = (scale * x for x in (interval.value, interval.low, interval.high))
        print(f"{title}: {name} {value:.2f} [{low:.2f}, {high:.2f}]")


def joined(study, cells, selector, name):
    return name, Result.join([study[cell] for cell in cells]), selector


if __name__ == "__main__":
    study = load_study(HERE / "languages")
    texts = [
        joined(study, [f"{name}/seed-1", f"{name}/seed-2"], BLIND, name) for name in (*LANGUAGES, "python")
    ]
    show("languages", combinations(texts[:5], 2), 10)
    show("Python", [(texts[5], one) for one in texts[:5]], 5)

    study = load_study(HERE / "books")
    lengths = [
        joined(study, [f"n{n}-m32-seed-1", f"n{n}-m32-seed-2"], BLIND if n == 128 else PROPOSED, f"N {n}")
        for n in (1024, 512, 128)
    ]
    show("books", combinations(lengths, 2), 3)

    study = load_study(HERE / "length")
    cells = [[f"influence/config={name},seed={seed}" for seed in (1, 2)] for name in (*SIZES, "rope")]
    sizes = [joined(study, pair, SIGNED, pair[0][17:-7]) for pair in cells]
    show("sizes", combinations(sizes[3::-1], 2), 6)
    show("RoPE less RoPE + PoSE", [(sizes[4], sizes[2])], 1)
    alone = {
        name: (name, study[f"influence/config={name},seed=1"], SIGNED)
        for name in ("rope", "pose", "pose4", "pose16", "random_start", "nope", "alibi")
    }
    show("encodings, seed 1", [(alone[name], alone["rope"]) for name in list(alone)[1:]], 6)

    for name, result, _ in texts:
        show_persistence(name, result.trainings)
    study = load_study(HERE / "demo")
    show_persistence("demo", [study[f"seed-{seed}"] for seed in (6198, 1, 2)])
