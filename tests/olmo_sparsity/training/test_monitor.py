"""What a run writes and shows: metrics.jsonl, progress, Weights & Biases, TensorBoard."""

import importlib.util
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from olmo_sparsity.training import log as log_module
from olmo_sparsity.training.log import (
    RUN_ID_NAME,
    TENSORBOARD_FOLDER,
    Monitor,
    flops_per_token,
    peak_memory_gb,
    read_metrics,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.signals import StoppedBySignal
from tests.support import tiny

ROOT = Path(__file__).parents[3]
HELDOUT = {
    "heldout_loss_nats": 3.0,
    "heldout_tokens": 10,
    "heldout_loss_by_position": [
        {"from": 0, "to": 16, "loss_nats": 3.5, "tokens": 4},
        {"from": 16, "to": 128, "loss_nats": 2.5, "tokens": 6},
    ],
}


def run(config, first=0, last=6, evaluate_at=(), **options):
    """As the loop uses it, with losses that fall."""
    with Monitor(config, first_step=first, last_step=last, **options) as monitor:
        for step in range(first + 1, last + 1):
            monitor.log(step, {"loss_nats": 5 - step / 10, "learning_rate": 1e-3, "grad_norm": 1.0})
            if step in evaluate_at:
                monitor.log_evaluation(step, HELDOUT)


def rows_of(config):
    return read_metrics(Path(config.save_folder) / "metrics.jsonl")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(log_module, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


class TestMetricsFile:
    def test_rows_at_the_interval_and_at_the_end(self, tmp_path):
        config = tiny.train_config(tmp_path, "--console_log_interval=4")
        run(config, evaluate_at=(3,))
        training = [row for row in rows_of(config) if "loss_nats" in row]
        assert [(row["step"], row["tokens"], row["loss_nats"]) for row in training] == [
            (4, 512, 4.6),
            (6, 768, 4.4),
        ]
        assert {"step": 3, "tokens": 384, **HELDOUT} in rows_of(config)
        assert all(row["tokens_per_second"] > 0 and row["peak_memory_gb"] > 0 for row in training)
        assert all("mfu" not in row for row in training)  # a processor's peak is not known

    def test_other_processes_write_and_show_nothing(self, tmp_path, capsys):
        config = tiny.train_config(tmp_path, "--tensorboard")
        run(config, evaluate_at=(2,), enabled=False)
        assert not Path(config.save_folder).exists()
        assert capsys.readouterr() == ("", "")


class TestSpeed:
    def test_tokens_per_second_over_the_last_steps(self, tmp_path, clock):
        config = tiny.train_config(tmp_path, "--speed_monitor.window_size=2", "--console_log_interval=1")
        with Monitor(config, first_step=0, last_step=4) as monitor:
            for step, seconds in enumerate([8, 1, 1, 4], 1):
                clock.seconds += seconds
                monitor.log(step, {"loss_nats": 1.0})
        rates = [row["tokens_per_second"] for row in rows_of(config)]
        assert rates == pytest.approx([128 / 8, 256 / 9, 256 / 2, 256 / 5])

    def test_pauses_do_not_count(self, tmp_path, clock):
        config = tiny.train_config(tmp_path, "--console_log_interval=1")
        with Monitor(config, first_step=0, last_step=2) as monitor:
            for step in (1, 2):
                clock.seconds += 1
                monitor.log(step, {"loss_nats": 1.0})
                with monitor.paused():
                    clock.seconds += 50
        assert [row["tokens_per_second"] for row in rows_of(config)] == pytest.approx([128, 128])

    def test_utilisation_is_of_all_devices(self, tmp_path, clock):
        config = tiny.train_config(
            tmp_path, "--console_log_interval=1", "--speed_monitor.gpu_flops_available=1e9"
        )
        with Monitor(config, first_step=0, last_step=1, processes=4) as monitor:
            clock.seconds += 2
            monitor.log(1, {"loss_nats": 1.0})
        assert rows_of(config)[0]["mfu"] == pytest.approx(128 / 2 * flops_per_token(config) / 4e9)

    def test_memory_is_that_of_this_process(self):
        assert 0.05 < peak_memory_gb(torch.device("cpu")) < 100


class FakeWandb(types.ModuleType):
    """Stands for the package: keeps what it is given."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.opened, self.logged, self.exits, self.step = [], [], [], 0
        self.error = None

    def init(self, **options):
        if self.error:
            raise self.error
        self.opened.append(options)
        return types.SimpleNamespace(
            step=self.step,
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda exit_code: self.exits.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def wandb_config(folder, *overrides, **section):
    return tiny.train_config(
        folder, *overrides, wandb={"project": "p", "entity": "e", "name": "n", **section}
    )


class TestWeightsAndBiases:
    def test_olmos_section_is_passed_on(self, tmp_path, wandb):
        config = wandb_config(tmp_path, tags=["a"], group="g", log_interval=2)
        run(config, evaluate_at=(3,))
        (options,) = wandb.opened
        assert {key: options[key] for key in ("project", "entity", "name", "group", "tags", "dir")} == {
            **{"project": "p", "entity": "e", "name": "n", "group": "g"},
            **{"tags": ["a"], "dir": config.save_folder},
        }
        assert options["config"]["optimizer"]["learning_rate"] == 3e-3 and "wandb" not in options["config"]
        assert [step for step, _ in wandb.logged] == [2, 3, 4, 6]
        assert wandb.logged[0][1]["loss_nats"] == 4.8
        assert wandb.logged[1][1] == {
            "tokens": 384,
            "heldout_loss_nats": 3.0,
            "heldout_tokens": 10,
            "heldout_loss_nats_by_position/000-016": 3.5,
            "heldout_loss_nats_by_position/016-128": 2.5,
        }
        assert wandb.exits == [0]

    def test_a_resumed_run_goes_on_in_the_same_one(self, tmp_path, wandb):
        config = wandb_config(tmp_path)
        run(config, last=3)
        wandb.step = 5  # it was killed after logging step 4, beyond its checkpoint at 3
        run(config, first=3)
        assert [step for step, _ in wandb.logged] == [1, 2, 3, 5, 6]
        run(config, first=0)
        first, second, afresh = (options["id"] for options in wandb.opened)
        assert first == second != afresh
        assert all(options["resume"] == "allow" for options in wandb.opened)
        assert (Path(config.save_folder) / RUN_ID_NAME).read_text().strip() == afresh

    @pytest.mark.parametrize(
        ("error", "code"), [(UserError, 1), (StoppedBySignal, 0), (KeyboardInterrupt, 1)]
    )
    def test_a_run_that_fails_is_marked_so(self, tmp_path, wandb, error, code):
        config = wandb_config(tmp_path)
        with pytest.raises(error), Monitor(config, first_step=0, last_step=3):
            raise error("x")
        assert wandb.exits == [code]

    def test_a_run_whose_metrics_cannot_be_written_is_marked_so(self, tmp_path, wandb, monkeypatch):
        def full(*_):
            raise OSError("no space left")

        monkeypatch.setattr("olmo_sparsity.training.log.MetricsFile", full)
        with (
            pytest.raises(OSError),
            Monitor(wandb_config(tmp_path), first_step=0, last_step=3),
        ):
            pass
        assert wandb.exits == [1]

    @pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
    def test_the_real_package_offline(self, tmp_path):
        wandb_config(tmp_path)
        code = (
            "from olmo_sparsity.config.load import load_config;"
            "from tests.olmo_sparsity.training.test_monitor import run;"
            f"config = load_config({str(tmp_path / 'config.yaml')!r});"
            "run(config, last=3, evaluate_at=(2,)); run(config, first=3)"
        )
        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, timeout=120)
        identity = (tmp_path / "run" / RUN_ID_NAME).read_text().strip()
        found = list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
        assert found  # two of the same id, unless both started within one second
        content = b"".join(path.read_bytes() for path in found)
        assert all(name in content for name in (b"loss_nats", b"heldout_loss_nats", b"peak_memory_gb"))


class TestTensorBoard:
    def read(self, config):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(Path(config.save_folder) / TENSORBOARD_FOLDER)).Reload()
        return {
            tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]
        }

    def test_curves(self, tmp_path):
        config = tiny.train_config(tmp_path, "--tensorboard", "--console_log_interval=2")
        run(config, evaluate_at=(3,))
        curves = self.read(config)
        assert curves["loss_nats"] == pytest.approx({2: 4.8, 4: 4.6, 6: 4.4})
        assert curves["heldout_loss_nats"] == {3: 3.0}
        assert curves["heldout_loss_nats_by_position/016-128"] == {3: 2.5}
        assert "tokens_per_second" in curves and "peak_memory_gb" in curves

    def test_a_resumed_run_has_every_step_once(self, tmp_path):
        config = tiny.train_config(tmp_path, "--tensorboard")
        run(config, last=5)
        time.sleep(1.1)  # event files are ordered by their second
        run(config, first=3, last=6)
        assert list(self.read(config)["loss_nats"]) == [1, 2, 3, 4, 5, 6]
