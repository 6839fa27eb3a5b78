"""Random streams: what committed results depend on."""

import numpy as np
import pytest

from olmo_sparsity.util.rng import Stream, generators

SHARED = {"BENCHMARK_TARGETS": 5}


def test_numbers_stay_and_no_other_is_shared():
    aliases = {name: int(each) for name, each in Stream.__members__.items() if each.name != name}
    assert aliases == SHARED
    assert [Stream.TARGETS, Stream.PLACEBOS, Stream.RANDOM_SELECTOR, Stream.PASSAGE_PLACEBOS] == [1, 2, 3, 4]
    tags = {"HELDOUT_WINDOWS": b"hld", "ID_TABLE": b"ids", "NEEDLES": b"nee", "POSITIONS": b"pos"}
    tags |= {"SEGMENTS": b"seg"}
    assert {name: int.from_bytes(tag) for name, tag in tags.items()} == {name: Stream[name] for name in tags}


@pytest.mark.parametrize("key", [(0, 0, 0), (7, 2**32 - 1, 5), (1, 2**32, 3), (1, 2**63 - 1, 2**40, 9)])
@pytest.mark.parametrize("largest", [2**32 - 1, 2**32], ids=["of a word", "longer"])
def test_generators_made_at_once_are_those_of_numpy_bit_for_bit(key, largest):
    indices = np.array([0, 1, 77, largest])
    for generator, index in zip(generators(key, indices), indices.tolist(), strict=True):
        assert generator.bit_generator.state == np.random.default_rng([*key, index]).bit_generator.state


def test_no_generators_are_made_of_no_indices():
    assert generators([1, 2, 3], np.empty(0, dtype=np.int64)) == []
