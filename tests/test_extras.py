"""The wheel in a new environment with each extra alone, where the README's lines run on a tiny model.

Packages come from pip's own index, PyTorch from this environment: of it alone the new one sees the files. Nothing else
of this environment is seen, so that an extra which lacks a package fails here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path

import numpy as np
import pytest

from tests.support import small_measurement
from tests.support.families import random_model
from tests.support.gguf_files import WORDS, write_gguf
from tests.test_wheel import TINY, build_wheel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf8")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
SMALLER = {'"docs"': '"texts"', "*.md": "*.txt", "targets=640": "n_long=20, n_short=4, targets=128"}
"""What of the README's lines is replaced: other texts, which are smaller."""
SECONDS = 1200.0
"""Until a command counts as hanging: packages are downloaded, and imported without compiled files."""
EXTRAS = ("", "gguf", "train", "notebook")
NOTEBOOK = """
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(text) for text in open("lines.py").read().split("\\n\\n")]
cells.append(nbformat.v4.new_code_cell("result"))
ran = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
print(ran.cells[-1].outputs[0]["data"]["text/html"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to what PyTorch's own package installed, and to nothing else."""
    folder = tmp_path_factory.mktemp("torch")
    torch = distribution("torch")
    tops = {file.parts[0] for file in torch.files or () if file.parts[0] not in ("..", "__pycache__")}
    for name in tops:
        (folder / name).symlink_to(Path(str(torch.locate_file(name))))
    return folder


Run = Callable[..., str]


@pytest.fixture(params=EXTRAS, ids=lambda extra: extra or "none")
def environment(
    request: pytest.FixtureRequest, wheel: Path, torch_alone: Path, tmp_path: Path
) -> tuple[str, Run]:
    """The extra, and what runs a command in an empty folder of a new environment that has it alone."""
    extra, made, work = request.param, tmp_path / "environment", tmp_path / "work"
    subprocess.run([sys.executable, "-m", "venv", made], check=True, timeout=SECONDS)
    python, work_folder = made / "bin" / "python", work
    work_folder.mkdir()
    [site] = made.glob("lib/python*/site-packages")
    (site / "torch_alone.pth").write_text(f"{torch_alone}\n")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    command = [python, *PIP, "install", "--no-compile", "-c", constraints, what]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if installed.returncode and re.search(
        "Temporary failure|Failed to establish|No matching distr", installed.stderr
    ):
        pytest.skip(f"the package index cannot be reached: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    assert not list(site.glob("torch-*")), "PyTorch was installed again"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PATH": f"{made / 'bin'}{os.pathsep}{os.defpath}", "HF_HUB_OFFLINE": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}

    def run(line: str) -> str:
        done = subprocess.run(
            line,
            shell=True,
            executable="/bin/bash",
            cwd=work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        return done.stdout

    return extra, run


def block_after(title: str) -> str:
    """The first indented block of the README under a heading or a line."""
    behind = README.split(title, 1)[1]
    block = re.search(r"\n\n((?:    .*\n|\n)+)", behind)
    assert block, title
    return "\n".join(line[4:] for line in block[1].rstrip().split("\n"))


def smaller(text: str, model: Path) -> str:
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text.replace('"results/checkpoint"', repr(str(model))).replace("MODEL", shlex.quote(str(model)))


def write_texts(folder: Path, words: list[str]) -> None:
    """Eight texts and a story, as the README has them."""
    (folder / "texts").mkdir()
    for number in range(8):
        drawn = np.random.default_rng(number).choice(words, 300)
        (folder / "texts" / f"{number}.txt").write_text(" ".join(drawn))
    (folder / "story.txt").write_text(" ".join(np.random.default_rng(9).choice(words, 60)))


@pytest.mark.slow
def test_the_readme_runs_with_each_extra_alone(environment: tuple[str, Run], tmp_path: Path) -> None:
    extra, run = environment
    work, model = tmp_path / "work", tmp_path / "model"
    if extra == "gguf":
        model = write_gguf(tmp_path / "model.gguf", random_model(initializer_range=0.3))
        write_texts(work, WORDS[12:])
    else:
        small_measurement.saved(model)
        write_texts(work, [f"w{number}" for number in range(1, 50)])
    (work / "lines.py").write_text(
        smaller(block_after("In Python, a model and texts that are in the clone:"), model)
    )
    assert "128 targets of 8 documents" in run("python lines.py")
    assert (work / "figure2.png").is_file()
    for line in smaller(block_after("In the shell, of any model:"), model).splitlines():
        run(line)
    assert (work / "runs" / "a" / "figure2.png").is_file() and (
        work / "runs" / "xray" / "xray.html"
    ).is_file()
    if extra == "notebook":
        (work / "notebook.py").write_text(NOTEBOOK)
        assert "128 targets of 8 documents" in run("python notebook.py")
    if extra == "train":
        run(
            "olmo-sparsity prepare_data text --files texts --heldout-fraction 0.4 --vocab-size 280 --out data"
        )
        start = re.search(r"torchrun .*? train ", README)
        assert start
        # torchrun is a script of PyTorch's, whose scripts are not linked
        line = start[0].replace(
            "torchrun --nproc_per_node 8", "python -m torch.distributed.run --nproc_per_node 1"
        )
        run(f"{line} configs/demo.yaml {' '.join(TINY).replace('vocab_size=320', 'vocab_size=280')}")
        run("olmo-sparsity measure run --corpus data --out run/influence --n-long 16 --n-short 4 --tau 0.01")
