"""Needles in held-out text: does a model find, at any depth, what it has read once?

A *needle of k tokens* [ours] is a random key of q tokens and behind it a random value of k. It stands at some depth of
a stretch of one text; the context ends with the key again, and the model is to go on with the value:

    text[:p]  key  value  text[p:]  key  ->  value         (L tokens before the first one that is predicted)

The tokens of a needle are drawn without replacement from those that occur in the texts and not in the stretch, so that
neither the text nor knowledge of the world helps, and the earlier key is the only match. Depth is p over the tokens of
text: 0 puts the needle first, 1 right before the second key. The control, *absent*, has text in the needle's place.

All models read the same needles in the same stretches, and a needle is the same at every length and depth.
Teacher-forced: each value token is given the true ones before it. All of them likeliest is what a model that writes
greedily and reads itself needs to be right, so exact match is the same for it.

*Recall*: do influence selectors find the needle that a prediction needs? The target is the first value token; the short
context is the second key, and everything before it is far. The needle's tokens are the earlier key and its first value
token, q + 1 far columns. The placebo [ours] is the far context of another sample, with its needle, whose value is not
the target: a selector that finds those tokens as often goes by how they look, not by what they do.

    needle.json     settings, the models, and the numbers: `Needles`
    needle.parquet  a row per model, sample and cell

Shapes: n samples, L tokens of context, q of the key, k of the value, C models with all trainings; for the recall N
tokens of context, F = N - q far tokens, K values of how many are selected. Losses are in nats per token.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.contexts import Contexts
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
from analysis.selectors import check_selector
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, count_clusters
from analysis.stats.measured import PLACEBO, TRUE
from analysis.stats.numbers import CHANCE
from analysis.stats.show import show
from analysis.synthetic.planted import KS, chance_recall, found_at, selected_columns
from olmo_sparsity.util.arguments import Parser, finite_number, several, texts, whole_number, whole_numbers
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import provenance
from olmo_sparsity.util.streams import Stream

if TYPE_CHECKING:
    from analysis.contexts import Texts
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

NAME, KIND = "needle.json", "olmo-sparsity needles"
LENGTHS, VALUE_TOKENS, DEPTHS = (64, 128, 256, 512), (1, 2, 4, 8), (0.0, 0.25, 0.5, 0.75, 1.0)
UNSEEN_ONE_IN = 8
"""Keys whose ids sum to a multiple of this are never woven into training windows (`olmo_sparsity.data.needles`)."""


# --- needles ---


@dataclass(frozen=True)
class Cell:
    """What kind of context is measured."""

    value_tokens: int
    """k."""
    length: int
    """L."""
    depth: float | None
    """0 … 1; None: the needle is absent."""

    def start(self, key_tokens: int) -> int:
        """p: column of the needle's first token, behind a key of q tokens."""
        assert self.depth is not None
        return round(self.depth * (self.length - 2 * key_tokens - self.value_tokens))


@dataclass(frozen=True)
class Samples:
    """n stretches of text with a needle for each."""

    segments: Segments
    """Where the stretches stand; as long as the largest context."""
    text: np.ndarray
    """(n, largest L) token ids."""
    key: np.ndarray
    """(n, q) token ids."""
    value: np.ndarray
    """(n, largest k) token ids; a needle of fewer tokens has the first of them."""
    vocabulary: int
    """Different tokens of the texts, of which those are drawn that a stretch does not have."""

    def __len__(self) -> int:
        return len(self.text)

    def contexts(self, cell: Cell) -> np.ndarray:
        """Context and value of every sample, (n, L + k)."""
        q, value = self.key.shape[1], self.value[:, : cell.value_tokens]
        if cell.depth is None:
            return np.concatenate([self.text[:, : cell.length - q], self.key, value], axis=1)
        place = cell.start(q)
        text = self.text[:, : cell.length - 2 * q - cell.value_tokens]
        return np.concatenate([text[:, :place], self.key, value, text[:, place:], self.key, value], axis=1)


def draw_samples(
    source: Texts,
    count: int,
    *,
    lengths: Sequence[int],
    ks: Sequence[int],
    key_tokens: int,
    seed: int,
    unseen_keys: bool = False,
) -> Samples:
    """Up to ``count`` stretches and needles, a pure function of the arguments and the texts.

    With ``unseen_keys`` the keys are such as `olmo_sparsity.data.needles` never weaves into training windows.

    Raises `UserError` where a context does not hold its needle, no text is long enough, or the texts have too few
    different tokens.
    """
    needed = 2 * key_tokens + max(ks) + 1
    if lengths[0] < needed:
        raise UserError(
            f"a context of {lengths[0]} tokens does not hold a needle of {max(ks)} with its key of {key_tokens} twice "
            f"and text; raise --lengths to at least {needed}"
        )
    segments = sample_segments(source, count, length=lengths[-1], seed=seed)
    text = segments.read(source).astype(np.int64)
    occurring = [np.unique(source.tokens(number)) for number in range(len(source.lengths))]
    vocabulary = np.unique(np.concatenate(occurring)).astype(np.int64)
    needles = []
    for number, row in enumerate(text):
        others = np.setdiff1d(vocabulary, row)
        if len(others) < key_tokens + max(ks):
            raise UserError(
                f"only {len(others)} tokens of the texts do not occur in a stretch of {lengths[-1]:,} tokens; lower "
                "--ks or --lengths"
            )
        generator = np.random.default_rng([Stream.NEEDLES, seed, number])
        drawn = generator.choice(others, key_tokens + max(ks), replace=False)
        while unseen_keys and drawn[:key_tokens].sum() % UNSEEN_ONE_IN:
            drawn = generator.choice(others, key_tokens + max(ks), replace=False)
        needles.append(drawn)
    tokens = np.array(needles)
    return Samples(segments, text, tokens[:, :key_tokens], tokens[:, key_tokens:], len(vocabulary))


def cells_of(ks: Sequence[int], lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """Every kind of context, the control last for each k and length."""
    return [Cell(k, length, depth) for k in ks for length in lengths for depth in (*depths, None)]


def measure_cell(token_losses: TokenLosses, samples: Samples, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of the k value tokens [nats per token], and whether all are likeliest, both (n,)."""
    rows, k = samples.contexts(cell), cell.value_tokens
    loss, exact = np.empty(len(rows)), np.empty(len(rows), dtype=bool)
    for some in token_losses.batches(len(rows), rows.shape[1] - 1, k):
        of_tokens, likeliest = token_losses.last_losses_and_likeliest(rows[some], k)
        loss[some] = of_tokens.mean(axis=1)
        exact[some] = (likeliest == rows[some, -k:]).all(axis=1)
    return loss, exact


# --- recall ---


@dataclass(frozen=True)
class RecallOptions:
    """Which selectors look for the needle, and in how many samples."""

    selectors: tuple[str, ...]
    length: int
    """N."""
    depth: float
    samples: int

    def check(self, longest: int, key_tokens: int) -> None:
        """Raise `UserError` for a selector that there is not, and a context that is too long or short."""
        needed = 2 * key_tokens + 2
        if not needed <= self.length <= longest:
            raise UserError(
                f"--recall-length {self.length} must be from {needed} (a needle of 1, its key twice, and text) to the "
                f"largest of --lengths, {longest}"
            )
        for name in self.selectors:
            check_selector(name, k_max=max(KS), n_far=self.length - key_tokens)

    def rows(self, samples: Samples) -> np.ndarray:
        """The samples that it is measured on: spread over all of them, which stand text by text."""
        return np.linspace(0, len(samples) - 1, min(self.samples, len(samples))).round().astype(int)


def needle_contexts(samples: Samples, options: RecallOptions) -> tuple[Contexts, Contexts, np.ndarray]:
    """True and placebo contexts of n samples, and the needle's far columns, (q + 1,)."""
    q, cell = samples.key.shape[1], Cell(1, options.length, options.depth)
    rows = samples.contexts(cell)[options.rows(samples)]
    contexts = Contexts(rows[:, :-1], rows[:, -1:], np.arange(len(rows))[:, None], q)
    donors = np.roll(np.arange(len(rows)), 1)
    placebos = contexts.with_far(contexts.tokens[donors, : contexts.n_far])
    return contexts, placebos, cell.start(q) + np.arange(q + 1)


def recall_of_needles(
    token_losses: TokenLosses,
    samples: Samples,
    options: RecallOptions,
    label: str,
    seed: int,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Recall of the needle's q + 1 tokens: rows selector, far_context, k, value, low, high; chance is a selector."""
    from analysis.model.losses import Scorer

    contexts, placebos, columns = needle_contexts(samples, options)
    scorer = Scorer(
        token_losses.model, device=token_losses.device, tokens_per_batch=token_losses.tokens_per_batch
    )
    planted, at = np.tile(columns, (len(contexts), 1)), options.rows(samples)
    segments = samples.segments
    text, group = segments.text[at], None if segments.group is None else segments.group[at]
    ks = [k for k in KS if k <= contexts.n_far]
    rows: list[dict[str, Any]] = []
    what = f"recall, {label}"
    with show_progress(what, 2 * len(options.selectors), "selectors", enabled=progress) as advance:
        for name in options.selectors:
            shares: dict[tuple[str, int], np.ndarray] = {}
            for far_context, some in ((TRUE, contexts), (PLACEBO, placebos)):
                selected = selected_columns(name, scorer, some, seed, max(ks))
                recall = found_at(selected, planted, ks).mean(axis=2)  # (n, K)
                shares |= {(far_context, k): of_k for k, of_k in zip(ks, recall.T, strict=True)}
                advance(1)
            bootstrap, one = ClusterBootstrap(text, groups=group, seed=seed), np.ones(len(text))
            rows += [
                {"selector": name, "far_context": far, "k": k, **vars(bootstrap.ratio_interval(of_k, one))}
                for (far, k), of_k in shares.items()
            ]
    chance = {"selector": CHANCE, "far_context": TRUE, "low": math.nan, "high": math.nan}
    return rows + [{**chance, "k": k, "value": chance_recall(k, contexts.n_far)} for k in ks]


# --- what was measured ---


@dataclass(frozen=True)
class Needles:
    """What was measured of one model or several."""

    settings: dict[str, Any]
    """What was measured, and how much text there was."""
    models: list[dict[str, Any]]
    """Of each, and each training of it: label, what identifies it, and what lengths it was trained on, if known."""
    cells: pd.DataFrame
    """model (its label), name, value_tokens (k), length (L), depth, distance_tokens (from the needle's value to the
    prediction, k included), value, low, high; a mean over samples and trainings:

        loss_nats, exact                of the value: mean loss per token, share of needles all of whose tokens are
                                        likeliest; ``exact`` without a depth is its mean over depths
        gain_nats                       the loss where the needle is absent minus this one, paired
        absent_loss_nats, absent_exact  (no depth) where the needle is absent: chance
    """
    recalls: pd.DataFrame | None
    """model (its label, with the number of the training where it has several), number (of it in ``models``), selector,
    far_context (true, placebo), k, value, low, high: share of the needle's tokens among the first k selected; selector
    "chance": of k tokens drawn at random. None where no selectors were measured."""
    rows: pd.DataFrame
    """number (of the model), label, text, group (where there are groups), sample, value_tokens, length, depth (NaN:
    absent), loss_nats, exact."""
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write `needle.json` and `needle.parquet`; returns the path of the first."""
        path = Path(folder) / NAME
        names = ("settings", "models", "cells", "recalls", "provenance")
        save_probe(path, KIND, {name: getattr(self, name) for name in names}, self.rows, _parts(folder))
        return path

    def heading(self) -> str:
        """What was measured, for figures."""
        settings = self.settings
        return (
            f"{settings['samples_measured']:,} needles behind a key of {settings['key_tokens']} tokens, in "
            f"{settings['documents']:,} texts"
        )

    def draw(self, folder: str | Path, labels: Sequence[str] | None = None) -> list[Path]:
        """Write needle.png and needle_gain.png (a heat map per model and k), needle_lengths.png (mean over depths by
        length) and, where selectors were measured, needle_recall.png.

        ``labels``: the models to draw, in their order (None: all). Returns the paths.
        """
        from analysis.figures.needle import needle_figure, needle_lengths_figure, needle_recall_figure
        from analysis.figures.style import save_figure

        cells, heading = add_trained(self.cells, self.models, labels), self.heading()
        paths = save_figure(needle_figure(cells, heading=heading), folder, "needle")
        paths += save_figure(
            needle_figure(cells, measure="gain_nats", heading=heading), folder, "needle_gain"
        )
        paths += save_figure(needle_lengths_figure(cells, heading=heading), folder, "needle_lengths")
        if self.recalls is not None and labels is None:
            recall = self.settings["recall"]
            heading = f"{recall['samples']} contexts of {recall['length']} tokens, depth {recall['depth']:g}"
            paths += save_figure(needle_recall_figure(self.recalls, heading=heading), folder, "needle_recall")
        return paths

    def __str__(self) -> str:
        """The numbers as tables of text."""
        by = intervals_by(self.settings, self.models)
        exact = self.cells[self.cells["name"].isin(["exact", "absent_exact"])]
        depth = exact["depth"].map("{:g}".format).where(exact["depth"].notna(), "mean")
        shown = exact.assign(depth=depth.where(exact["name"] == "exact", "absent"))
        shown = shown.drop(columns=["name", "distance_tokens"])
        tables = [
            show(
                rows.drop(columns="model"),
                across="length",
                digits=0,
                title=f"{model}: exact match by context",
            )
            for model, rows in shown.groupby("model", sort=False)
        ]
        if self.recalls is not None:
            recalls = self.recalls.drop(columns="number")
            tables.append(show(recalls, across="k", digits=0, title="recall of the needle's tokens"))
        return "\n\n".join([f"{self.heading()}; in per cent, intervals 95 %, {by}", *tables])


def load_needles(path: str | Path) -> Needles:
    """What `Needles.save` wrote into this folder, or this `needle.json`. Raises `UserError` for another file."""
    content, rows = load_probe(path, NAME, KIND)
    recalls = None if content["recalls"] is None else frame_of(content["recalls"])
    cells = frame_of(content["cells"])
    return Needles(content["settings"], content["models"], cells, recalls, rows, content["provenance"])


def measure_needles(
    models: Any,
    texts: Any,
    *,
    labels: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    ks: Sequence[int] = VALUE_TOKENS,
    depths: Sequence[float] = DEPTHS,
    samples: int = 100,
    key_tokens: int = 2,
    unseen_keys: bool = False,
    selectors: Sequence[str] = (),
    recall_length: int | None = None,
    recall_samples: int = 40,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    split: str = "heldout",
    out: str | Path | None = None,
    tokens_per_batch: int | None = None,
    memory_limit_gb: float | None = None,
    progress: bool = True,
    **opening: Any,
) -> Needles:
    """Measure models, one after the other, on the same needles.

    Args:
        models: one, as for `analysis.model.loading.open_model`, which ``opening`` goes to, or a list of them.
        texts: as for `analysis.contexts.open_texts`, with ``split`` of a prepared corpus.
        labels: a name for each; models that share one are trainings of the same.
        lengths: L, ascending.
        ks: tokens of a value, k.
        depths: from 0 (first) to 1 (last), ascending.
        samples: needles of each cell, at most.
        key_tokens: q.
        unseen_keys: only keys that training never weaves into its windows.
        selectors: whose recall is measured, at the middle depth, k = 1; none by default.
        recall_length: N (None: the smallest length).
        recall_samples: needles for them, at most.
        resamples: of the bootstrap.
        seed: of all that is drawn, and of the bootstrap.
        out: folder to save to; the same call, interrupted, goes on with the model that it was at.
        tokens_per_batch: tokens of one forward pass.
        memory_limit_gb: what a forward pass may take, where ``tokens_per_batch`` is not given.
        progress: show it on standard error.

    Raises `UserError` before anything is measured, where a model cannot read so far, needles do not fit, or a model was
    trained on needles whose keys could be drawn here.
    """
    if not all(0 <= depth <= 1 for depth in depths):
        raise UserError(f"--depths are from 0 (first) to 1 (last), not {list(depths)}")
    recall = None
    if selectors:
        middle = depths[len(depths) // 2]
        recall = RecallOptions(tuple(selectors), recall_length or lengths[0], middle, recall_samples)
        recall.check(lengths[-1], key_tokens)

    def check(loaded: LoadedModel) -> None:
        if not unseen_keys:
            _refuse_seen_keys(loaded)
        check_reach(loaded, lengths[-1], max(ks) - 1)
        if recall is not None:
            loaded.check_context(recall.length)

    compared = Models(models, labels, opening)
    source = compared.read(texts, split, check)
    drawn_by = {
        "lengths": list(lengths),
        "ks": list(ks),
        "key_tokens": key_tokens,
        "unseen_keys": unseen_keys,
    }
    drawn = draw_samples(source, samples, seed=seed, **drawn_by)  # type: ignore[arg-type]
    if recall is not None and len(recall.rows(drawn)) < 2:
        raise UserError(
            "recall needs 2 needles, as the placebo is another one; raise --samples, --recall-samples"
        )
    cells = cells_of(ks, lengths, depths)

    def measure(token_losses: TokenLosses, label: str) -> dict[str, Any]:
        values = []
        with show_progress(f"needles, {label}", len(cells), "cells", enabled=progress) as advance:
            for cell in cells:
                values.append([each.tolist() for each in measure_cell(token_losses, drawn, cell)])
                advance(1)
        rows = None
        if recall is not None:
            rows = recall_of_needles(token_losses, drawn, recall, label, seed, progress)
        return {"values": values, "recall": rows}

    settings: dict[str, Any] = {
        "texts": source.name,
        "texts_sha256": source.sha256,
        "split": split,
        **drawn_by,
        "depths": list(depths),
        "samples": samples,
        "recall": None if recall is None else {**vars(recall), "selectors": list(recall.selectors)},
        "seed": seed,
    }
    measured = compared.measure(
        measure,
        settings=settings,
        parts=None if out is None else _parts(out),
        length=lengths[-1] + max(ks) - 1,
        tokens_per_batch=tokens_per_batch,
        memory_limit_gb=memory_limit_gb,
    )
    values = np.array([each["values"] for each in measured])  # (C, cells, 2, n)
    rows = _rows(compared.labels, drawn, cells, values[:, :, 0], values[:, :, 1].astype(bool))
    settings |= {
        "resamples": resamples,
        "samples_measured": len(drawn),
        **count_clusters(drawn.segments.text, drawn.segments.group),
        "tokens_to_draw_from": drawn.vocabulary,
    }
    numbers = needle_numbers(rows, key_tokens, resamples=resamples, seed=seed)
    recalls = None if recall is None else _recalls(compared.labels, [each["recall"] for each in measured])
    needles = Needles(settings, compared.described, numbers, recalls, rows, provenance())
    if out is not None:
        needles.save(out)
    return needles


def _parts(folder: str | Path) -> Path:
    return Path(folder) / "needle-parts"


def _refuse_seen_keys(loaded: LoadedModel) -> None:
    """Raise `UserError` for a run of this project whose training windows had needles; of others it is not known."""
    path = Path(loaded.name if Path(loaded.name).exists() else loaded.name.rpartition("@")[0])
    if not (loaded.of_project and loaded.name and path.is_dir()):
        return
    config = importlib.import_module("analysis.ours").config_of(path)
    if config.needles.share:
        raise UserError(
            f"{loaded.name} was trained on text with needles; add --unseen-keys, for keys that it never saw"
        )


# --- numbers ---


def _rows(
    labels: Sequence[str], samples: Samples, cells: Sequence[Cell], loss_nats: np.ndarray, exact: np.ndarray
) -> pd.DataFrame:
    """The rows of `Needles.rows` from ``loss_nats`` and ``exact``, both (C, cells, n)."""
    number, cell, sample = (index.ravel() for index in np.indices(loss_nats.shape))
    of_cells = pd.DataFrame([vars(each) for each in cells]).astype({"depth": float}).iloc[cell]
    segments = samples.segments
    group = {} if segments.group is None else {"group": segments.group[sample]}
    return pd.DataFrame(
        {
            "number": number,
            "label": np.array(labels, dtype=object)[number],
            "text": segments.text[sample],
            **group,
            "sample": sample,
            **{name: of_cells[name].to_numpy() for name in of_cells},
            "loss_nats": loss_nats.ravel(),
            "exact": exact.ravel(),
        }
    )


def needle_numbers(rows: pd.DataFrame, key_tokens: int, *, resamples: int, seed: int) -> pd.DataFrame:
    """The frame `Needles.cells`, from its ``rows``."""
    of_samples = rows.drop_duplicates("sample").sort_values("sample")
    labels = rows.drop_duplicates("number").sort_values("number")["label"].tolist()
    one = np.ones(len(of_samples))
    columns: dict[tuple[int, str, Cell], np.ndarray] = {}
    cells: dict[Cell, None] = {}
    for (c, k, length, depth), some in rows.groupby(
        ["number", "value_tokens", "length", "depth"], dropna=False, sort=False
    ):
        cell = Cell(k, length, None if math.isnan(depth) else depth)
        cells[cell] = None
        some = some.sort_values("sample")
        columns |= {(c, name, cell): some[name].to_numpy(dtype=float) for name in ("loss_nats", "exact")}
    bootstrap = ClusterBootstrap(
        of_samples["text"].to_numpy(),
        groups=of_samples["group"].to_numpy() if "group" in rows else None,
        labels=labels,
        resamples=resamples,
        seed=seed,
    )

    def mean(number: int, name: str, cell: Cell) -> np.ndarray:
        """Draws of the mean over the seeds of a model."""
        label = list(dict.fromkeys(labels))[number]
        of_seeds = [
            bootstrap.ratio(columns[c, name, cell], one) for c, other in enumerate(labels) if other == label
        ]
        return bootstrap.over_seeds(number, of_seeds)

    numbers = []
    for number, label in enumerate(dict.fromkeys(labels)):
        for cell in cells:
            loss, exact = mean(number, "loss_nats", cell), mean(number, "exact", cell)
            of_cell = {"model": label, **vars(cell), "distance_tokens": None}
            if cell.depth is None:
                like = [each for each in cells if each.depth is not None]
                like = [
                    each
                    for each in like
                    if (each.value_tokens, each.length) == (cell.value_tokens, cell.length)
                ]
                over_depths = np.mean([mean(number, "exact", each) for each in like], axis=0)
                intervals = {
                    "exact": bootstrap.share(over_depths, len(one)),
                    "absent_exact": bootstrap.share(exact, len(one)),
                    "absent_loss_nats": bootstrap.interval(loss),
                }
            else:
                of_cell["distance_tokens"] = cell.length - cell.start(key_tokens) - key_tokens
                absent = mean(number, "loss_nats", Cell(cell.value_tokens, cell.length, None))
                intervals = {
                    "exact": bootstrap.share(exact, len(one)),
                    "loss_nats": bootstrap.interval(loss),
                    "gain_nats": bootstrap.interval(absent - loss),
                }
            numbers += [{"name": name, **of_cell, **vars(each)} for name, each in intervals.items()]
    return pd.DataFrame(numbers).astype({"depth": float})


def _recalls(labels: list[str], of_models: Sequence[list[dict[str, Any]]]) -> pd.DataFrame:
    """The frame `Needles.recalls`."""
    rows = []
    for number, (label, of_model) in enumerate(zip(labels, of_models, strict=True)):
        model = f"{label}, {labels[: number + 1].count(label)}" if labels.count(label) > 1 else label
        rows += [{"model": model, "number": number, **row} for row in of_model]
    return pd.DataFrame(rows)


# --- the command ---


def main() -> None:
    """Measure, write, draw and print; or draw again."""
    parser = Parser(
        prog="olmo-sparsity needle",
        description="""Needles in held-out text: does a model find, at any depth and length, what it has read once?

examples:
  olmo-sparsity needle runs/rope runs/pose --out runs/needle
  olmo-sparsity needle runs/rope runs/rope@yarn:4 --corpus data/books --lengths 128,256,512,1024 --ks 1,4 \\
      --depths 0,0.5,1 --samples 200 --out runs/needle
  olmo-sparsity needle HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/needle \\
      --selectors leave-one-out,gradient,attention,random --recall-length 256

A needle of k tokens is a random key of --key-tokens tokens and behind it a random value of k tokens, put at some depth
(0: first, 1: last) of a stretch of one text. The context ends with the key again, and the model is to continue with the
value. None of these tokens occurs elsewhere in the stretch. The control is the same context without the needle: its
loss and exact match are those of chance, on a value that the model cannot know.

With --selectors the influence selectors rank the far tokens by their influence on the first value token, and it is
counted how many of the needle's tokens come first; their placebo is a context with another needle.

Models are those of the command length. Writes needle.json, needle.parquet (every needle), needle.png and
needle_gain.png (a heat map per model and k), needle_lengths.png (the mean over depths by length) and needle_recall.png,
and prints tables. The same command, interrupted, goes on with the model that it was at. Without models
it draws again what is in --out.""",
    )
    add_comparison_options(parser, NAME)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--lengths", type=whole_numbers, default=LENGTHS, help="L (default: 64,128,256,512)")
    group.add_argument(
        "--ks", type=whole_numbers, default=VALUE_TOKENS, help="tokens of a value (default: 1,2,4,8)"
    )
    group.add_argument(
        "--depths",
        type=several(finite_number),
        default=DEPTHS,
        help="from 0 to 1 (default: 0,0.25,0.5,0.75,1)",
    )
    group.add_argument("--samples", type=whole_number, default=100, help="at most (default: %(default)s)")
    group.add_argument("--key-tokens", type=whole_number, default=2, help="of a key (default: %(default)s)")
    group.add_argument(
        "--unseen-keys", action="store_true", help="only keys that training never weaves into its windows"
    )
    group.add_argument("--selectors", type=texts, default=(), help="to ask for the needle (default: none)")
    group.add_argument(
        "--recall-length", type=whole_number, help="tokens of context for them (default: the smallest length)"
    )
    group.add_argument(
        "--recall-samples", type=whole_number, default=40, help="needles (default: %(default)s)"
    )
    run_probe(parser.parse_args(), NAME, measure_needles, load_needles)
