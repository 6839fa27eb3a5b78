"""Conversations: written by the tokenizer's chat template, whose tokens are read and are no targets."""

import json

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from analysis.measuring import measure
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.texts import TextReader
from tests.support.families import random_model
from tests.support.refusals import refused

TEMPLATE = "{{ bos_token }}é  {% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n</>{% endfor %}"
TURNS = [("user", "user é"), ("system", "  ab\n\n"), ("user", ""), ("user", "\na (.*) </> <user>\n")]
CHATS = [[{"role": role, "content": n * text} for role, text in TURNS] for n in (2, 3)]


@pytest.fixture(scope="module")
def fast():
    """Its tokens are bytes, but for two line feeds, and for a BOS that it puts before a text."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "<s>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=TEMPLATE)


def test_tokens_of_the_template_are_read_and_are_no_targets(fast, tmp_path):
    texts, is_content = [], []
    for chat in CHATS:  # by hand: a token is as long as its bytes; no BOS, which stands before every context
        parts = [(f"<{m['role']}>\n", m["content"], "\n</>") for m in chat]
        texts.append("é  " + "".join(map("".join, parts)))
        inside = [0] * 4 + [i == 1 for part in parts for i, piece in enumerate(part) for _ in piece.encode()]
        is_content.append([min([inside.pop(0) for _ in token]) for token in fast.tokenize(texts[-1])])
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
    model = random_model(vocab_size=258, initializer_range=0.3), fast
    options = {"n_long": 20, "n_short": 4, "targets": 96, "tau_nats": 0.5, "ks": [2], "progress": False}
    options |= {"selectors": ["attention"], "targets_per_block": 4}
    plain = measure(model, texts, **options).targets
    expected = plain[
        [is_content[n][place] for n, place in zip(plain["text"], plain["position"], strict=True)]
    ]
    blocks = sorted(set(expected["target_id"] // 4))  # those left are numbered anew
    assert 0 < len(blocks) < len(plain) // 4 and len(expected) < 4 * len(blocks)
    ids = [4 * blocks.index(target // 4) + target % 4 for target in expected["target_id"]]
    result = measure(model, tmp_path / "chats.jsonl", out=tmp_path / "out", **options)
    pd.testing.assert_frame_equal(result.targets, expected.assign(target_id=ids).reset_index(drop=True))
    assert measure(model, CHATS, **options).settings.texts.sha256 == result.settings.texts.sha256


def test_where_the_template_is_from_and_what_is_refused(fast, tmp_path):
    def written(tokenizer=tmp_path / "tokenizer.json", chat=CHATS[0]):
        return open_model((random_model(vocab_size=258), tokenizer)).chat(chat)

    fast.save_pretrained(tmp_path)
    assert written() == written(fast)
    skips = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for message, template in [
        ("fit .*why", "{{ raise_exception('why') }}"),
        ("changes or drops", "{{ messages }}"),
        ("changes or drops", skips),
        ("changes or drops", ""),
    ]:
        (tmp_path / "chat_template.jinja").write_text(template)
        with refused(message):
            written()
    with refused("no chat template"):
        written(fast.backend_tokenizer)
    for wrong in ({"role": "user"}, {"role": "user", "content": None}, "a"):
        with refused("fit the template"):
            written(fast, [wrong])
    with refused("only `measure` reads messages"):
        open_texts(CHATS, TextReader(fast.encode))


def test_special_tokens_are_no_targets_and_the_date_stands_still(fast, tmp_path):
    fast.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%H') }}{{ messages[0].content }}")
    chat = open_model((random_model(vocab_size=258), tmp_path / "tokenizer.json")).chat
    text, is_content = chat([{"role": "user", "content": "a<s>b"}])
    assert text == "1 January 2026a<s>b" and is_content == [False] * 14 + [True, False, True]


def test_a_line_has_a_text_or_messages(fast, tmp_path):
    lines = [
        {"messages": CHATS[0], "text": None},
        {"messages": CHATS[1]},
        {"text": "plain", "messages": CHATS[1]},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    loaded = open_model((random_model(vocab_size=258), fast))
    texts = open_texts(tmp_path / "lines.jsonl", loaded.reader)
    assert [*texts.in_message] == [0, 1] and texts.lengths[2] == len("plain")
    for wrong in ({"messages": "text"}, {"messages": None}, {"conversation": []}):
        (tmp_path / "wrong.jsonl").write_text(json.dumps(wrong))
        with refused("no text and no list of messages"):
            open_texts(tmp_path / "wrong.jsonl", TextReader(fast.encode))
