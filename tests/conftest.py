"""What all tests share: the order of their files where several processes run them, and scripts run in this process."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from olmo_sparsity.cli import COMMANDS, imported

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """Have Ctrl-C heard: a shell has background jobs of a script ignore it, and tests of it would hang there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest files. One that came last would keep one process busy and the others waiting.
LONGEST_FIRST = (
    "studies", "distributed", "resume", "engine", "faults", "thesis", "run", "figure2", "losses", "nothing_over_tau",
    "numbers", "other_contexts", "structure", "adapter", "compiling", "paths", "task_training",
    "needle_probe", "far_cache", "submit", "devices", "saving", "selectors", "reference",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests (`make test`), put the longest files first."""
    if hasattr(config, "workerinput"):
        places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of PyTorch: sums in another order would differ in their last bits.

    Of a whole module, so that what its fixtures measure once is measured as its tests measure.
    """
    import torch  # not every test needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small_batches() -> Iterator[None]:
    """Batches of 16 targets in place of 64, so that 40 targets are three of them."""
    from analysis import engine  # with PyTorch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "TARGETS_PER_BATCH", 16)
        yield


@pytest.fixture
def call_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int | None, str]]:
    """Call the ``main`` of a command with these arguments; what it returned and printed. Its `UserError` is raised."""

    def call(name: str, *arguments: object) -> tuple[int | None, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
            capsys.readouterr()
            code = imported(COMMANDS[name].function)()
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script inside this process, which has loaded PyTorch already; a new process takes seconds to do so.

    Returns what `subprocess.run` would: exit status and what was printed.
    """

    def run(script: str | Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(script), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.chdir(ROOT)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
        return subprocess.CompletedProcess(command, int(end.value.code or 0), *capsys.readouterr())

    return run
