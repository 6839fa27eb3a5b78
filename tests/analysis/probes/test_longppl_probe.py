"""LongPPL in both forms against a plain loop over tokens, and its statistics by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.contexts import open_texts
from analysis.model.loading import open_model
from analysis.model.token_losses import TokenLosses
from analysis.probes import longppl
from analysis.probes.longppl import (
    LongPPL,
    LongPPLProbe,
    key_tokens,
    longppl_numbers,
    segment_sums,
    target_losses,
)
from analysis.segments import sample_segments
from tests.support import small_measurement
from tests.support.families import random_model
from tests.support.plain import plain_loss
from tests.support.refusals import refused
from tests.support.small_measurement import TEXTS

N, M, S = 30, 6, 4
ALPHA, BETA = 0.4, 5.0  # so low and so high that a random model has key tokens
PROBE = LongPPLProbe(
    n_long=N, n_short=M, sliding_window=S, segments=6, alpha_nats=ALPHA, beta_nats=BETA, resamples=300
)
HOW = {"device": "cpu", "progress": False}


def model_of(family):
    """Rotary, and with learned positions, which see absolute ids; with their tokenizer."""
    return random_model(family, initializer_range=0.3), small_measurement.model()[1]


@pytest.fixture(scope="module")
def segments():
    """Places of the segments, and their tokens."""
    texts = open_texts(TEXTS, open_model(model_of("llama")).encode)
    at = sample_segments(texts, 6, length=N, seed=0)
    return at, at.read(texts)


@pytest.fixture(scope="module")
def tokens(segments):
    return segments[1]


def token_losses(family, **options):
    return TokenLosses(open_model(model_of(family)).model, device="cpu", **options)


def plain_published(model, text, n_short, window):
    """Loss of every target in the windows that the authors' code reads, with ids from 0 in each, by the target."""
    losses = {}
    for start in range(0, len(text) - n_short, window):
        for target in range(start + n_short, min(start + n_short + window, len(text))):
            losses[target] = plain_loss(model, text[start:], range(target - start), text[target])
    return losses


def plain_rows(model, text, window):
    """(long, exact short, published short) loss of every target of a text."""
    published = plain_published(model, text, M, window)
    assert sorted(published) == list(range(M, N))
    return [
        (
            plain_loss(model, text, range(t), text[t]),
            plain_loss(model, text, range(t - M, t), text[t]),
            published[t],
        )
        for t in range(M + window, N)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("window", [S, 7, 1, N - M - 1])
def test_losses_equal_a_plain_loop_over_tokens(tokens, family, window):
    losses = target_losses(token_losses(family), tokens[:2], n_short=M, window=window)
    model = model_of(family)[0].eval()
    expected = np.array([plain_rows(model, text, window) for text in tokens[:2]])
    np.testing.assert_allclose(losses["long"], expected[..., 0], atol=1e-4)
    np.testing.assert_allclose(losses["exact"], expected[..., 1], atol=1e-4)
    np.testing.assert_allclose(losses["published"], expected[..., 2], atol=1e-4)


def test_batch_size_changes_nothing(tokens):
    one, other = (
        target_losses(token_losses("llama", tokens_per_batch=size), tokens, n_short=M, window=S)
        for size in (1, 131)
    )
    for form in ("long", "exact", "published"):
        np.testing.assert_allclose(one[form], other[form], atol=1e-5)


def test_key_tokens_lie_strictly_between_the_bounds():
    long = np.array([1.0, 1.0, 2.0, 1.9, 1.0])
    short = np.array([3.1, 3.0, 9.0, 4.0, 0.0])
    assert key_tokens(long, short, 2.0, 2.0).tolist() == [True, False, False, True, False]


def by_name(frame):
    """Value and bounds by name, or by name and form."""
    return {
        (row.name if row.form == "both" else f"{row.name} {row.form}"): (row.value, row.low, row.high)
        for row in frame.itertuples(index=False, name="Row")
    }


def within(value, *without):
    """Student's t of one degree of freedom around a value, given that of either text alone (twice)."""
    half = 12.7062047 * math.sqrt(sum((one - value) ** 2 for one in without) / 2)
    return pytest.approx((value, value - half, value + half))


def test_numbers_by_hand():
    """Two texts of two targets each; alpha = beta = 2."""
    losses = {
        "long": np.array([[0.5, 1.0], [1.5, 4.0]]),
        "exact": np.array([[3.5, 3.5], [4.5, 9.0]]),  # key: the first three
        "published": np.array([[3.0, 2.0], [4.0, 9.0]]),  # key: the first of each text
    }
    rows = pd.DataFrame({"text": [0, 1], **segment_sums(losses, 2.0, 2.0)})
    numbers = by_name(longppl_numbers(rows, resamples=1000, seed=0))
    assert numbers["key_tokens exact"] == within(3, 2, 4)
    assert numbers["longppl published"] == within(math.exp(1), math.exp(0.5), math.exp(1.5))
    lsd = np.array([(3.0, 2.5), (2.5, 1.0), (3.0, 2.5), (5.0, 5.0)])
    assert {name: value for name, (value, *_) in numbers.items()} == pytest.approx(
        {
            "ppl": math.exp(7 / 4),
            "key_tokens exact": 3,
            "key_tokens published": 2,
            "share exact": 0.75,
            "share published": 0.5,
            "longppl exact": math.exp(1),
            "longppl published": math.exp(1),
            "ppl_short exact": math.exp(20.5 / 4),
            "ppl_short published": math.exp(18 / 4),
            "mean_lsd_nats exact": lsd[:, 0].mean(),
            "mean_lsd_nats published": lsd[:, 1].mean(),
            "jaccard": 2 / 3,
            "share_of_exact": 2 / 3,
            "share_of_published": 1,
            "lsd_correlation": np.corrcoef(lsd.T)[0, 1],
            "share_difference": 0.25,
            "longppl_difference": 0,
        }
    )


def test_the_measurement_equals_a_plain_computation(segments):
    """The whole again, from texts and a model."""
    measured = PROBE.measure(model_of("llama"), TEXTS, **HOW)
    numbers, settings = by_name(measured.numbers), measured.settings
    at, tokens = segments
    model = model_of("llama")[0].eval()
    rows = [row for text in tokens for row in plain_rows(model, text, S)]
    long, *short = np.array(rows).T
    keys = [(one - long > ALPHA) & (long < BETA) for one in short]
    assert settings["targets"] == len(rows) == 6 * (N - M - S)
    assert (settings["documents"], settings["groups"]) == (len(set(at.text)), len(set(at.group)))
    assert measured.models[0]["family"] == "llama" and settings["texts_too_short"] == 0
    assert numbers["ppl"][0] == pytest.approx(np.exp(long.mean()), rel=1e-4)
    for form, key in zip(("exact", "published"), keys, strict=True):
        assert numbers[f"key_tokens {form}"][0] == key.sum() >= 3
        assert numbers[f"longppl {form}"][0] == pytest.approx(np.exp(long[key].mean()), rel=1e-4)
    assert numbers["jaccard"][0] == pytest.approx((keys[0] & keys[1]).sum() / (keys[0] | keys[1]).sum())
    correlation = np.corrcoef(short[0] - long, short[1] - long)[0, 1]
    assert numbers["lsd_correlation"][0] == pytest.approx(correlation, abs=1e-4)


def test_values_are_the_same_and_intervals_go_by_group():
    ungrouped = [text for texts in TEXTS.values() for text in texts]
    grouped, plain = (PROBE.measure(model_of("llama"), texts, **HOW) for texts in (TEXTS, ungrouped))
    with_groups, without = (by_name(one.numbers)["ppl"] for one in (grouped, plain))
    assert with_groups[0] == without[0] and with_groups[1] != without[1]
    assert "groups" not in plain.settings and plain.settings["documents"] == grouped.settings["documents"]


def test_a_quarter_of_the_short_context_is_the_window():
    measured = replace(PROBE, sliding_window=0).measure(model_of("llama"), TEXTS, **HOW)
    assert measured.settings["sliding_window"] == 1


def test_what_cannot_be_measured_is_refused():
    with refused("N = 10 leaves no target"):
        replace(PROBE, n_long=M + S)
    with refused("no text has 64 tokens, the longest has 45"):
        replace(PROBE, n_long=64).measure(model_of("llama"), TEXTS["site"][1:], **HOW)
    with refused("65"):
        replace(PROBE, n_long=65).measure(model_of("gpt2"), TEXTS, **HOW)  # more than its positions


def test_without_key_tokens_longppl_is_undefined(tmp_path):
    measured = replace(PROBE, alpha_nats=1e9).measure(model_of("llama"), TEXTS, **HOW)
    numbers = by_name(measured.numbers)
    assert numbers["key_tokens exact"][0] == 0 and np.isnan(numbers["longppl exact"]).all()
    [line] = [line.split() for line in str(measured).splitlines() if line.startswith("longppl ")]
    assert line == ["longppl", "–", "[–,", "–]", "–", "[–,", "–]"]
    saved = json.loads(measured.save(tmp_path).read_text())
    undefined = {
        "model": "model 1",
        "name": "jaccard",
        "form": "both",
        "value": None,
        "low": None,
        "high": None,
    }
    assert undefined in saved["numbers"] and saved["settings"] == measured.settings


def test_the_command_measures_files_and_prints_both_forms(tmp_path, monkeypatch, capsys):
    file = tmp_path / "text.jsonl"
    rows = [{"text": text, "group": group} for group, texts in TEXTS.items() for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = model_of("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    options = ["--n-long", N, "--n-short", M, "--sliding-window", S, "--alpha", ALPHA, "--beta", BETA]
    options += ["--segments", 6, "--device", "cpu"]
    command = ["longppl", tmp_path / "model", "--text", file, "--out", tmp_path / "out", *options]
    monkeypatch.setattr("sys.argv", list(map(str, command)))
    longppl.main()
    printed = capsys.readouterr().out
    expected = replace(PROBE, resamples=2000).measure(model_of("llama"), TEXTS, **HOW)
    for name in ("longppl", "mean_lsd_nats", "jaccard"):
        [line] = [line for line in str(expected).splitlines() if line.split()[:1] == [name]]
        assert line in printed
    again = LongPPL.load(tmp_path / "out")
    assert again.numbers["value"].tolist() == pytest.approx(expected.numbers["value"].tolist())
