"""LongPPL against a plain loop over tokens, and its statistics by hand."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from analysis.model.token_losses import TokenLosses
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.probes import longppl
from analysis.probes.longppl import LongPPL, LongPPLProbe, target_losses
from analysis.probes.segments import Segments, sample_segments
from tests.support import small_measurement
from tests.support.families import WINDOWED, random_model
from tests.support.plain import plain_loss
from tests.support.refusals import refused
from tests.support.small_measurement import TEXTS

N, M, S = 30, 6, 4
ALPHA, BETA = 0.4, 5.0  # so low and so high that a random model has key tokens
PROBE = LongPPLProbe(
    n_long=N, n_short=M, sliding_window=S, segments=6, alpha_nats=ALPHA, beta_nats=BETA, resamples=300
)
HOW = {"device": "cpu", "progress": False}
pytestmark = pytest.mark.usefixtures("few_are_enough")


def model_of(family):
    """Rotary, and with learned positions, which see absolute ids; with their tokenizer."""
    return random_model(family, initializer_range=0.3), small_measurement.model()[1]


@pytest.fixture(scope="module")
def segments():
    texts = open_texts(TEXTS, open_model(model_of("llama")).reader)
    return sample_segments(texts, 6, length=N, seed=0)


def token_losses(family, **options):
    return TokenLosses(open_model(model_of(family)).model, device="cpu", **options)


def plain_rows(model, text, window):
    """(long, short) loss of every target of a text."""
    return [
        (plain_loss(model, text, range(t), text[t]), plain_loss(model, text, range(t - M, t), text[t]))
        for t in range(M + window, N)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("window", [S, 1, N - M - 1])
def test_losses_equal_a_plain_loop_over_tokens(segments, family, window):
    tokens = segments.tokens[:2]
    losses = target_losses(token_losses(family), tokens, n_short=M, window=window)
    model = model_of(family)[0].eval()
    expected = np.array([plain_rows(model, text, window) for text in tokens])
    np.testing.assert_allclose(np.stack(losses, axis=-1), expected, atol=1e-4)


def test_a_window_within_the_segment_is_no_reason_to_refuse_a_model(segments):
    """Nothing is dropped, so that a window of its own counts the same tokens; Gemma 3 has one at the default N."""
    model = random_model("gemma3_text", **WINDOWED["gemma3_text"])
    measured = replace(PROBE, segments=2).measure((model, small_measurement.model()[1]), TEXTS, **HOW)
    assert measured.settings["segments_measured"] == 2
    model.eval()
    losses = target_losses(TokenLosses(open_model((model, None)).model), segments.tokens[:1], M, S)
    expected = np.array([plain_rows(model, segments.tokens[0], S)])
    np.testing.assert_allclose(np.stack(losses, axis=-1), expected, atol=1e-4)


def by_name(frame):
    """(value, low, high) by name."""
    return {row.name: (row.value, row.low, row.high) for row in frame.itertuples(index=False, name="Row")}


def within(value, *without):
    """Student's t of one degree of freedom around a value, given that of either text alone (twice)."""
    half = 12.7062047 * math.sqrt(sum((one - value) ** 2 for one in without) / 2)
    return pytest.approx((value, value - half, value + half))


def test_numbers_by_hand(monkeypatch):
    """Two texts of three targets each; alpha = beta = 2, which the last of each text only just reach."""
    long = np.array([[0.5, 1.0, 1.0], [1.5, 4.0, 2.0]])
    short = np.array([[3.5, 3.5, 3.0], [4.5, 6.0, 9.0]])  # key: two of the first text, one of the second
    monkeypatch.setattr(longppl, "target_losses", lambda *arguments: (long, short))
    segments = Segments(np.zeros((2, N)), np.arange(2), np.zeros(2), 0, np.ones((2, N), dtype=bool))
    probe = replace(PROBE, alpha_nats=2.0, beta_nats=2.0)
    rows = probe.measure_model(None, segments, lambda *arguments: nullcontext()).assign(number=0)
    numbers = by_name(probe.numbers(rows, ["a"])["numbers"])
    assert numbers["key_tokens"] == within(3, 2, 4)
    assert numbers["longppl"] == within(math.exp(1), math.exp(0.75), math.exp(1.5))
    assert {name: value for name, (value, *_) in numbers.items()} == pytest.approx(
        {
            "ppl": math.exp(10 / 6),
            "key_tokens": 3,
            "share": 0.5,
            "longppl": math.exp(1),
            "ppl_short": math.exp(29.5 / 6),
            "mean_lsd_nats": 19.5 / 6,
        }
    )


def test_the_measurement_equals_a_plain_computation(segments):
    """The whole again, from texts and a model."""
    measured = PROBE.measure(model_of("llama"), TEXTS, **HOW)
    numbers, settings = by_name(measured.numbers), measured.settings
    model = model_of("llama")[0].eval()
    long, short = np.array([row for text in segments.tokens for row in plain_rows(model, text, S)]).T
    key = (short - long > ALPHA) & (long < BETA)
    assert settings["segments_measured"] * (N - M - S) == len(long) == 6 * (N - M - S)
    assert (settings["documents"], settings["groups"]) == (len(set(segments.text)), len(set(segments.group)))
    assert measured.models[0]["family"] == "llama" and settings["texts_too_short"] == 0
    assert numbers["ppl"][0] == pytest.approx(np.exp(long.mean()), rel=1e-4)
    assert numbers["key_tokens"][0] == key.sum() >= 3
    assert numbers["longppl"][0] == pytest.approx(np.exp(long[key].mean()), rel=1e-4)


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
    assert numbers["key_tokens"][0] == 0 and np.isnan(numbers["longppl"]).all()
    saved = json.loads(measured.save(tmp_path).read_text())
    undefined = {"model": "model 1", "name": "longppl", "value": None, "low": None, "high": None}
    assert undefined in saved["numbers"] and saved["settings"] == measured.settings


def test_an_older_format_is_refused_in_one_line(tmp_path):
    measured = PROBE.measure(model_of("llama"), TEXTS, **HOW)
    path = measured.save(tmp_path)
    content = json.loads(path.read_text())
    for name in ("models", "provenance"):
        del content[name]
    path.write_text(json.dumps(content))
    with refused(r"longppl\.json is of an older format, without models, provenance; measure again"):
        LongPPL.load(tmp_path)
