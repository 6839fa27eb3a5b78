"""scripts/submit.py: what it prints and refuses, and jobs under a real SLURM of one node where one can be had."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from analysis.records import load_records
from olmo_sparsity.errors import UserError
from tests import local_slurm, tiny
from tests.test_corpora import c4_folder, needs_c4_sample
from tests.test_slurm import check_shell

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


def call(*command, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def submit(*arguments, cwd=ROOT, **environment):
    return call(SCRIPTS / "submit.py", *arguments, cwd=cwd, **environment)


@pytest.fixture
def submit_here(monkeypatch, capsys):
    """The script in this process, which saves the seconds that importing torch takes; returns what it printed."""
    specification = importlib.util.spec_from_file_location("submit_script", SCRIPTS / "submit.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)  # dataclasses look there for their module
    specification.loader.exec_module(module)

    def run(*arguments, cwd=ROOT, path="") -> str:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            patch.setenv("PATH", path)
            patch.setattr(sys, "argv", ["submit.py", *map(str, arguments)])
            module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def dry_run(submit_here):
    """The job scripts, printed as on a machine without sbatch."""

    def run(kind, *arguments, cwd=ROOT) -> str:
        return submit_here(kind, "--dry-run", *arguments, cwd=cwd)

    return run


@pytest.fixture
def run_folder(tmp_path):
    """A checkpoint's and a corpus's outer shape: enough to submit, not to measure."""
    config = tiny.train_config(tmp_path)
    checkpoint = Path(config.save_folder) / "step00000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").touch()
    return tmp_path


def test_base_yaml_becomes_a_sound_job_of_many_nodes(dry_run, tmp_path):
    options = ("--nodes", 2, "--gpus-per-node", 4, "--cpus", 6, "--time", "24:00:00", "--partition", "gpu")
    more = ("--account", "lab", "--sbatch=--qos=high", "--sbatch=--exclusive")
    script = dry_run("train", "configs/base.yaml", *options, *more, "--", "--seed=2")
    path = tmp_path / "train.sbatch"
    path.write_text(script)
    check_shell(path)
    directives = re.findall("^#SBATCH (.*)", script, re.MULTILINE)
    expected = [
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=6",
        "--gpus-per-node=4",
        "--time=24:00:00",
    ]
    expected += [
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--exclusive",
        "--requeue",
        "--signal=USR1@120",
    ]
    expected += ["--output=runs/base/slurm-%j.out", f"--chdir={ROOT}", "--open-mode=append"]
    assert set(expected) <= set(directives)
    assert "configs/base.yaml --seed=2 --resume)" in script
    assert not re.findall("@[A-Z_]+@", script)


def test_a_job_needs_no_option_at_all(dry_run):
    directives = re.findall("^#SBATCH (.*)", dry_run("train", "configs/demo.yaml"), re.MULTILINE)
    assert "--nodes=1" in directives
    assert "--ntasks-per-node=1" in directives
    assert not [line for line in directives if re.match("--(gpus|time|partition|account|mem)", line)]


def test_c4_becomes_an_array_and_a_merge(dry_run, tmp_path):
    text = dry_run(
        "prepare_c4", "--out", "data/c4", "--array", "64%16", "--", "--limit-tokens", "10000000000"
    )
    array, merge = text.split("\n# ---- then, with sbatch --dependency=afterok:<the job above>\n")
    for script in (array, merge):
        path = tmp_path / "x.sbatch"
        path.write_text(script)
        check_shell(path)
    assert "#SBATCH --array=1-64%16\n" in array
    assert (
        'c4 --out data/c4 --limit-tokens 10000000000 --workers=4 --shard="$SLURM_ARRAY_TASK_ID/64"' in array
    )
    assert "c4 --out data/c4 --limit-tokens 10000000000 --merge --workers=4\n" in merge


def test_several_checkpoints_become_one_array_with_folders_of_their_own(dry_run, run_folder):
    second = run_folder / "run" / "step00000009"
    second.mkdir()
    (second / "model.safetensors").touch()
    checkpoints = ("run/step00000008", "run")
    common = ("--corpus", "corpus", "--out", "records", "--array", "3%2", "--gpus-per-node", 1)
    text = dry_run("influence", *checkpoints, *common, "--", "--tau", "0.5", cwd=run_folder)
    array, _, merge = text.partition("\n# ---- then")
    (run_folder / "x.sbatch").write_text(array)
    check_shell(run_folder / "x.sbatch")
    assert "#SBATCH --array=1-6%2\n" in array
    assert "checkpoints=(run/step00000008 run/step00000009)\n" in array
    assert "records=(records/run-step00000008 records/run-step00000009)\n" in array
    assert "--corpus corpus --tau 0.5\n" in array
    assert "merge_records.py records/run-step00000008 records/run-step00000009\n" in merge
    assert "#SBATCH --gpus-per-node=1\n" in array
    assert "gpus" not in merge


def test_each_task_gets_its_checkpoint_and_shard(dry_run, run_folder):
    """The array's arithmetic, run by bash with `echo` for srun."""
    text = dry_run("influence", "run", "--corpus", "corpus", "--out", "a", "--array", "3", cwd=run_folder)
    array = text.partition("\n# ---- then")[0].replace("checkpoints=(", "checkpoints=(first ")
    array = array.replace("records=(", "records=(one ").replace("srun ", "echo srun ")
    seen = []
    for task in range(1, 7):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
        done = subprocess.run(["bash", "-c", array], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        seen.append(re.search(r"influence.py (\S+) --out (\S+) --shard (\S+)", done.stdout).groups())
    pairs = [("first", "one"), ("run/step00000008", "a")]
    assert seen == [(*pair, f"{shard}/3") for pair, shard in itertools.product(pairs, (1, 2, 3))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "none.yaml"), "none.yaml: there is no such config file"),
        (("train", "config.yaml", "--", "--model.d_modle=3"), "did you mean model.d_model"),
        (
            ("train", "config.yaml", "--nodes", 3, "--gpus-per-node", 2),
            r"size 4 cannot be shared by 6 processes",
        ),
        (("train", "config.yaml", "--", "--save_folder=a b"), "save_folder 'a b': SLURM needs a path"),
        (("influence", "none", "--corpus", "corpus", "--out", "x"), "none is neither a checkpoint nor a run"),
        (("influence", "run", "--corpus", "none", "--out", "x"), "none is no prepared corpus"),
        (("influence", "run", "run", "--corpus", "corpus", "--out", "x"), "checkpoints of the same name"),
        (
            ("influence", "run", "--corpus", "corpus", "--out", "x", "--", "--shard=1/2"),
            "--shard is decided by",
        ),
        (("prepare_c4", "--out", "x", "--array", "2-5"), "--array 2-5: write the number of shards"),
        (("prepare_c4", "--out", "x", "--", "--workers=2"), "--workers is decided by submit.py"),
    ],
)
def test_what_would_fail_is_refused_before_it_waits_in_the_queue(submit_here, run_folder, arguments, message):
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        submit_here(*arguments, cwd=run_folder)
    assert "\n" not in str(error.value)
    assert sorted(run_folder.rglob("*")) == before


def test_a_machine_without_slurm_is_one_line(run_folder):
    done = submit("train", "config.yaml", cwd=run_folder, PATH="")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no sbatch on this machine")
    assert done.stderr.count("\n") == 1, done.stderr


def test_jobs_are_kept_where_they_were_submitted_and_the_merge_waits(submit_here, run_folder):
    folder = run_folder / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\necho "$@" >>{folder}/told; echo 5\n')
    (folder / "sbatch").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    arguments = ("influence", "run", "--corpus", "corpus", "--out", "x", "--array", 2)
    printed = submit_here(*arguments, cwd=run_folder, path=path)
    assert "submitted x/influence.sbatch as job 5" in printed
    assert (folder / "told").read_text().splitlines() == [
        "--parsable x/influence.sbatch",
        "--parsable --dependency=afterok:5 --kill-on-invalid-dep=yes x/merge.sbatch",
    ]
    assert (run_folder / "x" / "merge.sbatch").is_file()


# Under a real SLURM.


@pytest.fixture(scope="session")
def slurm():
    local_slurm.start()


def submitted(*arguments, cwd) -> list[str]:
    """Submit for real; the numbers of the jobs."""
    done = submit(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return re.findall(r"as job (\d+)", done.stdout)


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


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
    local_slurm.wait_for("first steps", lambda: len(rows(run)) > 20)
    subprocess.run(["scancel", "--signal=USR1", number], check=True)
    local_slurm.start_now(number)
    stopped_at = len(rows(run))
    assert 20 < stopped_at < steps
    job = local_slurm.wait_for_end(number, 180)
    text = log.read_text()
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), text
    assert f"stopped after step {stopped_at} (SIGUSR1)" in text
    assert f"start 2: {processes} processes" in text
    assert "resuming from" in text
    assert [row["step"] for row in rows(run)] == list(range(1, steps + 1))

    plain = ("scripts/train.py", tmp_path / "config.yaml", *length, f"--save_folder={tmp_path}/plain")
    done = call(*plain)
    assert done.returncode == 0, done.stderr
    a, b = (
        load_file(tmp_path / name / f"step{steps:08d}" / "model.safetensors") for name in ("run", "plain")
    )
    if processes == 1:
        assert all(np.array_equal(a[name], b[name]) for name in b), (
            "not the weights of a run that never stopped"
        )
    losses = [[row["loss_nats"] for row in rows(tmp_path / name)[:100]] for name in ("run", "plain")]
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.slow
def test_a_job_that_fails_says_so_once_and_is_not_tried_again(slurm, tmp_path):
    tiny.train_config(tmp_path)
    options = ("--cpus", 1, "--processes-per-node", min(2, local_slurm.cores()), "--time", "30")
    (number,) = submitted("train", "config.yaml", *options, "--", "--corpus.path=nowhere", cwd=tmp_path)
    job = local_slurm.wait_for_end(number)
    text = (tmp_path / "run" / f"slurm-{number}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), text
    assert text.count("error: nowhere is no prepared corpus") == 1


@pytest.mark.slow
def test_an_array_of_shards_is_merged_to_the_records_of_one_run(slurm, tmp_path):
    tiny.train_config(tmp_path)
    length = ("--max_duration=100", "--save_interval=100", "--optimizer.learning_rate=1e-2")
    assert call("scripts/train.py", tmp_path / "config.yaml", *length).returncode == 0
    measure = (
        "--n-long",
        "20",
        "--n-short",
        "5",
        "--tau",
        "0.3",
        "--k",
        "1,2",
        "--targets",
        "200",
        "--device",
        "cpu",
    )
    where = ("--corpus", "corpus", "--out", "records", "--array", 3, "--cpus", 1, "--time", "30")
    numbers = submitted("influence", "run", *where, "--", *measure, cwd=tmp_path)
    assert len(numbers) == 2
    job = local_slurm.wait_for_end(numbers[1], 240)
    logs = "".join(path.read_text() for path in (tmp_path / "records").glob("slurm-*.out"))
    assert job["JobState"] == "COMPLETED", logs
    whole = ("scripts/influence.py", tmp_path / "run/step00000100", "--corpus", tmp_path / "corpus")
    assert call(*whole, "--out", tmp_path / "whole", *measure).returncode == 0
    a, b = load_records(tmp_path / "whole"), load_records(tmp_path / "records")
    assert len(a.over) > 10
    assert np.array_equal(a.targets.loss_long_nats, b.targets.loss_long_nats)
    for name, selector, context in itertools.product(
        ("loss_nats", "selected", "influence"), a.manifest.selectors, ("true", "placebo")
    ):
        assert np.array_equal(getattr(a, name)[selector][context], getattr(b, name)[selector][context])


@pytest.mark.slow
@needs_c4_sample
def test_an_array_prepares_the_corpus_of_one_run(slurm, tmp_path):
    dataset = ("--dataset", str(c4_folder(tmp_path / "c4")))
    where = ("--out", "data", "--array", 2, "--cpus", 1, "--time", "30")
    numbers = submitted("prepare_c4", *where, "--", *dataset, cwd=tmp_path)
    job = local_slurm.wait_for_end(numbers[1], 240)
    logs = "".join(path.read_text() for path in (tmp_path / "data").glob("slurm-*.out"))
    assert job["JobState"] == "COMPLETED", logs
    whole = ("scripts/prepare_data.py", "c4", "--out", tmp_path / "whole", "--workers", 1, *dataset)
    assert call(*whole).returncode == 0
    names = [path.name for path in (tmp_path / "whole").iterdir() if path.name != "provenance.json"]
    assert [path for path in names if path.endswith(".npy")]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "data" / name).read_bytes(), name
