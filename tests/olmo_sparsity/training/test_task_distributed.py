"""A synthetic task on two processes, plain and under ZeRO 2 and 3: losses and exact match are those of one process."""

import pytest

from tests.olmo_sparsity.training.test_distributed import run
from tests.support import tiny_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed_task")
    evaluation = {"interval": 6, "windows": 6}
    tiny_task.write(folder, evaluation=evaluation).rename(folder / "config.yaml")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return run(1, folder, "alone")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_two_processes_have_the_losses_and_the_exact_match_of_one(folder, alone, stage):
    rows = run(2, folder, f"zero{stage}", "--device_train_microbatch_size=2", stage=stage)
    assert rows.keys() == alone.keys()
    for step in range(1, 6):
        for name in ("loss_nats", "token_loss_nats", "id_loss_nats"):
            assert rows[step][name] == pytest.approx(alone[step][name], abs=1e-4)
    assert [row["samples"] for row in rows[6]["exact_match"]] == [6, 6, 6]
    for row, same in zip(rows[6]["exact_match"], alone[6]["exact_match"], strict=True):
        near = {name: pytest.approx(same[name], abs=1e-4) for name in ("mean_probability", "std_probability")}
        assert row == {**same, **near}
