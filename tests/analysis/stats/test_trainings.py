"""Several trainings measured on the same targets, against plain loops over trainings and documents."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from analysis.plots.figure2 import describe
from analysis.records.schema import FAR_CONTEXTS, Examples
from analysis.records.store import Records
from analysis.records.trainings import join_trainings
from analysis.stats.summary import summarize
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_records import BLOCK, made_up_training

SCRIPT = "scripts/figure2.py"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> list[Records]:
    folder = tmp_path_factory.mktemp("trainings")
    return [made_up_training(folder, number) for number in (1, 2, 3)]


def sums(records: Records) -> dict[int, np.ndarray]:
    """Of each document: targets, targets over tau, what greedy saves at k = 4 in both far contexts, and the gain."""
    row_of = {int(target): row for row, target in enumerate(records.over)}
    found: dict[int, np.ndarray] = {}
    for target, document in enumerate(records.targets.document.tolist()):
        values = [1.0, 0.0, 0.0, 0.0, 0.0]
        if target in row_of:
            short = records.targets.loss_short_nats[target]
            saved = [
                short - records.loss_nats["greedy"][context][row_of[target], 2] for context in FAR_CONTEXTS
            ]
            values = [1.0, 1.0, *saved, short - records.targets.loss_long_nats[target]]
        found[document] = found.get(document, np.zeros(5)) + values
    return found


def test_intervals_are_over_trainings_and_documents(trainings: list[Records]) -> None:
    """Without each document, and without each training, in turn."""
    summary = summarize(join_trainings(trainings), 1000, 0)
    of_trainings = np.array([list(dict(sorted(sums(each).items())).values()) for each in trainings])
    whole = of_trainings.sum(axis=(0, 1))

    def share(total: np.ndarray) -> float:
        return total[1] / total[0]

    def net(total: np.ndarray) -> float:
        return (total[2] - max(0.0, total[3])) / total[4]

    for found, statistic in (
        (summary["share_over_tau"], share),
        (summary["selectors"]["greedy"]["4"]["net_recovery"], net),
    ):
        parts = []
        for axis in (1, 0):
            own = of_trainings.sum(axis=axis)
            squares = np.array([(statistic(whole - one) - statistic(whole)) ** 2 for one in own])
            freedom = min(squares.sum() ** 2 / (squares**2).sum(), len(own) - 1)
            parts.append(((len(own) - 1) / len(own) * squares.sum(), t.ppf(0.975, freedom)))
        half = sum(variance * quantile for variance, quantile in parts) / np.sqrt(sum(v for v, _ in parts))
        assert found["value"] == pytest.approx(statistic(whole))
        assert found["high"] - found["value"] == pytest.approx(half)
    one = summarize(trainings[0], 1000, 0)["share_over_tau"]
    assert summary["share_over_tau"]["high"] - summary["share_over_tau"]["low"] > one["high"] - one["low"]


def test_each_training_stands_beside_all_of_them(trainings: list[Records]) -> None:
    summary = summarize(join_trainings(trainings), 1000, 0)
    assert summary["targets"] == 1200 and summary["documents"] == len(
        np.unique(trainings[0].targets.document)
    )
    assert [each["training_seed"] for each in summary["trainings"]] == [1, 2, 3]
    assert sum(each["targets_over_tau"] for each in summary["trainings"]) == summary["targets_over_tau"]
    for records, found in zip(trainings, summary["trainings"], strict=True):
        assert found["selectors"] == summarize(records, 1000, 0)["selectors"]
    line = describe(summary)
    assert "3 trainings × 400 targets of" in line and "95 %, by training and document" in line
    assert "by training" in summary["settings"]["interval"]
    alone = summarize(join_trainings(trainings[:1]), 1000, 0)
    assert "trainings" not in alone and "training" not in describe(alone)


def test_texts_stay_with_their_targets(trainings: list[Records]) -> None:
    def with_texts(records: Records) -> Records:
        ids = records.targets.target_id[records.over][:5]
        texts = [f"{records.manifest.training_seed}:{each}" for each in ids]
        return replace(
            records, examples=Examples(ids, [[t] for t in texts], texts, [[t] for t in texts], texts)
        )

    joined = join_trainings([with_texts(each) for each in trainings])
    assert joined.examples is not None
    rows = {int(target): row for row, target in enumerate(joined.targets.target_id)}
    for target, text in zip(joined.examples.target_id.tolist(), joined.examples.target_piece, strict=True):
        seed, own = map(int, text.split(":"))
        assert rows[target] == own + 400 * (seed - 1) and target % BLOCK == own % BLOCK
    assert join_trainings([with_texts(trainings[0]), trainings[1]]).examples is None


def test_what_is_no_other_training_is_refused(trainings: list[Records]) -> None:
    first, second = trainings[:2]

    def refused(other: Records, message: str) -> None:
        with pytest.raises(UserError, match=message):
            join_trainings([first, other])

    refused(first, "are of the same weights")
    refused(
        replace(second, manifest=replace(second.manifest, n_short=32)), "different settings: n_short 16 -> 32"
    )
    crossed = replace(second.manifest, evaluation_checkpoint_sha256="e" * 64)
    refused(replace(second, manifest=crossed), "is cross-fitted")
    moved = replace(second.targets, position=second.targets.position + 1)
    refused(replace(second, targets=moved), "hold different targets")


def test_the_command_draws_all_trainings_together(trainings: list[Records], tmp_path, run_here) -> None:
    folders = [each.folder for each in trainings]
    done = run_here(SCRIPT, *folders, "--out", tmp_path / "figures", "--format", "png")
    assert done.returncode == 0, done.stderr
    assert "3 trainings together, each on the same 400 targets" in done.stdout
    assert "each training by itself (leave-one-out, k = 4)" in done.stdout
    assert (tmp_path / "figures" / "figure2.png").stat().st_size > 10_000
    twice = run_here(SCRIPT, folders[0], folders[0], "--out", tmp_path / "figures")
    assert twice.returncode == 1 and "are of the same weights; give each training once" in twice.stderr
