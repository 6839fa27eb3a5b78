"""LongPPL: perplexity on the key tokens, those that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

examples:
  olmo-sparsity longppl runs/books --out runs/books/longppl --n-long 256 --n-short 32
  olmo-sparsity longppl runs/books --corpus data/books --out runs/books/longppl --n-long 1024 --n-short 128 \\
      --sliding-window 64 --documents 40

A token is a key token where the long context makes it likelier by more than --alpha nats than the short one does, and
its loss given the long context is below --beta nats. LongPPL is the perplexity of the key tokens given the long
context. It is measured in two forms on the same tokens: exact (every token has its own M tokens of short context) and
as published (windows of M + S tokens, S apart, whose last S tokens are measured). Writes longppl.json: key tokens,
LongPPL and plain PPL, how the forms agree, and what each costs, with 95 % intervals over groups and
documents; prints a table.
"""

from __future__ import annotations

from analysis.measure.settings import LongPPLSettings
from analysis.records.results import LONGPPL
from olmo_sparsity.util.arguments import parse_settings


def main() -> None:
    """Measure, then print what was written."""
    settings = parse_settings(__doc__, LongPPLSettings)
    from analysis.measure.longppl import measure_longppl
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_longppl

    path = measure_longppl(settings)
    print_result([render_longppl(LONGPPL.load(path))], [path])
