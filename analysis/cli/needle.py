"""Needles in held-out text: does a model find, at any depth and context length, what it has read once?

examples:
  olmo-sparsity needle runs/rope runs/pose --out runs/needle
  olmo-sparsity needle runs/rope runs/rope@yarn:4 --corpus data/books --lengths 128,256,512,1024 --ks 1,4 \\
      --depths 0,0.5,1 --samples 200 --out runs/needle
  olmo-sparsity needle runs/pose --out runs/needle \\
      --selectors leave-one-out,gradient,attention,random --recall-length 256

A needle of k tokens is a random key of --key-tokens tokens and behind it a random value of k tokens, put at some depth
(0: first, 1: last) of a stretch of text from one document. The context ends with the key again, and the model is to
continue with the value. None of these tokens occurs elsewhere in the stretch. The control is the same context without
the needle: its loss and exact match are those of chance, on a value that the model cannot know.

With --selectors the influence selectors rank the far tokens by their influence on the first value token, and it is
counted how many of the needle's tokens come first; their placebo is a context with another needle.

Checkpoints are those of the command length: CKPT@SCHEME:FACTOR scales RoPE, and those with one label are seeds of one
model. Writes needle.json, needle.parquet (every needle), needle.png and needle_gain.png (a heat map per model and k),
needle_lengths.png (the mean over depths by length) and needle_recall.png, all also as pdf, and prints a table. The same
command, interrupted, goes on with the checkpoint that it was at.
"""

from __future__ import annotations

from analysis.cli.arguments import with_labels
from analysis.measure.settings import NeedleSettings
from analysis.records.results import NEEDLE
from olmo_sparsity.util.arguments import parse_settings


def main() -> None:
    """Measure, then draw and print what was written."""
    settings = parse_settings(__doc__, NeedleSettings)
    from analysis.measure.needle import measure_needle
    from analysis.plots.needle import MEASURES, needle_figure, needle_lengths_figure, recall_figure
    from analysis.plots.style import save_figure
    from analysis.tables.cells import print_result
    from analysis.tables.models import render_needle

    path = measure_needle(with_labels(settings))
    found = NEEDLE.load(path)
    paths = [path, path.with_suffix(".parquet")]
    for measure, (name, _) in MEASURES.items():
        paths += save_figure(needle_figure(found, measure), path.parent, name)
    paths += save_figure(needle_lengths_figure(found), path.parent, "needle_lengths")
    if settings.recall is not None:
        paths += save_figure(recall_figure(found), path.parent, "needle_recall")
    print_result(render_needle(found), paths)
