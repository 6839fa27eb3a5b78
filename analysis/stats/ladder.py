"""Sparsity of far dependencies against model size, and against length generalization (docs/method.md, 2.6).

Joins two measurements of the same checkpoints: influence records (`analysis.stats.summary`) and loss by position
(`length.json`). Neither a model nor torch is needed.

    sparsity            net recovery at one k, and the share of targets over tau that k tokens suffice for (90 % of the
                        gain)
    use of the far context  share of the targets that gain more than tau from it, and the mean gain of all targets
    length generalization   rise: loss at s times the training window minus loss at the window, where the loss at L is
                        that of the half octave (or less) below L [ours]; the smaller, the better
    use beyond the window   mean gain of all targets from N tokens, more than the window, over the window's [ours]. Of
                        text that is the same everywhere it is the rise at N with the other sign, of the same targets
    change beyond the window    mean |gain| of the same: near 0 where a model does not look beyond its window [ours]
    needles beyond the window   exact match of the shortest needle at s times the window, mean over depths, of models of
                        the same label that were trained to find needles: use where there is much to use [ours]
    entropy                 of the attention at the window, where length measured it: how few tokens are looked at

A model may hold its loss without using what is beyond its window. Its seeds are measured together: intervals draw
trainings, groups and documents. *Correlation*: Spearman's, of one of these with the rise, over models, each the mean of
its seeds; the interval resamples models and, of each, seeds [ours].
Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from analysis.records.schema import ROPE_SCALING
from analysis.records.store import Records
from analysis.records.trainings import joined_by_label
from analysis.stats.bootstrap import percentile_interval
from analysis.stats.correlation import row_spearman
from analysis.stats.summary import summarize, summarize_all_targets
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

RELATED = (
    "net_recovery",
    "k_suffices",
    "share_over_tau",
    "use_nats",
    "change_nats",
    "needle_exact",
    "entropy_nats",
)
"""What is correlated with the rise."""
LEAST_MODELS = 4
"""Of a correlation."""
Model = tuple[str, int | None]
"""Its label, and of cross-fitted records, which are not joined, their number."""
Weights = tuple[str, str]
"""The checksum of a checkpoint, and how its RoPE was scaled."""


def by_model(
    records: Sequence[Records], length_json: Json, *, of_all_targets: bool = False
) -> dict[Model, Records]:
    """Records by model: those of one label of ``length_json`` are of its seeds, and are joined.

    ``of_all_targets``: only what does not depend on tau is read of them, and models may differ in it.

    Raises `UserError` where a checkpoint was not measured by position, and where records cannot be joined.
    """
    labels = [
        (_by_position(each, length_json)[0]["label"], number if each.manifest.crossfit else None)
        for number, each in enumerate(records)
    ]
    return joined_by_label(labels, records, of_all_targets=of_all_targets)


def model_point(
    records: Records,
    length_json: Json,
    *,
    selector: str,
    k: int,
    times: int,
    resamples: int,
    seed: int,
    beyond: Records | None = None,
) -> Json:
    """Sparsity, use, rise and size of one model, and of each of its ``seeds``.

    Args:
        records: of its trainings, joined, or cross-fitted ones.
        length_json: loss by position.
        selector: whose recoveries these are.
        k: of the recoveries.
        times: multiple of the window at which the rise is taken.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        beyond: of the same trainings, joined; short context is the training window. Else no use and no change.

    Raises `UserError` where the records lack the selector or k, where their checkpoints were not measured by position
    together, and where the window or its multiple is none of the lengths.
    """
    model, checkpoints = _by_position(records, length_json)
    summary = summarize(records, resamples, seed)
    uses = {} if beyond is None else _uses(beyond, checkpoints[0], resamples, seed)
    if uses and uses.keys() - {"all"} != _of_trainings(summary).keys():
        raise UserError(f"{model['label']}: --beyond has records of other seeds; give those of the same")

    numbers = partial(_numbers, trained=checkpoints[0], selector=selector, k=k, times=times)
    return {
        "label": model["label"],
        "parameters": checkpoints[0]["parameters"],
        "position_scheme": checkpoints[0]["position_scheme"],
        "crossfit": records.manifest.crossfit,
        "targets_over_tau": summary["targets_over_tau"],
        **{
            name: summary["settings"][name]
            for name in ("trainings", "documents_over_tau", "groups_over_tau")
            if name in summary["settings"]
        },
        **numbers(summary, model if len(checkpoints) > 1 else checkpoints[0], uses.get("all")),
        "seeds": [
            {
                **{name: one[name] for name in ("checkpoint", "checkpoint_sha256", "training_seed")},
                **numbers(own, one, uses.get(sha)),
            }
            for one, (sha, own) in zip(checkpoints, _of_trainings(summary).items(), strict=True)
        ],
    }


def _numbers(
    summary: Json, measured: Json, use: Json | None, *, trained: Json, selector: str, k: int, times: int
) -> Json:
    """Of a model or of one of its seeds, from its records and its loss by position."""
    told = measured["at_lengths"][0].get("attention")
    return {
        "share_over_tau": summary["share_over_tau"],
        "gain_nats": summary["all_targets"]["gap_short_minus_long"],
        **sparsity_at(summary, selector, k),
        "rise_nats": _rise(measured, trained, times),
        **(use or {}),
        **({"entropy_nats": told["entropy_nats"]} if told else {}),
    }


def with_needles(points: Sequence[Json], needle_json: Json, times: int) -> list[Json]:
    """The points, with ``needle_exact`` where ``needle_json`` has a model of the label.

    Those models were trained to find needles, apart from the others: each seed of a point has the mean of theirs.
    Raises `UserError` where no label is among the points', and where ``times`` the window is none of the lengths.
    """
    found = {}
    for model in needle_json["models"]:
        if "over_depths" not in model:
            raise UserError(
                f"the needles of {model['label']} were measured before means over depths were kept; measure them again "
                "with scripts/needle.py"
            )
        window = model["checkpoints"][0]["training_length"]
        at = [each for each in model["over_depths"] if window and each["length"] == times * window]
        if not at:
            raise UserError(
                f"the needles of {model['label']} were not measured at {times} times its window; give "
                + (
                    f"--lengths {times * window} to scripts/needle.py"
                    if window
                    else "models trained by this project"
                )
            )
        found[model["label"]] = {"needle_exact": min(at, key=lambda each: each["value_tokens"])["exact"]}
    labels = [point["label"] for point in points]
    if not found.keys() & set(labels):
        raise UserError(
            f"no model has both needles and records: {', '.join(found)}; {', '.join(labels)}; give both the same labels"
        )
    return [
        {
            **point,
            **found[point["label"]],
            "seeds": [{**one, **found[point["label"]]} for one in point["seeds"]],
        }
        if point["label"] in found and not point["crossfit"]
        else point
        for point in points
    ]


def _of_trainings(summary: Json) -> dict[str, Json]:
    """What a summary says of each training, by its checksum."""
    if "trainings" in summary:
        return {each["checkpoint_sha256"]: each for each in summary["trainings"]}
    return {summary["settings"]["checkpoint_sha256"]: summary}


def correlations(points: Sequence[Json], *, resamples: int, seed: int) -> dict[str, Json]:
    """Spearman's correlation of each of `RELATED` with the rise, and what it is without each of the models.

    Over the models that are not cross-fitted, each the mean of its seeds. Nothing of fewer than `LEAST_MODELS`. The
    interval draws them and their seeds. ``undefined``: in which share of the resamples one side is constant, which may
    leave no bound (docs/method.md, 2.4).
    """
    own = [point for point in points if not point["crossfit"]]
    found = {}
    for name in RELATED:
        told = [point for point in own if name in point]
        if len(told) < LEAST_MODELS:
            continue
        pairs = [
            np.array([(one[name]["value"], one["rise_nats"]["value"]) for one in point["seeds"]], float)
            for point in told
        ]
        means = np.stack([each.mean(axis=0) for each in pairs])
        left_out = np.stack([np.delete(means, place, axis=0) for place in range(len(told))])
        resampled = _spearman(_resampled(pairs, resamples, seed))
        found[name] = {
            **percentile_interval(float(_spearman(means[None])[0]), resampled).as_dict(),
            "undefined": float(np.isnan(resampled).mean()),
            "models": len(told),
            "without": dict(zip((p["label"] for p in told), map(_number, _spearman(left_out)), strict=True)),
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


def weights_of(records: Records) -> list[Weights]:
    """What the losses of each training are of."""
    manifests = [each.manifest for each in records.trainings or (records,)]
    return [
        (each.evaluation_checkpoint_sha256 or each.checkpoint_sha256, str(each.options.get(ROPE_SCALING)))
        for each in manifests
    ]


def by_weights(model: Json) -> dict[Weights, Json]:
    """The checkpoints of a model of ``length.json``."""
    return {(one["checkpoint_sha256"], str(one["rope_scaling"])): one for one in model["checkpoints"]}


def _by_position(records: Records, length_json: Json) -> tuple[Json, list[Json]]:
    """The model of ``length_json`` that records evaluate, and of its checkpoints those, one for each training."""
    evaluated = weights_of(records)
    for model in length_json["models"]:
        found = by_weights(model)
        own = [found[each] for each in evaluated if each in found]
        if len(own) == len(evaluated):
            if 1 < len(own) < len(found):
                raise UserError(
                    f"{model['label']} was measured by position with {len(found)} seeds, and these are records of "
                    f"{len(own)}; give records of all of them"
                )
            return model, own
    first = (records.trainings or (records,))[0].manifest
    how = "scaled as in the records" if ROPE_SCALING in first.options else "without scaling its RoPE"
    raise UserError(
        f"{first.evaluation_checkpoint or first.checkpoint} was not measured by position; measure it with "
        f"scripts/length.py, {how}"
    )


def _uses(beyond: Records, checkpoint: Json, resamples: int, seed: int) -> dict[str, Json]:
    """Use and change beyond the window: of each training by its checksum, and of ``all``."""
    window, n_short = checkpoint["training_length"], beyond.manifest.n_short
    if n_short != window:
        raise UserError(
            f"{checkpoint['checkpoint']} was measured beyond {n_short:,} tokens, and its window has {window:,}; give "
            f"records of --n-short {window} to --beyond"
        )
    parts = {each.manifest.checkpoint_sha256: each for each in beyond.trainings or (beyond,)}
    found = {
        name: summarize_all_targets(each, resamples, seed) for name, each in {"all": beyond, **parts}.items()
    }
    return {
        name: {"use_nats": each["gap_short_minus_long"], "change_nats": each["absolute_gap"]}
        for name, each in found.items()
    }


def sparsity_at(summary: Json, selector: str, k: int) -> Json:
    """Recoveries of a selector at one k, and the share of targets over tau that k tokens suffice for.

    Raises `UserError` where a summary lacks the selector or k.
    """
    where = summary.get("settings", summary)["checkpoint"]
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


def _rise(measured: Json, checkpoint: Json, times: int) -> Json:
    """Loss at ``times`` the window minus the loss at the window, of a model or of one checkpoint."""
    window, lengths = checkpoint["training_length"], measured["at_lengths"]
    if window is None:
        raise UserError(
            f"{checkpoint['checkpoint']} was not trained by this project: its training window is not known"
        )
    if lengths[0]["length"] != window or times * window not in [one["length"] for one in lengths]:
        raise UserError(
            f"{checkpoint['checkpoint']} was not measured at its window and {times} times that; give "
            f"--lengths {window},{times * window} to scripts/length.py, the window first"
        )
    return next(one["rise_nats"] for one in lengths if one["length"] == times * window)
