"""Measurements of text in groups: the values of the same text without groups, and intervals by group, then document."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from analysis.measure.length import measure_length
from analysis.measure.longppl import measure_longppl
from analysis.measure.needle import measure_needle
from analysis.measure.settings import LengthSettings, LongPPLSettings, NeedleSettings
from analysis.plots.length import describe_length
from analysis.stats.bootstrap import ClusterBootstrap, ratio_of_sums
from analysis.tables.models import render_length
from tests.support import tiny
from tests.support.measured import write_models

LENGTHS = (95, 64, 61, 70, 80, 66)
OF_DOCUMENT = np.array(["a", "a", "b", "b", "c", "c"])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("grouped"), LENGTHS, one={})
    shutil.copytree(folder / "corpus", folder / "grouped")
    tiny.add_groups(folder / "grouped", OF_DOCUMENT.tolist())
    return folder


def measured(made: Path, out: Path, kind: str) -> tuple[dict, dict]:
    """The result of the same measurement on text with groups, and without."""
    run = str(made / "one" / "run")
    found = []
    for corpus in ("grouped", "corpus"):
        values = {"corpus": str(made / corpus), "out": str(out / corpus), "device": "cpu", "seed": 0}
        several = {**values, "checkpoints": (run,), "labels": ("one",), "resamples": 300}
        if kind == "length":
            path = measure_length(LengthSettings(**several, lengths=(8, 16), windows=18, attention=True))
        elif kind == "needle":
            path = measure_needle(
                NeedleSettings(
                    **several,
                    lengths=(20,),
                    ks=(1,),
                    depths=(0.5,),
                    samples=12,
                    selectors=("random",),
                    recall_samples=12,
                    recall_length=20,
                )
            )
        else:
            lengths = {"n_long": 30, "n_short": 6, "sliding_window": 4, "segments": 12, "resamples": 300}
            path = measure_longppl(LongPPLSettings(**values, **lengths, checkpoint=run))
        found.append(json.loads(path.read_text()))
    return found[0], found[1]


def numbers(result: dict, kind: str) -> dict:
    if kind == "longppl":
        return result["ppl"]
    [model] = result["models"]
    return model["bins"][0]["loss_nats"] if kind == "length" else model["cells"][0]["loss_nats"]


def further_numbers(result: dict, kind: str) -> dict:
    """Of the same measurement: the entropy of the attention, the recall of needles."""
    [model] = result["models"]
    if kind == "length":
        return model["at_lengths"][0]["attention"]["entropy_nats"]
    return model["checkpoints"][0]["recall"]["selectors"]["random"]["8"]["recall"]


@pytest.mark.parametrize("kind", ["length", "needle", "longppl"])
def test_values_are_the_same_and_intervals_go_by_group(made, tmp_path, kind):
    grouped, plain = measured(made, tmp_path, kind)
    with_groups, without = numbers(grouped, kind), numbers(plain, kind)
    assert with_groups["value"] == without["value"] and with_groups["low"] != without["low"]
    if kind != "longppl":
        with_groups, without = further_numbers(grouped, kind), further_numbers(plain, kind)
        assert with_groups["value"] == without["value"] and with_groups["low"] != without["low"]
    counts = grouped if kind == "longppl" else grouped["settings"]
    assert (counts["groups"], counts["documents"]) == (3, 6)
    assert "groups" not in plain and "groups" not in plain["settings"]
    assert "by group, then document" in grouped["settings"]["interval"]
    assert "no groups are known" in plain["settings"]["interval"]


def test_the_loss_by_position_has_the_interval_of_its_table(made, tmp_path):
    grouped, plain = measured(made, tmp_path, "length")
    rows = [
        row for row in pq.read_table(tmp_path / "grouped" / "length.parquet").to_pylist() if row["from"] == 1
    ]
    documents = np.array([row["document"] for row in rows])
    assert [row["group"] for row in rows] == OF_DOCUMENT[documents].tolist()
    columns = np.array([[row["loss_sum_nats"], row["tokens"]] for row in rows])
    bootstrap = ClusterBootstrap(columns, documents, groups=OF_DOCUMENT[documents], resamples=300)
    expected = bootstrap.interval(ratio_of_sums(0, 1)).as_dict()
    assert numbers(grouped, "length") == pytest.approx(expected)
    assert "by group, then document (only 3 groups: rough)" in describe_length(grouped)
    for result, said in (
        (grouped, "[95 % interval by group, then document (only 3"),
        (plain, "[95 % interval by document (only 6 documents: rough)]"),
    ):
        assert all(str(table.caption).startswith(said) for table in render_length(result))
    assert describe_length(plain).endswith("bands and bars: 95 %, by document (only 6 documents: rough)")
