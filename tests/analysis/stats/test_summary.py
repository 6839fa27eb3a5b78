"""The numbers of Figure 2 against a computation of their own, target by target."""

import copy
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from analysis.plots.figure2 import describe
from analysis.records.schema import FAR_CONTEXTS
from analysis.records.store import Records
from analysis.stats.bootstrap import ClusterBootstrap, few_clusters, ratio_of_sums
from analysis.stats.findings import describe_findings
from analysis.stats.summary import gain_bins, summarize, summarize_all_targets
from analysis.tables.cells import name_lines
from analysis.tables.summary import render_summary
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_records import MEASURED, made_up_records, resampled_rows


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return made_up_records(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def summary(records: Records) -> dict:
    return summarize(records, 1000, 0)


def test_values_equal_a_plain_loop(records: Records, summary: dict) -> None:
    targets = records.targets
    over = [i for i in range(len(targets)) if targets.loss_short_nats[i] - targets.loss_long_nats[i] > 1.0]
    short = [targets.loss_short_nats[i] for i in over]
    long = [targets.loss_long_nats[i] for i in over]
    assert summary["targets"] == 400 and summary["targets_over_tau"] == len(over)
    assert summary["documents"] == len(set(targets.document.tolist()))
    assert summary["share_over_tau"]["value"] == pytest.approx(len(over) / 400)
    assert summary["loss_short"]["value"] == pytest.approx(np.mean(short))
    assert summary["loss_long"]["value"] == pytest.approx(np.mean(long))
    everyone = summary["all_targets"]
    assert everyone["loss_short"]["value"] == pytest.approx(np.mean(targets.loss_short_nats))
    assert everyone["loss_long"]["value"] == pytest.approx(np.mean(targets.loss_long_nats))
    gap = np.mean(targets.loss_short_nats - targets.loss_long_nats)
    assert everyone["gap_short_minus_long"]["value"] == pytest.approx(gap)
    changes = [abs(s - long) for s, long in zip(targets.loss_short_nats, targets.loss_long_nats, strict=True)]
    assert everyone["absolute_gap"]["value"] == pytest.approx(math.fsum(changes) / 400)
    for selector in MEASURED:
        for column, k in enumerate(["1", "2", "4", "8"]):
            found = summary["selectors"][selector][k]
            for prefix, context in (("", "true"), ("placebo_", "placebo")):
                losses = [records.loss_nats[selector][context][row, column] for row in range(len(over))]
                saved = math.fsum(s - loss for s, loss in zip(short, losses, strict=True))
                gained = math.fsum(s - each for s, each in zip(short, long, strict=True))
                assert found[f"{prefix}loss"]["value"] == pytest.approx(np.mean(losses))
                assert found[f"{prefix}recovery"]["value"] == pytest.approx(saved / gained)


def test_intervals_equal_a_bootstrap_of_whole_documents(records: Records, summary: dict) -> None:
    """Each resample copies the targets of the drawn documents; net recovery is computed from the copies."""
    targets, loss = records.targets, records.loss_nats["greedy"]
    net, share = [], []
    for rows, drawn in resampled_rows(records, 1000):
        over = records.over[rows]
        gain = targets.loss_short_nats[over] - targets.loss_long_nats[over]
        net.append((loss["placebo"][rows, 2] - loss["true"][rows, 2]).sum() / gain.sum())
        share.append(len(rows) / drawn)
    for values, found in (
        (net, summary["selectors"]["greedy"]["4"]["net_recovery"]),
        (share, summary["share_over_tau"]),
    ):
        values.sort()
        assert (found["low"], found["high"]) == pytest.approx((values[24], values[975]))


def test_best_is_the_lowest_loss_of_each_target(records: Records, summary: dict) -> None:
    """Chosen target by target and k by k, among controls too, in the true and the placebo context by themselves."""
    short = records.targets.loss_short_nats[records.over]
    gain = records.targets.gain_nats[records.over]
    winners = set()
    for column, k in enumerate(["1", "2", "4", "8"]):
        for key, context in (("recovery", "true"), ("placebo_recovery", "placebo")):
            saved = 0.0
            for row in range(len(short)):
                losses = {name: records.loss_nats[name][context][row, column] for name in MEASURED}
                winner = min(losses, key=lambda name: losses[name])
                winners.add(winner)
                saved += short[row] - losses[winner]
            found = summary["selectors"]["best"][k]
            assert found[key]["value"] == pytest.approx(saved / gain.sum())
            for name in MEASURED:
                assert found[key]["value"] >= summary["selectors"][name][k][key]["value"]
    assert len(winners) > 2


def test_best_needs_two_selectors_that_look_at_the_model(tmp_path: Path) -> None:
    names = ("leave-one-out", "random", "nearest")
    summary = summarize(made_up_records(tmp_path, selectors=names), 100)
    assert list(summary["selectors"]) == list(names)


def test_what_thresholding_does_stands_beside_the_share_over_tau(records: Records, summary: dict) -> None:
    found, gain = summary["thresholding"], records.targets.gain_nats
    assert found["share_under_minus_tau"]["value"] == pytest.approx((gain < -1).mean())
    assert found["share_of_net_gain"]["value"] == pytest.approx(gain[gain > 1].sum() / gain.sum())
    assert found["persistence"] is None
    held = f"{100 * gain[gain > 1].sum() / gain.sum():.0f}"
    assert "% of the net gain of all" in table_text(summary)
    assert f"hold {held} [" in table_text(summary) and "(the mirror tail): 0.0 [0.0, " in table_text(summary)
    assert f"0.0% lose more; the former hold {held}% of the net gain of all" in describe_findings(records)
    assert rf"0.0 % below $-\tau$; {held} % of the net gain" in describe(summary)


def test_cross_fitted_records_tell_what_persists(tmp_path: Path) -> None:
    records = made_up_records(tmp_path, crossfit=True)
    summary = summarize(records, 1000)
    chosen, gain = records.targets.selecting_gain_nats, records.targets.gain_nats
    over, found = chosen > 1, summary["thresholding"]["persistence"]
    assert found["selecting_gain_nats"]["value"] == pytest.approx(chosen[over].mean())
    assert found["gain_nats"]["value"] == pytest.approx(gain[over].mean())
    assert found["share_still_over_tau"]["value"] == pytest.approx((gain[over] > 1).mean())
    assert f"they gain {gain[over].mean():.2f} [" in table_text(summary)


def test_no_p_value_of_targets_that_were_chosen_by_the_true_gain(summary: dict) -> None:
    """True and placebo could not be exchanged: of 1,000 simulations without a difference 755 had p < 0.05."""
    assert "permutation" not in json.dumps(summary) and "p-value" not in table_text(summary)


def test_comparisons_are_paired(records: Records, summary: dict) -> None:
    """The default selector minus the other one, both of the same resample."""
    pairs = [(each["first"], each["second"], each["k"]) for each in summary["comparisons"]]
    assert pairs == [("leave-one-out", name, 4) for name in ("leave-one-in", "greedy", "random", "best")]
    gain = records.targets.gain_nats[records.over]
    losses = {name: {c: records.loss_nats[name][c][:, 2] for c in FAR_CONTEXTS} for name in MEASURED}
    resamples = resampled_rows(records, 1000)
    for each in summary["comparisons"][:3]:
        one, two = losses[each["first"]], losses[each["second"]]
        net = (one["placebo"] - one["true"]) - (two["placebo"] - two["true"])
        for found, saved in (
            (each["net_recovery_difference"], net),
            (each["recovery_difference"], two["true"] - one["true"]),
        ):
            slow = sorted(saved[rows].sum() / gain[rows].sum() for rows, _ in resamples)
            assert found["value"] == pytest.approx(saved.sum() / gain.sum())
            assert (found["low"], found["high"]) == pytest.approx((slow[24], slow[975]))
    both = [summary["selectors"][name]["4"]["net_recovery"] for name in ("leave-one-out", "greedy")]
    paired = summary["comparisons"][1]["net_recovery_difference"]
    assert paired["value"] == pytest.approx(both[0]["value"] - both[1]["value"])


def test_without_the_default_selector_the_first_is_compared(tmp_path: Path) -> None:
    summary = summarize(made_up_records(tmp_path, selectors=("random", "greedy", "gradient")), 100)
    assert [(each["first"], each["second"]) for each in summary["comparisons"]] == [
        ("greedy", "random"), ("greedy", "gradient"), ("greedy", "best"),
    ]  # fmt: skip


def test_crossfit_chooses_with_one_model_and_sums_losses_of_the_other(tmp_path: Path) -> None:
    records = made_up_records(tmp_path, crossfit=True)
    targets = records.targets
    summary = summarize(records, 100)
    over = [i for i in range(len(targets)) if targets.selecting_gain_nats[i] > 1.0]
    evaluated = [targets.loss_short_nats[i] - targets.loss_long_nats[i] for i in over]
    assert min(evaluated) < 0 and set(over) != set(np.flatnonzero(targets.gain_nats > 1.0))
    assert summary["settings"]["crossfit"] and summary["settings"]["evaluation_checkpoint"] == "runs/b"
    assert summary["targets_over_tau"] == len(over)
    assert summary["share_over_tau"]["value"] == pytest.approx(len(over) / 400)
    assert summary["loss_short"]["value"] == pytest.approx(
        np.mean([targets.loss_short_nats[i] for i in over])
    )
    assert summary["loss_long"]["value"] == pytest.approx(np.mean([targets.loss_long_nats[i] for i in over]))
    everyone = np.mean(targets.loss_short_nats - targets.loss_long_nats)
    assert summary["all_targets"]["gap_short_minus_long"]["value"] == pytest.approx(everyone)
    saved = [
        targets.loss_short_nats[i] - records.loss_nats["greedy"]["true"][row, 2] for row, i in enumerate(over)
    ]
    recovery = sum(saved) / sum(evaluated)
    assert summary["selectors"]["greedy"]["4"]["recovery"]["value"] == pytest.approx(recovery)
    # the selecting model's gain parts the bins as it decides about tau: every target over tau is in one
    bins = summary["gain_bins"]["bins"]
    assert sum(each["targets"] for each in bins) == len(over)
    inside = [row for row, i in enumerate(over) if 2 < targets.selecting_gain_nats[i] <= 3]
    in_bin = sum(saved[row] for row in inside) / sum(evaluated[row] for row in inside)
    assert bins[1]["selectors"]["greedy"]["recovery"]["value"] == pytest.approx(in_bin)
    assert "cross-fitted" in table_text(summary)


def test_crossfit_without_gains_is_refused(tmp_path: Path) -> None:
    records = made_up_records(tmp_path, crossfit=True)
    targets = records.targets
    long = targets.loss_long_nats.copy()
    long[records.over] = targets.loss_short_nats[records.over] + 0.25
    barren = replace(records, targets=replace(targets, loss_long_nats=long))
    total = -0.25 * len(records.over)
    with pytest.raises(
        UserError, match=f"over the {len(records.over)} targets .* evaluating .* sum to {total:.3g} nats"
    ) as refused:
        summarize(barren, 100)
    assert "\n" not in str(refused.value)


def test_bins_split_the_targets(records: Records, summary: dict) -> None:
    bins = summary["gain_bins"]["bins"]
    assert summary["gain_bins"]["k"] == 4
    assert [(each["low"], each["high"]) for each in bins] == [(1, 2), (2, 3), (3, 5), (5, None)]
    assert sum(each["targets"] for each in bins) == summary["targets_over_tau"]
    gain = records.targets.gain_nats[records.over]
    inside = (gain > 2) & (gain <= 3)
    assert bins[1]["targets"] == inside.sum()
    assert bins[1]["documents"] == len(np.unique(records.targets.document[records.over[inside]]))
    short = records.targets.loss_short_nats[records.over]
    found = bins[1]["selectors"]["leave-one-out"]
    for name, context in (("recovery", "true"), ("placebo_recovery", "placebo")):
        saved = (short - records.loss_nats["leave-one-out"][context][:, 2])[inside]
        assert found[name]["value"] == pytest.approx(saved.sum() / gain[inside].sum())
    net = found["recovery"]["value"] - found["placebo_recovery"]["value"]
    assert found["net_recovery"]["value"] == pytest.approx(net)


def test_a_negative_placebo_adds_nothing_in_any_resample(records: Records) -> None:
    """Placebo losses that lie about L_short: recovery minus the positive part, resample by resample."""
    targets, over = records.targets, records.over
    gain, short = targets.gain_nats[over], targets.loss_short_nats[over]
    harm = np.random.default_rng(5).normal(0, 0.3, len(over))
    harm += 0.01 - harm.mean()
    losses = records.loss_nats["greedy"]
    harmful = {**losses, "placebo": np.repeat((short + harm)[:, None], 4, axis=1)}
    changed = replace(records, loss_nats={**records.loss_nats, "greedy": harmful})
    found = summarize(changed, 1000, 0)["selectors"]["greedy"]["4"]
    saved = short - losses["true"][:, 2]
    nets = []
    for rows, _ in resampled_rows(records, 1000):
        placebo = -harm[rows].sum() / gain[rows].sum()
        nets.append(saved[rows].sum() / gain[rows].sum() - max(0.0, placebo))
    assert found["placebo_recovery"]["low"] < found["placebo_recovery"]["value"] < 0
    assert found["placebo_recovery"]["high"] > 0  # so that resamples of both signs are seen
    assert found["net_recovery"]["value"] == found["recovery"]["value"]
    nets.sort()
    net = found["net_recovery"]
    assert (net["low"], net["high"]) == pytest.approx((nets[24], nets[975]))
    assert all(net[bound] <= found["recovery"][bound] for bound in net)


@pytest.mark.parametrize(
    ("tau", "lower"),
    [(1.0, [1, 2, 3, 5]), (0.5, [0.5, 1, 2, 3, 5]), (2.5, [2.5, 3, 5]), (5.0, [5]), (9.0, [9])],
)
def test_bins_follow_tau(tau: float, lower: list[float]) -> None:
    assert [low for low, _ in gain_bins(tau)] == lower
    assert [high for _, high in gain_bins(tau)] == [*lower[1:], math.inf]


def test_refuses_when_no_target_is_over_tau(tmp_path: Path) -> None:
    records = made_up_records(tmp_path, tau_nats=50.0)
    largest = records.targets.gain_nats.max()
    with pytest.raises(
        UserError, match=f"no target above tau: 0 % of the 400 .* {largest:.3g}.*--tau"
    ) as refused:
        summarize(records)
    assert "\n" not in str(refused.value)


def test_refuses_a_k_that_was_not_measured(records: Records) -> None:
    with pytest.raises(UserError, match="k = 3 was not measured; choose one of 1, 2, 4, 8"):
        summarize(records, k_of_bins=3)
    assert summarize(records, 100, k_of_bins=8)["gain_bins"]["k"] == 8


def test_unfinished_records_say_so(records: Records) -> None:
    """The sums run over what is measured; the share, which needs only the gaps, over everything."""
    half = len(records.over) // 2
    loss, selected = (
        {name: {c: values[:half] for c, values in each.items()} for name, each in kept.items()}
        for kept in (records.loss_nats, records.selected)
    )
    unfinished = replace(records, over=records.over[:half], loss_nats=loss, selected=selected)
    summary = summarize(unfinished, 100)
    assert summary["settings"]["targets_measured"] == half and not summary["settings"]["complete"]
    assert summary["share_over_tau"]["value"] == pytest.approx(len(records.over) / 400)
    short = records.targets.loss_short_nats[records.over[:half]]
    assert summary["loss_short"]["value"] == pytest.approx(short.mean())
    assert f"unfinished: {half} measured so far" in table_text(summary)


def table_text(summary: dict) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_summary(summary))
    return console.export_text()


def shown(interval: dict[str, float], scale: float = 100, digits: int = 0) -> str:
    return f"{scale * interval['value']:.{digits}f} ["


def test_table_has_every_number_in_80_columns(summary: dict) -> None:
    text = table_text(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        "400 targets" in text and f"{summary['targets_over_tau']} over tau" in text and "L_k [nats]" in text
    )
    assert f"L_short {summary['loss_short']['value']:.2f} [" in text
    for per_k in summary["selectors"].values():
        for values in per_k.values():
            assert f"{values['loss']['value']:.2f} [{values['loss']['low']:.2f}, " in text
            assert shown(values["net_recovery"]) in text
    for selector in summary["selectors"]:
        assert text.count(selector) >= 2


def test_table_of_screened_selectors_keeps_80_columns(tmp_path: Path) -> None:
    name = "leave-one-out@gradient:32"
    text = table_text(summarize(made_up_records(tmp_path, selectors=("leave-one-out", name, "random")), 100))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "@gradient:32  " in text
    assert name_lines(name, 3) == ["leave-one-out", "@gradient:32", ""]
    assert name_lines(name, 1) == ["leave-one-out\n@gradient:32"]
    assert name_lines("random", 2) == ["random", ""] and name_lines("random", 1) == ["random"]
    long = "leave-one-out-absolute@integrated-gradients:32"
    assert name_lines(long, 4) == ["leave-one-out-", "absolute", "@integrated-", "gradients:32"]
    assert name_lines(long, 2) == ["leave-one-out-", "absolute\n@integrated-\ngradients:32"]


def test_near_copies_of_training_text_are_counted_and_left_out(records: Records, summary: dict) -> None:
    assert summary["near_copies"] is None and "near copies" not in table_text(summary)  # where nobody looked
    targets = records.targets
    near_copy = np.random.default_rng(5).random(len(targets)) < 0.3
    marked = summarize(replace(records, targets=replace(targets, near_copy=near_copy)), 1000, 0)
    found = marked.pop("near_copies")
    assert {**marked, "near_copies": None} == summary
    assert found["targets"] == near_copy.sum() and found["share"]["value"] == pytest.approx(near_copy.mean())
    assert found["targets_over_tau"] == near_copy[records.over].sum()
    assert found["share_over_tau"]["value"] == pytest.approx(near_copy[records.over].mean())
    rows = np.flatnonzero(~near_copy[records.over])
    without = replace(
        records,
        over=records.over[rows],
        loss_nats={
            name: {far: losses[rows] for far, losses in by_far.items()}
            for name, by_far in records.loss_nats.items()
        },
    )
    left = summarize_values(without)
    for name, values in found["selectors_without"].items():
        assert values["net_recovery"]["value"] == pytest.approx(left[name])
    text = table_text({**marked, "near_copies": found})
    assert f"near copies of training text: {shown(found['share'], digits=1)}" in text
    assert max(map(len, text.splitlines())) <= 80


def summarize_values(records: Records) -> dict[str, float]:
    """Net recovery at k = 4 over the targets of ``over``, by a plain sum."""
    over, column = records.over, records.manifest.ks.index(4)
    gain = records.targets.gain_nats[over].sum()
    return {
        name: (losses["placebo"][:, column] - losses["true"][:, column]).sum() / gain
        for name, losses in records.loss_nats.items()
    }


def test_few_documents_are_pointed_out(tmp_path: Path) -> None:
    summary = summarize(made_up_records(tmp_path, documents=3), 100)
    assert "only 3 documents" in table_text(summary)


def test_best_takes_a_control_where_it_is_the_lowest(records: Records) -> None:
    lucky = copy.deepcopy(records.loss_nats)
    lucky["random"]["true"][::3] = 0.0
    found = summarize(replace(records, loss_nats=lucky), 100)["selectors"]["best"]["4"]["recovery"]["value"]
    lowest = np.min([each["true"][:, 2] for each in lucky.values()], axis=0)
    short, gain = records.targets.loss_short_nats[records.over], records.targets.gain_nats[records.over]
    assert found == pytest.approx((short - lowest).sum() / gain.sum())


def test_groups_are_the_unit_where_records_have_them(tmp_path: Path) -> None:
    """Value and interval are those of the bootstrap by group; few groups are pointed out."""
    records = made_up_records(tmp_path / "few", groups=7)
    plain = summarize(made_up_records(tmp_path / "none"), 1000)
    assert records.targets.placebo_group is not None
    summary, targets = summarize(records, 1000), records.targets
    assert (summary["groups"], summary["settings"]["groups_over_tau"]) == (7, 7) and "groups" not in plain
    columns = np.stack([targets.loss_short_nats, np.ones(len(targets))], axis=1)
    for found, groups in ((summary, targets.document_group), (plain, None)):
        bootstrap = ClusterBootstrap(columns, targets.document, groups=groups, resamples=1000)
        expected = bootstrap.interval(ratio_of_sums(0, 1)).as_dict()
        assert found["all_targets"]["loss_short"] == pytest.approx(expected)
    assert "only 7 groups with targets over tau" in table_text(summary)
    assert "] by group, then document (only 7 groups: rough), of a recovery" in describe_findings(records)
    assert "by group, then document" in describe(summary) and "only 7 groups" in describe(summary)
    assert "(no groups are known)" in table_text(plain) and describe(plain).endswith("95 %, by document")
    kinds = [few_clusters(each, "_over_tau") for each in summary["kinds"]["kinds"]]
    assert all("group" in each for each in kinds)
    assert summarize_all_targets(records, 1000, 0) == summary["all_targets"]
    net = summarize(records, 2000)["selectors"]["leave-one-out"]["4"]["net_recovery"]
    low, high = (f"{100 * net[bound]:.0f}" for bound in ("low", "high"))
    assert f"[{low}, {high}] by group, then document (only 7 groups: rough)" in describe_findings(records)


def test_one_document_gives_no_intervals(tmp_path: Path) -> None:
    summary = summarize(made_up_records(tmp_path, documents=1), 100)
    assert summary["loss_short"]["low"] is None and summary["loss_short"]["value"] > 0
    assert "[–, –]" in table_text(summary)


def test_the_widest_numbers_fit_into_80_columns(summary: dict) -> None:
    wide = copy.deepcopy(summary)
    for per_k in wide["selectors"].values():
        for values in per_k.values():
            values["loss"] = {"value": 5.87, "low": 5.06, "high": 10.76}
            for name in ("recovery", "placebo_recovery", "net_recovery"):
                values[name] = {"value": 1.31, "low": 1.21, "high": 1.43}
    text = table_text(wide)
    assert "…" not in text
    assert text.count("131 [121, 143]") == 3 * sum(map(len, wide["selectors"].values()))
