"""Grids of runs: the product of some settings, each cell a run in a folder of its own. `runner` runs them.

OUT/sweep.json         the axes and the cells, for readers and figures; written before the first cell starts
OUT/CELL/sweep.log     what the commands of the cell printed
OUT/CELL/sweep.json    its settings, commands and commit; written when all of its commands have ended well
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from olmo.util import clean_opt
from omegaconf import OmegaConf as om

from olmo_sparsity.config.load import NOT_LOADED, Config, load_config, refuse_dry_run
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import read_json, write_json

FORMAT = 1
SWEEP_NAME, LOG_NAME = "sweep.json", "sweep.log"
LONGEST_NAME = 200  # file systems take 255 bytes
CONFIG_AXIS = "config"
"""Its values are the names of the YAML files, without .yaml."""
_OF_EACH_CELL = ("save_folder", "run_name")


@dataclass(frozen=True)
class Axis:
    """A key of the config and the values that it takes."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read ``key=1,2`` or ``key=[5,20],[5,10]``: commas inside brackets belong to a value."""
        text = " ".join(text.splitlines())
        match = re.fullmatch(r"([A-Za-z_][\w.]*)=(.*)", text)
        if match is None:
            raise UserError(f"--grid {text}: write a key of the config and its values, such as seed=1,2,3")
        key, values = match[1], _split_outside_brackets(match[2])
        if values is None:
            raise UserError(f"--grid {text}: a bracket is not closed, or closed twice")
        if not all(values):
            raise UserError(f"--grid {text}: a value is missing; give one or more, and null for none")
        if repeated := _repeated(values):
            raise UserError(f"--grid {text}: has {repeated} twice; give each value once")
        if key in (*_OF_EACH_CELL, CONFIG_AXIS):
            raise UserError(f"--grid {text}: {key} is decided by the sweep; leave it out")
        return cls(key, tuple(values))


@dataclass(frozen=True)
class Sweep:
    """What is to be run."""

    configs: tuple[str, ...]
    """YAML files; several are an axis of their own, `CONFIG_AXIS`, the slowest."""
    grid: tuple[Axis, ...]
    out: Path
    """Folder of the cells."""
    overrides: tuple[str, ...]
    """Of all cells: ``--path.to.key=value``."""
    train: tuple[str, ...]
    """Start of the command that trains; the config file and its options follow."""
    evaluate: tuple[str, ...]
    """Start of the command that evaluates a run of a task; the run's folder and ``evaluation`` follow."""
    evaluation: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those of the grid, behind that of the configs where there are several."""
        if len(self.configs) == 1:
            return self.grid
        return (Axis(CONFIG_AXIS, tuple(Path(config).stem for config in self.configs)), *self.grid)


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    folder: Path
    values: Mapping[str, str]
    """Of the axes, as they were written."""
    settings: Mapping[str, Any]
    """The resolved config."""
    commands: tuple[tuple[str, ...], ...]
    """What is run, one after the other."""
    evaluation: tuple[str, ...] | None
    """Arguments of the last command; None: its config has no task, and there is nothing to evaluate."""

    @property
    def name(self) -> str:
        """Its folder in the sweep's."""
        return self.folder.name

    @property
    def marker(self) -> Path:
        """The file that says that the cell is finished."""
        return self.folder / SWEEP_NAME

    @property
    def is_finished(self) -> bool:
        """Whether its commands have all succeeded, with the evaluation that is asked for now."""
        evaluation = self.evaluation if self.evaluation is None else list(self.evaluation)
        return self.marker.is_file() and _read(self.marker)["evaluation"] == evaluation

    def mark(self, commit: str) -> None:
        """Note that it is finished."""
        what = {key: getattr(self, key) for key in ("values", "settings", "commands", "evaluation")}
        write_json(self.marker, {"format": FORMAT, **what, "commit": commit})


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of a grid, in order. Raises `UserError` for one that is malformed, and for two of one key."""
    axes = tuple(Axis.parse(text) for text in texts)
    if repeated := _repeated([axis.key for axis in axes]):
        raise UserError(f"--grid {repeated} is given twice; put all of its values into one --grid")
    return axes


def make_cells(
    sweep: Sweep, only: int | None = None, check: Callable[[Config], object] | None = None
) -> list[Cell]:
    """The cells, the last axis fastest; with ``only`` that one alone, counted from 1.

    ``check`` gets the config of every cell that has a task, and raises `UserError` where it cannot be evaluated. Raises
    one `UserError` that names all cells that are refused, so or by their config, or are finished with other settings.
    """
    keys = [axis.key for axis in sweep.axes]
    for override in sweep.overrides:
        key = clean_opt(override).partition("=")[0]
        if key in (*_OF_EACH_CELL, *keys):
            raise UserError(f"{override}: {key} is decided by the sweep; leave it out behind the --")
    products = itertools.product(*(axis.values for axis in sweep.axes))
    grid = [dict(zip(keys, values, strict=True)) for values in products]
    if repeated := _repeated([_name(values) for values in grid]):
        raise UserError(f"two cells would share the folder {repeated}; put them into two sweeps")
    if only is not None:
        if only > len(grid):
            raise UserError(f"--only {only}: there are {len(grid)} cells")
        grid = [grid[only - 1]]
    cells: list[Cell] = []
    problems: dict[str, list[str]] = {}
    for values in grid:
        try:
            cells.append(_make_cell(sweep, values, check))
            _refuse_other_settings(cells[-1])
        except UserError as error:
            problems.setdefault(str(error), []).append(_name(values))
    if problems:
        raise UserError(_all_problems(problems, len(grid)))
    by_settings: dict[str, Cell] = {}
    for cell in cells:
        twin = by_settings.setdefault(json.dumps(_flat(cell.settings)), cell)
        if twin is not cell:
            raise UserError(f"{twin.name} and {cell.name} have the same settings; leave one of them out")
    return cells


def write_sweep(sweep: Sweep, cells: Sequence[Cell], commit: str) -> None:
    """Write `sweep.json`; its values are typed as YAML reads them."""
    values = [{key: _typed(text) for key, text in cell.values.items()} for cell in cells]
    write_json(
        sweep.out / SWEEP_NAME,
        {
            "format": FORMAT,
            "configs": sweep.configs,
            "overrides": sweep.overrides,
            "evaluation": sweep.evaluation,
            "axes": {axis.key: [_typed(value) for value in axis.values] for axis in sweep.axes},
            "cells": [
                {"folder": cell.name, "values": typed} for cell, typed in zip(cells, values, strict=True)
            ],
            "commit": commit,
        },
    )


def _make_cell(sweep: Sweep, values: Mapping[str, str], check: Callable[[Config], object] | None) -> Cell:
    name = _name(values)
    files = {Path(config).stem: config for config in sweep.configs}
    file = files[values[CONFIG_AXIS]] if CONFIG_AXIS in values else sweep.configs[0]
    folder = sweep.out / name
    overrides = [
        f"--save_folder={_as_yaml(str(folder))}",
        f"--run_name={_as_yaml(f'{sweep.out.resolve().name}-{name}')}",
        *sweep.overrides,
        *(f"--{key}={value}" for key, value in values.items() if key != CONFIG_AXIS),
    ]
    config = load_config(file, overrides, warn=False)
    refuse_dry_run(config)
    settings = _settings(config)
    train = (*sweep.train, file, "--resume", *overrides)
    if config.task.name is None:
        return Cell(folder, values, settings, (train,), None)
    if check is not None:
        check(config)
    evaluate = (*sweep.evaluate, str(folder), *sweep.evaluation)
    return Cell(folder, values, settings, (train, evaluate), sweep.evaluation)


def _name(values: Mapping[str, str]) -> str:
    """``seed=1,task.parameters.train_length=5-20``: without characters that are special to a shell, a path or YAML."""
    parts = []
    for key, text in values.items():
        plain = "-".join(filter(None, re.split(r"[^\w.+-]+", text, flags=re.ASCII)))
        parts.append(f"{key}={plain}")
    name = ",".join(parts)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{sha256(repr(values).encode()).hexdigest()[:8]}"


def _split_outside_brackets(text: str) -> list[str] | None:
    """The parts of ``text`` between the commas outside of its brackets; None where they do not match."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if depth < 0:
            return None
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return None if depth else [part.strip() for part in parts]


def _repeated(texts: Sequence[str]) -> str | None:
    return next((text for i, text in enumerate(texts) if text in texts[:i]), None)


def _as_yaml(text: str) -> str:
    """What YAML reads as ``text``: the same, or in quotes where it would read something else."""
    with suppress(UserError):
        if _typed(text) == text:
            return text
    return json.dumps(text)


def _typed(text: str) -> Any:
    try:
        return om.to_container(om.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index, call-overload]
    except NOT_LOADED as error:
        raise UserError(f"--grid: {text} cannot be read: {first_line(error)}") from None


def _settings(config: Config) -> dict[str, Any]:
    """``config`` as it is read back from JSON."""
    return json.loads(json.dumps(om.to_container(om.structured(config), resolve=True, enum_to_str=True)))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by their dotted names, without those that are different in every cell."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{name}": inner for name, inner in _flat(value).items()}
        elif key not in _OF_EACH_CELL:
            flat[key] = value
    return flat


def _refuse_other_settings(cell: Cell) -> None:
    """Raise `UserError` where the cell was finished with settings that differ from today's."""
    if not cell.marker.is_file():
        return
    defaults = _flat(_settings(Config()))  # of fields that the config has got since
    old = {**defaults, **_flat(_read(cell.marker)["settings"])}
    new = {**defaults, **_flat(cell.settings)}
    for name in {**new, **old}:
        before, now = old.get(name), new.get(name)
        if before != now:
            raise UserError(
                f"already finished in {cell.folder.parent}, with {name} {json.dumps(before)}, which is "
                f"{json.dumps(now)} now; set it back, choose another --out, or remove {SWEEP_NAME} from the cell's "
                "folder if the run is to go on with it"
            )


def _all_problems(problems: Mapping[str, Sequence[str]], cells: int) -> str:
    """One message: the problem alone where all cells have the same one, else each problem with its cells."""
    refused = sum(map(len, problems.values()))
    if refused == cells and len(problems) == 1:
        return next(iter(problems))
    lines = [f"{refused} of {cells} cells cannot run, and none is started:"]
    for message, names in problems.items():
        which = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        lines.append(f"  {which}: " + message.replace("\n", "\n  "))
    return "\n".join(lines)


def _read(marker: Path) -> dict[str, Any]:
    remedy = "remove it and run the same command again"
    noted: dict[str, Any] = read_json(marker, remedy)
    if "evaluation" not in noted or not isinstance(noted.get("settings"), dict):
        raise UserError(f"{marker} is damaged (it does not say what was finished); {remedy}")
    return noted
