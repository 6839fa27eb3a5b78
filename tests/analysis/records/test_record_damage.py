"""Records that a disk, a copy or a hand has changed: never read as if they were whole, and mended by what is said."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.schema import FORMAT_VERSION, FURTHER_SELECTIONS, FURTHER_TARGETS, Manifest
from analysis.records.store import RecordWriter, load_records
from olmo_sparsity.util.errors import UserError
from tests.analysis.records.test_store import MANIFEST, edit_json, finish, make_examples, rows_of, write
from tests.support.made_up_records import assert_same_records
from tests.support.slow import slow_but

ROOT = Path(__file__).parents[3]
FILES = (
    "manifest.json",
    "checksums.json",
    "targets.parquet",
    "examples.parquet",
    "selections/part-00001.parquet",
)
PART = "selections/part-00000.parquet"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished records; tests work on copies."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, finish=False).write_examples(make_examples())
    RecordWriter(folder, MANIFEST).finish()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "records"))


def refusal(attempt: Callable[[], Any]) -> str | None:
    """The one line with which something is refused; None where it is not."""
    try:
        attempt()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_read(whole: Path, folder: Path, name: str) -> None:
    expected, path = load_records(whole), folder / name
    data, draw = path.read_bytes(), random.Random(name)
    for bit in draw.sample(range(8 * len(data)), 120):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        assert refusal(lambda: load_records(folder)), f"bit {bit} of {name}"
        assert refusal(lambda: RecordWriter(folder, MANIFEST))
    path.write_bytes(data)
    assert_same_records(load_records(folder), expected)


@pytest.mark.parametrize("name", [PART, "selections/part-00003.parquet", "examples.parquet"])
@pytest.mark.parametrize("was_finished", [True, False])
def test_what_is_said_mends_it(whole: Path, folder: Path, name: str, was_finished: bool) -> None:
    if not was_finished:
        folder = Path(shutil.copytree(folder, folder.with_name("unfinished")))
        unfinish(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    said = refusal(lambda: load_records(folder)) or ""
    assert said.endswith("remove that file and run the same scripts/influence.py command again")
    assert str(folder / name) in said
    (folder / name).unlink()
    measure_the_rest(folder)
    assert load_records(folder).manifest.complete
    assert_same_records(load_records(folder), load_records(whole))


def unfinish(folder: Path) -> None:
    """As a run leaves it that was killed before it said that it had finished."""
    replace(Manifest.load(folder), complete=False).save(folder)


def measure_the_rest(folder: Path) -> None:
    writer = RecordWriter(folder, MANIFEST)
    assert not writer.manifest.complete and writer.targets is not None
    finish(writer)


def test_mending_goes_on_after_a_kill(whole: Path, folder: Path) -> None:
    (folder / "examples.parquet").unlink()
    RecordWriter(folder, MANIFEST)  # is killed here
    measure_the_rest(folder)
    assert_same_records(load_records(folder), load_records(whole))


def test_targets_that_are_damaged_or_gone_are_measured_anew(folder: Path) -> None:
    path = folder / "targets.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    for damage in (lambda: None, path.unlink):
        damage()
        for attempt in (load_records, lambda folder: RecordWriter(folder, MANIFEST)):
            said = refusal(lambda attempt=attempt: attempt(folder)) or ""
            assert said.endswith("measure again with scripts/influence.py --overwrite")
    assert RecordWriter(folder, MANIFEST, overwrite=True).targets is None


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, time: int, *, after: bool) -> None:
    """Die where the file ``name`` is renamed into place for the ``time``-th time."""
    original, times = os.replace, []

    def rename(source: Path, target: Path) -> None:
        times.extend([1] * (Path(target).name == name))
        dies = Path(target).name == name and len(times) == time
        if dies and not after:
            raise Killed
        original(source, target)
        if dies:
            raise Killed

    monkeypatch.setattr(os, "replace", rename)


def test_a_part_without_an_entry_is_left_out_and_measured_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writer = write(folder, (10, 12), finish=False)
    before = (folder / "checksums.json").read_bytes()
    writer.append(rows_of(13))
    (folder / "checksums.json").write_bytes(before)  # as a kill between the two leaves it
    assert load_records(folder).over.tolist() == [0, 2]
    assert RecordWriter(folder, MANIFEST).finished_targets() == {10, 12}
    assert not (folder / "selections" / "part-00002.parquet").exists()
    finish(RecordWriter(folder, MANIFEST))
    assert_same_records(load_records(folder), load_records(whole))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "time"),
    [
        *(("checksums.json", time) for time in range(1, 8)),
        *(("manifest.json", time) for time in (1, 2)),
        *(
            (name, 1)
            for name in ("targets.parquet", "examples.parquet", "part-00000.parquet", "part-00003.parquet")
        ),
    ],
)
def test_killed_anywhere_the_same_command_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, time: int, after: bool
) -> None:
    folder = tmp_path / "records"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, name, time, after=after)
        finish(RecordWriter(folder, MANIFEST))
    finish(RecordWriter(folder, MANIFEST))
    assert_same_records(load_records(folder), load_records(whole))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "holds no dict"),
        ('{"../elsewhere.parquet": {"bytes": 1, "sha256": "x"}}', "it names '../elsewhere.parquet'"),
        ('{"/etc/passwd": {"bytes": 1, "sha256": "x"}}', "it names '/etc/passwd'"),
        ('{"selections/part-1.parquet": {"bytes": 1, "sha256": "x"}}', "it names"),
        ('{"selections/../part-00000.parquet": {"bytes": 1, "sha256": "x"}}', "it names"),
        ('{"targets.parquet": 3}', "targets.parquet is 3"),
        ('{"targets.parquet": {"bytes": "1", "sha256": "x"}}', "bytes is '1'"),
        ('{"targets.parquet": {"bytes": 1}}', "has no sha256"),
        (None, "checksums.json is missing; restore it, or measure again"),
    ],
)
def test_a_list_that_is_none_is_refused(folder: Path, content: str | None, said: str) -> None:
    path = folder / "checksums.json"
    path.unlink() if content is None else path.write_text(content)
    for attempt in (load_records, lambda folder: RecordWriter(folder, MANIFEST)):
        assert said in (refusal(lambda attempt=attempt: attempt(folder)) or "")
    assert (folder / PART).exists()


@pytest.mark.parametrize(
    "change",
    [{"complete": False}, {"commit": "abd"}, {"training_seed": 2}, {"created": "later"}, {"version": 2}],
)
def test_an_edited_manifest_is_refused(folder: Path, change: dict) -> None:
    edit_json(folder / "manifest.json", change)
    assert "was edited or damaged" in (refusal(lambda: load_records(folder)) or "")


# --- older formats ---


def make_old(folder: Path, version: int, **change: Any) -> Path:
    """Turn records into what older code wrote; ``change`` replaces fields that no fingerprint protects."""
    if version < 4:
        table = pq.read_table(folder / "targets.parquet")
        place = table.column_names.index("gain_nats")
        gap = pa.field("gap_long_minus_short_nats", pa.float64(), nullable=False)
        negated = pa.array(-table["gain_nats"].to_numpy())
        pq.write_table(table.set_column(place, gap, negated), folder / "targets.parquet")
        list_again(folder / "targets.parquet", folder)
    for path, further in (
        (folder / "targets.parquet", FURTHER_TARGETS),
        *((part, FURTHER_SELECTIONS) for part in (folder / "selections").iterdir()),
    ):
        table = pq.read_table(path)
        pq.write_table(
            table.drop_columns([name for name in table.column_names if name in further.names]), path
        )
        list_again(path, folder)
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), "version": version, **change}
    del manifest["checksum"]
    manifest.pop("machine", None)
    if version == 2:
        (folder / "checksums.json").unlink()
        free = {"kind", "settings_fingerprint", "checkpoint", "training_seed", "evaluation_checkpoint", "complete",
                "evaluation_training_seed", "corpus", "device", "commit", "versions", "created"}  # fmt: skip
        manifest["settings_fingerprint"] = sha256_of({k: v for k, v in manifest.items() if k not in free})
    else:
        manifest["checksum"] = sha256_of(manifest)
    path.write_text(json.dumps(manifest))
    return folder


def sha256_of(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def test_the_fingerprint_of_format_2_is_that_of_committed_records(folder: Path) -> None:
    committed = ROOT / "results" / "c4-sample" / "influence"
    found = json.loads((committed / "manifest.json").read_text())
    assert found["version"] == 2 and load_records(committed).manifest.complete
    shutil.copyfile(committed / "manifest.json", folder / "manifest.json")
    edit_json(folder / "manifest.json", {"checksum": "x"})
    make_old(folder, 2)
    assert json.loads((folder / "manifest.json").read_text()) == found


@pytest.mark.parametrize("version", [2, 3, 4])
def test_records_of_older_formats_are_read_and_not_gone_on_with(
    whole: Path, folder: Path, version: int
) -> None:
    make_old(folder, version)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    records = load_records(folder)
    assert records.manifest.version == version and records.examples is not None
    assert_same_records(
        replace(records, manifest=replace(records.manifest, version=FORMAT_VERSION)), load_records(whole)
    )
    assert RecordWriter(folder, MANIFEST).manifest.complete  # nothing to do
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (folder / PART).unlink()
    said = refusal(lambda: RecordWriter(folder, MANIFEST)) or ""
    assert f"unfinished records of format version {version}" in said
    assert said.endswith("another --out, or with --overwrite")
    assert not RecordWriter(folder, MANIFEST, overwrite=True).manifest.complete
    assert not (folder / "selections").exists()


@pytest.mark.parametrize(
    "change",
    [{"complete": "no"}, {"commit": 5}, {"versions": []}, {"training_seed": True}, {"checkpoint": None}],
)
def test_a_manifest_of_format_2_with_other_types_is_refused(folder: Path, change: dict) -> None:
    assert "was edited or damaged" in (refusal(lambda: load_records(make_old(folder, 2, **change))) or "")


# --- content that no measurement writes, whatever the checksum says ---


def rewrite(path: Path, change: Callable[[dict], None], folder: Path) -> None:
    """Change the columns of a file, and list it again where there is a list."""
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    pq.write_table(pa.Table.from_pydict(columns, schema=table.schema), path)
    list_again(path, folder)


def list_again(path: Path, folder: Path) -> None:
    data = path.read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if (folder / "checksums.json").exists():
        edit_json(folder / "checksums.json", {path.relative_to(folder).as_posix(): entry})


def put(column: str, value: Any) -> Callable[[dict], None]:
    return lambda columns: columns[column].__setitem__(0, value)


@pytest.mark.parametrize("version", [2, FORMAT_VERSION])
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (PART, put("loss_nats", [1.0, float("nan"), 1.0]), "a loss is not finite"),
        (PART, put("loss_nats", [1.0, float("inf"), 1.0]), "a loss is not finite"),
        (PART, put("loss_nats", [1.0, None, 1.0]), "a loss is not finite"),
        (PART, put("loss_nats", [1.0]), "loss_nats is not 3 long"),
        (PART, put("influence", [1.0] * 5), "influence is not 4 long"),
        (PART, put("selected", [0, 1, 2, 24]), "not in the far context"),
        (PART, put("selected", [0, -1, 2, 3]), "not in the far context"),
        (PART, put("selected", [0, None, 2, 3]), "not in the far context"),
        (PART, put("selected", [0, 1, 2, 1]), "selected twice"),
        (PART, put("target_id", 99), "what is no target"),
        (PART, put("selector", "oracle"), "the selector 'oracle', which was not measured"),
        (PART, put("far_context", "false"), "the far_context 'false', which was not measured"),
        ("targets.parquet", put("loss_long_nats", float("nan")), "not finite"),
        ("targets.parquet", put("loss_long_nats", 9.0), "gain is not"),
        ("targets.parquet", put("target_id", 12), "repeat"),
        ("targets.parquet", put("kind", "nonsense"), "unknown kinds"),
        ("examples.parquet", put("context_pieces", ["a"]), "context_pieces are not one text for every token"),
        (
            "examples.parquet",
            put("context_pieces", [None] * 32),
            "context_pieces are not one text for every token",
        ),
        (
            "examples.parquet",
            put("placebo_pieces", ["a"] * 25),
            "placebo_pieces are not one text for every token",
        ),
        ("examples.parquet", put("target_id", 9), "what is no target"),
        ("examples.parquet", put("target_id", 13), "repeat or do not ascend"),
    ],
)
def test_impossible_content_is_refused(
    folder: Path, name: str, change: Callable[[dict], None], said: str, version: int
) -> None:
    if version < FORMAT_VERSION:
        make_old(folder, version)
    rewrite(folder / name, change, folder)
    found = refusal(lambda: load_records(folder)) or ""
    assert said in found and str(folder / name) in found
    assert said in (refusal(lambda: RecordWriter(folder, MANIFEST)) or "")


def test_other_columns_are_refused(folder: Path) -> None:
    pq.write_table(pq.read_table(folder / PART).drop_columns(["influence"]), folder / PART)
    list_again(folder / PART, folder)
    assert "not those of a record" in (refusal(lambda: load_records(folder)) or "")


def test_a_file_that_is_no_parquet_is_refused(folder: Path) -> None:
    (folder / PART).write_bytes(b"PAR1 nothing")
    list_again(folder / PART, folder)
    assert "cannot be read" in (refusal(lambda: load_records(folder)) or "")
    (folder / PART).unlink()
    (folder / PART).mkdir()
    assert "cannot be read" in (refusal(lambda: load_records(folder)) or "")


# --- a full disk ---

WRITES = {
    "targets": "writer.write_targets(make_targets())",
    "examples": "writer.write_examples(make_examples())",
    "append": "writer.append(rows_of(13))",
    "finish": "writer.append(rows_of(13)); writer.append(rows_of(15)); full(); writer.finish()",
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("bytes_left", slow_but([0, 300], 300))
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    tmp_path: Path, what: str, bytes_left: int
) -> None:
    """A file-size limit stands for the full disk. With 300 bytes, some of the small files still fit."""
    folder = tmp_path / "records"
    has_targets, has_examples = what != "targets", what in ("append", "finish")
    writer = write(folder, (), finish=False) if has_targets else RecordWriter(folder, MANIFEST)
    if has_examples:
        writer.write_examples(make_examples())
        for target in (10, 12):
            writer.append(rows_of(target))
    code = f"""
import resource, signal
from analysis.records.store import RecordWriter
from olmo_sparsity.util.errors import run_script
from tests.analysis.records.test_record_damage import MANIFEST, make_examples, rows_of
from tests.analysis.records.test_store import make_targets
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_left}, {bytes_left}))
def main():
    writer = RecordWriter({str(folder)!r}, MANIFEST)
    {"" if what == "finish" else "full()"}
    {WRITES[what]}
run_script(main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: the disk is full") and done.stderr.count("\n") == 1
    assert not [path for path in folder.rglob("*") if ".tmp-" in path.name]
    if has_examples:
        found = load_records(folder)
        assert found.over.tolist() == ([0, 2, 3, 5] if what == "finish" else [0, 2])
        assert not found.manifest.complete
    finish(RecordWriter(folder, MANIFEST))
    assert load_records(folder).over.tolist() == [0, 2, 3, 5]
