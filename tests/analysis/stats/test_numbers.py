"""Every frame of numbers against plain loops over targets, and bootstraps of whole documents."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr, spearmanr

from analysis.api import Result
from analysis.stats import attribution, bootstrap, comparisons, context_worth, numbers
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.numbers import LARGEST, NUMBERS, distance_edges, gain_edges
from analysis.stats.recovery import Measured, choose_k, default_selector
from analysis.stats.summary import findings
from analysis.token_kinds import KINDS
from olmo_sparsity.util.errors import UserError
from tests.support.frames import row_of, rows_of
from tests.support.refusals import refused
from tests.support.results import CURVES, made_result

KS = (1, 2, 4, 8)
PLACEBOS = ("placebo", "same-group", "shuffled")
FURTHER = ["subset_loss_nats", "subset_influence", "comprehensiveness_nats", "leave_one_out_spearman"]
OF_CHOICES = (
    "recovery", "losses", "differences", "gain_bins", "target_bins", "kinds", "distances", "tokens_needed",
    "specificity", "faithfulness",
)  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return made_result(kinds=KINDS)


@pytest.fixture
def percentiles(monkeypatch):
    """Percentiles of a bootstrap for few documents, too, so that a plain loop over resamples gives them."""
    monkeypatch.setattr(bootstrap, "MOST_UNITS_OF_T", 1)


def value(frame: pd.DataFrame, **where: Any) -> float:
    return row_of(frame, **where)["value"]


def bounds(frame: pd.DataFrame, **where: Any) -> tuple[float, float]:
    row = row_of(frame, **where)
    return row["low"], row["high"]


def losses(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """L_short and L_long of the targets over tau."""
    over = result.targets.iloc[result.over]
    return over["loss_short_nats"].to_numpy(), over["loss_long_nats"].to_numpy()


def resampled_rows(result: Result, resamples: int) -> Iterator[tuple[list[int], int]]:
    """Of each resample, documents drawn one by one: the rows of `over` of their targets, and how many targets."""
    place_of = {int(index): place for place, index in enumerate(result.over)}
    document = result.targets["text"].to_numpy()
    documents = np.unique(document)
    rng = np.random.default_rng(0)
    for _ in range(resamples):
        drawn = rng.integers(len(documents), size=len(documents))
        targets = [int(i) for place in drawn for i in np.flatnonzero(document == documents[place])]
        yield [place_of[i] for i in targets if i in place_of], len(targets)


def middle(values: Sequence[Any]) -> tuple[float, float]:
    """The bounds of the middle 95 %, each one of the values."""
    ordered = sorted(values)
    tail = 0.025 * (len(ordered) - 1)
    return ordered[math.floor(tail)], ordered[len(ordered) - 1 - math.floor(tail)]


def test_values_equal_sums_over_targets(result):
    short, long = result.targets["loss_short_nats"], result.targets["loss_long_nats"]
    gains = short - long
    over = gains > 1
    shares = numbers.shares(result, resamples=100)
    assert dict(zip(shares["name"], shares["value"], strict=True)) == pytest.approx(
        {
            "loss_short_nats": short.mean(),
            "loss_long_nats": long.mean(),
            "gain_nats": gains.mean(),
            "absolute_gain_nats": gains.abs().mean(),
            "share_over_tau": over.mean(),
            "share_below_minus_tau": (gains < -1).mean(),
            "share_of_gain": gains[over].sum() / gains.sum(),
            "loss_short_over_tau_nats": short[over].mean(),
            "loss_long_over_tau_nats": long[over].mean(),
        }
    )
    recovery, mean_losses = (f(result, resamples=100) for f in (numbers.recovery, numbers.losses))
    for selector in CURVES:
        recovered = {}
        for far_context in ("true", "placebo"):
            losses = result.loss_nats(selector, far_context)
            where = {"selector": selector, "far_context": far_context}
            assert rows_of(mean_losses, **where)["value"].tolist() == pytest.approx(losses.mean(axis=0))
            saved = (short[over].to_numpy()[:, None] - losses).sum(axis=0)
            recovered[far_context] = saved / gains[over].sum()
        recovered["net"] = recovered["true"] - recovered["placebo"].clip(min=0)
        for far_context, values in recovered.items():
            of_context = rows_of(recovery, selector=selector, far_context=far_context)
            assert of_context["k"].tolist() == list(KS) and of_context["value"].tolist() == pytest.approx(
                values
            )
    assert numbers.counts(result) == {
        "targets": 400, "targets_over_tau": over.sum(), "targets_measured": over.sum(), "runs": 1,
        "documents": result.targets["text"].nunique(), "documents_over_tau": result.targets["text"][over].nunique(),
    }  # fmt: skip


def test_intervals_equal_a_bootstrap_of_whole_documents(percentiles, result):
    """Each resample copies the targets of the drawn documents; all is computed from the copies."""
    short, long = losses(result)
    greedy, other = (
        {place: result.loss_nats(name, place)[:, 2] for place in ("true", "placebo")}
        for name in ("greedy", "leave-one-out")
    )
    net, share, mean, difference = [], [], [], []
    for rows, drawn in resampled_rows(result, 200):
        gain = (short - long)[rows].sum()
        net.append((greedy["placebo"] - greedy["true"])[rows].sum() / gain)
        difference.append((other["placebo"] - other["true"])[rows].sum() / gain - net[-1])
        share.append(len(rows) / drawn)
        mean.append(greedy["true"][rows].mean())
    where = {"selector": "greedy", "k": 4}
    for frame_of, expected, keys in (
        (numbers.recovery, net, where | {"far_context": "net"}),
        (numbers.losses, mean, where | {"far_context": "true"}),
        (numbers.shares, share, {"name": "share_over_tau"}),
        (
            numbers.differences,
            difference,
            {"first": "leave-one-out", "second": "greedy", "far_context": "net"},
        ),
    ):
        assert bounds(frame_of(result, resamples=200), **keys) == pytest.approx(middle(expected))


def test_a_negative_placebo_adds_nothing_in_any_resample(percentiles, result):
    """Placebo losses that lie about L_short: recovery minus the positive part, resample by resample."""
    short, long = losses(result)
    harm = np.random.default_rng(5).normal(0, 0.3, len(short))
    harm += 0.01 - harm.mean()
    choices = result.choices.copy()
    rows = (choices["selector"] == "greedy") & (choices["far_context"] == "placebo")
    choices.loc[rows, "loss_nats"] = pd.Series(
        list((short + harm)[:, None].repeat(4, 1)), choices.index[rows]
    )
    recovery = numbers.recovery(replace(result, choices=choices), resamples=200)
    saved = short - result.loss_nats("greedy")[:, 2]
    nets = []
    for drawn, _ in resampled_rows(result, 200):
        gain = (short - long)[drawn].sum()
        nets.append(saved[drawn].sum() / gain - max(0.0, -harm[drawn].sum() / gain))
    true, placebo, net = (
        row_of(recovery, selector="greedy", k=4, far_context=name) for name in ("true", "placebo", "net")
    )
    assert placebo["low"] < placebo["value"] < 0 < placebo["high"]  # so that resamples of both signs are seen
    assert net["value"] == true["value"] and (net["low"], net["high"]) == pytest.approx(middle(nets))
    assert net["low"] <= true["low"] and net["high"] <= true["high"]


def test_best_is_the_lowest_loss_of_each_target(result):
    short, long = losses(result)
    for far_context in ("true", "placebo"):
        lowest = np.min([result.loss_nats(selector, far_context) for selector in CURVES], axis=0)
        recovered = (short[:, None] - lowest).sum(axis=0) / (short - long).sum()
        frame = numbers.recovery(result, resamples=100)
        values = [value(frame, selector="best", far_context=far_context, k=k) for k in KS]
        assert values == pytest.approx(recovered)
    alone = made_result(selectors=("leave-one-out", "random"))
    assert Measured(alone).names == ["leave-one-out", "random"]  # a control is no second search


@pytest.fixture(scope="module")
def of_ways(with_further):
    """Choices kept as text, and as cache with losses 0.5 higher and no further columns; each alone, and both."""
    result = with_further
    cache = result.choices.drop(columns=FURTHER).assign(level="cache", unit="span", sinks=4)
    cache["loss_nats"] = cache["loss_nats"].map(lambda values: values + 0.5)
    both = pd.concat([result.choices, cache], ignore_index=True)
    return {
        "text": result,
        "cache": replace(result, choices=cache),
        "both": replace(result, choices=both),
    }


@pytest.mark.parametrize("name", OF_CHOICES)
def test_every_way_has_the_numbers_that_it_has_alone(of_ways, name):
    text, cache, both = (NUMBERS[name].frame(of_ways[way], resamples=50) for way in ("text", "cache", "both"))
    pd.testing.assert_frame_equal(both, pd.concat([text, cache], ignore_index=True))
    assert set(text["level"]) == {"text"} and set(cache["sinks"]) == {4}


@pytest.mark.parametrize(
    ("tau", "lower"),
    [(1.0, [1, 2, 3, 5]), (0.5, [0.5, 1, 2, 3, 5]), (2.5, [2.5, 3, 5]), (5.0, [5]), (9.0, [9])],
)
def test_bins_follow_tau(tau, lower):
    assert gain_edges(tau) == [*lower, math.inf]


def test_near_copies_are_counted_and_left_out(result):
    assert numbers.near_copies(result).empty  # where nobody looked
    copies = np.random.default_rng(5).random(400) < 0.3
    marked = replace(result, targets=result.targets.assign(near_copy=copies))
    frame = numbers.near_copies(marked, resamples=100)
    assert value(frame, name="share") == pytest.approx(copies.mean())
    assert value(frame, name="share_over_tau") == pytest.approx(copies[result.over].mean())
    short, long = losses(result)
    rest = ~copies[result.over]
    saved = (short - result.loss_nats("greedy")[:, 2])[rest]
    row = row_of(frame, name="recovery", selector="greedy", far_context="true")
    assert row["value"] == pytest.approx(saved.sum() / (short - long)[rest].sum())
    assert row["n_targets"] == rest.sum()


def test_crossfit_chooses_with_one_model_and_sums_losses_of_the_other():
    result = made_result(crossfit=True)
    selecting = result.targets["selecting_gain_nats"].to_numpy()
    over = np.flatnonzero(selecting > 1)
    selecting, gain = selecting[over], result.gain_nats[over]
    assert gain.min() < 0 and set(over) != set(np.flatnonzero(result.gain_nats > 1))
    saved = result.targets["loss_short_nats"].to_numpy()[over] - result.loss_nats("greedy")[:, 2]
    where = {"selector": "greedy", "far_context": "true", "k": 4}
    assert value(numbers.recovery(result), **where) == pytest.approx(saved.sum() / gain.sum())
    inside = (selecting > 2) & (selecting <= 3)
    bins = numbers.gain_bins(result)
    assert value(bins, from_nats=2, **where) == pytest.approx(saved[inside].sum() / gain[inside].sum())
    kept = numbers.persistence(result)
    assert dict(zip(kept["name"], kept["value"], strict=True)) == pytest.approx(
        {
            "selecting_gain_nats": selecting.mean(),
            "gain_nats": gain.mean(),
            "share_still_over_tau": (gain > 1).mean(),
        }
    )
    assert numbers.persistence(made_result()).empty


def test_the_sums_run_over_what_is_measured_and_shares_over_everything(result):
    half = result.targets["target_id"].iloc[result.over[: len(result.over) // 2]]
    choices = result.choices[result.choices["target_id"].isin(half)].reset_index(drop=True)
    unfinished = replace(result, choices=choices)
    size = numbers.counts(unfinished)
    assert (size["targets_over_tau"], size["targets_measured"]) == (len(result.over), len(half))
    frame = numbers.shares(unfinished, resamples=100)
    assert value(frame, name="share_over_tau") == pytest.approx(len(result.over) / 400)
    assert value(frame, name="loss_short_over_tau_nats") == pytest.approx(
        losses(result)[0][: len(half)].mean()
    )
    assert f"unfinished: {len(half)} measured" in findings(unfinished)


def test_groups_and_runs_are_units_where_there_are_any():
    grouped = made_result(groups=7)
    runs = Result.join([made_result(run=number) for number in (1, 2, 3)])
    for result, units in (
        (made_result(), {}),
        (grouped, {"groups": grouped.targets["group"].to_numpy()}),
        (runs, {"runs": np.repeat(np.arange(3), 400)}),
    ):
        bootstrap = ClusterBootstrap(result.targets["text"].to_numpy(), **units)
        short = result.targets["loss_short_nats"].to_numpy()
        expected = bootstrap.ratio_interval(short, np.ones(len(short)))
        found = bounds(numbers.shares(result), name="loss_short_nats")
        assert found == pytest.approx((expected.low, expected.high))
        saved, gain = np.zeros(len(short)), np.zeros(len(short))
        saved[result.over] = short[result.over] - result.loss_nats("greedy")[:, 2]
        gain[result.over] = result.gain_nats[result.over]
        expected = bootstrap.ratio_interval(saved, gain)
        found = bounds(numbers.recovery(result), selector="greedy", k=4, far_context="true")
        assert found == pytest.approx((expected.low, expected.high))
    assert numbers.counts(grouped)["groups_over_tau"] == 7
    assert "by group, then document (only 7 groups: rough)" in findings(grouped)
    assert numbers.counts(runs)["runs"] == 3 and "3 runs together" in findings(runs)


def test_two_runs_have_the_numbers_that_they_have_alone_beside_those_of_both():
    alone = [made_result(run=number) for number in (1, 2)]
    both = Result.join(alone)
    for name in ("shares", "recovery", "kinds", "distances"):
        columns = NUMBERS[name].frame(both)
        for run, column in zip(alone, ("first_run", "second_run"), strict=True):
            frame = NUMBERS[name].frame(run)
            np.testing.assert_allclose(columns[column], frame["value"], rtol=1e-9, atol=1e-12)
            assert column not in frame


def selector_lines(result: Result) -> tuple[list[str], list[list[str]]]:
    """Heading and columns, and the rows of what the findings say of every selector."""
    lines = findings(result).splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("selector"))
    rows = []
    for line in lines[head + 1 :]:
        cells = re.split(r"  +", line)
        if len(cells) == 1:
            break
        rows.append(cells)
    return lines[head - 1 : head + 1], rows


@pytest.mark.parametrize("far_contexts", [("true", "placebo"), ("true",)])
def test_findings_have_a_line_for_every_selector_the_largest_net_recovery_first(
    far_contexts,
):
    result = made_result(far_contexts=far_contexts, selectors=("random", "leave-one-out", "greedy"))
    shown = "net" if "placebo" in far_contexts else "true"
    frame = numbers.recovery(result)
    frame = frame[(frame["far_context"] == shown) & frame["selector"].isin(result.selectors)]
    at_four = frame[frame["k"] == 4].set_index("selector")["value"]
    (title, columns), rows = selector_lines(result)
    assert title == ("net recovery by k [%]" if shown == "net" else "recovery by k [%]")
    assert columns.split() == ["selector", "1", "2", "4", "8"]
    assert [cells[0] for cells in rows] == sorted(at_four.index, key=lambda name: -at_four[name])
    for selector, *cells in rows:
        of_selector = frame.loc[frame["selector"] == selector, ["value", "low", "high"]]
        in_percent = (100 * of_selector).round().astype(int)
        assert cells == [f"{value} [{low}, {high}]" for value, low, high in in_percent.to_numpy()]


def test_findings_have_the_lines_of_one_way_of_keeping_and_name_it():
    result = made_result()
    cache = result.choices.assign(level="cache", unit="word", sinks=4)
    cache["loss_nats"] = cache["loss_nats"].map(lambda losses: losses + 0.5)
    both = replace(result, choices=pd.concat([cache, result.choices], ignore_index=True))
    _, rows_as_text = selector_lines(result)
    heading, rows = selector_lines(both)
    assert heading[0] == "net recovery by k, as text [%]" and rows == rows_as_text
    heading, rows = selector_lines(replace(result, choices=cache))
    assert heading[0] == "net recovery by k, as cache, words, 4 sinks [%]" and rows != rows_as_text


def test_recovery_without_gain_is_refused():
    none_over = made_result(tau_nats=50.0)
    with pytest.raises(UserError, match="none of 400 targets gains more than 50 nats .* lower tau"):
        numbers.recovery(none_over)
    assert value(numbers.shares(none_over), name="share_over_tau") == 0
    assert "none of 400 targets gains more than 50 nats" in findings(none_over)
    losing = made_result(crossfit=True)
    targets = losing.targets.assign(loss_long_nats=losing.targets["loss_short_nats"] + 0.25)
    with pytest.raises(
        UserError, match=f"over tau sum to {-0.25 * len(losing.over):.3g} nats under the eval"
    ):
        numbers.kinds(replace(losing, targets=targets))


def test_the_selector_and_k_that_are_shown():
    assert [choose_k(ks) for ks in ([1, 2, 4, 8], [1, 8], [3, 5], [16])] == [4, 1, 3, 16]
    with pytest.raises(UserError, match="k = 3 was not measured; choose one of 1, 2, 4, 8"):
        numbers.kinds(made_result(), k=3)
    assert default_selector(["random", "leave-one-out", "leave-one-out-kl"]) == "leave-one-out-kl"
    assert default_selector(["random", "greedy", "gradient"]) == "greedy"
    assert default_selector(["random", "nearest"]) == "random"


# --- which dependencies ---


def of_shares(gain: np.ndarray, recovered: dict, selected: dict, **settings: Any) -> Result:
    """A Result by hand: targets with these gains, N 8 and M 2, so that 6 far tokens are 3 to 8 back.

    ``recovered``: what share of its gain each target over 1 nat recovers at k = 1 and 3, by selector and far context;
    ``selected``: its tokens, by far context.
    """
    target_id = np.arange(len(gain))
    targets = pd.DataFrame({"target_id": target_id, "position": target_id + 10, "token": 0, "kind": "name"})
    targets = targets.assign(loss_long_nats=1.0, loss_short_nats=1 + gain, over_tau=gain > 1)
    rows = [
        (target, selector, far_context, tokens, 1 + gain[target] * (1 - np.array(share)))
        for (selector, far_context), shares in recovered.items()
        for target, tokens, share in zip(target_id[gain > 1], selected[far_context], shares, strict=False)
    ]
    choices = pd.DataFrame(rows, columns=["target_id", "selector", "far_context", "selected", "loss_nats"])
    selectors, far_contexts = (list(dict.fromkeys(names)) for names in zip(*recovered, strict=True))
    settings |= {
        "n_long": 8,
        "n_short": 2,
        "ks": [1, 3],
        "selectors": selectors,
        "far_contexts": far_contexts,
    }
    made = made_result().settings.but(**settings)
    return Result(made, targets, choices.assign(level="text", unit="token", sinks=0))


def by_hand() -> Result:
    """Eight targets of four documents, five of them over tau."""
    gain = np.array([2.0, 4.0, 0.5, 2.0, 0.0, 1.5, 1.0, 4.0])
    recovered = {
        ("leave-one-out", "true"): [[0.5, 0.95], [0.9, 0.2], [0.0, 0.5], [1.2, 1.2], [0.89, 0.9]],
        ("leave-one-out", "placebo"): [[0.1, 0.2], [0.0, 0.0], [0.0, 0.0], [0.95, 0.1], [0.0, 0.89]],
    }
    selected = {"true": [[0, 1, 2], [5, 4, 3], [0, 5, 1], [2, 3, 4], [5, 0, 1]], "placebo": [[1, 0, 2]] * 5}
    result = of_shares(gain, recovered, selected, targets_per_block=1)
    kinds = ["name", "repeat", "name", "name", "number", "repeat", "punctuation", "repeat"]
    return replace(result, targets=result.targets.assign(text=[0, 0, 0, 1, 1, 2, 2, 3], kind=kinds))


def test_kinds_by_hand():
    frame = numbers.kinds(by_hand(), k=3)
    assert [*frame["kind"].unique()] == ["repeat", "name", "number", "punctuation"]  # in the order of KINDS
    of_kinds = frame[frame["name"] == "share"].set_index("kind")
    sizes = of_kinds[["n_targets", "n_targets_over_tau", "n_documents_over_tau"]]
    assert sizes.to_numpy().tolist() == [[3, 3, 3], [3, 2, 2], [1, 0, 0], [1, 0, 0]]
    assert of_kinds["value"].tolist() == [3 / 8, 3 / 8, 1 / 8, 1 / 8]
    assert frame["value"][frame["name"] == "share_over_tau"].tolist() == [3 / 5, 2 / 5, 0, 0]
    gains = frame["value"][frame["name"] == "gain_nats"].tolist()
    assert gains == pytest.approx([9.5 / 3, 4.5 / 3, 0, 1])
    for kind, true, placebo in (
        ("repeat", (4 * 0.2 + 1.5 * 1.2 + 4 * 0.9) / 9.5, (1.5 * 0.1 + 4 * 0.89) / 9.5),
        ("name", (2 * 0.95 + 2 * 0.5) / 4, 2 * 0.2 / 4),
        ("number", math.nan, math.nan),
    ):
        rows = frame[(frame["kind"] == kind) & (frame["name"] == "recovery")].set_index("far_context")[
            "value"
        ]
        expected = {"true": true, "placebo": placebo, "net": true - placebo}
        assert rows.to_dict() == pytest.approx(expected, nan_ok=True)


def test_distances_by_hand():
    """Position ids 0 … 5 are 8 … 3 tokens back."""
    frame = numbers.distances(by_hand(), k=1)
    true = frame[frame["far_context"] == "true"]
    assert true["from_tokens"].tolist() == [3, 4, 5, 6, 7, 8] and true["to_tokens"].tolist()[-1] == 9
    assert true["value"].tolist() == [2 / 5, 0, 0, 1 / 5, 0, 2 / 5]  # ids 0, 5, 0, 2, 5
    assert true["uniform"].tolist() == pytest.approx([1 / 6] * 6)
    assert frame["value"][frame["far_context"] == "placebo"].tolist() == [0, 0, 0, 0, 1, 0]
    third = numbers.distances(by_hand(), k=3).groupby("far_context")["value"].apply(list)
    assert third["true"] == pytest.approx([x / 15 for x in (3, 2, 2, 2, 3, 3)])
    assert third["placebo"] == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("n_long", "n_short"), [(128, 16), (256, 32), (512, 64), (20, 16), (2, 1), (3000, 7)]
)
def test_bins_hold_every_far_token_once(n_long, n_short):
    edges = distance_edges(n_long, n_short)
    assert edges[0] == n_short + 1 and edges[-1] == n_long + 1 and len(edges) <= 9
    inside = [sum(low <= n_long - c < high for low, high in pairwise(edges)) for c in range(n_long - n_short)]
    assert set(inside) == {1}
    if n_long - n_short > 100:
        ratios = np.divide(edges[1:], edges[:-1])
        assert ratios.max() / ratios.min() < 1.2  # equally wide on a logarithmic scale


def test_tokens_needed_by_hand():
    """0.9 of the gain is enough, 0.89 is not; who has it at k = 1 keeps it, though k = 3 recovers less."""
    frame = numbers.tokens_needed(by_hand())
    assert set(frame["n_targets"]) == {5}
    reached = frame[frame["name"] == "reached"].groupby("far_context")["value"].apply(list)
    assert reached["true"] == [2 / 5, 4 / 5] and reached["placebo"] == [1 / 5, 1 / 5]
    assert value(frame, name="never") == pytest.approx(1 / 5)


def test_targets_that_the_evaluating_model_loses_on_need_nothing():
    """Two of the five lose by the long context: neither counts as reached, nor as censored."""
    result = by_hand()
    losing = result.targets.assign(loss_long_nats=[1, 5.1, 1, 3.1, 1, 1, 1, 1])
    frame = numbers.tokens_needed(replace(result, targets=losing))
    assert set(frame["n_targets"]) == {3}
    assert [value(frame, name="reached", far_context="true", k=k) for k in (1, 3)] == pytest.approx(
        [1 / 3, 1]
    )
    assert value(frame, name="never") == 0


def test_intervals_of_dependencies_equal_a_bootstrap_of_whole_documents(percentiles, result):
    """One number of each frame, computed from copies of the targets of the drawn documents."""
    short, long = losses(result)
    kind = result.targets["kind"].to_numpy()[result.over]
    saved = short[:, None] - result.loss_nats("leave-one-out")
    back = 128 - result.selected("random", "placebo")[:, :4]
    low, high = distance_edges(128, 16)[2:4]
    recovered, share, distance, reached = [], [], [], []
    for rows, _ in resampled_rows(result, 200):
        names = [row for row in rows if kind[row] == "name"]
        recovered.append(saved[names, 2].sum() / (short - long)[names].sum())
        share.append(len(names) / len(rows))
        distance.append(np.mean((back[rows] >= low) & (back[rows] < high)))
        reached.append(np.mean((saved[rows, :3] >= 0.9 * (short - long)[rows, None]).any(axis=1)))
    kinds = numbers.kinds(result, resamples=200)
    where = {"selector": "leave-one-out", "far_context": "true", "k": 4}
    for interval, values in (
        (bounds(kinds, kind="name", name="recovery", **where), recovered),
        (bounds(kinds, kind="name", name="share_over_tau"), share),
        (bounds(numbers.tokens_needed(result, resamples=200), name="reached", **where), reached),
        (
            bounds(numbers.distances(result, resamples=200), selector="random", far_context="placebo", from_tokens=low),
            distance,
        ),
    ):  # fmt: skip
        assert interval == pytest.approx(middle(values)) and interval[0] < interval[1]


# --- the parts of a recovery ---


@pytest.fixture(scope="module")
def with_placebos():
    """Every seventh text has nothing else in its group."""
    selectors = ("leave-one-out", "leave-one-out-kl", "leave-one-out-tv", "random")
    result = made_result(selectors=selectors, far_contexts=("true", *PLACEBOS))
    alone = result.targets["target_id"][result.targets["text"] % 7 == 0]
    none = result.choices["target_id"].isin(alone) & (result.choices["far_context"] == "same-group")
    choices = result.choices[~none].reset_index(drop=True)
    # the same curve for every selector and placebo would make all parts 0
    shift = choices["far_context"].map({"shuffled": 0.2, "same-group": 0.1}).fillna(0.0)
    shift += choices["selector"].map({"leave-one-out": 0.1, "leave-one-out-tv": 0.05}).fillna(0.0)
    losses = [values - move for values, move in zip(choices["loss_nats"], shift, strict=True)]
    return replace(result, choices=choices.assign(loss_nats=losses))


def plain_parts(result: Result, rows: Sequence[int], blind: str, column: int) -> dict[tuple[str, str], float]:
    """By sums over the targets over tau that have every far context."""
    has = np.isfinite(result.loss_nats("random", "same-group")).all(axis=1)
    rows = [row for row in rows if has[row]]
    short, long = losses(result)

    def recovery(selector: str, far_context: str) -> float:
        of_rows = result.loss_nats(selector, far_context)[rows, column]
        return (short[rows] - of_rows).sum() / (short - long)[rows].sum()

    common = {name: recovery(blind, name) for name in PLACEBOS}
    largest = max(0.0, *common.values())
    return {
        ("selection_bias", "placebo"): recovery("leave-one-out", "placebo") - common["placebo"],
        **{("common_context", name): part for name, part in common.items()},
        ("common_context", LARGEST): largest,
        ("specific", "true"): recovery(blind, "true") - largest,
    }


def test_parts_equal_plain_sums_and_intervals_a_bootstrap_of_documents(percentiles, with_placebos):
    result, every = with_placebos, range(len(with_placebos.over))
    frame = numbers.placebos(result, resamples=200)
    assert set(frame["blind"].dropna()) == {"leave-one-out-kl", "leave-one-out-tv"}
    for blind in ("leave-one-out-kl", "leave-one-out-tv"):
        for column, k in enumerate(KS):
            of_k = frame[(frame["blind"] == blind) & (frame["k"] == k)]
            values = of_k.set_index(["name", "far_context"])["value"].to_dict()
            assert values == pytest.approx(plain_parts(result, every, blind, column))
    drawn = [plain_parts(result, rows, "leave-one-out-kl", 2) for rows, _ in resampled_rows(result, 200)]
    for name, far_context in drawn[0]:
        interval = bounds(frame, name=name, blind="leave-one-out-kl", far_context=far_context, k=4)
        assert interval == pytest.approx(middle([parts[name, far_context] for parts in drawn])), name
    has = np.isfinite(result.loss_nats("random", "same-group")).all(axis=1)
    assert set(frame["n_targets"]) == {has.sum()} and not has.all()
    short, long = losses(result)
    for far_context in ("true", *PLACEBOS):
        saved = (short - result.loss_nats("random", far_context)[:, 1])[has]
        expected = saved.sum() / (short - long)[has].sum()
        where = {"name": "recovery", "selector": "random", "far_context": far_context, "k": 2}
        assert value(frame, **where) == pytest.approx(expected)


def test_further_placebos_change_no_other_number(with_placebos):
    choices = with_placebos.choices[with_placebos.choices["far_context"].isin(("true", "placebo"))]
    settings = with_placebos.settings.but(far_contexts=["true", "placebo"])
    bare = replace(with_placebos, settings=settings, choices=choices.reset_index(drop=True))
    assert numbers.placebos(bare).empty
    for frame_of in (numbers.recovery, numbers.kinds, numbers.distances, attribution.faithfulness):
        pd.testing.assert_frame_equal(frame_of(bare, resamples=50), frame_of(with_placebos, resamples=50))


def test_parts_need_no_placebo_of_another_text(with_placebos):
    """The winner's curse is what the placebo shows; the other parts are those of the placebos that there are."""
    settings = with_placebos.settings.but(far_contexts=["true", "same-group"])
    choices = with_placebos.choices[with_placebos.choices["far_context"].isin(("true", "same-group"))]
    frame = numbers.placebos(replace(with_placebos, settings=settings, choices=choices), resamples=50)
    assert set(frame["name"]) == {"recovery", "common_context", "specific"}
    both = numbers.placebos(with_placebos, resamples=50)
    where = {"name": "common_context", "blind": "leave-one-out-kl", "far_context": "same-group", "k": 4}
    assert value(frame, **where) == value(both, **where)


def test_forms_that_rank_in_the_cache_are_parted_as_those_of_text_are(with_placebos):
    in_cache = {name: f"{name}/cache:4" for name in with_placebos.selectors if name.startswith("leave")}
    settings = with_placebos.settings.but(
        selectors=[in_cache.get(name, name) for name in with_placebos.selectors]
    )
    choices = with_placebos.choices.assign(selector=with_placebos.choices["selector"].replace(in_cache))
    renamed = numbers.placebos(replace(with_placebos, settings=settings, choices=choices), resamples=50)
    back = {new: old for old, new in in_cache.items()}
    expected = numbers.placebos(with_placebos, resamples=50)
    pd.testing.assert_frame_equal(renamed.replace({"selector": back, "blind": back}), expected)


# --- the ladder of specificity ---


def ladder(other_target: bool = True, sinks: int = 4) -> Result:
    """Five targets over tau in two documents, by hand; the last has no other target in its block."""
    gain = np.array([2.0, 4.0, 2.0, 1.5, 4.0])
    recovered = {
        ("leave-one-out", "true"): [[0.5, 0.9], [0.6, 0.8], [0.2, 0.4], [1.0, 1.0], [0.3, 0.7]],
        ("leave-one-out", "placebo"): [[0.1, 0.2], [0.0, 0.1], [-0.1, 0.0], [0.2, 0.1], [0.9, 0.9]],
        ("random", "true"): [[0.0, 0.1], [0.1, 0.1], [0.0, 0.2], [0.1, 0.3], [0.5, 0.5]],
        ("random", "placebo"): [[0.0, 0.0]] * 5,
    }
    if other_target:
        recovered["leave-one-out", "other-target"] = [[0.3, 0.4], [0.1, 0.5], [0.0, 0.2], [0.2, 0.6]]
        recovered["random", "other-target"] = [[0.0, 0.1]] * 4
    selected = dict.fromkeys(("true", "placebo", "other-target"), [[0, 1, 2]] * 5)
    result = of_shares(gain, recovered, selected, keep_as=[f"cache:{sinks}"])
    base = 1 + gain * (1 - np.array([0.05, 0.1, -0.1, 0.0, 0.9]))
    of_choices = base[result.choices["target_id"]]
    choices = result.choices.assign(level="cache", sinks=sinks, loss_base_nats=of_choices)
    return replace(result, targets=result.targets.assign(text=[0, 0, 1, 1, 1]), choices=choices)


def test_the_ladder_of_specificity_by_hand():
    """Over the four targets that have every rung; gains 2, 4, 2 and 1.5."""
    frame = numbers.specificity(ladder())
    own = frame[frame["selector"] == "leave-one-out"]
    expected = {
        "own": [(1 + 2.4 + 0.4 + 1.5) / 9.5, (1.8 + 3.2 + 0.8 + 1.5) / 9.5],
        "other-target": [(0.6 + 0.4 + 0.0 + 0.3) / 9.5, (0.8 + 2.0 + 0.4 + 0.9) / 9.5],
        "placebo": [(0.2 + 0.0 - 0.2 + 0.3) / 9.5, (0.4 + 0.4 + 0.0 + 0.15) / 9.5],
        "random": [(0.0 + 0.4 + 0.0 + 0.15) / 9.5, (0.2 + 0.4 + 0.4 + 0.45) / 9.5],
        "sinks": [(0.1 + 0.4 - 0.2 + 0.0) / 9.5] * 2,
    }
    assert list(own["name"].unique()) == list(expected)
    assert set(own["n_targets"]) == {4}
    for name, values in expected.items():
        assert [value(own, name=name, k=k) for k in (1, 3)] == pytest.approx(values)
    of_random = frame[frame["selector"] == "random"]
    assert list(of_random["name"].unique()) == ["own", "other-target", "placebo", "sinks"]
    assert value(of_random, name="own", k=1) == pytest.approx(value(own, name="random", k=1))
    less = comparisons.specificity_differences(ladder())
    less = less[less["selector"] == "leave-one-out"]
    assert list(less["less"].unique()) == list(expected)[1:] and set(less["n_targets"]) == {4}
    for name, values in list(expected.items())[1:]:
        differences = np.subtract(expected["own"], values)
        assert [value(less, less=name, k=k) for k in (1, 3)] == pytest.approx(list(differences))


def test_without_a_rung_the_others_are_of_all_targets_that_have_them():
    """A far context that was to be measured but that no target has is none, nor sinks where there are none."""
    result = ladder(other_target=False)
    there = result.settings.but(far_contexts=["true", "placebo", "other-target"], keep_as=["cache"])
    none_has_it = replace(ladder(other_target=False, sinks=0), settings=there)
    older = replace(result, choices=result.choices.drop(columns="loss_base_nats"))
    for one, names in (
        (result, ["own", "placebo", "random", "sinks"]),
        (none_has_it, ["own", "placebo", "random"]),
        (older, ["own", "placebo", "random"]),
    ):
        own = numbers.specificity(one, selector="leave-one-out")
        assert list(own["name"].unique()) == names and set(own["n_targets"]) == {5}
        expected = (1 + 2.4 + 0.4 + 1.5 + 1.2) / 13.5
        assert value(own, name="own", k=1) == pytest.approx(expected)
        true = row_of(numbers.recovery(one), selector="leave-one-out", far_context="true", k=1)
        assert value(own, name="own", k=1) == pytest.approx(true["value"])


def test_intervals_of_the_ladder_equal_a_bootstrap_of_whole_documents(percentiles, with_placebos):
    has = np.isfinite(with_placebos.loss_nats("random", "same-group")).all(axis=1)
    short, long = losses(with_placebos)
    saved = short - with_placebos.loss_nats("leave-one-out", "shuffled")[:, 2]
    saved_by_own = short - with_placebos.loss_nats("leave-one-out", "true")[:, 2]
    drawn = []
    differences = []
    for rows, _ in resampled_rows(with_placebos, 200):
        rows = [row for row in rows if has[row]]
        gain = (short - long)[rows].sum()
        drawn.append(saved[rows].sum() / gain)
        differences.append((saved_by_own - saved)[rows].sum() / gain)
    frame = numbers.specificity(with_placebos, resamples=200)
    found = bounds(frame, name="shuffled", selector="leave-one-out", k=4)
    assert found == pytest.approx(middle(drawn)) and found[0] < found[1]
    less = comparisons.specificity_differences(with_placebos, resamples=200)
    found = bounds(less, less="shuffled", selector="leave-one-out", k=4)
    assert found == pytest.approx(middle(differences)) and found[0] < found[1]


def test_placebos_that_recover_nothing_take_nothing_away(with_placebos):
    moved = with_placebos.choices["selector"].eq("leave-one-out-kl") & with_placebos.choices[
        "far_context"
    ].ne("true")
    losses = [loss + 3.0 * move for loss, move in zip(with_placebos.choices["loss_nats"], moved, strict=True)]
    choices = with_placebos.choices.assign(loss_nats=losses)
    frame = numbers.placebos(replace(with_placebos, choices=choices), resamples=100)
    where = {"blind": "leave-one-out-kl", "k": 4}
    largest = row_of(frame, name="common_context", far_context=LARGEST, **where)
    assert largest["value"] == 0 and np.isnan([largest["low"], largest["high"]]).all()
    recovery = row_of(frame, name="recovery", selector="leave-one-out-kl", far_context="true", k=4)
    specific = row_of(frame, name="specific", **where)
    assert specific[["value", "low", "high"]].tolist() == recovery[["value", "low", "high"]].tolist()


# --- faithfulness ---


@pytest.fixture(scope="module")
def with_further(result):
    """Made-up further columns; of greedy no summed influence, of one target a constant one."""
    rng = np.random.default_rng(1)
    choices, targets = result.choices.copy(), result.targets.copy()
    losses = {key: rng.gamma(2, 1, 16) for key in choices.groupby(["target_id", "far_context"]).groups}
    rows = choices[["target_id", "selector", "far_context"]].itertuples(index=False)
    choices["subset_loss_nats"] = [losses[target, far_context] for target, _, far_context in rows]
    choices["subset_influence"] = [rng.normal(size=16) - losses for losses in choices["subset_loss_nats"]]
    choices["comprehensiveness_nats"] = [rng.gamma(1, 1, 4) for _ in range(len(choices))]
    choices["leave_one_out_spearman"] = rng.uniform(-1, 1, len(choices))
    for row in choices.index[choices["selector"] == "greedy"]:
        choices.at[row, "subset_influence"] = np.full(16, np.nan)
    constant = (choices["target_id"] == result.over[3]) & (choices["far_context"] == "true")
    for row in choices.index[constant & (choices["selector"] != "greedy")]:
        choices.at[row, "subset_influence"] = np.ones(16)
    unranked = choices["selector"].isin(("greedy", "leave-one-out"))
    choices.loc[unranked, "leave_one_out_spearman"] = np.nan
    targets["loss_short_from_0_nats"] = targets["loss_short_nats"] + rng.normal(0.1, 0.2, len(targets))
    targets["loss_of_32_nats"] = targets["loss_long_nats"] + rng.normal(0.1, 0.3, len(targets))
    targets["loss_of_96_nats"] = targets["loss_long_nats"] + rng.normal(0.0, 0.1, len(targets))
    return replace(result, targets=targets, choices=choices)


@pytest.mark.parametrize("selector", CURVES)
@pytest.mark.parametrize("far_context", ["true", "placebo"])
def test_faithfulness_equals_a_plain_loop(with_further, selector, far_context):
    """Of greedy there is no summed influence, and of the exact selector nothing to compare with itself."""
    result, frame = with_further, attribution.faithfulness(with_further, resamples=50)

    def measured(column: str) -> np.ndarray:
        return result.of_choices(column, selector, far_context)

    _, long = losses(result)
    means = {
        "sufficiency": (result.loss_nats(selector, far_context) - long[:, None]).mean(axis=0),
        "comprehensiveness": measured("comprehensiveness_nats").mean(axis=0),
    }
    expected = {(f"{name}_aopc_nats", None): values.mean() for name, values in means.items()}
    for name, values in means.items():
        expected |= {(f"{name}_nats", k): value for k, value in zip(KS, values, strict=True)}
    if selector != "greedy":
        pairs = list(zip(measured("subset_influence"), measured("subset_loss_nats"), strict=True))
        if far_context == "true":
            del pairs[3]  # whose influence is constant
        expected["lds", None] = np.mean([spearmanr(x, -y).statistic for x, y in pairs])
        expected["r2", None] = np.mean([pearsonr(x, y).statistic ** 2 for x, y in pairs])
    if selector == "random":
        expected["spearman", None] = measured("leave_one_out_spearman").mean()
    if selector != "leave-one-out":
        both = [result.selected(name, far_context).tolist() for name in (selector, "leave-one-out")]
        for k in KS:
            shares = [len({*a[:k]} & {*b[:k]}) / k for a, b in zip(*both, strict=True)]
            expected["overlap", k] = np.mean(shares)
    rows = rows_of(frame, selector=selector, far_context=far_context).replace({"k": {np.nan: None}})
    values = {(row.name, row.k): row.value for row in rows.itertuples(index=False, name="Row")}
    assert values == pytest.approx(expected)


def test_lds_and_r2_of_each_choice_stand_for_its_subsets(with_further):
    """Those of `results/` were made so: the lists of all subsets are half of a file."""
    subsets = ["subset_influence", "subset_loss_nats"]
    pairs = with_further.choices[subsets].itertuples(index=False)
    ranked = [(np.ptp(influence) > 0, influence, -losses) for influence, losses in pairs]
    nan = float("nan")
    smaller = with_further.choices.drop(columns=[*subsets, "influence"]).assign(
        lds=[spearmanr(x, y).statistic if varies else nan for varies, x, y in ranked],
        r2=[pearsonr(x, y).statistic ** 2 if varies else nan for varies, x, y in ranked],
    )
    result = replace(with_further, choices=smaller)
    pd.testing.assert_frame_equal(
        attribution.faithfulness(result, resamples=50), attribution.faithfulness(with_further, resamples=50)
    )


def test_without_further_columns_there_is_what_losses_and_choices_say(result, with_further):
    bare, full = (
        attribution.faithfulness(measurement, resamples=50) for measurement in (result, with_further)
    )
    assert set(bare["name"]) == {"sufficiency_nats", "sufficiency_aopc_nats", "overlap"}
    kept = full[full["name"].isin(set(bare["name"]))].reset_index(drop=True)
    pd.testing.assert_frame_equal(bare, kept)
    assert value(bare, selector="chance", k=4) == pytest.approx(4 / 112)
    assert context_worth.contexts(result).empty


def test_contexts_equal_a_plain_loop(with_further):
    targets, frame = with_further.targets, context_worth.contexts(with_further, resamples=50)
    short = targets["loss_short_nats"]
    cost = short - targets["loss_short_from_0_nats"]
    assert value(frame, name="gap_cost_nats") == pytest.approx(cost.mean())
    assert value(frame, name="gap_cost_over_tau_nats") == pytest.approx(cost[with_further.over].mean())
    assert frame["length"].dropna().unique().tolist() == [16, 32, 96, 128]
    assert set(frame[frame["length"] == 128]["name"]) == {"loss_nats", "gain_nats"}
    losses = {length: targets[f"loss_of_{length}_nats"] for length in (32, 96)}
    losses |= {16: short, 128: targets["loss_long_nats"]}
    for length, reference, tau in ((16, 128, 1.0), (32, 128, 1.0), (96, 128, 0.05), (32, 96, 0.2)):
        loss, other = losses[length], losses[reference]
        rise = loss - other
        expected = {
            "loss_nats": loss.mean(),
            "rise_nats": rise.mean(),
            "share_enough": (loss <= other + 0.1).mean(),
            "share_within_tau": (rise.abs() <= tau).mean(),
            "share_over_tau": (rise > tau).mean(),
            "share_below_minus_tau": (rise < -tau).mean(),
        }
        if length != 16:  # M, which gains nothing over L_short
            expected["gain_nats"] = (short - loss).mean()
            expected["share_of_gain"] = (short - loss).sum() / (short - other).sum()
        shown = context_worth.contexts(with_further, reference=reference, tau_nats=tau, resamples=50)
        of_length = shown[shown["length"] == length].set_index("name")["value"]
        assert of_length.to_dict() == pytest.approx(expected)
    with refused("length 64 was not measured; choose from 16, 32, 96, 128"):
        context_worth.contexts(with_further, reference=64)
    for tau in ("1", np.nan):
        with refused(f"tau_nats takes a finite number, not {tau!r}"):
            context_worth.contexts(with_further, tau_nats=tau)


def test_a_control_stands_beside_its_result(with_further):
    targets = with_further.targets
    flat = targets.assign(loss_of_32_nats=targets["loss_long_nats"])
    control = replace(with_further, targets=flat, settings=with_further.settings.but(model_sha256="f" * 64))
    frame = context_worth.contexts(with_further, control=control, resamples=50)
    for name, one in (("model", with_further), ("control", control)):
        alone = frame[frame["of"] == name].drop(columns="of").reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, context_worth.contexts(one, resamples=50))
    others = [replace(control, targets=flat.assign(position=flat["position"] + 1))]
    # texts of the same lengths, and another prefix
    for changes in ({"n_short": 15}, {"texts_sha256": "e" * 64}, {"prefix": [1]}):
        others.append(replace(control, settings=control.settings.but(**changes)))
    for other in others:
        with refused("the control was measured on other targets or in other contexts"):
            context_worth.contexts(with_further, control=other)
    joined = Result.join([with_further, made_run(with_further)])
    assert set(context_worth.contexts(joined, control=control, resamples=50)["of"]) == {"model", "control"}


def made_run(result: Result) -> Result:
    """Another run of the same targets."""
    targets = result.targets.assign(loss_long_nats=result.targets["loss_long_nats"] + 0.1)
    return replace(result, targets=targets, settings=result.settings.but(model_sha256="d" * 64))


@pytest.mark.parametrize("groups", [None, 7])
def test_documents_equal_a_plain_loop(groups):
    result = made_result(900, groups=groups)
    rng = np.random.default_rng(3)
    targets = result.targets.drop_duplicates(["text", "position"], ignore_index=True)
    targets.loc[0, "text"] = 60  # which has no other target
    targets["text_tokens"] = 500 + targets["text"]
    targets["loss_placebo_nats"] = targets["loss_long_nats"] + rng.normal(0.3, 1.0, len(targets))
    frame = replace(result, targets=targets).documents()
    assert frame["net_gain_nats"].is_monotonic_decreasing
    assert sorted(frame["text"]) == sorted(set(targets["text"]))
    for row in frame.itertuples():
        of_text = targets[targets["text"] == row.text]
        gains = of_text["loss_short_nats"] - of_text["loss_long_nats"]
        net = of_text["loss_placebo_nats"] - of_text["loss_long_nats"]
        assert (row.tokens, row.n_targets) == (500 + row.text, len(of_text))
        if groups is not None:
            assert row.group == of_text["group"].iloc[0]
        positive = gains.clip(lower=0).sort_values(ascending=False)
        largest = positive[: max(1, round(len(gains) / 10))]
        held = largest.sum() / positive.sum() if positive.any() else np.nan
        shown = [row.gain_nats, row.gain_error_nats, row.net_gain_nats, row.net_gain_error_nats]
        shown += [row.share_over_tau, row.share_below_minus_tau, row.share_of_largest]
        expected = [
            gains.mean(),
            gains.sem(),
            net.mean(),
            net.sem(),
            (gains > 1).mean(),
            (gains < -1).mean(),
            held,
        ]
        assert shown == pytest.approx(expected, nan_ok=True)
    bare = replace(result, targets=targets.drop(columns=["loss_placebo_nats", "text_tokens"])).documents()
    assert bare["gain_nats"].is_monotonic_decreasing and bare["net_gain_nats"].isna().all()
    assert bare["tokens"].isna().all() and list(bare) == list(frame)


def test_of_mean_losses_there_are_no_shares_by_tau_and_no_documents(with_further):
    """Such a result was made smaller: means of its losses are right, and of its shares those within 0.1 nats."""
    whole = context_worth.contexts(with_further, resamples=50)
    smaller = replace(with_further, settings=with_further.settings.but(losses_not_over_tau="sums by text"))
    for result in (smaller, Result.join([smaller, made_run(smaller)])):
        frame = context_worth.contexts(result, resamples=50)
        by_tau = {"share_within_tau", "share_over_tau", "share_below_minus_tau"}
        assert set(whole["name"]) - set(frame["name"]) == by_tau
        assert "share_enough" not in set(context_worth.contexts(result, reference=96, resamples=50)["name"])
        with refused("the result keeps mean losses of targets not over tau"):
            context_worth.documents(result)
    kept = whole[~whole["name"].isin(by_tau)].reset_index(drop=True)
    pd.testing.assert_frame_equal(context_worth.contexts(smaller, resamples=50), kept)


def test_documents_of_joined_runs_are_of_the_mean_gain_of_a_target():
    """Here the gains of the runs differ by a constant, and so their errors do not."""
    runs = [made_result(), made_run(made_result())]
    joined, first, second = (
        one.documents().set_index("text").sort_index() for one in (Result.join(runs), *runs)
    )
    assert joined["n_targets"].tolist() == first["n_targets"].tolist()
    np.testing.assert_allclose(joined["gain_nats"], (first["gain_nats"] + second["gain_nats"]) / 2)
    np.testing.assert_allclose(joined["gain_error_nats"], first["gain_error_nats"])


# --- bins of the targets ---

P_LONG = (0.9, 0.1, 0.6, 0.15, 0.3)


def with_p_long(result: Result, p_long: Sequence[float] = P_LONG) -> Result:
    """A result of `ladder` whose targets have these probabilities given the long context, and the same gains."""
    more_nats = -np.log(p_long) - 1.0
    targets = result.targets.copy()
    for name in ("loss_long_nats", "loss_short_nats"):
        targets[name] += more_nats
    of_choice = more_nats[result.choices["target_id"]]
    choices = result.choices.copy()
    for name in ("loss_nats", "loss_base_nats"):
        choices[name] = [losses + more for losses, more in zip(choices[name], of_choice, strict=True)]
    return replace(result, targets=targets, choices=choices)


def test_bins_of_targets_by_hand():
    """Gains 2, 4, 2, 1.5 and 4; a gain of 2 is in the bin up to 2."""
    result = with_p_long(ladder())
    frame = result.target_bins(selector="leave-one-out")
    expected = {
        ("gain_nats", 1.0, 2.0): (3, 2, (1.0 + 0.4 + 1.5) / 5.5, (0.2 - 0.2 + 0.3) / 5.5),
        ("gain_nats", 2.0, 3.0): (0, 0, math.nan, math.nan),
        ("gain_nats", 3.0, 5.0): (2, 2, (2.4 + 1.2) / 8, (0.0 + 3.6) / 8),
        ("gain_nats", 5.0, math.inf): (0, 0, math.nan, math.nan),
        ("p_long", 0.0, 0.2): (2, 2, (2.4 + 1.5) / 5.5, (0.0 + 0.3) / 5.5),
        ("p_long", 0.2, 0.5): (1, 1, 1.2 / 4, 3.6 / 4),
        ("p_long", 0.5, 1.0): (2, 2, (1.0 + 0.4) / 4, (0.2 - 0.2) / 4),
    }
    assert list(frame[["by", "above", "up_to"]].drop_duplicates().itertuples(index=False)) == list(expected)
    for (by, above, up_to), (n_targets, n_documents, true, placebo) in expected.items():
        where = {"by": by, "above": above, "up_to": up_to, "k": 1}
        values = {"true": true, "placebo": placebo, "net": true - max(0.0, placebo)}
        for far_context, recovered in values.items():
            row = row_of(frame, far_context=far_context, **where)
            assert (row["n_targets"], row["n_documents"]) == (n_targets, n_documents)
            assert row["value"] == pytest.approx(recovered, nan_ok=True)
    of_p_long = result.target_bins(by="p_long")
    pd.testing.assert_frame_equal(
        of_p_long, result.target_bins().query("by == 'p_long'").reset_index(drop=True)
    )
    with pytest.raises(UserError, match="by = 'p' was not measured; choose from gain_nats, p_long"):
        result.target_bins(by="p")


def test_every_target_is_in_one_bin_whatever_its_loss_is_rounded_to():
    result = with_p_long(ladder())
    for loss in (0.0, -1e-7, 1e4):
        targets = result.targets.assign(loss_long_nats=loss, loss_short_nats=loss + 3.0)
        frame = numbers.target_bins(
            replace(result, targets=targets), selector="random", far_context="true", k=1
        )
        assert frame.groupby("by")["n_targets"].sum().to_dict() == {"gain_nats": 5, "p_long": 5}


def test_bins_of_the_gain_are_those_that_figure_2_draws():
    for result in (
        made_result(),
        made_result(crossfit=True),
        Result.join([made_result(run=1), made_result(run=2)]),
    ):
        bins = numbers.target_bins(result, k=4, resamples=50).query("by == 'gain_nats'").drop(columns="by")
        bins = bins.rename(columns={"above": "from_nats", "up_to": "to_nats"}).reset_index(drop=True)
        pd.testing.assert_frame_equal(bins, numbers.gain_bins(result, k=4, resamples=50))


@pytest.mark.parametrize("by", ["gain_nats", "p_long"])
def test_any_frame_in_bins_has_the_targets_of_each_and_the_same_resamples(by):
    runs = Result.join([made_result(run=1, groups=7), made_result(run=2, groups=7)])
    for result in (made_result(), made_result(crossfit=True), made_result(groups=7), runs):
        bins = numbers.target_bins(result, resamples=50).drop(columns=["n_targets", "n_documents"])
        of_frame = comparisons.by_bins(numbers.recovery, result, by, resamples=50)
        columns = [*bins.columns]
        expected = bins[(bins["by"] == by) & bins["value"].notna()].reset_index(drop=True)
        pd.testing.assert_frame_equal(of_frame[columns], expected)
    with pytest.raises(UserError, match="has bins of targets already"):
        comparisons.by_bins(numbers.target_bins, runs, by)


def test_the_ladder_of_specificity_in_bins_by_hand():
    """The last target, p_long 0.3 and gain 4, has no other target in its block."""
    frame = with_p_long(ladder()).specificity(by="p_long", selector="leave-one-out")
    expected = {
        0.0: {"own": (2.4 + 1.5) / 5.5, "other-target": (0.4 + 0.3) / 5.5, "sinks": (0.4 + 0.0) / 5.5},
        0.2: {"own": 1.2 / 4, "placebo": 3.6 / 4, "sinks": 3.6 / 4},
        0.5: {"own": (1.0 + 0.4) / 4, "other-target": (0.6 + 0.0) / 4, "sinks": (0.1 - 0.2) / 4},
    }
    assert frame["above"].unique().tolist() == list(expected)
    for above, rungs in expected.items():
        for name, recovered in rungs.items():
            assert value(frame, above=above, name=name, k=1) == pytest.approx(recovered)
    assert "other-target" not in set(frame[frame["above"] == 0.2]["name"])
    by_gain = with_p_long(ladder()).specificity(by="gain_nats")
    assert by_gain["above"].unique().tolist() == [1.0, 3.0]
    with pytest.raises(UserError, match="'p' divides no targets; choose from gain_nats, p_long"):
        ladder().specificity(by="p")
