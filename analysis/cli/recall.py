"""Recall of planted tokens against k: do selectors find what a prediction depends on?

examples:
  python scripts/recall.py --out runs/recall
  python scripts/recall.py --checkpoint runs/planted --out runs/planted/recall
  python scripts/recall.py --checkpoint runs/parity --length 50 --ks 1,2,4 --samples 200 --out runs/parity/recall

Without --checkpoint a model built by hand tells: its answer depends on p far tokens that are known, each by itself
("sum"), or only all of them together ("all", as a model that copies needs the earlier match and what followed it).
Every other token gives a little noise. Prints the share of the planted tokens among the first k selected, for every
selector, and writes recall.json.

With --checkpoint, a run or checkpoint trained on sparse_parity or planted: the context is the prompt of a test sample,
the target its label. Measured are samples whose planted tokens all stand before the short context, the last --n-short
tokens. The placebo is the far context of a sample with another label: a selector that finds the placebo's own planted
tokens as well as true ones goes by their looks, not by what they do for the answer. In sparse parity the bits are
planted; recall of pairs counts a bit's selector too. Writes recall.json and the figure recall.png and recall.pdf.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_sparsity.util.arguments import Parser, out_folder, seed_number, whole_number, whole_numbers
from olmo_sparsity.util.errors import UserError

PLANTED = (1, 2, 4, 8)
SELECTORS = "leave-one-out,leave-one-in,greedy,gradient,attention,{}random,nearest"
HAND_BUILT = {
    "n_long": 128,
    "n_short": 16,
    "models": 20,
    "selectors": SELECTORS.format("leave-one-out@gradient:32,"),
}
TRAINED = {
    "n_short": 2,
    "length": None,
    "ks": None,
    "samples": 100,
    "device": None,
    "selectors": SELECTORS.format(""),
}


def main() -> None:
    """Measure, print and write."""
    arguments = _parser().parse_args()
    trained = arguments.checkpoint is not None
    _set_defaults(arguments, TRAINED if trained else HAND_BUILT)
    names = tuple(name.strip() for name in arguments.selectors.split(","))
    if trained:
        _measure_checkpoint(arguments, names)
    else:
        _measure_hand_built(arguments, names)


def _set_defaults(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Fill in what was left out. Raises `UserError` for options of the other way to run this."""
    for name in {**HAND_BUILT, **TRAINED}:
        if name in defaults:
            if getattr(arguments, name) is None:
                setattr(arguments, name, defaults[name])
        elif getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} is for models built by hand; leave it out, or leave out --checkpoint"
                if defaults is TRAINED
                else f"{option} is for a trained model; name one with --checkpoint, or leave {option} out"
            )


def _measure_checkpoint(arguments: argparse.Namespace, names: tuple[str, ...]) -> None:
    import torch

    from analysis.measure.planted import checked_settings, measure_recall, planted_task, recall_record
    from analysis.model.load import check_long_context, load_for_analysis
    from analysis.model.scorer import Scorer
    from analysis.plots.recall import recall_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import RECALL_NAME
    from analysis.stats.tables import percent_text
    from olmo_sparsity.checkpoint import resolve_checkpoint
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.progress import progress

    folder = resolve_checkpoint(arguments.checkpoint)
    config, task = planted_task(folder)
    settings = checked_settings(
        task,
        length=arguments.length,
        planted=arguments.ks,
        n_short=arguments.n_short,
        samples=arguments.samples,
        selectors=names,
        seed=arguments.seed,
    )
    loaded = load_for_analysis(folder)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(loaded.model.to(device), device=device)
    check_long_context(loaded.model, settings.length, name=f"{folder} ({loaded.family})", option="--length")
    contexts = 2 * settings.samples * len(names) * len(settings.planted)
    with progress("recall", contexts, "contexts") as advance:
        cells = measure_recall(scorer, task, settings, advance=advance)
    result = recall_record(loaded, config, task, settings, cells)
    path = arguments.out / RECALL_NAME
    write_json(path, result)
    figures = save_figure(recall_figure(result), arguments.out, "recall")
    console = Console(highlight=False, soft_wrap=True)
    for cell in cells:
        right = percent_text(cell["accuracy"], 1)
        console.print(
            f"{cell['planted']} planted: {right} % of {cell['samples']:,} samples are answered right"
        )
    for what in result["chance"]:
        console.print(_table_of_checkpoint(result, what))
    console.print(f"wrote {', '.join(map(str, [path, *figures]))}", markup=False)


def _table_of_checkpoint(result: dict[str, Any], what: str) -> Table:
    """Rows for every number of planted tokens, selector and sort of context; ``what``: token or place."""
    from analysis.stats.tables import plain_table

    counted = {"token": "planted tokens", "place": "planted pairs, found by either token"}[what]
    table = plain_table("planted", "selector", "context", *(f"k = {k}" for k in result["ks"]))
    table.title, table.title_justify = f"recall of the {counted}", "left"
    for column in table.columns[1:3]:
        column.justify = "left"
    for cell in result["cells"]:
        sorts = {"true": "recall", "placebo": "placebo_recall"}
        if 0 < cell["accuracy"]["value"] < 1:
            sorts["true, right"] = "recall_right"
        planted = str(cell["planted"])
        for name, by_k in cell["selectors"].items():
            for context, sort in sorts.items():
                recalls = [f"{each[f'{what}_{sort}']['value']:.2f}" for each in by_k.values()]
                table.add_row(planted, name if context == "true" else "", context, *recalls)
                planted = ""
    table.add_row("", "chance", "", *(f"{each:.2f}" for each in result["chance"][what].values()))
    return table


def _measure_hand_built(arguments: argparse.Namespace, names: tuple[str, ...]) -> None:
    from analysis.measure.planted import KS
    from analysis.records.results import FORMAT, OF_HAND_BUILT, RECALL_NAME
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import current_commit

    if not 0 < arguments.n_short < arguments.n_long - max(KS):
        raise UserError(f"--n-long must exceed --n-short by more than {max(KS)}, the largest k")
    rows = [
        row
        for rule in ("sum", "all")
        for planted in PLANTED
        for row in _measure(arguments, names, rule, planted)
    ]
    path = arguments.out / RECALL_NAME
    result = {"format": FORMAT, "measured": OF_HAND_BUILT, "n_long": arguments.n_long}
    result |= {"n_short": arguments.n_short, "models": arguments.models, "ks": KS}
    write_json(path, {**result, "commit": current_commit(), "rows": rows})
    Console(highlight=False).print(_table(rows, KS))
    print(f"wrote {path}")


def _measure(
    arguments: argparse.Namespace, names: tuple[str, ...], rule: str, planted: int
) -> list[dict[str, Any]]:
    """Mean recall over models with their own planted tokens, a row per selector."""
    from analysis.measure.planted import KS, PlantedModel, planted_contexts, recall_at
    from analysis.measure.selectors import Question, find_selector
    from analysis.model.scorer import Scorer

    n_far = arguments.n_long - arguments.n_short
    generator = np.random.default_rng([arguments.seed, planted])
    recalls: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number in range(arguments.models):
        columns = np.sort(generator.choice(n_far, planted, replace=False))
        model = PlantedModel(columns.tolist(), arguments.n_long, rule=rule, seed=number)
        contexts = planted_contexts(1, arguments.n_long, arguments.n_short)
        for name in names:
            chosen = find_selector(name)(Question(Scorer(model), contexts, arguments.seed + number, max(KS)))
            recalls[name].append(recall_at(chosen.columns, columns[None], KS)[0])
    return [
        {"rule": rule, "planted": planted, "selector": name, "recall": np.mean(each, axis=0).tolist()}
        for name, each in recalls.items()
    ]


def _table(rows: list[dict[str, Any]], ks: tuple[int, ...]) -> Table:
    table = Table(box=None, header_style="bold", title="recall of the planted tokens")
    for name in ("rule", "planted", "selector", *(f"k = {k}" for k in ks)):
        table.add_column(name, justify="right" if name.startswith("k") else "left")
    for row in rows:
        table.add_row(
            row["rule"], str(row["planted"]), row["selector"], *(f"{each:.2f}" for each in row["recall"])
        )
    return table


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where recall.json goes")
    parser.add_argument(
        "--n-short",
        type=whole_number,
        help=f"M in tokens (default: {HAND_BUILT['n_short']}; of a checkpoint {TRAINED['n_short']})",
    )
    parser.add_argument(
        "--selectors",
        help=f"comma-separated (default: {HAND_BUILT['selectors']}; of a checkpoint the same, none screened)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="of planted tokens, noise and samples (default: %(default)s)",
    )
    by_hand = parser.add_argument_group("models built by hand")
    by_hand.add_argument("--n-long", type=whole_number, help=f"N (default: {HAND_BUILT['n_long']} tokens)")
    by_hand.add_argument(
        "--models",
        type=whole_number,
        help=f"each with its own planted tokens (default: {HAND_BUILT['models']})",
    )
    trained = parser.add_argument_group("a trained model")
    trained.add_argument(
        "--checkpoint", metavar="RUN", help="a run (then its last checkpoint) or checkpoint on a planted task"
    )
    trained.add_argument(
        "--length", type=whole_number, help="N: tokens of every prompt (default: the longest of training)"
    )
    trained.add_argument(
        "--ks",
        type=whole_numbers,
        help="numbers of planted tokens of a sample, comma-separated (default: powers of 2 up to training's k_train)",
    )
    trained.add_argument(
        "--samples", type=whole_number, help=f"test samples for each of --ks (default: {TRAINED['samples']})"
    )
    trained.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    return parser
