"""Files that are whole or absent, and never in the place of a folder."""

import json
import re

import pytest

from olmo_sparsity.util.files import (
    EXACT_MATCH,
    EXACT_MATCH_NAME,
    atomic_path,
    read_exact_match,
    read_json,
    shard_names,
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


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a.safetensors"]}, {"weight_map": {"weight": 1}}])
def test_an_index_of_shards_without_files_is_damaged(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    write_json(path, index)
    with refused(r"index.json is damaged \(its weight_map names no files\); save it again"):
        shard_names(path, "save it again")
    write_json(path, {"weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "1.safetensors"}})
    assert shard_names(path, "save it again") == ["1.safetensors", "2.safetensors"]
