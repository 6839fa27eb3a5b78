"""Loss by position: does a model predict as well at contexts longer than those it was trained on?

The *position* of a token is the number of tokens that the model reads before it, all of its own text: the first token
of a window has position 0 and is not measured, for nothing predicts it. Windows have L tokens at position ids 0 … L-1
and lie inside one text; end-of-text is not predicted. All models read the same windows, hence their differences are
paired. Models with the same label are trainings of one, whose loss is their mean; intervals are by group and text, the
same for all, and for a model of several trainings by training too [ours: also the bins, and drawing windows evenly from
texts].

    length.json     settings, the models, and the numbers: `LossByPosition`
    length.parquet  a row per model, text and bin: sum of losses and number of tokens

Shapes: n windows, L tokens of each, D texts, B bins of positions, C models with all trainings. Losses are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.probes.models import (
    Models,
    add_comparison_options,
    add_trained,
    check_reach,
    frame_of,
    intervals_by,
    load_probe,
    run_probe,
    save_probe,
)
from analysis.segments import Segments, sample_segments
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, count_clusters
from analysis.stats.show import show
from olmo_sparsity.util.arguments import Parser, whole_number, whole_numbers
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import provenance

if TYPE_CHECKING:
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

NAME, KIND = "length.json", "olmo-sparsity loss by position"
LENGTHS = (128, 256, 512, 1024)
OF_BIN, OF_LENGTH = "loss_nats", "loss_at_length_nats"
DIFFERENCE, RISE = "difference_to_first_nats", "rise_nats"
ENTROPY, ZEROS = "entropy_nats", "zero_share"
BINS_PER_OCTAVE = 2
OCTAVES_BELOW = 3
"""Below the smallest length the bins go down so many octaves; the positions before them are one bin."""
ATTENTION_QUERIES = 16
"""Last tokens of each length whose attention is measured."""
ATTENTION_MEMORY = 4
"""Memory of a forward pass that returns its attention, in multiples of one that does not."""


@dataclass(frozen=True)
class LossByPosition:
    """What was measured of one model or several."""

    settings: dict[str, Any]
    """What was measured, and how much text there was."""
    models: list[dict[str, Any]]
    """Of each, and each training of it: label, what identifies it, and what lengths it was trained on, if known."""
    numbers: pd.DataFrame
    """model (its label), name, from_tokens, to_tokens (positions, the last not included), value, low, high:

        loss_nats                 of each bin, in nats per token
        difference_to_first_nats  the same minus that of the first model, paired
        loss_at_length_nats       of the last bin below each length (half an octave or less), which is called the loss
                                  at that length [ours]; ``to_tokens`` is the length
        rise_nats                 how far that lies above the loss at the smallest length, paired
        entropy_nats, zero_share  (optional) of the attention of the last tokens of each length: means over heads and
                                  layers of its entropy and of the share of its weights that are exactly 0 in float32
    """
    trainings: pd.DataFrame
    """The numbers at each length of every training by itself: as ``numbers``, and ``number`` of it in ``models``."""
    sums: pd.DataFrame
    """What the numbers were made from, a row per model (``number``), name (loss_nats, entropy_nats, zero_share), text
    and bin or length: group (where there are groups), from_tokens, to_tokens, sum and count."""
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write `length.json` and `length.parquet`; returns the path of the first."""
        path = Path(folder) / NAME
        names = ("settings", "models", "numbers", "trainings", "provenance")
        save_probe(path, KIND, {name: getattr(self, name) for name in names}, self.sums, _parts(folder))
        return path

    def frame(self, labels: Sequence[str] | None = None) -> pd.DataFrame:
        """What the figures of `analysis.figures.length` draw, see `add_trained`."""
        return add_trained(self.numbers, self.models, labels)

    def heading(self) -> str:
        """What was measured, for figures."""
        settings = self.settings
        return (
            f"{settings['windows_measured']:,} windows of {settings['lengths'][-1]:,} tokens in "
            f"{settings['documents']:,} texts, {intervals_by(self.settings, self.models)}"
        )

    def draw(self, folder: str | Path, labels: Sequence[str] | None = None) -> list[Path]:
        """Write length.png (loss by position) and lengths.png (loss at each length).

        ``labels``: the models to draw, in their order (None: all). Returns the paths.
        """
        from analysis.figures.length import length_figure, lengths_figure
        from analysis.figures.style import save_figure

        frame, heading = self.frame(labels), self.heading()
        figures = {"length": length_figure, "lengths": lengths_figure}
        return [
            path
            for name, figure in figures.items()
            for path in save_figure(figure(frame, heading=heading), folder, name)
        ]

    def __str__(self) -> str:
        """The numbers as tables of text."""
        ends = self.numbers.drop(columns="from_tokens")
        tables = [
            show(ends[ends["name"] == name], across="to_tokens", title=title)
            for name, title in (
                (OF_LENGTH, "held-out loss at each length"),
                (RISE, "its difference to the first length, paired"),
                (ENTROPY, "entropy of the attention of the last tokens of each length"),
                (ZEROS, "weights of it that are exactly 0, in per cent"),
            )
            if name in set(ends["name"])
        ]
        bins = self.numbers[self.numbers["name"] == OF_BIN]
        tables.append(show(bins, across="model", title="held-out loss by position"))
        if len(bins["model"].unique()) > 1:
            paired = self.numbers[self.numbers["name"] == DIFFERENCE]
            tables.append(show(paired, across="model", title="its difference to the first model, paired"))
        return "\n\n".join([f"{self.heading()}; intervals 95 %; losses in nats per token", *tables])


def load_length(path: str | Path) -> LossByPosition:
    """What `LossByPosition.save` wrote into this folder, or this `length.json`. Raises `UserError` for another file."""
    content, sums = load_probe(path, NAME, KIND)
    numbers, trainings = (frame_of(content[name]) for name in ("numbers", "trainings"))
    return LossByPosition(
        content["settings"], content["models"], numbers, trainings, sums, content["provenance"]
    )


def measure_length(
    models: Any,
    texts: Any,
    *,
    labels: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    windows: int = 256,
    attention: bool = False,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    split: str = "heldout",
    out: str | Path | None = None,
    tokens_per_batch: int | None = None,
    memory_limit_gb: float | None = None,
    progress: bool = True,
    **opening: Any,
) -> LossByPosition:
    """Loss by position of models, one after the other, on the same windows of texts.

    Args:
        models: one, as for `analysis.model.loading.open_model`, which ``opening`` goes to, or a list of them.
        texts: as for `analysis.contexts.open_texts`, with ``split`` of a prepared corpus.
        labels: a name for each; models that share one are trainings of the same.
        lengths: tokens, ascending. Each is an edge of bins; the largest is L.
        windows: to sample, at most.
        attention: also the entropy of attention at each length, and its exact zeros.
        resamples: of the bootstrap.
        seed: of the sample and the bootstrap.
        out: folder to save to; the same call, interrupted, goes on with the model that it was at.
        tokens_per_batch: tokens of one forward pass.
        memory_limit_gb: what a forward pass may take, where ``tokens_per_batch`` is not given.
        progress: show it on standard error.

    Raises `UserError` before anything is measured, where a model cannot read so far, or no text has L tokens.
    """
    lengths = list(lengths)
    if lengths != sorted(set(lengths)) or lengths[0] < 2:
        raise UserError(f"the lengths must be ascending and at least 2, not {lengths}; mend --lengths")

    def check(loaded: LoadedModel) -> None:
        check_reach(loaded, lengths[-1])
        if attention and (loaded.rope_scaling or "").startswith("mesa"):
            raise UserError(
                f"{loaded.name} is read in chunks, and its attention is no single row; leave --attention out"
            )

    compared = Models(models, labels, opening)
    source = compared.read(texts, split, check)
    segments = sample_segments(source, windows, length=lengths[-1], seed=seed)
    tokens, edges = segments.read(source), position_edges(lengths)

    def measure(token_losses: TokenLosses, label: str) -> list[dict[str, Any]]:
        sums = _sum_losses(token_losses, segments, tokens, edges, label, progress)
        if attention:
            sums = pd.concat([sums, _sum_attention(token_losses, segments, tokens, lengths, label, progress)])
        return sums.to_dict("records")

    settings = {
        "texts": source.name,
        "texts_sha256": source.sha256,
        "split": split,
        "lengths": lengths,
        "windows": windows,
        "attention": attention,
        "seed": seed,
    }
    batches: dict[str, Any] = {"tokens_per_batch": tokens_per_batch, "memory_limit_gb": memory_limit_gb}
    parts = None if out is None else _parts(out)
    rows = compared.measure(measure, settings=settings, parts=parts, length=lengths[-1], **batches)
    sums = pd.concat([pd.DataFrame(each).assign(number=c) for c, each in enumerate(rows)], ignore_index=True)
    if source.groups is not None:
        sums["group"] = source.groups[sums["text"]]
    settings |= {
        "resamples": resamples,
        "windows_measured": len(segments),
        **count_clusters(segments.text, segments.group),
        "texts_too_short": segments.texts_too_short,
    }
    numbers = length_numbers(sums, compared.labels, lengths, resamples=resamples, seed=seed)
    trainings = numbers_of_trainings(sums, compared.labels, lengths, resamples=resamples, seed=seed)
    measured = LossByPosition(settings, compared.described, numbers, trainings, sums, provenance())
    if out is not None:
        measured.save(out)
    return measured


def _parts(folder: str | Path) -> Path:
    return Path(folder) / "length-parts"


# --- losses ---


def position_edges(lengths: Sequence[int]) -> list[int]:
    """Edges of the bins of positions, ascending, from 1 to the largest length [ours].

    Every length is an edge, so that no bin lies on both sides of it. From an eighth of the smallest length on, a bin
    spans half an octave or less; the positions before are one bin.
    """
    edges = {1, *lengths}
    for low, high in pairwise([max(1, lengths[0] >> OCTAVES_BELOW), *lengths]):
        steps = math.ceil(BINS_PER_OCTAVE * math.log2(high / low) - 1e-9)
        edges |= set(np.geomspace(low, high, steps + 1).round().astype(int).tolist())
    return sorted(edges)


def _sum_losses(
    token_losses: TokenLosses,
    segments: Segments,
    tokens: np.ndarray,
    edges: list[int],
    label: str,
    progress: bool,
) -> pd.DataFrame:
    """Rows of `LossByPosition.sums` per text and bin, from windows of ``tokens`` (n, L)."""
    texts, text, windows = np.unique(segments.text, return_inverse=True, return_counts=True)
    sums = np.zeros((len(texts), len(edges) - 1))
    scored = segments.length - 1
    what = f"loss by position, {label}"
    with show_progress(what, len(segments), "windows", enabled=progress) as advance:
        for rows in token_losses.batches(len(segments), scored, scored):
            by_position = token_losses.last_losses(tokens[rows], scored)  # column c is position c + 1
            by_bin = np.add.reduceat(by_position, np.array(edges[:-1]) - 1, axis=1)
            np.add.at(sums, text[rows], by_bin)
            advance(len(rows))
    return _rows(OF_BIN, texts, list(pairwise(edges)), sums, windows[:, None] * np.diff(edges))


def _sum_attention(
    token_losses: TokenLosses,
    segments: Segments,
    tokens: np.ndarray,
    lengths: Sequence[int],
    label: str,
    progress: bool,
) -> pd.DataFrame:
    """Rows per text and length of entropy and share of zeros at the end of the first L tokens of each window."""
    texts, text, windows = np.unique(segments.text, return_inverse=True, return_counts=True)
    sums = np.zeros((len(texts), len(lengths), 2))
    spans = [(length - min(ATTENTION_QUERIES, length), length) for length in lengths]
    with show_progress(f"attention, {label}", len(lengths), "lengths", enabled=progress) as advance:
        for number, (start, length) in enumerate(spans):
            queries = length - start
            for rows in token_losses.batches(len(segments), ATTENTION_MEMORY * length, queries):
                statistics = token_losses.attention_statistics(tokens[rows, :length], queries)
                np.add.at(sums[:, number], text[rows], statistics)
            advance(1)
    count = np.repeat(windows[:, None], len(lengths), axis=1)
    frames = [
        _rows(name, texts, spans, sums[..., which], count) for which, name in enumerate((ENTROPY, ZEROS))
    ]
    return pd.concat(frames)


def _rows(
    name: str, texts: np.ndarray, spans: Sequence[tuple[int, int]], sums: np.ndarray, count: np.ndarray
) -> pd.DataFrame:
    """A row for each of ``sums`` (D, spans)."""
    text, span = (index.ravel() for index in np.indices(sums.shape))
    start, end = np.array(spans).T
    columns = {
        "from_tokens": start[span],
        "to_tokens": end[span],
        "sum": sums.ravel(),
        "count": count.ravel(),
    }
    return pd.DataFrame({"name": name, "text": texts[text], **columns})


# --- numbers ---


def length_numbers(
    sums: pd.DataFrame, labels: Sequence[str], lengths: Sequence[int], *, resamples: int, seed: int
) -> pd.DataFrame:
    """The frame `LossByPosition.numbers`, from its ``sums``, of the models with these C ``labels``."""
    models = list(dict.fromkeys(labels))
    names = [name for name in (ENTROPY, ZEROS) if name in set(sums["name"])]
    losses = _Means(sums, (OF_BIN,), labels, resamples, seed)
    attention = _Means(sums, names, labels, resamples, seed) if names else None
    rows = []
    for number, model in enumerate(models):
        of_model = _of_losses(losses, number, lengths)
        of_attention = [] if attention is None else _of_attention(attention, number, names)
        for name, (start, end), interval in [*of_model, *of_attention]:
            span = {"from_tokens": start, "to_tokens": end}
            rows.append({"model": model, "name": name, **span, **vars(interval)})
    return pd.DataFrame(rows)


def numbers_of_trainings(
    sums: pd.DataFrame, labels: Sequence[str], lengths: Sequence[int], *, resamples: int, seed: int
) -> pd.DataFrame:
    """The frame `LossByPosition.trainings`: every one as a model by itself."""
    alone = length_numbers(
        sums, [str(c) for c in range(len(labels))], lengths, resamples=resamples, seed=seed
    )
    at_lengths = alone[~alone["name"].isin([OF_BIN, DIFFERENCE])]
    number = at_lengths["model"].astype(int)
    return at_lengths.assign(model=np.array(labels, dtype=object)[number], number=number)


class _Means:
    """Means of ``sums`` over texts, by model, name and span of positions, on the same resamples."""

    def __init__(
        self, sums: pd.DataFrame, names: Sequence[str], labels: Sequence[str], resamples: int, seed: int
    ):
        sums = sums[sums["name"].isin(names)]
        key = ["name", "from_tokens", "to_tokens"]
        by_text = sums.pivot(index="text", columns=["number", *key], values="sum")
        # every model reads the same windows
        counts = sums[sums["number"] == 0].pivot(index="text", columns=key, values="count")
        self.counts = {span: counts[span].to_numpy() for span in counts}
        self.by_text = by_text
        groups = None
        if "group" in sums:
            groups = sums.drop_duplicates("text").set_index("text")["group"].loc[by_text.index].to_numpy()
        self.spans: list[tuple[str, int, int]] = sorted(counts)
        self.labels = labels
        self.bootstrap = ClusterBootstrap(
            by_text.index.to_numpy(), groups=groups, labels=labels, resamples=resamples, seed=seed
        )

    def mean(self, number: int, span: tuple[str, int, int]) -> np.ndarray:
        """Draws of the mean over the seeds of a model."""
        label = list(dict.fromkeys(self.labels))[number]
        of_seeds = [
            self.bootstrap.ratio(self.by_text[c, *span].to_numpy(), self.counts[span])
            for c, other in enumerate(self.labels)
            if other == label
        ]
        return self.bootstrap.over_seeds(number, of_seeds)


def _of_losses(
    means: _Means, number: int, lengths: Sequence[int]
) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """Name, span and interval of the numbers of a model; ``number`` counts the models by label."""
    for span in means.spans:
        of_model, of_first = means.mean(number, span), means.mean(0, span)
        yield OF_BIN, span[1:], means.bootstrap.interval(of_model)
        yield DIFFERENCE, span[1:], means.bootstrap.interval(of_model - of_first)
    last_below = [span for length in lengths for span in means.spans if span[2] == length]
    for span in last_below:
        yield OF_LENGTH, span[1:], means.bootstrap.interval(means.mean(number, span))
        rise = means.mean(number, span) - means.mean(number, last_below[0])
        yield RISE, span[1:], means.bootstrap.interval(rise)


def _of_attention(
    means: _Means, number: int, names: Sequence[str]
) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """As `_of_losses`, of the attention."""
    for span in means.spans:
        mean = means.mean(number, span)
        interval = means.bootstrap.interval(mean)
        if span[0] == ZEROS:
            interval = means.bootstrap.share(mean, means.counts[span].sum())
        yield span[0], span[1:], interval


# --- the command ---


def main() -> None:
    """Measure, write, draw and print; or draw again."""
    parser = Parser(
        prog="olmo-sparsity length",
        description="""Loss by position: how well models predict up to and past the length they were trained on.

examples:
  olmo-sparsity length runs/rope runs/pose --out runs/length
  olmo-sparsity length runs/rope runs/pose --corpus data/books --out runs/length \\
      --lengths 256,512,1024,2048 --windows 512 --labels "RoPE,RoPE + PoSE"
  olmo-sparsity length runs/rope-1 runs/rope-2 runs/pose-1 runs/pose-2 --labels RoPE,RoPE,PoSE,PoSE --out runs/seeds
  olmo-sparsity length runs/rope runs/rope@linear:4 runs/rope@ntk:4 runs/rope@yarn:4 --out runs/extended
  olmo-sparsity length --out runs/length --labels "RoPE + PoSE,RoPE" --figures runs/length/two

The position of a token is how many tokens of its own text the model reads before it. All models read the same windows.
Models with the same label are trainings of one, whose loss is their mean. Every length is an edge of bins: give the
training length and its multiples. Models must read text as the same tokens.

Writes length.json (mean loss in bins of positions and its paired difference to the first model, with 95 % intervals
over groups, texts and trainings), length.parquet (sums per model, text and bin), length.png (loss by position) and
lengths.png (loss at each length), and prints tables. The same command, interrupted, goes on with the
model that it was at. Without models it draws again what is in --out.

MODEL@SCHEME:FACTOR reads MODEL with its RoPE scaled, without training, so that it reaches FACTOR times the ids that it
was trained on: linear (position interpolation), ntk (NTK-aware), yarn (YaRN), log-n (sharper scores instead), mesa
(Mesa-Extrapolation: in chunks, at woven ids).""",
    )
    add_comparison_options(parser, NAME)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--lengths", type=whole_numbers, default=LENGTHS, help="tokens (default: 128,256,512,1024)"
    )
    group.add_argument("--windows", type=whole_number, default=256, help="at most (default: %(default)s)")
    group.add_argument(
        "--attention",
        action="store_true",
        help="also the entropy of attention at each length, and exact zeros",
    )
    run_probe(parser.parse_args(), NAME, measure_length, load_length)
