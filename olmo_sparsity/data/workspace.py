"""The folder that a corpus is made in: whose it is, what is finished in it, what may be removed.

Unfinished work has its state in `.partial`, the request that it answers among it. Shards may work in the folder at
the same time: each writes the files of its own units; what all of them need (request, tokenizer, held-out documents)
each makes if it is not there, with the same bytes, and renames it into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from olmo_sparsity.data.groups import GROUPS_SUFFIX, groups_name
from olmo_sparsity.data.near_copies import NEAR_COPIES_SUFFIX, near_copies_name
from olmo_sparsity.data.sources import LEFT_OUT_WHERE_OFF, PrepareSettings
from olmo_sparsity.data.tokenizers import tokenizer_file
from olmo_sparsity.data.tokens import MANIFEST_NAME, TOKENIZER_NAME, CorpusManifest, TokenFile
from olmo_sparsity.util.errors import NO_ROOM, UserError
from olmo_sparsity.util.files import read_json, remove, sha256_file, write_json
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.shard import Shard
from olmo_sparsity.util.workers import StoppedEarly

WORK_NAME = ".partial"
REQUEST_NAME = "request.json"
SHARDS_NAME = "shards.json"
MAX_NAMED = 20
_FILES = [f"{split}-*{suffix}" for split in ("train", "heldout") for suffix in (".npy", GROUPS_SUFFIX)]
OUTPUT_PATTERNS = (MANIFEST_NAME, TOKENIZER_NAME, *_FILES, f"heldout-*{NEAR_COPIES_SUFFIX}", WORK_NAME)


def finished_corpus(out: Path, request: dict[str, Any]) -> CorpusManifest | None:
    """The manifest where ``out`` holds this corpus, whole. Raises `UserError` where it holds another one."""
    if not (out / MANIFEST_NAME).is_file():
        return None
    manifest = CorpusManifest.load(out)
    _refuse_other(out, manifest.settings, request)
    files = [file for split in manifest.splits.values() for file in split]
    tokenizer = out / TOKENIZER_NAME
    has_tokenizer = tokenizer.is_file() and sha256_file(tokenizer) == manifest.tokenizer_sha256
    return manifest if has_tokenizer and all(is_whole(out, file) for file in files) else None


def is_whole(out: Path, file: TokenFile) -> bool:
    """Whether a token file and the files beside it are there and have their checksums."""
    wanted = {
        out / file.name: file.sha256 if file.tokens else None,  # a unit without a document has no file
        out / groups_name(file.name): file.groups_sha256,
        out / near_copies_name(file.name): file.near_copies_sha256,
    }
    return all((sha256_file(path) if path.is_file() else None) == sha256 for path, sha256 in wanted.items())


def claim(
    out: Path,
    request: dict[str, Any],
    settings: PrepareSettings,
    *,
    overwrite: bool = False,
    shard: Shard | None = None,
) -> None:
    """Make ``out`` ready for work: new, to be gone on with, or cleared. Raises `UserError` for another's.

    With a ``shard`` nothing of what others may be writing is touched.
    """
    path, written = out / WORK_NAME / REQUEST_NAME, out / TOKENIZER_NAME
    tokenizer = settings.tokenizer_name
    if tokenizer != "bpe" and tokenizer_file(tokenizer).resolve() == written.resolve():
        raise UserError(f"--tokenizer names the file that would be written, {written}; choose another --out")
    with _writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        if overwrite or (shard is None and (out / MANIFEST_NAME).is_file()):
            # Without ``overwrite`` it is this corpus, damaged: `finished_corpus` refused any other.
            remove_outputs(out)
        elif not path.is_file():
            _refuse_foreign(out, shard)
        if path.is_file():
            remedy = f"choose another --out, or {'remove the folder' if shard else 'pass --overwrite'} to start anew"
            earlier = read_json(path, f"nobody knows what the files beside it were made of: {remedy}")
            _refuse_other(out, earlier, request)
        remove_temporaries(out, shard)
        if not path.is_file():
            write_json(path, request)
        if shard is not None:
            _record_count(out / WORK_NAME, shard)


def _refuse_other(out: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    names = dict.fromkeys([*request, *LEFT_OUT_WHERE_OFF])
    differing = [name for name in names if earlier.get(name) != request.get(name)]
    if differing:
        raise UserError(
            f"{out} holds a corpus made with other settings ({', '.join(differing)}); choose another --out, "
            "or pass --overwrite to replace it"
        )


def _refuse_foreign(out: Path, shard: Shard | None) -> None:
    """Refuse outputs without a request. A shard may meet the `.partial` of another, which is about to write one."""
    if shard is None:  # a run that was stopped before it had written its request leaves temporaries only
        remove_temporaries(out / WORK_NAME)
        remove_if_empty(out / WORK_NAME)
    patterns = [pattern for pattern in OUTPUT_PATTERNS if shard is None or pattern != WORK_NAME]
    foreign = [file.name for pattern in patterns for file in out.glob(pattern)]
    if foreign and not (out / WORK_NAME / REQUEST_NAME).is_file():
        raise UserError(
            f"{out} has {foreign[0]} but no record of how it was made; choose another --out, or pass "
            "--overwrite to replace it"
        )


@contextmanager
def locked(out: Path, *, part: str | None = None) -> Iterator[None]:
    """Hold ``out``, or a part of it, see `folder_lock`, while the block runs; leave no empty folder."""
    try:
        with ExitStack() as held:
            with _writing_to(out):
                held.enter_context(folder_lock(out, part=part))
            try:
                yield
            finally:
                remove_if_empty(out / WORK_NAME)
    finally:
        remove_if_empty(out)


@contextmanager
def _writing_to(out: Path) -> Iterator[None]:
    """Turn errors of writing to ``out`` into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise UserError(f"cannot write to {out} ({error.strerror}); choose another --out") from error


def has_nothing_finished(out: Path) -> bool:
    """Whether nothing is there yet that is worth keeping."""
    return {path.name for path in (out / WORK_NAME).glob("*")} <= {REQUEST_NAME}


def remove_work(out: Path) -> None:
    """Remove, if possible, the work folder of a run that was killed after it had finished the corpus."""
    if (out / WORK_NAME).exists():
        with suppress(UserError, OSError), folder_lock(out):
            remove(out / WORK_NAME)


def remove_outputs(out: Path) -> None:
    """Remove everything that preparing a corpus writes."""
    for pattern in OUTPUT_PATTERNS:
        for path in out.glob(pattern):
            remove(path)


def remove_temporaries(out: Path, shard: Shard | None = None) -> None:
    """Remove what stopped processes have left half written; of a shard's own units where one is given."""
    for folder in (out, out / WORK_NAME):
        for path in folder.glob(".*.tmp-*"):
            index = path.name.removeprefix(".train-").partition(".")[0]
            if shard is None or (index.isdigit() and shard.has(int(index))):
                remove(path)


def remove_if_empty(out: Path) -> None:
    """Remove a folder that holds nothing."""
    with suppress(OSError):  # it is not empty, or another process has begun in it
        out.rmdir()


# --- shards ---


def _record_count(work: Path, shard: Shard) -> None:
    """Record the number of shards. Raises `UserError` where a task with another number has begun."""
    known = _recorded_count(work)
    if known is None:
        write_json(work / SHARDS_NAME, {"count": shard.count})
    elif known != shard.count:
        raise UserError(
            f"{work.parent} was begun with {known} shards; go on with --shard i/{known}, or finish it without "
            "--shard"
        )


def _recorded_count(work: Path) -> int | None:
    """How many shards the corpus was divided into; None where it was not."""
    path, remedy = work / SHARDS_NAME, "remove it and run the same command again"
    if not path.is_file():
        return None
    count = read_json(path, remedy).get("count")
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{path} is damaged (it holds no count); {remedy}")
    return count


def refuse_missing(work: Path, missing: Sequence[int], units: int) -> None:
    """Name the shards whose units ``missing`` (from 0) are not finished. Raises `StoppedEarly` if there are any."""
    if not missing:
        return
    count = _recorded_count(work) or 1
    shards = sorted({index % count + 1 for index in missing})
    named = ", ".join(map(str, shards[:MAX_NAMED])) + (", …" if len(shards) > MAX_NAMED else "")
    raise StoppedEarly(
        f"{len(missing)} of {units} units are not finished in {work.parent}, of "
        f"{'shard' if len(shards) == 1 else 'shards'} {named} of {count}; run these again with --shard i/{count}, "
        "then --merge: what is finished is kept"
    )
