"""Performance as ratios: everything that is compared is timed in turn, in one run, on the same machine.

examples:
  python scripts/benchmark.py train                          the demo's shape
  python scripts/benchmark.py train --config configs/base.yaml --rounds 5 --json
  python scripts/benchmark.py encodings configs/length/rope.yaml configs/length/{alibi,fox,entmax}.yaml
  python scripts/benchmark.py profile --config configs/synthetic/addition-small.yaml
  python scripts/benchmark.py data --files data/c4/en/*.json.gz --rounds 5
  python scripts/benchmark.py influence --out runs/benchmark                    random weights, random tokens
  python scripts/benchmark.py influence results/checkpoint --text runs/verify/data --out runs/benchmark
  python scripts/benchmark.py synthetic --config configs/synthetic/scratchpad_parity-small.yaml
  python scripts/benchmark.py gpu --out runs/gpu                             on a machine with CUDA, about half an hour

`train` times optimizer steps of unmodified OLMo in a plain loop ("olmo"), our model with position ids in the same loop,
this project's whole loop, data loading and PoSE included ("loop"), and transformers' model of the same shape trained by
its Trainer; the last two also compiled by torch.compile, which is not timed. Ratios are throughput over that of "olmo",
and of both Trainers, the median over rounds; a ratio above 1 is faster. Beside them stand the share of the machine's
own matrix product in the same precision, timed in the same rounds, and the memory of the loss against the vocabulary.
--model.d_model=512 --model.n_heads=8 is another width.

`encodings` times optimizer steps of our loop with each config's position encoding and attention, eager and on random
tokens, and measures the memory of a step, each in a process of its own.

`profile` times optimizer steps of our loop, compiled where the config has `compile`, and lists the longest operations
of as many more steps under PyTorch's profiler, which slows them.

`data` times making token files of text, reading it included, as prepare_data does, and `datasets.map` with the same
tokenizer (OLMo's) and as many processes as there are cores.

`influence` compares the engine of the analysis with a plain loop (one forward pass per candidate, nothing shared), one
target at a time and in a block: targets per second, whether both choose the same tokens, and the share of the machine's
matrix product. With --text it also times one whole measurement and its memory. It writes influence.json.

`synthetic` times making batches of every synthetic task that has a config beside --config, in turn with training steps.
Then it times this project's loop and transformers' Trainer on the same GPT-NeoX, samples, ids and optimizer, after the
losses of both were found to be the same. With OMP_NUM_THREADS=1 on a CPU it counts the processor's time, which other
programs hardly change.

`gpu` does on a CUDA machine, each part in a process with a time limit and a JSON file of its own: losses and gradients
against the CPU's, a run resumed there, influence against the CPU's, tokens/s and MFU at 60M, 150M and 1B, eager
and compiled, influence targets/s, ZeRO 2; then a 150M model is trained for the time that is left, and its Figure 2 is
drawn. Run again, it goes on with the parts that are missing or failed. docs/gpu.md says what such a machine needs.
"""

from __future__ import annotations

import importlib
import json

from benchmarks.settings import BENCHMARKS

from olmo_sparsity.util.arguments import Parser, add_arguments, settings_from
from olmo_sparsity.util.script import run_script


def main() -> int:
    """Parse arguments, run one benchmark, print its tables or JSON; 1 where a part of it failed."""
    arguments, overrides = _parser().parse_known_args()
    settings = settings_from(BENCHMARKS[arguments.benchmark], arguments, overrides=tuple(overrides))
    result = importlib.import_module(f"benchmarks.{arguments.benchmark}").run(settings)
    if arguments.json:
        print(json.dumps(result))
    else:
        from benchmarks.tables import print_tables

        print_tables(result)
    return int(any(part["failed"] for part in result.get("parts", {}).values()))


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", required=True, help="what to measure"
    )
    for name, settings in BENCHMARKS.items():
        what = settings.__doc__
        one = benchmarks.add_parser(name, help=what, description=f"{what} See scripts/benchmark.py --help.")
        one.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
        add_arguments(one, settings)
    return parser


if __name__ == "__main__":
    run_script(main)
