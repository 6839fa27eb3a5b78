"""This project's own checkpoints, RoPE scaled after training, and prepared corpora."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from analysis import engine
from analysis.measuring import measure
from analysis.open_model import open_model
from analysis.project import OlmoAdapter, PreparedTexts, corpus_of
from olmo_sparsity.checkpoint import config_of
from olmo_sparsity.data.near_copies import write_near_copies
from olmo_sparsity.data.tokens import CorpusManifest
from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.rope_scaling import LOG_N, ROPE_SCALINGS
from olmo_sparsity.util.files import sha256_file
from tests.support import tiny
from tests.support.families import directory
from tests.support.refusals import refused
from tests.support.tiny import checkpoint

LENGTH, REACH = 192, 64  # tokens read; the ids of the training config stay below 64
TOKENS = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
IDS = torch.arange(LENGTH)[None].expand(2, -1)


@torch.inference_mode()
def logits(model):
    """Of a model object, or of one that is opened."""
    model = model if isinstance(model, torch.nn.Module) else open_model(str(model)).model
    return model(TOKENS, position_ids=IDS).logits


# --- checkpoints ---


@pytest.mark.parametrize("name", ["rope", "alibi", "nope", "entmax", "neox"])
def test_a_checkpoint_is_the_model_that_was_saved(name, tmp_path):
    neox = {"family": "gpt_neox", "embedding_size": None}
    changes = neox if name == "neox" else tiny.ENCODINGS[name]
    source, model = checkpoint(tmp_path, **changes)
    for path in (source, source.parent, f"{source.parent}"):
        loaded = open_model(path)
        assert torch.equal(logits(loaded.model), logits(model))
        assert loaded.sha256 == sha256_file(source / "model.safetensors")
        assert loaded.tokenizer_sha256 == sha256_file(source / "tokenizer.json")
        assert (loaded.name, loaded.training_seed, loaded.prefix) == (str(source), 3, ())
        assert loaded.family == ("gpt_neox" if name == "neox" else "olmo-sparsity")
    assert loaded.trained["training_length"] == 32 and loaded.reads == REACH


def test_a_measurement_goes_on_after_a_move_to_shards(tmp_path, monkeypatch):
    """And gives what it gives of the one file; the export is of the same weights, too."""
    source, _ = checkpoint(tmp_path / "whole")
    shards = tiny.in_shards(source, tmp_path / "moved", 2)
    settings = {
        "n_long": 24,
        "n_short": 4,
        "targets": 20,
        "targets_per_block": 4,
        "tau_nats": 0.0,
        "ks": (1, 2),
    }
    settings |= {"device": "cpu", "progress": False, "selectors": ("leave-one-out",)}
    corpus = tmp_path / "whole" / "corpus"
    original = engine.Engine.choose
    rounds = []
    stops_after = 2

    def choose(self, targets):
        if len(rounds) == stops_after:
            raise KeyboardInterrupt
        rounds.append(targets)
        return original(self, targets)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "choose", choose)
        with pytest.raises(KeyboardInterrupt):
            measure(source, corpus, out=tmp_path / "result", **settings)
        stops_after = 5
        moved = measure(shards, corpus, out=tmp_path / "result", **settings)
    assert len(rounds) == 5
    whole = measure(source, corpus, **settings)
    assert moved.settings.model.sha256 == whole.settings.model.sha256
    for frame in ("targets", "choices", "texts"):
        assert getattr(moved, frame).to_json() == getattr(whole, frame).to_json()
    exported = export_checkpoint(shards, tmp_path / "hf")
    assert exported["source_weights_sha256"] == sha256_file(source / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path / "hf"), logits(source), rtol=0, atol=1e-4)


def test_untrained_weights_are_those_before_the_first_step(tmp_path):
    source, _ = checkpoint(tmp_path)
    untrained = open_model(f"{source.parent}@untrained")
    expected = build_model(replace(config_of(source), seed=0)).eval()
    assert torch.equal(logits(untrained.model), logits(expected))
    assert untrained.sha256 == open_model((expected, None)).sha256 != open_model(source).sha256
    assert (untrained.untrained, untrained.training_seed) == (True, None)
    assert untrained.name == f"{source}@untrained"


def test_an_exported_folder_names_the_seed_of_its_training(tmp_path):
    source, _ = checkpoint(tmp_path)
    export_checkpoint(source, tmp_path / "hf")
    exported, loaded = open_model(tmp_path / "hf"), open_model(source)
    assert exported.training_seed == loaded.training_seed == 3
    assert exported.tokenizer_sha256 == loaded.tokenizer_sha256
    torch.testing.assert_close(logits(exported.model), logits(loaded.model), rtol=0, atol=1e-4)


def test_models_that_no_single_token_can_be_dropped_from_are_refused():
    class PositionPredictor(torch.nn.Linear):
        __module__ = "olmo_sparsity.model.predictive"

    class TupleAttention(torch.nn.Linear):
        __module__ = "olmo_sparsity.model.tuples"

    for kind in (PositionPredictor, TupleAttention):
        with refused("tuples of tokens, or reads position ids in another way than RoPE alone"):
            open_model((kind(2, 2), None))


@pytest.mark.parametrize("name", ["rope", "alibi", "learned", "entmax", "fox"])
@torch.inference_mode()
def test_attention_of_the_last_positions_is_read_without_changing_the_model(name):
    model = OlmoAdapter(tiny.model(**tiny.ENCODINGS[name]))
    tokens, ids = TOKENS[:, :20], IDS[:, :20]
    before = model(tokens, ids).logits
    attention = model.last_attention(tokens, ids, 3)
    assert attention.shape == (2, 3, 20) and torch.equal(model(tokens, ids).logits, before)
    assert attention[:, 0, 18:].abs().max() < 1e-6  # later tokens
    if name != "fox":
        torch.testing.assert_close(attention.sum(dim=-1), torch.ones(2, 3))


# --- RoPE scaled after training ---


@pytest.fixture(scope="module", params=[8, 64], ids="head of {}".format)
def made(request, tmp_path_factory):
    """A checkpoint whose heads have so many dimensions, and its export."""
    folder = tmp_path_factory.mktemp("scaled")
    source, _ = checkpoint(folder, d_model=2 * request.param, n_heads=2)
    export_checkpoint(source, folder / "hf")
    return source, folder / "hf"


@torch.inference_mode()
def logits_of_transformers(folder, name, factor):
    """Its "dynamic" with a factor of 1 is NTK-aware scaling to the length it reads, once that is beyond its own."""
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == REACH
    rope = {"rope_type": name, "rope_theta": config.rope_parameters["rope_theta"], "factor": factor}
    if name == "yarn":
        rope["original_max_position_embeddings"] = REACH
    if name == "ntk":
        rope |= {"rope_type": "dynamic", "factor": 1.0}
        config.max_position_embeddings = round(LENGTH / factor)
    config.rope_parameters = rope
    return AutoModelForCausalLM.from_pretrained(folder, config=config).eval()(TOKENS, position_ids=IDS).logits


@pytest.mark.parametrize("name", [name for name in ROPE_SCALINGS if name != LOG_N])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_logits_are_those_of_transformers_on_copied_weights(made, name, factor):
    source, exported = made
    expected = logits_of_transformers(exported, name, factor)
    tolerance = 1e-5 * float(expected.abs().max())
    for path in (source, exported):
        loaded = open_model(f"{path}@{name}:{factor}")
        torch.testing.assert_close(logits(loaded.model), expected, rtol=0, atol=tolerance)
        assert (logits(path) - expected).abs().max() > 100 * tolerance, "unscaled it is another model"
        assert loaded.rope_scaling == f"{name}:{factor}" and loaded.name == f"{path}@{name}:{factor}"


def test_log_n_after_training_is_the_attention_of_that_name(made):
    """The same weights with ``model.attention: log-n`` and the window that the ids reached in training."""
    source, exported = made
    plain = open_model(source).model.model
    trained = PositionedOLMo(replace(plain.config, attention="log-n", max_sequence_length=REACH)).eval()
    trained.load_state_dict(plain.state_dict())
    scaled, usual = logits(f"{source}@log-n:3"), logits(source)
    tolerance = 1e-5 * float(scaled.abs().max())
    torch.testing.assert_close(scaled, logits(trained), rtol=0, atol=tolerance)
    assert (scaled - usual)[:, REACH:].abs().max() > 100 * tolerance
    torch.testing.assert_close(scaled[:, :REACH], usual[:, :REACH], rtol=0, atol=tolerance)
    with refused("transformers' attention has no place for log-n"):
        open_model(f"{exported}@log-n:3")


def test_what_cannot_be_scaled_is_refused(made, tmp_path):
    nope, _ = checkpoint(tmp_path, rope=False, nope=True)
    entmax, _ = checkpoint(tmp_path / "entmax", attention="entmax")
    learned = directory(tmp_path / "gpt2", "gpt2")
    scaled = shutil.copytree(made[1], tmp_path / "scaled@yarn:2")  # a folder whose name looks like a scheme
    config = AutoConfig.from_pretrained(scaled)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    config.save_pretrained(scaled)
    assert open_model(scaled).rope_scaling is None
    for text, message in (
        (f"{nope}@yarn:2", "was not trained with RoPE: there is nothing to scale"),
        (f"{entmax}@log-n:2", "log-n is for softmax attention with RoPE in every layer"),
        (f"{learned}@yarn:2", "this model has no RoPE, and only plain RoPE can be scaled"),
        (f"{scaled}@yarn:2", "this model has linear, and only plain RoPE can be scaled"),
        (
            f"{made[0]}@yern:2",
            "unknown RoPE scaling .yern.; choose from linear, ntk, yarn, log-n, as in CKPT@yarn:4",
        ),
        (f"{made[0]}@yarn:0.5", "the factor 0.5 is below 1"),
    ):
        with refused(message):
            open_model(text)


# --- prepared corpora ---


def test_a_prepared_corpus_is_its_documents(tmp_path):
    documents = [*tiny.random_documents(3, 40), [7, 8, 9]]
    corpus = tiny.write_corpus(tmp_path, {"heldout": documents, "train": [[1, 2]]})
    texts = PreparedTexts(corpus)
    assert texts.lengths.tolist() == [40, 40, 40, 3]
    assert [texts.tokens(number).tolist() for number in range(4)] == documents
    assert PreparedTexts(corpus, "train").tokens(0).tolist() == [1, 2]
    assert texts.sha256 == sha256_file(corpus / "manifest.json")
    assert texts.groups is None and texts.in_near_copy(np.array([0]), np.array([0])) is None
    assert texts.tokenizer_sha256 == sha256_file(corpus / "tokenizer.json")
    tiny.add_groups(corpus, ["a", "b", "a", None])
    assert PreparedTexts(corpus).groups.tolist() == ["a", "b", "a", "document 3 by itself"]
    file = corpus / "heldout-00000.npy"
    file.write_bytes(file.read_bytes()[:-2] + b"\7\7")
    with refused("checksum mismatch"):
        PreparedTexts(corpus)


def test_near_copies_are_found_by_position(tmp_path):
    corpus = tiny.write_corpus(tmp_path, {"heldout": [[1] * 10, [2] * 10]})
    manifest = CorpusManifest.load(corpus)
    [file] = manifest.splits["heldout"]
    sha256 = write_near_copies(corpus / file.name, np.array([[3, 5], [12, 14]]))
    replace(manifest, splits={"heldout": [replace(file, near_copies_sha256=sha256)]}).save(corpus)
    text, position = np.divmod(np.arange(20), 10)
    inside = PreparedTexts(corpus).in_near_copy(text, position)
    # the second text begins behind the EOS id of the first
    assert np.stack([text, position], axis=1)[inside].tolist() == [[0, 3], [0, 4], [1, 1], [1, 2]]


def test_the_corpus_of_a_run_is_the_one_it_was_trained_on(tmp_path):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(4, 60)})
    source, _ = checkpoint(tmp_path, corpus=corpus)
    for model in (source, source.parent, f"{source.parent}@yarn:4", f"{source}@untrained"):
        assert corpus_of(str(model)) == str(corpus)
    for model in (directory(tmp_path / "hf", "llama"), "someone/model", tmp_path / "x.gguf"):
        with refused("does not say on which prepared corpus it was trained"):
            corpus_of(str(model))
