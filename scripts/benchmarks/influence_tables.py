"""Tables of the influence benchmark's result."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.influence import Json

MEGABYTE = 1e6


def influence_tables(result: Json) -> list[Table]:
    """A table for each part that was measured."""
    builders = {"speed": _speed, "screened": _screened, "cost": _cost}
    return [build(result[part]) for part, build in builders.items() if part in result]


def describe_machine(result: Json) -> str:
    """One line: model, contexts, machine, commit."""
    machine, settings = result["machine"], result["settings"]
    where = machine["gpu"] or f"{machine['cores']} {machine['processor']} cores"
    return (
        f"{result['model']} ({result['parameters']:,} parameters), N {settings['n_long']}, M {settings['n_short']}, "
        f"{result.get('contexts', 'random tokens')}; {where}, threads: {machine['threads']}, torch {machine['torch']}, "
        f"load average before {machine['load_average_before']:.1f}; commit {result['commit']}"
    )


def _speed(speed: Json) -> Table:
    title = (
        f"speed: {speed['targets']} targets, their number per second; × the plain loop's speed [lowest, highest]; "
        f"share whose first {speed['k']} tokens are the plain loop's, as a set and in order [%]; "
        "largest difference of influence [nats]"
    )
    columns = ["per s", "× plain", "set", "order", "nats"]
    table = _table(title, ["selector", ""], columns)
    for selector, timed in speed["selectors"].items():
        for number, (label, row) in enumerate(timed["results"].items()):
            ratio, low, high = (row[key] for key in ("ratio", "ratio_low", "ratio_high"))
            numbers = [_short(row["rate"]), f"{ratio:.2f} [{low:.2f}, {high:.2f}]"]
            compared = timed["selections"].get(label)
            same = ["", "", ""]
            if compared:
                same = [f"{100 * compared[key]:.0f}" for key in ("same_set", "same_order")]
                same.append(f"{compared['largest_influence_difference_nats']:.0e}")
            name = "" if number else selector
            table.add_row(name, label.replace("prefixes not shared", "no sharing"), *numbers, *same)
        table.add_section()
    return table


def _screened(screened: Json) -> Table:
    title = (
        f"screened: {screened['targets']} targets of {screened['documents']} documents, {screened['rounds']} rounds; "
        "in % of the exact selector's: seconds [lowest, highest], tokens, net recovery [95 %]"
    )
    rows = screened["selectors"]
    ks = list(next(iter(rows.values())).get("net_recovery_kept", {}))
    table = _table(title, ["selector"], ["seconds", "tokens", *(f"kept, k = {k}" for k in ks)])
    for name, row in rows.items():
        ratio = row["seconds_ratio"]
        seconds = _bounded(ratio["ratio"], ratio["ratio_low"], ratio["ratio_high"])
        kept = [row["net_recovery_kept"][k] for k in ks]
        table.add_row(
            name,
            seconds,
            _percent(row["tokens_ratio"]),
            *(_bounded(each["value"], each["low"], each["high"]) for each in kept),
        )
    return table


def _cost(cost: Json) -> Table:
    table = _table(
        "cost: every point in a process of its own, random tokens",
        ["varied", "selector"],
        ["N", "M", "k", "targets", "s/target", "peak memory [MB]"],
    )
    for varied, points in cost["sweeps"].items():
        for point in points:
            shape = [str(point[key]) for key in ("n_long", "n_short", "k", "targets")]
            peak = point["peak_bytes"]
            memory = "-" if peak is None else f"{peak / MEGABYTE:,.1f}"
            table.add_row(varied, point["selector"], *shape, _short(point["seconds_per_target"]), memory)
        table.add_section()
    return table


def _table(title: str, names: list[str], numbers: list[str]) -> Table:
    look: Any = {"title_justify": "left", "box": None, "padding": (0, 1, 0, 0), "header_style": "bold"}
    table = Table(title=Text(title), **look)
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def _short(value: float) -> str:
    return f"{value:,.3g}"


def _bounded(*shares: float | None) -> str:
    """``value [low, high]`` in per cent; of what is compared with itself the value alone."""
    value, low, high = map(_percent, shares)
    return value if value == low == high else f"{value} [{low}, {high}]"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
