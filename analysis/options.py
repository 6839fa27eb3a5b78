"""Options that the commands of every measurement share: the model, how it is run, and what it reads."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from olmo_sparsity.util.arguments import whole_number

MODEL = """a run or checkpoint of this project, a folder that transformers wrote, the id of a model on the Hugging Face
hub, or a .gguf file; add @yarn:4 to scale its RoPE by 4, or @untrained to draw its weights anew"""
DTYPES = ("fp32", "bf16", "fp16", "auto")
PREFIX = """tokens put before every context: auto (what the tokenizer puts before a text), none, bos, eos, or
comma-separated ids (default: auto)"""
DTYPE = "number format of weights and computation; auto: as the weights are stored (default: fp32)"
DEVICE = "where the model runs: cpu, cuda, cuda:1, … (default: a GPU where there is one, else the CPU)"
ATTENTION = """how transformers computes attention: eager (plain matrix products) or sdpa (fused, of PyTorch)
(default: what transformers chooses for the model)"""
PASS = """maximum number of tokens in one forward pass; halved where memory runs out (default: 1,024 on a CPU, 65,536 on
a GPU)"""
TEXT = """files to read; each is one text and one group, but each line of a .json or .jsonl file (also .gz) is a text by
itself, in its field text or messages, of the group in its field group or url (default: --corpus)"""
CORPUS = """folder that prepare_data wrote (default: the corpus that the run was trained on; for verify the texts of
RESULT)"""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How a model is opened and run: the options that every measurement shares, named as in `analysis.measure`."""
    add = parser.add_argument_group("the model").add_argument
    add("--tokenizer", metavar="PATH", help="tokenizer.json to use (default: the model's own)")
    add("--prefix", default="auto", metavar="TOKENS", help=PREFIX)
    add("--dtype", default="fp32", choices=DTYPES, help=DTYPE)
    add("--device", help=DEVICE)
    add("--attn-implementation", choices=("eager", "sdpa"), help=ATTENTION)
    add("--tokens-per-batch", type=whole_number, metavar="N", help=PASS)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """What is read: files, or a prepared corpus."""
    group = parser.add_argument_group("the text")
    source = group.add_mutually_exclusive_group().add_argument
    source("--text", nargs="+", type=Path, metavar="FILE", help=TEXT)
    source("--corpus", metavar="DIR", help=CORPUS)
    group.add_argument("--split", default="heldout", help="part of the corpus to read (default: heldout)")


def texts_of(given: argparse.Namespace, model: str) -> Any:
    """What `measure` is to read: the files, the corpus, or the corpus that the run was trained on."""
    return given.text or given.corpus or import_module("analysis.ours").corpus_of(model)
