"""Parts of preparing a corpus that run as tasks of their own, on any machine that shares the folder.

    task 1/n … task n/n: train-*.npy and their records ──► merge: held-out split, manifest

Every task writes the files of its own units; what all of them need (request, tokenizer, held-out documents) each
makes if it is not there, with the same bytes, and renames it into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.data.sources import PrepareSettings, find_source
from olmo_sparsity.data.workers import StoppedEarly
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.shard import Shard

SHARDS_NAME = "shards.json"
MAX_NAMED = 20


@dataclass(frozen=True)
class PreparedShard:
    """What a finished share of a corpus holds, and what this run did for it."""

    shard: Shard
    units: int
    documents: int
    tokens: int
    seconds: float
    tokens_written: int
    """By this run; the rest was there already."""
    corpus_is_ready: bool = False
    """All shares were merged already; nothing was left to do."""


def check_shardable(settings: PrepareSettings) -> None:
    """Refuse what needs a look at the whole text before the first token is written."""
    problems = []
    if settings.tokenizer_name == "bpe":
        problems.append(
            "--shard needs a tokenizer that is there already, and bpe is trained on all the text; pass "
            "--tokenizer olmo, or a tokenizer.json made by an earlier run without --shard"
        )
    apart = find_source(settings.source).heldout_is_apart(settings)
    if not apart:
        problems.append(
            f"--shard needs held-out text of its own, and {settings.source} would be searched as a whole for "
            "documents to hold out; name --heldout-files, or run without --shard"
        )
    if problems:
        raise UserError("; ".join(problems))


def record_count(work: Path, shard: Shard) -> None:
    """Write down how many shares there are. Raises `UserError` where tasks of another number have begun."""
    known = recorded_count(work)
    if known is None:
        write_json(work / SHARDS_NAME, {"count": shard.count})
    elif known != shard.count:
        raise UserError(
            f"{work.parent} was begun with {known} shards; go on with --shard i/{known}, or finish it without "
            "--shard"
        )


def recorded_count(work: Path) -> int | None:
    """How many shares the corpus was divided into; None where it was not."""
    path, remedy = work / SHARDS_NAME, "remove it and run the same command again"
    if not path.is_file():
        return None
    count = read_json(path, remedy).get("count")
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{path} is damaged (it holds no count); {remedy}")
    return count


def refuse_missing(work: Path, missing: Sequence[int], units: int) -> None:
    """Name the shares whose units ``missing`` (from 0) are not finished. Raises `StoppedEarly` if there are any."""
    if not missing:
        return
    count = recorded_count(work) or 1
    shards = sorted({index % count + 1 for index in missing})
    named = ", ".join(map(str, shards[:MAX_NAMED])) + (", …" if len(shards) > MAX_NAMED else "")
    raise StoppedEarly(
        f"{len(missing)} of {units} units are not finished in {work.parent}, of "
        f"{'shard' if len(shards) == 1 else 'shards'} {named} of {count}; run these again with --shard i/{count}, "
        "then --merge: what is finished is kept"
    )
