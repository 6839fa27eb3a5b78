"""The measurement end to end on a tiny model, its resumption, and what a user does wrong."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import analysis.measure.influence as measurement_module
from analysis.measure.influence import measure_influence
from analysis.measure.settings import InfluenceSettings
from analysis.records.store import load_records
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.export import position_reach
from olmo_sparsity.model.rope_scaling import RopeScaling
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.analysis.records.test_record_damage import list_again, put, rewrite
from tests.support import tiny
from tests.support.replaced_tokens import assert_refused_and_right_ones_remembered

ROOT = Path(__file__).parents[3]
N, M, KS = 20, 5, (1, 2, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned a little to copy, and its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, "--max_duration=150", "--optimizer.learning_rate=1e-2"))
    return folder


def settings(trained, out, **changes):
    values = {
        "checkpoint": str(trained / "run"),
        "corpus": str(trained / "corpus"),
        "out": str(out),
        "n_long": N,
        "n_short": M,
        "tau_nats": 0.05,
        "ks": KS,
        "targets": 60,
        "device": "cpu",
    }
    return InfluenceSettings(**{**values, **changes})


def arrays(records):
    return [records.loss_nats[s][c] for s in records.manifest.selectors for c in ("true", "placebo")] + [
        records.selected[s][c] for s in records.manifest.selectors for c in ("true", "placebo")
    ]


@torch.no_grad()
def plain_loss(model, window, kept, token):
    logits = model(
        torch.tensor([[int(window[j]) for j in kept]]), position_ids=torch.tensor([list(kept)])
    ).logits
    return float(-logits[0, -1].double().log_softmax(-1)[token])


@pytest.mark.parametrize("scaled", ["", "@yarn:2"])
def test_records_equal_a_plain_computation(trained, tmp_path, scaled):
    """Every loss in the records again, one subsequence at a time, from the token files and the checkpoint."""
    checkpoint = f"{trained / 'run'}{scaled}"
    records = load_records(measure_influence(settings(trained, tmp_path / "records", checkpoint=checkpoint)))
    assert len(records.targets) == 60
    assert len(records.over) >= 5
    model, config = load_model(trained / "run")
    if scaled:
        model.rope_scaling = RopeScaling("yarn", 2.0, original_length=position_reach(config))
        assert records.manifest.options["rope_scaling"] == asdict(model.rope_scaling)
    assert records.manifest.checkpoint.endswith(f"/step00000150{scaled}")  # what reports and refusals call it
    tokens = TokenFiles.of_split(trained / "corpus", "heldout")
    short, far = list(range(N - M, N)), N - M
    for row, at in enumerate(records.over[:5]):
        t = records.targets
        document, position = tokens.document(t.document[at]), int(t.position[at])
        window, token = document[position - N : position], int(document[position])
        assert token == t.token[at]
        assert t.loss_long_nats[at] == pytest.approx(plain_loss(model, window, range(N), token), abs=1e-4)
        assert t.loss_short_nats[at] == pytest.approx(plain_loss(model, window, short, token), abs=1e-4)
        start = int(t.placebo_start[at])
        other = tokens.document(t.placebo_document[at])[start : start + far]
        for context, text in (("true", window), ("placebo", np.concatenate([other, window[far:]]))):
            for selector in records.manifest.selectors:
                chosen = records.selected[selector][context][row]
                for column, k in enumerate(KS):
                    expected = plain_loss(model, text, sorted(chosen[:k].tolist()) + short, token)
                    assert records.loss_nats[selector][context][row, column] == pytest.approx(
                        expected, abs=1e-4
                    )
            long = plain_loss(model, text, range(N), token)
            gains = [
                plain_loss(model, text, [j for j in range(N) if j != i], token) - long for i in range(far)
            ]
            first = records.selected["leave-one-out"][context][row, 0]
            assert gains[first] == pytest.approx(max(gains), abs=1e-4)


def test_scaled_and_plain_rope_are_never_mixed(trained, tmp_path):
    plain, scaled = str(trained / "run"), f"{trained / 'run'}@yarn:2"
    for folder, first, second in (("a", plain, scaled), ("b", scaled, plain)):
        measure_influence(settings(trained, tmp_path / folder, checkpoint=first, targets=4))
        with pytest.raises(UserError, match="rope_scaling"):
            measure_influence(settings(trained, tmp_path / folder, checkpoint=second, targets=4))
    with pytest.raises(UserError, match="cannot be scaled in cross-fitting"):
        measure_influence(settings(trained, tmp_path / "c", checkpoint=scaled, evaluate_with=plain))
    with pytest.raises(UserError, match="are of a checkpoint with scaled RoPE"):
        changes = {"checkpoint": str(tmp_path / "b"), "evaluate_with": plain, "targets": 4}
        measure_influence(settings(trained, tmp_path / "d", **changes))


def test_batch_size_changes_nothing(trained, tmp_path):
    a = load_records(measure_influence(settings(trained, tmp_path / "a", tokens_per_batch=64)))
    b = load_records(measure_influence(settings(trained, tmp_path / "b", tokens_per_batch=100_000)))
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_an_interrupted_measurement_goes_on_where_it_stopped(trained, tmp_path, monkeypatch):
    whole = load_records(measure_influence(settings(trained, tmp_path / "whole")))
    assert len(whole.over) > 2 * measurement_module.TARGETS_PER_ROUND
    original = measurement_module.selected_losses
    calls = []

    def interrupt(*args):
        calls.append(1)
        if len(calls) > 12:  # in the middle of the second round of targets
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(measurement_module, "selected_losses", interrupt)
    parts = settings(trained, tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        measure_influence(parts)
    finished = load_records(tmp_path / "parts")  # finished records stay
    assert len(finished.over) == measurement_module.TARGETS_PER_ROUND
    monkeypatch.setattr(measurement_module, "selected_losses", original)
    monkeypatch.setattr(measurement_module, "long_and_short_losses", None)  # the gaps are not measured again
    resumed = load_records(measure_influence(parts))
    for x, y in zip(arrays(whole), arrays(resumed), strict=True):
        assert np.array_equal(x, y)


def test_a_complete_measurement_is_left_alone(trained, tmp_path):
    folder = measure_influence(settings(trained, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    measure_influence(settings(trained, tmp_path))
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_records_of_other_settings_are_not_mixed(trained, tmp_path):
    measure_influence(settings(trained, tmp_path))
    with pytest.raises(UserError, match="n_short 5 -> 6"):
        measure_influence(settings(trained, tmp_path, n_short=6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_long": M}, "must be larger than M = 5"),
        ({"n_long": 80, "n_short": 70}, r"the longest has 80 tokens; lower --n-long to at most 79"),
        ({"selectors": ("leave-one-out", "leave-two-out")}, "unknown selector 'leave-two-out'; choose among"),
        ({"ks": (1, 16)}, "more than the 15 far tokens"),
        ({"split": "test"}, "has no split 'test'; it has heldout, train"),
        ({"tau_nats": 90.0}, r"none of 60 targets gains more than tau = 90.0 nats.*lower --tau"),
        ({"checkpoint": "nowhere"}, "nowhere is neither a checkpoint nor a run"),
        ({"corpus": "nowhere"}, "nowhere is no prepared corpus"),
    ],
)
def test_bad_settings_are_refused_in_one_line(trained, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        measure_influence(settings(trained, tmp_path / "out", **changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_text_of_another_tokenizer_is_refused(trained, tmp_path):
    corpus = tiny.write_corpus(tmp_path / "other", {"heldout": tiny.random_documents(3, 60)}, vocab_size=49)
    with pytest.raises(UserError, match="another tokenizer than"):
        measure_influence(settings(trained, tmp_path / "out", corpus=str(corpus)))


def test_a_truncated_heldout_file_is_refused(trained, tmp_path):
    corpus = tmp_path / "corpus"
    subprocess.run(["cp", "-r", trained / "corpus", corpus], check=True)
    path = corpus / "heldout-00000.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="truncated or was changed"):
        measure_influence(settings(trained, tmp_path / "out", corpus=str(corpus)))


def test_a_damaged_checkpoint_is_refused(trained, tmp_path):
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", trained / "run", run], check=True)
    weights = sorted(run.glob("step*"))[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        UserError, match=r"model.safetensors is damaged.*an earlier checkpoint, such as .*run/step"
    ):
        measure_influence(settings(trained, tmp_path / "out", checkpoint=str(run)))


def script(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def influence_command(trained, out, *more):
    paths = (trained / "run", "--corpus", trained / "corpus", "--out", out)
    return (
        "scripts/influence.py",
        *paths,
        "--n-long",
        N,
        "--n-short",
        M,
        "--tau",
        "0.05",
        "--k",
        "1,2",
        *more,
    )


def test_the_script_measures_and_figure2_draws(trained, tmp_path, run_here):
    run = script(*influence_command(trained, tmp_path / "records", "--targets", 30))
    output, errors = run.communicate()
    assert run.returncode == 0, errors
    assert str(tmp_path / "records") in output
    draw = run_here("scripts/figure2.py", tmp_path / "records", "--out", tmp_path)
    assert draw.returncode == 0, draw.stderr
    assert "leave-one-out" in draw.stdout
    assert (tmp_path / "figure2.png").stat().st_size > 10_000
    assert (tmp_path / "summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scripts/influence.py", "nowhere", "--corpus", "x", "--out", "y"), "nowhere is neither"),
        (("scripts/figure2.py", "nowhere"), "nowhere has no records"),
        (("scripts/train.py", "configs/demo.yaml", "--model.d_modle=3"), "did you mean model.d_model"),
        (("scripts/train.py", "configs/none.yaml"), "configs/none.yaml"),
    ],
)
def test_scripts_end_bad_input_with_one_line_and_a_code(arguments, message, run_here):
    run = run_here(*arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert run.stdout == ""


def test_ctrl_c_keeps_finished_records_and_says_how_to_go_on(trained, tmp_path):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(60, 80, seed=1)})
    slow = ("--targets", 600, "--tokens-per-batch", 1, "--corpus", corpus)  # ten seconds of selecting
    run = script(*influence_command(trained, tmp_path / "records", *slow))
    deadline = time.monotonic() + 240
    while not (tmp_path / "records" / "targets.parquet").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process = psutil.Process(run.pid)  # its processor time does not depend on what else runs
    enough = process.cpu_times().user + 1  # ten rounds of targets
    while process.cpu_times().user < enough and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=240)
    assert run.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("interrupted: what was finished is kept")
    assert "Traceback" not in errors
    assert len(load_records(tmp_path / "records").over) > 0


def test_a_second_process_is_refused_and_changes_nothing(trained, tmp_path, run_here):
    out = tmp_path / "records"
    command = influence_command(trained, out, "--targets", 60, "--tokens-per-batch", 1)
    first = script(*command)
    deadline = time.monotonic() + 240
    while not (out / "targets.parquet").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.poll() is None
    for more in (("--seed", 1, "--overwrite"), ("--seed", 1), ()):
        second = run_here(*command, *more)
        assert second.returncode == 1
        assert second.stderr.splitlines()[-1].startswith(f"error: {out} is in use by process {first.pid} on ")
        assert "Traceback" not in second.stderr
    assert first.poll() is None
    _, errors = first.communicate(timeout=240)
    assert first.returncode == 0, errors
    whole = load_records(
        measure_influence(settings(trained, tmp_path / "whole", ks=(1, 2), tokens_per_batch=1))
    )
    found = load_records(out)
    assert found.manifest.seed == 0
    for x, y in zip(arrays(whole), arrays(found), strict=True):
        assert np.array_equal(x, y)
    assert not list(out.glob(".lock*"))


@pytest.mark.parametrize("what", ["long_and_short_losses", "selected_losses"])
def test_losses_that_are_not_finite_are_one_line(trained, tmp_path, monkeypatch, what):
    original = getattr(measurement_module, what)

    def broken(*args):
        found = original(*args)
        (found[0] if isinstance(found, tuple) else found).flat[0] = np.nan
        return found

    monkeypatch.setattr(measurement_module, what, broken)
    with pytest.raises(UserError, match="a loss of the model is not finite") as error:
        measure_influence(settings(trained, tmp_path))
    assert "\n" not in str(error.value)
    monkeypatch.setattr(measurement_module, what, original)
    assert load_records(measure_influence(settings(trained, tmp_path))).manifest.complete


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_on_records_that_are_not_finite_ends_with_one_line(trained, tmp_path, finished):
    limit = None if finished else 4
    folder = measure_influence(settings(trained, tmp_path / "a", limit=limit))
    part = next((folder / "selections").iterdir())
    whole = part.read_bytes()
    rewrite(part, put("loss_nats", [1.0, float("nan"), 1.0]), folder)
    crossfit = settings(trained, tmp_path / "b", checkpoint=str(folder), evaluate_with=str(trained / "run"))
    for asked in (settings(trained, tmp_path / "a"), crossfit):
        with pytest.raises(UserError, match="a loss is not finite") as error:
            measure_influence(asked)
        assert "\n" not in str(error.value)
    part.write_bytes(whole)
    list_again(part, folder)
    assert load_records(measure_influence(settings(trained, tmp_path / "a"))).manifest.complete


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    """A file-size limit stands for the full disk: the write fails in the middle, as it would there."""
    config = tiny.train_config(tmp_path, "--model.d_model=128")
    path = tmp_path / "config.yaml"

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    run = script("scripts/train.py", path, "--model.d_model=128", preexec_fn=limit)
    _, errors = run.communicate()
    assert run.returncode == 1
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert "disk" in errors
    assert "Traceback" not in errors
    assert not list(Path(config.save_folder).glob("*step*"))


def test_replaced_fields_of_a_checkpoint_do_not_warn_again(trained, tmp_path, caplog):
    config = replace(tiny.train_config(tmp_path), gen1_gc_interval=7)
    train(config)
    caplog.clear()
    load_model(tmp_path / "run")
    assert "no effect" not in caplog.text


def test_replaced_tokens_are_refused_and_right_ones_remembered(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "corpus", tmp_path / "corpus")
    asked = settings(trained, tmp_path / "out", corpus=str(tmp_path / "corpus"))
    assert_refused_and_right_ones_remembered(measure_influence, asked, monkeypatch)


def test_nothing_stays_where_no_target_gains(trained, tmp_path):
    with pytest.raises(UserError, match="gains more than tau"):
        measure_influence(settings(trained, tmp_path / "out", tau_nats=1e6))
    assert not (tmp_path / "out").exists()
