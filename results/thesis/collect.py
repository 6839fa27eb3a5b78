"""The records of the study of the thesis: what `study.py` reads, made of the cells that run.sh has measured.

    python results/thesis/collect.py OUT

Records: targets (what is predicted), needs (of a model and seed: gain, L_inside, tokens needed) and losses (beyond the
window, and L_short at the same ids). Of the targets that gain more than 1 nat under no seed of a model, every fourth is
kept: targets that need nothing are drawn from these. Those that `trial.py` draws are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import Result, load
from analysis.measurement import RESULT_NAME
from analysis.saved import without_folders, write_saved
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles

HERE = Path(__file__).parent
TRIAL = HERE / "trial.json"
"""As `trial.py` writes it."""
HEAD, KIND, VERSION = "records.json", "olmo-sparsity thesis records", 1
"""As in `study.py`."""
CELL = re.compile(
    r"(?P<kind>need|cache|losses|own|greedy)-(?P<model>[a-z0-9]+)-(?P<seed>\d+)"
    r"(-(?P<context>inside|behind|gap)(-(?P<windows>\d+))?)?"
)
AS_TEXT = {"text": ("leave-one-out-kl", 0)}
WAYS = {
    "need": AS_TEXT,
    "own": AS_TEXT,
    "cache": {"cache": ("leave-one-out-kl/cache:4", 4)},
    "greedy": {"greedy": ("greedy-kl", 0)},
}
"""Of a kind of cell, the ways of needing that it measures: selector, and sinks beside the tokens."""
SHARE = 0.9
TAU_NATS = 1.0
KEPT_ONE_IN = 4


def collect(out: Path, records: Path, trial: Path = TRIAL) -> None:
    """Make the records of all complete cells in a folder of run.sh, and of the parts of greedy ones.

    ``trial``: the targets of the first look, which are left out.
    """
    of_trial = targets_of_trial(trial, out / "data")
    frequency = log_frequencies(out / "data")
    targets: dict[str, pd.DataFrame] = {}
    needs = []
    losses = []
    about = {}
    checks = Checks()
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        match = CELL.fullmatch(folder.name)
        result = read_cell(folder) if match else None
        if match is None or result is None:
            continue
        keys: dict[str, Any] = {"of": targets_of(match), "model": match["model"], "seed": int(match["seed"])}
        about[folder.name] = provenance_of(result)
        checks.add(folder.name, match, result)
        columns = ["target_id", "text", "position", "group", "kind", "token"]
        there = result.targets[columns].assign(of=keys["of"])
        if match["kind"] != "greedy":
            known = targets.setdefault(keys["of"], there)
            check_same_targets(known, there, folder.name)
        ways = WAYS.get(match["kind"], {})
        if ways or match["context"] == "inside":
            needs.append(needs_of(result, ways).assign(**keys))
        for context, windows, short, beyond in losses_beyond(result, match):
            frame = pd.DataFrame({"target_id": result.targets["target_id"], "short": short, "beyond": beyond})
            losses.append(frame.assign(**keys, context=context, windows=windows))
    if not needs or not losses:
        raise SystemExit(f"{out} has no complete cells of need and losses: run results/thesis/run.sh first")
    of_targets = pd.concat(targets.values(), ignore_index=True)
    of_targets["log_frequency"] = frequency[of_targets["token"]]
    of_targets = without_trial(of_targets, of_trial)
    if "control" in targets:
        of_targets = with_planted(of_targets, out / "texts-control" / "planted.jsonl")
    of_needs = joined_needs(pd.concat(needs, ignore_index=True))
    of_losses = pd.concat(losses, ignore_index=True)
    kept = kept_targets(of_needs).intersection(
        of_targets[["of", "target_id"]].itertuples(index=False, name=None)
    )
    frames = {
        "targets": of_targets[_is_in(of_targets, kept)].drop(columns="position"),
        "needs": rounded(of_needs[_is_in(of_needs, kept)]),
        "losses": rounded(of_losses[_is_in(of_losses, kept)]),
    }
    write_records(records, about, **frames)


def write_records(folder: Path, about: dict[str, Any], **frames: pd.DataFrame) -> None:
    """Write targets, needs and losses into a folder, as `study.Records` has them."""
    write_saved(folder / HEAD, {"kind": KIND, "version": VERSION, "cells": about}, frames)


def targets_of(match: re.Match[str]) -> str:
    """Which targets a cell is of."""
    if match["model"] == "control":
        return "control"
    return "own" if match["kind"] == "own" else "all"


def targets_of_trial(path: Path, corpus: Path) -> set[tuple[int, int]]:
    """Text and position of the targets of the first look. Ends where these are of another corpus."""
    trial = json.loads(path.read_text(encoding="utf8"))
    [heldout] = CorpusManifest.load(corpus).splits["heldout"]
    if heldout.sha256 != trial["heldout_sha256"]:
        raise SystemExit(
            f"{corpus} has other held-out text than {path} is of: make it with the versions of constraints.txt"
        )
    offsets = range(trial["targets_per_block"])
    return {(text, first + offset) for text, first in trial["first_targets"] for offset in offsets}


def without_trial(targets: pd.DataFrame, of_trial: set[tuple[int, int]]) -> pd.DataFrame:
    """The targets that are none of the first look's, but for the control's, which are of other text; says how many."""
    is_of_text = targets["of"] != "control"
    places = zip(targets["text"], targets["position"], strict=True)
    is_of_trial = is_of_text & np.array([place in of_trial for place in places])
    for of, of_kind in targets[is_of_text].groupby("of"):
        count = int(is_of_trial[of_kind.index].sum())
        print(f"{count:,} of {len(of_kind):,} targets ({of}) are of the first look: left out")
    return targets[~is_of_trial]


def read_cell(folder: Path) -> Result | None:
    """The result of a cell, or its finished parts where it was measured by shards; None where there is none."""
    paths = [folder] if (folder / RESULT_NAME).is_file() else []
    if folder.name.startswith("greedy-"):
        paths = sorted(path.parent for path in folder.glob(f"parts/*/{RESULT_NAME}"))
    if not paths:
        return None
    return Result.of_parts([load(path) for path in paths])


def provenance_of(result: Result) -> dict[str, Any]:
    """Settings and provenance of a cell, without the folders of its machine."""
    shown = without_folders(result)
    return {"settings": shown.settings.to_json(), "provenance": shown.provenance}


def check_same_targets(known: pd.DataFrame, there: pd.DataFrame, cell: str) -> None:
    """End where a cell is of other targets than those before it."""
    columns = ["target_id", "text", "position", "token"]
    if not known[columns].reset_index(drop=True).equals(there[columns].reset_index(drop=True)):
        raise SystemExit(f"{cell} was measured on other targets than the cells before it: measure it again")


class Checks:
    """Ends where cells do not go together: what is alike in all of them is compared with the first."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, ...], tuple[str, Any]] = {}
        """Of what is alike: the first cell that has it, and its value."""

    def add(self, cell: str, match: re.Match[str], result: Result) -> None:
        """Check one more cell."""
        model = match["model"]
        seed = match["seed"]
        settings = result.settings
        contexts = settings.contexts
        of_training = "control" if model == "control" else "text"
        trained = "rope" if model.startswith("yarn") else model
        self._alike(("model", trained, seed), cell, settings.model.sha256)
        self._alike(("corpus", of_training), cell, settings.texts.sha256)
        lengths = contexts.n_long, contexts.n_short, contexts.targets_per_block, contexts.seed
        self._alike(("lengths", of_training), cell, lengths)
        if match["kind"] in WAYS:
            self._alike(("threshold", targets_of(match)), cell, settings.choices.tau_nats)
        of_length = (of_training, seed) if of_training == "control" else (of_training,)
        self._alike(("last step of training", *of_length), cell, step_of(settings.model.name))
        if settings.model.training_seed not in (None, int(seed)):
            raise SystemExit(
                f"{cell} is of a model trained from seed {settings.model.training_seed}: remove it"
            )
        further = {"behind": contexts.before, "gap": contexts.gap}
        for context, tokens in further.items():
            if match["context"] == context:
                self._alike(("window", of_training), cell, tokens / (int(match["windows"]) - 1))
            elif tokens:
                raise SystemExit(f"{cell} was measured with {context} of {tokens} tokens: remove it")

    def _alike(self, key: tuple[str, ...], cell: str, value: Any) -> None:
        first, known = self.first.setdefault(key, (cell, value))
        if value != known:
            raise SystemExit(
                f"{cell} has another {key[0]} than {first}: remove one of them, and measure it again"
            )


def step_of(model: str) -> str:
    """The last folder of a checkpoint's path, such as step00001100, without what is behind @."""
    return Path(model).name.partition("@")[0]


def needs_of(result: Result, ways: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """target_id, short, inside, and for each way of needing need and farthest; NaN of targets not over tau.

    Need: the smallest k whose first tokens give `SHARE` of the gain, inf where none does. Farthest: how many tokens
    before the target the farthest of these stands, of all where none is enough.
    """
    targets = result.targets
    frame = targets[["target_id"]].assign(short=targets["loss_short_nats"], inside=targets["loss_long_nats"])
    size = result.settings.contexts.targets_per_block
    if result.over.size == 0:
        return frame
    for name, (selector, sinks) in ways.items():
        kept_as: dict[str, Any] = {"level": "cache" if name == "cache" else "text", "sinks": sinks}
        losses = result.loss_nats(selector, **kept_as)
        chosen = result.selected(selector, **kept_as)
        over = targets.iloc[result.over]
        gain = over["loss_short_nats"] - over["loss_long_nats"]
        saved = over["loss_short_nats"].to_numpy()[:, None] - losses
        is_enough = saved >= SHARE * gain.to_numpy()[:, None]
        ks = np.array(result.ks)
        measured = np.isfinite(losses).all(axis=1)
        need = np.where(is_enough.any(axis=1), ks[is_enough.argmax(axis=1)], np.inf)
        among = np.arange(chosen.shape[1]) < np.minimum(need, ks[-1])[:, None]
        first = np.where(among, chosen, result.n_far).min(axis=1)
        place = over["target_id"].to_numpy() % size
        farthest = result.settings.contexts.n_long + place - first
        columns = {f"need_{name}": need, f"farthest_{name}": farthest}
        for column, values in columns.items():
            frame.loc[over.index[measured], column] = values[measured].astype(float)
    return frame


def losses_beyond(result: Result, match: re.Match[str]) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Context, windows, L_short and L_beyond of a cell, for each context beyond the window that it has."""
    targets = result.targets
    n_long = result.settings.contexts.n_long
    size = result.settings.contexts.targets_per_block
    if match["kind"] == "own":
        for length in result.settings.contexts.longer_lengths:
            short = targets[f"loss_short_at_{length}_nats"].to_numpy()
            windows = (length + size) // (n_long + size)  # a window has the last target of a block, too
            yield "own", windows, short, targets[f"loss_of_{length}_nats"].to_numpy()
    elif match["windows"]:
        short = targets["loss_short_nats"].to_numpy()
        yield match["context"], int(match["windows"]), short, targets["loss_long_nats"].to_numpy()


def joined_needs(needs: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, seed and target, with what all cells say of it."""
    return needs.groupby(["of", "model", "seed", "target_id"], as_index=False, sort=False).first()


def kept_targets(needs: pd.DataFrame) -> set[tuple[str, int]]:
    """Which targets are kept, by ``of`` and target_id."""
    over = needs["short"] - needs["inside"] > TAU_NATS
    is_kept = over | (needs["target_id"] % KEPT_ONE_IN == 0) | (needs["of"] == "control")
    return set(needs.loc[is_kept, ["of", "target_id"]].itertuples(index=False, name=None))


def _is_in(frame: pd.DataFrame, kept: set[tuple[str, int]]) -> np.ndarray:
    keys = pd.MultiIndex.from_frame(frame[["of", "target_id"]])
    return keys.isin(pd.MultiIndex.from_tuples(sorted(kept)))


def rounded(frame: pd.DataFrame) -> pd.DataFrame:
    """Losses to 1e-4 nats, which pack well."""
    names = frame.columns.intersection(["short", "inside", "beyond"])
    return frame.assign(**{name: frame[name].astype(float).round(4) for name in names})


def log_frequencies(corpus: Path) -> np.ndarray:
    """Natural logarithm of how often a token occurs in the training text, plus one, (vocabulary,)."""
    files = TokenFiles.of_split(corpus, "train")
    vocabulary = json.loads((corpus / "manifest.json").read_text(encoding="utf8"))["vocab_size"]
    counts = np.zeros(vocabulary + 3)
    for path in files.paths:
        counts[:vocabulary] += np.bincount(np.fromfile(path, files.dtype), minlength=vocabulary)
    return np.log1p(counts)


def with_planted(targets: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Targets of the control with k and the distance of their farthest bit, without documents that have no bits."""
    rows = pd.DataFrame([json.loads(line) for line in path.read_text(encoding="utf8").splitlines()])
    is_control = targets["of"] == "control"
    for name in ("k", "farthest"):
        values = rows[name].reindex(targets["text"]).to_numpy(dtype=float)
        targets[name] = np.where(is_control, values, np.nan)
    return targets[~is_control | (targets["k"] > 0)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of run.sh")
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    trial = "targets that are left out, as trial.py writes them (default: trial.json beside this file)"
    parser.add_argument("--trial", type=Path, default=TRIAL, metavar="JSON", help=trial)
    options = parser.parse_args(arguments)
    collect(options.out, options.records, options.trial)


if __name__ == "__main__":
    main()
