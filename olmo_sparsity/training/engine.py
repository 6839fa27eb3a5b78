"""Devices, precision and processes. The only module that imports Accelerate."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from olmo.optim import build_optimizer
from torch import Tensor

from olmo_sparsity.batch import Batch
from olmo_sparsity.config import Config
from olmo_sparsity.model import PositionedOLMo

log = logging.getLogger(__name__)


def cpu_has_fast_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices natively; elsewhere bf16 is slower than fp32 on a CPU."""
    capability = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
    try:
        with open("/proc/cpuinfo", encoding="utf8") as file:
            flags = file.read()
    except OSError:
        return False
    return "AVX512" in capability and ("avx512_bf16" in flags or "amx_bf16" in flags)


def chosen_precision(config: Config) -> str:
    """Accelerate's name of the precision: what the config says, or bf16 where the machine has it."""
    if config.precision is not None:
        return {"amp_bf16": "bf16", "fp32": "no"}[config.precision]
    has_bf16 = torch.cuda.is_bf16_supported() if torch.cuda.is_available() else cpu_has_fast_bf16()
    return "bf16" if has_bf16 else "no"


class Engine:
    """Runs forward, backward and optimizer steps of one model over all processes."""

    def __init__(self, config: Config, model: PositionedOLMo):
        self.accelerator = Accelerator(
            mixed_precision=chosen_precision(config), cpu=not torch.cuda.is_available()
        )
        self.micro_batch_size = config.device_train_microbatch_size
        if config.activation_checkpointing is not None:
            model.set_activation_checkpointing(config.activation_checkpointing)
        self.raw_model = model.to(self.accelerator.device).train()
        optimizer = build_optimizer(config, model)
        for group in optimizer.param_groups:
            group["fused"] = True  # one kernel for all parameters; OLMo's builder has no switch for it
        compiled = torch.compile(model, **asdict(config.compile)) if config.compile is not None else model
        self.model, self.optimizer = self.accelerator.prepare(compiled, optimizer)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    def seed_dropout(self, seed: int, step: int) -> None:
        """Make dropout a function of (seed, step, process), so that resuming needs no random state."""
        words = np.random.SeedSequence([seed, step, self.accelerator.process_index]).generate_state(1)
        torch.manual_seed(int(words[0]))

    def forward_backward(self, batch: Batch) -> float:
        """Accumulate gradients of the mean loss per token of the global batch; returns that loss in nats.

        Each micro-batch contributes its sum over tokens divided by the number of loss tokens of the *global* batch, so
        the split into processes and micro-batches changes nothing but rounding.
        """
        count = self._sum_over_processes(torch.tensor(float(batch.num_loss_tokens)))
        total = torch.zeros((), device=self.device)
        parts = batch.split(self.micro_batch_size)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    loss_sum = token_loss_sum(self.model, part.to(self.device))
                # Processes average their gradients; times their number makes it the sum over the global batch.
                self.accelerator.backward(loss_sum * (self.accelerator.num_processes / count))
            total += loss_sum.detach()
        return float(self._sum_over_processes(total) / count)

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value.to(self.device), reduction="sum")

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        """Clip, update the weights, forget the gradients; returns the gradient norm before clipping."""
        bound = float("inf") if max_grad_norm is None else max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), bound)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm) if norm is not None else float("nan")

    def weights(self) -> dict[str, Tensor]:
        """The model's weights on the CPU, by OLMo's names."""
        return {name: tensor.detach().cpu() for name, tensor in self.raw_model.state_dict().items()}

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        """OLMo's optimizer beneath Accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def wait(self) -> None:
        """Let every process reach this point."""
        self.accelerator.wait_for_everyone()


def token_loss_sum(model: Any, batch: Batch) -> Tensor:
    """Sum over the tokens that count of -log p(label), in nats; a scalar that gradients flow through."""
    logits = model(batch.input_ids, position_ids=batch.position_ids).logits
    labels = batch.labels.masked_fill(~batch.loss_mask, -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
