"""Progress in a log file: a line now and then, also while a unit is not finished; times in words."""

import logging
import re
import sys

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
    with progress.progress("targets measured", 10, "targets", done=2, estimates=False) as advance:
        clock[0] += 10
        advance(0, "")
        assert capsys.readouterr().err == ""
        clock[0] += 10
        advance(0, "16 min left")
        line = capsys.readouterr().err
    assert line == "targets measured: 2/10 targets, 00:20, 16 min left\n"


def test_in_a_terminal_a_log_message_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once stood behind the bar, and the rest of the bar stayed behind it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with progress.progress("targets measured", 10, "targets", estimates=False) as advance:
            advance(1)
            logging.getLogger("analysis").warning("about 3 min")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "about 3 min" in re.split(r"[\r\n]", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (8.4, "8 s"), (99, "99 s"), (100, "2 min"), (540, "9 min"), (5940, "99 min"), (5990, "1.7 h"),
     (36_000, "10 h"), (3.6e7, "10,000 h")],
)  # fmt: skip
def test_a_time_has_two_digits(seconds: float, words: str) -> None:
    assert duration(seconds) == words
