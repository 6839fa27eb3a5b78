"""What stands at the fields of a config: bounds, who reads them, what a resumed run may change."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
from olmo.config import TrainConfig

from olmo_sparsity.config.fields import may_change
from olmo_sparsity.config.olmo_fields import IGNORED, REFUSED
from olmo_sparsity.config.rules import Rule, checked, rule_of
from olmo_sparsity.config.schema import Config


def has_number(kind: Any) -> bool:
    """Whether a value of a type, such as ``int | None`` or ``list[float]``, is or holds a number."""
    return kind in (int, float) or any(has_number(inner) for inner in get_args(kind))


def sections(kind: Any) -> list[type]:
    """The dataclasses among a type's choices: of ``WandbConfig | None`` the first."""
    return [choice for choice in (kind, *get_args(kind)) if isinstance(choice, type) and is_dataclass(choice)]


def silent_numbers(section: type, prefix: str = "") -> list[str]:
    """The numbers of a section that are read, and neither have bounds nor say that they have none."""
    kinds, names = get_type_hints(section), []
    for item in fields(section):
        name, rule = prefix + item.name, rule_of(item)
        if name in IGNORED or name in REFUSED:
            continue
        if has_number(kinds[item.name]) and not (rule.bounds or rule.unbounded):
            names.append(name)
        for inner in sections(kinds[item.name]):
            names += silent_numbers(inner, f"{name}.")
    return names


@dataclass
class Section:
    silent: int | None = None
    free: float = checked(0.5, unbounded=True)
    bounded: list[int] = checked(default_factory=list, at_least=1)


def test_every_number_has_bounds_or_says_that_it_has_none() -> None:
    assert silent_numbers(Config) == []


def test_a_number_without_bounds_is_noticed() -> None:
    assert silent_numbers(Section) == ["silent"]


def defaults(section: Any, prefix: str = "") -> dict[str, Any]:
    values = {}
    for item in fields(section):
        value = getattr(section, item.name)
        inner = (
            defaults(value, f"{prefix}{item.name}.") if is_dataclass(value) else {prefix + item.name: value}
        )
        values.update(inner)
    return values


def test_the_defaults_are_those_of_olmo() -> None:
    ours, olmos = defaults(Config()), defaults(TrainConfig())
    changed = {name for name, value in olmos.items() if name in ours and ours[name] != value}
    assert changed == {"data.drop_last", "tokenizer.identifier"}
    assert {*olmos} - {*ours} == {"compile"}  # a section here


BOUNDS = [
    (Rule(at_least=1), [1, 10**6, None, "text", True, [1, 2]], [0, -1, [1, 0]], "is not 1 or more"),
    (Rule(above=0), [1e-9, 7], [0, 0.0, -1e-9], "is not above 0"),
    (Rule(at_least=0, at_most=1), [0, 0.5, 1], [-0.1, 1.1], "is not in 0 … 1"),
    (Rule(at_least=0, below=1), [0, 0.999], [1, -1, (0.9, 1.5)], "is not 0 or more and below 1"),
    (Rule(unbounded=True), [-5, 1e300, 2**63 - 1], [2**63, -(2**63)], "has more than 63 bits"),
    (Rule(at_least=0, at_most=2**64 - 1), [2**64 - 1], [2**64], "is not in 0 … 18446744073709551615"),
    (Rule(), [0], [float("nan"), float("inf"), [1.0, float("nan")]], "is no finite number"),
]


@pytest.mark.parametrize(("rule", "right", "wrong", "complaint"), BOUNDS)
def test_bounds(rule: Rule, right: list[Any], wrong: list[Any], complaint: str) -> None:
    assert [rule.complaint(value) for value in right] == [None] * len(right)
    assert [rule.complaint(value) for value in wrong] == [complaint] * len(wrong)


def test_what_a_resumed_run_may_change() -> None:
    """A section that may change takes its fields with it; what OLMo has and this engine does not changes nothing."""
    free = ["save_folder", "data.num_workers", "wandb.project", "wandb", "compile.mode", "fsdp.precision"]
    free += ["optimizer.learning_rate", "max_grad_norm", "auxiliary_loss_multiplier", "data.skip_steps"]
    fixed = ["seed", "data.seed", "data.memmap_dtype", "model.d_model", "optimizer.betas", "positions.chunks"]
    assert all(may_change(name) for name in free) and not any(may_change(name) for name in fixed)
