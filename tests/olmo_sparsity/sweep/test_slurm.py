"""Job scripts: templates that are sound bash before and after they are filled in, and what sbatch is told."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.sweep.slurm import Array, Job, plain_word, render, words
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))


def check_shell(path: Path) -> None:
    """bash's own check of the syntax, and shellcheck's where it is installed."""
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if SHELLCHECK:
        done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_sound_bash_as_they_are(path):
    check_shell(path)


def test_words_are_replaced_and_shell_variables_stay():
    text = "run @COMMAND@ $HOME ${x[@]} $(date +%T) a@b --signal=USR1@120\n"
    assert render(text, {"COMMAND": "echo"}) == text.replace("@COMMAND@", "echo")


def test_what_is_filled_in_is_not_read_again():
    assert render("@A@ @B@\n", {"A": "@B@", "B": "x"}) == "@B@ x\n"


def test_a_list_repeats_its_line_and_an_empty_one_removes_it():
    template = "a\n#SBATCH @OPTIONS@\nb\n"
    two = render(template, {"OPTIONS": ["--x=1", "--y"]})
    assert two == "a\n#SBATCH --x=1\n#SBATCH --y\nb\n"
    assert render(template, {"OPTIONS": []}) == "a\nb\n"


@pytest.mark.parametrize("values", [{}, {"A": "1", "B": "2"}, {"B": "2"}])
def test_names_and_values_must_match(values):
    with pytest.raises(ValueError, match="differ in"):
        render("@A@\n", values)


@pytest.mark.parametrize("path", ["runs/my run", "runs/a;b", "runs/%j", "runs/$x", ""])
def test_paths_that_slurm_would_misread_are_refused(path):
    with refused("save_folder.*letters, digits"):
        plain_word(path, "save_folder")


def test_arrays_are_read_as_sbatch_writes_them():
    assert Array.parse("64") == Array.parse("1-64") == Array(64)
    assert str(Array.parse("64%16")) == "1-64%16"
    assert str(Array(8)) == "1-8"


@pytest.mark.parametrize("text", ["0", "0-3", "2-5", "a", "4%0", "1,2", "", "1" * 30, "4\n5"])
def test_other_arrays_are_refused(text):
    with refused(r"write the number of shards"):
        Array.parse(text)


@pytest.fixture
def merge(tmp_path, monkeypatch):
    """A job of this machine, and what gives it an sbatch of its own."""
    monkeypatch.chdir(tmp_path)
    names = dict.fromkeys(("NAME", "FOLDER", "OUT", "CPUS", "MERGE"), "x")

    def with_sbatch(code: str | None) -> Job:
        (tmp_path / "bin").mkdir()
        if code is not None:
            (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/bash\n{code}\n")
            (tmp_path / "bin" / "sbatch").chmod(0o755)
        usual = os.environ["PATH"] if code else ""
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{usual}")
        return Job("merge", Path("out"), {**names, "OPTIONS": []})

    return with_sbatch


def test_the_number_of_a_submitted_job_is_returned(merge, tmp_path):
    job = merge(f'echo "$@" >{tmp_path}/told; echo "17;cluster"')
    assert job.submit("--dependency=afterok:3")[0] == "17"
    assert (tmp_path / "told").read_text() == "--parsable --dependency=afterok:3 out/merge.sbatch\n"
    assert (tmp_path / "out" / "merge.sbatch").read_text() == job.script


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "no sbatch on this machine; .*--dry-run"),
        (
            "printf 'sbatch: error: invalid partition\\nsbatch: error: failed\\n' >&2; exit 1",
            "SLURM refused out/merge.sbatch: .*invalid partition; .*failed",
        ),
    ],
)
def test_no_slurm_and_slurms_own_reason_are_one_line(merge, code, message):
    with refused(message):
        merge(code).submit()


# The part of train.sbatch that decides between finished, saved and failed, with stand-ins for SLURM's programs.
def run_train_job(tmp_path: Path, python_code: str) -> tuple[int, str, bool]:
    """Run the filled-in template under bash: (exit code, output, whether it was requeued)."""
    srun = 'for r in 1 0; do SLURM_PROCID=$r SLURM_LOCALID=$r "$@" || exit; done'
    programs = {
        "srun": f"while [[ $1 == --* ]]; do shift; done; {srun}",
        "scontrol": f'[[ $1 == requeue ]] && echo "$2" >{tmp_path}/requeued',
    }
    for name, code in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    template = (ROOT / "slurm" / "train.sbatch").read_text(encoding="utf8")
    names = dict.fromkeys(re.findall("@([A-Z_]+)@", template), "1")
    train = words([sys.executable, "-c", python_code])
    values = {**names, "OPTIONS": [], "RUN": str(tmp_path), "TRAIN": train}
    script = tmp_path / "train.sbatch"
    script.write_text(render(template, values))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n", "SLURM_NTASKS": "2"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **job, "SLURM_NTASKS_PER_NODE": "2", "PATH": path}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr, (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "expected", "requeued"), [(0, 0, False), (85, 0, True), (1, 1, False), (137, 137, False)]
)
def test_only_a_saved_run_is_requeued(tmp_path, code, expected, requeued):
    assert run_train_job(tmp_path, f"raise SystemExit({code})")[::2] == (expected, requeued)
    assert not list(tmp_path.glob(".saved-by-*"))


def test_a_mark_of_an_earlier_start_requeues_nothing(tmp_path):
    (tmp_path / ".saved-by-7").touch()
    assert run_train_job(tmp_path, "")[::2] == (0, False)


def test_every_process_is_told_where_the_others_are_and_to_resume(tmp_path):
    code = "import os, sys; e = os.environ; print(*(e[n] for n in sys.argv[1:-1]), sys.argv[-1])"
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    ]
    told = f"import sys; sys.argv[1:1] = {names!r}; {code}"
    _, output, _ = run_train_job(tmp_path, told)
    assert "0 0 2 2 127.0.0.1 20007 1 --resume" in output
    assert "1 1 2 2 127.0.0.1 20007 1 --resume" in output


def test_a_signal_before_python_listens_kills_nothing(tmp_path):
    """It is ignored until then, and the run's own handler takes over."""
    early = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getppid(), signal.SIGUSR1)"
    late = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(85)); os.kill(os.getpid(), signal.SIGUSR1)"
    assert run_train_job(tmp_path, f"{early}; {late}")[::2] == (0, True)
