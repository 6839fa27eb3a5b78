"""Performance as ratios: everything that is compared is timed in turn, in one run, on the same machine.

examples:
  python scripts/benchmark.py train                          the demo's shape
  python scripts/benchmark.py train --config configs/base.yaml --rounds 5 --json
  python scripts/benchmark.py data --files data/c4/en/*.json.gz --rounds 5
  python scripts/benchmark.py influence --out runs/benchmark                    random weights, random tokens
  python scripts/benchmark.py influence runs/books --corpus runs/books/data --out runs/benchmark \\
      --targets 8 --screened-targets 64
  python scripts/benchmark.py synthetic --config configs/synthetic/scratchpad_parity-small.yaml
  python scripts/benchmark.py length runs/books --length 512

`train` times optimizer steps of unmodified OLMo in a plain loop ("olmo"), our model with position ids in the same loop,
this project's whole loop, data loading and PoSE included ("loop"), and transformers' model of the same shape trained by
its Trainer. Ratios are throughput over that of "olmo", the median over rounds; a ratio above 1 is faster. On a GPU
whose peak is known the loop's model FLOPs utilisation is given too. --compile.mode=default compiles ours alone.

`data` times making token files of text, reading it included, as scripts/prepare_data.py does, and `datasets.map` with
the same tokenizer (OLMo's) and as many processes as there are cores.

`influence` compares the engine of the influence analysis with a plain loop (one forward pass per candidate, nothing
shared) on the same targets: speed, and whether both choose the same tokens; screened selectors with exact ones: cost
and, on a trained checkpoint and its corpus, the net recovery that they keep; and it measures seconds and memory against
N, k and the number of targets. It writes influence.json and, of the costs, cost.png and cost.pdf; its options are
listed by `scripts/benchmark.py influence --help`, as are those of the others.

`synthetic` times making batches of every synthetic task, position ids included, in turn with training steps on batches
that are there. Beside addition-small.yaml, copy-small.yaml is the config of copy; a task without one is given the shape
of --config. Then it times this project's loop, making its batches meanwhile, and transformers' Trainer on the same
GPT-NeoX, samples, ids and optimizer, after the losses of both were found to be the same; ids of a coupled scheme give
way to PoSE there, since the Trainer knows no joint loss. With OMP_NUM_THREADS=1 on a CPU it counts the processor's
time, which other programs hardly change; for a small shape the ratio still differs by some per cent from run to run.

`length` times loss by position as scripts/length.py computes it and with one forward pass for each position, after the
losses of both were found to be the same to 1e-4 nats.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import summarise, time_in_turn

from olmo_sparsity.data.workers import available_cores
from olmo_sparsity.util.arguments import (
    Parser,
    finite_number,
    out_folder,
    seed_number,
    whole_number,
    whole_numbers,
)
from olmo_sparsity.util.errors import UserError, run_script
from olmo_sparsity.util.files import write_json


def main() -> None:
    """Parse arguments, run one benchmark, print its table or JSON."""
    arguments, overrides = _parser().parse_known_args()
    result = arguments.run(arguments, overrides)
    if arguments.json:
        print(json.dumps(result))
    else:
        arguments.show(result)


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True, help="what to measure")

    def add(name: str, run: Callable[..., dict[str, Any]], show: Callable[..., None]) -> Parser:
        one = benchmarks.add_parser(name, help=run.__doc__, description=run.__doc__)
        one.set_defaults(run=run, show=show)
        one.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        return one

    train = add("train", benchmark_train, print_table)
    train.add_argument(
        "--config", default="configs/demo.yaml", help="its shape, batch and precision (default: %(default)s)"
    )
    train.add_argument(
        "--rounds", type=whole_number, default=12, help="how often each is timed (default: %(default)s)"
    )
    train.add_argument(
        "--steps", type=whole_number, default=4, help="steps per timing (default: %(default)s)"
    )
    data = add("data", benchmark_data, print_table)
    data.add_argument("--files", nargs="+", default=(), help="text in C4's layout (default: some is made up)")
    data.add_argument(
        "--rounds", type=whole_number, default=5, help="how often each is timed (default: %(default)s)"
    )
    synthetic = add("synthetic", benchmark_synthetic, print_synthetic)
    synthetic.add_argument(
        "--config",
        default="configs/synthetic/scratchpad_parity.yaml",
        help="task, shape, batch and precision; on a CPU take its -small (default: %(default)s)",
    )
    synthetic.add_argument(
        "--rounds", type=whole_number, default=7, help="how often each is timed (default: %(default)s)"
    )
    synthetic.add_argument(
        "--steps", type=whole_number, default=4, help="steps per timing (default: %(default)s)"
    )
    _add_length_arguments(add("length", benchmark_length, print_table))
    _add_influence_arguments(add("influence", benchmark_influence, print_influence))
    return parser


def _add_subject_arguments(parser: Parser) -> None:
    """Which model is measured, and where."""
    parser.add_argument("checkpoint", nargs="?", help="checkpoint, run, or transformers directory")
    parser.add_argument(
        "--config",
        default="configs/books.yaml",
        help="shape of random weights where no checkpoint is given (default: %(default)s)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")


def _add_length_arguments(parser: Parser) -> None:
    _add_subject_arguments(parser)
    numbers = [("--length", 256, "tokens of a window"), ("--windows", 4, "windows of random tokens")]
    for name, default, text in [*numbers, ("--rounds", 3, "how often each is timed")]:
        parser.add_argument(name, type=whole_number, default=default, help=f"{text} (default: %(default)s)")


def _add_influence_arguments(parser: Parser) -> None:
    """What the influence benchmark measures on what; the defaults take minutes on 2 cores."""
    _add_subject_arguments(parser)
    parser.add_argument("--corpus", help="prepared corpus of the checkpoint (default: random tokens)")
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="DIR", help="folder of what is written"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: tuple(text.split(",")),
        default=("speed", "screened", "cost"),
        help="comma-separated (default: speed,screened,cost)",
    )
    numbers = [
        ("--n-long", 256, "N"),
        ("--n-short", 32, "M"),
        ("--targets", 2, "targets of the comparison with the plain loop"),
        ("--screened-targets", 8, "targets of the comparison of screened with exact selectors"),
        ("--repeats", 3, "how often each is timed against the plain loop, at most how often for cost"),
    ]
    for name, default, text in numbers:
        parser.add_argument(name, type=whole_number, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="seed of the targets (default: %(default)s)"
    )
    parser.add_argument(
        "--tau", type=finite_number, default=1.0, help="targets gain more nats (default: %(default)s)"
    )
    lists = [
        ("--lengths", (64, 128, 256, 512), "N whose cost is measured"),
        ("--k", (1, 2, 4, 8, 16), "k whose cost is measured"),
        ("--counts", (1, 2, 4), "numbers of targets whose cost is measured"),
    ]
    for name, values, text in lists:
        shown = ",".join(map(str, values))
        parser.add_argument(name, type=whole_numbers, default=values, help=f"{text} (default: {shown})")


def benchmark_data(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of preparing text, ours against `datasets.map`."""
    from benchmarks.data import MAP, count_tokens, data_runners, generated_files

    if overrides:
        raise UserError(f"{overrides[0]} is not for benchmark data")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = arguments.files or generated_files(folder)
        runners = data_runners(files, folder)
        seconds = time_in_turn(runners, arguments.rounds, lambda: None, warm_up=1)
        tokens = count_tokens(folder)
    result = summarise(seconds, baseline=MAP, amount=tokens, unit="tokens/s")
    return result | {"benchmark": "data", "files": len(files), "tokens": tokens, "cores": available_cores()}


def benchmark_train(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of a training step: ours, unmodified OLMo's, and transformers' Trainer's."""
    from benchmarks.train import OLMO, TrainBenchmark

    with tempfile.TemporaryDirectory() as folder:
        benchmark = TrainBenchmark(arguments.config, overrides, arguments.steps, Path(folder))
        seconds = time_in_turn(benchmark.runners(), arguments.rounds, benchmark.synchronise)
    result = summarise(seconds, baseline=OLMO, amount=benchmark.tokens_per_call, unit="tokens/s")
    about = benchmark.about()
    flops_per_second = result["results"]["loop"]["rate"] * about["flops_per_token"]
    mfu = flops_per_second / about["peak_flops"] if about["peak_flops"] else None
    return result | {"benchmark": "train", **about, "loop_mfu": mfu}


def benchmark_influence(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Seconds of the influence analysis: its engine against a plain loop, screened against exact selectors."""
    import torch
    from benchmarks.influence import BenchmarkSettings, Subject, run_influence_benchmark

    from analysis.plots.costs import cost_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import INFLUENCE_BENCHMARK

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = BenchmarkSettings(
        subject=Subject(arguments.checkpoint, arguments.config, tuple(overrides), device),
        corpus=arguments.corpus,
        parts=arguments.parts,
        n_long=arguments.n_long,
        n_short=arguments.n_short,
        targets=arguments.targets,
        screened_targets=arguments.screened_targets,
        repeats=arguments.repeats,
        tau_nats=arguments.tau,
        seed=arguments.seed,
        lengths=arguments.lengths,
        ks=arguments.k,
        counts=arguments.counts,
    )
    result = INFLUENCE_BENCHMARK.stamped(run_influence_benchmark(settings))
    write_json(arguments.out / INFLUENCE_BENCHMARK.name, result)
    if "cost" in result:
        save_figure(cost_figure(result), arguments.out, "cost")
    return result


def benchmark_synthetic(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Synthetic tasks: samples per second and their share of a step; steps per second, ours against the Trainer's."""
    from benchmarks.synthetic import run_synthetic_benchmark

    return run_synthetic_benchmark(
        arguments.config, overrides, rounds=arguments.rounds, steps=arguments.steps
    )


def benchmark_length(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of loss by position: one forward pass a window against one a position."""
    import torch
    from benchmarks.influence import Subject
    from benchmarks.length import run_length_benchmark

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = Subject(arguments.checkpoint, arguments.config, tuple(overrides), device)
    return run_length_benchmark(
        subject, length=arguments.length, windows=arguments.windows, rounds=arguments.rounds
    )


def print_influence(result: dict[str, Any]) -> None:
    """The tables of the influence benchmark."""
    from benchmarks.influence_tables import describe_machine, influence_tables
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(describe_machine(result), markup=False)
    for table in influence_tables(result):
        console.print(table)


def print_synthetic(result: dict[str, Any]) -> None:
    """The tables of the synthetic benchmark."""
    machine = ", ".join(f"{key} {result[key]}" for key in ("device", "precision", "threads", "clock"))
    making = (
        f"{result['config']}; {machine}, load average before {result['load_average_before']:.1f}, "
        f"{result['rounds']} rounds, commit {result['commit']}\n\n"
        f"making a batch, % of a training step [lowest, highest]; to be below {100 * result['largest_share']:.0f}"
    )
    rows = [
        [
            name,
            task["scheme"],
            str(task["batch"]),
            f"{task['samples_per_second']:,.0f}",
            f"{task['steps_per_second']:,.3g}",
            "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * task[f"share{key}"] for key in ("", "_low", "_high"))),
        ]
        for name, task in result["tasks"].items()
    ]
    _print_rows(making, ["task", "ids", "batch", "samples/s", "steps/s", "% of a step"], rows)
    steps = result["steps"]
    rows = [
        [name, f"{row['rate']:,.3g}", "{ratio:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]".format(**row)]
        for name, row in steps["results"].items()
    ]
    title = (
        f"\n{steps['task']}, {steps['scheme']} ids, the same losses: × {steps['baseline']} [lowest, highest]"
    )
    _print_rows(title, ["", steps["unit"], "×"], rows)


def _print_rows(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A title and a table whose first column holds names."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False)
    console.print(table)


def print_table(result: dict[str, Any]) -> None:
    """The result as a table."""
    from rich.console import Console
    from rich.table import Table

    about = ", ".join(
        f"{key} {value}" for key, value in result.items() if key not in ("results", "benchmark")
    )
    table = Table(title=f"{result['benchmark']}: {about}", title_justify="left")
    table.add_column("")
    for column in (result["unit"], f"ratio to {result['baseline']}", "lowest", "highest"):
        table.add_column(column, justify="right")
    for name, row in result["results"].items():
        values = [f"{row['rate']:,.0f}", *(f"{row[key]:.3f}" for key in ("ratio", "ratio_low", "ratio_high"))]
        table.add_row(name, *values)
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
