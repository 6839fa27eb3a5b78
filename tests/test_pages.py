"""Pages that name code: the tour of both packages, the API reference, and tables of what is chosen by name.

What is renamed or registered is renamed and named there too.
"""

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

import analysis
from analysis import probes
from analysis.cache_eviction.reference import REFERENCES
from analysis.policies import POLICIES
from analysis.probes.probe import Probe
from analysis.selectors import BLIND, SELECTORS
from olmo_sparsity.attention import ATTENTIONS
from olmo_sparsity.attention.attention import SOFTMAX
from olmo_sparsity.cli import COMMANDS
from olmo_sparsity.model.rope_scaling import ROPE_SCALINGS
from olmo_sparsity.positions import COUPLED_SCHEMES, SCHEMES
from olmo_sparsity.tasks.task import TASKS
from tests.test_structure import FILES, IMPORTS, stage_of

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "extending.md").read_text(encoding="utf8")
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PACKAGES = ("analysis", "olmo_sparsity")
FAMILY_OF = {name: registered.family for name, registered in SELECTORS.items()}
"""Of every registered selector, as the package has it: other tests may register more."""


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


def rows_below(page, heading):
    """The cells of every row of the table in a page of docs/ whose first line begins so."""
    _, _, below = (ROOT / "docs" / page).read_text(encoding="utf8").partition(f"\n| {heading} |")
    _, *rows = below.partition("\n\n")[0].splitlines()[1:]
    assert rows, f"{page} has no table {heading}"
    return [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]


def names_in(cell):
    """What stands between backticks in a cell of a table."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_selector_has_its_row_and_family_in_the_method_and_every_row_its_selector():
    documented = {
        name: family.strip()
        for first, family, _ in rows_below("method.md", "selector | family")
        for name in names_in(first)
    }
    assert documented.pop("EXACT@PROPOSER:m") == ""  # the screened form of any two
    assert documented == FAMILY_OF


def test_the_policies_of_the_method_are_selectors_that_never_look_at_the_target():
    policies = {
        name
        for first, *_ in rows_below(
            "method.md", "selector | what it keeps, as cache | observed by, aware and blind"
        )
        for name in names_in(first)
    }
    assert {name for name in policies if FAMILY_OF[name] == BLIND} == set(POLICIES)


@pytest.mark.parametrize(
    ("page", "heading", "registered"),
    [
        ("method.md", "`positions.scheme`", {*SCHEMES, *COUPLED_SCHEMES}),
        ("method.md", "`model.attention`", {*ATTENTIONS, SOFTMAX}),
        ("synthetic.md", "`task.name`", set(TASKS)),
        ("method.md", "reference", set(REFERENCES)),
    ],
)
def test_what_users_choose_by_name_has_its_row_and_every_row_is_a_choice(page, heading, registered):
    names = [name for cells in rows_below(page, heading) for name in names_in(cells[0])]
    assert sorted(names) == sorted(registered)


def test_every_scaling_of_rope_and_every_probe_is_named_where_they_are_described():
    method = (ROOT / "docs" / "method.md").read_text(encoding="utf8")
    encodings = re.search(r"\*\*Encodings\.\*\*.*?\n\n", method, re.DOTALL)[0]
    assert set(ROPE_SCALINGS) <= set(names_in(encodings))
    analysis_page = (ROOT / "docs" / "analysis.md").read_text(encoding="utf8")
    for module in pkgutil.iter_modules(probes.__path__, "analysis.probes."):
        import_module(module.name)
    names = {
        probe.RESULT.NAME for probe in Probe.__subclasses__() if probe.__module__.startswith("analysis.")
    }
    assert names and names <= set(names_in(analysis_page)) & COMMANDS.keys()


def test_the_gallery_shows_the_figures_and_xrays_of_all_pages():
    """A new figure of a page of results has its place in the gallery, too."""
    results = ROOT / "results"
    shown = set()
    for page in results.rglob("*.md"):
        if page.name != "gallery.md":
            pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf8"))
            shown |= {(page.parent / picture).resolve() for picture in pictures}
    shown |= set(results.rglob("xray.html"))
    links = re.findall(r"\(([^)]+\.(?:png|html))\)", (results / "gallery.md").read_text(encoding="utf8"))
    assert {(results / link).resolve() for link in links} == shown
