"""Cross-fitting: one model chooses, another measures; by checkpoint or by records, and what is refused."""

import shutil

import numpy as np
import pytest
import torch

from analysis.measure.influence import measure_influence, open_measurement
from analysis.model.rope_scaling import load_scaled
from analysis.plots.figure2 import describe
from analysis.records.shards import MeasurementShard
from analysis.records.store import load_records
from analysis.stats.compare import compare
from analysis.stats.faithfulness import overlap
from analysis.stats.summary import summarize
from olmo_sparsity.checkpoint import checkpoints, load_model
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support.measured import M, N, arrays, assert_losses_are_plain, influence_settings
from tests.support.refusals import refused

SELECTORS = ("leave-one-out", "greedy", "gradient", "random")


def settings(two_seeds, out, checkpoint="run", evaluate_with=None, **changes):
    values = {"evaluate_with": evaluate_with, "tau_nats": 1.3, "selectors": SELECTORS, "targets": 80}
    return influence_settings(two_seeds, out, checkpoint, **{**values, **changes})


@pytest.fixture(scope="module")
def own(two_seeds):
    """Records of the first model, in `records`."""
    return load_records(measure_influence(settings(two_seeds, two_seeds / "records")))


@pytest.fixture(scope="module")
def crossed(two_seeds, own):
    return load_records(measure_influence(settings(two_seeds, two_seeds / "crossed", "run", "second")))


def test_a_chooses_and_b_measures(two_seeds, own, crossed):
    assert len(crossed.over) >= 5
    assert np.array_equal(crossed.over, own.over)  # the targets are those over tau for the model that chooses
    assert np.array_equal(crossed.targets.selecting_gain_nats, own.targets.selecting_gain_nats)
    for selector in SELECTORS:
        for far in ("true", "placebo"):
            assert np.array_equal(crossed.selected[selector][far], own.selected[selector][far])
    assert_losses_are_plain(crossed, two_seeds / "corpus", load_model(two_seeds / "second")[0])


def test_records_choose_as_their_checkpoint_does(two_seeds, crossed, tmp_path):
    again = load_records(measure_influence(settings(two_seeds, tmp_path / "again", "records", "second")))
    assert again.manifest.options == {**crossed.manifest.options, "choices": "recorded"}
    for x, y in zip(arrays(again), arrays(crossed), strict=True):
        assert np.array_equal(x, y)
    part = settings(two_seeds, tmp_path / "part", "records", "second", ks=(1, 2), selectors=("greedy",))
    fewer = load_records(measure_influence(part))
    assert np.array_equal(fewer.loss_nats["greedy"]["true"], crossed.loss_nats["greedy"]["true"][:, :2])


def test_the_manifest_names_both(own, crossed):
    manifest = crossed.manifest
    assert manifest.crossfit
    assert not own.manifest.crossfit
    assert (manifest.training_seed, manifest.evaluation_training_seed) == (3, 4)
    assert manifest.checkpoint_sha256 != manifest.evaluation_checkpoint_sha256


@pytest.mark.parametrize(
    ("checkpoint", "evaluate_with", "changes", "message"),
    [
        ("run", "run", {}, "the weights are the same"),
        ("records", None, {}, "is a records folder; give a checkpoint, or another one with"),
        ("records", "second", {"n_short": 6, "targets": 70}, r"have --n-short 5 \(here 6\), --targets 80 \(here 70\)"),
        ("records", "second", {"selectors": ("attention",)}, "hold up to k = 4 of the selectors leave-one-out"),
        ("crossed", "second", {}, "are cross-fitted themselves"),
        ("unfinished", "second", {}, "are unfinished"),
        ("untrained", "second", {}, "are of the targets of untrained weights"),
        ("run", None, {"propose_with": "second"}, "--propose-with is for screened selectors; name one in --selectors"),
        ("records", "second", {"propose_with": "second"}, "has chosen already; leave --propose-with out"),
        ("run", None, {"device": "gpu"}, "there is no device 'gpu'"),
        ("run", None, {"device": "meta"}, "'meta' cannot be used here"),
        pytest.param(
            *("run", None, {"device": "cuda:1"}, "'cuda:1' cannot be used here"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    two_seeds, crossed, tmp_path, checkpoint, evaluate_with, changes, message
):
    if checkpoint == "unfinished":
        measure_influence(settings(two_seeds, two_seeds / "unfinished", limit=1))
    if checkpoint == "untrained":
        measure_influence(
            settings(two_seeds, two_seeds / "untrained", "run@untrained", tau_nats=-9.0, limit=1)
        )
    with refused(message):
        measure_influence(settings(two_seeds, tmp_path / "out", checkpoint, evaluate_with, **changes))
    assert not (tmp_path / "out").exists()


def test_choices_of_records_and_of_their_checkpoint_are_not_mixed_where_lds_tells_them_apart(
    two_seeds, own, tmp_path
):
    changes = {"only_recovery": False, "subsets": 4, "selectors": ("leave-one-out", "random")}
    measure_influence(settings(two_seeds, tmp_path, "run", "second", limit=1, **changes))
    with refused("choices None -> recorded"):
        measure_influence(settings(two_seeds, tmp_path, "records", "second", **changes))


def test_records_in_a_checkpoints_folder_are_refused_and_those_in_a_runs_leave_it_a_model(
    two_seeds, own, tmp_path
):
    shutil.copytree(two_seeds / "run", tmp_path / "run")
    step = checkpoints(tmp_path / "run")[-1]
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    with refused("is no place for records: its checksums.json is that of"):
        measure_influence(settings(two_seeds, step))
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before
    for limit in (1, None):  # goes on
        measure_influence(settings(tmp_path, tmp_path / "run", corpus=str(two_seeds / "corpus"), limit=limit))
    assert np.array_equal(load_records(tmp_path / "run").over, own.over)


@pytest.mark.parametrize("model", ["run", "hf"])
def test_untrained_weights_choose_for_the_targets_of_the_trained_model(two_seeds, own, tmp_path, model):
    """Adebayo et al. 2018: what they choose is measured on the trained model, and differs from what that chooses."""
    asked = settings(two_seeds, tmp_path, f"{model}@untrained", model, selectors=("leave-one-out", "random"))
    records = load_records(measure_influence(asked))
    assert np.array_equal(records.over, own.over) and records.manifest.options["untrained"]
    assert np.allclose(records.targets.gain_nats, records.targets.selecting_gain_nats)
    assert_losses_are_plain(records, two_seeds / "corpus", load_model(two_seeds / "run")[0])
    for far in ("true", "placebo"):
        assert np.array_equal(records.selected["random"][far], own.selected["random"][far])
        mine, trained_ones = (each.selected["leave-one-out"][far] for each in (records, own))
        assert 0 < overlap(mine, trained_ones).mean() < 0.7
    again, loaded = (load_scaled(str(two_seeds / model) + what) for what in ("@untrained", ""))
    assert again.weights_sha256 == records.manifest.checkpoint_sha256 != loaded.weights_sha256
    trained_weights = loaded.model.state_dict()
    assert any(
        not torch.equal(each, trained_weights[name]) for name, each in again.model.state_dict().items()
    )
    compared = compare(records, own, 200)["overlap"]
    assert compared["random"]["4"]["true"]["value"] == 1 > compared["leave-one-out"]["4"]["true"]["value"]
    assert "sanity check" in describe(summarize(records, 200))
    with refused("untrained weights gain nothing"):
        measure_influence(settings(two_seeds, tmp_path / "out", "run", "run@untrained"))


def test_a_smaller_model_proposes(two_seeds, own, tmp_path):
    """Among as many candidates as are chosen nothing is left to decide: the set is what the other model ranks first."""
    screened = {
        "selectors": ("leave-one-out@gradient:4", "random"),
        "propose_with": str(two_seeds / "second"),
    }
    records = load_records(measure_influence(settings(two_seeds, tmp_path / "screened", **screened)))
    proposed = load_records(measure_influence(settings(two_seeds, tmp_path / "second", "second")))
    assert records.manifest.options["proposer_sha256"] == proposed.manifest.checkpoint_sha256
    assert np.array_equal(records.over, own.over)
    _, mine, theirs = np.intersect1d(records.over, proposed.over, return_indices=True)
    assert len(mine) >= 3
    for far in ("true", "placebo"):
        chosen = records.selected["leave-one-out@gradient:4"][far][mine]
        assert np.array_equal(np.sort(chosen), np.sort(proposed.selected["gradient"][far][theirs]))
        assert overlap(chosen, own.selected["gradient"][far][mine]).mean() < 1
    # cross-fitted records say it as well, whether the choice is made now or was recorded
    crossed = two_seeds, tmp_path / "crossed"
    alike = {"selectors": screened["selectors"], "only_recovery": True}
    now = open_measurement(settings(*crossed, "run", "second", **{**screened, **alike})).manifest
    recorded = settings(*crossed, records.folder, "second", **alike)
    assert now.fingerprint == open_measurement(recorded).manifest.fingerprint
    random = settings(*crossed, records.folder, "second", selectors=("random",))
    assert "proposer_sha256" not in open_measurement(random).manifest.options


def test_how_the_proposers_rope_is_scaled_is_a_setting(two_seeds, tmp_path):
    """Records of one scaling must not be gone on with under another: the weights are the same."""
    small = str(two_seeds / "second")
    asked = {"selectors": ("leave-one-out@gradient:4",), "targets": 20}
    measure_influence(settings(two_seeds, tmp_path, propose_with=small, limit=1, **asked))
    with refused("was measured with other settings: proposer_rope_scaling None -> yarn:4"):
        measure_influence(settings(two_seeds, tmp_path, propose_with=f"{small}@yarn:4", **asked))


def test_a_limit_leaves_the_rest_to_the_same_command(two_seeds, own, tmp_path):
    finished = []
    for _ in range(100):
        records = load_records(measure_influence(settings(two_seeds, tmp_path, limit=5)))
        finished.append(len(records.over))
        if records.manifest.complete:
            break
    assert finished[0] in range(5, 9)  # rounds of targets are finished
    assert finished == sorted(set(finished))
    assert len(finished) > 1
    assert records.examples.to_table().equals(own.examples.to_table())
    for x, y in zip(arrays(records), arrays(own), strict=True):
        assert np.array_equal(x, y)


def test_shards_can_be_cross_fitted(two_seeds, crossed, tmp_path):
    for number in (1, 2):
        shard = settings(two_seeds, tmp_path, "records", "second", shard=MeasurementShard(number, 2))
        part = load_records(measure_influence(shard))
        rows = np.isin(crossed.targets.target_id[crossed.over], part.targets.target_id[part.over])
        assert np.array_equal(part.loss_nats["greedy"]["true"], crossed.loss_nats["greedy"]["true"][rows])


def test_examples_hold_the_text_of_the_contexts(two_seeds, crossed):
    tokens, examples = TokenFiles.of_split(two_seeds / "corpus", "heldout"), crossed.examples
    assert np.array_equal(examples.target_id, crossed.targets.target_id[crossed.over])
    for row, at in enumerate(crossed.over):
        t = crossed.targets
        document, position = tokens.document(t.document[at]), int(t.position[at])
        window = " ".join(f"w{token}" for token in document[position - N : position + 1])
        assert "".join(examples.context_pieces[row]) + examples.target_piece[row] == window
        start = int(t.placebo_start[at])
        other = tokens.document(t.placebo_document[at])[start : start + N - M]
        assert "".join(examples.placebo_pieces[row]) == " ".join(f"w{token}" for token in other)
        behind = document[position + 1 : position + 13]
        assert examples.after[row].split() == [f"w{token}" for token in behind]


def test_the_script_crosses_and_refuses_in_one_line(two_seeds, own, tmp_path, run_here):
    rest = ["--corpus", two_seeds / "corpus", "--out", tmp_path / "out", "--n-long", N, "--n-short", M]
    rest += ["--tau", 1.3, "--k", "1,2", "--targets", 80, "--selectors", "leave-one-out", "--device", "cpu"]
    for arguments, message in (
        ([], "give a checkpoint to measure, or --select-with A --evaluate-with B"),
        (["--select-with", "a"], "--select-with needs --evaluate-with"),
        (["a", "--select-with", "b"], "not both"),
    ):
        done = run_here("scripts/influence.py", *arguments, *rest)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    both = ["--select-with", two_seeds / "records", "--evaluate-with", two_seeds / "second"]
    done = run_here("scripts/influence.py", *both, *rest)
    assert done.returncode == 0, done.stderr
    assert load_records(tmp_path / "out").manifest.crossfit


def test_of_a_large_measurement_a_share_of_the_targets_keeps_its_text(two_seeds, own, tmp_path, monkeypatch):
    whole = own.examples
    monkeypatch.setattr("analysis.measure.influence.EXAMPLES_FROM_TARGETS", 40)  # of 80
    some = load_records(measure_influence(settings(two_seeds, tmp_path, limit=1))).examples
    assert 0 < len(some) < len(whole)
    assert set(some.target_id.tolist()) < set(whole.target_id.tolist())
    asked = settings(two_seeds, tmp_path / "asked", targets=10**6, limit=1)  # more than the text has
    many = load_records(measure_influence(asked))
    assert len(many.examples) > 0.2 * len(many.over_tau) * 40 / len(many.targets)
    row = whole.target_id.tolist().index(int(some.target_id[0]))
    assert some.context_pieces[0] == whole.context_pieces[row]
