"""The one type that the training loop sees, whatever the task. Shapes: B examples, T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Tokens with their position ids, and what is to be predicted at each of them."""

    input_ids: Tensor
    """(B, T) int64."""
    position_ids: Tensor
    """(B, T) int64, the id that each token is rotated by."""
    labels: Tensor
    """(B, T) int64, the token to be predicted at each place; read only where the loss mask is set."""
    loss_mask: Tensor
    """(B, T) bool, the places whose loss counts."""
    id_labels: Tensor | None = None
    """(B, T) int64, the position id of the token to be predicted, likewise; None: ids are not predicted."""
    document_ids: Tensor | None = None
    """(B, T) int64, equal for the tokens of one document, which then see each other only; None: no such mask."""

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """What the model's forward pass is given, by name; ``document_ids`` only where there are any."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        return inputs if self.document_ids is None else {**inputs, "document_ids": self.document_ids}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; the copy overlaps computation where the tensors are pinned."""
        return Batch(**{name: part.to(device, non_blocking=True) for name, part in self._tensors().items()})

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of at most ``size`` examples, in order."""
        parts = {name: tensor.split(size) for name, tensor in self._tensors().items()}
        return [
            Batch(**dict(zip(parts, tensors, strict=True))) for tensors in zip(*parts.values(), strict=True)
        ]

    def pin_memory(self) -> Batch:
        """Called by PyTorch's data loader when ``data.pin_memory`` is set."""
        return Batch(**{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens count in the loss."""
        return int(self.loss_mask.sum())
