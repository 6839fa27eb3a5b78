"""Whether a GPU computes what the CPU does: losses and gradients, a resumed run, and influence records."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.engine import measure
from analysis.verify import compare
from benchmarks.gpu_study import TINY_MODEL, TINY_SHAPE, corpus_of, corpus_overrides
from benchmarks.settings import GpuSettings
from benchmarks.timing import Json, chosen_device
from olmo_sparsity.checkpoint import WEIGHTS, load_tensors, step_folder
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.task_batches import TaskData
from olmo_sparsity.model.build import Model, build_model
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics import read_metrics

DEMO, TASK = "configs/demo.yaml", "configs/synthetic/scratchpad_parity-small.yaml"
_ENCODINGS = {
    "rope": (),
    "alibi": ("--model.rope=false", "--model.alibi=true"),
    "nope": ("--model.rope=false", "--model.nope=true"),
    "learned": ("--model.rope=false", "--positions.scheme=contiguous"),
}
LOSS_BOUND_NATS = {"fp32": 1e-4, "bf16": 1e-2}
GRADIENT_BOUND = {"fp32": 1e-3, "bf16": 1e-1}
"""Largest differences that are taken for rounding [ours], set before any run on a GPU: bf16 keeps 8 bits."""
STEPS = 20
"""Before the checkpoint, and behind it."""
RESUMED_BOUND_NATS = 1e-3
SELECTORS = ("leave-one-out", "leave-one-in", "gradient", "attention")
INFLUENCE_BOUND_NATS = 1e-3


# --- losses and gradients ---


def measure_agreement(settings: GpuSettings) -> Json:
    """Loss and gradients of one batch on the CPU and on the device, of every model and mask, in fp32 and bf16."""
    device = torch.device(chosen_device())
    rows: dict[str, Json] = {}
    apart = []
    for name, model, batch in _cases(settings):
        for precision in LOSS_BOUND_NATS:
            cpu, own = (
                _loss_and_gradients(model, batch, at, precision) for at in (torch.device("cpu"), device)
            )
            loss = abs(own[0] - cpu[0])
            gradient = max(map(_relative_difference, own[1], cpu[1]))
            case = f"{name}, {precision}"
            rows[case] = {
                "loss_nats": own[0],
                "loss_difference_nats": loss,
                "gradient_difference": gradient,
            }
            if not (loss <= LOSS_BOUND_NATS[precision] and gradient <= GRADIENT_BOUND[precision]):
                apart.append(case)
    largest = [
        f"{precision} {_largest(rows, precision, 'loss_difference_nats'):.1e} nats, gradients "
        f"{_largest(rows, precision, 'gradient_difference'):.1e}"
        for precision in LOSS_BOUND_NATS
    ]
    found = f"{len(rows)} cases, largest differences: {'; '.join(largest)}"
    if apart:
        found = f"beyond rounding: {', '.join(apart)}; {found}"
    return {"found": found, "failed": bool(apart), "rows": rows}


def _largest(rows: dict[str, Json], precision: str, name: str) -> float:
    return max(row[name] for case, row in rows.items() if case.endswith(precision))


def _cases(settings: GpuSettings) -> Iterable[tuple[str, Model, Batch]]:
    """Models with freshly drawn weights, each with a batch on the CPU."""
    for name, changes in _ENCODINGS.items():
        config = load_config(DEMO, [*changes, *(TINY_SHAPE if settings.tiny else ())], warn=False)
        model = build_model(config)
        yield name, model, _text_batch(config, jumps=name != "learned")
        if name != "learned":
            yield f"{name}, document mask", model, _text_batch(config, documents=True)
    for family in ("gpt_neox", "olmo"):
        for scheme in ("predicted", "coupled", "pose"):
            changes = (f"--model.family={family}", f"--positions.scheme={scheme}")
            config = load_config(
                TASK, [*changes, "--data.num_workers=0", *(TINY_MODEL if settings.tiny else ())], warn=False
            )
            yield f"{family}, {scheme}", build_model(config), next(TaskData(config).batches(0)).split(8)[0]


def _text_batch(config: Config, *, jumps: bool = True, documents: bool = False) -> Batch:
    """Random tokens whose ids jump once, as in PoSE; with ``documents``, each row has two."""
    rows, length = 4, config.model.max_sequence_length
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, config.model.vocab_size, (rows, length), generator=draw)
    index = torch.arange(length).expand(rows, -1)
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, -1] = False
    return Batch(
        input_ids=tokens,
        position_ids=index + length // 2 * (index > length // 3) if jumps else index.clone(),
        labels=tokens.roll(-1, dims=1),
        loss_mask=mask,
        document_ids=(index > length // 2).long() if documents else None,
    )


def _loss_and_gradients(
    model: Model, batch: Batch, device: torch.device, precision: str
) -> tuple[float, list[Tensor]]:
    """Mean loss in nats, and the gradients of all parameters on the CPU, as the training loop computes them."""
    model, batch = deepcopy(model).to(device).train(), batch.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch.model_inputs, **batch.targets)["loss_nats"]
    loss = loss / batch.loss_mask.sum()
    loss.backward()
    gradients = [each.grad.float().cpu() for each in model.parameters() if each.grad is not None]
    return float(loss.detach()), gradients


def _relative_difference(own: Tensor, cpu: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((own - cpu).norm() / cpu.norm().clamp_min(1e-12))


# --- a resumed run ---


def train_on_cpu(settings: GpuSettings) -> Json:
    """A short run on the CPU in fp32, with a checkpoint in its middle."""
    folder = _checkpoints(settings) / "cpu"
    train(_resumed_config(settings, folder), resume=True)
    losses = _losses(folder)
    return {"found": f"{2 * STEPS} steps on the CPU, loss {losses[-1]:.3f} nats", "loss_nats": losses}


def measure_resuming(settings: GpuSettings) -> Json:
    """The second half of that run, resumed on the device with its optimizer's state, against the CPU's."""
    cpu, own = (_checkpoints(settings) / name for name in ("cpu", "gpu"))
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(cpu, own, ignore=shutil.ignore_patterns(step_folder(cpu, 2 * STEPS).name))
    end = train(_resumed_config(settings, own), resume=True)
    differences = np.abs(np.array(_losses(cpu)) - np.array(_losses(own)))
    weights, expected = (load_tensors(each / WEIGHTS) for each in (end, step_folder(cpu, 2 * STEPS)))
    apart = max(_relative_difference(weights[name], tensor) for name, tensor in expected.items())
    largest = float(differences[STEPS:].max())
    return {
        "found": f"{STEPS} steps on, losses within {largest:.1e} nats of the CPU's, weights within {apart:.1e}",
        "failed": not largest <= RESUMED_BOUND_NATS,
        "largest_loss_difference_nats": largest,
        "largest_weight_difference": apart,
    }


def _checkpoints(settings: GpuSettings) -> Path:
    return settings.out / "work" / "checkpoint"


def _resumed_config(settings: GpuSettings, folder: Path) -> Config:
    overrides = [
        *corpus_overrides(corpus_of(settings)),
        *(
            "--precision=fp32",
            f"--max_duration={2 * STEPS}",
            "--scheduler.t_warmup=5",
            f"--save_folder={folder}",
        ),
        *(f"--save_interval={STEPS}", f"--checkpoints.keep_every={STEPS}", "--console_log_interval=1"),
        *((*TINY_SHAPE, "--global_train_batch_size=4") if settings.tiny else ()),
    ]
    return load_config(DEMO, overrides, warn=False)


def _losses(folder: Path) -> list[float]:
    """Loss of every step, in nats."""
    return [row["loss_nats"] for row in read_metrics(folder / "metrics.jsonl")]


# --- influence ---


def measure_influence_twice(settings: GpuSettings) -> Json:
    """The same targets and the same checkpoint, measured on the CPU and on the device."""
    sizes: dict[str, Any] = {"n_long": 24, "n_short": 4, "targets": 16} if settings.tiny else {"targets": 64}
    common: dict[str, Any] = {
        "tau_nats": 0.0,
        "ks": (1, 2, 4),
        "selectors": SELECTORS,
        "targets_per_block": 4,
    }
    cpu, own = (
        measure(
            str(_checkpoints(settings) / "cpu"),
            corpus_of(settings),
            device=device,
            progress=False,
            **common,
            **sizes,
        )
        for device in ("cpu", chosen_device())
    )
    compared = compare(cpu, own)
    return {
        "found": str(compared),
        "failed": not compared.holds,
        "targets": compared.targets,
        "largest_difference_nats": compared.largest_difference_nats,
        "same": compared.same,
    }
