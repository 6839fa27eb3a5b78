"""From the losses of targets to LongPPL in both forms, with intervals.

`analysis.measure.longppl` says what the forms are. Shapes: n segments, T targets of each. Losses are in nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.stats.bootstrap import DEFAULT_RESAMPLES, Statistic, count_clusters, difference
from analysis.stats.recovery import SumsBootstrap
from olmo_sparsity.util.result_files import Json

FORMS = ("exact", "published")
_MOMENTS = ("x", "y", "xx", "yy", "xy")


@dataclass(frozen=True)
class TargetLosses:
    """Losses in nats of the same targets given the long context and both short ones; every array is (n, T) float64."""

    long: np.ndarray
    short: dict[str, np.ndarray]
    """By form."""
    tokens_read: dict[str, int]
    """Tokens that the model read for the long contexts ("long") and for the short ones of each form: the cost."""


def key_tokens(long: np.ndarray, short: np.ndarray, alpha_nats: float, beta_nats: float) -> np.ndarray:
    """Whether each token is a key token, of the shape of its losses in nats (Fang et al. 2024)."""
    return (short - long > alpha_nats) & (long < beta_nats)


def summarize_longppl(
    losses: TargetLosses,
    document: np.ndarray,
    document_groups: np.ndarray | None = None,
    *,
    alpha_nats: float = 2.0,
    beta_nats: float = 2.0,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Json:
    """Both forms and their agreement, with 95 % cluster-bootstrap intervals; ``document`` (n,) is each segment's, and
    ``document_groups`` (n,) the group of it.

    Differences are exact minus published, on the same tokens, hence paired. LongPPL is None without key tokens.
    """
    columns = _columns(losses, alpha_nats, beta_nats)
    sums = SumsBootstrap(columns, document, resamples, seed, document_groups)
    share = {form: sums.statistic(f"key {form}", "one") for form in FORMS}
    longppl = {form: _exp(sums.statistic(f"long of key {form}", f"key {form}")) for form in FORMS}
    both = {form: sums.statistic("both", f"key {form}") for form in FORMS}
    correlation = _correlation(*(sums.index[name] for name in ("one", *_MOMENTS)))
    forms = {
        form: {
            "key_tokens": sums.interval(_total(sums.index[f"key {form}"])),
            "share": sums.interval(share[form]),
            "longppl": sums.interval(longppl[form]),
            "ppl_short": sums.interval(_exp(sums.statistic(f"short {form}", "one"))),
            "mean_lsd_nats": sums.ratio(f"lsd {form}", "one"),
            "tokens_read": losses.tokens_read[form],
        }
        for form in FORMS
    }
    return {
        "targets": losses.long.size,
        **count_clusters(document, document_groups),
        "ppl": sums.interval(_exp(sums.statistic("long", "one"))),
        "tokens_read_long": losses.tokens_read["long"],
        "forms": forms,
        "agreement": {
            "jaccard": sums.ratio("both", "either"),
            "share_of_exact_found_by_published": sums.share(both["exact"], "key exact"),
            "share_of_published_confirmed_by_exact": sums.share(both["published"], "key published"),
            "lsd_correlation": sums.interval(correlation),
            "share_difference": sums.interval(difference(share["exact"], share["published"])),
            "longppl_difference": sums.interval(difference(longppl["exact"], longppl["published"])),
        },
    }


def _columns(losses: TargetLosses, alpha_nats: float, beta_nats: float) -> dict[Any, np.ndarray]:
    """Sums over the targets of each segment, which share its document; each (n,)."""
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
    return {name: each.sum(axis=1, dtype=np.float64) for name, each in columns.items()}


def _total(column: int) -> Statistic:
    return lambda sums: sums[..., column]


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
