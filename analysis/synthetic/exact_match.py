"""Exact match of the synthetic tasks by length: read, saved as one frame, and pooled over training seeds.

`olmo-sparsity exact_match` measures a run and leaves an exact_match.json in its folder; a study keeps all rows of its
runs in one exact_match.parquet. A *group* is what was trained alike but for the seed, as far as the rows tell: they
have no precision, heads or weight decay, say. A *curve* is one k of a group, with a point for every length that at
least one seed of the group has.

Shapes: S seeds of a point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.stats.bootstrap import Interval, student_t, wilson
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path
from olmo_sparsity.util.result_files import EXACT_MATCH

NAME = "exact_match.parquet"
SCHEME_LABELS = {
    "contiguous": "RoPE",
    "random_start": "RoPE, random start",
    "pose": "RoPE + PoSE",
    "random_float": "RoPE, random float",
    "coupled": "coupled ids (oracle)",
    "predicted": "Predictive Position Coupling",
}
"""Position schemes in the order in which they are drawn, and their names in figures."""
ERROR_SORTS = ("token", "id", "stop")
"""Of a response that is not exact: what its first error is."""

# --- the frame ---

_FORMAT = {b"kind": b"olmo-sparsity exact match", b"version": b"3"}
_JSON = ("parameters", "trained", "options")
_SETTINGS = ("task", *_JSON[:2], "scheme", "rotate", "skip_probability", "family", "weights", "options")
_STRINGS = ("folder", "checkpoint", "weights_sha256", "commit", "machine", *_SETTINGS)
_COUNTS = ("samples", "exact", *(f"wrong_{sort}" for sort in ERROR_SORTS))
_FORCED = ("teacher_forced_exact", "response_tokens", "teacher_forced_tokens")
_NUMBERS = ("step", "seed", "evaluation_seed", "weights", "length", "k", *_COUNTS, *_FORCED)
_FLOATS = ("skip_probability", "teacher_forced_ids", "mean_probability", "std_probability")
_TYPES = dict.fromkeys(_STRINGS, str) | dict.fromkeys(_NUMBERS, np.int64) | dict.fromkeys(_FLOATS, np.float64)
COLUMNS = list(_TYPES)
"""A row per checkpoint, k and length: the checkpoint (``folder``: where it was measured, below the folder that was
read), the settings of its `Group`, and the counts of `olmo_sparsity.evaluate.exact_match.LengthResult`. k is 0 where
the task plants no tokens; ``teacher_forced_ids`` is NaN where the model predicts none, the probabilities where an old
record had none."""


def record_frame(record: Mapping[str, Any], folder: str = "") -> pd.DataFrame:
    """The rows of one evaluation, as `olmo_sparsity.evaluate.exact_match.exact_match_record` tells them."""
    options = dict(sorted(record["options"].items()))
    if record["initial_weights"]:  # its training went on from weights of another run
        options["initial_weights"] = True
    of_record = {name: record[name] for name in COLUMNS if name in record and name != "parameters"}
    of_record |= {
        "folder": folder,
        "task": record["task"]["name"],
        "parameters": json.dumps(record["task"]["parameters"], sort_keys=True),
        "trained": json.dumps(record["trained"], sort_keys=True),
        "rotate": record["rotate"] or "",
        "weights": record["parameters"],
        "options": json.dumps(options),
    }
    frame = pd.DataFrame(record["rows"]).assign(**of_record)
    frame["k"] = frame["k"].fillna(0)
    return frame.reindex(columns=COLUMNS).astype(_TYPES)


def save(path: str | Path, frame: pd.DataFrame) -> None:
    """Write a frame of `COLUMNS` as Parquet, atomically; every page has a checksum."""
    table = pa.Table.from_pandas(frame[COLUMNS], preserve_index=False).replace_schema_metadata(_FORMAT)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def load(paths: Sequence[str | Path], only: Sequence[str] = ()) -> pd.DataFrame:
    """The rows at these paths, each once; a folder stands for every `exact_match.parquet` and `.json` beneath it.

    ``only``: folders, as in the column ``folder``, whose rows are wanted, and those beneath them; all by default.
    Raises `UserError` for a path without rows.
    """
    frames = []
    for path in map(Path, paths):
        names = NAME, EXACT_MATCH.name
        files = sorted(file for name in names for file in path.rglob(name)) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no {' or '.join(names)}; make one with olmo-sparsity exact_match")
        for file in files:
            below = file.parent.relative_to(path) if path.is_dir() else Path()
            frame = record_frame(EXACT_MATCH.load(file)) if file.suffix == ".json" else _read(file)
            frames.append(frame.assign(folder=[str(below / folder) for folder in frame["folder"]]))
    rows = pd.concat(frames, ignore_index=True).drop_duplicates(ignore_index=True)
    wanted = [
        not only or any(Path(folder).is_relative_to(part) for part in only) for folder in rows["folder"]
    ]
    if not any(wanted):
        raise UserError(f"no rows of {', '.join(only)}; there are {', '.join(sorted({*rows['folder']}))}")
    return rows[wanted].reset_index(drop=True)


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} is missing; give an {NAME}, or a folder that holds some")
    table = pq.read_table(path, page_checksum_verification=True)
    if table.schema.metadata != _FORMAT:
        raise UserError(f"{path} is no exact match of this format; make it with olmo-sparsity figure1 --rows")
    return table.to_pandas()


# --- pooling ---


@dataclass(frozen=True)
class Group:
    """What was trained alike but for the seed, and its numbers; the settings are columns of the frame, too."""

    task: str
    parameters: dict[str, Any]
    """Every parameter of the task that was measured."""
    trained: dict[str, Any]
    """Those of its training."""
    scheme: str
    rotate: str
    """What RoPE rotates by; empty: the model's default."""
    skip_probability: float | None
    """Share of the training samples whose coupled ids jump ahead; None (NaN in a frame): it couples nothing."""
    family: str
    weights: int
    """How many the model has."""
    options: dict[str, Any]
    """Further options of its training by dotted name, those that are not at their default."""
    rows: pd.DataFrame
    """Theirs, of `COLUMNS`."""
    points: pd.DataFrame
    """A row for each k and length, ascending: k, length, seeds (how many), samples (of all seeds), value, low, high
    (`exact_interval`), of_seeds (the share of each that is exact), wrong_token, wrong_id, wrong_stop (share whose first
    error it is, mean over seeds), error, error_low, error_high (`expected_error`; where rows have no probabilities, the
    share that is not exact), is_expected (which of the two)."""

    @property
    def train_length(self) -> tuple[int, int]:
        """Shortest and longest training sample, in the task's unit."""
        shortest, longest = self.trained["train_length"]
        return shortest, longest

    @property
    def k_train(self) -> int:
        """K_train; 0: the task plants no tokens."""
        return self.trained.get("k_train", 0)

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing, where all labels are equally likely whatever k; None elsewhere."""
        if self.task == "sparse_parity":
            return 1 / 2
        even = {"label_function": "sum", "planted_distribution": "uniform"}
        if self.task == "planted" and even.items() <= self.parameters.items():
            return 1 / self.parameters["num_planted"]
        return None

    @property
    def scheme_label(self) -> str:
        """Its position scheme as figures name it; that of the idealised transformer has no RoPE."""
        if (self.scheme, self.rotate) == ("contiguous", "none"):
            return "NoPE"
        label = SCHEME_LABELS.get(self.scheme, self.scheme)
        return label.replace("RoPE", "tuples") if self.family == "tuples" else label

    def curves(self) -> dict[int, pd.DataFrame]:
        """Points by k, ascending."""
        return {int(k): points for k, points in self.points.groupby("k")}


def pool(rows: pd.DataFrame) -> list[Group]:
    """Groups of rows of `load`, in the order in which they are drawn.

    Raises `UserError` where a training seed occurs twice in a group, for the two would not be independent. Other
    lengths or k of the same weights belong together.
    """
    groups = []
    for values, members in rows.groupby(list(_SETTINGS), dropna=False):
        _check_seeds(members)
        settings = dict(zip(_SETTINGS, values, strict=True))
        settings |= {name: json.loads(settings[name]) for name in _JSON}
        settings["skip_probability"] = next(iter(members["skip_probability"].dropna()), None)
        members = members.sort_values(["k", "length", "seed"], ignore_index=True)
        points = pd.DataFrame([_point(of_cell) for _, of_cell in members.groupby(["k", "length"])])
        groups.append(Group(**settings, rows=members, points=points))
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[Any, ...]:
    """Ascending in figures and tables."""
    schemes = [*SCHEME_LABELS, group.scheme]
    parameters, trained, options = (json.dumps(getattr(group, name)) for name in _JSON)
    plan = group.task, group.k_train, parameters, schemes.index(group.scheme), group.scheme, group.rotate
    model = -(group.skip_probability or 0), group.family, group.weights
    return *plan, *model, bool(group.options), options, trained


def _check_seeds(rows: pd.DataFrame) -> None:
    """Raise `UserError` where two trainings of a group have one seed, or one was measured twice at a length."""
    weights = rows.groupby("seed")["weights_sha256"].nunique()
    again = [*weights.index[weights > 1], *rows["seed"][rows.duplicated(["seed", "k", "length"])]]
    if again:
        names = " and ".join(rows["folder"][rows["seed"] == again[0]].unique())
        raise UserError(f"seed {again[0]} of one setting occurs twice ({names}); give it once")


def _point(rows: pd.DataFrame) -> dict[str, Any]:
    """One row of `Group.points` from the rows of its seeds."""
    samples, exact = rows["samples"].to_numpy(), rows["exact"].to_numpy()
    share, expected = exact_interval(exact, samples), expected_error(rows)
    error = expected or Interval(1 - share.value, 1 - share.high, 1 - share.low)
    return {
        "k": int(rows["k"].iloc[0]),
        "length": int(rows["length"].iloc[0]),
        "seeds": len(rows),
        "samples": int(samples.sum()),
        **vars(share),
        "of_seeds": (exact / samples).tolist(),
        **{f"wrong_{sort}": float(np.mean(rows[f"wrong_{sort}"] / samples)) for sort in ERROR_SORTS},
        **{"error": error.value, "error_low": error.low, "error_high": error.high},
        "is_expected": expected is not None,
    }


def exact_interval(exact: np.ndarray, samples: np.ndarray) -> Interval:
    """Mean over seeds of the share that is exact, and its 95 % interval [ours]: `_over_seeds`, Wilson's for one seed.

    Where no sample of any seed is exact, or all are: Wilson's interval of the pooled counts. That seeds may share their
    test samples is not accounted for.

    Args:
        exact: (S,) exact samples of each seed.
        samples: (S,) samples of each seed, 1 or more.
    """
    shares = exact / samples
    pooled = wilson(int(exact.sum()), int(samples.sum()))
    return pooled if shares.mean() in (0.0, 1.0) else _over_seeds(shares, pooled)


def expected_error(rows: pd.DataFrame) -> Interval | None:
    """1 - probability of the true response, mean over seeds, and its 95 % interval [ours]; None where one has none.

    `_over_seeds`; for one seed the normal interval of the mean of its samples. Where no sample differs from 0, or from
    1, that has no width: Wilson's interval of the pooled samples then.
    """
    samples = rows["samples"].to_numpy(float)
    errors, deviations = 1 - rows["mean_probability"].to_numpy(), rows["std_probability"].to_numpy()
    if np.isnan(errors).any() or np.isnan(deviations).any():
        return None
    value = float(errors.mean())
    if value in (0.0, 1.0):
        return wilson(round(value * samples.sum()), int(samples.sum()))
    half = student_t(np.inf) * np.sqrt((deviations**2 / samples).sum()) / len(rows)
    return _over_seeds(errors, Interval(value, value - half, value + half))


def _over_seeds(shares: np.ndarray, of_samples: Interval) -> Interval:
    """Mean share of S seeds with Student's t, S - 1 degrees of freedom, within 0 … 1 [ours].

    Never narrower than the interval of the samples alone: few seeds may agree by chance.
    """
    value, half = float(shares.mean()), 0.0
    if len(shares) > 1:
        half = student_t(len(shares) - 1) * float(shares.std(ddof=1)) / len(shares) ** 0.5
    low, high = np.clip((min(value - half, of_samples.low), max(value + half, of_samples.high)), 0, 1)
    return Interval(value, float(low), float(high))


# --- names ---


def facts(group: Group) -> dict[str, str]:
    """What groups of one task, K_train and scheme may differ in, by name, as text; what tells most about them first."""
    values = {"rotate": group.rotate, "skip_probability": group.skip_probability, "family": group.family}
    values |= group.parameters
    values |= {
        f"trained {name}": value
        for name, value in group.trained.items()
        if value != group.parameters.get(name)
    }
    values |= group.options | {"weights": f"{group.weights:,}"}
    words = {name: "–".join(map(str, v)) if isinstance(v, list) else v for name, v in values.items()}
    return {name: f"{name.split('.')[-1]} {word}" for name, word in words.items()}


def tell_apart(all_facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Of each the facts that tell it from the others; a fact that tells no more apart than those before is left out."""
    frame = pd.DataFrame(all_facts).fillna("")
    names: list[str] = []
    count = 1
    for name in sorted(frame, key="weights".__eq__):  # last, as they follow from the rest
        combinations = len(frame[[*names, name]].drop_duplicates())
        if combinations > count:
            names, count = [*names, name], combinations
    return [", ".join(filter(None, known)) for known in frame[names].to_numpy().tolist()]


def labels(groups: Sequence[Group], facts_of: Callable[[Group], Mapping[str, str]] = facts) -> list[str]:
    """A name for each group: its scheme, and what tells apart (`tell_apart`) those of its task, K_train and scheme."""
    kinds = [(group.task, group.k_train, group.scheme_label) for group in groups]
    named = [""] * len(groups)
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        further = tell_apart([facts_of(groups[place]) for place in places])
        for place, text in zip(places, further, strict=True):
            named[place] = f"{kind[-1]}, {text}" if text else kind[-1]
    return named


def points_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """All points as one tidy frame: `Group.points` behind task and name of the curve, and the model of its group."""
    frames = []
    for group, label in zip(groups, labels(groups), strict=True):
        names = [f"k = {k}, K_train = {group.k_train}; {label}" if k else label for k in group.points["k"]]
        frame = group.points.assign(task=group.task, name=names)[["task", "name", *group.points.columns]]
        model = ("scheme", "rotate", "skip_probability", "family", "weights")
        frames.append(frame.assign(**{name: getattr(group, name) for name in model}))
    return pd.concat(frames, ignore_index=True)


def describe(groups: Sequence[Group]) -> str:
    """One line on what was evaluated: scheme if there is one, seeds, steps, samples."""
    points = pd.concat([group.points for group in groups])
    schemes = {group.scheme_label for group in groups}
    seeds, samples = _range(points["seeds"]), _range(points["samples"])
    steps = _range(pd.concat([group.rows["step"] for group in groups]))
    last = " of the last stage" if any("initial_weights" in group.options for group in groups) else ""
    parts = [f"{seeds} training seed{'' if seeds == '1' else 's'}", f"{steps} steps{last}"]
    return "; ".join([*(schemes if len(schemes) == 1 else ()), *parts, f"{samples} samples a point"])


def _range(values: pd.Series) -> str:
    return " to ".join(f"{value:,}" for value in sorted({values.min(), values.max()}))
