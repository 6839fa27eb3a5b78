"""English text that every machine with this project has: docstrings and Python's help topics.

One document per module (its docstrings in source order) and per topic. Modules are parsed, never imported.
"""

from __future__ import annotations

import ast
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.text import Document, paragraphs, write_rows
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path

PYTHON = "python"
"""Stands for the standard library and the help topics among package names."""
BASE = ("ai2-olmo", "datasets", "transformers", "accelerate", "deepspeed", "scipy", "matplotlib")
"""Whose docstrings, and those of what they need, make the corpus, whatever an install brings."""
PARTS = 8
"""Files the documents are divided into, each one a unit."""
MIN_CHARACTERS = 500
MIN_REPEATED_CHARACTERS = 100
"""A paragraph at least this long is kept only where it stands first: packages copy whole parameter lists."""
MIN_ASCII_SHARE = 0.9
MIN_COMMON_WORD_SHARE = 0.1
"""English prose with code examples has 0.15 to 0.4 of these words; grammars and tables of numbers less."""
COMMON_WORDS = re.compile(
    r"\b(the|of|and|to|a|in|is|for|that|it|as|be|with|this|or|are|by|on|from|an|not|if|which|can)\b",
    re.IGNORECASE,
)
SKIPPED_FILES = re.compile(
    r"(^|/)(tests?|_?vendor(ed)?|third_party|lib2to3|site-packages|dist-packages|__pycache__)/"
    r"|(^|/)(test_[^/]*|conftest|topics)\.py$|_(test|pb2)\.py$"
)
BOILERPLATE = re.compile(
    r"copyright|licen[sc]ed under|:license:|all rights reserved|SPDX-|automatically generated|auto-generated"
    r"|^\s*\.\. (autosummary|toctree|currentmodule|module|automodule|autofunction|autoclass)::",
    re.IGNORECASE,
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
                found = distribution(name)
            except PackageNotFoundError:
                if names or name in BASE:
                    remedy = f"{PYTHON} and what is installed, such as by pip install 'olmo-sparsity[train]'"
                    raise UserError(f"package {name} is not installed; docs takes {remedy}") from None
                continue  # a requirement for another platform
            versions[name] = found.version
            needed = map(Requirement, () if names else found.requires or ())
            left += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
    return dict(sorted(versions.items()))


def write_documents(folder: Path, packages: Sequence[str], workers: int) -> None:
    """Write the documents of ``packages`` as ``PARTS`` files of JSON lines in ``folder``, all or none."""
    modules = {name: path for package in packages for name, path in _modules(package)}
    jobs = [partial(read_docstrings, path) for path in modules.values()]
    parsed = run_jobs(jobs, workers, "reading docstrings")
    documents = dict(zip(modules, parsed, strict=True))
    if PYTHON in packages:
        from pydoc_data.topics import topics

        documents |= {f"{PYTHON}/topics/{name}": [page] for name, page in topics.items()}
    # A fixed pseudo-random order: modules of a package are alike, and each part should have some of every package.
    names = sorted(documents, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    cleaned = list(clean_documents((name.partition("/")[0], documents[name]) for name in names))
    with atomic_path(folder) as temporary:
        for part in range(PARTS):
            write_rows(partial(iter, cleaned[part::PARTS]), temporary / f"docs-{part:05d}.jsonl")


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
    """Docstrings of a source file's module, classes and functions, in its order; none where it is not Python."""

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
    words, common = len(re.findall(r"[A-Za-z]+", text)), len(COMMON_WORDS.findall(text))
    ascii_characters = len(text.encode("ascii", "ignore"))
    return common >= MIN_COMMON_WORD_SHARE * max(1, words) and ascii_characters >= MIN_ASCII_SHARE * len(text)
