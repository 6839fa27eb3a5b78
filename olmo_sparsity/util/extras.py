"""The extras of this package, as in ``pip install '.[train]'``, and what is said where one is missing."""

from __future__ import annotations

import importlib.util

from olmo_sparsity.util.errors import UserError

EXTRA_OF = {
    **dict.fromkeys(("olmo", "olmo_data", "omegaconf", "datasets", "accelerate", "deepspeed"), "train"),
    "gguf": "gguf",
    "wandb": "wandb",
}
"""Of modules that `pip install .` leaves out: the extra that brings them."""


def missing_module(module: str, extra: str) -> str:
    """The line for a user who lacks a module that an extra brings."""
    return f"this needs {module}, which is not installed; run in the clone: pip install '.[{extra}]'"


def require_extra(extra: str, *modules: str) -> None:
    """Raise `UserError` where one of these modules of an extra is not installed. Imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(missing_module(module, extra))
