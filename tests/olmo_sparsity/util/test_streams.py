"""Random streams: what committed results depend on."""

from olmo_sparsity.util.streams import Stream

SHARED = {"PASSAGE_PLACEBOS": 4, "SIGNS": 4, "BENCHMARK_TARGETS": 5}


def test_numbers_stay_and_no_other_is_shared():
    aliases = {name: int(each) for name, each in Stream.__members__.items() if each.name != name}
    assert aliases == SHARED
    assert [Stream.TARGETS, Stream.PLACEBOS, Stream.RANDOM_SELECTOR, Stream.EXAMPLES] == [1, 2, 3, 4]
    tags = {"HELDOUT_WINDOWS": b"hld", "ID_TABLE": b"ids", "NEEDLES": b"nee", "POSITIONS": b"pos"}
    tags |= {"SEGMENTS": b"seg", "STREAMED_TEXT": b"str", "TRAINING_SEEDS": b"ls"}
    assert {name: int.from_bytes(tag) for name, tag in tags.items()} == {name: Stream[name] for name in tags}
