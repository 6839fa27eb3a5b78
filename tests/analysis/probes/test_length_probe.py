"""Loss by position against one forward pass per window and position, its statistics, and what an interruption keeps."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem, t

from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.probes.length import LengthProbe, LossByPosition, position_edges
from analysis.probes.segments import sample_segments
from analysis.stats.bootstrap import ClusterBootstrap
from olmo_sparsity.util.files import folder_lock
from tests.support import small_measurement, tiny
from tests.support.families import directory, random_model
from tests.support.plain import plain_loss
from tests.support.refusals import refused
from tests.support.small_measurement import TEXTS

LENGTHS, WINDOWS = (8, 16, 40), 9
PROBE = LengthProbe(lengths=LENGTHS, windows=WINDOWS, resamples=300)
HOW = {"device": "cpu", "progress": False}
pytestmark = pytest.mark.usefixtures("few_are_enough")


def two_models():
    return [small_measurement.model(), small_measurement.model(1)]


@pytest.fixture(scope="module")
def measured():
    return PROBE.measure(two_models(), TEXTS, labels=["one", "other"], **HOW)


@pytest.fixture(scope="module")
def segments():
    texts = open_texts(TEXTS, open_model(small_measurement.model()).reader)
    return sample_segments(texts, WINDOWS, length=LENGTHS[-1], seed=0)


@pytest.fixture(scope="module")
def plain(segments):
    """Losses at positions 1 … L-1 of every model and window, each by a pass over the tokens before it."""
    return np.array(
        [
            [
                [plain_loss(model, row, range(p), row[p]) for p in range(1, len(row))]
                for row in segments.tokens
            ]
            for model, _ in two_models()
        ]
    )


def rows_of(frame, name, model):
    rows = frame[(frame["name"] == name) & (frame["model"] == model)]
    return list(rows.itertuples(index=False))


def test_equals_one_forward_pass_per_window_and_position(measured, segments, plain):
    at = segments
    losses = measured.rows[measured.rows["name"] == "loss_nats"]
    assert len(losses) == 2 * len(set(at.text)) * (len(position_edges(LENGTHS)) - 1)
    for row in losses.itertuples():
        part = plain[row.number][at.text == row.text, row.from_tokens - 1 : row.to_tokens - 1]
        assert row.count == part.size > 0 and row.sum == pytest.approx(part.sum(), abs=1e-3)
        assert row.group == at.group[at.text == row.text][0]
    for number, model in enumerate(("one", "other")):
        bins = rows_of(measured.numbers, "loss_nats", model)
        paired = rows_of(measured.numbers, "difference_to_first_nats", model)
        assert [(row.from_tokens, row.to_tokens) for row in bins] == list(pairwise(position_edges(LENGTHS)))
        for row, to_first in zip(bins, paired, strict=True):
            part = plain[:, :, row.from_tokens - 1 : row.to_tokens - 1]
            assert row.value == pytest.approx(part[number].mean(), abs=1e-4)
            assert to_first.value == pytest.approx((part[number] - part[0]).mean(), abs=1e-4)
            assert np.isnan([to_first.low, to_first.high]).tolist() == [number == 0] * 2


def test_differences_are_paired_by_text_and_group(measured, segments, plain):
    """The interval is that of the differences themselves."""
    at = segments
    for row in rows_of(measured.numbers, "difference_to_first_nats", "other"):
        part = (plain[1] - plain[0])[:, row.from_tokens - 1 : row.to_tokens - 1]
        bootstrap = ClusterBootstrap(at.text, groups=at.group, resamples=300)
        expected = bootstrap.interval(bootstrap.ratio(part.sum(1), np.full(len(part), part.shape[1])))
        assert (row.low, row.high) == pytest.approx((expected.low, expected.high), abs=1e-3)


def test_the_loss_at_a_length_is_that_of_the_half_octave_below_it(measured, plain):
    for number, model in enumerate(("one", "other")):
        losses, rises = (
            rows_of(measured.numbers, name, model) for name in ("loss_at_length_nats", "rise_nats")
        )
        assert [row.to_tokens for row in losses] == list(LENGTHS)
        assert all(1 < row.to_tokens / row.from_tokens <= 1.5 for row in (losses[0], losses[-1]))
        means = [plain[number][:, row.from_tokens - 1 : row.to_tokens - 1].mean() for row in losses]
        assert [row.value for row in losses] == pytest.approx(means, abs=1e-4)
        assert [row.value for row in rises] == pytest.approx(np.array(means) - means[0], abs=1e-4)
        assert np.isnan([rises[0].low, rises[0].high]).all()


def test_runs_of_one_model_are_averaged_and_its_intervals_are_over_them():
    """Sums over 4 texts of 10 tokens in two bins; texts do not differ, so the interval is Student's t of runs."""
    losses = {0: (2.0, 3.0), 1: (4.0, 4.5), 2: (6.0, 6.0), 3: (1.0, 1.0)}
    sums = pd.DataFrame(
        [
            {"name": "loss_nats", "number": c, "text": text, "from_tokens": start, "to_tokens": end}
            | {"sum": 10 * loss, "count": 10}
            for c, of_bins in losses.items()
            for text in range(4)
            for (start, end), loss in zip(((1, 8), (8, 16)), of_bins, strict=True)
        ]
    )
    numbers = LengthProbe(lengths=(8, 16)).numbers_of(sums, ["three", "three", "three", "one"])

    def interval(name, model, place):
        row = rows_of(numbers, name, model)[place]
        return row.value, row.low, row.high

    def of_runs(*values):
        half = t.ppf(0.975, 2) * sem(values)
        return pytest.approx((np.mean(values), np.mean(values) - half, np.mean(values) + half))

    assert interval("loss_nats", "three", 0) == of_runs(2, 4, 6)
    assert interval("loss_nats", "one", 0) == pytest.approx((1, np.nan, np.nan), nan_ok=True)
    assert interval("difference_to_first_nats", "one", 1) == of_runs(-2, -3.5, -5)
    # the rise of a run, 1.0, 0.5 or 0: both losses are those of the same run
    assert interval("rise_nats", "three", 1) == of_runs(1, 0.5, 0)


def test_every_run_has_its_numbers_too(measured):
    both = PROBE.measure(two_models(), TEXTS, labels=["a", "a"], **HOW)
    columns = ["number", "name", "to_tokens", "value", "low", "high"]
    pd.testing.assert_frame_equal(
        both.runs[columns].reset_index(drop=True), measured.runs[columns].reset_index(drop=True)
    )
    mean = rows_of(both.numbers, "loss_at_length_nats", "a")
    of_each = [rows_of(measured.numbers, "loss_at_length_nats", model) for model in ("one", "other")]
    for row, *parts in zip(mean, *of_each, strict=True):
        assert row.value == pytest.approx(np.mean([part.value for part in parts]))


def test_an_interrupted_measurement_goes_on_with_the_model_it_was_at(measured, tmp_path, monkeypatch):
    options = {"labels": ["one", "other"], "out": tmp_path, **HOW}
    measure_model, models = LengthProbe.measure_model, []

    def interrupted(probe, token_losses, *arguments):
        models.append(token_losses.model.model)
        if len(models) == 2:
            raise KeyboardInterrupt
        return measure_model(probe, token_losses, *arguments)

    monkeypatch.setattr(LengthProbe, "measure_model", interrupted)
    both = two_models()
    with pytest.raises(KeyboardInterrupt):
        PROBE.measure(both, TEXTS, **options)
    PROBE.measure(both, TEXTS, **options)
    assert models == [model for model, _ in (both[0], both[1], both[1])]
    assert {path.name for path in tmp_path.iterdir()} == {"length.json", "length.parquet"}
    again = LossByPosition.load(tmp_path)
    for name in ("numbers", "runs", "rows"):
        expected, frame = (getattr(result, name).reset_index(drop=True) for result in (measured, again))
        pd.testing.assert_frame_equal(frame, expected, check_dtype=False)
    assert (again.settings, again.models) == (measured.settings, measured.models)


def test_older_records_are_read_under_the_names_of_today(measured, tmp_path):
    """Before 0.2.0 ``runs`` was ``trainings``."""
    path = measured.save(tmp_path)
    written = json.loads(path.read_text())
    written["trainings"] = written.pop("runs")
    path.write_text(json.dumps(written))
    again = LossByPosition.load(tmp_path)
    pd.testing.assert_frame_equal(again.runs, measured.runs.reset_index(drop=True), check_dtype=False)


def test_other_resamples_take_up_what_was_interrupted_and_leftovers_of_a_kill_are_removed(
    measured, tmp_path, monkeypatch
):
    """They are of the intervals alone: no loss changes with them."""
    monkeypatch.setattr(LengthProbe, "numbers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PROBE.measure(two_models(), TEXTS, labels=["one", "other"], out=tmp_path, **HOW)
    monkeypatch.undo()
    monkeypatch.setattr(LengthProbe, "measure_model", None)
    for name in (".length-parts.tmp-elsewhere-1", ".length.json.tmp-elsewhere-1"):
        (tmp_path / name).mkdir()
    more = replace(PROBE, resamples=400)
    again = more.measure(two_models(), TEXTS, labels=["one", "other"], out=tmp_path, **HOW)
    pd.testing.assert_frame_equal(again.rows, measured.rows, check_dtype=False)
    assert again.settings == measured.settings | {"resamples": 400}
    assert {path.name for path in tmp_path.iterdir()} == {"length.json", "length.parquet"}


def test_other_settings_do_not_take_up_what_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(LengthProbe, "numbers", interrupt)
    model = small_measurement.model()
    with pytest.raises(KeyboardInterrupt):
        PROBE.measure(model, TEXTS, out=tmp_path, **HOW)
    before = sorted(tmp_path.rglob("*"))
    with refused("was begun with other settings, and is not finished: seed 0 -> 1; give another folder"):
        replace(PROBE, seed=1).measure(model, TEXTS, out=tmp_path, **HOW)
    with folder_lock(tmp_path / "length-parts"), refused("is in use by another process"):
        PROBE.measure(model, TEXTS, out=tmp_path, **HOW)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before


def test_a_model_that_is_named_otherwise_is_not_measured_again(tmp_path, monkeypatch):
    """Its weights say which it is; what is kept of it is read, unless it is damaged."""
    folder = small_measurement.saved(tmp_path / "llama")
    link = tmp_path / "link"
    link.symlink_to(folder)
    out = tmp_path / "out"
    monkeypatch.setattr(LengthProbe, "numbers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PROBE.measure(str(folder), TEXTS, out=out, **HOW)
    monkeypatch.undo()
    monkeypatch.setattr(LengthProbe, "measure_model", None)
    [rows] = out.glob("length-parts/*/length.parquet")
    content = rows.read_bytes()
    for length in (0, 50):
        rows.write_bytes(content[:length])
        with refused(f"{rows.parent.name} is damaged; remove it, and the same call measures again"):
            PROBE.measure(str(link), TEXTS, out=out, **HOW)
    rows.write_bytes(content)
    assert PROBE.measure(str(link), TEXTS, labels=["a"], out=out, **HOW).models[0]["model"] == str(link)


def test_without_the_file_of_their_settings_parts_of_others_are_not_taken_up(tmp_path, monkeypatch):
    measured = []
    measure_model = LengthProbe.measure_model

    def counted(*arguments):
        measured.append(arguments)
        return measure_model(*arguments)

    monkeypatch.setattr(LengthProbe, "measure_model", counted)
    monkeypatch.setattr(LengthProbe, "numbers", interrupt)
    for seed, models in [(0, 1), (1, 2), (1, 2)]:
        with pytest.raises(KeyboardInterrupt):
            replace(PROBE, seed=seed).measure(small_measurement.model(), TEXTS, out=tmp_path, **HOW)
        assert len(measured) == models
        (tmp_path / "length-parts" / "settings.json").unlink()


def interrupt(*_):
    raise KeyboardInterrupt


def test_models_that_cannot_be_compared_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(LengthProbe, "measure_model", None)
    model, tokenizer = small_measurement.model()
    with refused("is given twice as a; give each seed once"):
        PROBE.measure([(model, tokenizer)] * 2, TEXTS, labels=["a", "a"], **HOW)
    with refused("--labels a: 2 models need as many labels"):
        PROBE.measure(two_models(), TEXTS, labels=["a"], **HOW)
    shifted = {f"w{token}": (token + 1) % 50 for token in range(50)} | {"unknown": 1}
    other = type(tokenizer)(type(tokenizer.model)(shifted, unk_token="unknown"))
    other.pre_tokenizer = tokenizer.pre_tokenizer
    with refused("has another tokenizer than .*losses are not of the same tokens"):
        PROBE.measure([(model, tokenizer), (model, other)], TEXTS, **HOW)
    with refused("beyond the 64 learned positions"):
        replace(PROBE, lengths=(8, 65)).measure((random_model("gpt2"), tokenizer), TEXTS, **HOW)


def test_edges_hold_every_length_and_are_narrow():
    assert position_edges((128, 256, 512, 1024))[:6] == [1, 16, 23, 32, 45, 64]
    for lengths in [(128, 256, 512, 1024), (8, 16, 40), (100, 150, 1200), (2, 3)]:
        edges = position_edges(lengths)
        assert {1, *lengths} <= set(edges) and edges[-1] == lengths[-1]
        assert edges == sorted(set(edges))
        for low, high in pairwise(edge for edge in edges if edge >= max(8, lengths[0] / 8)):
            assert high / low <= 2**0.5 * (1 + 1 / low)


def test_the_command_measures_draws_and_draws_again(tmp_path, run_here):
    """A rotary model past its 64 positions, and the same with RoPE scaled, on a prepared corpus."""
    folder = directory(tmp_path / "llama", "llama")
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(4, 90)})
    out, names = tmp_path / "out", {"length.png", "lengths.png"}
    models = [folder, f"{folder}@yarn:2", "--labels", "plain,YaRN"]
    options = ["--corpus", corpus, "--lengths", "80,16", "--windows", 4, "--device", "cpu", "--out", out]
    done = run_here("scripts/length.py", *models, *options)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == names | {"length.json", "length.parquet"}
    assert [model["rope_scaling"] for model in LossByPosition.load(out).models] == [None, "yarn:2"]
    some = ["--labels", "YaRN", "--out", out, "--figures", tmp_path / "some"]
    assert run_here("scripts/length.py", *some).returncode == 0
    assert {path.name for path in (tmp_path / "some").iterdir()} == names


def test_figures_are_drawn_beside_a_folder_of_the_same_name(measured, tmp_path):
    """A folder of runs may hold one that is called ``length``, as that of `results/models` does."""
    (tmp_path / "length").mkdir()
    assert measured.draw(tmp_path) == [tmp_path / "length.png", tmp_path / "lengths.png"]
    assert all(path.is_file() for path in measured.draw(tmp_path))
