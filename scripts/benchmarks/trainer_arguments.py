"""The settings under which transformers' Trainer is timed beside our loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from olmo_sparsity.config.load import Config

if TYPE_CHECKING:
    from transformers import TrainingArguments

LEARNING_RATE = 1e-5
"""Of every side that is compared."""


def trainer_arguments(
    config: Config,
    device: torch.device,
    precision: str,
    steps: int,
    folder: Path,
) -> TrainingArguments:
    """The Trainer's settings: batch, precision and clipping of ``config``, nothing logged, nothing saved."""
    from transformers import TrainingArguments

    size = min(config.device_train_microbatch_size, config.global_train_batch_size)
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=config.global_train_batch_size // size,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm or 0.0,
        train_sampling_strategy="sequential",
        bf16=precision == "bf16",
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
