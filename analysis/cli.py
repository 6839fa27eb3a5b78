"""The commands `olmo-sparsity measure`, `figure2`, `xray` and `verify`: arguments, one call, what was found.

Probes and synthetic tasks have theirs beside what they measure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from analysis.cli_options import (
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
    finite_number,
    out_folder,
    path,
    texts,
    whole_number,
    whole_number_or_zero,
    whole_numbers,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path
from olmo_sparsity.util.provenance import command_line
from olmo_sparsity.util.text_files import TextFiles

SELECTION = """methods that choose the far tokens, comma-separated, from the list above; none: only losses are measured,
and texts are ranked by what their far context is worth (default: leave-one-out, leave-one-out-kl, leave-one-in, random,
nearest)"""
LENGTHS = """also measure every target given the last n tokens of its text, for each of these n, comma-separated; n may
be more than N (default: none)"""
BEFORE = """read so many tokens of another text before the long context: what distractors alone do; takes --selectors
none (default: 0)"""
GAP = """leave out so many position ids between the far and the short context, so that the same tokens are farther
apart: what distance alone does (default: 0)"""
PLACEBOS = """far contexts to compare with, comma-separated: placebo (of another text), same-group (from elsewhere in
the target's group), shuffled (the true one in random order), other-target (the true one, with the tokens chosen for
another target of its block); none: none is measured (default: placebo)"""
KEEP_AS = """how chosen tokens are kept, comma-separated: text (the model reads them alone), cache (it reads the whole
context, and only their keys and values are kept); cache:4 also keeps the first 4 far tokens, not counted as
chosen; text/word keeps whole words, text/neighbors tokens with theirs, text:4/before:2 also the 2 tokens before each;
controls with as many: behind:2, ranked:2 (more of the ranking), drawn:2; cache:4/read:2 reads what text:4/before:2
reads, and keeps only the chosen ones; its controls are read-behind:2, read-ranked:2 and read-drawn:2 (default: text;
docs/method.md, 2.2a)"""
PER_BLOCK = "B consecutive targets that share a far context; 1: a far context for each target (default: 16)"

MEASURE = """How much far context helps a model, and how much of that k influential far tokens recover (Eq. 20).

examples:
  olmo-sparsity measure HuggingFaceTB/SmolLM2-135M --text books/*.txt --n-long 1024 --n-short 32 --out runs/smol
  olmo-sparsity measure model-Q4_K_M.gguf --text code.jsonl.gz --out runs/gguf
  olmo-sparsity measure MODEL --text FILES --out DIR --selectors leave-one-out-kl/cache:4,snapkv --keep-as cache:4
  olmo-sparsity measure runs/demo --corpus data/books --out runs/demo/on-books --shard 3/8
  olmo-sparsity measure MODEL --text FILES --out DIR --selectors none --targets-per-block 128 --lengths 32,128,512
  olmo-sparsity measure runs/books-2 --select-with runs/books --out runs/books/crossfit

Of sampled targets it measures the loss given N tokens, given the last M, and, where the difference is more than tau,
given the last M and k far tokens of every selector; the same in a placebo far context. The same command goes on after
an interruption, and puts shards together. leave-one-out-kl/cache:4 ranks by leaving single keys and values out of the
cache, in place of tokens out of the text, and never the first 4 (2.2b); so do leave-one-in, greedy, halving and their
forms. EXACT@PROPOSER:m lets EXACT decide among the m tokens that PROPOSER puts first, SELECTOR/other-near chooses with
half of the short context replaced; with --select-with CHOOSER, that
chooses and MODEL, trained from another seed, measures. More: docs/analysis.md.

selectors, by what they look at (docs/method.md, 2.2):
"""


def measure_parser() -> Parser:
    """Of `measure`; options are named as the arguments of `analysis.measure`."""
    parser = Parser(prog="olmo-sparsity measure", description=MEASURE + _selectors_by_family())
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="DIR", help="folder to write the result to"
    )
    add_text_options(parser)
    add = parser.add_argument_group("what is measured").add_argument
    n_long = "N, tokens of the long context (default: 128)"
    add("--n-long", type=whole_number, default=128, metavar="N", help=n_long)
    n_short = "M, tokens of the short context (default: 16)"
    add("--n-short", type=whole_number, default=16, metavar="M", help=n_short)
    targets = "number of target tokens to sample from the texts (default: 1000)"
    add("--targets", type=whole_number, default=1000, metavar="COUNT", help=targets)
    add("--targets-per-block", type=whole_number, default=16, metavar="B", help=PER_BLOCK)
    add("--lengths", type=whole_numbers, default=(), metavar="N,N,…", help=LENGTHS)
    add("--before", type=whole_number_or_zero, default=0, metavar="TOKENS", help=BEFORE)
    add("--gap", type=whole_number_or_zero, default=0, metavar="IDS", help=GAP)
    tau = "threshold on the gain L_short - L_long in nats: above it, far tokens are chosen (default: 1)"
    add("--tau", dest="tau_nats", type=finite_number, default=1.0, metavar="NATS", help=tau)
    ks = "numbers of far tokens that are kept, comma-separated (default: 1,2,4,8)"
    add("--k", dest="ks", type=whole_numbers, default=(1, 2, 4, 8), metavar="K,K,…", help=ks)
    add("--selectors", type=texts, metavar="NAMES", help=SELECTION)
    add("--placebos", type=texts, default=("placebo",), metavar="NAMES", help=PLACEBOS)
    add("--keep-as", type=texts, default=("text",), metavar="WAYS", help=KEEP_AS)
    seed = "random seed of all draws (default: 0)"
    add("--seed", type=whole_number_or_zero, default=0, help=seed)
    chooses = "model that chooses the targets and tokens that MODEL evaluates (default: MODEL itself)"
    add("--select-with", metavar="CHOOSER", help=chooses)
    proposes = "smaller model with the same tokenizer, as PROPOSER in EXACT@PROPOSER:m (default: the one that chooses)"
    add("--propose-with", metavar="SMALL", help=proposes)
    faithful = "also measure comprehensiveness, LDS and shorter contexts (docs/method.md, 2.8)"
    add("--faithfulness", action="store_true", help=faithful)
    scores = "also save the influence of every far token, not only of the chosen ones"
    add("--scores", action="store_true", help=scores)
    effects = "also save what leaving each far key and value out of the cache does to all targets: KL, change of loss"
    add("--effects", action="store_true", help=effects)
    shard = "measure shard i of n, i from 1 on; the same command without it joins them (default: measure all)"
    add("--shard", metavar="i/n", help=shard)
    add_model_options(parser)
    return parser


def _selectors_by_family() -> str:
    """All selectors with their parameters, a paragraph a family, in 80 columns."""
    from analysis.selectors import FAMILIES, list_selectors

    paragraphs = []
    for family in FAMILIES:
        paragraphs.append(
            textwrap.fill(
                ", ".join(list_selectors(family)),
                width=79,
                initial_indent=f"  {family + ':':<14}",
                subsequent_indent=" " * 16,
                break_on_hyphens=False,
                break_long_words=False,
            )
        )
    return "\n".join(paragraphs)


def run_measure() -> None:
    """Measure, and print the findings."""
    arguments = measure_parser().parse_args()
    show_log("analysis")
    from analysis.measuring import measure

    texts = texts_of(arguments, arguments.model)
    not_options = ("model", *TEXT_OPTIONS)
    options = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in not_options
    }
    result = measure(arguments.model, texts, **options)
    if arguments.shard:
        print(f"shard {arguments.shard} is measured; next, when all are: the same command without --shard")
        return
    print(result)
    if not result.selectors:
        path = arguments.out / "documents.csv"
        with atomic_path(path) as temporary:
            result.documents().to_csv(temporary, index=False)
        print(f"wrote {path}: all texts")
    print(f"next: olmo-sparsity figure2 {arguments.out}")


FIGURE2 = """Draw what was measured: loss and recovery against k, kinds, distances and more; print the main numbers.

examples:
  olmo-sparsity figure2 runs/demo/influence
  olmo-sparsity figure2 runs/seeds/seed=*/influence --out runs/seeds        several runs of one model, joined
  olmo-sparsity figure2 runs/rope/influence runs/pose/influence --labels RoPE,PoSE --out runs/both
  olmo-sparsity figure2 runs/study --cells n128-m32-seed-1,n128-m32-seed-2 --out runs/both
  olmo-sparsity figure2 runs/demo/influence --length runs/length --format pdf --width 3.25 --no-title --out paper

Writes figure2 (with --length also loss by position), figure2-selectors, figure2-kept-as, kinds, distances,
tokens_needed and placebos, those for which something was measured, and numbers.csv; of several labels figure2
and numbers.csv. Results without --labels are runs of one model, measured on the same targets."""


def figure2_parser() -> Parser:
    """Of `figure2`."""
    parser = Parser(prog="olmo-sparsity figure2", description=FIGURE2)
    add = parser.add_argument
    add(
        "results",
        nargs="+",
        type=path,
        metavar="RESULT",
        help="folder that measure wrote, or that of a study",
    )
    cells = "results of a study to plot, comma-separated; required for a study (default: none)"
    add("--cells", type=texts, metavar="NAMES", help=cells)
    labels = "a name for each result, comma-separated; those of one name are joined (default: all are joined)"
    add("--labels", type=texts, metavar="NAMES", help=labels)
    add("--out", type=out_folder, metavar="DIR", help="folder to write to (default: the first RESULT)")
    by_position = "folder that length wrote, to plot loss by position as well (default: none)"
    add("--length", type=path, metavar="DIR", help=by_position)
    selectors = (
        "selectors to plot in figure2, comma-separated (default: target-blind and signed ones, and controls)"
    )
    add("--selectors", type=texts, metavar="NAMES", help=selectors)
    k = "number of far tokens in panels of one k (default: 4, or the closest that was measured)"
    add("--k", type=whole_number, help=k)
    width = "width of figures in inches; 3.25 fits one of two columns (default: 6.75)"
    add("--width", type=float, default=6.75, metavar="INCHES", help=width)
    file_format = "file format of figures (default: png)"
    add("--format", default="png", choices=("png", "pdf", "svg"), help=file_format)
    tables = "print every number in tables, too, as they are in numbers.csv"
    add("--tables", action="store_true", help=tables)
    no_title = "omit the caption above the figures"
    add("--no-title", dest="heading", action="store_false", help=no_title)
    resamples = "resamples of the bootstrap for intervals, 1,000 at least (default: 2000)"
    add("--resamples", type=whole_number, default=2000, metavar="COUNT", help=resamples)
    add("--seed", type=whole_number_or_zero, default=0, help="random seed of the bootstrap (default: 0)")
    return parser


def run_figure2() -> None:
    """Draw the figures of a result and print its numbers."""
    arguments = figure2_parser().parse_args()
    from analysis.figures.breakdowns import all_figures
    from analysis.figures.style import check_width, save_figure
    from analysis.stats.summary import every_number, findings, summary

    if arguments.resamples < 1000:
        raise UserError(
            f"--resamples {arguments.resamples} are too few for 95 % intervals; give 1000 or more"
        )
    check_width(arguments.width)
    results = _joined_by_label(arguments.results, arguments.cells, arguments.labels)
    bootstrap = {"resamples": arguments.resamples, "seed": arguments.seed}
    looks = {name: getattr(arguments, name) for name in ("selectors", "k", "width", "heading")}
    if arguments.length:
        from analysis.probes.length import LossByPosition

        length = LossByPosition.load(arguments.length)
        looks["length"] = length.with_training(length.numbers)
    for label, result in results.items():
        text = (
            summary(result, arguments.k, **bootstrap) if arguments.tables else findings(result, **bootstrap)
        )
        print("\n".join(filter(None, [label, text, ""])))
    folder = arguments.out or arguments.results[0]
    written = [
        path
        for name, figure in all_figures(results, **looks, **bootstrap).items()
        for path in save_figure(figure, folder, f"{name}.{arguments.format}")
    ]
    numbers = folder / "numbers.csv"
    with atomic_path(numbers) as temporary:
        every_number(results, arguments.k, **bootstrap).to_csv(temporary, index=False)
    print(f"wrote {', '.join(map(str, written))}; every number: {numbers}, or --tables")


def _joined_by_label(
    folders: list[Path], cells: tuple[str, ...] | None, labels: tuple[str, ...] | None
) -> dict[str, Any]:
    """The results by label, those of one label joined; without labels all of them, under the name ""."""
    from analysis.api import Result, load_study

    studies = [load_study(folder) for folder in folders]
    measured = [cell for study in studies for cell in study if cell]
    named = dict.fromkeys(named_cells(cells or (), measured)) if measured else {}
    chosen = []  # in the order in which they are given, which is that of their labels
    for number, study in enumerate(studies):
        chosen += [(number, cell) for cell in ("", *named) if cell in study]
    names = labels or ("",) * len(chosen)
    if len(names) != len(chosen):
        raise UserError(f"{len(names)} labels are given for {len(chosen)} results; give one for each")
    label_of = dict(zip(chosen, names, strict=True))
    by_label: dict[str, list[Result]] = {label: [] for label in names}
    for number, study in enumerate(studies):
        for cell, result in study.items():  # runs are joined in the study's order, whatever that of --cells
            if (number, cell) in label_of:
                by_label[label_of[number, cell]].append(result)
    return {label: Result.join(runs) for label, runs in by_label.items()}


def named_cells(parts: Sequence[str], measured: Sequence[str]) -> list[str]:
    """The cells of a study that a list, split at its commas, names; names of cells may have commas, too.

    Of two names the longer one counts. Raises `UserError`, which lists the cells, where the list names none, or
    something else.
    """
    by_parts = {texts(cell): cell for cell in measured}
    names = []
    rest = tuple(parts)
    while rest:
        longest = next((end for end in range(len(rest), 0, -1) if rest[:end] in by_parts), 0)
        if not longest:
            break
        names.append(by_parts[rest[:longest]])
        rest = rest[longest:]
    if rest or not names:
        unknown = f"there is no cell {rest[0]!r}; " if rest else ""
        separator = "; " if any("," in cell for cell in measured) else ", "
        raise UserError(f"{unknown}name cells with --cells, of {separator.join(measured)}")
    return names


def checked_measure(arguments: list[str]) -> Any:
    """The arguments of `measure`. Raises `UserError` for options that it refuses before it opens a model."""
    from analysis.arguments import context_settings
    from analysis.options import DEFAULT_SELECTORS, check_options, choice_settings

    parsed = measure_parser().parse_args(arguments)
    options = {**vars(parsed), "selectors": parsed.selectors or DEFAULT_SELECTORS}

    def made_by(function: Callable[..., Any]) -> Any:
        """What a function makes of the options that are its parameters."""
        return function(**{name: options[name] for name in signature(function).parameters})

    check_options(made_by(context_settings), made_by(choice_settings))
    return parsed


XRAY = """X-ray a text: for every token, which earlier tokens it needs and by how much.

examples:
  olmo-sparsity xray runs/demo --text README.md --out runs/demo/xray
  olmo-sparsity xray model-Q4_K_M.gguf --text chapter.txt --out runs/xray --n-long 256 --n-short 32 --tau 0.5

Every token of a window is left out once, and the loss of all later ones is measured without it: exact leave-one-out
influence, in nats. Of a longer text the first N tokens are read; with --whole all of it, in windows of N tokens that
overlap by half. Writes xray.html, to open in any browser, xray.png (a heat map), and xray.parquet with xray.json (all
numbers)."""


def run_xray() -> None:
    """Measure the influence map of a text, and draw it."""
    parser = Parser(prog="olmo-sparsity xray", description=XRAY)
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add(
        "--text",
        type=path,
        required=True,
        metavar="FILE",
        help="file to read, of any kind that measure reads",
    )
    add_field_options(parser)
    which = "which text of a file that has more than one, counted from 0 (default: 0)"
    add("--text-number", type=whole_number_or_zero, default=0, metavar="I", help=which)
    add("--out", type=out_folder, metavar="DIR", help="folder to write to (default: FILE-xray)")
    n_long = (
        "N, maximum number of tokens that are read at once (default: what the model reads, at most 1,024); of N tokens "
        "the last has N - 1 before it, and this is the N that the map names"
    )
    add("--n-long", type=whole_number, metavar="N", help=n_long)
    n_short = "M, the last tokens before each token, which are always read and not measured (default: 16)"
    add("--n-short", type=whole_number, default=16, metavar="M", help=n_short)
    whole = "read all of a longer text, in windows of N tokens (default: its first N tokens)"
    add("--whole", action="store_true", help=whole)
    tau = "threshold on the gain from far context in nats: tokens above it are marked (default: 1)"
    add("--tau", dest="tau_nats", type=finite_number, default=1.0, metavar="NATS", help=tau)
    add_model_options(parser)
    arguments = parser.parse_args()
    show_log("analysis")
    from analysis.figures.style import save_figure
    from analysis.xray import influence_map

    text_index = arguments.text_number
    name, text = _one_text(TextFiles([arguments.text], **field_options(arguments)), text_index)
    not_options = ("model", "out", "text_number", *TEXT_OPTIONS)
    options = {option: value for option, value in vars(arguments).items() if option not in not_options}
    measured = influence_map(arguments.model, text, name=name, **options)
    folder = arguments.out or Path(
        f"{arguments.text}-{text_index}-xray" if text_index else f"{arguments.text}-xray"
    )
    measured.save(folder)
    save_figure(measured.plot(), folder, "xray.png")
    measured.to_html(folder / "xray.html", command=command_line())
    print(f"{measured}\nwrote {folder / 'xray.html'}, xray.png, xray.parquet and xray.json")


def _one_text(files: TextFiles, text_index: int) -> tuple[str, str]:
    """Name and text of the one with this number; says so where there are more."""
    texts = files.read()
    if text_index >= len(texts):
        raise UserError(
            f"--text-number {text_index}: {files} has {len(texts):,}, counted from 0; give a lower one"
        )
    _, text = texts[text_index]
    if not isinstance(text, str):
        raise UserError(
            f"{files}: text {text_index} is messages, which only `measure` reads; write it out as text"
        )
    if len(texts) == 1:
        return str(files), text
    print(f"{files} has {len(texts):,} texts; number {text_index} is read (another: --text-number)")
    return f"{files}, text {text_index}", text


VERIFY = """Measure some targets of a result again, and compare losses and choices with what it says.

example:
  olmo-sparsity verify runs/a --text texts/*.txt

What is measured, with which prefix and number format, is what RESULT says. Losses may differ by rounding between
machines, by at most 0.001 nats; at least 95 % of the choices must be the same."""


def run_verify() -> None:
    """Measure recorded targets again and compare; exit code 1 where the result does not hold."""
    parser = Parser(prog="olmo-sparsity verify", description=VERIFY)
    add = parser.add_argument
    add("result", type=path, metavar="RESULT", help="folder that measure wrote")
    add("--model", help="path or id of the model to measure with (default: the one that RESULT names)")
    targets = "how many targets over tau to measure again, at least (default: 100)"
    add("--targets", type=whole_number, default=100, metavar="COUNT", help=targets)
    seed = "random seed of the targets (default: 0)"
    add("--seed", type=whole_number_or_zero, default=0, help=seed)
    add_text_options(parser, default="the texts that RESULT names", again=True)
    add_model_options(parser, again=True)
    arguments = parser.parse_args()
    show_log("analysis")
    from analysis.api import load
    from analysis.verify import verify

    result = load(arguments.result)
    model = arguments.model or result.settings.model.name
    read = files_of(arguments) or arguments.corpus
    if read is None:
        read = result.settings.texts.name
        if not Path(read).exists():
            raise UserError(
                f"{arguments.result} was measured on {read}; name this text with --text or --corpus"
            )
    names = ("tokenizer", "device", "attn_implementation", "tokens_per_batch")
    options = {name: getattr(arguments, name) for name in names}
    comparison = verify(result, model, read, targets=arguments.targets, seed=arguments.seed, **options)
    print(comparison)
    if not comparison.holds:
        raise UserError(f"{arguments.result} does not hold for {model} on {read}; see above")
