"""The benchmark of data preparation runs and compares the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.corpora import some_files

ROOT = Path(__file__).parents[2]


def test_it_times_ours_and_datasets_map(tmp_path):
    files = some_files(tmp_path / "text", files=2)
    command = [sys.executable, "scripts/benchmark.py", "data", "--rounds", "1", "--json", "--files", *files]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    result = json.loads(done.stdout)
    assert result["baseline"] == "datasets.map" and result["tokens"] > 1000
    assert all(row["rate"] > 0 for row in result["results"].values())
    assert set(result["results"]) >= {"datasets.map", "prepare_data"}
