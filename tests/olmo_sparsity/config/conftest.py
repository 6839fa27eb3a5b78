"""What the tests of configs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_sparsity.config.load import load_config
from olmo_sparsity.util.errors import UserError

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "support" / "fixtures" / "olmo-tiny.yaml"
BASE = ROOT / "configs" / "base.yaml"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a YAML file and give its path."""

    def write_file(text: str, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf8")
        return path

    return write_file


def refusal(path: Path, *overrides: str) -> str:
    """The message that ``load_config`` refuses with, without the path of the file."""
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value).replace(str(path), "FILE")
