"""Shards of a measurement, and their merge: the records of one run without them, to the last bit."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import analysis.measure.influence as influence_module
import analysis.records.shards as merge_module
from analysis.measure.influence import measure_influence
from analysis.records.schema import FORMAT_VERSION, Manifest
from analysis.records.shards import MeasurementShard, merge_records
from analysis.records.store import load_records
from olmo_sparsity.util.errors import UserError
from tests.analysis.records.test_record_damage import make_old, put, rewrite
from tests.support.made_up_records import assert_same_records
from tests.support.measured import influence_settings
from tests.support.refusals import assert_refused, refused

ROOT = Path(__file__).parents[3]
COUNT = 3


def settings(trained, out, shard=None, **changes):
    values = {
        "tau_nats": 1.5,
        "ks": (1, 2),
        "selectors": ("leave-one-out", "random"),
        "targets": 300,  # 5 blocks of 64, so that shards have 2, 2 and 1
        "shard": MeasurementShard(shard, COUNT) if shard else None,
    }
    return influence_settings(trained, out, **{**values, **changes})


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """The records of a run without shards."""
    return load_records(measure_influence(settings(trained, tmp_path_factory.mktemp("whole"))))


@pytest.fixture(scope="module")
def measured(trained, tmp_path_factory):
    """A folder with every shard; tests work on copies."""
    out = tmp_path_factory.mktemp("sharded")
    for number in (2, 3, 1):
        measure_influence(settings(trained, out, number))
    return out


@pytest.fixture
def out(measured, tmp_path):
    return Path(shutil.copytree(measured, tmp_path / "records"))


def test_merged_shards_equal_the_unsharded_run_bit_for_bit(whole, out):
    assert len(whole.over) > 20
    parts = [load_records(MeasurementShard(number, COUNT).folder(out)) for number in (1, 2, 3)]
    assert all(len(part.targets) < 300 for part in parts)
    merged = load_records(merge_records(out))
    assert_same_records(whole, merged)
    assert merged.manifest.complete
    assert merged.manifest.fingerprint == whole.manifest.fingerprint


def test_shards_none_of_whose_targets_is_shown_are_merged(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(influence_module, "EXAMPLES_FROM_TARGETS", 0)
    for number in (1, 2, 3):
        measure_influence(settings(trained, tmp_path, number))
    assert len(load_records(merge_records(tmp_path)).examples) == 0


def test_an_unsharded_run_takes_the_merged_records_for_its_own(trained, out):
    merge_records(out)
    before = (out / "manifest.json").read_bytes()
    measure_influence(settings(trained, out))
    assert (out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("renamed_before", [0, 1, 2, 3, 4])
def test_a_killed_merge_leaves_no_records_and_is_done_again(whole, out, monkeypatch, renamed_before):
    original, calls = merge_module.os.replace, []

    def killed(*args):
        if Path(args[0]).parent.name == ".merging" and Path(args[1]).parent == out:
            calls.append(1)
            if len(calls) > renamed_before:
                raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(merge_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_records(out)
    with pytest.raises(UserError, match="has no records"):
        load_records(out)
    monkeypatch.setattr(merge_module.os, "replace", original)
    assert_same_records(whole, load_records(merge_records(out)))
    made = {path.name for path in out.iterdir()} - {"verified.json"}  # that the shards remember there
    assert sorted(made) == [
        "checksums.json",
        "examples.parquet",
        "manifest.json",
        "selections",
        *(f"shard-{number}-of-3" for number in (1, 2, 3)),
        "targets.parquet",
    ]


def test_one_process_at_a_time_writes_the_merged_records(out):
    code = (
        "import sys; from olmo_sparsity.util.lock import folder_lock\n"
        "with folder_lock(sys.argv[1]): print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, out], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    holder.stdout.readline()
    before = sorted(out.rglob("*"))
    with refused(f"records is in use by process {holder.pid} on "):
        merge_records(out)
    assert sorted(out.rglob("*")) == before
    holder.communicate("\n")
    merge_records(out)


def test_shards_of_an_older_format_are_merged_into_records_of_the_present_one(whole, out):
    for number in (1, 2, 3):
        make_old(MeasurementShard(number, COUNT).folder(out), 2)
    merged = load_records(merge_records(out))
    assert merged.manifest.version == FORMAT_VERSION
    assert merged.further == {} and merged.targets.loss_short_from_0_nats is None
    bare = replace(whole, further={}, targets=replace(whole.targets, loss_short_from_0_nats=None))
    assert_same_records(bare, merged)
    merge_records(out)  # is left as it is


def test_a_damaged_shard_is_refused_and_mended(trained, whole, out):
    folder = MeasurementShard(2, COUNT).folder(out)
    path = next((folder / "selections").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError, match="remove that file and run the same scripts/influence.py command again"
    ):
        merge_records(out)
    path.unlink()
    measure_influence(settings(trained, out, 2))
    assert_same_records(whole, load_records(merge_records(out)))


@pytest.mark.parametrize("version", [2, 4])
def test_a_shard_with_losses_that_are_not_finite_is_refused(out, version):
    folder = MeasurementShard(2, COUNT).folder(out)
    if version == 2:
        make_old(folder, 2)
    rewrite(next((folder / "selections").iterdir()), put("loss_nats", [1.0, float("nan")]), folder)
    with refused("a loss is not finite"):
        merge_records(out)
    assert not (out / "manifest.json").exists()


def test_an_interrupted_shard_goes_on_and_still_equals_the_unsharded_run(trained, whole, out, monkeypatch):
    folder = MeasurementShard(1, COUNT).folder(out)
    shutil.rmtree(folder)
    original, calls = influence_module.selected_losses, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) > 6:  # in the middle of the second round of targets
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(influence_module, "selected_losses", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_influence(settings(trained, out, 1))
    with pytest.raises(UserError, match=r"unfinished shard 1/3; run the same .* --shard 1/3"):
        merge_records(out)
    monkeypatch.setattr(influence_module, "selected_losses", original)
    measure_influence(settings(trained, out, 1))
    assert_same_records(whole, load_records(merge_records(out)))


def test_missing_and_unfinished_shards_are_all_named_in_one_line(out):
    shutil.rmtree(MeasurementShard(3, COUNT).folder(out))
    unfinished = MeasurementShard(1, COUNT).folder(out)
    replace(Manifest.load(unfinished), complete=False).save(unfinished)
    with refused("missing shard 3/3; unfinished shard 1/3"):
        merge_records(out)
    assert not (out / "manifest.json").exists()


def test_a_shard_of_other_settings_is_refused(trained, out):
    shutil.rmtree(MeasurementShard(2, COUNT).folder(out))
    measure_influence(settings(trained, out, 2, seed=5))
    with pytest.raises(UserError, match="other settings than .*seed 0 -> 5"):
        merge_records(out)


def test_two_divisions_are_refused(trained, out):
    measure_influence(replace(settings(trained, out), shard=MeasurementShard(1, 2)))
    with pytest.raises(UserError, match="shards of 2 and of 3; remove the folders of all but one"):
        merge_records(out)


def test_a_folder_of_another_measurement_is_left_alone(trained, out):
    shutil.copytree(measure_influence(settings(trained, out / "x", seed=4)), out, dirs_exist_ok=True)
    with pytest.raises(UserError, match="another measurement than its shards: seed 4 -> 0"):
        merge_records(out)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no shards to merge"):
        merge_records(tmp_path)


def test_a_shard_without_a_target_over_tau_is_finished_and_only_all_of_them_are_too_few(trained, tmp_path):
    for number in (1, 2, 3):
        measure_influence(settings(trained, tmp_path, number, tau_nats=90.0))
    with pytest.raises(UserError, match="none of 300 targets gains more than tau = 90.0"):
        merge_records(tmp_path)


def test_more_shards_than_blocks_are_refused(trained, tmp_path):
    with pytest.raises(UserError, match="300 targets make 5 blocks of 64, too few for 6 shards"):
        measure_influence(replace(settings(trained, tmp_path / "out"), shard=MeasurementShard(1, 6)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="i/n with i from 1 to n"):
        MeasurementShard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_block_is_in_exactly_one_shard(count):
    for block in range(30):
        assert sum(MeasurementShard(number, count).has(block) for number in range(1, count + 1)) == 1


@pytest.mark.slow
def test_the_scripts_measure_merge_and_draw(trained, tmp_path):
    def run(*command):
        return subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
        )

    out = tmp_path / "records"
    measure = (
        "scripts/influence.py",
        trained / "run",
        "--corpus",
        trained / "corpus",
        "--out",
        out,
        "--k",
        1,
    )
    measure += ("--n-long", 20, "--n-short", 5, "--tau", 0.3, "--targets", 128, "--selectors", "random")
    first = run(*measure, "--shard", "1/2")
    assert first.returncode == 0, first.stderr
    assert_refused(run("scripts/merge_records.py", out), "missing shard 2/2")
    assert run(*measure, "--shard", "2/2").returncode == 0
    merge = run("scripts/merge_records.py", out)
    assert merge.returncode == 0, merge.stderr
    draw = run("scripts/figure2.py", out)
    assert draw.returncode == 0, draw.stderr
    assert (out / "figure2.png").is_file()


def test_a_copy_of_a_shard_in_place_of_another_is_refused(out):
    second, third = (MeasurementShard(number, COUNT).folder(out) for number in (2, 3))
    shutil.rmtree(third)
    shutil.copytree(second, third)
    with refused("shard-3-of-3 holds shard 2/3, not 3/3; was it renamed"):
        merge_records(out)
