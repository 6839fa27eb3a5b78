"""The measurement end to end on a tiny model, its resumption, and what a user does wrong."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import analysis.measure.influence as measurement_module
from analysis.measure.influence import measure_influence
from analysis.records.store import load_records
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.export import position_reach
from olmo_sparsity.model.rope_scaling import RopeScaling
from tests.analysis.records.test_record_damage import list_again, put, rewrite
from tests.support import measured, tiny
from tests.support.measured import M, N, arrays, assert_losses_are_plain, placebo_window, plain_loss
from tests.support.measured import influence_settings as settings
from tests.support.refusals import refused
from tests.support.replaced_tokens import assert_refused_and_right_ones_remembered
from tests.support.slow import slow_but

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("scaled", "per_block"), slow_but([("", 1), ("@yarn:2", 1), ("", 6)], ("@yarn:2", 1), ("", 6))
)
def test_records_equal_a_plain_computation(trained, tmp_path, scaled, per_block):
    checkpoint = f"{trained / 'run'}{scaled}"
    asked = settings(trained, tmp_path / "records", checkpoint, targets_per_block=per_block)
    records = load_records(measure_influence(asked))
    assert len(records.targets) == 60
    assert len(records.over) >= 5
    model, config = load_model(trained / "run")
    if scaled:
        model.rope_scaling = RopeScaling("yarn", 2.0, original_length=position_reach(config))
        assert records.manifest.options["rope_scaling"] == asdict(model.rope_scaling)
    assert records.manifest.checkpoint.endswith(f"/step00000150{scaled}")  # what reports and refusals call it
    assert_losses_are_plain(records, trained / "corpus", model)
    tokens = TokenFiles.of_split(trained / "corpus", "heldout")
    for row, at in enumerate(records.over[:5]):
        text, token = placebo_window(records, tokens, at), records.targets.token[at]
        losses = [
            plain_loss(model, text, [j for j in range(len(text)) if j != i], token) for i in range(N - M)
        ]
        first = records.selected["leave-one-out"]["placebo"][row, 0]
        assert losses[first] == pytest.approx(max(losses), abs=1e-4)


def test_records_of_gpt_neox_equal_a_plain_computation(tmp_path):
    made = measured.write_models(tmp_path, (24, 30, 80, 100, 10), neox={"family": "gpt_neox"})
    records = load_records(measure_influence(settings(made, tmp_path / "records", "neox/run")))
    assert len(records.over) >= 5
    assert_losses_are_plain(records, made / "corpus", load_model(made / "neox" / "run")[0])


def test_records_carry_the_groups_of_target_and_placebo(trained, tmp_path):
    corpus = shutil.copytree(trained / "corpus", tmp_path / "corpus")
    count = len(TokenFiles.of_split(corpus, "heldout").document_bounds)
    tiny.add_groups(corpus, names := [f"book {number // 3}" for number in range(count)])
    records = load_records(
        measure_influence(settings(trained, tmp_path / "records", corpus=str(corpus), targets=20))
    )
    targets, names = records.targets, np.array(names)
    assert np.array_equal(targets.document_group, names[targets.document])
    assert np.array_equal(targets.placebo_group, names[targets.placebo_document])
    assert not (targets.document_group == targets.placebo_group).any()


def test_scaled_and_plain_rope_are_never_mixed(trained, tmp_path):
    for folder, first, second in (("a", "run", "run@yarn:2"), ("b", "run@yarn:2", "run")):
        measure_influence(settings(trained, tmp_path / folder, first, targets=4))
        with refused("rope_scaling"):
            measure_influence(settings(trained, tmp_path / folder, second, targets=4))
    with refused("cannot be scaled in cross-fitting"):
        measure_influence(settings(trained, tmp_path / "c", "run@yarn:2", evaluate_with="run"))
    with refused("are of a checkpoint with scaled RoPE"):
        measure_influence(settings(trained, tmp_path / "d", tmp_path / "b", evaluate_with="run", targets=4))


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


def test_a_complete_measurement_is_left_alone_and_other_settings_are_not_mixed_in(trained, tmp_path):
    folder = measure_influence(settings(trained, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    measure_influence(settings(trained, tmp_path))
    with refused("n_short 5 -> 6"):
        measure_influence(settings(trained, tmp_path, n_short=6))
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


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
    with refused(message):
        measure_influence(settings(trained, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused(trained, tmp_path):
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    weights = sorted(run.glob("step*"))[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused(r"model.safetensors is damaged.*an earlier checkpoint, such as .*run/step"):
        measure_influence(settings(trained, tmp_path / "out", run))


def influence_command(model, corpus, out, *more):
    options = ("--n-long", N, "--n-short", M, "--tau", 0.05, "--k", "1,2", *more)
    return ["scripts/influence.py", model, "--corpus", corpus, "--out", out, *options]


@pytest.mark.slow
def test_the_script_measures_a_directory_and_figure2_draws(trained, tmp_path, run_here):
    out = tmp_path / "records"
    done = run_here(*influence_command(trained / "hf", trained / "corpus", out, "--targets", 30))
    assert done.returncode == 0, done.stderr
    records, found, following = done.stdout.splitlines()
    assert records == f"records: {out}"
    assert "of 30 targets" in found and "leave-one-out-kl: net recovery at k = 2 is" in found
    assert following == f"next: olmo-sparsity figure2 {out}"
    draw = run_here("scripts/figure2.py", out, "--out", tmp_path)
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


@pytest.mark.slow
def test_a_second_process_is_refused_and_ctrl_c_keeps_what_is_finished(trained, tmp_path, run_here):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(60, 80, seed=1)})
    out, slow = tmp_path / "records", ("--targets", 1000, "--tokens-per-batch", 1)  # a minute of selecting
    command = influence_command(trained / "run", corpus, out, *slow)
    first = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not any((out / "selections").glob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for more in (("--seed", 1, "--overwrite"), ()):
        second = run_here(*command, *more)
        assert second.returncode == 1
        assert second.stderr.splitlines()[-1].startswith(f"error: {out} is in use by process {first.pid} on ")
        assert "Traceback" not in second.stderr
    assert first.poll() is None
    os.kill(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=240)
    assert first.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("interrupted: files that were written are kept")
    assert "Traceback" not in errors
    assert not list(out.glob(".lock*"))
    found = load_records(out)
    assert found.manifest.seed == 0
    few = {
        "limit": measurement_module.TARGETS_PER_ROUND,
        "targets": 1000,
        "ks": (1, 2),
        "tokens_per_batch": 1,
    }
    alone = load_records(measure_influence(settings(trained, tmp_path / "few", corpus=str(corpus), **few)))
    for x, y in zip(arrays(found), arrays(alone), strict=True):
        assert np.array_equal(x[: len(y)], y)


@pytest.mark.parametrize("what", ["long_and_short_losses", "selected_losses"])
def test_losses_that_are_not_finite_are_one_line(trained, tmp_path, monkeypatch, what):
    original = getattr(measurement_module, what)

    def broken(*args):
        found = original(*args)
        (found[0] if isinstance(found, tuple) else found).flat[0] = np.nan
        return found

    monkeypatch.setattr(measurement_module, what, broken)
    with refused("a loss of the model is not finite"):
        measure_influence(settings(trained, tmp_path))
    monkeypatch.setattr(measurement_module, what, original)
    assert load_records(measure_influence(settings(trained, tmp_path))).manifest.complete


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_on_records_that_are_not_finite_ends_with_one_line(trained, tmp_path, finished):
    limit = None if finished else 4
    folder = measure_influence(settings(trained, tmp_path / "a", limit=limit))
    part = next((folder / "selections").iterdir())
    whole = part.read_bytes()
    rewrite(part, put("loss_nats", [1.0, float("nan"), 1.0]), folder)
    crossfit = settings(trained, tmp_path / "b", folder, evaluate_with="run")
    for asked in (settings(trained, tmp_path / "a"), crossfit):
        with refused("a loss is not finite"):
            measure_influence(asked)
    part.write_bytes(whole)
    list_again(part, folder)
    assert load_records(measure_influence(settings(trained, tmp_path / "a"))).manifest.complete


def test_replaced_tokens_are_refused_and_right_ones_remembered(trained, tmp_path, monkeypatch):
    assert_refused_and_right_ones_remembered(
        measure_influence, settings(trained, tmp_path / "out"), monkeypatch
    )
