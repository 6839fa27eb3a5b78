"""The benchmark of loss by position: both ways give the same losses, and one that does not is found."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from olmo_sparsity.util.errors import UserError
from tests.support import tiny

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import length  # noqa: E402
from benchmarks.influence import Subject  # noqa: E402


@pytest.fixture
def subject(tmp_path):
    tiny.train_config(tmp_path)
    return Subject(None, str(tmp_path / "config.yaml"))


def test_both_ways_are_the_loss_of_each_token_given_those_before_it(subject):
    losses = length.TokenLosses(subject.load(), device="cpu")
    tokens = np.random.default_rng(0).integers(1, 50, (2, 9))
    expected = []
    for row in tokens.tolist():
        with torch.no_grad():
            logits = losses.model(torch.tensor([row]), position_ids=torch.arange(9)[None]).logits[0]
        log_p = logits.double().log_softmax(-1)
        expected.append([-float(log_p[place - 1, row[place]]) for place in range(1, 9)])
    for way in (length.plain_losses, length.window_losses):
        assert way(losses, tokens) == pytest.approx(np.array(expected), abs=1e-5)


def test_losses_that_differ_are_not_timed(subject, monkeypatch):
    original = length.plain_losses
    monkeypatch.setattr(length, "plain_losses", lambda *rest: original(*rest) + 2e-4)
    monkeypatch.setattr(length, "time_in_turn", None)
    with pytest.raises(UserError, match="the losses differ by 2.0e-04 nats"):
        length.run_length_benchmark(subject, length=8, windows=2, rounds=1)


def test_a_whole_run(subject):
    command = [sys.executable, "scripts/benchmark.py", "length", "--config", subject.config, "--json"]
    command += ["--length", "12", "--windows", "2", "--rounds", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["baseline"] == length.PLAIN and found["rounds"] == 2
    assert found["results"][length.OURS]["ratio"] > 0
    assert found["largest_difference_nats"] < 1e-4
    bad = subprocess.run([*command, "--rounds", "0"], cwd=ROOT, capture_output=True, text=True)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1) and "argument --rounds: '0'" in bad.stderr
