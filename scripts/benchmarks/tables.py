"""Tables of what the benchmarks measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.timing import Json

MEGABYTE = 1e6


def print_tables(result: Json) -> None:
    """What was measured on what, and the tables of the result."""
    tables = {"influence": _influence, "synthetic": _synthetic}.get(result["benchmark"], _rates)(result)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_about(result), markup=False)
    for table in tables:
        console.print(table)


def _about(result: Json) -> str:
    """Benchmark, settings, machine and commit, in a line."""
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['cores']} {machine['processor']} cores"
    plain = {name: value for name, value in result.items() if isinstance(value, str | int | float)}
    shown = {
        name: value
        for name, value in plain.items()
        if name not in ("benchmark", "started", "command", "unit")
    }
    return (
        f"{result['benchmark']}: {', '.join(f'{name} {value}' for name, value in shown.items())}; {where}, "
        f"threads: {machine['threads']}, torch {machine['torch']}, load average before "
        f"{machine['load_average_before']:.1f}"
    )


def _table(title: str, names: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first columns hold names, the others numbers."""
    table = Table(
        title=Text(title), title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold"
    )
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _rates(result: Json) -> list[Table]:
    """Rates and their ratios to the baseline."""
    rows = [[name, f"{row['rate']:,.3g}", _ratio(row)] for name, row in result["results"].items()]
    title = f"\nmedian of {result['rounds']} rounds; × {result['baseline']} [lowest, highest]"
    return [_table(title, [""], [result["unit"], "×"], rows)]


def _synthetic(result: Json) -> list[Table]:
    rows = [
        [
            name,
            task["scheme"],
            str(task["batch"]),
            f"{task['samples_per_second']:,.0f}",
            _short(task["steps_per_second"]),
            "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * task[f"share{key}"] for key in ("", "_low", "_high"))),
        ]
        for name, task in result["tasks"].items()
    ]
    bound = 100 * result["largest_share"]
    title = f"\nmaking a batch, % of a training step [lowest, highest]; to be below {bound:.0f}"
    making = _table(title, ["task", "ids"], ["batch", "samples/s", "steps/s", "% of a step"], rows)
    return [making, *_rates(result["steps"])]


def _influence(result: Json) -> list[Table]:
    """A table for each part that was measured."""
    builders = {"speed": _speed, "screened": _screened, "cost": _cost}
    return [build(result[part]) for part, build in builders.items() if part in result]


def _speed(speed: Json) -> Table:
    rows = []
    for selector, timed in speed["selectors"].items():
        for label, row in timed["results"].items():
            same = ["", "", ""]
            if compared := timed["selections"].get(label):
                same = [f"{100 * compared[key]:.0f}" for key in ("same_set", "same_order")]
                same.append(f"{compared['largest_influence_difference_nats']:.0e}")
            rows.append([selector, label, _short(row["rate"]), _ratio(row), *same])
    title = (
        f"\nspeed: {speed['targets']} targets, their number per second; × the plain loop's speed [lowest, highest]; "
        f"share whose first {speed['k']} tokens are the plain loop's, as a set and in order [%]; "
        "largest difference of influence [nats]"
    )
    return _table(title, ["selector", ""], ["per s", "× plain", "set", "order", "nats"], rows)


def _screened(screened: Json) -> Table:
    rows = [
        [name, _ratio(row["seconds_ratio"]), f"{row['tokens_ratio']:.3f}"]
        for name, row in screened["selectors"].items()
    ]
    title = (
        f"\nscreened: {screened['targets']} targets in {screened['rounds']} rounds; seconds [lowest, highest] and "
        "tokens, × the exact selector's"
    )
    return _table(title, ["selector"], ["seconds", "tokens"], rows)


def _cost(cost: Json) -> Table:
    rows = []
    for varied, points in cost["sweeps"].items():
        for point in points:
            shape = [str(point[key]) for key in ("n_long", "n_short", "k", "targets")]
            peak = "-" if point["peak_bytes"] is None else f"{point['peak_bytes'] / MEGABYTE:,.1f}"
            rows.append([varied, point["selector"], *shape, _short(point["seconds_per_target"]), peak])
    numbers = ["N", "M", "k", "targets", "s/target", "peak memory [MB]"]
    return _table(
        "\ncost: every point in a process of its own, random tokens", ["varied", "selector"], numbers, rows
    )


def _ratio(row: Json) -> str:
    return "{ratio:.3g} [{ratio_low:.3g}, {ratio_high:.3g}]".format(**row)


def _short(value: float) -> str:
    return f"{value:,.3g}"
