"""Arguments of all scripts: numbers and paths that make no sense are one line, before anything is written."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_file,
    out_folder,
    seed_number,
    settings_from,
    several,
    whole_number,
    whole_numbers,
)
from tests.test_structure import imported

ROOT = Path(__file__).parents[3]
COMMANDS = [
    *(
        path
        for path in (ROOT / "analysis" / "cli").glob("*.py")
        if path.stem not in ("__init__", "arguments")
    ),
    *(ROOT / "scripts" / f"{name}.py" for name in ("benchmark", "fault_test")),
]

NO_WHOLE = ("0", "-1", "-7", "nan", "inf", "1.5", "1e3", "", "many", str(10**30), "9" * 5000)
BELOW_0 = tuple(text for text in NO_WHOLE if text != "0")
NO_SEED = (*BELOW_0, str(2**63))
NO_NUMBER = ("nan", "inf", "-inf", "1e400", "", "many", "1,2")
NO_POSITIVE = (*NO_NUMBER, "0", "-1", "-1e-3")
NO_LIST = ("1,,2", "0", "nan", "-4", "1e400", "", "1,", "1;2", "1,-4", f"1,{10**30}")
NO_NUMBERS = ("0,,1", "nan", "1e400", "", "0,inf")

MEASUREMENT = {"--corpus": "c", "--out": "o"}
BOOTSTRAP = {"--resamples": (*NO_WHOLE, "999"), "--seed": NO_SEED}
SLURM = {"--gpus-per-node": BELOW_0, "--cpus": NO_WHOLE}
"""Script and what it must be given, and its numeric options with values that each must refuse."""
OPTIONS = {
    ("benchmark", "train"): {"--rounds": NO_WHOLE, "--steps": NO_WHOLE},
    ("benchmark", "data"): {"--rounds": NO_WHOLE},
    ("benchmark", "synthetic"): {"--rounds": NO_WHOLE, "--steps": NO_WHOLE},
    ("benchmark", "length"): dict.fromkeys(("--length", "--windows", "--rounds"), NO_WHOLE),
    ("benchmark", "influence", "--out", "o"): {
        **dict.fromkeys(("--n-long", "--n-short", "--targets", "--screened-targets", "--repeats"), NO_WHOLE),
        **dict.fromkeys(("--lengths", "--k", "--counts"), NO_LIST),
        "--seed": NO_SEED,
        "--tau": NO_NUMBER,
    },
    ("compare", "a", "b"): BOOTSTRAP,
    ("exact_match", "a"): {
        **dict.fromkeys(("--samples", "--batch-tokens"), NO_WHOLE),
        **dict.fromkeys(("--lengths", "--ks"), NO_LIST),
        "--seed": NO_SEED,
    },
    ("fault_test",): {
        **dict.fromkeys(("--injections", "--repeat", "--jobs"), NO_WHOLE),
        "--seed": NO_SEED,
        "--time-out": NO_POSITIVE,
    },
    ("figure1", "a", "--out", "o"): BOOTSTRAP,
    ("figure2", "a"): {"--k": NO_WHOLE, **BOOTSTRAP},
    ("figure6", "a", "--out", "o"): BOOTSTRAP,
    ("influence", "a", "--corpus", "c", "--out", "o"): {
        **dict.fromkeys(("--n-long", "--n-short", "--targets", "--tokens-per-batch", "--limit"), NO_WHOLE),
        "--k": NO_LIST,
        "--memory-limit": NO_POSITIVE,
        "--tau": NO_NUMBER,
        "--seed": NO_SEED,
        "--shard": ("0/3", "4/3", "1", "", f"1/{10**30}", "1/" + "9" * 5000),
    },
    ("ladder", "a", "--length", "l", "--out", "o"): {"--k": NO_WHOLE, "--times": NO_WHOLE, **BOOTSTRAP},
    ("length", "a", "--corpus", "c", "--out", "o"): {
        "--lengths": NO_LIST, "--windows": NO_WHOLE, "--tokens-per-batch": NO_WHOLE, "--seed": NO_SEED,
    },
    ("longppl", "a", "--corpus", "c", "--out", "o", "--n-long", "9", "--n-short", "3"): {
        **dict.fromkeys(("--n-long", "--n-short", "--sliding-window", "--segments", "--documents"), NO_WHOLE),
        **dict.fromkeys(("--alpha", "--beta"), NO_NUMBER),
        "--tokens-per-batch": NO_WHOLE,
        "--seed": NO_SEED,
    },
    ("needle", "a", "--corpus", "c", "--out", "o"): {
        **dict.fromkeys(("--lengths", "--ks"), NO_LIST),
        **dict.fromkeys(("--samples", "--key-tokens", "--recall-length", "--recall-samples"), NO_WHOLE),
        "--depths": (*NO_NUMBERS, "-0.5", "-0.5,1", "1.5"),
        "--tokens-per-batch": NO_WHOLE,
        "--seed": NO_SEED,
    },
    ("plot_metrics", "a"): {"--smooth": (*NO_NUMBER, "-0.1", "1")},
    ("prepare_data", "docs", "--out", "o"): {
        **dict.fromkeys(("--workers", "--vocab-size"), NO_WHOLE),
        "--seed": NO_SEED,
        "--decontaminate-min-characters": BELOW_0,
        "--heldout-fraction": (*NO_POSITIVE, "1", "2"),
        "--tokenizer-sample-mb": NO_POSITIVE,
    },
    ("prepare_data", "c4", "--out", "o"): {
        **dict.fromkeys(("--limit-documents", "--limit-tokens", "--heldout-documents"), NO_WHOLE),
        "--shard": ("0/3", "4/3", f"1/{10**30}"),
    },
    ("recall", "--out", "o"): {
        **dict.fromkeys(("--n-long", "--n-short", "--models"), NO_WHOLE), "--seed": NO_SEED,
    },
    ("recall", "--out", "o", "--checkpoint", "a"): {
        **dict.fromkeys(("--length", "--samples"), NO_WHOLE), "--ks": NO_LIST,
    },
    ("report", "a"): {"--examples": BELOW_0, "--k": NO_WHOLE, **BOOTSTRAP},
    ("submit", "train", "a.yaml"): {"--nodes": NO_WHOLE, "--processes-per-node": NO_WHOLE, **SLURM},
    ("submit", "prepare_c4", "--out", "o"): {"--array": ("0", "-1", "nan", "4%0", "", str(10**30)), **SLURM},
    ("submit", "influence", "a", "--corpus", "c", "--out", "o"): {"--array": ("0", "1,2", str(10**30)), **SLURM},
    ("sweep", "a.yaml", "--grid", "seed=1", "--out", "o"): {"--jobs": NO_WHOLE, "--only": NO_WHOLE, **SLURM},
    ("train", "a.yaml"): {"--show": NO_WHOLE},
}  # fmt: skip
CASES = [
    pytest.param(command, option, values, id=f"{' '.join(command[:2])} {option}")
    for command, options in OPTIONS.items()
    for option, values in options.items()
]


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """Runs a script, in this process and an empty folder; returns its exit code and what it printed as an error."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        return int(end.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize(("command", "option", "values"), CASES)
def test_a_number_that_makes_no_sense_is_one_line_that_names_the_option(
    script, tmp_path, command, option, values
):
    for value in values:
        code, said = script(*command, f"{option}={value}")
        assert code in (1, 2), value
        assert said.startswith("error: ") and said.count("\n") == 1, (value, said)
        assert option in said, (value, said)
    assert not list(tmp_path.iterdir())


def test_the_list_of_numeric_options_is_whole():
    """Every option of a script whose type is a number stands above."""
    types = {"whole_number", "whole_number_or_zero", "seed_number", "finite_number", "positive_number"}
    types |= {"share_of_one", "whole_numbers", "several", "int", "float"}
    tested = {(command[0], option) for command, options in OPTIONS.items() for option in options}
    for path in COMMANDS:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            given = {key.value for key in call.keywords if key.arg == "type"}
            kinds = {getattr(each.func if isinstance(each, ast.Call) else each, "id", "") for each in given}
            assert not kinds & {"int", "float"}, f"{path.name}: line {call.lineno} takes any number"
            if kinds & types and isinstance(call.args[0], ast.Constant):
                assert (path.stem, call.args[0].value) in tested


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_script_has_the_parser_that_refuses_in_one_line(path):
    assert "olmo_sparsity.util.arguments" in imported(path)
    assert "ArgumentParser" not in path.read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("influence", "a"), "the following arguments are required: --corpus, --out"),
        (("submit", "trian"), "argument KIND: invalid choice: 'trian'"),
        (("submit", "train", "a.yaml", "--node", "3"), "unrecognized arguments: --node 3"),
        (("benchmark",), "the following arguments are required: BENCHMARK"),
        (("compare", "a", "b", "--ou\nt"), "unrecognized arguments: --ou t"),
    ],
)
def test_other_mistakes_are_one_line_too(script, command, message):
    code, said = script(*command)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {message}") and said.endswith("; see --help\n")


def test_overrides_of_a_config_are_no_options_of_the_script(script, tmp_path):
    """What looks like a shortened option is one of the config, and is refused there."""
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    code, said = script("train", "a.yaml", "--res=true", "--model.d_modle=3", "--dry-run")
    assert code == 1
    assert "res: unknown key" in said and "model.d_model" in said


def test_good_values_are_read():
    parser = Parser()
    parser.add_argument("--tau", type=float)
    parser.add_argument("--ks", type=whole_numbers, default="4,1,2,4")
    parser.add_argument("--depths", type=several(float))
    read = parser.parse_args(["--tau", "-1e-3", "--depths", "-0.5,1"])
    assert (read.tau, read.ks, read.depths) == (-1e-3, (1, 2, 4), (-0.5, 1.0))
    assert whole_number("10000000000") == 10**10
    with pytest.raises(SystemExit):
        parser.parse_args(["--dep", "1"])


@dataclass(frozen=True)
class Settings:
    checkpoints: tuple[str, ...] = field(metadata=argument("what is measured", positional=True, nargs="+"))
    out: Path = field(metadata=argument("folder", type=out_folder))
    tau_nats: float = field(default=1.0, metadata=argument("threshold", name="tau"))
    ks: tuple[int, ...] = field(default=(1, 2), metadata=argument("numbers of tokens", name="k"))
    device: str | None = field(default=None, metadata=argument("default: a GPU", choices=["cpu", "cuda"]))
    limit: int | None = field(default=None, metadata=argument("at most 100 %% of them", metavar="n"))
    bf16: bool = field(default=False, metadata=argument("coarser"))
    seed: int = field(default=0, metadata=argument("of the draws", type=seed_number))
    not_an_argument: int = 7


def test_arguments_are_made_from_the_fields_of_settings(capsys):
    parser = Parser(prog="x")
    add_arguments(parser, Settings)
    least = settings_from(Settings, parser.parse_args(["a", "--out", "o"]))
    assert least == Settings(("a",), Path("o"))
    given = [
        "a",
        "b",
        "--out",
        "o",
        "--tau",
        "-1e-3",
        "--k",
        "4,1",
        "--device",
        "cpu",
        "--limit",
        "3",
        "--bf16",
    ]
    assert settings_from(Settings, parser.parse_args(given), not_an_argument=8) == Settings(
        ("a", "b"), Path("o"), -1e-3, (1, 4), "cpu", 3, True, 0, 8
    )
    for wrong in (["a"], ["a", "--out", "o", "--k", "0"], ["a", "--out", "o", "--limit", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
    help = parser.format_help()
    assert "(default: 1.0)" in help and "(default: 1,2)" in help and "(default: 0)" in help
    assert help.count("default: ") == 4
    assert "100 % of" in help


def test_only_the_fields_that_are_wanted_become_arguments():
    parser = Parser()
    add_arguments(parser, Settings, only=("checkpoints", "tau_nats"))
    assert vars(parser.parse_args(["a"])) == {"checkpoints": ["a"], "tau_nats": 1.0}


# Where results go.

FOLDER_OUT = {
    ("benchmark", "influence"), ("exact_match", "a"), ("export_hf", "a"), ("fault_test",),
    ("figure1", "a"), ("figure2", "a"), ("figure6", "a"),
    ("influence", "a", "--corpus", "c"), ("ladder", "a", "--length", "l"),
    ("length", "a", "--corpus", "c"), ("longppl", "a", "--corpus", "c", "--n-long", "9", "--n-short", "3"),
    ("needle", "a", "--corpus", "c"), ("plot_length", "a"), ("prepare_data", "docs"), ("recall",),
    ("submit", "prepare_c4"), ("submit", "influence", "a", "--corpus", "c"),
    ("sweep", "a.yaml", "--grid", "seed=1"),
}  # fmt: skip
FILE_OUT = {
    ("compare", "a", "b"): "compare.json",
    ("report", "a"): "report.html",
    ("plot_metrics", "a"): "loss.png",
}


def test_every_script_that_writes_somewhere_is_tried_below():
    with_out = {path.stem for path in COMMANDS if '"--out"' in path.read_text()}
    measured = {path.stem for path in COMMANDS if "add_measurement_arguments" in path.read_text()}
    assert with_out | measured == {command[0] for command in (*FOLDER_OUT, *FILE_OUT)}


@pytest.mark.parametrize(("command", "out"), [
    *itertools.product(sorted(FOLDER_OUT), ("file", "file/deeper", "")), (("merge_records",), "file"),
])  # fmt: skip
def test_a_file_where_a_folder_is_needed_is_refused_before_any_work(script, tmp_path, command, out):
    (tmp_path / "file").write_text("mine")
    code, said = script(*command, *([out] if command == ("merge_records",) else ["--out", out]))
    assert (code, said.count("\n")) == (2, 1), said
    assert re.match(r"error: argument (--out|OUT): (file is a file; name a folder|it is empty)", said), said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", FILE_OUT)
def test_a_folder_that_cannot_hold_the_file_is_refused_before_any_work(script, tmp_path, command):
    name = FILE_OUT[command]
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "kept").touch()
    (tmp_path / "file").touch()
    for out, said_of in {
        "out": f"out/{name} is a folder",
        "file/x.png": "file is a file",
        "": "is empty",
    }.items():
        code, said = script(*command, "--out", out)
        assert (code, said.count("\n")) == (2, 1), said
        assert said.startswith("error: argument --out: ") and said_of in said
    assert (tmp_path / "out" / name / "kept").is_file()


def test_a_file_goes_into_a_folder_under_its_usual_name(tmp_path):
    read = out_file("report.html")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "report.html").touch()
    assert read(str(tmp_path / "folder")) == tmp_path / "folder" / "report.html"
    assert read(f"{tmp_path}/new/") == tmp_path / "new" / "report.html"
    assert read(str(tmp_path / "new" / "page.html")) == tmp_path / "new" / "page.html"
    assert out_folder(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"
