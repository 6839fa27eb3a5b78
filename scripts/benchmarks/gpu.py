"""A CUDA machine, part by part: commands of this project, each part with a time limit and a file of what it gave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from benchmarks.timing import Json, about_this_run
from benchmarks.train import with_random_tokens
from olmo_sparsity.checkpoint import config_of, resolve_checkpoint
from olmo_sparsity.cli import command_line
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.build import open_training_data
from olmo_sparsity.data.tokens import MANIFEST_NAME, CorpusManifest
from olmo_sparsity.data.training_batches import Batch
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.log import METRICS_NAME, read_metrics
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import last_line, read_json, write_json
from olmo_sparsity.util.provenance import pick_device

BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 1e-1)}
"""Largest differences of a loss in nats, and of a gradient as a share of its norm, that are taken for rounding [ours],
set before any run on a GPU: bf16 keeps 8 bits."""
RESUMED_BOUND_NATS, FIRST_BOUND_NATS = 1e-3, 2e-2  # of all steps; of the first four of other ways
ONE_OF_SEVERAL = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=23456"
OF_TINY = {  # variables of the commands that are empty but with --tiny
    "TINY": """--model.d_model=32 --model.n_heads=2 --model.n_layers=2 --model.max_sequence_length=32
        --positions.target_length=64 --precision=fp32 --compile.backend=eager --global_train_batch_size=4
        --device_train_microbatch_size=2 --evaluation.windows=8 --data.num_workers=0 --data.pin_memory=false""",
    "TINY_SIZES": "--n-long 24 --n-short 4 --targets-per-block 4",
    "TINY_DOCS": "--packages packaging rich --vocab-size 300 --group-field none",
}


# --- what is read off what commands made ---


def read_last_line(part: str, out: Path, printed: str) -> Json:
    """What a command said last: of its work, or, as `benchmark.py --json` does, all in one object."""
    last = printed.splitlines()[-1]
    row: Json = json.loads(last) if last.startswith("{") else {"found": last}
    rates = (f"{name} {way['rate']:,.3g}/s" for name, way in row.get("results", {}).items())
    return {"found": "; ".join(rates), **row}


def read_run(part: str, plain: str, bound_nats: float, steps: int | None, out: Path, printed: str) -> Json:
    """Tokens/s, MFU, memory, losses and norms of a run, and how far its losses are from those of the run ``plain``.

    Those of its first ``steps`` are compared, where there are any of another run; None: of all, which must be there.
    """
    rows, others = (read_metrics(out / "work" / run / METRICS_NAME) for run in (part, plain))
    row: Json = {key: rows[-1].get(key) for key in ("tokens_per_second", "mfu", "peak_memory_gb")}
    row |= {key: [step[key] for step in rows] for key in ("loss_nats", "grad_norm")}
    config = config_of(resolve_checkpoint(out / "work" / part))
    row |= {"failed": "not compiled:" in printed, "micro_batch": config.device_train_microbatch_size}
    finding = f"{row['tokens_per_second']:,.0f} tokens/s" + (f", MFU {row['mfu']:.1%}" if row["mfu"] else "")
    losses = row["loss_nats"][:steps]
    plain_losses = [step["loss_nats"] for step in others[:steps]]
    if steps is None or (plain_losses and part != plain):
        # Of a NaN this maximum is NaN, which no bound holds; Python's may pass over it.
        apart = np.inf
        if len(losses) == len(plain_losses):
            apart = float(np.abs(np.subtract(losses, plain_losses)).max())
        row |= {"largest_loss_difference_nats": apart, "failed": row["failed"] or not apart <= bound_nats}
        finding = f"{finding}, losses within {apart:.1e} nats of {plain}"
    return {"found": finding, **row}


# --- the parts ---


class Part(NamedTuple):
    """One part: its commands, for bash, with ``$PART``, its name, and `variables`, and how long they may take."""

    commands: str
    minutes: float = 3
    read: Callable[..., Json] = read_last_line
    """``found`` in one line, ``failed`` where that is no success, and numbers; given ``part``, ``out``, ``printed``."""


BENCHMARK = f"{sys.executable} {Path(__file__).resolve().parents[1] / 'benchmark.py'}"
SHORT = """$RUN train configs/demo.yaml $VOCABULARY --precision=fp32 --max_duration=40 --scheduler.t_warmup=5 \
            --console_log_interval=1 $TINY"""
COMPILE = {"eager": "--compile=null", "compiled": "--compile.from_steps=0"}
OF_ANALYSIS = "TORCH_CUDNN_SDPA_DEPRIORITIZED=1"  # cuDNN's attention makes a plan for each of its many shapes
ZERO2 = "--deepspeed.config=configs/deepspeed/zero2.json"
LAYERS = "--activation_checkpointing=whole_layer"
KINDS = {"train": ("", ""), "ddp": (ONE_OF_SEVERAL, ""), "zero2": (ONE_OF_SEVERAL, ZERO2)}
CHANGES = {"": "", "6-heads-": "--model.n_heads=6", "fp32-": "--precision=fp32", "checkpointed-": LAYERS}


def speed(kind: str, change: str, size: str, mode: str) -> Part:
    """20 steps of configs/pose-c4-SIZE.yaml in bf16, but for a change; compared with the plain loop, not compiled."""
    environment, zero2 = KINDS[kind]
    commands = f"""
        for size in {"16 8 4" if size == "1b" else "64 32 16"}; do
            {environment} $RUN train configs/pose-c4-{size}.yaml $TOKENS --save_folder=$WORK/$PART --save_overwrite \
                --max_duration=20 --scheduler.t_warmup=5 --speed_monitor.window_size=10 --console_log_interval=1 \
                --global_train_batch_size=64 --activation_checkpointing=null {CHANGES[change]} \
                --evaluation.interval=null --device_train_microbatch_size=$size $TINY {zero2} {COMPILE[mode]} && exit
        done
        exit 1"""
    read = partial(read_run, plain=f"train-{change}{size}-eager", bound_nats=FIRST_BOUND_NATS, steps=4)
    return Part(commands, 4 if size == "1b" else 3, read)


PARTS: dict[str, Part] = {
    "data": Part(
        "[ -f $CORPUS/manifest.json ] || $RUN prepare_data docs $TINY_DOCS --out $CORPUS; du $CORPUS"
    ),
    "agreement": Part(f"{BENCHMARK} gpu --agreement --out $OUT --json"),
    "checkpoint": Part(f"""
        export CUDA_VISIBLE_DEVICES=
        {SHORT} --save_folder=$WORK/half --stop_at=20 --save_overwrite
        rm -rf $WORK/cpu; cp -r $WORK/half $WORK/cpu
        {SHORT} --save_folder=$WORK/cpu --resume"""),
    "resume": Part(
        f"rm -rf $WORK/$PART; cp -r $WORK/half $WORK/$PART; {SHORT} --save_folder=$WORK/$PART --resume",
        read=partial(read_run, plain="cpu", bound_nats=RESUMED_BOUND_NATS, steps=None),
    ),
    "influence": Part(f"""
        $RUN measure $WORK/cpu --corpus $CORPUS --out $WORK/influence-cpu --device cpu --tau 0 --k 1,2,4 \
            --selectors leave-one-out,leave-one-in,gradient,attention --targets 64 $TINY_SIZES
        {OF_ANALYSIS} $RUN verify $WORK/influence-cpu --model $WORK/cpu --corpus $CORPUS --targets 64"""),
    **{
        f"{kind}-{change}{size}-{mode}": speed(kind, change, size, mode)
        for kind, change, size, mode in product(KINDS, CHANGES, ("60m", "150m", "1b"), COMPILE)
    },
    "targets": Part(f"""
        {OF_ANALYSIS} {BENCHMARK} measure $WORK/train-150m-eager --text $CORPUS --blocks 8 \
            --tokenizer $CORPUS/tokenizer.json --json $TINY_SIZES"""),
}
ASKED_FOR = ("ddp", "zero2", "train-fp32", "train-checkpointed")  # parts that begin so run with --only alone


def variables(out: Path, data: str | None, tiny: bool) -> dict[str, str]:
    """What stands in the commands, as far as it is known by now."""
    corpus = data or str(out / "work" / "data")
    known = {"RUN": " ".join(command_line("")), "OUT": str(out), "WORK": str(out / "work")}
    known |= {"CORPUS": corpus, **(OF_TINY if tiny else dict.fromkeys(OF_TINY, ""))}
    if Path(corpus, MANIFEST_NAME).is_file():
        manifest = CorpusManifest.load(corpus)
        files, end = manifest.splits["train"], manifest.eos_token_id
        paths = ",".join(str(Path(corpus, file.name)) for file in files)
        known["TOKENS"] = f"--corpus.path=null --data.paths=[{paths}] --data.memmap_dtype={manifest.dtype}"
        known["VOCABULARY"] = (
            f"--corpus.path={corpus} --model.vocab_size={manifest.vocab_size} --model.eos_token_id={end}"
            f" --model.embedding_size={-(-manifest.vocab_size // 128) * 128} --model.pad_token_id={end}"
        )
    return known


def run(out: Path, minutes: float, only: tuple[str, ...], agreement: bool, **of: Any) -> Json:
    """Measure the parts that are missing or failed, of ``data``, maybe ``tiny``. Raises `UserError` without a GPU."""
    if of["tiny"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if agreement:
        return measure_agreement()
    about: Json = {"of": of, **about_this_run()}
    if about["machine"]["gpu"] is None and not of["tiny"]:
        raise UserError(
            f"torch {torch.__version__} finds no CUDA device; run it where it does, or add --tiny"
        )
    deadline, results = time.monotonic() + 60 * minutes, {}
    names = [name for name in PARTS if (name.startswith(only) if only else not name.startswith(ASKED_FOR))]
    if not names:
        raise UserError(f"--only has none of {', '.join(PARTS)}")
    for name in names:
        path = out / f"{name}.json"
        row: Json = read_json(path, "remove it") if path.is_file() else {"failed": True}
        if row["failed"]:
            known = {"PART": name, **variables(out, **of)}
            row = {"part": name, **about, **measure_part(out, name, deadline - time.monotonic(), known)}
            write_json(path, row)
        elif row["of"] != about["of"]:
            raise UserError(f"{path} was measured with other --tiny or --data; give another --out")
        print(f"{name}: {row['found']}", file=sys.stderr, flush=True)
        shown = ("failed", "seconds", "tokens_per_second", "mfu", "peak_memory_gb")
        results[name] = {key: row[key] for key in shown if key in row}
    return {"benchmark": "gpu", **about, "results": results}


def measure_part(out: Path, name: str, seconds_left: float, known: dict[str, str]) -> Json:
    """Run the commands of one part, which are killed at its limit; what they gave, or why they failed."""
    part, log, started = PARTS[name], out / "logs" / f"{name}.log", time.monotonic()
    limit = max(min(60 * part.minutes, seconds_left), 1.0)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["bash", "-euc", part.commands]
    with open(log, "w", encoding="utf8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | known, process_group=0
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:  # also on Ctrl-C: nothing of the part goes on computing
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, code = time.monotonic() - started, process.returncode
    if code == 0:
        printed = log.read_text(encoding="utf8")
        return {"seconds": seconds, "failed": False, **part.read(name, out=out, printed=printed)}
    why = f"exit code {code}: {(last_line(log) or 'it printed nothing')[:200]}"
    if seconds >= limit:
        why = f"not done in {limit:,.0f} s, its limit or what was left"
    return {"seconds": seconds, "failed": True, "found": f"failed: {why}; see {log}"}


# --- agreement with the CPU ---

_TEXT, _TASK = "configs/demo.yaml $TINY", "configs/synthetic/scratchpad_parity-small.yaml"
CASES = {
    "rope": _TEXT,
    "alibi": f"{_TEXT} --model.rope=false --model.alibi=true",
    "nope": f"{_TEXT} --model.rope=false --model.nope=true",
    "learned": f"{_TEXT} --model.rope=false --positions.scheme=contiguous",
    **{
        f"{family}, {scheme}": f"{_TASK} --model.family={family} --positions.scheme={scheme}"
        for family, scheme in product(("gpt_neox", "olmo"), ("predicted", "coupled", "pose"))
    },
}
"""Models and masks: a config and its changes, with variables of `OF_TINY`."""


def measure_agreement() -> Json:
    """Loss and gradients of one batch on the CPU and on the device, of each of `CASES`, in fp32 and bf16."""
    rows, devices = [], (torch.device("cpu"), pick_device(None))
    for case, command in CASES.items():
        path, *changes = os.path.expandvars(command).split()
        config = load_config(path, changes, warn=False)
        with tempfile.TemporaryDirectory() as folder:
            with_data = config if config.task.name else with_random_tokens(config, Path(folder))
            batch = next(open_training_data(with_data).batches(0)).split(4)[0]
        for precision, bounds in BOUNDS.items():
            (expected, *expected_gradients), (loss, *gradients) = (
                gradients_on(device, precision, config, batch) for device in devices
            )
            norms = [
                (a - b).norm() / b.norm().clamp_min(1e-12)
                for a, b in zip(gradients, expected_gradients, strict=True)
            ]
            apart = (loss - expected).abs().item(), torch.stack(norms).max().item()
            rows.append((case, precision, loss.item(), *apart, all(np.less_equal(apart, bounds))))
    names = ["loss_difference_nats", "gradient_difference"]
    frame = pd.DataFrame(rows, columns=["case", "precision", "loss_nats", *names, "holds"])
    beyond = frame["case"][~frame["holds"]].tolist()
    largest = f"{len(frame)} cases; {frame.groupby('precision')[names].max().to_dict()}"
    finding = "; beyond rounding: ".join([largest, *beyond])
    return {"found": finding, "failed": bool(beyond), "rows": frame.to_dict("list")}


def gradients_on(device: torch.device, precision: str, config: Config, batch: Batch) -> list[torch.Tensor]:
    """The mean loss in nats, and then the gradients of all parameters, on the CPU, as the training loop has them."""
    model, batch = build_model(config).to(device).train(), batch.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch.model_inputs, **batch.targets)["loss_nats"] / batch.loss_mask.sum()
    loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [tensor.detach().float().cpu() for tensor in (loss, *gradients)]
