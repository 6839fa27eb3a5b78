"""An optimizer's state as named tensors: stored without pickles, read on any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor

from olmo_sparsity.util.errors import UserError

SEPARATOR = "|"


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters by the names that OLMo's optimizer groups carry."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def export_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every state tensor as `<parameter>|<state>` on the CPU."""
    tensors = {}
    for name, parameter in _named_parameters(optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}{SEPARATOR}{key}"] = torch.as_tensor(value).detach().cpu().clone()
    return tensors


def import_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `export_state` gave. Raises `UserError` where it belongs to another model or optimizer."""
    parameters = _named_parameters(optimizer)
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit(SEPARATOR, 1)
        if name not in parameters:
            raise UserError(
                f"the checkpoint's optimizer state has {name}, which this model has not; check the config"
            )
        parameter = parameters[name]
        on_device = key != "step" or bool(optimizer.param_groups[0].get("fused"))
        optimizer.state[parameter][key] = tensor.to(parameter.device) if on_device else tensor.clone()
