"""Tables of numbers with intervals, as a log and as a narrow terminal show them."""

from io import StringIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from analysis.tables.cells import interval_cell, print_result, print_whole

WIDE = "4.61 [4.48, 4.74] " * 9


def table():
    made = Table(box=None)
    for number in range(2):
        made.add_column(str(number))
    made.add_row("a", WIDE.strip())
    return made


def test_a_log_has_no_broken_cell(capsys):
    print_whole(Console(width=80), table())
    assert WIDE.strip() in capsys.readouterr().out


def test_nor_has_one_of_several_tables(capsys):
    head = "a line of words that is longer than the table and the terminal " * 4
    print_result([Group(Text(head.strip()), table(), Text()), "the end"], [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == head.strip() and lines[-2] == "the end"
    assert any(WIDE.strip() in line for line in lines)


def test_a_terminal_keeps_its_width():
    out = StringIO()
    print_whole(Console(file=out, width=80, force_terminal=True, color_system=None), table())
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_value_that_rounds_to_zero_has_no_sign():
    assert interval_cell({"value": -0.001, "low": -0.2, "high": None}) == "0.00 [-0.20, –]"
