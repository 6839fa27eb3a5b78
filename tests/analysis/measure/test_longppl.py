"""LongPPL in both forms against a plain loop over tokens, its statistics by hand, and what a user does wrong."""

import json
import math

import numpy as np
import pytest

from analysis.measure.longppl import measure_longppl, score_targets
from analysis.measure.settings import LongPPLSettings
from analysis.model.load import load_for_analysis
from analysis.model.token_losses import TokenLosses
from analysis.stats.longppl import TargetLosses, key_tokens, summarize_longppl
from analysis.tables.models import render_longppl
from analysis.text.segments import sample_segments
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support.families import directory
from tests.support.measured import plain_loss, write_models
from tests.support.refusals import refused

N, M, S = 30, 6, 4
ALPHA, BETA = 0.4, 5.0  # so low and so high that a random model has key tokens
TABLE = {"scheme": "contiguous", "target_length": None}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus, and models of it: rotary, and with learned positions, which see absolute ids."""
    learned = {"positions": TABLE, "rope": False}
    return write_models(tmp_path_factory.mktemp("longppl"), (29, 30, 95, 64, 61), rope={}, learned=learned)


def model_of(made, name):
    return load_for_analysis(made / name / "run")


def settings(made, out, **changes):
    values = {"corpus": str(made / "corpus"), "out": str(out), "device": "cpu", "resamples": 300}
    values |= {"checkpoint": str(made / "rope" / "run"), "n_long": N, "n_short": M, "sliding_window": S}
    values |= {"segments": 6, "alpha_nats": ALPHA, "beta_nats": BETA}
    return LongPPLSettings(**{**values, **changes})


@pytest.fixture(scope="module")
def segments(made):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    at = sample_segments(tokens, 6, length=N, seed=0, option="--n-long")
    return at, at.read(tokens)


@pytest.fixture(scope="module")
def texts(segments):
    return segments[1]


def plain_published(model, text, n_short, window):
    """Loss of every target in the windows that the authors' code reads, with ids from 0 in each, by the target."""
    found = {}
    for start in range(0, len(text) - n_short, window):
        for target in range(start + n_short, min(start + n_short + window, len(text))):
            found[target] = plain_loss(model, text[start:], range(target - start), text[target])
    return found


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


@pytest.mark.parametrize("name", ["rope", "learned"])
@pytest.mark.parametrize("window", [S, 7, 1, N - M - 1])
def test_losses_equal_a_plain_loop_over_tokens(made, texts, name, window):
    loaded = model_of(made, name)
    found = score_targets(TokenLosses(loaded, device="cpu"), texts[:2], n_short=M, window=window)
    expected = np.array([plain_rows(loaded.model, text, window) for text in texts[:2]])
    np.testing.assert_allclose(found.long, expected[..., 0], atol=1e-4)
    np.testing.assert_allclose(found.short["exact"], expected[..., 1], atol=1e-4)
    np.testing.assert_allclose(found.short["published"], expected[..., 2], atol=1e-4)


@pytest.mark.parametrize("window", [S, 5])
def test_the_cost_is_what_the_model_reads(made, texts, window):
    engine = TokenLosses(model_of(made, "rope"), device="cpu")
    read, positions = [], {}

    def watch(model, inputs, output):
        read.append(inputs[0].numel())
        positions[inputs[0].shape[1]] = output.logits.shape[1]

    engine.model.register_forward_hook(watch)
    found = score_targets(engine, texts, n_short=M, window=window)
    assert sum(read) == sum(found.tokens_read.values())
    assert found.tokens_read["long"] == 6 * (N - 1)
    assert found.tokens_read["exact"] == found.long.size * M
    assert positions[M] == 1  # where one token is scored, no other logits are computed


def test_batch_size_changes_nothing(made, texts):
    loaded = model_of(made, "rope")
    a, b = (
        score_targets(TokenLosses(loaded, device="cpu", tokens_per_batch=size), texts, n_short=M, window=S)
        for size in (1, 131)
    )
    np.testing.assert_allclose(a.long, b.long, atol=1e-5)
    for form in a.short:
        np.testing.assert_allclose(a.short[form], b.short[form], atol=1e-5)


def test_key_tokens_lie_strictly_between_the_bounds():
    long = np.array([1.0, 1.0, 2.0, 1.9, 1.0])
    short = np.array([3.1, 3.0, 9.0, 4.0, 0.0])
    assert key_tokens(long, short, 2.0, 2.0).tolist() == [True, False, False, True, False]


def within(value, *without):
    """Student's t of one degree of freedom around a value, given that of either document alone (twice)."""
    half = 12.7062047 * math.sqrt(sum((each - value) ** 2 for each in without) / 2)
    return pytest.approx((value - half, value + half))


def test_numbers_by_hand():
    """Two documents of two targets each; alpha = beta = 2."""
    losses = TargetLosses(
        long=np.array([[0.5, 1.0], [1.5, 4.0]]),
        short={
            "exact": np.array([[3.5, 3.5], [4.5, 9.0]]),  # key: the first three
            "published": np.array([[3.0, 2.0], [4.0, 9.0]]),  # key: the first of each document
        },
        tokens_read={"long": 1, "exact": 2, "published": 3},
    )
    found = summarize_longppl(losses, np.array([0, 1]), resamples=1000)
    exact, published = found["forms"]["exact"], found["forms"]["published"]
    bounds = (published["longppl"]["low"], published["longppl"]["high"])
    assert (exact["key_tokens"]["value"], published["key_tokens"]["value"]) == (3, 2)
    assert (exact["key_tokens"]["low"], exact["key_tokens"]["high"]) == within(3, 2, 4)
    assert (exact["share"]["value"], published["share"]["value"]) == (0.75, 0.5)
    assert exact["longppl"]["value"] == pytest.approx(math.exp(1.0))
    assert published["longppl"]["value"] == pytest.approx(math.exp(1.0))
    assert bounds == within(math.exp(1), math.exp(0.5), math.exp(1.5))
    assert found["ppl"]["value"] == pytest.approx(math.exp(7 / 4))
    assert exact["ppl_short"]["value"] == pytest.approx(math.exp(20.5 / 4))
    lsd = [(3.0, 2.5), (2.5, 1.0), (3.0, 2.5), (5.0, 5.0)]
    agreement = {name: each["value"] for name, each in found["agreement"].items()}
    assert agreement == pytest.approx(
        {
            "jaccard": 2 / 3,
            "share_of_exact_found_by_published": 2 / 3,
            "share_of_published_confirmed_by_exact": 1,
            "lsd_correlation": np.corrcoef(np.array(lsd).T)[0, 1],
            "share_difference": 0.25,
            "longppl_difference": 0,
        }
    )
    assert (found["tokens_read_long"], exact["tokens_read"], published["tokens_read"]) == (1, 2, 3)


def test_the_file_equals_a_plain_computation(made, segments, tmp_path):
    """The whole measurement again, from token files and checkpoint."""
    found = json.loads(measure_longppl(settings(made, tmp_path)).read_text())
    at, texts = segments
    model = model_of(made, "rope").model
    rows = [row for text in texts for row in plain_rows(model, text, S)]
    long, *short = np.array(rows).T
    keys = [(each - long > ALPHA) & (long < BETA) for each in short]
    assert found["targets"] == len(rows) == 6 * (N - M - S)
    assert found["documents"] == len(set(at.document.tolist())) == 4
    assert found["ppl"]["value"] == pytest.approx(np.exp(long.mean()), rel=1e-4)
    for form, key in zip(("exact", "published"), keys, strict=True):
        assert found["forms"][form]["key_tokens"]["value"] == key.sum() >= 3
        assert found["forms"][form]["longppl"]["value"] == pytest.approx(np.exp(long[key].mean()), rel=1e-4)
    either = (keys[0] | keys[1]).sum()
    assert found["agreement"]["jaccard"]["value"] == pytest.approx((keys[0] & keys[1]).sum() / either)
    correlation = np.corrcoef(short[0] - long, short[1] - long)[0, 1]
    assert found["agreement"]["lsd_correlation"]["value"] == pytest.approx(correlation, abs=1e-4)
    assert (found["settings"]["sliding_window"], found["settings"]["documents_too_short"]) == (S, 1)
    assert found["checkpoint_sha256"] == model_of(made, "rope").weights_sha256


def test_defaults_and_documents(made, tmp_path):
    assert settings(made, tmp_path, sliding_window=None, n_short=4096).window == 1024  # a quarter
    assert settings(made, tmp_path, sliding_window=None, n_short=3).window == 1
    assert json.loads(measure_longppl(settings(made, tmp_path, documents=2)).read_text())["documents"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_long": M + S}, r"N = 10 leaves no target .* M \+ S = 6 \+ 4 tokens; raise --n-long"),
        ({"n_long": 99}, "no held-out document has 99 tokens, the longest has 95; lower --n-long"),
        ({"checkpoint": "nowhere"}, "nowhere is neither"),
        ({"split": "test"}, "has no split 'test'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(made, tmp_path, changes, message):
    with refused(message):
        measure_longppl(settings(made, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_measured_are_named(made, tmp_path):
    with refused("N = 33 is beyond the 32 positions"):
        measure_longppl(settings(made, tmp_path / "out", checkpoint=str(made / "learned" / "run"), n_long=33))
    llama = directory(tmp_path / "llama", "llama")
    found = measure_longppl(settings(made, tmp_path / "out", checkpoint=str(llama)))
    assert json.loads(found.read_text())["family"] == "llama"


def test_the_script_measures_and_prints_both_forms(made, tmp_path, run_here):
    """On the corpus that the run was trained on, as none is named."""
    options = ["--n-long", N, "--n-short", M, "--alpha", ALPHA, "--beta", BETA, "--segments", 6]
    done = run_here("scripts/longppl.py", made / "rope" / "run", "--out", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "longppl.json").read_text())
    assert (found["settings"]["sliding_window"], found["settings"]["corpus"]) == (1, str(made / "corpus"))
    for form in ("exact", "published"):
        assert f"{found['forms'][form]['longppl']['value']:.3f} [" in done.stdout
    for said in ("mean LSD [nats]", "exact", "published", "longppl.json"):
        assert said in done.stdout


def test_without_key_tokens_the_table_says_so_in_words(made, tmp_path):
    found = json.loads(measure_longppl(settings(made, tmp_path, alpha_nats=1e9)).read_text())
    nothing = {"value": None, "low": None, "high": None}
    assert found["forms"]["exact"]["longppl"] == found["agreement"]["jaccard"] == nothing
    assert found["forms"]["exact"]["key_tokens"]["value"] == 0
    rendered = render_longppl(found).renderables
    cells = {row: list(column.cells) for row, column in enumerate(rendered[2].columns)}
    place = [str(title) for title in cells[0]].index("LongPPL")
    assert cells[1][place] == cells[2][place] == "undefined"
    assert cells[1][0] == "0 [0, 0]"
    said = rendered[-1].plain
    assert "no key tokens in either form, so LongPPL is undefined" in said and "lower --alpha" in said
    assert "–" not in said
