"""Measure some targets of records again, and say how far the numbers are from what was recorded.

examples:
  olmo-sparsity verify runs/demo/influence
  olmo-sparsity verify results/demo/seed-1 --checkpoint runs/seeds/seed=1 --corpus runs/demo/data --targets 20

Everything is made anew from the weights and the text: which targets are sampled, L_long and L_short, what every
selector chooses in every far context, and L_k of it. The weights must be those of the records by their checksum; of
the text, the targets. It prints the largest differences, and ends with exit code 1 where a loss differs by more than
0.001 nats, or more than one choice in twenty is of other tokens (rounding decides between equal influences).
"""

from __future__ import annotations

from analysis.measure.settings import VerifySettings
from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import parse_settings
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Measure again, print, and fail where the records are not what is found."""
    settings = parse_settings(__doc__, VerifySettings)
    from analysis.measure.verify import verify

    show_log("analysis")
    found = verify(settings)
    print(
        f"{found['targets']} targets of {settings.records} measured again; largest differences from the records:"
    )
    for name, words in (
        ("loss_long", "L_long"),
        ("loss_short", "L_short"),
        ("loss_k", "L_k, of choices of the same tokens"),
    ):
        print(f"  {found['largest_difference_nats'][name]:.1e} nats  {words}")
    print(f"  {found['same']:.1%} of {found['choices']:,} choices are of the same tokens")
    if not found["verified"]:
        raise UserError(
            f"{settings.records} is not what these weights give on this text; measure again with scripts/influence.py"
        )
    print("verified: the records are what these weights give on this text")
