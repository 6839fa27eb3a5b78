"""Checkpoints whose files were changed, and what loading one says."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import yaml
from olmo.safetensors_util import state_dict_to_safetensors_file
from safetensors.torch import load_file
from transformers.utils.hub import get_checkpoint_shard_files

from olmo_sparsity.checkpoint import load_model, load_optimizer, load_state, weights_sha256
from olmo_sparsity.training.loop import train
from tests.support import tiny
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


# --- shards ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of one process."""
    return train(
        tiny.train_config(tmp_path_factory.mktemp("trained"), "--max_duration=2", scheduler={"t_warmup": 1})
    )


@pytest.mark.parametrize("count", [2, 3, 40])
def test_shards_hold_the_same_tensors_and_are_the_same_weights(trained, tmp_path, count):
    """Also where there are more processes than tensors: some files are empty."""
    shards = tiny.in_shards(trained, tmp_path, count)
    assert not {"model.safetensors", "optimizer.safetensors"} & {path.name for path in shards.iterdir()}
    ours, theirs = load_model(shards)[0].state_dict(), load_model(trained)[0].state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = load_optimizer(shards), load_file(trained / "optimizer.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    identity = sha256((trained / "model.safetensors").read_bytes()).hexdigest()
    assert weights_sha256(shards) == weights_sha256(shards, is_verified=True) == identity
    assert load_state(shards) == load_state(trained)
    noted = json.loads((shards / "checksums.json").read_text())
    files = {path.name: path.read_bytes() for path in shards.iterdir() if path.name != "checksums.json"}
    assert noted == {name: {"sha256": sha256(content).hexdigest()} for name, content in files.items()}


def test_the_index_is_one_that_transformers_reads(trained, tmp_path):
    shards = tiny.in_shards(trained, tmp_path, 3)
    for name in ("model", "optimizer"):
        index = str(shards / f"{name}.safetensors.index.json")
        paths, about = get_checkpoint_shard_files(str(shards), index)
        whole = load_file(trained / f"{name}.safetensors")
        expected = [str(shards / f"{name}-{number:05d}-of-00003.safetensors") for number in (1, 2, 3)]
        assert paths == expected
        assert about["total_size"] == sum(tensor.nbytes for tensor in whole.values())
        assert about["weight_map"] == {
            tensor: path.split("/")[-1] for path in paths for tensor in load_file(path)
        }
        assert sorted(about["all_checkpoint_keys"]) == sorted(whole)


def of_a_shard(change):
    return lambda folder: change(folder / "model-00002-of-00002.safetensors")


def of_the_index(change):
    return lambda folder: change(folder / "model.safetensors.index.json")


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


def swap_shards(path):
    other = path.with_name("model-00001-of-00002.safetensors")
    content = other.read_bytes()
    path.rename(other)
    path.write_bytes(content)


def forget(name):
    def change(folder):
        path = folder / "checksums.json"
        noted = json.loads(path.read_text())
        del noted[name]
        path.write_text(json.dumps(noted))

    return change


DAMAGED_SHARDS = {
    "a shard, one bit flipped": (of_a_shard(flip), "model-00002-of-00002.safetensors is damaged"),
    "a shard, missing": (of_a_shard(Path.unlink), "model-00002-of-00002.safetensors cannot be read"),
    "shards, swapped": (of_a_shard(swap_shards), "model-0000.-of-00002.safetensors is damaged"),
    "the index, one bit flipped": (of_the_index(flip), "index.json is damaged"),
    "the index, missing": (of_the_index(Path.unlink), "index.json is missing"),
    "no checksum of a shard": (
        forget("model-00001-of-00002.safetensors"),
        "it has no checksum of model-00001-of-00002.safetensors",
    ),
    "no checksum of the index": (
        forget("model.safetensors.index.json"),
        "it has no checksum of model.safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_SHARDS)
def test_damaged_shards_are_named(trained, tmp_path, damage):
    """Of the last checkpoint of a run, and of a checkpoint that is given itself."""
    change, said = DAMAGED_SHARDS[damage]
    folder = tiny.in_shards(trained, tmp_path, 2)
    change(folder)
    for read in (load_model, weights_sha256):
        for path in (tmp_path, folder):
            with refused(f"step00000002/.*{said}.*; copy it again; there is no earlier checkpoint"):
                read(path)


def test_a_checkpoint_without_its_weights_is_still_one(trained, tmp_path):
    folder = tmp_path / trained.name
    shutil.copytree(trained, folder)
    (folder / "model.safetensors").unlink()
    for read in (load_model, weights_sha256):
        with refused("step00000002/model.safetensors cannot be read .*; copy it again"):
            read(folder)
