"""Files that are whole or absent, and never in the place of a folder."""

import json
import re

import pytest

from olmo_sparsity.util.errors import run_script
from olmo_sparsity.util.files import (
    EXACT_MATCH,
    EXACT_MATCH_NAME,
    atomic_path,
    read_exact_match,
    read_json,
    write_json,
)
from tests.support.refusals import refused


def test_a_folder_is_never_replaced_by_a_file(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "run", {})
    assert (tmp_path / "run").is_dir() and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_takes_the_place_of_a_folder_when_whole(tmp_path):
    for content in ("first", "second"):
        with atomic_path(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "folder") as temporary:
        temporary.mkdir()
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        (b"", "is damaged"),
        (b"[1, 2]", "holds no dict"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 200_000, "is damaged"),
    ],
)
def test_damaged_json_is_one_line(tmp_path, content, says):
    path = tmp_path / "value.json"
    if content is not None:
        path.write_bytes(content)
    with refused(says) as error:
        read_json(path, "write it again")
    assert str(error.value).endswith("write it again")


@pytest.mark.parametrize("content", ["{}", json.dumps({**EXACT_MATCH, "version": 99})])
def test_what_is_no_record_of_exact_match_is_refused(content, tmp_path):
    path = tmp_path / EXACT_MATCH_NAME
    path.write_text(content)
    with refused(re.escape(str(path))):
        read_exact_match(path)


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
