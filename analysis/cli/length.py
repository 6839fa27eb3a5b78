"""Loss by position: how well checkpoints predict at contexts up to and past the length they were trained on.

examples:
  python scripts/length.py runs/rope runs/pose --corpus data/books --out runs/length
  python scripts/length.py runs/rope runs/pose --corpus data/books --out runs/length \\
      --lengths 256,512,1024,2048 --windows 512 --labels "RoPE,RoPE + PoSE"
  python scripts/length.py runs/rope-1 runs/rope-2 runs/pose-1 runs/pose-2 --labels RoPE,RoPE,PoSE,PoSE \\
      --corpus data/books --out runs/seeds
  python scripts/length.py runs/rope runs/rope@linear:4 runs/rope@ntk:4 runs/rope@yarn:4 --corpus data/books \\
      --out runs/extended

The position of a token is how many tokens of its own document the model reads before it. Windows as long as the
largest length are drawn evenly from the documents that are long enough, and every checkpoint reads the same ones.
Checkpoints with the same label are seeds of one model, whose loss is their mean.

Writes length.json (mean loss in bins of positions and the paired difference to the first model, with 95 % intervals
over documents and seeds), length.parquet (sums per checkpoint, document and bin), length.png (loss by position) and
lengths.png (loss at each length), both also as pdf, and prints two tables. Every length is an edge of bins: give the
training length and its multiples. Checkpoints must share a tokenizer. A model of any causal language model directory
can be measured, a rotary one past its configured length.

CKPT@SCHEME:FACTOR reads CKPT with its RoPE scaled, without training, so that it reaches FACTOR times the ids that it
was trained on: linear (position interpolation), ntk (NTK-aware), yarn (YaRN).
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from olmo_sparsity.util.arguments import Parser, whole_number, whole_numbers


def main() -> None:
    """Measure, then draw and print what was written."""
    from analysis.cli.arguments import labels_of
    from analysis.measure.length import SUMS_NAME, LengthSettings, measure_length
    from analysis.plots.length import save_length_figures
    from analysis.records.results import LENGTH
    from analysis.stats.tables import print_whole, render_length

    values: dict[str, Any] = vars(_parser().parse_args())
    values["checkpoints"] = tuple(values["checkpoints"])
    values["labels"] = labels_of(values["checkpoints"], values["labels"])
    path = measure_length(LengthSettings(**values))
    measured = LENGTH.load(path)
    paths = [path, path.with_name(SUMS_NAME), *save_length_figures(measured, path.parent)]
    console = Console(highlight=False, soft_wrap=True)
    for table in render_length(measured):
        print_whole(console, table)
        console.print()
    console.print(f"wrote {', '.join(map(str, paths))}", markup=False)


def _parser() -> Parser:
    from analysis.cli.arguments import add_measurement_arguments, add_model_arguments

    parser = Parser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        "--lengths",
        type=whole_numbers,
        default="128,256,512,1024",
        help="tokens, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--windows", type=whole_number, default=256, help="windows to sample, at most (default: %(default)s)"
    )
    add_measurement_arguments(parser, seed_of="windows and bootstrap")
    return parser
