"""Loss by position: how well checkpoints predict at contexts up to and past the length they were trained on.

examples:
  olmo-sparsity length runs/rope runs/pose --out runs/length
  olmo-sparsity length runs/rope runs/pose --corpus data/books --out runs/length \\
      --lengths 256,512,1024,2048 --windows 512 --labels "RoPE,RoPE + PoSE"
  olmo-sparsity length runs/rope-1 runs/rope-2 runs/pose-1 runs/pose-2 --labels RoPE,RoPE,PoSE,PoSE --out runs/seeds
  olmo-sparsity length runs/rope runs/rope@linear:4 runs/rope@ntk:4 runs/rope@yarn:4 --out runs/extended

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

from dataclasses import replace

from analysis.cli.arguments import labels_of
from analysis.measure.settings import LengthSettings
from analysis.records.results import LENGTH
from olmo_sparsity.util.arguments import Parser, add_arguments, settings_from


def main() -> None:
    """Measure, then draw and print what was written."""
    parser = Parser(description=__doc__)
    add_arguments(parser, LengthSettings)
    settings = settings_from(LengthSettings, parser.parse_args())
    from analysis.measure.length import measure_length
    from analysis.plots.length import save_length_figures
    from analysis.stats.tables import print_result, render_length

    labels = settings.labels or labels_of(settings.checkpoints, None)
    path = measure_length(replace(settings, labels=labels))
    found = LENGTH.load(path)
    figures = save_length_figures(found, path.parent)
    print_result(render_length(found), [path, path.with_suffix(".parquet"), *figures])
