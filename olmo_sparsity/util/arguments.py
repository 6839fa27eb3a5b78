"""Arguments of the commands: a parser that says what is wrong in one line, the types of what it reads, and arguments
that are made from the fields of a settings dataclass.

A type takes the text of an argument and returns its value; argparse names the option in front of what it refuses.
Settings say once what an argument is:

    @dataclass(frozen=True)
    class Settings:
        checkpoint: str = field(metadata=argument("checkpoint to measure", positional=True))
        n_long: int = field(default=128, metadata=argument("N, tokens of the long context"))
        tau_nats: float = field(default=1.0, metadata=argument("threshold on the gain, in nats", name="tau"))

    add_arguments(parser, Settings)  # CHECKPOINT --n-long --tau
    settings = settings_from(Settings, parser.parse_args())
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_Value = TypeVar("_Value", int, float)
_Settings = TypeVar("_Settings")

LARGEST_NUMBER = 10**12
"""Of anything that is counted; no array is larger, and sums of it stay within 64 bits."""
LARGEST_SEED = 2**63 - 1


class Parser(argparse.ArgumentParser):
    """Shows the module's docstring as it stands, takes no shortened options, and refuses in one line.

    Parsers of subcommands are of this class too.
    """

    def __init__(self, **options: Any) -> None:
        how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**how, **options})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # so that -1e-3 and -0.5,1 are values too

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line; argparse's own would put the usage before it."""
        self.exit(2, f"error: {' '.join(message.splitlines())}; see --help\n")


def whole_number(text: str) -> int:
    """A number of things, from 1 up."""
    return _integer(text, 1, LARGEST_NUMBER)


def whole_number_or_zero(text: str) -> int:
    """A number of things, from 0 up."""
    return _integer(text, 0, LARGEST_NUMBER)


def seed_number(text: str) -> int:
    """A seed of random draws, which every library takes."""
    return _integer(text, 0, LARGEST_SEED)


def _integer(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:  # also what has more than 4,300 digits
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return value


def finite_number(text: str) -> float:
    """Any number but infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value


def positive_number(text: str) -> float:
    """A number above 0."""
    value = finite_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def share_of_one(text: str) -> float:
    """A part of a whole, between 0 and 1."""
    value = finite_number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not lie between 0 and 1")
    return value


def several(type_of_each: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """The type of a list with commas: its values, ascending, each once."""

    def parse(text: str) -> tuple[_Value, ...]:
        return tuple(sorted({type_of_each(part) for part in text.split(",")}))

    return parse


whole_numbers = several(whole_number)
"""Such as ``1,2,4``."""


def texts(text: str) -> tuple[str, ...]:
    """The parts of a list with commas, in their order."""
    return tuple(part.strip() for part in text.split(","))


def out_folder(text: str) -> Path:
    """A folder to write to, which need not exist."""
    return _reachable(_named(text))


def _named(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a path")
    return Path(text)


def _reachable(path: Path) -> Path:
    """``path``, a folder that exists or can be made. Refuses one that a file stands in the way of."""
    blocking = next((each for each in (path, *path.parents) if each.exists() and not each.is_dir()), None)
    if blocking is not None:
        raise argparse.ArgumentTypeError(f"{blocking} is a file; name a folder, or remove the file")
    return path


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": whole_number,
    "float": finite_number,
    "str": str,
    "Path": Path,
    "tuple[int, ...]": whole_numbers,
    "tuple[float, ...]": several(finite_number),
    "tuple[str, ...]": texts,
}
"""How an argument is read, by the annotation of its field, where the field's metadata do not say."""


def argument(
    help: str, *, name: str | None = None, positional: bool = False, **options: Any
) -> dict[str, Any]:
    """Metadata that makes a dataclass field a command-line argument; see `add_arguments`.

    ``name`` is the option's, where it is not the field's; ``options`` are those of `argparse`: ``type``, ``metavar``,
    ``choices``, ``nargs``. A bool becomes a flag, or, where it is True by default, that and its negation. The default
    is added to the help, unless the help mentions one.
    """
    return {"argument": {"name": name, "positional": positional, "help": help, **options}}


def add_arguments(parser: Any, settings: type, *, only: Collection[str] | None = None) -> None:
    """Add an argument to a parser, or a group of one, for every field that has `argument` metadata.

    ``only`` names the fields that are wanted. A field without a default is required. The ``argument_default`` of a
    parser that has one takes the place of theirs. Annotations are read as text: the file of the settings starts with
    ``from __future__ import annotations``.
    """
    for field in fields(settings):
        if "argument" in field.metadata and (only is None or field.name in only):
            _add_argument(parser, field)


def settings_from(
    settings: Callable[..., _Settings], arguments: argparse.Namespace, **others: Any
) -> _Settings:
    """The settings that the command line asks for; ``others`` are fields that it lacks, or that differ from it."""
    names = {field.name for field in fields(settings)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    tuples = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return settings(**given | tuples | others)


def _add_argument(parser: Any, field: Field[Any]) -> None:
    options = dict(field.metadata["argument"])
    name, positional = options.pop("name") or field.name, options.pop("positional")
    annotation = str(field.type).removesuffix(" | None")
    if annotation == "bool":
        options["action"] = argparse.BooleanOptionalAction if field.default is True else "store_true"
    elif options.get("type") is None:
        if "nargs" in options:
            annotation = annotation.removeprefix("tuple[").removesuffix(", ...]")
        options["type"] = _TYPES[annotation]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if default is not MISSING:
        options["default"] = default if parser.argument_default is None else parser.argument_default
        if default not in (None, ()) and default is not False and "default" not in options["help"]:
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            options["help"] += f" (default: {shown.replace('%', '%%')})"
    if positional:
        if default is not MISSING:
            options.setdefault("nargs", "?")
        parser.add_argument(field.name, **options)
    else:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, dest=field.name, required=default is MISSING, **options)
