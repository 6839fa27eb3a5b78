"""How a command ends: with a line for what a user can mend, and a traceback for a defect."""

import json

import pytest

from olmo_sparsity.cli import run_script


def run_failing(error):
    """Run a script that raises this."""

    def main():
        raise error

    run_script(main)


def test_what_the_system_refuses_is_one_line(capsys):
    for error in (OSError(30, "Read-only file system", "/a/file"), OSError(28, "No space left on device")):
        with pytest.raises(SystemExit, match="1"):
            run_failing(error)
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and str(error) in printed


def test_ctrl_c_has_its_exit_code_and_a_defect_keeps_its_traceback():
    with pytest.raises(SystemExit, match="130"):
        run_failing(KeyboardInterrupt())
    bad_descriptor = OSError(9, "Bad file descriptor")
    for error in (ValueError("ours"), RuntimeError("ours"), bad_descriptor, json.JSONDecodeError("x", "", 0)):
        with pytest.raises(type(error)):
            run_failing(error)
