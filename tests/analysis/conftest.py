"""What several tests of `analysis` measure, trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.training.loop import train
from tests.support import tiny

LEARNS = ("--max_duration=150", "--optimizer.learning_rate=1e-2", "--save_interval=100")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned a little to copy, its corpus, and its export in `hf`."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, *LEARNS))
    export_checkpoint(folder / "run", folder / "hf")
    return folder
