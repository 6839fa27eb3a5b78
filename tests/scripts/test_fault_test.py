"""The fault test, and that it notices: a careful command keeps the property, and each way to break it is seen."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from faults import commands, injections  # noqa: E402

CAREFUL = """
import hashlib, json, os, sys, time
from pathlib import Path

out, text = Path("corpus"), Path("text/one.jsonl.gz")

def write(path, content):
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)

def prepare():
    content = text.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    request, tokens = out / "manifest.json", out / "train-00000.npy"
    if request.is_file() and json.loads(request.read_bytes()) != checksum:
        sys.exit("error: the corpus there was made of another text")
    out.mkdir(exist_ok=True)
    write(request, json.dumps(checksum).encode())
    write(tokens, content)

try:
    prepare()
except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")
"""
# What is changed in the careful command, the fault that finds it, and what is then said.
BROKEN = {
    "a traceback": ("except (OSError, ValueError)", "except KeyError", "full-disk", "not one line: Traceback"),
    "no line": ('sys.exit(f"error: {error}")', "sys.exit(1)", "full-disk", "not one line: nothing"),
    "two lines": ('f"error: {error}"', 'f"error: {error}\\nerror: sorry"', "full-disk", "not one line"),
    "a lie": ('sys.exit(f"error: {error}")', "sys.exit(0)", "full-disk", "another result"),
    "it trusts what it finds": ("    write(tokens", "    tokens.exists() or write(tokens", "bit-flip", "another"),
    "it cannot go on": (
        "    out.mkdir", "    if any(out.glob('*.npy')): sys.exit('error: it is there')\n    out.mkdir",
        "kill", "run again: exit 1",
    ),
    "it hangs": (
        "    out.mkdir", "    while any(out.glob('.*')): time.sleep(0.01)\n    out.mkdir",
        "kill", "still running at its time-out",
    ),
    "it tidies up too much": (
        "    out.mkdir", "    [path.unlink() for path in Path('of another').rglob('*.txt')]\n    out.mkdir",
        "kill", "was whole and is gone",
    ),
    "it is noisy": (
        "    out.mkdir", "    any(out.glob('*.npy')) and print('what?', file=sys.stderr)\n    out.mkdir",
        "kill", "standard error: what?",
    ),
}  # fmt: skip


def inject(fault, script, folder, count=12):
    """What is seen in injections of one fault into ``prepare``, played by ``script``, one after the other."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "prepare_data.py").write_text(script)
    workshop = commands.Workshop(folder / "undisturbed", folder / "scripts", time_out=3.0)
    for number in range(count):
        trial = injections.Trial(
            workshop, commands.COMMANDS["prepare"], folder / str(number), random.Random(number)
        )
        try:
            injections.FAULTS[fault](trial)
        except injections.Broken as broken:
            yield f"{trial.place}: {broken}"


@pytest.mark.parametrize("fault", sorted(injections.FAULTS.keys() - {"stalled-peer", "dead-peer"}))
def test_a_careful_command_keeps_the_property(fault, tmp_path):
    assert list(inject(fault, CAREFUL, tmp_path)) == []


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_command_is_noticed(how, tmp_path):
    careful, careless, fault, expected = BROKEN[how]
    assert careful in CAREFUL
    # Where a fault strikes is drawn; on a busy machine the command may be past the place that is broken.
    seen = inject(fault, CAREFUL.replace(careful, careless), tmp_path, count=60)
    assert any(expected in each for each in seen)


def run_script(tmp_path, *arguments):
    command = [sys.executable, ROOT / "scripts" / "fault_test.py", "--out", tmp_path / "faults", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_every_command_keeps_the_property(tmp_path):
    result = run_script(tmp_path, "--injections", 300, "--seed", 1)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "| **all** | | 300 |" in result.stdout


def test_an_unknown_name_and_a_folder_of_something_else_are_refused(tmp_path):
    result = run_script(tmp_path, "--only", "kil")
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: argument --only: 'kil' is none of kill, full-disk, ")
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "of_mine.txt").write_text("text")
    assert "holds something else" in run_script(tmp_path).stderr
