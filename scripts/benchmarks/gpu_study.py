"""A model trained for the time that is left, its influence records and its Figure 2; and the corpus of all parts."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from analysis.engine import measure
from benchmarks.settings import GpuSettings
from benchmarks.timing import Json
from olmo_sparsity.checkpoint import last_whole_checkpoint, load_state
from olmo_sparsity.config.load import load_config
from olmo_sparsity.corpus.tokens import CorpusManifest
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.windows import TrainingData
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.signals import StoppedBySignal

CONFIG = "configs/pose-c4-150m.yaml"
EPOCHS = 8
"""At most: a model this large memorizes a small corpus."""
TRAINING_SHARE = 0.8
"""Of the time of its part; the rest is for starting, compiling and checkpoints."""
LEARNING_RATE = 6e-4  # the paper's 5e-5 is for billions of tokens
WINDOWS = 64
"""Of a step: the share of one process of eight."""
TINY_MODEL = ("--model.d_model=32", "--model.n_heads=2", "--model.n_layers=2")
TINY_SHAPE = (
    *(*TINY_MODEL, "--model.max_sequence_length=32"),
    *("--positions.target_length=64", "--data.num_workers=0", "--data.prefetch_factor=null"),
    *("--data.persistent_workers=false", "--data.pin_memory=false"),
)


# --- the corpus ---


def corpus_of(settings: GpuSettings) -> str:
    """The prepared corpus of all parts."""
    return settings.data or str(settings.out / "work" / "data")


def prepare_corpus(settings: GpuSettings) -> Json:
    """Docstrings of the installed packages, as `prepare_data.py docs` makes them; or the corpus that is given."""
    if settings.data is None:
        tiny: dict[str, Any] = (
            {"packages": ("packaging", "rich"), "vocab_size": 300, "group_field": "none"}
            if settings.tiny
            else {}
        )
        prepare(PrepareSettings("docs", **tiny), corpus_of(settings))
    manifest = CorpusManifest.load(corpus_of(settings))
    tokens = {name: sum(each.tokens for each in files) for name, files in manifest.splits.items()}
    return {
        "found": ", ".join(f"{count:,} tokens {name}" for name, count in tokens.items()),
        "tokens": tokens,
    }


def corpus_overrides(corpus: str) -> list[str]:
    """What a config needs to train on this corpus with its own vocabulary."""
    manifest = CorpusManifest.load(corpus)
    sizes = {
        "vocab_size": manifest.vocab_size,
        "embedding_size": -(-manifest.vocab_size // 128) * 128,
        "eos_token_id": manifest.eos_token_id,
        "pad_token_id": manifest.eos_token_id,
    }
    return [f"--corpus.path={corpus}", *(f"--model.{name}={value}" for name, value in sizes.items())]


def token_file_overrides(corpus: str) -> list[str]:
    """What a config needs to read this corpus's tokens with the vocabulary of its own: for speed alone."""
    manifest = CorpusManifest.load(corpus)
    paths = [str(Path(corpus, each.name)) for each in manifest.splits["train"]]
    return ["--corpus.path=null", f"--data.paths={paths}", f"--data.memmap_dtype={manifest.dtype}"]


def compile_overrides(settings: GpuSettings, compiled: bool) -> list[str]:
    """Compile or do not, whatever the length of the run."""
    if not compiled:
        return ["--compile=null"]
    return ["--compile.from_steps=0", *(["--compile.backend=eager"] if settings.tiny else [])]


def part_numbers(settings: GpuSettings, name: str) -> Json:
    """What another part measured. Raises `UserError` where it has not."""
    found: Json = read_json(settings.out / f"{name}.json", f"the part {name} has to be measured first")
    if found["failed"]:
        raise UserError(f"the part {name} failed, and this one needs its numbers")
    return found


# --- the model ---


def train_model(settings: GpuSettings) -> Json:
    """Train the 150M model for the time of this part, at most `EPOCHS`; resumes an earlier start."""
    started = time.monotonic()
    plan = settings.out / "work" / "model.json"
    if not plan.is_file():
        write_json(plan, _plan(settings, 60 * settings.minutes * TRAINING_SHARE))
    chosen = read_json(plan, "remove it to plan anew")
    left = 60 * settings.minutes * (1 + TRAINING_SHARE) / 2 - (time.monotonic() - started)
    config = load_config(CONFIG, [*chosen["overrides"], f"--time_limit={left}"], warn=False)
    with suppress(StoppedBySignal):  # out of time: the last checkpoint is measured
        train(config, resume=True)
    state = load_state(_checkpoint(settings))
    tokens = state.step * config.tokens_per_step
    found = f"{state.step:,} of {chosen['steps']:,} steps, {tokens / 1e6:,.1f} million tokens"
    return {"found": found, **chosen, "step": state.step, "tokens": tokens}


def _plan(settings: GpuSettings, seconds: float) -> Json:
    """How many steps fit, by the speed that was measured, and the overrides of the config."""
    speeds = {}
    for how in ("eager", "compiled"):
        with suppress(UserError):
            speeds[how] = part_numbers(settings, f"train-150m-{how}")
    if not speeds:
        raise UserError("no speed of the 150M model was measured, so the number of steps is not known")
    how = max(speeds, key=lambda each: speeds[each]["tokens_per_second"])
    best = speeds[how]
    overrides = _model_overrides(settings, best)
    overrides += compile_overrides(settings, how == "compiled")
    config = load_config(CONFIG, overrides, warn=False)
    steps_per_epoch = TrainingData(config).steps_per_epoch
    most = 8 if settings.tiny else EPOCHS * steps_per_epoch
    steps = max(1, min(most, int(seconds * best["tokens_per_second"] / config.tokens_per_step)))
    interval = max(1, steps // 4)
    overrides += [
        *(f"--max_duration={steps}", f"--scheduler.t_warmup={min(300, steps // 10)}"),
        *(f"--save_interval={interval}", f"--evaluation.interval={interval}"),
    ]
    return {"steps": steps, "epochs": steps / steps_per_epoch, "overrides": overrides}


def _model_overrides(settings: GpuSettings, best: Json) -> list[str]:
    tiny = ("--global_train_batch_size=4", "--evaluation.windows=8", "--precision=fp32", *TINY_SHAPE)
    return [
        *corpus_overrides(corpus_of(settings)),
        *(f"--global_train_batch_size={WINDOWS}", f"--device_train_microbatch_size={best['micro_batch']}"),
        *(f"--optimizer.learning_rate={LEARNING_RATE}", "--checkpoints.keep_every=null"),
        *("--save_num_checkpoints_to_keep=1", f"--save_folder={settings.out / 'work' / 'model'}"),
        *(tiny if settings.tiny else ()),
    ]


def _checkpoint(settings: GpuSettings) -> Path:
    found = last_whole_checkpoint(settings.out / "work" / "model")
    if found is None:
        raise UserError("the model has no checkpoint yet; run the same command again")
    return found


def draw_figure2(settings: GpuSettings) -> Json:
    """Influence of the model, with blocks of targets, and the figures and numbers of `figure2.py`."""
    sizes: dict[str, Any] = {"n_long": 256, "n_short": 32, "targets": 4096, "targets_per_block": 32}
    if settings.tiny:
        sizes = {"n_long": 24, "n_short": 4, "targets": 32, "targets_per_block": 4, "tau_nats": 0.01}
    measured, folder = settings.out / "work" / "influence", settings.out / "figure2"
    result = measure(str(_checkpoint(settings)), corpus_of(settings), out=measured, **sizes)
    script = Path(__file__).resolve().parents[1] / "figure2.py"
    done = subprocess.run(
        [sys.executable, str(script), str(measured), "--out", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"figure2.py: {done.stderr.strip().splitlines()[-1]}")
    found = f"{len(result.targets):,} targets: {str(result).splitlines()[1]}"
    return {"found": f"{found}; {folder / 'figure2.png'}"}
