"""The import directions of the project, and that every file of a kind keeps its promises."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.config.load import load_config

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("olmo_sparsity", "analysis", "scripts") for path in (ROOT / folder).rglob("*.py")
)
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
ENGINES = {"accelerate", "deepspeed"}


def imported_modules(path):
    """Every module that a file imports, inside functions too, by its full dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def tops(path):
    return {name.split(".")[0] for name in imported_modules(path)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    above = {"olmo_sparsity": {"analysis", "scripts"}, "analysis": {"scripts"}, "scripts": set()}[package]
    assert not tops(path) & (above | {"tests"})
    if path.parent != ROOT / "olmo_sparsity" / "training" or path.name not in ("engine.py", "zero.py"):
        assert not tops(path) & ENGINES, "only training/engine.py and zero.py import Accelerate and DeepSpeed"
    if package == "analysis":
        assert not {name for name in imported_modules(path) if name.startswith("olmo_sparsity.training")}


@pytest.mark.parametrize(
    "module", ["analysis.measure.influence", "analysis.model.scorer", "analysis.measure.selectors"]
)
def test_analysis_runs_without_the_engines(module):
    code = f"import sys, {module}; print(sorted({{'accelerate', 'deepspeed'}} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize(
    "module",
    [
        "analysis.records.store",
        "analysis.stats.bootstrap",
        "analysis.stats.summary",
        "analysis.stats.dependencies",
        "analysis.stats.compare",
        "analysis.plots.figure2",
        "analysis.plots.dependencies",
        "analysis.plots.length",
        "analysis.plots.costs",
        "analysis.stats.grid",
        "analysis.report.page",
        "analysis.text.kinds",
        "analysis.text.decode",
        "analysis.stats.exact_match",
        "analysis.plots.figure1",
        "analysis.stats.bound",
        "analysis.plots.recall",
    ],
)
def test_figures_are_made_without_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
        == "False"
    )


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


def test_packages_do_not_print():
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] != "scripts":
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            printed = [
                n.lineno
                for n in calls
                if getattr(n.func, "id", "") == "print" and not any(k.arg == "file" for k in n.keywords)
            ]
            assert not printed, f"{path}: prints at lines {printed}"
