"""Arguments of the commands: a parser, the types of what it reads, and arguments that are made from the fields of a
settings dataclass.

A type takes the text of an argument and returns its value, or raises; argparse names the option and the text.
Settings say once what an argument is:

    @dataclass(frozen=True)
    class Settings:
        n_long: int = field(default=128, metadata=argument("N, tokens of the long context"))
        tau_nats: float = field(default=1.0, metadata=argument("threshold on the gain, in nats", name="tau"))

    add_arguments(parser, Settings)  # --n-long --tau
    settings = settings_from(Settings, parser.parse_args())
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import shipped, user_path

_Value = TypeVar("_Value", int, float)
_Settings = TypeVar("_Settings")


class _Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a description to the width of the terminal; tables and examples stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            is_table = re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE)
            paragraphs.append(paragraph if is_table else textwrap.fill(paragraph, width))
        return textwrap.indent("\n\n".join(paragraphs), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Names such as leave-one-out-kl stay in one line."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Shows the module's docstring, and takes no shortened options.

    Its last line says where the files are that help and messages name. Parsers of subcommands are of this class too.
    """

    def __init__(self, **options: Any) -> None:
        defaults = {
            "formatter_class": _Paragraphs,
            "allow_abbrev": False,
            "epilog": f"configs/…, docs/… and slurm/… are in {shipped('.')}",
        }
        super().__init__(**{**defaults, **options})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # so that -1e-3 and -0.5,1 are values too


def whole_number(text: str, least: int = 1) -> int:
    """From 1 to 10^12: no array has more elements, and sums of such numbers stay within 64 bits."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to 10^12")
    return value


def whole_number_or_zero(text: str) -> int:
    """From 0 to 10^12, such as a seed."""
    return whole_number(text, least=0)


def finite_number(text: str) -> float:
    """Neither an infinity nor a NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def comma_separated(value_type: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """The type of a list with commas: its values, ascending, each once."""

    def values(text: str) -> tuple[_Value, ...]:
        try:
            return tuple(sorted({value_type(item) for item in text.split(",")}))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} are no numbers with commas between them") from None

    return values


whole_numbers = comma_separated(whole_number)
"""Such as ``1,2,4``."""


def texts(text: str) -> tuple[str, ...]:
    """The items of a list with commas, in their order."""
    return tuple(item.strip() for item in text.split(","))


def path(text: str) -> Path:
    """A file or folder; see `user_path`."""
    try:
        return user_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def out_folder(text: str) -> Path:
    """A folder to write to, which need not exist. Where a file is in its way it is refused before the work is done."""
    folder = path(text)
    if any(parent.exists() and not parent.is_dir() for parent in (folder, *folder.parents)):
        raise argparse.ArgumentTypeError(f"{text!r} is no folder, and none can be made there")
    return folder


def shard(text: str) -> tuple[int, int]:
    """i and n of the i-th of n shares of a long job, such as "3/8"."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i from 1 to n, such as 3/8")
    return int(match[1]), int(match[2])


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": whole_number,
    "float": float,
    "str": str,
    "Path": path,
    "tuple[int, ...]": whole_numbers,
    "tuple[float, ...]": comma_separated(float),
    "tuple[str, ...]": texts,
}
"""How an argument is read, by the annotation of its field, where the field's metadata do not say."""


def argument(help: str, *, name: str | None = None, **options: Any) -> dict[str, Any]:
    """Metadata that makes a dataclass field, which has a default, a command-line option; see `add_arguments`.

    ``name`` is the option's, where it is not the field's; ``options`` are those of `argparse`: ``type``, ``metavar``,
    ``choices``, ``nargs``. A bool becomes a flag, or, where it is True by default, that and its negation. The default
    is added to the help, unless the help mentions one.
    """
    return {"argument": {"name": name, "help": help, **options}}


def add_arguments(parser: Any, settings: type) -> None:
    """Add an option to a parser, or a group of one, for every field that has `argument` metadata.

    Annotations are read as text: the file of the settings starts with ``from __future__ import annotations``.
    """
    for field in fields(settings):
        if "argument" not in field.metadata:
            continue
        options = dict(field.metadata["argument"])
        default = field.default
        option = f"--{options.pop('name') or field.name}".replace("_", "-")
        annotation = str(field.type).removesuffix(" | None")
        if annotation == "bool":
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            options.setdefault("type", str if "nargs" in options else _TYPES[annotation])
        if default not in (None, ()) and default is not False and "default" not in options["help"]:
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            options["help"] += f" (default: {shown.replace('%', '%%')})"
        parser.add_argument(option, dest=field.name, default=default, **options)


def settings_from(settings: Callable[..., _Settings], arguments: argparse.Namespace) -> _Settings:
    """The settings of a command line."""
    names = {field.name for field in fields(settings)}  # type: ignore[arg-type]
    values = {name: value for name, value in vars(arguments).items() if name in names}
    return settings(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )
