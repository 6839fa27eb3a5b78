"""The study on eviction: its tables from tiny cells, the needles, the dataset and its card, the script for a GPU."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import spearmanr
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from analysis import eviction, load_study, measure
from analysis.cache_eviction import numbers
from analysis.cache_eviction.agreement import kept_overlap, rank_correlation
from analysis.cache_eviction.result import EvictionResult
from analysis.cache_eviction.settings import BUDGETS
from analysis.measurement import save_study
from analysis.policies.policy import highest
from analysis.stats.tables import Tables, interval_text
from tests.analysis.cache_eviction.made_up import WAYS, made_up
from tests.support import small_measurement
from tests.support.families import directory
from tests.support.processes import SECONDS
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "eviction"
study = import_module("results.eviction.study")
needles = import_module("results.eviction.needles")
dataset = import_module("results.eviction.dataset")
gpu = import_module("results.eviction.gpu")
SMALL = {
    "n_long": 40,
    "n_short": 6,
    "targets_per_block": 8,
    "blocks": 8,
    "budgets": (0.12, 0.25),
    "policies": ("snapkv", "snapkv:blind=1", "h2o", "h2o:blind=1", "streaming-llm", "random", "nearest"),
    "sinks": 2,
    "device": "cpu",
    "progress": False,
}
pytestmark = pytest.mark.usefixtures("one_thread")


def small(**changes):
    return eviction(small_measurement.model(), small_measurement.TEXTS, **{**SMALL, **changes})


def lines_of(printed, title):
    """The rows of the table of this title, by their first word."""
    table = printed.split(f"{title}\n")[1].split("\n\n")[0]
    return {line.split()[0]: line for line in table.splitlines() if line}


def assert_shown(line, rows, **how):
    """That every interval of a frame stands in a line."""
    for row in rows.to_dict("records"):
        assert interval_text(row, digits=2, **how) in line


def later_of(result):
    return replace(result, targets=result.targets.query("place >= 4").reset_index(drop=True))


def test_what_is_collected_is_rounded(tmp_path):
    result = EvictionResult.of_parts([made_up()])
    result.save(tmp_path / "out" / "smollm2-code-n256")
    study.main(["collect", str(tmp_path / "out"), "--records", str(tmp_path)])
    collected = EvictionResult.load(tmp_path / "smollm2-code-n256").losses
    np.testing.assert_allclose(collected["loss_nats"], result.losses["loss_nats"], atol=2**-13, rtol=0)
    np.testing.assert_allclose(collected["kl_nats"], result.losses["kl_nats"], atol=0, rtol=2**-11)
    assert (collected["loss_nats"] * 4096 % 1 == 0).all()
    others = [name for name in collected if name not in ("loss_nats", "kl_nats")]
    pd.testing.assert_frame_equal(collected[others], result.losses[others])


@pytest.mark.slow
def test_cells_are_collected_and_every_table_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "SEEN_BY_FIRST", 4)
    both = {"references": ("leave-one-out-kl", "leave-one-out-kl:first=4")}
    blind = {"policies": ("streaming-llm", "knorm", "random"), "near": "reread", "references": ()}
    cells = {
        "smollm2-code-n256": small(),
        "smollm2-books-blindhorizon": small(**blind),
        "smollm2-books-horizon": small(**both),
        "smollm2-code-horizon": small(**both, blocks=6),
        "smollm2-books-needles": small(kept_sets=True),
    }
    cells = {cell: study.rounded(result) for cell, result in cells.items()}  # as they are collected
    out = tmp_path / "out"
    for cell, result in cells.items():
        settings = result.settings.but(model="/models/model.gguf", texts="/texts/code.jsonl")
        replace(result, settings=settings).save(out / cell)
    part = small(only_blocks=[2, 5], budgets=(0.12, 0.5))
    part.save(out / "smollm2-code-n1024" / "eviction-parts" / "block-00000002")
    asked = cells["smollm2-books-needles"]
    places = [{"asked for": 5, "not asked for yet": 9}] * (asked.targets["text"].max() + 1)
    (out / "smollm2-books-needles" / "places.json").write_text(json.dumps(places))

    records = tmp_path / "records"
    study.main(["collect", str(out), "--records", str(records)])
    assert "/models" not in (records / "smollm2-code-n256" / "eviction.json").read_text()
    csv = tmp_path / "numbers.csv"
    study.main(["--records", str(records), "--figures", str(tmp_path), "--numbers", str(csv)])
    printed = capsys.readouterr().out
    assert (tmp_path / "policies.png").is_file()

    whole = cells["smollm2-code-n256"]
    of_h2o = whole.summary().query("policy == 'h2o' and near == 'kept' and name == @numbers.LOSS")
    title = "smollm2-code-n256, aware, near kept: loss over full, nats"
    of_cell = lines_of(printed, title)
    assert_shown(of_cell["h2o"], of_h2o)
    assert "best" in of_cell
    written = pd.read_csv(csv).query("of == @title and policy == 'h2o'")
    assert written["value"].tolist() == pytest.approx(of_h2o["value"].tolist(), rel=1e-5)
    paired = whole.aware_less_blind().query("policy == 'h2o'")
    assert_shown(lines_of(printed, "smollm2-code-n256, near reread: aware less blind")["h2o"], paired)
    assert "smollm2-code-n1024: 16 targets, 2 of 8 blocks" in printed
    of_blind = lines_of(printed, "smollm2-code-n256, blind, near reread: less streaming-llm")
    assert not {"snapkv", "h2o", "nearest"} & {*of_blind}
    less = whole.differences("streaming-llm", "reread", ["snapkv:blind=1", "h2o:blind=1", "random"])
    assert_shown(of_blind["random"], less.query("policy == 'random'"))
    for name in ("gain", "kind", "distance"):
        assert f"smollm2-code-n256, aware, near kept, by {name}" in printed
        assert f"smollm2-code-n256, blind, near reread, by {name}" in printed
    pooled = EvictionResult.pool({name: cells[f"smollm2-{name}-horizon"] for name in ("books", "code")})
    first = "leave-one-out-kl:first=4"
    title = "smollm2-all-horizon, aware, near kept, later targets: less leave-one-out-kl"
    less = later_of(pooled).differences("leave-one-out-kl").query("policy == @first")
    assert_shown(lines_of(printed, title)[first], less)
    title = "smollm2-books-horizon, aware, near kept: less snapkv (policy random)"
    of_random = cells["smollm2-books-horizon"].differences("snapkv", "kept", ["random"])
    assert_shown(printed.split(f"{title}\n")[1].split("\n\n")[0], of_random)
    title = "smollm2-books-blindhorizon, blind, near reread, later targets: less streaming-llm"
    less = later_of(cells["smollm2-books-blindhorizon"]).differences("streaming-llm", "reread")
    assert_shown(lines_of(printed, title)["knorm"], less.query("policy == 'knorm'"))
    kept = asked.choices.query("policy == 'h2o' and near == 'kept' and budget == 0.25")["kept_share"]
    title = "smollm2-books-needles, aware, near kept: per cent of heads that keep the word asked for"
    of_h2o = lines_of(printed, title)["h2o"]
    assert f" {100 * np.stack(kept)[:, 5].mean():.0f} " in f"{of_h2o} "


@pytest.fixture(scope="module")
def two_texts():
    """Cells of two texts at two N, in which policies differ by made-up losses."""
    cells = {}
    for text, (kind, n_long) in product(("books", "code"), (("n256", 12), ("n1024", 20))):
        result = made_up(seed=len(cells), ways=[*WAYS, *BLIND_ONES])
        contexts = replace(result.settings.contexts, n_long=n_long, n_short=n_long - 8)
        settings = replace(result.settings, contexts=contexts)
        cells[f"smollm2-{text}-{kind}"] = replace(result, settings=settings)
    return cells


BLIND_ONES = [("streaming-llm", "far", "reread"), ("h2o:blind=1", "far", "reread")]


def shifted(result, policy, nats):
    """The result in which a policy loses so much more at all targets."""
    losses = result.losses.copy()
    losses.loc[losses["policy"] == policy, "loss_nats"] += np.float32(nats)
    return replace(result, losses=losses)


def test_a_policy_is_better_or_worse_where_all_texts_together_pass_and_none_turns(two_texts, capsys):
    cells = {name: shifted(shifted(cell, "h2o", -3), "random", 3) for name, cell in two_texts.items()}
    cells = {name: shifted(cell, "h2o:blind=1", 3) for name, cell in cells.items()}
    turned = shifted(cells["smollm2-code-n1024"], "random", -5)
    cells["smollm2-code-n1024"] = turned
    study.print_verdicts(cells, study.pooled(cells))
    of_cells = dict(part.split(" by Holm", 1) for part in capsys.readouterr().out.split("\n\n"))
    aware = of_cells["\nsmollm2-all-n256, aware, near kept, 2 texts: less snapkv"]
    assert "better  h2o  25, 50 %" in aware and "worse  random  25, 50 %" in aware
    blind = of_cells["smollm2-all-n256, blind, near reread, 2 texts: less streaming-llm"]
    assert "worse  h2o:blind=1  25, 50 %" in blind and "knorm" not in blind
    later = of_cells["smollm2-all-n1024, aware, near kept, 2 texts: less snapkv"]
    assert "better  h2o" in later and "random" not in later


def test_differences_are_printed_with_p_and_the_number_of_tests(two_texts, capsys):
    frame = two_texts["smollm2-code-n256"].differences()
    study.print_differences(Tables(percent=False, digits=2), frame, "code")
    printed = capsys.readouterr().out
    values, of_p = (lines_of(printed, title) for title in ("code", "code: p by Holm over 4 tests"))
    assert "leave-one-out-kl" in values and "leave-one-out-kl" not in of_p
    for policy, rows in frame.groupby("policy"):
        assert_shown(values[policy], rows)
        if policy in of_p:
            assert of_p[policy].split()[1:] == [f"{p:.4f}" for p in rows["p_holm"]]


def test_references_are_compared_with_single_effects_also_in_the_far_context_of_another_text(capsys):
    others = ("halving-kl", "presence-gradient")
    ways = [way for way in WAYS if way[2] == "kept"]
    ways += [(name, "targets", "kept") for name in others]
    cells = {}
    for seed, text in enumerate(("books", "code")):
        result = made_up(seed, far_contexts=("true", "placebo"), ways=ways)
        settings = replace(result.settings, references=("leave-one-out-kl", *others))
        cells[f"smollm2-{text}-references"] = replace(result, settings=settings)
    [(name, of_all)] = study.pooled(cells).items()
    study.print_cell(Tables(percent=False, digits=2), name, of_all)
    printed = capsys.readouterr().out
    assert "p by Holm" not in printed
    less = of_all.differences("leave-one-out-kl", policies=others)
    for far_context in ("true", "placebo"):
        what = f"{name}, aware, near kept, {far_context} far context"
        lines = lines_of(printed, f"{what}: references less leave-one-out-kl")
        assert not {"snapkv", "h2o", "random"} & {*lines}
        for other in others:
            rows = less.query("far_context == @far_context and policy == @other")
            assert_shown(lines[other], rows)
    losses = of_all.summary().query("name == @numbers.LOSS and policy == 'presence-gradient'")
    lines = lines_of(printed, f"{name}, aware, near kept, placebo far context: loss over full, nats")
    assert_shown(lines["presence-gradient"], losses.query("far_context == 'placebo' and near == 'kept'"))


def test_the_figure_is_of_the_longer_context_where_that_has_as_many_texts(two_texts):
    def heading_of(cells):
        return " ".join(text.get_text() for text in study.figure(cells).texts)

    assert "N 20, M" in heading_of(two_texts)
    fewer = {name: cell for name, cell in two_texts.items() if name != "smollm2-code-n1024"}
    assert "N 12, M" in heading_of(fewer)
    assert study.figure({}) is None


def test_orders_of_policies_at_two_lengths_are_compared(two_texts, capsys):
    pair = [f"smollm2-books-{kind}" for kind in ("n256", "n1024")]
    policies = ["snapkv", "knorm", "streaming-llm", "h2o:blind=1"]
    losses, shares = [], []
    for cell in pair:
        summary = two_texts[cell].summary().query("near == 'reread' and budget == 0.5")
        by_name = summary.set_index(["name", "policy"])
        losses.append(by_name.loc[numbers.LOSS, "value"][policies])
        shares.append(by_name.loc[numbers.SHARE].loc["knorm"])
    expected = pytest.approx(spearmanr(*losses).statistic)
    assert study.order_alike(*(two_texts[cell] for cell in pair), "reread") == (expected, 4)
    study.print_lengths(Tables(), dict.fromkeys(pair, made_up(gain=0.0, ways=[*WAYS, *BLIND_ONES])))
    printed = capsys.readouterr().out
    assert "12 %: rank correlation of 4 policies between N 256 and 1,024: 1.00" in printed
    assert "that is left" not in printed
    study.print_lengths(Tables(), two_texts)
    title = "books, blind, near reread, 12 %: per cent of the gain that is left, by N"
    knorm = lines_of(capsys.readouterr().out, title)["knorm"]
    for share in shares:
        assert interval_text(share.to_dict(), percent=True, digits=0) in knorm


def words_tokenizer():
    """Characters are tokens, and the words of the needles with the space before them."""
    words = [f" {word}" for word in needles.WORDS]
    pieces = [*words, *map(chr, range(32, 127)), "\n"]
    numbers_of = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(numbers_of, unk_token="?"))
    pattern = Regex("|".join([*words, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def words_reader():
    tokenizer = words_tokenizer()
    return needles.Reader(lambda text: tokenizer.encode(text).ids, tokenizer.decode)


def test_needles_are_judged_and_their_places_written(tmp_path, capsys):
    tokenizer = words_tokenizer()
    model = directory(tmp_path / "model", "llama", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(model / "tokenizer.json"))
    lines = " ".join(f"Line {number} of a book." for number in range(60))
    books = [{"text": lines, "group": group} for group in "ab"]
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps(book) + "\n" for book in books))
    out = tmp_path / "out"
    options = (
        "--policies",
        "snapkv,snapkv:blind=1",
        "--references",
        "none",
        "--n-long",
        "160",
        "--of-each",
        "1",
    )
    needles.main([str(model), str(path), str(out), *options])
    result = EvictionResult.load(out)
    assert str(result) in capsys.readouterr().out
    assert result.settings.policies == ("snapkv", "snapkv:blind=1") and result.counts["groups"] == 2
    made = needles.needles_of(words_reader(), books, 1, n_long=160)
    expected = [one for of_book in made.values() for one in of_book]
    assert json.loads((out / "places.json").read_text()) == [one.columns for one in expected]
    kept = study.words_of(result.targets, [one.columns for one in expected])
    assert len(result.keeps(kept)) == 3 * 3 * len(BUDGETS)
    for text, targets in result.targets.groupby("text"):
        ids = tokenizer.encode(expected[text].text).ids
        first, last = (targets["token"].iloc[place] for place in (0, -1))
        assert [ids[expected[text].columns[word]] for word in (needles.FIRST, needles.SECOND)] == [
            first,
            last,
        ]


def test_needles_are_whole_blocks_whose_words_stand_where_they_are_said_to(tmp_path):
    reader = words_reader()
    book = {"text": " ".join(f"Line {number} of a book." for number in range(600)), "group": "a"}
    made = needles.needles_of(reader, [book, {**book, "group": "b"}], 3, n_long=400)
    size = needles.targets_per_block(reader)
    assert list(made) == ["a", "b"]
    orders = set()
    for of_book in made.values():
        for one in of_book:
            ids = reader.encode(one.text)
            assert len(ids) == 400 + size
            first, second = one.columns[needles.FIRST], one.columns[needles.SECOND]
            orders.add(first < second)
            words = [reader.decode([ids[column]]) for column in (first, second)]
            assert max(first, second) < 400 - needles.N_SHORT
            for ordinal, word in zip(("first", "second"), words, strict=True):
                assert one.text.count(f"\nThe {ordinal} secret word is{word}.\n") >= 1
            answer = reader.decode(ids[400:])
            assert answer == f"{words[0]}.\nThe second secret word is{words[1]}"
            assert reader.decode(ids[:400]).endswith("\nThe first secret word is")
    assert orders == {True, False}


def test_words_of_a_block_are_those_of_its_text():
    targets = pd.DataFrame({"block": [0, 0, 1], "text": [1, 1, 0]})
    frame = study.words_of(targets, [{"key": 3}, {"key": 7}])
    assert frame.to_dict("records") == [
        {"block": 0, "name": "key", "column": 7},
        {"block": 1, "name": "key", "column": 3},
    ]


def test_the_script_for_a_gpu_writes_one_comparison_of_all_texts(tmp_path, monkeypatch):
    paths = []
    for name, groups in (("a", ("book", "letter")), ("b", ("site",))):
        lines = [
            {"text": text, "group": group} for group in groups for text in small_measurement.TEXTS[group]
        ]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = directory(tmp_path / "model", "llama")
    small_measurement.model()[1].save(str(model / "tokenizer.json"))
    assert "kvzip" not in gpu.settings_of(tiny=False)["policies"]
    few = {name: value for name, value in SMALL.items() if name != "device"} | {"blocks": 2}
    monkeypatch.setattr(gpu, "settings_of", lambda tiny: few)
    gpu.main([str(model), str(tmp_path / "out"), *map(str, paths), "--tiny"])
    result = EvictionResult.load(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("eviction-choices.parquet", "eviction-losses.parquet", "eviction-targets.parquet", "eviction.json"),
        "speed.json",
    ]
    assert result.counts["blocks"] == 4 and {group[:3] for group in result.targets["group"]} == {"a: ", "b: "}
    alone = [eviction(str(model), [path], **few) for path in paths]
    expected = EvictionResult.pool({"a": alone[0], "b": alone[1]})
    pd.testing.assert_frame_equal(result.losses, expected.losses, check_exact=True)


BOOK = {"text": "", "group": "https://www.gutenberg.org/ebooks/36#The-War-of-the-Worlds", "url": "x"}
CPYTHON = {"text": "", "group": "io.py", "url": "https://github.com/python/cpython/blob/3.11/Lib/io.py"}
TRIO = {"text": "", "group": "https://pypi.org/project/trio", "url": "https://pypi.org/project/trio#a.py"}
ATTRS = {"text": "", "group": "attrs", "url": "attrs-26.1.0.tar.gz/attrs-26.1.0/CHANGELOG.md"}
LICENSES = "==== Trio (LICENSE)\n\nfree\n==== CPython 3.11 standard library (LICENSE.txt)\n\nfree\n"


def test_tokens_are_of_texts_whose_license_is_on_file(tmp_path):
    (tmp_path / "licenses.txt").write_text(LICENSES)
    source_of = dataset.source_of_lines(ROOT / "results", tmp_path / "licenses.txt")
    book = source_of["books"](BOOK)
    assert (book.license, book.recipe) == ("public domain (USA)", "H. G. Wells: The War of the Worlds")
    assert source_of["books"]({**BOOK, "group": "elsewhere"}).license is None
    assert source_of["code"](CPYTHON).license == "PSF-2.0"
    assert source_of["code"](TRIO).license == "MIT OR Apache-2.0"
    assert source_of["code"]({**TRIO, "group": "https://pypi.org/project/sympy"}).license is None
    notes = source_of["releases"](ATTRS)
    assert notes.license == "MIT" and notes.recipe.startswith("attrs==26.1.0 --hash=sha256:")
    assert source_of["releases"]({**ATTRS, "url": "attrs-25.0.tar.gz/CHANGELOG.md"}).license is None
    without = dataset.source_of_lines(ROOT / "results", None)
    assert without["code"](CPYTHON).license is None and without["code"](TRIO).license is None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset of a tiny model, and the result with the effects that it is made from."""
    folder = tmp_path_factory.mktemp("dataset")
    model = directory(folder / "model", "llama")
    small_measurement.model()[1].save(str(model / "tokenizer.json"))
    texts = folder / "texts"
    texts.mkdir()
    sources = [BOOK, CPYTHON, TRIO, {**TRIO, "group": "https://pypi.org/project/sympy"}]
    strings = [text for of_group in small_measurement.TEXTS.values() for text in of_group]
    lines = [{**source, "text": text} for source, text in zip(sources, strings, strict=False)]
    another_book = {**BOOK, "group": "another book", "text": strings[4]}
    of_texts = {"code": lines[1:], "books": [lines[0], another_book]}
    for text, of_text in of_texts.items():
        (texts / f"{text}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_text))
    (folder / "licenses.txt").write_text(LICENSES)
    exact = "leave-one-out-kl/cache:2"
    shape = {"n_long": 40, "n_short": 6, "targets_per_block": 8, "tau_nats": 1.0, "ks": (1,), "effects": True}
    shape |= {"selectors": (exact,), "keep_as": ("cache:2",), "device": "cpu", "progress": False}
    out = folder / "out"
    result = measure(str(model), texts / "code.jsonl", targets=48, **shape)
    result.save(out / "smollm2-code-n1024")
    some = measure(str(model), texts / "books.jsonl", targets=72, batches=[0], **shape)
    assert not some.settings.complete
    some.save(out / "smollm2-books-n1024" / "parts" / "targets-00000000")
    import_module("results.cache.study").main(["collect", str(out), "--records", str(folder / "records")])
    made = SimpleNamespace(
        folder=folder,
        model=model,
        texts=texts,
        results={"books": some, "code": result},
        out=folder / "dataset",
    )
    dataset.build(
        folder / "records",
        texts,
        str(model),
        made.out,
        licenses=folder / "licenses.txt",
        results=ROOT / "results",
    )
    return made


def test_the_dataset_has_the_exact_effects_and_the_tokens_that_they_are_of(made):
    effects = pd.read_parquet(made.out / "effects.parquet")
    expected = pd.concat([result.effects for result in made.results.values()], ignore_index=True)
    assert effects.groupby("text").size().to_dict() == {
        text: len(result.effects) for text, result in made.results.items()
    }
    kl = np.exp(np.stack(effects["log_kl"]).astype(float))
    np.testing.assert_allclose(kl, np.stack(expected["kl_nats"]), rtol=0.01, atol=1e-6)
    blocks = pd.read_parquet(made.out / "blocks.parquet")
    by_license = blocks.groupby(blocks["license"].fillna("none"))["tokens"].apply(
        lambda rows: rows.notna().all()
    )
    with_tokens = {"MIT OR Apache-2.0": True, "PSF-2.0": True, "public domain (USA)": True}
    assert by_license.to_dict() == {**with_tokens, "none": False}
    lines = [json.loads(line) for line in (made.texts / "code.jsonl").read_text().splitlines()]
    for row in blocks[blocks["tokens"].notna() & (blocks["text"] == "code")].itertuples():
        [text] = [line["text"] for line in lines if line["url"] == row.url and line["group"] != "sympy"][:1]
        ids = small_measurement.model()[1].encode(text).ids
        assert row.tokens.tolist() == ids[row.first_token : row.first_token + 48]


def test_the_card_says_what_there_is_and_its_code_scores_a_policy(made):
    text = (made.out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    for config in front["dataset_info"]:
        frame = pd.read_parquet(made.out / f"{config['config_name']}.parquet")
        assert [feature["name"] for feature in config["features"]] == list(frame)
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    code = code.replace("sinks, keys = 4, ", "sinks, keys = 2, ")
    before = os.getcwd()
    os.chdir(made.out)
    try:
        names = {}
        exec(code, names)
    finally:
        os.chdir(before)
    of_first_text = next(iter(made.results.values())).effects
    first = of_first_text["target_id"] < 8
    exact = np.stack(of_first_text["kl_nats"][first]).astype(float).sum(axis=0)
    scores = np.arange(len(exact), dtype=float)
    assert names["spearman"] == pytest.approx(rank_correlation(scores, exact, 2), abs=1e-3)
    kept = [np.r_[[True] * 2, highest(values[2:], names["keys"] - 2)] for values in (scores, exact)]
    assert names["overlap"] == pytest.approx(kept_overlap(*kept, 2))
    for line in (made.out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((made.out / name).read_bytes()).hexdigest() == digest
    assert str(made.folder) not in text


def test_a_dataset_of_other_texts_or_of_none_is_refused(made, tmp_path):
    records = made.folder / "records"
    other = tmp_path / "texts"
    other.mkdir()
    shutil.copy(made.texts / "books.jsonl", other)
    (other / "code.jsonl").write_text((made.texts / "code.jsonl").read_text().replace("w7 ", "w8 "))
    with refused("code.jsonl holds other texts than were measured"):
        dataset.build(records, other, str(made.model), tmp_path / "out")
    with refused("has no cell smollm2-TEXT-n256"):
        dataset.build(records, made.texts, str(made.model), tmp_path / "out", kind="n256")
    mixed = shutil.copytree(records, tmp_path / "mixed")
    study = load_study(mixed)
    of_code = study["smollm2-code-n1024"]
    save_study(
        mixed, {**study, "smollm2-code-n1024": replace(of_code, settings=of_code.settings.but(seed=1))}
    )
    with refused("the cells were measured with different settings: seed 0 -> 1"):
        dataset.build(mixed, made.texts, str(made.model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_upload_is_only_said_and_damaged_files_are_not_uploaded(made, tmp_path):
    folder = shutil.copytree(made.out, tmp_path / "dataset")
    command = ["bash", str(FOLDER / "upload.sh"), "me/name", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"would run: hf upload me/name {folder} . --repo-type dataset" in done.stdout
    (folder / "effects.parquet").write_bytes(b"nothing")
    assert subprocess.run(command, capture_output=True, text=True).returncode != 0


def run_script(folder, cell, **environment):
    """What run.sh of a study prints, with `echo` in place of the commands."""
    environment = {**os.environ, "EVICTION": "echo", "MEASURE": "echo", **environment}
    command = ["bash", str(ROOT / "results" / folder / "run.sh"), "T", "s.gguf", "g.gguf", "O", cell]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True, timeout=SECONDS
    )


@pytest.mark.parametrize(
    ("cell", "with_effects", "expected"),
    [
        ("smollm2-books-n256", True, "s.gguf --text T/books.jsonl --n-long 256 .*--blocks 26 .*--effects C/"),
        ("gemma-code-n256", False, "g.gguf --text T/code.jsonl --n-long 256 .*--blocks 8 "),
        ("smollm2-code-n1024", True, "T/code.jsonl --n-long 1024 .*--blocks 16 .*--only-blocks 0-7$"),
        ("smollm2-books-n1024", False, "T/books-long.jsonl --n-long 1024 .*--blocks 8 (?!.*--only-blocks)"),
    ],
)
def test_cells_read_effects_where_there_are_some_and_of_the_blocks_that_have_them(
    tmp_path, cell, with_effects, expected
):
    cache = tmp_path / "C"
    if with_effects:
        (cache / cell).mkdir(parents=True)
        (cache / cell / "result.json").write_text("{}")
    done = run_script("eviction", cell, CACHE=str(cache))
    assert re.search(expected, done.stdout.replace(str(cache), "C")), done.stdout
    assert done.stdout.count("--effects") == with_effects
    assert ("its reference is measured" in done.stderr) != with_effects


SHARED = [f"{model}-{text}-n256" for model in ("smollm2", "gemma") for text in study.TEXTS]
SHARED += [f"smollm2-{text}-{kind}" for text in study.TEXTS for kind in ("n1024", "n4096")]


@pytest.mark.parametrize("cell", SHARED)
def test_cells_that_share_effects_have_the_blocks_of_the_study_on_the_cache(cell):
    """Effects are read by text and place, which the number of blocks decides with the seed."""
    words = {folder: run_script(folder, cell).stdout.split() for folder in ("eviction", "cache")}

    def value_of(folder, option):
        return words[folder][words[folder].index(option) + 1]

    assert words["eviction"][0] == words["cache"][0]
    for option in ("--text", "--n-long", "--n-short", "--targets-per-block"):
        assert value_of("eviction", option) == value_of("cache", option)
    targets = int(value_of("eviction", "--blocks")) * int(value_of("eviction", "--targets-per-block"))
    assert targets == int(value_of("cache", "--targets"))
    assert "--seed" not in [*words["eviction"], *words["cache"]]
