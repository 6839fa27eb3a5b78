"""Text to prepare corpora of, the command that prepares them, and what is in them."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from olmo_sparsity.cli import run_script
from olmo_sparsity.data import prepare as prepare_module
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from tests.support.tiny import SHARED_DATA

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
C4_SAMPLES = sorted(SHARED_DATA.glob("c4-sample.*.json.gz"))
needs_c4_sample = pytest.mark.skipif(not C4_SAMPLES, reason=f"no C4 sample files in {SHARED_DATA}")
PROSE = "It is the first of the pages that can be read on a day with rain, and this is all that it says. "
WORDS = [f"{a}{b}" for a in ("ba", "do", "ki", "mu", "ra", "sel") for b in ("n", "rt", "st", "l", "mp", "")]
ENVIRONMENT = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def some_texts(count: int, seed: int, paragraphs: int = 3, words: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [
        "\n\n".join(" ".join(draw.choices(WORDS, k=words)) for _ in range(paragraphs)) for _ in range(count)
    ]


def write_lines(path: Path, texts: list[str], urls: Sequence[str] = ()) -> str:
    """Write C4's layout, gzipped where the name says so; without ``urls`` there are no groups."""
    rows = [{"text": text, "timestamp": "t"} for text in texts]
    for row, url in zip(rows, urls, strict=False):
        row["url"] = url
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def some_files(folder: Path, files: int = 4, **options) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [write_lines(folder / f"{i}.jsonl.gz", some_texts(30, i, **options)) for i in range(files)]


def cut(path: str) -> str:
    """Take the end off a file."""
    Path(path).write_bytes(Path(path).read_bytes()[:-30])
    return path


def text_settings(files, heldout_files=(), **changes) -> PrepareSettings:
    return PrepareSettings("text", files, heldout_files, **({"vocab_size": 300} | changes))


def sharded_settings(folder: Path, files: int = 4) -> PrepareSettings:
    """Settings that shards can share; some of the held-out paragraphs also stand in training files."""
    heldout = [*some_texts(5, seed=90)]
    heldout += [a + "\n\n" + b for a, b in zip(some_texts(5, 3), some_texts(5, 91), strict=True)]
    named = [write_lines(folder / "h.jsonl", heldout)]
    return PrepareSettings("text", some_files(folder / "text", files), named, tokenizer="olmo")


def arguments(settings: PrepareSettings, out: Path, *more: str) -> list[str]:
    """Those of the command that prepares `sharded_settings`, with one worker."""
    given = ["text", "--files", *settings.files, "--heldout-files", *settings.heldout_files]
    return [*given, "--tokenizer", "olmo", "--workers", "1", "--out", str(out), *more]


def bpe_command(files: list[str], out: Path, *more: str) -> list[str]:
    """The command, for a new process, that prepares `text_settings` of ``files``."""
    options = ["--vocab-size", "300", "--workers", "1", "--out", str(out), *more]
    return [sys.executable, str(SCRIPT), "text", "--files", *files, *options]


def run_main(*given: str) -> int:
    """The script's exit code, in this process."""
    script = importlib.import_module("olmo_sparsity.cli.prepare_data")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_info:
        patch.setattr(sys, "argv", ["prepare_data.py", *given])
        run_script(script.main)
    return int(exit_info.value.code or 0)


def errors(text: str) -> list[str]:
    """Lines of standard error but for those of progress."""
    return [line for line in text.splitlines() if not re.search(r"\d left\b", line)]


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def assert_same_as_one_go(settings: PrepareSettings, out: Path) -> None:
    """A corpus has the bytes that it has when it is made without a break."""
    whole = out.with_name(f"{out.name}-whole")
    prepare(settings, whole, workers=1)
    assert contents(out) == contents(whole)


def stop_before_third_file(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    """Let preparing stop at the third training file, half written, as Ctrl-C does."""

    real = prepare_module._encode_unit

    def failing(*arguments):
        if arguments[-1][1].name == "train-00002.json":
            (out / ".train-00002.npy.tmp-here-1").touch()  # what a worker leaves that is stopped
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(prepare_module, "_encode_unit", failing)


def c4_folder(folder: Path) -> Path:
    """A copy of the hub's folder of C4: two training shards, one of validation."""
    (folder / "en").mkdir(parents=True)
    names = ("c4-train.00000-of-00002", "c4-train.00001-of-00002", "c4-validation.00000-of-00001")
    for source, name in zip(C4_SAMPLES, names, strict=True):
        shutil.copyfile(source, folder / "en" / f"{name}.json.gz")
    splits = "".join(f"  - split: {s}\n    path: en/c4-{s}.*.json.gz\n" for s in ("train", "validation"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: en\n  data_files:\n{splits}---\n")
    return folder


def c4_texts(index: int) -> list[str]:
    """Texts of one sample file, read without any of our code."""
    with gzip.open(C4_SAMPLES[index], "rt", encoding="utf8") as file:
        return [json.loads(line)["text"] for line in file]
