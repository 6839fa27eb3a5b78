"""The wheel, installed away from the checkout: commands, configs and SLURM templates all work from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import SECONDS

ROOT = Path(__file__).parents[1]
SOURCES = (
    *("olmo_sparsity", "analysis", "configs", "slurm", "docs"),
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"),
)
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index")
TINY = (
    *("--model.d_model=32", "--model.n_heads=4", "--model.n_layers=1", "--model.max_sequence_length=32"),
    *("--model.vocab_size=320", "--model.embedding_size=384", "--positions.target_length=64"),
    *("--global_train_batch_size=8", "--device_train_microbatch_size=8", "--optimizer.learning_rate=1e-2"),
    *("--max_duration=40", "--scheduler.t_warmup=2", "--evaluation.interval=null"),
    *("--corpus.path=data", "--save_folder=run"),
)


def build_wheel(folder):
    """The wheel of a copy of the sources, for building writes beside them; nothing is downloaded."""
    copy = folder / "copy"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    gone = copy / "build" / "lib" / "olmo_sparsity" / "cli" / "gone.py"  # as an earlier build leaves a module
    gone.parent.mkdir(parents=True)
    gone.touch()
    subprocess.run(
        [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, copy], check=True, timeout=SECONDS
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install` of the wheel puts into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [*PIP, "install", *OFFLINE, "--target", folder / "site", build_wheel(folder)],
        check=True,
        timeout=SECONDS,
    )
    return folder / "site"


@pytest.mark.slow
def test_modules_of_an_earlier_build_are_left_out(installed):
    assert (installed / "olmo_sparsity" / "cli" / "train.py").is_file()
    assert not (installed / "olmo_sparsity" / "cli" / "gone.py").exists()


@pytest.fixture
def run(installed, tmp_path):
    """Runs Python in an empty folder that knows the installed packages, not the checkout; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def run(*words) -> str:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    return run


@pytest.fixture
def olmo_sparsity(run, installed):
    """The command that pip made."""
    return lambda *arguments: run(installed / "bin" / "olmo-sparsity", *arguments)


@pytest.mark.slow
def test_an_installed_wheel_brings_its_configs_and_templates(run, olmo_sparsity, installed, tmp_path):
    where = "import analysis, olmo_sparsity; print(analysis.__file__, olmo_sparsity.__file__)"
    assert run("-P", "-c", where).count(str(installed)) == 2
    assert all((installed / name / "py.typed").is_file() for name in ("olmo_sparsity", "analysis"))
    shipped = installed / "olmo_sparsity" / "shipped"
    for name in ("configs", "slurm"):
        in_repository = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        assert {
            path.relative_to(shipped) for path in (shipped / name).rglob("*") if path.is_file()
        } == in_repository
    (tmp_path / "mine.yaml").write_text("base: configs/base.yaml\nseed: 7\n")
    assert "seed: 7" in olmo_sparsity("train", "mine.yaml", "--dry-run")
    grid = ("configs/synthetic/addition-small.yaml", "--grid", "seed=1", "--out", "out", "--dry-run")
    start = f"{sys.executable} -P -m olmo_sparsity.cli"
    job = olmo_sparsity("submit", "sweep", *grid)
    assert f"{shipped}/slurm/job.sbatch {start} sweep configs/synthetic/addition-small.yaml" in job


@pytest.mark.slow
def test_an_installed_wheel_leads_from_text_to_a_figure(olmo_sparsity, tmp_path):
    data = ("--packages", "scipy", "--group-field", "none", "--vocab-size", 320, "--out", "data")
    olmo_sparsity("prepare_data", "docs", *data)
    olmo_sparsity("train", "configs/demo.yaml", *TINY)
    (started,) = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert started["command"].startswith("olmo-sparsity train configs/demo.yaml --model.d_model=32")
    measure = ("--n-long", 16, "--n-short", 4, "--targets", 200, "--tau", 0.01, "--k", "1,2")
    olmo_sparsity("measure", "run", "--corpus", "data", "--out", "records", *measure)
    olmo_sparsity("figure2", "records", "--resamples", 1000)
    assert (tmp_path / "records" / "figure2.png").is_file()
    job = olmo_sparsity(
        "submit", "train", "configs/demo.yaml", "--dry-run", "--", *TINY, "--save_folder=other"
    )
    assert f"{sys.executable} -P -m olmo_sparsity.cli train configs/demo.yaml" in job
