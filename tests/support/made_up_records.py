"""Records as the real writer leaves them, with losses made up: what the summary and its readers are tested against."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.schema import FAR_CONTEXTS, Examples, Manifest, SelectionRow, Targets
from analysis.records.store import Records, RecordWriter, load_records
from analysis.stats.bootstrap import ClusterBootstrap, Interval, Statistic
from analysis.text.kinds import KINDS
from tests.support.made_up_summary import CURVES

MEASURED = {name: CURVES[name] for name in ("leave-one-out", "leave-one-in", "greedy", "random")}
"""Recovery at k = 1, 2, 4, 8 in the true and the placebo far context."""
UNSIGNED = {
    "leave-one-out-kl": ((0.15, 0.48, 0.65, 0.74), (0.00, -0.02, 0.00, 0.08)),
    "leave-one-out-tv": ((0.16, 0.50, 0.67, 0.75), (0.00, -0.03, 0.00, 0.09)),
    "leave-one-out-absolute": ((0.18, 0.56, 0.74, 0.83), (0.02, 0.02, 0.05, 0.04)),
}
BLOCK = 4
"""Targets per block of `made_up_training`."""
OVER_PLACEBO = {"same-group": 0.03, "shuffled": 0.14}
"""What further placebos recover more than the placebo."""
WORDS = (
    " the", " house", " of", " Mr", ".", " Éva", ",", "\n", " said", "ing", " 42", " “", "”", "", " 家", "  ",
)  # fmt: skip


def made_up_examples(target_id: np.ndarray, n_long: int, n_short: int) -> Examples:
    rng = np.random.default_rng(1)

    def pieces(count: int) -> list[str]:
        return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]

    return Examples(
        target_id,
        [pieces(n_long) for _ in target_id],
        [f" target{i}" for i in target_id],
        [pieces(n_long - n_short) for _ in target_id],
        ["".join(pieces(5)) for _ in target_id],
    )


def made_up_manifest(count: int, **changes: Any) -> Manifest:
    """A manifest of N 128, M 16 and the selectors of `MEASURED`; ``changes`` replaces any field."""
    names = ("checkpoint_sha256", "tokenizer_sha256", "corpus_manifest_sha256")
    settings: dict[str, Any] = dict(
        checkpoint="runs/a", corpus="data/docs", training_seed=1, split="heldout", n_long=128, n_short=16,
        tau_nats=1.0, ks=[1, 2, 4, 8], selectors=list(MEASURED), seed=0, targets_asked=count, dtype="float32",
        device="cpu", commit="abc", **{name: name[0] * 64 for name in names},
    )  # fmt: skip
    return Manifest(**{**settings, **changes})


def made_up_targets(count: int, documents: int, rng: np.random.Generator, crossfit: bool = False) -> Targets:
    """Most targets gain nothing from the long context, a few gain nats; documents differ in how much.

    With ``crossfit`` the evaluating model gains about half of what the selecting one does, and loses now and then.
    """
    document = rng.integers(documents, size=count)
    gain = rng.exponential(1.2, count) * (rng.random(count) < 0.3)
    gain = gain * np.exp(rng.normal(0, 0.3, documents)[document]) + rng.normal(0, 0.1, count)
    long = rng.gamma(2.0, 1.2, count)
    evaluated = gain * rng.normal(0.5, 0.4, count) if crossfit else (long + gain) - long  # as losses round it
    return Targets(
        target_id=np.arange(count),
        document=document,
        position=rng.integers(128, 900, count),
        token=rng.integers(8000, size=count),
        loss_long_nats=long,
        loss_short_nats=long + (evaluated if crossfit else gain),
        selecting_gain_nats=gain if crossfit else evaluated,
        kind=rng.choice(KINDS, count),
        placebo_document=document + 1,
        placebo_start=np.zeros(count),
    )


def write_records(folder: Path, manifest: Manifest, targets: Targets, rng: np.random.Generator) -> Records:
    """Records with the recoveries of `MEASURED` and noise about them; selectors unknown there are like greedy."""
    writer = RecordWriter(folder, manifest)
    writer.write_targets(targets)
    far = manifest.n_long - manifest.n_short
    rows = []
    for i in targets.over(manifest.tau_nats):
        gain = targets.loss_short_nats[i] - targets.loss_long_nats[i]
        for selector in manifest.selectors:
            true, placebo = (MEASURED | UNSIGNED).get(selector, MEASURED["greedy"])
            for context in manifest.far_contexts:
                if not targets.having(context)[i]:
                    continue
                curve = true if context == "true" else placebo
                recovery = np.array(curve[: len(manifest.ks)]) + rng.normal(0, 0.1)
                recovery += OVER_PLACEBO.get(context, 0.0)
                loss = targets.loss_short_nats[i] - gain * recovery
                selected = rng.permutation(far)[: manifest.k_max]
                influence = np.zeros(manifest.k_max)
                rows.append(SelectionRow(int(i), selector, context, selected, influence, loss))
    writer.append(rows)
    writer.finish()
    return load_records(folder)


def made_up_records(
    folder: Path,
    count: int = 400,
    documents: int = 60,
    tau_nats: float = 1.0,
    selectors: Sequence[str] = tuple(MEASURED),
    crossfit: bool = False,
    groups: int | None = None,
    further_placebos: Sequence[str] = (),
) -> Records:
    """Records of one measurement, or of a cross-fitted one; of documents in so many ``groups``, where there are any.

    Every seventh document has nothing else in its group.
    """
    rng = np.random.default_rng(0)
    other: dict[str, Any] = {
        "evaluation_checkpoint": "runs/b",
        "evaluation_checkpoint_sha256": "e" * 64,
        "evaluation_training_seed": 2,
    }
    manifest = made_up_manifest(
        count, tau_nats=tau_nats, selectors=list(selectors), **(other if crossfit else {})
    )
    targets = made_up_targets(count, documents, rng, crossfit)
    if groups is not None:
        names = np.array([f"book {number}" for number in range(groups)])
        own, other = names[targets.document % groups], names[targets.placebo_document % groups]
        targets = replace(targets, document_group=own, placebo_group=other)
    if further_placebos:
        manifest = replace(manifest, options={"further_placebos": list(further_placebos)})
    if "same-group" in further_placebos:
        elsewhere = np.where(targets.document % 7, targets.document + 7, -1)
        targets = replace(targets, same_group_document=elsewhere, same_group_start=np.minimum(elsewhere, 0))
    return write_records(folder, manifest, targets, rng)


def made_up_training(folder: Path, number: int) -> Records:
    """The same 400 targets under one training: another one gains more or less, by chance and on the whole."""
    targets = made_up_targets(400, 60, np.random.default_rng(0))
    rng = np.random.default_rng(number)
    gain = (1 + 0.2 * number) * targets.selecting_gain_nats + rng.normal(0, 0.3, 400)
    short = targets.loss_long_nats + gain
    gain = short - targets.loss_long_nats  # as the losses round it
    manifest = made_up_manifest(
        400, checkpoint=f"runs/{number}", checkpoint_sha256=f"{number}" * 64, training_seed=number,
        options={"targets_per_block": BLOCK},
    )  # fmt: skip
    own = replace(targets, loss_short_nats=short, selecting_gain_nats=gain)
    return write_records(folder / str(number), manifest, own, rng)


def with_further(bare: Records) -> Records:
    """The same records with made-up further columns; of greedy no summed influence, of one target a constant one."""
    rng, m, n = np.random.default_rng(1), len(bare.over), len(bare.targets)
    losses = {context: rng.gamma(2, 1, (m, 16)) for context in FAR_CONTEXTS}
    further: dict = {
        name: {}
        for name in (
            *("comprehensiveness_nats", "subset_loss_nats"),
            *("subset_influence", "leave_one_out_spearman"),
        )
    }
    for number, selector in enumerate(bare.manifest.selectors):
        noise = {context: (number + 1) * rng.normal(size=(m, 16)) for context in FAR_CONTEXTS}
        sums = {context: noise[context] - losses[context] for context in FAR_CONTEXTS}
        if selector == "greedy":
            sums = {context: np.full((m, 16), np.nan) for context in FAR_CONTEXTS}
        else:
            sums["true"][3] = 1.0
        further["subset_influence"][selector], further["subset_loss_nats"][selector] = sums, losses
        further["comprehensiveness_nats"][selector] = {
            context: rng.gamma(1, 1, (m, 4)) for context in FAR_CONTEXTS
        }
        known = np.nan if selector in ("greedy", "leave-one-out") else 1.0
        further["leave_one_out_spearman"][selector] = {
            context: known * rng.uniform(-1, 1, m) for context in FAR_CONTEXTS
        }
    long, short = bare.targets.loss_long_nats, bare.targets.loss_short_nats
    targets = replace(
        bare.targets,
        loss_short_from_0_nats=short + rng.normal(0.1, 0.2, n),
        loss_of_32_nats=long + rng.normal(0.1, 0.3, n),
        loss_of_96_nats=long + rng.normal(0.0, 0.1, n),
    )
    options = {"subsets": 16, "keep_rate": 0.5}
    return replace(bare, targets=targets, further=further, manifest=replace(bare.manifest, options=options))


def resampled_rows(records: Records, resamples: int) -> list[tuple[list[int], int]]:
    """Of each resample, documents drawn one by one: the rows of ``over`` of their targets, and how many targets."""
    row_of = {int(index): row for row, index in enumerate(records.over)}
    documents = np.unique(records.targets.document)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(resamples):
        drawn = rng.integers(len(documents), size=len(documents))
        targets = [i for each in drawn for i in np.flatnonzero(records.targets.document == documents[each])]
        found.append(([row_of[int(i)] for i in targets if int(i) in row_of], len(targets)))
    return found


def assert_same_records(a: Records, b: Records) -> None:
    """The same targets, selections and examples, to the last bit; manifests may differ."""
    for name, column in vars(a.targets).items():
        assert np.array_equal(column, getattr(b.targets, name)), name
    assert np.array_equal(a.over, b.over)
    assert a.further.keys() == b.further.keys()
    both = [{**vars(each), **each.further} for each in (a, b)]
    for name in ("loss_nats", "selected", "influence", *a.further):
        for selector, by_context in both[0][name].items():
            for context, array in by_context.items():
                np.testing.assert_array_equal(
                    array, both[1][name][selector][context], f"{name} {selector} {context}"
                )
    assert a.examples is not None and b.examples is not None
    assert a.examples.to_table().equals(b.examples.to_table())


def interval_of(columns: np.ndarray, clusters: np.ndarray, statistic: Statistic, **options: Any) -> Interval:
    """The interval of one statistic."""
    return ClusterBootstrap(columns, clusters, **options).interval(statistic)
