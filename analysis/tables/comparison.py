"""Two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.records.results import SIDES
from analysis.records.schema import FAR_CONTEXTS
from analysis.stats.bootstrap import by_clusters
from analysis.stats.recovery import nats
from analysis.tables.cells import interval_cell, name_lines, percent_text, plain_table
from olmo_sparsity.util.result_files import Json


def render_comparison(comparison: Json) -> Group:
    """The comparison as tables for a terminal of 80 columns; recoveries and shares in per cent."""
    settings = comparison["settings"]
    head = Text.assemble(
        (f"{comparison['targets']:,} targets", "bold"),
        f" of {comparison['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}; "
        f"tau {nats(settings['tau_nats'])}",
    )
    for letter, side in zip("AB", SIDES, strict=True):
        head.append(f"\n{letter}: {comparison[side]['records']}")
        if not comparison[side]["complete"]:
            head.append(" (unfinished)", "yellow")
    overall = plain_table("", "A", "B", "A - B")
    for name, key, text in (
        ("share over tau [%]", "share_over_tau", lambda interval: percent_text(interval, 1)),
        ("mean gain [nats]", "gap_short_minus_long", interval_cell),
    ):
        overall.add_row(Text(name), *(text(comparison[key][side]) for side in (*SIDES, "difference")))
    note = Text(
        f"[95 % interval] {by_clusters(comparison)}, the same for A and B; "
        f"in common: A - B over the {comparison['targets_over_tau_in_both']:,} targets that are over tau under both",
        style="dim",
    )
    tables = [
        _recovery_table(comparison, name, title)
        for name, title in (
            ("recovery", "recovery [%]"),
            ("placebo_recovery", "placebo [%]"),
            ("net_recovery", "net recovery [%]"),
        )
    ]
    tables += _agreement_tables(comparison)
    return Group(head, Text(), overall, Text(), *(part for table in tables for part in (table, Text())), note)


def _recovery_table(comparison: Json, name: str, title: str) -> Table:
    """A recovery of both and their difference, over each one's targets and over those in common."""
    table = plain_table(title, "k", "A", "B", "A - B", "in common")
    for selector, per_k in comparison["selectors"].items():
        names = name_lines(selector, len(per_k))
        for cell, (k, values) in zip(names, per_k.items(), strict=True):
            common = comparison["selectors_on_common_targets"][selector][k][name]
            table.add_row(
                cell,
                k,
                *(percent_text(values[name][side]) for side in (*SIDES, "difference")),
                percent_text(common["difference"]),
            )
    return table


def _agreement_tables(comparison: Json) -> Iterator[Table]:
    """Tokens that both chose, and how alike their losses on random subsets are."""
    table = plain_table("same tokens chosen [%]", "k", "true", "placebo", "chance")
    for selector, per_k in comparison["overlap"].items():
        names = name_lines(selector, len(per_k))
        for cell, (k, values) in zip(names, per_k.items(), strict=True):
            shares = (percent_text(values[context]) for context in FAR_CONTEXTS)
            table.add_row(cell, k, *shares, f"{100 * values['chance']:.1f}")
    yield table
    if ceiling := comparison["lds_ceiling"]:
        table = plain_table("", "true", "placebo")
        cells = (interval_cell(ceiling[context]) for context in FAR_CONTEXTS)
        table.add_row("ceiling of LDS (losses of A and B)", *cells)
        yield table
