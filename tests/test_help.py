"""What `--help` says of every option of every command."""

import argparse
import re
import sys
from collections.abc import Iterator

import pytest

from olmo_sparsity.cli import COMMANDS, imported
from olmo_sparsity.util.arguments import Parser


class Parsing(Exception):
    """Raised where a command begins to parse its arguments, with its parser."""


@pytest.fixture
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """All that a command takes, but --help and what is hidden."""

    def parsing(parser: Parser, *arguments: object, **more: object) -> None:
        raise Parsing(parser)

    monkeypatch.setattr(Parser, "parse_known_args", parsing)
    monkeypatch.setattr(sys, "argv", [request.param])
    with pytest.raises(Parsing) as caught:
        imported(COMMANDS[request.param].function)()
    (parser,) = caught.value.args
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert isinstance(actions[0], argparse._HelpAction) and len(actions) > 1
    return actions[1:]


def values(default: object) -> Iterator[str]:
    """A default as its parts are written in a help text."""
    for value in default if isinstance(default, tuple) else (default,):
        yield f"{value:g}" if isinstance(value, float) else str(value)


every_command = pytest.mark.parametrize("options", COMMANDS, indirect=True)


@every_command
def test_every_option_says_what_it_does(options: list[argparse.Action]) -> None:
    for option in options:
        assert option.help, option.dest
        said = option.help.split("(default")[0].split()
        assert len(said) >= 3, f"{option.dest}: {option.help}"
        # "of a pass" and "without what was measured" are no help to whoever does not know already
        assert said[0].lower() not in ("of", "to", "default:", "without"), f"{option.dest}: {option.help}"


def test_a_name_with_hyphens_stays_in_one_line(call_main, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        call_main("measure", "--help")
    assert re.search(
        "default: leave-one-out,\\s+leave-one-out-kl,\\s+leave-one-in,\\s+random,", capsys.readouterr().out
    )


@every_command
def test_every_option_that_takes_a_value_names_its_default(options: list[argparse.Action]) -> None:
    for option in options:
        if option.nargs == 0 or option.required or not option.option_strings:
            continue
        assert option.help and option.help.count("(default: ") == 1, f"{option.dest}: {option.help}"
        shown = option.help.split("(default: ")[1]
        if option.default not in (None, (), [], {}, "", (1, "1")):
            assert all(value in shown for value in values(option.default)), f"{option.dest}: {option.help}"
