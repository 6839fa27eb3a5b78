"""The commands under test, what each is given, and what its right result is.

A scene is a folder that a command runs in, with everything it reads and writes, all named by relative paths. The
scene of an undisturbed run is the reference, and what it wrote is given to commands further down the pipeline.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults.processes import Moment, Process, in_fork, ranks, wait_until
from faults.whole import BYSTANDER, KEPT_CHECKPOINTS, Ended, Files, complaints_about, digest, files_of

SECONDS_FOR_PEERS = 5.0
"""Time-out of the processes of one training for each other."""

Result = dict[str, str]
"""What a command was run for: checksums by name."""

CONFIG = f"""\
seed: 3
model: {{d_model: 32, n_heads: 4, n_layers: 2, mlp_ratio: 4, vocab_size: 320, embedding_size: 384, rope: true,
        include_bias: false, layer_norm_type: rms, attention_dropout: 0.0, residual_dropout: 0.1,
        embedding_dropout: 0.0, max_sequence_length: 32, weight_tying: true, eos_token_id: 0, pad_token_id: 0}}
optimizer: {{name: adamw, learning_rate: 1.0e-2, weight_decay: 0.1}}
scheduler: {{name: linear_with_warmup, t_warmup: 4, alpha_f: 0.0, warmup_min_lr: 0.0}}
positions: {{scheme: pose, target_length: 64}}
corpus: {{path: corpus}}
save_folder: run
max_duration: 16
save_interval: 4
save_num_checkpoints_to_keep: {KEPT_CHECKPOINTS}
global_train_batch_size: 8
device_train_microbatch_size: 4
precision: fp32
max_grad_norm: 1.0
"""


@dataclass(frozen=True)
class Command:
    """A command, what it is given, and where its result is."""

    name: str
    script: str
    arguments: str
    out: str
    """The one folder that it may change."""
    result: Callable[[Path], Result]
    """The result that stands in a folder ``out``."""
    given: dict[str, str] = field(default_factory=dict)
    """Folders of its scene, each with the command in whose reference it is found."""
    again: str = ""
    """What is added when it is run again, as its own message says."""
    processes: int = 1
    replaces_out: bool = False
    """The folder is replaced as a whole, so that nothing else belongs into it."""


class Run:
    """A command that is running in a scene."""

    def __init__(
        self,
        command: Command,
        workshop: Workshop,
        scene: Path,
        more: str = "",
        *,
        rank: int = 0,
        moment: Moment | None = None,
    ):
        """``moment``: when process ``rank`` is to be paused."""
        self.time_out = workshop.time_out
        script = workshop.scripts / command.script
        arguments = [*command.arguments.split(), *more.split()]
        environment = {"OLMO_SPARSITY_TIMEOUT": str(SECONDS_FOR_PEERS)}
        self.processes = [
            Process(script, arguments, scene, environment | each, moment if i == rank else None)
            for i, each in enumerate(ranks(command.processes))
        ]
        self.disturbed = self.processes[rank]

    def end(self) -> Ended:
        """Wait for its end, and kill it at its time-out."""
        wait_until(lambda: sum(each.look() for each in self.processes) == len(self.processes), self.time_out)
        codes = tuple(each.code for each in self.processes)
        lasted = max(each.lasted for each in self.processes)
        for each in self.processes:
            each.kill()
        errors = tuple(each.errors.decode(errors="replace") for each in self.processes)
        changes = tuple(each.changes for each in self.processes)
        self.close()
        return Ended(codes, errors, lasted, changes)

    def close(self) -> None:
        """Leave nothing running."""
        for each in self.processes:
            each.close()


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a command."""

    scene: Path
    result: Result
    files: Files
    """Every file of the scene at the end."""
    seconds: float
    changes: tuple[int, ...]
    """How many changes of files each of its processes made."""


class Workshop:
    """Makes scenes, and each undisturbed reference when it is first needed."""

    def __init__(self, folder: Path, scripts: Path, time_out: float):
        self.folder, self.scripts, self.time_out = folder, scripts, time_out
        self.references: dict[str, Reference] = {}

    def begin(self, command: Command, scene: Path) -> None:
        """Make the scene in which ``command`` starts."""
        for each in command.given.values():
            self.reference(COMMANDS[each])
        scene.mkdir(parents=True, exist_ok=True)
        write_inputs(scene)
        for path, maker in command.given.items():
            shutil.copytree(self.references[maker].scene / path, scene / path, dirs_exist_ok=True)
        write_bystanders(scene, None if command.replaces_out else scene / command.out)

    def reference(self, command: Command) -> Reference:
        """The undisturbed run of ``command``; raises `RuntimeError` where it does not end well."""
        if command.name not in self.references:
            scene = self.folder / command.name
            self.begin(command, scene)
            ended = Run(command, self, scene).end()
            if complaints := complaints_about(ended):
                raise RuntimeError(
                    f"{command.name} fails undisturbed: {complaints[0]}\n{''.join(ended.errors)}"
                )
            result = result_of(command, scene)
            self.references[command.name] = Reference(
                scene, result, files_of(scene), ended.seconds, ended.changes
            )
        return self.references[command.name]


def result_of(command: Command, scene: Path) -> Result:
    """The result that stands in a scene; what cannot be read counts as a result, never as the right one."""
    try:
        return in_fork(command.result, scene / command.out)
    except RuntimeError as error:
        return {"unreadable": str(error)}


def write_inputs(scene: Path, seed: int = 0) -> None:
    """Made-up text, in which documents repeat their own words, and a config."""
    words = random.Random(seed)
    (scene / "text").mkdir(exist_ok=True)
    for name, count in {"one": 24, "two": 24, "three": 24, "four": 24, "heldout": 24}.items():
        lines = [json.dumps({"text": _document(words)}) + "\n" for _ in range(count)]
        path = scene / "text" / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
        os.utime(path, (0, 0))  # a text is known by its name, size and time of change
    (scene / "config.yaml").write_text(CONFIG, encoding="utf8")


def _document(words: random.Random) -> str:
    syllables = ["ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu", "ve", "za"]
    names = ["".join(words.choices(syllables, k=3)).capitalize() for _ in range(4)]
    verbs = ["saw", "met", "called", "followed", "heard"]
    sentences = [f"{words.choice(names)} {words.choice(verbs)} {words.choice(names)}." for _ in range(30)]
    return "\n\n".join(" ".join(sentences[start : start + 6]) for start in range(0, 30, 6))


def write_bystanders(scene: Path, out: Path | None) -> None:
    """Files of somebody else, beside the output folder and in it."""
    beside = scene / "of another" / "step00000001"
    for folder in (scene, beside, *([out] if out else [])):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BYSTANDER).write_text("not made by any command\n", encoding="utf8")


def _files(folder: Path, *patterns: str) -> Result:
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): digest(path) for path in paths if path.name != BYSTANDER}


def corpus(folder: Path) -> Result:
    """Token files with their groups, tokenizer and manifest of a corpus."""
    return _files(folder, "*.npy", "*.groups.jsonl.gz", "tokenizer.json", "manifest.json")


def second_share(folder: Path) -> Result:
    """Token files of the second of two shares of four texts, and the tokenizer."""
    return _files(folder, "train-00001.npy", "train-00003.npy", "tokenizer.json")


def training(folder: Path) -> Result:
    """The last checkpoint's weights and optimizer state, and the loss of every step."""
    last = max(folder.glob("step*"), default=folder / "no checkpoint")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()]
    losses = json.dumps([(row["step"], row["loss_nats"]) for row in rows])
    return {"checkpoint": last.name, "losses": losses, **_files(last, "*.safetensors")}


def records(folder: Path) -> Result:
    """Settings, targets, choices and texts, as every reader of a result gets them."""
    from analysis import load

    found = load(folder)
    settings = {"settings": digest(json.dumps(found.settings, sort_keys=True).encode())}
    frames = {"targets": found.targets, "choices": found.choices, "texts": found.texts}
    return settings | {name: digest(frame.to_json().encode()) for name, frame in frames.items()}


def parts(folder: Path) -> Result:
    """How many batches one shard has finished."""
    return {"parts": str(len([*folder.glob("parts/*/result.json")]))}


def export(folder: Path) -> Result:
    """All that transformers reads."""
    found = _files(folder, "*")
    return {name: value for name, value in found.items() if name != "olmo_sparsity.json"}  # that has the time


def figures(folder: Path) -> Result:
    """Every figure, and the numbers that are drawn."""
    return _files(folder, "*.png", "numbers.csv")


_PREPARE = "text --files text/one.jsonl.gz text/two.jsonl.gz text/three.jsonl.gz --out corpus --workers 1"
_BPE = f"{_PREPARE} --heldout-fraction 0.2 --vocab-size 320"
_TOKENIZED = (
    "text --files text/one.jsonl.gz text/two.jsonl.gz text/three.jsonl.gz text/four.jsonl.gz --workers 1 "
    "--heldout-files text/heldout.jsonl.gz --tokenizer ready/tokenizer.json --out corpus"
)
_MEASURE = (
    "run --corpus corpus --out records --n-long 24 --n-short 8 --targets 128 --tau 0.0012 --k 1,2,4 "
    "--device cpu --targets-per-block 1 --selectors leave-one-out,attention,random --tokens-per-batch 4096"
)
_TRAINED = {"corpus": "prepare", "run": "train"}


def _commands(*every: Command) -> dict[str, Command]:
    return {command.name: command for command in every}


# fmt: off
UNDER_TEST = _commands(
    Command("prepare", "prepare_data.py", _BPE, "corpus", corpus),
    Command(
        "prepare-shard", "prepare_data.py", f"{_TOKENIZED} --shard 2/2", "corpus", second_share,
        {"ready": "ready", "corpus": "first-share"},
    ),
    Command(
        "prepare-merge", "prepare_data.py", f"{_TOKENIZED} --merge", "corpus", corpus,
        {"ready": "ready", "corpus": "prepare-shard"},
    ),
    Command("train", "train.py", "config.yaml", "run", training, {"corpus": "prepare"}, again="--resume"),
    Command(
        "train-resume", "train.py", "config.yaml --resume", "run", training, {"corpus": "prepare", "run": "half"}
    ),
    Command(
        "train-2", "train.py", "config.yaml", "run", training, {"corpus": "prepare"}, again="--resume", processes=2
    ),
    Command(
        "train-2-resume", "train.py", "config.yaml --resume", "run", training,
        {"corpus": "prepare", "run": "half-2"}, processes=2,
    ),
    Command("influence", "influence.py", _MEASURE, "records", records, _TRAINED),
    Command(
        "influence-shard", "influence.py", f"{_MEASURE} --shard 2/2", "records", records,
        {**_TRAINED, "records": "first-shard"},
    ),
    Command(
        "export", "export_hf.py", "run --out export --overwrite", "export", export,
        {"run": "train", "export": "earlier-export"}, replaces_out=True,
    ),
    Command(
        "figure2", "figure2.py", "records --out figures --resamples 1000", "figures", figures, {"records": "influence"}
    ),
)
"""Commands that faults are injected into."""
COMMANDS = UNDER_TEST | _commands(
    Command("ready", "prepare_data.py", _BPE.replace("--out corpus", "--out ready"), "ready", corpus),
    Command("first-share", "prepare_data.py", f"{_TOKENIZED} --shard 1/2", "corpus", corpus, {"ready": "ready"}),
    Command("half", "train.py", "config.yaml --stop_at=8", "run", training, {"corpus": "prepare"}),
    Command("half-2", "train.py", "config.yaml --stop_at=8", "run", training, {"corpus": "prepare"}, processes=2),
    Command("first-shard", "influence.py", f"{_MEASURE} --shard 1/2", "records", parts, _TRAINED),
    Command("other-corpus", "prepare_data.py", f"{_BPE} --seed 1", "corpus", corpus),
    Command("earlier-export", "export_hf.py", "run --out export", "export", export, {"run": "half"}, replaces_out=True),
)
"""All, with those whose results the ones under test are given."""
# fmt: on
