"""What somebody meets who runs the measuring commands: help, the corpus that is assumed, and the last lines."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.records.results import LENGTH
from analysis.records.store import load_records
from analysis.stats.findings import describe_findings
from analysis.stats.summary import summarize
from tests.support import tiny
from tests.support.made_up_records import made_up_records
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.tiny import checkpoint

ROOT = Path(__file__).parents[3]
COMMANDS = ("influence", "length", "longppl", "needle", "recall", "xray")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run and its corpus, and the corpus that another one would be measured on by mistake."""
    folder = tmp_path_factory.mktemp("commands")
    corpus = tiny.write_corpus(folder / "corpus", {"heldout": tiny.random_documents(4, 80, seed=2)})
    checkpoint(folder, corpus=corpus)
    return folder


@pytest.mark.parametrize("name", slow_but(COMMANDS, "influence"))
def test_help_shows_whole_examples_without_torch(name):
    """Processor time, which does not depend on what else runs; an example goes on behind a backslash."""
    code = (
        "import sys, time; sys.argv = ['x', '--help']\n"
        f"from analysis.cli.{name} import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *({'torch', 'matplotlib', 'transformers'} & sys.modules.keys()))\n"
        "print('seconds:', time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "loaded:\n" in done.stdout
    assert float(re.search(r"seconds: (.*)", done.stdout)[1]) < 1
    lines = done.stdout.split("examples:\n")[1].split("\n\n")[0].splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        assert line.startswith("      " if before.endswith("\\") else f"  olmo-sparsity {name} ")
    assert not lines[-1].endswith("\\")


def test_a_directory_without_a_corpus_says_so_in_one_line(tmp_path, run_here):
    (tmp_path / "config.json").write_text("{}")
    done = run_here("scripts/length.py", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {tmp_path} does not say on which prepared corpus it was trained; name one with --corpus\n"
    )


def test_influence_ends_with_what_was_found_and_what_to_do_next(made, tmp_path, run_here):
    settings = ("--n-long", 20, "--n-short", 5, "--tau", -9, "--k", "1,2,4", "--targets", 70)
    command = ("scripts/influence.py", made / "run", "--out", tmp_path / "a", *settings)
    found, following = run_here(*command).stdout.splitlines()[1:]
    assert found == describe_findings(load_records(tmp_path / "a"))
    assert following == f"next: olmo-sparsity figure2 {tmp_path / 'a'}"
    assert "goes on" in run_here(*command[:3], tmp_path / "b", *settings, "--limit", 4).stdout
    shard = run_here(*command[:3], tmp_path / "c", *settings, "--shard", "1/2").stdout
    assert shard.splitlines()[-1].endswith(
        f"shards are finished: olmo-sparsity merge_records {tmp_path / 'c'}"
    )


def test_the_finding_is_that_of_the_summary(tmp_path):
    records = made_up_records(tmp_path)
    found = summarize(records, 2000)["selectors"]["leave-one-out"]["4"]
    low, value, high = (round(100 * found["net_recovery"][name]) for name in ("low", "value", "high"))
    true, placebo = (round(100 * found[f"{name}recovery"]["value"]) for name in ("", "placebo_"))
    said = describe_findings(records)
    net_recovery = f"net recovery at k = 4 is {value} % [{low}, {high}] by document"
    parts = f"of a recovery of {true} % and a placebo of {placebo} %"
    assert said.endswith(f"leave-one-out: {net_recovery}, {parts}")
    over = len(records.targets.over(1.0))
    assert said.startswith(
        f"{over} of 400 targets ({over / 400:.1%}) gain more than 1 nat from the long context"
    )


def test_a_piped_table_has_whole_lines_and_compares_no_model_with_itself(made, tmp_path, run_here):
    done = run_here("scripts/length.py", made / "run", "--out", tmp_path, "--lengths", "8,16", "--windows", 4)
    lines = done.stdout.splitlines()
    assert "held-out loss at each length [nats per token]" in lines
    assert any(
        line.startswith("[95 % interval by document (only ")
        and "; the loss at L is" in line
        and line.endswith("in parentheses: each seed")
        for line in lines
    )
    assert any(
        line.startswith("[95 % interval by document (only ") and line.endswith("rough)]") for line in lines
    )
    assert "first model" not in done.stdout
    assert len(LENGTH.load(tmp_path)["models"]) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("length", ["runs/none"]),
        ("needle", ["runs/none"]),
        ("corpora", ["runs/none", "--length", "runs/none"]),
        ("figure6", ["runs/none"]),
    ],
)
def test_a_label_that_cannot_be_drawn_is_refused_before_anything_is_read(
    name, arguments, call_main, tmp_path
):
    with refused(r"the label '\$x_\$' is no formula between its dollar signs; write"):
        call_main(name, *arguments, "--labels", "$x_$", "--out", tmp_path)
