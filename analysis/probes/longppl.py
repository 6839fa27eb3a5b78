"""LongPPL (Fang et al. 2024, arXiv 2410.23771): perplexity on the few tokens that a long context helps with.

Theirs:

    LSD(t)     = log p(t | long context) - log p(t | short context) = L_short - L_long
    key tokens = those with LSD > alpha and L_long < beta           (both 2 nats by default)
    LongPPL    = exp(mean L_long over the key tokens)

In their paper a second, stronger model may choose the key tokens; here the model that is measured chooses them itself.
Two forms of the short context are measured on the same tokens:

- *published*, as their code has it: windows of M + S tokens begin at 0, S, 2 S, … of the text, and the last S tokens of
  each (fewer in the last window) are measured in it. So a target has M to M + S - 1 tokens of short context, at
  position ids that count from 0 again, and S times fewer windows are read. Their code never calls one of the first M
  tokens a key token, nor one of the S behind them, for there the short context is the long one.
- *exact* [ours]: every target has its own M tokens, at their position ids in the segment, so that LSD is the gain
  L_short - L_long of docs/method.md, 2.1. The ids matter for learned positions only.

The text is a segment of N tokens inside one text [ours; theirs is a whole document]: the long context of a target is
all of the segment before it, at position ids from 0. Only targets with at least M + S tokens before them count, in both
forms and in every figure here [ours]: those are all that their code could call key tokens.

Shapes: n segments, T = N - M - S targets of each. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view

from analysis.segments import sample_segments
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Interval,
    by_clusters,
    count_clusters,
)
from analysis.stats.show import show
from olmo_sparsity.util.arguments import Parser, finite_number, out_folder, seed_number, whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import Advance
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import provenance

FORMS = ("exact", "published")
NAME = "longppl.json"
_MOMENTS = ("x", "y", "xx", "yy", "xy")


@dataclass(frozen=True)
class LongPPL:
    """LongPPL of a model in both forms."""

    settings: dict[str, Any]
    """What was measured, how much of it, and the tokens that the model read for each loss: the cost."""
    numbers: pd.DataFrame
    """name, form (exact, published, or both), value, low, high; NaN where it is undefined.

    ppl of all targets; of each form key_tokens (their number), share (of the targets), longppl, ppl_short,
    mean_lsd_nats; and jaccard of the key tokens, share_of_exact and share_of_published that are key tokens in both,
    lsd_correlation, share_difference and longppl_difference (exact - published, paired)."""
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write `longppl.json`; returns its path."""
        path = Path(folder) / NAME
        numbers = self.numbers.astype(object).where(self.numbers.notna(), None).to_dict("records")
        write_json(path, {"settings": self.settings, "numbers": numbers, "provenance": self.provenance})
        return path

    def __str__(self) -> str:
        """What was found, as tables of text."""
        settings, numbers = self.settings, self.numbers
        n_long, n_short, window = (settings[name] for name in ("n_long", "n_short", "sliding_window"))
        head = (
            f"{settings['model']} on {settings['texts']}: {settings['targets']:,} targets of "
            f"{settings['documents']:,} texts; N {n_long}, M {n_short}, S {window}\nkey tokens: LSD > "
            f"{settings['alpha_nats']:g} nats and L_long < {settings['beta_nats']:g} nats; intervals 95 %, "
            f"{by_clusters(settings)}"
        )
        shares = numbers["name"].str.contains("share|jaccard")
        tables = [
            show(numbers[~shares], across="form", percent=False, digits=2),
            show(numbers[shares], across="form", title="in per cent"),
        ]
        return "\n\n".join([head, *tables])


def measure_longppl(
    model: Any,
    texts: Any,
    *,
    n_long: int,
    n_short: int,
    sliding_window: int | None = None,
    segments: int = 256,
    max_texts: int | None = None,
    alpha_nats: float = 2.0,
    beta_nats: float = 2.0,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    split: str = "heldout",
    tokens_per_batch: int | None = None,
    memory_limit_gb: float | None = None,
    progress: bool = True,
    **opening: Any,
) -> LongPPL:
    """LongPPL of a model on sampled segments of texts, in both forms.

    Args:
        model: as for `analysis.model.loading.open_model`, which ``opening`` goes to.
        texts: as for `analysis.contexts.open_texts`, with ``split`` of a prepared corpus.
        n_long: N, tokens of a segment.
        n_short: M.
        sliding_window: S; by default a quarter of M: the authors' code has M = 4096 and S = 1024.
        segments: to sample, at most.
        max_texts: that they are drawn from, at most.
        alpha_nats: L_short - L_long of a key token is above it.
        beta_nats: L_long of a key token is below it.
        resamples: of the bootstrap.
        seed: of the sample and the bootstrap.
        tokens_per_batch: tokens of one forward pass.
        memory_limit_gb: what a forward pass may take, where ``tokens_per_batch`` is not given.
        progress: show it on standard error.

    Raises `UserError` where model and texts do not go together, or no text has N tokens.
    """
    from analysis.contexts import open_texts
    from analysis.model.loading import open_model
    from analysis.model.memory import GB, tokens_that_fit
    from analysis.model.token_losses import TokenLosses

    window = max(1, n_short // 4) if sliding_window is None else sliding_window
    if n_long <= n_short + window:
        raise UserError(
            f"N = {n_long} leaves no target whose long context is longer than M + S = {n_short} + {window} tokens; "
            "raise N, or lower M or S"
        )
    loaded = open_model(model, **opening)
    try:
        loaded.check_context(n_long)
        source = open_texts(texts, loaded.encode, split=split)
        loaded.check_texts(source)
        at = sample_segments(source, segments, length=n_long, seed=seed, max_texts=max_texts)
        if tokens_per_batch is None and memory_limit_gb is not None:
            limit = memory_limit_gb * GB
            tokens_per_batch = tokens_that_fit(loaded.model, loaded.device, n_long, limit, n_targets=n_long)
        token_losses = TokenLosses(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)
        losses = target_losses(
            token_losses, at.read(source), n_short=n_short, window=window, progress=progress
        )
        described = loaded.describe()
    finally:
        loaded.give_back()
    settings = {
        **described,
        "device": str(token_losses.device),
        "texts": source.name,
        "texts_sha256": source.sha256,
        "split": split,
        "n_long": n_long,
        "n_short": n_short,
        "sliding_window": window,
        "alpha_nats": alpha_nats,
        "beta_nats": beta_nats,
        "resamples": resamples,
        "seed": seed,
        "segments": len(at),
        "texts_too_short": at.texts_too_short,
        "targets": losses.long.size,
        **count_clusters(at.text, at.group),
        "tokens_read": losses.tokens_read,
    }
    numbers = longppl_numbers(
        losses,
        at.text,
        at.group,
        alpha_nats=alpha_nats,
        beta_nats=beta_nats,
        resamples=resamples,
        seed=seed,
    )
    return LongPPL(settings, numbers, provenance())


# --- losses ---


@dataclass(frozen=True)
class TargetLosses:
    """Losses in nats of the same targets given the long context and both short ones; every array is (n, T) float64."""

    long: np.ndarray
    short: dict[str, np.ndarray]
    """By form."""
    tokens_read: dict[str, int]
    """Tokens that the model read for the long contexts ("long") and for the short ones of each form: the cost."""


def target_losses(
    token_losses: Any, tokens: np.ndarray, *, n_short: int, window: int, progress: bool = True
) -> TargetLosses:
    """L_long and both L_short of the last T tokens of every segment.

    ``token_losses``: `analysis.model.losses.TokenLosses`. ``tokens``: (n, N) ids. ``window``: S.
    """
    count, n_long = tokens.shape
    scored = n_long - n_short - window
    starts = range(window, n_long - n_short, window)  # the first window, at 0, has no target that counts
    read = {
        "long": count * (n_long - 1),
        "exact": count * scored * n_short,
        # no window reads its last token, which is measured only
        "published": count * sum(min(n_short + window, n_long - start) - 1 for start in starts),
    }
    with show_progress("long and short losses", sum(read.values()), "tokens", enabled=progress) as advance:
        long = np.empty((count, scored))
        for rows in token_losses.batches(count, n_long - 1, scored):
            long[rows] = token_losses.last_losses(tokens[rows], scored)
            advance(len(rows) * (n_long - 1))
        exact = _exact_losses(token_losses, tokens, n_short, window, advance)
        published = _published_losses(token_losses, tokens, n_short, window, advance)
    return TargetLosses(long, {"exact": exact, "published": published}, read)


def _exact_losses(
    token_losses: Any, tokens: np.ndarray, n_short: int, window: int, advance: Advance
) -> np.ndarray:
    """L_short where every target has its own M tokens, at their position ids in the segment; (n, T)."""
    # The first target stands at M + S, so its M tokens begin at S; one row is those and the target.
    views = sliding_window_view(tokens, n_short + 1, axis=1)[:, window:]
    losses = np.empty(views.shape[:2])
    for number in token_losses.batches(losses.size, n_short, 1):
        segment, place = np.divmod(number, losses.shape[1])
        of_batch = token_losses.last_losses(views[segment, place], 1, first_ids=place + window)
        losses[segment, place] = of_batch[:, 0]
        advance(of_batch.size * n_short)
    return losses


def _published_losses(
    token_losses: Any, tokens: np.ndarray, n_short: int, window: int, advance: Advance
) -> np.ndarray:
    """L_short in windows of M + S tokens, S apart, whose last S tokens are targets; (n, T)."""
    count, n_long = tokens.shape
    losses = np.empty((count, n_long - n_short - window))
    whole = sliding_window_view(tokens, n_short + window, axis=1)[:, window::window]
    for number in token_losses.batches(count * whole.shape[1], n_short + window - 1, window):
        segment, place = np.divmod(number, whole.shape[1])
        of_batch = token_losses.last_losses(whole[segment, place], window)
        losses[segment[:, None], place[:, None] * window + np.arange(window)] = of_batch
        advance(len(number) * (n_short + window - 1))
    if rest := losses.shape[1] % window:
        last = tokens[:, n_long - n_short - rest :]
        for rows in token_losses.batches(count, n_short + rest - 1, rest):
            losses[rows, -rest:] = token_losses.last_losses(last[rows], rest)
            advance(len(rows) * (n_short + rest - 1))
    return losses


# --- numbers ---


def key_tokens(long: np.ndarray, short: np.ndarray, alpha_nats: float, beta_nats: float) -> np.ndarray:
    """Whether each token is a key token, of the shape of its losses in nats (Fang et al. 2024)."""
    return (short - long > alpha_nats) & (long < beta_nats)


def longppl_numbers(
    losses: TargetLosses,
    text: np.ndarray,
    group: np.ndarray | None = None,
    *,
    alpha_nats: float = 2.0,
    beta_nats: float = 2.0,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """The frame of `LongPPL.numbers`, with 95 % cluster-bootstrap intervals.

    ``text`` (n,) is each segment's, and ``group`` (n,) the group of it.
    """
    columns = _columns(losses, alpha_nats, beta_nats)
    bootstrap = ClusterBootstrap(text, groups=group, resamples=resamples, seed=seed)
    rows = [
        {"name": name, "form": form, **vars(interval)}
        for name, form, interval in _intervals(columns, bootstrap)
    ]
    return pd.DataFrame(rows)


def _intervals(
    columns: dict[str, np.ndarray], bootstrap: ClusterBootstrap
) -> Iterator[tuple[str, str, Interval]]:
    """Name, form and interval of every number, from the `_columns`."""

    def mean(above: str, below: str = "one") -> np.ndarray:
        return bootstrap.ratio(columns[above], columns[below])

    share = {form: mean(f"key {form}") for form in FORMS}
    longppl = {form: np.exp(mean(f"long of key {form}", f"key {form}")) for form in FORMS}
    yield "ppl", "both", bootstrap.interval(np.exp(mean("long")))
    for form in FORMS:
        yield "key_tokens", form, bootstrap.interval(bootstrap.sums(columns[f"key {form}"]))
        yield "share", form, bootstrap.share(share[form], columns["one"].sum())
        yield "longppl", form, bootstrap.interval(longppl[form])
        yield "ppl_short", form, bootstrap.interval(np.exp(mean(f"short {form}")))
        yield "mean_lsd_nats", form, bootstrap.ratio_interval(columns[f"lsd {form}"], columns["one"])
    yield "jaccard", "both", bootstrap.ratio_interval(columns["both"], columns["either"])
    for form in FORMS:
        in_both = mean("both", f"key {form}")
        yield f"share_of_{form}", "both", bootstrap.share(in_both, columns[f"key {form}"].sum())
    correlation = _correlation(*(mean(name) for name in _MOMENTS))
    yield "lsd_correlation", "both", bootstrap.interval(correlation)
    yield "share_difference", "both", bootstrap.interval(share["exact"] - share["published"])
    yield "longppl_difference", "both", bootstrap.interval(longppl["exact"] - longppl["published"])


def _columns(losses: TargetLosses, alpha_nats: float, beta_nats: float) -> dict[str, np.ndarray]:
    """Sums over the targets of each segment, which share its text; each (n,)."""
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
    x, y = (lsd[form] - lsd[form].mean() for form in FORMS)  # centred, so that little is lost to rounding
    columns |= dict(zip(_MOMENTS, (x, y, x * x, y * y, x * y), strict=True))
    return {name: column.sum(axis=1, dtype=np.float64) for name, column in columns.items()}


def _correlation(
    mean_x: np.ndarray, mean_y: np.ndarray, square_x: np.ndarray, square_y: np.ndarray, product: np.ndarray
) -> np.ndarray:
    """Draws of Pearson's correlation from those of mean values, squares and product; NaN where one is constant."""
    variance = (square_x - mean_x**2) * (square_y - mean_y**2)
    varies = variance > 0
    root = np.sqrt(np.where(varies, variance, 1.0))
    return np.where(varies, (product - mean_x * mean_y) / root, np.nan)


# --- the command ---


def main() -> None:
    """Measure, write and print."""
    from analysis.options import MODEL, add_model_options, add_text_options, texts_of
    from olmo_sparsity.cli import show_log

    parser = Parser(
        prog="olmo-sparsity longppl",
        description=f"""LongPPL: perplexity on the key tokens, those that a long context helps with (Fang et al. 2024).

examples:
  olmo-sparsity longppl runs/books --out runs/books/longppl --n-long 256 --n-short 32
  olmo-sparsity longppl HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/smol --n-long 1024 --n-short 128

A token is a key token where the long context makes it likelier by more than alpha nats than the short one does, and
its loss given the long context is below beta nats. LongPPL is the perplexity of the key tokens given the long context.
It is measured in two forms on the same tokens: exact (every token has its own M tokens of short context) and as
published (windows of M + S tokens, S apart, whose last S tokens are measured). Writes {NAME}: key tokens, LongPPL and
plain perplexity, and how the forms agree, with 95 % intervals over groups and texts; prints them.""",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help=f"folder for {NAME}")
    add_text_options(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--n-long", type=whole_number, required=True, help="N, tokens of a segment")
    group.add_argument("--n-short", type=whole_number, required=True, help="M, tokens of the short context")
    group.add_argument("--sliding-window", type=whole_number, metavar="S", help="default: M / 4")
    group.add_argument("--segments", type=whole_number, default=256, help="at most (default: %(default)s)")
    group.add_argument("--max-texts", type=whole_number, help="that they are drawn from (default: all)")
    group.add_argument(
        "--alpha", dest="alpha_nats", type=finite_number, default=2.0, help="nats (default: 2)"
    )
    group.add_argument("--beta", dest="beta_nats", type=finite_number, default=2.0, help="nats (default: 2)")
    group.add_argument("--seed", type=seed_number, default=0, help="of all that is drawn (default: 0)")
    add_model_options(parser)
    given = parser.parse_args()
    show_log("analysis")
    options = {
        name: value for name, value in vars(given).items() if name not in ("model", "text", "corpus", "out")
    }
    measured = measure_longppl(given.model, texts_of(given, given.model), **options)
    print(f"{measured}\n\nwrote {measured.save(given.out)}")
