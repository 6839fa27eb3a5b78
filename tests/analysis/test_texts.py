"""Special tokens in texts: they are read, are no targets, divide texts into documents, and double no prefix."""

import math

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from analysis.api import load
from analysis.measuring import measure
from analysis.model.token_losses import TokenLosses
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.probes.length import LengthProbe
from analysis.probes.longppl import LongPPLProbe, target_losses
from analysis.probes.needle import NeedleProbe
from analysis.stats import numbers
from analysis.texts import TextReader, Texts
from analysis.xray import influence_map
from tests.support.families import random_model
from tests.support.refusals import refused

END, BEGIN, OTHER, SPACE = 90, 91, 92, 93


def encode(text):
    return np.array([int(word) for word in text.split()], dtype=np.int64)


def decode(ids):
    return " ".join("\n" if token == SPACE else str(token) for token in ids)


def documents(*strings, prefix=(), groups=None):
    """Token ids and group of every text that some strings become."""
    boundaries = frozenset({END, BEGIN})
    reader = TextReader(encode, None, boundaries | {OTHER}, boundaries, prefix, decode)
    texts = Texts(reader, list(zip(groups or [None] * len(strings), strings, strict=True)), "texts")
    names = [None] * len(texts.lengths) if texts.groups is None else texts.groups.tolist()
    return [(texts.tokens(number).tolist(), name) for number, name in enumerate(names)]


def test_tokens_that_end_or_begin_a_document_divide_a_text():
    assert documents("1 2", "3 92 4") == [([1, 2], None), ([3, 92, 4], None)]
    assert documents("1 90 2 90") == [([1], "texts 0 to 1"), ([2], "texts 0 to 1")]
    assert documents("5 6", "1 90 91 2 90 3", "7") == [
        ([5, 6], "text 0 by itself"),
        *(([token], "texts 1 to 3") for token in (1, 2, 3)),
        ([7], "text 4 by itself"),
    ]
    assert documents("1 90 2", "3", groups=["book", "site"]) == [([1], "book"), ([2], "book"), ([3], "site")]
    assert documents("90 91", "1") == [([], None), ([1], None)]


def test_white_space_between_documents_is_none():
    assert documents("1 2 90 93", "93 90 3") == [([1, 2], None), ([3], None)]
    assert documents("93 91 1 93 90 93 93 91 2", prefix=(91,)) == [
        ([1, 93], "texts 0 to 1"),
        ([2], "texts 0 to 1"),
    ]
    assert documents("93", "1") == [([93], None), ([1], None)]  # what is no part of a text stays
    assert documents("93 90 93", "1") == [([], None), ([1], None)]


def test_a_prefix_that_is_written_out_is_not_doubled():
    assert documents("91 1 2 91", prefix=(91,)) == [([1, 2], None)]
    assert documents("90 1 2", prefix=(90,)) == [([1, 2], None)]
    assert documents("8 9 1 8 9 2", "8 1", prefix=(8, 9)) == [([1, 8, 9, 2], None), ([8, 1], None)]
    assert documents("91 9 1 90 91 9 2", prefix=(91, 9)) == [([1], "texts 0 to 1"), ([2], "texts 0 to 1")]
    assert documents("1 91 2") == [([1], "texts 0 to 1"), ([2], "texts 0 to 1")]


@pytest.fixture(scope="module")
def tokenizer():
    """A word is a token; <turn> is special, </s> ends a document, <s> begins one and is put before a text."""
    words = {f"w{number}": number for number in range(40)} | {"</s>": 40, "<s>": 41, "<turn>": 42}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>", "<s>", "<turn>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def words_with_turns(count, every, seed):
    drawn = np.random.default_rng(seed).integers(1, 40, count)
    return " ".join("<turn>" if place % every == 0 else f"w{word}" for place, word in enumerate(drawn, 1))


OPTIONS = {"n_long": 20, "n_short": 4, "targets": 96, "targets_per_block": 4, "tau_nats": 0.5, "ks": [1, 3]}
OPTIONS |= {"selectors": ["attention", "random"], "progress": False}


def test_special_tokens_are_no_targets_and_may_be_chosen(tokenizer, tmp_path, caplog):
    texts = [words_with_turns(120, 5, seed) for seed in range(3)]
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    plain = [text.replace("<turn>", "w1") for text in texts]  # drawn alike, from texts of the same lengths
    drawn = measure(model, plain, **OPTIONS).targets[["text", "position"]]
    with caplog.at_level("INFO"):
        result = measure(model, texts, **OPTIONS, out=tmp_path / "out")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    kept = drawn[[ids[text][position] != 42 for text, position in drawn.to_numpy()]]
    pd.testing.assert_frame_equal(result.targets[["text", "position"]], kept.reset_index(drop=True))
    assert f"{3 * 24} special tokens stand in the texts" in caplog.text
    assert f"{len(drawn) - len(kept)} of {len(drawn)} drawn targets" in caplog.text
    # which of the chosen ones are special, by hand
    rows = result.choices.merge(result.targets, on="target_id")
    rows = rows[(rows["far_context"] == "true") & (rows["selector"] == "attention")]
    block_starts = rows["position"] - rows["target_id"] % 4 - 20
    by_hand = [
        [ids[text][start + place] == 42 for place in selected]
        for text, start, selected in zip(rows["text"], block_starts, rows["selected"], strict=True)
    ]
    assert [list(row) for row in rows["selected_special"]] == by_hand
    share = numbers.special_tokens(load(tmp_path / "out"))
    share = share.set_index(["selector", "far_context"]).loc[("attention", "true"), "value"]
    assert share == pytest.approx(np.mean(by_hand))
    chosen = f"of the first 3 that attention chose {100 * share:.1f}"
    assert f"72 special tokens in the texts are no targets; {chosen}" in str(result)
    assert numbers.special_tokens(measure(model, plain, **OPTIONS)).empty


def test_a_written_out_document_is_measured_as_the_document_itself(tokenizer):
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    texts = [words_with_turns(60, 7, seed) for seed in range(6)]
    alone = measure(model, {"a": texts[:3], "b": texts[3:]}, **OPTIONS, prefix="bos")
    packed = [" </s> <s> ".join(texts[:3]), "<s> " + " </s> ".join(texts[3:]) + " </s>"]
    together = measure(model, dict(zip("ab", packed, strict=True)), **OPTIONS, prefix="bos")
    pd.testing.assert_frame_equal(alone.targets, together.targets)
    pd.testing.assert_frame_equal(alone.choices, together.choices)
    assert together.settings.model.prefix == (41,) != (model[0].config.bos_token_id,)


def test_one_packed_text_has_placebos_from_its_own_documents(tokenizer, caplog):
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    packed = " </s> ".join(words_with_turns(60, 7, seed) for seed in range(4))
    result = measure(model, [packed], **OPTIONS)
    assert set(result.targets["group"]) == {"texts 0 to 3"}
    assert (result.targets["text"] != result.targets["placebo_text"]).all()
    assert "placebos are of other documents in it" in caplog.text
    with refused("second text"):
        measure(model, {"one": [words_with_turns(60, 7, 0)] * 2}, **OPTIONS)


def test_short_documents_beside_one_leave_it_the_placebos_of_a_text_by_itself(tokenizer, caplog):
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    text = words_with_turns(150, 7, 0)
    alone = measure(model, [text], **OPTIONS)
    assert "only one text has 16 tokens or more: placebos are from it" in caplog.text
    beside = measure(model, [f"{text} </s> w1 w2", "w3"], **OPTIONS)
    columns = ["text", "position", "placebo_text", "placebo_start", "loss_long_nats"]
    pd.testing.assert_frame_equal(beside.targets[columns], alone.targets[columns])


@pytest.mark.parametrize("tau_nats", [0.5, 99.0])
def test_it_is_said_that_texts_are_divided(tokenizer, caplog, tau_nats):
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    texts = [words_with_turns(60, 99, seed) for seed in range(3)]
    line = "tokens that end or begin a document divide the texts into 3 documents"
    options = {**OPTIONS, "tau_nats": tau_nats}
    with caplog.at_level("INFO"):
        result = measure(model, [" </s> ".join(texts[:2]), texts[2]], **options)
    assert line in caplog.text and line in str(result) and "special tokens" not in str(result)
    assert (result.settings.texts.documents, result.settings.texts.special_tokens) == (3, None)
    caplog.clear()
    with caplog.at_level("INFO"):
        result = measure(model, [f"{text} <turn> </s>" for text in texts], **options)
    assert "3 special tokens in the texts are no targets" in str(result)
    assert "divide the texts" not in caplog.text + str(result) and result.settings.texts.documents is None


def test_a_token_for_unknown_words_ends_no_document(caplog):
    """As in GPT-2's configuration, with a vocabulary that does not have every word."""
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(40)} | {"<end>": 40}, "<end>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<end>")
    reader = open_model(
        (random_model(vocab_size=43), PreTrainedTokenizerFast(tokenizer_object=words, **names))
    ).reader
    with caplog.at_level("INFO"):
        texts = open_texts(["w1 strange w2 <end> w3", "w4"], reader)
    assert [len(texts.tokens(number)) for number in range(2)] == [5, 1] and texts.groups is None
    assert "2 special tokens stand in the texts" in caplog.text


def test_losses_of_a_uniform_guess_are_warned_of(tokenizer, caplog):
    model = random_model(vocab_size=43, initializer_range=0.1)
    texts = [words_with_turns(120, 5, seed) for seed in range(3)]
    loaded = open_model((model, tokenizer))
    loaded.check_losses(np.full(3, 0.84 * math.log(43)))
    assert not caplog.text
    measure((model, tokenizer), texts, **{**OPTIONS, "tau_nats": -1.0})
    assert caplog.text.count("where a uniform guess has 3.76") == 1


def test_which_special_tokens_end_a_document(tokenizer, tmp_path):
    reader = open_model((random_model(vocab_size=43), tokenizer)).reader
    assert (reader.special, reader.boundaries) == ({40, 41, 42}, {40, 41})
    tokenizer.save_pretrained(tmp_path)
    saved = open_model((random_model(vocab_size=43), tmp_path)).reader
    assert (saved.special, saved.boundaries) == (reader.special, reader.boundaries)
    turns = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<turn>")
    assert open_model((random_model(vocab_size=43), turns)).reader.boundaries == {40, 41, 42}
    turns.chat_template = "{{ messages }}"  # there it may end a turn
    assert open_model((random_model(vocab_size=43), turns)).reader.boundaries == {40, 41}
    assert open_texts(["w1 <turn> w2"], open_model((random_model(vocab_size=43), turns)).reader).divided == 0


def test_probes_leave_special_tokens_out(tokenizer):
    model = random_model(vocab_size=43, initializer_range=0.3)
    texts = [words_with_turns(120, 5, seed) for seed in range(4)]
    loaded = open_model((model, tokenizer))
    source, token_losses = open_texts(texts, loaded.reader), TokenLosses(loaded.model, device=loaded.device)
    length = LengthProbe(lengths=(8, 16), windows=8)
    tokens = length.draw_sample(source).tokens
    losses = token_losses.last_losses(tokens, 15)
    rows = length.measure((model, tokenizer), texts, progress=False).rows
    assert rows["sum"].sum() == pytest.approx(losses[tokens[:, 1:] != 42].sum(), abs=1e-4)
    assert rows["count"].sum() == (tokens[:, 1:] != 42).sum() < tokens[:, 1:].size
    longppl = LongPPLProbe(n_long=20, n_short=4, sliding_window=2, segments=8)
    segments = longppl.draw_sample(source).tokens
    long, _ = target_losses(token_losses, segments, 4, 2)
    numbers = longppl.measure((model, tokenizer), texts, progress=False).numbers.set_index("name")
    assert numbers.loc["ppl", "value"] == pytest.approx(np.exp(long[segments[:, 6:] != 42].mean()), rel=1e-5)
    needles = NeedleProbe(lengths=(16,), ks=(1,), samples=8).draw_sample(source)
    assert 42 not in needles.key and 42 not in needles.value and 42 in needles.tokens


def test_an_xray_reads_one_document_and_special_tokens_need_nothing(tokenizer, caplog):
    model = random_model(vocab_size=43, initializer_range=0.3), tokenizer
    text = words_with_turns(24, 5, 0)
    options = {"n_long": 24, "n_short": 3, "prefix": "41", "progress": False, "tau_nats": -9.0}
    alone = influence_map(model, text, **options)
    packed = influence_map(model, f"w1 w2 </s> <s> {text} </s> {text}", **options)
    assert "holds 3 documents, of which the first of 5 tokens or more is read" in caplog.text
    pd.testing.assert_frame_equal(packed.tokens, alone.tokens)
    is_turn = (alone.tokens["token"] == 42).to_numpy()
    assert np.isnan(alone.gain_nats[is_turn]).all() and not np.isnan(alone.gain_nats[~is_turn][1:]).any()
    assert is_turn.sum() == 4 and not set(alone.over) & set(np.flatnonzero(is_turn))
    with refused("no file"):
        influence_map(model, "typo.txt", **options)
