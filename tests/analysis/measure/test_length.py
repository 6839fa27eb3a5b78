"""Loss by position against one forward pass per window and position; its windows, statistics, figure and refusals."""

from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import entropy, sem, t
from transformers import AutoModelForCausalLM

import analysis.model.token_losses as token_losses_module
from analysis.measure.length import _bytes_per_token, measure_length, position_edges
from analysis.measure.measurement import MeasuredText
from analysis.measure.settings import LengthSettings
from analysis.model.load import load_for_analysis
from analysis.records.results import LENGTH
from analysis.stats.bootstrap import ratio_of_sums
from analysis.stats.length import PositionSums, summarize_length
from analysis.text.segments import sample_segments
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.corpus.tokens import TokenFiles, Verified
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.export import export_checkpoint
from tests.support import tiny
from tests.support.families import directory
from tests.support.made_up_records import interval_of
from tests.support.measured import plain_loss, write_models
from tests.support.refusals import refused
from tests.support.replaced_tokens import assert_refused_and_right_ones_remembered
from tests.support.tiny import checkpoint

LENGTHS, WINDOWS = (8, 16, 40), 9
DOCUMENT_LENGTHS = (39, 40, 170, 60, 5, 95, 81)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus of documents of many lengths, and two models trained (in name) on windows of 32, ids up to 64."""
    folder = tmp_path_factory.mktemp("length")
    return write_models(folder, DOCUMENT_LENGTHS, pose={}, nope={"rope": False, "nope": True})


def settings(made, out, names=("pose", "nope"), **changes):
    paths = tuple(str(made / name / "run") for name in names)
    values = {"corpus": str(made / "corpus"), "out": str(out), "device": "cpu", "resamples": 300}
    values |= {"checkpoints": paths, "labels": tuple(names), "lengths": LENGTHS, "windows": WINDOWS}
    return LengthSettings(**{**values, **changes})


def plain_losses(model, window):
    """Loss of each token but the first, one forward pass over the p tokens before it at a time."""
    return [plain_loss(model, window, range(p), window[p]) for p in range(1, len(window))]


def loaded(settings):
    """The result that measuring with these settings writes."""
    return LENGTH.load(measure_length(settings))


@pytest.fixture(scope="module")
def measured(made):
    """The folder of a result for both models."""
    measure_length(settings(made, made / "measured"))
    return made / "measured"


@pytest.fixture(scope="module")
def plain(made):
    """(document, losses at positions 1 … 39) of every window and model, by brute force."""
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    at = sample_segments(tokens, WINDOWS, length=40, seed=0, option="--lengths")
    windows = [tokens.document(d)[s : s + 40] for d, s in zip(at.document, at.start, strict=True)]
    models = [load_for_analysis(made / name / "run").model for name in ("pose", "nope")]
    return at.document, np.array([[plain_losses(model, each) for each in windows] for model in models])


def test_equals_one_forward_pass_per_window_and_position(plain, measured):
    document, losses = plain
    found = LENGTH.load(measured)
    rows = pq.read_table(measured / "length.parquet").to_pylist()
    assert len(rows) == 2 * len(set(document.tolist())) * len(position_edges(LENGTHS)[1:])
    for row in rows:
        of_model = losses[["pose", "nope"].index(row["label"])]
        part = of_model[document == row["document"], row["from"] - 1 : row["to"] - 1]
        assert row["tokens"] == part.size > 0
        assert row["loss_sum_nats"] == pytest.approx(part.sum(), abs=1e-3)
    for number, each in enumerate(found["models"]):
        assert [one["from"] for one in each["bins"]] == position_edges(LENGTHS)[:-1]
        for one in each["bins"]:
            part = losses[:, :, one["from"] - 1 : one["to"] - 1]
            assert one["tokens"] == part[0].size
            assert one["loss_nats"]["value"] == pytest.approx(part[number].mean(), abs=1e-4)
            difference = (part[number] - part[0]).mean()
            assert one["difference_to_first_nats"]["value"] == pytest.approx(difference, abs=1e-4)


def test_differences_are_paired_by_document(plain, measured):
    """The interval is that of a bootstrap over the differences themselves."""
    document, losses = plain
    first, second = LENGTH.load(measured)["models"]
    for one in second["bins"]:
        difference = (losses[1] - losses[0])[:, one["from"] - 1 : one["to"] - 1]
        columns = np.stack([difference.sum(1), np.full(len(difference), difference.shape[1])], axis=1)
        expected = interval_of(columns, document, ratio_of_sums(0, 1), resamples=300, seed=0)
        found = one["difference_to_first_nats"]
        assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), abs=1e-4)
    for one in first["bins"]:
        assert one["difference_to_first_nats"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert one["loss_nats"]["low"] < one["loss_nats"]["high"]


def rise_of(sums):
    """The second mean minus the first; sums are (loss, tokens, loss, tokens)."""
    return sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1]


def test_the_loss_at_a_length_is_that_of_the_half_octave_below_it(plain, measured):
    document, losses = plain
    found = LENGTH.load(measured)
    for number, each in enumerate(found["models"]):
        first, *_, last = each["at_lengths"]
        assert [one["length"] for one in each["at_lengths"]] == list(LENGTHS)
        assert first["rise_nats"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        parts = [losses[number][:, one["from"] - 1 : one["length"] - 1] for one in (first, last)]
        assert all(1 < one["length"] / one["from"] <= 1.5 for one in (first, last))
        rise = parts[1].mean() - parts[0].mean()
        assert last["rise_nats"]["value"] == pytest.approx(rise, abs=1e-4)
        sizes = [np.full(len(losses[0]), part.shape[1]) for part in parts]
        columns = np.stack([parts[0].sum(1), sizes[0], parts[1].sum(1), sizes[1]], axis=1)
        expected = interval_of(columns, document, rise_of, resamples=300, seed=0)
        interval = (last["rise_nats"]["low"], last["rise_nats"]["high"])
        assert interval == pytest.approx((expected.low, expected.high), abs=1e-4)


def told_of(attention, length):
    """Mean entropy by SciPy and share of zeros of the last 16 rows of layers of attention (H, L, L)."""
    rows = [row[:place] for layer in attention for head in layer
            for place, row in enumerate(head.double().tolist(), start=1) if place > length - 16]  # fmt: skip
    zeros = [sum(weight == 0 for weight in row) / len(row) for row in rows]
    return np.mean([entropy(row) for row in rows]), np.mean(zeros)


def test_the_entropy_of_attention_and_its_zeros_are_told_at_each_length(made, tmp_path):
    """Of softmax against transformers' own attention; of entmax against the weights of its layers, row by row."""
    export_checkpoint(made / "pose" / "run", tmp_path / "hf")
    (tmp_path / "entmax").mkdir()
    checkpoint(tmp_path / "entmax", corpus=made / "corpus", attention="entmax")
    paths = (str(made / "pose" / "run"), str(tmp_path / "hf"), str(tmp_path / "entmax" / "run"))
    labels = ("pose", "exported", "entmax")
    found = loaded(settings(made, tmp_path / "out", checkpoints=paths, labels=labels, attention=True))
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    windows = sample_segments(tokens, WINDOWS, length=40, seed=0, option="--lengths").read(tokens)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    sparse = load_model(tmp_path / "entmax" / "run")[0]
    recorded = []
    for block in sparse.blocks():
        block.mixer.register_forward_hook(
            lambda mixer, inputs, _: recorded.append(
                mixer.weights(*inputs[:2], inputs[2][..., :0], inputs[3])[0]
            )
        )
    for number, length in enumerate((16, 40), start=1):
        softmax, entmax = [], []
        for window in torch.from_numpy(windows[:, :length].astype(np.int64)):
            with torch.no_grad():
                softmax.append(
                    told_of(
                        [each[0] for each in plain(window[None], output_attentions=True).attentions], length
                    )
                )
                recorded.clear()
                sparse(window[None])
            entmax.append(told_of(recorded, length))
        for model, expected in zip(found["models"], (softmax, softmax, entmax), strict=True):
            told = model["at_lengths"][number]["attention"]
            values = told["entropy_nats"]["value"], told["zero_share"]["value"]
            assert values == pytest.approx(tuple(np.mean(expected, axis=0)), abs=1e-5)
            assert told["entropy_nats"]["low"] < values[0] < told["entropy_nats"]["high"]
            assert model["checkpoints"][0]["at_lengths"][number]["attention"] == told
        assert np.mean(softmax, axis=0)[1] == 0 < np.mean(entmax, axis=0)[1] < 1
    assert (
        "attention"
        not in loaded(settings(made, tmp_path / "without", ["pose"]))["models"][0]["at_lengths"][0]
    )


def sums_of(*checkpoints, documents=4):
    """Sums over documents of 10 tokens each in two bins; every document has the loss that is given for its bin."""
    losses = np.array(checkpoints, dtype=float)[:, None, :] * 10
    tokens = np.full((documents, 2), 10)
    return PositionSums([1, 8, 16], np.arange(documents), tokens, np.repeat(losses, documents, axis=1))


def test_seeds_of_one_model_are_averaged_and_its_intervals_are_over_them():
    sums = sums_of((2.0, 3.0), (4.0, 4.5), (1.0, 1.0))
    two, one = summarize_length(sums, ["two", "two", "one"], (8, 16), resamples=2000, seed=0)

    def of_seeds(*values):  # documents do not differ: the interval is Student's t of the seeds
        mean, half = np.mean(values), t.ppf(0.975, 1) * sem(values)
        return pytest.approx({"value": mean, "low": mean - half, "high": mean + half})

    assert two["bins"][0]["loss_nats"] == of_seeds(2, 4)
    assert one["bins"][0]["loss_nats"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert one["bins"][1]["difference_to_first_nats"] == of_seeds(-2, -3.5)
    # a seed's own rise, 1.0 or 0.5: both losses are those of the same seeds
    assert two["at_lengths"][1]["rise_nats"] == of_seeds(1, 0.5)


def test_a_file_names_the_checkpoints_of_each_model(made, measured, tmp_path):
    found = LENGTH.load(measured)
    own = load_for_analysis(made / "pose" / "run")
    pose, nope = (model["checkpoints"][0] for model in found["models"])
    assert (pose["label"], pose["training_length"], pose["position_target"]) == ("pose", 32, 64)
    assert pose["parameters"] == sum(parameter.numel() for parameter in own.model.parameters())
    assert pose["checkpoint_sha256"] == own.weights_sha256 != nope["checkpoint_sha256"]
    told = found["settings"]
    assert (told["windows_measured"], told["documents"], told["documents_too_short"]) == (9, 5, 2)
    assert set(found["provenance"]) == {"commit", "versions", "machine"}
    (both,) = loaded(settings(made, tmp_path, labels=("a", "a")))["models"]
    assert both["label"] == "a"
    assert [one["at_lengths"] for one in both["checkpoints"]] == [
        one["at_lengths"] for one in found["models"]
    ]
    twice = (str(made / "pose" / "run"), str(made / "pose" / "run" / "step00000001"))
    with refused("step00000001 is given twice as a; give each seed once"):
        measure_length(settings(made, tmp_path, checkpoints=twice, labels=("a", "a")))


def test_batches_and_slices_change_nothing(made, tmp_path, monkeypatch):
    a = loaded(settings(made, tmp_path / "a", tokens_per_batch=1))
    sizes = []
    original = token_losses_module.F.cross_entropy

    def watched(logits, *rest, **options):
        sizes.append(logits.shape[0])
        return original(logits, *rest, **options)

    monkeypatch.setattr(token_losses_module.F, "cross_entropy", watched)
    monkeypatch.setattr(token_losses_module, "LOGITS_PER_SLICE", 128 * 4 * 5)
    b = loaded(settings(made, tmp_path / "b", tokens_per_batch=4 * 39))
    assert max(sizes) == 4 * 5  # 4 windows at a time, 5 positions of each
    for x, y in zip(a["models"], b["models"], strict=True):
        for one, other in zip(x["bins"], y["bins"], strict=True):
            assert one["loss_nats"] == pytest.approx(other["loss_nats"], abs=1e-5)


def test_a_forward_pass_has_no_more_logits_than_allowed(made, monkeypatch):
    losses = token_losses_module.TokenLosses(load_for_analysis(made / "pose" / "run"), device="cpu")
    assert losses.vocabulary == 128
    monkeypatch.setitem(token_losses_module.LOGITS_PER_BATCH, "cpu", 128 * 39 * 3)
    assert [len(rows) for rows in losses.batches(8, 39, 39)] == [3, 3, 2]
    assert [len(rows) for rows in losses.batches(200, 39, 1)] == [4096 // 39, 200 - 4096 // 39]
    monkeypatch.setitem(token_losses_module.LOGITS_PER_BATCH, "cpu", 1)
    assert [len(rows) for rows in losses.batches(2, 39, 39)] == [1, 1]


def test_segments_lie_in_one_document_apart_and_evenly(made):
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    seen = set()
    for seed in range(30):
        at = sample_segments(tokens, 7, length=40, seed=seed, option="--lengths")
        again = sample_segments(tokens, 7, length=40, seed=seed, option="--lengths")
        assert np.array_equal(at.document, again.document) and np.array_equal(at.start, again.start)
        assert (len(at), at.documents_too_short) == (7, 2)
        for document, start, row in zip(at.document, at.start, at.read(tokens), strict=True):
            assert row.tolist() == tokens.document(document)[start : start + 40].tolist()
        counts = np.bincount(at.document, minlength=len(DOCUMENT_LENGTHS))
        assert counts[[0, 4]].tolist() == [0, 0]
        assert counts[[1, 3]].tolist() == [1, 1]  # no room for more
        assert sorted(counts[[2, 5, 6]].tolist()) == [1, 2, 2]  # two rounds, the second not for all
        for d in np.flatnonzero(counts > 1):
            starts = at.start[at.document == d]
            assert (np.diff(starts) >= 40).all()
        seen |= set(at.start[at.document == 3].tolist())
    assert min(seen) < 5 and max(seen) > 15 and max(seen) <= 20  # anywhere in the 60 tokens
    everything = sample_segments(tokens, 1000, length=40, seed=0, option="--lengths")
    assert np.bincount(everything.document).tolist() == [n // 40 for n in DOCUMENT_LENGTHS]
    few = sample_segments(tokens, 1000, length=40, seed=0, option="--lengths", documents=2)
    assert len(set(few.document.tolist())) == 2


def test_every_arrangement_is_equally_likely(tmp_path):
    """Two segments of 3 in 8 tokens: 6 arrangements."""
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(1, 8)})
    tokens = TokenFiles.of_split(corpus, "heldout")
    found = [
        tuple(sample_segments(tokens, 2, length=3, seed=s, option="").start.tolist()) for s in range(600)
    ]
    counts = {each: found.count(each) for each in found}
    assert set(counts) == {(0, 3), (0, 4), (0, 5), (1, 4), (1, 5), (2, 5)}
    assert min(counts.values()) > 60 and max(counts.values()) < 150  # 100 each; 4 standard deviations are 37


def test_edges_hold_every_length_and_are_narrow():
    assert position_edges((128, 256, 512, 1024))[:6] == [1, 16, 23, 32, 45, 64]
    for lengths in [(128, 256, 512, 1024), (8, 16, 40), (100, 150, 1200), (2, 3)]:
        edges = position_edges(lengths)
        assert {1, *lengths} <= set(edges) and edges[-1] == lengths[-1]
        assert edges == sorted(set(edges))
        for low, high in pairwise(edge for edge in edges if edge >= max(8, lengths[0] / 8)):
            assert high / low <= 2**0.5 * (1 + 1 / low)


def test_rotary_models_are_measured_past_their_configuration_and_tables_are_not(made, tmp_path):
    gpt2 = load_for_analysis(directory(tmp_path / "gpt2", "gpt2"))
    gpt2.check_reach(64)
    with refused(r"65 tokens are beyond the 64 learned positions of .*gpt2 \(gpt2\)"):
        gpt2.check_reach(65)
    gpt2.check_reach(57, 7)  # as a needle with 8 value tokens is read
    with refused(r"65 tokens are beyond the 64 .*lower --lengths to at most 57"):
        gpt2.check_reach(58, 7)
    contiguous = {"scheme": "contiguous", "target_length": None}
    checkpoint(tmp_path, corpus=made / "corpus", positions=contiguous, rope=False)
    with refused(r"33 tokens are beyond the 32 learned.*lower --lengths to at most 32"):
        load_for_analysis(tmp_path / "run").check_reach(33)
    table = {"checkpoints": (str(tmp_path / "run"),), "labels": ("table",), "lengths": (32,)}
    found = loaded(settings(made, tmp_path / "out", **table))
    assert found["models"][0]["checkpoints"][0]["position_target"] is None


def test_a_directory_of_transformers_is_measured_in_the_same_way(made, tmp_path):
    """A Llama past its 64 positions: its losses one token at a time."""
    folder = directory(tmp_path, "llama")
    document = tiny.random_documents(1, 80, seed=8)
    corpus = tiny.write_corpus(tmp_path / "long", {"heldout": document})
    changes = {"checkpoints": (str(folder),), "corpus": str(corpus), "lengths": (20, 80)}
    found = loaded(settings(made, tmp_path / "out", ["x"], **changes))
    expected = np.array(plain_losses(load_for_analysis(folder).model, document[0]))
    for one in found["models"][0]["bins"]:
        part = expected[one["from"] - 1 : one["to"] - 1]
        assert one["loss_nats"]["value"] == pytest.approx(part.mean(), abs=1e-4)
        assert one["loss_nats"]["low"] is None  # a single document
    assert found["models"][0]["checkpoints"][0]["training_length"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (8, 200)}, "no held-out document has 200 tokens, the longest has 170; lower --lengths"),
        ({"lengths": (16, 8)}, "must be ascending"),
        ({"lengths": (1,)}, "at least 2"),
        ({"labels": ("a",)}, "2 checkpoints need as many labels, not a; mend"),
        ({"split": "test"}, "has no split 'test'"),
        ({"checkpoints": ("nowhere", "nowhere")}, "nowhere is neither"),
        (
            {"checkpoints": ("RUN@mesa:2", "RUN"), "attention": True},
            "mesa:2 is read in chunks, .*; leave --attention",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(made, tmp_path, changes, message):
    own = str(made / "pose" / "run")
    changes = {name: tuple(x.replace("RUN", own) for x in each) if name == "checkpoints" else each
               for name, each in changes.items()}  # fmt: skip
    with refused(message):
        measure_length(settings(made, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_replaced_tokens_are_refused_and_right_ones_remembered(made, tmp_path, monkeypatch):
    assert_refused_and_right_ones_remembered(measure_length, settings(made, tmp_path / "out"), monkeypatch)


def test_a_refused_second_checkpoint_is_told_before_the_first_is_measured(made, tmp_path, monkeypatch):
    other = tiny.write_corpus(tmp_path / "other", {"heldout": tiny.random_documents(2, 60)}, vocab_size=49)
    checkpoint(tmp_path, corpus=other)
    monkeypatch.setattr(torch.nn.Module, "__call__", None)  # nothing is measured
    paths = (str(made / "pose" / "run"), str(tmp_path / "run"))
    with refused("another tokenizer than"):
        measure_length(settings(made, tmp_path / "out", checkpoints=paths))


def test_losses_that_are_not_finite_are_refused(made):
    losses = token_losses_module.TokenLosses(load_for_analysis(made / "pose" / "run"), device="cpu")
    with torch.no_grad():
        next(losses.model.parameters()).fill_(float("nan"))
    with refused("run.* gives losses that are not finite"):
        losses.last_losses(np.ones((1, 5), dtype=np.int64), 4)


def test_the_script_measures_draws_and_prints(made, tmp_path, run_here):
    """On the corpus that the run was trained on, as none is named."""
    paths = [made / "pose" / "run", made / "nope" / "run"]
    options = ["--lengths", "40,8,16", "--windows", 5, "--device", "cpu", "--out", tmp_path]
    done = run_here("scripts/length.py", *paths, *options)
    assert done.returncode == 0, done.stderr
    found = LENGTH.load(tmp_path)
    assert [each["label"] for each in found["models"]] == ["pose/run", "nope/run"]
    assert (found["settings"]["lengths"], found["settings"]["corpus"]) == ([8, 16, 40], str(made / "corpus"))
    assert "by position [nats per token]" in done.stdout and "length.pdf" in done.stdout
    for each in found["models"][1]["bins"]:
        assert f"{each['from']}–{each['to'] - 1}" in done.stdout
        assert f"{each['loss_nats']['value']:.2f} [" in done.stdout
        assert f"{each['difference_to_first_nats']['value']:.2f} [" in done.stdout
    for each in found["models"][1]["at_lengths"]:
        assert f"{each['loss_nats']['value']:.2f} [" in done.stdout
        assert f"{each['rise_nats']['value']:.2f} [" in done.stdout or each["length"] == 8
    assert (tmp_path / "length.png").stat().st_size > 10_000


def test_figures_are_drawn_again_of_some_models(measured, tmp_path, run_here):
    command = ["scripts/plot_length.py", measured]
    names = {"length.pdf", "length.png", "lengths.pdf", "lengths.png"}
    assert run_here(*command, "--models", "nope, pose", "--out", tmp_path / "some").returncode == 0
    assert {path.name for path in (tmp_path / "some").iterdir()} == names
    assert run_here(*command).returncode == 0
    assert names < {path.name for path in measured.iterdir()}
    (measured / "lengths.png").unlink()
    assert run_here("scripts/plot_length.py", measured / "length.json").returncode == 0
    assert (measured / "lengths.png").is_file()
    done = run_here(*command, "--models", "nope,rope", "--out", tmp_path / "none")
    assert done.returncode == 1 and not (tmp_path / "none").exists()
    assert done.stderr == f"error: {measured} has no model 'rope'; choose of pose, nope\n"


def test_bytes_per_token_are_those_of_the_text(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number, words in enumerate(
        ("naïve cafés, 東京 and back. " * 40, "plain words of one byte each. " * 60)
    ):
        (text / f"{number}.txt").write_text(words)
    corpus = tmp_path / "corpus"
    prepare(PrepareSettings("text", (), tuple(map(str, text.iterdir())), tokenizer="olmo"), corpus, workers=1)
    tokens = TokenFiles.of_split(corpus, "heldout")
    found = _bytes_per_token(MeasuredText(str(corpus), "", tokens, Verified(tmp_path)), np.arange(2))
    assert found == sum(path.stat().st_size for path in text.iterdir()) / (tokens.num_tokens - 2)
