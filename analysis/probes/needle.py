"""Needles in held-out text: does a model find, at any depth and length, what it has read once?

examples:
  olmo-sparsity needle runs/rope runs/rope@yarn:4 --lengths 128,256,512,1024 --ks 1,4 --out runs/needle
  olmo-sparsity needle HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/needle

A needle of k tokens [ours] is a random key of q tokens and behind it a random value of k. It stands at some depth of
a stretch of one text; the context ends with the key again, and the model is to go on with the value:

    text[:p]  key  value  text[p:]  key  ->  value         (L tokens before the first one that is predicted)

Its tokens are drawn without replacement from those that occur in the texts and not in the stretch, so that neither the
text nor knowledge of the world helps, and the earlier key is the only match. Depth is p over the tokens of text: 0 puts
the needle first, 1 right before the second key. The control, absent, has text in the needle's place: its loss and exact
match are those of chance. All models read the same needles, and a needle is the same at every length and depth. Each
value token is given the true ones before it: all of them likeliest is what a model that writes greedily needs, too.

Models are those of the command length. Writes needle.json, needle.parquet (every needle), needle.png (a heat map per
model and k) and needle_lengths.png (the mean over depths by length), and prints tables. The same command, interrupted,
goes on with the model that it was at.

Shapes: n samples, L tokens of context, q of the key, k of the value, C models with all runs. Losses are in nats
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.probes import probe
from analysis.probes.probe import Bar, Probe, ProbeResult, draws_of_means, intervals_frame
from analysis.probes.segments import Segments, sample_segments
from analysis.stats.tables import show
from olmo_sparsity.util.arguments import argument
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.model.loaded import LoadedModel
    from analysis.model.token_losses import TokenLosses
    from analysis.texts import Texts

UNSEEN_ONE_IN = 8
"""Keys whose ids sum to a multiple of this are never woven into training windows (`olmo_sparsity.data.windows`)."""
_MOST_DRAWS = 10_000
"""Of a key for one needle: with so many it is sure that there is none, where one in eight is fit."""
_ABSENT = -1.0  # a depth in the keys of means, where NaN would not equal itself


class Cell(NamedTuple):
    """What kind of context is measured."""

    value_tokens: int
    """k."""
    length: int
    """L."""
    depth: float | None
    """0 … 1; None: the needle is absent."""


@dataclass(frozen=True)
class Samples(Segments):
    """n stretches of text, as long as the largest context, with a needle for each."""

    key: np.ndarray = field(kw_only=True)
    """(n, q) token ids."""
    value: np.ndarray = field(kw_only=True)
    """(n, largest k) token ids; a needle of fewer tokens has the first of them."""

    def contexts(self, cell: Cell) -> np.ndarray:
        """Context and value of every sample, (n, L + k)."""
        q = self.key.shape[1]
        value = self.value[:, : cell.value_tokens]
        if cell.depth is None:
            text = self.tokens[:, : cell.length - q]
            return np.concatenate([text, self.key, value], axis=1)
        text = self.tokens[:, : cell.length - 2 * q - cell.value_tokens]
        split_at = round(cell.depth * text.shape[1])
        before_key = text[:, :split_at]
        after_key = text[:, split_at:]
        return np.concatenate([before_key, self.key, value, after_key, self.key, value], axis=1)


def measure_cell(token_losses: TokenLosses, samples: Samples, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of the k value tokens [nats per token], and whether all are likeliest, both (n,)."""
    rows = samples.contexts(cell)
    k = cell.value_tokens
    loss = np.empty(len(rows))
    exact = np.empty(len(rows), dtype=bool)
    for some in token_losses.batches(len(rows), rows.shape[1] - 1, k):
        of_tokens, likeliest = token_losses.last_losses_and_likeliest(rows[some], k)
        loss[some] = of_tokens.mean(axis=1)
        exact[some] = (likeliest == rows[some, -k:]).all(axis=1)
    return loss, exact


@dataclass(frozen=True, kw_only=True)
class Needles(ProbeResult):
    """Needles of one model or several.

    ``rows``: number (of the model), label, text, group (where there are groups), sample, value_tokens, length, depth
    (NaN: absent), loss_nats, exact.
    """

    NAME, KIND = "needle", "olmo-sparsity needles"

    cells: pd.DataFrame
    """model (its label), name, value_tokens (k), length (L), depth, distance_tokens (from the needle's value to the
    prediction, k included), value, low, high; a mean over samples and runs:

        loss_nats, exact                of the value: mean loss per token, share of needles all of whose tokens are
                                        likeliest; ``exact`` without a depth is its mean over depths
        gain_nats                       the loss where the needle is absent minus this one, paired
        absent_loss_nats, absent_exact  (no depth) where the needle is absent: chance
    """

    def heading(self) -> str:
        """What was measured, for figures."""
        settings = self.settings
        return (
            f"{settings['samples_measured']:,} needles behind a key of {settings['key_tokens']} tokens, in "
            f"{settings['documents']:,} texts"
        )

    def figures(self, labels: Sequence[str] | None = None) -> dict[str, Figure]:
        """needle (a heat map per model and k) and needle_lengths (mean over depths by length)."""
        from analysis.figures.needle import needle_figure, needle_lengths_figure

        cells = self.with_training(self.cells, labels)
        of_runs = ""
        if self.most_runs() > 1:
            of_runs = f"; means of {self.most_runs()} runs"
        by_length = f"{self.heading()}, {self.intervals_by()}"
        return {
            "needle": needle_figure(cells, heading=self.heading() + of_runs),
            "needle_lengths": needle_lengths_figure(cells, heading=by_length),
        }

    def __str__(self) -> str:
        """The numbers as tables of text."""
        exact = self.cells[self.cells["name"].isin(["exact", "absent_exact"])]
        depth = exact["depth"].map("{:g}".format).where(exact["depth"].notna(), "mean")
        shown = exact.assign(depth=depth.where(exact["name"] == "exact", "absent"))
        shown = shown.drop(columns=["name", "distance_tokens"]).sort_values("value_tokens", kind="stable")
        intervals = "in per cent; "
        if self.has_intervals():
            intervals = "in per cent, intervals 95 %, "
        tables = [f"{self.heading()}; {intervals}{self.intervals_by()}"]
        for model, rows in shown.groupby("model", sort=False):
            title = f"{model}: exact match by context"
            tables.append(show(rows.drop(columns="model"), across="length", digits=0, title=title))
        return "\n\n".join(tables)


@dataclass(kw_only=True)
class NeedleProbe(Probe):
    """Models on the same needles."""

    RESULT, MEASURED = Needles, "samples_measured"

    lengths: tuple[int, ...] = field(
        default=(64, 128, 256, 512),
        metadata=argument("L, tokens of context, comma-separated", metavar="L,L,…"),
    )
    ks: tuple[int, ...] = field(
        default=(1, 2, 4, 8),
        metadata=argument("k, tokens of a needle's value, comma-separated", metavar="K,K,…"),
    )
    depths: tuple[float, ...] = field(
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        metadata=argument(
            "depths at which needles stand, comma-separated, from 0 (first) to 1 (last)", metavar="D,D,…"
        ),
    )
    samples: int = field(
        default=100,
        metadata=argument("maximum number of needles for each length, depth and k", metavar="COUNT"),
    )
    key_tokens: int = field(default=2, metadata=argument("q, tokens of a needle's key", metavar="Q"))
    unseen_keys: bool = field(
        default=False, metadata=argument("draw only keys that are kept out of training on needles")
    )

    def __post_init__(self) -> None:
        q = self.key_tokens
        if list(self.lengths) != sorted(set(self.lengths)):
            raise UserError(f"lengths must be ascending, each once, not {self.lengths}; fix --lengths")
        for name, values in (("ks", self.ks), ("depths", self.depths)):
            if len(set(values)) < len(values):
                raise UserError(f"--{name} has a number twice: {list(values)}; give each once")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"--depths are from 0 (first) to 1 (last), not {list(self.depths)}")
        needed = 2 * q + max(self.ks) + 1
        if self.lengths[0] < needed:
            raise UserError(
                f"a context of {self.lengths[0]} tokens does not hold a needle of {max(self.ks)} with its key of {q} "
                f"twice and text; raise --lengths to at least {needed}"
            )

    def check(self, loaded: LoadedModel) -> None:
        """See `Probe`, as for all methods below."""
        if loaded.trained.get("share_of_needles") and not self.unseen_keys:
            raise UserError(
                f"{loaded.name} was trained on text with needles; add --unseen-keys, for keys that it never saw"
            )
        probe.check_reach(loaded, self.lengths[-1], max(self.ks) - 1)

    def draw_sample(self, source: Texts) -> Samples:
        """Stretches and needles, a pure function of the settings and the texts."""
        segments = sample_segments(source, self.samples, length=self.lengths[-1], seed=self.seed)
        occurring = [np.unique(source.tokens(number)) for number in range(len(source.lengths))]
        vocabulary = np.unique(np.concatenate(occurring)).astype(np.int64)
        vocabulary = vocabulary[~source.is_special(vocabulary)]
        needles = []
        for number, row in enumerate(segments.tokens):
            others = np.setdiff1d(vocabulary, row)
            needles.append(self._draw(number, others))
        key, value = np.split(np.array(needles), [self.key_tokens], axis=1)
        return Samples(**vars(segments), key=key, value=value)

    def _draw(self, number: int, others: np.ndarray) -> np.ndarray:
        """Key and largest value of a sample, (q + k,), from the tokens that its stretch does not have."""
        q = self.key_tokens
        count = self.key_tokens + max(self.ks)
        if len(others) < count:
            raise UserError(
                f"only {len(others)} tokens of the texts do not occur in a stretch of {self.lengths[-1]:,} tokens; "
                "lower --ks or --lengths"
            )
        generator = np.random.default_rng([Stream.NEEDLES, self.seed, number])
        for _ in range(_MOST_DRAWS):
            drawn = generator.choice(others, count, replace=False)
            if not self.unseen_keys or drawn[:q].sum() % UNSEEN_ONE_IN == 0:
                return drawn
        raise UserError(
            f"none of {_MOST_DRAWS:,} keys of {q} tokens was kept out of training, of the {len(others)} tokens that a "
            "stretch does not have; raise --key-tokens, or lower --lengths"
        )

    def cells(self) -> list[Cell]:
        """Every kind of context, the control last for each k and length."""
        depths = (*self.depths, None)
        return [Cell(k, length, depth) for k in self.ks for length in self.lengths for depth in depths]

    def measure_model(self, token_losses: TokenLosses, sample: Samples, bar: Bar) -> pd.DataFrame:
        cells = self.cells()
        rows = []
        head = {**sample.places(), "sample": np.arange(len(sample))}
        with bar(len(cells), "cells") as advance:
            for cell in cells:
                loss, exact = measure_cell(token_losses, sample, cell)
                of_cell = pd.DataFrame({**head, "loss_nats": loss, "exact": exact, **cell._asdict()})
                rows.append(of_cell.astype({"depth": float}))
                advance(1)
        return pd.concat(rows)

    def numbers(self, rows: pd.DataFrame, labels: Sequence[str]) -> dict[str, pd.DataFrame]:
        rows = rows.fillna({"depth": _ABSENT}).astype({"exact": float})
        others = [name for name in rows if name not in ("loss_nats", "exact")]
        rows = rows.melt(others, var_name="name", value_name="sum").assign(count=1)
        of = ["name", "value_tokens", "length", "depth"]
        resampling: dict[str, Any] = {"resamples": self.resamples, "seed": self.seed}
        bootstrap, draws = draws_of_means(rows, of, labels, unit="sample", **resampling)
        trials = dict.fromkeys(["exact", "absent_exact"], rows["sample"].nunique())
        cells = []
        for model in dict.fromkeys(labels):
            exact = draws[model]["exact"]
            loss = draws[model]["loss_nats"]
            absent_exact = exact.xs(_ABSENT, axis=1, level="depth")
            absent_loss = loss.xs(_ABSENT, axis=1, level="depth")
            exact = exact.drop(columns=_ABSENT, level="depth")
            loss = loss.drop(columns=_ABSENT, level="depth")
            gain = absent_loss.loc[:, loss.columns.droplevel("depth")].to_numpy() - loss
            over_depths = exact.T.groupby(level=["value_tokens", "length"]).mean().T
            named = [
                ("exact", exact),
                ("loss_nats", loss),
                ("gain_nats", gain),
                ("exact", over_depths),
                ("absent_exact", absent_exact),
                ("absent_loss_nats", absent_loss),
            ]
            cells.append(intervals_frame(model, bootstrap, named, trials))
        numbers = pd.concat(cells, ignore_index=True)
        text = numbers["length"] - 2 * self.key_tokens - numbers["value_tokens"]
        distance = numbers["length"] - (numbers["depth"] * text).round() - self.key_tokens
        numbers.insert(numbers.columns.get_loc("depth") + 1, "distance_tokens", distance)
        return {"cells": numbers}


def main() -> None:
    """See the module."""
    probe.run_probe(NeedleProbe, __doc__)
