"""Options that the commands of every measurement share: the model, how it is run, and what it reads."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from olmo_sparsity.util.arguments import whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.text_files import TextFiles

MODEL = """a run or checkpoint of this project, a folder of transformers, the id of a model on the Hugging Face hub, or
a .gguf file; maybe with @yarn:4 behind it (scales RoPE) or @untrained (freshly drawn weights)"""
DTYPES = ("fp32", "bf16", "fp16", "auto")
PREFIX = """tokens that stand before every context: auto (what the tokenizer puts before a text; the default), none,
bos, eos, or ids such as 2"""
PASS = "of a pass (default: 1,024, on a GPU 65,536; halved where memory runs out)"
TEXT = """files, or a folder with files of one kind: .txt, .md and any other are one text and group; .jsonl, .json,
.csv, .tsv and .parquet have rows with text (or, in JSON, messages) and maybe group or url; all but .parquet also as
.gz or .zst"""
TEXT_FIELD = "of --text: field or column with the text (default: text)"
GROUP_FIELD = "of --text: field or column with the book or site; none: no groups (default: group, else url)"
ENCODING = "of --text: encoding, such as latin-1 or utf-16 (default: utf-8)"
TEXT_OPTIONS = ("text", "text_field", "group_field", "encoding", "corpus")
"""What `texts_of` takes from the command line: no arguments of `measure`."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How a model is opened and run: the options that every measurement shares, named as in `analysis.measure`."""
    add = parser.add_argument_group("the model").add_argument
    add("--tokenizer", metavar="PATH", help="tokenizer.json, where the model has none")
    add("--prefix", default="auto", metavar="TOKENS", help=PREFIX)
    add("--dtype", default="fp32", choices=DTYPES, help="auto: as stored (default: fp32)")
    add("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    add("--attn-implementation", choices=("eager", "sdpa"), help="of transformers")
    add("--tokens-per-batch", type=whole_number, metavar="N", help=PASS)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """What is read: files, or a prepared corpus."""
    group = parser.add_argument_group("the text")
    source = group.add_mutually_exclusive_group().add_argument
    source("--text", nargs="+", type=Path, metavar="FILE", help=TEXT)
    source("--corpus", metavar="DIR", help="folder that prepare_data made (default: the run's own)")
    add_field_options(group)
    group.add_argument("--group-field", metavar="NAME", help=GROUP_FIELD)
    group.add_argument("--split", default="heldout", help="of the corpus (default: %(default)s)")


def add_field_options(group: Any) -> None:
    """How files of text are read, see `field_options`."""
    group.add_argument("--text-field", metavar="NAME", help=TEXT_FIELD)
    group.add_argument("--encoding", metavar="NAME", help=ENCODING)


def texts_of(given: argparse.Namespace, model: str) -> Any:
    """What `measure` is to read: the files, the corpus, or the corpus that the run was trained on."""
    return files_of(given) or given.corpus or import_module("analysis.ours").corpus_of(model)


def files_of(given: argparse.Namespace) -> TextFiles | None:
    """The files of ``--text``, and how they are read; None without it. Raises `UserError` for options of it alone."""
    options = field_options(given)
    if given.text is not None:
        return TextFiles(given.text, **options)
    for name in options:
        raise UserError(f"--{name.replace('_', '-')} is of files: name them with --text, or leave it out")
    return None


def field_options(given: argparse.Namespace) -> dict[str, str]:
    """How files of text are read, as arguments of `TextFiles`: what the command line says of it."""
    names = ("text_field", "group_field", "encoding")
    return {name: value for name, value in vars(given).items() if name in names and value is not None}
