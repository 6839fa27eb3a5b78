"""Performance as ratios: everything that is compared is timed in turn, in one run, on the same machine.

examples:
  python scripts/benchmark.py train                                  the demo's shape, random tokens
  python scripts/benchmark.py train --config configs/base.yaml --rounds 5 --model.d_model=512 --json
  torchrun --nproc_per_node 2 scripts/benchmark.py save              how long a step waits for a checkpoint
  python scripts/benchmark.py measure                                the weights and the text of this repository
  python scripts/benchmark.py cache MODEL.gguf --n-long 1024         leaving far keys and values out of the cache
  python scripts/benchmark.py start --config configs/pose-c4-300m.yaml    the start of a run, of one and two processes
  python scripts/benchmark.py sizes                                  what 150M to 7B ask of GPUs, by arithmetic
  python scripts/benchmark.py gpu --out runs/gpu                     a machine with CUDA, about half an hour
  python scripts/benchmark.py show results/benchmarks/train.json     what was recorded

`train` times optimizer steps of unmodified OLMo in a plain loop ("olmo"), of this project's loop, data loading and PoSE
included, and of transformers' Trainer on its own model of the same shape; the last two also compiled, which is not
timed. Ratios are throughput over that of "olmo" and of both Trainers: the median over rounds, lowest and highest.

`save` times how long training stands still for a checkpoint: written by rank 0, by all ranks, and by all ranks in the
background, with the most memory of rank 0's process. Under DDP; steps have one window of 64 tokens for each rank. On
CPUs it needs some 30 bytes a parameter in every process.

`measure` compares `analysis.measure`, in blocks, with a plain loop of one forward pass for each candidate: targets
per second, share of the matrix product, and how far the influences are from the loop's.

`cache` compares a block of leave-one-out in the cache, over far keys that rows share, with copies of the keys for every
row and with leave-one-out as text, in processor seconds of one thread, beside a linear layer of the model.

`start` times a start, and gives the peak memory beyond that of the libraries, of rank 0 and of the last rank:
until the model is built (what a host needs beside a GPU), and until it is ready to train. Weights are drawn, or read
from a checkpoint, by every rank as in older versions, or by rank 0.

`gpu` measures a CUDA machine in the parts of docs/gpu.md; run again, it goes on with those that are missing or failed.

`show` prints the numbers of records, of older commits, too.
"""

from __future__ import annotations

import importlib
import json
import os

from olmo_sparsity.cli import run_script
from olmo_sparsity.util.arguments import Parser, comma_separated, out_folder, path, texts, whole_number


def main() -> int:
    """Parse arguments, run one benchmark, print its table or JSON; 1 where a part of it failed."""
    parser = _parser()
    arguments, overrides = parser.parse_known_args()
    options = vars(arguments)
    name = options.pop("benchmark")
    if name == "show":
        if overrides:
            parser.error(f"{overrides[0]} is no option of show")
        print(importlib.import_module("benchmarks.records").show(options["records"]))
        return 0
    if name == "sizes":
        print(importlib.import_module("benchmarks.sizes").tables())
        return 0
    as_json = options.pop("json")
    if name in ("train", "save", "start"):
        options["overrides"] = overrides
    elif overrides:
        parser.error(f"{overrides[0]} is no option of benchmark {name}")
    result = importlib.import_module(f"benchmarks.{name}").run(**options)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result) if as_json else importlib.import_module("benchmarks.timing").table(result))
    return int(any(row.get("failed") for row in result.get("results", {}).values()))


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, help="what to measure")

    def add(name: str, what: str) -> Parser:
        one: Parser = benchmarks.add_parser(name, help=what, description=f"{what}; see --help without {name}")
        one.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        return one

    train = add("train", "training steps: ours, plain OLMo's, and transformers' Trainer's")
    train.add_argument("--config", default="configs/demo.yaml", help="its shape, batch and precision")
    train.add_argument("--rounds", type=whole_number, default=12, help="how often each is timed")
    train.add_argument("--steps", type=whole_number, default=4, help="optimizer steps of each timing")

    save = add("save", "a checkpoint: by rank 0, by all ranks, by all ranks in the background")
    save.add_argument("--config", default="configs/pose-c4-150m.yaml", help="its shape and precision")
    save.add_argument("--rounds", type=whole_number, default=3, help="how often each is timed")

    start = add("start", "the start of a run: seconds and memory")
    start.add_argument("--config", default="configs/pose-c4-300m.yaml", help="whose model")
    start.add_argument(
        "--processes",
        type=comma_separated(whole_number),
        default=(1, 2),
        metavar="P,…",
        help="how many (default: 1,2)",
    )

    measure = add("measure", "influence of far tokens: a plain loop, and the engine in blocks of targets")
    measure.add_argument("model", nargs="?", default="results/checkpoint", help="as measure takes it")
    measure.add_argument("--text", help="prepared corpus or file of text (default: this documentation)")
    measure.add_argument("--tokenizer", help="tokenizer.json, where the model has none")
    sizes = {"n-long": (256, "N"), "n-short": (32, "M"), "targets-per-block": (32, "B")}
    sizes |= {"blocks": (4, "of targets"), "targets": (2, "of the plain loop"), "rounds": (3, "of timing")}
    for size, (default, what) in sizes.items():
        measure.add_argument(f"--{size}", type=whole_number, default=default, help=what)

    cache = add("cache", "leave-one-out in the cache: shared and copied far keys, and as text")
    cache.add_argument("model", nargs="?", default="results/checkpoint", help="as measure takes it")
    cache.add_argument("--tokenizer", help="tokenizer.json, where the model has none")
    sizes = {"n-long": (256, "N"), "n-short": (32, "M"), "targets-per-block": (16, "B")}
    sizes |= {"rows": (48, "far tokens that are left out"), "rounds": (3, "of timing")}
    for size, (default, what) in sizes.items():
        cache.add_argument(f"--{size}", type=whole_number, default=default, help=what)

    gpu = add("gpu", "a CUDA machine in parts: agreement with the CPU, and speed")
    gpu.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="of the parts' files")
    gpu.add_argument("--data", metavar="DIR", help="prepared corpus (default: docstrings, prepared here)")
    gpu.add_argument("--minutes", type=float, default=28.0, help="of all parts together")
    gpu.add_argument("--tiny", action="store_true", help="the same parts on the CPU, with tiny shapes")
    gpu.add_argument("--only", type=texts, default=(), metavar="PART,…", help="these, such as train-150m")
    gpu.add_argument("--agreement", action="store_true", help="what the part of that name calls")
    what = "memory, saving and communication of models of 150M to 7B, by arithmetic"
    benchmarks.add_parser("sizes", help=what, description=f"{what}; see --help without sizes")
    what = "print the numbers of recorded benchmarks"
    show: Parser = benchmarks.add_parser("show", help=what, description=f"{what}; see --help without show")
    show.add_argument(
        "records", nargs="+", type=path, metavar="FILE", help="of --json, or of gpu; .jsonl: its last line"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
