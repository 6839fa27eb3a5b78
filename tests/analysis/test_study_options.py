"""What scripts of studies share: batches come in turn, and none begins that may end too late."""

from pathlib import Path

import pytest

from analysis.study_options import in_turn_until

A, B = Path("a.jsonl"), Path("b.jsonl")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test moves on."""
    now = [0.0]
    monkeypatch.setattr("analysis.study_options.time.monotonic", lambda: now[0])
    return now


def test_batches_come_in_turn_until_a_text_has_none_left() -> None:
    pairs = in_turn_until(float("inf"), {A: [2, 0, 1], B: [1, 0]})
    assert list(pairs) == [(A, 2), (B, 1), (A, 0), (B, 0), (A, 1)]


def test_no_batch_begins_that_may_end_too_late(clock: list[float]) -> None:
    """The longest took 20 s: at 35 s one of 26 s still ends at 61, at 45 s it does not end at 70."""
    begun = []
    for (_, number), seconds in zip(in_turn_until(70, {A: range(9)}), (20, 15, 10, 1), strict=False):
        begun.append((number, clock[0]))
        clock[0] += seconds
    assert begun == [(0, 0), (1, 20), (2, 35)]
