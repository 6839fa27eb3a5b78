import json
import subprocess
import sys
from pathlib import Path

from tests.support import tiny

ROOT = Path(__file__).parents[2]


def test_everything_is_timed_on_the_same_shape(tmp_path):
    tiny.train_config(tmp_path)
    command = [
        "scripts/benchmark.py",
        "train",
        "--config",
        tmp_path / "config.yaml",
        "--rounds",
        "2",
        "--steps",
        "1",
    ]
    result = subprocess.run(
        [sys.executable, *map(str, command), "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    measured = json.loads(result.stdout)
    assert measured["baseline"] == "olmo"
    assert measured["window"] == 32
    assert set(measured["results"]) == {"olmo", "position_ids", "loop", "transformers Trainer"}
    for row in measured["results"].values():
        assert row["rate"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert measured["results"]["olmo"]["ratio"] == 1
