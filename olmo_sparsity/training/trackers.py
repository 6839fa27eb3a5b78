"""Weights & Biases and TensorBoard, for those who ask for them; neither is imported otherwise."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from olmo_sparsity.config.schema import Config
from olmo_sparsity.util.files import write_text

RUN_ID_NAME = "wandb_run_id.txt"
TENSORBOARD_FOLDER = "tensorboard"


def open_trackers(config: Config, first_step: int) -> list[Tracker]:
    """The trackers that the config asks for; a run that is resumed after ``first_step`` goes on in the same one."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(config, first_step))
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config, first_step))
    return trackers


class WeightsAndBiases:
    """OLMo's section `wandb`. ``WANDB_MODE=offline`` works, and `wandb sync` uploads later."""

    def __init__(self, config: Config, first_step: int):
        import wandb

        options = config.wandb
        assert options is not None
        self.interval = options.log_interval
        folder = Path(config.save_folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RUN_ID_NAME
        if first_step == 0 or not path.is_file():
            write_text(path, uuid.uuid4().hex[:12] + "\n")
        self.run: Any = wandb.init(
            dir=str(folder),
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=options.name,
            tags=options.tags,
            config=config.asdict(exclude=["wandb"]),
            id=path.read_text(encoding="utf8").strip(),
            resume="allow",
        )

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Log one row, but for steps that the run has from before an interruption: it takes no step twice."""
        if step >= self.run.step:
            self.run.log(_scalars(row), step=step)

    def close(self, failed: bool) -> None:
        """Upload the rest and mark the run as finished or failed."""
        self.run.finish(exit_code=int(failed))


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.interval = config.console_log_interval
        # purge_step hides what an interrupted run wrote beyond its last checkpoint
        self.writer: Any = SummaryWriter(
            str(Path(config.save_folder) / TENSORBOARD_FOLDER), purge_step=first_step + 1
        )

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Write one row and hand it to the operating system."""
        for name, value in _scalars(row).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Close the event file."""
        self.writer.close()


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row; the loss by position becomes one number a bin, named so that bins sort by position."""
    values = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
    bins = row.get("heldout_loss_by_position", [])
    width = len(str(bins[-1]["to"])) if bins else 0
    for of_bin in bins:
        place = f"{of_bin['from']:0{width}d}-{of_bin['to']:0{width}d}"
        values[f"heldout_loss_nats_by_position/{place}"] = of_bin["loss_nats"]
    return values


Tracker = WeightsAndBiases | TensorBoard
"""Shows the rows of `metrics.jsonl` elsewhere: those of training every `interval` steps, held-out measures always."""
