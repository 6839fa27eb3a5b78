"""What a first user hands to `measure`: each input is measured, or refused in one line that says what to do.

`python -m tests.test_first_hour` prints the table.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, DatasetDict
from pyarrow import parquet
from transformers import ByT5Tokenizer

from analysis import TextFiles, influence_map, measure
from olmo_sparsity.util.errors import UserError
from tests.support import small_measurement
from tests.support.families import random_model

MEASURED = "measured"
OPTIONS: dict[str, Any] = {"n_long": 20, "n_short": 4, "targets": 16, "tau_nats": 0.1, "ks": (1, 2)}
OPTIONS |= {"selectors": "random", "targets_per_block": 4, "progress": False}
TEXTS = [" ".join(f"w{number}" for number in range(first, first + 40)) for first in (1, 5)]
ROWS = [{"text": text, "group": group} for text, group in zip(TEXTS, "ab", strict=True)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FRAME = pd.DataFrame(ROWS)


def parquet_bytes(frame: pd.DataFrame) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pandas(frame), file)
    return file.getvalue()


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


FILES: dict[str, tuple[bytes, str]] = {
    "lines.jsonl": (LINES.encode(), MEASURED),
    "lines.json": (LINES.encode(), MEASURED),
    "lines.jsonl.gz": (gzip.compress(LINES.encode()), MEASURED),
    "lines.json.zst": (zst(LINES.encode()), MEASURED),
    "LINES.JSONL": (LINES.encode(), MEASURED),
    "bom.jsonl": (b"\xef\xbb\xbf" + LINES.encode(), MEASURED),
    "blank.jsonl": (LINES.replace("\n", "\n\n").encode(), MEASURED),
    "array.json": (json.dumps(ROWS, indent=1).encode(), MEASURED),
    "one_line_array.json": (json.dumps(ROWS).encode(), MEASURED),
    "strings.json": (json.dumps(TEXTS).encode(), MEASURED),
    "table.csv": (FRAME.to_csv(index=False).encode(), MEASURED),
    "table.tsv": (FRAME.to_csv(index=False, sep="\t").encode(), MEASURED),
    "table.csv.gz": (gzip.compress(FRAME.to_csv(index=False).encode()), MEASURED),
    "table.parquet": (parquet_bytes(FRAME), MEASURED),
    "one.txt": ((TEXTS[0] * 3).encode(), MEASURED),
    "one.md": ((TEXTS[0] * 3).encode(), MEASURED),
    "one.log": ((TEXTS[0] * 3).encode(), MEASURED),
    "latin1.txt": (
        f"w1 é w2\n{TEXTS[0]}".encode("latin-1"),
        "latin1.txt:1 is not UTF-8 .*--encoding latin-1",
    ),
    "utf16.txt": (TEXTS[0].encode("utf-16"), "utf16.txt:1 .*--encoding utf-16"),
    "cut.jsonl": ((LINES + '{"text": "w1').encode(), "cut.jsonl:3 is no JSON"),
    "cut.jsonl.gz": (
        gzip.compress(LINES.encode())[:-20],
        r"cut.jsonl.gz:\d+ cannot be read .*cut or damaged",
    ),
    "no.gz": (LINES.encode(), "no.gz:1 cannot be read .*not packed with gzip"),
    "list.jsonl": ((LINES + '["w1"]\n').encode(), "list.jsonl:3 is a list"),
    "number.jsonl": ((LINES + "3\n").encode(), "number.jsonl:3 is a number"),
    "null.jsonl": ((LINES + '{"text": null}\n').encode(), "null.jsonl:3"),
    "content.jsonl": (LINES.replace('"text"', '"content"').encode(), "has content, group.*--text-field"),
    "object.json": (json.dumps({"data": ROWS}, indent=1).encode(), "object.json:1 has no text .*data"),
    "wrong.csv": (b"id,body\n1,w1\n", 'wrong.csv:1 has no column "text" .*id, body'),
    "ragged.csv": (b"text,group\nw1,a,b\n", "ragged.csv:2 has 3 cells where the header has 2"),
    "list.parquet": (parquet_bytes(pd.DataFrame({"text": [[1, 2]]})), "holds list"),
    "wrong.parquet": (parquet_bytes(pd.DataFrame({"body": TEXTS})), 'no column "text" .*body'),
    "damaged.parquet": (b"PAR1 and no more", "damaged.parquet.* cannot be read"),
    "empty.txt": (b"", "there is no text"),
    "empty.jsonl": (b"", "there is no text"),
    "paper.pdf": (b"%PDF-1.7 \xff\x00", "PDF; extract its text"),
    "nul.txt": (b"w1 \x00 w2", "NUL at offset 3"),
}


class Characters:
    """A tokenizer of one's own."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 50 for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


def cases(folder: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """What is called, and how what it gives is told, by the name of the input."""
    model = small_measurement.model()
    weights = random_model()

    def of(texts: Any, using: Any = model, **options: Any) -> Callable[[], Any]:
        return lambda: measure(using, texts, **{**OPTIONS, **options})

    table: dict[str, tuple[Callable[[], Any], str]] = {}
    for name, (data, expected) in FILES.items():
        (folder / name).write_bytes(data)
        table[name] = of([folder / name]), expected
    mixed = folder / "mixed"
    mixed.mkdir()
    (mixed / "a.txt").write_text(TEXTS[0])
    (mixed / "b.jsonl").write_text(LINES)
    (folder / "nothing").mkdir()
    (folder / "link.txt").symlink_to(folder / "gone.txt")
    latin = TextFiles([folder / "latin1.txt", folder / "one.txt"], encoding="latin-1")
    body = TextFiles([folder / "content.jsonl"], text_field="content")
    special = {
        "latin-1, said so": (of(latin), MEASURED),
        "a field, named": (of(body), MEASURED),
        "a folder of two kinds": (of(mixed), "several kinds of files of text"),
        "an empty folder": (of(folder / "nothing"), "it is empty"),
        "a link that leads nowhere": (of([folder / "link.txt"]), "no file|is a link to"),
        "a path that does not exist": (of(["typo.txt"]), "no file 'typo.txt'"),
        "a path at home": (of(["~/none.txt"]), "no file '~/none.txt'"),
        "a path beside a string": (of([folder / "one.txt", TEXTS[1]]), MEASURED),
        "strings": (of(TEXTS), MEASURED),
        "groups of strings": (of({"a": TEXTS[:1], "b": TEXTS[1]}), MEASURED),
        "an array": (of(np.array(TEXTS)), MEASURED),
        "a Series": (of(pd.Series(TEXTS)), MEASURED),
        "a Series with None": (of(pd.Series([*TEXTS, None])), "text 2 is missing"),
        "a DataFrame": (of(FRAME), MEASURED),
        "a DataFrame without text": (
            of(FRAME.rename(columns={"text": "body"})),
            "no column text, only body, group",
        ),
        "a Dataset": (of(Dataset.from_list(ROWS)), MEASURED),
        "a DatasetDict": (of(DatasetDict(train=Dataset.from_list(ROWS))), "has the splits train"),
        "rows": (of(ROWS), MEASURED),
        "one row": (of(FRAME.iloc[0]), "too few for placebos from it"),
        "groups of tables": (of({"a": FRAME[:1], "b": FRAME[1:]}), MEASURED),
        "columns of two lengths": (of({"text": TEXTS, "group": ["a"]}), "not a list of one length"),
        "two columns of one name": (of(FRAME[["text", "text"]]), "has the column text twice"),
        "a group of None": (of({"a": TEXTS, "b": None}), "group 'b' cannot be a NoneType"),
        "a set": (of(set(TEXTS)), MEASURED),
        "a generator": (of(text for text in TEXTS), MEASURED),
        "token ids": (of([[1, 2, 3]]), "text 0 is a list"),
        "bytes": (of([TEXTS[0].encode()]), "text 0 is a bytes"),
        "an open file": (of(io.StringIO(TEXTS[0])), "cannot be a StringIO"),
        "no text at all": (of([]), "there is no text"),
        "short texts": (of(["w1 w2"]), "the longest has 2 tokens; lower N or B"),
        "ks=2": (of(TEXTS, ks=2), MEASURED),
        "ks='2'": (of(TEXTS, ks="2"), "ks takes whole numbers from 1 on, not '2'"),
        "n_long=20.0": (of(TEXTS, n_long=20.0), "n_long takes whole numbers"),
        "selectors=None": (of(TEXTS, selectors=None), "selectors takes names"),
        "an unknown selector": (of(TEXTS, selectors="leave-out"), "leave-out"),
        "tau='1'": (of(TEXTS, tau_nats="1"), "tau_nats takes a finite number"),
        "tau=nan": (of(TEXTS, tau_nats=float("nan")), "tau_nats takes a finite number"),
        "ks=None": (of(TEXTS, ks=None), "ks takes whole numbers"),
        "seed=-1": (of(TEXTS, seed=-1), "seed takes whole numbers from 0 on"),
        "tokens_per_batch='x'": (of(TEXTS, tokens_per_batch="x"), "tokens_per_batch takes whole numbers"),
        "tokens_per_batch=0": (of(TEXTS, tokens_per_batch=0), "tokens_per_batch takes whole numbers"),
        "shard=1": (of(TEXTS, shard=1), "give i/n"),
        "batches=[]": (of(TEXTS, batches=[]), r"batches=\[\]: there are 1 batches of targets"),
        "batches=[99]": (of(TEXTS, batches=[99]), "from 0 to 0"),
        "a batch twice": (of(TEXTS, batches=[0, 0]), MEASURED),
        "out=5": (of(TEXTS, out=5), "out takes the path of a folder, not 5"),
        "out is a file": (of(TEXTS, out=folder / "one.txt"), "one.txt is a file; give another folder"),
        "a huge prefix": (of(TEXTS, prefix="9" * 20), "--prefix 9+: .* has embeddings of 50 tokens"),
        "an X-ray with N a string": (
            lambda: influence_map(model, TEXTS[0], n_long="32", progress=False),
            "n_long takes whole numbers",
        ),
        "an X-ray with N 0": (
            lambda: influence_map(model, TEXTS[0], n_long=0, progress=False),
            "n_long takes whole numbers from 1 on",
        ),
        "an X-ray with tau nan": (
            lambda: influence_map(model, TEXTS[0], tau_nats=float("nan"), progress=False),
            "tau_nats takes a finite number",
        ),
        "an X-ray of a table": (
            lambda: influence_map(model, FRAME, progress=False),
            "one string or the path of a file, not a DataFrame",
        ),
        "an X-ray of a named file": (
            lambda: influence_map(model, TextFiles(folder / "one.txt"), n_short=4, progress=False),
            "InfluenceMap",
        ),
        "dtype=float32": (of(TEXTS, dtype="float32"), "choose one of fp32, bf16, fp16, auto"),
        "nothing over tau": (of(TEXTS, tau_nats=99.0), "0 gain more than 99 nats|none of"),
        "a model that is not there": (of(TEXTS, "SmolLM2-135M"), "org/name"),
        "a .gguf that is not there": (of(TEXTS, "none.gguf"), "no file none.gguf"),
        "a file that is no model": (of(TEXTS, str(folder / "one.txt")), "is a file, and no .gguf"),
        "a folder that is no model": (of(TEXTS, str(folder / "nothing")), "neither a checkpoint nor a run"),
        "None for a model": (of(TEXTS, None), "the model is a NoneType"),
        "a tokenizer without a backend": (
            of(TEXTS, (random_model(vocab_size=400), ByT5Tokenizer())),
            MEASURED,
        ),
        "a tokenizer of one's own": (of(TEXTS, (weights, Characters())), MEASURED),
        "a tokenizer that is none": (of(TEXTS, (weights, 3)), "a int is no tokenizer"),
        "a tokenizer's class": (of(TEXTS, (weights, Characters)), "the class Characters is no tokenizer"),
        "a tokenizer of a larger model": (
            of(TEXTS, (weights, ByT5Tokenizer())),
            "has embeddings of 50 tokens",
        ),
        "a model without a tokenizer": (of(TEXTS, weights), "has no tokenizer.json"),
        "an X-ray of a path": (
            lambda: influence_map(model, "typo.txt", progress=False),
            "no file 'typo.txt'",
        ),
    }
    return table | special


def outcome(call: Callable[[], Any]) -> str:
    """What a user sees of it: what was measured, or the error in one line."""
    try:
        lines = str(call()).splitlines()
        return f"{MEASURED}: {lines[min(1, len(lines) - 1)]}"
    except UserError as error:
        return str(error)


def test_every_input_is_measured_or_refused_in_one_line(tmp_path: Path) -> None:
    import re

    table = cases(tmp_path)
    assert len(table) >= 60
    outcomes = {name: outcome(call) for name, (call, _) in table.items()}
    wrong = {
        name: outcomes[name]
        for name, (_, expected) in table.items()
        if not re.search(expected, outcomes[name]) or "\n" in outcomes[name]
    }
    assert not wrong


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        for name, (call, _) in cases(Path(made)).items():
            print(f"{name:32} {outcome(call).replace(made, '')}")
