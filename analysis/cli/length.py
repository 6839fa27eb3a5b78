"""Loss by position: how well checkpoints predict at contexts up to and past the length they were trained on.

examples:
  olmo-sparsity length runs/rope runs/pose --out runs/length
  olmo-sparsity length runs/rope runs/pose --corpus data/books --out runs/length \\
      --lengths 256,512,1024,2048 --windows 512 --labels "RoPE,RoPE + PoSE"
  olmo-sparsity length runs/rope-1 runs/rope-2 runs/pose-1 runs/pose-2 --labels RoPE,RoPE,PoSE,PoSE --out runs/seeds
  olmo-sparsity length runs/rope runs/rope@linear:4 runs/rope@ntk:4 runs/rope@yarn:4 --out runs/extended

The position of a token is how many tokens of its own document the model reads before it. Every checkpoint reads the
same windows. Checkpoints with the same label are seeds of one model, whose loss is their mean.

Writes length.json (mean loss in bins of positions and the paired difference to the first model, with 95 % intervals
over groups, documents and seeds), length.parquet (sums per checkpoint, document and bin), length.png (loss by
position) and lengths.png (loss at each length), both also as pdf, and prints two tables. Every length is an edge of
bins: give the training length and its multiples. Checkpoints must share a tokenizer; transformers directories can be
measured too. The same command, interrupted, goes on with the checkpoint that it was at.

CKPT@SCHEME:FACTOR reads CKPT with its RoPE scaled, without training, so that it reaches FACTOR times the ids that it
was trained on: linear (position interpolation), ntk (NTK-aware), yarn (YaRN), log-n (sharper scores instead), mesa
(Mesa-Extrapolation: in chunks, at woven ids).
"""

from __future__ import annotations

from analysis.cli.arguments import with_labels
from analysis.measure.settings import LengthSettings
from analysis.records.results import LENGTH
from olmo_sparsity.util.arguments import parse_settings


def main() -> None:
    """Measure, then draw and print what was written."""
    settings = parse_settings(__doc__, LengthSettings)
    from analysis.measure.length import measure_length
    from analysis.plots.length import save_length_figures
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_length

    path = measure_length(with_labels(settings))
    found = LENGTH.load(path)
    figures = save_length_figures(found, path.parent)
    print_result(render_length(found), [path, path.with_suffix(".parquet"), *figures])
