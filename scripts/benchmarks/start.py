"""The start of a run, from the first weight to the model that is ready to train: seconds, and the host's memory.

Weights are drawn or read by rank 0 alone, as a run does, or by every rank for itself, as it was before.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import Json, about_this_run
from olmo_sparsity.checkpoint import TrainState, load_weights, step_folder
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.model.build import build_model
from olmo_sparsity.new_checkpoint import NewCheckpoint, Share
from olmo_sparsity.training.build import build_engine, initial_model, prepare_model

EVERY_RANK, RANK_ZERO = "every rank", "rank 0"


def run(config: str, overrides: Sequence[str], processes: Sequence[int]) -> Json:
    """Starts of numbers of ``processes``, with drawn weights and from a checkpoint, one after another."""
    about = about_this_run()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        of_run = replace(load_config(config, overrides), compile=None, save_folder=str(folder))
        of_run.save(folder / "config.yaml")
        weights = build_model(of_run).state_dict()
        parameters = sum(weight.numel() for weight in weights.values())
        checkpoint = NewCheckpoint.begin(step_folder(folder, 1))
        checkpoint.finish(checkpoint.write(Share(weights, {})), TrainState(1, 1), of_run, tokenizer=None)
        del weights
        for count in processes:
            for what, path in (("drawn", ""), ("read", str(checkpoint.folder))):
                for who in (EVERY_RANK, RANK_ZERO):
                    row = _started(count, [str(folder / "config.yaml"), who, path])
                    rows[f"{what} by {who}, {count} processes"] = row
    return {"benchmark": "start", "config": config, "parameters": parameters, **about, "results": rows}


def _started(count: int, arguments: Sequence[str]) -> Json:
    """The slowest rank's seconds, and the memory of the first and the last one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    with tempfile.TemporaryDirectory() as folder:
        scripts = str(Path(__file__).parents[1])
        python_path = os.pathsep.join([scripts, str(Path(scripts).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": python_path}
        command = [*launcher, "-m", "benchmarks.start", folder, *arguments]
        subprocess.run(command, check=True, env=environment)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    return {
        "seconds": max(rank["seconds"] for rank in ranks),
        "built_gb_rank_0": ranks[0]["built_gb"],
        "built_gb_last_rank": ranks[-1]["built_gb"],
        "ready_gb_rank_0": ranks[0]["ready_gb"],
        "ready_gb_last_rank": ranks[-1]["ready_gb"],
    }


def start(config: Config, who: str, checkpoint: Path | None) -> tuple[int, Json]:
    """This process's rank; seconds, and peak memory (10^9 bytes, beyond that of its libraries).

    ``built_gb``: until the model is built, what a host needs beside a GPU; ``ready_gb``: also of the wrapped model.
    """
    engine = build_engine(config)
    engine.any_rank(False)  # all are here
    of_libraries = _peak_bytes()
    started = time.perf_counter()
    if who == RANK_ZERO:
        model = initial_model(engine, config, checkpoint, is_resumed=checkpoint is not None)
    else:
        model = build_model(config)
        if checkpoint is not None:
            load_weights(model, checkpoint)
    built = _peak_bytes()
    prepare_model(engine, config, model)
    engine.any_rank(False)
    seconds = time.perf_counter() - started
    gigabytes = {
        "built_gb": (built - of_libraries) / 1e9,
        "ready_gb": (_peak_bytes() - of_libraries) / 1e9,
    }
    return engine.rank, {"seconds": seconds, **gigabytes}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(folder: str, config: str, who: str, checkpoint: str = "") -> None:
    """One rank, which writes its numbers into ``folder``."""
    rank, row = start(load_config(config, warn=False), who, Path(checkpoint) if checkpoint else None)
    (Path(folder) / f"{rank:04d}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
