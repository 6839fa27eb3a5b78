"""YAML of a config file or of an override, refused in one line where it is malformed, nested too deeply or too large.

libyaml and OmegaConf trust what they read: brackets by the thousand end the process, long numbers and aliases of
aliases take minutes. The text is therefore looked through first, without recursion, in time linear in its length.
"""

from __future__ import annotations

import io
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig
from omegaconf import OmegaConf as om
from omegaconf.errors import OmegaConfBaseException

from olmo_sparsity.util.errors import first_line

MAX_BYTES = 8 << 20
"""A saved config that names fifty thousand token files stays below it."""
MAX_NODES = 100_000
MAX_ALIASED_NODES = 10_000
"""What a text with aliases may grow to, where that is more than it has of its own."""
MAX_DEPTH = 32
MAX_SCALAR, MAX_KEY, MAX_INTERPOLATION = 10_000, 200, 1_000
"""Characters of a value, a key, and a value with ``${…}``, whose grammar is slow and recursive."""
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxXoO_:.]{100,}")
_ONE_VALUE = "holds one value; a config is made of lines `name: value`"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OF_THE_TEXT = (
    *(yaml.YAMLError, OmegaConfBaseException, ValueError, KeyError, TypeError, AttributeError),
    *(IndexError, OverflowError, RecursionError),
)
"""What loading YAML raises for a text that it cannot make values of."""


class YamlError(ValueError):
    """What is wrong with a text, on one line, and where."""


def read_yaml(path: Path) -> DictConfig | ListConfig:
    """The values of a file. Raises `YamlError`, and `FileNotFoundError` where there is none."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
            raise YamlError(f"cannot be read: it is {kind}; name a YAML file")
        if found.st_size > MAX_BYTES:
            raise YamlError(f"cannot be read: {found.st_size:,} bytes are too many for a config")
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf8")  # a file of /proc has no size
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise YamlError(f"is no UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL
        raise error if isinstance(error, YamlError) else YamlError(f"cannot be read: {error}") from None
    return parse_yaml(text)


def parse_yaml(text: str) -> DictConfig | ListConfig:
    """The values of a YAML document, ``${…}`` in them not resolved. Raises `YamlError`."""
    nodes = check_yaml(text)
    with _one_line():
        document = yaml.compose(text, Loader=_LOADER)
        if isinstance(document, yaml.ScalarNode) and document.value not in ("", "~", "null"):
            raise YamlError(
                _ONE_VALUE
            )  # OmegaConf would read a quoted text as YAML once more, without limits
        return om.load(io.StringIO(text), max_yaml_expanded_nodes=max(MAX_ALIASED_NODES, nodes))


def parse_override(name: str, text: str) -> DictConfig | ListConfig:
    """The values of ``name=text``, where ``name`` may be dotted. Raises `YamlError`."""
    if len(name) > MAX_KEY:
        raise YamlError(f"cannot be read: a name of {len(name):,} characters")
    check_yaml(text)
    with _one_line():
        return om.from_dotlist([f"{name}={text}"])


def check_yaml(text: str) -> int:
    """The number of nodes. Raises `YamlError` for what is malformed, too deep, too long or too much."""
    depth = nodes = 0
    with _one_line():
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            nodes += isinstance(event, yaml.NodeEvent)
            if what := _excess(event, depth, nodes):
                raise YamlError(f"{_where(event.start_mark)}{what}")
    return nodes


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn what yaml and OmegaConf raise for a text that they cannot make values of into `YamlError`."""
    try:
        yield
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        what = str(error.problem)
        if what.startswith("YAML"):  # OmegaConf's own limits, with advice about its environment variables
            what = "its aliases make far more of it than is written" if "expan" in what else "it holds itself"
        raise YamlError(f"{_where(error.problem_mark)}malformed YAML: {what}") from None
    except OSError:  # OmegaConf's, for a document that is neither a mapping nor a list
        raise YamlError(_ONE_VALUE) from None
    except _OF_THE_TEXT as error:
        raise YamlError(f"cannot be read: {first_line(error)}") from None


def _where(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""


def _excess(event: yaml.Event, depth: int, nodes: int) -> str | None:
    if depth > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep; no config is"
    if nodes > MAX_NODES:
        return f"more than {MAX_NODES:,} values; no config has so many"
    if not isinstance(event, yaml.ScalarEvent):
        return None
    most = MAX_INTERPOLATION if "${" in event.value else MAX_SCALAR
    if len(event.value) > most:
        return f"a value of {len(event.value):,} characters; give at most {most:,}"
    if (event.tag or not event.style) and _LONG_NUMBER.fullmatch(event.value):
        return f"a number of {len(event.value):,} digits; give a shorter one"
    return None
