"""How much of a text is read, what is said before it is, and the command."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.xray import InfluenceMap, influence_map
from analysis.xray import map as map_file
from analysis.xray.map import chunks_left_out, estimated_seconds, tokens_read, windows
from olmo_sparsity.util.errors import UserError
from tests.support.small_measurement import model, saved

N, M = 20, 4
WORDS = [f"w{token}" for token in np.random.default_rng(0).integers(1, 50, 50)]
TEXT = " ".join(WORDS)


def assert_same(one: InfluenceMap, other: InfluenceMap) -> None:
    columns = ["token", "piece", "loss_long_nats", "loss_short_nats", "first_far"]
    pd.testing.assert_frame_equal(one.tokens[columns], other.tokens[columns])
    assert np.array_equal(one.matrix(), other.matrix(), equal_nan=True)


def of_map(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the map itself warns of; random weights, as here, are warned of by the model."""
    return [record for record in caplog.records if record.name == "analysis.xray.map"]


def test_of_a_longer_text_the_first_n_tokens_are_read_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured = influence_map(model(), TEXT, n_long=N, n_short=M, progress=False)
    assert [record.getMessage() for record in of_map(caplog)] == [
        "the text has 50 tokens, of which only the first 20 are read; read all with --whole (in Python whole=True)"
    ]
    caplog.clear()
    alone = influence_map(model(), " ".join(WORDS[:N]), n_long=N, n_short=M, progress=False)
    assert not of_map(caplog)
    assert_same(measured, alone)
    assert (len(measured), measured.about["text_tokens"], alone.about["text_tokens"]) == (N, 50, N)
    assert measured.extent == "20 tokens (the first of 50)" and measured.extent in repr(measured)
    assert measured.extent in measured.to_html() and measured.extent in measured.plot().get_suptitle()
    assert alone.extent == "20 tokens"
    assert measured.about["n_long"] == alone.about["n_long"] == N - 1, "what stands before the last token"


def test_the_whole_text_is_read_in_windows(caplog: pytest.LogCaptureFixture) -> None:
    measured = influence_map(model(), TEXT, n_long=N, n_short=M, progress=False, whole=True)
    assert not of_map(caplog) and len(measured) == measured.about["text_tokens"] == 50
    assert measured.about["n_long"] == N
    starts = [start for part in windows(50, N) for start in [part.start] * (part.end - part.first)]
    assert measured.tokens["first_far"].tolist() == [0, *starts]
    first = influence_map(model(), TEXT, n_long=N, n_short=M, progress=False)
    np.testing.assert_allclose(measured.matrix()[:N, :N], first.matrix(), atol=1e-5)


def test_n_is_by_default_what_the_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_file, "MOST_CONTEXT", 30)
    assert len(influence_map(model(), TEXT, n_short=M, progress=False)) == 30
    assert len(influence_map(model(), TEXT, n_short=M, progress=False, whole=True)) == 50


def test_the_shortest_n_still_has_a_far_token() -> None:
    measured = influence_map(model(), TEXT, n_long=2, n_short=1, progress=False)
    assert len(measured) == 3 and len(measured.tokens["influence"][2]) == 1
    with pytest.raises(UserError, match="at least twice"):
        influence_map(model(), TEXT, n_long=3, n_short=2, progress=False)


def test_how_long_it_takes_is_said_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    influence_map(model(), TEXT, n_long=N, n_short=M)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"about \d+ s: 15 tokens are left out, one at a time", lines[0])
    influence_map(model(), TEXT, n_long=N, n_short=M, whole=True)
    assert "one at a time in 4 windows\n" in capsys.readouterr().err
    influence_map(model(), TEXT, n_long=N, n_short=M, progress=False)
    assert capsys.readouterr().err == ""


def test_the_estimate_grows_with_the_tokens_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second for each token that a pass reads; the first passes are slow."""
    clock = [0.0]
    calls = []

    def reads(scorer: object, read: np.ndarray, first: int, n_short: int, start: int, end: int) -> None:
        clock[0] += tokens_read(len(read), start, end) + (100 if not calls else 0)
        calls.append(end)

    class Scorer:
        tokens_per_batch = 50

    monkeypatch.setattr(map_file, "_losses_of_chunk", reads)
    monkeypatch.setattr(map_file.time, "monotonic", lambda: clock[0])
    parts = windows(50, N)
    assert estimated_seconds(Scorer(), np.arange(50), parts[0], M, total=7000) == 7000
    assert calls == [2, 2]  # as many rows as a batch has


@pytest.mark.parametrize("length", [M + 2, 17, N + 1])
def test_every_far_token_is_left_out_in_one_chunk(length: int) -> None:
    chunks = chunks_left_out(length, M)
    assert [i for start, end in chunks for i in range(start, end)] == list(range(length - 1 - M))
    assert max(end - start for start, end in chunks) <= M


def test_the_command_reads_the_first_n_tokens_or_all(
    tmp_path: Path, call_main: Callable[..., tuple[int | None, str]]
) -> None:
    saved(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    arguments = (tmp_path / "model", "--text", tmp_path / "a.txt", "--n-long", N, "--n-short", M)
    for options, extent in (((), "20 tokens (the first of 50)"), (("--whole",), "50 tokens")):
        code, printed = call_main("xray", *arguments, "--out", tmp_path / "out", *options)
        assert not code and f"of {extent} gain more" in printed
        assert InfluenceMap.load(tmp_path / "out").extent == extent
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            "xray.html",
            "xray.json",
            "xray.parquet",
            "xray.png",
        }
