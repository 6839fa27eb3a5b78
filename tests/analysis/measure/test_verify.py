"""Records measured again: what agrees, what was changed, and what cannot be verified."""

from dataclasses import replace

import numpy as np
import pytest

from analysis.measure import verify as module
from analysis.measure.influence import measure_influence
from analysis.measure.settings import VerifySettings
from analysis.measure.verify import verify
from analysis.records.store import load_records
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support import tiny
from tests.support.measured import influence_settings
from tests.support.refusals import refused
from tests.support.slow import slow_but

SELECTORS = ("leave-one-out", "leave-one-out-kl", "random")


@pytest.fixture(scope="module", params=slow_but([1, 4], 4))
def measured(two_seeds, request):
    """Records of the first model, one target at a time and in blocks, with all that can be measured."""
    folder = two_seeds / f"of-blocks-of-{request.param}"
    further = {"targets_per_block": request.param, "further_placebos": ("shuffled",), "subsets": 4}
    asked = influence_settings(
        two_seeds, folder, "run", tau_nats=0.1, selectors=SELECTORS, targets=80, **further
    )
    return measure_influence(asked)


def again(folder, **changes):
    return verify(VerifySettings(records=folder, **{"targets": 9, "device": "cpu", **changes}))


def test_what_was_recorded_is_found_again(measured):
    found = again(measured)
    records = load_records(measured)
    assert found["verified"] and found["same"] == 1
    assert 9 <= found["targets"] < len(records.over)
    assert found["choices"] == found["targets"] * 3 * len(SELECTORS) * len(records.manifest.ks)
    assert max(found["largest_difference_nats"].values()) < 1e-5
    assert again(measured, targets=10_000)["targets"] == len(records.over)


@pytest.mark.parametrize("what", ["loss_long", "loss_k", "selected"])
def test_what_was_changed_is_noticed(measured, monkeypatch, what):
    records = load_records(measured)
    if what == "loss_long":
        targets = replace(records.targets, loss_long_nats=records.targets.loss_long_nats + 0.01)
        records = replace(records, targets=targets)
    for by_context in records.loss_nats.values() if what == "loss_k" else ():
        by_context["placebo"] += 0.01
    for by_context in records.selected.values() if what == "selected" else ():
        by_context["true"] = np.roll(by_context["true"], 1, axis=0)
    monkeypatch.setattr(module, "load_records", lambda folder: records)
    found = again(measured, targets=10_000)
    assert not found["verified"]
    if what == "selected":
        assert found["same"] < 0.9
    else:
        assert found["largest_difference_nats"][what] == pytest.approx(0.01, abs=1e-5)


def other_corpus(two_seeds, folder, split):
    """The same corpus, but for one split in which every token is another."""
    documents = {}
    for name in ("train", "heldout"):
        tokens = TokenFiles.of_split(two_seeds / "corpus", name)
        documents[name] = [tokens.document(number).tolist() for number in range(len(tokens.document_bounds))]
    documents[split] = [
        [token % 49 + 1 for token in each] for each in documents[split]
    ]  # 1 … 49; 0 ends a document
    return tiny.write_corpus(folder, documents)


def test_the_text_that_was_measured_decides(measured, two_seeds, tmp_path):
    trained_on_other = other_corpus(two_seeds, tmp_path / "train", "train")
    assert again(measured, corpus=str(trained_on_other))["verified"]
    with refused("holds other targets than are sampled from .*; prepare the text of the records"):
        again(measured, corpus=str(other_corpus(two_seeds, tmp_path / "heldout", "heldout")))


def test_what_cannot_be_verified_is_one_line(measured, two_seeds, tmp_path, run_here, monkeypatch):
    with refused("checkpoint .* -> .*second.*; give the records' own --checkpoint and --corpus"):
        again(measured, checkpoint=str(two_seeds / "second"))
    crossed = influence_settings(
        two_seeds,
        tmp_path / "crossed",
        "run",
        evaluate_with="second",
        tau_nats=0.1,
        selectors=SELECTORS,
        targets=80,
    )
    with refused("are cross-fitted; verify records of one checkpoint"):
        again(measure_influence(crossed))
    records = load_records(measured)
    moved = replace(records, manifest=replace(records.manifest, checkpoint="runs/moved@yarn:2"))
    with monkeypatch.context() as patched, refused("^runs/moved@yarn:2, .* say where it is: --checkpoint$"):
        patched.setattr(module, "load_records", lambda folder: moved)
        again(measured)
    done = run_here("scripts/verify.py", measured, "--targets", 5)
    assert done.returncode == 0 and "verified: the records are what these weights give" in done.stdout
    missing = run_here("scripts/verify.py", measured, "--checkpoint", tmp_path / "nowhere")
    assert missing.returncode == 1 and missing.stderr.splitlines()[-1].startswith("error: ")
