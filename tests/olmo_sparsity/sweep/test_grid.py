"""Grids of runs: axes, cells and their names, and what is refused before anything starts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from olmo_sparsity.config.load import load_config
from olmo_sparsity.sweep.grid import Axis, Sweep, make_cells, parse_axes, write_sweep
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from tests.support import tiny
from tests.support.refusals import refused

TASK = """\
model: {d_model: 16, n_heads: 2, n_layers: 1, mlp_ratio: 2, rope: true, include_bias: false, layer_norm_type: rms,
        vocab_size: 6, embedding_size: 64, eos_token_id: 0, pad_token_id: 0, max_sequence_length: 24}
task: {name: scratchpad_parity, parameters: {train_length: [5, 10], test_length: [5, 20]}}
positions: {scheme: coupled, table_size: 30}
scheduler: {name: linear_with_warmup, t_warmup: 2}
max_duration: 2
global_train_batch_size: 4
"""


def the_sweep(folder, *grid, overrides=(), evaluation=()):
    return Sweep(
        (str(folder / "config.yaml"),),
        parse_axes(grid),
        folder / "out",
        tuple(overrides),
        ("train",),
        ("measure",),
        tuple(evaluation),
    )


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("seed=1,2,3", "seed", ["1", "2", "3"]),
        ("a.b=[5,20],[5,10]", "a.b", ["[5,20]", "[5,10]"]),
        ("a={x: [1,2], y: 3},null", "a", ["{x: [1,2], y: 3}", "null"]),
        ("optimizer.learning_rate=1e-4, 1e-3", "optimizer.learning_rate", ["1e-4", "1e-3"]),
        ("base=configs/a.yaml", "base", ["configs/a.yaml"]),
    ],
)
def test_commas_outside_of_brackets_separate_values(text, key, values):
    assert Axis.parse(text) == Axis(key, tuple(values))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["seed"], "--grid seed: write a key of the config and its values"),
        (["--seed=1"], "write a key of the config"),
        (["seed="], "--grid seed=: a value is missing"),
        (["seed=1,,2"], "a value is missing"),
        (["seed=1,2,1"], "has 1 twice"),
        (["a=[1,2"], "a bracket is not closed"),
        (["a=1],[2"], "or closed twice"),
        (["a=1,\n,2"], "a value is missing"),
        (["seed=1", "seed=2"], "--grid seed is given twice; put all"),
        (["save_folder=a,b"], "save_folder is decided by the sweep"),
        (["config=a,b"], "config is decided by the sweep"),
    ],
)
def test_malformed_axes_are_refused_in_a_line(grid, message):
    with refused(re.escape(message)):
        parse_axes(grid)


def test_cells_are_the_product_in_order_and_their_commands_load_as_they_are(tmp_path):
    tiny.train_config(tmp_path)
    grid = ("seed=1,2", "positions.scheme=contiguous,pose", "optimizer.betas=[0.9,0.95],[0.8,0.99]")
    cells = make_cells(the_sweep(tmp_path, *grid, overrides=["--max_duration=6"]))
    assert [cell.name for cell in cells] == [
        f"seed={seed},positions.scheme={scheme},optimizer.betas={betas}"
        for seed in (1, 2)
        for scheme in ("contiguous", "pose")
        for betas in ("0.9-0.95", "0.8-0.99")
    ]
    assert cells[5].values == {"seed": "2", "positions.scheme": "contiguous", "optimizer.betas": "[0.8,0.99]"}
    ((program, path, resume, *overrides),) = cells[5].commands
    assert (program, resume) == ("train", "--resume")
    config = load_config(path, overrides)
    assert config.save_folder == str(cells[5].folder)
    assert config.run_name == f"out-{cells[5].name}"
    assert (config.seed, config.positions.scheme, config.max_duration) == (2, "contiguous", 6)
    assert tuple(config.optimizer.betas) == (0.8, 0.99)
    assert cells[5].settings["optimizer"]["betas"] == [0.8, 0.99]


@pytest.mark.parametrize("name", ["a #1", "[a]", "a: b", "'a", "ä \\", "trailing "])
def test_a_folder_of_any_name_is_the_one_that_is_trained_in(tmp_path, monkeypatch, name):
    """Its name is a value of the config's, too, which YAML would read otherwise."""
    tiny.train_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    (cell,) = make_cells(replace(the_sweep(tmp_path, "seed=1"), out=Path(name)))
    ((_, path, _, *overrides),) = cell.commands
    config = load_config(path, overrides)
    assert (config.save_folder, config.run_name) == (f"{name}/seed=1", f"{name}-seed=1")
    assert str(cell.folder) == config.save_folder


def test_several_configs_are_the_slowest_axis(tmp_path):
    tiny.train_config(tmp_path)
    for name, changes in (("rope", "contiguous"), ("pose", "pose")):
        text = (tmp_path / "config.yaml").read_text().replace("scheme: pose", f"scheme: {changes}")
        (tmp_path / f"{name}.yaml").write_text(text)
    configs = (str(tmp_path / "rope.yaml"), str(tmp_path / "pose.yaml"))
    sweep = replace(the_sweep(tmp_path, "seed=1,2"), configs=configs)
    cells = make_cells(sweep)
    assert [cell.name for cell in cells] == [
        "config=rope,seed=1", "config=rope,seed=2", "config=pose,seed=1", "config=pose,seed=2",
    ]  # fmt: skip
    for cell in cells:
        ((_, path, _, *overrides),) = cell.commands
        assert path == str(tmp_path / f"{cell.values['config']}.yaml")
        scheme = {"rope": "contiguous", "pose": "pose"}[cell.values["config"]]
        assert load_config(path, overrides).positions.scheme == scheme == cell.settings["positions"]["scheme"]
    write_sweep(sweep, cells, "commit")
    listed = json.loads((sweep.out / "sweep.json").read_text())
    assert listed["configs"] == list(configs)
    assert listed["axes"] == {"config": ["rope", "pose"], "seed": [1, 2]}
    with refused("two cells would share the folder config=rope,seed=1"):
        make_cells(replace(sweep, configs=(configs[0], configs[0])))


def test_no_axis_but_one_cell_and_negative_values_keep_their_sign(tmp_path):
    tiny.train_config(tmp_path)
    assert [c.name for c in make_cells(the_sweep(tmp_path, "save_num_checkpoints_to_keep=-1,1"))] == [
        "save_num_checkpoints_to_keep=-1",
        "save_num_checkpoints_to_keep=1",
    ]


def test_a_long_name_is_cut_and_stays_its_own(tmp_path):
    tiny.train_config(tmp_path)
    values = [f"[{','.join([f'/data/{name}/tokens-of-a-long-name.npy'] * 9)}]" for name in ("a", "b")]
    cells = make_cells(
        the_sweep(tmp_path, f"data.paths={','.join(values)}", overrides=["--corpus.path=null"])
    )
    assert len({cell.name for cell in cells}) == 2
    assert all(len(cell.name) == 200 for cell in cells)


def test_a_task_is_evaluated_and_text_is_not(tmp_path):
    (tmp_path / "config.yaml").write_text(TASK)
    (cell,) = make_cells(the_sweep(tmp_path, "seed=1", evaluation=["--samples", "5"]))
    assert cell.commands[1] == ("measure", str(cell.folder), "--samples", "5")
    tiny.train_config(tmp_path)
    (cell,) = make_cells(the_sweep(tmp_path, "seed=1"))
    assert len(cell.commands) == 1


# What is refused before anything starts.


def test_all_bad_cells_are_named_at_once(tmp_path):
    tiny.train_config(tmp_path)
    grid = ("positions.scheme=pose,posse,contiguous", "positions.chunks=2,1")
    with pytest.raises(UserError) as error:
        make_cells(the_sweep(tmp_path, *grid))
    head, *lines = str(error.value).splitlines()
    # posse is unknown whatever the chunks; one chunk is no PoSE
    assert head == "3 of 6 cells cannot run, and none is started:"
    assert len(lines) == 2
    assert lines[0].startswith("  positions.scheme=pose,positions.chunks=1: ")
    assert lines[1].startswith("  positions.scheme=posse,positions.chunks=2 and 1 more: ")
    assert "posse is unknown; choose contiguous" in lines[1]


def test_what_is_wrong_in_all_cells_is_said_once(tmp_path):
    with refused() as error:
        make_cells(the_sweep(tmp_path, "seed=1,2"))
    assert str(error.value).startswith(f"{tmp_path / 'config.yaml'}: [Errno 2] No such file")


@pytest.mark.parametrize(
    ("grid", "overrides", "message"),
    [
        (["seed=1"], ["--seed=2"], "--seed=2: seed is decided by the sweep"),
        (["seed=1"], ["--save-folder=x"], "save_folder is decided by the sweep"),
        (
            ["seed=1"],
            ["--dry-run"],
            "dry_run: such a run trains nothing; leave it out, or give --dry-run before",
        ),
        (["optimizer.betas=[0.9,0.95],[0.9, 0.95]"], [], "would share the folder optimizer.betas=0.9-0.95"),
        (["seed=1,+1"], [], "seed=1 and seed=+1 have the same settings; leave one of them out"),
    ],
)
def test_cells_that_are_one_run_are_refused_in_a_line(tmp_path, grid, overrides, message):
    tiny.train_config(tmp_path)
    with refused(re.escape(message)):
        make_cells(the_sweep(tmp_path, *grid, overrides=overrides))


def test_a_finished_cell_is_refused_with_other_settings_and_measured_with_other_arguments(tmp_path):
    (tmp_path / "config.yaml").write_text(TASK)
    (cell,) = make_cells(the_sweep(tmp_path, "seed=1"))
    assert not cell.is_finished
    cell.mark("abc")
    (again,) = make_cells(the_sweep(tmp_path, "seed=1"))
    assert again.is_finished
    (other,) = make_cells(the_sweep(tmp_path, "seed=1", evaluation=["--samples", "9"]))
    assert not other.is_finished
    changed = the_sweep(tmp_path, "seed=1,2", overrides=["--task.parameters.train_length=[5,9]"])
    with pytest.raises(UserError) as error:
        make_cells(changed)
    head, line = str(error.value).splitlines()
    assert head == "1 of 2 cells cannot run, and none is started:"
    assert line.startswith(
        f"  seed=1: already finished in {tmp_path / 'out'}, with task.parameters.train_length "
    )
    assert "[5, 10], which is [5, 9] now; set it back, choose another --out, or remove sweep.json" in line


@pytest.mark.parametrize(
    "content", ["{oops", "[]", "[" * 100_000, '{"format": 1}', '{"evaluation": null, "settings": 3}']
)
def test_a_damaged_marker_is_a_line_that_names_it(tmp_path, content):
    tiny.train_config(tmp_path)
    (cell,) = make_cells(the_sweep(tmp_path, "seed=1"))
    cell.mark("abc")
    cell.marker.write_text(content)
    with refused(r"sweep.json is damaged .*; remove it and run the same"):
        make_cells(the_sweep(tmp_path, "seed=1"))
    with refused("is damaged"):
        cell.is_finished  # noqa: B018 (a property that reads the file)


def test_a_field_that_the_config_has_got_since_changes_nothing(tmp_path):
    tiny.train_config(tmp_path)
    (cell,) = make_cells(the_sweep(tmp_path, "seed=1"))
    cell.mark("abc")
    marker = json.loads(cell.marker.read_text())
    del marker["settings"]["positions"]["id_weight"]
    write_json(cell.marker, marker)
    assert make_cells(the_sweep(tmp_path, "seed=1"))[0].is_finished
    with refused("with positions.id_weight 1.0, which is 2.0 now"):
        make_cells(the_sweep(tmp_path, "seed=1", overrides=["--positions.id_weight=2"]))
