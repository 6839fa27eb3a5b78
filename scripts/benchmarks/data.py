"""Text to tokens on disk: our preparation and `datasets.map`, with the same tokenizer, cores and files."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.settings import DataSettings
from benchmarks.timing import Json, about_this_run, summarise, time_in_turn
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings, check_files
from olmo_sparsity.data.tokenizers import find_eos, load_tokenizer, tokenizer_file
from olmo_sparsity.util.provenance import available_cores

GENERATED_FILES = 4
GENERATED_DOCUMENTS = 3000
OURS, MAP, MAP_ONLY = "prepare_data", "datasets.map", "datasets.map, text loaded before"


def run(settings: DataSettings) -> Json:
    """Tokens per second of each on the same files."""
    if settings.files:
        check_files(settings.files)
    made = about_this_run("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = settings.files or generated_files(folder)
        seconds = time_in_turn(data_runners(files, folder), settings.rounds, warm_up=1)
        tokens = sum(path.stat().st_size for path in (folder / "ours").glob("train-*.npy")) // 2  # uint16
    rates = summarise(seconds, baseline=MAP, amount=tokens, unit="tokens/s")
    return {"benchmark": "data", "files": len(files), "tokens": tokens, **made, **rates}


def data_runners(files: Sequence[str], folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed: each reads ``files`` and writes every token to ``folder``.

    `datasets.map` does nothing but tokenize and write; ours also hashes, checks and removes what the held-out text
    shares with the training text. The third has its text loaded from an Arrow file, uncompressed and parsed before.
    """
    import datasets

    datasets.disable_progress_bars()
    # Each process is to have one thread, as is best where there are as many processes as cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    heldout = folder / "heldout.jsonl"
    heldout.write_text(json.dumps({"text": "A document that is held out."}) + "\n")
    ours = PrepareSettings("text", tuple(files), (str(heldout),), tokenizer="olmo")
    loaded = _load(files, folder / "loaded")
    return {
        MAP: lambda: _map(_load(files, _fresh(folder / "map")), _fresh(folder / "mapped")),
        MAP_ONLY: lambda: _map(loaded, _fresh(folder / "mapped")),
        OURS: lambda: prepare(ours, _fresh(folder / "ours")),
    }


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _load(files: Sequence[str], cache: Path) -> Any:
    from datasets import load_dataset

    workers = min(available_cores(), len(files))
    loaded = load_dataset(
        "json", data_files=list(files), split="train", cache_dir=str(cache), num_proc=workers
    )
    return loaded.select_columns(["text"])


def _map(text: Any, folder: Path) -> None:
    text.map(
        Tokenize(str(tokenizer_file("olmo"))),
        batched=True,
        num_proc=available_cores(),
        remove_columns=["text"],
        cache_file_name=str(folder / "tokens.arrow"),
        load_from_cache_file=False,
    )


class Tokenize:
    """What a user would pass to `datasets.map`: ids and EOS; loads its tokenizer where it runs."""

    def __init__(self, path: str):
        self.path = path
        self.tokenizer: Any = None

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.path)
            self.eos = find_eos(self.tokenizer)
        encoded = self.tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*one.ids, self.eos] for one in encoded]}


def generated_files(folder: Path) -> list[str]:
    """English-like text in C4's layout, made of lines of Python's help topics; some 20 MB."""
    from pydoc_data.topics import topics

    lines = [line for page in topics.values() for line in str(page).splitlines() if len(line) > 40]
    paths = []
    for number in range(GENERATED_FILES):
        draw = np.random.default_rng(number)
        path = folder / f"text-{number:05d}.json.gz"
        with gzip.open(path, "wt", encoding="utf8", compresslevel=1) as file:
            for _ in range(GENERATED_DOCUMENTS):
                chosen = draw.integers(len(lines), size=int(draw.integers(5, 50)))
                text = "\n".join(lines[i] for i in chosen)
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")
        paths.append(str(path))
    return paths
