"""LongPPL in both forms against a plain loop over tokens, its statistics by hand, and what a user does wrong."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.measure.longppl import measure_longppl, score_targets
from analysis.measure.settings import LongPPLSettings
from analysis.model.load import load_for_analysis
from analysis.model.token_losses import TokenLosses
from analysis.stats.longppl import TargetLosses, key_tokens, render_longppl, summarize_longppl
from analysis.text.segments import sample_segments
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from tests.analysis.model.test_load import directory
from tests.olmo_sparsity.test_export import checkpoint
from tests.support import tiny
from tests.support.replaced_tokens import assert_refused_and_right_ones_remembered

ROOT = Path(__file__).parents[3]
N, M, S = 30, 6, 4
ALPHA, BETA = 0.4, 5.0  # so low and so high that a random model has key tokens
TABLE = {"scheme": "contiguous", "target_length": None}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus, and models of it: rotary, and with learned positions, which see absolute ids."""
    folder = tmp_path_factory.mktemp("longppl")
    documents = [d for n in (29, 30, 95, 64, 61) for d in tiny.random_documents(1, n, seed=n)]
    corpus = tiny.write_corpus(folder / "corpus", {"heldout": documents})
    for name, changes in (("rope", {}), ("learned", {"positions": TABLE, "rope": False})):
        (folder / name).mkdir()
        checkpoint(folder / name, corpus=corpus, **changes)
    return folder


def settings(made, out, **changes):
    values = {
        "checkpoint": str(made / "rope" / "run"),
        "corpus": str(made / "corpus"),
        "out": str(out),
        "n_long": N,
        "n_short": M,
        "sliding_window": S,
        "segments": 6,
        "alpha_nats": ALPHA,
        "beta_nats": BETA,
        "device": "cpu",
        "resamples": 300,
    }
    return LongPPLSettings(**{**values, **changes})


def segments_of(made, length=N):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    at = sample_segments(tokens, 6, length=length, seed=0, option="--n-long")
    return at, at.read(tokens)


@torch.no_grad()
def plain_loss(model, text, target, context, ids):
    """-log p of token ``target`` of a segment given the tokens ``context`` at position ids ``ids``."""
    inputs = torch.tensor([[int(text[j]) for j in context]])
    logits = model(inputs, position_ids=torch.tensor([list(ids)])).logits[0, -1]
    return float(-logits.double().log_softmax(-1)[int(text[target])])


def plain_published(model, text, n_short, window):
    """Loss of every target in the windows that the authors' code reads, by the target."""
    found = {}
    for start in range(0, len(text) - n_short, window):
        for target in range(start + n_short, min(start + n_short + window, len(text))):
            context = range(start, target)
            found[target] = plain_loss(model, text, target, context, range(len(context)))
    return found


@pytest.mark.parametrize("name", ["rope", "learned"])
@pytest.mark.parametrize("window", [S, 7, 1, N - M - 1])
def test_losses_equal_a_plain_loop_over_tokens(made, name, window):
    loaded = load_for_analysis(made / name / "run")
    _, texts = segments_of(made)
    found = score_targets(TokenLosses(loaded, device="cpu"), texts[:2], n_short=M, window=window)
    for row, text in enumerate(texts[:2]):
        published = plain_published(loaded.model, text, M, window)
        targets = range(M + window, N)
        assert sorted(published) == list(range(M, N))
        assert found.long.shape == (2, len(targets))
        for column, t in enumerate(targets):
            long = plain_loss(loaded.model, text, t, range(t), range(t))
            exact = plain_loss(loaded.model, text, t, range(t - M, t), range(t - M, t))
            assert found.long[row, column] == pytest.approx(long, abs=1e-4)
            assert found.short["exact"][row, column] == pytest.approx(exact, abs=1e-4)
            assert found.short["published"][row, column] == pytest.approx(published[t], abs=1e-4)


def test_the_targets_left_out_have_one_context_in_the_published_form(made):
    """Those with fewer than M + S tokens before them: long and short are the same, so none is a key token."""
    loaded = load_for_analysis(made / "learned" / "run")
    _, texts = segments_of(made)
    published = plain_published(loaded.model, texts[0], M, S)
    for t in range(M, M + S):
        assert published[t] == plain_loss(loaded.model, texts[0], t, range(t), range(t))
    assert published[M + S] != plain_loss(loaded.model, texts[0], M + S, range(M + S), range(M + S))


def test_both_forms_are_one_where_every_target_has_its_own_window(made):
    """S = 1 and a rotary model, which sees no absolute ids."""
    _, texts = segments_of(made)
    found = {
        name: score_targets(
            TokenLosses(load_for_analysis(made / name / "run"), device="cpu"), texts, n_short=M, window=1
        ).short
        for name in ("rope", "learned")
    }
    np.testing.assert_allclose(found["rope"]["exact"], found["rope"]["published"], atol=1e-5)
    assert np.abs(found["learned"]["exact"] - found["learned"]["published"]).max() > 0.1


@pytest.mark.parametrize("window", [S, 5])
def test_the_cost_is_what_the_model_reads(made, window):
    engine = TokenLosses(load_for_analysis(made / "rope" / "run"), device="cpu")
    _, texts = segments_of(made)
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


def test_batch_size_changes_nothing(made):
    loaded = load_for_analysis(made / "rope" / "run")
    _, texts = segments_of(made)
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
    exact, published, agreement = *(found["forms"][f] for f in ("exact", "published")), found["agreement"]
    assert (exact["key_tokens"]["value"], published["key_tokens"]["value"]) == (3, 2)
    assert (exact["key_tokens"]["low"], exact["key_tokens"]["high"]) == (2, 4)  # one document twice
    assert (exact["share"]["value"], published["share"]["value"]) == (0.75, 0.5)
    assert exact["longppl"]["value"] == pytest.approx(math.exp(1.0))
    assert published["longppl"]["value"] == pytest.approx(math.exp(1.0))
    assert (published["longppl"]["low"], published["longppl"]["high"]) == pytest.approx(
        (math.exp(0.5), math.exp(1.5))
    )
    assert found["ppl"]["value"] == pytest.approx(math.exp(7 / 4))
    assert exact["ppl_short"]["value"] == pytest.approx(math.exp(20.5 / 4))
    assert agreement["jaccard"]["value"] == pytest.approx(2 / 3)
    assert agreement["share_of_exact_found_by_published"]["value"] == pytest.approx(2 / 3)
    assert agreement["share_of_published_confirmed_by_exact"]["value"] == 1
    lsd = [(3.0, 2.5), (2.5, 1.0), (3.0, 2.5), (5.0, 5.0)]
    assert agreement["lsd_correlation"]["value"] == pytest.approx(np.corrcoef(np.array(lsd).T)[0, 1])
    assert agreement["share_difference"]["value"] == 0.25
    assert agreement["longppl_difference"]["value"] == pytest.approx(0)
    assert [found["tokens_read_long"], *(found["forms"][f]["tokens_read"] for f in found["forms"])] == [
        1,
        2,
        3,
    ]


def test_without_key_tokens_there_is_no_longppl():
    losses = TargetLosses(
        np.ones((2, 3)),
        {f: np.ones((2, 3)) for f in ("exact", "published")},
        {"long": 0, "exact": 0, "published": 0},
    )
    found = summarize_longppl(losses, np.arange(2), resamples=1000)
    nothing = {"value": None, "low": None, "high": None}
    assert found["forms"]["exact"]["longppl"] == found["agreement"]["jaccard"] == nothing
    assert found["agreement"]["lsd_correlation"] == nothing
    assert found["forms"]["exact"]["key_tokens"]["value"] == 0
    assert found["ppl"]["value"] == pytest.approx(math.e)


def test_the_file_equals_a_plain_computation(made, tmp_path):
    """The whole measurement again, from token files and checkpoint."""
    path = measure_longppl(settings(made, tmp_path))
    found = json.loads(path.read_text())
    model = load_for_analysis(made / "rope" / "run").model
    at, texts = segments_of(made)
    rows = []
    for text in texts:
        published = plain_published(model, text, M, S)
        for t in range(M + S, N):
            long = plain_loss(model, text, t, range(t), range(t))
            exact = plain_loss(model, text, t, range(t - M, t), range(t - M, t))
            rows.append((long, exact, published[t]))
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
    assert found["checkpoint_sha256"] == load_for_analysis(made / "rope" / "run").weights_sha256


def test_the_window_is_a_quarter_of_m_by_default(made, tmp_path):
    assert settings(made, tmp_path, sliding_window=None, n_short=4096).window == 1024
    assert settings(made, tmp_path, sliding_window=None, n_short=3).window == 1


def test_fewer_documents_are_drawn_from_where_asked(made, tmp_path):
    found = json.loads(measure_longppl(settings(made, tmp_path, documents=2)).read_text())
    assert found["documents"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_long": M + S}, r"N = 10 leaves no target .* M \+ S = 6 \+ 4 tokens; raise --n-long"),
        ({"n_short": 0}, "must be at least 1"),
        ({"sliding_window": 0}, "mend --n-short or --sliding-window"),
        ({"n_long": 99}, "no held-out document has 99 tokens, the longest has 95; lower --n-long"),
        ({"segments": 0}, "nothing to measure"),
        ({"documents": 0}, "nothing to measure"),
        ({"checkpoint": "nowhere"}, "nowhere is neither"),
        ({"split": "test"}, "has no split 'test'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(made, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        measure_longppl(settings(made, tmp_path / "out", **changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_measured_are_named(made, tmp_path):
    learned = replace(settings(made, tmp_path / "out"), checkpoint=str(made / "learned" / "run"))
    with pytest.raises(UserError, match="N = 33 is beyond the 32 positions"):
        measure_longppl(replace(learned, n_long=33))
    other = tiny.write_corpus(tmp_path / "other", {"heldout": tiny.random_documents(3, 60)}, vocab_size=49)
    with pytest.raises(UserError, match="another tokenizer than"):
        measure_longppl(settings(made, tmp_path / "out", corpus=str(other)))
    llama = directory(tmp_path / "llama", "llama")
    found = measure_longppl(settings(made, tmp_path / "out", checkpoint=str(llama)))
    assert json.loads(found.read_text())["family"] == "llama"


def test_the_script_measures_and_prints_both_forms(made, tmp_path):
    command = ["scripts/longppl.py", made / "rope" / "run", "--corpus", made / "corpus", "--out", tmp_path]
    command += ["--n-long", N, "--n-short", M, "--alpha", ALPHA, "--beta", BETA, "--segments", 6]
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "longppl.json").read_text())
    assert found["settings"]["sliding_window"] == 1
    for form in ("exact", "published"):
        assert f"{found['forms'][form]['longppl']['value']:.3f} [" in done.stdout
    assert (
        "mean LSD [nats]" in done.stdout
        and "exact" in done.stdout
        and "published" in done.stdout
        and "longppl.json" in done.stdout
    )


def test_without_key_tokens_the_table_says_so_in_words(made, tmp_path):
    found = json.loads(measure_longppl(settings(made, tmp_path, alpha_nats=1e9)).read_text())
    rendered = render_longppl(found).renderables
    cells = {row: list(column.cells) for row, column in enumerate(rendered[2].columns)}
    place = [str(title) for title in cells[0]].index("LongPPL")
    assert cells[1][place] == cells[2][place] == "undefined"
    assert cells[1][0] == "0 [0, 0]"
    said = rendered[-1].plain
    assert "no key tokens in either form, so LongPPL is undefined" in said and "lower --alpha" in said
    assert "–" not in said


def test_replaced_tokens_are_refused_and_right_ones_remembered(made, tmp_path, monkeypatch):
    shutil.copytree(made / "corpus", tmp_path / "corpus")
    asked = settings(made, tmp_path / "out", corpus=str(tmp_path / "corpus"))
    assert_refused_and_right_ones_remembered(measure_longppl, asked, monkeypatch)
