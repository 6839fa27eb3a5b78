"""What measuring a model of transformers needs: nothing of training."""

import subprocess
import sys
from pathlib import Path

from tests.support import tiny
from tests.support.families import directory

ROOT = Path(__file__).parents[2]
WITHOUT_TRAINING = """
import importlib.util
import sys

GONE = ("olmo", "deepspeed", "accelerate", "datasets", "omegaconf", "boto3", "google.cloud")

def gone(name):
    return any(name == each or name.startswith(each + ".") for each in GONE)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if gone(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec  # which libraries ask whether there is a package
importlib.util.find_spec = lambda name, package=None: None if gone(name) else find_spec(name, package)
sys.meta_path.insert(0, Absent())
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(name, *arguments):
    code = f"{WITHOUT_TRAINING}\nfrom olmo_sparsity.cli import main\nsys.argv[0] = 'olmo-sparsity'\nmain()"
    return run(code, name, *arguments)


def test_a_model_of_transformers_is_measured_and_drawn_without_the_packages_of_training(tmp_path):
    model = directory(tmp_path / "model", "llama")
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(12, 60)})
    (model / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    out = tmp_path / "records"
    sizes = ("--n-long", 20, "--n-short", 5, "--targets", 20, "--k", "1,2")
    made = command("influence", model, "--corpus", corpus, "--out", out, *sizes)
    assert made.returncode == 0, made.stderr
    drawn = command("figure2", out, "--out", tmp_path / "figures")
    assert drawn.returncode == 0, drawn.stderr
    assert list((tmp_path / "figures").glob("*.png"))
