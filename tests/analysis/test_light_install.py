"""An install without extras measures models of transformers, and says which extra any other use needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.families import directory, random_model
from tests.support.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]
WITHOUT_EXTRAS = """
import importlib.util
import sys

GONE = (
    *("olmo", "olmo_data", "deepspeed", "accelerate", "datasets", "omegaconf", "boto3", "google.cloud"),
    *("gguf", "wandb"),
)

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
        [sys.executable, "-c", f"{WITHOUT_EXTRAS}\n{code}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(name, *arguments):
    return run("from olmo_sparsity.cli import main\nsys.argv[0] = 'olmo-sparsity'\nmain()", name, *arguments)


@pytest.mark.slow
def test_a_model_of_transformers_is_measured_and_drawn_without_extras(tmp_path):
    model = directory(tmp_path / "model", "llama")
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(12, 60)})
    (model / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    out = tmp_path / "records"
    sizes = ("--n-long", 20, "--n-short", 5, "--targets", 20, "--k", "1,2")
    made = command("measure", model, "--corpus", corpus, "--out", out, *sizes)
    assert made.returncode == 0, made.stderr
    drawn = command("figure2", out, "--out", tmp_path / "figures")
    assert drawn.returncode == 0, drawn.stderr
    assert list((tmp_path / "figures").glob("*.png"))


@pytest.mark.slow
def test_eviction_policies_are_judged_on_eight_texts_without_extras(tmp_path):
    texts = sorted((ROOT / "docs").glob("*.md"))[:8]
    sizes = ("--n-long", 64, "--n-short", 16, "--targets-per-block", 8, "--blocks", 8, "--budgets", "12%,25%")
    judged = command("eviction", ROOT / "results/checkpoint", "--text", *texts, *sizes, "--out", tmp_path)
    assert judged.returncode == 0, judged.stderr
    assert "64 targets in 8 blocks of 8, 8 documents" in judged.stdout
    assert {"numbers.csv", "eviction.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a text, a GGUF file, a checkpoint of this project, and a corpus with its tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("ab cd ef " * 200)
    write_gguf(folder / "tiny.gguf", random_model())
    tiny.checkpoint(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        ("measure {}/tiny.gguf --text {}/text.txt --out {}/out", "gguf", "gguf"),
        pytest.param(
            "xray {}/tiny.gguf --text {}/text.txt --out {}/out", "gguf", "gguf", marks=pytest.mark.slow
        ),
        ("measure {}/run --text {}/text.txt --out {}/out", "olmo", "train"),
        ("export_hf {}/run --out {}/out", "olmo", "train"),
        ("exact_match {}/run --out {}/out", "olmo", "train"),
        ("train configs/demo.yaml --save_folder={}/out", "olmo", "train"),
        ("sweep configs/demo.yaml --grid seed=1 --out {}/out", "olmo", "train"),
        ("prepare_data c4 --out {}/out", "olmo_data", "train"),
        ("prepare_data c4 --tokenizer {}/corpus/tokenizer.json --out {}/out", "datasets", "train"),
        ("prepare_data text --files {}/text.txt --tokenizer olmo --out {}/out", "olmo_data", "train"),
    ],
)
def test_what_needs_an_extra_says_which_in_one_line(arguments, module, extra, files):
    done = command(*arguments.replace("{}", str(files)).split())
    line = f"error: this needs {module}, which is not installed; run in the clone: pip install '.[{extra}]'\n"
    assert done.returncode == 1 and done.stderr.endswith(line), done.stderr
    assert "Traceback" not in done.stderr
    assert not (files / "out").exists() or not list((files / "out").iterdir())


@pytest.mark.slow
def test_so_does_python(files):
    for model, extra in ((files / "tiny.gguf", "gguf"), (files / "run", "train")):
        code = f"from analysis import measure\nmeasure({str(model)!r}, ['ab cd ' * 100])"
        done = run(code)
        assert "UserError: this needs" in done.stderr
        assert f"pip install '.[{extra}]'" in done.stderr


def test_a_tokenizer_that_is_a_file_needs_no_extra(files):
    code = "from olmo_sparsity.data.tokens import tokenizer_file\nprint(tokenizer_file(sys.argv[1]).name)"
    assert run(code, files / "corpus").stdout == "tokenizer.json\n"
    assert "unknown tokenizer 'absent.json'" in run(code, "absent.json").stderr
