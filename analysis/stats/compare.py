"""Two checkpoints measured on the same targets: paired differences with intervals (docs/method.md, 2.4).

Both were measured on the same sampled targets, so one bootstrap by document resamples them together, and what documents
have in common cancels in a difference. Every difference is first minus second.
Shapes: n sampled targets; m of them over tau under a checkpoint, another m under the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from analysis.records.results import SIDES
from analysis.records.schema import FAR_CONTEXTS, KEEP_RATE, SUBSETS
from analysis.records.store import Records
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, Statistic, difference
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

_SAME_SETTINGS = ("split", "n_long", "n_short", "seed", "tau_nats")
_OWN, _COMMON = "own", "common"  # groups: over tau under this checkpoint; under both


def compare(first: Records, second: Records, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> Json:
    """Paired differences between two checkpoints, first minus second, as one JSON value.

    Every quantity has ``first``, ``second`` and ``difference``, an interval each:

    - ``share_over_tau``: of all targets; ``gap_short_minus_long``: mean over all targets, nats.
    - ``selectors[name][k]``: recovery, placebo and net recovery for the selectors and k that both have. Each
      checkpoint's recovery is over its own targets over tau, as in its summary.
    - ``selectors_on_common_targets[name][k]``: the same over the targets that are over tau under both, so that a
      difference is not one of which targets gain.

    Over these common targets also, true and placebo, an interval each:

    - ``overlap[name]``: share of the first k tokens of the one that are among those of the other, for each k;
      ``chance`` is k / F.
    - ``lds_ceiling``: Spearman correlation of the two models' losses on the same random subsets of the far tokens: what
      an LDS could reach that predicts what two trainings have in common. None where either was measured without them.

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
    agreed = _agreement_columns(both, measured[0], ks)
    columns = {**_columns(both, measured, ks), **agreed}
    bootstrap = SumsBootstrap(columns, first.targets.document, resamples, seed)
    return {
        **{side: _of_checkpoint(records) for side, records in zip(SIDES, both, strict=True)},
        "targets": len(first.targets),
        "documents": len(np.unique(first.targets.document)),
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
        **_agreement(bootstrap, first, ks, agreed),
        "settings": {
            **{name: getattr(first.manifest, name) for name in _SAME_SETTINGS},
            "corpus": first.manifest.corpus,
            "corpus_manifest_sha256": first.manifest.corpus_manifest_sha256,
            "ks": ks,
            "resamples": resamples,
            "bootstrap_seed": seed,
            "interval": "95 % percentile, cluster bootstrap by document, paired",
        },
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
    return columns


def _agreement_columns(both: tuple[Records, Records], measured: MeasuredTargets, ks: list[int]) -> Columns:
    """Overlap of the choices, and correlation of the losses on subsets, of the targets over tau under both."""
    first, second = both
    rows = np.flatnonzero(np.isin(first.over, second.over))
    same_rows = np.flatnonzero(np.isin(second.over, first.over))
    columns: Columns = {}

    def add(name: Hashable, values: np.ndarray) -> None:
        """Values of the common targets, as a column and one of where they are defined."""
        for part, each in (("value", np.nan_to_num(values)), ("defined", np.isfinite(values))):
            column = np.zeros(len(measured.over))
            column[rows] = each
            columns[part, name] = measured.column(column)

    common = [name for name in first.manifest.selectors if name in second.manifest.selectors]
    for context in FAR_CONTEXTS:
        for selector in common:
            one = first.selected[selector][context][rows]
            two = second.selected[selector][context][same_rows]
            for k in ks:
                add(("overlap", selector, context, k), overlap(one[:, :k], two[:, :k]))
        if _same_subsets(both):
            losses = (each.further["subset_loss_nats"] for each in both)
            one, two = (next(iter(each.values()))[context] for each in losses)  # the same for every selector
            add(("ceiling", context), row_spearman(one[rows], two[same_rows]))
    return columns


def _same_subsets(both: tuple[Records, Records]) -> bool:
    first, second = ([each.manifest.options.get(name) for name in (SUBSETS, KEEP_RATE)] for each in both)
    return first == second and all("subset_loss_nats" in each.further for each in both)


def _agreement(bootstrap: SumsBootstrap, records: Records, ks: list[int], columns: Columns) -> Json:
    """Intervals of `_agreement_columns`; ``records`` are the first ones."""

    def mean(*name: Hashable) -> Json:
        return bootstrap.ratio(("value", name), ("defined", name))

    selectors = [
        name for name in records.manifest.selectors if ("value", ("overlap", name, "true", ks[0])) in columns
    ]
    return {
        "overlap": {
            "chance": {str(k): k / records.manifest.n_far for k in ks},
            "selectors": {
                selector: {
                    context: {str(k): mean("overlap", selector, context, k) for k in ks}
                    for context in FAR_CONTEXTS
                }
                for selector in selectors
            },
        },
        "lds_ceiling": {context: mean("ceiling", context) for context in FAR_CONTEXTS}
        if ("value", ("ceiling", "true")) in columns
        else None,
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
        "targets_over_tau": len(records.targets.over(manifest.tau_nats)),
        "complete": len(records.over) == len(records.targets.over(manifest.tau_nats)),
    }
