"""Checkpoints whose files were changed, and what loading one says."""

import json
import shutil
from dataclasses import replace

import pytest

from olmo_sparsity.checkpoint import TrainState, load_model, load_state, save_checkpoint, what_is_torn
from olmo_sparsity.util.errors import UserError
from tests.support import tiny
from tests.support.tiny import checkpoint


def test_checksums_name_files_of_the_checkpoint_only(tmp_path):
    source, _ = checkpoint(tmp_path / "run")
    assert what_is_torn(source) is None
    noted = json.loads((source / "checksums.json").read_text())
    shutil.copyfile(source / "state.json", tmp_path / "outside.json")
    for text, what in (
        (json.dumps({**noted, "../../outside.json": noted["state.json"]}), "names other files than those"),
        (json.dumps({**noted, str(tmp_path / "outside.json"): noted["state.json"]}), "names other files"),
        (json.dumps({**noted, "config.yaml": 7}), "missing or damaged"),
        (json.dumps([*noted]), "missing or damaged"),
        ("[" * 100_000, "missing or damaged"),
    ):
        (source / "checksums.json").write_text(text)
        assert what in what_is_torn(source)
    for text in ("[" * 100_000, "[]", "{}", '{"step": "1", "tokens": 2}', '{"step": 1, "tokens": 2, "x": 3}'):
        (source / "state.json").write_text(text)
        with pytest.raises(UserError, match="state.json is damaged .*; resume from an earlier checkpoint"):
            load_state(source)


def test_replaced_fields_of_a_checkpoint_do_not_warn_again(tmp_path, caplog):
    config = replace(tiny.train_config(tmp_path), gen1_gc_interval=7)
    save_checkpoint(tmp_path / "run", config, TrainState(1, 1), tiny.model().state_dict(), {}, None)
    load_model(tmp_path / "run")
    assert "no effect" not in caplog.text
