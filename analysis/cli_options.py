"""Options that the commands of every measurement share: the model, how it is run, and what it reads."""

from __future__ import annotations

import argparse
from typing import Any

from olmo_sparsity.util.arguments import path, whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.text_files import TextFiles

MODEL = """a run or checkpoint of this project, a folder that transformers wrote, the id of a model on the Hugging Face
hub, or a .gguf file; add @yarn:4 to scale its RoPE by 4, or @untrained to draw its weights anew"""
DTYPES = ("fp32", "bf16", "fp16", "auto")
PREFIX = """tokens put before every context: auto (what the tokenizer puts before a text), none, bos, eos, or
comma-separated ids (default: auto)"""
DTYPE = "number format of weights and computation; auto: as the weights are stored (default: fp32)"
DEVICE = "device to run the model on: cpu, cuda, cuda:1, … (default: a GPU where there is one, else the CPU)"
ATTENTION = """attention kernel (transformers): eager (plain matrix products) or sdpa (fused, PyTorch) (default: what
transformers chooses for the model)"""
PASS = """tokens per forward pass; halved when memory runs out (default: 1,024 on a CPU, 65,536 on a GPU)"""
TEXT = """files to read, or a folder with files of one kind: each .txt, .md or other file is one text and group; .jsonl,
.ndjson, .json, .csv, .tsv and .parquet have a text in every row, in the field text (in JSON and Parquet also messages),
of the group in the field group or url; all but .parquet also as .gz or .zst (default: --corpus)"""
CORPUS = "folder that prepare_data wrote (default: {default})"
TEXT_FIELD = "field or column of the files of --text that holds the text (default: text)"
GROUP_FIELD = """field or column of the files of --text that names the book or site; none: no groups (default: group,
else url)"""
ENCODING = "encoding of the files of --text, such as latin-1 or utf-16 (default: utf-8)"
TEXT_OPTIONS = ("text", "text_field", "group_field", "encoding", "corpus")
"""What `texts_of` takes from the command line: no arguments of `measure`."""


def add_model_options(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """How a model is opened and run: the options that every measurement shares, named as in `analysis.measure`.

    ``again``: without those that the settings of a result decide, which is measured again.
    """
    add = parser.add_argument_group("the model").add_argument
    add("--tokenizer", metavar="PATH", help="tokenizer.json to use (default: the model's own)")
    if not again:
        add("--prefix", default="auto", metavar="TOKENS", help=PREFIX)
        add("--dtype", default="fp32", choices=DTYPES, help=DTYPE)
    add("--device", help=DEVICE)
    add("--attn-implementation", choices=("eager", "sdpa"), help=ATTENTION)
    add("--tokens-per-batch", type=whole_number, metavar="N", help=PASS)


def add_text_options(
    parser: argparse.ArgumentParser,
    default: str = "the corpus that the run was trained on",
    *,
    again: bool = False,
) -> None:
    """What is read: files, or a prepared corpus; ``default``, in words, where neither is given.

    ``again``: as of `add_model_options`.
    """
    group = parser.add_argument_group("the text")
    source = group.add_mutually_exclusive_group().add_argument
    source("--text", nargs="+", type=path, metavar="FILE", help=TEXT)
    source("--corpus", type=path, metavar="DIR", help=CORPUS.format(default=default))
    add_field_options(group)
    group.add_argument("--group-field", metavar="NAME", help=GROUP_FIELD)
    if not again:
        group.add_argument("--split", default="heldout", help="part of the corpus to read (default: heldout)")


def add_field_options(group: Any) -> None:
    """How files of text are read, see `field_options`."""
    group.add_argument("--text-field", metavar="NAME", help=TEXT_FIELD)
    group.add_argument("--encoding", metavar="NAME", help=ENCODING)


def texts_of(arguments: argparse.Namespace, model: str) -> Any:
    """What `measure` is to read: the files, the corpus, or the corpus that the run was trained on."""
    if read := files_of(arguments) or arguments.corpus:
        return read
    from analysis.project import corpus_of  # not above: it needs what training needs

    return corpus_of(model)


def files_of(arguments: argparse.Namespace) -> TextFiles | None:
    """The files of ``--text``, and how they are read; None without it. Raises `UserError` for options of it alone."""
    options = field_options(arguments)
    if arguments.text is not None:
        return TextFiles(arguments.text, **options)
    for name in options:
        raise UserError(f"--{name.replace('_', '-')} is of files: name them with --text, or leave it out")
    return None


def field_options(arguments: argparse.Namespace) -> dict[str, str]:
    """How files of text are read, as arguments of `TextFiles`: what the command line says of it."""
    names = ("text_field", "group_field", "encoding")
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}
