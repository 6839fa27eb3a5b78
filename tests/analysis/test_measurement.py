"""A Result reads back as it was saved, alone or in a study, and says where its files were damaged."""

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.api import Result, load, load_study
from analysis.measurement import save_study
from analysis.parquet import write_table
from olmo_sparsity.util.errors import UserError
from tests.support.refusals import refused
from tests.support.results import made_result


def assert_same(a: Result, b: Result) -> None:
    assert a.settings == b.settings and a.provenance == b.provenance
    for name in ("targets", "choices"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert set(ours) == set(theirs) and len(ours) == len(theirs)
        for column in ours:
            one, other = (np.array(frame[column].to_list()) for frame in (ours, theirs))
            same = np.allclose(one, other, rtol=1e-6) if one.dtype.kind == "f" else np.array_equal(one, other)
            assert same, column


def test_a_saved_result_reads_back_with_losses_of_float32(tmp_path):
    result = made_result(groups=7, crossfit=True)
    result.save(tmp_path / "a")
    assert_same(result, load(tmp_path / "a"))
    assert np.array_equal(load(tmp_path / "a").over, result.over)


def test_a_study_keeps_its_cells_apart_with_the_columns_that_each_has(tmp_path):
    before = made_result()
    places_in_long_texts = {"text_tokens": 2**24 + 3, "before_text": 1, "before_start": 2**24 + 1}
    cells = {
        "before": replace(before, targets=before.targets.assign(**places_in_long_texts)),
        "a": made_result(groups=5),
        "b": made_result(50, tau_nats=0.5, ks=[1, 2]),
        "none": made_result(tau_nats=99),
    }
    save_study(tmp_path, cells)
    again = load_study(tmp_path)
    assert list(again) == list(cells)
    for cell, result in cells.items():
        assert_same(result, again[cell])
    with pytest.raises(UserError, match="load_study"):
        load(tmp_path)


def test_older_records_are_read_under_the_names_of_today(tmp_path):
    """Before 0.2.0 ``keep_as`` was ``give_back``, and its unit ``neighbors`` was ``three``."""
    result = made_result()
    settings = result.settings.but(keep_as=["text", "cache:2/neighbors"])
    kept_in_cache = result.choices.assign(level="cache", unit="neighbors", sinks=2)
    choices = pd.concat([result.choices, kept_in_cache], ignore_index=True)
    replace(result, settings=settings, choices=choices.replace({"unit": {"neighbors": "three"}})).save(
        tmp_path
    )
    head = tmp_path / "result.json"
    written = json.loads(head.read_text())
    of_cell = written["cells"][""]["settings"]
    del of_cell["keep_as"]
    of_cell["give_back"] = ["text", "cache:2/three"]
    head.write_text(json.dumps(written))
    assert_same(load(tmp_path), replace(result, settings=settings, choices=choices))


def test_what_is_replaced_is_shown():
    """Jupyter, the X-ray and the chosen tokens once went on with the result before."""
    result = made_result()
    half = replace(result, targets=result.targets[:100])
    assert not half.runs and not result.runs


def test_arrays_follow_the_targets_over_tau_whatever_the_order_of_the_rows():
    result = made_result()
    shuffled = replace(result, choices=result.choices.sample(frac=1, random_state=1))
    for row, target in enumerate(result.over):
        [of_target] = result.choices.query(
            f"target_id == {target} and selector == 'greedy' and far_context == 'placebo'"
        ).itertuples()
        for measurement in (result, shuffled):
            assert np.array_equal(measurement.loss_nats("greedy", "placebo")[row], of_target.loss_nats)
            assert np.array_equal(measurement.selected("greedy", "placebo")[row], of_target.selected)


def test_a_target_without_a_far_context_has_no_loss_there():
    result = made_result(far_contexts=("true", "placebo", "same-group"))
    missing = result.targets["target_id"][result.over[0]]
    choices = result.choices[
        ~((result.choices.target_id == missing) & (result.choices.far_context == "same-group"))
    ]
    loss = replace(result, choices=choices).loss_nats("greedy", "same-group")
    assert np.isnan(loss[0]).all() and np.isfinite(loss[1:]).all()


def test_joined_trainings_stand_one_behind_the_other():
    runs = [made_result(run=number) for number in range(3)]
    joined = Result.join(runs)
    assert len(joined.targets) == 3 * len(runs[0].targets)
    assert np.array_equal(joined.gain_nats, np.concatenate([run.gain_nats for run in runs]))
    losses = np.concatenate([run.loss_nats("greedy") for run in runs])
    assert np.array_equal(joined.loss_nats("greedy"), losses)
    assert joined.runs == tuple(runs) and Result.join(runs[:1]) is runs[0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: made_result(), "same weights"),
        (lambda: made_result(run=1, dtype="bf16"), 'dtype "fp32" -> "bf16"'),
        (lambda: made_result(run=1, crossfit=True), "cross-fitted"),
    ],
)
def test_what_would_not_be_one_average_is_not_joined(other, said):
    with pytest.raises(UserError, match=said):
        Result.join([made_result(), other()])


def test_parts_are_one_result_again_in_whatever_order_they_come():
    whole = replace(made_result(groups=5), provenance={"seconds": 2.0})

    def part(of):
        frames = {
            name: frame[frame["target_id"].isin(of)].reset_index(drop=True)
            for name, frame in (("targets", whole.targets), ("choices", whole.choices))
        }
        return replace(whole, **frames)

    ids = whole.targets["target_id"].to_numpy()
    third = len(ids) // 3
    parts = [part(ids[2 * third :]), part(ids[: 2 * third]), part(ids[third : 2 * third])]
    together = Result.of_parts(parts)
    assert together.provenance["seconds"] == 3 * whole.provenance["seconds"]
    assert_same(replace(together, provenance=whole.provenance), whole)
    other = replace(parts[1], settings=whole.settings.but(tau_nats=0.25))
    with refused("a part was measured with other settings: tau_nats"):
        Result.of_parts([parts[0], other])


@pytest.mark.parametrize("name", ["targets", "choices"])
def test_a_flipped_byte_in_a_page_is_found(tmp_path, name):
    """Else a disk that fails would change a number."""
    made_result(groups=7).save(tmp_path)
    path = tmp_path / f"{name}.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    path.write_bytes(damaged)
    with pytest.raises(UserError):
        load(tmp_path)


def test_of_many_results_the_one_without_its_settings_is_named(tmp_path):
    made_result().save(tmp_path)
    head = tmp_path / "result.json"
    content = json.loads(head.read_text())
    del content["cells"][""]["settings"]["n_long"]
    head.write_text(json.dumps(content))
    with refused("result.json: the result lacks settings"):
        load(tmp_path)


def without(content, *path):
    """Remove what stands at a path of keys in a JSON object."""
    *above, name = path
    for key in above:
        content = content[key]
    del content[name]


DAMAGES = {
    "no cells": (lambda content: without(content, "cells"), "holds no cells"),
    "empty cells": (lambda content: content.update(cells={}), "holds no cells"),
    "cells in a list": (lambda content: content.update(cells=[*content["cells"].values()]), "holds no cells"),
    "cells null": (lambda content: content.update(cells=None), "holds no cells"),
    "no settings": (lambda content: without(content, "cells", "", "settings"), "it has no settings"),
    "settings null": (lambda content: content["cells"][""].update(settings=None), "it has no settings"),
    "no provenance": (
        lambda content: without(content, "cells", "", "provenance"),
        "it has no provenance",
    ),
    "a cell null": (lambda content: content["cells"].update({"": None}), "it has no settings"),
    "ways of keeping in a number": (
        lambda content: content["cells"][""]["settings"].update(keep_as=4),
        "the result lacks settings",
    ),
    "a way of keeping in a number": (
        lambda content: content["cells"][""]["settings"].update(keep_as=[4]),
        "the result lacks settings",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_head_that_lacks_something_is_refused_with_the_remedy(tmp_path, damage, said):
    made_result().save(tmp_path)
    head = tmp_path / "result.json"
    content = json.loads(head.read_text())
    damage(content)
    head.write_text(json.dumps(content))
    for read in (load, load_study):
        with refused(f"result.json.* {said}.*; .*measure again"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "4"])
def test_a_head_that_is_no_json_object_is_refused_with_the_remedy(tmp_path, text):
    made_result().save(tmp_path)
    (tmp_path / "result.json").write_text(text)
    with refused("result.json is damaged .*; give a folder"):
        load(tmp_path)


def test_a_save_that_fails_leaves_the_result_that_was_there(tmp_path, monkeypatch):
    made_result(groups=7).save(tmp_path)
    names, written = sorted(tmp_path.iterdir()), []

    def full_disk(path, table, **how):
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_table(path, table, **how)

    monkeypatch.setattr("analysis.parquet.write_table", full_disk)
    with pytest.raises(OSError, match="No space"):
        made_result(groups=5).save(tmp_path)
    assert sorted(tmp_path.iterdir()) == names
    assert_same(load(tmp_path), made_result(groups=7))


def test_a_save_that_was_killed_is_no_result_of_old_and_new_frames(tmp_path, monkeypatch):
    made_result(groups=7).save(tmp_path)
    rename, renamed = os.replace, []

    def killed(old, new):
        if new.name == "targets.parquet":
            raise KeyboardInterrupt
        renamed.append(new)
        rename(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made_result(groups=5).save(tmp_path)
    assert tmp_path / "choices.parquet" in renamed
    with pytest.raises(UserError, match="is missing"):
        load(tmp_path)
