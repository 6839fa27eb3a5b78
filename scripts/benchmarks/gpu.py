"""A CUDA machine, part by part: each has a process, a time limit and a file of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import gpu_agreement, gpu_speed, gpu_study
from benchmarks.settings import GpuSettings
from benchmarks.timing import Json, about_this_run, chosen_device
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import last_line
from olmo_sparsity.util.result_files import ResultFile

PART = ResultFile(
    "PART.json",
    "olmo-sparsity part of a GPU benchmark",
    1,
    "part of a GPU benchmark",
    "scripts/benchmark.py gpu",
    shape={"part": str, "seconds": float, "found": str, "failed": bool},
)
LONGEST_REASON = 200
FEWEST_SECONDS = 10.0
"""With less time left a part is not started."""
_SCRIPT = Path(__file__).resolve().parents[1] / "benchmark.py"
_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
# cuDNN's attention, where PyTorch prefers it, makes a plan per shape, and the shapes of the analysis vary.
_ANALYSIS = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


@dataclass(frozen=True)
class Part:
    """One part: what it measures, and how long it may take."""

    measure: Callable[[GpuSettings], Json]
    """Returns its result: ``found`` in one line, ``failed`` where that is no success, and its numbers."""
    minutes: float | None
    """At most; None: all that is left but for the parts behind it."""
    environment: dict[str, str] = field(default_factory=dict)


def _training(size: str, compiled: bool) -> Callable[[GpuSettings], Json]:
    return lambda settings: gpu_speed.measure_training(settings, size, compiled=compiled)


PARTS: dict[str, Part] = {
    "data": Part(gpu_study.prepare_corpus, 4, _ON_CPU),
    "agreement": Part(gpu_agreement.measure_agreement, 3),
    "checkpoint": Part(gpu_agreement.train_on_cpu, 3, _ON_CPU),
    "resume": Part(gpu_agreement.measure_resuming, 2),
    "influence": Part(gpu_agreement.measure_influence_twice, 3, _ANALYSIS),
    "train-60m-eager": Part(_training("60m", compiled=False), 2),
    "train-60m-compiled": Part(_training("60m", compiled=True), 3),
    "train-150m-eager": Part(_training("150m", compiled=False), 2),
    "train-150m-compiled": Part(_training("150m", compiled=True), 3),
    "train-1b-eager": Part(_training("1b", compiled=False), 3),
    "train-1b-compiled": Part(_training("1b", compiled=True), 4),
    "targets": Part(gpu_speed.measure_targets, 3, _ANALYSIS),
    "zero2": Part(gpu_speed.measure_zero, 2),
    "model": Part(gpu_study.train_model, None),
    "figure2": Part(gpu_study.draw_figure2, 6, _ANALYSIS),
}


def run(settings: GpuSettings) -> Json:
    """All parts that are missing, or the one that is asked for. Raises `UserError` without a GPU and ``tiny``."""
    if settings.part not in (None, *PARTS):
        raise UserError(f"--part has no {settings.part!r}; choose among {', '.join(PARTS)}")
    os.environ |= _ON_CPU if settings.tiny else {}
    os.environ |= (
        PARTS[settings.part].environment if settings.part else {}
    )  # of one that is asked for by hand
    made = about_this_run("cpu" if settings.tiny else chosen_device())
    if settings.part is not None:
        return {"benchmark": "gpu", **made, "parts": {settings.part: measure_here(settings, made)}}
    if made["machine"]["gpu"] is None and not settings.tiny:
        raise UserError(
            f"torch {made['machine']['torch']} finds no CUDA device here; run this where there is one, with a CUDA "
            "build of torch (docs/gpu.md), or add --tiny to try the same parts on the CPU"
        )
    started, parts = time.monotonic(), {}
    for name in PARTS:
        earlier = _load(settings, name)
        if earlier is not None and earlier.get("of", _of(settings)) != _of(settings):
            raise UserError(
                f"{_file(settings, name)} was measured with other --tiny or --data; give another --out"
            )
        if earlier is not None and not earlier["failed"]:
            _say(f"{name}: {_file(settings, name)} is there and whole, skipped")
            parts[name] = earlier
            continue
        left = 60 * settings.minutes - (time.monotonic() - started)
        parts[name] = run_part(settings, name, seconds_for(name, left), made)
        _say(f"{name}: {parts[name]['found']}")
    return {"benchmark": "gpu", **made, "parts": parts}


def seconds_for(name: str, left: float) -> float:
    """How long a part may take of ``left`` seconds."""
    names = list(PARTS)
    minutes = PARTS[name].minutes
    if minutes is not None:
        return min(60 * minutes, left)
    behind = [PARTS[each].minutes or 0 for each in names[names.index(name) + 1 :]]
    return max(left / 2, left - 60 * sum(behind))


def measure_here(settings: GpuSettings, made: Json) -> Json:
    """One part, measured in this process and written to its file."""
    name, started = settings.part, time.monotonic()
    assert name is not None
    result = PARTS[name].measure(settings)
    about = {
        "part": name,
        "of": _of(settings),
        **made,
        "seconds": time.monotonic() - started,
        "failed": False,
    }
    row = {**about, **result}
    PART.save(_file(settings, name), row)
    return row


def run_part(settings: GpuSettings, name: str, seconds: float, made: Json) -> Json:
    """One part in a process of its own, which is killed after ``seconds``; what it wrote, or why it failed."""
    file, log = _file(settings, name), settings.out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    started = time.monotonic()
    reason = "no time was left; run the same command again" if seconds < FEWEST_SECONDS else None
    if reason is None:
        reason = _wait_for(part_command(settings, name, seconds), log, seconds, PARTS[name].environment)
    row = _load(settings, name)
    if row is None:
        seconds = time.monotonic() - started
        row = {"part": name, **made, "seconds": seconds, "failed": True, "found": f"failed: {reason}"}
        PART.save(file, row)
    return row


def part_command(settings: GpuSettings, name: str, seconds: float) -> list[str]:
    """The command that measures one part."""
    options = ["--part", name, "--out", str(settings.out), "--minutes", str(seconds / 60)]
    options += ["--data", settings.data] if settings.data else []
    return [sys.executable, str(_SCRIPT), "gpu", *options, *(["--tiny"] if settings.tiny else [])]


def _wait_for(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run it with its output in ``log``; returns why it wrote no file, in case it did not."""
    with open(log, "w", encoding="utf8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:,.0f} s, its limit; see {log}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = last_line(log) or "it printed nothing"
    return f"exit code {code}: {last.removeprefix('error: ')[:LONGEST_REASON]}; see {log}"


def _of(settings: GpuSettings) -> Json:
    """What a part depends on."""
    return {"tiny": settings.tiny, "data": settings.data}


def _file(settings: GpuSettings, name: str) -> Path:
    return settings.out / f"{name}.json"


def _load(settings: GpuSettings, name: str) -> Json | None:
    """What a part wrote, if it is whole."""
    try:
        return PART.load(_file(settings, name))
    except UserError:
        return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
