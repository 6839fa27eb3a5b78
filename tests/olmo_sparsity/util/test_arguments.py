"""Arguments of all commands: numbers and paths that make no sense are one line, before anything is done."""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from olmo_sparsity import cli
from olmo_sparsity.util import arguments as types
from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_folder,
    seed_number,
    settings_from,
    several,
    whole_number,
    whole_numbers,
)

ROOT = Path(__file__).parents[3]
COMMANDS = (*cli.COMMANDS, "benchmark")

NO_WHOLE = ("0", "-1", "-7", "nan", "inf", "1.5", "1e3", "", "many", str(10**30), "9" * 5000)
BELOW_0 = tuple(text for text in NO_WHOLE if text != "0")
NO_NUMBER = ("nan", "inf", "-inf", "1e400", "", "many", "1,2")
NO_POSITIVE = (*NO_NUMBER, "0", "-1", "-1e-3")
REFUSED = {
    types.whole_number: NO_WHOLE,
    types.whole_number_or_zero: BELOW_0,
    types.seed_number: (*BELOW_0, str(2**63)),
    types.finite_number: NO_NUMBER,
    types.positive_number: NO_POSITIVE,
    types.share_of_one: (*NO_POSITIVE, "1", "2"),
    types.whole_numbers: ("1,,2", "0", "nan", "-4", "1e400", "", "1,", "1;2", "1,-4", f"1,{10**30}"),
    types.out_folder: ("file", "file/deeper", ""),
}
"""What each type of argument must refuse, beside a file called file."""
REFUSED_BY_NAME = {
    "several.<locals>.parse": ("0,,1", "nan", "1e400", "", "0,inf"),
    "_array": ("0", "0-3", "2-5", "a", "4%0", "1,2", "", "1" * 30, "4\n5"),
}
"""The same of types that are made where they are needed."""


class Parsed(Exception):
    """A command has come to reading its arguments, with this parser."""


def start_of(command):
    """The file that a command is in, and what is typed before its arguments."""
    if command in cli.COMMANDS:
        return Path(cli.__file__).with_name("__main__.py"), [command]
    return ROOT / "scripts" / f"{command}.py", []


def parsers_of(monkeypatch, command):
    """The parser of a command, and those of its subcommands, by what is typed before the options."""
    script, arguments = start_of(command)

    def stop(parser, *rest, **more):
        raise Parsed(parser)

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", stop)
        patch.setattr(sys, "argv", [script.name, *arguments])
        patch.syspath_prepend(str(script.parent))
        with pytest.raises(Parsed) as seen:
            runpy.run_path(str(script), run_name="__main__")
    (parser,) = seen.value.args
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


def refused_by(kind):
    """What a type of argument must refuse; nothing where the type is a command's own."""
    return REFUSED.get(kind) or REFUSED_BY_NAME.get(getattr(kind, "__qualname__", ""), ())


@pytest.mark.parametrize("command", COMMANDS)
def test_what_makes_no_sense_is_one_line_that_names_the_option(command, monkeypatch, capsys, tmp_path):
    parsers = parsers_of(monkeypatch, command)
    assert all(isinstance(parser, Parser) for parser in parsers)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for parser in parsers:
        for action in parser._actions:
            option = (action.option_strings or [""])[-1]
            name = option or action.metavar or action.dest
            assert action.type not in (int, float), f"{name} takes any number"
            for value in refused_by(action.type):
                with pytest.raises(SystemExit, match="2"):
                    parser.parse_args([f"{option}={value}" if option else value])
                said = capsys.readouterr().err
                assert said.startswith(f"error: argument {'/'.join(action.option_strings) or name}: "), said
                assert said.endswith("; see --help\n") and said.count("\n") == 1, said
    assert Path("file").read_text() == "mine"


def test_the_types_are_those_that_the_commands_use(monkeypatch):
    parsers = [parser for command in COMMANDS for parser in parsers_of(monkeypatch, command)]
    used = {action.type for parser in parsers for action in parser._actions}
    assert used >= REFUSED.keys()
    assert {getattr(kind, "__qualname__", "") for kind in used} >= REFUSED_BY_NAME.keys()


@pytest.fixture
def script(run_here):
    """Runs a command in this process; its exit code and what it printed as an error."""

    def run(name, *arguments) -> tuple[int, str]:
        script, before = start_of(name)
        done = run_here(script, *before, *arguments)
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("influence", "a"), "the following arguments are required: --out"),
        (("submit", "trian"), "argument COMMAND: invalid choice: 'trian'"),
        (("benchmark",), "the following arguments are required: benchmark"),
        (("figure2", "a", "b", "--ou\nt"), "unrecognized arguments: --ou t"),
    ],
)
def test_other_mistakes_are_one_line_too(script, command, message):
    code, said = script(*command)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {message}") and said.endswith("; see --help\n")


def test_overrides_of_a_config_are_no_options_of_the_script(script, tmp_path):
    """What looks like a shortened option is one of the config, and is refused there."""
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    code, said = script("train", tmp_path / "a.yaml", "--res=true", "--model.d_modle=3", "--dry-run")
    assert code == 1
    assert "res: Key 'res' not in 'Config'" in said


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
    title: bool = field(default=True, metadata=argument("a line above"))
    not_an_argument: int = 7


def test_arguments_are_made_from_the_fields_of_settings():
    parser = Parser(prog="x")
    add_arguments(parser, Settings)
    least = settings_from(Settings, parser.parse_args(["a", "--out", "o"]))
    assert least == Settings(("a",), Path("o"))
    numbers = ["--tau", "-1e-3", "--k", "4,1", "--limit", "3"]
    given = ["a", "b", "--out", "o", *numbers, "--device", "cpu", "--bf16", "--no-title"]
    assert settings_from(Settings, parser.parse_args(given), not_an_argument=8) == Settings(
        ("a", "b"), Path("o"), -1e-3, (1, 4), "cpu", 3, True, 0, False, 8
    )
    for wrong in (["a"], ["a", "--out", "o", "--k", "0"], ["a", "--out", "o", "--limit", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
    help = parser.format_help()
    assert "(default: 1.0)" in help and "(default: 1,2)" in help and "(default: 0)" in help
    assert help.count("default: ") == 5 and "(default: True)" in help
    assert "100 % of" in help


def test_only_the_fields_that_are_wanted_become_arguments():
    parser = Parser()
    add_arguments(parser, Settings, only=("checkpoints", "tau_nats"))
    assert vars(parser.parse_args(["a"])) == {"checkpoints": ["a"], "tau_nats": 1.0}


def test_a_folder_that_is_not_there_is_taken(tmp_path):
    assert out_folder(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"
