"""The commands `olmo-sparsity influence`, `figure2`, `xray` and `verify`: arguments, one call, what was found.

Probes and synthetic tasks have theirs beside what they measure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.options import (
    MODEL,
    TEXT_OPTIONS,
    add_field_options,
    add_model_options,
    add_text_options,
    field_options,
    files_of,
    texts_of,
)
from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import (
    Parser,
    out_folder,
    texts,
    whole_number,
    whole_number_or_zero,
    whole_numbers,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path
from olmo_sparsity.util.provenance import command_line
from olmo_sparsity.util.text_files import TextFiles

PLACEBOS = "of placebo, same-group (elsewhere in the target's group) and shuffled (default: placebo)"
GIVE_BACK = """how chosen tokens are given back: text; or cache (read in the whole context, their keys and values are
left), maybe with sinks or in words: cache:4, text/word (default: text; docs/method.md, 2.2a)"""

INFLUENCE = """How much far context helps a model, and what k influential far tokens give back (Eq. 20).

examples:
  olmo-sparsity influence HuggingFaceTB/SmolLM2-135M --text books/*.txt --n-long 1024 --n-short 32 --out runs/smol
  olmo-sparsity influence model-Q4_K_M.gguf --text code.jsonl.gz --out runs/gguf
  olmo-sparsity influence runs/demo --corpus data/books --out runs/demo/on-books --shard 3/8
  olmo-sparsity influence runs/books-2 --select-with runs/books --out runs/books/crossfit

Of sampled targets it measures the loss given N tokens, given the last M, and, where the difference is more than tau,
given the last M and k far tokens of every selector; the same in a placebo far context. The same command goes on after
an interruption, and puts shards together. EXACT@PROPOSER:m lets EXACT decide among the m tokens that PROPOSER puts
first; with --select-with A, A chooses and MODEL, trained from another seed, measures. More: docs/analysis.md.

selectors, by what they look at (docs/method.md, 2.2):
"""


def influence_parser() -> Parser:
    """Of `influence`; options are named as the arguments of `analysis.measure`."""
    from analysis.selectors import FAMILIES

    families = (f"  {family + ':':<14}{', '.join(names)}" for family, names in FAMILIES.items())
    parser = Parser(prog="olmo-sparsity influence", description=INFLUENCE + "\n".join(families))
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder of the result")
    add_text_options(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--n-long", type=whole_number, default=128, help="N, tokens (default: 128)")
    add("--n-short", type=whole_number, default=16, help="M, tokens (default: 16)")
    add("--targets", type=whole_number, default=1000, help="to sample (default: 1000)")
    add("--targets-per-block", type=whole_number, default=16, metavar="B", help="default: 16")
    add("--tau", dest="tau_nats", type=float, default=1.0, help="in nats (default: 1)")
    add("--k", dest="ks", type=whole_numbers, default=(1, 2, 4, 8), help="default: 1,2,4,8")
    add("--selectors", type=texts, help="default: leave-one-out, -kl, leave-one-in, random, nearest")
    add("--placebos", type=texts, default=("placebo",), help=PLACEBOS)
    add("--give-back", type=texts, default=("text",), metavar="WAYS", help=GIVE_BACK)
    add("--seed", type=whole_number_or_zero, default=0, help="of all that is drawn (default: 0)")
    add("--select-with", metavar="A", help="the model that chooses")
    add("--propose-with", metavar="SMALL", help="the model that proposes for screened selectors")
    add("--faithfulness", action="store_true", help="also comprehensiveness and LDS (docs/method.md, 2.8)")
    add("--scores", action="store_true", help="also keep the influence of every far token")
    add("--shard", metavar="i/n", help="measure one of n shares")
    add_model_options(parser)
    return parser


def influence() -> None:
    """Measure, and say what was found."""
    given = influence_parser().parse_args()
    show_log("analysis")
    from analysis.engine import measure

    read = texts_of(given, given.model)
    apart = ("model", *TEXT_OPTIONS)
    options = {name: value for name, value in vars(given).items() if value is not None and name not in apart}
    result = measure(given.model, read, **options)
    if given.shard:
        print(f"shard {given.shard} is measured; next, when all are: the same command without --shard")
        return
    print(result)
    print(f"next: olmo-sparsity figure2 {given.out}")


FIGURE2 = """Print and draw what influence measured: loss and recovery against k, kinds, distances and more.

examples:
  olmo-sparsity figure2 runs/demo/influence
  olmo-sparsity figure2 runs/seeds/seed=*/influence --out runs/seeds        several trainings of one model, joined
  olmo-sparsity figure2 runs/rope/influence runs/pose/influence --labels RoPE,PoSE --out runs/both
  olmo-sparsity figure2 results/books --cells n128-m32-seed-1,n128-m32-seed-2 --out runs/books
  olmo-sparsity figure2 runs/demo/influence --length runs/length --format pdf --width 3.25 --no-title --out paper

Writes figure2 (with --length also loss by position), figure2-selectors, figure2-levels, kinds, distances, tokens_needed
and placebos, those for which something was measured, and numbers.csv; of several labels figure2 and numbers.csv.
Results without --labels are trainings of one model, measured on the same targets."""


def figure2() -> None:
    """Print all numbers of a result and draw its figures."""
    parser = Parser(prog="olmo-sparsity figure2", description=FIGURE2)
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULT", help="folder that influence wrote, or of a study")
    add("--cells", type=texts, help="of the studies among them, comma-separated")
    add("--labels", type=texts, help="a name for each; those with the same name are joined")
    add("--out", type=out_folder, metavar="DIR", help="where to write (default: the first RESULT)")
    add("--length", type=Path, metavar="DIR", help="what the command length wrote")
    add("--selectors", type=texts, help="of figure2 (default: the target-blind, signed and controls)")
    add("--k", type=whole_number, help="of what is shown at one k (default: 4, or the closest)")
    add("--width", type=float, default=6.75, help="inches; a column is 3.25 (default: 6.75)")
    add("--format", default="png", choices=("png", "pdf", "svg"), help="default: png")
    add("--no-title", dest="heading", action="store_false", help="without what was measured")
    add("--resamples", type=whole_number, default=2000, help="of the bootstrap (default: 2000)")
    add("--seed", type=whole_number_or_zero, default=0, help="of the bootstrap (default: 0)")
    given = parser.parse_args()
    from analysis.figures.dependencies import all_figures
    from analysis.figures.style import save_figure
    from analysis.stats.summary import every_number, summary

    if given.resamples < 1000:
        raise UserError(f"--resamples {given.resamples} are too few for 95 % intervals; give 1000 or more")
    results = _joined_by_label(given.results, given.cells, given.labels)
    bootstrap = {"resamples": given.resamples, "seed": given.seed}
    looks = {name: getattr(given, name) for name in ("selectors", "k", "width", "heading")}
    if given.length:
        from analysis.probes.length import LossByPosition

        length = LossByPosition.load(given.length)
        looks["length"] = length.with_training(length.numbers)
    for label, result in results.items():
        print("\n".join(filter(None, [label, summary(result, given.k, **bootstrap), ""])))
    folder = given.out or Path(given.results[0])
    written = [
        path
        for name, figure in all_figures(results, **looks, **bootstrap).items()
        for path in save_figure(figure, folder, f"{name}.{given.format}")
    ]
    with atomic_path(folder / "numbers.csv") as temporary:
        every_number(results, given.k, **bootstrap).to_csv(temporary, index=False)
    print(f"wrote {', '.join(map(str, [*written, folder / 'numbers.csv']))}")


def _joined_by_label(
    folders: list[str], cells: tuple[str, ...] | None, labels: tuple[str, ...] | None
) -> dict[str, Any]:
    """The results by label, those of one label joined; without labels all of them, under the name ""."""
    from analysis.result import Result, load_study

    results = [item for folder in folders for item in load_study(folder).items()]
    there = [cell for cell, _ in results if cell]
    if there and not (cells and set(cells) <= set(there)):
        raise UserError(f"name cells with --cells, of {', '.join(there)}")
    chosen = [result for cell, result in results if not cell or cell in (cells or ())]
    names = labels or ("",) * len(chosen)
    if len(names) != len(chosen):
        raise UserError(f"{len(names)} labels are given for {len(chosen)} results; give one for each")
    by_label: dict[str, list[Result]] = {}
    for label, result in zip(names, chosen, strict=True):
        by_label.setdefault(label, []).append(result)
    return {label: Result.join(trainings) for label, trainings in by_label.items()}


def checked_influence(arguments: list[str]) -> Any:
    """The arguments of `influence`. Raises `UserError` for options that it refuses before it opens a model."""
    from analysis.engine import SELECTORS, check_options

    given = influence_parser().parse_args(arguments)
    further = {"placebos": given.placebos, "give_back": given.give_back, "tau_nats": given.tau_nats}
    check_options(given.n_long, given.n_short, given.ks, given.selectors or SELECTORS, **further)
    return given


XRAY = """X-ray a text: for every token, which earlier tokens it needs and by how much.

examples:
  olmo-sparsity xray runs/demo --text README.md --out runs/demo/xray
  olmo-sparsity xray model-Q4_K_M.gguf --text chapter.txt --out runs/xray --n-long 256 --n-short 32 --tau 0.5

Every token of a window is left out once, and the loss of all later ones is measured without it: exact leave-one-out
influence, in nats. A text longer than N tokens is read in windows that overlap by half. Writes xray.html, to open in
any browser, xray.png (a heat map), and xray.parquet with xray.json (all numbers)."""


def xray() -> None:
    """Measure the influence map of a text, and draw it."""
    parser = Parser(prog="olmo-sparsity xray", description=XRAY)
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--text", type=Path, required=True, metavar="FILE", help="of any kind that influence reads")
    add_field_options(parser)
    which = "which text of a file that has more than one, counted from 0 (default: 0)"
    add("--text-number", type=whole_number_or_zero, default=0, metavar="I", help=which)
    add("--out", type=out_folder, metavar="DIR", help="default: TEXT-xray")
    add("--n-long", type=whole_number, help="N (default: what the model reads, at most 1,024)")
    add("--n-short", type=whole_number, default=16, help="M (default: 16)")
    add("--tau", dest="tau_nats", type=float, default=1.0, help="nats (default: 1)")
    add_model_options(parser)
    given = parser.parse_args()
    show_log("analysis")
    from analysis.figures.style import save_figure
    from analysis.xray import influence_map

    number = given.text_number
    name, text = _one_text(TextFiles([given.text], **field_options(given)), number)
    apart = ("model", "out", "text_number", *TEXT_OPTIONS)
    options = {option: value for option, value in vars(given).items() if option not in apart}
    measured = influence_map(given.model, text, name=name, **options)
    folder = given.out or Path(f"{given.text}-{number}-xray" if number else f"{given.text}-xray")
    measured.save(folder)
    save_figure(measured.plot(), folder, "xray")
    measured.to_html(folder / "xray.html", command=command_line())
    print(f"{measured}\nwrote {folder / 'xray.html'}, xray.png, xray.parquet and xray.json")


def _one_text(files: TextFiles, number: int) -> tuple[str, str]:
    """Name and text of the one with this number; says so where there are more."""
    texts = files.read()
    if number >= len(texts):
        raise UserError(
            f"--text-number {number}: {files} has {len(texts):,}, counted from 0; give a lower one"
        )
    _, text = texts[number]
    if not isinstance(text, str):
        raise UserError(
            f"{files}: text {number} is messages, which only `influence` reads; write it out as text"
        )
    if len(texts) == 1:
        return str(files), text
    print(f"{files} has {len(texts):,} texts; number {number} is read (another: --text-number)")
    return f"{files}, text {number}", text


VERIFY = """Measure some targets of a result again, and compare losses and choices with what it says.

example:
  olmo-sparsity verify results/checkpoint/influence --model results/checkpoint --corpus runs/verify/data

Losses may differ by rounding between machines, by at most 0.001 nats; at least 95 % of the choices must be the same."""


def verify() -> None:
    """Measure recorded targets again and compare; exit code 1 where the result does not hold."""
    parser = Parser(prog="olmo-sparsity verify", description=VERIFY)
    add = parser.add_argument
    add("result", type=Path, metavar="RESULT", help="folder that influence wrote")
    add("--model", help="default: where it was when it was measured")
    add("--targets", type=whole_number, default=100, help="over tau, at least (default: 100)")
    add("--seed", type=whole_number_or_zero, default=0, help="of their choice (default: 0)")
    add_text_options(parser)
    add_model_options(parser)
    given = parser.parse_args()
    show_log("analysis")
    from analysis.result import load
    from analysis.verify import verify as compare

    result = load(given.result)
    model = given.model or result.settings["model"]
    read = files_of(given) or given.corpus or result.settings["texts"]
    options = {name: getattr(given, name) for name in ("device", "tokens_per_batch")}
    comparison = compare(result, model, read, targets=given.targets, seed=given.seed, **options)
    print(comparison)
    if not comparison.holds:
        raise UserError(f"{given.result} does not hold for {model} on {read}; see above")
