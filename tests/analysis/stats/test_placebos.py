"""The parts of a recovery against plain sums and a bootstrap of whole documents; what is printed and drawn of them."""

import json
from dataclasses import replace
from itertools import pairwise

import matplotlib
import numpy as np
import pytest

from analysis.plots import style
from analysis.plots.dependencies import all_figures
from analysis.records.schema import FURTHER_PLACEBOS
from analysis.records.store import Records
from analysis.stats.summary import summarize
from analysis.tables.cells import name_lines, percent_text
from tests.analysis.stats.test_summary import table_text
from tests.support.made_up_records import UNSIGNED, made_up_records, resampled_rows

SELECTORS = ("leave-one-out", *UNSIGNED, "random")
CONTEXTS = ("true", "placebo", *FURTHER_PLACEBOS)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Records:
    folder = tmp_path_factory.mktemp("records")
    return made_up_records(folder, selectors=SELECTORS, further_placebos=FURTHER_PLACEBOS)


@pytest.fixture(scope="module")
def summary(records) -> dict:
    return json.loads(json.dumps(summarize(records, 1000)))


def plain_parts(records: Records, rows: list[int], blind: str, column: int) -> dict[str, float]:
    """By sums over targets over tau that have every far context, one by one."""
    rows = [row for row in rows if records.targets.same_group_document[records.over[row]] >= 0]
    short, long = (getattr(records.targets, f"loss_{n}_nats")[records.over] for n in ("short", "long"))

    def recovery(selector: str, context: str) -> float:
        losses = records.loss_nats[selector][context][:, column]
        return sum(short[row] - losses[row] for row in rows) / sum(short[row] - long[row] for row in rows)

    common = {context: recovery(blind, context) for context in CONTEXTS[1:]}
    largest = max(0.0, *common.values())
    return {
        "luck": recovery("leave-one-out", "placebo") - common["placebo"],
        **common,
        "largest": largest,
        "specific": recovery(blind, "true") - largest,
    }


def flat(parts: dict) -> dict:
    return {"luck": parts["luck"], **parts["common_context"], "specific": parts["specific"]}


def test_parts_equal_plain_sums_and_intervals_a_bootstrap_of_documents(records, summary):
    found = summary["placebos"]
    every = range(len(records.over))
    assert found["targets"] == sum(records.targets.same_group_document[records.over] >= 0) < len(every)
    pairs = [(each["signed"], each["blind"]) for each in found["parts"]]
    assert pairs == [("leave-one-out", f"leave-one-out-{form}") for form in ("kl", "tv")]
    for pair in found["parts"]:
        for column, k in enumerate((1, 2, 4, 8)):
            expected = plain_parts(records, list(every), pair["blind"], column)
            values = {name: each["value"] for name, each in flat(pair["ks"][str(k)]).items()}
            assert values == pytest.approx(expected)
    drawn = [plain_parts(records, rows, "leave-one-out-kl", 2) for rows, _ in resampled_rows(records, 1000)]
    for name, interval in flat(found["parts"][0]["ks"]["4"]).items():
        values = sorted(each[name] for each in drawn)
        assert (interval["low"], interval["high"]) == pytest.approx((values[24], values[975])), name
    for selector in SELECTORS:
        for context in CONTEXTS:
            rows = np.flatnonzero(records.targets.same_group_document[records.over] >= 0)
            at = records.over[rows]
            saved = records.targets.loss_short_nats[at] - records.loss_nats[selector][context][rows, 1]
            value = saved.sum() / records.targets.gain_nats[at].sum()
            assert found["recovery"][selector][context]["2"]["value"] == pytest.approx(value)


def test_the_rest_of_the_summary_is_that_of_records_without_them(records, summary):
    def cut(by_name: dict) -> dict:
        return {
            name: {each: by_context[each] for each in CONTEXTS[:2]} for name, by_context in by_name.items()
        }

    bare = replace(
        records,
        manifest=replace(records.manifest, options={}),
        **{name: cut(getattr(records, name)) for name in ("loss_nats", "selected", "influence")},
    )
    old = json.loads(json.dumps(summarize(bare, 1000)))
    assert old["placebos"] is None
    for name in old.keys() - {"placebos", "settings"}:
        assert old[name] == summary[name], name
    assert "placebos" not in all_figures(old)


def test_tables_show_the_parts_in_80_columns(summary):
    text = table_text(summary).split("recovery at k = 4")[1]
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    found = summary["placebos"]
    rows = [line.split() for line in text.splitlines()]
    for selector in SELECTORS:
        cells = " ".join(percent_text(found["recovery"][selector][context]["4"]) for context in CONTEXTS)
        names = name_lines(selector, 2)  # the end of a long name goes below
        assert [names[0], *cells.split()] in rows and (not names[1] or any(names[1] in row for row in rows))
    parts = found["parts"][1]["ks"]["8"]
    shown = (parts["luck"], parts["common_context"]["largest"], parts["specific"])
    assert ["8", *" ".join(map(percent_text, shown)).split()] in rows


@pytest.mark.parametrize("width", [style.COLUMN, style.PAGE])
def test_the_figure_shows_every_far_context_and_part(summary, width):
    figure = all_figures(summary, width=width)["placebos"]
    figure.draw_without_rendering()
    first, second = figure.axes
    points = {container.get_label(): container for container in first.containers}
    order = ("shuffled", "same-group", "placebo")
    for selector in SELECTORS:
        recovery = summary["placebos"]["recovery"][selector]
        own, others = (points[f"{selector} {kind}recovery"].lines[0] for kind in ("", "placebo_"))
        assert list(own.get_ydata()) == [recovery["true"]["4"]["value"]]
        assert list(others.get_ydata()) == [recovery[context]["4"]["value"] for context in order]
        assert others.get_markerfacecolor() == "white"
    parts = summary["placebos"]["parts"][0]["ks"].values()
    for name, key in (("luck", "luck"), ("specific", "specific")):
        (bars,) = [each for each in second.containers if each.get_label() == name]
        assert [bar.get_height() for bar in bars] == [each[key]["value"] for each in parts]
    texts = [each for each in figure.findobj(matplotlib.text.Text) if each.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    ticks = [label.get_window_extent() for label in first.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(ticks))
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert legend.get_window_extent().x1 <= figure.bbox.x1 + 1
    looks = style.selector_styles(SELECTORS).values()
    for part in range(2):
        assert len({each[part] for each in looks}) == len(SELECTORS)


def test_one_further_placebo_is_enough_and_groups_may_have_none(tmp_path):
    records = made_up_records(tmp_path, selectors=("leave-one-out",), further_placebos=("shuffled",))
    found = summarize(records, 100)["placebos"]
    assert found["far_contexts"] == ["true", "placebo", "shuffled"] and found["parts"] == []
    assert found["targets"] == len(records.over)
    assert len(all_figures(summarize(records, 100))["placebos"].axes) == 1
    alone = made_up_records(
        tmp_path / "alone", documents=1, selectors=("random",), further_placebos=FURTHER_PLACEBOS
    )
    assert summarize(alone, 100)["placebos"] is None


def test_placebos_that_recover_nothing_take_nothing_away(tmp_path):
    selectors = ("leave-one-out", "leave-one-out-kl")
    records = made_up_records(tmp_path, selectors=selectors, further_placebos=FURTHER_PLACEBOS)
    for context in CONTEXTS[1:]:
        records.loss_nats["leave-one-out-kl"][context] += 3.0
    found = summarize(records, 100)["placebos"]
    parts = found["parts"][0]["ks"]["4"]
    assert parts["common_context"]["largest"] == {"value": 0, "low": 0, "high": 0}
    assert parts["specific"] == found["recovery"]["leave-one-out-kl"]["true"]["4"]
