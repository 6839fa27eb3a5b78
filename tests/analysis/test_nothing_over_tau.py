"""A measurement in which no target is over tau: a result like others, whose losses a lower tau uses again."""

from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd
import pytest

from analysis import engine, measuring, options
from analysis.api import Result, load, load_study
from analysis.figures.breakdowns import all_figures
from analysis.measurement import save_study
from analysis.stats import numbers
from analysis.stats.recovery import nats
from analysis.stats.summary import every_number, summary
from analysis.verify import verify
from tests.analysis.figures.drawn import assert_readable, legend
from tests.support.refusals import refused
from tests.support.results import made_result
from tests.support.small_measurement import TEXTS, assert_same, interrupted_losses, model, small

pytestmark = pytest.mark.usefixtures("small_batches")

TAU = 90.0
WITH_CHOICES = (
    *("recovery", "losses", "differences", "gain_bins", "target_bins", "near_copies", "kinds", "distances"),
    *("tokens_needed", "placebos", "specificity", "faithfulness", "xray"),
)
EVERYTHING = {"scores": True, "faithfulness": True, "placebos": options.PLACEBOS[:-1], "targets": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small_batches):
    """Of a result that has all that can be measured, and no target over tau."""
    path = tmp_path_factory.mktemp("nothing")
    small(tau_nats=TAU, out=path, **EVERYTHING)
    return path


@pytest.fixture
def losses_are_not_measured(monkeypatch):
    def measured(*_):
        raise AssertionError("L_long and L_short are measured")

    monkeypatch.setattr(engine, "long_and_short_losses", measured)


@pytest.mark.parametrize(
    "changes", [{}, {"targets_per_block": 3}, EVERYTHING, {"select_with": model(1)}], ids=len
)
def test_it_is_a_whole_result_in_memory_and_from_its_folder(tmp_path, changes):
    changes = {**changes, "targets": 24}
    result = small(tau_nats=TAU, out=tmp_path, **changes)
    assert result.settings.complete and not len(result.over) and not (tmp_path / "parts").exists()
    for one in (result, load(tmp_path), small(tau_nats=TAU, **changes)):
        assert_same(one, result)
        assert one.settings == result.settings
    with_choices = small(tau_nats=-TAU, **changes)
    for name in ("choices", "scores", "texts"):
        empty, frame = getattr(load(tmp_path), name), getattr(with_choices, name)
        assert (empty is None) == (frame is None)
        if frame is not None and name != "choices":
            assert set(empty) == set(frame) - {"placebo_pieces"}
    assert "loss_nats" in result.choices and "selector" in result.choices
    assert result.targets.drop(columns="over_tau").equals(with_choices.targets.drop(columns="over_tau"))


def test_it_says_what_was_measured_and_nothing_that_would_fail(folder):
    result = load(folder)
    largest = nats(round(result.gain_nats.max(), 3))
    text = str(result)
    assert (
        f"none of 60 targets gains more than 90 nats from the long context; the largest gain is {largest}"
        in text
    )
    for name in ("long", "short"):
        assert f"{result.targets[f'loss_{name}_nats'].mean():.2f}" in text
    assert ".xray" not in text and ".recovery" not in text
    assert escape(text) in result._repr_html_() and summary(result).startswith(text)
    assert result.counts()["targets_over_tau"] == 0 and len(result.persistence()) == 0
    gain = result.shares().set_index("name")["value"]["gain_nats"]
    assert gain == pytest.approx(result.gain_nats.mean())
    assert {"gap_cost_nats", "gap_cost_over_tau_nats", "share_enough"} < set(result.contexts()["name"])
    for name in WITH_CHOICES:
        with refused(f"no target is over tau: none of 60 .* 90 nats .* {largest}; measure with a lower tau"):
            getattr(result, name)()


def test_the_figure_has_the_mean_losses_of_all_targets():
    result = made_result(tau_nats=99, texts=9)
    figures = all_figures({"": result}, resamples=50)
    assert list(figures) == ["figure2"]
    [panel] = figures["figure2"].axes
    shares = result.shares(resamples=50).set_index("name").loc[["loss_short_nats", "loss_long_nats"]]
    line, _, [bars] = panel.containers[0]
    assert line.get_ydata().tolist() == shares["value"].tolist()
    ends = np.array(bars.get_segments())[:, :, 1]
    np.testing.assert_allclose(ends, shares[["low", "high"]], atol=1e-12)
    assert panel.get_title("left") == "(a) Mean loss of all targets"
    drawn = result.figure2().axes, all_figures({"a": result, "b": result})["figure2"]
    assert len(drawn[0]) == 1 and legend(drawn[1]) == ["a", "b"]


def test_the_commands(tmp_path, folder, call_main, monkeypatch):
    code, printed = call_main("figure2", folder, "--out", tmp_path)
    assert not code and printed.startswith(str(load(folder))) and "loss_short_nats" not in printed
    code, printed = call_main("figure2", folder, "--tables", "--out", tmp_path)
    assert not code and printed.startswith(load(folder).summary())
    assert {path.name for path in tmp_path.iterdir()} == {"figure2.png", "numbers.csv"}
    written = pd.read_csv(tmp_path / "numbers.csv")
    assert set(written["frame"]) == {"shares", "contexts"}
    assert written["value"][0] == pytest.approx(load(folder).shares()["value"][0])
    monkeypatch.setattr(measuring, "measure", lambda *_, **options: load(folder))
    (tmp_path / "a.txt").write_text("some text")
    code, printed = call_main("measure", "a model", "--text", tmp_path / "a.txt", "--out", tmp_path)
    assert not code and printed.startswith(str(load(folder)))


@pytest.mark.parametrize(
    "shards", [(None,), pytest.param(("2/2", "1/2", None), marks=pytest.mark.slow)], ids=["whole", "shards"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {"targets": 32},
        pytest.param({**EVERYTHING, "targets": 32, "targets_per_block": 3}, marks=pytest.mark.slow),
        {"targets": 32, "select_with": model(1)},
    ],
    ids=["plain", "everything", "crossfit"],
)
def test_a_lower_tau_takes_the_losses_and_is_a_fresh_measurement_to_the_last_bit(
    tmp_path, request, shards, changes
):
    small(tau_nats=TAU, out=tmp_path, **changes)
    fresh = small(tau_nats=1.5, **changes)
    request.getfixturevalue("losses_are_not_measured")
    for shard in shards:
        assert load(tmp_path).settings.choices.tau_nats == TAU  # until the new one is whole
        result = small(tau_nats=1.5, out=tmp_path, shard=shard, **changes)
    for one in (result, load(tmp_path)):
        assert len(one.over) and one.settings == fresh.settings
        assert_same(one, fresh)
        assert list(one.targets) == list(fresh.targets)
    assert not (tmp_path / "parts").exists()
    with refused("was measured with other settings: tau_nats 1.5 -> 0.5; give another folder"):
        small(tau_nats=0.5, out=tmp_path, **changes)


def test_a_lower_tau_goes_on_after_an_interruption(tmp_path, monkeypatch, losses_are_not_measured):
    monkeypatch.undo()
    few = {"targets": 40, "out": tmp_path}
    before = small(tau_nats=TAU, **few)
    begun = interrupted_losses(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        small(tau_nats=1.5, **few)
    assert_same(load(tmp_path), before)
    assert_same(small(tau_nats=TAU, **few), before)
    assert_same(small(tau_nats=1.5, **few), small(tau_nats=1.5, targets=40))
    assert len(begun) == 2 + 2 + 3  # of three batches


def test_nothing_is_over_a_higher_tau_either(tmp_path, request):
    few = {"targets": 40, "out": tmp_path}
    small(tau_nats=TAU, **few)
    request.getfixturevalue("losses_are_not_measured")
    small(tau_nats=TAU + 1, **few)
    assert load(tmp_path).settings.choices.tau_nats == TAU + 1
    with refused("was measured with other settings: tau_nats 91.0 -> 1.5, ks"):
        small(tau_nats=1.5, ks=(1, 2), **few)


def test_losses_of_other_targets_are_not_used(tmp_path):
    result = small(tau_nats=TAU, targets=40, out=tmp_path)
    targets = result.targets.assign(position=result.targets["position"] + 1)
    replace(result, targets=targets).save(tmp_path)
    with refused("has other targets than are sampled now; give another folder"):
        small(tau_nats=1.5, targets=40, out=tmp_path)


def test_it_can_be_verified(folder):
    again = verify(load(folder), model(), TEXTS, targets=50, device="cpu", tokens_per_batch=2048)
    assert again.holds and again.choices == 0 and "no choices: verified" in str(again)


def test_one_of_several_has_nothing_over_tau(tmp_path):
    """As a cell of a study, as a label of a figure, as one run of a model."""
    nothing = made_result(run=1, tau_nats=99, texts=6)
    some = made_result(run=2, texts=6)
    save_study(tmp_path, {"none": nothing, "some": some})
    study = load_study(tmp_path)
    assert "the largest gain is" in str(study["none"])
    assert len(study["some"].recovery()) == len(some.recovery())

    figure = all_figures(study)["figure2"]
    assert_readable(figure)
    assert legend(figure)[0] == "some" and "none" not in legend(figure)
    assert "none: N = 128" in figure.get_suptitle() and "the largest gain is" in figure.get_suptitle()
    every = every_number(study, resamples=50)
    assert set(every[every["result"] == "none"]["frame"]) == {"shares"}

    quiet = made_result(run=1, texts=6)
    gain = np.minimum(quiet.gain_nats, 0.9)
    targets = quiet.targets.assign(loss_short_nats=quiet.targets["loss_long_nats"] + gain, over_tau=False)
    quiet = replace(quiet, targets=targets, choices=quiet.choices[:0])
    for runs in ([some, quiet], [quiet, some]):
        joined = Result.join(runs)
        recovery = numbers.recovery(joined)
        assert recovery["value"].tolist() == pytest.approx(numbers.recovery(some)["value"].tolist())
        assert "training seed 1 by itself: no target is over tau: none of 400" in summary(joined)
    neither = Result.join([quiet, replace(quiet, settings=quiet.settings.but(model_sha256="f"))])
    assert "none of 800 targets" in str(neither)
