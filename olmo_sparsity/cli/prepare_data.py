"""Turn text into OLMo's token files: a folder with train and held-out files, tokenizer.json, manifest.json.

examples:
  olmo-sparsity prepare_data docs --out runs/demo/data
  olmo-sparsity prepare_data text --files books/*.jsonl.gz --out runs/books
  olmo-sparsity prepare_data text --files train.json.gz --heldout-files validation.json.gz \\
      --tokenizer olmo --out runs/mine
  olmo-sparsity prepare_data text --heldout-files other.json.gz --tokenizer data/books/tokenizer.json \\
      --out data/other                                               # to evaluate on only
  olmo-sparsity prepare_data c4 --limit-tokens 1000000000 --out runs/c4
  olmo-sparsity prepare_data c4 --out runs/c4 --shard 3/64       # a task of a SLURM array, 64 of them
  olmo-sparsity prepare_data c4 --out runs/c4                    # when all 64 are done: puts them together

sources:
  docs  docstrings of the installed packages and Python's help topics; no network, about a minute on 2 cores
  text  your own files, or a folder with files of one kind: .txt or .md with one document a file; .jsonl with one
        {"text": ...} object a line (C4's layout), .json also with an array of them; .csv or .tsv with a header that
        names a column "text"; each of them also as .gz or .zst; and .parquet with a column "text" (--text-field)
  c4    allenai/c4 (English), streamed from the Hugging Face hub, or a copy of its folder, or of the files of its
        folder en, named with --dataset

Documents of one book, site or package are no independent samples: this group of each document is kept next to the
tokens (--group-field), and held-out documents are chosen as whole groups, in a random order as far as they fit in
the share. A group larger than the share thus stays in training.

A run that was stopped goes on where it was when the same command is given again; a finished corpus is left as
it is. Held-out documents lose every paragraph that also occurs in a training document.

--shard i/n prepares a share of the input (files, or shards of C4) into the same --out, at the same time as the
other shares, on any machine that sees the folder; the same command without --shard then makes what is missing, the
held-out split and the manifest. The result has the same bytes as without shards.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import SOURCES, PrepareSettings
from olmo_sparsity.data.tokens import MANIFEST_NAME, CorpusManifest, TokenFile
from olmo_sparsity.util.arguments import Parser, add_arguments, out_folder, settings_from, shard, whole_number


def main() -> int:
    settings, options = parse_settings()
    is_ready = (options.out / MANIFEST_NAME).is_file()
    start = time.monotonic()
    manifest = prepare(settings, options.out, workers=options.workers, shard=options.shard)
    seconds = time.monotonic() - start
    if manifest is None:
        name = "{}/{}".format(*options.shard)
        print(f"shard {name}: {seconds:,.1f} s; next, when all are ready: the same command without --shard")
    elif is_ready:
        print(
            f"{summary(manifest)}\n{options.out} was ready already, made with the same settings; nothing to do"
        )
    else:
        print(f"{summary(manifest)}\n{seconds:,.1f} s; {options.out} is ready")
    return 0


def parse_settings(arguments: Sequence[str] | None = None) -> tuple[PrepareSettings, argparse.Namespace]:
    """The corpus's settings, and all options, of ``arguments``, by default those of the command line."""
    options = _parser().parse_args(arguments)
    return settings_from(PrepareSettings, options), options


def summary(manifest: CorpusManifest) -> str:
    """What the corpus holds, a line per split and per count of what was found."""
    lines = [f"{name}: {_amount(files)} files" for name, files in manifest.splits.items()]
    for name in ("groups", "near_copies", "decontamination"):
        if counts := manifest.settings.get(name):
            lines.append(f"{name}: {', '.join(f'{key} {count:,}' for key, count in counts.items())}")
    return "\n".join(lines)


def _amount(files: Sequence[TokenFile]) -> str:
    documents = sum(file.documents for file in files)
    tokens = sum(file.tokens for file in files)
    return f"{documents:,} documents, {tokens:,} tokens in {len(files)}"


def _parser() -> Parser:
    """How the work is done, and an option for every setting, which says itself what it is."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", choices=SOURCES, help=f"one of {', '.join(SOURCES)}")
    add("--out", type=out_folder, required=True, metavar="DIR", help="folder to write the corpus to")
    add(
        "--workers",
        type=whole_number,
        metavar="N",
        help="processes that work side by side (default: one for each core)",
    )
    share = "prepare share I of N only; not for docs, nor with --tokenizer bpe (default: everything)"
    add("--shard", type=shard, metavar="I/N", help=share)
    add_arguments(parser, PrepareSettings)
    return parser
