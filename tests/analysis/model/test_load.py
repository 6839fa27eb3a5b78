"""Models of transformers under analysis: positions, masks, identity, refusals, and the whole measurement."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from analysis.measure.influence import measure_influence
from analysis.measure.settings import VerifySettings
from analysis.measure.verify import verify
from analysis.model.load import OWN_FAMILY, adapter_of, load_for_analysis
from analysis.model.rope_scaling import load_scaled
from analysis.model.trial import check_long_context
from analysis.records.store import load_records
from olmo_sparsity.checkpoint import TOKENIZER
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file
from tests.support import tiny
from tests.support.families import FAMILIES, REACH, ROTARY, VOCABULARY, directory, random_model
from tests.support.measured import arrays, influence_settings
from tests.support.refusals import refused
from tests.support.tiny import checkpoint

ROOT = Path(__file__).parents[3]
LONGROPE = {
    **FAMILIES["llama"],
    "original_max_position_embeddings": 20,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]},
}
"""RoPE of other frequencies in texts of more than 20 tokens: what comes first is read otherwise there."""


WINDOW = {"text_config": {**FAMILIES["gemma3"]["text_config"], "sliding_window": 31}}
CHUNKED = {**ROTARY, "attention_chunk_size": 31, "num_local_experts": 2, "intermediate_size_mlp": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


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
    last = loaded.model(ids[:, KEPT], position_ids=positions[:, KEPT], logits_to_keep=1).logits
    scale = float(hidden.abs().max())
    torch.testing.assert_close(dropped, hidden, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(last, hidden[:, -1:], rtol=0, atol=1e-5 * scale)
    renumbered = loaded.model(ids[:, KEPT], position_ids=torch.arange(len(KEPT)).expand(3, -1)).logits
    assert float((renumbered - hidden).abs().max()) > 1e-2 * scale
    assert (loaded.family, loaded.model.max_positions, loaded.training_seed) == (family, REACH, None)


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
        "transformers no longer cuts attention at id jumps: say so in analysis/model/load.py"
    )
    seen = [loaded.model(each[:, KEPT], position_ids=positions).logits[:, -1] for each in (ids, other)]
    assert float((seen[0] - seen[1]).abs().max()) > 1e-2 * float(seen[0].abs().max())


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
    with refused(rf"{names[1]} is missing"):
        load_for_analysis(tmp_path / "several")


def test_checkpoints_of_this_project_load_as_ever(tmp_path):
    source, original = checkpoint(tmp_path / "rope")
    loaded = load_for_analysis(source.parent)
    assert (loaded.family, loaded.training_seed, loaded.model.max_positions) == (OWN_FAMILY, 3, None)
    assert loaded.weights_sha256 == sha256_file(source / "model.safetensors")
    ids = tokens()
    torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, rtol=0, atol=0)
    table = {"scheme": "contiguous", "target_length": None}
    source, _ = checkpoint(tmp_path / "learned", positions=table, rope=False)
    with refused("N = 33 is beyond the 32 positions"):
        load_for_analysis(source).check_context(33)


@pytest.mark.parametrize(
    ("family", "changes", "longest", "longer", "message"),
    [
        ("gpt2", {}, 64, 65, "N = 65 is beyond the 64 positions of .*; lower --n-long to at most 64"),
        ("mistral", {"sliding_window": 31}, 31, 32, "N = 32 is beyond the 31 tokens of a sliding window in"),
        ("phi3", {**ROTARY, "sliding_window": 31}, 31, 32, "lower --n-long to at most 31"),
        ("gemma3", WINDOW, 31, 32, "N = 32 is beyond the 31 tokens of a sliding window in"),
        ("llama4_text", CHUNKED, 31, 32, "N = 32 is beyond the 31 tokens of a chunked window in"),
        ("llama", {"rope_parameters": DYNAMIC}, 64, 65, "the 64 tokens after which dynamic changes all"),
        (
            "phi3",
            LONGROPE,
            20,
            21,
            "the 20 tokens after which longrope changes .*; lower --n-long to at most 20",
        ),
    ],
    ids=["positions", "mistral", "phi3", "composite", "chunks", "dynamic", "longrope"],
)
def test_contexts_that_are_too_long_are_refused(tmp_path, family, changes, longest, longer, message):
    loaded = load_for_analysis(directory(tmp_path, family, **changes))
    loaded.check_context(longest)
    loaded.model.bfloat16()  # in which a trial would not see one token
    for n_long, more in ((longer, 0), (longer - 4, 4)):
        with refused(message if not more else "with 4 more tokens of block and prefix is beyond"):
            loaded.check_context(n_long, more + 1)


def test_the_trial_sees_a_window_that_leaves_out_one_token(tmp_path):
    """Of a kind that no setting of ours names."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": REACH}
    local = {
        "num_layers": 2,
        "attention_types": [[["local"], 2]],
        "window_size": 31,
        "initializer_range": 0.3,
    }
    loaded = load_for_analysis(directory(tmp_path, "gpt_neo", **sizes, **local))
    loaded.check_context(31)
    with refused("N = 32 does not equal hiding them"):
        loaded.check_context(32)


def test_rounding_of_bf16_is_no_reason_to_refuse_a_model():
    """In Gemma 3 it is a third of the logits' spread; the trial is in fp32 and leaves weights as they were."""
    model = random_model()
    model.lm_head.weight.data += 200 * torch.randn(32)  # logits far from 0, near each other
    model.bfloat16()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    check_long_context(adapter_of(model, "the model"), 40, name="the model", option="n_long")
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "looks ahead, as BERT does"),
        ("openai-gpt", "caches no keys"),
        ("minimax", "cannot read random tokens behind a prefix"),
    ],
)
def test_models_whose_prefixes_cannot_be_shared_are_refused(family, message):
    model = adapter_of(random_model(family, **ROTARY, num_experts_per_tok=1), "the model")
    with refused(f"the model .*{message}"):
        check_long_context(model, 20, name="the model", option="n_long")


def test_a_rotary_model_is_measured_beyond_its_length_with_a_warning(tmp_path, caplog):
    llama = directory(tmp_path, "llama")
    load_for_analysis(llama).check_context(64)
    load_scaled(f"{llama}@yarn:2").check_context(128)
    assert not caplog.records
    load_for_analysis(llama).check_context(61, 5)
    load_scaled(f"{llama}@yarn:2").check_context(129)
    assert [record.getMessage().partition("is measured")[2] for record in caplog.records] == [
        " beyond the 64 positions that its configuration names"
    ] * 2


def test_models_without_position_ids_are_refused(tmp_path):
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    with refused(r"\(bloom\) takes no position ids"):
        load_for_analysis(directory(tmp_path / "bloom", "bloom", **small))
    falcon = {**small, "num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True}
    loaded = load_for_analysis(directory(tmp_path / "falcon", "falcon", **falcon))
    with refused(r"\(falcon\) does not read its position ids"):
        loaded.check_context(20)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class CreatesAFile:
    """What a pickle can do when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def hostile(llama, tmp_path):
    """A copy of a good directory, to be made a bad one."""
    return Path(shutil.copytree(llama, tmp_path / "hostile"))


def write_index(folder, name, **other):
    """An index that names one file for every tensor, in place of model.safetensors."""
    weights = folder / "model.safetensors"
    keys = load_file(weights)
    weights.rename(folder / "kept.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, name), **other}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_refused(folder, message):
    with pytest.raises(UserError, match=message) as error:
        load_for_analysis(folder)
    assert str(error.value).replace(str(folder), "").isprintable()


def give_remote_code(folder):
    edit_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    (folder / "mine.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')")


def give_pickle_instead(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(CreatesAFile(folder.parent / "ran")))
    (folder / "model.safetensors").unlink()


def give_index_of_a_pickle(folder):
    write_index(folder, "w.bin")
    (folder / "w.bin").write_bytes(pickle.dumps(CreatesAFile(folder.parent / "ran")))


def tear(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])


def drop_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def wrap(folder):
    weights = {f"module.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrap, "begin with module., .*; save the model inside, model.module"),
        (give_remote_code, "cannot be loaded by transformers"),
        (give_pickle_instead, "model.safetensors is missing.*pickles are never read"),
        (give_index_of_a_pickle, "names 'w.bin', which is no safetensors file in its folder"),
        (tear, "cannot be loaded by transformers"),
        (drop_a_weight, "lacks 1 of its model's weights, such as model.layers.1.mlp.up_proj"),
        (lambda folder: edit_config(folder, hidden_size=64), "cannot be loaded by transformers|lacks"),
    ],
)
def test_code_pickles_and_other_weights_are_refused(hostile, damage, message):
    damage(hostile)
    assert_refused(hostile, message)
    assert not (hostile.parent / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors", "inside/../../outside.safetensors", "inside/w.safetensors", "..", "", ".",
        "/etc/passwd", "a\nb.safetensors", "a\0.safetensors", "\x1b[31m.safetensors", ".safetensors",
        "kept.safetensors\n", "kept.safetensors/", 7, None, ["kept.safetensors"], {"a": "kept.safetensors"},
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_only(hostile, name):
    shutil.copyfile(hostile / "model.safetensors", hostile.parent / "outside.safetensors")
    (hostile / "inside").mkdir()
    shutil.copyfile(hostile / "model.safetensors", hostile / "inside" / "w.safetensors")
    write_index(hostile, name)
    assert_refused(hostile, "which is no safetensors file in its folder")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}"])
def test_a_damaged_index_is_refused(hostile, text):
    write_index(hostile, "kept.safetensors")
    (hostile / "model.safetensors.index.json").write_text(text)
    assert_refused(hostile, "model.safetensors.index.json is damaged")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", "\udcff"])
def test_a_damaged_config_is_refused(hostile, text):
    (hostile / "config.json").write_text(text, errors="surrogateescape")
    assert_refused(hostile, "config.json is damaged")


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_weights": "kept.safetensors"},
        {"transformers_weights": "../outside.safetensors"},
        {"configuration_files": ["config.4.0.0.json"]},
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "somebody/kernel"},
        {"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": "sonicmoe"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"kernel_config": {"RMSNorm": "somebody/kernel:RMSNorm"}},
        {"use_kernels": True},
        {"text_config": {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}},
        {"parts\n": [{"_attn_implementation": "somebody/kernel"}]},
    ],
)
def test_what_would_read_something_else_is_refused_by_name(hostile, changes):
    shutil.copyfile(hostile / "model.safetensors", hostile / "kept.safetensors")
    edit_config(hostile, **changes)
    assert_refused(hostile, "config.json: .*remove it, or give a model in full precision")


@pytest.mark.parametrize("changes", [{"attn_implementation": "eager"}, {"quantization_config": None}])
def test_settings_that_read_nothing_else_are_taken(hostile, changes):
    edit_config(hostile, **changes)
    load_for_analysis(hostile)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]}, {"model_type": None}, {"model_type": "no\x1bne"}, {"vocab_size": "many"},
        {"get_text_config": "x"}, {"num_attention_heads": 0}, {"hidden_size": -1}, {"rope_parameters": 7},
        {"auto_map": {"AutoConfig": "x--y.Z"}, "model_type": "z"},
    ],
)  # fmt: skip
def test_values_that_no_model_has_are_refused(hostile, changes):
    edit_config(hostile, **changes)
    assert_refused(hostile, "cannot be loaded by transformers")


def test_only_what_is_checked_is_seen_by_transformers(hostile, monkeypatch, tmp_path):
    """Shards of torch's distributed checkpoints, adapters and code for generation came first; some are pickles."""
    expected = load_for_analysis(hostile).model(tokens(), position_ids=torch.arange(20)[None]).logits
    other = {name: torch.randn_like(each) for name, each in load_file(hostile / "model.safetensors").items()}
    save_file(other, hostile / "shard-00001-model-00001-of-00001.safetensors", metadata={"format": "pt"})
    for name in (".metadata", "pytorch_model.bin", "training_args.bin"):
        (hostile / name).write_bytes(pickle.dumps(CreatesAFile(tmp_path / "ran")))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "somebody/else"}
    (hostile / "adapter_config.json").write_text(json.dumps(adapter))
    (hostile / "generation_config.json").write_text("[" * 100_000)
    (hostile / "custom_generate").mkdir()
    (hostile / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    seen, real = {}, AutoModelForCausalLM.from_pretrained

    def spy(folder, **options):
        seen["files"] = sorted(path.name for path in Path(folder).iterdir())
        seen["offline"] = huggingface_hub.constants.HF_HUB_OFFLINE
        return real(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    loaded = load_for_analysis(hostile)
    assert seen == {"files": ["config.json", "model.safetensors"], "offline": True}
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    found = loaded.model(tokens(), position_ids=torch.arange(20)[None]).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert loaded.weights_sha256 == sha256_file(hostile / "model.safetensors")
    assert loaded.model.model.config.name_or_path == str(hostile)
    assert not (tmp_path / "ran").exists()


def test_links_lead_to_safetensors_or_nowhere(hostile, tmp_path):
    """As in the hub's cache, whose blobs have no suffix; a pickle behind a link is not read as one."""
    weights, blob = hostile / "model.safetensors", tmp_path / "blob"
    identity = load_for_analysis(hostile).weights_sha256
    weights.rename(blob)
    weights.symlink_to("../blob")
    assert load_for_analysis(hostile).weights_sha256 == identity
    blob.write_bytes(pickle.dumps(CreatesAFile(tmp_path / "ran")))
    assert_refused(hostile, "cannot be loaded by transformers")
    for target in ("/dev/zero", "nowhere", "."):
        weights.unlink()
        weights.symlink_to(target)
        assert_refused(hostile, "model.safetensors is missing")
    assert not (tmp_path / "ran").exists()


def test_the_note_of_an_export_may_be_damaged(hostile):
    for text in ("[", "[" * 100_000, "[]", '{"kind": "olmo-sparsity export", "training_seed": "x"}'):
        (hostile / "olmo_sparsity.json").write_text(text)
        assert_refused(hostile, "olmo_sparsity.json is damaged")


def test_the_corpus_must_have_the_tokenizer_of_the_model(tmp_path):
    folder = directory(tmp_path / "model", "llama")
    loaded, corpus = load_for_analysis(folder), folder / "corpus"
    loaded.check_corpus(corpus)
    written = json.loads((folder / TOKENIZER).read_text())
    written["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / TOKENIZER).write_text(json.dumps(written, indent=7, sort_keys=True))
    loaded.check_corpus(corpus)  # written down in another way, it does the same to text
    other = tiny.write_corpus(tmp_path / "other", {"heldout": tiny.random_documents(3, 60)}, vocab_size=49)
    with refused("other was made with another tokenizer than"):
        loaded.check_corpus(other)
    (folder / TOKENIZER).unlink()
    with refused("tokenizer.json is missing"):
        loaded.check_corpus(corpus)


def test_the_corpus_must_not_have_more_ids_than_the_model(llama):
    loaded, corpus = load_for_analysis(llama), llama / "corpus"
    known = len(loaded.model.model.get_input_embeddings().weight)
    path = corpus / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "vocab_size": known}))
    loaded.check_corpus(corpus)
    path.write_text(json.dumps({**raw, "vocab_size": known + 1}))
    with refused(f"a vocabulary of {known + 1} tokens, .* one of {known};"):
        loaded.check_corpus(corpus)


def test_an_exported_directory_gives_the_records_of_its_checkpoint(trained, tmp_path):
    own, exported = (
        load_records(measure_influence(influence_settings(trained, tmp_path / model, model)))
        for model in ("run", "hf")
    )
    assert len(own.over) >= 5
    for field in ("document", "position", "token", "placebo_document", "placebo_start"):
        assert np.array_equal(getattr(own.targets, field), getattr(exported.targets, field))
    for field in ("loss_long_nats", "loss_short_nats"):
        np.testing.assert_allclose(getattr(own.targets, field), getattr(exported.targets, field), atol=1e-5)
    assert np.array_equal(own.over, exported.over)
    for x, y in zip(arrays(own), arrays(exported), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert exported.manifest.training_seed == own.manifest.training_seed == 3
    assert exported.manifest.tokenizer_sha256 == own.manifest.tokenizer_sha256
    assert exported.manifest.checkpoint_sha256 == sha256_file(trained / "hf" / "model.safetensors")
    assert exported.manifest.checkpoint_sha256 != own.manifest.checkpoint_sha256


def test_a_refused_model_leaves_no_records(trained, tmp_path):
    gpt2 = directory(tmp_path / "gpt2", "gpt2", n_positions=30)
    with refused("N = 40 is beyond the 30 positions"):
        corpus = str(gpt2 / "corpus")
        measure_influence(influence_settings(trained, tmp_path / "out", gpt2, corpus=corpus, n_long=40))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "recorded"), [("bf16", "bf16-weights"), ("fp16", "fp16-weights"), ("auto", "fp32")]
)
def test_weights_are_loaded_in_the_type_that_is_asked_for(trained, tmp_path, dtype, recorded):
    asked = influence_settings(
        trained, tmp_path / "out", "hf", dtype=dtype, targets=40, selectors=("gradient",)
    )
    records = load_records(measure_influence(asked))
    assert records.manifest.dtype == recorded
    whole = load_records(measure_influence(replace(asked, out=tmp_path / "whole", dtype="fp32")))
    difference = np.abs(records.targets.loss_long_nats - whole.targets.loss_long_nats).max()
    assert (difference == 0) == (recorded == "fp32") and difference < 0.3
    assert verify(VerifySettings(records=records.folder, targets=5, device="cpu"))["verified"]


def test_a_type_that_nothing_is_loaded_in_is_refused(trained, tmp_path):
    with refused("run.* is a checkpoint of this project, measured in fp32; leave out --dtype"):
        measure_influence(influence_settings(trained, tmp_path / "out", dtype="bf16"))
    with refused("--bf16 computes in bf16 with weights in fp32, and --dtype fp16 .*; give one"):
        influence_settings(trained, tmp_path / "out", "hf", dtype="fp16", bf16=True)


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
    with refused("someone/absent is neither a folder here nor a model that could be fetched"):
        load_for_analysis("someone/absent")
    with refused("no/such/folder"):
        load_for_analysis("no/such/folder")


def test_of_the_hub_only_what_is_read_is_fetched(monkeypatch, tmp_path):
    files = {"config.json", "tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors"}
    others = {"pytorch_model.bin", "original/model.safetensors", "custom_generate/a.json", "modeling.py"}
    others |= {".x/a.json"}

    def download(name, allow_patterns, ignore_patterns):
        kept = filter_repo_objects(
            files | others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert set(kept) == files
        return shutil.copytree(ROOT / "configs", tmp_path / "copy")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refused(r"somebody/model on the hub has no config\.json"):
        load_for_analysis("somebody/model")
