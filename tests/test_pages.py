"""Pages that name code: the tour of both packages, and the API reference. What is renamed is renamed there too."""

import pkgutil
import re
from pathlib import Path

import pytest

import analysis
from tests.test_structure import FILES, IMPORTS, stage_of

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "extending.md").read_text(encoding="utf8")
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PACKAGES = ("analysis", "olmo_sparsity")


def rows_of(package):
    """The paths that every row of a package's table in the tour begins with, in its order."""
    _, _, table = TOUR.partition(f"\n| `{package}/` | what |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tour_names_every_folder_and_file_of_a_package(package):
    there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    assert {name for row in rows_of(package) for name in row} == there


@pytest.mark.parametrize("package", PACKAGES)
def test_what_stands_in_a_row_of_the_tour_imports_only_rows_above_it(package):
    row_of = {f"{package}/{name.rstrip('/')}": n for n, row in enumerate(rows_of(package)) for name in row}
    for path, names in IMPORTS.items():
        if stage_of(path) in row_of:
            for imported in {stage_of(FILES[name]) for name in names & FILES.keys()} & row_of.keys():
                assert row_of[imported] <= row_of[stage_of(path)], f"{path} imports {imported}"


def test_the_tour_names_no_path_that_does_not_exist():
    paths = set(re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|yaml))`", TOUR))
    assert len(paths) > 50
    folders = [ROOT, *(ROOT / package for package in PACKAGES)]
    missing = {path for path in paths if not any((folder / path).exists() for folder in folders)}
    assert {path for path in missing if "NAME." not in path} == set()  # those are the reader's to write


def entries(page):
    """The dotted names that a page of the reference shows: of each entry, and of the members that it picks."""
    for entry in re.split(r"^::: ", page.read_text(encoding="utf8"), flags=re.MULTILINE)[1:]:
        target = entry.split()[0]
        yield target
        picked = re.search(r"members: \[(.*)\]", entry)
        for member in picked[1].split(", ") if picked else ():
            yield f"{target}.{member}"


def test_the_reference_has_every_public_name_of_the_analysis():
    named = {name for page in REFERENCE for name in entries(page)}
    assert {f"analysis.{name}" for name in analysis.__all__} <= named


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.stem)
def test_the_reference_names_what_there_is(page):
    for name in entries(page):
        assert pkgutil.resolve_name(name) is not None, name
