"""Exact match of the synthetic tasks by length: read, saved as one frame, and pooled over training seeds.

A *group* is what was trained alike but for the seed, as far as the frame tells: same task and parameters, scheme,
rotation, family, number of weights, further options. (It does not record precision, heads or weight decay, say.) A
*curve* is one k of a group; it has a point for every length that at least one seed of the group has.

`olmo-sparsity exact_match` measures a run and leaves an exact_match.json in its folder; a study keeps all rows of its
runs in one exact_match.parquet. Shapes: S seeds of a point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
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
WILSON, STUDENT, POOLED = "Wilson", "Student's t over seeds", "Wilson, seeds pooled"
"""The intervals of `exact_interval`."""

_FORMAT = {b"kind": b"olmo-sparsity exact match", b"version": b"3"}
_STRINGS = ("folder", "checkpoint", "weights_sha256", "commit", "machine")
_COUNTS = ("samples", "exact", *(f"wrong_{sort}" for sort in ERROR_SORTS))
_FORCED = ("teacher_forced_exact", "response_tokens", "teacher_forced_tokens")


# --- the frame ---


@dataclass(frozen=True)
class Settings:
    """What the rows of a group have in common; each field is a column of the frame."""

    task: str
    parameters: str
    """Every parameter of the task that was measured, JSON, keys in order."""
    trained: str
    """Those of its training, likewise."""
    scheme: str
    rotate: str
    """What RoPE rotates by; empty: the model's default."""
    skip_probability: float | None
    """Share of the training samples whose coupled ids jump ahead; None (NaN in a frame): it couples nothing."""
    family: str
    weights: int
    """How many the model has."""
    options: str
    """Further options of its training by dotted name, those that are not at their default, JSON."""

    @cached_property
    def task_parameters(self) -> dict[str, Any]:
        """Parameters of the task by name."""
        return json.loads(self.parameters)

    @cached_property
    def trained_parameters(self) -> dict[str, Any]:
        """Parameters of the task in training, by name."""
        return json.loads(self.trained)

    @cached_property
    def training_options(self) -> dict[str, Any]:
        """Further options of its training, by dotted name."""
        return json.loads(self.options)

    @property
    def train_length(self) -> tuple[int, int]:
        """Shortest and longest training sample, in the task's unit."""
        shortest, longest = self.trained_parameters["train_length"]
        return shortest, longest

    @property
    def k_train(self) -> int:
        """K_train; 0: the task plants no tokens."""
        return self.trained_parameters.get("k_train", 0)

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing, where all labels are equally likely whatever k; None elsewhere."""
        if self.task == "sparse_parity":
            return 1 / 2
        even = {"label_function": "sum", "planted_distribution": "uniform"}
        if self.task == "planted" and even.items() <= self.task_parameters.items():
            return 1 / self.task_parameters["num_planted"]
        return None

    @property
    def order(self) -> tuple[Any, ...]:
        """Ascending in figures and tables."""
        schemes = [*SCHEME_LABELS, self.scheme]
        plan = (self.task, self.k_train, self.parameters, schemes.index(self.scheme), self.scheme)
        model = (self.rotate, -(self.skip_probability or 0), self.family, self.weights)
        return (*plan, *model, self.options != "{}", self.options, self.trained)


_SETTINGS = [field.name for field in fields(Settings)]
_TYPES = {
    **dict.fromkeys((*_STRINGS, *_SETTINGS), str),
    **dict.fromkeys(
        ("step", "seed", "evaluation_seed", "weights", "length", "k", *_COUNTS, *_FORCED), np.int64
    ),
    **dict.fromkeys(
        ("skip_probability", "teacher_forced_ids", "mean_probability", "std_probability"), np.float64
    ),
}
COLUMNS = list(_TYPES)
"""A row per checkpoint, k and length: the checkpoint (``folder``: where it was measured, below the folder that was
read), `Settings`, and the counts of `olmo_sparsity.evaluate.exact_match.LengthResult`. k is 0 where the task plants no
tokens; ``teacher_forced_ids`` is NaN where the model predicts none, the probabilities where an old record had none."""


def record_frame(record: Mapping[str, Any], folder: str = "") -> pd.DataFrame:
    """The rows of one evaluation, as `olmo_sparsity.evaluate.exact_match.exact_match_record` tells them."""
    options = dict(sorted(record["options"].items()))
    if record["initial_weights"]:  # its training went on from weights of another run
        options["initial_weights"] = True
    frame = pd.DataFrame(record["rows"]).assign(
        folder=folder,
        task=record["task"]["name"],
        parameters=json.dumps(record["task"]["parameters"], sort_keys=True),
        trained=json.dumps(record["trained"], sort_keys=True),
        rotate=record["rotate"] or "",
        weights=record["parameters"],
        options=json.dumps(options),
        **{name: record[name] for name in ("checkpoint", "step", "weights_sha256", "commit", "machine")},
        **{
            name: record[name] for name in ("scheme", "skip_probability", "family", "seed", "evaluation_seed")
        },
    )
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
    """Checkpoints that differ, as far as they say, in the training seed alone."""

    settings: Settings
    rows: pd.DataFrame
    """Theirs, of `COLUMNS`."""
    points: pd.DataFrame
    """A row for each k and length, ascending: k, length, seeds (how many), samples (of all seeds), value, low, high
    (share of exact responses, mean over seeds, and its 95 % interval), interval (`WILSON`, `STUDENT` or `POOLED`),
    of_seeds (that share of each), wrong_token, wrong_id, wrong_stop (share whose first error it is, mean over seeds),
    error, error_low, error_high (`expected_error`; where rows have no probabilities, the share that is not exact),
    is_expected (which of the two)."""

    @property
    def curves(self) -> dict[int, pd.DataFrame]:
        """Points by k, ascending."""
        return {int(k): points for k, points in self.points.groupby("k")}


def pool(rows: pd.DataFrame) -> list[Group]:
    """Groups of rows of `load`, in the order in which they are drawn.

    Raises `UserError` where a training seed occurs twice in a group, for the two would not be independent. Other
    lengths or k of the same weights belong together.
    """
    groups = []
    for values, members in rows.groupby(_SETTINGS, dropna=False):
        settings = Settings(**dict(zip(_SETTINGS, values, strict=True)))
        skips = settings.skip_probability
        settings = replace(settings, skip_probability=None if pd.isna(skips) else skips)
        again = members[members.duplicated(["seed", "k", "length"])]
        weights = members.drop_duplicates(["seed", "weights_sha256"])
        again = pd.concat([again, weights[weights.duplicated("seed")]])
        if len(again):
            both = members[members["seed"] == again["seed"].iloc[0]][
                ["folder", "checkpoint"]
            ].drop_duplicates()
            names = " and ".join(f"{row.folder}: {row.checkpoint}" for row in both.itertuples())
            raise UserError(
                f"seed {again['seed'].iloc[0]} of one setting occurs twice ({names}); give it once"
            )
        members = members.sort_values(["k", "length", "seed"], ignore_index=True)
        points = pd.DataFrame([_point(of_cell) for _, of_cell in members.groupby(["k", "length"])])
        groups.append(Group(settings, members, points))
    return sorted(groups, key=lambda group: group.settings.order)


def _point(rows: pd.DataFrame) -> dict[str, Any]:
    """One row of `Group.points` from the rows of its seeds."""
    samples, exact = rows["samples"].to_numpy(), rows["exact"].to_numpy()
    share, interval = exact_interval(exact, samples)
    error = expected_error(rows)
    is_expected = error is not None
    error = error or Interval(1 - share.value, 1 - share.high, 1 - share.low)
    return {
        "k": int(rows["k"].iloc[0]),
        "length": int(rows["length"].iloc[0]),
        "seeds": len(rows),
        "samples": int(samples.sum()),
        **{"value": share.value, "low": share.low, "high": share.high, "interval": interval},
        "of_seeds": (exact / samples).tolist(),
        **{f"wrong_{sort}": float(np.mean(rows[f"wrong_{sort}"] / samples)) for sort in ERROR_SORTS},
        **{
            "error": error.value,
            "error_low": error.low,
            "error_high": error.high,
            "is_expected": is_expected,
        },
    }


def expected_error(rows: pd.DataFrame) -> Interval | None:
    """1 - probability of the true response, mean over seeds, and its 95 % interval [ours]; None where one has none.

    One seed: the normal interval of the mean of its samples. Several: `_over_seeds`. Where no sample differs from 0, or
    from 1, that has no width: Wilson's interval of the pooled samples then.
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


def exact_interval(exact: np.ndarray, samples: np.ndarray) -> tuple[Interval, str]:
    """Mean over seeds of the share that is exact, its 95 % interval, and the name of that interval [ours].

    One seed: Wilson's score interval. Several: `_over_seeds`. Where no sample of any seed is exact, or all are:
    Wilson's interval of the pooled counts. That seeds may share their test samples is not accounted for.

    Args:
        exact: (S,) exact samples of each seed.
        samples: (S,) samples of each seed, 1 or more.
    """
    shares = exact / samples
    pooled = wilson(int(exact.sum()), int(samples.sum()))
    if len(exact) == 1 or shares.mean() in (0.0, 1.0):
        return pooled, WILSON if len(exact) == 1 else POOLED
    return _over_seeds(shares, pooled), STUDENT


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


def task_facts(settings: Settings) -> dict[str, Any]:
    """Parameters of the task by name, and those that were others in training."""
    parameters = settings.task_parameters
    trained = settings.trained_parameters.items()
    return {
        **parameters,
        **{f"trained {name}": value for name, value in trained if value != parameters.get(name)},
    }


def facts(settings: Settings) -> dict[str, Any]:
    """What the settings of one task may differ in: parameters of the task, then of the model."""
    model = {name: getattr(settings, name) for name in ("rotate", "skip_probability", "family", "weights")}
    scheme = SCHEME_LABELS.get(settings.scheme, settings.scheme)
    return {**task_facts(settings), "scheme": scheme, **model, **settings.training_options}


def differing(all_facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is not the same in all of them, of each."""
    names = dict.fromkeys(name for known in all_facts for name in known)
    odd = [name for name in names if any(known.get(name) != all_facts[0].get(name) for known in all_facts)]
    return [{name: known[name] for name in odd if name in known} for known in all_facts]


def fact_text(name: str, value: Any) -> str:
    """What is known of settings with its name, where the value does not speak for itself."""
    if name == "weights":
        return f"{value:,} weights"
    text = "–".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if name == "scheme" else f"{name} {text}"


def scheme_labels(all_settings: Sequence[Settings]) -> list[str]:
    """A name for each of the settings after its scheme, and as much more as tells apart those of one task.

    Rotation, skips and family are named only where a scheme occurs with several, further options only where it does in
    one family and with one K_train, which is named elsewhere, and the number of weights only where settings that agree
    in all else differ in it.
    """
    labels = []
    for settings in all_settings:
        label = _scheme_label(settings)
        alike = [
            other for other in all_settings if (other.task, _scheme_label(other)) == (settings.task, label)
        ]
        if settings.family == "tuples":
            label = label.replace("RoPE", "tuples")
        if len({other.rotate for other in alike}) > 1:
            label += f", rotate {settings.rotate or 'default'}"
        if len({other.skip_probability for other in alike}) > 1:
            skips = settings.skip_probability
            label += f", skips in {100 * skips:g} %" if skips else ", no skips"
        if len({other.family for other in alike}) > 1 and settings.family not in label:
            label += f", {settings.family}"
        one = settings.family, settings.k_train
        alike = [other for other in alike if (other.family, other.k_train) == one]
        odd, *_ = differing([settings.training_options, *(other.training_options for other in alike)])
        label += "".join(f", {name.split('.')[-1]} {value}" for name, value in odd.items())
        if len({other.weights for other in alike if _plan(other) == _plan(settings)}) > 1:
            label += f", {settings.weights:,} weights"
        labels.append(label)
    return labels


def _scheme_label(settings: Settings) -> str:
    if (settings.scheme, settings.rotate) == ("contiguous", "none"):
        return "NoPE"
    return SCHEME_LABELS.get(settings.scheme, settings.scheme)


def _plan(settings: Settings) -> tuple[Any, ...]:
    model = settings.rotate, settings.skip_probability, settings.options
    return settings.task, settings.parameters, *model


def points_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """All points as one tidy frame: `Group.points` behind task, name of the curve, and the settings of its group.

    Parameters of the task stand in the name where they alone tell curves apart.
    """
    all_settings = [group.settings for group in groups]
    labels = scheme_labels(all_settings)
    plans = [(one.task, one.k_train, label) for one, label in zip(all_settings, labels, strict=True)]
    frames = []
    for group, plan in zip(groups, plans, strict=True):
        alike = [task_facts(one) for one, other in zip(all_settings, plans, strict=True) if other == plan]
        odd, *_ = differing([task_facts(group.settings), *alike])
        name = "; ".join([plan[-1], *([", ".join(fact_text(*item) for item in odd.items())] if odd else [])])
        points = group.points.assign(**asdict(group.settings))
        planted = [f"k = {k}, K_train = {group.settings.k_train}; " if k else "" for k in points["k"]]
        points["name"] = [prefix + name for prefix in planted]
        frames.append(points[["task", "name", *group.points.columns, *_SETTINGS[1:]]])
    return pd.concat(frames, ignore_index=True)


def describe(groups: Sequence[Group]) -> str:
    """One line on what was evaluated: scheme if there is one, seeds, samples, the intervals."""
    points = pd.concat([group.points for group in groups])
    schemes = {scheme_labels([group.settings])[0] for group in groups}
    parts = list(schemes) if len(schemes) == 1 else []
    seeds = _range(points["seeds"])
    parts.append(f"{seeds} training seed{'' if seeds == '1' else 's'}")
    last = any("initial_weights" in group.settings.training_options for group in groups)
    steps = _range(pd.concat([group.rows["step"] for group in groups]))
    parts.append(f"{steps} steps" + (" of the last stage" if last else ""))
    parts.append(f"{_range(points['samples'])} samples a point")
    names = {*points["interval"]}
    words = ["Student's t over seeds"] if STUDENT in names else []
    words += ["Wilson where all samples agree"] if POOLED in names and words else []
    words += ["Wilson for single seeds" if words else "Wilson"] if WILSON in names or not words else []
    return "; ".join([*parts, f"bands: 95 %, {', '.join(words)}"])


def _range(values: pd.Series) -> str:
    return " to ".join(f"{value:,}" for value in sorted({values.min(), values.max()}))
