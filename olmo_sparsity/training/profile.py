"""Where the time of a step goes: some steps of rank 0 under PyTorch's profiler, as a table and a trace."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from olmo_sparsity.util.errors import first_line
from olmo_sparsity.util.files import atomic_path

log = logging.getLogger(__name__)

STEP = "olmo_sparsity: step"
DATA = "olmo_sparsity: waiting for data"
"""What the loop calls its parts in the profile."""
MATRIX_PRODUCTS, ATTENTION, OTHER = "matrix products", "attention", "other operations"
COMMUNICATION, WAITING, GAPS = "communication", "data", "gaps"
ROWS = {
    MATRIX_PRODUCTS: "of linear layers, the head, and attentions that are made of them",
    ATTENTION: "fused kernels of the softmax",
    OTHER: "norms, activations, rotation, loss, optimizer, copies",
    COMMUNICATION: "between processes, while nothing is computed",
    WAITING: "waiting for the next batch, while nothing else is done",
    GAPS: "none of these: Python, launches, waiting",
}
# Names of CUDA kernels, and of PyTorch's operations on a CPU. Attention comes first: its kernels are CUTLASS's, too.
_KINDS = {
    COMMUNICATION: re.compile(r"nccl|gloo|c10d"),
    ATTENTION: re.compile(r"flash|fmha|sdp|attention", re.IGNORECASE),
    MATRIX_PRODUCTS: re.compile(
        r"gemm|cutlass|cublas|nvjet|xmma|triton_tem|aten::_?(mm|addmm|bmm|baddbmm)\b|mk(l|ldnn)_linear"
    ),
}
_WARM_UP_STEPS = 10
_Interval = tuple[float, float]


def profiled_steps(trained: Iterator[int], count: int) -> list[int]:
    """The steps to watch: one in which the profiler starts, which does not count, and ``count`` that do.

    They come after `_WARM_UP_STEPS`; in a run of fewer steps they are its last, and fewer.
    """
    return list(islice(trained, _WARM_UP_STEPS + count))[-count - 1 :]


class StepProfiler:
    """Watches some steps, and writes the table and the trace after the last of them. Use it as a context manager.

    A run that ends before has neither.
    """

    def __init__(self, folder: Path, steps: Sequence[int], device: torch.device):
        """``folder``: of the run. ``steps``: those of `profiled_steps`; fewer than two: nothing is watched."""
        self.folder = folder
        self.steps = steps if len(steps) > 1 else []
        self.device = device
        self.running: profile | None = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running is not None:
            self.running.on_trace_ready = None
            self.running.stop()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Watch what the block does, if ``step`` is one of those that are watched."""
        if step not in self.steps:
            yield
            return
        if self.running is None:
            self.running = self._start()
        with record_function(STEP):
            yield
        self.running.step()
        if step == self.steps[-1]:
            self.running.stop()
            self.running = None

    def _start(self) -> profile:
        on_gpu = self.device.type == "cuda"
        started = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
            schedule=schedule(wait=0, warmup=1, active=len(self.steps) - 1, repeat=1),
            on_trace_ready=self._write,
        )
        started.start()
        return started

    def _write(self, seen: profile) -> None:
        on_gpu = self.device.type == "cuda"
        counted = self.steps[1:]
        name = f"steps-{counted[0]}-{counted[-1]}"
        folder = self.folder / "profile" / name
        text = table(time_by_kind(seen.events(), on_gpu=on_gpu), len(counted))
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        operations = seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
        try:
            with atomic_path(folder) as temporary:
                temporary.mkdir()
                (temporary / "table.txt").write_text(
                    f"{name}, rank 0\n\n{text}\n\n{operations}\n", encoding="utf8"
                )
                seen.export_chrome_trace(str(temporary / "trace.json.gz"))
        except OSError as error:  # the run goes on: no loss depends on it
            log.warning("profile: %s cannot be written (%s)", folder, first_line(error))
        log.info("where the time goes, %s:\n%s", folder, text)


def time_by_kind(events: Sequence[Any], *, on_gpu: bool) -> dict[str, float]:
    """Seconds within the steps by the rows of `ROWS`, which sum to those of the steps.

    ``events``: PyTorch's. At each moment one row counts. On a GPU it is what a kernel does, where one runs: computing
    before communication. On a CPU it is what the thread of the loop does, or else what the processes exchange.
    """
    loop = [event for event in events if event.name == STEP and event.device_type == DeviceType.CPU]
    steps = [_interval(event) for event in loop]
    intervals: dict[str, list[_Interval]] = {row: [] for row in ROWS}
    for event in events:
        if event.name == DATA and event.device_type == DeviceType.CPU:
            intervals[WAITING].append(_interval(event))
        elif event.is_user_annotation or (event.device_type == DeviceType.CUDA) != on_gpu:
            continue
        else:
            kind = _kind(event.name)
            if on_gpu or kind == COMMUNICATION or event.thread == loop[0].thread:
                intervals[kind].append(_interval(event))
    computing = [ATTENTION, MATRIX_PRODUCTS, OTHER]
    order = [*computing, COMMUNICATION, WAITING] if on_gpu else [WAITING, *computing, COMMUNICATION]
    seconds = dict.fromkeys(ROWS, 0.0)
    counted: list[_Interval] = []
    for kind in order:
        before = covered(counted, steps)
        counted += intervals[kind]
        seconds[kind] = covered(counted, steps) - before
    seconds[GAPS] = covered(steps, steps) - covered(counted, steps)
    return seconds


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), OTHER)


def _interval(event: Any) -> _Interval:
    """Seconds, from and to."""
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def covered(intervals: Sequence[_Interval], windows: Sequence[_Interval]) -> float:
    """Seconds within the windows, which do not overlap, that at least one of the intervals covers."""
    total = 0.0
    disjoint = _disjoint(intervals)
    for first, last in windows:
        # the first that ends within the window, or later
        index = bisect_right(disjoint, first, key=itemgetter(1))
        while index < len(disjoint) and disjoint[index][0] < last:
            start, stop = disjoint[index]
            total += min(stop, last) - max(start, first)
            index += 1
    return total


def _disjoint(intervals: Sequence[_Interval]) -> list[_Interval]:
    """What the intervals cover, in order, as ones that neither overlap nor touch."""
    disjoint: list[_Interval] = []
    for start, stop in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(stop, disjoint[-1][1]))
        else:
            disjoint.append((start, stop))
    return disjoint


def table(seconds: dict[str, float], num_steps: int) -> str:
    """Share and milliseconds of a step, a line for each of `ROWS`."""
    total = sum(seconds.values())
    lines = [
        f"{row:<17} {100 * seconds[row] / total:5.1f} %  {1e3 * seconds[row] / num_steps:10.2f} ms   {about}"
        for row, about in ROWS.items()
    ]
    return "\n".join([*lines, f"{'a step':<17}          {1e3 * total / num_steps:10.2f} ms"])
