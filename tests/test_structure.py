"""The shape of the project, read off its folders: a folder is a stage, and imports go down only."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from olmo_sparsity.cli import COMMANDS
from olmo_sparsity.config.load import load_config
from tests.support.processes import SECONDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("olmo_sparsity", "analysis", "scripts")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
ENGINES = {"accelerate", "deepspeed"}
HEAVY = {"torch", "transformers", "matplotlib", *ENGINES}


def module_of(path):
    """The dotted name of a source file; a package in scripts is imported by its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "scripts" and len(parts) > 2 else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def stage_of(path):
    """The folder that a file is a part of; a file in a package's own folder is a stage by itself."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] != "scripts" else "scripts"


FILES = {module_of(path): path for path in SOURCES}


def imported(path):
    """Every module that a file imports, inside functions too, by its full dotted name."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= names & FILES.keys() or {node.module}
    return modules


IMPORTS = {path: imported(path) for path in SOURCES}


def circle(graph):
    """What imports each other in a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_files_import_each_other_in_a_circle():
    assert not circle({module_of(path): (names & FILES.keys()) for path, names in IMPORTS.items()})


def test_modules_are_imported_by_name_at_few_places():
    """Elsewhere an import is an import: what is read by name alone, no reader and no test of circles sees."""
    by_name = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if re.search(r"\bimport_module\(|\b__import__\(", path.read_text(encoding="utf8"))
    }
    assert by_name == {
        "analysis/__init__.py",  # the public names, loaded when they are asked for
        "olmo_sparsity/attention/__init__.py",  # every attention
        "olmo_sparsity/cli/__init__.py",  # the table of commands
        "olmo_sparsity/tasks/__init__.py",  # every task
        "scripts/benchmark.py",  # its parts
    }


def test_a_folder_is_a_stage_and_imports_only_stages_before_it():
    stages = defaultdict(set)
    for path, names in IMPORTS.items():
        stages[stage_of(path)] |= {stage_of(FILES[name]) for name in names & FILES.keys()} - {stage_of(path)}
    assert not circle(stages)


def test_imports_point_one_way():
    """And only two files of training import Accelerate and DeepSpeed."""
    forbidden = {}
    for path, names in IMPORTS.items():
        name, (package, *_) = path.relative_to(ROOT).as_posix(), path.relative_to(ROOT).parts
        never = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests"}
        if name not in ("olmo_sparsity/training/engine.py", "olmo_sparsity/training/zero.py"):
            never |= ENGINES
        if package == "analysis":
            never.add("olmo_sparsity.training")
        forbidden[name] = {one for one in names if any(f"{one}.".startswith(f"{part}.") for part in never)}
    assert {name: names for name, names in forbidden.items() if names} == {}


def loaded_by(modules, names):
    """Which of ``names`` are loaded in a process that imports these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({set(names)!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("analysis",), HEAVY | {"pandas", "numpy"}),
        (("analysis.measuring",), ENGINES | {"matplotlib", "boto3", "google.cloud"}),
        (
            (
                "analysis.api",
                "analysis.stats.numbers",
                "analysis.figures.figure2",
                "analysis.xray",
                "analysis.selectors",
            ),
            {"torch"},
        ),
        (sorted({command.function.split(":")[0] for command in COMMANDS.values()}), HEAVY - {"matplotlib"}),
    ],
    ids=["the package", "measuring", "results, numbers, figures and names", "commands"],
)
def test_what_is_imported_loads_no_more_than_it_needs(modules, absent):
    assert loaded_by(modules, absent) == []


def test_one_door_leads_from_the_analysis_to_what_training_needs():
    allowed = ("olmo_sparsity.util", "olmo_sparsity.cli")
    for path, names in IMPORTS.items():
        parts = path.relative_to(ROOT).parts
        if parts[0] == "analysis" and parts[1] != "project.py":
            beyond = {name for name in names & FILES.keys() if name.startswith("olmo_sparsity")}
            assert not {name for name in beyond if not name.startswith(allowed)}, path


NAMED = re.compile(r"\b(?:configs|docs|results|scripts|slurm|tests)/\w[\w./-]*")
"""A file of the checkout, or the beginning of its name, as in ``docs/method.md`` and ``configs/pose-c4-SIZE``."""
INSTALLED = ("configs/", "docs/", "slurm/")


def test_help_and_messages_name_no_file_that_an_installed_package_lacks():
    named = defaultdict(set)
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] != "scripts":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for name in NAMED.findall(node.value):
                        named[name.rstrip("./")].add(str(path.relative_to(ROOT)))
    assert {"docs/method.md", "configs/demo.yaml", "slurm/job.sbatch"} <= named.keys()
    assert {name: paths for name, paths in named.items() if not name.startswith(INSTALLED)} == {}
    assert {name: paths for name, paths in named.items() if not list(ROOT.glob(f"{name}*"))} == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_yaml_loads(path):
    config = load_config(path)
    assert config.model.d_model > 0
    assert config.model.rope == (path.stem not in ("nope", "alibi", "drope", "fox"))
    # Numbers on C4 do not depend on the machine; small models on a CPU go by what it has.
    assert config.precision == ("amp_bf16" if config.corpus.path == "data/c4" else None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command, call_main, capsys):
    with pytest.raises(SystemExit, match="0"):
        call_main(command, "--help")
    description = re.split(
        "^(?:positional arguments|options):$", capsys.readouterr().out, flags=re.MULTILINE
    )[0]
    assert "example" in description
    assert not re.search(r"\S {5,}--", description), "a backslash joins a line of the docstring with the next"


def test_one_command_runs_and_lists_them_all():
    def run(*words):
        command = [sys.executable, "-m", "olmo_sparsity.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)

    listed = run().stdout
    assert all(re.search(rf"^  {name} +\w", listed, re.MULTILINE) for name in COMMANDS)
    assert "tokenizer" in run("prepare-data", "--help").stdout
    unknown = run("trian")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == (
        "error: there is no command 'trian'; did you mean train? See olmo-sparsity --help\n"
    )
    assert {path.stem for path in SCRIPTS} <= {*COMMANDS, "benchmark"}
