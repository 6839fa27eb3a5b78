"""Cross-fitting: one model chooses, another measures; by checkpoint or by records, and what is refused."""

import numpy as np
import pytest
import torch

from analysis.measure.influence import measure_influence
from analysis.measure.settings import InfluenceSettings
from analysis.records.shards import MeasurementShard
from analysis.records.store import load_records
from analysis.stats.summary import summarize
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.analysis.measure.test_influence import plain_loss
from tests.support import tiny

N, M, KS = 20, 5, (1, 2, 4)
SELECTORS = ("leave-one-out", "greedy", "gradient", "random")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two runs on one corpus that differ by their seed, and records of the first."""
    folder = tmp_path_factory.mktemp("seeds")
    for seed in (3, 4):
        rate = "--optimizer.learning_rate=1e-2"
        train(
            tiny.train_config(
                folder, "--max_duration=120", rate, f"--seed={seed}", f"--save_folder={folder / str(seed)}"
            )
        )
    measure_influence(settings(folder, folder / "records", "3"))
    return folder


def settings(folder, out, checkpoint, evaluate_with=None, **changes):
    values = {
        "checkpoint": str(folder / checkpoint),
        "evaluate_with": str(folder / evaluate_with) if evaluate_with else None,
        "corpus": str(folder / "corpus"),
        "out": str(out),
        "n_long": N,
        "n_short": M,
        "tau_nats": 0.1,
        "ks": KS,
        "selectors": SELECTORS,
        "targets": 80,
        "device": "cpu",
    }
    return InfluenceSettings(**{**values, **changes})


@pytest.fixture(scope="module")
def crossed(seeds):
    return load_records(measure_influence(settings(seeds, seeds / "crossed", "3", "4")))


def test_a_chooses_and_b_measures(seeds, crossed):
    own = load_records(seeds / "records")
    assert len(crossed.over) >= 5
    assert np.array_equal(crossed.over, own.over)  # the targets are those over tau for the model that chooses
    assert np.array_equal(crossed.targets.selecting_gain_nats, own.targets.selecting_gain_nats)
    model, _ = load_model(seeds / "4")
    tokens = TokenFiles.of_split(seeds / "corpus", "heldout")
    for row, at in enumerate(crossed.over[:4]):
        t = crossed.targets
        document, position = tokens.document(t.document[at]), int(t.position[at])
        window, token, short = (
            document[position - N : position],
            int(document[position]),
            list(range(N - M, N)),
        )
        assert t.loss_long_nats[at] == pytest.approx(plain_loss(model, window, range(N), token), abs=1e-4)
        assert t.loss_short_nats[at] == pytest.approx(plain_loss(model, window, short, token), abs=1e-4)
        start = int(t.placebo_start[at])
        other = tokens.document(t.placebo_document[at])[start : start + N - M]
        for context, text in (("true", window), ("placebo", np.concatenate([other, window[N - M :]]))):
            for selector in SELECTORS:
                assert np.array_equal(
                    crossed.selected[selector][context][row], own.selected[selector][context][row]
                )
                for column, k in enumerate(KS):
                    kept = sorted(own.selected[selector][context][row][:k].tolist()) + short
                    expected = plain_loss(model, text, kept, token)
                    assert crossed.loss_nats[selector][context][row, column] == pytest.approx(
                        expected, abs=1e-4
                    )


def test_records_choose_as_their_checkpoint_does(seeds, crossed, tmp_path):
    again = load_records(measure_influence(settings(seeds, tmp_path / "again", "records", "4")))
    assert again.manifest.fingerprint == crossed.manifest.fingerprint
    for selector in SELECTORS:
        for context in ("true", "placebo"):
            assert np.array_equal(again.selected[selector][context], crossed.selected[selector][context])
            assert np.array_equal(again.loss_nats[selector][context], crossed.loss_nats[selector][context])
    part = settings(seeds, tmp_path / "part", "records", "4", ks=(1, 2), selectors=("greedy",))
    fewer = load_records(measure_influence(part))
    assert np.array_equal(fewer.loss_nats["greedy"]["true"], crossed.loss_nats["greedy"]["true"][:, :2])


def test_the_manifest_names_both(seeds, crossed):
    manifest = crossed.manifest
    assert manifest.crossfit
    assert not load_records(seeds / "records").manifest.crossfit
    assert (manifest.training_seed, manifest.evaluation_training_seed) == (3, 4)
    assert manifest.checkpoint_sha256 != manifest.evaluation_checkpoint_sha256
    assert summarize(crossed, 1000)["settings"]["crossfit"]


def test_what_cannot_be_crossed_is_refused(seeds, tmp_path):
    refusals = {
        "the weights are the same": settings(seeds, tmp_path / "out", "3", "3"),
        "is a records folder; give a checkpoint, or another one with": settings(
            seeds, tmp_path / "out", "records"
        ),
        r"have --n-short 5 \(here 6\), --targets 80 \(here 70\)": settings(
            seeds, tmp_path / "out", "records", "4", n_short=6, targets=70
        ),
        "hold up to k = 4 of the selectors leave-one-out": settings(
            seeds, tmp_path / "out", "records", "4", selectors=("attention",)
        ),
        "are cross-fitted themselves": settings(seeds, tmp_path / "out", "crossed", "4"),
    }
    measure_influence(settings(seeds, seeds / "crossed", "3", "4"))
    for message, asked in refusals.items():
        with pytest.raises(UserError, match=message):
            measure_influence(asked)
    assert not (tmp_path / "out").exists()
    measure_influence(settings(seeds, tmp_path / "unfinished", "3", limit=1))
    with pytest.raises(UserError, match="are unfinished"):
        measure_influence(settings(seeds, tmp_path / "out", tmp_path / "unfinished", "4"))


def test_a_limit_leaves_the_rest_to_the_same_command(seeds, tmp_path):
    whole = load_records(seeds / "records")
    finished = []
    for _ in range(100):
        finished.append(len(load_records(measure_influence(settings(seeds, tmp_path, "3", limit=5))).over))
        if load_records(tmp_path).manifest.complete:
            break
    assert finished[0] in range(5, 9)  # rounds of targets are finished
    assert finished == sorted(set(finished))
    assert len(finished) > 1
    records = load_records(tmp_path)
    assert records.examples.to_table().equals(whole.examples.to_table())
    for selector in SELECTORS:
        for context in ("true", "placebo"):
            assert np.array_equal(records.loss_nats[selector][context], whole.loss_nats[selector][context])
    with pytest.raises(UserError, match="--limit 0 leaves nothing"):
        measure_influence(settings(seeds, tmp_path / "none", "3", limit=0))


def test_shards_can_be_cross_fitted(seeds, crossed, tmp_path):
    for number in (1, 2):
        shard = settings(seeds, tmp_path, "records", "4", shard=MeasurementShard(number, 2))
        part = load_records(measure_influence(shard))
        rows = np.isin(crossed.targets.target_id[crossed.over], part.targets.target_id[part.over])
        assert np.array_equal(part.loss_nats["greedy"]["true"], crossed.loss_nats["greedy"]["true"][rows])


def test_examples_hold_the_text_of_the_contexts(seeds, crossed):
    tokens, examples = TokenFiles.of_split(seeds / "corpus", "heldout"), crossed.examples
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


def test_the_script_crosses_and_refuses_in_one_line(seeds, tmp_path, run_here):
    rest = [
        "--corpus",
        seeds / "corpus",
        "--out",
        tmp_path / "out",
        "--n-long",
        N,
        "--n-short",
        M,
        "--tau",
        0.1,
    ]
    rest += ["--k", "1,2", "--targets", 80, "--selectors", "leave-one-out", "--device", "cpu"]

    for arguments, message in (
        ([], "give a checkpoint to measure, or --select-with A --evaluate-with B"),
        (["--select-with", "a"], "--select-with needs --evaluate-with"),
        (["a", "--select-with", "b"], "not both"),
    ):
        done = run_here("scripts/influence.py", *arguments, *rest)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = run_here(
        "scripts/influence.py", "--select-with", seeds / "records", "--evaluate-with", seeds / "4", *rest
    )
    assert done.returncode == 0, done.stderr
    assert load_records(tmp_path / "out").manifest.crossfit


def test_a_device_that_is_not_there_is_refused(seeds, tmp_path):
    for device, message in (("gpu", "there is no device 'gpu'"), ("meta", "'meta' cannot be used here")):
        with pytest.raises(UserError, match=message):
            measure_influence(settings(seeds, tmp_path / "out", "3", device=device))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="'cuda:1' cannot be used here"):
            measure_influence(settings(seeds, tmp_path / "out", "3", device="cuda:1"))


def test_of_a_large_measurement_a_share_of_the_targets_keeps_its_text(seeds, tmp_path, monkeypatch):
    whole = load_records(seeds / "records").examples
    monkeypatch.setattr("analysis.measure.influence.EXAMPLES_FROM_TARGETS", 40)  # of 80
    some = load_records(measure_influence(settings(seeds, tmp_path, "3", limit=1))).examples
    assert 0 < len(some) < len(whole)
    assert set(some.target_id.tolist()) < set(whole.target_id.tolist())
    row = whole.target_id.tolist().index(int(some.target_id[0]))
    assert some.context_pieces[0] == whole.context_pieces[row]
