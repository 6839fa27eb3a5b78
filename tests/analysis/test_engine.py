"""The measurement end to end on a small model: against plain passes, interrupted, in shards, and what is refused."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from analysis import engine, measuring, runner
from analysis.api import load
from analysis.engine import PLACEBOS
from analysis.kept import GivenBack
from analysis.measuring import measure
from analysis.model.losses import Scorer
from analysis.work import Work
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.files import folder_lock
from olmo_sparsity.util.progress import duration
from tests.support import small_measurement, tiny
from tests.support.refusals import refused
from tests.support.small_measurement import (
    F,
    M,
    N,
    assert_losses_are_plain,
    assert_same,
    model,
    small,
    small_tokens,
)


@pytest.fixture(scope="module", params=[1, 3])
def whole(request):
    """The result with all placebos, of single targets and of blocks."""
    return small(placebos=PLACEBOS, targets_per_block=request.param)


def again(whole, **changes):
    per_block = whole.settings.contexts.targets_per_block
    return small(**{"placebos": PLACEBOS, "targets_per_block": per_block, **changes})


@pytest.fixture
def stops_after(monkeypatch):
    """Interrupt the engine after so many batches."""
    original = engine.Engine.targets

    def stop(batches):
        done = []

        def targets(self, places):
            if len(done) == batches:
                raise KeyboardInterrupt
            done.append(1)
            return original(self, places)

        monkeypatch.setattr(engine.Engine, "targets", targets)

    return stop


def test_losses_are_those_of_one_plain_pass_each(whole):
    has = whole.targets["same_group_text"].to_numpy()[whole.over] >= 0
    assert 3 < has.sum() < len(has)
    rows = [*np.flatnonzero(has)[:3], *np.flatnonzero(~has)[:2]]
    assert_losses_are_plain(whole, model()[0], small_tokens(), rows)


def test_targets_over_tau_are_those_whose_rounded_gain_is(whole):
    targets = whole.targets
    assert len(targets) == 150 and 10 < len(whole.over) < 100
    assert np.array_equal(targets["over_tau"], whole.gain_nats > 1.5)
    losses = targets[["loss_long_nats", "loss_short_nats"]].to_numpy()
    assert np.array_equal(losses, losses.astype(np.float32))


def test_what_was_measured_without_further_placebos_is_the_same(whole):
    bare = again(whole, placebos=("placebo",))
    assert bare.far_contexts == ["true", "placebo"]
    assert not [name for name in bare.targets if name.startswith("same_group")]
    for selector in bare.selectors:
        for far_context in bare.far_contexts:
            for name in ("loss_nats", "selected", "influence"):
                one, other = (getattr(result, name)(selector, far_context) for result in (bare, whole))
                assert np.array_equal(one, other)


def test_the_texts_of_blocks_are_their_tokens(whole):
    size, tokens = whole.settings.contexts.targets_per_block, small_tokens()
    over = whole.targets.iloc[whole.over]
    assert whole.texts["block"].tolist() == sorted(set(over["target_id"] // size))
    for row in whole.texts.itertuples():
        target = over[over["target_id"] // size == row.block].iloc[0]
        text = tokens[row.text][row.first_position - N : row.first_position + size + 12]
        assert "".join(row.pieces) == model()[1].decode(text.tolist(), skip_special_tokens=False)
        assert row.pieces[N + target.target_id % size].strip() == f"w{target.token}"
        far = tokens[target.placebo_text][target.placebo_start : target.placebo_start + F]
        assert [piece.strip() for piece in row.placebo_pieces] == [f"w{token}" for token in far]


def test_scores_are_those_that_choices_are_made_from():
    result = small(scores=True, selectors=("leave-one-out", "greedy"))
    assert set(result.scores["selector"]) == {"leave-one-out"}
    keys = ["target_id", "selector", "far_context"]
    both = result.scores.merge(result.choices, on=keys, suffixes=("_of_all", ""))
    assert len(both) == len(result.scores) == 2 * len(result.over)
    for row in both.itertuples():
        assert len(row.influence_of_all) == F
        assert row.influence_of_all[row.selected].tolist() == row.influence.tolist()


def test_an_interrupted_measurement_goes_on_where_it_stopped(whole, tmp_path, stops_after):
    with pytest.raises(KeyboardInterrupt):
        stops_after(2)
        again(whole, out=tmp_path)
    kept = [load(path.parent) for path in (tmp_path / "parts").glob("*/result.json")]
    size = engine.targets_per_batch(whole.settings.contexts.targets_per_block)
    assert sum(len(part.targets) for part in kept) == 2 * size
    stops_after(1)  # nothing but the third batch is left
    result = again(whole, out=tmp_path)
    assert result.settings == whole.settings and result.settings.complete
    assert_same(result, whole)
    assert_same(load(tmp_path), whole)
    assert not (tmp_path / "parts").exists()


def test_other_settings_are_refused_before_all_is_measured(tmp_path, stops_after):
    with pytest.raises(KeyboardInterrupt):
        stops_after(1)
        small(out=tmp_path)
    with refused("begun with other settings, and is not finished: tau_nats 1.5 -> 0.5"):
        small(out=tmp_path, tau_nats=0.5)


def test_a_complete_measurement_is_left_alone_and_other_settings_are_not_mixed_in(tmp_path, stops_after):
    small(out=tmp_path)
    stops_after(0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    small(out=tmp_path)
    with refused("was measured with other settings: n_short 5 -> 6"):
        small(out=tmp_path, n_short=6)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}


def test_shards_together_are_one_run_to_the_last_bit(whole, tmp_path, stops_after):
    for number in (3, 1):
        part = again(whole, out=tmp_path, shard=f"{number}/3")
        assert not part.settings.complete
    assert not (tmp_path / "result.json").exists()
    assert_same(again(whole, out=tmp_path, shard="2/3"), whole)
    stops_after(0)
    merged = again(whole, out=tmp_path)
    assert merged.settings == whole.settings
    for result in (merged, load(tmp_path)):
        assert_same(result, whole)
    with refused("shard '4/4': give i/n with i from 1 to n, and n at most the 3 batches"):
        again(whole, out=tmp_path / "other", shard="4/4")


def test_scores_are_a_setting_so_that_no_result_has_them_in_part(tmp_path):
    small(out=tmp_path, shard="1/2")
    with refused("scores false -> true"):
        small(out=tmp_path, shard="2/2", scores=True)


def test_one_process_at_a_time_writes(tmp_path):
    for part in (None, "1-of-2"):  # a run of all batches, one of a share
        with folder_lock(tmp_path / "parts", part=part), refused("parts is in use by another process"):
            small(out=tmp_path)
    small(out=tmp_path)
    names = {"choices.parquet", "result.json", "targets.parquet", "texts.parquet"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    "changes",
    [{}, {"targets_per_block": 3}, {"selectors": ("greedy", "random")}, {"selectors": ("nearest",)}],
    ids=str,
)
def test_the_time_left_is_right_within_a_factor_of_two(monkeypatch, changes):
    """By a clock of tokens that the model reads, from the losses of the first batch on. It was once shown when the
    first block was done, and targets that are not over tau counted as much as others, which take a hundred times as
    long."""
    read, shown = [0], []

    class Counting(Scorer):
        def _logits(self, passes, rows, prefixes, queries):
            read[0] += passes.length(rows) * len(rows) - int(passes.shared[rows].min()) * len(rows)
            return super()._logits(passes, rows, prefixes, queries)

    def advance(targets):
        shown.append((read[0], targets))

    monkeypatch.setattr(measuring, "Scorer", Counting)
    monkeypatch.setattr(runner, "show_progress", lambda *_, **how: nullcontext(advance))
    result = small(tokens_per_batch=256, **changes)
    time, targets = np.array(shown).T
    done = np.cumsum(targets) / len(result.targets)
    assert done[-1] == pytest.approx(1) and (targets > 0).all()
    assert np.diff(done).max() < 0.1
    estimates = time / done / read[0]
    assert estimates.max() < 2 and estimates.min() > 0.5


def test_the_time_is_said_in_words_once_some_of_it_has_passed(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr("analysis.work.time.monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    advanced = []
    work = Work(320, advanced.append)
    work.begin_batch(64, 100, 5000)
    work.read(50)
    work.begin_steps([1000, 1000])
    for _ in range(4):
        clock[0] += 6.0
        work.read(100)
    assert sum(advanced) == pytest.approx(64 * 500 / 2100)
    # after 12 s 300 of 2,100 tokens of a batch of 64 were read
    assert caplog.messages == ["about 7 min for 320 targets"] and duration(12 * 7 * 320 / 64) == "7 min"


@pytest.mark.parametrize(("owner", "what"), [(engine, "long_and_short_losses"), (GivenBack, "losses")])
def test_losses_that_are_not_finite_are_refused(tmp_path, monkeypatch, owner, what):
    original = getattr(owner, what)

    def broken(*args):
        losses = original(*args)
        (losses[0] if isinstance(losses, tuple) else losses).flat[0] = np.nan
        return losses

    monkeypatch.setattr(owner, what, broken)
    with refused("a loss of the model is not finite"):
        small(out=tmp_path)
    monkeypatch.undo()
    assert small(out=tmp_path).settings.complete


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_long": M}, "N = 5 must be larger than M = 5"),
        ({"ks": (1, 36)}, "at most the 35 far tokens"),
    ],
)
def test_bad_settings_are_refused_in_one_line(tmp_path, changes, message):
    with refused(message):
        small(out=tmp_path, **changes)
    assert not list(tmp_path.glob("*.json")) and not (tmp_path / "parts").exists()


def test_a_run_on_its_corpus_equals_a_plain_computation(tmp_path):
    """Of a model that learned a little to copy."""
    learns = ("--max_duration=150", "--optimizer.learning_rate=1e-2", "--save_interval=100")
    train(tiny.train_config(tmp_path, *learns))
    settings = {**small_measurement.SMALL, "targets": 60}
    result = measure(str(tmp_path / "run"), str(tmp_path / "corpus"), **settings)
    inner, _ = load_model(tmp_path / "run")
    tokens = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    documents = [tokens.document(number) for number in range(len(tokens.document_bounds))]
    assert_losses_are_plain(result, inner, documents, range(min(5, len(result.over))))


def test_the_text_that_is_named_next_has_an_x_ray():
    """Text 0, which was always named, may have no target over tau."""
    result = small()
    targets = result.targets[result.targets["text"] > result.targets["text"].min()].reset_index(drop=True)
    choices = result.choices[result.choices["target_id"].isin(targets["target_id"])]
    later = replace(result, targets=targets, choices=choices)
    named = int(str(later).rpartition(".xray(")[2].rstrip(")"))
    assert named in targets["text"].to_numpy() and later.xray(named)
