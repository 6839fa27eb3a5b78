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
- *exact* [ours]: every target has its own M tokens, at their position ids in the segment, so that LSD is -gap of METHOD
  2.1. The ids matter for learned positions only.

The text is a segment of N tokens inside one document [ours; theirs is a whole document]: the long context of a target
is all of the segment before it, at position ids from 0. Only targets with at least M + S tokens before them count, in
both forms and in every figure here [ours]: those are all that their code could call key tokens.

Shapes: n segments, T = N - M - S targets of each, V vocabulary. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from rich.console import Group
from rich.table import Table
from rich.text import Text

from analysis.measure.settings import MeasurementSettings
from analysis.model.load import find_model, load_for_analysis
from analysis.model.token_losses import TokenLosses
from analysis.records.results import LONGPPL
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Interval,
    Statistic,
    difference,
    ratio_of_sums,
)
from analysis.stats.tables import interval_cell
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.data.tokens import MANIFEST_NAME
from olmo_sparsity.data.verify import Verified
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit, library_versions

FORMS = ("exact", "published")
WINDOW_SHARE = 4
"""Their code has M = 4096 and S = 1024 by default; where S is not given, it is M divided by this."""

Json = dict[str, Any]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class LongPPLSettings(MeasurementSettings):
    """What is measured on what."""

    checkpoint: str
    """Checkpoint folder, a run (then its last), or a directory of a causal language model of transformers."""
    n_long: int
    """N, tokens of a segment."""
    n_short: int
    """M, tokens of the short context."""
    sliding_window: int | None = None
    """S, targets that share a short context in the published form; None: a quarter of M."""
    segments: int = 256
    """Segments to sample."""
    documents: int | None = None
    """From how many documents at most; None: from all that are long enough."""
    alpha_nats: float = 2.0
    """Key tokens have an LSD above it."""
    beta_nats: float = 2.0
    """Key tokens have L_long below it."""

    @property
    def window(self) -> int:
        """S."""
        return max(1, self.n_short // WINDOW_SHARE) if self.sliding_window is None else self.sliding_window


@dataclass(frozen=True)
class TargetLosses:
    """Losses in nats of the same targets given the long context and both short ones; every array is (n, T) float64."""

    long: np.ndarray
    short: dict[str, np.ndarray]
    """By form."""
    tokens_read: dict[str, int]
    """Tokens that the model read for the long contexts ("long") and for the short ones of each form: the cost."""


def measure_longppl(settings: LongPPLSettings) -> Path:
    """Measure and write `longppl.json`; returns its path. Raises `UserError` for bad input."""
    n_long, n_short, window = settings.n_long, settings.n_short, settings.window
    _check_lengths(n_long, n_short, window)
    folder = find_model(settings.checkpoint)
    verified = Verified(settings.out)
    tokens = verified.open_split(settings.corpus, settings.split)
    segments = sample_segments(
        tokens,
        settings.segments,
        length=n_long,
        seed=settings.seed,
        option="--n-long",
        documents=settings.documents,
    )
    loaded = load_for_analysis(folder)  # the slowest check comes last
    loaded.check_corpus(settings.corpus)
    loaded.check_context(n_long)
    engine = TokenLosses(
        loaded, device=settings.device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )
    losses = score_targets(engine, segments.read(tokens), n_short=n_short, window=window)
    found = {
        "checkpoint": str(loaded.checkpoint),
        "checkpoint_sha256": loaded.weights_sha256,
        "family": loaded.family,
        "training_seed": loaded.training_seed,
        **summarize_longppl(
            losses,
            segments.document,
            alpha_nats=settings.alpha_nats,
            beta_nats=settings.beta_nats,
            resamples=settings.resamples,
            seed=settings.seed,
        ),
        "settings": _describe(settings, segments, str(engine.device)),
        "provenance": {"commit": current_commit(), "versions": library_versions()},
    }
    path = Path(settings.out) / LONGPPL.name
    LONGPPL.save(path, found)
    verified.save()
    return path


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


def key_tokens(long: np.ndarray, short: np.ndarray, alpha_nats: float, beta_nats: float) -> np.ndarray:
    """Whether each token is a key token, of the shape of its losses in nats (Fang et al. 2024)."""
    return (short - long > alpha_nats) & (long < beta_nats)


def summarize_longppl(
    losses: TargetLosses,
    document: np.ndarray,
    *,
    alpha_nats: float = 2.0,
    beta_nats: float = 2.0,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Json:
    """Both forms and their agreement, with 95 % cluster-bootstrap intervals; ``document`` (n,) is each segment's.

    Differences are exact minus published, on the same tokens, hence paired. LongPPL is None without key tokens.
    """
    sums = _Sums(losses, document, alpha_nats, beta_nats, resamples, seed)
    share = {form: sums.ratio(f"key {form}", "one") for form in FORMS}
    longppl = {form: _exp(sums.ratio(f"long of key {form}", f"key {form}")) for form in FORMS}
    both = {form: sums.ratio("both", f"key {form}") for form in FORMS}
    correlation = _correlation(*(sums.column[name] for name in ("one", *sums.moments)))
    forms = {
        form: {
            "key_tokens": sums.interval(sums.total(f"key {form}")),
            "share": sums.interval(share[form]),
            "longppl": sums.interval(longppl[form]),
            "ppl_short": sums.interval(_exp(sums.ratio(f"short {form}", "one"))),
            "mean_lsd_nats": sums.interval(sums.ratio(f"lsd {form}", "one")),
            "tokens_read": losses.tokens_read[form],
        }
        for form in FORMS
    }
    return {
        "targets": losses.long.size,
        "documents": len(np.unique(document)),
        "ppl": sums.interval(_exp(sums.ratio("long", "one"))),
        "tokens_read_long": losses.tokens_read["long"],
        "forms": forms,
        "agreement": {
            "jaccard": sums.interval(sums.ratio("both", "either")),
            "share_of_exact_found_by_published": sums.interval(both["exact"]),
            "share_of_published_confirmed_by_exact": sums.interval(both["published"]),
            "lsd_correlation": sums.interval(correlation),
            "share_difference": sums.interval(difference(share["exact"], share["published"])),
            "longppl_difference": sums.interval(difference(longppl["exact"], longppl["published"])),
        },
    }


class _Sums:
    """Bootstrapped sums over targets of named columns."""

    def __init__(
        self,
        losses: TargetLosses,
        document: np.ndarray,
        alpha_nats: float,
        beta_nats: float,
        resamples: int,
        seed: int,
    ):
        long = losses.long
        key = {form: key_tokens(long, losses.short[form], alpha_nats, beta_nats) for form in FORMS}
        lsd = {form: losses.short[form] - long for form in FORMS}
        columns: dict[str, np.ndarray] = {"one": np.ones_like(long), "long": long}
        for form in FORMS:
            columns[f"short {form}"] = losses.short[form]
            columns[f"key {form}"] = key[form]
            columns[f"long of key {form}"] = long * key[form]
            columns[f"lsd {form}"] = lsd[form]
        columns["both"] = key["exact"] & key["published"]
        columns["either"] = key["exact"] | key["published"]
        self.moments = ("x", "y", "xx", "yy", "xy")  # of the LSDs, centred so that little is lost to rounding
        x, y = (lsd[form] - lsd[form].mean() for form in FORMS)
        columns |= dict(zip(self.moments, (x, y, x * x, y * y, x * y), strict=True))
        self.column = {name: number for number, name in enumerate(columns)}
        # the targets of a segment share its document
        matrix = np.stack([each.sum(axis=1, dtype=np.float64) for each in columns.values()], axis=1)
        self.bootstrap = ClusterBootstrap(matrix, document, resamples=resamples, seed=seed)

    def ratio(self, numerator: str, denominator: str) -> Statistic:
        return ratio_of_sums(self.column[numerator], self.column[denominator])

    def total(self, name: str) -> Statistic:
        column = self.column[name]
        return lambda sums: sums[..., column]

    def interval(self, statistic: Statistic) -> Json:
        found: Interval = self.bootstrap.interval(statistic)
        return found.as_dict()


def _exp(statistic: Statistic) -> Statistic:
    """From a mean loss to a perplexity."""
    return lambda sums: np.exp(statistic(sums))


def _correlation(one: int, x: int, y: int, xx: int, yy: int, xy: int) -> Statistic:
    """Pearson correlation from columns of ones, values, squares and products; NaN where one of both is constant."""

    def statistic(sums: np.ndarray) -> np.ndarray:
        mean_x, mean_y, square_x, square_y, product = (
            sums[..., column] / sums[..., one] for column in (x, y, xx, yy, xy)
        )
        variance = (square_x - mean_x**2) * (square_y - mean_y**2)
        varies = variance > 0
        root = np.sqrt(np.where(varies, variance, 1.0))
        return np.where(varies, (product - mean_x * mean_y) / root, np.nan)

    return statistic


def render_longppl(found: Json) -> Group:
    """Both forms side by side, and how they agree, for a terminal."""
    settings, agreement = found["settings"], found["agreement"]
    head = Text.assemble(
        (f"{found['targets']:,} targets", "bold"),
        f" of {found['documents']:,} documents; N {settings['n_long']}, M {settings['n_short']}, "
        f"S {settings['sliding_window']}; PPL of all of them {interval_cell(found['ppl'])}\n"
        f"key tokens: LSD > {settings['alpha_nats']:g} nats and L_long < {settings['beta_nats']:g} nats",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for form in FORMS:
        table.add_column(form, justify="right")
    rows: list[tuple[str, str, Json]] = [
        ("key tokens", "key_tokens", {"digits": 0}),
        ("share of the targets [%]", "share", {"scale": 100}),
        ("LongPPL", "longppl", {"digits": 3}),
        ("PPL with the short context", "ppl_short", {}),
        ("mean LSD [nats]", "mean_lsd_nats", {"digits": 3}),
    ]
    for title, name, looks in rows:
        table.add_row(Text(title), *(interval_cell(found["forms"][form][name], **looks) for form in FORMS))
    table.add_row(
        "tokens read", *(f"{found['forms'][form]['tokens_read']:,}" for form in FORMS), end_section=True
    )
    shares = ("jaccard", "share_of_exact_found_by_published", "share_of_published_confirmed_by_exact")
    jaccard, of_exact, of_published = (interval_cell(agreement[name], scale=100, digits=0) for name in shares)
    lines = Text.assemble(
        f"key tokens of both forms: {jaccard} % of those of either (Jaccard), {of_exact} % of exact, "
        f"{of_published} % of published\n"
        f"correlation of LSD {interval_cell(agreement['lsd_correlation'], digits=3)}; LongPPL exact - published "
        f"{interval_cell(agreement['longppl_difference'], digits=3)}\n",
        (f"[95 % interval]: {settings['resamples']:,} resamples of documents", "dim"),
    )
    return Group(head, Text(), table, Text(), lines)


def _check_lengths(n_long: int, n_short: int, window: int) -> None:
    if n_short < 1 or window < 1:
        raise UserError(
            f"M = {n_short} and S = {window} must be at least 1; mend --n-short or --sliding-window"
        )
    if n_long <= n_short + window:
        raise UserError(
            f"N = {n_long} leaves no target whose long context is longer than M + S = {n_short} + {window} tokens; "
            "raise --n-long, or lower --n-short or --sliding-window"
        )


def _describe(settings: LongPPLSettings, segments: Segments, device: str) -> Json:
    kept = asdict(settings)
    for name in ("checkpoint", "out", "tokens_per_batch"):  # told elsewhere, or without effect
        del kept[name]
    return {
        **kept,
        "sliding_window": settings.window,
        "corpus_manifest_sha256": sha256_file(Path(settings.corpus) / MANIFEST_NAME),
        "device": device,
        "segments_measured": len(segments),
        "documents_too_short": segments.documents_too_short,
        "interval": "95 % percentile, cluster bootstrap by document",
    }
