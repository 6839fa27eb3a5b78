"""Corpora side by side: what is told of each, per token and per byte, and what cannot be compared."""

import json
from dataclasses import replace

import numpy as np
import pytest

from analysis.plots.corpora import corpora_figure
from analysis.records.trainings import joined_by_label
from analysis.stats.corpora import corpus_numbers
from analysis.stats.summary import summarize
from tests.support.made_up_length import checkpoint, length_json
from tests.support.made_up_records import (
    made_up_manifest,
    made_up_targets,
    made_up_training,
    write_records,
)
from tests.support.refusals import refused

SCRIPT = "scripts/corpora.py"
LABELS = ("English", "English", "French")
BYTES = {"English": 4.0, "French": 5.0}


def length_of(label, *shas):
    own = (checkpoint("a", label, 0.4, 1000, checkpoint_sha256=sha) for sha in shas)
    return length_json(*own, bytes_per_token=BYTES[label])


LENGTHS = [length_of("English", "1" * 64, "2" * 64), length_of("French", "3" * 64)]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return [made_up_training(folder, number) for number in (1, 2, 3)]


def numbers_of(records, label="English", lengths=LENGTHS, **changes):
    options = {"selector": "leave-one-out", "k": 4, "resamples": 1000, "seed": 0, **changes}
    return corpus_numbers(label, joined_by_label(LABELS, records)[label], lengths, **options)


def test_what_is_per_token_is_told_per_byte_too(records):
    found = numbers_of(records)
    whole = summarize(joined_by_label(LABELS, records)["English"], 1000, 0)
    assert (found["trainings"], found["bytes_per_token"]) == (2, 4.0)
    assert found["gain_nats_per_token"] == whole["all_targets"]["gap_short_minus_long"]
    assert found["gain_nats_per_byte"]["high"] == found["gain_nats_per_token"]["high"] / 4
    assert found["net_recovery"] == whole["selectors"]["leave-one-out"]["4"]["net_recovery"]
    alone = [summarize(each, 1000, 0)["share_over_tau"]["value"] for each in records[:2]]
    assert [each["value"] for each in found["share_over_tau_of_trainings"]] == alone
    (bin_,) = found["loss_by_position"]
    assert bin_["loss_nats"]["value"] == 3.0 and bin_["loss_nats_per_byte"]["value"] == 0.75
    assert numbers_of(records, "French")["loss_at_lengths"][0]["loss_nats_per_byte"]["value"] == 0.6


def test_a_checkpoint_whose_rope_was_scaled_is_another_model(records):
    scaled = [{**one, "rope_scaling": {"name": "yarn"}} for one in LENGTHS[0]["models"][0]["checkpoints"]]
    yarn = {**LENGTHS[0]["models"][0], "checkpoints": scaled, "at_lengths": []}
    both = {**LENGTHS[0], "models": [yarn, LENGTHS[0]["models"][0]]}
    assert numbers_of(records, lengths=[both])["loss_at_lengths"]
    with refused("were not measured by position together"):
        numbers_of(records, lengths=[{**both, "models": [yarn]}])


def test_function_words_which_are_known_of_english_only_count_as_other_words(records):
    targets = records[2].targets
    of_kind = {each["kind"]: each for each in numbers_of(records, "French")["kinds"]}
    assert list(of_kind) == ["repeat", "name", "number", "punctuation", "other"]
    over = targets.kind[records[2].over]
    other = int(np.isin(over, ("function word", "content word")).sum())
    assert of_kind["other"]["targets_over_tau"] == other
    assert of_kind["other"]["share_over_tau"]["value"] == pytest.approx(other / len(over))


def test_what_cannot_be_compared_is_one_line(records, tmp_path):
    with refused("were not measured by position together; give their --length"):
        numbers_of(records, lengths=[length_of("English", "1" * 64), LENGTHS[1]])
    old = length_of("French", "3" * 64)
    del old["settings"]["bytes_per_token"]
    with refused("does not tell bytes per token; measure it again with scripts/length.py"):
        numbers_of(records, "French", lengths=[old])
    with refused("has no selector nearby"):
        numbers_of(records, selector="nearby")
    rng = np.random.default_rng(0)
    other = write_records(tmp_path, made_up_manifest(200, n_long=64), made_up_targets(200, 30, rng), rng)
    with refused("the records have different N, M, tau and targets per block"):
        joined_by_label(LABELS, [*records[:2], other])
    with refused("hold different targets"):
        shuffled = replace(records[1].targets, document=records[1].targets.document[::-1].copy())
        joined_by_label(LABELS, [records[0], replace(records[1], targets=shuffled), records[2]])


def test_the_script_joins_draws_and_prints(records, tmp_path, run_here):
    for name, each in zip(("en", "fr"), LENGTHS, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "length.json").write_text(json.dumps(each))
    folders = [each.folder for each in records]
    command = [*folders, "--length", tmp_path / "en", tmp_path / "fr", "--out", tmp_path / "out"]
    printed = run_here(SCRIPT, *command, "--labels", ",".join(LABELS), "--resamples", 1000).stdout
    assert "French" in printed and "5.00" in printed
    found = json.loads((tmp_path / "out" / "corpora.json").read_text())
    assert found["corpora"] == json.loads(json.dumps([numbers_of(records), numbers_of(records, "French")]))
    assert (tmp_path / "out" / "corpora.png").stat().st_size > 10_000
    panels = corpora_figure(found).axes
    assert [axes.get_title("left")[:3] for axes in panels] == [f"({letter})" for letter in "abcdef"]
    (english, french) = [line for line in panels[5].lines if len(line.get_xdata()) == 1]
    assert english.get_ydata()[0] == 0.75 and french.get_ydata()[0] == 0.6
    assert english.get_xdata()[0] == pytest.approx(4 * np.sqrt(64 * 127))
    too_few = run_here(SCRIPT, *command, "--labels", "English,French")
    assert too_few.returncode == 1 and "3 folders of records need as many --labels" in too_few.stderr
