"""Progress in a log file: a line now and then, also while a unit is not finished; times in words."""

import pytest

from olmo_sparsity.util import progress
from olmo_sparsity.util.progress import duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What tqdm takes for the time, in seconds."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(progress.tqdm, "monitor_interval", 0)
    return now


def test_a_line_comes_while_the_first_unit_is_not_done(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that takes minutes for a target once showed nothing for a quarter of an hour."""
    with progress.progress("targets measured", 10, "targets", steady=False) as advance:
        clock[0] += 10
        advance(0.1)
        assert capsys.readouterr().err == ""
        clock[0] += 10
        advance(0.1)
        line = capsys.readouterr().err
    assert line.startswith("targets measured: 0/10 targets, ") and line.endswith(" 16:20 left\n")


def test_the_time_left_of_uneven_work_is_by_all_of_it(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress("targets measured", 10, "targets", steady=False) as advance:
        for seconds in (100, 100, 100, 20):
            clock[0] += seconds
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[3].endswith(" 08:00 left")  # 6 more at 320 s for 4


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (8.4, "8 s"), (99, "99 s"), (100, "2 min"), (540, "9 min"), (5940, "99 min"), (5990, "1.7 h"),
     (36_000, "10 h"), (3.6e7, "10,000 h")],
)  # fmt: skip
def test_a_time_has_two_digits(seconds: float, words: str) -> None:
    assert duration(seconds) == words
