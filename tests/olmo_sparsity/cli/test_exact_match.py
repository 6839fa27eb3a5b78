"""The exact_match command and its record: what is written, and when it is left alone."""

import json
from dataclasses import asdict, replace

import pytest

from olmo_sparsity.checkpoint import weights_sha256
from olmo_sparsity.data.build import task_positions
from olmo_sparsity.evaluate.exact_match import measure_exact_match
from olmo_sparsity.evaluate.exact_match_record import exact_match_record, record_is_of
from olmo_sparsity.model.build import as_predictor, build_model
from olmo_sparsity.tasks import make_task
from tests.olmo_sparsity.evaluate.test_exact_match import make_config
from tests.support import tiny
from tests.support.refusals import refused


@pytest.fixture
def script(call_main):
    """Calls the command; what it printed."""
    return lambda *arguments: call_main("exact_match", *arguments)[1]


def save(config, step=3, **changes):
    """A checkpoint of fresh weights."""
    model = build_model(replace(config, **changes))
    return tiny.save_model(config.save_folder, config, model, step=step)


def test_script_writes_a_record_and_is_not_run_twice(tmp_path, script):
    config = make_config(tmp_path)
    folder, path = save(config), tmp_path / "run" / "exact_match.json"
    options = ("--lengths", "8,5", "--samples", 6, "--device", "cpu")
    printed = script(tmp_path / "run", *options)
    record = json.loads(path.read_text())
    model = as_predictor(build_model(config)).eval()
    task, cells = make_task("scratchpad_parity", config.task.parameters), [(5, None), (8, None)]
    rows = measure_exact_match(model, task, task_positions(config), cells, samples=6, seed=0)
    expected = exact_match_record(folder, config, task, model, rows, seed=0, device="cpu")
    assert record == json.loads(json.dumps(expected))
    assert (record["weights_sha256"], record["step"]) == (weights_sha256(folder), 3)
    assert f"{rows[0].exact / 6:.1%} [" in printed and f"wrote {path}" in printed

    before = path.stat().st_mtime_ns
    assert "is there already" in script(tmp_path / "run", *options)
    assert path.stat().st_mtime_ns == before
    settings = {"samples": 6, "seed": 0}
    assert record_is_of(path, folder, task, cells, **settings)
    assert not record_is_of(path, folder, task, cells[:1], **settings)
    assert not record_is_of(path, folder, replace(task, train_length=(4, 5)), cells, **settings)
    assert not record_is_of(path, folder, task, cells, samples=5, seed=0)
    assert not record_is_of(path, folder, task, cells, samples=6, seed=1)
    assert not record_is_of(path, save(config, step=2, seed=9), task, cells, **settings)
    script(folder, *options, "--seed", 1, "--out", tmp_path / "other")
    assert json.loads((tmp_path / "other" / "exact_match.json").read_text())["evaluation_seed"] == 1


def test_other_parameters_of_the_task_are_those_of_the_test_samples(tmp_path, script):
    parameters = {
        "train_length": [8, 10],
        "test_length": [8, 16],
        "k_train": 2,
        "k_test": [2, 3],
        "num_background": 2,
    }
    config = make_config(tmp_path, "planted", "contiguous", parameters=parameters)
    save(config)
    far = tmp_path / "far"
    options = "--samples", 40, "--lengths", 16, "--ks", 2, "--device", "cpu", "--out", far
    printed = script(tmp_path / "run", *options, "--parameters", "{distance: [9, 16], label_function: max}")
    assert " k " in printed and "id" not in printed.splitlines()[0]
    record = json.loads((far / "exact_match.json").read_text())
    assert record["task"]["parameters"]["distance"] == [9, 16]
    assert record["trained"] == json.loads(json.dumps(asdict(make_task("planted", parameters))))
    task = make_task("planted", {**parameters, "distance": [9, 16], "label_function": "max"})
    model = as_predictor(build_model(config)).eval()
    [row] = measure_exact_match(model, task, task_positions(config), [(16, 2)], samples=40, seed=0)
    assert record["rows"] == [asdict(row)]
    for given, message in (
        ("{distanc: 3}", "Key 'distanc' not in"),
        ("{num_background: 9}", "give the symbols other ids than in training"),
        ("{num_planted: 3}", "give the symbols other ids than in training"),
    ):
        with refused(message):
            script(tmp_path / "run", *options, "--parameters", given)


def test_another_measurement_is_replaced_only_where_that_is_asked_for(tmp_path, script):
    save(make_config(tmp_path))
    path, options = tmp_path / "run" / "exact_match.json", ("--samples", 4, "--device", "cpu")
    script(tmp_path / "run", "--lengths", "5,8", *options)
    before = path.read_bytes()
    for other in (("--lengths", 5), ("--lengths", "5,8", "--seed", 1)):
        with refused("holds another measurement; give --out, or --overwrite"):
            script(tmp_path / "run", *other, *options)
    assert "is there already" in script(tmp_path / "run", "--lengths", "5,8", "--parameters", "{}", *options)
    assert path.read_bytes() == before
    assert "wrote" in script(tmp_path / "run", "--lengths", 5, *options, "--overwrite")
    assert [row["length"] for row in json.loads(path.read_text())["rows"]] == [5]
    path.write_text("{")
    assert "wrote" in script(tmp_path / "run", "--lengths", 5, *options, "--overwrite")
