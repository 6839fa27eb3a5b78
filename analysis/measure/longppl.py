"""LongPPL (Fang et al. 2024, arXiv 2410.23771): perplexity on the few tokens that a long context helps with.

Theirs:

    LSD(t)     = log p(t | long context) - log p(t | short context) = L_short - L_long
    key tokens = those with LSD > alpha and L_long < beta           (both 2 nats by default)
    LongPPL    = exp(mean L_long over the key tokens)

In their paper a second, stronger model may choose the key tokens; here the checkpoint that is measured chooses them
itself. Two forms of the short context are measured on the same tokens:

- *published*, as their code has it: windows of M + S tokens begin at 0, S, 2 S, … of the text, and the last S tokens of
  each (fewer in the last window) are measured in it. So a target has M to M + S - 1 tokens of short context, at
  position ids that count from 0 again, and S times fewer windows are read. Their code never calls one of the first M
  tokens a key token, nor one of the S behind them, for there the short context is the long one.
- *exact* [ours]: every target has its own M tokens, at their position ids in the segment, so that LSD is the gain
  L_short - L_long of docs/method.md, 2.1. The ids matter for learned positions only.

The text is a segment of N tokens inside one document [ours; theirs is a whole document]: the long context of a target
is all of the segment before it, at position ids from 0. Only targets with at least M + S tokens before them count, in
both forms and in every figure here [ours]: those are all that their code could call key tokens.

Shapes: n segments, T = N - M - S targets of each. Losses are in nats per token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from analysis.measure.measurement import load_losses, open_text, write_result
from analysis.measure.settings import LongPPLSettings
from analysis.model.token_losses import TokenLosses
from analysis.records.results import LONGPPL
from analysis.stats.bootstrap import interval_words
from analysis.stats.longppl import TargetLosses, summarize_longppl
from analysis.text.segments import sample_segments
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance, progress


def measure_longppl(settings: LongPPLSettings) -> Path:
    """Measure and write `longppl.json`; returns its path. Raises `UserError` for bad input."""
    n_long, n_short, window = settings.n_long, settings.n_short, settings.window
    _check_lengths(n_long, n_short, window)
    text = open_text(settings, settings.checkpoint)
    segments = sample_segments(
        text.tokens,
        settings.segments,
        length=n_long,
        seed=settings.seed,
        option="--n-long",
        documents=settings.documents,
    )
    described, engine = load_losses(
        settings, text, settings.checkpoint, lambda loaded: loaded.check_context(n_long)
    )
    losses = score_targets(engine, segments.read(text.tokens), n_short=n_short, window=window)
    found = summarize_longppl(
        losses,
        segments.document,
        segments.group,
        alpha_nats=settings.alpha_nats,
        beta_nats=settings.beta_nats,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    measured = {
        "sliding_window": window,
        "segments_measured": len(segments),
        "documents_too_short": segments.documents_too_short,
        "interval": interval_words(segments.group),
    }
    return write_result(LONGPPL, settings, text, found={**described, **found}, measured=measured)


def _check_lengths(n_long: int, n_short: int, window: int) -> None:
    if n_long <= n_short + window:
        raise UserError(
            f"N = {n_long} leaves no target whose long context is longer than M + S = {n_short} + {window} tokens; "
            "raise --n-long, or lower --n-short or --sliding-window"
        )


def score_targets(engine: TokenLosses, tokens: np.ndarray, *, n_short: int, window: int) -> TargetLosses:
    """L_long and both L_short of the last T tokens of every segment; ``tokens`` is (n, N), ``window`` is S."""
    count, n_long = tokens.shape
    scored = n_long - n_short - window
    starts = range(window, n_long - n_short, window)  # the first window, at 0, has no target that counts
    read = {
        "long": count * (n_long - 1),
        "exact": count * scored * n_short,
        # no window reads its last token, which is measured only
        "published": count * sum(min(n_short + window, n_long - start) - 1 for start in starts),
    }
    with progress("long and short losses", sum(read.values()), "tokens") as advance:
        long = np.empty((count, scored))
        for rows in engine.batches(count, n_long - 1, scored):
            long[rows] = engine.last_losses(tokens[rows], scored)
            advance(len(rows) * (n_long - 1))
        exact = _exact_losses(engine, tokens, n_short, window, advance)
        published = _published_losses(engine, tokens, n_short, window, advance)
    return TargetLosses(long, {"exact": exact, "published": published}, read)


def _exact_losses(
    engine: TokenLosses, tokens: np.ndarray, n_short: int, window: int, advance: Advance
) -> np.ndarray:
    """L_short where every target has its own M tokens, at their position ids in the segment; (n, T)."""
    # The first target stands at M + S, so its M tokens begin at S; one row is those and the target.
    views = sliding_window_view(tokens, n_short + 1, axis=1)[:, window:]
    losses = np.empty(views.shape[:2])
    for number in engine.batches(losses.size, n_short, 1):
        segment, place = np.divmod(number, losses.shape[1])
        found = engine.last_losses(views[segment, place], 1, first_ids=place + window)
        losses[segment, place] = found[:, 0]
        advance(found.size * n_short)
    return losses


def _published_losses(
    engine: TokenLosses, tokens: np.ndarray, n_short: int, window: int, advance: Advance
) -> np.ndarray:
    """L_short in windows of M + S tokens, S apart, whose last S tokens are targets; (n, T)."""
    count, n_long = tokens.shape
    losses = np.empty((count, n_long - n_short - window))
    whole = sliding_window_view(tokens, n_short + window, axis=1)[:, window::window]
    for number in engine.batches(count * whole.shape[1], n_short + window - 1, window):
        segment, place = np.divmod(number, whole.shape[1])
        found = engine.last_losses(whole[segment, place], window)
        losses[segment[:, None], place[:, None] * window + np.arange(window)] = found
        advance(len(number) * (n_short + window - 1))
    if rest := losses.shape[1] % window:
        last = tokens[:, n_long - n_short - rest :]
        for rows in engine.batches(count, n_short + rest - 1, rest):
            losses[rows, -rest:] = engine.last_losses(last[rows], rest)
            advance(len(rows) * (n_short + rest - 1))
    return losses
