"""Loading the configuration of a run: YAML files, the ones they are based on, and overrides.

OLMo's own YAML files load unchanged. A file may name a `base:` and hold differences only: sections are merged, any
other value, lists included, is replaced. What OmegaConf refuses, it words; what `validate` refuses is listed at once.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml
from olmo.config import EvaluatorType
from olmo.util import clean_opt
from omegaconf import DictConfig
from omegaconf import OmegaConf as om
from omegaconf.errors import OmegaConfBaseException

from olmo_sparsity.config.fields import field_value, is_set
from olmo_sparsity.config.olmo_fields import IGNORED
from olmo_sparsity.config.rules import NOT_FIXED, rules
from olmo_sparsity.config.schema import Config
from olmo_sparsity.config.validate import validate
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import find_shipped, user_path

log = logging.getLogger(__name__)

NOT_LOADED = (
    *(yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError),
    *(AttributeError, LookupError, OverflowError, RecursionError, AssertionError),
)
"""What YAML, OmegaConf and OLMo's resolvers raise for text that they cannot make a config of."""
_MOST_NODES = 1_000_000  # a run may name ten thousand token files, for which OmegaConf's own limit is too low


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, warn: bool = True, only: Sequence[str] = ()
) -> Config:
    """Read a YAML file, its `base:` files and overrides such as ``--optimizer.learning_rate=1e-4``.

    Raises `UserError` for what is no config, and one that lists all that `validate` finds wrong. With ``warn``, warns
    once of fields that have no effect. ``only``: the keys that are read, where others may be anything; by default all.
    """
    values = None
    try:
        values = _merged(find_shipped(user_path(path)), overrides)
        if left_open := [line for line in om.to_yaml(values).splitlines() if line.endswith(": ???")]:
            raise ValueError(f"{left_open[0].strip()} is left open; give it a value")
        values = om.masked_copy(values, [*only]) if only else values
        config = cast(Config, om.to_object(om.merge(_defaults(), values)))
        om.structured(config)  # looks at the elements of lists too; what is refused here could not be saved
        _expand_home(config)
    except NOT_LOADED as error:
        raise UserError(f"{path}: {_in_one_line(error)}{_missing_variables(error, values)}") from error
    notes = _taken_over(config)
    if problems := validate(config):
        if len(problems) > 1:
            raise UserError(f"{len(problems)} problems in {path}:", *problems)
        raise UserError(f"{path}: {problems[0]}")
    for note in notes if warn else ():
        log.warning("%s: %s", path, note)
    if warn and (ignored := ignored_fields(config) | _unlike_neox(config, values)):
        reasons = dict.fromkeys(ignored.values())
        texts = (f"{', '.join(name for name in ignored if ignored[name] == why)} ({why})" for why in reasons)
        log.warning("%s: no effect here: %s", path, "; ".join(texts))
    return config


def _expand_home(config: Config) -> None:
    """Put the home folder in the place of ``~`` in all paths of a config."""
    for section, name in (
        (config, "save_folder"),
        (config, "initial_weights"),
        (config, "load_path"),
        (config.corpus, "path"),
        (config.tokenizer, "identifier"),
    ):
        if path := getattr(section, name):
            setattr(section, name, os.path.expanduser(path))
    for data in (config.data, config.evaluation):
        data.paths = data.paths and list(map(os.path.expanduser, data.paths))


def ignored_fields(config: Config) -> dict[str, str]:
    """The fields that this engine does not read, and what it has instead."""
    return {
        name: reason
        for name, reason in IGNORED.items()
        if is_set(config, name) and field_value(config, name) not in (None, False, 0, "cpu")
    }


def _taken_over(config: Config) -> list[str]:
    """Translate some of OLMo's fields into those that have their meaning here; returns a line for each."""
    notes = []
    starts_anew = not config.restore_dataloader or config.reset_trainer_state
    if (
        config.load_path
        and starts_anew
        and config.initial_weights is None
        and Path(config.load_path).is_dir()
    ):
        notes.append(
            f"load_path {config.load_path} is read as initial_weights; optimizer and schedule start anew"
        )
        config.initial_weights = config.load_path
        config.load_path = None
        config.restore_dataloader = True
        config.reset_optimizer_state = False
        config.reset_trainer_state = False
    if config.evaluation.paths is None and config.data.paths and (files := _files_of_evaluators(config)):
        notes.append(
            f"the {len(files)} files of evaluators are read as evaluation.paths, for one held-out loss"
        )
        config.evaluation.paths = files
        if config.evaluation.interval is None:
            config.evaluation.interval = config.eval_interval
        config.evaluators = []
        config.eval_interval = Config().eval_interval
    return notes


def _files_of_evaluators(config: Config) -> list[str]:
    """The token files of OLMo's evaluators of type lm; none where one is of another type or on another machine."""
    files: list[str] = []
    for evaluator in config.evaluators:
        if evaluator.type == EvaluatorType.lm:
            data = evaluator.data
            of_evaluator = [*(data.paths or ()), *chain.from_iterable((data.datasets or {}).values())]
            if data.memmap_dtype != config.data.memmap_dtype or any("://" in file for file in of_evaluator):
                return []
            files += of_evaluator
    return files


def _unlike_neox(config: Config, written: DictConfig) -> dict[str, str]:
    """Fields that GPT-NeoX fixes, where the config has other values, as for OLMo."""
    if config.model.family != "gpt_neox":
        return {}
    ignored = {}
    for name, value, rule in rules(config.model):
        if name in written.model and value is not None and rule.in_neox not in (NOT_FIXED, value):
            ignored[f"model.{name}"] = f"GPT-NeoX has {rule.in_neox}"
    return ignored


@cache
def _defaults() -> DictConfig:
    """A config of nothing but defaults, and the resolvers of OLMo's ``${path.glob:…}``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OLMo 0.6 calls a function that OmegaConf has deprecated
        Config._register_resolvers()
    return om.structured(Config)


def _merged(path: Path, overrides: Sequence[str]) -> DictConfig:
    """The values of the base files, the file and the overrides, neither checked nor resolved yet."""
    options = [_without_base_60(clean_opt(override)) for override in overrides]
    if without_value := [option for option in options if not option.partition("=")[2].strip()]:
        raise ValueError(
            f"--{without_value[0]} has no value, as of a variable that is not set; null stands for none"
        )
    bases = [find_shipped(option.removeprefix("base=")) for option in options if option.startswith("base=")]
    layers = _layers(path, (), bases[-1] if bases else None)
    written = [om.from_dotlist([option]) for option in options if not option.startswith("base=")]
    return Config.update_legacy_settings(om.merge({}, *layers, *written))


def _without_base_60(option: str) -> str:
    """``data.skip_steps=6:7`` as text: YAML 1.1 would read the value as 6 x 60 + 7."""
    name, _, value = option.partition("=")
    return f"{name}='{value}'" if re.fullmatch(r"\d+(:\d+)+", value) else option


def _layers(path: Path, above: tuple[Path, ...], base: Path | None = None) -> list[Any]:
    """The file and what it is based on, base first; ``base`` stands in for the one that the file names."""
    if path.resolve() in above:
        raise ValueError(f"its base files form a circle, by {path}")
    values: Any = om.load(path, max_yaml_expanded_nodes=_MOST_NODES)
    named = values.pop("base", None)
    if base is None and named is not None:
        base = find_shipped(path.parent / named, named)
    return [*(_layers(base, (*above, path.resolve())) if base else ()), values]


def _missing_variables(error: Exception, values: DictConfig | None) -> str:
    """The environment variables that the value at fault would be made of and that are not set, as a remedy."""
    section = (getattr(error, "full_key", None) or "").partition(".")[0]
    if values is None or section not in values:
        return ""
    written = str(om.to_container(values, resolve=False)[section])  # type: ignore[index]
    names = [name for name in re.findall(r"\$\{oc\.env:(\w+)", written) if name not in os.environ]
    return f"; set the environment variable {names[0]}, or --{section}" if names else ""


def _in_one_line(error: Exception) -> str:
    """OmegaConf's message about a key, or YAML's about a line of a text."""
    key = getattr(error, "full_key", None)
    return f"{key}: {first_line(error)}" if key else " ".join(str(error).split())
