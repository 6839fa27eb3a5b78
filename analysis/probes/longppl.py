"""LongPPL: perplexity on the key tokens, those that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

examples:
  olmo-sparsity longppl runs/books --out runs/books/longppl --n-long 256 --n-short 32
  olmo-sparsity longppl HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/smol --n-long 1024 --n-short 128

Theirs:

    LSD(t)     = log p(t | long context) - log p(t | short context) = L_short - L_long
    key tokens = those with LSD > alpha and L_long < beta           (both 2 nats by default)
    LongPPL    = exp(mean L_long over the key tokens)

In their paper a second, stronger model may choose the key tokens; here the model that is measured does. Every target
has its own M tokens of short context [ours], at their position ids in the segment (which matter for learned positions
only), so that LSD is the gain L_short - L_long of docs/method.md, 2.1. Theirs shares windows between S targets: run the
authors' package longppl for it. Only targets with at least M + S tokens before them count, which are all that it could
call key tokens. The text is a segment of N tokens inside one text [ours; theirs is a whole document]: the long context
of a target is all of the segment before it, at position ids from 0.

Writes longppl.json (key tokens, LongPPL and plain perplexity, with 95 % intervals over groups and texts) and
longppl.parquet (sums per segment), and prints the numbers. Of more models than one each is measured by itself.

Shapes: n segments, T = N - M - S targets of each. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view

from analysis.probes.probe import Bar, Probe, ProbeResult, run_probe
from analysis.probes.segments import Segments, sample_segments
from analysis.stats.bootstrap import ClusterBootstrap, Interval
from analysis.stats.tables import interval_frame, show
from olmo_sparsity.util.arguments import argument
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance

if TYPE_CHECKING:
    from analysis.model.loaded import LoadedModel
    from analysis.model.token_losses import TokenLosses
    from analysis.texts import Texts


@dataclass(frozen=True, kw_only=True)
class LongPPL(ProbeResult):
    """LongPPL of models; ``rows`` has sums over the targets of each segment, under ``key`` of key tokens."""

    NAME, KIND = "longppl", "olmo-sparsity LongPPL"

    numbers: pd.DataFrame
    """model (its label), name, value, low, high; NaN where it is undefined.

    ppl of all targets; key_tokens (their number), share (of the targets), longppl, ppl_short, mean_lsd_nats."""

    def __str__(self) -> str:
        """The numbers as tables of text."""
        settings = self.settings
        is_share = self.numbers["name"] == "share"
        intervals = ""
        if self.has_intervals():
            intervals = "intervals 95 %, "
        head = (
            f"{settings['segments_measured']:,} segments of {settings['documents']:,} texts ({settings['texts']}); N "
            f"{settings['n_long']}, M {settings['n_short']}, S {settings['sliding_window']}\nkey tokens: LSD > "
            f"{settings['alpha_nats']:g} nats and L_long < {settings['beta_nats']:g} nats; {intervals}"
            f"{self.intervals_by()}"
        )
        tables = [
            show(self.numbers[~is_share], percent=False, digits=2),
            show(self.numbers[is_share], title="in per cent"),
        ]
        return "\n\n".join([head, *tables])


@dataclass(kw_only=True)
class LongPPLProbe(Probe):
    """LongPPL of models on sampled segments of texts."""

    RESULT, MEASURED = LongPPL, "segments_measured"

    n_long: int = field(default=1024, metadata=argument("N, tokens of a segment", metavar="N"))
    n_short: int = field(default=128, metadata=argument("M, tokens of the short context", metavar="M"))
    sliding_window: int = field(
        default=0,
        metadata=argument(
            "S: only targets with M + S tokens before them count (default: M / 4; the authors' code has M = 4096, "
            "S = 1024)",
            metavar="S",
        ),
    )
    segments: int = field(
        default=256, metadata=argument("maximum number of segments to sample from the texts", metavar="COUNT")
    )
    alpha_nats: float = field(
        default=2.0,
        metadata=argument("key tokens have an LSD above this, in nats", name="alpha", metavar="NATS"),
    )
    beta_nats: float = field(
        default=2.0,
        metadata=argument("key tokens have an L_long below this, in nats", name="beta", metavar="NATS"),
    )

    def __post_init__(self) -> None:
        if not self.sliding_window:
            self.sliding_window = max(1, self.n_short // 4)
        if self.n_long <= self.n_short + self.sliding_window:
            raise UserError(
                f"N = {self.n_long} leaves no target whose long context is longer than M + S = {self.n_short} + "
                f"{self.sliding_window} tokens; raise N, or lower M or S"
            )

    def check(self, loaded: LoadedModel) -> None:
        """See `Probe`, as for all methods below."""
        loaded.check_context(self.n_long, drops_tokens=False)

    def draw_sample(self, source: Texts) -> Segments:
        return sample_segments(source, self.segments, length=self.n_long, seed=self.seed)

    def measure_model(self, token_losses: TokenLosses, sample: Segments, bar: Bar) -> pd.DataFrame:
        targets = len(sample) * (self.n_long - self.n_short - self.sliding_window)
        with bar(2 * targets, "losses") as advance:
            long, short = target_losses(
                token_losses, sample.tokens, self.n_short, self.sliding_window, advance
            )
        lsd = short - long
        scored = long.shape[1]
        one = sample.is_target[:, -scored:].astype(np.float64)
        key = one * ((lsd > self.alpha_nats) & (long < self.beta_nats))
        of_targets = {
            "one": one,
            "long": one * long,
            "short": one * short,
            "lsd": one * lsd,
            "key": key,
            "long of key": long * key,
        }
        columns = sample.places()
        for name, values in of_targets.items():
            columns[name] = values.sum(axis=1, dtype=np.float64)
        return pd.DataFrame(columns)

    def numbers(self, rows: pd.DataFrame, labels: Sequence[str]) -> dict[str, pd.DataFrame]:
        numbers = []
        for number, label in enumerate(labels):
            model = label
            if labels.count(label) > 1:
                model = f"{label}, {labels[: number + 1].count(label)}"
            of_model = self._numbers_of(rows[rows["number"] == number])
            for name, interval in of_model.items():
                numbers.append({"model": model, "name": name, **vars(interval)})
        return {"numbers": interval_frame(numbers, ["model", "name"])}

    def _numbers_of(self, rows: pd.DataFrame) -> dict[str, Interval]:
        bootstrap = ClusterBootstrap.of(rows, resamples=self.resamples, seed=self.seed)
        one = rows["one"].to_numpy()
        key = rows["key"].to_numpy()
        long = bootstrap.ratio(rows["long"].to_numpy(), one)
        short = bootstrap.ratio(rows["short"].to_numpy(), one)
        long_of_key = bootstrap.ratio(rows["long of key"].to_numpy(), key)
        share = bootstrap.ratio(key, one)
        return {
            "ppl": bootstrap.interval(np.exp(long)),
            "key_tokens": bootstrap.interval(bootstrap.sums(key)),
            "share": bootstrap.share(share, one.sum()),
            "longppl": bootstrap.interval(np.exp(long_of_key)),
            "ppl_short": bootstrap.interval(np.exp(short)),
            "mean_lsd_nats": bootstrap.ratio_interval(rows["lsd"].to_numpy(), one),
        }


def target_losses(
    token_losses: TokenLosses,
    tokens: np.ndarray,
    n_short: int,
    window: int,
    advance: Advance = lambda count: None,
) -> tuple[np.ndarray, np.ndarray]:
    """L_long and L_short in nats of the last T tokens of every segment, both (n, T) float64.

    ``tokens``: (n, N) ids; ``window``: S; ``advance`` is called with how many losses are done.
    """
    count, n_long = tokens.shape
    scored = n_long - n_short - window
    long = np.empty((count, scored))
    short = np.empty(count * scored)
    for rows in token_losses.batches(count, n_long - 1, scored):
        long[rows] = token_losses.last_losses(tokens[rows], scored)
        advance(long[rows].size)
    # the first target stands at M + S, so its own M tokens begin at S
    with_context = sliding_window_view(tokens, n_short + 1, axis=1)[:, window:]
    for targets in token_losses.batches(count * scored, n_short, 1):
        rows, place = np.divmod(targets, scored)
        first_ids = place + window
        short[targets] = token_losses.last_losses(with_context[rows, place], 1, first_ids)[:, 0]
        advance(len(targets))
    return long, short.reshape(count, scored)


def main() -> None:
    """See the module."""
    run_probe(LongPPLProbe, __doc__)
