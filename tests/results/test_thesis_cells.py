"""What `results/thesis/run.sh` and `results/thesis/selected/run.sh` ask for, cell by cell, with `echo` in place of the
commands: lengths inside the ids that PoSE teaches, the same targets everywhere, and folders that `collect.py` reads."""

import os
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.support.processes import SECONDS

ROOT = Path(__file__).parents[2]
THESIS = ROOT / "results" / "thesis" / "run.sh"
SELECTED = ROOT / "results" / "thesis" / "selected" / "run.sh"
collect = import_module("results.thesis.collect")
selected = import_module("results.thesis.selected.collect")
TRAINED = ("pose", "rope", "nope", "alibi", "window")
ALIKE = ("--corpus", "--n-long", "--n-short", "--targets-per-block", "--seed")
"""Options that all cells of text have alike: they draw the targets, with how many there are."""
Options = dict[str, str]


def finish(training: Path, is_finished: bool = True) -> None:
    """Leave what a training leaves: its last checkpoint says whether it came to its end."""
    for step in ("step00000200", "step00001100"):
        (training / step).mkdir(parents=True)
        state = '{"step": 200, "finished": false}\n'
        if is_finished and step == "step00001100":
            state = '{"step": 1100, "finished": true}\n'
        (training / step / "state.json").write_text(state)


def run(script: Path, out: Path, *cells: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OLMO_SPARSITY": "echo"}
    command = ["bash", str(script), str(out), *cells]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=SECONDS)


def measured(printed: str) -> dict[str, Options]:
    """Of each folder that is measured into: its model, and its options, the last where one is given twice."""
    cells = {}
    for line in printed.splitlines():
        command, *words = line.split()
        if command == "measure":
            options = {"model": words[0]}
            options |= dict(zip(words[1::2], words[2::2], strict=True))
            cells[Path(options["--out"]).name] = options
    return cells


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder in which everything is trained and nothing measured."""
    folder = tmp_path_factory.mktemp("out")
    for seed in (1, 2, 3):
        for model in TRAINED:
            finish(folder / f"train-{model}-{seed}")
        finish(folder / f"train-control-{seed}" / "1-4:1000")
    for seed in (2, 3, 4):
        for third in ("random", "top", "easy"):
            finish(folder / "selected" / f"train-{third}-{seed}")
    (folder / "texts-control").mkdir()
    (folder / "texts-control" / "planted.jsonl").write_text("{}\n" * 1210)
    return folder


@pytest.fixture(scope="module")
def names(out):
    """All cells."""
    return run(THESIS, out, "list").stdout.split()


@pytest.fixture(scope="module")
def cells(out, names):
    """What is measured of all cells but the texts, which Python makes."""
    done = run(THESIS, out, *(name for name in names if name != "texts-control"))
    assert done.returncode == 0, done.stderr
    return measured(done.stdout)


def of_text(cells: dict[str, Options]) -> dict[str, Options]:
    """The cells that are not the control's."""
    return {name: options for name, options in cells.items() if "-control-" not in name}


def test_every_cell_is_collected_or_is_no_measurement(names, cells):
    others = [name for name in names if name.startswith(("data", "train-", "texts-"))]
    assert len(others) == 1 + 3 * len(TRAINED) + 3 + 1
    assert len(names) == len(set(names)) == len(others) + len(cells)
    for folder, options in cells.items():
        match = collect.CELL.fullmatch(folder)
        assert match is not None, folder
        trained = "rope" if match["model"].startswith("yarn") else match["model"]
        assert f"train-{trained}-{match['seed']}" in options["model"]


def test_two_windows_are_inside_the_ids_that_pose_teaches(cells):
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf8"))
    ids = config["positions"]["target_length"]
    for model in (*TRAINED, "yarn2", "yarn4"):
        for seed in (1, 2, 3):
            options = cells[f"losses-{model}-{seed}-behind-2"]
            context = int(options["--n-long"]) + int(options["--targets-per-block"])
            assert context == config["model"]["max_sequence_length"]
            assert context + int(options["--before"]) <= ids
    for seed in (1, 2, 3):  # a quarter of everything
        options = cells[f"losses-control-{seed}-behind-2"]
        context = int(options["--n-long"]) + int(options["--targets-per-block"])
        assert context + int(options["--before"]) <= ids // 4


def test_lengths_are_whole_windows(cells):
    for folder, options in cells.items():
        match = collect.CELL.fullmatch(folder)
        window = 64 if match["model"] == "control" else 256
        further = {"behind": "--before", "gap": "--gap"}
        for context, option in further.items():
            if match["context"] == context:
                assert int(options[option]) == window * (int(match["windows"]) - 1)
            else:
                assert option not in options
        if match["kind"] == "own":
            block = int(options["--targets-per-block"])
            lengths = [int(length) + block for length in options["--lengths"].split(",")]
            assert lengths == [window * windows for windows in (2, 3, 4, 8)]
            assert int(options["--n-long"]) + block == window


def test_all_cells_of_text_have_the_same_targets(cells):
    alike = {tuple(options[name] for name in ALIKE) for options in of_text(cells).values()}
    assert len(alike) == 1
    for folder, options in of_text(cells).items():
        assert int(options["--targets"]) == 32 * (400 if folder.startswith("own-") else 514)
    alike = {
        tuple(options[name] for name in (*ALIKE[1:], "--text", "--targets", "--tau"))
        for name, options in cells.items()
        if "-control-" in name
    }
    assert len(alike) == 1


def test_every_pair_has_what_its_hypotheses_are_read_of(cells):
    """Of all three seeds: need, also by greedy search, and losses inside and beyond the window."""
    for seed in (1, 2, 3):
        for model in TRAINED:
            assert cells[f"need-{model}-{seed}"]["--selectors"] == "leave-one-out-kl"
        for yarn, factor in {"yarn2": "2", "yarn4": "4"}.items():
            inside = cells[f"losses-{yarn}-{seed}-inside"]
            assert inside["model"].endswith(f"train-rope-{seed}@yarn:{factor}")
            assert inside["model"] == cells[f"losses-{yarn}-{seed}-behind-3"]["model"]
        for model in (*TRAINED, "yarn2", "yarn4"):
            for windows in (2, 3, 4):
                assert cells[f"losses-{model}-{seed}-behind-{windows}"]["--selectors"] == "none"
        assert cells[f"cache-pose-{seed}"]["--keep-as"] == "cache:4"
        greedy = cells[f"greedy-pose-{seed}"]
        assert greedy["--shard"] == "1/10" and "greedy-kl" in greedy["--selectors"].split(",")


def test_chosen_text_is_measured_on_the_targets_of_the_thesis(out, cells):
    names = run(SELECTED, out, "list").stdout.split()
    heldout = [name for name in names if name.startswith("heldout-")]
    assert len(heldout) == 9 and all(selected.CELL.fullmatch(name) for name in heldout)
    done = run(SELECTED, out, *heldout, "length")
    assert done.returncode == 0, done.stderr
    chosen = measured(done.stdout)
    assert sorted(chosen) == sorted(heldout)
    for options in chosen.values():
        for name in (*ALIKE, "--targets"):
            assert options[name] == cells["need-pose-1"][name], name


@pytest.mark.parametrize(
    ("script", "cell", "training"),
    [
        (THESIS, "need-pose-2", "train-pose-2"),
        (THESIS, "losses-yarn4-3-inside", "train-rope-3"),
        (THESIS, "losses-control-1-behind-2", "train-control-1/1-4:1000"),
        (SELECTED, "heldout-top-3", "selected/train-top-3"),
        (SELECTED, "length", "selected/train-random-2"),
    ],
)
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_training_that_is_not_finished_is_not_measured(tmp_path, script, cell, training, is_begun):
    (tmp_path / "texts-control").mkdir()
    (tmp_path / "texts-control" / "planted.jsonl").write_text("{}\n")
    if is_begun:
        finish(tmp_path / training, is_finished=False)
    done = run(script, tmp_path, cell)
    assert done.returncode != 0 and f"{training} is not trained to its end" in done.stderr
    assert not done.stdout


def test_a_control_that_has_not_learned_is_trained_further_and_then_measured(tmp_path):
    (tmp_path / "texts-control").mkdir()
    (tmp_path / "texts-control" / "planted.jsonl").write_text("{}\n")
    training = tmp_path / "train-control-1"
    further = {
        "further-control-1": ("1-4:1000", "1-4:2000"),
        "again-control-1": ("1-4:2000", "again/3-4:2000"),
    }
    for cell, (before, stage) in further.items():
        refused = run(THESIS, tmp_path, cell)
        assert refused.returncode != 0 and f"{training / before} is not trained to its end" in refused.stderr
        finish(training / before)
        (tmp_path / "need-control-1").mkdir()
        refused = run(THESIS, tmp_path, cell)
        assert refused.returncode != 0 and "need-control-1 is of the training before" in refused.stderr
        (tmp_path / "need-control-1").rmdir()
        first, *more = run(THESIS, tmp_path, cell).stdout.splitlines()
        assert f"--save_folder={training / stage} " in first
        assert f"--initial_weights={training / before}" in first
        assert len(more) == (1 if cell.startswith("again") else 0)
        need = measured(run(THESIS, tmp_path, "need-control-1").stdout)["need-control-1"]
        assert need["model"] == str(training / before)
    finish(training / "again/3-4:2000")
    unfinished = run(THESIS, tmp_path, "need-control-1")
    assert unfinished.returncode != 0 and "again/1-4:1000 is not trained to its end" in unfinished.stderr
    finish(training / "again/1-4:1000")
    need = measured(run(THESIS, tmp_path, "need-control-1").stdout)["need-control-1"]
    assert need["model"] == str(training / "again/1-4:1000")
