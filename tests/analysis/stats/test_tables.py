"""Frames as text: every interval stands where its keys say."""

import pandas as pd
import pytest

from analysis.api import Result
from analysis.stats import numbers
from analysis.stats.numbers import recovery
from analysis.stats.summary import every_number, findings, summary
from analysis.stats.tables import Tables, interval_text, save_numbers, show
from analysis.token_kinds import KINDS
from tests.support.results import made_result


def test_a_table_of_keys_and_intervals():
    rows = [
        ("a", "true", 1, None, 0.5, 0.25, 0.75), ("a", "placebo", 1, None, 0.0, -0.125, 0.125),
        ("a", "true", 12, None, 1.0, 0.5, 1.5), ("bc", "true", 12, None, 2.0, 1.0, 3.0),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["selector", "far_context", "k", "blind", "value", "low", "high"])
    assert show(
        frame.assign(level="text"), across="far_context", digits=0, title="recovery"
    ).splitlines() == [
        "recovery (level text)",
        "selector  k             true      placebo",
        "a         1      50 [25, 75]  0 [-12, 12]",
        "          12   100 [50, 150]",
        "bc        12  200 [100, 300]",
    ]


def test_saved_numbers_say_what_they_are_of_and_lose_nothing_that_is_printed(tmp_path):
    recoveries = pd.DataFrame(
        {"k": [1, 4], "value": [1 / 3, 2 / 3], "low": [0.25, None], "high": [0.5, None]}
    )
    losses = pd.DataFrame({"name": ["gain_nats"], "k": [None], "value": [1234.5678]})
    save_numbers(tmp_path / "numbers.csv", {"books": recoveries, "all, both runs": losses})
    assert (tmp_path / "numbers.csv").read_text(encoding="utf8").splitlines() == [
        "of,k,value,low,high,name",
        "books,1,0.333333,0.25,0.5,",
        "books,4,0.666667,,,",
        '"all, both runs",,1234.57,,,gain_nats',
    ]


def test_tables_are_printed_as_they_are_added_and_saved_together(tmp_path, capsys):
    nan = float("nan")
    recoveries = pd.DataFrame({"level": ["text", "cache"], "sinks": nan, "value": [0.25, 0.5]})
    recoveries = recoveries.assign(low=nan, high=nan)
    tables = Tables(digits=0)
    tables.add("of ways", recoveries, by=("level", "sinks"))
    tables.add("losses", recoveries.drop(columns="sinks"), percent=False, digits=2)
    shown = ["of ways\nlevel  value\ntext      25", "of ways\nlevel  value\ncache     50"]
    shown.append("losses\nlevel  value\ntext   0.250\ncache  0.500")
    assert capsys.readouterr().out == "".join(f"\n{table}\n" for table in shown)
    tables.save(tmp_path / "numbers.csv")
    written = pd.read_csv(tmp_path / "numbers.csv")
    assert written["of"].tolist() == ["of ways"] * 2 + ["losses"] * 2
    assert written["value"].tolist() == [0.25, 0.5] * 2
    with pytest.raises(ValueError, match="two tables 'losses'"):
        tables.add("losses", recoveries)


def test_losses_are_never_per_cents():
    frame = pd.DataFrame(
        {"name": ["gain_nats", "share"], "value": [0.5, 0.5], "low": [0.25] * 2, "high": [0.75] * 2}
    )
    assert show(frame).splitlines()[1:] == ["gain_nats  0.50 [0.25, 0.75]", "share      50.0 [25.0, 75.0]"]


def test_whole_numbers_of_a_column_with_gaps_are_printed_as_such():
    nan = float("nan")
    lengths = [nan, 512, 4096, 1024.5, float("inf")]
    frame = pd.DataFrame({"length": lengths, "value": [1.0, 2, 3, 4, 5], "low": nan, "high": nan})
    shown = show(frame, percent=False).splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["1.00"],
        ["512", "2.00"],
        ["4,096", "3.00"],
        ["1.02e+03", "4.00"],
        ["inf", "5.00"],
    ]


def test_a_value_without_an_interval_stands_alone():
    nan = float("nan")
    assert interval_text({"value": 0.79, "low": nan, "high": nan}, percent=True) == "79.0"
    assert interval_text({"value": 0.79, "low": 0.5, "high": nan}, percent=True) == "79.0 [50.0, –]"
    assert interval_text({"value": nan, "low": nan, "high": nan}) == "–"


def test_two_runs_stand_beside_an_interval_that_does_not_hold_both():
    nan = float("nan")
    pooled = {"value": 0.1, "low": 0.08, "high": 0.12, "first_run": 0.2, "second_run": 0.0}
    assert interval_text(pooled, percent=True, digits=0) == "10 [8, 12] (runs 20 and 0)"
    assert interval_text(pooled) == "0.10 [0.08, 0.12] (runs 0.20 and 0.00)"
    assert interval_text(pooled | {"low": nan, "high": nan}) == "0.10 (runs 0.20 and 0.00)"
    inside = pooled | {"first_run": 0.081, "second_run": 0.119}
    assert interval_text(inside) == "0.10 [0.08, 0.12]"
    outside = pooled | {"first_run": 0.079, "second_run": 0.119}
    assert interval_text(outside) == "0.10 [0.08, 0.12] (runs 0.08 and 0.12)"
    alike = pooled | {"low": nan, "high": nan, "first_run": 0.1001, "second_run": 0.0999}
    assert interval_text(alike) == "0.10"
    assert interval_text(pooled | {"first_run": nan, "second_run": nan}) == "0.10 [0.08, 0.12]"
    frame = pd.DataFrame([{"k": 1} | pooled, {"k": 2} | inside])
    assert show(frame, digits=0).splitlines() == [
        "k                       value",
        "1  10 [8, 12] (runs 20 and 0)",
        "2                  10 [8, 12]",
    ]


@pytest.mark.parametrize("texts", [2, 4])
def test_no_interval_is_printed_below_four_documents(texts):
    """Two texts, the example of the README, once had a recovery of 79.0 [-1,330.4, 1,488.5] %."""
    result = made_result(texts=texts, kinds=KINDS)
    for text in (findings(result), summary(result)):
        assert ("[" in text.replace("[%", "").replace("[nats]", "")) == (texts == 4)
        assert ("2 documents: too few for an interval" in text) == (texts == 2)
        assert ("[95 % interval]" in text) == (texts == 4)


@pytest.mark.parametrize("options", [{}, {"resamples": 200}, {"seed": 1}])
def test_the_findings_are_those_of_the_frames_with_the_resamples_that_are_wanted(options):
    """The command prints them beside a numbers.csv and figures of these. Of few documents none are drawn."""
    result = made_result(3000, texts=300)
    text = findings(result, **options)
    rows = recovery(result, selector="leave-one-out", k=4, **options).set_index("far_context")
    for name, words in (("true", "recovery"), ("placebo", "placebo"), ("net", "net")):
        assert f"{words} {interval_text(rows.loc[name], percent=True)} %" in text
    shares = numbers.shares(result, **options).set_index("name")
    for name in ("share_over_tau", "share_below_minus_tau", "share_of_gain"):
        assert f"{interval_text(shares.loc[name], percent=True)} %" in text
    assert f"{len(result.over):,} gain more than 1 nat" in text and "3,000 targets of" in text
    assert text.splitlines()[-1].startswith("next: .recovery()")
    assert summary(result, **options).startswith(text)


def test_the_summary_has_the_frames_of_everything():
    result = made_result(kinds=KINDS)
    text = summary(result, resamples=200)
    nets = recovery(result, k=4, far_context="net", resamples=200)
    assert set(nets["selector"]) == {"leave-one-out", "greedy", "random", "best"}
    needed = numbers.tokens_needed(result, selector="leave-one-out", resamples=200)
    never = needed[needed["name"] == "never"]
    for row in [*nets.to_dict("records"), *never.to_dict("records")]:
        assert interval_text(row, percent=True) in text
    every = every_number({"mine": result}, k=2, without=["target_bins"], resamples=200)
    assert "target_bins" not in set(every["frame"])
    of_kinds = numbers.kinds(result, k=2, resamples=200)
    is_of_kinds = (every["frame"] == "kinds") & (every["result"] == "mine")
    shown = every.loc[is_of_kinds, [*of_kinds]].reset_index(drop=True)
    pd.testing.assert_frame_equal(shown, of_kinds, check_dtype=False)


@pytest.mark.parametrize(
    ("settings", "names"), [({}, ("training seed 1",)), ({"training_seed": None}, ("runs/1", "runs/2"))]
)
def test_runs_that_were_joined_stand_in_the_summary_by_themselves(settings, names):
    runs = [made_result(run=number, kinds=KINDS, **settings) for number in (1, 2)]
    text = summary(Result.join(runs), resamples=200)
    assert all(f"recovery, {name} by itself" in text for name in names)
