"""Submit training, preparation of C4, or a measurement to SLURM, or print the job scripts (--dry-run).

examples:
  python scripts/submit.py train configs/base.yaml --nodes 2 --gpus-per-node 4 --time 24:00:00 --dry-run
  python scripts/submit.py train configs/base.yaml --nodes 2 --gpus-per-node 4 --time 24:00:00 \\
      --partition gpu --account lab -- --seed=2 --save_folder=runs/second
  python scripts/submit.py prepare_c4 --out data/c4 --array 64%16 --cpus 4 -- --limit-tokens 10000000000
  python scripts/submit.py influence runs/base --corpus data/c4 --out runs/base/influence --array 8 \\
      --gpus-per-node 1 -- --n-long 512 --n-short 64 --targets 4000

What follows `--` goes to the job's own script: scripts/train.py, prepare_data.py c4, or influence.py. Everything that
can be checked here is checked before a job waits in the queue for it. The job scripts are made from the templates in
slurm/, which explain themselves, and are kept beside what they make: RUN/train.sbatch, OUT/influence.sbatch.

train        goes on by itself after the time limit and after a preemption: it saves, requeues and resumes.
prepare_c4   --array shards in parallel, then a merge, in a second job that waits for them.
influence    --array shards of the targets for each checkpoint, then a merge. Several checkpoints get a folder each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olmo_sparsity.errors import UserError, run_script
from olmo_sparsity.slurm import Array, job_path, words
from olmo_sparsity.slurm_jobs import (
    Job,
    add_slurm_options,
    common_values,
    split_arguments,
    submit_job,
    whole_number,
)

SCRIPTS = Path(__file__).resolve().parent


def main() -> None:
    """Check, then print or submit."""
    own, theirs = split_arguments(sys.argv[1:])
    options = _parser().parse_args(own)
    job, *after = {"train": train_jobs, "prepare_c4": prepare_jobs, "influence": influence_jobs}[
        options.kind
    ](options, theirs)
    if options.dry_run:
        print(job.script, end="")
        for other in after:
            print(f"\n# ---- then, with sbatch --dependency=afterok:<the job above>\n{other.script}", end="")
        return
    number, line = submit_job(job)
    print(line)
    for other in after:
        # If a task fails for good the merge could never start: it then leaves the queue instead of waiting for ever.
        print(submit_job(other, f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes")[1])


def train_jobs(options: argparse.Namespace, overrides: Sequence[str]) -> list[Job]:
    """One job that trains. Raises `UserError` for a bad config, or one that so many processes cannot share."""
    from olmo_sparsity.config import load_config

    config = load_config(options.config, overrides)
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
    run = job_path(config.save_folder, "save_folder")
    values = {
        **common_values(options, config.run_name or Path(options.config).stem),
        "RUN": run,
        "NODES": options.nodes,
        "PROCESSES_PER_NODE": per_node,
        "CPUS_PER_PROCESS": options.cpus,
        "TRAIN": words([sys.executable, SCRIPTS / "train.py", options.config, *overrides]),
    }
    return [Job("train", Path(run), values)]


def prepare_jobs(options: argparse.Namespace, arguments: Sequence[str]) -> list[Job]:
    """An array that makes the shards of C4, and the merge."""
    out, array = job_path(options.out, "--out"), Array.parse(options.array)
    _refuse(arguments, "--out", "--shard", "--merge", "--workers")
    command = [sys.executable, SCRIPTS / "prepare_data.py", "c4", "--out", out, *arguments]
    common = {**common_values(options, "prepare_c4"), "OUT": out, "CPUS": options.cpus}
    values = {**common, "ARRAY": str(array), "SHARDS": array.tasks, "PREPARE": words(command)}
    merge = words([*command, "--merge", f"--workers={options.cpus}"])
    return [Job("prepare_c4", Path(out), values), Job("merge", Path(out), {**common, "MERGE": merge})]


def influence_jobs(options: argparse.Namespace, arguments: Sequence[str]) -> list[Job]:
    """An array over checkpoints and shards of their targets, and the merge. Raises `UserError` for a missing input."""
    from olmo_sparsity.checkpoint import resolve_checkpoint
    from olmo_sparsity.data.tokens import CorpusManifest

    out, array = job_path(options.out, "--out"), Array.parse(options.array)
    _refuse(arguments, "--out", "--shard", "--corpus")
    CorpusManifest.load(options.corpus)
    # Resolved here, so that all shards measure the same one even while a run goes on writing others.
    checkpoints = [resolve_checkpoint(path) for path in options.checkpoints]
    records = _record_folders(out, checkpoints)
    values = {
        **common_values(options, "influence"),
        "OUT": out,
        "CPUS": options.cpus,
        "ARRAY": str(Array(array.tasks * len(checkpoints), array.at_once)),
        "CHECKPOINTS": words(checkpoints),
        "RECORDS": words(records),
        "SHARDS": array.tasks,
        "INFLUENCE": words([sys.executable, SCRIPTS / "influence.py"]),
        "ARGUMENTS": words(["--corpus", options.corpus, *arguments]),
    }
    job = Job("influence", Path(out), values)
    if array.tasks == 1:
        return [job]
    without_gpus = argparse.Namespace(**{**vars(options), "gpus_per_node": 0})
    common = {**common_values(without_gpus, "influence-merge"), "OUT": out, "CPUS": 1}
    merge = words([sys.executable, SCRIPTS / "merge_records.py", *records])
    return [job, Job("merge", Path(out), {**common, "MERGE": merge})]


def _record_folders(out: str, checkpoints: Sequence[Path]) -> list[Path]:
    """Where each checkpoint's records go: ``out``, or for several a folder in it, named after run and step."""
    if len(checkpoints) == 1:
        return [Path(out)]
    names = ["-".join(path.resolve().parts[-2:]) for path in checkpoints]
    if len(set(names)) < len(names):
        raise UserError(f"checkpoints of the same name: {', '.join(sorted(names))}; submit them apart")
    return [Path(out) / name for name in names]


def _refuse(arguments: Sequence[str], *names: str) -> None:
    for argument in arguments:
        if (name := argument.partition("=")[0]) in names:
            raise UserError(f"{name} is decided by submit.py; give it before the --, or leave it out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    train = _kind(kinds, "train", "train a model on any number of nodes")
    train.add_argument("config", metavar="CONFIG", help="YAML file; overrides of it follow --")
    train.add_argument("--nodes", type=whole_number, default=1, help="default: %(default)s")
    train.add_argument(
        "--processes-per-node", type=whole_number, metavar="N", help="default: one for each GPU, or one"
    )
    prepare = _kind(kinds, "prepare_c4", "prepare C4 in an array of tasks")
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder of the corpus")
    influence = _kind(kinds, "influence", "measure checkpoints in an array of tasks")
    influence.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints, or runs")
    influence.add_argument("--corpus", required=True, metavar="DIR", help="folder made by prepare_data.py")
    influence.add_argument("--out", required=True, metavar="DIR", help="folder of the records")
    for each in (prepare, influence):
        each.add_argument(
            "--array", default="1", metavar="N[%M]", help="shards, at most M at a time (default: %(default)s)"
        )
    return parser


def _kind(kinds: Any, name: str, what: str) -> argparse.ArgumentParser:
    """The options that all kinds of job share."""
    parser = kinds.add_parser(name, help=what, description=what, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="print the job scripts and submit nothing")
    add_slurm_options(parser)
    return parser


if __name__ == "__main__":
    run_script(main)
