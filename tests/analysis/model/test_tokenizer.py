"""Tokenizers of every kind: with a backend, of other libraries, of one's own; what they are known by."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from analysis.measuring import measure
from analysis.model.tokenizer import OtherTokenizer, TextTokenizer, read_tokenizer
from analysis.open_model import open_model
from analysis.xray import influence_map
from tests.support.families import directory, random_model
from tests.support.refusals import refused

TEXT = "The quick brown fox é 你."


class Characters:
    """A tokenizer of one's own: no more than it must have."""

    def encode(self, text):
        return [ord(character) % 128 for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class WithSpecial(Characters):
    """It always puts 126 before a text and 127 behind it, and knows that they are special."""

    all_special_ids = [126, 127]
    eos_token_id = 127

    def encode(self, text):
        return torch.tensor([126, *super().encode(text), 127])


class AlwaysAround(Characters):
    """It always puts 1 before a text and 2 behind it, and says so of none."""

    all_special_ids = None

    def encode(self, text):
        return [1, *super().encode(text), 2]


class WithEnds(Characters):
    """Two of its tokens end a document."""

    all_special_ids = [126, 127]
    eos_token_id = [126, 127]


class Called:
    """It is called, as one of transformers is."""

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        ids = [ord(character) % 128 for character in text]
        return {"input_ids": [[1, *ids] if add_special_tokens else ids]}

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


class LikeTiktoken(Characters):
    """It refuses special tokens in a text where it is not told to read them."""

    special_tokens_set = {"<|endoftext|>"}

    def encode_single_token(self, token):
        return {"<|endoftext|>": 0}[token]

    def encode(self, text, *, allowed_special=(), disallowed_special="all"):
        assert allowed_special == "all"
        ids = [super(LikeTiktoken, self).encode(part) for part in text.split("<|endoftext|>")]
        return [token for number, part in enumerate(ids) for token in [0, *part][number == 0 :]]

    def decode(self, ids):
        return "".join("<|endoftext|>" if token == 0 else chr(token) for token in ids)


PLAIN = [ord(character) % 128 for character in TEXT]


@pytest.mark.parametrize(
    ("tokenizer", "ids", "before", "special", "boundaries"),
    [
        (Characters(), PLAIN, (), set(), set()),
        (WithSpecial(), PLAIN, (126,), {126, 127}, {127}),
        (AlwaysAround(), PLAIN, (1,), set(), set()),
        (WithEnds(), PLAIN, (), {126, 127}, {126, 127}),
        (Called(), PLAIN, (1,), set(), set()),
        (LikeTiktoken(), PLAIN, (), {0}, {0}),
        (ByT5Tokenizer(), [byte + 3 for byte in TEXT.encode()], (), None, {1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tokenizer_without_a_backend_is_read_by_its_methods(tokenizer, ids, before, special, boundaries):
    read = read_tokenizer(tokenizer)
    assert isinstance(read, OtherTokenizer)
    assert read.encode(TEXT).tolist() == ids and read.encode(TEXT).dtype == np.int64
    assert read.encode("").tolist() == []
    assert read.added_before == before
    assert read.boundaries == boundaries
    assert special is None or read.special == special
    assert "".join(read.decoder.pieces(ids)) == read.decode(ids)
    assert read.sha256 == read_tokenizer(tokenizer).sha256


def test_tokenizers_without_a_file_are_told_apart():
    tokenizers = [
        Characters(),
        WithSpecial(),
        AlwaysAround(),
        Called(),
        LikeTiktoken(),
        ByT5Tokenizer(),
        ByT5Tokenizer(extra_ids=5),
    ]
    assert len({read_tokenizer(tokenizer).sha256 for tokenizer in tokenizers}) == len(tokenizers)


@pytest.mark.parametrize("tokenizer", [Characters(), ByT5Tokenizer()], ids=lambda value: type(value).__name__)
def test_they_measure_and_are_drawn(tokenizer):
    model = random_model(vocab_size=400)
    texts = [TEXT * 4, TEXT[::-1] * 4]
    options = {"n_long": 20, "n_short": 4, "targets": 32, "tau_nats": 0.1, "ks": 1, "selectors": "random"}
    result = measure((model, tokenizer), texts, **options, progress=False)
    same = measure(model, texts, tokenizer=tokenizer, **options, progress=False)
    assert len(result.over) and result.targets.equals(same.targets)
    assert len(influence_map((model, tokenizer), TEXT, n_long=20, n_short=4, progress=False)) >= 20


def test_what_is_no_tokenizer_is_refused(tmp_path):
    class Words(Characters):
        def encode(self, text):
            return text.split()

    class Negative(Characters):
        def encode(self, text):
            return [-1, 2]

    class Ids(Characters):
        def encode(self, text):
            return {"ids": super().encode(text)}

    class Bytes(Characters):
        def decode(self, ids):
            return bytes(ids)

    for tokenizer in (Words(), Negative(), Ids()):
        with refused("must give a list of token ids"):
            read_tokenizer(tokenizer)
    with refused(r"\(Bytes\) makes b'a' of token ids, a bytes; its decode\(ids\) must give a string"):
        read_tokenizer(Bytes())
    for tokenizer in (3, None, object(), str):
        with refused("is no tokenizer"):
            read_tokenizer(tokenizer)
    with refused("the class Characters is no tokenizer: .* an object with both"):
        read_tokenizer(Characters)
    with refused("is no tokenizer.json and no folder"):
        read_tokenizer("none/tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        with refused("is no tokenizer.json of the tokenizers library"):
            read_tokenizer(path)
    (tmp_path / "empty").mkdir()
    with refused("no other tokenizer that transformers can load"):
        read_tokenizer(tmp_path / "empty")
    with refused("no tokenizer.json; copy it there, or give the tokenizer"):
        open_model(random_model()).encode(TEXT)


def test_a_folder_with_another_kind_of_tokenizer(tmp_path):
    folder = directory(tmp_path, "llama")
    (folder / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(folder)
    tokenizer = open_model(folder).tokenizer
    assert isinstance(tokenizer, OtherTokenizer)
    assert tokenizer.encode("ab").tolist() == [100, 101]
    assert read_tokenizer(folder).sha256 == tokenizer.sha256


def test_ids_without_an_embedding_are_refused_when_texts_are_read():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 49, "d": 50}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = random_model(vocab_size=50)
    loaded = open_model((model, words))
    assert loaded.encode("a b c").tolist() == [0, 1, 49]
    message = "'d' has the id 50, and the model .* has embeddings of 50 tokens"
    options = {"n_long": 8, "n_short": 2, "progress": False}
    with refused(message):
        measure((model, words), ["a b " * 20, "a b d " * 20], ks=1, **options)
    with refused(message):
        influence_map((model, words), "a b c d " * 5, **options)
    with refused("give the model's own tokenizer"):
        measure((model, words), ["a b " * 20] * 2, prefix=50, ks=1, **options)


def test_special_tokens_are_those_of_the_configuration_too(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "<x>": 2}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}, "additional_special_tokens": ["<x>", "<unknown>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = TextTokenizer(tmp_path / "tokenizer.json")
    assert (read.special, read.boundaries) == ({1, 2}, {1})
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    assert read_tokenizer(fast).boundaries == {1}
    for named in ({"additional_special_tokens": [5, None, "<x>"]}, {"additional_special_tokens": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": 5, "bos_token": ["a"], **named})
        )
        read = TextTokenizer(tmp_path / "tokenizer.json")
        assert (read.special, read.boundaries) == ({2} if "<x>" in str(named) else set(), set())


@pytest.mark.parametrize(
    ("name", "of_tokenizer", "of_model", "prefix"),
    [
        ("bos", "<x>", 0, [2]),
        ("bos", None, 0, [0]),
        ("bos", "<x>", None, [2]),
        ("eos", "<x>", 0, [2]),
        ("eos", "<x>", [1, 2], [1]),
    ],
)
def test_bos_is_the_tokenizer_s_where_the_model_names_another(name, of_tokenizer, of_model, prefix):
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "<x>": 2}, unk_token="a"))
    model = random_model(vocab_size=43)
    setattr(model.config, f"{name}_token_id", of_model)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **{f"{name}_token": of_tokenizer})
    assert list(open_model((model, fast), prefix=name).prefix) == prefix


def test_a_vocabulary_without_a_token_for_unknown_words_is_read():
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}))
    words.add_special_tokens(["</s>"])
    assert read_tokenizer(words).boundaries == {1}
