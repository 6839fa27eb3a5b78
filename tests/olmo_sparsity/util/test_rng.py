"""Random streams: what committed results depend on."""

import numpy as np

from olmo_sparsity.util.rng import Stream, generators


def test_numbers_stay():
    assert [Stream.TARGETS, Stream.PLACEBOS, Stream.RANDOM_SELECTOR, Stream.PASSAGE_PLACEBOS] == [1, 2, 3, 4]
    tags = {"HELDOUT_WINDOWS": b"hld", "ID_TABLE": b"ids", "NEEDLES": b"nee", "POSITIONS": b"pos"}
    tags |= {"SEGMENTS": b"seg"}
    assert {name: int.from_bytes(tag) for name, tag in tags.items()} == {name: Stream[name] for name in tags}


def test_what_is_drawn_stays():
    """NumPy promises that its seeding and these generators do not change; an index may have more than 32 bits."""
    drawn = [int(one.integers(2**62)) for one in generators([Stream.POSITIONS, 7, 2], np.array([0, 2**33]))]
    assert drawn == [1956880869393742659, 2537287250274557943]
