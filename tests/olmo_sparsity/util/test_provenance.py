"""What is written beside a result: commit, command and machine."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from olmo_sparsity.util import provenance


def test_the_command_can_be_typed_again(monkeypatch):
    arguments = ["--labels", "RoPE,RoPE + PoSE", "--out", "x"]
    for program, words in (
        ("olmo-sparsity length", ["olmo-sparsity", "length"]),
        ("scripts/length.py", [Path(sys.executable).name, "scripts/length.py"]),
    ):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        assert shlex.split(provenance.provenance()["command"]) == [*words, *arguments]


def test_the_commit_is_that_of_this_code_not_of_a_checkout_that_it_is_installed_in(tmp_path, monkeypatch):
    def git(*arguments):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *settings, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    code = tmp_path / ".venv" / "provenance.py"
    code.parent.mkdir()
    code.touch()
    git("init", "--quiet")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git("add", ".gitignore")
    git("commit", "--quiet", "-m", "notes of mine")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert provenance.current_commit() == ""
    git("add", "--force", str(code))
    git("commit", "--quiet", "-m", "the code")
    assert provenance.current_commit() == git("rev-parse", "--short=12", "HEAD")
    code.write_text("changed")
    assert provenance.current_commit().endswith("+")


def test_the_machine_is_what_the_system_says():
    machine = provenance.machine()
    done = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert machine["processor"] in done.stdout
    flags = next(line for line in done.stdout.splitlines() if line.startswith("Flags:")).split()[1:]
    assert set(machine["features"]) == set(provenance.FEATURES) & set(flags)
    assert machine["cores"] == len(os.sched_getaffinity(0)) and machine["threads"] == torch.get_num_threads()
    assert torch.cuda.is_available() or (machine["gpu"], machine["driver"]) == (None, None)
