"""The commands: one module each, whose ``main`` parses arguments and calls one function.

`scripts/NAME.py` runs them from a checkout, and ``olmo-sparsity NAME`` wherever the package is installed.
"""

from __future__ import annotations

import importlib

from olmo_sparsity.util.errors import run_script


def run(name: str) -> None:
    """Run the command of this name with the arguments of the process, and leave with its exit code."""
    run_script(lambda: importlib.import_module(f"analysis.cli.{name}").main())
