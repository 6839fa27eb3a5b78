"""What arguments of `measure`, `eviction` and `influence_map` must be, whoever calls them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from analysis.settings import ContextSettings
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """The value as Python's int. Raises `UserError`, which names the argument, for anything else."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) < 2**63:
        raise UserError(f"{name} takes whole numbers from {least} on, not {value!r}")
    return int(value)


def whole_numbers(name: str, value: Any, *, least: int = 1) -> list[int]:
    """One or more numbers as a list. Raises `UserError`, which names the argument, for anything else."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    return [whole_number(name, item, least=least) for item in (value if is_list else [value])]


def true_or_false(name: str, value: Any) -> bool:
    """The value itself. Raises `UserError`, which names the argument, for anything else."""
    if not isinstance(value, bool):
        raise UserError(f"{name} takes True or False, not {value!r}")
    return value


def finite_number(name: str, value: Any) -> float:
    """The value as Python's float. Raises `UserError`, which names the argument, for anything else."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{name} takes a finite number, not {value!r}")
    return float(value)


def names(name: str, value: Any) -> list[str]:
    """One or more strings as a list, empty of ``none``. Raises `UserError`, which names the argument, for others."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    strings = list(value) if is_list else [value]
    for item in strings:
        if not isinstance(item, str):
            raise UserError(f"{name} takes names, not {item!r}")
    return [] if strings == ["none"] else strings


def folder(name: str, value: Any) -> Path:
    """The path of a folder, which need not exist. Raises `UserError` where none can be made."""
    if not isinstance(value, str | Path):
        raise UserError(f"{name} takes the path of a folder, not {value!r}")
    path = user_path(value)
    for parent in (path, *path.parents):
        if parent.exists() and not parent.is_dir():
            raise UserError(f"{name}={str(value)!r}: {parent} is a file; give another folder")
    return path


def context_settings(
    *,
    n_long: Any,
    n_short: Any,
    targets_per_block: Any,
    seed: Any,
    lengths: Any = (),
    before: Any = 0,
    gap: Any = 0,
) -> ContextSettings:
    """The lengths, B and the seed. Raises `UserError`, which names the argument, where one is no such number."""
    return ContextSettings(
        n_long=whole_number("n_long", n_long),
        n_short=whole_number("n_short", n_short),
        seed=whole_number("seed", seed, least=0),
        targets_per_block=whole_number("targets_per_block", targets_per_block),
        lengths=tuple(sorted(set(whole_numbers("lengths", lengths)))),
        before=whole_number("before", before, least=0),
        gap=whole_number("gap", gap, least=0),
    )
