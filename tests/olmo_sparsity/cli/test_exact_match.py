"""scripts/exact_match.py and its record: what is written, and when it is left alone."""

import json
from dataclasses import asdict, replace

import pytest

from olmo_sparsity.checkpoint import TrainState, save_checkpoint, weights_sha256
from olmo_sparsity.data.task_batches import TaskPositions
from olmo_sparsity.evaluate.exact_match import exact_match_record, is_measured, measure
from olmo_sparsity.model.build import as_predictor, build_model
from olmo_sparsity.tasks import make_task
from olmo_sparsity.util.errors import UserError
from tests.olmo_sparsity.evaluate.test_exact_match import make_config
from tests.support import tiny


@pytest.fixture
def script(call_main):
    """Calls the command; what it printed."""
    return lambda *arguments: call_main("exact_match", *arguments)[1]


def save(config, step=3, **changes):
    """A checkpoint of fresh weights."""
    model = build_model(replace(config, **changes))
    return save_checkpoint(config.save_folder, config, TrainState(step, 99), model.state_dict(), {}, None)


def test_script_writes_a_record_and_is_not_run_twice(tmp_path, script):
    config = make_config(tmp_path)
    folder, path = save(config), tmp_path / "run" / "exact_match.json"
    options = ("--lengths", "8,5", "--samples", 6, "--device", "cpu")
    printed = script(tmp_path / "run", *options)
    record = json.loads(path.read_text())
    model = as_predictor(build_model(config)).eval()
    task = make_task("scratchpad_parity", config.task.parameters)
    rows = measure(model, task, TaskPositions(config), lengths=[5, 8], samples=6, seed=0)
    assert record == json.loads(
        json.dumps(exact_match_record(folder, config, task, model, rows, seed=0, device="cpu"))
    )
    assert record["rows"] == [asdict(row) for row in rows]
    assert record["task"]["parameters"] == {"train_length": [4, 6], "test_length": [4, 20]}
    told = {
        "kind": "olmo-sparsity exact match",
        "version": 2,
        "run": "run",
        "step": 3,
        "scheme": "predicted",
        "rotate": "index",
        "seed": 3,
    }
    told |= {"family": "gpt_neox", "evaluation_seed": 0, "weights_sha256": weights_sha256(folder)}
    told |= {"checkpoint": str(folder), "initial_weights": False}
    told |= {"parameters": sum(each.numel() for each in model.parameters())}
    assert {name: record[name] for name in told} == told
    low_high = rows[0].exact / 6 * 100, "0.0" if rows[0].exact == 0 else ""
    assert f"{low_high[0]:.1f} [{low_high[1]}" in printed and f"wrote {path}" in printed

    before = path.stat().st_mtime_ns
    assert script(tmp_path / "run", *options) == (
        f"{path} is there already, of the same weights, task, lengths, k, samples and seed\n"
    )
    assert path.stat().st_mtime_ns == before
    cells, asked = [(5, None), (8, None)], {"samples": 6, "seed": 0}
    assert is_measured(path, folder, task, cells, **asked)
    assert not is_measured(path, folder, task, cells[:1], **asked)
    assert not is_measured(path, folder, replace(task, train_length=(4, 5)), cells, **asked)
    assert not is_measured(path, folder, task, cells, **{**asked, "samples": 5})
    assert not is_measured(path, folder, task, cells, **{**asked, "seed": 1})
    assert not is_measured(path, save(config, step=2, seed=9), task, cells, **asked)
    other = tmp_path / "other"
    assert "wrote" in script(folder, *options, "--seed", 1, "--out", other)
    for damaged in ("{", "[" * 100_000, json.dumps({**record, "commit": "x"})):
        path.write_text(damaged)
        assert "wrote" in script(folder, *options)
    assert json.loads(path.read_text()) == record
    assert json.loads((other / "exact_match.json").read_text())["evaluation_seed"] == 1


def test_script_measures_every_k_of_a_sparse_task(tmp_path, script):
    parameters = {"train_length": [8, 10], "test_length": [8, 16], "k_train": 2, "k_test": [2, 7]}
    save(make_config(tmp_path, "sparse_parity", "contiguous", parameters=parameters))
    printed = script(tmp_path / "run", "--samples", 4, "--lengths", "8,16", "--device", "cpu")
    rows = json.loads((tmp_path / "run" / "exact_match.json").read_text())["rows"]
    assert [(row["length"], row["k"]) for row in rows] == [(8, 2), (16, 2), (16, 7)]
    assert all(row["teacher_forced_ids"] is None and row["response_tokens"] == 4 for row in rows)
    assert " k " in printed and "id" not in printed.splitlines()[1]
    with pytest.raises(UserError, match="k = 7 of k_test needs 14 tokens"):
        script(tmp_path / "run", "--lengths", "8,16", "--ks", "2,7")


def test_other_parameters_of_the_task_are_those_of_the_test_samples(tmp_path, script):
    parameters = {
        "train_length": [8, 10],
        "test_length": [8, 16],
        "k_train": 2,
        "k_test": [2],
        "num_background": 2,
    }
    config = make_config(tmp_path, "planted", "contiguous", parameters=parameters)
    save(config)
    far = tmp_path / "far"
    options = "--samples", 40, "--lengths", 16, "--device", "cpu", "--out", far
    script(tmp_path / "run", *options, "--parameters", "{distance: [9, 16], label_function: max}")
    record = json.loads((far / "exact_match.json").read_text())
    assert record["task"]["parameters"]["distance"] == [9, 16]
    assert record["trained"] == json.loads(json.dumps(asdict(make_task("planted", parameters))))
    task = make_task("planted", {**parameters, "distance": [9, 16], "label_function": "max"})
    model = as_predictor(build_model(config)).eval()
    [row] = measure(model, task, TaskPositions(config), lengths=[16], samples=40, seed=0)
    assert record["rows"] == [asdict(row)]
    for given, said in (
        ("{distanc: 3}", "unknown parameter 'distanc'"),
        ("{num_background: 9}", "number the symbols in another way; leave them"),
        ("{num_background: 1}", "number the symbols in another way; leave them"),
        ("{num_planted: 3}", "number the symbols in another way; leave them"),
    ):
        with pytest.raises(UserError, match=said):
            script(tmp_path / "run", *options, "--parameters", given)


def test_another_measurement_is_replaced_only_where_that_is_asked_for(tmp_path, script):
    save(make_config(tmp_path))
    path, options = tmp_path / "run" / "exact_match.json", ("--samples", 4, "--device", "cpu")
    script(tmp_path / "run", "--lengths", "5,8", *options)
    before = path.read_bytes()
    others = (("--lengths", 5), ("--lengths", "5,8", "--seed", 1), ("--lengths", "5,8", "--parameters", "{}"))
    for other in others[:2]:
        with pytest.raises(UserError) as refused:
            script(tmp_path / "run", *other, *options)
        assert str(refused.value) == (
            f"{path} holds another measurement (step 3, 4 samples of lengths 5, 8, evaluation seed 0); give --out, or "
            "--overwrite"
        )
    assert "is there already" in script(tmp_path / "run", *others[2], *options)
    assert path.read_bytes() == before
    assert "wrote" in script(tmp_path / "run", *others[0], *options, "--overwrite")
    assert [row["length"] for row in json.loads(path.read_text())["rows"]] == [5]


def test_an_interrupted_measurement_goes_on_behind_the_cells_that_it_has(tmp_path, script, monkeypatch):
    save(make_config(tmp_path))
    options = ("--lengths", "4,5,8", "--samples", 4, "--device", "cpu")
    script(tmp_path / "run", *options, "--out", tmp_path / "whole")
    whole = (tmp_path / "whole" / "exact_match.json").read_bytes()
    measured, stop_at = [], [5]

    def noted(model, task, positions, *, lengths, **more):
        if lengths == stop_at:
            raise KeyboardInterrupt
        measured.extend(lengths)
        return measure(model, task, positions, lengths=lengths, **more)

    monkeypatch.setattr("olmo_sparsity.evaluate.exact_match.measure", noted)
    for arguments in (options, (*options, "--seed", 1)):  # the second is another measurement, from its start
        with pytest.raises(KeyboardInterrupt):
            script(tmp_path / "run", *arguments)
    assert not (tmp_path / "run" / "exact_match.json").exists()
    stop_at.clear()
    with pytest.raises(UserError, match="longest that fits is 38"):
        script(tmp_path / "run", "--lengths", "4,45", "--device", "cpu", "--out", tmp_path / "long")
    script(tmp_path / "run", *options, "--seed", 1)
    assert measured == [4, 4, 5, 8]
    stop_at[:] = [8]
    with pytest.raises(KeyboardInterrupt):
        script(tmp_path / "run", *options, "--overwrite")
    stop_at.clear()
    script(tmp_path / "run", *options, "--overwrite")
    assert measured == [4, 4, 5, 8, 4, 5, 8]
    assert (tmp_path / "run" / "exact_match.json").read_bytes() == whole
    assert not list((tmp_path / "run").glob("*unfinished*"))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu"])
def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path, script, monkeypatch, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=f"device '{device}'"):
        script(tmp_path / "run", "--device", device)


def test_script_names_a_checkpoint_of_text(tmp_path, script):
    config = tiny.train_config(tmp_path)
    save(config)
    with pytest.raises(UserError, match=r"step00000003 was trained on text.*olmo-sparsity length"):
        script(tmp_path / "run")
