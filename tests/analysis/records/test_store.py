"""The records that every figure is made from: written whole, read back, never mixed."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.records.schema import FAR_CONTEXTS, SELECTIONS_SCHEMA, Examples, Manifest, SelectionRow, Targets
from analysis.records.store import RecordWriter, load_records
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import library_versions
from tests.support.refusals import refused

MANIFEST = Manifest(
    checkpoint="runs/a/final",
    checkpoint_sha256="a" * 64,
    training_seed=1,
    tokenizer_sha256="b" * 64,
    corpus="data/docs",
    corpus_manifest_sha256="c" * 64,
    split="heldout",
    n_long=32,
    n_short=8,
    tau_nats=1.0,
    ks=[1, 2, 4],
    selectors=["leave-one-out", "random"],
    seed=0,
    targets_asked=6,
    dtype="float32",
    device="cpu",
    commit="abc",
)


def make_targets() -> Targets:
    """Six targets, 10, 11, … 15; the gains of 10, 12, 13 and 15 are over 1 nat, that of 14 is 1 exactly."""
    gain = np.array([2.0, 0.5, 1.5, 4.0, 1.0, 1.25])
    long = np.array([1.0, 2.0, 3.0, 0.5, 1.0, 2.0])
    same = np.zeros(6)
    document = np.array([0, 0, 1, 2, 2, 3])
    kind = ["repeat", "name", "number", "punctuation", "function word", "content word"]
    return Targets(
        target_id=np.arange(10, 16),
        document=document,
        position=same + 40,
        token=same + 7,
        loss_long_nats=long,
        loss_short_nats=long + gain,
        selecting_gain_nats=gain,
        kind=np.array(kind),
        placebo_document=same + 1,
        placebo_start=same + 3,
    )


def rows_of(target: int, manifest: Manifest = MANIFEST) -> list[SelectionRow]:
    """A row per selector and far context, with values that tell which row they belong to."""
    rows = []
    for s, selector in enumerate(manifest.selectors):
        for c, context in enumerate(FAR_CONTEXTS):
            base = target + s / 10 + c / 100
            selected = (np.arange(4) + target + s) % 24
            rows.append(
                SelectionRow(target, selector, context, selected, [4.0, 3.0, 2.0, base], [base, 1.0, 0.5])
            )
    return rows


def make_examples() -> Examples:
    return Examples(
        target_id=np.array([10, 13]),
        context_pieces=[["a ", "</script>"] * 16, ["é", ""] * 16],
        target_piece=["\n", " x"],
        placebo_pieces=[["b"] * 24, ["c"] * 24],
        after=["", "rest"],
    )


def write(folder: Path, targets: tuple[int, ...] = (15, 10, 13, 12), finish: bool = True) -> RecordWriter:
    writer = RecordWriter(folder, MANIFEST)
    writer.write_targets(make_targets())
    for target in targets:
        writer.append(rows_of(target))
    if finish:
        writer.finish()
    return writer


def finish(writer: RecordWriter) -> None:
    """Write what is missing, as a measurement does that goes on."""
    if writer.targets is None:
        writer.write_targets(make_targets())
    if not writer.has_examples:
        writer.write_examples(make_examples())
    for target in {10, 12, 13, 15} - writer.finished_targets():
        writer.append(rows_of(target))
    writer.finish()


def test_written_and_read_back(tmp_path: Path) -> None:
    write(tmp_path)
    records = load_records(tmp_path)
    assert records.manifest == replace(MANIFEST, complete=True)
    for name, value in vars(make_targets()).items():
        np.testing.assert_array_equal(getattr(records.targets, name), value)
    assert records.over.tolist() == [0, 2, 3, 5]  # in the order of the targets, not of the parts
    for s, selector in enumerate(MANIFEST.selectors):
        for c, context in enumerate(FAR_CONTEXTS):
            base = np.array([10, 12, 13, 15]) + s / 10 + c / 100
            expected = np.stack([base, np.ones(4), np.full(4, 0.5)], axis=1)
            np.testing.assert_array_equal(records.loss_nats[selector][context], expected)
            np.testing.assert_allclose(records.influence[selector][context][:, 3], base, rtol=1e-6)
            first = (np.array([10, 12, 13, 15]) + s) % 24
            np.testing.assert_array_equal(records.selected[selector][context][:, 0], first)
    assert records.loss_nats["random"]["placebo"].dtype == np.float64
    assert records.selected["random"]["placebo"].dtype == np.int32


def test_files_have_the_documented_columns(tmp_path: Path) -> None:
    write(tmp_path)
    table = pq.read_table(tmp_path / "targets.parquet")
    assert table["gain_nats"].to_pylist() == [2.0, 0.5, 1.5, 4.0, 1.0, 1.25]
    assert table.schema.field("token").type == pa.int32()
    part = pq.read_table(tmp_path / "selections" / "part-00000.parquet")
    assert part.schema.equals(SELECTIONS_SCHEMA)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["complete"] is True and len(manifest["settings_fingerprint"]) == 64
    assert set(manifest["versions"]) >= {"python", "torch", "ai2-olmo", "olmo-sparsity", "numpy"}
    assert library_versions()["numpy"] == np.__version__


def test_a_column_that_only_some_records_have_is_read_where_it_is(tmp_path: Path) -> None:
    near_copy = np.array([True, False, False, True, False, False])
    writer = RecordWriter(tmp_path, MANIFEST)
    writer.write_targets(replace(make_targets(), near_copy=near_copy))
    finish(writer)
    read = load_records(tmp_path).targets
    np.testing.assert_array_equal(read.near_copy, near_copy)
    joined = Targets.joined([read.take(np.array([3])), read.take(np.array([0, 1]))])
    assert joined.near_copy.tolist() == [True, True, False] and joined.target_id.tolist() == [13, 10, 11]
    assert "near_copy" not in make_targets().to_table().column_names


def test_resumes_where_a_killed_writer_stopped(tmp_path: Path) -> None:
    write(tmp_path, (10, 12), finish=False)
    with_leftover = tmp_path / "selections" / ".part-00002.parquet.tmp-1"
    with_leftover.write_bytes(b"half a file")
    writer = RecordWriter(tmp_path, replace(MANIFEST, created="later", checkpoint="moved/elsewhere"))
    assert writer.manifest == MANIFEST  # what stands in the folder stays
    assert not with_leftover.exists()
    assert writer.targets is not None and len(writer.targets) == 6
    assert writer.finished_targets() == {10, 12}
    with pytest.raises(ValueError, match=r"2 targets over tau lack rows in .*, e\.g\. 13"):
        writer.finish()
    for target in (13, 15):
        writer.append(rows_of(target))
    writer.finish()
    names = sorted(path.name for path in (tmp_path / "selections").iterdir())
    assert names == [f"part-0000{i}.parquet" for i in range(4)]
    assert load_records(tmp_path).manifest.complete


def test_later_of_two_rows_counts(tmp_path: Path) -> None:
    writer = write(tmp_path, finish=False)
    writer.append([replace(row, loss_nats=[9.0, 9.0, 9.0]) for row in rows_of(13)])
    writer.finish()
    loss = load_records(tmp_path).loss_nats["random"]["true"]
    assert loss[2].tolist() == [9.0] * 3 and loss[3, 0] == 15.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tau_nats": 0.5}, "tau_nats 1.0 -> 0.5"),
        ({"ks": [1, 2]}, r"ks \[1, 2, 4\] -> \[1, 2\]"),
        ({"selectors": ["random"]}, r"selectors .*leave-one-out.* -> \['random'\]"),
        (
            {"checkpoint": "runs/b", "checkpoint_sha256": "d" * 64},
            r"runs/a/final \(a{12}\) -> runs/b \(d{12}\)",
        ),
        ({"corpus_manifest_sha256": "e" * 64}, r"corpus data/docs \(c{12}\) -> data/docs \(e{12}\)"),
        ({"tokenizer_sha256": "e" * 64}, r"tokenizer \(b{12}\) -> \(e{12}\)"),
        ({"options": {"candidates": 64}}, "candidates None -> 64"),
        ({"n_short": 16, "seed": 3}, "n_short 8 -> 16, seed 0 -> 3"),
    ],
)
def test_refuses_other_settings(tmp_path: Path, change: dict, said: str) -> None:
    write(tmp_path, (10,), finish=False)
    with pytest.raises(
        UserError, match=f"other settings: .*{said}; give another --out, or --overwrite"
    ) as refused:
        RecordWriter(tmp_path, replace(MANIFEST, **change))
    assert "\n" not in str(refused.value)


def test_overwrite_starts_anew(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "figure2.png").write_bytes(b"kept")
    writer = RecordWriter(tmp_path, replace(MANIFEST, tau_nats=0.5), overwrite=True)
    assert writer.targets is None and writer.finished_targets() == set()
    assert not Manifest.load(tmp_path).complete and Manifest.load(tmp_path).tau_nats == 0.5
    assert (tmp_path / "figure2.png").exists()


def test_overwrite_spares_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"corpus": "docs", "version": 1}')
    for overwrite in (True, False):
        with pytest.raises(UserError, match="no records folder"):
            RecordWriter(tmp_path, MANIFEST, overwrite=overwrite)
    assert (tmp_path / "manifest.json").exists()


def edit_json(path: Path, change: dict) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_refuses_another_format_version(tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "manifest.json", {"version": 0})
    for attempt in (load_records, lambda folder: RecordWriter(folder, MANIFEST)):
        with pytest.raises(UserError, match=r"format version 0, this code reads 2 to 5.*--overwrite"):
            attempt(tmp_path)
    RecordWriter(tmp_path, MANIFEST, overwrite=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "has no records .*scripts/influence.py"),
        (lambda folder: (folder / "targets.parquet").unlink(), "targets.parquet is missing.*--overwrite"),
        (
            lambda folder: (folder / "selections" / "part-00002.parquet").unlink(),
            "part-00002.parquet is missing, though it was written; run the same",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (
            lambda folder: edit_json(folder / "manifest.json", {"tau_nats": 0.1}),
            "was edited or damaged .*fingerprint",
        ),
        (lambda folder: edit_json(folder / "manifest.json", {"surprise": 1}), "wrong fields: surprise"),
    ],
)
def test_damage_is_one_line_with_a_remedy(tmp_path: Path, damage, said: str) -> None:
    write(tmp_path)
    damage(tmp_path)
    with refused(said):
        load_records(tmp_path)


def test_unfinished_records_load_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, (13, 10), finish=False).append(rows_of(15)[:2])
    with caplog.at_level(logging.WARNING):
        records = load_records(tmp_path)
    assert records.over.tolist() == [0, 3] and len(records.targets) == 6
    assert records.loss_nats["random"]["true"].shape == (2, 3)
    assert "unfinished: 2 of 4 targets over tau" in caplog.text


def test_nothing_finished_yet(tmp_path: Path) -> None:
    write(tmp_path, (), finish=False)
    with pytest.raises(UserError, match=r"no target .* is finished yet"):
        load_records(tmp_path)


def test_writer_refuses_wrong_rows(tmp_path: Path) -> None:
    writer = write(tmp_path, (), finish=False)
    with pytest.raises(ValueError, match="'oracle', which was not measured"):
        writer.append([replace(rows_of(10)[0], selector="oracle")])
    assert not (tmp_path / "selections").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_short": 32}, "must be shorter"),
        ({"ks": [2, 1]}, "ascending"),
        ({"ks": []}, "ascending"),
        ({"ks": [1, 25]}, "more than the 24 far tokens"),
        ({"selectors": ["random", "random"]}, "each selector once"),
        *(({"selectors": [name]}, "cannot be the name") for name in ("a b", "\u202eevil", "", "a\nb", "é")),
    ],
)
def test_manifest_refuses_what_cannot_be_measured(change: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(MANIFEST, **change)


def test_targets_refuse_repeated_ids_and_infinite_losses() -> None:
    with pytest.raises(ValueError, match="repeat"):
        replace(make_targets(), target_id=np.zeros(6))
    with pytest.raises(ValueError, match="not finite"):
        replace(make_targets(), loss_long_nats=np.full(6, np.inf))
    with pytest.raises(ValueError, match="shape"):
        replace(make_targets(), token=np.zeros(5))


def test_examples_are_written_and_read_back(tmp_path: Path) -> None:
    writer = write(tmp_path)
    assert load_records(tmp_path).examples is None
    writer.write_examples(make_examples())
    read = load_records(tmp_path).examples
    assert read is not None and read.to_table().equals(make_examples().to_table())


def test_the_selecting_models_gain_decides_which_targets_are_over_tau() -> None:
    targets = make_targets()
    assert targets.over(1.0).tolist() == [0, 2, 3, 5]
    other = replace(targets, selecting_gain_nats=np.array([0.0, 3.0, 0.0, 0.0, 1.1, 1.0]))
    assert other.over(1.0).tolist() == [1, 4]
    with pytest.raises(ValueError, match="unknown kinds of dependency: nonsense"):
        replace(targets, kind=np.array(["nonsense"] * 6))
