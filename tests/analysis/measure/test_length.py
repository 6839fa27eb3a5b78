"""Loss by position against one forward pass per window and position; its windows, statistics, figure and refusals."""

import json
import shutil
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import analysis.measure.length as length_module
import analysis.model.token_losses as token_losses_module
from analysis.measure.length import measure_length, position_edges
from analysis.measure.settings import LengthSettings
from analysis.model.load import load_for_analysis
from analysis.records.results import LENGTH
from analysis.stats.bootstrap import ratio_of_sums
from analysis.stats.length import PositionSums, summarize_length
from analysis.stats.tables import render_length
from analysis.text.segments import sample_segments
from olmo_sparsity.data import tokens
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from tests.analysis.model.test_load import directory
from tests.olmo_sparsity.test_export import checkpoint
from tests.support import tiny
from tests.support.made_up_records import interval_of

ROOT = Path(__file__).parents[3]
LENGTHS, WINDOWS = (8, 16, 40), 9
DOCUMENTS = [
    document for n in (39, 40, 170, 60, 5, 95, 81) for document in tiny.random_documents(1, n, seed=n)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus of documents of many lengths, and two models trained (in name) on windows of 32, ids up to 64."""
    folder = tmp_path_factory.mktemp("length")
    corpus = tiny.write_corpus(folder / "corpus", {"train": DOCUMENTS[:1], "heldout": DOCUMENTS})
    for name, changes in (("pose", {}), ("nope", {"rope": False, "nope": True})):
        (folder / name).mkdir()
        checkpoint(folder / name, corpus=corpus, **changes)
    return folder


def settings(made, out, names=("pose", "nope"), **changes):
    values = {
        "checkpoints": tuple(str(made / name / "run") for name in names),
        "labels": tuple(names),
        "corpus": str(made / "corpus"),
        "out": str(out),
        "lengths": LENGTHS,
        "windows": WINDOWS,
        "device": "cpu",
        "resamples": 300,
    }
    return LengthSettings(**{**values, **changes})


@torch.no_grad()
def plain_losses(model, window):
    """Loss of each token but the first, one forward pass over the p tokens before it at a time."""
    losses = []
    for p in range(1, len(window)):
        ids = torch.tensor([window[:p].tolist()], dtype=torch.long)
        logits = model(ids, position_ids=torch.arange(p)[None]).logits[0, -1]
        losses.append(float(-logits.double().log_softmax(-1)[int(window[p])]))
    return losses


@pytest.fixture(scope="module")
def plain(made):
    """(document, losses at positions 1 … 39) of every window and model, by brute force."""
    tokens = TokenFiles.of_split(made / "corpus", "heldout")
    at = sample_segments(tokens, WINDOWS, length=40, seed=0, option="--lengths")
    windows = [tokens.document(d)[s : s + 40] for d, s in zip(at.document, at.start, strict=True)]
    models = [load_for_analysis(made / name / "run").model for name in ("pose", "nope")]
    return at.document, np.array([[plain_losses(model, each) for each in windows] for model in models])


def test_equals_one_forward_pass_per_window_and_position(made, plain, tmp_path):
    document, losses = plain
    found = LENGTH.load(measure_length(settings(made, tmp_path)))
    rows = pq.read_table(tmp_path / "length.parquet").to_pylist()
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


def test_differences_are_paired_by_document(made, plain, tmp_path):
    """The interval is that of a bootstrap over the differences themselves."""
    document, losses = plain
    found = LENGTH.load(measure_length(settings(made, tmp_path)))
    for one in found["models"][1]["bins"]:
        difference = (losses[1] - losses[0])[:, one["from"] - 1 : one["to"] - 1]
        columns = np.stack([difference.sum(1), np.full(len(difference), difference.shape[1])], axis=1)
        expected = interval_of(columns, document, ratio_of_sums(0, 1), resamples=300, seed=0)
        measured = one["difference_to_first_nats"]
        assert (measured["low"], measured["high"]) == pytest.approx((expected.low, expected.high), abs=1e-4)
    for one in found["models"][0]["bins"]:
        assert one["difference_to_first_nats"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert one["loss_nats"]["low"] < one["loss_nats"]["high"]


def test_the_loss_at_a_length_is_that_of_the_half_octave_below_it(made, plain, tmp_path):
    document, losses = plain
    found = LENGTH.load(measure_length(settings(made, tmp_path)))
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
        expected = interval_of(
            columns,
            document,
            lambda sums: sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1],
            resamples=300,
            seed=0,
        )
        assert last["rise_nats"]["low"] == pytest.approx(expected.low, abs=1e-4)
        assert last["rise_nats"]["high"] == pytest.approx(expected.high, abs=1e-4)


def sums_of(*checkpoints, documents=4):
    """Sums over documents of 10 tokens each in two bins; every document has the loss that is given for its bin."""
    losses = np.array(checkpoints, dtype=float)[:, None, :] * 10
    tokens = np.full((documents, 2), 10)
    return PositionSums([1, 8, 16], np.arange(documents), tokens, np.repeat(losses, documents, axis=1))


def test_seeds_of_one_model_are_averaged_and_drawn():
    sums = sums_of((2.0, 3.0), (4.0, 4.5), (1.0, 1.0))
    two, one = summarize_length(sums, ["two", "two", "one"], (8, 16), resamples=2000, seed=0)
    # documents do not differ, so the interval is that of two seeds drawn with replacement: either one twice 1 in 4
    assert two["bins"][0]["loss_nats"] == {"value": 3.0, "low": 2.0, "high": 4.0}
    assert one["bins"][0]["loss_nats"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert one["bins"][1]["difference_to_first_nats"] == {"value": -2.75, "low": -3.5, "high": -2.0}
    # a seed's own rise, 1.0 or 0.5: both losses are those of the same seeds
    assert two["at_lengths"][1]["rise_nats"] == {"value": 0.75, "low": 0.5, "high": 1.0}


def test_seeds_that_do_not_differ_change_no_interval(made, plain, tmp_path):
    names = {"checkpoints": (str(made / "pose" / "run"),), "labels": ("pose",)}
    alone = LENGTH.load(measure_length(settings(made, tmp_path / "a", **names)))["models"][0]
    table = pq.read_table(tmp_path / "a" / "length.parquet")
    edges = position_edges(LENGTHS)
    losses = table["loss_sum_nats"].to_numpy().reshape(1, -1, len(edges) - 1)
    tokens = table["tokens"].to_numpy().reshape(-1, len(edges) - 1)
    documents = np.arange(len(tokens))
    sums = PositionSums(edges, documents, tokens, np.repeat(losses, 3, axis=0))
    (thrice,) = summarize_length(sums, ["x"] * 3, LENGTHS, resamples=300, seed=0)
    for one, other in zip(alone["bins"], thrice["bins"], strict=True):
        assert one["loss_nats"] == pytest.approx(other["loss_nats"])


def test_the_models_of_a_file_name_their_seeds(made, tmp_path):
    (model,) = LENGTH.load(measure_length(settings(made, tmp_path, labels=("a", "a"))))["models"]
    apart = LENGTH.load(measure_length(settings(made, tmp_path)))["models"]
    assert [one["at_lengths"] for one in model["checkpoints"]] == [one["at_lengths"] for one in apart]
    own = sum(parameter.numel() for parameter in load_for_analysis(made / "pose" / "run").model.parameters())
    assert model["checkpoints"][0]["parameters"] == own
    assert (model["label"], len(model["checkpoints"])) == ("a", 2)
    assert len({each["checkpoint_sha256"] for each in model["checkpoints"]}) == 2
    twice = (str(made / "pose" / "run"), str(made / "pose" / "run" / "step00000001"))
    with pytest.raises(UserError, match="step00000001 is given twice as a; give each seed once"):
        measure_length(settings(made, tmp_path, checkpoints=twice, labels=("a", "a")))


def test_batches_and_slices_change_nothing(made, tmp_path, monkeypatch):
    a = LENGTH.load(measure_length(settings(made, tmp_path / "a", tokens_per_batch=1)))
    sizes = []
    original = token_losses_module.F.cross_entropy

    def watched(logits, *rest, **options):
        sizes.append(logits.shape[0])
        return original(logits, *rest, **options)

    monkeypatch.setattr(token_losses_module.F, "cross_entropy", watched)
    monkeypatch.setattr(token_losses_module, "LOGITS_PER_SLICE", 128 * 4 * 5)
    b = LENGTH.load(measure_length(settings(made, tmp_path / "b", tokens_per_batch=4 * 39)))
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
        read = at.read(tokens)
        for document, start, row in zip(at.document, at.start, read, strict=True):
            assert row.tolist() == DOCUMENTS[document][start : start + 40]
        counts = np.bincount(at.document, minlength=len(DOCUMENTS))
        assert counts[[0, 4]].tolist() == [0, 0]
        assert counts[[1, 3]].tolist() == [1, 1]  # no room for more
        assert sorted(counts[[2, 5, 6]].tolist()) == [1, 2, 2]  # two rounds, the second not for all
        for d in np.flatnonzero(counts > 1):
            starts = at.start[at.document == d]
            assert (np.diff(starts) >= 40).all()
        seen |= set(at.start[at.document == 3].tolist())
    assert min(seen) < 5 and max(seen) > 15 and max(seen) <= 20  # anywhere in the 60 tokens
    everything = sample_segments(tokens, 1000, length=40, seed=0, option="--lengths")
    assert np.bincount(everything.document).tolist() == [len(document) // 40 for document in DOCUMENTS]
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


def test_what_identifies_the_checkpoints_is_kept(made, tmp_path):
    found = LENGTH.load(measure_length(settings(made, tmp_path)))
    pose, nope = (model["checkpoints"][0] for model in found["models"])
    assert (pose["label"], pose["training_length"], pose["position_target"]) == ("pose", 32, 64)
    assert pose["checkpoint_sha256"] != nope["checkpoint_sha256"]
    assert pose["checkpoint_sha256"] == load_for_analysis(made / "pose" / "run").weights_sha256
    told = found["settings"]
    assert (told["windows_measured"], told["documents"], told["documents_too_short"]) == (9, 5, 2)
    assert set(found["provenance"]) == {"commit", "versions"}


def test_rotary_models_are_measured_past_their_configuration_and_tables_are_not(made, tmp_path):
    llama = load_for_analysis(directory(tmp_path / "llama", "llama"))
    llama.check_reach(200)
    gpt2 = load_for_analysis(directory(tmp_path / "gpt2", "gpt2"))
    gpt2.check_reach(64)
    with pytest.raises(UserError, match=r"65 tokens are beyond the 64 learned positions of .*gpt2 \(gpt2\)"):
        gpt2.check_reach(65)
    contiguous = {"scheme": "contiguous", "target_length": None}
    (tmp_path / "own").mkdir()
    checkpoint(tmp_path / "own", corpus=made / "corpus", positions=contiguous, rope=False)
    with pytest.raises(
        UserError, match=r"33 tokens are beyond the 32 learned.*lower --lengths to at most 32"
    ):
        load_for_analysis(tmp_path / "own" / "run").check_reach(33)
    found = measure_length(
        settings(tmp_path, tmp_path / "out", ["own"], corpus=str(made / "corpus"), lengths=(32,))
    )
    assert LENGTH.load(found)["models"][0]["checkpoints"][0]["position_target"] is None


def test_a_directory_of_transformers_is_measured_in_the_same_way(made, plain, tmp_path):
    """A Llama past its 64 positions: its losses one token at a time."""
    folder = directory(tmp_path, "llama")
    document = tiny.random_documents(1, 80, seed=8)
    corpus = tiny.write_corpus(tmp_path / "long", {"heldout": document})
    found = LENGTH.load(
        measure_length(
            settings(
                made,
                tmp_path / "out",
                ["x"],
                checkpoints=(str(folder),),
                corpus=str(corpus),
                lengths=(20, 80),
            )
        )
    )
    expected = np.array(plain_losses(load_for_analysis(folder).model, np.array(document[0])))
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
        ({"windows": 0}, "nothing to measure"),
        ({"split": "test"}, "has no split 'test'"),
        ({"checkpoints": ("nowhere", "nowhere")}, "nowhere is neither"),
    ],
)
def test_bad_settings_are_refused_in_one_line(made, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        measure_length(settings(made, tmp_path / "out", **changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_replaced_tokens_are_refused_and_right_ones_remembered(made, tmp_path, monkeypatch):
    shutil.copytree(made / "corpus", tmp_path / "corpus")
    asked = settings(made, tmp_path / "out", corpus=str(tmp_path / "corpus"))
    path = tmp_path / "corpus" / "heldout-00000.npy"
    ids = np.fromfile(path, dtype=np.uint16)
    np.where(np.arange(len(ids)) == 7, (ids + 1) % 50, ids).astype(np.uint16).tofile(path)
    with pytest.raises(UserError, match=r"checksum mismatch in .*heldout-00000\.npy"):
        measure_length(asked)
    assert not (tmp_path / "out").exists()
    ids.tofile(path)
    measure_length(asked)
    assert (tmp_path / "out" / "verified.json").is_file()
    monkeypatch.setattr(tokens, "_read", None)  # nothing is read again
    measure_length(asked)


def test_a_refused_second_checkpoint_is_told_before_the_first_is_measured(made, tmp_path, monkeypatch):
    other = tiny.write_corpus(tmp_path / "other", {"heldout": DOCUMENTS}, vocab_size=49)
    (tmp_path / "odd").mkdir()
    checkpoint(tmp_path / "odd", corpus=other)
    monkeypatch.setattr(length_module, "_sum_losses", None)  # nothing is measured
    paths = (str(made / "pose" / "run"), str(tmp_path / "odd" / "run"))
    with pytest.raises(UserError, match="another tokenizer than"):
        measure_length(settings(made, tmp_path / "out", checkpoints=paths))


def test_losses_that_are_not_finite_are_refused(made, tmp_path):
    losses = token_losses_module.TokenLosses(load_for_analysis(made / "pose" / "run"), device="cpu")
    with torch.no_grad():
        next(losses.model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="run.* gives losses that are not finite"):
        losses.last_losses(np.ones((1, 5), dtype=np.int64), 4)


def test_the_table_has_every_number(made, tmp_path):
    found = LENGTH.load(measure_length(settings(made, tmp_path)))
    by_length, by_position = render_length(found)
    cells = [list(column.cells) for column in by_position.columns]
    for number, one in enumerate(found["models"][1]["bins"]):
        assert cells[0][number] == f"{one['from']}–{one['to'] - 1}"
        assert f"{one['loss_nats']['value']:.2f} [" in cells[3][number]
        assert f"\n{one['difference_to_first_nats']['value']:.2f} [" in cells[3][number]
    cells = [list(column.cells) for column in by_length.columns]
    assert list(cells[1]) == ["1", "1"]
    for number, one in enumerate(found["models"][1]["at_lengths"]):
        assert f"{one['loss_nats']['value']:.2f} [" in cells[2 + number][1]
        assert number == 0 or f"\n{one['rise_nats']['value']:.2f} [" in cells[2 + number][1]


def test_the_script_measures_draws_and_prints(made, tmp_path, run_here):
    paths = [made / "pose" / "run", made / "nope" / "run"]
    command = ["scripts/length.py", *paths, "--corpus", made / "corpus", "--out", tmp_path]
    command += ["--lengths", "40,8,16", "--windows", 5, "--device", "cpu"]
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "length.json").read_text())
    assert [each["label"] for each in found["models"]] == ["pose/run", "nope/run"]
    assert found["settings"]["lengths"] == [8, 16, 40]
    assert "by position [nats per token]" in done.stdout and "length.pdf" in done.stdout
    assert (tmp_path / "length.png").stat().st_size > 10_000


def test_figures_are_drawn_again_of_some_models(made, tmp_path):
    measure_length(settings(made, tmp_path))
    command = [sys.executable, "scripts/plot_length.py", str(tmp_path)]
    script = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    script([*command, "--models", "nope, pose", "--out", str(tmp_path / "some")], check=True)
    names = {"length.pdf", "length.png", "lengths.pdf", "lengths.png"}
    assert {path.name for path in (tmp_path / "some").iterdir()} == names
    script(command, check=True)
    assert names < {path.name for path in tmp_path.iterdir()}
    refused = script([*command, "--models", "nope,rope", "--out", str(tmp_path / "none")])
    assert refused.returncode == 1 and not (tmp_path / "none").exists()
    assert refused.stderr == f"error: {tmp_path} has no model 'rope'; choose of pose, nope\n"
