"""The numbers of Figure 2 against a computation of their own, target by target."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from analysis.manifest import Manifest
from analysis.records import (
    FAR_CONTEXTS,
    Records,
    RecordWriter,
    SelectionRow,
    Targets,
    load_records,
)
from analysis.summary import gain_bins, render_table, summarize, write_summary
from olmo_sparsity.errors import UserError

# recovery at k = 1, 2, 4, 8 in the true and the placebo far context: METHOD 2.3, first table
MEASURED = {
    "leave-one-out": ((0.43, 0.72, 0.95, 1.11), (0.09, 0.20, 0.31, 0.44)),
    "leave-one-in": ((0.56, 0.72, 0.93, 1.07), (0.28, 0.39, 0.51, 0.60)),
    "greedy": ((0.56, 0.87, 1.15, 1.33), (0.30, 0.48, 0.68, 0.90)),
    "random": ((0.06, 0.07, 0.11, 0.18), (0.00, 0.01, 0.04, 0.02)),
}


def made_up_targets(count: int, documents: int, rng: np.random.Generator) -> Targets:
    """Most targets gain nothing from the long context, a few gain nats; documents differ in how much."""
    document = rng.integers(documents, size=count)
    gain = rng.exponential(1.2, count) * (rng.random(count) < 0.3)
    gain = gain * np.exp(rng.normal(0, 0.3, documents)[document]) + rng.normal(0, 0.1, count)
    long = rng.gamma(2.0, 1.2, count)
    token, start = rng.integers(8000, size=count), np.zeros(count)
    position = rng.integers(128, 900, count)
    return Targets(np.arange(count), document, position, token, long, long + gain, document + 1, start)


def made_up_records(
    folder: Path,
    count: int = 400,
    documents: int = 60,
    tau_nats: float = 1.0,
    selectors: tuple = tuple(MEASURED),
) -> Records:
    """Records as the real writer leaves them, with the recoveries of `MEASURED` and noise about them."""
    rng = np.random.default_rng(0)
    sha: dict[str, Any] = {
        name: name[0] * 64 for name in ("checkpoint_sha256", "tokenizer_sha256", "corpus_manifest_sha256")
    }
    manifest = Manifest(
        checkpoint="runs/a", corpus="data/docs", training_seed=1, split="heldout", n_long=128, n_short=16,
        tau_nats=tau_nats, ks=[1, 2, 4, 8], selectors=list(selectors), seed=0, targets_asked=count,
        dtype="float32", device="cpu", commit="abc", **sha,
    )  # fmt: skip
    writer = RecordWriter(folder, manifest)
    targets = made_up_targets(count, documents, rng)
    writer.write_targets(targets)
    rows = []
    for i in targets.over(tau_nats):
        gain = targets.loss_short_nats[i] - targets.loss_long_nats[i]
        for selector in selectors:
            for context, recovery in zip(
                FAR_CONTEXTS, MEASURED.get(selector, MEASURED["greedy"]), strict=True
            ):
                loss = targets.loss_short_nats[i] - gain * (np.array(recovery) + rng.normal(0, 0.1))
                row = SelectionRow(int(i), selector, context, rng.permutation(112)[:8], np.zeros(8), loss)
                rows.append(row)
    writer.append(rows)
    writer.finish()
    return load_records(folder)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return made_up_records(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def summary(records: Records) -> dict:
    return summarize(records, 1000, 0)


def test_layout(summary: dict) -> None:
    assert list(summary) == [
        "targets", "targets_over_tau", "documents", "share_over_tau", "loss_short", "loss_long",
        "all_targets", "selectors", "gain_bins", "settings",
    ]  # fmt: skip
    bounds = ["value", "low", "high"]
    assert (
        list(summary["share_over_tau"]) == list(summary["loss_short"]) == list(summary["loss_long"]) == bounds
    )
    assert list(summary["all_targets"]) == ["loss_short", "loss_long", "gap_short_minus_long"]
    assert list(summary["selectors"]) == list(MEASURED)
    for per_k in summary["selectors"].values():
        assert list(per_k) == ["1", "2", "4", "8"]
        for values in per_k.values():
            assert list(values) == ["loss", "placebo_loss", "recovery", "placebo_recovery", "net_recovery"]
            for interval in values.values():
                assert list(interval) == bounds
                assert interval["low"] < interval["value"] < interval["high"]
    settings = summary["settings"]
    assert (settings["n_long"], settings["n_short"], settings["tau_nats"]) == (128, 16, 1.0)
    assert settings["checkpoint_sha256"] == "c" * 64 and settings["commit"] == "abc" and settings["complete"]
    assert (settings["resamples"], settings["bootstrap_seed"]) == (1000, 0)


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
    for selector in MEASURED:
        for column, k in enumerate(["1", "2", "4", "8"]):
            found = summary["selectors"][selector][k]
            for prefix, context in (("", "true"), ("placebo_", "placebo")):
                losses = [records.loss_nats[selector][context][row, column] for row in range(len(over))]
                saved = math.fsum(s - loss for s, loss in zip(short, losses, strict=True))
                gained = math.fsum(s - each for s, each in zip(short, long, strict=True))
                assert found[f"{prefix}loss"]["value"] == pytest.approx(np.mean(losses))
                assert found[f"{prefix}recovery"]["value"] == pytest.approx(saved / gained)


def test_recovery_can_be_checked_by_hand(summary: dict) -> None:
    short, long = summary["loss_short"]["value"], summary["loss_long"]["value"]
    for per_k in summary["selectors"].values():
        for values in per_k.values():
            value = {name: interval["value"] for name, interval in values.items()}
            assert value["recovery"] == pytest.approx((short - value["loss"]) / (short - long))
            assert value["placebo_recovery"] == pytest.approx(
                (short - value["placebo_loss"]) / (short - long)
            )
            assert value["net_recovery"] == pytest.approx(value["recovery"] - value["placebo_recovery"])


def test_intervals_equal_a_bootstrap_of_whole_documents(records: Records, summary: dict) -> None:
    """Each resample copies the targets of the drawn documents; net recovery is computed from the copies."""
    targets = records.targets
    row_of = {int(index): row for row, index in enumerate(records.over)}
    documents = np.unique(targets.document)
    rng = np.random.default_rng(0)
    net, share = [], []
    for _ in range(1000):
        drawn = rng.integers(len(documents), size=len(documents))
        members = np.concatenate([np.flatnonzero(targets.document == documents[each]) for each in drawn])
        over = [int(each) for each in members if int(each) in row_of]
        rows = [row_of[each] for each in over]
        gain = targets.loss_short_nats[over] - targets.loss_long_nats[over]
        loss = {context: records.loss_nats["greedy"][context][rows, 2] for context in FAR_CONTEXTS}
        net.append((loss["placebo"] - loss["true"]).sum() / gain.sum())
        share.append(len(over) / len(members))
    for values, found in (
        (net, summary["selectors"]["greedy"]["4"]["net_recovery"]),
        (share, summary["share_over_tau"]),
    ):
        values.sort()
        assert (found["low"], found["high"]) == pytest.approx((values[24], values[975]))


def test_bins_split_the_targets(records: Records, summary: dict) -> None:
    bins = summary["gain_bins"]["bins"]
    assert summary["gain_bins"]["k"] == 4
    assert [(each["low"], each["high"]) for each in bins] == [(1, 2), (2, 3), (3, 5), (5, None)]
    assert sum(each["targets"] for each in bins) == summary["targets_over_tau"]
    gain = -records.targets.gap_long_minus_short_nats[records.over]
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


@pytest.mark.parametrize(
    ("tau", "lower"),
    [(1.0, [1, 2, 3, 5]), (0.5, [0.5, 1, 2, 3, 5]), (2.5, [2.5, 3, 5]), (5.0, [5]), (9.0, [9])],
)
def test_bins_follow_tau(tau: float, lower: list[float]) -> None:
    assert [low for low, _ in gain_bins(tau)] == lower
    assert [high for _, high in gain_bins(tau)] == [*lower[1:], math.inf]


def test_same_seed_same_summary(records: Records, summary: dict) -> None:
    assert summarize(records, 1000, 0) == summary
    other = summarize(records, 1000, 1)
    assert other["loss_short"]["value"] == summary["loss_short"]["value"]
    assert other["loss_short"]["low"] != summary["loss_short"]["low"]


def test_refuses_when_no_target_is_over_tau(tmp_path: Path) -> None:
    records = made_up_records(tmp_path, tau_nats=50.0)
    largest = -records.targets.gap_long_minus_short_nats.min()
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
    loss = {
        name: {c: values[:half] for c, values in each.items()} for name, each in records.loss_nats.items()
    }
    summary = summarize(replace(records, over=records.over[:half], loss_nats=loss), 100)
    assert summary["settings"]["targets_measured"] == half and not summary["settings"]["complete"]
    assert summary["share_over_tau"]["value"] == pytest.approx(len(records.over) / 400)
    short = records.targets.loss_short_nats[records.over[:half]]
    assert summary["loss_short"]["value"] == pytest.approx(short.mean())
    assert f"unfinished: {half} measured so far" in table_text(summary)


def table_text(summary: dict) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_table(summary))
    return console.export_text()


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
            assert f"{100 * values['net_recovery']['value']:.0f} [" in text
    for selector in MEASURED:
        assert selector in text


def test_few_documents_are_pointed_out(tmp_path: Path) -> None:
    summary = summarize(made_up_records(tmp_path, documents=3), 100)
    assert "only 3 documents" in table_text(summary)


def test_one_document_gives_no_intervals(tmp_path: Path) -> None:
    summary = summarize(made_up_records(tmp_path, documents=1), 100)
    assert summary["loss_short"]["low"] is None and summary["loss_short"]["value"] > 0
    assert "[–, –]" in table_text(summary)


def test_written_summary_is_plain_json(summary: dict, tmp_path: Path) -> None:
    write_summary(summary, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail) == summary
