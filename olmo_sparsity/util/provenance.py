"""What made a file: commit, library versions, command and machine, written beside every result."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from olmo_sparsity.util.machine import machine

LIBRARIES = ("torch", "ai2-olmo", "transformers", "accelerate", "deepspeed", "numpy", "olmo-sparsity")


def command_line(script: str | None = None) -> str:
    """How this process was started; with the name of its ``script``, as one would type it in a checkout."""
    program, *arguments = sys.argv
    if not program.startswith("olmo-sparsity "):  # which is typed as it stands, python scripts/NAME.py is not
        program = shlex.join([Path(sys.executable).name, program] if script is None else ["python", script])
    return f"{program} {shlex.join(arguments)}".rstrip()


def provenance() -> dict[str, Any]:
    """Commit, versions, command line, machine and time (UTC) of this process."""
    return {
        "commit": current_commit(),
        "versions": library_versions(),
        "command": command_line(),
        "machine": machine(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers depend on; imports none of them."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def current_commit() -> str:
    """Commit of this code, with a + behind it where files were changed since; empty outside a git checkout."""
    try:
        # Fails for a copy that is installed inside another checkout, as in its .venv: that commit is not of this code.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    # Without optional locks: a run that is killed here must not leave the user's checkout locked.
    return subprocess.run(
        ["git", "--no-optional-locks", *arguments], cwd=here, capture_output=True, text=True, check=True
    ).stdout.strip()
