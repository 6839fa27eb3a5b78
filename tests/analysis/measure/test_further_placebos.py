"""Far contexts from the target's own group, and in random order: against a plain pass each, resumed, and in shards."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from analysis.measure.influence import measure_influence
from analysis.records.schema import FAR_CONTEXTS, FURTHER_PLACEBOS
from analysis.records.shards import MeasurementShard, merge_records
from analysis.records.store import Records, load_records
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.streams import Stream
from tests.analysis.records.test_record_damage import list_again
from tests.support import tiny
from tests.support.made_up_records import assert_same_records
from tests.support.measured import influence_settings, plain_loss
from tests.support.refusals import refused
from tests.support.slow import slow_but

N, M, KS = 40, 5, (1, 2, 4)
F = N - M
"""Targets in the middle of a document of 80 tokens have no F tokens besides what they read."""


@pytest.fixture(scope="module")
def grouped(trained, tmp_path_factory) -> Path:
    """The model, and its text with one group of three documents; every other one is a group by itself."""
    folder = tmp_path_factory.mktemp("grouped")
    shutil.copytree(trained / "run", folder / "run")
    shutil.copytree(trained / "corpus", folder / "corpus")
    count = len(TokenFiles.of_split(folder / "corpus", "heldout").document_bounds)
    tiny.add_groups(folder / "corpus", [f"book {max(0, number - 2)}" for number in range(count)])
    return folder


def settings(grouped: Path, out: Path, **changes):
    asked = {"selectors": ("leave-one-out", "random"), "targets": 150, "subsets": 4, "n_long": N}
    asked |= {"tau_nats": 1.5, **changes}
    return influence_settings(grouped, out, further_placebos=FURTHER_PLACEBOS, **asked)


@pytest.fixture(scope="module", params=slow_but([1, 3], 3))
def whole(grouped, request, tmp_path_factory) -> Records:
    out = tmp_path_factory.mktemp("whole")
    return load_records(measure_influence(settings(grouped, out, targets_per_block=request.param)))


def again(whole: Records, grouped: Path, out: Path, **changes):
    return settings(grouped, out, targets_per_block=whole.manifest.targets_per_block, **changes)


def test_losses_are_those_of_one_plain_pass_each(whole, grouped):
    targets, tokens = whole.targets, TokenFiles.of_split(grouped / "corpus", "heldout")
    model, _ = load_model(grouped / "run")
    has = targets.same_group_document[whole.over] >= 0
    assert 3 < has.sum() < len(has)
    for row in [*np.flatnonzero(has)[:3], *np.flatnonzero(~has)[:2]]:
        at = whole.over[row]
        position, place = int(targets.position[at]), targets.target_id[at] % whole.manifest.targets_per_block
        window = tokens.document(targets.document[at])[position - N - place : position]
        block = targets.target_id[at] // whole.manifest.targets_per_block
        order = np.random.default_rng([Stream.SHUFFLED, whole.manifest.seed, block]).permutation(F)
        far = {"shuffled": window[:F][order]}
        if has[row]:
            start = int(targets.same_group_start[at])
            far["same-group"] = tokens.document(targets.same_group_document[at])[start : start + F]
        for selector in whole.manifest.selectors:
            if not has[row]:
                assert np.isnan(whole.loss_nats[selector]["same-group"][row]).all()
                assert np.isnan(whole.influence[selector]["same-group"][row]).all()
                assert (whole.selected[selector]["same-group"][row] == -1).all()
            for context, first_tokens in far.items():
                text = np.concatenate([first_tokens, window[F:]])
                chosen = whole.selected[selector][context][row].tolist()
                kept = [[*sorted(chosen[:k]), *range(F, len(text))] for k in KS]
                expected = [plain_loss(model, text, each, targets.token[at]) for each in kept]
                found = whole.loss_nats[selector][context][row]
                assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_what_was_measured_without_them_is_the_same(whole, grouped, tmp_path):
    asked = again(whole, grouped, tmp_path)
    bare = load_records(measure_influence(replace(asked, further_placebos=())))
    assert bare.manifest.options == {
        name: value for name, value in whole.manifest.options.items() if name != "further_placebos"
    }
    assert bare.targets.same_group_document is None
    assert not {"same_group_document", "same_group_start"} & set(bare.targets.to_table().column_names)
    for name, column in vars(bare.targets).items():
        assert column is None or np.array_equal(column, getattr(whole.targets, name)), name
    for name in ("loss_nats", "selected", "influence"):
        for selector, by_context in getattr(bare, name).items():
            assert tuple(by_context) == FAR_CONTEXTS
            for context, values in by_context.items():
                assert np.array_equal(values, getattr(whole, name)[selector][context])


@pytest.mark.slow
def test_resumed_and_sharded_are_those_of_one_run(whole, grouped, tmp_path):
    resumed = again(whole, grouped, tmp_path / "resumed")
    measure_influence(replace(resumed, limit=5))
    part = load_records(tmp_path / "resumed")
    assert 0 < len(part.over) < len(whole.over)
    assert_same_records(whole, load_records(measure_influence(resumed)))
    for number in (1, 2):
        shard = MeasurementShard(number, 2)
        measure_influence(again(whole, grouped, tmp_path / "shards", shard=shard))
    merged = load_records(merge_records(tmp_path / "shards"))
    assert_same_records(whole, merged)
    assert merged.manifest.fingerprint == whole.manifest.fingerprint


def test_recorded_choices_are_evaluated_where_they_have_them(trained, two_seeds, tmp_path):
    changes = {"selectors": ("leave-one-out",), "targets": 30, "only_recovery": True}
    for name, asked in (("with", FURTHER_PLACEBOS), ("without", ())):
        out = tmp_path / name
        measure_influence(influence_settings(trained, out, **changes, further_placebos=asked))
    crossed = influence_settings(
        *(two_seeds, tmp_path / "crossed", tmp_path / "with"),
        **{**changes, "evaluate_with": "second", "further_placebos": FURTHER_PLACEBOS},
    )
    evaluated, own = load_records(measure_influence(crossed)), load_records(tmp_path / "with")
    for context in FURTHER_PLACEBOS:
        chosen = [each.selected["leave-one-out"][context] for each in (evaluated, own)]
        assert np.array_equal(*chosen)
    with refused("have no far context same-group, shuffled; leave it out of --further-placebos"):
        measure_influence(replace(crossed, checkpoint=str(tmp_path / "without"), out=str(tmp_path / "other")))
    with refused("'other' is no further placebo; give --further-placebos some of same-group, shuffled"):
        replace(crossed, further_placebos=("shuffled", "other"))


def test_targets_without_the_places_are_refused(whole, tmp_path):
    folder = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    path = folder / "targets.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["same_group_document", "same_group_start"]), path)
    list_again(path, folder)
    with refused("it lacks same_group_document"):
        load_records(folder)
