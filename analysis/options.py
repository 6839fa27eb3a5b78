"""Options that the commands of every measurement share: the model, how it is run, and what it reads."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from olmo_sparsity.util.arguments import positive_number, whole_number
from olmo_sparsity.util.errors import UserError

MODEL = """a run or checkpoint of this project, a folder of transformers, the id of a model on the Hugging Face hub, or
a .gguf file; maybe with @yarn:4 behind it (scales RoPE) or @untrained (freshly drawn weights)"""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How a model is opened and run: the options that every measurement shares, named as in `analysis.measure`."""
    group = parser.add_argument_group("the model")
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, where the model has none")
    group.add_argument(
        "--prefix",
        default="auto",
        metavar="TOKENS",
        help="tokens that stand before every context: auto (what the tokenizer puts before a text; the default), none, "
        "bos, eos, or ids such as 2",
    )
    group.add_argument(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "auto"),
        help="type of weights and computation; auto: as stored (default: fp32)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    group.add_argument("--attn-implementation", choices=("eager", "sdpa"), help="of transformers")
    group.add_argument(
        "--tokens-per-batch",
        type=whole_number,
        metavar="N",
        help="tokens of a forward pass (default: what fits)",
    )
    group.add_argument(
        "--memory-limit",
        dest="memory_limit_gb",
        type=positive_number,
        metavar="GB",
        help="what a batch may take (default: half the memory, or 80 %% of what is free on the GPU)",
    )


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """What is read: files, or a prepared corpus."""
    group = parser.add_argument_group("the text")
    group.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="one text and group each; of .json and .jsonl (.gz) every line has the fields text and url or group",
    )
    group.add_argument(
        "--corpus", metavar="DIR", help="folder that prepare_data made (default: the run's own)"
    )
    group.add_argument("--split", default="heldout", help="of the corpus (default: %(default)s)")


def texts_of(given: argparse.Namespace, model: str) -> Any:
    """What `measure` is to read: the files, the corpus, or the corpus that the run was trained on."""
    if given.text and given.corpus:
        raise UserError("--text and --corpus are two sources; give one")
    if given.text or given.corpus:
        return given.text or given.corpus
    return import_module("analysis.ours").corpus_of(model)
