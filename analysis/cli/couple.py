"""Find which tokens of a task belong together, in a model that was trained without being told.

examples:
  olmo-sparsity couple runs/parity-rope --out runs/parity-rope/coupling
  olmo-sparsity couple runs/addition-nope --by attention --samples 128 --out runs/addition-nope/coupling

For each training length it measures how much every token of the prompt bears on every token of the response: by leaving
it out (leave-one-out-kl), or by the attention that it is given. A token of the prompt is coupled to the one of the
response that it influences most. What is found is one rule for each segment of the prompt: whether ids are counted from
its start or its end, and the first id. So it holds for prompts of any length; docs/method.md, 3.5.

Writes coupling.json and prints the rule, how much of what was measured it explains (agreement), for how many tokens it
is what the task itself says, and the options with which train takes it in the place of the task's own coupling.
Where a rule explains less than half of a segment, none was found.
"""

from __future__ import annotations

import shlex

from rich.markup import escape

from analysis.measure.settings import CouplingSettings
from analysis.records.results import COUPLING
from olmo_sparsity.util.arguments import parse_settings
from olmo_sparsity.util.result_files import Json

LEAST_AGREEMENT = 0.5
"""Below it nothing was found [ours]: some rule is the commonest in a model that has learned nothing, too."""


def main() -> None:
    """Measure, write and print."""
    settings = parse_settings(__doc__, CouplingSettings)
    from analysis.measure.coupling import measure_coupling
    from analysis.tables.cells import plain_table, print_result

    path = measure_coupling(settings)
    found = COUPLING.load(path)
    table = plain_table("segment", "ids counted from its", "first id", "agreement")
    for number, segment in enumerate(found["segments"], start=1):
        agreement = f"{100 * segment['agreement']:.0f} %"
        table.add_row(str(number), segment["counted_from"], str(segment["first_id"]), agreement)
    print_result([table, *_outcome(found)], [path])


def _outcome(found: Json) -> list[str]:
    """How far the rule is the task's own, and how to train with it; or that there is none."""
    if min(segment["agreement"] for segment in found["segments"]) < LEAST_AGREEMENT:
        least = f"{100 * LEAST_AGREEMENT:.0f} %"
        return [
            f"no coupling was found: a rule explains less than {least} of a segment; has the model learned the task?"
        ]
    lines = [f"train with {escape(shlex.join(_options(found)))}"]
    if (same := found["as_the_task_says"]) is not None:
        lines.insert(0, f"{100 * same:.0f} % of the tokens have the id that the task gives them")
    return lines


def _options(found: Json) -> list[str]:
    values = {
        "marks": found["marks"],
        "counted_from": [each["counted_from"] for each in found["segments"]],
        "first_ids": [each["first_id"] for each in found["segments"]],
    }
    return [f"--positions.found.{name}=[{','.join(map(str, each))}]" for name, each in values.items()]
