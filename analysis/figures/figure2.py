"""Figure 2 (docs/method.md, 2.5), of one Result or of several beside each other.

(a) mean loss against k, (b) net recovery against k, (c) recovery at one k in bins of L_short - L_long, (d) with a frame
of it, loss against position. Of one Result a curve is a selector; of several it is a Result, by its default selector,
under its name. The other selectors of one have a figure of their own, `selectors_figure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures import style
from analysis.figures.length import plot_length
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import by_clusters
from analysis.stats.measured import (
    CONTROLS,
    NET,
    PLACEBO,
    SIGNED_SELECTOR,
    TRUE,
    choose_k,
    default_selector,
    nats,
)
from olmo_sparsity.util.errors import UserError

AS_TEXT = {"level": "text", "unit": "token", "sinks": 0}
"""How the tokens that are drawn here were given back."""
_NET_LABEL = f"net recovery\n{style.OF_GAIN}"


@dataclass(frozen=True)
class _Curve:
    """What one colour stands for: a selector of a Result."""

    label: str
    result: str
    selector: str


def figure2(
    results: Mapping[str, Result],
    path: str | Path | None = None,
    *,
    length: pd.DataFrame | None = None,
    selectors: Sequence[str] | None = None,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure:
    """Panels (a) to (c), and with ``length`` panel (d).

    Args:
        results: by the names that stand in the legend; the name of one alone is not shown.
        path: where to write it (`style.save_figure`); None: nowhere.
        length: loss by position, see `analysis.figures.length.plot_length`.
        selectors: of panels (a) and (b); by default those of `main_selectors`, or of several Results the default one.
        k: of panel (c); by default 4 or the closest that was measured.
        width: in inches.
        heading: whether a line above the panels says what was measured.
        bootstrap: ``resamples`` and ``seed`` of the intervals.

    Raises `UserError` where recovery is undefined, and for a selector that was not measured.
    """
    panels = _Panels(results, selectors, bootstrap)
    draws: list[Callable[[Axes], None]] = [
        panels.plot_loss,
        panels.plot_net_recovery,
        lambda axes: panels.plot_gain_bins(axes, k),
    ]
    shown = [*panels.curves, *panels.curves_in_bins]
    legend_height = 0.0
    if length is not None:
        draws.append(lambda axes: plot_length(axes, length))
        legend_height = 0.16 * length["model"].nunique()
    return _figure(panels, draws, shown, path, width, heading, legend_height)


def selectors_figure(
    result: Result,
    path: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure | None:
    """Panels (a) and (b) of the selectors that `figure2` leaves out, beside the default one; None without any."""
    names = numbers.Measured(result).names
    default, main = default_selector(names), main_selectors(names, selectors)
    others = [name for name in names if name not in main and name != default]
    if not others:
        return None
    panels = _Panels({"": result}, [default, *others], bootstrap)
    return _figure(panels, [panels.plot_loss, panels.plot_net_recovery], panels.curves, path, width, heading)


def main_selectors(measured: Sequence[str], wanted: Sequence[str] | None = None) -> list[str]:
    """``wanted``, or of what was measured the default selector, its signed form, attention and the controls.

    Raises `UserError` for a selector that was not measured.
    """
    if wanted is None:
        usual = (default_selector(measured), SIGNED_SELECTOR, "attention", *CONTROLS)
        return [name for name in dict.fromkeys(usual) if name in measured]
    if unknown := [name for name in wanted if name not in measured]:
        raise UserError(f"{', '.join(unknown)} was not measured; choose from {', '.join(measured)}")
    return list(wanted)


class _Panels:
    """The frames, curves and styles of one figure, and what draws each panel."""

    def __init__(
        self, results: Mapping[str, Result], selectors: Sequence[str] | None, bootstrap: Mapping[str, int]
    ):
        if not results:
            raise ValueError("there is nothing to draw: give one Result or more")
        self.results, self.bootstrap = results, bootstrap
        self.recovery = {name: _as_text(numbers.recovery(one, **bootstrap)) for name, one in results.items()}
        self.losses = {name: _as_text(numbers.losses(one, **bootstrap)) for name, one in results.items()}
        self.ks = sorted({k for result in results.values() for k in result.ks})
        measured = {name: list(dict.fromkeys(frame["selector"])) for name, frame in self.recovery.items()}
        self.alone = len(results) == 1
        if self.alone:
            [(name, names)] = measured.items()
            self.styles = {
                style.selector_label(selector): look
                for selector, look in style.selector_styles(names).items()
            }
            self.curves = [_curve(name, selector) for selector in main_selectors(names, selectors)]
            self.curves_in_bins = [_curve(name, selector) for selector in style.shown_selectors(names)]
            return
        self.curves = []
        for name, names in measured.items():
            chosen = [default_selector(names)] if selectors is None else main_selectors(names, selectors)
            for selector in chosen:
                label = name if len(chosen) == 1 else f"{name}, {selector}"
                self.curves.append(_Curve(label, name, selector))
        self.curves_in_bins = self.curves
        self.styles = style.model_styles(
            {curve.label: style.encoding_of(curve.result) for curve in self.curves}
        )

    @property
    def has_placebo(self) -> bool:
        """Whether any Result has one."""
        return any(PLACEBO in result.far_contexts for result in self.results.values())

    def plot_loss(self, axes: Axes) -> None:
        """Panel (a): L_k against k, the placebo dashed, between L_short and L_long [nats per token]."""
        style.draw_curves(axes, self._of(self.losses, PLACEBO), self.styles, placebo=True)
        style.draw_curves(axes, self._of(self.losses, TRUE), self.styles)
        for number, (name, result) in enumerate(self.results.items()):
            rows = numbers.shares(result, **self.bootstrap).set_index("name")
            short, long = (rows.loc[[f"loss_{which}_over_tau_nats"]] for which in ("short", "long"))
            colour = "black" if self.alone else self._colour_of(name)
            # where both intervals overlap, and of every further result, they stand beside each other
            place = 1.03 + 0.025 * number
            beside = 0.025 * bool(long["high"].iloc[0] >= short["low"].iloc[0])
            last = number == len(self.results) - 1
            self._reference(axes, short, r"$L_{short}$" if last else "", colour, place)
            self._reference(axes, long, r"$L_{long}$" if last else "", colour, place + beside)
        style.k_axis(axes, self.ks)
        axes.margins(y=0.08)
        axes.set_ylabel("mean loss [nats per token]")
        axes.set_title("(a) Loss with k influential far tokens", loc="left")

    def plot_net_recovery(self, axes: Axes) -> None:
        """Panel (b): net recovery (docs/method.md, 2.3) against k; recovery where there is no placebo."""
        net = self._of(self.recovery, NET)
        style.draw_curves(axes, net or self._of(self.recovery, TRUE), self.styles)
        axes.axhline(0.0, **style.REFERENCE)
        style.k_axis(axes, self.ks)
        axes.set_ylabel(_NET_LABEL if net else _NET_LABEL.removeprefix("net "))
        axes.set_title("(b) Net recovery (recovery − placebo$^+$)" if net else "(b) Recovery", loc="left")

    def plot_gain_bins(self, axes: Axes, k: int | None = None) -> None:
        """Panel (c): recovery at one k in bins of L_short - L_long, true and placebo far context.

        Of one Result the default selector and the controls. A point without a bar comes from too few documents for an
        interval.
        """
        frames = {
            name: numbers.gain_bins(one, k, **self.bootstrap).set_index(["from_nats", "to_nats"])
            for name, one in self.results.items()
        }
        bins = sorted(set().union(*(frame.index for frame in frames.values())))
        points = [(curve, context) for curve in self.curves_in_bins for context in (TRUE, PLACEBO)]
        for number, (curve, context) in enumerate(points):
            frame = frames[curve.result]
            rows = frame[(frame["selector"] == curve.selector) & (frame["far_context"] == context)]
            if rows.empty:
                continue
            shift = min(0.13, 0.8 / len(points)) * (number - (len(points) - 1) / 2)
            places = [bins.index(one) + shift for one in rows.index]
            label = f"{curve.label} placebo" if context == PLACEBO else curve.label
            look = self.styles[curve.label]
            style.draw_points(axes, places, rows, label, look, hollow=context == PLACEBO)
        axes.axhline(0.0, **style.REFERENCE)
        axes.axhline(1.0, linestyle=":", **style.REFERENCE)
        labels = [f"> {low:g}" if math.isinf(high) else f"{low:g}–{high:g}" for low, high in bins]
        if self.alone:
            [frame] = frames.values()
            counts = frame["n_targets"].groupby(level=[0, 1]).first()
            labels = [f"{text}\nn={counts[one]:,}" for text, one in zip(labels, bins, strict=True)]
        axes.set_xticks(range(len(bins)), labels)
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(r"$L_{short} - L_{long}$ of the target [nats]")
        axes.set_ylabel(f"recovery\n{style.OF_GAIN}")
        ks = sorted({choose_k(result.ks, k) for result in self.results.values()})
        shown = dict.fromkeys(curve.selector for curve in self.curves_in_bins)
        title = f"(c) Recovery by size of the gain, k = {', '.join(map(str, ks))}"
        axes.set_title(f"{title}\n{', '.join(shown)}", loc="left")

    def _of(self, frames: Mapping[str, pd.DataFrame], far_context: str) -> dict[str, pd.DataFrame]:
        """The rows of each curve in one far context, by label; not of what has none."""
        curves = {}
        for curve in self.curves:
            frame = frames[curve.result]
            rows = frame[(frame["selector"] == curve.selector) & (frame["far_context"] == far_context)]
            if len(rows):
                curves[curve.label] = rows
        return curves

    def _colour_of(self, name: str) -> Any:
        return next(self.styles[curve.label][0] for curve in self.curves if curve.result == name)

    def _reference(self, axes: Axes, row: pd.DataFrame, text: str, colour: Any, place: float) -> None:
        """A dotted line across the panel; its interval, at ``place``, and name are to the right of the curves."""
        [value] = row["value"]
        axes.axhline(value, color=colour, linewidth=1.0, linestyle=":", label=row.index[0], zorder=2.0)
        right: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        axes.errorbar(
            [place], [value], style.bar_lengths(row), color=colour, elinewidth=1, capsize=2, **right
        )
        axes.text(place + 0.03, value, text, va="center", **right)


def _curve(name: str, selector: str) -> _Curve:
    return _Curve(style.selector_label(selector), name, selector)


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of tokens that were given back as text, one by one."""
    return frame[np.all([frame[name] == value for name, value in AS_TEXT.items()], axis=0)]


def _figure(
    panels: _Panels,
    draws: Sequence[Callable[[Axes], None]],
    shown: Sequence[_Curve],
    path: str | Path | None,
    width: float,
    heading: bool,
    legend_height: float = 0.0,
) -> Figure:
    """``legend_height``: inches below the last panel, of a legend of its own."""
    columns = min(style.columns_in(width, 3.2), len(draws))
    rows = math.ceil(len(draws) / columns)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, 2.6 * rows + (0.9 if heading else 0.6) + legend_height)
        grid = figure.add_gridspec(rows, columns)
        for number, draw in enumerate(draws):
            row, column = divmod(number, columns)
            last = number == len(draws) - 1
            draw(figure.add_subplot(grid[row, column:] if last else grid[row, column]))
        styles = {curve.label: panels.styles[curve.label] for curve in shown}
        style.add_legend(figure, style.selector_handles(styles, placebo=panels.has_placebo))
        if heading:
            style.add_heading(figure, describe(panels.results))
        figure.draw_without_rendering()  # panel (d) has a legend of its own: the layout takes two passes
    if path is not None:
        style.save_figure(figure, path)
    return figure


def describe(results: Result | Mapping[str, Result]) -> str:
    """What was measured, for headings: context lengths, targets, documents, tau; of several Results the main counts."""
    if isinstance(results, Result):
        return _describe_one(results)
    if len(results) == 1:
        return _describe_one(next(iter(results.values())))
    parts = [
        f"{name}: {_sizes(result)}; {numbers.counts(result)['targets_over_tau']:,} of {len(result.targets):,} over "
        f"$\\tau$ = {nats(result.settings['tau_nats'])}"
        for name, result in results.items()
    ]
    return f"{'; '.join(parts)}; bars: 95 %"


def _describe_one(result: Result) -> str:
    settings, counts = result.settings, numbers.counts(result)
    share = numbers.shares(result, resamples=2).set_index("name")["value"]
    targets = f"{counts['targets'] // counts['trainings']:,} targets of {counts['documents']:,} documents"
    if counts["trainings"] > 1:
        targets = f"{counts['trainings']} trainings × {targets}"
    tails = rf"{100 * share['share_below_minus_tau']:.1f} % below $-\tau$"
    held = share["share_of_gain"]
    if np.isfinite(held):
        tails += f"; {100 * held:.0f} % of the net gain{', as others lose' if held > 1 else ''}"
    missing = counts["targets_over_tau"] - counts["targets_measured"]
    unfinished = f" ({counts['targets_measured']:,} measured so far)" if missing else ""
    chosen = "; cross-fit: chosen by one model, measured by another" if result.crossfit else ""
    if result.crossfit and settings["selected_by"].get("untrained"):
        chosen = "; sanity check: chosen with untrained weights"
    return (
        f"{_sizes(result)}; {targets}, {counts['targets_over_tau']:,} with "
        rf"$L_{{short}} - L_{{long}} > \tau$ = {nats(settings['tau_nats'])} "
        f"({100 * share['share_over_tau']:.1f} %; {tails}){unfinished}{chosen}; "
        f"bars: 95 %, {by_clusters(counts, '_over_tau')}"
    )


def _sizes(result: Result) -> str:
    """N, M, and what is not as usual: B, and the prefix (docs/method.md, 2.1)."""
    settings = result.settings
    size, prefix = settings.get("targets_per_block", 1), settings.get("prefix")
    blocks = f", B = {size}" if size > 1 else ""
    before = f", prefix {' '.join(map(str, prefix))}" if prefix else ""
    return f"N = {settings['n_long']}, M = {settings['n_short']}{blocks}{before}"
