"""The influence map of a text: which earlier tokens every token needs, and by how much (docs/method.md, 2.7 [ours]).

A forward pass over a text without token i predicts every later token, so one pass for each i gives the exact
leave-one-out influence of all pairs. Of a longer text the first N tokens are read, or all in windows that overlap by
half.
Shapes: T tokens of the text, N the most tokens of context, M short context length, W tokens of a window, B targets.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.arguments import finite_number, whole_number
from analysis.contexts import Contexts
from analysis.xray.influences import Influences
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import duration
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.text_files import TextFiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.model.losses import Scorer
    from analysis.texts import Texts

log = logging.getLogger(__name__)

MOST_CONTEXT = 1024
"""N where none is given and the model reads more."""


@dataclass(eq=False, repr=False)
class InfluenceMap(Influences):
    """Losses and influences of every token of a text, as a figure and as a page. In Jupyter it shows itself."""

    def plot(self) -> Figure:
        """The heat map."""
        from analysis.xray.figure import map_figure  # not above: a map is measured without matplotlib

        return map_figure(self)

    def to_html(self, path: str | Path | None = None, *, command: str | None = None) -> str:
        """The page; written to ``path`` where one is given. ``command``: the command line that it is made by."""
        from analysis.xray.page import page

        return page(self, path, command=command)

    def _repr_html_(self) -> str:
        from analysis.xray.page import in_notebook

        return in_notebook(self.to_html())


def influence_map(
    model: Any,
    text: str,
    *,
    n_long: int | None = None,
    n_short: int = 16,
    tau_nats: float = 1.0,
    name: str | None = None,
    progress: bool = True,
    whole: bool = False,
    tokens_per_batch: int | None = None,
    **options: Any,
) -> InfluenceMap:
    """L_long, L_short and exact leave-one-out influence of all pairs of tokens of a text, or of its first N tokens.

    Every token is left out once in each window that reads it, so the time grows with the square of N, and with the
    length of a text that is read as a whole.

    Args:
        model: as in `analysis.measure`: a path, a hub id, or (model, tokenizer).
        text: what is read: a string, or the path of a file.
        n_long: N, the most tokens that are read at once; by default what the model reads, up to 1,024. The map names
            the most tokens that one of its tokens has before it: N - 1 where N tokens are read, N where a longer text
            is read whole.
        n_short: M; nearer tokens are not measured.
        tau_nats: tokens that gain more are marked.
        name: of the text, such as its file, for people to read.
        progress: show on standard error how long it will take, and how far it is.
        whole: read all of a text of more than N tokens, in windows of N that overlap by half; by default a warning says
            that only its first N tokens are read.
        tokens_per_batch: tokens of one forward pass, see `analysis.measure`.
        options: ``tokenizer``, ``prefix``, ``dtype``, ``device`` and ``attn_implementation``, as in `analysis.measure`.

    Raises `UserError`, one line with the remedy, where the text is too short or the model cannot be measured so.
    """
    from analysis.model.losses import LOGITS_PER_BATCH, Scorer
    from analysis.open_model import open_model
    from analysis.open_texts import open_texts

    if n_long is not None:
        n_long = whole_number("n_long", n_long)
    n_short = whole_number("n_short", n_short)
    tau_nats = finite_number("tau_nats", tau_nats)
    if tokens_per_batch is not None:
        tokens_per_batch = whole_number("tokens_per_batch", tokens_per_batch)
    if not isinstance(text, str | Path | list | TextFiles):
        raise UserError(f"text takes one string or the path of a file, not a {type(text).__name__}")
    with open_model(model, **options) as loaded:
        texts: Any = [text]
        if isinstance(text, TextFiles):
            texts = text
        source = open_texts(texts, loaded.reader)
        n_long = n_long or min(loaded.reads or MOST_CONTEXT, MOST_CONTEXT)
        tokens, text_tokens = _tokens_to_read(source, n_long, n_short, whole=whole)
        n_long = context_length(len(tokens), n_long, n_short)
        loaded.check_context(n_long)
        scorer = Scorer(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)
        # a window has many targets: their logits must fit, too
        most = LOGITS_PER_BATCH[loaded.device.type] // loaded.model.vocabulary_size
        scorer.tokens_per_batch = max(1, min(scorer.tokens_per_batch, most))
        frame = _measured(scorer, tokens, windows(len(tokens), n_long), n_short, progress=progress)
        loaded.check_losses(frame["loss_long_nats"].dropna().to_numpy())
    for place in np.flatnonzero(source.is_special(tokens)):
        frame.loc[place, ["loss_long_nats", "loss_short_nats"]] = np.nan
        frame.at[place, "influence"] = np.empty(0, dtype=np.float32)
    of_model = {"model": loaded.name, "model_sha256": loaded.sha256, "text": name, "text_tokens": text_tokens}
    sizes = {"n_long": n_long, "n_short": n_short, "prefix": list(loaded.prefix), "tau_nats": tau_nats}
    about = of_model | sizes | {"dtype": loaded.dtype, "commit": current_commit()}
    return InfluenceMap(frame.assign(piece=loaded.decoder.pieces(tokens.tolist())), about)


def _measured(
    scorer: Scorer, tokens: np.ndarray, parts: list[Window], n_short: int, *, progress: bool
) -> pd.DataFrame:
    """What `measure_map` gives of these windows; ``progress``: how long it will take is said, and how far it is."""
    total = 0
    left_out = 0
    for part in parts:
        length = part.end - part.start
        for start, end in chunks_left_out(length, n_short):
            total += tokens_read(length, start, end)
            left_out += end - start
    if progress:
        seconds = estimated_seconds(scorer, tokens, parts[0], n_short, total)
        _say_estimate(seconds, left_out, len(parts))
    with show_progress("leaving tokens out", total, "tokens read", enabled=progress) as advance:
        return measure_map(scorer, tokens, parts, n_short, advance)


def _tokens_to_read(source: Texts, n_long: int, n_short: int, *, whole: bool) -> tuple[np.ndarray, int]:
    """Tokens of the first document that is long enough, or its first N; and how many the document has.

    Says what is left unread.
    """
    least = n_short + 2  # with fewer there is nothing to measure
    if len(source.lengths) > 1:
        documents = f"{len(source.lengths):,}"
        log.warning(
            "the text holds %s documents, of which the first of %s tokens or more is read", documents, least
        )
    first_long_enough = int(np.argmax(source.lengths >= least))
    tokens = source.tokens(first_long_enough)
    read = tokens
    if not whole:
        read = tokens[: max(n_long, least)]
    if len(read) < len(tokens):
        log.warning(
            "the text has %s tokens, of which only the first %s are read; read all with --whole (in Python whole=True)",
            f"{len(tokens):,}",
            f"{len(read):,}",
        )
    return read, len(tokens)


def _say_estimate(seconds: float, left_out: int, window_count: int) -> None:
    in_windows = ""
    if window_count > 1:
        in_windows = f" in {window_count:,} windows"
    line = f"about {duration(seconds)}: {left_out:,} tokens are left out, one at a time{in_windows}"
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Window:
    """A stretch of the text that is read from position id 0 on."""

    start: int
    """The first token that is read."""
    first: int
    """The first target."""
    end: int
    """One past the last target."""


def windows(length: int, n_long: int) -> list[Window]:
    """The windows in which a text of so many tokens is read; each token but the first is a target in one of them."""
    parts = [Window(0, 1, min(n_long + 1, length))]
    step = (n_long + 1) // 2
    first = parts[0].end
    while first < length:
        end = min(first + step, length)
        parts.append(Window(first + step - 1 - n_long, first, end))
        first = end
    return parts


def chunks_left_out(length: int, n_short: int) -> list[tuple[int, int]]:
    """The tokens of a window of ``length`` that are left out, M after one another: the first, and one past the last."""
    last = length - 1 - n_short
    return [(start, min(start + n_short, last)) for start in range(0, last, n_short)]


def tokens_read(length: int, start: int, end: int) -> int:
    """About how many tokens are read to leave out a chunk: what stands before it is read once for all."""
    return (end - start) * (length - start)


def context_length(length: int, n_long: int, n_short: int) -> int:
    """N, or as many tokens as stand before the last one of a text of ``length`` tokens.

    Raises `UserError` where a text of so many tokens has no far tokens, or N and M do not go together.
    """
    if n_short < 1 or 2 * n_short > n_long:
        raise UserError(
            f"N = {n_long:,} must be at least twice M = {n_short:,}, and M at least 1; change one of them"
        )
    if length < n_short + 2:
        raise UserError(
            f"the text has {length:,} tokens, too few for M = {n_short:,}, a far token and a target; give a longer "
            "text, or lower M"
        )
    return min(length - 1, n_long)


def measure_map(
    scorer: Scorer, tokens: np.ndarray, parts: list[Window], n_short: int, advance: Callable[[int], Any]
) -> pd.DataFrame:
    """The frame of `InfluenceMap.tokens` but for the pieces, of T ``tokens`` (T,) that are read in windows.

    Raises `UserError` where a loss is not finite.
    """
    long = np.full(len(tokens), np.nan)
    short = np.full(len(tokens), np.nan)
    first_far = np.zeros(len(tokens), dtype=np.int64)
    influence = [np.empty(0, dtype=np.float32)] * len(tokens)
    for window in parts:
        targets = slice(window.first, window.end)
        read = tokens[window.start : window.end]
        first = window.first - window.start
        everything = np.arange(0)[None]  # nothing is far, so all before a target is read
        long[targets] = _losses(scorer, read, 0, first, everything)[:, 0]
        short[targets] = _short_losses(scorer, read, first, long[targets], n_short)
        without = _losses_without(scorer, read, first, n_short, advance)
        first_far[targets] = window.start
        for t in range(window.first, window.end):
            far = max(0, t - window.start - n_short)
            changes = without[t - window.first, :far] - long[t]
            influence[t] = changes.astype(np.float32)
    if not all(np.isfinite(values).all() for values in (long[1:], short[1:], *influence)):
        raise UserError("a loss is not finite; measure with dtype fp32, and check the model's weights")
    columns = {"token": tokens, "loss_long_nats": long, "loss_short_nats": short, "first_far": first_far}
    return pd.DataFrame(columns).assign(influence=influence)


def estimated_seconds(scorer: Scorer, tokens: np.ndarray, part: Window, n_short: int, total: int) -> float:
    """How long it takes to read ``total`` tokens, by the time of the first passes of a window."""
    read = tokens[part.start : part.end]
    _, end = chunks_left_out(len(read), n_short)[0]
    end = max(1, min(end, scorer.tokens_per_batch // len(read)))  # one batch
    for _ in range(2):  # the first one warms up
        began = time.monotonic()
        _losses_of_chunk(scorer, read, part.first, n_short, 0, end)
        seconds = time.monotonic() - began
    return seconds * total / tokens_read(len(read), 0, end)


def _losses_without(
    scorer: Scorer, read: np.ndarray, first: int, n_short: int, advance: Callable[[int], Any]
) -> np.ndarray:
    """loss(t | all before t without i) of the targets from ``first`` on, (B, W) nats; NaN where i is no far token."""
    losses = np.full((len(read) - first, len(read)), np.nan)
    for start, end in chunks_left_out(len(read), n_short):
        of_chunk = _losses_of_chunk(scorer, read, first, n_short, start, end)
        losses[len(losses) - len(of_chunk) :, start:end] = of_chunk
        advance(tokens_read(len(read), start, end))
    return losses


def _losses_of_chunk(
    scorer: Scorer, read: np.ndarray, first: int, n_short: int, start: int, end: int
) -> np.ndarray:
    """loss(t | all before t without i) of the last targets of a window, (B, C), for the tokens i from start to end.

    Up to M tokens that follow one another are left out in turn of one block, whose targets, from ``first`` on, begin
    where the first of the tokens becomes a far one.
    """
    kept = np.arange(end - 1)
    left_out = np.arange(start, end)[:, None]
    far = kept + (kept >= left_out)
    first_with_far = max(first, start + n_short + 1)
    return _losses(scorer, read, end, first_with_far, far)


def _losses(scorer: Scorer, read: np.ndarray, n_far: int, first: int, far: np.ndarray) -> np.ndarray:
    """Losses of all tokens of a window from ``first`` on, (B, C), given subsets ``far`` (C, j) of its first ``n_far``
    tokens and all tokens behind these."""
    targets = read[None, first:]
    contexts = Contexts(read[None, :-1], targets, np.arange(targets.size)[None], first - n_far)
    return np.asarray(scorer.losses(contexts, far))


def _short_losses(scorer: Scorer, read: np.ndarray, first: int, long: np.ndarray, n_short: int) -> np.ndarray:
    """L_short of the targets from ``first`` on, (B,): given M tokens at their position ids in the window."""
    place = np.arange(max(first, n_short + 1), len(read))
    # every target is a block by itself, whose far context is the whole window: its short context is one subset
    rows = np.broadcast_to(read[:-1], (len(place), len(read) - 1))
    contexts = Contexts(rows, read[place, None], place[:, None], 0)
    columns = place[:, None, None] + np.arange(-n_short, 0)
    short = scorer.losses(contexts, columns)[:, 0]
    nothing_far = long[: len(long) - len(place)]  # there L_short is L_long
    return np.concatenate([nothing_far, short])
