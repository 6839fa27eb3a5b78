"""Arguments of all commands: numbers and paths that make no sense are refused before anything is done."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from olmo_sparsity.util import arguments as types
from olmo_sparsity.util.arguments import Parser, add_arguments, argument, settings_from

NO_WHOLE = ("0", "-1", "nan", "inf", "1.5", "1e3", "", "many", str(10**30), "9" * 5000)
BELOW_0 = tuple(text for text in NO_WHOLE if text != "0")
REFUSED = {
    types.whole_number: NO_WHOLE,
    types.whole_number_or_zero: BELOW_0,
    types.whole_numbers: ("1,,2", "0", "nan", "-4", "1e400", "", "1,", "1;2", "1,-4", f"1,{10**30}"),
    types.comma_separated(float): ("", "1,", "a", "1;2"),
    types.out_folder: ("file", "file/deeper", ""),
    types.path: ("",),
    types.shard: ("3/2", "0/2", "1", "1/0", "-1/2", "1/2/3", ""),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_makes_no_sense_is_refused(kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for text in REFUSED[kind]:
        with pytest.raises(
            argparse.ArgumentTypeError, match="'|is empty"
        ):  # else argparse shows a function's name
            kind(text)
    assert Path("file").read_text() == "mine"


def test_good_values_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert types.path("~/a") == tmp_path / "a" and types.out_folder("~/new") == tmp_path / "new"
    assert types.whole_number("10000000000") == 10**10
    assert types.whole_numbers("4,1,2,4") == (1, 2, 4) and types.comma_separated(float)("-0.5,1") == (
        -0.5,
        1.0,
    )
    assert types.shard("2/3") == (2, 3)
    assert types.out_folder(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"


@dataclass(frozen=True)
class Settings:
    source: str
    files: tuple[str, ...] = field(default=(), metadata=argument("what is measured", nargs="+"))
    tau_nats: float = field(default=1.0, metadata=argument("threshold", name="tau"))
    ks: tuple[int, ...] = field(default=(1, 2), metadata=argument("numbers of tokens", name="k"))
    device: str | None = field(default=None, metadata=argument("default: a GPU", choices=["cpu", "cuda"]))
    limit: int | None = field(default=None, metadata=argument("at most 100 %% of them", metavar="n"))
    bf16: bool = field(default=False, metadata=argument("coarser"))
    seed: int = field(default=0, metadata=argument("of the draws", type=types.whole_number_or_zero))
    title: bool = field(default=True, metadata=argument("a line above"))
    not_an_argument: int = 7


def test_arguments_are_made_from_the_fields_of_settings():
    parser = Parser(prog="x")
    parser.add_argument("source")
    add_arguments(parser, Settings)
    assert settings_from(Settings, parser.parse_args(["a"])) == Settings("a")
    line = "a --files b c --tau -1e-3 --k 4,1 --limit 3 --device cpu --bf16 --no-title"
    expected = Settings("a", ("b", "c"), -1e-3, (1, 4), "cpu", 3, True, 0, False)
    assert settings_from(Settings, parser.parse_args(line.split())) == expected
    # it may be a field of a config
    assert parser.parse_known_args(["a", "--lim", "1"])[1] == ["--lim", "1"]
    for wrong in (["a", "--k", "0"], ["a", "--limit", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
