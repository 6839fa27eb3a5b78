"""The weights in `results/checkpoint`: small enough to keep, and the result beside them is what they give."""

import sys
from pathlib import Path

import pytest

from analysis import load, load_study
from analysis.cli import run_verify
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "results" / "checkpoint"


def test_they_are_those_of_the_result():
    weights = SHIPPED / "model.safetensors"
    result = load(SHIPPED / "influence")
    assert weights.stat().st_size < 8_000_000
    assert result.settings.model.sha256 == sha256_file(weights)
    assert len(result.over) >= 100


@pytest.mark.slow
def test_the_result_is_what_they_give(tmp_path, run_here):
    """As `make verify`, with fewer targets."""
    tokenizer = SHIPPED / "tokenizer.json"
    prepared = run_here("scripts/prepare_data.py", "docs", "--tokenizer", tokenizer, "--out", tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    options = ("--model", SHIPPED, "--corpus", tmp_path, "--targets", 10)
    done = run_here("olmo_sparsity/cli/__main__.py", "verify", SHIPPED / "influence", *options)
    if "give the text of the result" in done.stderr:
        pytest.skip(f"other package versions than in constraints.txt, under {sys.executable}")
    assert done.returncode == 0 and "verified" in done.stdout, done.stderr


def test_a_text_that_the_result_does_not_lead_to_is_wanted_by_name(monkeypatch, tmp_path):
    """It was measured on a folder that is not here, and nobody can open "a.txt and 7 more"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["verify", str(SHIPPED / "influence")])
    with pytest.raises(UserError, match="was measured on .*; name this text with --text or --corpus"):
        run_verify()


def test_reading_losses_that_are_sums_says_so(caplog):
    """Whoever draws their histogram, or takes another tau, would get a wrong number."""
    load_study(ROOT / "results" / "encodings")
    assert "no histogram and no other tau" in caplog.text
