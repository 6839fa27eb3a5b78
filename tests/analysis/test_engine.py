"""The measurement end to end on a small model: against plain passes, interrupted, in shards, and what is refused."""

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from analysis import engine, measuring, runner, saved
from analysis.api import Result, load
from analysis.kept import KeptAs
from analysis.measuring import measure
from analysis.model.losses import Scorer
from analysis.options import PLACEBOS
from analysis.work import Work
from olmo_sparsity.checkpoint import load_model
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.files import folder_lock
from olmo_sparsity.util.progress import duration
from tests.support import small_measurement, tiny
from tests.support.plain import plain_loss
from tests.support.processes import SECONDS
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.small_measurement import (
    KS,
    F,
    M,
    N,
    assert_losses_are_plain,
    assert_same,
    model,
    small,
    small_tokens,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("small_batches")

FEW = {"targets": 20, "targets_per_block": 4}
"""Targets of five rounds, where it does not matter how many there are."""
ALL = {"targets": 42, "tau_nats": 2.0, "ks": (1, 4)}
"""Of three batches with all placebos, which are measured again and again: two sevenths of the targets are over tau."""


def placebos_of(size):
    """All placebos that targets of such blocks may have."""
    return PLACEBOS if size > 1 else PLACEBOS[:-1]


@pytest.fixture(scope="module", params=[1, 3])
def whole(request, small_batches):
    """The result with all placebos, of single targets and of blocks."""
    return small(**ALL, placebos=placebos_of(request.param), targets_per_block=request.param)


def kept_in(out):
    """Ids of the targets that an unfinished measurement has kept, ascending."""
    parts = [load(path.parent) for path in (out / "parts").glob("*/result.json")]
    return sorted(target for part in parts for target in part.targets["target_id"])


def shown_by_the_bar(monkeypatch):
    """The bar of the last measurement: how many targets it has shown, and of how many."""
    bar = SimpleNamespace()

    def show_progress(description, total, unit, *, done, **_):
        bar.total, bar.done = total, done

        def advance(n, note):
            bar.done += n

        return nullcontext(advance)

    monkeypatch.setattr(runner, "show_progress", show_progress)
    return bar


def again(whole, **changes):
    per_block = whole.settings.contexts.targets_per_block
    return small(**{**ALL, "placebos": placebos_of(per_block), "targets_per_block": per_block, **changes})


def interrupted(*_):
    """By Ctrl-C; it stands for what a kill cuts short, too."""
    raise KeyboardInterrupt


@pytest.fixture
def stops_after(monkeypatch):
    """Interrupt the engine after so many rounds; gives the targets that it measured before, round by round."""
    original = engine.Engine.choose

    def stop(rounds, how=interrupted):
        measured = []

        def choose(self, targets):
            if len(measured) == rounds:
                how()
            frames = original(self, targets)
            measured.append(targets)
            return frames

        monkeypatch.setattr(engine.Engine, "choose", choose)
        return measured

    return stop


def test_losses_are_those_of_one_plain_pass_each(whole):
    has = whole.targets["same_group_text"].to_numpy()[whole.over] >= 0
    assert 3 < has.sum() < len(has)
    rows = [*np.flatnonzero(has)[:3], *np.flatnonzero(~has)[:2]]
    assert_losses_are_plain(whole, model()[0], small_tokens(), rows)


def test_targets_over_tau_are_those_whose_rounded_gain_is(whole):
    targets = whole.targets
    assert len(targets) == 42 and 10 < len(whole.over) < 28
    assert np.array_equal(targets["over_tau"], whole.gain_nats > 2.0)
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


def test_tokens_of_another_target_are_those_of_the_next_one_in_the_block(tmp_path):
    """In every way of keeping, with losses by plain passes; a target alone in its block has none."""
    ways = ("text", "text:2/before:1", "cache:2")
    settings = {
        "targets_per_block": 3,
        "targets": 30,
        "keep_as": ways,
        "selectors": ("leave-one-out", "snapkv"),
    }
    result = small(placebos=("other-target",), out=tmp_path, **settings)
    target_id = result.targets["target_id"].to_numpy()[result.over]
    inner, tokens = model()[0], small_tokens()
    bare = small(placebos=(), **settings)
    lone = 0
    for selector in result.selectors:
        for way in ({}, {"unit": "before:1", "sinks": 2}, {"level": "cache", "sinks": 2}):
            own = result.selected(selector, **way)
            assert own.tolist() == bare.selected(selector, **way).tolist()
            other = result.selected(selector, "other-target", **way)
            for row, target in enumerate(target_id):
                of_block = [place for place in range(len(target_id)) if target_id[place] // 3 == target // 3]
                following = of_block[(of_block.index(row) + 1) % len(of_block)]
                if len(of_block) == 1:
                    lone += 1
                    assert set(other[row]) == {-1}
                    continue
                assert other[row].tolist() == own[following].tolist()
    assert lone
    losses = result.loss_nats("leave-one-out", "other-target", unit="before:1", sinks=2)
    other = result.selected("leave-one-out", "other-target", unit="before:1", sinks=2)
    assert load(tmp_path).loss_nats("snapkv", "other-target").shape == losses.shape
    for row in np.flatnonzero(np.isfinite(losses).all(axis=1))[:4]:
        target = result.targets.iloc[result.over[row]]
        text = small_measurement.window(result, target, tokens, "true")
        kept = {0, 1, *other[row], *(other[row] - 1)}
        expected = plain_loss(inner, text, [*sorted(kept), *range(F, len(text))], target.token)
        assert losses[row, -1] == pytest.approx(expected, abs=1e-4)


def test_a_measurement_says_what_was_read_and_kept_and_what_the_sinks_give(tmp_path):
    """Of every way and far context, saved and loaded; L_short where there are no sinks."""
    ways = ("text", "text:2/before:1", "cache:2", "cache:2/read:1")
    result = small(targets=24, targets_per_block=3, keep_as=ways, selectors=("leave-one-out",), out=tmp_path)
    inner, tokens = model()[0], small_tokens()
    over = result.targets.iloc[result.over]
    for one in (result, load(tmp_path)):
        for far_context in ("true", "placebo"):
            base = one.of_choices("loss_base_nats", "leave-one-out", far_context)
            assert base.tolist() == over["loss_short_nats"].tolist()
            read, kept = (one.of_choices(f"tokens_{what}", "leave-one-out") for what in ("read", "kept"))
            assert read.tolist() == kept.tolist() == [list(KS)] * len(over)
            with_sinks = {"level": "cache", "sinks": 2}
            read, kept = (
                one.of_choices(f"tokens_{what}", "leave-one-out", **with_sinks) for what in ("read", "kept")
            )
            assert (read == F).all() and kept.tolist() == [[2 + k for k in KS]] * len(over)
            chosen = one.selected("leave-one-out", unit="before:1", sinks=2)
            windows = [
                [len({0, 1, *row[:k].tolist(), *(row[:k] - 1).tolist()}) for k in KS] for row in chosen
            ]
            as_text = {"unit": "before:1", "sinks": 2}
            partly = {"level": "cache", "unit": "read:1", "sinks": 2}
            for name, way in (("read", as_text), ("kept", as_text), ("read", partly)):
                assert one.of_choices(f"tokens_{name}", "leave-one-out", **way).tolist() == windows
            assert one.of_choices("tokens_kept", "leave-one-out", **partly).tolist() == kept.tolist()
            for row in range(3):
                text = small_measurement.window(result, over.iloc[row], tokens, far_context)
                expected = plain_loss(inner, text, [0, 1, *range(F, len(text))], over.iloc[row].token)
                for way in (as_text, with_sinks, partly):
                    of_way = one.of_choices("loss_base_nats", "leave-one-out", far_context, **way)
                    assert of_way[row] == pytest.approx(expected, abs=1e-4)


def test_ways_and_placebos_beside_it_change_no_number_of_a_way():
    few = {"targets": 24, "targets_per_block": 3}
    few["selectors"] = ("leave-one-out", "leave-one-in@random:20", "random")
    alone = small(keep_as=("text", "cache:2"), **few)
    ways = ("text", "cache:2", "text:2/ranked:2", "cache:2/read:3", "text/drawn:4")
    among = small(keep_as=ways, placebos=("placebo", "other-target"), **few)
    for selector in alone.selectors:
        for way in ({}, {"level": "cache", "sinks": 2}):
            for name in ("loss_nats", "selected", "influence"):
                one, other = (getattr(result, name)(selector, **way) for result in (alone, among))
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
    result = small(**FEW, scores=True, selectors=("leave-one-out", "greedy"))
    assert set(result.scores["selector"]) == {"leave-one-out"}
    keys = ["target_id", "selector", "far_context"]
    both = result.scores.merge(result.choices, on=keys, suffixes=("_of_all", ""))
    assert len(both) == len(result.scores) == 2 * len(result.over)
    for row in both.itertuples():
        assert len(row.influence_of_all) == F
        assert row.influence_of_all[row.selected].tolist() == row.influence.tolist()


@pytest.mark.parametrize(
    ("whole", "seconds_between_parts"),
    slow_but([(1, 0.0), (1, 1e9), (3, 0.0), (3, 1e9)], (1, 1e9)),
    indirect=["whole"],
)
def test_an_interrupted_measurement_goes_on_where_it_stopped(
    whole, tmp_path, stops_after, monkeypatch, seconds_between_parts
):
    """Ctrl-C in the middle of a batch loses the block that it came in, and nothing else, however parts are cut."""
    monkeypatch.setattr(saved, "SECONDS_BETWEEN_PARTS", seconds_between_parts)
    shown = shown_by_the_bar(monkeypatch)
    rounds = 1 if whole.settings.contexts.targets_per_block == 1 else 7
    first = stops_after(rounds)
    with pytest.raises(KeyboardInterrupt):
        again(whole, out=tmp_path)
    kept = kept_in(tmp_path)
    assert kept == pd.concat(first)["target_id"].tolist() and len(first) == rounds
    assert Result.of_parts(Result.load_parts(tmp_path)).targets["target_id"].tolist() == kept
    size = engine.targets_per_batch(whole.settings.contexts.targets_per_block)
    assert len(kept) % size > 0, "it stopped between two batches"
    assert (shown.done, shown.total) == (len(kept), len(whole.targets))
    rest = stops_after(1000)
    result = again(whole, out=tmp_path)
    assert kept + pd.concat(rest)["target_id"].tolist() == whole.targets["target_id"].tolist()
    assert shown.done == shown.total
    assert result.settings == whole.settings and result.settings.complete
    assert_same(result, whole)
    [there] = Result.load_parts(tmp_path)
    assert_same(there, whole)
    assert not (tmp_path / "parts").exists()


def exit_code_of_fork(action):
    """Of this process's child that does it and ends; a negative one is a signal's.

    A thread of this process, such as that of a progress bar, may hold a lock now, which the child would wait for.
    """
    process = os.fork()
    if not process:
        try:
            action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # without what pytest does at its end
    ended, status, deadline = 0, 0, time.monotonic() + SECONDS
    try:
        while not ended:
            assert time.monotonic() < deadline, "the child hangs"
            time.sleep(0.02)
            ended, status = os.waitpid(process, os.WNOHANG)
    finally:
        if not ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def test_what_a_kill_loses_is_one_block(tmp_path, stops_after, monkeypatch, one_thread):
    """Of a process that is killed in its sixth block, and has no time to do anything."""
    settings = {"targets": 24, "targets_per_block": 4}
    monkeypatch.setattr(saved, "SECONDS_BETWEEN_PARTS", 0.0)
    stops_after(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert exit_code_of_fork(lambda: small(out=tmp_path, **settings)) == -signal.SIGKILL
    monkeypatch.undo()
    assert kept_in(tmp_path) == list(range(5 * 4))
    assert_same(small(out=tmp_path, **settings), small(**settings))


@pytest.mark.slow
def test_what_a_kill_loses_are_no_losses_of_a_batch_that_was_done(tmp_path):
    """Targets that are not over tau take no time, and wait for no block: the next batch's losses may take minutes."""
    code = f"""
import os, signal
from analysis import engine, saved
from tests.support.small_measurement import small
saved.SECONDS_BETWEEN_PARTS = 1e9
original = engine.Engine.with_losses
batches = []
def losses(self, *of_batch):
    if len(batches) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    batches.append(1)
    return original(self, *of_batch)
engine.Engine.with_losses = losses
small(out={str(tmp_path)!r}, targets_per_block=16, targets=160)
"""
    command = [sys.executable, "-c", code]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert kept_in(tmp_path) == list(range(64))


@pytest.mark.parametrize("cut_short", ["analysis.saved.Parts.remove", "shutil.rmtree"])
def test_what_a_kill_left_beside_a_finished_result_is_removed_by_the_next_run(
    tmp_path, monkeypatch, cut_short
):
    """In the last milliseconds: the result is written, and its parts are not removed, or not all of them."""
    monkeypatch.setattr(cut_short, interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(out=tmp_path, **FEW)
    monkeypatch.undo()
    whole = load(tmp_path)
    frames = {path.name for path in tmp_path.iterdir() if path.suffix in (".json", ".parquet")}
    others = {".parts.tmp-notes", ".hf.tmp-here-1"}  # of somebody, and of another command
    for name in others:
        (tmp_path / name).mkdir()
    assert len([*tmp_path.iterdir()]) == len(frames | others) + 1
    assert_same(small(out=tmp_path, **FEW), whole)
    assert {path.name for path in tmp_path.iterdir()} == frames | others


def test_what_a_kill_left_of_a_save_is_removed_by_the_run_that_goes_on(tmp_path, stops_after):
    with pytest.raises(KeyboardInterrupt):
        stops_after(3)
        small(out=tmp_path, **FEW)
    for name in (
        ".parts.tmp-elsewhere-1",
        ".result.json.tmp-elsewhere-1",
        ".targets.parquet.tmp-elsewhere-1",
    ):
        (tmp_path / name).mkdir()
    stops_after(1000)
    small(out=tmp_path, **FEW)
    assert not [*tmp_path.glob(".*")]


def test_parts_of_another_tau_or_in_use_stay_where_a_result_is_complete(tmp_path, stops_after, monkeypatch):
    """A result with nothing over tau lends its losses to a run with a lower one, which may be at it."""
    small(out=tmp_path, tau_nats=50, **FEW)
    with pytest.raises(KeyboardInterrupt):
        stops_after(1)
        small(out=tmp_path, **FEW)
    kept = kept_in(tmp_path)
    small(out=tmp_path, tau_nats=50, **FEW)
    assert kept and kept_in(tmp_path) == kept
    stops_after(1000)
    monkeypatch.setattr("analysis.saved.Parts.remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(out=tmp_path, **FEW)
    with folder_lock(tmp_path / "parts", part="1-of-2"):
        small(out=tmp_path, **FEW)
        assert (tmp_path / "parts").is_dir()
    small(out=tmp_path, **FEW)
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(("file", "length"), [("result.json", 0), ("choices.parquet", 100)])
def test_of_a_damaged_part_its_targets_alone_are_measured_again(
    tmp_path, stops_after, monkeypatch, file, length
):
    monkeypatch.setattr(saved, "SECONDS_BETWEEN_PARTS", 0.0)
    stops_after(3)
    with pytest.raises(KeyboardInterrupt):
        small(out=tmp_path, **FEW)
    monkeypatch.undo()
    part = sorted((tmp_path / "parts").glob("targets-*"))[1]
    lost = load(part).targets["target_id"].tolist()
    kept = kept_in(tmp_path)
    (part / file).write_bytes((part / file).read_bytes()[:length])
    with refused(f"{part.name} is damaged; remove it, and the same call measures again what it held"):
        small(out=tmp_path, **FEW)
    shutil.rmtree(part)
    whole = small(**FEW)
    rest = stops_after(1000)
    assert_same(small(out=tmp_path, **FEW), whole)
    assert set(pd.concat(rest)["target_id"]) & set(kept) == set(lost)


def test_parts_without_their_settings_are_those_of_the_same_call_alone(tmp_path, stops_after):
    """Where the file that names the settings is damaged, it is removed, and no finished part."""
    with pytest.raises(KeyboardInterrupt):
        stops_after(3)
        small(out=tmp_path, **FEW)
    settings = tmp_path / "parts" / "settings.json"
    settings.write_text("")
    with refused("settings.json is damaged .*; remove this file, and the same call goes on"):
        small(out=tmp_path, **FEW)
    settings.unlink()
    with refused("was measured with other settings: tau_nats 1.5 -> 0.5"):
        small(out=tmp_path, tau_nats=0.5, **FEW)
    settings.unlink()
    kept = kept_in(tmp_path)
    rest = stops_after(1000)
    result = small(out=tmp_path, **FEW)
    assert sorted(kept + pd.concat(rest)["target_id"].tolist()) == result.targets["target_id"].tolist()


@pytest.mark.parametrize("whole", slow_but([1, 3], 3), indirect=True)
def test_shares_of_different_numbers_measure_nothing_twice_in_the_result(whole, tmp_path):
    """Jobs of shares 1/3 and 1/2, side by side, both measure the first batch."""
    one, other = tmp_path / "one", tmp_path / "other"
    again(whole, out=one, shard="1/3")
    again(whole, out=other, shard="1/2")
    for part in (other / "parts").glob("targets-*"):
        shutil.copytree(part, one / "parts" / part.name)
    assert_same(again(whole, out=one), whole)


def test_other_settings_are_refused_before_all_is_measured(tmp_path, stops_after):
    with pytest.raises(KeyboardInterrupt):
        stops_after(1)
        small(out=tmp_path, **FEW)
    with refused("begun with other settings, and is not finished: tau_nats 1.5 -> 0.5"):
        small(out=tmp_path, tau_nats=0.5, **FEW)


def test_a_complete_measurement_is_left_alone_and_other_settings_are_not_mixed_in(tmp_path, stops_after):
    small(out=tmp_path, **FEW)
    stops_after(0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    small(out=tmp_path, **FEW)
    with refused("was measured with other settings: n_short 5 -> 6"):
        small(out=tmp_path, n_short=6, **FEW)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}


def test_a_result_of_some_targets_is_not_taken_for_the_whole(tmp_path):
    some = small(targets=40, targets_per_block=4, batches=[0])
    some.save(tmp_path)
    with refused("holds a result of 16 of the 40 targets; give another folder"):
        small(targets=40, targets_per_block=4, out=tmp_path)


@pytest.mark.parametrize("whole", slow_but([1, 3], 1), indirect=True)
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
    small(out=tmp_path, targets=32, shard="1/2")
    with refused("scores false -> true"):
        small(out=tmp_path, targets=32, shard="2/2", scores=True)


def test_one_process_at_a_time_writes(tmp_path):
    for part in (None, "1-of-2"):  # a run of all batches, one of a share
        with folder_lock(tmp_path / "parts", part=part), refused("parts is in use by another process"):
            small(out=tmp_path, **FEW)
    small(out=tmp_path, **FEW)
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
    read, done = [0], []

    class Counting(Scorer):
        def _logits(self, passes, rows, prefixes, queries):
            read[0] += passes.length(rows) * len(rows) - int(passes.shared[rows].min()) * len(rows)
            return super()._logits(passes, rows, prefixes, queries)

    class Watched(Work):
        def _show(self, kept=0):
            super()._show(kept)
            if self.done > (done[-1][1] if done else 0):
                done.append((read[0], self.done))

    monkeypatch.setattr(measuring, "Scorer", Counting)
    monkeypatch.setattr(runner, "Work", Watched)
    result = small(targets=40, tokens_per_batch=256, **changes)
    time, targets = np.array(done).T
    done = targets / len(result.targets)
    assert done[-1] == pytest.approx(1)
    assert np.diff(done).max() < 0.1
    estimates = time / done / read[0]
    assert estimates.max() < 2 and estimates.min() > 0.5


def test_the_time_is_said_in_words_once_some_of_it_has_passed(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr("analysis.work.time.monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    shown = []
    work = Work(320, lambda kept, left: shown.append((kept, left)))
    work.begin_batch(64, 100, 5000)
    work.read(50)
    work.begin_steps([1000, 1000])
    for _ in range(4):
        clock[0] += 6.0
        work.read(100)
    assert work.done == pytest.approx(64 * 500 / 2100)
    assert shown[0] == (0, "") and shown[-1] == (0, "8 min left")
    work.keep(64)
    assert shown[-1] == (64, "8 min left")
    # after 12 s 300 of 2,100 tokens of a batch of 64 were read
    assert caplog.messages == ["about 7 min for 320 targets"] and duration(12 * 7 * 320 / 64) == "7 min"


@pytest.mark.parametrize(("owner", "what"), [(engine, "long_and_short_losses"), (KeptAs, "losses")])
def test_losses_that_are_not_finite_are_refused(tmp_path, monkeypatch, owner, what):
    original = getattr(owner, what)

    def broken(*args):
        losses = original(*args)
        (losses[0] if isinstance(losses, tuple) else losses).flat[0] = np.nan
        return losses

    monkeypatch.setattr(owner, what, broken)
    with refused("a loss of the model is not finite"):
        small(out=tmp_path, **FEW)
    monkeypatch.undo()
    assert small(out=tmp_path, **FEW).settings.complete


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
    result = small(targets=40)
    targets = result.targets[result.targets["text"] > result.targets["text"].min()].reset_index(drop=True)
    choices = result.choices[result.choices["target_id"].isin(targets["target_id"])]
    later = replace(result, targets=targets, choices=choices)
    named = int(str(later).rpartition(".xray(")[2].rstrip(")"))
    assert named in targets["text"].to_numpy() and later.xray(named)
