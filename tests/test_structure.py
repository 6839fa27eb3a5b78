"""The shape of the project, read off its folders: a folder is a stage, and imports go down only."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from olmo_sparsity.config.load import load_config

ROOT = Path(__file__).parents[1]
PACKAGES = ("olmo_sparsity", "analysis", "scripts")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
COMMANDS = ROOT / "analysis" / "cli"
ENGINES = {"accelerate", "deepspeed"}


def module_of(path):
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def stage_of(path):
    """The folder that a file is a part of; a file in a package's own folder is a stage by itself."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] != "scripts" else "scripts"


FILES = {module_of(path): path for path in SOURCES}


def imported(path):
    """Every module that a file imports, inside functions too, by its full dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & FILES.keys() or {node.module}
    return found


IMPORTS = {path: imported(path) for path in SOURCES}


def circle(graph):
    """What imports each other in a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.xfail(reason="the files that were only moved are put together next", strict=False)
def test_no_files_import_each_other_in_a_circle():
    assert not circle({module_of(path): (names & FILES.keys()) for path, names in IMPORTS.items()})


@pytest.mark.xfail(reason="the files that were only moved are put together next", strict=False)
def test_a_folder_is_a_stage_and_imports_only_stages_before_it():
    stages = defaultdict(set)
    for path, names in IMPORTS.items():
        stages[stage_of(path)] |= {stage_of(FILES[name]) for name in names & FILES.keys()} - {stage_of(path)}
    assert not circle(stages)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in IMPORTS[path]}
    above = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests"}
    assert not tops & above
    if path.parent != ROOT / "olmo_sparsity" / "training" or path.name not in ("engine.py", "zero.py"):
        assert not tops & ENGINES, "only training/engine.py and zero.py import Accelerate and DeepSpeed"
    if package == "analysis" and path.parent != COMMANDS:
        assert not {name for name in IMPORTS[path] if name.startswith("olmo_sparsity.training")}


def loaded_by(modules, names):
    """Which of ``names`` are loaded in a process that imports these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({set(names)!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.xfail(reason="the files that were only moved are put together next", strict=False)
@pytest.mark.parametrize(
    ("stages", "absent"),
    [
        (("text", "model", "measure"), ENGINES | {"matplotlib"}),
        (("records", "stats", "plots", "report"), {"torch"}),
        (("cli",), {"torch", "transformers", "matplotlib"} | ENGINES),
    ],
    ids=[
        "measuring needs no engine and draws nothing",
        "records and what follows",
        "commands, to show --help",
    ],
)
def test_a_stage_loads_no_more_than_it_needs(stages, absent):
    modules = [
        name for name, path in FILES.items() if stage_of(path) in {f"analysis/{each}" for each in stages}
    ]
    assert modules and loaded_by(modules, absent) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_yaml_loads(path):
    config = load_config(path)
    assert config.model.d_model > 0
    assert config.model.rope == (path.stem not in ("nope", "alibi"))


def test_there_are_configs_to_load():
    assert {"base.yaml", "demo.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_every_script_teaches(path):
    result = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "example" in result.stdout


def test_every_command_has_its_script():
    commands = {path.stem for path in COMMANDS.glob("*.py")} - {"__init__", "__main__", "arguments"}
    assert commands <= {path.stem for path in (ROOT / "scripts").glob("*.py")}


def test_packages_do_not_print():
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] != "scripts" and path.parent != COMMANDS:
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            printed = [
                call.lineno
                for call in calls
                if getattr(call.func, "id", "") == "print" and not any(k.arg == "file" for k in call.keywords)
            ]
            assert not printed, f"{path}: prints at lines {printed}"
