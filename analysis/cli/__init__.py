"""The commands: one module each, whose ``main`` parses arguments and calls one function.

``olmo-sparsity NAME`` runs them wherever the package is installed, and `scripts/NAME.py` from a checkout.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from olmo_sparsity.util.errors import run_script

PROGRAM = "olmo-sparsity"
_NO_COMMANDS = ("__init__", "__main__", "arguments")


def main() -> None:
    """``olmo-sparsity NAME …``: run a command; without one, list them all."""
    name, *arguments = sys.argv[1:] or ["--help"]
    names = command_names()
    if name in ("-h", "--help"):
        print(_help(names))
    elif name == "--version":
        print(f"{PROGRAM} {_version()}")
    elif (module := name.replace("-", "_")) in names:
        sys.argv = [f"{PROGRAM} {module}", *arguments]
        run(module)
    else:
        close = difflib.get_close_matches(module, names, n=1)
        remedy = f"did you mean {close[0]}" if close else "give one of its list"
        print(f"error: there is no command {name!r}; {remedy}; see {PROGRAM} --help", file=sys.stderr)
        sys.exit(2)


def run(name: str) -> None:
    """Run the command of this name with the arguments of the process, and leave with its exit code."""
    run_script(lambda: importlib.import_module(f"analysis.cli.{name}").main())


def show_log(*packages: str) -> None:
    """Print warnings to standard error, and what these packages tell on their way.

    Called before PyTorch is imported: what its C++ warns of is a page of addresses, and an error follows it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for package in packages:
        logging.getLogger(package).setLevel(logging.INFO)


def command_names() -> list[str]:
    """The commands there are, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NO_COMMANDS)


def command_line(name: str, arguments: Sequence[object] = ()) -> list[str]:
    """The words that start a command in a process of its own, from a checkout or an installed package alike.

    ``-P`` keeps a folder of the user's that happens to be called analysis from being imported instead.
    """
    return [sys.executable, "-P", "-m", "analysis.cli", name, *map(str, arguments)]


def _help(names: Sequence[str]) -> str:
    """Every command with the first line of its docstring, read without importing it."""
    width, lines = max(map(len, names)), []
    for name in names:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf8")
        title = text.splitlines()[0].strip('"')
        lines.append(f"  {name:<{width}}  {title}")
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND …",
            "",
            "Which few far-away tokens does each prediction of a language model need?",
            "",
            "commands:",
            *lines,
            "",
            f"example: {PROGRAM} train configs/demo.yaml; {PROGRAM} COMMAND --help shows what a command takes.",
        ]
    )


def _version() -> str:
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "(not installed)"
