"""Performance as ratios: everything that is compared is timed in turn, in one run, on the same machine.

examples:
  python scripts/benchmark.py train                          the demo's shape
  python scripts/benchmark.py train --config configs/base.yaml --rounds 5 --json
  python scripts/benchmark.py data --files data/c4/en/*.json.gz --rounds 5

`train` times optimizer steps of unmodified OLMo in a plain loop ("olmo"), our model with position ids in the same loop,
this project's whole loop, data loading and PoSE included ("loop"), and transformers' model of the same shape trained by
its Trainer. Ratios are throughput over that of "olmo", the median over rounds; a ratio above 1 is faster. On a GPU
whose peak is known the loop's model FLOPs utilisation is given too. --compile.mode=default compiles ours alone.

`data` times making token files of text, reading it included, as scripts/prepare_data.py does, and `datasets.map` with
the same tokenizer (OLMo's) and as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from olmo_sparsity.data.workers import available_cores
from olmo_sparsity.errors import UserError, run_script


def main() -> None:
    """Parse arguments, run one benchmark, print its table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), help="what to measure")
    parser.add_argument(
        "--config", default="configs/demo.yaml", help="its shape, batch and precision (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="how often each is timed (default: 12; data: 5)")
    parser.add_argument("--steps", type=int, default=4, help="steps per timing (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--files", nargs="+", default=(), help="data: text in C4's layout (default: some is made up)"
    )
    arguments, overrides = parser.parse_known_args()
    result = BENCHMARKS[arguments.name](arguments, overrides)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_table(result)


def benchmark_data(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of preparing text, ours against `datasets.map`."""
    from benchmarks.data import MAP, count_tokens, data_runners, generated_files

    if overrides:
        raise UserError(f"{overrides[0]} is not for benchmark data")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = arguments.files or generated_files(folder)
        runners = data_runners(files, folder)
        seconds = time_in_turn(runners, arguments.rounds or 5, lambda: None, warm_up=1)
        tokens = count_tokens(folder)
    result = summarise(seconds, baseline=MAP, amount=tokens, unit="tokens/s")
    return result | {"benchmark": "data", "files": len(files), "tokens": tokens, "cores": available_cores()}


def benchmark_train(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of a training step: ours, unmodified OLMo's, and transformers' Trainer's."""
    from benchmarks.train import OLMO, TrainBenchmark

    with tempfile.TemporaryDirectory() as folder:
        benchmark = TrainBenchmark(arguments.config, overrides, arguments.steps, Path(folder))
        seconds = time_in_turn(benchmark.runners(), arguments.rounds or 12, benchmark.synchronise)
    result = summarise(seconds, baseline=OLMO, amount=benchmark.tokens_per_call, unit="tokens/s")
    about = benchmark.about()
    flops_per_second = result["results"]["loop"]["rate"] * about["flops_per_token"]
    mfu = flops_per_second / about["peak_flops"] if about["peak_flops"] else None
    return result | {"benchmark": "train", **about, "loop_mfu": mfu}


def time_in_turn(
    runners: dict[str, Callable[[], float | None]],
    rounds: int,
    synchronise: Callable[[], None],
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Seconds of each runner, round by round; the order turns so that none is always first.

    A runner that returns seconds has timed itself, without what should not count.
    """
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            synchronise()
            started = time.perf_counter()
            own = runners[name]()
            synchronise()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started if own is None else own)
    return seconds


def summarise(seconds: dict[str, list[float]], *, baseline: str, amount: float, unit: str) -> dict[str, Any]:
    """Median rate of each, and the median, lowest and highest of its round-by-round ratio to the baseline."""
    rows = {}
    for name, values in seconds.items():
        ratios = [base / value for base, value in zip(seconds[baseline], values, strict=True)]
        rows[name] = {
            "rate": amount / statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
    return {"unit": unit, "baseline": baseline, "rounds": len(seconds[baseline]), "results": rows}


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


BENCHMARKS = {"data": benchmark_data, "train": benchmark_train}


if __name__ == "__main__":
    run_script(main)
