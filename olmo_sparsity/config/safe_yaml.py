"""What the text of a config file or of an override may do: its YAML, and what its ``${name:…}`` can ask for.

libyaml and OmegaConf trust what they read: brackets by the thousand end the process, long numbers and aliases of
aliases take minutes. The text is therefore looked through first, without recursion, in time linear in its length.

A resolved config is printed, saved beside every checkpoint and sent to experiment trackers, and a secret in the
environment would go with it. Only the few variables that tell jobs and scratch folders apart can be read.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from olmo.config import TrainConfig
from olmo.util import find_latest_checkpoint, is_url
from omegaconf import DictConfig, ListConfig
from omegaconf import OmegaConf as om
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from olmo_sparsity.config.messages import shorten
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
    except (FileNotFoundError, YamlError):
        raise
    except UnicodeDecodeError as error:
        raise YamlError(f"is no UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise YamlError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL
        raise YamlError(f"cannot be read: {error}") from None
    return parse_yaml(text)


def parse_yaml(text: str) -> DictConfig | ListConfig:
    """The values of a YAML document, ``${…}`` in them not resolved. Raises `YamlError`."""
    nodes = check_yaml(text)
    with _one_line():
        document = yaml.compose(text, Loader=_LOADER)
        if isinstance(document, yaml.ScalarNode) and document.value not in ("", "~", "null"):
            # OmegaConf would read a quoted text as YAML once more, without limits.
            raise YamlError(_ONE_VALUE)
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


_BY_SCHEDULER = {
    "Slurm": """SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_SUBMIT_DIR
        SLURM_TMPDIR SLURM_RESTART_COUNT""",
    "PBS": "PBS_JOBID PBS_JOBNAME PBS_ARRAYID PBS_ARRAY_INDEX PBS_O_WORKDIR",
    "LSF": "LSB_JOBID LSB_JOBNAME LSB_JOBINDEX LS_SUBCWD",
    "Grid Engine": "JOB_ID JOB_NAME SGE_TASK_ID SGE_O_WORKDIR",
    "others": "FLUX_JOB_ID COBALT_JOBID OAR_JOB_ID",
    "OLMo's own files, on LUMI": "SCRATCH_DIR",
}
READABLE = frozenset(name for names in _BY_SCHEDULER.values() for name in names.split())
"""The environment variables that a config may read."""


@contextmanager
def config_resolvers() -> Iterator[None]:
    """Inside, OmegaConf has these resolvers and no others; afterwards those that it had before."""
    before = BaseContainer._resolvers  # there is no public way to put resolvers back
    try:
        om.clear_resolvers()  # into a new table: what a notebook has registered is not for files from elsewhere
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # OLMo 0.6 calls a function that OmegaConf has deprecated
            TrainConfig._register_resolvers()
            om.register_new_resolver("oc.env", _env, replace=True)
            om.register_new_resolver("path.last_checkpoint", _local_last_checkpoint, replace=True)
        yield
    finally:
        BaseContainer._resolvers = before


def _env(name: str, *default: Any) -> Any:
    """As OmegaConf's `oc.env`, for the `READABLE` variables.

    It is asked with the name that is left when everything in it is resolved, so that no nesting gets around it.
    """
    if name not in READABLE:
        raise ValueError(
            f"{shorten(str(name), 40)} is not for configs, which are saved and shown; "
            "write the value, or pass it as an override"
        )
    if name in os.environ:
        return os.environ[name]
    if not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return None if default[0] is None else str(default[0])


def _local_last_checkpoint(path: str) -> str:
    """As OLMo's, which would ask S3 or Google Storage, with the user's credentials, about a URL."""
    if is_url(path):
        raise ValueError(f"{shorten(path, 60)} is no folder; copy the checkpoint here")
    found = find_latest_checkpoint(path)
    if found is None:
        raise FileNotFoundError(f"Could not find a latest checkpoint at {path}")
    return str(found)
