"""Sparsity of far dependencies against model size, and against length generalization (docs/method.md, 2.6).

Joins two measurements of the same checkpoints: influence records (`analysis.stats.summary`) and loss by position
(`length.json`). Neither a model nor torch is needed.

    sparsity            net recovery at one k, and the share of targets over tau that k tokens suffice for (90 % of the
                        gain)
    use of the far context  share of the targets that gain more than tau from it
    length generalization   rise: loss at s times the training window minus loss at the window, where the loss at L is
                        that of the half octave of positions below L [ours]; the smaller, the better

Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.records.schema import ROPE_SCALING
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json


def ladder_points(
    summaries: Sequence[Json], length_json: Json, *, selector: str, k: int, times: int
) -> list[Json]:
    """A point for each summary: sparsity, rise and size of the checkpoint that it evaluates.

    Raises `UserError` where a summary lacks the selector or k, where its checkpoint was not measured by position, and
    where the window or its multiple is none of the lengths there.
    """
    checkpoints = [
        {**one, "label": model["label"]} for model in length_json["models"] for one in model["checkpoints"]
    ]
    points = []
    for summary in summaries:
        settings = summary["settings"]
        sha = settings["evaluation_checkpoint_sha256"] or settings["checkpoint_sha256"]
        scaling = settings["options"].get(ROPE_SCALING)
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
            }
        )
    return points


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
