"""Times in words."""

import pytest

from olmo_sparsity.util.progress import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (8.4, "8 s"), (99, "99 s"), (100, "2 min"), (540, "9 min"), (5940, "99 min"), (5990, "1.7 h"),
     (36_000, "10 h"), (3.6e7, "10,000 h")],
)  # fmt: skip
def test_a_time_has_two_digits(seconds: float, words: str) -> None:
    assert duration(seconds) == words
