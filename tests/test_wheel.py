"""The wheel, installed away from the checkout: commands, configs and SLURM templates all work from an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (
    "olmo_sparsity",
    "analysis",
    "configs",
    "slurm",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
)
TINY = (
    *("--model.d_model=32", "--model.n_heads=4", "--model.n_layers=1", "--model.max_sequence_length=32"),
    *(
        "--model.vocab_size=320",
        "--model.embedding_size=384",
        "--positions.target_length=64",
        "--corpus.path=data",
    ),
    *("--save_folder=run", "--max_duration=40", "--scheduler.t_warmup=2", "--global_train_batch_size=8"),
    *("--device_train_microbatch_size=8", "--optimizer.learning_rate=1e-2", "--evaluation.interval=null"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install` of the wheel puts into site-packages; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", "--no-build-isolation", *offline, "--wheel-dir", folder, copy]
    subprocess.run(list(map(str, wheel)), check=True)
    (path,) = folder.glob("*.whl")
    target = [*pip, "install", *offline, "--target", folder / "site", path]
    subprocess.run(list(map(str, target)), check=True)
    return folder / "site"


def test_an_installed_wheel_needs_no_checkout(installed, tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        **{"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "PATH": os.path.dirname(sys.executable)},
    }

    def run(*words) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    command = (sys.executable, installed / "bin" / "olmo-sparsity")
    where = "import analysis, olmo_sparsity; print(analysis.__file__, olmo_sparsity.__file__)"
    assert run(sys.executable, "-P", "-c", where).count(str(installed)) == 2
    for name in ("olmo_sparsity", "analysis"):
        assert (installed / name / "py.typed").is_file()
    shipped = installed / "olmo_sparsity" / "shipped"
    for name in ("configs", "slurm"):
        ours = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        assert {path.relative_to(shipped) for path in (shipped / name).rglob("*") if path.is_file()} == ours

    run(
        *command,
        "prepare_data",
        "docs",
        "--packages",
        "scipy",
        "--vocab-size",
        320,
        "--out",
        "data",
    )
    run(*command, "train", "configs/demo.yaml", *TINY)
    measure = ("--n-long", 16, "--n-short", 4, "--targets", 200, "--tau", 0.01, "--k", "1,2")
    out = run(*command, "influence", "run", "--corpus", "data", "--out", "records", *measure)
    assert "records" in out
    run(*command, "figure2", "records", "--resamples", 1000)
    assert (tmp_path / "records" / "figure2.png").is_file()
    script = run(
        *command, "submit", "train", "configs/demo.yaml", "--dry-run", "--", *TINY, "--save_folder=other"
    )
    assert f"{sys.executable} -P -m analysis.cli train configs/demo.yaml" in script
    (tmp_path / "mine.yaml").write_text("base: configs/base.yaml\nseed: 7\n")
    assert "seed: 7" in run(*command, "train", "mine.yaml", "--dry-run")
