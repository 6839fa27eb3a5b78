"""Inject faults into the commands of this project at random moments and places, and hold what follows to one property.

    The command ends with the right result, or with one line ("error: ...") and a non-zero exit in time, and what was
    whole before is whole after.

examples:
  python scripts/fault_test.py                                      300 injections, some 15 minutes on 2 cores
  python scripts/fault_test.py --injections 1000 --seed 3 --table faults.md
  python scripts/fault_test.py --only kill,bit-flip --commands train-resume,export
  python scripts/fault_test.py --seed 3 --repeat 217                that injection alone, as it was

After a kill, a full disk, a read-only folder, a second process, or a peer that stalled or died, the same command is run
again undisturbed and must end with the right result. After damage (a flipped bit, a truncated or deleted file, another
input) it must give the right result or refuse in one line; never another result.

The right result is that of an undisturbed run: token files and manifest byte for byte; weights, optimizer state and
every loss bit for bit; records, exports and figures. Everything is tiny and made up; models train on one CPU thread in
fp32. Inputs, files of somebody else, and earlier results must keep their bytes; a checkpoint may go when as many newer
ones as the run keeps are whole. A full disk is a limit on the size of the files that a process may write.

A failed injection prints its number, and what it was, saw and said; its folder is kept in --out. The exit code is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.commands import COMMANDS, UNDER_TEST, Workshop
from faults.injections import FAULTS, REFUSED, RESUMED, RIGHT, Broken, Trial, meets
from faults.processes import import_everything

from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_folder,
    positive_number,
    seed_number,
    settings_from,
    texts,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.script import run_script

MARK = ".fault-test"
FAILED = "FAILED"


def some_of(choices: Iterable[str], metavar: str) -> Any:
    """A setting that takes some of ``choices``, with commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = texts(text)
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return names

    help = f"of: {', '.join(choices)} (default: all)"
    return field(default=tuple(choices), metadata=argument(help, type=parse, metavar=metavar))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is injected into what."""

    injections: int = field(default=300, metadata=argument("how many", metavar="N"))
    seed: int = field(default=0, metadata=argument("decides every moment and place", type=seed_number))
    only: tuple[str, ...] = some_of(FAULTS, "FAULT,…")
    commands: tuple[str, ...] = some_of(UNDER_TEST, "NAME,…")
    repeat: int | None = field(default=None, metadata=argument("make this injection alone", metavar="NUMBER"))
    jobs: int = field(
        default=os.cpu_count() or 1, metadata=argument("injections at a time (default: cores)", metavar="N")
    )
    out: Path = field(
        default=Path("runs/faults"),
        metadata=argument("work folder, made anew", type=out_folder, metavar="DIR"),
    )
    time_out: float = field(
        default=60.0, metadata=argument("seconds of a command", type=positive_number, metavar="S")
    )
    table: Path | None = field(
        default=None, metadata=argument("write the table of verdicts there, in Markdown", metavar="FILE")
    )
    scripts: Path = field(
        default=Path(__file__).parent,
        metadata=argument("where the commands are (default: here)", metavar="DIR"),
    )


@dataclass(frozen=True)
class Injection:
    """One fault in one command. Its number and the seed decide everything that is random about it."""

    number: int
    fault: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """What came of an injection."""

    injection: Injection
    verdict: str
    place: str
    why: str = ""
    """What was seen, where the property did not hold."""
    said: str = ""
    """Exit code and standard error of the command then."""


def main() -> int:
    """Make the undisturbed references, inject the faults, and say what was found."""
    parser = Parser(description=__doc__)
    add_arguments(parser, Settings)
    settings = settings_from(Settings, parser.parse_args())
    start = time.monotonic()
    out = _work_folder(settings.out)
    plan = make_plan(settings)
    import_everything()
    print(f"seed {settings.seed}, {len(plan)} injections into {out}", file=sys.stderr)
    workshop = Workshop(out / "undisturbed", settings.scripts.resolve(), settings.time_out)
    for name in dict.fromkeys(injection.command for injection in plan):
        workshop.reference(COMMANDS[name])
    outcomes = []
    for outcome in _inject_all(plan, workshop, settings.seed, settings.jobs):
        outcomes.append(outcome)
        if outcome.verdict == FAILED:
            print(_report(outcome, settings), flush=True)
    table = make_table(outcomes, settings.seed, time.monotonic() - start)
    print(table)
    if settings.table:
        settings.table.parent.mkdir(parents=True, exist_ok=True)
        settings.table.write_text(table, encoding="utf8")
    return int(any(outcome.verdict == FAILED for outcome in outcomes))


def make_plan(settings: Settings) -> list[Injection]:
    """The injections: every pair of fault and command in turn, shuffled anew each time, as the seed says."""
    pairs = [
        (fault, name)
        for fault in FAULTS
        for name, command in UNDER_TEST.items()
        if meets(fault, command) and fault in settings.only and name in settings.commands
    ]
    if not pairs:
        raise UserError("no command of --commands has a fault of --only; give others")
    order: list[tuple[str, str]] = []
    for cycle in range(-(-max(settings.injections, settings.repeat or 0) // len(pairs))):
        order += random.Random(f"{settings.seed} {cycle}").sample(pairs, len(pairs))
    plan = [Injection(number, *pair) for number, pair in enumerate(order, 1)]
    return [plan[settings.repeat - 1]] if settings.repeat else plan[: settings.injections]


def _inject_all(plan: list[Injection], workshop: Workshop, seed: int, jobs: int) -> Iterator[Outcome]:
    """Outcomes as they come. The processes are forked before the bar starts its thread."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(inject, injection, workshop, seed) for injection in plan]
        with progress("injecting faults", len(plan), "injections") as advance:
            failed = 0
            for future in as_completed(futures):
                outcome = future.result()
                failed += outcome.verdict == FAILED
                advance(1, note=f"{failed} failed" if failed else "")
                yield outcome


def inject(injection: Injection, workshop: Workshop, seed: int) -> Outcome:
    """Make one injection, in a scene of its own that is kept where it failed."""
    scene = workshop.folder.parent / f"{injection.number:04d}-{injection.fault}-{injection.command}"
    trial = Trial(workshop, COMMANDS[injection.command], scene, random.Random(f"{seed} {injection.number}"))
    why = said = ""
    try:
        verdict = FAULTS[injection.fault](trial)
        shutil.rmtree(scene)
    except Broken as broken:
        verdict, why = FAILED, str(broken)
        if trial.ended is not None:
            said = f"exit {', '.join(map(str, trial.ended.codes))}\n{''.join(trial.ended.errors)}"
    except Exception:  # a defect of this test must not end the others
        verdict, why, said = FAILED, "an error of the test itself", traceback.format_exc()
    return Outcome(injection, verdict, trial.place, why, said)


def _report(outcome: Outcome, settings: Settings) -> str:
    """A failed injection, for people: what it was, what was seen, and how to see it again."""
    injection = outcome.injection
    command = COMMANDS[injection.command]
    again = ["python", "scripts/fault_test.py", "--seed", settings.seed, "--repeat", injection.number]
    for name, every in (("only", FAULTS), ("commands", UNDER_TEST)):
        if (chosen := getattr(settings, name)) != tuple(every):
            again += [f"--{name}", ",".join(chosen)]
    lines = outcome.said.splitlines()
    if len(lines) > 30:
        lines[10:-10] = ["…"]
    return (
        f"\n{FAILED} {injection.number}: {injection.fault}, {injection.command}: {outcome.place}\n"
        f"  seen:    {outcome.why}\n"
        f"  command: scripts/{command.script} {command.arguments} ({command.processes} process)\n"
        f"  repeat:  {shlex.join(map(str, again))}\n" + "\n".join(f"  {line}" for line in lines)
    )


def make_table(outcomes: list[Outcome], seed: int, seconds: float) -> str:
    """Verdicts of every fault in every command, in Markdown, with what made them."""
    verdicts = (RIGHT, REFUSED, RESUMED, FAILED)
    counts = Counter((each.injection.fault, each.injection.command, each.verdict) for each in outcomes)
    lines = [f"| fault | command | injections | {' | '.join(verdicts)} |", "|---|---|---|---|---|---|---|"]
    for fault in FAULTS:
        for command in UNDER_TEST:
            row = [counts[fault, command, verdict] for verdict in verdicts]
            if any(row):
                lines.append(
                    f"| {fault} | {command} | {sum(row)} | {' | '.join(str(n or '') for n in row)} |"
                )
    every = [sum(each.verdict == verdict for each in outcomes) for verdict in verdicts]
    lines.append(f"| **all** | | {len(outcomes)} | {' | '.join(map(str, every))} |")
    made = (
        f"`python {shlex.join(sys.argv)}` at {current_commit() or 'an unknown commit'}, {os.cpu_count()} cores "
        f"({platform.machine()}), seed {seed}, {seconds / 60:.0f} minutes"
    )
    return "\n".join([made, "", *lines, ""])


def _work_folder(out: Path) -> Path:
    """The folder, empty. Raises `UserError` for one that holds something else than an earlier test."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).is_file():
            raise UserError(f"{out} holds something else; give another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    return out.resolve()


if __name__ == "__main__":
    run_script(main)
