"""Tables of the influence benchmark's result."""

from __future__ import annotations

from typing import Any

from rich.table import Table

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
        f"speed: {speed['targets']} targets; share whose first {speed['k']} tokens are the plain loop's, as a set and "
        "in order; largest difference of influence"
    )
    columns = ["targets/s", "× plain", "lowest", "highest", "set", "order", "off [nats]"]
    table = _table(title, ["selector", ""], columns)
    for selector, timed in speed["selectors"].items():
        for label, row in timed["results"].items():
            numbers = [
                _short(row["rate"]),
                *(f"{row[key]:.2f}" for key in ("ratio", "ratio_low", "ratio_high")),
            ]
            compared = timed["selections"].get(label)
            same = ["", "", ""]
            if compared:
                same = [f"{100 * compared[key]:.0f} %" for key in ("same_set", "same_order")]
                same.append(f"{compared['largest_influence_difference_nats']:.1e}")
            table.add_row(selector, label, *numbers, *same)
        table.add_section()
    return table


def _screened(screened: Json) -> Table:
    title = (
        f"screened: {screened['targets']} targets of {screened['documents']} documents, {screened['rounds']} rounds; "
        "cost and net recovery in % of the exact selector's"
    )
    rows = screened["selectors"]
    ks = list(next(iter(rows.values())).get("net_recovery", {}))
    kept = [heading for k in ks for heading in (f"net, k = {k}", f"kept, k = {k} [95 %]")]
    table = _table(title, ["selector"], ["s/context", "seconds", "lowest", "highest", "tokens", *kept])
    for name, row in rows.items():
        ratio = row["seconds_ratio"]
        values = [_short(row["seconds_per_context"])]
        values += [_percent(ratio[key]) for key in ("ratio", "ratio_low", "ratio_high")]
        values.append(_percent(row["tokens_ratio"]))
        for k in ks:
            interval = row["net_recovery_kept"][k]
            low, high = (_percent(interval[bound]) for bound in ("low", "high"))
            values += [
                _percent(row["net_recovery"][k]["value"]),
                f"{_percent(interval['value'])} [{low}, {high}]",
            ]
        table.add_row(name, *values)
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
    table: Any = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _short(value: float) -> str:
    return f"{value:,.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
