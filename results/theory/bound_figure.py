"""Error against length under both bounds, both axes logarithmic: a panel per K_train, a curve per L with its interval.

    python results/theory/bound_figure.py ROWS OUT [FOLDER...]

Drawn as multiples: the length of L, the error of delta. So the improved bound is one line for every L, and that of
Theorem 4.3 a line for each. Both end where they reach the error of guessing. Up to the dotted line of a panel are the
lengths that the constants were taken from. Where no sample was wrong, a hollow triangle stands at the upper limit of
the interval. ROWS is an exact_match.parquet, FOLDER one of its rows' folders. Writes figure1-TASK-bound.png to OUT for
each planted task.
"""

import argparse

import matplotlib
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.figures import style
from analysis.synthetic.bound import (
    TESTED,
    errors_frame,
    fit_bounds,
    improved_bound,
    theorem_bound,
    trained_frame,
)
from analysis.synthetic.exact_match import describe, load, pool
from analysis.synthetic.figure1 import k_title

LIMIT = {"marker": "v", "markerfacecolor": "white", "markersize": 3.8, "linestyle": "none"}
FITTED = {"color": "0.45", "linestyle": ":", "linewidth": 1, "label": "c is from the lengths up to this"}
THEOREM = {"linestyle": (0, (6, 2)), "linewidth": 1.1, "label": "Theorem 4.3: c L L′² δ"}
IMPROVED = {"linestyle": (0, (1, 1)), "linewidth": 1.1, "label": "improved: c (L′/L)² δ"}


def bound_figure(points):
    """The figure of one task, from its points of `pool`."""
    errors = errors_frame(points)
    fits = fit_bounds(errors).set_index([*TESTED, "bound"])
    tests = dict(iter(errors.groupby(TESTED, sort=False)))
    names = dict.fromkeys(curve_name(row) for _, row in errors.sort_values("longest").iterrows())
    looks = {name: (*look[:2], "-") for name, look in style.model_styles(names).items()}
    titles = [title_of(test, named=errors["model"].nunique() > 1) for test in tests.values()]
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(tests), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, (test, of_test), title in zip(panels, tests.items(), titles, strict=True):
            axes.axhline(1, color="0.75", linewidth=0.8, zorder=1.4)
            axes.axvline(fits.loc[(*test, "improved"), "fitted_to"], zorder=1.5, **FITTED)
            for _, curve in of_test.groupby(["longest", "locality"]):
                name = curve_name(curve.iloc[0])
                draw_errors(axes, curve, name, looks[name])
                constant = fits.loc[test, "constant"]
                draw_bound(axes, curve, constant["theorem_4_3"], theorem_bound, looks[name][0], THEOREM)
                draw_bound(axes, curve, constant["improved"], improved_bound, "black", IMPROVED)
            axes.set_title(title, loc="left")
        longest = errors["multiple"].max()
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        style.log_axis(panels[0], [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= longest])
        panels[0].set_xlim(0.5, 1.1 * longest)  # shorter samples say nothing about length generalization
        error = "expected error" if errors["is_expected"].all() else "error"
        style.outer_labels(panels, "length L′ [multiples of L]", f"{error} [multiples of δ]")
        handles = style.line_handles(looks)
        if (errors["error"] == 0).any():
            handles.append(Line2D([], [], color="0.3", label="none wrong: upper limit", **LIMIT))
        handles += [Line2D([], [], color="0.3", **THEOREM), Line2D([], [], color="black", **IMPROVED)]
        style.add_legend(figure, [*handles, Line2D([], [], **FITTED)])
        style.add_heading(figure, describe(points))
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
    x, delta = curve["multiple"].to_numpy(), curve["delta"]
    value, low, high = ((curve[name] / delta).to_numpy() for name in ("error", "error_low", "error_high"))
    wrong, positive_low = (np.where(values > 0, values, np.nan) for values in (value, low))
    style.draw_band(axes, x, (wrong, positive_low, high), label, look, alpha=0.15)
    none = value == 0
    axes.plot(x[none], high[none], color=look[0], label=f"{label}, none wrong", zorder=3.2, **LIMIT)


def draw_bound(axes, curve, constant, bound, colour, looks):
    """From L to the longest length, or to where it is at the error of guessing."""
    first = curve.iloc[0]
    lengths = np.geomspace(first["longest"], curve["length"].max(), 200)
    values = constant * bound(lengths, first["longest"], first["delta"])
    below = values < first["guessing"]
    x, y = lengths[below] / first["longest"], values[below] / first["delta"]
    axes.plot(x, y, color=colour, zorder=2.5, **looks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", metavar="ROWS")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("folders", metavar="FOLDER", nargs="*")
    given = parser.parse_args()
    pooled = pool(load([given.rows], given.folders))
    for task, of_task in pooled[pooled["k_train"] > 0].groupby("task", sort=False):
        style.save_figure(bound_figure(of_task), given.out, f"figure1-{task}-bound")
