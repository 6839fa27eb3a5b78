"""Text to prepare corpora of, the command that prepares them, and what is in them."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
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


def text_settings(files, heldout_files=(), **changes) -> PrepareSettings:
    return PrepareSettings("text", files, heldout_files, **({"vocab_size": 300} | changes))


def sharded_settings(folder: Path, files: int = 4) -> PrepareSettings:
    """Settings that shards can share; some of the held-out paragraphs also stand in training files."""
    heldout = [*some_texts(5, seed=90)]
    heldout += [a + "\n\n" + b for a, b in zip(some_texts(5, 3), some_texts(5, 91), strict=True)]
    named = [write_lines(folder / "h.jsonl", heldout)]
    return PrepareSettings("text", some_files(folder / "text", files), named, tokenizer="olmo")


def bpe_command(files: list[str], out: Path, *more: str) -> list[str]:
    """The command, for a new process, that prepares `text_settings` of ``files``."""
    options = ["--vocab-size", "300", "--workers", "1", "--out", str(out), *more]
    return [sys.executable, str(SCRIPT), "text", "--files", *files, *options]


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
