"""Submit training, preparation of C4, or a measurement to SLURM, or print the job scripts (--dry-run).

examples:
  olmo-sparsity submit train configs/base.yaml --nodes 2 --gpus-per-node 4 --time 24:00:00 --dry-run
  olmo-sparsity submit train configs/base.yaml --nodes 2 --gpus-per-node 4 --time 24:00:00 \\
      --partition gpu --account lab -- --seed=2 --save_folder=runs/second
  olmo-sparsity submit prepare_c4 --out data/c4 --array 64%16 --cpus 4 -- --limit-tokens 10000000000
  olmo-sparsity submit influence runs/base --corpus data/c4 --out runs/base/influence --array 8 \\
      --gpus-per-node 1 -- --n-long 512 --n-short 64 --targets 4000

all three as a chain, each with --after the last job that the one before it has printed (here the merge, 12, and 13):
  olmo-sparsity submit prepare_c4 --out data/c4 --array 64%16
  olmo-sparsity submit train configs/base.yaml --gpus-per-node 4 --after 12 -- --corpus.path=data/c4
  olmo-sparsity submit influence runs/base --corpus data/c4 --out runs/base/influence --gpus-per-node 1 --after 13

What follows `--` goes to the command of the job: train, prepare_data c4, or influence. Whatever can be checked is
checked before a job waits in the queue: options, configuration, text, token files and what the run folder holds; not
the hub, checksums, weights and the machine. The job scripts are made from the templates in slurm/, which explain
themselves, and are kept beside what they make: RUN/train.sbatch, OUT/influence.sbatch.

train        saves, requeues and resumes by itself at the time limit and after a preemption.
prepare_c4   --array shards in parallel, then a merge, in a second job that waits for them.
influence    --array shards of the targets for each checkpoint, then a merge. Several checkpoints get a folder each.

With --after a job starts when the named ones have ended well, and leaves the queue if one of them fails. The
corpus and the runs that they make need not be there yet; a run's last checkpoint is then looked up by the job.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.cli import command_line
from olmo_sparsity.sweep.slurm import (
    Array,
    Job,
    add_slurm_options,
    common_values,
    dependency,
    job_numbers,
    plain_word,
    split_arguments,
    words,
)
from olmo_sparsity.util.arguments import Parser, out_folder, whole_number
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.config.load import Config


def main() -> None:
    """Check, then print or submit."""
    own, theirs = split_arguments(sys.argv[1:])
    options = _parser().parse_args(own)
    job, *then = {"train": train_jobs, "prepare_c4": prepare_jobs, "influence": influence_jobs}[options.kind](
        options, theirs
    )
    waits = dependency(options.after)
    if options.dry_run:
        print(job.script, end="")
        if waits:
            print(f"\n# ---- with sbatch {' '.join(waits)}")
        for other in then:
            print(f"\n# ---- then, with sbatch --dependency=afterok:<the job above>\n{other.script}", end="")
        return
    number, line = job.submit(*waits)
    print(line)
    for other in then:
        print(other.submit(*dependency([number]))[1])


def train_jobs(options: argparse.Namespace, overrides: Sequence[str]) -> list[Job]:
    """One job that trains. Raises `UserError` for what training would refuse when it starts."""
    from olmo_sparsity.config.load import load_config, refuse_dry_run

    config = load_config(options.config, overrides)
    refuse_dry_run(config)
    per_node = options.processes_per_node or options.gpus_per_node or 1
    processes = options.nodes * per_node
    if config.global_train_batch_size % processes:
        raise UserError(
            f"global_train_batch_size {config.global_train_batch_size} cannot be shared by {processes} processes "
            f"({options.nodes} nodes x {per_node}); choose --nodes and --gpus-per-node whose product divides it"
        )
    if config.deepspeed.config is not None:
        from olmo_sparsity.training.zero import deepspeed_config

        deepspeed_config(config, processes)  # refuses what DeepSpeed would refuse after the wait in the queue
    run = plain_word(config.save_folder, "save_folder")
    name, what = Path(options.config).stem, "the name of the config file"
    if config.run_name:
        name, what = config.run_name, "run_name"
    values = {
        **common_values(options, name, what),
        "RUN": run,
        "NODES": options.nodes,
        "PROCESSES_PER_NODE": per_node,
        "CPUS_PER_PROCESS": options.cpus,
        "TRAIN": words(command_line("train", [options.config, *overrides])),
    }
    _check_start(config, after=bool(options.after))
    return [Job("train", Path(run), values)]


def _check_start(config: Config, *, after: bool) -> None:
    """Raise `UserError` for what training would refuse before its first step; weights and checksums are not read.

    Left out is, for a job ``after`` another, a corpus that is not there yet.
    """
    from olmo_sparsity.data.batches import open_training_data
    from olmo_sparsity.evaluate.exact_match import TaskEvaluation
    from olmo_sparsity.evaluate.heldout import HeldoutEvaluation
    from olmo_sparsity.training.resume import starting_checkpoint

    is_text, corpus = config.task.name is None, config.corpus.path
    to_come = is_text and corpus is not None and _is_to_come(corpus, after)
    if not to_come:
        open_training_data(config)
    if config.evaluation.interval is not None and (config.evaluation.paths or not to_come):
        if is_text:
            HeldoutEvaluation(config)
        else:
            TaskEvaluation(config)
    starting_checkpoint(config, resume=True)


def prepare_jobs(options: argparse.Namespace, arguments: Sequence[str]) -> list[Job]:
    """An array that makes the shards of C4, and the merge. Raises `UserError` for what each shard would refuse."""
    from olmo_sparsity.cli.prepare_data import parse_settings
    from olmo_sparsity.data.prepare import check_shardable

    out, array = plain_word(options.out, "--out"), Array.parse(options.array)
    _refuse(arguments, "--out", "--shard", "--merge", "--workers")
    settings, _ = parse_settings(["c4", "--out", out, "--shard", f"1/{array.tasks}", *arguments])
    settings.check()
    check_shardable(settings)
    command = command_line("prepare_data", ["c4", "--out", out, *arguments])
    common = {**common_values(options, "prepare_c4"), "OUT": out, "CPUS": options.cpus}
    values = {**common, "ARRAY": str(array), "SHARDS": array.tasks, "PREPARE": words(command)}
    merge = words([*command, "--merge", f"--workers={options.cpus}"])
    return [Job("prepare_c4", Path(out), values), Job("merge", Path(out), {**common, "MERGE": merge})]


def influence_jobs(options: argparse.Namespace, arguments: Sequence[str]) -> list[Job]:
    """An array over checkpoints and shards of their targets, and the merge.

    Raises `UserError` for a missing input, and for arguments that each shard would refuse.
    """
    out, array = plain_word(options.out, "--out"), Array.parse(options.array)
    _refuse(arguments, "--out", "--shard", "--corpus")
    checkpoints = [_checkpoint(text, bool(options.after)) for text in options.checkpoints]
    command = [checkpoints[0], "--corpus", options.corpus, "--out", out, *arguments]
    to_come = _is_to_come(options.corpus, bool(options.after))
    # by its name: training knows nothing of the analysis
    importlib.import_module("analysis.cli").check_influence(
        command, shards=array.tasks, read_texts=not to_come
    )
    records = _record_folders(out, checkpoints)
    values = {
        **common_values(options, "influence"),
        "OUT": out,
        "CPUS": options.cpus,
        "ARRAY": str(Array(array.tasks * len(checkpoints), array.at_once)),
        "CHECKPOINTS": words(checkpoints),
        "RECORDS": words(records),
        "SHARDS": array.tasks,
        "INFLUENCE": words(command_line("influence")),
        "ARGUMENTS": words(["--corpus", options.corpus, *arguments]),
    }
    job = Job("influence", Path(out), values)
    if array.tasks == 1:
        return [job]
    without_gpus = argparse.Namespace(**{**vars(options), "gpus_per_node": 0})
    common = {**common_values(without_gpus, "influence-merge"), "OUT": out, "CPUS": 1}
    # without --shard, influence puts finished shards together
    measured = ["--corpus", options.corpus, *arguments]
    merges = [
        words(command_line("influence", [checkpoint, "--out", folder, *measured]))
        for checkpoint, folder in zip(checkpoints, records, strict=True)
    ]
    return [job, Job("merge", Path(out), {**common, "MERGE": " && ".join(merges)})]


def _checkpoint(text: str, after: bool) -> str:
    """The checkpoint that ``text`` means: a run's last one, so that all shards measure the same while it goes on.

    ``after`` another job, which may make it, the path stays as it is, and the job looks there.
    """
    from olmo_sparsity.checkpoint import resolve_checkpoint
    from olmo_sparsity.model.rope_scaling import split_scaling

    path, _ = split_scaling(text)  # refuses an unknown way to scale RoPE
    is_of_hub = path.count("/") == 1 and not Path(path).exists() and not Path(path).parent.exists()
    if after or is_of_hub or Path(path).is_file():
        return text
    return str(resolve_checkpoint(path)) + text[len(path) :]


def _is_to_come(corpus: str, after: bool) -> bool:
    """Whether a corpus is left to an earlier job."""
    from olmo_sparsity.data.tokens import MANIFEST_NAME

    return after and not (Path(corpus) / MANIFEST_NAME).is_file()


def _record_folders(out: str, checkpoints: Sequence[str]) -> list[Path]:
    """Where each checkpoint's records go: ``out``, or for several a folder in it, named after run and step."""
    if len(checkpoints) == 1:
        return [Path(out)]
    names = ["-".join(Path(path).resolve().parts[-2:]) for path in checkpoints]
    if len(set(names)) < len(names):
        raise UserError(f"checkpoints of the same name: {', '.join(sorted(names))}; submit them apart")
    return [Path(out) / name for name in names]


def _refuse(arguments: Sequence[str], *names: str) -> None:
    for argument in arguments:
        if (name := argument.partition("=")[0]) in names:
            raise UserError(f"{name} is decided by submit; give it before the --, or leave it out")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    train = _kind(kinds, "train", "train a model on any number of nodes")
    train.add_argument("config", metavar="CONFIG", help="YAML file; overrides of it follow --")
    train.add_argument("--nodes", type=whole_number, default=1, help="default: %(default)s")
    train.add_argument(
        "--processes-per-node", type=whole_number, metavar="N", help="default: one for each GPU, or one"
    )
    prepare = _kind(kinds, "prepare_c4", "prepare C4 in an array of tasks")
    influence = _kind(kinds, "influence", "measure checkpoints in an array of tasks")
    influence.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints, or runs")
    influence.add_argument("--corpus", required=True, metavar="DIR", help="folder made by prepare_data")
    for each in (prepare, influence):
        each.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
        each.add_argument(
            "--array", default="1", metavar="N[%M]", help="shards, at most M at a time (default: %(default)s)"
        )
    return parser


def _kind(kinds: Any, name: str, what: str) -> Parser:
    """The options that all kinds of job share."""
    parser = kinds.add_parser(name, help=what, description=what)
    parser.add_argument("--dry-run", action="store_true", help="print the job scripts and submit nothing")
    parser.add_argument(
        "--after",
        type=job_numbers,
        default=(),
        metavar="JOB[,JOB]",
        help="start when these jobs have ended well; what they make need not be there yet",
    )
    add_slurm_options(parser)
    return parser
