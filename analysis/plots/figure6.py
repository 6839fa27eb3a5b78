"""The grids of "Figure 6": net recovery, recovery and placebo at further k, N, M and model sizes (docs/method.md, 2.5).

A small panel for each records folder, drawn from its summary. Any folders may be combined: every panel's title says
what was measured there, and what differs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.plots import style
from analysis.plots.figure2 import check_selectors
from analysis.plots.training import last_parts
from analysis.stats.bootstrap import few_clusters
from analysis.stats.recovery import (
    BEST,
    CONTROLS,
    DEFAULT_SELECTOR,
    RECOVERIES,
    SIGNED_SELECTOR,
    and_prefix,
    default_selector,
    nats,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

_OF_LDS = ("subsets", "keep_rate")
"""Options that no recovery depends on."""


@dataclass(frozen=True)
class GridPanel:
    """One records folder in the grid."""

    source: str
    """The records folder."""
    summary: Json
    title: str
    row: int
    column: int


def grid_panels(
    sources: Sequence[str],
    summaries: Sequence[Json],
    *,
    rows: str | None = None,
    columns: str | None = None,
    labels: Sequence[str] | None = None,
) -> list[GridPanel]:
    """The panels with their titles and places.

    Args:
        sources: the records folders, named in messages and in the table.
        summaries: theirs.
        rows: setting whose values are the rows, such as n_long. Numbers ascend, other values keep their order.
        columns: the same for columns. Without both, panels follow each other in rows.
        labels: names in the titles instead of the models'.

    Raises `UserError` for a setting that there is not, two folders for one place, or too few or too many labels.
    """
    if labels is not None and len(labels) != len(sources):
        raise UserError(
            f"{len(labels)} labels for {len(sources)} records folders; give one for each, in their order"
        )
    places = _places(sources, summaries, rows, columns)
    titles = _titles(summaries, labels)
    return [
        GridPanel(source, summary, title, *place)
        for source, summary, title, place in zip(sources, summaries, titles, places, strict=True)
    ]


def choose_selectors(panels: Sequence[GridPanel], wanted: Sequence[str] | None = None) -> list[str]:
    """Those ``wanted``, or the default selector, if possible one that all panels have, the controls and `best`.

    Raises `UserError` for a name that no panel has.
    """
    measured = _measured(panels)
    if wanted is None:
        usual = (DEFAULT_SELECTOR, SIGNED_SELECTOR)
        in_all = [name for name in usual if all(name in each.summary["selectors"] for each in panels)]
        first = in_all[0] if in_all else default_selector(measured)
        return [first, *(name for name in (*CONTROLS, BEST) if name in measured and name != first)]
    return check_selectors(wanted, measured)


def figure6(panels: Sequence[GridPanel], selectors: Sequence[str], *, net: bool) -> Figure:
    """Net recovery against k, or else recovery and its placebo (dashed), of ``selectors`` where they were measured."""
    ks = sorted({k for panel in panels for k in panel.summary["settings"]["ks"]})
    styles = style.selector_styles(_measured(panels))
    with matplotlib.rc_context({**style.STYLE, "axes.titlesize": style.SMALL}):
        places = [(panel.row, panel.column) for panel in panels]
        figure, all_axes = style.small_multiples(
            places, title_lines=style.lines_of([panel.title for panel in panels])
        )
        for axes, panel in zip(all_axes, panels, strict=True):
            found = _found(panel, selectors)
            if net:
                style.draw_curves(axes, found, "net_recovery", styles)
            else:
                style.draw_curves(axes, found, "placebo_recovery", styles, placebo=True)
                style.draw_curves(axes, found, "recovery", styles)
                axes.axhline(1.0, linestyle=":", **style.REFERENCE)
            axes.axhline(0.0, **style.REFERENCE)
            style.k_axis(axes, ks)
            axes.set_title(panel.title, loc="left")
        of_what = "\n[fraction of $L_{short} - L_{long}$]"
        style.outer_labels(all_axes, "k [far tokens]", f"{'net recovery' if net else 'recovery'}{of_what}")
        style.add_legend(
            figure, style.selector_handles({name: styles[name] for name in selectors}, placebo=not net)
        )
        what = "Net recovery (recovery − placebo$^+$)" if net else "Recovery and placebo recovery"
        bounds = "bars: 95 %, by " + " or ".join(sorted({_unit(panel.summary) for panel in panels}))
        style.add_heading(figure, f"{what} from k influential far tokens; {bounds}")
    return figure


def grid_table(panels: Sequence[GridPanel], selectors: Sequence[str]) -> Json:
    """What is drawn, as JSON: of each panel its records, place, settings and recoveries with intervals."""
    settings = (
        "n_long",
        "n_short",
        "checkpoint",
        "checkpoint_sha256",
        "tau_nats",
        "crossfit",
        "documents_over_tau",
        "groups_over_tau",
    )
    numbers = ("targets", "targets_over_tau", "share_over_tau")
    return {
        "panels": [
            {
                "records": panel.source,
                "title": panel.title,
                "row": panel.row,
                "column": panel.column,
                **{
                    name: panel.summary["settings"][name]
                    for name in settings
                    if name in panel.summary["settings"]
                },
                **{name: panel.summary[name] for name in numbers},
                "selectors": {
                    name: {k: {key: values[key] for key in RECOVERIES} for k, values in per_k.items()}
                    for name, per_k in _found(panel, selectors).items()
                },
            }
            for panel in panels
        ]
    }


def _unit(summary: Json) -> str:
    return "group, then document" if "groups" in summary else "document"


def _measured(panels: Sequence[GridPanel]) -> list[str]:
    """Every selector that some panel has, in the order in which they are met, `best` last."""
    names = dict.fromkeys(name for panel in panels for name in panel.summary["selectors"])
    return sorted(names, key=lambda name: name == BEST)


def _found(panel: GridPanel, selectors: Sequence[str]) -> Json:
    measured = panel.summary["selectors"]
    return {name: measured[name] for name in selectors if name in measured}


def _titles(summaries: Sequence[Json], labels: Sequence[str] | None) -> list[str]:
    """Model, N, M and share over tau; below them the further settings that are not the same in all panels."""
    facts = [_facts(each) for each in summaries]
    texts = {key: _texts([each.get(key) for each in facts]) for each in facts for key in each}
    models = texts.pop("model")
    differing = [key for key, values in texts.items() if len(set(values)) > 1]
    titles = []
    for number, summary in enumerate(summaries):
        settings = summary["settings"]
        share = f"{100 * summary['share_over_tau']['value']:.1f} % of {summary['targets']:,}"
        prefix = and_prefix(settings.get("options", {}).get("prefix"))
        lines = [
            models[number] if labels is None else labels[number],
            f"N = {settings['n_long']}, M = {settings['n_short']}{prefix}",
            f"{share} over $\\tau$",
            *(f"{key} {texts[key][number]}" for key in differing),
        ]
        if few := few_clusters(settings, "_over_tau"):
            lines.append(f"only {few}: rough intervals")
        if not settings["complete"]:
            lines.append(f"unfinished: {settings['targets_measured']:,} measured so far")
        titles.append("\n".join(lines))
    return titles


def _facts(summary: Json) -> dict[str, Any]:
    """What decides the numbers beside N and M, by its name in a title; files as (path, checksum)."""
    settings = summary["settings"]
    evaluated = (settings["evaluation_checkpoint"], settings["evaluation_checkpoint_sha256"])
    return {
        "model": (settings["checkpoint"], settings["checkpoint_sha256"]),
        "evaluated with:": evaluated if settings["crossfit"] else "itself",
        r"$\tau$ =": nats(settings["tau_nats"]),
        "text:": (settings["corpus"], settings["corpus_manifest_sha256"]),
        "split:": settings["split"],
        "tokenizer:": settings["tokenizer_sha256"][:6],
        "number format:": settings["dtype"],
        "seed:": settings["seed"],
        **{f"{name}:": value for name, value in settings["options"].items() if name not in _OF_LDS},
    }


def _texts(values: Sequence[Any]) -> list[str]:
    """How the values of one fact are written: of files, as little of the path as tells them apart."""
    short = _short_names([value for value in values if isinstance(value, tuple)])
    return [
        short[_key(value)] if isinstance(value, tuple) else "none" if value is None else str(value)
        for value in values
    ]


def _key(file: tuple[str, str]) -> tuple[str, str]:
    """The checksum of a file (path, checksum), and how a checkpoint's RoPE is scaled (CKPT@yarn:4)."""
    return file[1], PurePath(file[0]).name.partition("@")[2]


def _short_names(files: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """`_key` to a short name of the first path it is met at; a checkpoint's step is named only where it must be."""
    paths = {_key(file): PurePath(file[0]) for file in reversed(files)}
    without_step = [_without_step(path) for path in paths.values()]
    for shown, fewest in ((without_step, 1), (list(paths.values()), 2)):
        if names := last_parts(shown, fewest):
            return dict(zip(paths, names, strict=True))
    return {key: f"{path} ({key[0][:6]})" for key, path in paths.items()}


def _without_step(path: PurePath) -> PurePath:
    step, at, scaling = path.name.partition("@")
    run = path.parent
    return run.with_name(run.name + at + scaling) if re.fullmatch(r"step\d+", step) and run.name else path


def _places(
    sources: Sequence[str], summaries: Sequence[Json], rows: str | None, columns: str | None
) -> list[tuple[int, int]]:
    """(row, column) of every panel; where only one of them is given, its panels follow each other in the other."""
    if rows is None and columns is None:
        return style.in_rows(len(sources), style.columns_in(style.PAGE, 2.0))
    of_rows, of_columns = (_ranks(sources, summaries, name) if name else [] for name in (rows, columns))
    places = list(zip(of_rows or _repeats(of_columns), of_columns or _repeats(of_rows), strict=True))
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UserError(
                f"{sources[places.index(place)]} and {sources[number]} have the same {rows} and {columns}; "
                "choose other --rows or --columns, or leave one of them out"
            )
    return places


def _repeats(ranks: Sequence[int]) -> list[int]:
    """How often each rank was there before."""
    return [ranks[:number].count(rank) for number, rank in enumerate(ranks)]


def _ranks(sources: Sequence[str], summaries: Sequence[Json], name: str) -> list[int]:
    """Rank of each summary's value of the setting ``name`` among all its values."""
    values = []
    for source, summary in zip(sources, summaries, strict=True):
        settings = {**summary["settings"], **summary["settings"]["options"]}
        known = [key for key, value in settings.items() if isinstance(value, (str, int, float))]
        if name not in known:
            raise UserError(f"{name} is no setting of {source}; choose from {', '.join(known)}")
        values.append(settings[name])
    distinct = list(dict.fromkeys(values))
    if all(isinstance(value, (int, float)) for value in distinct):
        distinct.sort()
    return [distinct.index(value) for value in values]
