"""Where documents come from: docstrings of installed packages, local files, and data sets on the Hugging Face hub.

A unit of text becomes a token file. It can be read again, in any process, with the same documents in the same order.
Local files are read by `olmo_sparsity.util.text_files`, not by `datasets`: its reader of text changes line ends, that
of JSON takes numbers for text, and zstandard would need another package.
"""

from __future__ import annotations

import ast
import math
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.text import Document, Unit, find_eos, paragraphs, write_rows
from olmo_sparsity.data.tokens import load_tokenizer, tokenizer_file
from olmo_sparsity.util.arguments import argument, whole_number_or_zero
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import atomic_path, sha256_file, user_path
from olmo_sparsity.util.text_fields import NO_GROUPS, URL_FIELD, Fields
from olmo_sparsity.util.text_files import expand_folders
from olmo_sparsity.util.text_rows import KINDS, check_encoding, is_plain, kind_of, read_rows, read_text

TEXT_UNIT_BYTES = 16 << 20
"""Consecutive files of one text each are put together up to this size: training windows do not cross token files."""
HUB_UNIT_TOKENS = 25_000_000
"""With a limit on tokens, shards are put together in units of about this size."""
SOURCES = {
    "docs": ("packages", "heldout_fraction"),
    "text": ("files", "heldout_files", "heldout_fraction", "text_field", "encoding"),
    "c4": ("dataset", "dataset_config", "limit_tokens", "heldout_documents", "text_field"),
}
"""Kinds of text, each with the settings that not all of them have."""


def documents_of(rows: Iterable[tuple[str, Any]], fields: Fields) -> Iterator[Document]:
    """Documents of rows, each after its location. Rows with an empty text are left out.

    Raises `UserError`, which begins with the location, for a row without a text, or without the named group.
    """
    for location, row in rows:
        text = fields.text_of(location, row)
        if not text.strip():
            continue
        group = fields.group_of(location, row)
        if group is None and fields.group not in (None, NO_GROUPS):
            raise UserError(
                f"{location} has no {fields.group} to name its group; name a field that all have with --group-field, "
                f"or {NO_GROUPS}"
            )
        yield Document(text, group)


def read_files(paths: Sequence[str], fields: Fields, encoding: str = "utf-8") -> Iterator[Document]:
    """Documents of local files, in their order; a file that is one text is a document without a group."""
    for path in paths:
        if is_plain(path):
            text = read_text(path, encoding)
            if text.strip():
                yield Document(text)
        else:
            yield from documents_of(read_rows(path, fields, encoding), fields)


def file_units(files: Sequence[str], fields: Fields, encoding: str = "utf-8") -> list[Unit]:
    """Units of local files: each file of rows, and each run of files of one text each, of about 16 MB."""
    runs: list[list[str]] = []
    room = 0  # bytes left in the run of files of one text at the end
    for path in files:
        is_text = is_plain(path)
        if not is_text or room <= 0:
            runs.append([])
            room = TEXT_UNIT_BYTES if is_text else 0
        runs[-1].append(path)
        room -= Path(path).stat().st_size
    return [partial(read_files, run, fields, encoding) for run in runs]


def open_split(dataset: str, config: str, split: str) -> tuple[str, Any]:
    """What to call a split of a data set in errors, and its rows, read while they come. ``dataset`` is its name on the
    hub, or a folder of the same layout, or of its files. Raises `UserError` where there is none."""
    from datasets import load_dataset

    local = user_path(dataset)
    dataset = str(local) if local.is_dir() else dataset
    name = f"{dataset}, config {config}, split {split}"
    files = f"c4-{split}.*.json.gz"
    with hub_errors(name):
        for folder in (local / config, local):
            if any(folder.glob(files)):  # copied without the README.md that names the files
                copied = {split: str(folder / files)}
                return name, load_dataset("json", data_files=copied, split=split, streaming=True)
        return name, load_dataset(dataset, config, split=split, streaming=True)


def read_split(name: str, rows: Iterable[Any], fields: Fields) -> Iterator[Document]:
    """Documents of the rows of `open_split`, or of some of them."""
    with hub_errors(name):
        yield from documents_of(((name, row) for row in rows), fields)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raises `UserError` where a split of a data set cannot be opened, or the connection is lost."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, zlib and the client of the hub
        remedy = "run the same command again, what is finished is kept, or name a copy of its folder with --dataset"
        raise UserError(f"{name} cannot be read ({first_line(error)}); {remedy}") from error


# Of docs: a document per module (its docstrings in source order) and per help topic of Python.
PYTHON = "python"
"""Stands for the standard library and the help topics among package names."""
BASE = ("ai2-olmo", "datasets", "transformers", "accelerate", "deepspeed", "scipy", "matplotlib")
"""Whose docstrings, and those of what they need, make the corpus, whatever an install brings."""
NUM_FILES = 8
"""Files the documents are divided into, each one a unit."""
MIN_CHARACTERS = 500
MIN_REPEATED_CHARACTERS = 100
"""A paragraph at least this long is kept only where it stands first: packages copy whole parameter lists."""
MIN_ASCII_SHARE = 0.9
MIN_COMMON_WORD_SHARE = 0.1
"""English prose with code examples has 0.15 to 0.4 of these words; grammars and tables of numbers less."""
COMMON_WORDS = re.compile(
    r"(?i)\b(the|of|and|to|a|in|is|for|that|it|as|be|with|this|or|are|by|on|from|an|not|if|which|can)\b"
)
SKIPPED_FILES = re.compile(
    r"(^|/)(tests?|_?vendor(ed)?|third_party|lib2to3|site-packages|dist-packages|__pycache__)/"
    r"|(^|/)(test_[^/]*|conftest|topics)\.py$|_(test|pb2)\.py$"
)
BOILERPLATE = re.compile(
    r"(?i)copyright|licen[sc]ed under|:license:|all rights reserved|SPDX-|automatically generated|auto-generated"
    r"|^\s*\.\. (autosummary|toctree|currentmodule|module|automodule|autofunction|autoclass)::"
)


def docs_packages(names: Sequence[str] = ()) -> dict[str, str]:
    """Packages whose docstrings make the corpus, with their versions, sorted.

    By default Python itself and everything that `BASE` depends on, directly or not, without optional extras,
    so that whatever else is installed changes nothing. Raises `UserError` for a name that is not installed.
    """
    versions: dict[str, str] = {}
    left = [*(names or (PYTHON, *BASE))]
    while left:
        name = canonicalize_name(left.pop())
        if name == PYTHON:
            versions[name] = platform.python_version()
        elif name not in versions:
            try:
                installed = distribution(name)
            except PackageNotFoundError:
                if names or name in BASE:
                    remedy = f"{PYTHON} and what is installed, such as in the clone by pip install '.[train]'"
                    raise UserError(f"package {name} is not installed; docs takes {remedy}") from None
                continue  # a requirement for another platform
            versions[name] = installed.version
            requirements = map(Requirement, () if names else installed.requires or ())
            left += [
                requirement.name
                for requirement in requirements
                if not requirement.marker or requirement.marker.evaluate({"extra": ""})
            ]
    return dict(sorted(versions.items()))


def write_documents(folder: Path, packages: Sequence[str], workers: int) -> None:
    """Write the documents of ``packages`` as `NUM_FILES` files of JSON lines in ``folder``, all or none."""
    modules = {name: path for package in packages for name, path in _modules(package)}
    jobs = [partial(read_docstrings, path) for path in modules.values()]
    documents = dict(zip(modules, run_jobs(jobs, workers, "reading docstrings"), strict=True))
    if PYTHON in packages:
        from pydoc_data.topics import topics

        documents |= {f"{PYTHON}/topics/{name}": [page] for name, page in topics.items()}
    # A fixed pseudo-random order: modules of a package are alike, and each file should have some of every package.
    names = sorted(documents, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    cleaned = list(clean_documents((name.partition("/")[0], documents[name]) for name in names))
    with atomic_path(folder) as temporary:
        for index in range(NUM_FILES):
            write_rows(partial(iter, cleaned[index::NUM_FILES]), temporary / f"docs-{index:05d}.jsonl")


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """The source files of a package, each with its package and path, which are the same on every machine."""
    if package == PYTHON:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = [(file.relative_to(folder).as_posix(), file) for file in folder.rglob("*.py")]
    else:
        listed = distribution(package).files or ()
        sources = [(file.as_posix(), Path(str(file.locate()))) for file in listed if file.suffix == ".py"]
    return ((f"{package}/{name}", path) for name, path in sources if not SKIPPED_FILES.search(name))


def read_docstrings(module: Path) -> list[str]:
    """Docstrings of a source file, parsed and not run, in its order; none where it is missing or not Python."""

    def documented(node: Any) -> Iterator[Any]:
        yield node
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from documented(child)

    with warnings.catch_warnings(), suppress(OSError, SyntaxError, ValueError, RecursionError):
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        tree = ast.parse(module.read_bytes())
        return [text for node in documented(tree) if (text := ast.get_docstring(node))]
    return []


def clean_documents(documents: Iterable[tuple[str, list[str]]]) -> Iterator[Document]:
    """Documents that are English and long enough, their docstrings joined by blank lines; the group is the package.

    ``documents`` are packages and docstrings. What is left out: licence notes, directives of documentation tools, and
    long paragraphs that stood earlier.
    """
    seen: set[int] = set()
    for package, docstrings in documents:
        kept = []
        for paragraph, digest in chain.from_iterable(map(paragraphs, docstrings)):
            if not BOILERPLATE.search(paragraph):
                if len(paragraph.rstrip()) < MIN_REPEATED_CHARACTERS or digest not in seen:
                    kept.append(paragraph.rstrip())
                seen.add(digest)
        text = "\n\n".join(kept)
        if len(text) >= MIN_CHARACTERS and is_english(text):
            yield Document(text, package)


def is_english(text: str) -> bool:
    """Whether the text is nearly all ASCII and has as many common English words as prose does."""
    words = len(re.findall(r"[A-Za-z]+", text))
    common = len(COMMON_WORDS.findall(text))
    ascii_characters = len(text.encode("ascii", "ignore"))
    return common >= MIN_COMMON_WORD_SHARE * max(1, words) and ascii_characters >= MIN_ASCII_SHARE * len(text)


def _option(default: Any, about: str, type: Callable[[str], Any] | None = None) -> Any:
    """A setting and its command-line option, see `argument`; ``type`` reads it from text."""
    options = {"nargs": "+"} if isinstance(default, tuple) else {"type": type} if type else {}
    return field(default=default, metadata=argument(about, **options))


@dataclass(frozen=True)
class PrepareSettings:
    """What corpus to make. A setting that the source does not use must stay at its default."""

    source: str
    """docs, text or c4."""
    files: tuple[str, ...] = _option(
        (), "text: files to train on, or a folder of them (default: none, a corpus to evaluate on)"
    )
    heldout_files: tuple[str, ...] = _option(
        (), "text: files to hold out (default: a share of the documents)"
    )
    packages: tuple[str, ...] = _option(
        (),
        "docs: packages to read, python is the standard library (default: python and what this project needs)",
    )
    dataset: str = _option(
        "allenai/c4", "c4: name on the hub, or a copy of its folder, or of the files in it"
    )
    dataset_config: str = _option("en", "c4: configuration of the data set, such as its language")
    limit_tokens: int | None = _option(
        None, "c4: about how many tokens to train on, in whole documents (default: all)"
    )
    heldout_documents: int = _option(5000, "c4: maximum number of validation documents to hold out")
    heldout_fraction: float = _option(0.1, "docs, text: share of documents to hold out, in whole groups")
    group_field: str | None = _option(
        None,
        "field of a document that names its book or site, or none for no groups (default: the site or work that its "
        "url names; of docs the package)",
    )
    text_field: str = _option("text", "text, c4: field or column of a document that holds its text")
    encoding: str = _option("utf-8", "text: encoding of all files but Parquet, such as latin-1 or utf-16")
    seed: int = _option(0, "seed that chooses the documents to hold out", whole_number_or_zero)
    tokenizer: str | None = _option(
        None,
        "bpe (trained on the training split), olmo (50,280 ids), the path of a tokenizer.json or of a folder with one, "
        "or the id of a model on the Hugging Face hub (default: bpe for docs and text, olmo for c4)",
    )
    vocab_size: int = _option(4096, "bpe: number of token ids")
    tokenizer_sample_mb: float = _option(20.0, "bpe: text to train it on, in millions of characters")
    eos_token: str | None = _option(
        None, "token that ends a document, such as </s> (default: the usual names are tried)"
    )
    decontaminate: bool = _option(True, "remove held-out paragraphs that also stand in a training document")
    near_copy_tokens: int = _option(
        32,
        "mark runs of held-out text of this many tokens that are in training text too; 0 marks none",
        whole_number_or_zero,
    )

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, or the source's own choice."""
        return self.tokenizer or ("olmo" if self.source == "c4" else "bpe")

    @property
    def chooses_heldout(self) -> bool:
        """Whether held-out documents are chosen among the training documents."""
        return self.source != "c4" and not self.heldout_files

    @property
    def fields(self) -> Fields:
        """Fields of a row that are read; without a named group it is that of its ``url``, where it has one."""
        return Fields(self.text_field, self.group_field, usual_groups=(URL_FIELD,))

    def check(self, *, in_shards: bool = False) -> None:
        """Raise `UserError` for settings that do not go together, or that shards cannot share."""
        if self.source == "docs" and self.group_field not in (None, NO_GROUPS):
            raise UserError(f"--group-field {self.group_field}: of docs it is the package, or {NO_GROUPS}")
        for name in chain.from_iterable(SOURCES.values()):
            if name not in SOURCES[self.source] and getattr(self, name) != getattr(PrepareSettings, name):
                raise UserError(f"--{name.replace('_', '-')} is not for source {self.source}")
        check_encoding(self.encoding)
        trains_tokenizer = self.tokenizer_name == "bpe"
        for is_read, name, below in (
            (self.chooses_heldout, "heldout_fraction", 1),
            (trains_tokenizer, "tokenizer_sample_mb", math.inf),
        ):
            if is_read and not 0 < (value := getattr(self, name)) < below:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} {value} is not above 0 and below {below}; change it")
        if self.source == "text" and not self.files and (trains_tokenizer or not self.heldout_files):
            remedy = "to evaluate only, --heldout-files and the --tokenizer of the model (olmo, or a tokenizer.json)"
            raise UserError(f"no input files; name --files, or, {remedy}")
        if not trains_tokenizer:
            find_eos(load_tokenizer(tokenizer_file(self.tokenizer_name)), self.eos_token)
        if in_shards and (trains_tokenizer or self.chooses_heldout):
            remedy = "pass --tokenizer olmo, or a tokenizer.json, and name --heldout-files, or leave it out"
            raise UserError(f"--shard needs a tokenizer and held-out text that are there already; {remedy}")

    def request(self) -> dict[str, Any]:
        """What the token files depend on, for the manifest: equal requests make the same corpus. Values are those of
        JSON. Quick; raises `UserError` for what is missing."""
        request: dict[str, Any] = {"source": self.source, "seed": self.seed}
        groups = None if self.group_field == NO_GROUPS else self.group_field or URL_FIELD
        if self.source == "docs":
            request["packages"] = docs_packages(self.packages)
            groups = groups and "package"
        elif self.source == "text":
            train = expand_folders(self.files)
            heldout = expand_folders(self.heldout_files)
            files = [*train, *heldout]
            if len({Path(path).resolve() for path in files}) < len(files):
                raise UserError(f"a file is named twice among {', '.join(files)}")
            for name, paths in {"files": train, "heldout_files": heldout}.items():
                request[name] = [_describe(path) for path in paths]
                if paths and not any(file["bytes"] for file in request[name]):
                    raise UserError(f"there is no text in {', '.join(paths)}; give files that are not empty")
            groups = None if all(is_plain(path) for path in files) else groups
        else:
            request |= {name: getattr(self, name) for name in SOURCES["c4"] if name != "text_field"}
        if self.source != "c4":
            request["heldout_fraction"] = self.heldout_fraction if self.chooses_heldout else None
        if groups:
            request["group_field"] = groups
        # left out at their defaults, as in the manifests of corpora that were made before there was a choice
        if self.text_field != PrepareSettings.text_field:
            request["text_field"] = self.text_field
        if (encoding := check_encoding(self.encoding)) != PrepareSettings.encoding:
            request["encoding"] = encoding
        request["tokenizer"] = self.tokenizer_name if self.tokenizer_name in ("bpe", "olmo") else "file"
        if self.tokenizer_name == "bpe":
            request |= {"vocab_size": self.vocab_size, "tokenizer_sample_mb": self.tokenizer_sample_mb}
        else:
            request["tokenizer_file_sha256"] = sha256_file(tokenizer_file(self.tokenizer_name))
        request |= {"eos_token": self.eos_token, "decontaminate": self.decontaminate}
        return request | ({"near_copy_tokens": self.near_copy_tokens} if self.near_copy_tokens else {})

    def units(self, work: Path, workers: int) -> tuple[list[Unit], list[Unit]]:
        """Units to train on, and held-out ones: none where held-out documents are chosen among the others.

        ``work`` is a folder for what is made on the way. With a limit on tokens, a data set has few units, which have
        equal parts of it: a taste need not open a thousand files.
        """
        if self.source == "docs":
            folder = work / "text"
            if not folder.is_dir():
                write_documents(folder, list(docs_packages(self.packages)), workers)
            files = sorted(map(str, folder.glob("*.jsonl")))
            return file_units(files, Fields(group=self.group_field or "group")), []
        if self.source == "text":
            encoding = check_encoding(self.encoding)
            train = file_units(expand_folders(self.files), self.fields, encoding)
            return train, file_units(expand_folders(self.heldout_files), self.fields, encoding)
        name, rows = open_split(self.dataset, self.dataset_config, "train")
        count: int = rows.num_shards
        if self.limit_tokens is not None:
            count = min(count, -(-self.limit_tokens // HUB_UNIT_TOKENS))
        shards = (rows.shard(count, index) for index in range(count))
        train = [partial(read_split, name, shard, self.fields) for shard in shards]
        name, rows = open_split(self.dataset, self.dataset_config, "validation")
        return train, [partial(read_split, name, rows.take(self.heldout_documents), self.fields)]


def _describe(path: str) -> dict[str, Any]:
    """Without its folder: a manifest may be published, and a corpus copied together with its text."""
    if kind_of(path) is None:
        raise UserError(f"input file {path} is of no supported kind; give {KINDS}")
    if not Path(path).is_file():
        raise UserError(f"input file {path} is missing; put it back, or name another")
    stat = Path(path).stat()
    return {"name": Path(path).name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
