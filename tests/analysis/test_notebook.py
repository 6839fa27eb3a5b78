"""Influential tokens of a text: against the scripts' measurement, by hand, for every kind of tokenizer, and misuse."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
)

from analysis import influence_map, influential_tokens
from analysis.measure.influence import InfluenceEngine, measure_influence
from analysis.measure.settings import InfluenceSettings
from analysis.model.load import load_for_analysis
from analysis.records.store import load_records
from analysis.report.notebook import InfluentialTokens
from analysis.stats.summary import summarize
from analysis.text.tokenized import Passage, Placebos
from olmo_sparsity.checkpoint import TOKENIZER
from tests.support import tiny
from tests.support.families import random_model
from tests.support.measured import plain_loss
from tests.support.refusals import refused

N, M, K = 20, 5, 4
F = N - M
SELECTORS = ("leave-one-out", "gradient", "random", "leave-one-out@gradient:8")
SETTINGS = {"n_long": N, "n_short": M, "k": K, "tau_nats": 0.5, "tokens_per_batch": 512}
DOCUMENT, OTHER = tiny.random_documents(2, 60, seed=3)
DOCUMENT[40:45] = [7, 9, 7, 11, 7]


def words(bos=False):
    """A tokenizer of w1, w2, …, of which <|endoftext|> is special; ``bos`` puts <s> before a text."""
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 49)}, "<s>": 49}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 49)])
    special = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", **special)


def spelled(ids):
    return " ".join("<|endoftext|>" if i == 0 else f"w{i}" for i in ids)


def measure(model=None, tokenizer=None, text=None, **changes):
    text = spelled(DOCUMENT) if text is None else text
    settings = {**SETTINGS, "selectors": ("leave-one-out",), **changes}
    model = random_model() if model is None else model  # a compiled one has no truth
    return influential_tokens(model, tokenizer or words(), text, **settings)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_measures_what_the_scripts_measure(family, tmp_path):
    """The same text as the only document that offers targets; its placebo, of F tokens, can only be one place."""
    random_model(family).save_pretrained(tmp_path / "model")
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": [DOCUMENT, OTHER[:F]]})
    (tmp_path / "model" / TOKENIZER).write_bytes((corpus / TOKENIZER).read_bytes())
    ks = tuple(range(1, K + 1))
    paths = {"checkpoint": str(tmp_path / "model"), "corpus": str(corpus), "out": str(tmp_path / "records")}
    asked = {**SETTINGS, "ks": ks, "selectors": SELECTORS, "seed": 5, "targets": 1000, "device": "cpu"}
    del asked["k"]
    records = load_records(measure_influence(InfluenceSettings(**asked, **paths)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    result = measure(model, selectors=SELECTORS, placebo_text=spelled(OTHER[:F]), seed=5)
    there, here = records.targets, result.targets
    assert len(here) == len(DOCUMENT) - N
    assert len(result.over) >= 5
    for name in ("target_id", "position", "token", "kind", "placebo_start", "placebo_document"):
        assert np.array_equal(getattr(there, name), getattr(here, name)), name
    for name in ("loss_long_nats", "loss_short_nats", "selecting_gain_nats"):
        np.testing.assert_allclose(getattr(here, name), getattr(there, name), atol=1e-5)
    assert np.array_equal(records.over, result.over)
    shares = summarize(records, resamples=1000)
    assert result.summary["share_over_tau"] == pytest.approx(shares["share_over_tau"]["value"])
    for selector in SELECTORS:
        for far, found in result.choices[selector].items():
            assert np.array_equal(found.selected, records.selected[selector][far])
            np.testing.assert_allclose(
                found.influence, records.influence[selector][far], rtol=1e-3, atol=1e-5
            )
            np.testing.assert_allclose(found.loss_nats, records.loss_nats[selector][far], atol=1e-5)
        for k in ks:
            there_k, here_k = shares["selectors"][selector][str(k)], result.summary["selectors"][selector][k]
            for key in ("recovery", "placebo_recovery", "net_recovery"):
                assert here_k[key] == pytest.approx(there_k[key]["value"], abs=1e-4)


@pytest.mark.parametrize("per_block", [1, 7])
def test_the_table_against_one_forward_pass_per_number(per_block):
    """Every row: positions, texts and losses again, from the token ids and the model alone."""
    model = random_model()
    result = measure(model, placebo_text=spelled(OTHER), targets_per_block=per_block)
    frame, targets = result.to_pandas(), result.targets_frame()
    assert len(frame) == len(result.over) * K > 0
    assert len(targets) == len(DOCUMENT) - N
    over = result.targets.position[result.over].tolist()
    assert (
        targets.query("over_tau")["position"].tolist() == frame.query("k == 1")["position"].tolist() == over
    )
    close = {"abs": 1e-4}
    for position, rows in list(frame.groupby("position"))[:4]:
        read = N + (position - N) % per_block
        window, token, short = DOCUMENT[position - read : position], DOCUMENT[position], list(range(F, read))
        start = int(result.targets.placebo_start[position - N])
        placebo = [*OTHER[start : start + F], *window[F:]]
        long = plain_loss(model, window, range(read), token)
        losses = [
            plain_loss(model, window, [j for j in range(read) if j != i], token) - long for i in range(F)
        ]
        chosen = sorted(range(F), key=lambda i: -losses[i])[:K]
        in_placebo = result.choices["leave-one-out"]["placebo"].selected[over.index(position)]
        for k, row in enumerate(rows.itertuples(), 1):
            assert row.token.strip() == f"w{token}"
            assert row.loss_long_nats == pytest.approx(long, **close)
            assert row.loss_short_nats == pytest.approx(plain_loss(model, window, short, token), **close)
            assert row.gain_nats == pytest.approx(row.loss_short_nats - row.loss_long_nats)
            assert (row.k, row.selected_position) == (k, position - read + chosen[k - 1])
            assert row.selected_token.strip() == f"w{DOCUMENT[row.selected_position]}"
            assert row.distance_tokens == position - row.selected_position
            assert row.influence == pytest.approx(losses[chosen[k - 1]], **close)
            loss = plain_loss(model, window, sorted(chosen[:k]) + short, token)
            assert row.loss_k_nats == pytest.approx(loss, **close)
            kept = sorted(in_placebo[:k].tolist()) + short
            assert row.placebo_loss_k_nats == pytest.approx(plain_loss(model, placebo, kept, token), **close)
            assert row.placebo_selected_token.strip() == f"w{placebo[in_placebo[k - 1]]}"


def assert_long_losses(result, model, ids, positions):
    """The long loss of the targets at these positions, one forward pass each."""
    for t in positions:
        expected = plain_loss(model, ids[t - N : t], range(N), ids[t])
        row = result.targets.position.tolist().index(t)
        assert result.targets.loss_long_nats[row] == pytest.approx(expected, abs=1e-4)


def test_models_of_this_project_as_they_are_and_as_they_are_loaded(tmp_path):
    own = tiny.model()
    assert_long_losses(measure(own), own, DOCUMENT, (N, 41))
    random_model().save_pretrained(tmp_path)
    adapter, plain = measure(load_for_analysis(tmp_path).model), measure()
    np.testing.assert_allclose(adapter.targets.loss_short_nats, plain.targets.loss_short_nats, atol=1e-6)


def test_a_slow_tokenizer_without_offsets():
    """Bytes: a character is several tokens, and </s>, which the tokenizer puts at the end, is no target."""
    text = "Zoë met Zoë, and Zoë met 日本 <b>&amp;</b>."
    model = random_model(vocab_size=384)
    result = measure(model, ByT5Tokenizer(), text)
    ids = [*(byte + 3 for byte in text.encode()), 1]
    assert "".join(result.pieces) == text + "</s>"
    assert result.targets.position.tolist() == list(range(N, len(ids) - 1))
    assert_long_losses(result, model, ids, (N, N + 7, len(ids) - 2))


def test_special_tokens_are_context_but_never_targets():
    text = spelled([*DOCUMENT[:30], 0, *DOCUMENT[31:]])
    model = random_model()
    result = measure(model, words(bos=True), text, prefix="none")
    ids = [49, *DOCUMENT[:30], 0, *DOCUMENT[31:]]
    assert result.targets.position.tolist() == [t for t in range(N, len(ids)) if t != 31]
    assert_long_losses(result, model, ids, (N, 35))  # <s> in the first window, <|endoftext|> in the second
    with refused("31 is a special token"):
        measure(model, words(bos=True), text, prefix="none", targets=[25, 31])


def test_the_token_before_a_text_stands_before_every_context():
    model = random_model()
    result = measure(model, words(bos=True), spelled(DOCUMENT))
    assert result.prefix == (49,) and ", prefix 49)" in repr(result)
    for t in (N, 35):
        expected = plain_loss(model, [49, *DOCUMENT[t - N : t]], range(N + 1), DOCUMENT[t])
        row = result.targets.position.tolist().index(t)
        assert result.targets.loss_long_nats[row] == pytest.approx(expected, abs=1e-4)
    assert influence_map(model, words(bos=True), spelled(DOCUMENT), n_short=2).about["prefix"] == [49]


def test_asking_for_some_targets_changes_nothing_else():
    changes = {"selectors": ("random", "leave-one-out"), "placebo_text": spelled(OTHER)}
    whole = measure(**changes).to_pandas()
    asked = sorted(set(whole["position"]))[1:4]
    some = measure(**changes, targets=reversed(asked))
    assert some.targets.position.tolist() == asked
    expected = whole[whole["position"].isin(asked)].reset_index(drop=True)
    pandas.testing.assert_frame_equal(some.to_pandas(), expected, rtol=0, atol=1e-5)


def passage(length, special=()):
    ids = np.arange(length)
    return Passage(ids, np.isin(ids, special), [f"w{i} " for i in ids])


@pytest.mark.parametrize("block", [1, 4])
def test_placebos_of_the_text_itself_are_far_away(block):
    """Against every place that there is, one by one; the length that the note asks for is enough, and no less is."""
    enough = 3 * N + 2 * F + block - 1
    for length in (enough - 30, enough - 1, enough, enough + 40):
        placebos = Placebos(passage(length), None, N, F, block, seed=1)
        positions = np.arange(N, length)
        starts = placebos.starts(positions)
        for position, start in zip(positions, starts, strict=True):
            # contexts and targets of the block, and N tokens on either side
            first = position - (position - N) % block
            used = set(range(first - 2 * N, first + block + N))
            places = [s for s in range(length - F + 1) if not used & set(range(s, s + F))]
            assert start in places if places else start == -1
        assert (starts >= 0).all() or length < enough
        assert not (starts >= 0).all() or length >= enough - block + 1
        assert np.array_equal(placebos.starts(positions[:: 7 * block]), starts[:: 7 * block])
        assert f"at least {enough} tokens" in placebos.describe(found=False)
    drawn = {int(Placebos(passage(106), None, N, F, 1, seed=s).starts(np.array([90]))[0]) for s in range(400)}
    assert drawn == set(range(90 - 2 * N - F + 1))
    around = Placebos(passage(200, special=[0, 199]), None, N, F, 1, seed=0).starts(np.array([100, 150] * 9))
    assert (around > 0).all() and (around + F <= 199).all()


def test_a_text_too_short_for_its_own_placebo_says_so():
    short = measure()
    assert set(short.choices["leave-one-out"]) == {"true"}
    for said in (short.summary["placebo"], short._repr_html_()):
        assert "none: the text has 60 tokens" in said
    assert "no placebo" in repr(short)
    assert short.summary["selectors"]["leave-one-out"][K]["net_recovery"] is None
    assert short.to_pandas()["placebo_loss_k_nats"].isna().all()
    long = measure(text=spelled([*DOCUMENT, *OTHER]), targets=[*range(100, 120)])
    assert "the text itself, at least 20 tokens away" in long.summary["placebo"]
    ids = [*DOCUMENT, *OTHER]
    for pieces, start in zip(long.placebo_pieces, long.targets.placebo_start[long.over], strict=True):
        assert [int(piece.strip()[1:]) for piece in pieces] == ids[start : start + F]
    with refused("placebo_text has 14 tokens, and a placebo takes 15"):
        measure(placebo_text=spelled(OTHER[: F - 1]))


def test_nothing_over_tau_is_a_result_too():
    result = measure(tau_nats=100.0)
    assert len(result.to_pandas()) == 0
    assert "loss_k_nats" in result.to_pandas()
    assert result.summary["selectors"]["leave-one-out"][1]["recovery"] is None
    most = f"{result.gain_nats.max():.2f}"
    assert f"the most is {most}, lower tau_nats" in repr(result)
    assert f"The most is {most}" in result._repr_html_()


@pytest.mark.parametrize("too_long", [False, True])
def test_the_model_is_left_as_it_was(too_long):
    window = 16 if too_long else None
    model = random_model("mistral", attention_dropout=0.5, sliding_window=window).train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)

    def state():
        modes = [module.training for module in model.modules()]
        return modes, [(p.requires_grad, p.grad, p.dtype, p.device) for p in model.parameters()]

    before, weights = state(), [p.detach().clone() for p in model.parameters()]
    randomness = torch.get_rng_state()
    if too_long:
        with refused("N = 20 is beyond the 16 tokens"):
            measure(model)
    else:
        measure(model, selectors=("gradient", "attention", "leave-one-out"))
    assert state() == before
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    ids = torch.tensor([DOCUMENT])
    model(ids, labels=ids).loss.backward()  # and it still learns
    assert model.model.embed_tokens.weight.grad is not None


class Adapted(torch.nn.Module):
    """What PEFT makes of a model."""

    def __init__(self, model, prompts=False):
        super().__init__()
        self.inner, self.active_peft_config = model, SimpleNamespace(is_prompt_learning=prompts)

    def get_base_model(self):
        return self.inner


@pytest.mark.parametrize(
    "wrap", [torch.compile, Adapted, torch.nn.DataParallel, lambda m: torch.compile(Adapted(m))]
)
def test_a_wrapped_model_is_the_model_inside(wrap):
    inner = random_model()
    found, expected = measure(wrap(inner), selectors=("gradient",)), measure(inner, selectors=("gradient",))
    assert found.to_pandas().equals(expected.to_pandas())
    with refused("reads learned prompts before a text"):
        measure(Adapted(inner, prompts=True))


def test_a_model_on_one_device_is_measured_and_one_on_several_never_moved(tmp_path):
    random_model().save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert len(measure(placed).targets) == len(measure().targets)
    placed.lm_head.to("meta")
    with refused(r"the model \(llama\) is spread over cpu, meta; load it on one device"):
        measure(placed)
    assert placed.lm_head.weight.is_meta


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_attention_that_cuts_where_ids_jump_is_refused(family):
    model = random_model(family)
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    with refused(r'flash_attention_2, .* call model.set_attn_implementation\("sdpa"\)'):
        measure(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_who_turned_gradients_off(mode):
    expected = measure(selectors=("gradient",)).to_pandas()
    model = random_model()
    with mode():
        found = measure(model, selectors=("gradient",)).to_pandas()
    assert found["selected_position"].tolist() == expected["selected_position"].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    whole = measure(initializer := random_model())
    half = measure(initializer.to(dtype), selectors=("leave-one-out", "gradient", "attention"))
    assert next(initializer.parameters()).dtype == dtype
    difference = half.targets.loss_long_nats - whole.targets.loss_long_nats
    assert 0 < np.abs(difference).max() < 0.15
    losses = torch.tensor(half.targets.loss_long_nats)
    assert not torch.equal(losses, losses.to(dtype).double())  # the softmax is taken in fp32
    cut = random_model("mistral", sliding_window=8).to(dtype)
    with refused("N = 20 is beyond the 8 tokens of a sliding window"):
        measure(cut)


def masked():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=50, **small))


REFUSED = {
    "short": ({"n_long": 60}, "the text has 60 tokens, too few for N = 60 .*; choose n_long = 59 or less"),
    "empty": ({"text": ""}, "the text has 0 tokens, .*; give a longer text"),
    "list": ({"text": ["w1"]}, "text is a list; give one string"),
    "bounds": ({"n_short": 20}, "n_long = 20 must be larger than n_short = 20"),
    "k": ({"k": 16}, "k = 16 must be from 1 to the 15 far tokens"),
    "block": ({"targets_per_block": 0}, "targets_per_block = 0 holds no target; give 1 or more"),
    "selector": ({"selectors": "gredy"}, "unknown selector 'gredy'.*did you mean greedy"),
    "screened": ({"selectors": ["leave-one-out@gradient:3"]}, "m = 3 must be at least k = 4"),
    "no selector": ({"selectors": ()}, "selectors is empty"),
    "targets": ({"targets": [19]}, "positions from 20 .* to 59 .*; 19 is not among them"),
    "no targets": ({"targets": []}, "targets is empty"),
    "path": ({"model": "gpt2"}, "model is a str, not a loaded model"),
    "masked": ({"model": masked}, r"the model \(bert\) is no causal language model"),
    "window": ({"model": lambda: random_model("mistral", sliding_window=16)}, "the 16 tokens of.*lower n_long"),
    "reach": ({"model": lambda: random_model("gpt2", n_positions=19)}, "beyond the 19 positions of the model"),
    "vocabulary": ({"model": lambda: random_model(vocab_size=30)}, "gives token id .*, and the model has 30 tokens"),
    "tokenizer": ({"tokenizer": Tokenizer(models.BPE())}, "tokenizer is a Tokenizer, not one of transformers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_with_the_remedy(case):
    changes, message = REFUSED[case]
    model = changes.get("model")
    with refused(message):
        measure(**{**changes, "model": model() if callable(model) else model})


def test_losses_that_are_not_finite_are_refused():
    everywhere, here = random_model(), random_model()
    tried = torch.randint(50, (1, N), generator=torch.Generator().manual_seed(0)).tolist()[0]
    with torch.no_grad():
        everywhere.lm_head.weight[3] = float("inf")
        here.model.embed_tokens.weight[next(i for i in DOCUMENT if i not in tried)] = float("nan")
    with refused("its logits are not finite"):
        measure(everywhere)
    with refused("a loss of the model is not finite"):
        measure(here)


def test_a_sample_of_the_targets_is_measured_unless_all_are_asked_for():
    some, all_of_them = measure(max_targets=7), measure(max_targets=None)
    assert len(some.targets) == 7 and len(all_of_them.targets) == len(DOCUMENT) - N == len(measure().targets)
    assert np.array_equal(some.targets.position, measure(max_targets=7).targets.position)
    assert not np.array_equal(some.targets.position, measure(max_targets=7, seed=1).targets.position)
    rows = np.isin(all_of_them.targets.position, some.targets.position)
    np.testing.assert_allclose(some.gain_nats, all_of_them.gain_nats[rows], atol=1e-5)
    assert len(measure(max_targets=2, targets=range(25, 30)).targets) == 5  # what is named is measured
    with refused("max_targets = 0 leaves nothing to measure"):
        measure(max_targets=0)


def test_how_long_it_takes_is_told_and_an_interrupt_keeps_what_is_finished(monkeypatch, capsys):
    whole = measure(placebo_text=spelled(OTHER))
    assert len(whole.over) > 8
    said = capsys.readouterr().err
    assert f"selecting tokens for {len(whole.over)} targets takes about" in said
    assert "selecting tokens:" in said
    original, calls = InfluenceEngine.select, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(InfluenceEngine, "select", interrupt)
    part = measure(placebo_text=spelled(OTHER))
    assert f"interrupted: 8 of {len(whole.over)} targets are finished" in capsys.readouterr().err
    assert whole.complete and not part.complete
    assert part.over.tolist() == whole.over[:8].tolist()
    assert part.summary["targets_over_tau"] == len(whole.over) and not part.summary["complete"]
    assert len(part.to_pandas()) == 8 * K
    for far in ("true", "placebo"):
        first, second = (each.choices["leave-one-out"][far].loss_nats for each in (part, whole))
        assert np.array_equal(first, second[:8])
    assert "interrupted after 8 of them" in repr(part) and "Interrupted" in part._repr_html_()


def test_a_result_is_saved_and_loaded(tmp_path):
    result = measure(selectors=("random", "leave-one-out"), placebo_text=spelled(OTHER))
    again = InfluentialTokens.load(result.save(tmp_path))
    assert again.to_pandas().equals(result.to_pandas()) and again.summary == result.summary
    assert again._repr_html_() == result._repr_html_()
    assert result.to_html(tmp_path / "page.html") == (tmp_path / "page.html").read_text()
    nothing = measure(tau_nats=100.0)
    assert len(InfluentialTokens.load(nothing.save(tmp_path / "none.json")).to_pandas()) == 0
    path = tmp_path / "influential_tokens.json"
    path.write_text(path.read_text().replace("w1", "w2"))
    with refused("edited or damaged"):
        InfluentialTokens.load(tmp_path)


def test_the_first_k_and_sums_over_words_and_sentences():
    """Against sums over the rows of the table, one word at a time; three words make a sentence."""
    written = " ".join(f"w{i}{'.' if n % 3 == 2 else ''}" for n, i in enumerate(DOCUMENT))
    inner = Tokenizer(
        models.WordLevel({**{f"w{i}": i for i in range(1, 49)}, "<unk>": 0, ".": 49}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.Fuse()
    result = measure(random_model(), PreTrainedTokenizerFast(tokenizer_object=inner), written, tau_nats=0.3)
    pieces = [f" {piece}" if piece.startswith("w") and n else piece for n, piece in enumerate(result.pieces)]
    result = replace(result, pieces=pieces)  # as a tokenizer with spaces has them
    table = result.to_pandas()
    first = result.top_k(2)
    assert len(first) == len(result.over) > 5 and first["gain_nats"].is_monotonic_decreasing
    for row in first.itertuples():
        own = table[(table["position"] == row.position) & (table["k"] <= 2)]
        assert row.chosen == own["selected_token"].tolist()
        assert row.loss_k_nats == own["loss_k_nats"].iloc[-1]
    for ask, reason in (
        (lambda: result.top_k(20), "k = 20 was not measured; give 1 to 4"),
        (lambda: result.top_k(2, "greedy"), "greedy was not measured; choose leave-one-out"),
        (lambda: result.aggregate("paragraph"), "paragraph is no unit; choose word, sentence"),
    ):
        with refused(reason):
            ask()
    for unit, length in (("word", 1), ("sentence", 3)):
        units = result.aggregate(unit)
        assert units["text"].str.strip().tolist() == [
            " ".join(written.split()[start : start + length]) for start in range(0, len(DOCUMENT), length)
        ]
        assert units["targets"].sum() == len(result.targets) and units["times_chosen"].sum() == len(table)
        for row in units.itertuples():
            chosen = table[table["selected_position"].between(row.first_position, row.last_position)]
            assert row.times_chosen == len(chosen)
            assert row.influence == pytest.approx(chosen["influence"].sum())
            inside = result.targets_frame()["position"].between(row.first_position, row.last_position)
            assert row.gain_nats == pytest.approx(result.targets_frame()["gain_nats"][inside].sum())


def test_the_figure_draws_the_recoveries():
    result = influential_tokens(
        random_model(), words(), spelled(DOCUMENT), **SETTINGS, placebo_text=spelled(OTHER)
    )
    curves = {line.get_label(): list(line.get_ydata()) for line in result.plot().axes[0].lines}
    assert list(result.summary["selectors"]) == ["leave-one-out-kl", "leave-one-out"]  # the defaults
    assert curves == {
        f"{name}{suffix}": [found[k][kind] for k in range(1, K + 1)]
        for name, found in result.summary["selectors"].items()
        for suffix, kind in (("", "recovery"), (", placebo", "placebo_recovery"))
    }


def test_records_are_loaded_without_torch():
    code = "import sys; from analysis import load_records; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
