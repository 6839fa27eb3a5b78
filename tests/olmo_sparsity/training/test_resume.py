"""What a run folder survives: damaged checkpoints, other settings, other text, a second process, damaged files."""

import json
import logging
import re
import resource
import shutil
import subprocess
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from olmo_sparsity.checkpoint import (
    checkpoints,
    config_of,
    load_model,
    load_state,
    weights_sha256,
)
from olmo_sparsity.data.build import open_training_data
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training import engine as engines
from olmo_sparsity.training import loop
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.files import folder_lock
from tests.support import tiny
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.yaml", "checksums.json")


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def half(tmp_path, *overrides):
    """A run of 8 steps that stopped after 4, and its config."""
    config = tiny.train_config(tmp_path, *overrides)
    train(replace(config, stop_at=4))
    return config


@pytest.fixture(scope="module")
def run_of_half(tmp_path_factory):
    """The folder of such a run; what is copied from it need not be trained anew."""
    folder = tmp_path_factory.mktemp("half")
    half(folder)
    return folder


@pytest.fixture(scope="module")
def run_of_two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    half(folder, "--save_interval=2")
    return folder


def copy_of(folder, tmp_path, *overrides):
    """A copy of a run, and its config."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tiny.train_config(tmp_path, *overrides)


# --- damaged checkpoints ---


def flipped(content):
    return bytes([*content[:-1], content[-1] ^ 1])


DAMAGES = {
    **{
        f"{name}.safetensors, one bit flipped": (f"{name}.safetensors", flipped)
        for name in ("model", "optimizer")
    },
    **{f"{name}, cut off": (name, lambda content: content[:-20]) for name in FILES},
    **{f"{name}, empty": (name, lambda content: b"") for name in FILES},
    **{f"{name}, missing": (name, None) for name in FILES},
    "checksums.json, of nothing": ("checksums.json", lambda content: b"{}"),
    "checksums.json, of other text": ("checksums.json", lambda content: b'{"model.safetensors": 3}'),
    "config.yaml, of another model": (
        "config.yaml",
        lambda content: content.replace(b"n_layers: 2", b"n_layers: 3"),
    ),
}


def damaged_run(run, tmp_path, name, change):
    """A copy of a run of two checkpoints, of which a file of the last is changed or removed, and its config."""
    config = copy_of(run, tmp_path, "--save_interval=2", "--stop_at=5")
    path = tmp_path / "run" / "step00000004" / name
    content = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(content))
    return config


def command_in(error):
    """What is to be done before the same command is run again."""
    return re.search("go on from step00000002: (.*), and the same command again", str(error.value))[1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_a_command_that_sets_it_aside(
    damage, run_of_two_checkpoints, tmp_path
):
    name, change = DAMAGES[damage]
    config = damaged_run(run_of_two_checkpoints, tmp_path, name, change)
    run = tmp_path / "run"
    before = files_of(run)
    with refused(f"step00000004/{name} is (damaged|missing)|step00000004/{name} cannot be read") as error:
        train(config, resume=True)
    assert files_of(run) == before
    assert command_in(error) == f"mkdir -p {run}/aside && mv {run}/step00000004 {run}/aside"


def test_the_command_in_the_message_goes_on_before_a_damaged_checkpoint(run_of_two_checkpoints, tmp_path):
    """Word for word: whoever runs the job copies it from the log."""
    config = damaged_run(run_of_two_checkpoints, tmp_path, "model.safetensors", flipped)
    with refused("model.safetensors is damaged") as error:
        train(config, resume=True)
    subprocess.run(command_in(error), shell=True, check=True)
    assert load_state(train(config, resume=True)).step == 5


def test_without_an_earlier_checkpoint_no_command_is_offered(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    path = tmp_path / "run" / "step00000004" / "optimizer.safetensors"
    path.write_bytes(flipped(path.read_bytes()))
    with refused("optimizer.safetensors is damaged.*; copy it again; there is no earlier checkpoint"):
        train(config, resume=True)


def test_what_an_older_checkpoint_has_no_checksum_of_is_said_once_and_loaded(run_of_half, tmp_path, caplog):
    config = copy_of(run_of_half, tmp_path)
    checksums = tmp_path / "run" / "step00000004" / "checksums.json"
    noted = json.loads(checksums.read_text())
    checksums.write_text(json.dumps({"model.safetensors": noted["model.safetensors"]}))
    train(config, resume=True)
    assert caplog.text.count("optimizer.safetensors cannot be verified") == 1


def test_the_empty_configuration_of_an_older_checkpoint_is_named(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    folder = tmp_path / "run" / "step00000004"
    noted = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": noted["model.safetensors"]}))
    (folder / "config.yaml").write_text("")
    with refused(r"config.yaml is damaged \(it describes no model\); copy it again"):
        train(config, resume=True)


def test_damaged_weights_are_not_started_from(tmp_path):
    first = train(tiny.train_config(tmp_path))
    late = tiny.train_config(tmp_path, f"--initial_weights={first}", f"--save_folder={tmp_path / 'late'}")
    path = first / "model.safetensors"
    path.write_bytes(flipped(path.read_bytes()))
    with refused("model.safetensors is damaged"):
        train(late)
    assert not checkpoints(tmp_path / "late")


def test_a_disk_that_fills_up_in_a_save_leaves_the_checkpoints_before_it(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with refused("step00000008 cannot be saved: the disk is full.*; step00000004 is whole.*--resume"):
            train(config, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    assert load_state(train(config, resume=True)).finished


def test_nothing_is_removed_before_the_new_run_is_known_to_start(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    (tmp_path / "corpus" / "train-00000.npy").unlink()
    with refused("is missing"):
        train(replace(config, save_overwrite=True))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step00000004"]


# --- what may change on resume ---

VALUES = {
    "scheduler.t_warmup": 5, "optimizer.weight_decay": 0.2, "epoch": 1, "data.seed": 4, "seed": 9,
    "optimizer.eps": 1e-4, "positions.chunks": 3, "model.residual_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_decides_the_losses_may_not_change(run_of_half, tmp_path, name):
    copy_of(run_of_half, tmp_path)
    with refused(f"cannot resume .*: {name} was .* and is now {VALUES[name]}; set it back"):
        train(tiny.train_config(tmp_path, f"--{name}={VALUES[name]}"), resume=True)


REMEDIES = {
    "optimizer.learning_rate": (3e-3, 5e-4),
    "max_grad_norm": (1.0, 0.5),
    "softmax_auxiliary_loss": (False, True),
    "precision": ("fp32", "amp_bf16"),
    "max_duration": (8, 12),
    "data.skip_steps": (None, "6:7"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_is_said_and_recorded(run_of_half, tmp_path, caplog, name):
    copy_of(run_of_half, tmp_path)
    before, now = REMEDIES[name]
    with caplog.at_level(logging.INFO):
        folder = train(tiny.train_config(tmp_path, f"--{name}={now}"), resume=True)
    assert load_state(folder).finished
    shown = {3e-3: "0.003", 5e-4: "0.0005"}
    change = f"{name} {shown.get(before, before)} -> {shown.get(now, now)}"
    assert caplog.messages.count(f"resumed at step 4 with {change}") == 1
    started, resumed = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert "changed" not in started
    assert resumed["resumed_at_step"] == 4
    assert resumed["changed"] == {name: {"before": before, "now": now}}


def test_a_learning_rate_is_said_as_people_write_it(tmp_path, caplog):
    half(tmp_path, "--optimizer.learning_rate=5e-5")
    with caplog.at_level(logging.INFO):
        train(tiny.train_config(tmp_path, "--optimizer.learning_rate=2e-5"), resume=True)
    assert "resumed at step 4 with optimizer.learning_rate 5e-5 -> 2e-5" in caplog.messages
    rates = [row["learning_rate"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates[4:] == pytest.approx([1.5e-5, 1e-5, 0.5e-5, 0], rel=1e-12)  # linear, to 0 at step 8


def test_another_precision_is_taken_where_it_is_asked_for_and_not_where_the_machine_chooses(
    run_of_half, tmp_path, monkeypatch
):
    copy_of(run_of_half, tmp_path)
    config = tiny.train_config(tmp_path, "--precision=null")
    monkeypatch.setattr(engines, "cpu_has_fast_bf16", lambda: True)
    with refused(
        "precision was fp32, and this machine would choose amp_bf16; set --precision=fp32 to keep it"
    ):
        train(config, resume=True)
    monkeypatch.setattr(engines, "cpu_has_fast_bf16", lambda: False)
    train(config, resume=True)


HELDOUT = {"of the corpus": None, "of token files": ["wide.npy"]}


@pytest.mark.parametrize("kind", HELDOUT)
def test_held_out_text_that_comes_with_the_resumption_is_verified(run_of_half, tmp_path, kind):
    """A measure of it would be a wrong number, or end in an index that is out of range."""
    copy_of(run_of_half, tmp_path)
    heldout = tmp_path / "corpus" / "heldout-00000.npy"
    heldout.write_bytes(b"\x01" + heldout.read_bytes()[1:])
    np.arange(1, 41, dtype=np.uint32).repeat(4).tofile(tmp_path / "wide.npy")
    paths = HELDOUT[kind] and [str(tmp_path / name) for name in HELDOUT[kind]]
    message = "heldout-00000.npy" if paths is None else "wide.npy holds ids of 4 bytes, read as 2"
    with refused(message):
        train(tiny.train_config(tmp_path, evaluation={"interval": 4, "paths": paths}), resume=True)


# --- a run that diverges ---


@pytest.fixture
def diverging_at_6(tmp_path, monkeypatch):
    """Fields of a step that was not finite: the sixth, whose batch is one that no learning rate helps with."""
    real = loop.forward_backward
    bad = next(open_training_data(tiny.train_config(tmp_path)).batches(5))

    def not_finite(engine, batch, length_groups):
        values = real(engine, batch, length_groups)
        is_bad = torch.equal(batch.input_ids, bad.input_ids)
        return {**values, "loss_nats": values["loss_nats"] * (torch.nan if is_bad else 1)}

    monkeypatch.setattr(loop, "forward_backward", not_finite)
    return monkeypatch


def test_the_advice_of_a_run_that_diverged_can_be_followed(tmp_path, diverging_at_6):
    """Each of its options, word for word; whether it helps is the batch's affair: here only leaving it out does."""
    config = tiny.train_config(tmp_path)
    with refused("loss_nats is nan at step 6; .* go on with --resume and ") as error:
        train(config)
    advice = re.findall(r"--[\w.]+(?:=[\w:]+)?", str(error.value))
    assert advice == [
        *(
            "--resume",
            "--optimizer.learning_rate",
            "--max_grad_norm",
            "--precision=fp32",
            "--data.skip_steps=6:7",
        )
    ]
    for option in ("--optimizer.learning_rate=1e-3", "--max_grad_norm=0.5", "--precision=fp32"):
        with refused("loss_nats is nan at step 6"):  # and no refusal to resume
            train(tiny.train_config(tmp_path, option), resume=True)
    assert load_state(train(tiny.train_config(tmp_path, advice[-1]), resume=True)).finished


def test_the_advice_repeats_the_steps_that_were_skipped_before(tmp_path, diverging_at_6):
    """A resume refuses to train steps that were left out."""
    with refused("loss_nats is nan at step 6; .*--data.skip_steps=2:3,6:7$") as error:
        train(tiny.train_config(tmp_path, "--data.skip_steps=2:3"))
    option = str(error.value).split()[-1]
    assert load_state(train(tiny.train_config(tmp_path, option), resume=True)).finished


def test_a_skipped_step_computes_nothing_and_data_and_schedule_go_on(tmp_path, caplog):
    """The seventh step's loss is that of the weights after the fifth on the seventh batch, at the seventh rate."""
    plain = tiny.train_config(tmp_path, "--console_log_interval=1", "--save_interval=1")
    train(plain)
    expected = read_metrics(tmp_path / "run" / "metrics.jsonl")
    model, _ = load_model(tmp_path / "run" / "step00000005")
    batches = open_training_data(plain).batches(6)
    batch = next(batches)
    with torch.no_grad():
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten())

    config = tiny.train_config(
        tmp_path, "--console_log_interval=1", "--data.skip_steps=6:7", f"--save_folder={tmp_path / 'skips'}"
    )
    with caplog.at_level(logging.INFO):
        train(config)
    rows = read_metrics(tmp_path / "skips" / "metrics.jsonl")
    assert rows[5] == {"step": 6, "tokens": expected[5]["tokens"], "skipped": True}
    assert [row["loss_nats"] for row in rows[:5]] == [row["loss_nats"] for row in expected[:5]]
    assert rows[6]["loss_nats"] == pytest.approx(loss.item(), abs=1e-5)
    assert [row["learning_rate"] for row in rows[6:]] == [row["learning_rate"] for row in expected[6:]]
    assert "data.skip_steps: steps 6 to 6 are counted and not trained" in caplog.messages
    assert config_of(tmp_path / "skips" / "step00000008").data.skip_steps == "6:7"


@pytest.mark.parametrize("stop_at", [1, 2, 5, 6])
def test_a_run_resumes_exactly_before_in_and_behind_skipped_steps(tmp_path, stop_at):
    """Also where no step was trained yet, so that the optimizer has no state."""
    options = "--data.skip_steps=1:3,5:7"
    whole = train(tiny.train_config(tmp_path, options, f"--save_folder={tmp_path / 'whole'}"))
    config = tiny.train_config(tmp_path, options)
    train(replace(config, stop_at=stop_at))
    cut = train(config, resume=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_steps_that_are_trained_already_are_skipped_from_an_earlier_checkpoint(
    run_of_two_checkpoints, tmp_path
):
    """By the command in the message, word for word."""
    copy_of(run_of_two_checkpoints, tmp_path)
    config = tiny.train_config(tmp_path, "--save_interval=2", "--data.skip_steps=4:6")
    with refused("data.skip_steps: step 4 is trained already.*; skip steps from 5 on, or") as error:
        train(config, resume=True)
    command = re.search("go on from before it: (.*), and the same command again", str(error.value))
    subprocess.run(command[1], shell=True, check=True)
    assert load_state(train(config, resume=True)).finished
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "skipped" in row] == [4, 5]


def test_without_a_checkpoint_before_the_steps_the_run_starts_over(run_of_half, tmp_path):
    copy_of(run_of_half, tmp_path)
    with refused("step 4 is trained already.*, or start over with --save_overwrite in place of --resume$"):
        train(tiny.train_config(tmp_path, "--data.skip_steps=4:6"), resume=True)
    assert load_state(
        train(tiny.train_config(tmp_path, "--data.skip_steps=4:6", "--save_overwrite"))
    ).finished


def test_steps_that_were_skipped_stay_so(tmp_path):
    """In the saved configuration; others may follow behind them."""
    config = tiny.train_config(tmp_path, "--data.skip_steps=2:4")
    train(replace(config, stop_at=4))
    for options in ((), ("--data.skip_steps=2:3",), ("--data.skip_steps=6:8",)):
        with refused("data.skip_steps was 2:4, and step . was left out; give --data.skip_steps=2:4 again"):
            train(tiny.train_config(tmp_path, *options), resume=True)
    further = tiny.train_config(tmp_path, "--data.skip_steps=2:4,6:8")
    assert load_state(train(further, resume=True)).finished


@pytest.mark.parametrize(
    "steps", ["4", "4:", "4:4", "5:3", "0:2", "-1:2", "1:2,", "a:b", "1:2:3", "1:1e3", ""]
)
def test_no_steps(tmp_path, steps):
    with refused("data.skip_steps: .* is no list of ranges of steps; give 1200:1210"):
        tiny.train_config(tmp_path, data={"skip_steps": steps})


def test_another_text_of_equal_size_is_refused_and_a_moved_one_is_not(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    other = {"train": tiny.random_documents(12, 90, seed=7), "heldout": [[1, 2, 3]]}
    tiny.write_corpus(tmp_path / "corpus", other)
    with refused("the text it is trained on, .* was"):
        train(config, resume=True)
    folder = train(replace(config, corpus=replace(config.corpus, path=str(moved))), resume=True)
    assert load_state(folder).finished


def test_other_raw_token_files_are_refused(tmp_path):
    config = tiny.train_config(tmp_path)
    raw = tmp_path / "corpus" / "train-00000.npy"
    corpus, data = replace(config.corpus, path=None), replace(config.data, paths=[str(raw)])
    config = replace(config, corpus=corpus, data=data)
    train(replace(config, stop_at=4))
    content = bytearray(raw.read_bytes())
    content[10:12] = content[12:14]
    raw.write_bytes(content)
    with refused("the text it is trained on, .* was"):
        train(config, resume=True)


# --- a second process, and damaged files beside the checkpoints ---


def test_a_second_process_on_a_run_gets_one_line(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    before = files_of(tmp_path / "run")
    with folder_lock(tmp_path / "run"):
        for resume in (True, False):
            with refused("run is in use by another process"):
                train(replace(config, save_overwrite=not resume), resume=resume)
        assert {path: path.read_bytes() for path in before} == before
    train(config, resume=True)


def test_a_checkpoint_that_appears_meanwhile_is_noticed(run_of_half, tmp_path, monkeypatch):
    config = copy_of(run_of_half, tmp_path)
    last = checkpoints(tmp_path / "run")[-1]
    real = engines.Engine.prepare

    def slow(self, *arguments):
        real(self, *arguments)
        worker = threading.Thread(target=shutil.copytree, args=(last, last.with_name("step00000006")))
        worker.start()
        worker.join()

    monkeypatch.setattr(engines.Engine, "prepare", slow)
    with refused("was changed by another process"):
        train(config, resume=True)


def test_rows_beyond_the_checkpoint_which_a_kill_left_are_dropped(run_of_half, tmp_path):
    config = copy_of(run_of_half, tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(metrics, "ab") as file:
        file.write(b'{"step": 5, "loss_nats": 99.0}\n{"step": 6, "tok')
    train(config, resume=True)
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(row["loss_nats"] < 99 for row in rows)


@pytest.mark.parametrize("end", [b'{"step": 5, "tok', b"\x00" * 30, b'{"step": 4}'])
def test_the_last_line_that_was_cut_off_is_removed(run_of_half, tmp_path, caplog, end):
    """Of a machine that went down while it wrote; no loss depends on it."""
    config = copy_of(run_of_half, tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[: whole.rindex(b'{"step": 4')] + end)
    train(config, resume=True)
    rows = read_metrics(metrics)
    is_row = end.endswith(b"}")
    assert [row["step"] for row in rows] == ([1, 2, 3, 4, 5, 6, 7, 8] if is_row else [1, 2, 3, 5, 6, 7, 8])
    assert caplog.text.count("metrics.jsonl: the last line was cut off, and is removed") == (not is_row)


DAMAGED_RECORDS = [
    *(("metrics.jsonl", content) for content in (b"[]\n", b'{"step": "4"}\n', b"\xff\n{}\n")),
    *(("provenance.json", content) for content in (b"{}", b"", b"[", b"\xff", b"null")),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED_RECORDS)
def test_a_damaged_record_is_set_aside_and_the_run_goes_on(run_of_half, tmp_path, caplog, name, content):
    config = copy_of(run_of_half, tmp_path)
    path = tmp_path / "run" / name
    path.write_bytes(content)
    assert load_state(train(config, resume=True)).finished
    assert path.with_name(f"{name}.damaged").read_bytes() == content
    assert caplog.text.count(f"{name}.damaged") == 1
    if name == "provenance.json":
        assert [start["resumed_at_step"] for start in json.loads(path.read_text())] == [4]
    else:
        assert [row["step"] for row in read_metrics(path)] == [5, 6, 7, 8]


def test_a_missing_record_is_begun_again(run_of_half, tmp_path, caplog):
    config = copy_of(run_of_half, tmp_path)
    for name in ("metrics.jsonl", "provenance.json"):
        (tmp_path / "run" / name).unlink()
    assert load_state(train(config, resume=True)).finished
    assert "metrics.jsonl is missing, though 4 steps are done; a new one is begun" in caplog.text


# --- weights of another run ---


@pytest.mark.parametrize(
    "changes",
    [
        ["--model.max_sequence_length=64", "--positions.target_length=128"],
        ["--model.attention=ssmax"],
        ["--model.rope=false", "--model.nope=true"],
    ],
    ids=["longer window", "ssmax", "drope"],
)
def test_training_starts_from_the_weights_of_another_run_and_from_nothing_else_of_it(tmp_path, changes):
    """Its first loss is that of those weights; SSMax begins with its own as they are drawn. It resumes without them."""
    first = train(tiny.train_config(tmp_path))
    options = f"--initial_weights={first}", f"--save_folder={tmp_path / 'late'}", *changes
    late = tiny.train_config(tmp_path, *options)
    train(replace(late, stop_at=4))
    model = build_model(late)
    missing, unexpected = model.load_state_dict(load_model(first)[0].state_dict(), strict=False)
    assert all(".mixer." in name for name in missing) and not unexpected
    assert bool(missing) == (late.model.attention != "softmax")
    batch = next(open_training_data(late).batches(0))
    with torch.no_grad():
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten())
    begun = read_metrics(tmp_path / "late" / "metrics.jsonl")[0]
    assert begun["step"] == 1 and begun["loss_nats"] == pytest.approx(expected.item(), abs=1e-5)
    (start,) = json.loads((tmp_path / "late" / "provenance.json").read_text())
    assert start["initial_weights_sha256"] == weights_sha256(first)
    shutil.rmtree(tmp_path / "run")
    assert load_state(train(late, resume=True)).step == 8


def test_weights_of_another_tokenizer_or_shape_or_that_would_be_overwritten_are_refused(tmp_path):
    last = train(tiny.train_config(tmp_path))
    elsewhere = f"--initial_weights={last}", f"--save_folder={tmp_path / 'elsewhere'}"
    with refused("is of another model: .*blocks.2"):
        train(tiny.train_config(tmp_path, *elsewhere, "--model.n_layers=3"))
    with refused(
        "initial_weights: .* has model.n_heads 4, and this model has 8"
    ):  # tensors of the same shapes
        train(tiny.train_config(tmp_path, *elsewhere, "--model.n_heads=8"))
    other = tmp_path / "tokenizer.json"
    other.write_text((tmp_path / "corpus" / "tokenizer.json").read_text() + " ")
    with refused("initial_weights: .* has another tokenizer than the text"):
        train(tiny.train_config(tmp_path, *elsewhere, f"--tokenizer.identifier={other}"))
    assert not (tmp_path / "elsewhere" / "metrics.jsonl").exists()
    for name in ("run", "run/step00000008"):
        with refused("initial_weights: .*step00000008 is in the folder that would be overwritten"):
            train(tiny.train_config(tmp_path, f"--initial_weights={tmp_path / name}", "--save_overwrite"))
    assert weights_sha256(last)


def test_others_may_read_a_checkpoint_as_far_as_its_folder_lets_them(tmp_path):
    folder = train(replace(tiny.train_config(tmp_path), stop_at=1))
    readable = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(readable.values()) == {folder.stat().st_mode & 0o666}, readable
