"""The influence map against a plain loop of one forward pass per pair of tokens; its record, notebook and command."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis import influence_map
from analysis.measure.influence_map import Window, _reads, measure_map, windows
from analysis.model.rope_scaling import load_scaled
from analysis.model.scorer import Scorer
from analysis.plots.influence_map import map_figure
from analysis.records.influence_map import MapRecord
from analysis.report.influence_map import InfluenceMap
from olmo_sparsity.checkpoint import TOKENIZER
from tests.analysis.model.test_scorer import build
from tests.support.made_up_map import made_up_map
from tests.support.measured import plain_loss
from tests.support.refusals import refused

N, M = 20, 4


def measured(name: str, length: int, **options) -> tuple:
    """A model, random tokens, and their map."""
    model = build(name)
    tokens = np.random.default_rng(length).integers(1, 50, length)
    about = {"n_long": min(N, length - 1), "n_short": M}
    scorer = Scorer(model, **options)
    found = measure_map(scorer, tokens, ["x"] * length, about, show=lambda _: nullcontext(lambda count: None))
    return model, tokens, found


@pytest.mark.parametrize("length", [N + 1, 2 * N + 4], ids=["one window", "four windows, the last partial"])
@pytest.mark.parametrize("name", ["rope", "learned", "llama", "gpt2"])
def test_every_pair_equals_one_plain_forward_pass(name: str, length: int) -> None:
    model, tokens, found = measured(name, length)
    assert np.isnan(found.loss_long_nats[0]) and not len(found.influence_nats[0])
    for t in range(1, length):
        start = int(found.first_far[t])
        read = list(range(t - start))

        def loss(kept: list[int], t: int = t, start: int = start) -> float:
            return plain_loss(model, tokens[start:], kept, tokens[t])

        long = loss(read)
        assert found.loss_long_nats[t] == pytest.approx(long, abs=5e-5)
        assert found.loss_short_nats[t] == pytest.approx(loss(read[-M:]), abs=5e-5)
        far = read[:-M]
        assert len(found.influence_nats[t]) == len(far)
        for i in far[:: 1 if t % 7 == 0 else 5]:
            expected = loss([j for j in read if j != i]) - long
            assert found.influence_nats[t][i] == pytest.approx(expected, abs=1e-4)


def test_rows_of_a_batch_do_not_matter() -> None:
    _, _, found = measured("rope", 50)
    for options in ({"tokens_per_batch": 1}, {"share_prefixes": False}):
        _, _, other = measured("rope", 50, **options)
        np.testing.assert_allclose(found.matrix(), other.matrix(), atol=2e-5)


@pytest.mark.parametrize("n_long", [8, 9, 20])
@pytest.mark.parametrize("length", [6, 9, 10, 11, 24, 57])
def test_every_token_is_a_target_once_with_half_of_n_or_all_before_it(length: int, n_long: int) -> None:
    parts = windows(length, n_long)
    assert parts[0] == Window(0, 1, min(length, n_long + 1))
    assert [t for each in parts for t in range(each.first, each.end)] == list(range(1, length))
    for each in parts[1:]:
        assert each.start >= 0
        read = np.arange(each.first, each.end) - each.start
        assert n_long / 2 < read.min() and read.max() <= n_long


def test_the_record_comes_back_and_knows_what_is_strongest(tmp_path: Path) -> None:
    found = made_up_map(60)
    path = found.save(tmp_path)
    again = InfluenceMap.load(tmp_path)
    assert (again.about, again.pieces) == (found.about, found.pieces)
    for name in ("tokens", "loss_long_nats", "loss_short_nats", "first_far"):
        assert np.array_equal(getattr(again, name), getattr(found, name), equal_nan=name.startswith("loss"))
    assert np.array_equal(again.matrix(), found.matrix(), equal_nan=True)
    assert again.save(tmp_path / "b.parquet").read_bytes() == path.read_bytes()
    row = np.nan_to_num(found.matrix()[40])
    places = np.argsort(-np.abs(row), kind="stable")[:3]
    assert again.strongest(40, 3) == [(int(i), float(row[i])) for i in places]


def test_what_a_token_needs_most_is_its_largest_influence_above_0_and_not_the_largest_magnitude() -> None:
    rows = [[]] * 17 + [[-0.3], [0.5, -2.0], [-5.0, 4.0, 0.1]]
    of_tokens = [np.array(row, dtype=np.float32) for row in rows]
    found = replace(made_up_map(len(rows)), influence_nats=of_tokens)
    found.first_far[-1] = 1
    assert found.needed_most(5) == [(4.0, 2, 19), (0.5, 0, 18)]
    assert found.needed_most(1) == [(4.0, 2, 19)]
    assert f"at 19 needs {found.pieces[2]!r} at 2 most, by 4.00 nats" in repr(found)
    (said,) = [text.get_text() for text in map_figure(found).axes[0].texts if "→" in text.get_text()]
    assert [line[0] for line in said.splitlines()] == ["n", "1", "2"]
    none = replace(found, influence_nats=[-np.abs(row) for row in of_tokens])
    assert none.needed_most(1) == [] and "needs" not in repr(none)


def test_what_is_no_map_is_refused_in_one_line(tmp_path: Path) -> None:
    path = made_up_map(30).save(tmp_path)
    table = pq.read_table(path)
    with refused("is missing; make it with scripts/xray.py"):
        MapRecord.load(tmp_path / "none.parquet")
    other = tmp_path / "other.parquet"
    for damage in (b"nonsense", path.read_bytes()[:-100], b""):
        other.write_bytes(damage)
        with refused("holds no influence map"):
            MapRecord.load(other)
    pq.write_table(table.select(["token"]), other)
    with refused("of format version 1"):
        MapRecord.load(other)
    pq.write_table(table.replace_schema_metadata(), other)
    with refused("of format version 1"):
        MapRecord.load(other)
    pieces = ["edited", *table["piece"].to_pylist()[1:]]
    pq.write_table(table.set_column(1, table.schema.field("piece"), [pieces]), other)
    with refused("edited or damaged"):
        MapRecord.load(other)


@pytest.fixture(scope="module")
def spelled(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a trained run with a tokenizer that splits at spaces, which that of the run does not."""
    folder = tmp_path_factory.mktemp("spelled") / "hf"
    shutil.copytree(trained / "hf", folder)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))
    return folder


@pytest.mark.slow
def test_notebook_and_command_measure_the_same(spelled: Path, tmp_path: Path, run_here) -> None:
    """A text longer than what the model reads (64 tokens); then drawn again without the model."""
    text = " ".join(f"w{1 + i * i % 23}" for i in range(90))
    (tmp_path / "text.txt").write_text(text)
    done = run_here("scripts/xray.py", spelled, "--text", tmp_path / "text.txt", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "text.txt-xray"
    assert {path.name for path in folder.iterdir()} == {
        f"xray.{e}" for e in ("parquet", "png", "pdf", "html")
    }
    found = InfluenceMap.load(folder)
    assert found.about["n_long"] == 64 and str(found) == done.stdout.splitlines()[0]
    model, tokenizer = (each.from_pretrained(spelled) for each in (AutoModelForCausalLM, AutoTokenizer))
    here = influence_map(model, tokenizer, text)
    assert here.about["n_long"] == 64 and here.pieces == found.pieces
    np.testing.assert_allclose(here.gain_nats, found.gain_nats, atol=1e-4)
    np.testing.assert_allclose(here.matrix(), found.matrix(), atol=1e-4)
    assert "srcdoc" in here._repr_html_() and "<script>" not in here._repr_html_()
    before = (folder / "xray.png").read_bytes()
    assert run_here("scripts/xray.py", folder, "--out", tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / "xray.png").read_bytes() == before


def test_a_run_reads_what_its_positions_reached_in_training(trained: Path) -> None:
    assert _reads(load_scaled(str(trained / "run"))) == 64
    assert _reads(load_scaled(f"{trained / 'run'}@yarn:4")) == 256


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "none.txt"], "none.txt cannot be read"),
        (["--text", "."], ". cannot be read (Is a directory)"),
        (["--text", "short.txt"], "the text has 5 tokens, too few for M = 16"),
        (["--text", "short.txt", "--n-short", "2", "--n-long", "3"], "N = 3 must be at least twice M"),
        (["--text", "long.txt", "--n-short", "40"], "N = 64 must be at least twice M"),
        (["--text", "bytes.txt"], "is not UTF-8 text"),
        ([], "has no xray.parquet; give --text"),
    ],
)  # fmt: skip
def test_command_refuses_in_one_line(
    spelled: Path, tmp_path: Path, run_here, arguments: list, said: str
) -> None:
    (tmp_path / "short.txt").write_text("w1 w2 w3 w4 w5")
    (tmp_path / "long.txt").write_text(" ".join(f"w{number % 50}" for number in range(200)))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    paths = [tmp_path / each if each.endswith(".txt") else each for each in arguments]
    done = run_here("scripts/xray.py", spelled, *paths)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and said in done.stderr


@pytest.mark.parametrize("option", ["--tau", "--n-short", "--memory-limit"])
def test_what_was_measured_is_not_measured_again_with_other_options(
    tmp_path: Path, call_main, option: str
) -> None:
    (tmp_path / "xray.parquet").touch()
    with refused(f"{option} is for measuring; give --text, or leave {option} out"):
        call_main("xray", tmp_path, option, 2)


def test_the_map_may_have_no_far_token_over_tau() -> None:
    found = made_up_map(30)
    quiet = replace(found, influence_nats=[row * 0 for row in found.influence_nats])
    assert quiet.to_html().count("</html>") == 1
