"""What every measurement of a corpus does with held-out tokens that were replaced by others of equal size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.corpus import tokens
from olmo_sparsity.util.errors import UserError


def change_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.write_bytes(data)


def assert_refused_and_right_ones_remembered(
    measure: Callable[[Any], object], asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure twice, reading the right tokens once; then change one: refused, in the old folder and in a new one.

    ``asked`` are settings, whose corpus is copied beside their ``out``.
    """
    corpus = shutil.copytree(asked.corpus, Path(asked.out).with_name("corpus"))
    asked = replace(asked, corpus=str(corpus))
    measure(asked)
    monkeypatch.setattr(tokens, "_read", None)  # nothing is read again
    measure(asked)
    monkeypatch.undo()
    change_one_byte(corpus / "heldout-00000.npy")
    other = Path(asked.out).with_name("other")
    for each in (asked, replace(asked, out=str(other))):
        with pytest.raises(UserError, match=r"checksum mismatch in .*heldout-00000\.npy"):
            measure(each)
    assert not other.exists()
