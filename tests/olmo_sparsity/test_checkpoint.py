"""Checkpoints whose files were changed, and what loading one says."""

import json
from hashlib import sha256

import pytest
import torch
import yaml
from olmo.safetensors_util import state_dict_to_safetensors_file

from olmo_sparsity.checkpoint import load_model, weights_sha256
from tests.support.refusals import refused
from tests.support.tiny import checkpoint


def test_weights_whose_bytes_changed_are_not_recorded(tmp_path):
    source, _ = checkpoint(tmp_path / "run")
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    assert weights_sha256(source) == sha256(content).hexdigest()
    content[-1] ^= 1
    weights.write_bytes(content)
    with refused("model.safetensors is damaged"):
        weights_sha256(source)


def test_damaged_weights_are_not_measured(tmp_path):
    """They load and fit, so that nothing but the checksum tells; `analysis` and the export read them by this way."""
    source, _ = checkpoint(tmp_path / "run")
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with refused("model.safetensors is damaged: its checksum differs"):
        load_model(source)


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]", '{"model.safetensors": {}}'])
def test_weights_without_their_checksum_are_not_measured(tmp_path, content):
    source, _ = checkpoint(tmp_path / "run")
    (source / "checksums.json").unlink()
    if content is not None:
        (source / "checksums.json").write_text(content)
    with refused("checksums.json is (damaged|missing)"):
        load_model(source)


def test_all_files_have_their_checksum(tmp_path):
    source, _ = checkpoint(tmp_path / "run")
    noted = json.loads((source / "checksums.json").read_text())
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.name != "checksums.json"}
    assert noted == {name: {"sha256": sha256(content).hexdigest()} for name, content in files.items()}


def test_a_checkpoint_of_ai2_olmo_is_read_and_its_pickle_is_not(tmp_path):
    source, model = checkpoint(tmp_path / "run")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    settings = yaml.safe_load((source / "config.yaml").read_text())
    of_olmo = {
        "model": settings["model"],
        "seed": 3,
        "data": {"drop_last": False},
        "distributed_strategy": "fsdp",
    }
    (theirs / "config.yaml").write_text(yaml.safe_dump(of_olmo))
    state_dict_to_safetensors_file(model.state_dict(), theirs / "model.safetensors")
    loaded, config = load_model(theirs)
    ids = torch.randint(1, 50, (2, 20))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert config.seed == 3
    (theirs / "model.safetensors").rename(theirs / "model.pt")
    with refused("model.safetensors is read, and model.pt, a pickle, is not"):
        load_model(theirs)
