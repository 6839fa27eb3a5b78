"""Where the time of a compiled training step goes on a GPU: kernels by name, and the gaps between them.

    export PYTHONPATH=scripts
    python results/benchmarks/gpu/step_profile.py configs/pose-c4-150m.yaml OUT --compile.from_steps=0
    python results/benchmarks/gpu/step_profile.py configs/demo.yaml OUT --tiny --compile.from_steps=0     on a CPU

Random tokens; ten steps before, six that are timed and one that PyTorch's profiler sees. OUT gets profile.json and
profile.txt. The gaps are the step's time less the time in which any kernel ran; on a CPU there are no kernels, and the
table is of PyTorch's own operations.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from benchmarks.timing import about_this_run, synchronise
from benchmarks.train import engine_of, loop_steps, with_random_tokens
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from olmo_sparsity.config.load import load_config
from olmo_sparsity.training.flops import flops_per_token, peak_flops

TINY = ["--model.n_layers=1", "--model.d_model=64", "--model.n_heads=2", "--global_train_batch_size=4"]
TINY += ["--device_train_microbatch_size=2"]


def busy_seconds(events):
    """Time in which at least one kernel ran, of events that may overlap."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        start = max(event.time_range.start, end)
        busy += max(0.0, event.time_range.end - start)
        end = max(end, event.time_range.end)
    return busy / 1e6


def main(path, out, *changes):
    tiny = "--tiny" in changes
    config_changes = [change for change in changes if change != "--tiny"] + TINY * tiny
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config = with_random_tokens(load_config(path, config_changes), out)
    engine = engine_of(config)
    device, step = engine.device, loop_steps(engine, config, 1)
    for _ in range(10):
        step()
    seconds = []
    for _ in range(6):
        synchronise()
        started = time.perf_counter()
        step()
        synchronise()
        seconds.append(time.perf_counter() - started)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as seen:
        step()
        synchronise()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    busy, median = busy_seconds(kernels), statistics.median(seconds)
    peak = peak_flops(config, device)
    rate = config.tokens_per_step / median
    record = {
        **about_this_run(),
        "config": path,
        "changes": config_changes,
        "compiled": engine.is_compiled,
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(config) / peak if peak else None,
        "kernel_seconds": busy if kernels else None,
        "gap_seconds": median - busy if kernels else None,
    }
    (out / "profile.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
    order = "self_device_time_total" if kernels else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100)
    (out / "profile.txt").write_text(table, encoding="utf8")
    (out / "tokens.npy").unlink()
    print(f"{rate:,.0f} tokens/s, step {median * 1e3:.1f} ms, kernels {busy * 1e3:.1f} ms; {out}/profile.txt")


if __name__ == "__main__":
    main(*sys.argv[1:])
