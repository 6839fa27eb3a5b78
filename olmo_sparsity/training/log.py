"""What a run shows and writes while it trains: a progress bar, `metrics.jsonl`, Weights & Biases."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from olmo_sparsity.config.schema import WandbConfig
from olmo_sparsity.util.background import WANDB_THREAD
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.extras import missing_module
from olmo_sparsity.util.files import set_aside, write_text
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.signals import StoppedBySignal

log = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
RUN_ID_NAME = "wandb_run_id.txt"
_CPU = torch.device("cpu")


class Monitor:
    """Shows and writes the metrics of rank 0; silent in the others. Use it as a context manager.

    Rows of `metrics.jsonl`: step, tokens (seen so far), the values given, tokens_per_second (all processes together,
    over the last `speed_monitor.window_size` steps), mfu (fraction; absent where the device's peak is not known),
    peak_memory_gb (of rank 0's process since it started, 10^9 bytes: tensors on its GPU, or all of it on a CPU). A step
    of `data.skip_steps` has step, tokens and ``"skipped": true``.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        first_step: int,
        last_step: int,
        tokens_per_step: int,
        speed_steps: int,
        mfu_per_rate: float | None = None,
        device: torch.device = _CPU,
        enabled: bool = True,
    ):
        """``trackers`` are open, and closed with the monitor. ``speed_steps``: over how many the speed is a mean.

        ``mfu_per_rate``: MFU at one token per second; None: not known. ``enabled``: in rank 0.
        """
        self.trackers = trackers
        self.first_step = first_step
        self.last_step = last_step
        self.tokens_per_step = tokens_per_step
        self.speed_steps = speed_steps
        self.mfu_per_rate = mfu_per_rate
        self.device = device
        self.enabled = enabled
        self.paused_seconds = 0.0
        self.note = ""

    def __enter__(self) -> Monitor:
        total = self.last_step * self.tokens_per_step
        done = self.first_step * self.tokens_per_step
        with ExitStack() as stack:
            stack.push(self._close_trackers)
            bar = progress("training", total, "tokens", done=done, enabled=self.enabled)
            self.advance = stack.enter_context(bar)
            self.opened = stack.pop_all()
        self.step_times = deque([self._training_time()], maxlen=self.speed_steps + 1)
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def _close_trackers(self, kind: type[BaseException] | None, *_: Any) -> None:
        for tracker in self.trackers:
            tracker.close(failed=kind is not None and not issubclass(kind, StoppedBySignal))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show one optimizer step's values (`loss_nats` among them) and, at their intervals, write them."""
        self.step_times.append(self._training_time())
        if not self.enabled:
            return
        due = self._due(step)
        if due or not self.note:
            values = {**values, **self._speed_and_memory()}
            self._write(step, values, due)
            mfu = f", MFU {100 * values['mfu']:.1f} %" if "mfu" in values else ""
            self.note = f"{mfu}, {values['peak_memory_gb']:.1f} GB"
        self.advance(self.tokens_per_step, note=f"loss {values['loss_nats']:.3f}{self.note}")

    def log_skipped(self, step: int) -> None:
        """Write, where a row is due, that ``step`` was left out, and go on with the bar."""
        if self.enabled:
            self._write(step, {"skipped": True}, self._due(step))
            self.advance(self.tokens_per_step, note="skipped")

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Write the held-out measures (`Engine.evaluate`) after ``step``, whatever the interval."""
        self._write(step, values, self.trackers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what the block does, such as an evaluation or a checkpoint, out of tokens/s and MFU."""
        start = time.monotonic()
        yield
        self.paused_seconds += time.monotonic() - start

    def _training_time(self) -> float:
        return time.monotonic() - self.paused_seconds

    def _due(self, step: int) -> list[Tracker]:
        is_last = step == self.last_step
        return [tracker for tracker in self.trackers if is_last or step % tracker.interval == 0]

    def _write(self, step: int, values: dict[str, Any], trackers: Sequence[Tracker]) -> None:
        for tracker in trackers:
            tracker.write({"step": step, "tokens": step * self.tokens_per_step, **values})

    def _speed_and_memory(self) -> dict[str, float]:
        seconds = self.step_times[-1] - self.step_times[0]
        rate = (len(self.step_times) - 1) * self.tokens_per_step / max(seconds, 1e-9)
        values = {"tokens_per_second": rate}
        if self.mfu_per_rate is not None:
            values["mfu"] = rate * self.mfu_per_rate
        return {**values, "peak_memory_gb": peak_memory_gb(self.device)}


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this process has had, 10^9 bytes: of tensors on its GPU, or in all where it computes on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


# --- where rows are written: those of training every `interval` steps, held-out measures always ---


class MetricsFile:
    """Appends to a run's `metrics.jsonl`; rows beyond ``done_steps``, left by a run that was cut off, are dropped."""

    def __init__(self, folder: Path, done_steps: int, *, interval: int):
        self.interval = interval
        path = folder / METRICS_NAME
        repair_metrics(path, done_steps)
        kept = [row for row in read_metrics(path) if row["step"] <= done_steps] if done_steps else []
        _write_rows(path, kept)
        self.file = open(path, "a", encoding="utf8")  # noqa: SIM115 (open as long as the run)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self.file.close()


class WeightsAndBiases:
    """OLMo's section `wandb`. ``WANDB_MODE=offline`` works, and `wandb sync` uploads later.

    It never stops the run, nor delays it by more than `START_SECONDS` and `END_SECONDS`: W&B is called in a thread of
    its own, in which rows wait for it. Where it fails, at the start or later, a warning says so and the rows go to an
    offline run of the same id; where that fails too, to `metrics.jsonl` alone.
    """

    START_SECONDS = 5.0
    """How long the training waits for W&B at its start; after that it goes on while W&B starts."""
    END_SECONDS = 10.0
    """How long the end of the run waits for the last rows to be taken."""

    def __init__(self, options: WandbConfig, folder: Path, done_steps: int, *, run_config: dict[str, Any]):
        """``run_config``: the settings that W&B shows with the run."""
        self.options = options
        self.folder = folder
        self.run_config = run_config
        self.interval = options.log_interval
        path = folder / RUN_ID_NAME
        if done_steps == 0 or not path.is_file():
            write_text(path, uuid.uuid4().hex[:12] + "\n")
        self.run_id = path.read_text(encoding="utf8").strip()
        self.rows: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None: there are no more
        self.exit_code = 0
        self.thread: Thread | None = None
        # These reports to its makers wait half a minute for a silent server when the process ends.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb  # noqa: F401 (here, for the data loader may fork while the thread runs)
        except ModuleNotFoundError as error:
            module = error.name or "wandb"
            log.warning("%s; the run goes on without it", missing_module(module, "wandb"))
        except Exception as error:  # at odds with another package
            log.warning("Weights & Biases: %s, on import; the run goes on without it", _described(error))
        else:
            self._start((None, "offline"))

    def write(self, row: dict[str, Any]) -> None:
        """Hand over one row."""
        if self.thread is not None and self.thread.is_alive():
            self.rows.put(row)

    def close(self, failed: bool) -> None:
        """Upload the rest and mark the run as finished or failed."""
        self.exit_code = int(failed)
        self.rows.put(None)
        if self.thread is not None and self.thread.is_alive() and not self.is_ready.is_set():
            self._warn("no answer yet")
            self._start(("offline",))  # in place of the thread that waits for an answer
        if self.thread is not None:
            self.thread.join(self.END_SECONDS)
            if self.thread.is_alive():
                self._warn(f"not finished after {self.END_SECONDS:.0f} s")

    def _start(self, modes: tuple[str | None, ...]) -> None:
        self.is_ready = Event()
        self.thread = Thread(target=self._serve, args=(modes, self.is_ready), name=WANDB_THREAD, daemon=True)
        self.thread.start()
        self.is_ready.wait(self.START_SECONDS)

    def _serve(self, modes: tuple[str | None, ...], is_ready: Event) -> None:
        """In a thread: open a run, log the rows as they come, in the next mode where that fails; finish the run."""
        row: dict[str, Any] | None = None
        for mode in modes:
            try:
                run = self._open(mode)
                if is_ready is not self.is_ready:
                    return  # another thread has taken over
                is_ready.set()
                while row := row or self.rows.get():
                    self._log(run, row)
                    row = None
                break
            except (Exception, SystemExit) as error:
                if is_ready is not self.is_ready:
                    return
                self._warn(_described(error), is_last=mode == modes[-1])
        else:
            is_ready.set()
            return
        try:
            run.finish(exit_code=self.exit_code)
        except (Exception, SystemExit) as error:
            self._warn(_described(error))

    def _log(self, run: Any, row: dict[str, Any]) -> None:
        """Log one row, but for steps that the run has from before an interruption: it takes no step twice."""
        if row["step"] >= run.step:
            values = {name: value for name, value in row.items() if isinstance(value, int | float)}
            run.log(values, step=values.pop("step"))

    def _open(self, mode: str | None) -> Any:
        """A run of W&B; ``mode`` None is what the environment says."""
        import wandb

        if mode is None:
            more = {"resume": "allow"}
        else:
            more = {"mode": mode}
            with suppress(Exception):  # its service may have died; it would hold the id of the run
                wandb.teardown()
        return wandb.init(
            dir=str(self.folder),
            project=self.options.project,
            entity=self.options.entity,
            group=self.options.group,
            name=self.options.name,
            tags=self.options.tags,
            config=self.run_config,
            id=self.run_id,
            **more,
        )

    def _warn(self, reason: str, *, is_last: bool = False) -> None:
        remedy = f"upload the rest later: wandb sync {self.folder}/wandb/*run-*"
        if is_last:
            remedy = f"the metrics are in {self.folder / METRICS_NAME}"
        log.warning("Weights & Biases: %s; the run goes on without it; %s", reason, remedy)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


Tracker = MetricsFile | WeightsAndBiases


# --- metrics.jsonl, read again ---


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, in order; none where there is no file.

    A last line that was cut off by a kill is left out. Raises `UserError` that names any other damaged line.
    """
    rows, damaged, _ = _read_rows(Path(path))
    if damaged:
        raise UserError(f"{path}: line {damaged[0]} is damaged; remove that line to go on without its step")
    return rows


def repair_metrics(path: Path, done_steps: int, *, is_finished: bool = False) -> None:
    """Make a damaged `metrics.jsonl` one that can be read and appended to, and warn of what is lost.

    No loss depends on it: a run of ``done_steps`` steps goes on without the missing rows. A last line that was cut off
    is removed; of other damage the file is kept under another name. ``is_finished``: the last step should have a row.
    """
    if not done_steps:
        return
    if not path.exists():
        log.warning("%s is missing, though %s steps are done; a new one is begun", path, f"{done_steps:,}")
        return
    rows, damaged, is_cut = _read_rows(path)
    if damaged:
        kept_as = set_aside(path).name
        log.warning(
            "%s: line %d is damaged; kept as %s, and goes on without such lines", path, damaged[0], kept_as
        )
    elif is_cut:
        log.warning("%s: the last line was cut off, and is removed", path)
    if damaged or is_cut:
        _write_rows(path, rows)
    last_step = rows[-1]["step"] if rows else 0
    if (
        is_finished and last_step < done_steps and path.stat().st_size
    ):  # no warning for a file that was emptied
        log.warning("%s ends at step %s of %s", path, f"{last_step:,}", f"{done_steps:,}")


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int], bool]:
    """The rows that can be read, the numbers (from 1) of lines that cannot, and whether the last one was cut off."""
    *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    rows = []
    damaged = []
    for line_number, line in enumerate(lines, start=1):
        if (row := _row_of(line)) is None:
            damaged.append(line_number)
        else:
            rows.append(row)
    if (row := _row_of(last)) is not None:  # whole, but for its end of line
        rows.append(row)
    return rows, damaged, bool(last) and row is None


def _row_of(line: bytes) -> dict[str, Any] | None:
    """A row, its step first; None where the line is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {"step": row.pop("step"), **row}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
