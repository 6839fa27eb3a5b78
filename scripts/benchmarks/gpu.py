"""A CUDA machine, part by part: commands of this project, each part with a time limit and a file of what it gave."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from benchmarks.timing import Json, about_this_run
from benchmarks.train import with_random_tokens
from olmo_sparsity.checkpoint import config_of, resolve_checkpoint
from olmo_sparsity.cli import command_line
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.batches import open_training_data
from olmo_sparsity.data.tokens import MANIFEST_NAME, CorpusManifest
from olmo_sparsity.data.windows import Batch
from olmo_sparsity.model.build import Model, build_model
from olmo_sparsity.training.log import METRICS_NAME, read_metrics
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import last_line, read_json, write_json
from olmo_sparsity.util.provenance import pick_device

BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 1e-1)}
"""Largest differences of a loss in nats, and of a gradient as a share of its norm, that are taken for rounding [ours],
set before any run on a GPU: bf16 keeps 8 bits."""
RESUMED_BOUND_NATS, PROCESSES_BOUND_NATS = 1e-3, 2e-2  # all steps; the first four as one process of several
ONE_OF_SEVERAL = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=23456"
IN_THIS_PROCESS = """--data.num_workers=0 --data.prefetch_factor=null --data.persistent_workers=false
    --data.pin_memory=false"""
TINY_MODEL = "--model.d_model=32 --model.n_heads=2 --model.n_layers=2"
TINY = f"""{TINY_MODEL} --model.max_sequence_length=32 --positions.target_length=64 --precision=fp32
    --global_train_batch_size=4 --device_train_microbatch_size=2 --evaluation.windows=8 {IN_THIS_PROCESS}"""
OF_TINY = {  # variables of the commands that are empty but with --tiny; the source is else docs
    "TINY": TINY,
    "TINY_MODEL": TINY_MODEL,
    "TINY_COMPILER": "--compile.backend=eager",
    "TINY_SIZES": "--n-long 24 --n-short 4 --targets-per-block 4",
    "TINY_COUNTS": "--blocks 1 --rounds 1",
    "SOURCE": "docs --packages packaging rich --vocab-size 300 --group-field none",
}


class Part(NamedTuple):
    """One part: how long it may take, and its commands, for bash, with variables of `variables`."""

    minutes: float
    commands: str
    read: Callable[[Path, str], Json] = lambda out, printed: {"found": printed.splitlines()[-1]}
    """``found`` in one line, ``failed`` where that is no success, and numbers; given what was printed."""


# --- agreement with the CPU ---

_TEXT, _TASK = "configs/demo.yaml $TINY", "configs/synthetic/scratchpad_parity-small.yaml $TINY_MODEL"
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
"""Every model and mask: a config and its changes, with variables of `OF_TINY`."""


def measure_agreement() -> Json:
    """Loss and gradients of one batch on the CPU and on the device, of each of `CASES`, in fp32 and bf16."""
    rows = []
    for case, command in CASES.items():
        path, *changes = os.path.expandvars(f"{command} {IN_THIS_PROCESS}").split()
        config = load_config(path, changes, warn=False)
        with tempfile.TemporaryDirectory() as folder:
            given = config if config.task.name else with_random_tokens(config, Path(folder))
            batch = next(open_training_data(given).batches(0)).split(4)[0]
        model = build_model(config)
        for precision, bounds in BOUNDS.items():
            devices = torch.device("cpu"), pick_device(None)
            (expected, cpu), (loss, ours) = (
                _loss_and_gradients(model, batch, each, precision) for each in devices
            )
            norms = [(a - b).norm() / b.norm().clamp_min(1e-12) for a, b in zip(ours, cpu, strict=True)]
            apart = abs(loss - expected), float(max(norms))
            rows.append((case, precision, loss, *apart, apart[0] <= bounds[0] and apart[1] <= bounds[1]))
    names = ["loss_difference_nats", "gradient_difference"]
    frame = pd.DataFrame(rows, columns=["case", "precision", "loss_nats", *names, "holds"])
    beyond = frame["case"][~frame["holds"]].tolist()
    found = f"{len(frame)} cases; {frame.groupby('precision')[names].max().to_dict()}"
    found = "; beyond rounding: ".join([found, *beyond])
    return {"found": found, "failed": bool(beyond), "rows": frame.to_dict("list")}


def _loss_and_gradients(
    model: Model, batch: Batch, device: torch.device, precision: str
) -> tuple[float, list[torch.Tensor]]:
    """Mean loss in nats, and the gradients of all parameters on the CPU, as the training loop computes them."""
    model, batch = deepcopy(model).to(device).train(), batch.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch.model_inputs, **batch.targets)["loss_nats"] / batch.loss_mask.sum()
    loss.backward()
    gradients = [each.grad.float().cpu() for each in model.parameters() if each.grad is not None]
    return float(loss.detach()), gradients


# --- what is read off what commands made ---


def numbers_of(out: Path, part: str) -> Json | None:
    """What a part measured; None where it did not, or failed."""
    path = out / f"{part}.json"
    row: Json | None = read_json(path, "remove it") if path.is_file() else None
    return None if row is None or row["failed"] else row


def read_run(name: str, plain: str, bound_nats: float, steps: int | None, out: Path, printed: str) -> Json:
    """Tokens/s, MFU, memory, losses and norms of a run, and how far its losses are from those of the run ``plain``.

    Those of its first ``steps`` are compared, where there are any of another run; None: of all, which must be there.
    """
    runs = [read_metrics(out / "work" / each / METRICS_NAME) for each in (name, plain)]
    rows, config = runs[0], config_of(resolve_checkpoint(out / "work" / name))
    row: Json = {key: rows[-1].get(key) for key in ("tokens_per_second", "mfu", "peak_memory_gb")}
    row |= {"failed": "not compiled:" in printed, "micro_batch": config.device_train_microbatch_size}
    row |= {key: [step[key] for step in rows] for key in ("loss_nats", "grad_norm")}
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "unknown"
    found = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {mfu}"
    ours, theirs = ([step["loss_nats"] for step in each[:steps]] for each in runs)
    if steps is None or (theirs and name != plain):
        apart = (
            math.inf
            if len(ours) != len(theirs)
            else max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        )
        row |= {"largest_loss_difference_nats": apart, "failed": row["failed"] or not apart <= bound_nats}
        found = f"{found}, losses within {apart:.1e} nats of {plain}"
    return {"found": found, **row}


def read_json_line(out: Path, printed: str) -> Json:
    """What `benchmark.py --json` printed last."""
    last: Json = json.loads(printed.splitlines()[-1])
    rates = [f"{name} {row['rate']:,.3g}/s" for name, row in last.get("results", {}).items()]
    return {"found": "; ".join(rates), **last}


# --- the parts ---

SHORT = """$RUN train configs/demo.yaml $VOCABULARY --precision=fp32 --max_duration=40 --scheduler.t_warmup=5 \
            --console_log_interval=1 $TINY"""
BENCHMARK = f"{sys.executable} {Path(__file__).resolve().parents[1] / 'benchmark.py'}"
COMPILE = {"eager": "--compile=null", "compiled": "--compile.from_steps=0 $TINY_COMPILER"}
ZERO2 = "--deepspeed.config=configs/deepspeed/zero2.json"


def speed(name: str, size: str, how: str, environment: str = "", more: str = "") -> Part:
    """20 steps of configs/pose-c4-SIZE.yaml in bf16; with ``environment`` as one process of several."""
    commands = f"""
        for size in {"16 8 4" if size == "1b" else "64 32 16"}; do
            {environment} $RUN train configs/pose-c4-{size}.yaml $TOKENS --save_folder=$WORK/{name} --save_overwrite \
                --max_duration=20 --scheduler.t_warmup=5 --speed_monitor.window_size=10 --console_log_interval=1 \
                --global_train_batch_size=64 --evaluation.interval=null --activation_checkpointing=null {more} \
                {COMPILE[how]} --device_train_microbatch_size=$size $TINY && exit
        done
        exit 1"""
    # losses of another shape are compared with none
    plain = name if "--model." in more else f"train-{size}-eager"
    bound_nats = PROCESSES_BOUND_NATS if environment else math.inf
    return Part(4 if size == "1b" else 3, commands, partial(read_run, name, plain, bound_nats, 4))


RUNS = {  # by part: size, how, and what else `speed` takes
    **{f"train-{size}-{how}": (size, how) for size, how in product(("60m", "150m", "1b"), COMPILE)},
    "train-150m-6-heads": ("150m", "compiled", "", "--model.n_heads=6"),  # heads of 128 instead of 64
    "zero2": ("150m", "eager", ONE_OF_SEVERAL, ZERO2),
    "processes-ddp-compiled": ("150m", "compiled", ONE_OF_SEVERAL),
    "processes-zero2-compiled": ("150m", "compiled", ONE_OF_SEVERAL, ZERO2),
    "processes-zero2-1b": ("1b", "compiled", ONE_OF_SEVERAL, ZERO2),
}
PARTS: dict[str, Part] = {
    "data": Part(
        4,
        "[ -f $CORPUS/manifest.json ] || $RUN prepare_data $SOURCE --out $CORPUS; du -sh $CORPUS",
    ),
    "agreement": Part(3, f"{BENCHMARK} gpu --agreement --out $OUT --json", read_json_line),
    "checkpoint": Part(
        3,
        f"""export CUDA_VISIBLE_DEVICES=
        {SHORT} --save_folder=$WORK/half --stop_at=20 --save_overwrite
        rm -rf $WORK/cpu; cp -r $WORK/half $WORK/cpu
        {SHORT} --save_folder=$WORK/cpu --resume""",
    ),
    "resume": Part(
        2,
        f"""rm -rf $WORK/resumed; cp -r $WORK/half $WORK/resumed
        {SHORT} --save_folder=$WORK/resumed --resume""",
        partial(read_run, "resumed", "cpu", RESUMED_BOUND_NATS, None),
    ),
    "influence": Part(
        3,
        """$RUN influence $WORK/cpu --corpus $CORPUS --out $WORK/influence-cpu --device cpu --tau 0 --k 1,2,4 \
            --selectors leave-one-out,leave-one-in,gradient,attention --targets 64 $TINY_SIZES
        $RUN verify $WORK/influence-cpu --model $WORK/cpu --corpus $CORPUS --targets 64""",
    ),
    **{name: speed(name, *how) for name, how in RUNS.items()},
    "targets": Part(
        3,
        f"""{BENCHMARK} influence $WORK/train-150m-eager --text $CORPUS --tokenizer $CORPUS/tokenizer.json --json \
            --blocks 8 $TINY_SIZES $TINY_COUNTS""",
        read_json_line,
    ),
}
BY_DEFAULT = tuple(name for name in PARTS if not name.startswith("processes"))


def variables(out: Path, corpus: str, tiny: bool) -> dict[str, str]:
    """What stands in the commands, as far as it is known by now."""
    run = shlex.join(command_line("train")[:-1])
    known: dict[str, object] = {"RUN": run, "OUT": out, "WORK": out / "work", "CORPUS": corpus}
    known |= {**dict.fromkeys(OF_TINY, ""), "SOURCE": "docs", **(OF_TINY if tiny else {})}
    if Path(corpus, MANIFEST_NAME).is_file():
        manifest = CorpusManifest.load(corpus)
        files, end = manifest.splits["train"], manifest.eos_token_id
        paths = ",".join(str(Path(corpus, each.name)) for each in files)
        known["TOKENS"] = f"--corpus.path=null --data.paths=[{paths}] --data.memmap_dtype={manifest.dtype}"
        known["VOCABULARY"] = (
            f"--corpus.path={corpus} --model.vocab_size={manifest.vocab_size} --model.eos_token_id={end}"
            f" --model.embedding_size={-(-manifest.vocab_size // 128) * 128} --model.pad_token_id={end}"
        )
    return {name: str(value) for name, value in known.items()}


def run(
    out: Path, data: str | None, minutes: float, tiny: bool, only: tuple[str, ...], agreement: bool
) -> Json:
    """Measure the parts that are missing. Raises `UserError` without a GPU and ``tiny``."""
    if tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # cuDNN's attention, where PyTorch prefers it, makes a plan per shape, and the shapes of the analysis vary.
    os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    if agreement:
        return measure_agreement()
    corpus = data or str(out / "work" / "data")
    about: Json = {"of": {"tiny": tiny, "data": data}, **about_this_run()}
    if about["machine"]["gpu"] is None and not tiny:
        raise UserError(
            f"torch {torch.__version__} finds no CUDA device here; run this where there is one, with a CUDA build of "
            "torch (docs/gpu.md), or add --tiny to try the same parts on the CPU"
        )
    deadline, rows = time.monotonic() + 60 * minutes, {}
    names = [name for name in PARTS if name.startswith(only or BY_DEFAULT)]
    if not names:
        raise UserError(f"--only has none of {', '.join(PARTS)}")
    for name in names:
        row = numbers_of(out, name)
        if row is not None and row["of"] != about["of"]:
            raise UserError(f"{out}/{name}.json was measured with other --tiny or --data; give another --out")
        if row is None:
            seconds = min(60 * PARTS[name].minutes, deadline - time.monotonic())
            row = {"part": name, **about, **measure_part(out, name, seconds, variables(out, corpus, tiny))}
            write_json(out / f"{name}.json", row)
        rows[name] = row
        print(f"{name}: {row['found']}", file=sys.stderr, flush=True)
    shown = ("failed", "seconds", "tokens_per_second", "mfu", "peak_memory_gb")
    results = {name: {key: row[key] for key in shown if key in row} for name, row in rows.items()}
    return {"benchmark": "gpu", **about, "results": results}


def measure_part(out: Path, name: str, seconds: float, known: dict[str, str]) -> Json:
    """Run the commands of one part, which are killed after ``seconds``; what they gave, or why they failed."""
    log, started = out / "logs" / f"{name}.log", time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    limited = ["timeout", "--signal=KILL", str(max(seconds, 1.0)), "bash", "-euc", PARTS[name].commands]
    with open(log, "w", encoding="utf8") as output:
        code = subprocess.run(
            limited, stdout=output, stderr=subprocess.STDOUT, env=os.environ | known
        ).returncode
    if code == 0:
        result = {"failed": False, **PARTS[name].read(out, log.read_text(encoding="utf8"))}
    else:
        why = f"exit code {code}: {(last_line(log) or 'it printed nothing')[:200]}"
        if code in (-9, 137):
            why = f"not done in {seconds:,.0f} s, its limit or what was left"
        result = {"failed": True, "found": f"failed: {why}; see {log}"}
    return {"seconds": time.monotonic() - started, **result}
