"""Chosen tokens as text, against the token ids of the texts and one plain forward pass without each of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import analysis
from analysis.api import Result
from olmo_sparsity.util.errors import UserError
from tests.support.plain import plain_loss
from tests.support.small_measurement import KS, F, N, model, small, small_tokens, window

FEW = {"targets": 60}


@cache
def in_blocks(size: int) -> Result:
    """A result of targets in blocks of this size."""
    return small(**FEW, targets_per_block=size)


@pytest.mark.parametrize("far_context", ["true", "placebo"])
@pytest.mark.parametrize("size", [1, 4])
def test_without_a_chosen_token_the_loss_rises_by_its_influence(size: int, far_context: str) -> None:
    result = in_blocks(size)
    chosen = result.chosen(selector="leave-one-out", far_context=far_context)
    assert list(chosen["rank"]) == list(range(1, KS[-1] + 1)) * len(result.over)
    targets = result.targets.set_index("target_id", drop=False)
    inner = model()[0]
    places = set()
    for target_id, rows in list(chosen.groupby("target_id"))[:6]:
        target = targets.loc[target_id]
        text = window(result, target, small_tokens(), far_context)
        places.add(len(text) - N)
        long = plain_loss(inner, text, range(len(text)), target.token)
        for row in rows.itertuples():
            position = len(text) - row.distance_tokens
            assert position == row.position_id < F
            assert row.target.strip() == f"w{target.token}"
            assert row.piece.strip() == f"w{text[position]}"
            kept = [place for place in range(len(text)) if place != position]
            assert row.influence == pytest.approx(
                plain_loss(inner, text, kept, target.token) - long, abs=1e-4
            )
    assert size == 1 or len(places) > 1


def test_one_target_kept_with_sinks_is_the_one_of_selected() -> None:
    result = small(**FEW, keep_as=("text", "cache:4"), targets_per_block=4)
    target_id = int(result.targets["target_id"].iloc[result.over[3]])
    chosen = result.chosen(target_id, level="cache", sinks=4)
    selected = result.selected("leave-one-out", level="cache", sinks=4)
    assert list(chosen["position_id"]) == selected[3].tolist() and selected[3].min() >= 4
    assert chosen.equals(
        result.chosen(level="cache", sinks=4).query("target_id == @target_id").reset_index(drop=True)
    )


def test_where_nothing_was_kept_as_text_the_first_way_is_shown() -> None:
    result = small(**FEW, keep_as=("cache:4", "cache"), targets_per_block=4)
    selected = result.selected("leave-one-out", level="cache", sinks=4)
    assert result.chosen()["position_id"].tolist() == selected.reshape(-1).tolist()
    without = result.selected("leave-one-out", level="cache", sinks=0)
    assert result.chosen(sinks=0)["position_id"].tolist() == without.reshape(-1).tolist()


def test_an_x_ray_of_no_text_is_refused_in_one_line() -> None:
    result = in_blocks(4)
    with pytest.raises(
        UserError, match="no block of text 'hello' has a target over tau; give the number of a"
    ):
        result.xray("hello")
    with pytest.raises(UserError, match="holds no texts; measure again"):
        replace(result, texts=None).xray()


@pytest.mark.parametrize("keep_as", [("text", "cache:4"), ("cache:4", "text"), ("cache", "cache:4")])
def test_an_x_ray_shows_the_tokens_of_the_way_that_chosen_shows(keep_as: tuple[str, ...]) -> None:
    result = small(**FEW, keep_as=keep_as, targets_per_block=4)
    shown = result.targets.groupby(result.targets["target_id"] // 4)["over_tau"].sum().idxmax()
    drawn = result.xray()

    def of_block(**way: Any) -> dict[int, list[int]]:
        chosen = result.chosen(**way)
        chosen = chosen[chosen["target_id"] // 4 == shown].sort_values("position_id")
        return chosen.groupby("target_id")["position_id"].agg(list).to_dict()

    assert of_block() != of_block(sinks=4), "a way without sinks chooses among them, too"
    for target_id, chosen in of_block().items():
        strongest = drawn.strongest(N + target_id % 4, KS[-1])
        assert sorted(place for place, _ in strongest) == chosen


def test_an_x_ray_by_a_selector_that_was_not_measured_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError, match="^'nonsense' was not measured; choose from leave-one-out, random$"):
        in_blocks(4).xray(selector="nonsense")


def test_the_tokens_of_another_target_are_shown_as_text_of_the_true_far_context() -> None:
    result = small(**FEW, placebos=("other-target",), targets_per_block=4)
    shown = result.chosen(far_context="other-target")
    own = result.chosen()
    pieces = own.set_index([own["target_id"] // 4, "position_id"])["piece"].to_dict()
    for row in shown.itertuples():
        assert row.piece == pieces[row.target_id // 4, row.position_id]


@pytest.fixture(scope="module")
def with_placebos() -> Result:
    return small(**FEW, placebos=("placebo", "same-group", "shuffled"))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"far_context": "shuffled"}, "text of the far context 'shuffled' is not recorded"),
        ({}, {"far_context": "same-group"}, "text of the far context 'same-group' is not recorded"),
        (
            {},
            {"far_context": "placebos"},
            "'placebos' was not measured; choose from true, placebo, same-group",
        ),
        ({}, {"selector": "greedy"}, "'greedy' was not measured; choose from leave-one-out, random"),
        ({}, {"level": "cache"}, "choose what was measured: text "),
        ({}, {"target_id": 10**6}, "no token was chosen for target 1000000"),
        ({"texts": None}, {}, "holds no texts"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    with_placebos: Result, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        replace(with_placebos, **changes).chosen(**options)
    assert "\n" not in str(error.value)


def test_text_that_was_left_out_and_joined_trainings_are_refused() -> None:
    result = in_blocks(1)
    with pytest.raises(UserError, match="the text of block .* is not recorded"):
        replace(result, texts=result.texts.iloc[1:]).chosen()
    with pytest.raises(UserError, match=r"result\.runs\[0\]"):
        Result.join([result, small(model(1), **FEW)]).chosen()
    none = replace(result, targets=result.targets.assign(over_tau=False), choices=result.choices.iloc[:0])
    with pytest.raises(UserError, match="no target is over tau"):
        none.chosen()


def test_the_package_lists_what_it_offers() -> None:
    assert set(analysis.__all__) <= set(dir(analysis))
