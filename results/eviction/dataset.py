"""A dataset for others: exact effects of every far key and value, and the tokens that they are of.

    python results/eviction/dataset.py RECORDS TEXTS MODEL OUT --licenses code-LICENSES.txt
    bash results/eviction/upload.sh USER/NAME OUT                         says what it would upload

RECORDS: the folder of the study on the cache, whose cells smollm2-TEXT-n1024 have effects (with --kind n256 those).
TEXTS: a folder with books.jsonl, code.jsonl, releases.jsonl and books-long.jsonl that they were measured on. MODEL: the
model, whose tokenizer reads them. OUT gets effects.parquet, blocks.parquet, README.md (the card in the hub's format),
SHA256SUMS and, with tokens of code, code-LICENSES.txt.

Tokens are given of texts whose license is on file: public-domain books (results/texts.csv), code of packages with a
section in the file of --licenses, release notes of packages that say theirs (results/models/sdists-licenses.csv). Of
others a block has the address, and no tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis import Result, load_study
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.settings import ContextSettings
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path

RESULTS = Path(__file__).parents[1]
CARD = Path(__file__).with_name("card.txt")
MOST_BYTES = 6_000_000
PUBLIC_DOMAIN, PSF = "public domain (USA)", "PSF-2.0"
CODE = {
    "networkx": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "pydantic": "MIT",
    "trio": "MIT OR Apache-2.0",
    "werkzeug": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "prompt_toolkit": "BSD-3-Clause",
}
"""Licenses of packages whose texts stand in code-LICENSES.txt, where there is a section for each."""


@dataclass(frozen=True)
class Source:
    """Where a text is from, and its license where that is on file."""

    url: str
    license: str | None
    recipe: str
    """What it is a part of: a book, or a package with its version and sha256."""


def book_source(line: Mapping[str, str], books: pd.DataFrame) -> Source:
    """Of a text of books, by results/texts.csv, whose addresses begin those of the texts."""
    of_book = books[books["url"] == line["group"]]
    if of_book.empty:
        return Source(line["url"], None, line["group"])
    book = of_book.iloc[0]
    is_free = book["license"] == PUBLIC_DOMAIN
    return Source(line["url"], PUBLIC_DOMAIN if is_free else None, f"{book['author']}: {book['title']}")


def code_source(line: Mapping[str, str], on_file: set[str]) -> Source:
    """Of a module of Python's library, or of a package; ``on_file``: names of code-LICENSES.txt in lower case."""
    if "/cpython/" in line["url"]:
        return Source(line["url"], PSF if "cpython" in on_file else None, "CPython 3.11, standard library")
    package = line["group"].rpartition("/")[2]
    license_name = CODE.get(package)
    if package not in on_file:
        license_name = None
    return Source(line["url"], license_name, f"package {package}")


def release_source(line: Mapping[str, str], pins: Mapping[str, str], licenses: Mapping[str, str]) -> Source:
    """Of a change log, by the source distribution in its address."""
    archive = line["url"].partition("/")[0]
    name, _, version = archive.removesuffix(".tar.gz").rpartition("-")
    name = re.sub(r"[-_.]+", "-", name).lower()
    pin = pins.get(name)
    if pin is None or not pin.startswith(f"{name}=={version} "):
        return Source(line["url"], None, archive)
    return Source(line["url"], licenses.get(name) or None, pin)


def sections(path: Path | None) -> set[str]:
    """The first words of the headings ``==== NAME (FILE)`` of code-LICENSES.txt, in lower case; none without a file."""
    if path is None:
        return set()
    return {
        name.lower() for name in re.findall(r"^==== (\w+)", path.read_text(encoding="utf8"), re.MULTILINE)
    }


def source_of_lines(results: Path, licenses: Path | None) -> dict[str, Callable[[Mapping[str, str]], Source]]:
    """What says where a line of a file is from, by the name of the text."""
    books = pd.read_csv(results / "texts.csv")
    on_file = sections(licenses)
    lines = (results / "models" / "sdists.txt").read_text(encoding="utf8").splitlines()
    pins = {line.partition("==")[0]: line for line in lines}
    names = pd.read_csv(results / "models" / "sdists-licenses.csv", keep_default_na=False)
    of_packages = dict(zip(names["name"], names["license"], strict=True))
    return {
        "books": lambda line: book_source(line, books),
        "code": lambda line: code_source(line, on_file),
        "releases": lambda line: release_source(line, pins, of_packages),
    }


def effects_of(records: Path, cell: str) -> dict[str, np.ndarray]:
    """target_id (m,), log_kl (m, F) and loss_change_nats (m, F) of a cell. Raises `UserError` where there are none."""
    path = records / f"effects-{cell}.npz"
    if not path.is_file():
        raise UserError(f"{path} is missing; run `results/cache/study.py collect` once the cell is measured")
    with np.load(path) as arrays:
        return dict(arrays)


def effect_rows(text: str, result: Result, effects: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """A row for every target of a text."""
    size = result.settings.contexts.targets_per_block
    of_target = result.targets.set_index("target_id")
    rows = []
    for number, target_id in enumerate(effects["target_id"].tolist()):
        target = of_target.loc[target_id]
        block, place = divmod(target_id, size)
        rows.append(
            {
                "text": text,
                "block": block,
                "place": place,
                "token": int(target["token"]),
                "kind": target["kind"],
                "loss_full_nats": np.float32(target["loss_long_nats"]),
                "loss_short_nats": np.float32(target["loss_short_nats"]),
                "log_kl": effects["log_kl"][number],
                "loss_change_nats": effects["loss_change_nats"][number],
            }
        )
    return rows


def block_rows(
    text: str,
    targets: pd.DataFrame,
    contexts: ContextSettings,
    tokens_of: Callable[[int], np.ndarray],
    sources: Sequence[Source],
) -> list[dict[str, Any]]:
    """A row for every block: where it is from and, where a license is on file, its N + B tokens.

    Raises `UserError` where the tokens are others than those that were measured.
    """
    rows = []
    size = contexts.targets_per_block
    for block, of_block in targets.groupby(targets["target_id"] // size):
        first = of_block.iloc[0]
        number = int(first["text"])
        start = int(first["position"] - first["target_id"] % size - contexts.n_long)
        tokens = tokens_of(number)[start : start + contexts.n_long + size]
        place = (of_block["target_id"] % size).to_numpy()
        if not np.array_equal(tokens[contexts.n_long + place], of_block["token"]):
            raise UserError(
                f"block {block} of {text} reads otherwise than it was measured; give its model and texts"
            )
        source = sources[number]
        rows.append(
            {
                "text": text,
                "block": int(block),
                "group": first["group"],
                "url": source.url,
                "source": source.recipe,
                "license": source.license,
                "first_token": start,
                "tokens": None if source.license is None else tokens.astype(np.int32),
            }
        )
    return rows


EFFECTS = pa.schema(
    [
        ("text", pa.string()),
        ("block", pa.int32()),
        ("place", pa.int32()),
        ("token", pa.int32()),
        ("kind", pa.string()),
        ("loss_full_nats", pa.float32()),
        ("loss_short_nats", pa.float32()),
        ("log_kl", pa.list_(pa.float16())),
        ("loss_change_nats", pa.list_(pa.float16())),
    ]
)
BLOCKS = pa.schema(
    [
        ("text", pa.string()),
        ("block", pa.int32()),
        ("group", pa.string()),
        ("url", pa.string()),
        ("source", pa.string()),
        ("license", pa.string()),
        ("first_token", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
    ]
)


def write_table(rows: Sequence[dict[str, Any]], schema: pa.Schema, path: Path) -> None:
    """Write rows as Parquet, without names of a machine."""
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    with atomic_path(path) as temporary:
        pq.write_table(
            pa.Table.from_arrays(columns, schema=schema), temporary, compression="zstd", compression_level=19
        )


def sha256_of(path: Path) -> str:
    """As hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def size_category(rows: int) -> str:
    """As the hub names it."""
    for most, name in ((1000, "n<1K"), (10_000, "1K<n<10K")):
        if rows < most:
            return name
    return "10K<n<100K"


def check_alike(cells: Mapping[str, Result]) -> None:
    """Raise `UserError` where cells differ in more than their texts and how much of these is measured."""
    [settings, *others] = [result.settings for result in cells.values()]
    may_differ = ("texts", "texts_sha256", "targets_requested", "complete")
    for other in others:
        if differing := settings.differences(other, when="joined", but_for=may_differ):
            raise UserError(f"the cells were measured with different settings: {differing}")


def card(
    cells: Mapping[str, Result],
    effects: Sequence[dict[str, Any]],
    blocks: Sequence[dict[str, Any]],
    out: Path,
) -> str:
    """The text of the card: `CARD` with what was measured in the place of what stands in double braces."""
    settings = next(iter(cells.values())).settings
    contexts = settings.contexts
    listed = []
    for text in cells:
        of_text = [row for row in blocks if row["text"] == text]
        with_tokens = sum(row["tokens"] is not None for row in of_text)
        targets = sum(row["text"] == text for row in effects)
        listed.append(f"| {text} | {len(of_text)} | {targets} | {with_tokens} |")
    licenses = sorted({f"{row['text']}: {row['license']}" for row in blocks if row["license"]})
    names = ("effects.parquet", "blocks.parquet")
    values = {
        "n_long": contexts.n_long,
        "n_short": contexts.n_short,
        "n_far": contexts.n_far,
        "size": contexts.targets_per_block,
        "keys": round(0.25 * contexts.n_far),
        "seed": contexts.seed,
        "model_sha256": settings.model.sha256,
        "tokenizer_sha256": settings.model.tokenizer_sha256,
        "prefix": " ".join(map(str, settings.model.prefix)) or "none",
        "first_text": next(iter(cells)),
        "counts": "\n".join(listed),
        "licenses": "\n".join(f"- {line}" for line in licenses),
        "size_category": size_category(len(effects)),
        "commits": ", ".join(sorted({result.provenance["commit"] for result in cells.values()})),
        "sums": "\n".join(f"    {sha256_of(out / name)}  {name}" for name in names),
    }
    text = CARD.read_text(encoding="utf8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", str(value))
    assert "{{" not in text, "the card has a field without a value"
    return text


def build(
    records: Path,
    texts: Path,
    model: Any,
    out: Path,
    *,
    kind: str = "n1024",
    licenses: Path | None = None,
    results: Path = RESULTS,
) -> None:
    """Write the dataset. Raises `UserError` where it would be larger than `MOST_BYTES`, and for other texts."""
    study = load_study(records)
    cells = {}
    for text in ("books", "code", "releases"):
        if f"smollm2-{text}-{kind}" in study:
            cells[text] = study[f"smollm2-{text}-{kind}"]
    if not cells:
        raise UserError(f"{records} has no cell smollm2-TEXT-{kind}; collect one, or give another --kind")
    check_alike(cells)
    source_of = source_of_lines(results, licenses)
    effects: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    with open_model(model) as loaded:
        for text, result in cells.items():
            path = texts / Path(result.settings.texts.name).name
            opened = open_texts(path, loaded.reader)
            if opened.sha256 != result.settings.texts.sha256:
                raise UserError(
                    f"{path} holds other texts than were measured; build it as results/models says"
                )
            lines = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
            sources = [source_of[text](line) for line in lines]
            of_text = effect_rows(text, result, effects_of(records, f"smollm2-{text}-{kind}"))
            effects += of_text
            measured = {row["block"] for row in of_text}
            size = result.settings.contexts.targets_per_block
            is_measured = (result.targets["target_id"] // size).isin(measured)
            targets = result.targets[is_measured]
            blocks += block_rows(text, targets, result.settings.contexts, opened.tokens, sources)
    out.mkdir(parents=True, exist_ok=True)
    write_table(effects, EFFECTS, out / "effects.parquet")
    write_table(blocks, BLOCKS, out / "blocks.parquet")
    files = ["README.md", "effects.parquet", "blocks.parquet"]
    if licenses is not None:
        (out / "code-LICENSES.txt").write_bytes(licenses.read_bytes())
        files.append("code-LICENSES.txt")
    (out / "README.md").write_text(card(cells, effects, blocks, out), encoding="utf8")
    sums = [f"{sha256_of(out / name)}  {name}\n" for name in files]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf8")
    size = sum((out / name).stat().st_size for name in files)
    if size > MOST_BYTES:
        raise UserError(f"{out} has {size:,} bytes, more than {MOST_BYTES:,}; leave a text out")
    without = [row["source"] for row in blocks if row["tokens"] is None]
    print(f"{len(effects):,} targets in {len(blocks)} blocks, {size:,} bytes, in {out}")
    if without:
        print(f"without tokens, as no license is on file: {', '.join(sorted(set(without)))}")


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", default="n1024", help="of cells (default: n1024)")
    licenses = "code-LICENSES.txt: license texts of the code (default: no tokens of code)"
    parser.add_argument("--licenses", type=Path, metavar="FILE", help=licenses)
    options = parser.parse_args(arguments)
    try:
        build(
            options.records,
            options.texts,
            options.model,
            options.out,
            kind=options.kind,
            licenses=options.licenses,
        )
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
