"""The methods of a Result are those of the registry, written out: signature, docstring, columns; filters pick rows."""

import inspect
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import Result
from analysis.stats.numbers import NUMBERS
from olmo_sparsity.util.errors import UserError
from tests.support.results import made_result

DOCS = Path(__file__).parents[2] / "docs" / "analysis.md"


@pytest.fixture(scope="module")
def result() -> Result:
    return made_result()


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_a_method_that_says_its_columns(name: str, result: Result) -> None:
    method = getattr(Result, name)
    parameters = inspect.signature(method).parameters
    assert {"resamples", "seed"} <= parameters.keys()
    assert all(parameter.annotation is not parameter.empty for parameter in list(parameters.values())[1:]), (
        "mypy sees it"
    )
    words = set(re.findall(r"\w+", method.__doc__))
    assert {*NUMBERS[name].columns} <= words, "help() has the columns"
    frame = getattr(result, name)(resamples=50)
    assert tuple(frame.columns) == NUMBERS[name].columns
    pd.testing.assert_frame_equal(frame, NUMBERS[name].frame(result, resamples=50))


def test_the_page_names_every_number() -> None:
    [row] = [line for line in DOCS.read_text().splitlines() if line.startswith("| `recovery()`")]
    assert set(re.findall(r"`(\w+)\(\)`", row)) == NUMBERS.keys()


def test_filters_leave_out_rows_of_other_values(result: Result) -> None:
    whole = result.recovery(resamples=50)
    some = result.recovery(selector="greedy", k=(1, 4), far_context=["net"], resamples=50)
    expected = whole[
        (whole["selector"] == "greedy") & whole["k"].isin([1, 4]) & (whole["far_context"] == "net")
    ]
    assert len(some) == 2
    pd.testing.assert_frame_equal(some, expected.reset_index(drop=True))
    kinds = result.kinds(selector="greedy", k=2, resamples=50)
    assert set(kinds["k"].dropna()) == {2} and set(kinds["selector"].dropna()) == {"greedy"}
    assert "share" in set(kinds["name"]), "what is of no selector stays"


@pytest.mark.parametrize("name", [name for name, one in NUMBERS.items() if one.of_choices])
def test_a_k_may_be_taken_from_a_frame(result: Result, name: str) -> None:
    """Where other rows have no k, pandas makes it a float."""
    frame = NUMBERS[name].frame
    expected = frame(result, k=4, resamples=20)
    for k in (np.int64(4), np.float64(4)):
        pd.testing.assert_frame_equal(frame(result, k=k, resamples=20), expected)
    if not NUMBERS[name].one_k and len(expected):
        both = frame(result, k=np.array([2.0, 4.0]), resamples=20)
        pd.testing.assert_frame_equal(both[both["k"] != 2].reset_index(drop=True), expected)


def test_what_was_not_measured_is_refused_with_the_choices(result: Result) -> None:
    with pytest.raises(UserError, match="selector = 'greedi' was not measured; choose from .*greedy"):
        result.recovery(selector="greedi", resamples=50)
    with pytest.raises(UserError, match="k = 3 was not measured; choose from 1, 2, 4, 8"):
        result.losses(k=3, resamples=50)
    with pytest.raises(UserError, match="k = 3 was not measured; choose one of 1, 2, 4, 8"):
        result.kinds(k=3, resamples=50)
    with pytest.raises(UserError, match="kinds is of one k"):
        result.kinds(k=[1, 2], resamples=50)  # type: ignore[arg-type]
