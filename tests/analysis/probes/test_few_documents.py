"""Probes of fewer than four texts: values without intervals, in numbers, in words and in figures."""

import pytest

from analysis.probes.length import LengthProbe
from analysis.probes.longppl import LongPPLProbe
from analysis.probes.needle import NeedleProbe
from tests.support.small_measurement import TEXTS, model

PROBES = {
    "length": LengthProbe(lengths=(8, 16, 40), windows=12, resamples=100),
    "longppl": LongPPLProbe(n_long=20, n_short=5, segments=20, alpha_nats=0.5, resamples=100),
    "needle": NeedleProbe(lengths=(20,), ks=(2,), key_tokens=3, depths=(0.0, 1.0), samples=6, resamples=100),
}


@pytest.mark.parametrize("documents", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PROBES)
def test_below_four_documents_there_is_no_interval(name: str, documents: int) -> None:
    texts = [text for of_group in TEXTS.values() for text in of_group][:documents]
    result = PROBES[name].measure(model(), texts, device="cpu", progress=False)
    frame = result.cells if name == "needle" else result.numbers
    assert frame["value"].notna().any()
    printed = str(result)
    headings = [figure.get_suptitle() for figure in result.figures().values()]
    if documents < 4:
        plural = "" if documents == 1 else "s"
        assert frame[["low", "high"]].isna().all(axis=None)
        assert f"{documents} document{plural}: too few for an interval" in printed
        for text in (printed, *headings):
            assert "95 %" not in text and "[" not in text
    else:
        assert frame[["low", "high"]].notna().any(axis=None)
        assert "95 %" in printed and "by document (only 4 documents: rough)" in printed and "[" in printed
        assert name == "longppl" or any("95 %" in heading for heading in headings)
