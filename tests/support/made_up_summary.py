"""A summary made by hand, in the layout of `analysis.stats.summary.summarize`: what the figures are tested against."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Json = dict[str, Any]

KS = (1, 2, 4, 8)
# recovery at k = 1, 2, 4, 8 in the true and the placebo far context: docs/method.md, 2.3, and further ones made up
CURVES = {
    "leave-one-out": ((0.43, 0.72, 0.95, 1.11), (0.09, 0.20, 0.31, 0.44)),
    "leave-one-in": ((0.56, 0.72, 0.93, 1.07), (0.28, 0.39, 0.51, 0.60)),
    "greedy": ((0.56, 0.87, 1.15, 1.33), (0.30, 0.48, 0.68, 0.90)),
    "gradient": ((0.30, 0.49, 0.70, 0.86), (0.08, 0.14, 0.22, 0.33)),
    "attention": ((0.22, 0.37, 0.52, 0.66), (0.02, 0.05, 0.07, 0.10)),
    "leave-one-out@gradient:32": ((0.42, 0.70, 0.93, 1.07), (0.09, 0.19, 0.30, 0.42)),
    "greedy@gradient:32": ((0.53, 0.84, 1.10, 1.25), (0.28, 0.45, 0.63, 0.80)),
    "random": ((0.06, 0.07, 0.11, 0.18), (0.00, 0.01, 0.04, 0.02)),
    "nearest": ((0.05, 0.09, 0.16, 0.25), (0.01, 0.01, 0.02, 0.02)),
    "best": ((0.68, 1.01, 1.27, 1.42), (0.38, 0.58, 0.78, 0.97)),
}
EVERY_SELECTOR = tuple(CURVES)
FEW_SELECTORS = ("leave-one-out", "leave-one-in", "random", "nearest")
SHORT_NATS, LONG_NATS = 5.2, 3.1
# targets, targets over tau, documents over tau, mean gain, factor of recovery
KINDS = {
    "repeat": (310, 64, 51, 0.92, 1.15),
    "name": (120, 33, 30, 0.71, 1.00),
    "number": (95, 14, 12, 0.33, 0.80),
    "punctuation": (410, 21, 20, 0.06, 0.55),
    "function word": (620, 30, 29, 0.05, 0.70),
    "content word": (845, 96, 82, 0.19, 0.90),
}


def interval(value: float, half: float, skew: float = 1.0) -> Json:
    """An interval about ``value``, ``skew`` times longer above than below."""
    return {"value": value, "low": value - half, "high": value + skew * half}


def made_up_summary(selectors: Sequence[str] = EVERY_SELECTOR, **settings: Any) -> Json:
    """Everything that a figure reads; ``settings`` replaces any of the summary's settings."""
    rng = np.random.default_rng(len(selectors))
    targets, over = 2400, 258
    edges = [17, 24, 33, 46, 64, 89, 129]
    chosen = [name for name in selectors if name != "best"]
    return {
        "targets": targets,
        "targets_over_tau": over,
        "documents": 604,
        "share_over_tau": interval(over / targets, 0.012),
        "thresholding": {
            "share_under_minus_tau": interval(0.02, 0.01),
            "share_of_net_gain": interval(0.48, 0.05),
            "persistence": None,
        },
        "loss_short": interval(SHORT_NATS, 0.4),
        "loss_long": interval(LONG_NATS, 0.42),
        "selectors": {name: _per_k(name, rng) for name in selectors},
        "gain_bins": {"k": 4, "bins": [_bin(*edge, selectors) for edge in _BINS]},
        "kinds": {"k": 4, "kinds": [_kind(name, targets, over, selectors) for name in KINDS]},
        "distances": {
            "k": 4,
            "edges": edges,
            "selectors": {name: _distances(name, edges, rng) for name in chosen},
        },
        "tokens_needed": {
            "share": 0.9,
            "ks": list(KS),
            "selectors": {name: _tokens_needed(name) for name in selectors},
        },
        "picks": {
            "k": 4,
            "kinds": ["number", "content word"],
            "shares": {
                name: {
                    context: {"number": interval(share, 0.02), "content word": interval(1 - share, 0.02)}
                    for context, share in (("true", 0.1), ("placebo", 0.2))
                }
                for name in ("all far tokens", *chosen)
            },
        },
        "faithfulness": {
            "ks": list(KS),
            "subsets": {"number": 32, "keep_rate": 0.5},
            "overlap_by_chance": {str(k): k / 112 for k in KS},
            "selectors": {name: _faithfulness(name) for name in selectors},
        },
        "contexts": {
            "gap_cost_nats": {name: interval(0.01, 0.004) for name in ("all_targets", "over_tau")},
            "enough": {"within_nats": 0.1, "shares": {"32": interval(0.6, 0.02), "96": interval(0.9, 0.01)}},
        },
        "settings": {
            "checkpoint": "runs/demo/step00001100", "checkpoint_sha256": "c" * 64, "training_seed": 1,
            "tokenizer_sha256": "t" * 64, "corpus": "data/docs", "corpus_manifest_sha256": "d" * 64,
            "split": "heldout", "n_long": 128, "n_short": 16, "tau_nats": 1.0, "ks": list(KS),
            "selectors": chosen, "seed": 0, "targets_asked": targets, "dtype": "fp32", "device": "cpu",
            "options": {}, "complete": True, "targets_measured": over, "documents_over_tau": 171,
            "evaluation_checkpoint": None, "evaluation_checkpoint_sha256": None, "crossfit": False,
            "resamples": 2000, "bootstrap_seed": 0, **settings,
        },
    }  # fmt: skip


_BINS = ((1.0, 2.0, 120), (2.0, 3.0, 71), (3.0, 5.0, 61), (5.0, None, 6))


def _per_k(name: str, rng: np.random.Generator) -> Json:
    gain = SHORT_NATS - LONG_NATS
    return {
        str(k): {
            "loss": interval(SHORT_NATS - gain * true, 0.38),
            "placebo_loss": interval(SHORT_NATS - gain * placebo, 0.41),
            **_recoveries(true, placebo, 0.05 + 0.02 * rng.random()),
        }
        for k, true, placebo in zip(KS, *CURVES[name], strict=True)
    }


def _recoveries(true: float, placebo: float, half: float) -> Json:
    return {
        "recovery": interval(true, half, 0.8),
        "placebo_recovery": interval(placebo, 1.1 * half),
        "net_recovery": interval(true - placebo, 1.3 * half, 1.2),
    }


def _bin(low: float, high: float | None, targets: int, selectors: Sequence[str]) -> Json:
    factor = 1.1 - 0.1 * low
    return {
        "low": low,
        "high": high,
        "targets": targets,
        "documents": targets // 2,
        "selectors": {
            name: _recoveries(factor * CURVES[name][0][2], CURVES[name][1][2] / factor, 1 / targets**0.5)
            for name in selectors
        },
    }


def _kind(kind: str, all_targets: int, all_over: int, selectors: Sequence[str]) -> Json:
    targets, over, documents, gain, factor = KINDS[kind]
    return {
        "kind": kind,
        "targets": targets,
        "targets_over_tau": over,
        "documents_over_tau": documents,
        "share": interval(targets / all_targets, 0.02),
        "share_over_tau": interval(over / all_over, 0.05, 1.2),
        "gap_short_minus_long": interval(gain, 0.06),
        "selectors": {
            name: _recoveries(factor * CURVES[name][0][2], CURVES[name][1][2], 0.9 / over**0.5)
            for name in selectors
        },
    }


def _distances(name: str, edges: list[int], rng: np.random.Generator) -> Json:
    widths = np.diff(edges)
    if name == "nearest":
        shares = {context: np.eye(len(widths))[0] for context in ("true", "placebo")}
    else:
        slope = {"random": 0.0, "attention": 1.2}.get(name, 0.7)
        weights = {
            "true": widths / np.array(edges[:-1]) ** slope * (1 + 0.1 * rng.random(len(widths))),
            "placebo": widths / np.array(edges[:-1]) ** (slope / 3),
        }
        shares = {context: weight / weight.sum() for context, weight in weights.items()}
    return {
        context: [interval(float(share), 0.03 * (0 < share < 1)) for share in shares[context]]
        for context in ("true", "placebo")
    }


def _faithfulness(name: str) -> Json:
    """Sufficiency from the curves; what `best`, `greedy` and leave-one-out lack is None."""
    measured, compared = name != "best", name not in ("best", "leave-one-out")
    scored = measured and not name.startswith("greedy")

    def both(make: Callable[[int], Any]) -> Json:
        return {context: make(number) for number, context in enumerate(("true", "placebo"))}

    def over_k(number: int) -> Json:
        lacks = {str(k): 2.1 * (1 - x) for k, x in zip(KS, CURVES[name][number], strict=True)}
        lacks["aopc"] = sum(lacks.values()) / len(KS)
        return {k: interval(each, 0.2) for k, each in lacks.items()}

    return {
        "sufficiency_nats": both(over_k),
        "comprehensiveness_nats": both(over_k) if measured else None,
        "lds": both(lambda number: interval(0.6 - 0.3 * number, 0.05)) if scored else None,
        "r2": both(lambda number: interval(0.4 - 0.3 * number, 0.05)) if scored else None,
        "overlap": both(lambda number: {str(k): interval(0.3, 0.05) for k in KS}) if compared else None,
        "spearman": both(lambda number: interval(0.5, 0.04)) if compared and scored else None,
    }


def _tokens_needed(name: str) -> Json:
    """Below 1 because some targets never come so far; more for whoever recovers more."""
    true, placebo = ([min(0.85, 0.62 * max(0.0, x)) for x in curve] for curve in CURVES[name])
    return {
        "true": [interval(share, 0.04) for share in true],
        "placebo": [interval(share, 0.03) for share in placebo],
        "censored": interval(1 - true[-1], 0.04),
    }


def without_certainty(value: Any) -> Any:
    """The same summary where nothing has bounds, as of a single document."""
    if isinstance(value, dict):
        if set(value) == {"value", "low", "high"}:
            return {**value, "low": None, "high": None}
        return {key: without_certainty(each) for key, each in value.items()}
    return [without_certainty(each) for each in value] if isinstance(value, list) else value
