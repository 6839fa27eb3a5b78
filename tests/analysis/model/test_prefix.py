"""A prefix against contexts that have its tokens themselves as their first, which no subset leaves out."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

from analysis.measure.influence import measure_influence
from analysis.measure.settings import InfluenceSettings, VerifySettings
from analysis.measure.verify import verify
from analysis.model.adapters import OlmoForAnalysis, PositionedCausalLM, Prefixed
from analysis.model.load import added_before, load_for_analysis
from analysis.model.scorer import Scorer
from analysis.model.token_losses import TokenLosses
from analysis.records.influence_map import MapRecord
from analysis.records.store import load_records
from analysis.stats.recovery import and_blocks
from analysis.text.contexts import Contexts
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.data.tokenizers import load_tokenizer
from tests.support import tiny
from tests.support.families import FAMILIES, directory, random_model
from tests.support.measured import plain_loss, random_contexts
from tests.support.refusals import refused
from tests.support.slow import slow_but

N, M, PREFIX = 24, 6, (7, 3)
FAR, P = N - M, len(PREFIX)
OWN = ("rope", "alibi", "learned", "grouped")


def build(name):
    if name in OWN:
        changes = {"n_kv_heads": 2} if name == "grouped" else tiny.ENCODINGS[name]
        return OlmoForAnalysis(tiny.model(**changes)).requires_grad_(False)
    return PositionedCausalLM(random_model(name)).requires_grad_(False)


def with_prefix_in_the_text(contexts):
    first = np.broadcast_to(PREFIX, (len(contexts), P))
    return replace(contexts, tokens=np.concatenate([first, contexts.tokens], axis=1))


@pytest.mark.parametrize("name", slow_but([*OWN, *FAMILIES], "rope", "learned", "llama", "gpt2"))
@pytest.mark.parametrize("blocks", slow_but([1, 3], 3))
def test_every_number_is_that_of_a_text_that_begins_so(name, blocks):
    alone = random_contexts(N + blocks - 1, M + blocks - 1)
    targets = np.concatenate([alone.tokens[:, N:], alone.targets], axis=1)
    contexts = Contexts(alone.tokens, targets, alone.target_id + np.arange(blocks), M)
    wide, model = with_prefix_in_the_text(contexts), build(name)
    ours, theirs = Scorer(Prefixed(model, PREFIX), tokens_per_batch=100), Scorer(model)
    columns = np.arange(FAR - 1)
    without = columns + (columns >= np.arange(FAR)[:, None])
    for far in (without, contexts.all_far, np.arange(FAR)[:, None], np.empty((1, 0), dtype=np.int64)):
        kept = np.concatenate([np.broadcast_to(np.arange(P), (len(far), P)), far + P], axis=1)
        for names in (("loss",), ("kl",)):
            found, expected = ours.measures(contexts, far, names), theirs.measures(wide, kept, names)
            np.testing.assert_allclose(found, expected, atol=2e-5)
    asked = contexts.all_targets
    for kind in (
        "presence_gradient",
        "last_attention",
        "input_gradients",
        partial(Scorer.integrated_gradients, path=[(1.0, 1.0)]),
    ):
        read = (
            (lambda scorer, *rest, kind=kind: getattr(scorer, kind)(*rest)) if isinstance(kind, str) else kind
        )
        np.testing.assert_allclose(
            read(ours, contexts, asked), read(theirs, wide, asked)[:, P:], atol=2e-5, rtol=1e-5
        )


@pytest.fixture
def with_bos(tmp_path):
    """A model whose tokenizer puts a token before every text."""
    folder = directory(tmp_path / "hf", "llama")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    token = tokenizer.id_to_token(5)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, 5)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_prefix_is_what_the_tokenizer_adds(with_bos, tmp_path):
    loaded = load_for_analysis(with_bos)
    for asked, expected in {"auto": (5,), "none": (), "bos": (0,), "eos": (0,), "4,2": (4, 2)}.items():
        behind = loaded.behind(asked)
        assert behind.prefix == expected == getattr(behind.model, "prefix", ())
    for asked, why in {"first": "give auto", "99": "has no token 99"}.items():
        with refused(why):
            loaded.behind(asked)
    assert load_for_analysis(tiny.checkpoint(tmp_path)[0].parent).behind("auto").prefix == ()


def test_a_tokenizer_that_says_it_in_its_configuration(tmp_path):
    """Some classes of transformers make their post-processor when they are loaded."""
    folder = directory(tmp_path / "hf", "llama")
    assert added_before(folder / "tokenizer.json") == ()
    token = load_tokenizer(folder / "tokenizer.json").id_to_token(5)
    for named in (token, {"content": token}):
        config = {"add_bos_token": True, "bos_token": named}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert added_before(folder / "tokenizer.json") == (5,)


def test_records_name_it_and_are_measured_again_behind_it(with_bos, tmp_path):
    settings = InfluenceSettings(
        checkpoint=str(with_bos),
        corpus=str(with_bos / "corpus"),
        out=tmp_path / "records",
        n_long=N,
        n_short=M,
        tau_nats=0.05,
        targets=40,
        ks=(1,),
        selectors=("leave-one-out",),
        device="cpu",
    )
    records = load_records(measure_influence(settings))
    assert records.manifest.options["prefix"] == [5]
    assert and_blocks({"options": records.manifest.options}) == ", prefix 5"
    model, targets = load_for_analysis(with_bos).model, records.targets
    tokens = TokenFiles.of_split(with_bos / "corpus", "heldout")
    for row in (0, 7):
        text = tokens.document(targets.document[row])[: targets.position[row] + 1]
        expected = plain_loss(model, [5, *text[-N - 1 : -1]], range(N + 1), text[-1])
        assert targets.loss_long_nats[row] == pytest.approx(expected, abs=1e-4)
    assert verify(VerifySettings(records=records.folder, targets=5, device="cpu"))["verified"]


def test_losses_by_position_are_behind_the_prefix_too(with_bos):
    loaded = load_for_analysis(with_bos)
    tokens = np.random.default_rng(0).integers(1, 40, (3, 12))
    found = TokenLosses(loaded.behind("auto")).last_losses(tokens, 4)
    wide = np.concatenate([np.full((3, 1), 5), tokens], axis=1)
    np.testing.assert_allclose(found, TokenLosses(loaded).last_losses(wide, 4), atol=1e-5)


def test_every_command_names_the_prefix_and_loads_weights_in_the_type_that_is_asked_for(
    with_bos, tmp_path, run_here
):
    """What it prints names the prefix; losses in bf16 differ a little from those in fp32."""
    folder, text = tmp_path / "words", tmp_path / "text.txt"
    shutil.copytree(with_bos, folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    text.write_text(" ".join(f"w{1 + i * i % 23}" for i in range(20)))
    corpus, sizes = ["--corpus", with_bos / "corpus"], ["--n-long", 16, "--n-short", 4]
    commands = {
        "xray": (["--text", text, *sizes], "xray.parquet"),
        "length": ([*corpus, "--lengths", "8,16", "--windows", 4], "length.json"),
        "needle": ([*corpus, "--lengths", 16, "--ks", 1, "--depths", 0, "--samples", 4], "needle.json"),
        "longppl": ([*corpus, *sizes, "--segments", 4], "longppl.json"),
    }
    for command, (arguments, result) in commands.items():
        files = []
        for dtype in ("fp32", "bf16"):
            out = tmp_path / command / dtype
            model = folder if command == "xray" else with_bos
            options = ["--out", out, "--device", "cpu", "--dtype", dtype]
            done = run_here(f"scripts/{command}.py", model, *arguments, *options)
            assert done.returncode == 0, done.stderr
            assert command in ("length", "needle") or "prefix 5" in done.stdout
            files.append(out / result)
        if command == "xray":
            whole, half = map(MapRecord.load, files)
            assert (whole.about["dtype"], half.about["dtype"]) == ("fp32", "bf16-weights")
            found = [each.loss_long_nats[1:] for each in (whole, half)]
        else:
            told = [json.loads(each.read_text()) for each in files]
            assert [each["settings"]["dtype"] for each in told] == ["fp32", "bf16"]
            found = [np.array(loss_of[command](each)) for each in told]
        assert 0 < np.abs(found[0] - found[1]).max() < 0.1


loss_of = {
    "length": lambda found: found["models"][0]["bins"][0]["loss_nats"]["value"],
    "needle": lambda found: found["models"][0]["cells"][0]["loss_nats"]["value"],
    "longppl": lambda found: np.log(found["ppl"]["value"]),
}


def test_the_prefix_counts_among_the_positions_of_a_model(tmp_path):
    loaded = load_for_analysis(directory(tmp_path / "hf", "gpt2"))  # 64 learned positions
    loaded.behind("1").check_context(63)
    with refused("lower --n-long to at most 63"):
        loaded.behind("1").check_context(64)
