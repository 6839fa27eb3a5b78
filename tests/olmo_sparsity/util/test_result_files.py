"""Records of exact match that are none."""

import json
import re
from pathlib import Path

import pytest

from olmo_sparsity.util.result_files import EXACT_MATCH, EXACT_MATCH_NAME, read_exact_match
from tests.support.refusals import refused


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 100_000, "{}", json.dumps({**EXACT_MATCH, "version": 99})]
)
def test_what_is_no_record_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / EXACT_MATCH_NAME
    path.write_text(content)
    with refused(re.escape(str(path))):
        read_exact_match(path)
