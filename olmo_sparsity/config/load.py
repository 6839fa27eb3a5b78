"""The configuration of a run: OLMo's `TrainConfig` plus ours; load, override, validate.

OLMo's own YAML files load unchanged. A file may name a `base:` and hold differences only. Whatever is wrong,
in the files or on the command line, is reported at once, before anything is allocated; each line names the
key and a remedy.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from olmo.util import clean_opt
from omegaconf import DictConfig, ListConfig
from omegaconf import OmegaConf as om
from omegaconf.errors import OmegaConfBaseException

from olmo_sparsity.config.checks import find_problems, unusable_values
from olmo_sparsity.config.messages import choose, did_you_mean, section_of, shorten, show
from olmo_sparsity.config.safe_yaml import YamlError, config_resolvers, parse_override, read_yaml
from olmo_sparsity.config.schema import Config, replaced_fields, unlike_neox
from olmo_sparsity.util.errors import UserError, first_line, printable
from olmo_sparsity.util.shipped import find_shipped

log = logging.getLogger(__name__)
_COMMAND_LINE = "on the command line"
_LEFT_OPEN = "is left open; give it a value"
_MAX_BASES, _MAX_LINES = 16, 100
_NOT_TAKEN = (OmegaConfBaseException, TypeError, ValueError, OverflowError, RecursionError)
"""What OmegaConf raises for a value that does not fit a field."""


def refuse_dry_run(config: Config) -> None:
    """Raise `UserError` where a run that others wait for would only print its configuration, and end well."""
    if config.dry_run:
        raise UserError("dry_run: such a run trains nothing; leave it out, or give --dry-run before the --")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, warn: bool = True, only: Sequence[str] = ()
) -> Config:
    """Read a YAML file, its `base:` files and overrides such as ``--optimizer.learning_rate=1e-4``.

    Raises one `UserError` that lists everything that is wrong. With ``warn``, warns once of fields that are replaced.
    ``only``: the keys that are read, where others may be anything; by default all.
    """
    problems = _Problems()
    with config_resolvers():  # around it all: looking at a value may resolve it
        values = _read_all(find_shipped(path), overrides, problems)
        values = {key: values[key] for key in only if key in values} if only else values
        config = _build(values, problems)
    if config is not None:
        for name, text in unusable_values(config):
            problems.add_broken(name, text)
        for reads, text in find_problems(config):
            if not any(problems.touch(name) for name in reads):
                problems.add(reads[0], text)
    if problems.lines:
        raise UserError(problems.message(path))
    assert config is not None  # it is None only beside a problem
    written = {name: text for name, text in unlike_neox(config.model).items() if name in problems.sources}
    if warn and (replaced := replaced_fields(config) | written):
        log.warning("%s: no effect here: %s", path, _by_reason(replaced))
    return config


def _by_reason(replaced: dict[str, str]) -> str:
    """The fields on one line, grouped by what replaces them."""
    grouped: dict[str, list[str]] = {}
    for name, reason in replaced.items():
        grouped.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in grouped.items())


class _Problems:
    """What is wrong so far, and where each key was written."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str], str] = {}
        self.broken: set[str] = set()
        self.sources: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """``text`` says what is wrong with the key ``name``, and the remedy."""
        written = name
        while written not in self.sources and "." in written:  # an element of a list, or what is missing
            written = written.rpartition(".")[0]
        source = self.sources.get(written)
        self.lines[name, text] = printable(f"{name}: {text}" + (f" ({source})" if source else ""))

    def add_broken(self, name: str, text: str) -> None:
        """As `add`, for a key whose value is unusable: what depends on it is not checked."""
        self.broken.add(name)
        self.add(name, text)

    def touch(self, name: str) -> bool:
        """Whether the value of ``name``, of a part of it or of its section is unusable."""
        return any(f"{name}.".startswith(f"{b}.") or b.startswith(f"{name}.") for b in self.broken)

    def note_source(self, values: dict, source: str, prefix: str = "") -> None:
        """Remember where the keys of ``values`` were written; empty for the file that was asked for."""
        for key, value in values.items():
            self.sources[_name(prefix, key)] = source
            if isinstance(value, dict):
                self.note_source(value, source, f"{_name(prefix, key)}.")

    def message(self, path: str | Path) -> str:
        lines, where = list(self.lines.values()), printable(str(path))
        if len(lines) == 1:
            return f"{where}: {lines[0]}"
        head, more = f"{len(lines)} problems in {where}:", len(lines) - _MAX_LINES
        shown = [*lines[:_MAX_LINES], *([f"… and {more:,} more"] if more > 0 else [])]
        return "\n".join([head, *(f"  {line}" for line in shown)])


def _read_all(path: Path, overrides: Sequence[str], problems: _Problems) -> dict:
    """The values of the base files, the file and the overrides, merged, neither checked nor resolved yet."""
    values: dict = {}
    bases = [override.split("=", 1)[1] for override in overrides if override.startswith("--base=")]
    overrides = [override for override in overrides if not override.startswith("--base=")]
    for file, layer in _read_layers(path, (), find_shipped(bases[-1]) if bases else None):
        problems.note_source(layer, "" if file == path else f"in {file}")
        values = _merge(values, layer)
    for override in overrides:
        try:
            layer = _plain(parse_override(*clean_opt(override).split("=", 1)))
        except YamlError as error:
            remedy = "write --name=value or --section.name=value"
            problems.add(shorten(override, 120), f"{error}; {remedy}")
            continue
        problems.note_source(layer, _COMMAND_LINE)
        values = _merge(values, layer)
    return values


def _read_layers(
    path: Path, above: tuple[Path, ...], other_base: Path | None = None
) -> list[tuple[Path, dict]]:
    """The file and what it is based on, base first; ``other_base`` stands in for the base that the file names."""
    values = _read_file(path, above[-1] if above else None)
    if path.resolve() in [file.resolve() for file in above]:
        raise UserError(f"{above[0]}: its base files form a circle: {' -> '.join(map(str, [*above, path]))}")
    if len(above) > _MAX_BASES:
        raise UserError(f"{above[0]}: its base files are more than {_MAX_BASES}; put some of them together")
    base = values.pop("base", None)
    if other_base is not None:
        return [*_read_layers(other_base, (*above, path)), (path, values)]
    if base is None:
        return [(path, values)]
    if not isinstance(base, str):
        raise UserError(f"{path}: base: {show(base)} is no text; name one YAML file, relative to this one")
    return [*_read_layers(find_shipped(path.parent / base, base), (*above, path)), (path, values)]


def _read_file(path: Path, named_by: Path | None) -> dict:
    """The values of one file; ``named_by`` is the file whose `base:` it is."""
    try:
        raw = read_yaml(path)
    except FileNotFoundError:
        if named_by is not None:
            reason = f"base: there is no file {path}; the path is relative to {named_by}"
            raise UserError(printable(f"{named_by}: {reason}")) from None
        raise UserError(printable(f"{path}: there is no such config file")) from None
    except YamlError as error:
        raise UserError(printable(f"{path}: {error}")) from None
    if not isinstance(raw, DictConfig):
        raise UserError(printable(f"{path}: holds a list; a config is made of lines `name: value`"))
    # A section of a wrong type is reported with everything else.
    with contextlib.suppress(OmegaConfBaseException, AttributeError, RecursionError):
        raw = Config.update_legacy_settings(raw)
    return _plain(raw)


def _plain(config: DictConfig | ListConfig) -> Any:
    return om.to_container(config, resolve=False)


def _name(prefix: str, key: Any) -> str:
    """The dotted name of a key, cut to fit a line."""
    return prefix + shorten(str(key), 60)


def _merge(below: dict, above: dict) -> dict:
    """Sections are merged; any other value, lists included, is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _build(values: dict, problems: _Problems) -> Config | None:
    """The config without the values that are invalid; None where the others make no config either."""
    try:
        config = _filled(values, problems)
        if unresolved := list(_unresolved(config, ())):
            for keys, text in unresolved:
                problems.add_broken(".".join(map(str, keys)), text)
                _drop(values, keys)
            config = _filled(values, problems)
        for missing in om.missing_keys(config):
            problems.add_broken(re.sub(r"\[(\d+)\]", r".\1", missing), _LEFT_OPEN)
            om.update(config, missing, "")  # stands in, so that all the rest can be judged
        return typing.cast(Config, om.to_object(config))
    except _NOT_TAKEN as error:
        if not problems.lines:  # else this is likely what they have left behind
            problems.add_broken(getattr(error, "full_key", None) or "config", first_line(error))
        return None


def _filled(values: dict, problems: _Problems) -> DictConfig:
    config = copy.deepcopy(_defaults())
    _fill(config, values, "", problems)
    return config


@cache
def _defaults() -> DictConfig:
    """A config of nothing but defaults; a copy of it costs a fifth of making one."""
    return om.structured(Config)


def _fill(section: DictConfig, values: dict, prefix: str, problems: _Problems) -> None:
    """Set the values one by one, so that each one that OmegaConf refuses is reported and the others are set."""
    cls = typing.cast(type, om.get_type(section))
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        name = _name(prefix, key)
        if key not in hints:
            text = "unknown key"
            if len(problems.lines) < _MAX_LINES:  # looking for likenesses takes milliseconds
                text += "; " + did_you_mean(str(key), prefix, isinstance(value, dict), cls, Config)
            problems.add_broken(name, text)
            continue
        if value == "???":  # OmegaConf's mark for a value that must be given
            problems.add_broken(name, _LEFT_OPEN)
            continue
        inner, element = section_of(hints[key]), None
        if typing.get_origin(hints[key]) is list:
            element = section_of(typing.get_args(hints[key])[0])
        if inner and isinstance(value, dict):
            if section[key] is None:
                om.update(section, key, inner())
            _fill(section[key], value, f"{name}.", problems)
        elif element and isinstance(value, list) and all(isinstance(item, dict) for item in value):
            items = [om.structured(element) for _ in value]
            for number, (item, written) in enumerate(zip(items, value, strict=True)):
                _fill(item, written, f"{name}.{number}.", problems)
            section[key] = items
        else:
            try:
                om.update(section, key, value, merge=False)
            except _NOT_TAKEN:
                problems.add_broken(name, _misfit(cls, key, hints[key], value))


def _misfit(cls: type, key: str, hint: Any, value: Any) -> str:
    """Why a field does not take ``value``, and what it takes."""
    if section_of(hint):
        return f"{show(value)} is no section; write its keys below it"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"{show(value)} is unknown; {choose(str(value), hint.__members__)}"
    (wanted,) = (item.type for item in fields(cls) if item.name == key)
    return f"{show(value)} does not fit; give a value of type {getattr(wanted, '__name__', wanted)}"


def _unresolved(node: Any, path: tuple) -> Iterator[tuple[tuple, str]]:
    """The keys whose ``${…}`` cannot be resolved or gives a value of a wrong type, and why."""
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if om.is_missing(node, key):
            continue
        if not om.is_interpolation(node, key):
            if isinstance(node[key], DictConfig | ListConfig):
                yield from _unresolved(node[key], (*path, key))
            continue
        try:
            node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            yield (*path, key), f"{show(_plain(node)[key])} {_why_unresolved(error)}"


def _why_unresolved(error: Exception) -> str:
    text = first_line(error)
    if missing := re.fullmatch(r"Interpolation key '(.+)' not found", text):
        return (
            f"refers to {missing[1]}, which is no key; {did_you_mean(missing[1], '', False, Config, Config)}"
        )
    reason = re.sub(r"^(\w+ raised|While).* interpolation.*?: ", "", text)  # without OmegaConf's preamble
    return f"cannot be resolved: {shorten(reason, 120)}"


def _drop(values: Any, keys: tuple) -> None:
    """Remove the value at ``keys``; an element of a list takes the whole list with it."""
    while isinstance(keys[-1], int):
        keys = keys[:-1]
    for key in keys[:-1]:
        values = values[key]
    values.pop(keys[-1], None)
