"""Loss by position: how well models predict up to and past the length that they were trained on.

examples:
  olmo-sparsity length runs/rope runs/pose --corpus data/books --out runs/length \\
      --lengths 256,512,1024,2048 --windows 512 --labels "RoPE,RoPE + PoSE"
  olmo-sparsity length runs/rope-1 runs/rope-2 runs/pose-1 runs/pose-2 --labels RoPE,RoPE,PoSE,PoSE --out runs/seeds
  olmo-sparsity length runs/rope runs/rope@linear:4 runs/rope@ntk:4 runs/rope@yarn:4 --out runs/extended
  olmo-sparsity length --out runs/length --labels "RoPE + PoSE,RoPE" --figures runs/length/two

The position of a token is the number of tokens that the model reads before it, all of its own text: the first token of
a window has position 0 and is not measured, for nothing predicts it. Windows have L tokens at position ids 0 … L-1 and
lie inside one text; end-of-text is not predicted. All models read the same windows, hence their differences are paired.
Models with the same label are runs of one, whose loss is their mean; intervals are by group and text, the same for
all, and for a model of several runs by run too. [ours: also the bins, and drawing windows evenly from texts]

Every length is an edge of bins: give the training length and its multiples. Models must read text as the same tokens.
MODEL@SCHEME:FACTOR reads MODEL with its RoPE scaled, without training, so that it reaches FACTOR times the ids that it
was trained on: linear (position interpolation), ntk (NTK-aware), yarn (YaRN), log-n (sharper scores instead).

Writes length.json (mean loss in bins of positions and its paired difference to the first model, with 95 % intervals),
length.parquet (sums per model, text and bin), length.png (loss by position) and lengths.png (loss at each length), and
prints tables. The same command, interrupted, goes on with the model that it was at.

Shapes: n windows, L tokens of each, D texts, B bins of positions, C models with all runs. Losses are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from analysis.probes import probe
from analysis.probes.probe import Bar, Probe, ProbeResult, draws_of_means, intervals_frame
from analysis.probes.segments import Segments, sample_segments
from analysis.stats.tables import show
from olmo_sparsity.util.arguments import argument
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.model.loaded import LoadedModel
    from analysis.model.token_losses import TokenLosses
    from analysis.texts import Texts

OF_BIN, OF_LENGTH = "loss_nats", "loss_at_length_nats"
DIFFERENCE, RISE = "difference_to_first_nats", "rise_nats"
BINS_PER_OCTAVE = 2
OCTAVES_BELOW = 3
"""Below the smallest length the bins go down so many octaves; the positions before them are one bin."""
KEY = ["name", "from_tokens", "to_tokens"]
"""Columns that say what a mean is of."""


@dataclass(frozen=True, kw_only=True)
class LossByPosition(ProbeResult):
    """Loss by position of one model or several.

    ``rows`` has one per model (``number``), name (loss_nats), text and bin: group (where there are groups),
    from_tokens, to_tokens, sum and count.
    """

    NAME, KIND = "length", "olmo-sparsity loss by position"
    TITLES: ClassVar[dict[str, str]] = {
        OF_LENGTH: "held-out loss at each length",
        RISE: "its difference to the first length, paired",
        OF_BIN: "held-out loss by position",
        DIFFERENCE: "its difference to the first model, paired",
    }

    numbers: pd.DataFrame
    """model (its label), name, from_tokens, to_tokens (positions, the last not included), value, low, high:

        loss_nats                 of each bin, in nats per token
        difference_to_first_nats  the same minus that of the first model, paired
        loss_at_length_nats       of the last bin below each length (half an octave or less), which is called the loss
                                  at that length [ours]; ``to_tokens`` is the length
        rise_nats                 how far that lies above the loss at the smallest length, paired
    """
    runs: pd.DataFrame
    """The numbers at each length of every run by itself: as ``numbers``, and ``number`` of it in ``models``."""

    def heading(self) -> str:
        """What was measured, for figures."""
        settings = self.settings
        return (
            f"{settings['windows_measured']:,} windows of {settings['lengths'][-1]:,} tokens in "
            f"{settings['documents']:,} texts, {self.intervals_by()}"
        )

    def figures(self, labels: Sequence[str] | None = None) -> dict[str, Figure]:
        """length (loss by position) and lengths (loss at each length)."""
        from analysis.figures.length import length_figure, lengths_figure

        frame = self.with_training(self.numbers, labels)
        heading = self.heading()
        figures = {"length": length_figure, "lengths": lengths_figure}
        return {name: figure(frame, heading=heading) for name, figure in figures.items()}

    def __str__(self) -> str:
        """The numbers as tables of text."""
        tables = []
        for name, title in self.TITLES.items():
            shown = self.numbers[self.numbers["name"] == name]
            if name in (OF_BIN, DIFFERENCE):
                if name == OF_BIN or shown["model"].nunique() > 1:
                    tables.append(show(shown, across="model", title=title))
            elif len(shown):
                tables.append(show(shown.drop(columns="from_tokens"), across="to_tokens", title=title))
        intervals = ""
        if self.has_intervals():
            intervals = "; intervals 95 %"
        return "\n\n".join([f"{self.heading()}{intervals}; losses in nats per token", *tables])


@dataclass(kw_only=True)
class LengthProbe(Probe):
    """Loss by position of models on the same windows of texts."""

    RESULT, MEASURED = LossByPosition, "windows_measured"

    lengths: tuple[int, ...] = field(
        default=(128, 256, 512, 1024),
        metadata=argument(
            "lengths to measure in tokens, comma-separated; the largest is L, the length of all windows",
            metavar="L,L,…",
        ),
    )
    windows: int = field(
        default=256, metadata=argument("maximum number of windows to sample from the texts", metavar="COUNT")
    )

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 2:
            raise UserError(f"lengths must be ascending and at least 2, not {self.lengths}; fix --lengths")

    def check(self, loaded: LoadedModel) -> None:
        """See `Probe`, as for all methods below."""
        probe.check_reach(loaded, self.lengths[-1])

    def draw_sample(self, source: Texts) -> Segments:
        return sample_segments(source, self.windows, length=self.lengths[-1], seed=self.seed)

    def measure_model(self, token_losses: TokenLosses, sample: Segments, bar: Bar) -> pd.DataFrame:
        tokens = sample.tokens
        edges = position_edges(self.lengths)
        scored = tokens.shape[1] - 1
        losses = np.empty((len(tokens), len(edges) - 1))
        is_target = sample.is_target[:, 1:]
        starts = np.array(edges[:-1]) - 1
        with bar(len(tokens), "windows") as advance:
            for rows in token_losses.batches(len(tokens), scored, scored):
                by_position = token_losses.last_losses(tokens[rows], scored)  # column c is position c + 1
                losses[rows] = np.add.reduceat(by_position * is_target[rows], starts, axis=1)
                advance(len(rows))
        targets = np.add.reduceat(is_target, starts, axis=1, dtype=np.int64)
        return rows_by_text(OF_BIN, sample, list(pairwise(edges)), losses, targets)

    def numbers(self, rows: pd.DataFrame, labels: Sequence[str]) -> dict[str, pd.DataFrame]:
        label_by_number = {str(number): label for number, label in enumerate(labels)}
        alone = self.numbers_of(rows, list(label_by_number))
        alone = alone[~alone["name"].isin([OF_BIN, DIFFERENCE])]
        number = alone["model"]
        runs = alone.assign(model=number.map(label_by_number), number=number.astype(int))
        return {"numbers": self.numbers_of(rows, labels), "runs": runs}

    def numbers_of(self, rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
        """The frame `LossByPosition.numbers`, from ``rows`` of the models with these C ``labels``."""
        resampling: dict[str, Any] = {"resamples": self.resamples, "seed": self.seed}
        bootstrap, draws = draws_of_means(rows, KEY, labels, unit="text", **resampling)
        numbers = []
        for model in dict.fromkeys(labels):
            of_bins = draws[model][OF_BIN]
            at_lengths = of_bins.loc[:, of_bins.columns.isin(self.lengths, level="to_tokens")]
            named = [
                (OF_BIN, of_bins),
                (DIFFERENCE, of_bins - draws[labels[0]][OF_BIN]),
                (OF_LENGTH, at_lengths),
                (RISE, at_lengths.sub(at_lengths.iloc[:, 0], axis=0)),
            ]
            numbers.append(intervals_frame(model, bootstrap, named, trials={}))
        return pd.concat(numbers, ignore_index=True)


def position_edges(lengths: Sequence[int]) -> list[int]:
    """Edges of the bins of positions, ascending, from 1 to the largest length [ours].

    Every length is an edge, so that no bin lies on both sides of it. From an eighth of the smallest length on, a bin
    spans half an octave or less; the positions before are one bin.
    """
    edges = {1, *lengths}
    for low, high in pairwise([max(1, lengths[0] >> OCTAVES_BELOW), *lengths]):
        steps = math.ceil(BINS_PER_OCTAVE * math.log2(high / low) - 1e-9)
        inner = np.geomspace(low, high, steps + 1).round().astype(int)
        edges.update(inner.tolist())
    return sorted(edges)


def rows_by_text(
    name: str, sample: Segments, spans: Sequence[tuple[int, int]], values: np.ndarray, count: np.ndarray
) -> pd.DataFrame:
    """Rows of `LossByPosition` from ``values`` of windows, (n, spans), each a sum of so many, (n, spans)."""
    of_segments = pd.DataFrame({"name": name, **sample.places()})
    of_spans = []
    for span_index, (start, end) in enumerate(spans):
        of_span = of_segments.assign(from_tokens=start, to_tokens=end)
        of_spans.append(of_span.assign(sum=values[:, span_index], count=count[:, span_index]))
    by = [*of_segments, "from_tokens", "to_tokens"]
    return pd.concat(of_spans).groupby(by, as_index=False).sum()


def main() -> None:
    """See the module."""
    probe.run_probe(LengthProbe, __doc__)
