"""Two checkpoints on the same targets, against plain loops over resampled documents."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import spearmanr

from analysis.records.results import COMPARISON
from analysis.records.schema import FAR_CONTEXTS
from analysis.records.store import Records
from analysis.stats.bootstrap import ClusterBootstrap, ratio_of_sums
from analysis.stats.compare import compare
from analysis.stats.summary import summarize
from analysis.tables.comparison import render_comparison
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_records import MEASURED, made_up_manifest, made_up_targets, write_records
from tests.support.refusals import refused

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare.py"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, Records]:
    """The same 400 targets under two checkpoints: the second one gains a bit less, and has other selectors and k."""
    rng = np.random.default_rng(3)
    targets = made_up_targets(400, 60, np.random.default_rng(0))
    first = write_records(tmp_path_factory.mktemp("first"), made_up_manifest(400), targets, rng)
    gain = 0.8 * targets.selecting_gain_nats + rng.normal(0, 0.5, 400)
    weaker = replace(targets, loss_short_nats=targets.loss_long_nats + gain, selecting_gain_nats=gain)
    manifest = made_up_manifest(
        400, checkpoint="runs/b", checkpoint_sha256="d" * 64, training_seed=2, ks=[2, 4],
        selectors=["random", "greedy", "leave-one-out", "gradient"],
    )  # fmt: skip
    return first, write_records(tmp_path_factory.mktemp("second"), manifest, weaker, rng)


@pytest.fixture(scope="module")
def comparison(pair: tuple[Records, Records]) -> dict:
    return compare(*pair, 1000, 0)


def test_each_side_is_its_summary(pair: tuple[Records, Records], comparison: dict) -> None:
    """Not only the values: the same seed draws the same documents, so the intervals are equal as well."""
    for side, records in zip(("first", "second"), pair, strict=True):
        summary = summarize(records, 1000, 0)
        assert comparison["share_over_tau"][side] == pytest.approx(summary["share_over_tau"])
        gap = summary["all_targets"]["gap_short_minus_long"]
        assert comparison["gap_short_minus_long"][side] == pytest.approx(gap)
        assert comparison[side]["targets_over_tau"] == summary["targets_over_tau"]
        for selector, per_k in comparison["selectors"].items():
            for k, each in per_k.items():
                for name, found in each.items():
                    assert found[side] == pytest.approx(summary["selectors"][selector][k][name])


def net(records: Records, rows: list[int], column: int) -> float:
    """Net recovery of greedy over some rows of ``over``, one by one."""
    saved = gained = 0.0
    for row in rows:
        target = records.over[row]
        true, placebo = (records.loss_nats["greedy"][context][row, column] for context in FAR_CONTEXTS)
        saved += placebo - true
        gained += records.targets.loss_short_nats[target] - records.targets.loss_long_nats[target]
    return saved / gained


def test_differences_are_paired(pair: tuple[Records, Records], comparison: dict) -> None:
    """Both checkpoints see the same drawn documents; on common targets, the same targets as well."""
    row_of = [{int(target): row for row, target in enumerate(records.over)} for records in pair]
    common = row_of[0].keys() & row_of[1].keys()
    assert comparison["targets_over_tau_in_both"] == len(common) < min(map(len, row_of))
    document = pair[0].targets.document
    members = {d: np.flatnonzero(document == d).tolist() for d in np.unique(document)}
    documents = list(members)
    rng = np.random.default_rng(0)
    shares, own, both = [], [], []
    for _ in range(1000):
        drawn = [
            i for each in rng.integers(len(documents), size=len(documents)) for i in members[documents[each]]
        ]
        rows = [[of[i] for i in drawn if i in of] for of in row_of]
        shares.append((len(rows[0]) - len(rows[1])) / len(drawn))
        own.append(net(pair[0], rows[0], 2) - net(pair[1], rows[1], 1))  # k = 4 of each
        rows = [[of[i] for i in drawn if i in common] for of in row_of]
        both.append(net(pair[0], rows[0], 2) - net(pair[1], rows[1], 1))
    for slow, found in (
        (shares, comparison["share_over_tau"]),
        (own, comparison["selectors"]["greedy"]["4"]["net_recovery"]),
        (both, comparison["selectors_on_common_targets"]["greedy"]["4"]["net_recovery"]),
    ):
        slow.sort()
        difference = found["difference"]
        assert difference["value"] == pytest.approx(found["first"]["value"] - found["second"]["value"])
        assert (difference["low"], difference["high"]) == pytest.approx((slow[24], slow[975]))


def test_overlap_counts_the_tokens_that_both_chose(pair: tuple[Records, Records]) -> None:
    """Target by target, over those over tau in both; the placebo only where both had the same one."""
    targets = pair[1].targets
    moved = replace(targets, placebo_start=targets.placebo_start + (targets.target_id % 3 == 0))
    second = replace(pair[1], targets=moved)
    found = compare(pair[0], second, 1000, 0)["overlap"]
    assert list(found) == ["leave-one-out", "greedy", "random"]
    rows = [{int(target): row for row, target in enumerate(records.over)} for records in (pair[0], second)]
    document = pair[0].targets.document
    for context, wanted in (("true", 0), ("placebo", 1)):
        shares: dict[int, list[float]] = {}
        for target in sorted(rows[0].keys() & rows[1].keys()):
            if wanted and moved.placebo_start[target] != pair[0].targets.placebo_start[target]:
                continue
            first, other = (
                set(each.selected["greedy"][context][row[target], :4].tolist())
                for each, row in zip((pair[0], second), rows, strict=True)
            )
            shares.setdefault(document[target], []).append(len(first & other) / 4)
        every = [share for own in shares.values() for share in own]
        overlap = found["greedy"]["4"][context]
        assert overlap["value"] == pytest.approx(np.mean(every))
        rng, means = np.random.default_rng(0), []
        for _ in range(1000):
            documents = np.unique(document)
            drawn = documents[rng.integers(len(documents), size=len(documents))]
            means.append(np.mean([share for each in drawn for share in shares.get(each, [])]))
        means.sort()
        assert (overlap["low"], overlap["high"]) == pytest.approx((means[24], means[975]))


def test_chance_is_what_random_choices_share(pair: tuple[Records, Records]) -> None:
    """The made-up choices are random permutations of the 112 far tokens."""
    found = compare(*pair, 1000, 0)["overlap"]["random"]
    generator = np.random.default_rng(1)
    drawn = [[set(generator.permutation(112)[:4].tolist()) for _ in "AB"] for _ in range(5000)]
    simulated = np.mean([len(one & two) / 4 for one, two in drawn])
    assert found["4"]["chance"] == 4 / 112 == pytest.approx(simulated, abs=0.005)
    assert found["4"]["true"]["low"] <= found["4"]["chance"] <= found["4"]["true"]["high"]


def with_subset_losses(records: Records, losses: np.ndarray) -> Records:
    """The same with made-up losses on subsets, by target."""
    each = {context: losses[records.over] + number for number, context in enumerate(FAR_CONTEXTS)}
    further = {"subset_loss_nats": dict.fromkeys(records.manifest.selectors, each)}
    options = {"subsets": losses.shape[1], "keep_rate": 0.5}
    return replace(records, further=further, manifest=replace(records.manifest, options=options))


def test_losses_on_subsets_agree_as_a_plain_loop_says(
    pair: tuple[Records, Records], comparison: dict
) -> None:
    assert comparison["lds_ceiling"] is None
    rng = np.random.default_rng(5)
    losses = rng.gamma(2, 1, (400, 12))
    other = losses + rng.normal(size=(400, 12))
    found = compare(with_subset_losses(pair[0], losses), with_subset_losses(pair[1], other), 200)
    common = sorted(set(pair[0].over) & set(pair[1].over))
    expected = np.mean([spearmanr(losses[i], other[i]).statistic for i in common])
    for context in FAR_CONTEXTS:
        assert found["lds_ceiling"][context]["value"] == pytest.approx(expected)


def test_a_checkpoint_does_not_differ_from_itself(pair: tuple[Records, Records]) -> None:
    same = compare(pair[0], pair[0], 200)
    assert list(same["selectors"]) == [*MEASURED, "best"]
    for per_k in same["selectors"].values():
        for each in per_k.values():
            assert all(found["difference"] == {"value": 0, "low": 0, "high": 0} for found in each.values())
    assert same["selectors"] == same["selectors_on_common_targets"]
    overlaps = [values for per_k in same["overlap"].values() for values in per_k.values()]
    assert {each[context]["value"] for each in overlaps for context in FAR_CONTEXTS} == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "validation"}, "split heldout against validation"),
        ({"n_short": 8, "seed": 4}, "n_short 16 against 8, seed 0 against 4"),
        ({"tau_nats": 2.0}, "tau_nats 1.0 against 2.0"),
        ({"options": {"targets_per_block": 4}}, "targets_per_block 1 against 4"),
        ({"corpus_manifest_sha256": "f" * 64, "corpus": "data/books"}, r"different corpora \(data/docs, data/books\)"),
        ({"tokenizer_sha256": "f" * 64}, "different tokenizers"),
        ({"ks": [3]}, "no selector and k in common"),
        ({"selectors": ["attention"]}, "no selector and k in common"),
    ],
)  # fmt: skip
def test_refuses_other_settings(pair: tuple[Records, Records], changes: dict, message: str) -> None:
    second = replace(pair[1], manifest=replace(pair[1].manifest, **changes))
    if "selectors" in changes:
        second = replace(second, loss_nats={"attention": second.loss_nats["greedy"]})
    with refused(message):
        compare(pair[0], second, 100)


def test_refuses_other_targets(pair: tuple[Records, Records]) -> None:
    targets = pair[1].targets
    moved = targets.position.copy()
    moved[5] += 1
    with pytest.raises(UserError, match="hold different targets .* position differs.*--targets"):
        compare(pair[0], replace(pair[1], targets=replace(targets, position=moved)))


def test_refuses_records_without_gain(pair: tuple[Records, Records]) -> None:
    nothing = replace(pair[1], over=pair[1].over[:0])
    with pytest.raises(UserError, match="no target above tau"):
        compare(pair[0], nothing)


def test_script_prints_and_writes(
    pair: tuple[Records, Records], comparison: dict, tmp_path: Path, run_here: Any
) -> None:
    out = tmp_path / "compare.json"
    command = [SCRIPT, *(each.folder for each in pair), "--out"]
    done = run_here(*command, out, "--resamples", 1000)
    assert done.returncode == 0 and COMPARISON.load(out) == json.loads(
        json.dumps(COMPARISON.stamped(comparison))
    )
    interval = comparison["selectors"]["greedy"]["4"]["net_recovery"]["difference"]
    assert f"{100 * interval['value']:.0f} [" in done.stdout and str(out) in done.stdout
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    assert run_here(*command, tmp_path / "folder", "--resamples", 1000).returncode == 0
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"kept", "compare.json"}
    assert json.loads((tmp_path / "folder" / "compare.json").read_text()) == json.loads(out.read_text())
    refused = run_here(*command, out, "--resamples", 10)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "1000 or more" in refused.stderr


def test_table_has_every_difference_in_80_columns(comparison: dict) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    short = {side: {**comparison[side], "records": f"runs/{side}"} for side in ("first", "second")}
    console.print(render_comparison({**comparison, **short}))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    gap = comparison["gap_short_minus_long"]["difference"]
    assert f"{gap['value']:.2f} [{gap['low']:.2f}, {gap['high']:.2f}]" in text and "mean gain [nats]" in text
    assert "A: runs/first" in text and "B: runs/second" in text
    for per_k in comparison["selectors"].values():
        for each in per_k.values():
            for found in (one for name in each for one in each[name].values()):
                value, low = (round(100 * found[bound]) for bound in ("value", "low"))
                assert f"{value} [{low}, " in text
    overlap = comparison["overlap"]["greedy"]["4"]["true"]
    assert "same tokens chosen [%]" in text and f"{100 * overlap['value']:.0f} [" in text and "3.6" in text


def test_groups_are_the_unit_where_records_have_them(pair: tuple[Records, Records]) -> None:
    targets = [each.targets for each in pair]
    own, others = (
        np.array([f"book {n % 7}" for n in each])
        for each in (targets[0].document, targets[0].placebo_document)
    )
    both = [
        replace(each, targets=replace(each.targets, document_group=own, placebo_group=others))
        for each in pair
    ]
    found = compare(*both, 1000)
    columns = np.stack([targets[0].gain_nats - targets[1].gain_nats, np.ones(400)], axis=1)
    bootstrap = ClusterBootstrap(columns, targets[0].document, groups=own, resamples=1000)
    expected = bootstrap.interval(ratio_of_sums(0, 1)).as_dict()
    assert found["gap_short_minus_long"]["difference"] == pytest.approx(expected)
    assert found["groups"] == 7 and found["settings"]["interval"].endswith("group, then document, paired")


def test_only_what_both_have_is_compared(comparison: dict) -> None:
    """`best` of other selectors is another thing."""
    assert list(comparison["selectors"]) == ["leave-one-out", "greedy", "random"]
