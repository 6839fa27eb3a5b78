"""Measures of faithfulness against their definitions, target by target, and on an example worked out by hand."""

import json

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from analysis.records.schema import FAR_CONTEXTS
from analysis.records.store import Records
from analysis.stats.correlation import row_pearson, row_spearman
from analysis.stats.faithfulness import overlap
from analysis.stats.summary import summarize
from analysis.tables.cells import interval_cell, percent_text
from tests.analysis.stats.test_summary import table_text
from tests.support.made_up_records import made_up_records, resampled_rows, with_further

KS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Records:
    """Records without any further column, as older formats have them."""
    return made_up_records(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def records(bare) -> Records:
    return with_further(bare)


@pytest.fixture(scope="module")
def summary(records) -> dict:
    return json.loads(json.dumps(summarize(records, 1000)))


def test_correlations_are_scipys():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 4, (6, 9)).astype(float), rng.normal(size=(6, 9))
    first[4], second[5, 2] = 2.0, np.nan
    for mine, scipys in ((row_pearson, pearsonr), (row_spearman, spearmanr)):
        expected = [scipys(a, b).statistic for a, b in zip(first[:4], second[:4], strict=True)]
        assert mine(first, second)[:4].tolist() == pytest.approx(expected)
        assert np.isnan(mine(first, second)[4:]).all()


def test_a_constant_row_has_no_correlation_though_its_mean_is_rounded():
    constant = np.full((1, 7), 0.1)
    assert (constant != constant.mean()).all()
    assert np.isnan(row_pearson(constant, np.arange(7.0)[None]))


def test_values_equal_a_plain_loop(records, summary):
    targets, over = records.targets, records.over
    for selector in records.manifest.selectors:
        found = summary["faithfulness"]["selectors"][selector]
        for context in FAR_CONTEXTS:
            further = {name: each[selector][context] for name, each in records.further.items()}
            lacks = records.loss_nats[selector][context] - targets.loss_long_nats[over][:, None]
            for name, values in (
                ("sufficiency_nats", lacks),
                ("comprehensiveness_nats", further["comprehensiveness_nats"]),
            ):
                means = [found[name][context][str(k)]["value"] for k in KS]
                assert means == pytest.approx([np.mean(values[:, column]) for column in range(4)])
                assert found[name][context]["aopc"]["value"] == pytest.approx(np.mean(means))
            if selector == "greedy":
                assert found["lds"] is None and found["r2"] is None and found["spearman"] is None
                continue
            pairs = list(zip(further["subset_influence"], further["subset_loss_nats"], strict=True))
            pairs = [each for i, each in enumerate(pairs) if i != 3 or context == "placebo"]
            assert found["lds"][context]["value"] == pytest.approx(
                np.mean([spearmanr(sums, -losses).statistic for sums, losses in pairs])
            )
            residuals = [
                np.sum((np.polyval(np.polyfit(sums, losses, 1), sums) - losses) ** 2)
                / np.sum((losses - losses.mean()) ** 2)
                for sums, losses in pairs
            ]
            assert found["r2"][context]["value"] == pytest.approx(1 - np.mean(residuals))
            if selector == "leave-one-out":
                assert found["overlap"] is None and found["spearman"] is None
                continue
            assert found["spearman"][context]["value"] == pytest.approx(
                np.mean(further["leave_one_out_spearman"])
            )
            mine, exact = (records.selected[name][context].tolist() for name in (selector, "leave-one-out"))
            shares = [len({*a[:4]} & {*b[:4]}) / 4 for a, b in zip(mine, exact, strict=True)]
            assert found["overlap"][context]["4"]["value"] == pytest.approx(np.mean(shares))
    assert summary["faithfulness"]["overlap_by_chance"]["4"] == pytest.approx(4 / 112)
    contexts = summary["contexts"]
    cost = targets.loss_short_nats - targets.loss_short_from_0_nats
    assert contexts["gap_cost_nats"]["all_targets"]["value"] == pytest.approx(np.mean(cost))
    assert contexts["gap_cost_nats"]["over_tau"]["value"] == pytest.approx(np.mean(cost[over]))
    assert list(contexts["enough"]["shares"]) == ["32", "96"]
    near = [targets.loss_of_96_nats[i] - targets.loss_long_nats[i] <= 0.1 for i in range(len(targets))]
    assert contexts["enough"]["shares"]["96"]["value"] == pytest.approx(np.mean(near))


def test_intervals_equal_a_bootstrap_of_whole_documents(records, summary):
    drops = records.further["comprehensiveness_nats"]["random"]["placebo"]
    sums, losses = (
        records.further[name]["random"]["true"] for name in ("subset_influence", "subset_loss_nats")
    )
    lds = row_spearman(sums, -losses)
    found = {"aopc": [], "lds": []}
    for rows, _ in resampled_rows(records, 1000):
        found["aopc"].append(np.mean(drops[rows]))
        found["lds"].append(np.nanmean(lds[rows]))
    of_random = summary["faithfulness"]["selectors"]["random"]
    for values, interval in (
        (found["aopc"], of_random["comprehensiveness_nats"]["placebo"]["aopc"]),
        (found["lds"], of_random["lds"]["true"]),
    ):
        values.sort()
        assert (interval["low"], interval["high"]) == pytest.approx((values[24], values[975]))


def test_records_without_further_columns_have_what_their_losses_and_choices_say(bare, summary):
    old = json.loads(json.dumps(summarize(bare, 1000)))
    assert old["contexts"] == {"gap_cost_nats": None, "enough": None}
    assert old["faithfulness"]["subsets"] is None
    for selector, found in old["faithfulness"]["selectors"].items():
        full = summary["faithfulness"]["selectors"][selector]
        assert {name for name, each in found.items() if each is not None} <= {"sufficiency_nats", "overlap"}
        assert (found["sufficiency_nats"], found["overlap"]) == (full["sufficiency_nats"], full["overlap"])


def test_tables_show_every_measure_in_80_columns(summary):
    text = table_text(summary)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for selector, found in summary["faithfulness"]["selectors"].items():
        shown = [found["sufficiency_nats"]["placebo"]["aopc"]]
        shown += [found["comprehensiveness_nats"]["true"]["aopc"]] if selector != "best" else []
        shown += [found[name]["true"] for name in ("lds", "r2", "spearman") if found[name]]
        shown += [found["overlap"]["placebo"]["4"]] if found["overlap"] else []
        for each in shown:
            assert interval_cell(each) in text
    enough = summary["contexts"]["enough"]["shares"]["96"]
    assert f"last 96 tokens within 0.1 nats of L_long, % {percent_text(enough, 1)}" in " ".join(text.split())


def test_overlap_and_lds_by_hand():
    assert overlap(np.array([[3, 0, 1]]), np.array([[1, 2, 3]])).item() == pytest.approx(2 / 3)
    log_p = np.log([[0.1, 0.5, 0.3, 0.9]])  # ranks 1, 3, 2, 4
    assert row_spearman(np.array([[-1.0, 4.0, 5.0, 6.0]]), log_p).item() == pytest.approx(0.8)
