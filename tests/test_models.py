"""Models of transformers under analysis: positions, masks, identity, refusals, and the whole measurement."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from analysis.contexts import Contexts
from analysis.influence import InfluenceSettings, measure_influence
from analysis.models import OWN_FAMILY, PositionedCausalLM, load_for_analysis
from analysis.records import load_records
from analysis.scorer import Scorer
from olmo_sparsity.checkpoint import TOKENIZER
from olmo_sparsity.errors import UserError
from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.files import sha256_file
from olmo_sparsity.training.loop import train
from tests import tiny
from tests.test_export import checkpoint

ROOT = Path(__file__).parents[1]
VOCABULARY, REACH = 50, 64
ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": REACH,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ROTARY,
    "olmo": {**ROTARY, "clip_qkv": 1.0},
    "olmo2": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "mistral": {**ROTARY, "sliding_window": None},
    "gpt_neox": {**ROTARY, "num_key_value_heads": 4},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": REACH,
        "initializer_range": 0.3,
    },
}


def directory(folder, family, shards=False, **changes):
    """A directory of a random model of a family of transformers, with a tokenizer.json."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **changes})
    )
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    corpus = tiny.write_corpus(folder / "corpus", {"heldout": tiny.random_documents(3, 60)})
    shutil.copyfile(corpus / TOKENIZER, folder / TOKENIZER)
    return folder


def tokens(rows=3, length=20, seed=0):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


KEPT = [0, 1, 2, 6, 7, 11, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dropping_tokens_equals_hiding_them(family, tmp_path):
    loaded = load_for_analysis(directory(tmp_path, family))
    loaded.check_context(REACH)
    ids, positions, mask = tokens(), torch.arange(20).expand(3, -1), torch.zeros(3, 20, dtype=torch.long)
    mask[:, KEPT] = 1
    hidden = loaded.model(ids, position_ids=positions, attention_mask=mask).logits[:, KEPT]
    dropped = loaded.model(ids[:, KEPT], position_ids=positions[:, KEPT]).logits
    last = loaded.model(ids[:, KEPT], position_ids=positions[:, KEPT], last_logits_only=True).logits
    scale = float(hidden.abs().max())
    torch.testing.assert_close(dropped, hidden, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(last, hidden[:, -1:], rtol=0, atol=1e-5 * scale)
    renumbered = loaded.model(ids[:, KEPT], position_ids=torch.arange(len(KEPT)).expand(3, -1)).logits
    assert float((renumbered - hidden).abs().max()) > 1e-2 * scale
    assert (loaded.family, loaded.max_positions, loaded.training_seed) == (family, REACH, None)


@torch.no_grad()
def test_the_trap_is_real_and_avoided(tmp_path):
    """Without a mask transformers cuts attention where the ids jump: text before the jump has no effect."""
    loaded = load_for_analysis(directory(tmp_path, "llama"))
    ids, positions = tokens(), torch.tensor(KEPT).expand(3, -1)
    other = ids.clone()
    other[:, :6] = tokens(seed=1)[:, :6]
    read = [
        loaded.model.model(each[:, KEPT], position_ids=positions, use_cache=False).logits[:, -1]
        for each in (ids, other)
    ]
    assert torch.equal(*read), (
        "transformers no longer cuts attention at id jumps: say so in analysis/models.py"
    )
    seen = [loaded.model(each[:, KEPT], position_ids=positions).logits[:, -1] for each in (ids, other)]
    assert float((seen[0] - seen[1]).abs().max()) > 1e-2 * float(seen[0].abs().max())


def test_every_call_of_the_scorer_has_positions_and_a_mask_of_ones(tmp_path):
    loaded = load_for_analysis(directory(tmp_path, "llama"))
    inner, calls = loaded.model.model, []

    class Spy(torch.nn.Module):
        def forward(self, **options):
            calls.append(options)
            return inner(**options)

    window = tokens(2, 20).numpy()
    contexts = Contexts(window[:, :-1], window[:, -1], np.arange(2), 5)
    Scorer(PositionedCausalLM(Spy())).losses(contexts, np.array([KEPT[:-1]]))
    assert calls
    for call in calls:
        assert torch.equal(call["attention_mask"], torch.ones_like(call["input_ids"]))
        assert call["position_ids"].shape == call["input_ids"].shape
        assert (call["use_cache"], call["logits_to_keep"]) == (False, 1)


def test_identity_of_one_file_and_of_several(tmp_path):
    one = load_for_analysis(directory(tmp_path / "one", "llama"))
    several = load_for_analysis(directory(tmp_path / "several", "llama", shards=True))
    names = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(names) > 1
    assert one.weights_sha256 == sha256_file(tmp_path / "one" / "model.safetensors")
    joined = b"".join((tmp_path / "several" / name).read_bytes() for name in names)
    (tmp_path / "joined").write_bytes(joined)
    assert several.weights_sha256 == sha256_file(tmp_path / "joined")
    ids = tokens()
    expected = one.model(ids, position_ids=torch.arange(20)[None]).logits
    torch.testing.assert_close(several.model(ids, position_ids=torch.arange(20)[None]).logits, expected)
    (tmp_path / "several" / names[1]).unlink()
    with pytest.raises(UserError, match=rf"{names[1]} is missing"):
        load_for_analysis(tmp_path / "several")


def test_checkpoints_of_this_project_load_as_ever(tmp_path):
    source, original = checkpoint(tmp_path / "rope")
    loaded = load_for_analysis(source.parent)
    assert (loaded.family, loaded.training_seed, loaded.max_positions) == (OWN_FAMILY, 3, None)
    assert loaded.weights_sha256 == sha256_file(source / "model.safetensors")
    ids = tokens()
    torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, rtol=0, atol=0)
    table = {"scheme": "contiguous", "target_length": None}
    source, _ = checkpoint(tmp_path / "learned", positions=table, rope=False)
    with pytest.raises(UserError, match="N = 33 is beyond the 32 positions"):
        load_for_analysis(source).check_context(33)


def test_n_beyond_the_positions_is_refused(tmp_path):
    loaded = load_for_analysis(directory(tmp_path, "gpt2"))
    loaded.check_context(REACH)
    with pytest.raises(
        UserError, match="N = 65 is beyond the 64 positions of .*; lower --n-long to at most 64"
    ):
        loaded.check_context(REACH + 1)


def test_a_sliding_window_is_refused_where_it_cuts(tmp_path):
    loaded = load_for_analysis(directory(tmp_path, "mistral", sliding_window=16))
    loaded.check_context(16)
    with pytest.raises(
        UserError, match="dropping tokens from a context of N = 40 does not equal hiding them"
    ):
        loaded.check_context(40)


def test_models_without_position_ids_are_refused(tmp_path):
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    with pytest.raises(UserError, match=r"\(bloom\) takes no position ids"):
        load_for_analysis(directory(tmp_path / "bloom", "bloom", **small))
    falcon = {**small, "num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True}
    loaded = load_for_analysis(directory(tmp_path / "falcon", "falcon", **falcon))
    with pytest.raises(UserError, match=r"\(falcon\) does not read its position ids"):
        loaded.check_context(20)


def test_absent_weights_are_not_drawn_at_random(tmp_path):
    folder = directory(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 of its model's weights, such as model.layers.1.mlp.up_proj"):
        load_for_analysis(folder)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_remote_code_pickles_and_damage_are_refused_in_one_line(tmp_path):
    good = directory(tmp_path / "good", "llama")
    cases = {
        "remote": "cannot be loaded by transformers",
        "pickle": "model.safetensors is missing.*pickles are never read",
        "torn": "cannot be loaded by transformers",
        "config": "cannot be loaded by transformers",
        "shape": "cannot be loaded by transformers|lacks",
    }
    for name, message in cases.items():
        folder = tmp_path / name
        shutil.copytree(good, folder)
        if name == "remote":
            edit_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"})
            (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        elif name == "pickle":
            torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        elif name == "torn":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:500])
        elif name == "config":
            (folder / "config.json").write_text("{")
        else:
            edit_config(folder, hidden_size=64)
        with pytest.raises(UserError, match=message) as error:
            load_for_analysis(folder)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_the_corpus_must_have_the_tokenizer_of_the_model(tmp_path):
    folder = directory(tmp_path / "model", "llama")
    loaded, corpus = load_for_analysis(folder), folder / "corpus"
    loaded.check_corpus(corpus)
    written = json.loads((folder / TOKENIZER).read_text())
    written["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / TOKENIZER).write_text(json.dumps(written, indent=7, sort_keys=True))
    loaded.check_corpus(corpus)  # written down in another way, it does the same to text
    other = tiny.write_corpus(tmp_path / "other", {"heldout": tiny.random_documents(3, 60)}, vocab_size=49)
    with pytest.raises(UserError, match="other was made with another tokenizer than"):
        loaded.check_corpus(other)
    (folder / TOKENIZER).unlink()
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        loaded.check_corpus(corpus)


def test_the_corpus_must_not_have_more_ids_than_the_model(tmp_path):
    folder = directory(tmp_path / "model", "llama")
    loaded, corpus = load_for_analysis(folder), folder / "corpus"
    known = len(loaded.model.model.get_input_embeddings().weight)
    path = corpus / "manifest.json"
    raw = json.loads(path.read_text())
    for vocab_size in (known, known + 1):
        path.write_text(json.dumps({**raw, "vocab_size": vocab_size}))
        if vocab_size == known:
            loaded.check_corpus(corpus)
            continue
        with pytest.raises(
            UserError, match=f"a vocabulary of {known + 1} tokens, .* one of {known};"
        ) as error:
            loaded.check_corpus(corpus)
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned a little to copy, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, "--max_duration=150", "--optimizer.learning_rate=1e-2"))
    export_checkpoint(folder / "run", folder / "hf")
    return folder


def settings(trained, model, out, **changes):
    values = {"n_long": 20, "n_short": 5, "tau_nats": 0.05, "ks": (1, 2, 4), "targets": 60, "device": "cpu"}
    paths = {"checkpoint": str(trained / model), "corpus": str(trained / "corpus"), "out": str(out)}
    return InfluenceSettings(**{**values, **paths, **changes})


def test_an_exported_directory_gives_the_records_of_its_checkpoint(trained, tmp_path):
    own, exported = (
        load_records(measure_influence(settings(trained, model, tmp_path / model))) for model in ("run", "hf")
    )
    assert len(own.over) >= 5
    for field in ("document", "position", "token", "placebo_document", "placebo_start"):
        assert np.array_equal(getattr(own.targets, field), getattr(exported.targets, field))
    for field in ("loss_long_nats", "loss_short_nats"):
        np.testing.assert_allclose(getattr(own.targets, field), getattr(exported.targets, field), atol=1e-5)
    assert np.array_equal(own.over, exported.over)
    for name in own.manifest.selectors:
        for far in ("true", "placebo"):
            assert np.array_equal(own.selected[name][far], exported.selected[name][far])
            np.testing.assert_allclose(own.loss_nats[name][far], exported.loss_nats[name][far], atol=1e-5)
    assert exported.manifest.training_seed == own.manifest.training_seed == 3
    assert exported.manifest.tokenizer_sha256 == own.manifest.tokenizer_sha256
    assert exported.manifest.checkpoint_sha256 == sha256_file(trained / "hf" / "model.safetensors")
    assert exported.manifest.checkpoint_sha256 != own.manifest.checkpoint_sha256


def test_a_refused_model_leaves_no_records(trained, tmp_path):
    with pytest.raises(UserError, match="N = 70 is beyond the 64 positions"):
        measure_influence(settings(trained, "hf", tmp_path / "out", n_long=70))
    assert not (tmp_path / "out").exists()


def test_the_script_measures_a_directory_and_says_nothing_else(trained, tmp_path):
    command = [
        "scripts/influence.py",
        trained / "hf",
        "--corpus",
        trained / "corpus",
        "--out",
        tmp_path / "out",
    ]
    command += ["--n-long", 20, "--n-short", 5, "--tau", 0.05, "--k", "1,2", "--targets", 20]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"records: {tmp_path / 'out'}\n"


def test_a_model_of_the_hub_is_found_in_the_cache(trained, tmp_path, monkeypatch):
    """In the cache's layout, offline; what is not there is refused in one line."""
    snapshot = tmp_path / "models--someone--tiny-model" / "snapshots" / "0123"
    shutil.copytree(trained / "hf", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_for_analysis("someone/tiny-model")
    assert loaded.checkpoint == snapshot
    assert loaded.weights_sha256 == sha256_file(trained / "hf" / "model.safetensors")
    with pytest.raises(
        UserError, match="someone/absent is neither a folder here nor a model that could be fetched"
    ):
        load_for_analysis("someone/absent")
    with pytest.raises(UserError, match="no/such/folder"):
        load_for_analysis("no/such/folder")


def test_loading_analysis_loads_neither_transformers_nor_the_engines():
    code = "import sys, analysis.models; print(sorted({'transformers', 'accelerate', 'deepspeed'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
