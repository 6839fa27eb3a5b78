"""The submit command: what it prints and refuses, and jobs under a real SLURM of one node where one can be had."""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file

from analysis import load
from olmo_sparsity.checkpoint import TrainState, last_whole_checkpoint, save_checkpoint
from olmo_sparsity.training.metrics import read_metrics
from olmo_sparsity.util.errors import UserError
from tests.olmo_sparsity.sweep.test_slurm import check_shell
from tests.support import local_slurm, tiny
from tests.support.corpora import c4_folder, needs_c4_sample
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
SMALL = "--n-long 20 --n-short 5 --targets 3000"
"""What fits the documents of `tiny`."""
INFLUENCE = "influence run --corpus corpus --out x"
THEN = "\n# ---- then, with sbatch --dependency=afterok:<the job above>\n"


@pytest.fixture
def submit(monkeypatch, call_main, tmp_path):
    """The command in this process and ``tmp_path``, as on a machine without sbatch; returns what it printed."""

    def run(line, path="") -> str:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("PATH", path)
            return call_main("submit", *(shlex.split(line) if isinstance(line, str) else line))[1]

    return run


@pytest.fixture
def dry_run(submit):
    """The job scripts."""
    return lambda line: submit(f"{line.partition(' ')[0]} --dry-run {line.partition(' ')[2]}")


@pytest.fixture
def run_folder(tmp_path):
    """A corpus, and a checkpoint's outer shape: enough to submit, not to measure."""
    save_checkpoint(tmp_path / "run", tiny.train_config(tmp_path), TrainState(8, 1), {}, {}, None)
    return tmp_path


def directives(script: str) -> list[str]:
    """What sbatch reads: the lines before the first command, as sbatch(1) has it."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.split("\n"))
    return [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH")]


def checked(script: str, folder: Path) -> str:
    (folder / "x.sbatch").write_text(script)
    check_shell(folder / "x.sbatch")
    assert not re.findall("@[A-Z_]+@", script)
    return script


def test_base_yaml_becomes_a_sound_job_of_many_nodes(dry_run, tmp_path):
    options = "--nodes=2 --gpus-per-node=4 --time=24:00:00 --partition=gpu --account=lab"
    more = "--after 7 --cpus 6 --sbatch=--qos=high --sbatch=--exclusive -- --seed=2"
    script = checked(dry_run(f"train configs/base.yaml {options} {more}"), tmp_path)
    expected = "--ntasks-per-node=4 --cpus-per-task=6 --qos=high --exclusive --requeue --signal=USR1@120"
    expected += f" --output=runs/base/slurm-%j.out --chdir={tmp_path} --open-mode=append"
    assert {*options.split(), *expected.split()} <= set(directives(script))
    assert "configs/base.yaml --seed=2 --resume)" in script


def test_a_job_needs_no_option_at_all(dry_run):
    found = directives(dry_run("train configs/demo.yaml --after 7"))
    assert {"--nodes=1", "--ntasks-per-node=1"} <= set(found)
    assert not [line for line in found if re.match("--(gpus|time|partition|account|mem)", line)]


def test_c4_becomes_an_array_and_a_merge(dry_run, tmp_path):
    text = dry_run("prepare_c4 --out data/c4 --array 64%16 -- --limit-tokens 10000000000")
    array, merge = (checked(script, tmp_path) for script in text.split(THEN))
    assert "--array=1-64%16" in directives(array)
    shared = "c4 --out data/c4 --limit-tokens 10000000000"
    assert f'{shared} --workers=4 --shard="$SLURM_ARRAY_TASK_ID/64"' in array
    assert f"{shared} --merge --workers=4\n" in merge


def test_several_checkpoints_become_one_array_with_folders_of_their_own(dry_run, run_folder):
    save_checkpoint(run_folder / "run", tiny.train_config(run_folder), TrainState(9, 1), {}, {}, None)
    options = "--corpus corpus --out records --array 3%2 --gpus-per-node 1"
    text = dry_run(f"influence run/step00000008 run {options} -- {SMALL} --tau 0.5")
    array, merge = (checked(script, run_folder) for script in text.split(THEN))
    assert "--array=1-6%2" in directives(array)
    assert "checkpoints=(run/step00000008 run/step00000009)\n" in array
    assert "records=(records/run-step00000008 records/run-step00000009)\n" in array
    assert f"--corpus corpus {SMALL} --tau 0.5\n" in array
    # without --shard the same command puts the shards together
    for checkpoint in ("step00000008", "step00000009"):
        assert (
            f"influence run/{checkpoint} --out records/run-{checkpoint} --corpus corpus {SMALL} --tau 0.5"
            in merge
        )
    assert "--gpus-per-node=1" in directives(array)
    assert "gpus" not in merge


def test_each_task_gets_its_checkpoint_and_shard(dry_run, run_folder):
    """The array's arithmetic, run by bash with `echo` for srun."""
    array = dry_run(f"influence run --corpus corpus --out a --array 3 -- {SMALL}").split(THEN)[0]
    array = array.replace("checkpoints=(", "checkpoints=(first ").replace("records=(", "records=(one ")
    seen = []
    for task in range(1, 7):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
        script = array.replace("srun ", "echo srun ")
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        seen.append(re.search(r"influence (\S+) --out (\S+) --shard (\S+)", done.stdout).groups())
    pairs = [("first", "one"), ("run/step00000008", "a")]
    assert seen == [(*pair, f"{shard}/3") for pair, shard in itertools.product(pairs, (1, 2, 3))]


HELDOUT = "--evaluation.interval=2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train none.yaml", "none.yaml: there is no such config file"),
        ("train config.yaml -- --model.d_modle=3", "did you mean model.d_model"),
        ("train config.yaml -- --dry_run=true", "dry_run: such a run trains nothing"),
        ("train config.yaml --nodes 3 --gpus-per-node 2", "size 4 cannot be shared by 6 processes"),
        ("train config.yaml -- --save_folder='a b'", "save_folder 'a b': SLURM needs a path"),
        ("train config.yaml -- --corpus.path=nowhere", "nowhere is no prepared corpus"),
        ("train config.yaml -- --corpus.train_split=other", "no split 'other'"),
        ("train config.yaml -- --global_train_batch_size=400", "fewer than global_train_batch_size"),
        (f"train config.yaml -- {HELDOUT} --corpus.heldout_split=other", "no split 'other'"),
        (f"train config.yaml -- {HELDOUT} --evaluation.paths=[no.npy]", "token file no.npy is missing"),
        ("influence none --corpus corpus --out x", "none is neither a checkpoint nor a run"),
        ("influence run --corpus none --out x", "none is no prepared corpus"),
        (f"influence run run --corpus corpus --out x -- {SMALL}", "checkpoints of the same name"),
        (f"{INFLUENCE} -- --shard=1/2", "--shard is decided by submit"),
        (f"{INFLUENCE} --array 200 -- {SMALL}", "too few for 200 shards"),
        (f"{INFLUENCE} -- {SMALL} --split other", "no split 'other'"),
        (f"{INFLUENCE} -- --n-long 1000", "no text offers B = 16 targets in a row with N = 1000"),
        (f"{INFLUENCE} -- {SMALL} --selectors leave-one-outt", "leave-one-outt"),
        (f"{INFLUENCE} -- {SMALL} --k 16", "ks must ascend from 1 to at most the 15 far tokens"),
        ("prepare_c4 --out x --array 2-5", "--array '2-5': write the number of shards"),
        ("prepare_c4 --out x -- --workers=2", "--workers is decided by submit"),
        ("prepare_c4 --out x -- --tokenizer bpe", "--shard needs a tokenizer"),
        ("prepare_c4 --out x -- --tokenizer none.json", "none.json"),
        ("prepare_c4 --out x -- --overwrite", "--overwrite would remove the work of other"),
        # A line break would end the #SBATCH line, and what follows it would be a command of the job.
        ("train config.yaml -- --run_name='\"a\\nb\"'", r"run_name 'a\nb': SLURM needs a name"),
        ("train config.yaml -- --save_folder='\"a\\nb\"'", r"save_folder 'a\nb': SLURM needs a path"),
        ("train 'con\nfig.yaml'", r"the name of the config file 'con\nfig': SLURM needs a name"),
        ("influence run --corpus corpus --out 'a\nb'", r"--out 'a\nb': SLURM needs a path"),
        ("prepare_c4 --out x --array '4\n5'", r"--array '4\n5': write the number"),
        ("train config.yaml", "there is no sbatch on this machine"),
    ],
)
def test_what_would_fail_is_refused_in_a_line_before_it_waits_in_the_queue(submit, run_folder, line, message):
    if "con\nfig" in line:
        shutil.copy(run_folder / "config.yaml", run_folder / "con\nfig.yaml")
    if line == "train config.yaml":
        shutil.rmtree(run_folder / "run")
    before = sorted(run_folder.rglob("*"))
    with refused(re.escape(message)):
        submit(line)
    assert sorted(run_folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{INFLUENCE} -- --n-long 0", "argument --n-long: '0' is no whole number from 1"),
        (f"{INFLUENCE} -- --n-longer 9", "unrecognized arguments: --n-longer 9"),
        (f"{INFLUENCE} --after '12\n#SBATCH'", "argument --after: '12\\n#SBATCH' is no number of a job"),
        ("prepare_c4 --out x -- --limit-tokens 0", "argument --limit-tokens: '0'"),
        ("train config.yaml --nodes 0", "argument --nodes: '0' is no whole number"),
    ],
)
def test_bad_arguments_of_the_job_are_refused_by_its_own_parser(submit, run_folder, capsys, line, message):
    with pytest.raises(SystemExit, match="2"):
        submit(line)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said, said


def test_a_truncated_token_file_is_refused_before_it_waits(submit, run_folder):
    path = run_folder / "corpus" / "train-00000.npy"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train-00000.npy is truncated"):
        submit("train config.yaml")


def test_a_folder_that_holds_a_run_of_other_settings_is_refused_before_it_waits(dry_run, tmp_path):
    config = tiny.train_config(tmp_path)
    tensors = {"weight": torch.zeros(1)}
    save_checkpoint(config.save_folder, config, TrainState(4, 4, finished=False), tensors, tensors, None)
    before = sorted(tmp_path.rglob("*"))
    assert "--resume" in dry_run("train config.yaml")
    with refused(r"seed.* 3 .* 9"):
        dry_run("train config.yaml -- --seed=9")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("letters", ["\n#SBATCH --wrap=x", "\r", "\x1b[0m", "\x00", "\u2028", "\x85"])
@pytest.mark.parametrize("option", ["--partition", "--account", "--time", "--mem", "--sbatch"])
def test_a_line_break_in_an_option_of_slurm_is_refused_by_name(submit, run_folder, option, letters):
    with pytest.raises(UserError, match=f"^{option}: .*a line break or another control") as error:
        submit(["train", "config.yaml", f"{option}=a{letters}b"])
    assert str(error.value).isprintable()


@pytest.mark.parametrize("option", ["--partition", "--account", "--time", "--mem"])
def test_an_option_of_slurm_in_several_words_is_refused(dry_run, run_folder, option):
    with refused(f"^{option}=2 days: SLURM would not read this as one word"):
        dry_run(f"train config.yaml {option} '2 days'")


def test_a_further_option_of_sbatch_needs_its_dashes(dry_run, run_folder):
    with refused("^--sbatch 'qos=high' is no option of sbatch; .* --sbatch=--qos=high$"):
        dry_run("train config.yaml --sbatch qos=high")


@pytest.mark.parametrize(
    "line",
    [
        "train config.yaml -- --wandb.name={}",
        "prepare_c4 --out x -- --dataset {}",
        f"{INFLUENCE} --after 7 -- {SMALL} --select-with {{}}",
    ],
)
def test_a_line_break_in_a_word_of_the_command_stays_data(dry_run, run_folder, line):
    """Neither a directive nor a command of the job: it reaches the program as it was given."""
    text = "a\n#SBATCH --wrap=x\ntouch made"
    word = f'"{text}"' if "wandb" in line else text
    script, other = (dry_run(line.format(shlex.quote(each))).split("\n# ----")[0] for each in (word, "plain"))
    assert directives(script) == directives(other) and len(directives(script)) > 7
    (run_folder / "srun").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" >told\n")
    (run_folder / "srun").chmod(0o755)
    names = ("JOB_ID", "JOB_NUM_NODES", "NTASKS", "ARRAY_TASK_ID", "JOB_NODELIST")
    environment = {**os.environ, **{f"SLURM_{name}": "1" for name in names}}
    environment["PATH"] = f"{run_folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=script, cwd=run_folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = (run_folder / "told").read_text().split("\0")
    assert any(each.endswith((text, f'{text}"')) for each in told), told
    assert not (run_folder / "made").exists()


def test_a_chain_of_jobs_waits_for_what_is_not_there_yet(dry_run, tmp_path):
    """Corpus and run are left to the jobs before; everything else is checked as ever."""
    tiny.train_config(tmp_path)
    shutil.move(tmp_path / "corpus", tmp_path / "later")
    told = "\n# ---- with sbatch --dependency=afterok:12:13_4 --kill-on-invalid-dep=yes\n"
    assert dry_run("train config.yaml --after 12,13_4").endswith(told)
    assert told in dry_run("prepare_c4 --out corpus --after 12,13_4")
    options = "--corpus corpus --out x --after 12,13_4 --array 2"
    array = dry_run(f"influence run run@yarn:4 {options} -- {SMALL}").partition(THEN)[0]
    assert array.endswith(told)
    assert "checkpoints=(run run@yarn:4)\n" in array
    for line, message in {
        f"train config.yaml --after 1 -- {HELDOUT} --evaluation.paths=[no.npy]": "no.npy",
        "train config.yaml --after 1 --nodes 3": "cannot be shared by 3 processes",
        "influence run@yarn:0.5 --corpus corpus --out x --after 1": "factor 0.5",
        "influence run --corpus later --out x --after 1": "no text offers",
        "train config.yaml": "no prepared corpus",
        "influence run --corpus later --out x": "neither a checkpoint nor a run",
    }.items():
        with pytest.raises(UserError, match=message):
            dry_run(line)


def test_jobs_are_kept_where_they_were_submitted_and_the_merge_waits(submit, run_folder):
    folder = run_folder / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\necho "$@" >>{folder}/told; echo 5\n')
    (folder / "sbatch").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    printed = submit(f"{INFLUENCE} --array 2 -- {SMALL}", path=path)
    submit(f"{INFLUENCE} --after 3,4 -- {SMALL}", path=path)
    assert "submitted x/influence.sbatch as job 5" in printed
    assert (folder / "told").read_text().splitlines() == [
        "--parsable x/influence.sbatch",
        "--parsable --dependency=afterok:5 --kill-on-invalid-dep=yes x/merge.sbatch",
        "--parsable --dependency=afterok:3:4 --kill-on-invalid-dep=yes x/influence.sbatch",
    ]
    assert (run_folder / "x" / "merge.sbatch").is_file()


def test_the_shell_of_a_process_outlives_sigterm_until_the_run_has_saved(tmp_path):
    """SLURM sends SIGTERM to all of a step, and kills what is left of it once its shells have ended."""
    template = (ROOT / "slurm" / "train.sbatch").read_text()
    process = re.search(r"^process='(.*?)^'$", template, re.DOTALL | re.MULTILINE).group(1)
    run = "trap 'sleep 0.5; touch saved; exit 85' TERM; touch listens; while :; do sleep 0.05; done"
    environment = dict.fromkeys(
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "0"
    )
    shell = subprocess.Popen(
        ["bash", "-c", process, "process", str(tmp_path / "mark"), "bash", "-c", run],
        cwd=tmp_path,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    local_slurm.wait_for("the run", (tmp_path / "listens").exists)
    os.killpg(shell.pid, signal.SIGTERM)
    assert shell.wait(10) == 0
    assert (tmp_path / "saved").exists() and (tmp_path / "mark").exists()


# Under a real SLURM.


@pytest.fixture(scope="session")
def slurm():
    local_slurm.start()


def call(*command, cwd=ROOT):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted(*arguments, cwd) -> list[str]:
    """Submit for real; the numbers of the jobs."""
    return re.findall(r"as job (\d+)", call("-m", "olmo_sparsity.cli", "submit", *arguments, cwd=cwd))


def logs_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.out"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_told_to_stop_saves_requeues_and_goes_on_to_the_end(slurm, tmp_path, processes):
    if processes > local_slurm.cores():
        pytest.skip("SLURM here has one core")
    steps = {1: 1500, 2: 500}[processes]  # enough to be stopped in the middle
    length = (f"--max_duration={steps}", "--save_interval=100000", "--console_log_interval=1")
    tiny.train_config(tmp_path)
    options = ("--cpus", 1, "--processes-per-node", processes, "--time", "30")
    (number,) = submitted("train", "config.yaml", *options, "--", *length, cwd=tmp_path)
    run = tmp_path / "run"
    log = run / f"slurm-{number}.out"
    local_slurm.wait_for("first steps", lambda: len(read_metrics(run / "metrics.jsonl")) > 20)
    subprocess.run(["scancel", "--signal=USR1", number], check=True)
    local_slurm.start_now(number)
    stopped_at = len(read_metrics(run / "metrics.jsonl"))
    assert 20 < stopped_at < steps
    job = local_slurm.wait_for_end(number, 180)
    text = log.read_text()
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), text
    assert f"stopped after step {stopped_at} (SIGUSR1)" in text
    assert f"start 2: {processes} processes" in text
    assert "resuming from" in text
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, steps + 1))

    plain = ("scripts/train.py", tmp_path / "config.yaml", *length, f"--save_folder={tmp_path}/plain")
    call(*plain)
    a, b = (
        load_file(tmp_path / name / f"step{steps:08d}" / "model.safetensors") for name in ("run", "plain")
    )
    if processes == 1:
        assert all(np.array_equal(a[name], b[name]) for name in b), (
            "not the weights of a run that never stopped"
        )
    losses = [
        [row["loss_nats"] for row in read_metrics(tmp_path / name / "metrics.jsonl")[:100]]
        for name in ("run", "plain")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.slow
def test_a_cancelled_job_saves_its_last_step_and_stays_cancelled(slurm, tmp_path):
    tiny.train_config(tmp_path)
    length = ("--max_duration=100000", "--save_interval=100000", "--console_log_interval=1")
    (number,) = submitted("train", "config.yaml", "--cpus", 1, "--time", "30", "--", *length, cwd=tmp_path)
    run = tmp_path / "run"
    local_slurm.wait_for("first steps", lambda: len(read_metrics(run / "metrics.jsonl")) > 20)
    subprocess.run(["scancel", number], check=True)
    job = local_slurm.wait_for_end(number)
    text = (run / f"slurm-{number}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), text
    steps = len(read_metrics(run / "metrics.jsonl"))
    assert f"stopped after step {steps} (SIGTERM)" in text
    local_slurm.wait_for("the checkpoint", lambda: last_whole_checkpoint(run) is not None, 30)
    assert last_whole_checkpoint(run).name == f"step{steps:08d}"


@pytest.mark.slow
def test_a_job_that_fails_says_so_once_and_is_not_tried_again(slurm, tmp_path):
    tiny.train_config(tmp_path)
    path = tmp_path / "corpus" / "train-00000.npy"
    path.write_bytes(path.read_bytes()[::-1])  # the job alone reads all of it
    options = ("--cpus", 1, "--processes-per-node", min(2, local_slurm.cores()), "--time", "30")
    (number,) = submitted("train", "config.yaml", *options, cwd=tmp_path)
    job = local_slurm.wait_for_end(number)
    text = (tmp_path / "run" / f"slurm-{number}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), text
    assert text.count("error: rank 0: checksum mismatch") == 1


@pytest.mark.slow
def test_an_array_of_shards_is_merged_to_the_records_of_one_run(slurm, tmp_path):
    tiny.train_config(tmp_path)
    length = ("--max_duration=100", "--save_interval=100", "--optimizer.learning_rate=1e-2")
    call("scripts/train.py", tmp_path / "config.yaml", *length)
    sizes = "--n-long 20 --n-short 5 --tau 0.3 --k 1,2 --targets 200 --device cpu"
    measure = sizes.split()
    where = ("--corpus", "corpus", "--out", "records", "--array", 3, "--cpus", 1, "--time", "30")
    numbers = submitted("influence", "run", *where, "--", *measure, cwd=tmp_path)
    assert len(numbers) == 2
    job = local_slurm.wait_for_end(numbers[1], 240)
    assert job["JobState"] == "COMPLETED", logs_of(tmp_path / "records")
    whole = ("scripts/influence.py", tmp_path / "run/step00000100", "--corpus", tmp_path / "corpus")
    call(*whole, "--out", tmp_path / "whole", *measure)
    a, b = load(tmp_path / "whole"), load(tmp_path / "records")
    assert len(a.over) > 10
    pd.testing.assert_frame_equal(a.targets, b.targets)
    pd.testing.assert_frame_equal(a.choices, b.choices)


@pytest.mark.slow
@needs_c4_sample
def test_an_array_prepares_the_corpus_of_one_run(slurm, tmp_path):
    dataset = ("--dataset", str(c4_folder(tmp_path / "c4")))
    where = ("--out", "data", "--array", 2, "--cpus", 1, "--time", "30")
    numbers = submitted("prepare_c4", *where, "--", *dataset, cwd=tmp_path)
    job = local_slurm.wait_for_end(numbers[1], 240)
    assert job["JobState"] == "COMPLETED", logs_of(tmp_path / "data")
    whole = ("scripts/prepare_data.py", "c4", "--out", tmp_path / "whole", "--workers", 1, *dataset)
    call(*whole)
    names = [path.name for path in (tmp_path / "whole").iterdir() if path.name != "provenance.json"]
    assert [path for path in names if path.endswith(".npy")]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "data" / name).read_bytes(), name
