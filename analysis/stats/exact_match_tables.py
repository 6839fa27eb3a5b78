"""What the curves of exact match are called, and their numbers as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from analysis.stats.exact_match import SCHEME_LABELS, Curve, Group, Settings
from analysis.stats.summary import percent_text, plain_table
from analysis.stats.sums import Json

_OF_THE_MODEL = ("scheme", "rotate", "skip_probability", "family", "weights")


def facts(settings: Settings) -> Json:
    """What the settings of one task may differ in: parameters of the task, then of the model."""
    return {
        **settings.parameters,
        "scheme": SCHEME_LABELS.get(settings.scheme, settings.scheme),
        "rotate": settings.rotate,
        "skip_probability": settings.skip_probability,
        "family": settings.family,
        "weights": settings.weights,
    }


def differing(all_facts: Sequence[Json]) -> list[Json]:
    """What is not the same in all of them, of each."""
    names = dict.fromkeys(name for each in all_facts for name in each)
    odd = [name for name in names if any(each.get(name) != all_facts[0].get(name) for each in all_facts)]
    return [{name: each[name] for name in odd if name in each} for each in all_facts]


def scheme_labels(all_settings: Sequence[Settings]) -> list[str]:
    """A name for each of the settings after its scheme, and as much more as tells apart those of one task.

    Rotation is named only where a scheme occurs with several, family and number of weights only where settings that
    agree in all else differ in them.
    """
    labels = []
    for settings in all_settings:
        label = SCHEME_LABELS.get(settings.scheme, settings.scheme)
        alike = [other for other in all_settings if other.scheme == settings.scheme]
        if len({other.rotate for other in alike}) > 1:
            label += f", rotate {settings.rotate or 'default'}"
        if len({other.skip_probability for other in alike}) > 1:
            label += f", {_skips(settings.skip_probability)}"
        alike = [other for other in alike if _plan(other) == _plan(settings)]
        if len({other.family for other in alike}) > 1:
            label += f", {settings.family}"
        if len({other.weights for other in alike if other.family == settings.family}) > 1:
            label += f", {settings.weights:,} weights"
        labels.append(label)
    return labels


def _skips(probability: float | None) -> str:
    return f"skips in {100 * probability:g} %" if probability else "no skips"


def _plan(settings: Settings) -> tuple:
    return settings.task, settings.parameters_json, settings.rotate, settings.skip_probability


def curve_names(groups: Sequence[Group]) -> Iterator[tuple[Group, Curve, str]]:
    """Every curve with its group and what it is called."""
    for group, label in zip(groups, scheme_labels([group.settings for group in groups]), strict=True):
        for curve in group.curves:
            k = "" if curve.k is None else f"k = {curve.k}, K_train = {group.settings.k_train}; "
            yield group, curve, k + label


def render_curves(groups: Sequence[Group]) -> Table:
    """All curves as one table for a terminal, a section each; shares in per cent."""
    table = plain_table("curve", "length", "seeds", "samples", "exact [%]")
    for group, curve, name in curve_names(groups):
        cells = [group.settings.task, *name.split("; ")]
        cells += [""] * (len(curve.points) - len(cells))
        for number, point in enumerate(curve.points):
            last = number == len(curve.points) - 1
            # what has no row of its own is joined in the last one
            cell = "; ".join(each for each in cells[number:] if each) if last else cells[number]
            numbers = (f"{point.length:,}", str(point.seeds), f"{point.samples:,}")
            table.add_row(Text(cell), *numbers, percent_text(point.exact.as_dict(), 1), end_section=last)
    return table


def curves_json(groups: Sequence[Group]) -> list[Json]:
    """Every curve with the numbers that are drawn: shares from 0 to 1, lengths in the task's unit."""
    return [
        {
            "name": name,
            "task": group.settings.task,
            "task_parameters": group.settings.parameters,
            **{each: getattr(group.settings, each) for each in _OF_THE_MODEL},
            "k": curve.k,
            "seeds": sorted({record.seed for record in group.records}),
            "points": [{**asdict(point), "exact": point.exact.as_dict()} for point in curve.points],
        }
        for group, curve, name in curve_names(groups)
    ]


def sources_json(groups: Sequence[Group]) -> list[Json]:
    """Every record that was read: its file, training seed and where it comes from."""
    return [
        {"record": str(record.path), "seed": record.seed, **record.source}
        for group in groups
        for record in group.records
    ]
