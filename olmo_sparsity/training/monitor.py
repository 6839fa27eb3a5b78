"""What a run shows and writes while it trains: progress bar, `metrics.jsonl`, Weights & Biases, TensorBoard."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from olmo_sparsity.config.schema import Config
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.training.metrics import MetricsFile
from olmo_sparsity.training.trackers import Tracker, open_trackers
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.signals import StoppedBySignal

_CPU = torch.device("cpu")


class Monitor:
    """Shows and writes the metrics of the main process; silent in the others. Use it as a context manager.

    Rows of `metrics.jsonl`: step, tokens (seen so far), the values given, tokens_per_second (all processes together,
    over the last `speed_monitor.window_size` steps), mfu (fraction; absent where the device's peak is not known),
    peak_memory_gb (of the main process since it started, 10^9 bytes: tensors on its GPU, or all of it on a CPU).
    """

    def __init__(
        self,
        config: Config,
        *,
        first_step: int,
        last_step: int,
        enabled: bool = True,
        device: torch.device = _CPU,
        processes: int = 1,
    ):
        """``enabled``: in the main process."""
        self.config, self.enabled, self.device = config, enabled, device
        self.tokens_per_step, self.first_step, self.last_step = config.tokens_per_step, first_step, last_step
        peak = peak_flops(config, device) if enabled else None
        self.utilisation_per_rate = flops_per_token(config) / (peak * processes) if peak else None
        self.paused_seconds = 0.0
        self.note = ""
        self.metrics: MetricsFile | None = None
        self.trackers: list[Tracker] = []

    def __enter__(self) -> Monitor:
        if self.enabled:  # trackers first: where one fails, metrics.jsonl is still as it was
            self.trackers = open_trackers(self.config, self.first_step)
            try:
                self.metrics = MetricsFile(self.config.save_folder, self.first_step)
            except BaseException:
                self._close_trackers(failed=True)
                raise
        total, done = self.last_step * self.tokens_per_step, self.first_step * self.tokens_per_step
        self.bar = progress("training", total, "tokens", done=done, enabled=self.enabled)
        self.advance = self.bar.__enter__()
        self.step_times = deque([self._training_time()], maxlen=self.config.speed_monitor.window_size + 1)
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)
        if self.metrics is not None:
            self.metrics.close()
        self._close_trackers(failed=error[0] is not None and not issubclass(error[0], StoppedBySignal))

    def _close_trackers(self, failed: bool) -> None:
        for tracker in self.trackers:
            tracker.close(failed)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show one optimizer step's values (`loss_nats` among them) and, at their intervals, write them."""
        self.step_times.append(self._training_time())
        if not self.enabled:
            return
        writes = self._is_due(step, self.config.console_log_interval)
        due = [tracker for tracker in self.trackers if self._is_due(step, tracker.interval)]
        if writes or due or not self.note:
            values = {**values, **self._speed_and_memory()}
            self._write(step, values, to_file=writes, trackers=due)
            self.note = _note(values)
        self.advance(self.tokens_per_step, note=f"loss {values['loss_nats']:.3f}{self.note}")

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Write the held-out measures (`Engine.evaluate`) after ``step``, whatever the interval."""
        if self.enabled:
            self._write(step, values, to_file=True, trackers=self.trackers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what the block does, such as an evaluation or a checkpoint, out of tokens/s and MFU."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.paused_seconds += time.monotonic() - start

    def _training_time(self) -> float:
        return time.monotonic() - self.paused_seconds

    def _is_due(self, step: int, interval: int) -> bool:
        return step % interval == 0 or step == self.last_step

    def _write(self, step: int, values: dict[str, Any], *, to_file: bool, trackers: list[Tracker]) -> None:
        row = {"step": step, "tokens": step * self.tokens_per_step, **values}
        if to_file:
            assert self.metrics is not None, "log inside the with block"
            self.metrics.write(row)
        for tracker in trackers:
            tracker.write(step, row)

    def _speed_and_memory(self) -> dict[str, float]:
        seconds = self.step_times[-1] - self.step_times[0]
        rate = (len(self.step_times) - 1) * self.tokens_per_step / max(seconds, 1e-9)
        values = {"tokens_per_second": rate}
        if self.utilisation_per_rate is not None:
            values["mfu"] = rate * self.utilisation_per_rate
        return {**values, "peak_memory_gb": peak_memory_gb(self.device)}


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this process has had, 10^9 bytes: of tensors on its GPU, or in all where it computes on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _note(values: dict[str, float]) -> str:
    """What stands after the loss in the progress bar, whose own columns have tokens/s and the time left."""
    mfu = f", MFU {100 * values['mfu']:.1f} %" if "mfu" in values else ""
    return f"{mfu}, {values['peak_memory_gb']:.1f} GB"
