"""Options that the commands of every measurement share: the model, how it is run, and what it reads."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from olmo_sparsity.util.arguments import whole_number

MODEL = """a run or checkpoint of this project, a folder of transformers, the id of a model on the Hugging Face hub, or
a .gguf file; maybe with @yarn:4 behind it (scales RoPE) or @untrained (freshly drawn weights)"""
DTYPES = ("fp32", "bf16", "fp16", "auto")
PREFIX = """tokens that stand before every context: auto (what the tokenizer puts before a text; the default), none,
bos, eos, or ids such as 2"""
PASS = "of a pass (default: 1,024, on a GPU 65,536; halved where memory runs out)"
TEXT = "one text and group each; of .json and .jsonl (.gz) every line has text or messages, and url or group"


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
    group.add_argument("--split", default="heldout", help="of the corpus (default: %(default)s)")


def texts_of(given: argparse.Namespace, model: str) -> Any:
    """What `measure` is to read: the files, the corpus, or the corpus that the run was trained on."""
    return given.text or given.corpus or import_module("analysis.ours").corpus_of(model)
