"""Several trainings measured on the same targets, against plain loops over drawn trainings and documents."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from analysis.plots.figure2 import describe
from analysis.records.schema import FAR_CONTEXTS, Examples
from analysis.records.store import Records
from analysis.records.trainings import join_trainings
from analysis.stats.bootstrap import draw_seeds
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
    summary = summarize(join_trainings(trainings), 1000, 0)
    of_trainings = [sums(each) for each in trainings]
    documents = sorted(of_trainings[0])
    seeds = draw_seeds(3, 1000, 0, 0)
    assert len({tuple(sorted(row)) for row in seeds.tolist()}) == 10  # any three of three, with repetition
    rng = np.random.default_rng(0)
    shares, nets = [], []
    for drawn in seeds:
        chosen = Counter(rng.integers(len(documents), size=len(documents)).tolist())
        total = sum(
            times * of_trainings[number][documents[place]]
            for number in drawn
            for place, times in chosen.items()
        )
        shares.append(total[1] / total[0])
        nets.append(total[2] / total[4] - max(0.0, total[3] / total[4]))
    whole = np.sum([each for of_training in of_trainings for each in of_training.values()], axis=0)
    for found, value, slow in (
        (summary["share_over_tau"], whole[1] / whole[0], sorted(shares)),
        (
            summary["selectors"]["greedy"]["4"]["net_recovery"],
            (whole[2] - max(0.0, whole[3])) / whole[4],
            sorted(nets),
        ),
    ):
        assert (found["value"], found["low"], found["high"]) == pytest.approx((value, slow[24], slow[975]))
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
    assert "3 trainings × 400 targets of" in line and "bootstrap by training and document" in line
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
