"""Sparsity of far dependencies against model size, and against length generalization (docs/method.md, 2.6).

Joins two measurements of the same checkpoints: influence records (`analysis.stats.summary`) and loss by position
(`length.json`). Neither a model nor torch is needed.

    sparsity            net recovery at one k, and the share of targets over tau that k tokens suffice for (90 % of the
                        gain)
    use of the far context  share of the targets that gain more than tau from it
    length generalization   rise: loss at s times the training window minus loss at the window, where the loss at L is
                        that of the half octave of positions below L [ours]; the smaller, the better
    use beyond the window   mean gain of all targets from N tokens, more than the window, over the window's [ours]

A model may hold its loss without using what is beyond its window. *Correlation*: Spearman's, of one of these with the
rise, over models, each the mean of its seeds; the interval resamples models and, of each, seeds [ours].
Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.records.schema import ROPE_SCALING
from analysis.stats.correlation import row_spearman
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

RELATED = ("net_recovery", "k_suffices", "share_over_tau", "use_nats")
"""What is correlated with the rise."""
LEAST_MODELS = 4
"""Of a correlation."""


def ladder_points(
    summaries: Sequence[Json],
    length_json: Json,
    *,
    selector: str,
    k: int,
    times: int,
    beyond: Sequence[Json] = (),
) -> list[Json]:
    """A point for each summary: sparsity, rise and size of the checkpoint that it evaluates.

    ``beyond``: further summaries of the same checkpoints, whose short context is the training window; of their gains is
    ``use_nats``, which else is not there. Raises `UserError` where a summary lacks the selector or k, where its
    checkpoint was not measured by position, or beyond its window if others were, and where the window or its multiple
    is none of the lengths.
    """
    checkpoints = [
        {**one, "label": model["label"]} for model in length_json["models"] for one in model["checkpoints"]
    ]
    points = []
    gains = [(*_evaluated(each), each) for each in beyond]
    for summary in summaries:
        settings = summary["settings"]
        sha, scaling = _evaluated(summary)
        found = [
            one for one in checkpoints if (one["checkpoint_sha256"], one["rope_scaling"]) == (sha, scaling)
        ]
        if not found:
            raise UserError(
                f"{settings['evaluation_checkpoint'] or settings['checkpoint']} was not measured by position; measure "
                f"it with scripts/length.py, {'scaled as in the records' if scaling else 'without scaling its RoPE'}"
            )
        own = found[0]
        points.append(
            {
                "label": own["label"],
                "checkpoint": own["checkpoint"],
                "checkpoint_sha256": sha,
                "training_seed": own["training_seed"],
                "parameters": own["parameters"],
                "position_scheme": own["position_scheme"],
                "crossfit": settings["crossfit"],
                "targets_over_tau": summary["targets_over_tau"],
                **{
                    name: settings[name]
                    for name in ("documents_over_tau", "groups_over_tau")
                    if name in settings
                },
                "share_over_tau": summary["share_over_tau"],
                **sparsity_at(summary, selector, k),
                "rise_nats": _rise(own, times),
                **(
                    {"use_nats": _use(own, [each for *of, each in gains if of == [sha, scaling]])}
                    if beyond
                    else {}
                ),
            }
        )
    return points


def correlations(points: Sequence[Json], *, resamples: int, seed: int) -> dict[str, Json]:
    """Spearman's correlation of each of `RELATED` with the rise, and what it is without each of the models.

    Over models, that is labels, each the mean of its points that are not cross-fitted. Nothing of fewer than
    `LEAST_MODELS`. The interval is None where too few resamples have a correlation.
    """
    own = [point for point in points if not point["crossfit"]]
    labels = list(dict.fromkeys(point["label"] for point in own))
    if len(labels) < LEAST_MODELS:
        return {}
    found = {}
    for name in RELATED:
        if name not in own[0]:
            continue
        pairs = [
            np.array([(p[name]["value"], p["rise_nats"]["value"]) for p in own if p["label"] == label], float)
            for label in labels
        ]
        means = np.stack([each.mean(axis=0) for each in pairs])
        left_out = np.stack([np.delete(means, place, axis=0) for place in range(len(labels))])
        resampled = _spearman(_resampled(pairs, resamples, seed))
        resampled = resampled[np.isfinite(resampled)]
        low, high = np.quantile(resampled, (0.025, 0.975)) if len(resampled) > resamples / 2 else (None, None)
        found[name] = {
            "value": _number(_spearman(means[None])[0]),
            "low": _number(low),
            "high": _number(high),
            "models": len(labels),
            "without": dict(zip(labels, map(_number, _spearman(left_out)), strict=True)),
        }
    return found


def _spearman(pairs: np.ndarray) -> np.ndarray:
    """Of rows of pairs, (rows, models, 2): (rows,)."""
    return row_spearman(pairs[..., 0], pairs[..., 1])


def _resampled(pairs: Sequence[np.ndarray], resamples: int, seed: int) -> np.ndarray:
    """Means of models drawn with replacement, each of as many of its seeds as it has: (resamples, models, 2)."""
    rng = np.random.default_rng(seed)
    return np.array(
        [
            [
                pairs[model][rng.integers(len(pairs[model]), size=len(pairs[model]))].mean(axis=0)
                for model in rng.integers(len(pairs), size=len(pairs))
            ]
            for _ in range(resamples)
        ]
    )


def _number(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


def _evaluated(summary: Json) -> tuple[str, Json | None]:
    """Checksum of the weights that a summary evaluates, and how their RoPE was scaled."""
    settings = summary["settings"]
    sha = settings["evaluation_checkpoint_sha256"] or settings["checkpoint_sha256"]
    return sha, settings["options"].get(ROPE_SCALING)


def _use(checkpoint: Json, measured: Sequence[Json]) -> Json:
    where, window = checkpoint["checkpoint"], checkpoint["training_length"]
    if not measured:
        raise UserError(
            f"{where} was not measured beyond its window; give its records of --n-short {window} to --beyond"
        )
    settings = measured[0]["settings"]
    if settings["n_short"] != window:
        raise UserError(
            f"{where} was measured beyond {settings['n_short']:,} tokens, and its window has {window:,}; give records "
            f"of --n-short {window} to --beyond"
        )
    return measured[0]["all_targets"]["gap_short_minus_long"]


def sparsity_at(summary: Json, selector: str, k: int) -> Json:
    """Recoveries of a selector at one k, and the share of targets over tau that k tokens suffice for.

    Raises `UserError` where a summary lacks the selector or k.
    """
    where = summary["settings"]["checkpoint"]
    if selector not in summary["selectors"]:
        raise UserError(f"{where} has no selector {selector}; choose {', '.join(summary['selectors'])}")
    if str(k) not in summary["selectors"][selector]:
        raise UserError(
            f"{where} was not measured at k = {k}; choose {', '.join(summary['selectors'][selector])}"
        )
    at_k, needed = summary["selectors"][selector][str(k)], summary["tokens_needed"]
    place = needed["ks"].index(k)
    return {
        "net_recovery": at_k["net_recovery"],
        "recovery": at_k["recovery"],
        "placebo_recovery": at_k["placebo_recovery"],
        "k_suffices": needed["selectors"][selector]["true"][place],
        "k_suffices_placebo": needed["selectors"][selector]["placebo"][place],
    }


def _rise(checkpoint: Json, times: int) -> Json:
    window, measured = checkpoint["training_length"], checkpoint["at_lengths"]
    if window is None:
        raise UserError(
            f"{checkpoint['checkpoint']} was not trained by this project: its training window is not known"
        )
    if measured[0]["length"] != window or times * window not in [one["length"] for one in measured]:
        raise UserError(
            f"{checkpoint['checkpoint']} was not measured at its window and {times} times that; give "
            f"--lengths {window},{times * window} to scripts/length.py, the window first"
        )
    return next(one["rise_nats"] for one in measured if one["length"] == times * window)
