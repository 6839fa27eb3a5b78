"""Train a model from a YAML config.

examples:
  olmo-sparsity train configs/demo.yaml                           train the demo
  olmo-sparsity train configs/demo.yaml --resume                  go on after an interruption
  olmo-sparsity train configs/base.yaml --dry-run                 print the resolved config and what a step costs
  olmo-sparsity train configs/demo.yaml --save_folder=runs/b --seed=2 --optimizer.learning_rate=5e-4
  torchrun --nproc_per_node 8 --no-python olmo-sparsity train configs/base.yaml \\
      --deepspeed.config=configs/deepspeed/zero1.json

Any field of the config is overridden with --path.to.key=value, as in OLMo. The YAML is OLMo's own, with sections of
this project added (`positions`, `corpus`, `task`, `evaluation` and more: docs/training.md); `base: other.yaml` makes it
an overlay of another file. A run folder holds metrics.jsonl and step*/ checkpoints (safetensors weights, the resolved
config, optimizer and data state).
On SIGUSR1, SIGTERM or Ctrl-C, or at time_limit, the run saves and exits with code 85: --resume goes on.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.build import Model


def main() -> int:
    """Parse arguments and train, or show what would be trained."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="YAML file of OLMo's form, or an overlay of one")
    resume = "go on from the last checkpoint, or start if there is none"
    add("--resume", action="store_true", help=resume)
    dry_run = "print the resolved config, the number of parameters and the tokens per step, and train nothing"
    add("--dry-run", action="store_true", help=dry_run)
    # The deepspeed launcher's; the environment says the same.
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    show_log("olmo_sparsity")

    from olmo_sparsity.config.load import load_config

    config = load_config(arguments.config, overrides)
    from olmo_sparsity.training.check import check_run
    from olmo_sparsity.training.loop import train

    model = check_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    if arguments.dry_run or config.dry_run:
        print(_described(config, model))
        return 0
    from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE, StoppedBySignal

    try:
        end = f"trained: {train(config, resume=arguments.resume)}"
        code = 0
    except StoppedBySignal as stop:
        end = str(stop)
        code = REQUEUE_EXIT_CODE
    if os.environ.get("RANK", "0") == "0":
        print(end)
    return code


def _described(config: Config, model: Model) -> str:
    """The resolved config as YAML, then parameter counts and the tokens of one step."""
    from omegaconf import OmegaConf

    from olmo_sparsity.model.build import token_embedding

    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = token_embedding(model).weight.numel()
    batch = config.global_train_batch_size
    window_length = config.model.max_sequence_length
    return (
        f"{OmegaConf.to_yaml(OmegaConf.structured(config))}\n"
        f"parameters        {total:,} ({total - embedding:,} without the token embedding)\n"
        f"tokens per step   {batch} windows x {window_length} tokens = {batch * window_length:,}"
    )
