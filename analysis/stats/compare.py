"""Two checkpoints measured on the same targets: paired differences with intervals (docs/method.md, 2.4).

Both were measured on the same sampled targets, so one bootstrap resamples them together, and what groups and documents
have in common cancels in a difference. Every difference is first minus second.
Shapes: n sampled targets; m of them over tau under a checkpoint, another m under the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from analysis.records.results import SIDES
from analysis.records.schema import FAR_CONTEXTS, KEEP_RATE, SUBSETS
from analysis.records.store import Records
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    Statistic,
    count_clusters,
    difference,
    interval_words,
)
from analysis.stats.correlation import row_spearman
from analysis.stats.faithfulness import overlap
from analysis.stats.recovery import (
    BEST,
    Columns,
    MeasuredTargets,
    SumsBootstrap,
    over_tau_column,
    refuse_without_gain,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

_SAME_SETTINGS = ("split", "n_long", "n_short", "targets_per_block", "seed", "tau_nats")
_OWN, _COMMON = "own", "common"  # groups: over tau under this checkpoint; under both


def compare(first: Records, second: Records, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> Json:
    """Paired differences between two checkpoints, first minus second, as one JSON value.

    Every quantity has ``first``, ``second`` and ``difference``, an interval each:

    - ``share_over_tau``: of all targets; ``gap_short_minus_long``: mean over all targets, nats.
    - ``selectors[name][k]``: recovery, placebo and net recovery for the selectors and k that both have. Each
      checkpoint's recovery is over its own targets over tau, as in its summary.
    - ``selectors_on_common_targets[name][k]``: the same over the targets that are over tau under both, so that a
      difference is not one of which targets gain.
    - ``overlap[name][k]``: share of the first k tokens that both chose, over the common targets: ``true``; ``placebo``,
      where both had the same placebo; and ``chance``, k / F, what two random choices share on average.
    - ``lds_ceiling``: Spearman correlation of the two models' losses on the same random subsets of the far tokens,
      over the common targets, true and placebo: what an LDS could reach that predicts what two trainings have in
      common. None where either was measured without subsets.

    Args:
        first: records of one checkpoint.
        second: records of the other, of the same targets.
        resamples: bootstrap resamples, at least 1,000 for what is shown.
        seed: of the bootstrap.

    Raises `UserError` where the two were not measured on the same targets, or recovery is undefined for one. [ours]
    """
    both = (first, second)
    _refuse_other_targets(first, second)
    for records in both:
        refuse_without_gain(records)
    measured = (MeasuredTargets(first), MeasuredTargets(second))
    ks = [k for k in first.manifest.ks if k in second.manifest.ks]
    selectors = _common_selectors(*measured)
    if not ks or not selectors:
        raise UserError(
            f"{first.folder} and {second.folder} have no selector and k in common; measure one of them again "
            "with the --selectors and --k of the other"
        )
    document, groups = first.targets.document, first.targets.document_group
    bootstrap = SumsBootstrap(_columns(both, measured, ks), document, resamples, seed, groups)
    return {
        **{side: _of_checkpoint(records) for side, records in zip(SIDES, both, strict=True)},
        "targets": len(first.targets),
        **count_clusters(document, groups),
        "targets_over_tau_in_both": int(np.isin(first.over, second.over).sum()),
        "share_over_tau": _paired(bootstrap, [bootstrap.statistic((side, "over"), "one") for side in SIDES]),
        "gap_short_minus_long": _paired(
            bootstrap, [bootstrap.statistic((side, "gap"), "one") for side in SIDES]
        ),
        **{
            name: {
                selector: {str(k): _recoveries(bootstrap, selector, k, group) for k in ks}
                for selector in selectors
            }
            for name, group in (("selectors", _OWN), ("selectors_on_common_targets", _COMMON))
        },
        "overlap": _overlaps(bootstrap, both, [name for name in selectors if name != BEST], ks),
        "lds_ceiling": _ceiling(bootstrap, both),
        "settings": _settings(first, ks, resamples, seed),
    }


def _settings(records: Records, ks: list[int], resamples: int, seed: int) -> Json:
    """Those of both records, as the first one has them, and of the comparison."""
    manifest = records.manifest
    return {
        **{name: getattr(manifest, name) for name in _SAME_SETTINGS},
        "corpus": manifest.corpus,
        "corpus_manifest_sha256": manifest.corpus_manifest_sha256,
        "ks": ks,
        "resamples": resamples,
        "bootstrap_seed": seed,
        "interval": f"{interval_words(records.targets.document_group)}, paired",
    }


def _refuse_other_targets(first: Records, second: Records) -> None:
    one, two = first.manifest, second.manifest
    pair = f"{first.folder} and {second.folder}"
    if one.corpus_manifest_sha256 != two.corpus_manifest_sha256:
        raise UserError(
            f"{pair} were measured on different corpora ({one.corpus}, {two.corpus}); measure both on the same one"
        )
    if one.tokenizer_sha256 != two.tokenizer_sha256:
        raise UserError(f"{pair} were measured with different tokenizers; compare checkpoints that share one")
    odd = [
        f"{name} {getattr(one, name)} against {getattr(two, name)}"
        for name in _SAME_SETTINGS
        if getattr(one, name) != getattr(two, name)
    ]
    if odd:
        raise UserError(
            f"{pair} cannot be compared: {', '.join(odd)}; measure one of them again with the other's settings"
        )
    for name in ("document", "position"):
        if not np.array_equal(getattr(first.targets, name), getattr(second.targets, name)):
            raise UserError(
                f"{pair} hold different targets ({len(first.targets):,} and {len(second.targets):,}; {name} differs); "
                "measure both with the same --targets and --seed"
            )


def _common_selectors(one: MeasuredTargets, two: MeasuredTargets) -> list[str]:
    """Selectors of both, in the order of the first; `BEST` only where both chose it among the same ones."""
    common = [name for name in one.loss_nats if name in two.loss_nats]
    return common if one.loss_nats.keys() == two.loss_nats.keys() else [n for n in common if n != BEST]


def _columns(both: Sequence[Records], measured: Sequence[MeasuredTargets], ks: list[int]) -> Columns:
    """What is summed over targets for both checkpoints, each (n,)."""
    columns: Columns = {"one": np.ones(len(both[0].targets))}
    for side, records, mine, other in zip(SIDES, both, measured, reversed(measured), strict=True):
        columns[side, "over"] = over_tau_column(records)
        columns[side, "gap"] = records.targets.gain_nats
        columns |= mine.of_group((side, _OWN), ks)
        columns |= mine.of_group((side, _COMMON), ks, np.isin(mine.over, other.over))
    return columns | _agreement_columns(both, ks)


def _agreement_columns(both: Sequence[Records], ks: Sequence[int]) -> Columns:
    """Of the targets over tau under both, in each far context: which both chose tokens for, the share of the first k
    that are the same, and the correlation of the losses on the same random subsets."""
    common, *rows = np.intersect1d(both[0].over, both[1].over, return_indices=True)
    first, second = (each.targets for each in both)
    same_placebo = (first.placebo_document == second.placebo_document) & (
        first.placebo_start == second.placebo_start
    )
    columns: Columns = {}

    def add(name: Hashable, values: np.ndarray) -> None:
        columns[name] = np.zeros(len(first))
        columns[name][common] = values

    for context, members in (("true", np.ones(len(common))), ("placebo", same_placebo[common] * 1.0)):
        add(("chosen by both", context), members)
        for selector in (name for name in both[0].selected if name in both[1].selected):
            one, two = (each.selected[selector][context][own] for each, own in zip(both, rows, strict=True))
            for k in ks:
                add(("same", selector, context, k), overlap(one[:, :k], two[:, :k]) * members)
        if _same_subsets(both):
            # the same for every selector
            losses = [next(iter(each.further["subset_loss_nats"].values()))[context] for each in both]
            alike = row_spearman(*(each[own] for each, own in zip(losses, rows, strict=True)))
            add(("ceiling", context), np.nan_to_num(alike) * members)
            add(("has a ceiling", context), np.isfinite(alike) * members)
    return columns


def _same_subsets(both: Sequence[Records]) -> bool:
    first, second = ([each.manifest.options.get(name) for name in (SUBSETS, KEEP_RATE)] for each in both)
    return first == second and all("subset_loss_nats" in each.further for each in both)


def _ceiling(bootstrap: SumsBootstrap, both: Sequence[Records]) -> Json | None:
    if not _same_subsets(both):
        return None
    return {
        context: bootstrap.ratio(("ceiling", context), ("has a ceiling", context)) for context in FAR_CONTEXTS
    }


def _overlaps(
    bootstrap: SumsBootstrap, both: Sequence[Records], selectors: Sequence[str], ks: Sequence[int]
) -> Json:
    return {
        selector: {
            str(k): {
                **{
                    context: bootstrap.ratio(("same", selector, context, k), ("chosen by both", context))
                    for context in FAR_CONTEXTS
                },
                "chance": k / both[0].manifest.n_far,
            }
            for k in ks
        }
        for selector in selectors
    }


def _recoveries(bootstrap: SumsBootstrap, selector: str, k: int, group: str) -> Json:
    one, two = (bootstrap.recovery_statistics(selector, k, (side, group)) for side in SIDES)
    return {name: _paired(bootstrap, [one[name], two[name]]) for name in one}


def _paired(bootstrap: SumsBootstrap, statistics: Sequence[Statistic]) -> Json:
    first, second = statistics
    return {
        "first": bootstrap.interval(first),
        "second": bootstrap.interval(second),
        "difference": bootstrap.interval(difference(first, second)),
    }


def _of_checkpoint(records: Records) -> Json:
    manifest = records.manifest
    return {
        "records": str(records.folder),
        **{
            name: getattr(manifest, name)
            for name in (
                "checkpoint",
                "checkpoint_sha256",
                "training_seed",
                "evaluation_checkpoint",
                "evaluation_checkpoint_sha256",
                "evaluation_training_seed",
            )
        },
        "targets_over_tau": len(records.over_tau),
        "complete": len(records.over) == len(records.over_tau),
    }
