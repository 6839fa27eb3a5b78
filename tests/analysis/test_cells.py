"""`figure2 --cells` names the cells of a study, also those whose names have commas."""

import pytest

from analysis.cli import _joined_by_label, named_cells, run_figure2
from analysis.measurement import save_study
from olmo_sparsity.util.arguments import texts
from olmo_sparsity.util.errors import UserError
from tests.support.refusals import refused
from tests.support.results import made_result

CELLS = ("config=pose,seed=1", "config=pose,seed=2", "config=pose", "seed=2", "plain")


@pytest.mark.parametrize(
    "given, names",
    [
        ("plain", ["plain"]),
        ("config=pose,seed=1", ["config=pose,seed=1"]),
        ("config=pose,seed=1,config=pose,seed=2", ["config=pose,seed=1", "config=pose,seed=2"]),
        ("plain, config=pose,seed=2", ["plain", "config=pose,seed=2"]),
        ("config=pose,plain", ["config=pose", "plain"]),
        ("seed=2,config=pose", ["seed=2", "config=pose"]),
        ("plain,plain", ["plain", "plain"]),
    ],
)
def test_the_longest_names_count(given: str, names: list[str]) -> None:
    assert named_cells(texts(given), CELLS) == names


@pytest.mark.parametrize(
    "given, message",
    [
        (
            "config=pose,seed=3",
            "^there is no cell 'seed=3'; name cells with --cells, of config=pose,seed=1; ",
        ),
        ("nope", "^there is no cell 'nope'; "),
        ("", "^there is no cell ''; "),
    ],
)
def test_what_is_no_cell_is_named(given: str, message: str) -> None:
    with refused(message):
        named_cells(texts(given), CELLS)


def test_cells_are_listed_where_none_is_named() -> None:
    with refused("^name cells with --cells, of a, b$"):
        named_cells((), ("a", "b"))


def test_a_label_is_of_the_cell_at_its_place(tmp_path) -> None:
    runs = {name: made_result(run=seed) for seed, name in enumerate(("a", "b", "c"), 1)}
    save_study(tmp_path, runs)
    by_label = _joined_by_label([tmp_path], ("c", "a", "b"), ("C", "others", "others"))
    assert list(by_label) == ["C", "others"]
    assert by_label["C"].settings.model.training_seed == runs["c"].settings.model.training_seed
    seeds = [run.settings.model.training_seed for run in by_label["others"].runs]
    assert seeds == [runs[name].settings.model.training_seed for name in ("a", "b")]


@pytest.mark.slow
def test_figure2_reads_cells_whose_names_have_commas(tmp_path, monkeypatch, capsys) -> None:
    cells = {f"config=pose,seed={seed}": made_result(run=seed) for seed in (1, 2, 3)}
    save_study(tmp_path, cells)
    names = ",".join(list(cells)[:2])
    arguments = [
        "figure2",
        str(tmp_path),
        "--cells",
        names,
        "--out",
        str(tmp_path / "out"),
        "--resamples",
        "1000",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    run_figure2()
    assert "two runs pooled" in capsys.readouterr().out
    assert (tmp_path / "out" / "numbers.csv").is_file()
    monkeypatch.setattr("sys.argv", ["figure2", str(tmp_path)])
    with pytest.raises(UserError, match="of config=pose,seed=1; config=pose,seed=2"):
        run_figure2()
