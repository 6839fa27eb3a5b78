"""LongPPL: perplexity on the key tokens, those that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

examples:
  olmo-sparsity longppl runs/books --out runs/books/longppl --n-long 256 --n-short 32
  olmo-sparsity longppl HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/smol --n-long 1024 --n-short 128

Theirs:

    LSD(t)     = log p(t | long context) - log p(t | short context) = L_short - L_long
    key tokens = those with LSD > alpha and L_long < beta           (both 2 nats by default)
    LongPPL    = exp(mean L_long over the key tokens)

A second, stronger model may choose the key tokens in their paper; here the model that is measured does.
Two forms of the short context are measured on the same tokens:

- published, as their code has it: windows of M + S tokens begin at 0, S, 2 S, … of the text, and the last S tokens of
  each (fewer in the last window) are measured in it. So a target has M to M + S - 1 tokens of short context, at
  position ids that count from 0 again, and S times fewer windows are read. Their code never calls one of the first M
  tokens a key token, nor one of the S behind them, for there the short context is the long one.
- exact [ours]: every target has its own M tokens, at their position ids in the segment, so that LSD is the gain
  L_short - L_long of docs/method.md, 2.1. The ids matter for learned positions only.

The text is a segment of N tokens inside one text [ours; theirs is a whole document]: the long context of a target is
all of the segment before it, at position ids from 0. Only targets with at least M + S tokens before them count, in both
forms and in every figure here [ours]: those are all that their code could call key tokens.

Writes longppl.json (key tokens, LongPPL and plain perplexity, and how the forms agree, with 95 % intervals over groups
and texts) and longppl.parquet (sums per segment), and prints the numbers. Of more models than one each is measured by
itself.

Shapes: n segments, T = N - M - S targets of each. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view

from analysis.probes.probe import (
    Frames,
    Probe,
    ProbeResult,
    Sample,
    bootstrap_of,
    names_of_trainings,
    run_probe,
)
from analysis.segments import sample_segments
from analysis.stats.bootstrap import ClusterBootstrap, Interval
from analysis.stats.show import show
from olmo_sparsity.util.arguments import argument
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance
from olmo_sparsity.util.progress import progress as show_progress

if TYPE_CHECKING:
    from analysis.contexts import Texts
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

FORMS = ("exact", "published")


@dataclass(frozen=True, kw_only=True)
class LongPPL(ProbeResult):
    """LongPPL of models in both forms; ``rows`` has sums over the targets of each segment, see `segment_sums`."""

    NAME, KIND = "longppl", "olmo-sparsity LongPPL"

    numbers: pd.DataFrame
    """model (its label), name, form (exact, published, or both), value, low, high; NaN where it is undefined.

    ppl of all targets; of each form key_tokens (their number), share (of the targets), longppl, ppl_short,
    mean_lsd_nats; and jaccard of the key tokens, share_of_exact and share_of_published that are key tokens in both,
    lsd_correlation, share_difference and longppl_difference (exact - published, paired)."""

    def __str__(self) -> str:
        """The numbers as tables of text."""
        settings, shares = self.settings, self.numbers["name"].str.contains("share|jaccard")
        head = (
            f"{settings['targets']:,} targets of {settings['documents']:,} texts ({settings['texts']}); N "
            f"{settings['n_long']}, M {settings['n_short']}, S {settings['sliding_window']}\nkey tokens: LSD > "
            f"{settings['alpha_nats']:g} nats and L_long < {settings['beta_nats']:g} nats; intervals 95 %, "
            f"{self.intervals_by()}"
        )
        tables = [
            show(self.numbers[~shares], across="form", percent=False, digits=2),
            show(self.numbers[shares], across="form", title="in per cent"),
        ]
        return "\n\n".join([head, *tables])


@dataclass(kw_only=True)
class LongPPLProbe(Probe):
    """LongPPL of models on sampled segments of texts, in both forms."""

    RESULT = LongPPL

    n_long: int = field(default=1024, metadata=argument("N, tokens of a segment"))
    n_short: int = field(default=128, metadata=argument("M, tokens of the short context"))
    sliding_window: int = field(
        default=0, metadata=argument("S (default: M / 4, as the authors' code has M = 4096 and S = 1024)")
    )
    segments: int = field(default=256, metadata=argument("to sample, at most"))
    alpha_nats: float = field(
        default=2.0, metadata=argument("LSD of a key token is above it, in nats", name="alpha")
    )
    beta_nats: float = field(
        default=2.0, metadata=argument("L_long of a key token is below it, in nats", name="beta")
    )

    def __post_init__(self) -> None:
        self.sliding_window = window = self.sliding_window or max(1, self.n_short // 4)
        if self.n_long <= self.n_short + window:
            raise UserError(
                f"N = {self.n_long} leaves no target whose long context is longer than M + S = {self.n_short} + "
                f"{window} tokens; raise N, or lower M or S"
            )

    def check(self, loaded: LoadedModel) -> None:
        """See `Probe`, as for all methods below."""
        loaded.check_context(self.n_long)

    def draw_sample(self, source: Texts) -> Sample:
        segments = sample_segments(source, self.segments, length=self.n_long, seed=self.seed)
        n, scored = len(segments), self.n_long - self.n_short - self.sliding_window
        return Sample(segments, segments.read(source), {"segments_measured": n, "targets": n * scored})

    def measure_model(self, token_losses: TokenLosses, sample: Sample, label: str, progress: bool) -> Frames:
        what, lengths = f"long and short losses, {label}", (self.n_short, self.sliding_window)
        with show_progress(what, 3 * sample.counts["targets"], "losses", enabled=progress) as advance:
            losses = target_losses(token_losses, sample.tokens, *lengths, advance)
        sums = segment_sums(losses, self.alpha_nats, self.beta_nats)
        return {"rows": pd.DataFrame(sample.places() | sums)}

    def numbers(self, frames: Frames, labels: Sequence[str]) -> dict[str, Any]:
        names, how = names_of_trainings(labels), {"resamples": self.resamples, "seed": self.seed}
        of_models = {
            names[number]: longppl_numbers(rows, **how) for number, rows in frames["rows"].groupby("number")
        }
        return {"numbers": pd.concat(of_models, names=["model"]).reset_index("model").reset_index(drop=True)}


# --- losses ---


def target_losses(
    token_losses: TokenLosses,
    tokens: np.ndarray,
    n_short: int,
    window: int,
    advance: Advance = lambda count: None,
) -> dict[str, np.ndarray]:
    """Losses in nats of the last T tokens of every segment: long, and of each form short, all (n, T) float64.

    ``tokens``: (n, N) ids; ``window``: S; ``advance`` is called with how many losses are done.
    """
    count, n_long = tokens.shape
    scored = n_long - n_short - window
    losses = {name: np.empty((count, scored)) for name in ("long", *FORMS)}

    def measure(
        name: str, rows: np.ndarray, columns: np.ndarray, texts: np.ndarray, **first: np.ndarray
    ) -> None:
        """Fill in, at rows (R,) and columns (R or 1, targets), the losses of the last tokens of ``texts``."""
        of_texts = token_losses.last_losses(texts, columns.shape[1], **first)
        losses[name][rows[:, None], columns] = of_texts
        advance(of_texts.size)

    for rows in token_losses.batches(count, n_long - 1, scored):
        measure("long", rows, np.arange(scored)[None], tokens[rows])
    # the first target stands at M + S, so its own M tokens begin at S
    own = sliding_window_view(tokens, n_short + 1, axis=1)[:, window:]
    for number in token_losses.batches(count * scored, n_short, 1):
        rows, place = np.divmod(number, scored)
        measure("exact", rows, place[:, None], own[rows, place], first_ids=place + window)
    windows, rest = divmod(scored, window)
    whole = sliding_window_view(tokens, n_short + window, axis=1)[:, window::window]
    for number in token_losses.batches(count * windows, n_short + window - 1, window):
        rows, place = np.divmod(number, windows)
        measure("published", rows, place[:, None] * window + np.arange(window), whole[rows, place])
    for rows in token_losses.batches(count, n_short + rest - 1, rest) if rest else ():
        measure("published", rows, np.arange(scored - rest, scored)[None], tokens[rows, -n_short - rest :])
    return losses


# --- numbers ---


def key_tokens(long: np.ndarray, short: np.ndarray, alpha_nats: float, beta_nats: float) -> np.ndarray:
    """Whether each token is a key token, of the shape of its losses in nats (Fang et al. 2024)."""
    return (short - long > alpha_nats) & (long < beta_nats)


def segment_sums(losses: dict[str, np.ndarray], alpha_nats: float, beta_nats: float) -> dict[str, np.ndarray]:
    """What the numbers are made of: sums over the targets of each segment, by name, (n,); of `target_losses`."""
    long = losses["long"]
    key = {form: key_tokens(long, losses[form], alpha_nats, beta_nats) for form in FORMS}
    lsd = {form: losses[form] - long for form in FORMS}
    columns = {"one": np.ones_like(long), "long": long}
    for form in FORMS:
        columns[f"short {form}"] = losses[form]
        columns[f"key {form}"] = key[form]
        columns[f"long of key {form}"] = long * key[form]
        columns[f"lsd {form}"] = lsd[form]
    columns["both"] = key["exact"] & key["published"]
    columns["either"] = key["exact"] | key["published"]
    x, y = (lsd[form] - lsd[form].mean() for form in FORMS)  # centred, so that little is lost to rounding
    columns |= {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
    return {name: column.sum(axis=1, dtype=np.float64) for name, column in columns.items()}


def longppl_numbers(rows: pd.DataFrame, *, resamples: int, seed: int) -> pd.DataFrame:
    """The numbers of one model from its ``rows``, `segment_sums` beside text and maybe group."""
    bootstrap = bootstrap_of(rows, resamples=resamples, seed=seed)
    intervals = _intervals({name: rows[name].to_numpy() for name in rows}, bootstrap)
    return pd.DataFrame([{"name": name, "form": form, **vars(value)} for name, form, value in intervals])


def _intervals(
    columns: dict[str, np.ndarray], bootstrap: ClusterBootstrap
) -> Iterator[tuple[str, str, Interval]]:
    """Name, form and interval of every number, from `segment_sums`."""

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
    x, y, xx, yy, xy = map(mean, ("x", "y", "xx", "yy", "xy"))
    variance = (xx - x**2) * (yy - y**2)
    correlation = (xy - x * y) / np.sqrt(
        np.where(variance > 0, variance, np.nan)
    )  # NaN where one is constant
    yield "lsd_correlation", "both", bootstrap.interval(correlation)
    yield "share_difference", "both", bootstrap.interval(share["exact"] - share["published"])
    yield "longppl_difference", "both", bootstrap.interval(longppl["exact"] - longppl["published"])


def main() -> None:
    """See the module."""
    run_probe(LongPPLProbe, __doc__)
