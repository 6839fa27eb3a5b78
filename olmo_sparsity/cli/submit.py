"""Submit a command to SLURM: training, a sweep, preparation of C4, a measurement; or print the calls of sbatch.

examples:
  olmo-sparsity submit train configs/base.yaml --seed=2 --nodes 2 --gpus-per-node 4 --time 24:00:00 --dry-run
  olmo-sparsity submit sweep configs/base.yaml --grid seed=1,2,3,4 --out runs/seeds --jobs 2 --gpus-per-node 1
  olmo-sparsity submit prepare_data c4 --out data/c4 --limit-tokens 10000000000 --array 64%16
  olmo-sparsity submit measure runs/base --corpus data/c4 --out runs/base/influence --array 8 \\
      --gpus-per-node 1 --partition gpu --account lab --sbatch=--qos=high

a chain, each with --after the last job that the one before it has printed:
  olmo-sparsity submit prepare_data c4 --out data/c4 --array 64%16
  olmo-sparsity submit train configs/base.yaml --corpus.path=data/c4 --gpus-per-node 4 --after 12
  olmo-sparsity submit measure runs/base --corpus data/c4 --out runs/base/influence --gpus-per-node 1 --after 13

All but the options below goes to the command. What training, sweeps and preparation would refuse is refused before a
job waits in the queue: options, configuration, text, token files and what the run folder holds; not the hub, checksums,
weights and the machine; of measure the options. slurm/train.sbatch and slurm/job.sbatch explain the jobs.

train         saves, requeues and resumes by itself at the time limit and after a preemption; after a failure it does
              so at most --retries times in a row without a new checkpoint.
sweep         an array with a task for each cell, --jobs of them at a time, each of which does the same, but ends after
              a failure.
prepare_data, measure       with --array that many shards in parallel, then a merge, a second job that waits for them.

With --after a job starts when the named ones have ended well, and leaves the queue if one of them fails. The corpus and
the runs that they make need not be there yet.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.cli import COMMANDS, command_line, imported
from olmo_sparsity.util.arguments import Parser, whole_number, whole_number_or_zero
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import shipped

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.build import Model

TASK = "%a"
"""slurm/job.sbatch puts the number of the task in its place."""
WARNING_SECONDS = 120
"""How long before the time limit a job gets SIGUSR1, by the --signal that stands in the scripts of `slurm`."""
SAVED_BYTES_PER_SECOND = 0.5e9
"""Assumed of a shared file system that one process writes to, checksums included."""


@dataclass(frozen=True)
class Job:
    """What is submitted."""

    name: str
    folder: Path
    """Of the logs."""
    command: Sequence[str]
    options: Sequence[str] = ()
    """Of sbatch, besides those that all jobs have."""
    merge: Sequence[str] = ()
    """A command that waits for the tasks of the array."""
    script_options: Sequence[str] = ()
    """Of the job script; they stand before the command."""


def main() -> None:
    """Check, then print or submit."""
    # A -- is allowed in front of the arguments of the command: they are distinguished from our options by their names.
    options, arguments = _parser().parse_known_args([word for word in sys.argv[1:] if word != "--"])
    options.may_come = options.after is not None or options.dry_run
    if options.command in JOBS:
        job = JOBS[options.command](options, arguments)
    else:  # it is not checked, and its log goes to the current folder
        job = Job(options.command, Path(), command_line(options.command, arguments))
    if not options.dry_run:
        job.folder.mkdir(parents=True, exist_ok=True)  # else SLURM drops the logs
    job_id = _submit(options, job, job.command, job.options, after=options.after)
    if job.merge:
        options.gpus_per_node = None
        _submit(options, job, job.merge, after=job_id)
    if not options.dry_run:
        print(f"logs: {job.folder}/slurm-*.out")


def _submit(
    options: argparse.Namespace,
    job: Job,
    command: Sequence[str],
    more: Sequence[str] = (),
    *,
    after: str | None,
) -> str:
    """Submit a command, or print the call of sbatch; returns the id of the job. sbatch itself says what it refuses.

    It starts when the jobs ``after`` have ended well; if one of them fails, it leaves the queue.
    """
    log = "%A_%a" if any(option.startswith("--array") for option in more) else "%j"
    sbatch_options = {name: getattr(options, name) for name in ("time", "partition", "account", "mem")}
    sbatch_options |= {"gpus-per-node": options.gpus_per_node, "cpus-per-task": options.cpus}
    script = shipped(f"slurm/{'train' if options.command == 'train' else 'job'}.sbatch")
    call = [
        "sbatch",
        "--parsable",
        *([f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []),
        f"--job-name={job.name}",
        f"--output={job.folder}/slurm-{log}.out",
        *more,
        *(f"--{name}={value}" for name, value in sbatch_options.items() if value is not None),
        *options.sbatch,
        str(script),
        *job.script_options,
        *command,
    ]
    if options.dry_run:
        print(shlex.join(call))
        return "NUMBER_OF_THE_FIRST"
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"SLURM refused {shlex.join(call)}")
    job_id = done.stdout.strip().partition(";")[0]  # the cluster's name follows, where there is more than one
    print(f"submitted as job {job_id}")
    return job_id


def _is_missing(options: argparse.Namespace, corpora: Iterable[str | Path | None]) -> bool:
    """Whether one of these prepared corpora is not there, which is said. Raises `UserError` where none can come."""
    from olmo_sparsity.data.tokens import MANIFEST_NAME

    missing = sorted({str(path) for path in corpora if path and not Path(path, MANIFEST_NAME).is_file()})
    if missing and not options.may_come:
        raise UserError(
            f"{missing[0]} is no prepared corpus; prepare it first, or name the job that does: --after JOB"
        )
    for corpus in missing:
        print(f"# the corpus {corpus} is not there yet; it must be when this job starts")
    return bool(missing)


def _train(options: argparse.Namespace, arguments: Sequence[str]) -> Job:
    """Raises `UserError` for what training would refuse before its first step; weights and checksums are not read."""
    from olmo_sparsity.config.load import load_config
    from olmo_sparsity.data.build import open_training_data
    from olmo_sparsity.evaluate.build import open_evaluation
    from olmo_sparsity.training.check import check_run
    from olmo_sparsity.training.resume import initial_checkpoint, starting_checkpoint

    path = next((word for word in arguments if not word.startswith("--")), "CONFIG")
    overrides = [word for word in arguments if word not in (path, "--resume")]
    config = load_config(path, overrides)
    per_node = options.processes_per_node or options.gpus_per_node or 1
    world_size = options.nodes * per_node
    is_text = config.task.name is None
    steps_per_epoch = None
    is_missing = _is_missing(options, [config.corpus.path if is_text else None])
    if not is_missing:
        steps_per_epoch = open_training_data(config).steps_per_epoch
        if config.evaluation.interval is not None:
            open_evaluation(config)
    model = check_run(config, world_size, steps_per_epoch)
    last = starting_checkpoint(config, resume=True)
    weights_may_come = options.may_come and not Path(config.initial_weights or "").exists()
    if last is None and not is_missing and not weights_may_come:
        initial_checkpoint(config)
    _warn_of_long_save(checkpoint_bytes(config, model), options.sbatch)
    return Job(
        config.run_name or Path(path).stem,
        Path(config.save_folder),
        command_line("train", [path, *overrides, "--resume"]),
        [f"--nodes={options.nodes}", f"--ntasks-per-node={per_node}"],
        script_options=[f"--run={config.save_folder}", f"--retries={options.retries}"],
    )


def _warn_of_long_save(size: int, sbatch: Sequence[str]) -> None:
    """Say where a checkpoint of ``size`` bytes is probably not written between SIGUSR1 and the time limit."""
    warning = _warning_seconds(sbatch)
    seconds = size / SAVED_BYTES_PER_SECOND
    if seconds < warning:
        return
    enough = 60 * math.ceil(1.5 * seconds / 60)  # the current step ends first
    print(
        f"# a checkpoint of {size / 1e9:.0f} GB takes about {seconds:.0f} s at {SAVED_BYTES_PER_SECOND / 1e9} GB/s, "
        f"but the job is warned only {warning} s before its time limit; raise this: --sbatch=--signal=USR1@{enough}"
    )


def _warning_seconds(sbatch: Sequence[str]) -> int:
    """Seconds between SIGUSR1 and the time limit, by sbatch's option --signal=[R:]SIGNAL[@SECONDS]."""
    signals = re.findall(r"--signal[= ](\S+)", " ".join(sbatch))
    if not signals:
        return WARNING_SECONDS
    seconds = signals[-1].partition("@")[2]
    return int(seconds) if seconds.isdecimal() else 60  # SLURM's default


def checkpoint_bytes(config: Config, model: Model) -> int:
    """Size of a checkpoint: the weights in fp32, and of the optimizer two such moments in AdamW, one in LionW."""
    from olmo.config import OptimizerType

    moments = 1 if config.optimizer.name == OptimizerType.lionw else 2
    return sum(parameter.numel() for parameter in model.parameters()) * 4 * (1 + moments)


def _sweep(options: argparse.Namespace, arguments: Sequence[str]) -> Job:
    """Raises `UserError` for what the sweep refuses before its first cell."""
    from olmo_sparsity.cli.sweep import plan

    planned, cells = plan(arguments)
    _is_missing(options, (cell.corpus for cell in cells))
    array = f"--array=1-{len(cells)}" + (f"%{planned.jobs}" if planned.jobs else "")
    command = command_line("sweep", [*arguments, "--only", TASK])
    return Job(planned.out.resolve().name, planned.out, command, [array])


def _prepare(options: argparse.Namespace, arguments: Sequence[str]) -> Job:
    """Raises `UserError` for what each shard would refuse."""
    from olmo_sparsity.cli.prepare_data import parse_settings

    shards, _ = options.array
    settings, prepare_options = parse_settings([*arguments, *([f"--shard=1/{shards}"] if shards > 1 else [])])
    settings.check(in_shards=shards > 1)
    # without --workers it would take all cores that it sees, on some clusters those of the whole node
    command = command_line("prepare_data", [*arguments, f"--workers={options.cpus}"])
    return _in_shards(options, command, prepare_options.out)


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> Job:
    """Raises `UserError` for options that each shard would refuse; what is read is for the job to see."""
    from olmo_sparsity.checkpoint import resolve_checkpoint
    from olmo_sparsity.model.rope_scaling import split_scaling

    check = imported(COMMANDS["measure"].check)
    measure_options = check(list(arguments))
    _is_missing(options, [measure_options.corpus])
    model = measure_options.model
    path, _ = split_scaling(model)
    fixed = model
    if Path(path).is_dir() and not options.may_come:
        # A run's last checkpoint now: all shards measure the same while it goes on.
        fixed = str(resolve_checkpoint(path)) + model[len(path) :]
    # Of the words that are equal to it, such as the folder of --out, the one that is read as the model.
    with_fixed = (
        [*arguments[:i], fixed, *arguments[i + 1 :]] for i, word in enumerate(arguments) if word == model
    )
    arguments = next((words for words in with_fixed if check(words).model == fixed), arguments)
    return _in_shards(options, command_line("measure", arguments), measure_options.out)


def _in_shards(options: argparse.Namespace, command: Sequence[str], out: Path) -> Job:
    """An array of shards, if there is more than one, and the command without a shard, which puts them together."""
    shards, array = options.array
    if shards == 1:
        return Job(options.command, out, command)
    shard = [*command, "--shard", f"{TASK}/{shards}"]
    return Job(options.command, out, shard, [f"--array={array}"], command)


JOBS = {"train": _train, "sweep": _sweep, "prepare_data": _prepare, "measure": _measure}


def _array(text: str) -> tuple[int, str]:
    """Number of shards and what sbatch calls them: ``64%16``, at most 16 of 64 at a time, is ``1-64%16``."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})(%[1-9][0-9]*)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of shards, such as 64, or 64%16 at a time")
    return int(match[1]), f"1-{text}"


def _parser() -> Parser:
    parser = Parser(prog="olmo-sparsity submit", description=__doc__)
    commands = [name for name in COMMANDS if name != "submit"]
    parser.add_argument("command", metavar="COMMAND", choices=commands, help=f"one of {', '.join(commands)}")
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the calls of sbatch and submit nothing")
    after = "start when the jobs with these numbers have ended well (default: start at once)"
    add("--after", metavar="JOB[:JOB]", help=after)
    array = "run N shards, at most M of them at a time (default: 1, no shards)"
    add("--array", type=_array, default=(1, "1"), metavar="N[%M]", help=array)
    add("--nodes", type=whole_number, default=1, metavar="N", help="nodes that train runs on (default: 1)")
    per_node = "processes of train on each node (default: one for each GPU, or one)"
    add("--processes-per-node", type=whole_number, metavar="N", help=per_node)
    retries = (
        "how often in a row train goes on after a failure, without a new checkpoint in between (default: 3)"
    )
    add("--retries", type=whole_number_or_zero, default=3, metavar="N", help=retries)
    add("--gpus-per-node", type=whole_number, metavar="N", help="GPUs on each node (default: none)")
    add("--cpus", type=whole_number, default=4, metavar="N", help="CPU cores of each process (default: 4)")
    add("--time", metavar="D-HH:MM:SS", help="time limit of each job (default: the partition's)")
    add("--partition", help="SLURM partition to run in (default: the cluster's)")
    add("--account", help="SLURM account to charge (default: the user's)")
    add("--mem", metavar="SIZE", help="memory on each node, such as 64G (default: the partition's)")
    others = "any other option of sbatch, such as --sbatch=--qos=high; may be given again (default: none)"
    add("--sbatch", action="append", default=[], metavar="=OPTION", help=others)
    return parser
