"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6).

    python results/theory/bound.py ROWS OUT [FOLDER...]
    python results/theory/bound.py --errors ROWS OUT [FOLDER...]    prints all expected errors, writes OUT/numbers.csv

    Theorem 4.3 [paper]    error(L') = O(eta_L eta_L' L L'^2 delta)
    improved [paper]       error(L') = O((L' / L)^2 delta)

delta is the error at trained lengths, L the longest of them, and L' > L the length that is asked for. What O() hides
(with it eta_L and eta_L', which belong to the distribution of planted positions) is a constant, which is taken from
the shorter lengths beyond L and tried at the longer ones [ours]. L and L' are tokens of the prompt. With one L both
bounds grow like L'^2 and differ by the factor L^3, so that models of different L tell them apart. Test samples
with more planted tokens than were trained on have no bound.

ROWS is an exact_match.parquet or a folder of runs, FOLDER one of its rows' folders. Prints the numbers, writes them as
"bounds", "trained" and "errors" into the figure1.json of OUT, and draws figure1-TASK-bound.png for each planted task:
error against length, both axes logarithmic, a panel per K_train, a curve per L with its interval.

Drawn as multiples: the length of L, the error of delta. So the improved bound is one line for every L, and that of
Theorem 4.3 a line for each. Both end where they reach the error of guessing. Up to the dotted line of a panel are the
lengths that the constants were taken from. Where no sample was wrong, a hollow triangle stands at the upper limit of
the interval.

Shapes: n lengths.
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.figures import style
from analysis.stats.bootstrap import Interval, student_t, wilson
from analysis.stats.tables import save_numbers
from analysis.synthetic.exact_match import (
    GROUP,
    SETTINGS,
    describe,
    describe_bands,
    exact_interval,
    labels,
    load,
    over_seeds,
    pool,
)
from analysis.synthetic.figure1 import k_title, write_tables
from olmo_sparsity.util.arguments import Parser
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json

TESTED = ["task", "k_train", "model", "k"]
"""Models that are alike in these differ in L (and L_local with it) alone: one constant for all of them."""
OF_LENGTH = ("train_length", "test_length", "locality", "k_test")
LIMIT: style.Look = {"marker": "v", "markerfacecolor": "white", "markersize": 3.8, "linestyle": "none"}
FITTED: style.Look = {
    "color": "0.45",
    "linestyle": ":",
    "linewidth": 1,
    "label": "c is from the lengths up to this",
}
THEOREM: style.Look = {"linestyle": (0, (6, 2)), "linewidth": 1.1, "label": "Theorem 4.3: c L L′² δ"}
IMPROVED: style.Look = {"linestyle": (0, (1, 1)), "linewidth": 1.1, "label": "improved: c (L′/L)² δ"}

# --- numbers ---


def theorem_bound(lengths, trained_length, delta):
    """L L'^2 delta at ``lengths`` L', one or (n,), of that shape; L and delta likewise."""
    return np.asarray(trained_length) * np.asarray(lengths, dtype=float) ** 2 * np.asarray(delta)


def improved_bound(lengths, trained_length, delta):
    """(L' / L)^2 delta at ``lengths`` L', likewise."""
    return (np.asarray(lengths, dtype=float) / np.asarray(trained_length)) ** 2 * np.asarray(delta)


BOUNDS = {"theorem_4_3": theorem_bound, "improved": improved_bound}


def expected_error(rows):
    """1 - probability of the true response, mean over seeds, and its 95 % interval [ours]; None where one has none.

    `over_seeds`; for one seed the normal interval of the mean of its samples. Where no sample differs from 0, or from
    1, that has no width: Wilson's interval of the pooled samples then.
    """
    samples = rows["samples"].to_numpy(float)
    errors, deviations = 1 - rows["mean_probability"].to_numpy(), rows["std_probability"].to_numpy()
    if np.isnan(errors).any() or np.isnan(deviations).any():
        return None
    value = float(errors.mean())
    if value in (0.0, 1.0):
        return wilson(round(value * samples.sum()), int(samples.sum()))
    half = student_t(np.inf) * np.sqrt((deviations**2 / samples).sum()) / len(rows)
    return over_seeds(errors, Interval(value, value - half, value + half))


def with_errors(rows):
    """The points of these rows (`pool`) with the columns error, error_low, error_high and is_expected.

    The error is `expected_error`; without probabilities, the share that is not exact.
    """
    keys, errors = [*SETTINGS, "k", "length"], []
    for key, of_point in rows.sort_values("seed").groupby(keys, dropna=False):
        error = expected = expected_error(of_point)
        if expected is None:
            share = exact_interval(of_point["exact"].to_numpy(), of_point["samples"].to_numpy())
            error = Interval(1 - share.value, 1 - share.high, 1 - share.low)
        bounds = {"error": error.value, "error_low": error.low, "error_high": error.high}
        errors.append({**dict(zip(keys, key, strict=True)), **bounds, "is_expected": expected is not None})
    return pool(rows).merge(pd.DataFrame(errors), on=keys, validate="1:1")


def errors_by_run(rows):
    """The `expected_error` of every run at every k and length, its seeds together; and of each seed by itself.

    A row for each folder (without the seed), k and length. of_seeds: seed by seed; samples_half_width: half of the
    95 % interval of the samples of all seeds, which says nothing of how seeds differ.
    """
    runs = rows["folder"].str.removeprefix("records/").str.replace(r",seed=\d+$", "", regex=True)
    errors = []
    for (run, k, length), of_point in rows.sort_values("seed").groupby([runs, "k", "length"]):
        interval = expected_error(of_point)
        if interval is None:  # it has no probabilities
            continue
        of_seeds = 1 - of_point["mean_probability"]
        variances = of_point["std_probability"] ** 2 / of_point["samples"]
        errors.append(
            {
                "run": run,
                "k": k,
                "length": length,
                "seeds": len(of_point),
                "value": interval.value,
                "low": interval.low,
                "high": interval.high,
                "of_seeds": " ".join(f"{max(error, 0):.3g}" for error in of_seeds),
                "samples_half_width": student_t(np.inf) * np.sqrt(variances.sum()) / len(of_point),
            }
        )
    return pd.DataFrame(errors)


def errors_frame(points):
    """Of the points of planted tasks (`with_errors`) the curves of the largest k that was trained and tested.

    ``model`` is without what belongs to the length, so that models with one task, K_train, k and name differ in L and
    L_local alone. Further columns: locality, delta, delta_is_upper_limit (whether no sample was wrong), guessing (the
    error of guessing, above which a bound says nothing; 1 where that is not known), measured_length (the trained length
    that delta is of: the one whose error is largest, and the longest of those), multiple (L' / L).

    Raises `UserError` where no k, or no length of it, was both trained and tested, and where fewer than two lengths are
    beyond the trained ones.
    """
    groups = [group for _, group in points.groupby(GROUP, sort=False)]
    frames = []
    models = labels([of_any_length(group.iloc[0]) for group in groups])
    for group, model in zip(groups, models, strict=True):
        first = group.iloc[0]
        shortest, longest, k_train = first["shortest"], first["longest"], first["k_train"]
        trained_ks = range(json.loads(first["trained"]).get("k_train_min", 1), k_train + 1)
        curve = group[group["k"] == max({*group["k"]} & {*trained_ks}, default=0)]
        inside = curve[curve["length"].between(shortest, longest)]
        if inside.empty or (curve["length"] > longest).sum() < 2:
            raise UserError(
                f"{first['task']} with k_train {k_train}: the bound needs a trained k measured at a length from "
                f"{shortest} to {longest}, where it starts, and at two or more above {longest}; measure those too"
            )
        worst = inside.sort_values(["error", "length"]).iloc[-1]
        frames.append(
            curve.assign(
                model=model,
                locality=json.loads(first["parameters"]).get("locality") or 0,
                delta=worst["error"] or worst["error_high"],
                delta_is_upper_limit=worst["error"] == 0,
                guessing=1 - (0 if np.isnan(first["chance"]) else first["chance"]),
                measured_length=worst["length"],
                multiple=curve["length"] / longest,
            )
        )
    return pd.concat(frames, ignore_index=True)


def of_any_length(settings):
    """Settings without what differs with the length that was trained; the tables of tuples grow with it."""
    kept = settings.copy()
    for column in ("parameters", "trained", "options"):
        values = json.loads(settings[column])
        kept[column] = json.dumps(
            {name: value for name, value in values.items() if name.split(".")[-1] not in OF_LENGTH}
        )
    if settings["family"] == "tuples":
        kept["weights"] = 0
    return kept


def trained_frame(errors):
    """What the bounds start from: a row for each curve of `errors_frame`, by L among those that share a constant."""
    starts = errors[errors["length"] == errors["measured_length"]]
    together = [rows.sort_values("longest", kind="stable") for _, rows in starts.groupby(TESTED, sort=False)]
    numbers = ["longest", "measured_length", "error", "error_high", "delta", "delta_is_upper_limit"]
    return pd.concat(together, ignore_index=True)[[*TESTED, *numbers]]


def fit_bounds(errors):
    """Both bounds with a constant from the smaller half of all L'/L, tried at the larger half [ours].

    A row for each bound and models that differ in L alone: ``constant``, the smallest with which the bound holds where
    it was fitted (for the upper limit where no sample was wrong); ``fitted`` points, ``fitted_to`` the largest L'/L of
    them; ``tested`` points, where the bound is below the error of guessing, and ``empty`` ones, where it is not and
    says nothing; ``held`` of the tested ones, whose error (the lower end of its 95 % interval) is not above the bound;
    ``slack``, geometric mean of bound / error over the tested points with an error above 0, NaN where there are none.
    """
    fits = []
    for which, points in errors.groupby(TESTED, sort=False):
        beyond = points[points["multiple"] > 1].sort_values("multiple", kind="stable")
        half = (len(beyond) + 1) // 2
        for name in BOUNDS:
            fit = _fit(name, beyond.iloc[:half], beyond.iloc[half:])
            fits.append({**dict(zip(TESTED, which, strict=True)), "bound": name, **fit})
    return pd.DataFrame(fits)


def _fit(name, fitted, tested):
    def with_constant_1(points):
        return BOUNDS[name](points["length"], points["longest"], points["delta"])

    errors = np.where(fitted["error"] > 0, fitted["error"], fitted["error_high"])
    constant = float((errors / with_constant_1(fitted)).max())
    bound = constant * with_constant_1(tested)
    below = bound < tested["guessing"].to_numpy()
    bound, tried = bound[below], tested[below]
    wrong = tried["error"].to_numpy() > 0
    ratios = bound[wrong] / tried["error"].to_numpy()[wrong]
    return {
        "constant": constant,
        "fitted": len(fitted),
        "fitted_to": float(fitted["multiple"].max()),
        "tested": len(tried),
        "empty": len(tested) - len(tried),
        "held": int((tried["error_low"].to_numpy() <= bound).sum()),
        "slack": float(np.exp(np.mean(np.log(ratios)))) if len(ratios) and constant else np.nan,
    }


# --- the figure ---


def bound_figure(points):
    """The figure of one task, from its points of `with_errors`."""
    errors = errors_frame(points)
    fits = fit_bounds(errors).set_index([*TESTED, "bound"])
    tests = dict(iter(errors.groupby(TESTED, sort=False)))
    names = dict.fromkeys(curve_name(row) for _, row in errors.sort_values("longest").iterrows())
    looks = {name: look | {"linestyle": "-"} for name, look in style.model_styles(names).items()}
    titles = [title_of(test, named=errors["model"].nunique() > 1) for test in tests.values()]
    with matplotlib.rc_context(style.STYLE):
        error = "expected error" if errors["is_expected"].all() else "error"
        figure, panels = style.small_panels(titles, "length L′ [multiples of L]", f"{error} [multiples of δ]")
        for axes, (test, of_test) in zip(panels, tests.items(), strict=True):
            axes.axhline(1, color="0.75", linewidth=0.8, zorder=1.4)
            axes.axvline(fits.loc[(*test, "improved"), "fitted_to"], zorder=1.5, **FITTED)
            for _, curve in of_test.groupby(["longest", "locality"]):
                name = curve_name(curve.iloc[0])
                draw_errors(axes, curve, name, looks[name])
                constant = fits.loc[test, "constant"]
                draw_bound(axes, curve, constant["theorem_4_3"], theorem_bound, looks[name]["color"], THEOREM)
                draw_bound(axes, curve, constant["improved"], improved_bound, "black", IMPROVED)
        longest = errors["multiple"].max()
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        style.log_axis(panels[0], [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= longest])
        panels[0].set_xlim(0.5, 1.1 * longest)  # shorter samples say nothing about length generalization
        handles = []
        if (errors["error"] == 0).any():
            handles.append(Line2D([], [], color="0.3", label="none wrong: upper limit", **LIMIT))
        handles += [Line2D([], [], color="0.3", **THEOREM), Line2D([], [], color="black", **IMPROVED)]
        style.add_legend(figure, looks, *handles, Line2D([], [], **FITTED))
        style.add_heading(figure, describe(points), describe_bands(points))
    return figure


def curve_name(row):
    """L, and L_local where the task has one."""
    return f"L = {row['longest']}" + (f", $L_{{local}}$ = {row['locality']}" if row["locality"] else "")


def title_of(errors, *, named):
    """K_train, what was trained, k, and delta of each L, in their order."""
    first, starts = errors.iloc[0], trained_frame(errors)
    limits = np.where(starts["delta_is_upper_limit"], "≤ ", "")
    deltas = ", ".join(f"{limit}{delta:.2g}" for limit, delta in zip(limits, starts["delta"], strict=True))
    return k_title(first["k_train"], first["model"] if named else "", f"k = {first['k']}, δ: {deltas}")


def draw_errors(axes, curve, label, look):
    """The error of one model as multiples of delta, at multiples of L, with its interval."""
    x, names = curve["multiple"].to_numpy(), {"error": "value", "error_low": "low", "error_high": "high"}
    interval = curve[[*names]].div(curve["delta"], axis=0).rename(columns=names)
    positive = interval.where(interval > 0)
    style.draw_band(axes, x, positive.assign(high=interval["high"]), label, look, alpha=0.15)
    none, high = (interval["value"] == 0).to_numpy(), interval["high"].to_numpy()
    axes.plot(x[none], high[none], color=look["color"], label=f"{label}, none wrong", zorder=3.2, **LIMIT)


def draw_bound(axes, curve, constant, bound, colour, looks):
    """From L to the longest length, or to where it is at the error of guessing."""
    first = curve.iloc[0]
    lengths = np.geomspace(first["longest"], curve["length"].max(), 200)
    values = constant * bound(lengths, first["longest"], first["delta"])
    below = values < first["guessing"]
    x, y = lengths[below] / first["longest"], values[below] / first["delta"]
    axes.plot(x, y, color=colour, zorder=2.5, **looks)


def main():
    """Fit, draw, write and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("rows", metavar="ROWS")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("folders", metavar="FOLDER", nargs="*")
    parser.add_argument("--errors", action="store_true", help="all expected errors, and no bound")
    given = parser.parse_args()
    if given.errors:
        errors = errors_by_run(load([given.rows], given.folders))
        print(errors.to_string(index=False, float_format="{:.3g}".format))
        save_numbers(given.out / "numbers.csv", {"expected error": errors})
        return
    points = with_errors(load([given.rows], given.folders))
    planted = points[points["k_train"] > 0]
    errors = errors_frame(planted)
    of_error = ["seeds", "samples", "error", "error_low", "error_high", "is_expected"]
    tables = {"bounds": fit_bounds(errors), "trained": trained_frame(errors)}
    tables["errors"] = errors[[*TESTED, "longest", "locality", "length", *of_error]]
    path = given.out / "figure1.json"
    write_tables(path, tables, read_json(path, "remove it") if path.is_file() else {})
    for task, of_task in planted.groupby("task", sort=False):
        style.save_figure(bound_figure(of_task), given.out, f"figure1-{task}-bound.png")
    for table in tables.values():
        print(table.to_string(index=False), end="\n\n")


if __name__ == "__main__":
    main()
