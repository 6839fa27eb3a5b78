"""One measurement in several corpora side by side, from influence records and loss by position.

examples:
  olmo-sparsity corpora runs/{en,fr}/seed=*/influence --labels English,English,French,French \\
      --length runs/en/length runs/fr/length --out runs/languages

RECORDS are folders that scripts/influence.py wrote, with the same N, M, tau and targets per block; those with one label
are trainings of one model on one corpus. Each --length is what scripts/length.py wrote of all trainings of a label,
themselves under one label.

Writes corpora.json, corpora.png and corpora.pdf (use of the far context, net recovery, tokens needed, kinds, distances
and loss by position, a colour for each corpus), and prints a table. Per token and per byte, since tokenizers differ.
All intervals are 95 %, over trainings, groups and documents. No model is needed.
"""

from __future__ import annotations

from pathlib import Path

from analysis.cli.arguments import (
    add_choice_arguments,
    add_records_arguments,
    check_labels,
    common_selector,
)
from olmo_sparsity.util.arguments import Parser, texts
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Join, draw and print."""
    arguments = _parser().parse_args()
    if len(arguments.labels) != len(arguments.records):
        raise UserError(f"{len(arguments.records)} folders of records need as many --labels")
    check_labels(arguments.labels)
    from analysis.plots.corpora import corpora_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import CORPORA, LENGTH
    from analysis.records.store import load_records
    from analysis.records.trainings import joined_by_label
    from analysis.stats.corpora import corpus_numbers
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_corpora
    from olmo_sparsity.util.progress import progress
    from olmo_sparsity.util.provenance import current_commit

    lengths = [LENGTH.load(folder) for folder in arguments.length]
    by_label = joined_by_label(arguments.labels, [load_records(folder) for folder in arguments.records])
    selector = common_selector(arguments.selector, [each.manifest.selectors for each in by_label.values()])
    found = []
    with progress("summarising", len(by_label), "corpora") as advance:
        for label, records in by_label.items():
            found.append(
                corpus_numbers(
                    label,
                    records,
                    lengths,
                    selector=selector,
                    k=arguments.k,
                    resamples=arguments.resamples,
                    seed=arguments.seed,
                )
            )
            advance()
    manifest = next(iter(by_label.values())).manifest
    result = {
        "settings": {
            "selector": selector,
            "k": arguments.k,
            **{name: getattr(manifest, name) for name in ("n_long", "n_short", "tau_nats")},
            "resamples": arguments.resamples,
        },
        "corpora": found,
        "commit": current_commit(),
    }
    path = arguments.out / CORPORA.name
    CORPORA.save(path, result)
    print_result(
        [render_corpora(result)], [path, *save_figure(corpora_figure(result), arguments.out, "corpora")]
    )


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    add_records_arguments(parser)
    parser.add_argument(
        "--labels", type=texts, required=True, help="a corpus for each of RECORDS, comma-separated"
    )
    parser.add_argument(
        "--length",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders that scripts/length.py wrote",
    )
    add_choice_arguments(parser)
    return parser
