"""Sources of documents, and tokenizers: what is read is what stands in the files, and bad input is named."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from hashlib import blake2b
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data import docstrings
from olmo_sparsity.data import encode as words
from olmo_sparsity.data import text as text_module
from olmo_sparsity.data.sources import HubShards, TextFiles, file_units, hub_units
from olmo_sparsity.data.docstrings import clean_documents, docs_packages, is_english, write_documents
from olmo_sparsity.data.encode import Encoding, encode_documents
from olmo_sparsity.data.text import (
    MAX_PIECE_CHARACTERS,
    PIECE_CHARACTERS,
    paragraph_hash,
    split_paragraphs,
    split_pieces,
)
from olmo_sparsity.data.tokenizers import (
    EOS_TOKEN,
    MAX_RUN_CHARACTERS,
    _trainable,
    find_eos,
    id_range,
    load_tokenizer,
    tokenizer_file,
    train_bpe,
)
from olmo_sparsity.data.workers import StoppedEarly, run_jobs
from olmo_sparsity.util.errors import UserError
from tests.support.tiny import SHARED_DATA

C4_SAMPLES = sorted(SHARED_DATA.glob("c4-sample.*.json.gz"))
needs_c4_sample = pytest.mark.skipif(not C4_SAMPLES, reason=f"no C4 sample files in {SHARED_DATA}")
PROSE = "It is the first of the pages that can be read on a day with rain, and this is all that it says. "


def write_lines(path: Path, texts: list[str]) -> str:
    """Write C4's layout, gzipped where the name says so."""
    data = "".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def c4_folder(folder: Path) -> Path:
    """A copy of the hub's folder of C4: two training shards, one of validation."""
    (folder / "en").mkdir(parents=True)
    names = ("c4-train.00000-of-00002", "c4-train.00001-of-00002", "c4-validation.00000-of-00001")
    for source, name in zip(C4_SAMPLES, names, strict=True):
        shutil.copyfile(source, folder / "en" / f"{name}.json.gz")
    splits = "".join(f"  - split: {s}\n    path: en/c4-{s}.*.json.gz\n" for s in ("train", "validation"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: en\n  data_files:\n{splits}---\n")
    return folder


def c4_texts(index: int) -> list[str]:
    """Texts of one sample file, read without any of our code."""
    with gzip.open(C4_SAMPLES[index], "rt", encoding="utf8") as file:
        return [json.loads(line)["text"] for line in file]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_json_lines_are_read_in_order_without_empty_ones(tmp_path, name):
    texts = ["one\n\ntwo", "", " \n", "schön \U0001f600"]
    assert list(TextFiles((write_lines(tmp_path / name, texts),)).documents()) == [texts[0], texts[3]]


def test_a_text_file_is_one_document_and_small_ones_share_a_unit(tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nfile")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    lines = write_lines(tmp_path / "c.jsonl", ["third"])
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz"), lines, str(tmp_path / "a.txt")]
    units = file_units(paths)
    assert [list(unit.documents()) for unit in units] == [
        ["first\n\nfile", "second"],
        ["third"],
        ["first\n\nfile"],
    ]


def test_half_an_emoji_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "smile \\ud83d"}\n')
    assert list(TextFiles((str(tmp_path / "a.jsonl"),)).documents()) == ["smile ?"]


@pytest.mark.parametrize("line", ["{not json", '["a list"]', '{"url": "u"}', '{"text": 3}', "\xff"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n", encoding="latin1")
    with pytest.raises(UserError, match=r"a\.jsonl:3 .*one JSON object"):
        list(TextFiles((str(path),)).documents())


def test_a_truncated_gzip_is_named_after_its_whole_lines(tmp_path):
    draw = random.Random(0)
    texts = [str(draw.random()) for _ in range(5000)]
    path = Path(write_lines(tmp_path / "a.jsonl.gz", texts))
    path.write_bytes(path.read_bytes()[:-2000])
    read: list[str] = []
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is truncated or damaged"):
        read.extend(TextFiles((str(path),)).documents())
    assert 0 < len(read) < len(texts) and read == texts[: len(read)]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8"):
        list(TextFiles((str(tmp_path / "b.txt"),)).documents())


@needs_c4_sample
def test_c4_shards_stream_from_a_local_copy(tmp_path):
    dataset = str(c4_folder(tmp_path / "c4"))
    train, limit_tokens = hub_units(dataset, "en", "train")
    assert [list(unit.documents()) for unit in train] == [c4_texts(0), c4_texts(1)]
    assert limit_tokens is None
    [validation], _ = hub_units(dataset, "en", "validation", limit_documents=3)
    assert list(validation.documents()) == c4_texts(2)[:3]


@needs_c4_sample
def test_a_limit_takes_few_units_and_reaches_over_their_shards(tmp_path, monkeypatch):
    dataset = str(c4_folder(tmp_path / "c4"))
    [unit], limit_tokens = hub_units(dataset, "en", "train", limit_documents=13, limit_tokens=1000)
    assert list(unit.documents()) == (c4_texts(0) + c4_texts(1))[:13]
    assert limit_tokens == 1000
    monkeypatch.setattr("olmo_sparsity.data.sources.HUB_UNIT_DOCUMENTS", 5)
    units, _ = hub_units(dataset, "en", "train", limit_documents=13)
    assert [len(list(unit.documents())) for unit in units] == [7, 6]


@needs_c4_sample
def test_what_a_data_set_lacks_is_named(tmp_path):
    folder = c4_folder(tmp_path / "c4")
    with pytest.raises(UserError, match="config fr, has no readable split train"):
        hub_units(str(folder), "fr", "train")
    with pytest.raises(UserError, match="has no readable split test"):
        hub_units(str(folder), "en", "test")
    shard = folder / "en" / "c4-train.00000-of-00002.json.gz"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(UserError, match="cannot be read"):
        list(HubShards(str(folder), "en", "train", 0, 2).documents())


def test_without_a_network_the_hub_fails_at_once(monkeypatch):
    import httpx
    from huggingface_hub import HfApi

    def unreachable(self, name, timeout):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    with pytest.raises(StoppedEarly, match=r"cannot be reached \(no route\).*text --files"):
        hub_units("allenai/c4", "en", "train")


def test_docstrings_come_in_source_order_without_running_the_module(tmp_path):
    source = '"""Module."""\nraise SystemExit\nclass A:\n    """A."""\n    def f(self):\n        """A.f."""\n'
    source += 'async def g():\n    """g."""\n    def inner():\n        """inner."""\n"""not a docstring"""\n'
    (tmp_path / "good.py").write_text(source)
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""\n')
    modules = [
        tmp_path / name for name in ("good.py", "bad.py", "latin.py", "none.py")
    ]
    assert docstrings.read_docstrings(modules) == [["Module.", "A.", "A.f.", "g.", "inner."], [], [], []]


def test_the_default_packages_are_the_installed_requirements_only():
    packages = docs_packages()
    assert {"python", "numpy", "torch", "transformers", "certifi"} <= set(
        packages
    )  # certifi only through others
    assert not {"olmo-sparsity", "pytest", "ruff", "mypy"} & set(packages)
    with pytest.raises(UserError, match="package no-such-thing is not installed"):
        docs_packages(["no-such-thing"])


def test_documents_of_one_package_hold_its_docstrings(tmp_path):
    import safetensors.torch

    write_documents(tmp_path / "text", ["safetensors"], workers=1)
    paths = sorted(map(str, (tmp_path / "text").iterdir()))
    texts = [text for unit in file_units(paths) for text in unit.documents()]
    assert len(paths) == docstrings.PARTS
    expected = " ".join(str(safetensors.torch.save_file.__doc__).split())
    assert any(expected in " ".join(text.split()) for text in texts)
    assert len(texts) == len(set(texts))


def test_junk_short_and_repeated_text_is_left_out():
    long = [PROSE * 2 + str(number) for number in range(6)]
    documents = [
        [*long[:3], "Copyright 2020 by somebody. It is the licence of this.", "the end"],
        [long[0], *long[3:], "the end"],
        ["too short"],
        ["x1 = y1 * z1 + " * 100],
    ]
    cleaned = list(clean_documents(iter(documents)))
    assert cleaned == [
        "\n\n".join([*(p.rstrip() for p in long[:3]), "the end"]),
        "\n\n".join([*long[3:], "the end"]),
    ]
    assert is_english(PROSE)
    assert not is_english("les chats dorment sous une couverture quand il pleut dehors " * 3)
    assert not is_english("это предложение the of and to a in is for that")


def test_bpe_gives_every_text_back_and_has_all_bytes():
    tokenizer = train_bpe([PROSE] * 3, 300)
    text = "naïve \U0001f600\x00\r\n\t  end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert id_range(tokenizer) == 300
    assert find_eos(tokenizer) == tokenizer.token_to_id(EOS_TOKEN) == 0


def test_olmos_tokenizer_and_the_search_for_eos(tmp_path):
    olmo = load_tokenizer(tokenizer_file("olmo"))
    assert (id_range(olmo), find_eos(olmo)) == (50280, 50279)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 7}, unk_token="<unk>"))
    words.enable_truncation(2)
    words.save(str(tmp_path / "words.json"))
    loaded = load_tokenizer(tokenizer_file(str(tmp_path / "words.json")))
    assert (id_range(loaded), find_eos(loaded), find_eos(loaded, "<unk>")) == (8, 7, 0)
    assert loaded.truncation is None
    with pytest.raises(UserError, match=r"no token <stop>; .*--eos-token"):
        find_eos(loaded, "<stop>")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="is no tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(UserError, match="use bpe, olmo, or the path"):
        tokenizer_file("gpt9")


def _square_or_fail(number: int) -> int:
    if number < 0:
        raise UserError(f"{number} is negative")
    return number**2


def test_jobs_keep_their_order_and_their_errors():
    for workers in (1, 2):
        assert run_jobs(
            _square_or_fail, range(5), workers=workers, description="squares", unit="numbers"
        ) == [0, 1, 4, 9, 16]
        with pytest.raises(UserError, match="-3 is negative"):
            run_jobs(_square_or_fail, [1, -3, 2], workers=workers, description="squares", unit="numbers")


def test_the_tokenizer_of_real_text_is_the_one_without_cuts():
    """Long words and white space are cut before training; no text that people write has such."""
    texts = [
        *topics.values(),
        *(path.read_text(encoding="utf8") for path in Path(__file__).parents[3].glob("*/*.py")),
    ]
    texts.append("\n\n".join(texts))  # longer than a piece
    assert len(texts[-1]) > 2 * PIECE_CHARACTERS
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator(texts, trainer)
    assert train_bpe(texts, 1000).to_str() == plain.to_str()


@pytest.mark.parametrize("run", ["a", " ", "-", "1", "_-", "a1", "\u3000\t", "é"])
def test_a_long_run_is_cut_and_comes_back(tmp_path, run):
    """Training took the square of the length."""
    text = "some words " + run * (1_200_000 // len(run)) + " and more\n"
    parts = list(_trainable(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= MAX_RUN_CHARACTERS + 50
    assert "".join(split_pieces(text)) == text
    assert max(map(len, split_pieces(text))) <= MAX_PIECE_CHARACTERS
    tokenizer = train_bpe([text], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    [(_, ids)] = encode_documents([text], Encoding(str(tmp_path / "tokenizer.json"), 0, "uint16"))
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_text_without_single_spaces_keeps_its_ids(tmp_path, monkeypatch):
    """A list of words, a line each: pieces end at its line breaks."""
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(text_module, "MAX_PIECE_CHARACTERS", 4000)
    text = "\n".join(f"word{number},x" for number in range(5000))
    tokenizer = train_bpe([text[:10_000]], 400)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(list(split_pieces(text))) > 40
    [(_, ids)] = encode_documents([text], Encoding(str(tmp_path / "tokenizer.json"), 0, "uint16"))
    assert ids[:-1].tolist() == tokenizer.encode(text).ids


def test_words_without_end_are_not_all_remembered(monkeypatch):
    monkeypatch.setattr(words, "MAX_KNOWN_CHARACTERS", 10_000)
    encoder = words.WordEncoder(train_bpe(["abcdefghij" * 20], 300), np.dtype(np.uint16))
    for number in range(30):
        encoder.encode([f"{number}" + "abc" * 1000])
    assert 0 < sum(map(len, encoder.known)) < 20_000


@pytest.mark.parametrize("characters", [1, 2, 3, 5, 1000])
def test_paragraphs_have_the_same_hash_in_parts(monkeypatch, characters):
    monkeypatch.setattr(text_module, "_HASHED_CHARACTERS", characters)
    for paragraph in [
        "",
        " ",
        "one",
        "one two",
        "  one \t two\u3000three ",
        "a  b   c",
        "ab cd ef gh",
        " \x1c x",
    ]:
        words = " ".join(paragraph.split())
        expected = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")
        assert paragraph_hash(paragraph) == expected, paragraph


def test_paragraphs_are_what_stands_between_blank_lines():
    for text in ["", "\n\n", "a", "a\n\nb", "\n \na\n\n\n b\n\n", "a\n \n \n  b\nc\n\n\x1c"]:
        expected = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
        assert list(split_paragraphs(text)) == expected
