"""Exact match by length, from the records of evaluated checkpoints (`exact_match.json`): read and pooled. No torch.

A *group* is what was trained alike but for the seed, as far as the records tell: same task and parameters, scheme,
rotation, family, number of weights, further options. (They do not record precision, heads or weight decay, say.) A
*curve* is one k of a group, or the whole group where the task plants no tokens; it has a point for every length that
at least one record of the group has, over the seeds that have it.

Shapes: S seeds of a point, R resamples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from analysis.stats.bootstrap import Interval, student_t, wilson
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import EXACT_MATCH, Json, misfit

RECORD_NAME = EXACT_MATCH.name
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

_AGAIN = "measure it again with scripts/exact_match.py"
_SOURCE = ("run", "checkpoint", "step", "weights_sha256", "commit", "machine", "evaluation_seed")
_ROW = {
    **dict.fromkeys(("length", "samples", "exact", *(f"wrong_{sort}" for sort in ERROR_SORTS)), int),
    "k": (int, None),
}
_PROBABILITIES = ("mean_probability", "std_probability")
_PARAMETERS = {"train_length": [int]}
_SHAPE = {
    "task": {"name": str, "parameters": _PARAMETERS},
    **dict.fromkeys(("scheme", "family"), str),
    **dict.fromkeys(("parameters", "seed"), int),
    "rotate": (str, None),
    "skip_probability": (float, None),
    "rows": [_ROW],
}
"""What figures need of a record, see `misfit`."""


@dataclass(frozen=True)
class Settings:
    """What the records of a group have in common."""

    task: str
    parameters_json: str
    """Every parameter of the task, keys in order."""
    scheme: str
    rotate: str | None
    skip_probability: float | None
    """Share of the training samples whose coupled ids jump ahead; None: the scheme couples nothing."""
    family: str
    weights: int
    """How many the model has."""
    options_json: str = "{}"
    """Further options of its training by dotted name, those that are not at their default, keys in order."""
    initial_weights: bool | None = None
    """Whether its training went on from weights of another run; None: older records, which do not say."""
    trained_json: str = "{}"
    """Parameters of the task that differed in training, keys in order; older records have none."""

    @cached_property
    def parameters(self) -> Json:
        """Parameters of the task by name."""
        return json.loads(self.parameters_json)

    @cached_property
    def trained(self) -> Json:
        """Parameters of the task in training, by name."""
        return {**self.parameters, **json.loads(self.trained_json)}

    @property
    def options(self) -> Json:
        """Further options of its training, by dotted name."""
        return json.loads(self.options_json) | ({"initial_weights": True} if self.initial_weights else {})

    @property
    def train_length(self) -> tuple[int, int]:
        """Shortest and longest training sample, in the task's unit."""
        shortest, longest = self.trained["train_length"]
        return shortest, longest

    @property
    def k_train(self) -> int | None:
        """K_train; None: the task plants no tokens."""
        return self.trained.get("k_train")

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
    def order(self) -> tuple[Any, ...]:
        """Ascending in figures and tables."""
        schemes = [*SCHEME_LABELS, self.scheme]
        plan = (self.task, self.k_train or 0, self.parameters_json, schemes.index(self.scheme), self.scheme)
        model = (self.rotate or "", -(self.skip_probability or 0), self.family, self.weights)
        training = (bool(self.options), self.options_json, str(self.initial_weights), self.trained_json)
        return (*plan, *model, *training)


@dataclass(frozen=True)
class Row:
    """Counts of one length (and k) of one checkpoint."""

    length: int
    k: int | None
    samples: int
    exact: int
    wrong_token: int
    wrong_id: int
    wrong_stop: int
    mean_probability: float | None = None
    """Of the true response, over samples, 0 to 1; None: an older record, which has none."""
    std_probability: float | None = None


@dataclass(frozen=True)
class Record:
    """One evaluated checkpoint."""

    path: Path
    settings: Settings
    seed: int
    """Of the training run."""
    rows: tuple[Row, ...]
    source: Json
    """Run, checkpoint, step, checksum, commit, machine and evaluation seed, as the record says."""


@dataclass(frozen=True)
class Point:
    """One length of a curve."""

    length: int
    seeds: int
    """How many training seeds have this length."""
    samples: int
    """Of all of them together."""
    exact: Interval
    """Share of samples whose whole response is right: mean over seeds, 95 % interval."""
    of_seeds: tuple[float, ...]
    """That share of each."""
    interval: str
    """Which one: `WILSON`, `STUDENT` or `POOLED`."""
    wrong: dict[str, float]
    """Share of samples whose first error is of each of `ERROR_SORTS`, mean over seeds; with ``exact`` they make 1."""
    expected_error: Interval | None = None
    """1 - probability of the true response, mean over samples and seeds, 95 % interval; None: a record has none."""


@dataclass(frozen=True)
class Curve:
    """Exact match against length."""

    k: int | None
    points: tuple[Point, ...]
    """In ascending length."""

    @property
    def lengths(self) -> list[int]:
        """Of its points, in the task's unit."""
        return [point.length for point in self.points]


@dataclass(frozen=True)
class Group:
    """Records that differ, as far as they say, in the training seed alone, and their curves."""

    settings: Settings
    records: tuple[Record, ...]
    """In ascending seed."""
    curves: tuple[Curve, ...]
    """In ascending k."""

    @property
    def lengths(self) -> list[int]:
        """All that any of its curves has, ascending."""
        return sorted({length for curve in self.curves for length in curve.lengths})


# --- reading ---


def load_records(paths: Sequence[str | Path]) -> list[Record]:
    """The records at these paths, each once; a folder stands for every `exact_match.json` beneath it.

    Raises `UserError` for a path without records, and for a file that is damaged, of another format or inconsistent.
    """
    files = {file.resolve(): file for path in paths for file in _files(Path(path))}
    return [_load(file) for file in files.values()]


def _files(path: Path) -> list[Path]:
    found = sorted(path.rglob(RECORD_NAME)) if path.is_dir() else [path]
    if not found:
        raise UserError(f"{path} holds no {RECORD_NAME}; make one with scripts/exact_match.py")
    if not found[0].is_file():
        raise UserError(f"{path} is missing; give an {RECORD_NAME}, or a folder that holds some")
    return found


def _load(path: Path) -> Record:
    found = EXACT_MATCH.load(path)
    if odd := misfit(found, _SHAPE):
        raise UserError(f"{path} is malformed: {odd}; {_AGAIN}")
    parameters = found["task"]["parameters"]
    options, continued = found.get("options", {}), found.get("initial_weights")  # older records have none
    trained = found.get("trained", parameters)
    if odd := (
        misfit(trained, _PARAMETERS, "trained")
        or misfit(options, {}, "options")
        or misfit(continued, (bool, None), "initial_weights")
    ):
        raise UserError(f"{path} is malformed: {odd}; {_AGAIN}")
    if len(trained["train_length"]) != 2 or misfit(trained.get("k_train"), (int, None)):
        raise UserError(f"{path} is malformed: train_length or k_train of the task is none; {_AGAIN}")
    others = {name: value for name, value in trained.items() if value != parameters.get(name)}
    settings = Settings(
        task=found["task"]["name"],
        parameters_json=json.dumps(parameters, sort_keys=True),
        weights=found["parameters"],
        **{name: found[name] for name in ("scheme", "rotate", "skip_probability", "family")},
        options_json=json.dumps(options, sort_keys=True),
        initial_weights=continued,
        trained_json=json.dumps(others, sort_keys=True),
    )
    rows = tuple(
        Row(**{name: row[name] for name in _ROW}, **{name: row.get(name) for name in _PROBABILITIES})
        for row in found["rows"]
    )
    for row in rows:
        _check_row(path, row, settings)
    places = [(row.length, row.k) for row in rows]
    if twice := [place for number, place in enumerate(places) if place in places[:number]]:
        raise UserError(f"{path} has length {twice[0][0]}, k {twice[0][1]} twice; {_AGAIN}")
    return Record(path, settings, found["seed"], rows, {name: found.get(name) for name in _SOURCE})


def _check_row(path: Path, row: Row, settings: Settings) -> None:
    """Raise `UserError` for counts that do not fit each other, or a k where the task has none."""
    where = f"{path}, length {row.length}" + ("" if row.k is None else f", k {row.k}")
    if (row.k is None) != (settings.k_train is None):
        needs = "no k" if settings.k_train is None else "a k"
        raise UserError(f"{where}: k is {row.k}, but {settings.task} has {needs}; {_AGAIN}")
    wrong = (row.wrong_token, row.wrong_id, row.wrong_stop)
    if row.length < 1 or row.samples < 1 or min(row.exact, *wrong) < 0:
        raise UserError(f"{where}: a count is negative, or nothing was sampled; {_AGAIN}")
    if row.exact + sum(wrong) != row.samples:
        raise UserError(
            f"{where}: {row.exact} of {row.samples} exact leaves {row.samples - row.exact} wrong, but "
            f"{row.wrong_token} (token) + {row.wrong_id} (id) + {row.wrong_stop} (stop) are counted; {_AGAIN}"
        )


# --- pooling ---


def pool(records: Sequence[Record]) -> list[Group]:
    """Groups of records, in the order in which they are drawn.

    Raises `UserError` where a training seed occurs twice in a group, for the two would not be independent; parts of one
    measurement, the same weights at other lengths or k, are put together.
    """
    together: dict[Settings, list[Record]] = {}
    for record, settings in zip(records, _completed(records), strict=True):
        members = together.setdefault(settings, [])
        if same := [
            other for other in members if other.seed == record.seed and not _are_parts(other, record)
        ]:
            raise UserError(
                f"{same[0].path} and {record.path} are both seed {record.seed} of one setting "
                f"(steps {same[0].source['step']} and {record.source['step']}); give one of them only"
            )
        members.append(record)
    return [
        Group(
            settings,
            tuple(sorted(members, key=lambda record: record.seed)),
            _curves(members),
        )
        for settings, members in sorted(together.items(), key=lambda item: item[0].order)
    ]


def _completed(records: Sequence[Record]) -> list[Settings]:
    """The settings of each record; an older one takes those of the newer records that agree with all that it says.

    Where those newer ones differ from each other it keeps its own.
    """
    all_settings = [record.settings for record in records]
    kinds: dict[Settings, set[Settings]] = {}
    for settings in all_settings:
        older = replace(settings, initial_weights=None, trained_json="{}")
        if settings != older:
            kinds.setdefault(older, set()).add(settings)
    only = {older: fuller.pop() for older, fuller in kinds.items() if len(fuller) == 1}
    return [only.get(settings, settings) for settings in all_settings]


def _are_parts(one: Record, other: Record) -> bool:
    """Whether both are of the same weights, and nothing was measured in both."""
    cells = ({(row.length, row.k) for row in each.rows} for each in (one, other))
    weights = one.source["weights_sha256"]
    return weights is not None and weights == other.source["weights_sha256"] and set.isdisjoint(*cells)


def _curves(members: Sequence[Record]) -> tuple[Curve, ...]:
    rows = [row for record in members for row in record.rows]
    curves = []
    for k in sorted({row.k for row in rows}, key=lambda k: k or 0):
        own = [row for row in rows if row.k == k]
        lengths = sorted({row.length for row in own})
        points = (_point([row for row in own if row.length == length]) for length in lengths)
        curves.append(Curve(k, tuple(points)))
    return tuple(curves)


def _point(rows: Sequence[Row]) -> Point:
    samples = np.array([row.samples for row in rows])
    exact = np.array([row.exact for row in rows])
    interval, name = exact_interval(exact, samples)
    wrong = {
        sort: float(np.mean([getattr(row, f"wrong_{sort}") for row in rows] / samples))
        for sort in ERROR_SORTS
    }
    return Point(
        rows[0].length,
        len(rows),
        int(samples.sum()),
        interval,
        tuple((exact / samples).tolist()),
        name,
        wrong,
        expected_error(rows),
    )


def expected_error(rows: Sequence[Row]) -> Interval | None:
    """1 - probability of the true response, mean over seeds, and its 95 % interval [ours]; None where one has none.

    One seed: the normal interval of the mean of its samples. Several: `_over_seeds`. Where no sample differs from 0, or
    from 1, that has no width: Wilson's interval of the pooled samples then.
    """
    if any(row.mean_probability is None or row.std_probability is None for row in rows):
        return None
    samples, means, deviations = np.array(
        [[row.samples, row.mean_probability, row.std_probability] for row in rows], dtype=float
    ).T
    errors = 1 - means
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


# --- by an option of training ---

OPTION_DEFAULTS: Json = {
    "positions.coupled_share": 1.0,
    "positions.id_noise": 0.0,
    "model.rope_window": None,
}
"""Options that figures can be drawn against, and their values where a record does not name them."""


def by_option(groups: Sequence[Group], names: Sequence[str]) -> dict[str, list[tuple[Any, Group]]]:
    """What to draw against each of the options ``names``: its values, ascending, with their groups.

    Where one of them varies, the others are at their defaults.

    Raises `UserError` for an option of another name or with fewer than two values, and for groups that differ in
    anything else or are of a task that plants tokens.
    """
    if unknown := [name for name in names if name not in OPTION_DEFAULTS]:
        raise UserError(f"--by {unknown[0]}: is none of {', '.join(OPTION_DEFAULTS)}; give one of them")
    if any(group.settings.k_train is not None for group in groups):
        raise UserError("--by is for tasks without planted tokens; leave it out")
    all_facts = [{"task": group.settings.task, **facts(group.settings)} for group in groups]
    others = [{name: value for name, value in each.items() if name not in names} for each in all_facts]
    if odd := {name for each in differing(others) for name in each}:
        raise UserError(f"--by: the records differ in {', '.join(sorted(odd))}, too; give those that do not")
    series = {}
    for name in names:
        own = [
            (each.get(name, OPTION_DEFAULTS[name]), group)
            for each, group in zip(all_facts, groups, strict=True)
            if not any(other in each for other in names if other != name)
        ]
        if len(own) < 2:
            raise UserError(f"--by {name}: the records have fewer than two of its values; give more")
        series[name] = sorted(own, key=lambda item: (item[0] is None, item[0] or 0))
    return series


# --- names and JSON ---

_OF_THE_MODEL = ("scheme", "rotate", "skip_probability", "family", "weights")


def task_facts(settings: Settings) -> Json:
    """Parameters of the task by name, and those that were others in training."""
    trained = json.loads(settings.trained_json)
    return {**settings.parameters, **{f"trained {name}": value for name, value in trained.items()}}


def facts(settings: Settings) -> Json:
    """What the settings of one task may differ in: parameters of the task, then of the model."""
    model = {name: getattr(settings, name) for name in _OF_THE_MODEL}
    model["scheme"] = SCHEME_LABELS.get(settings.scheme, settings.scheme)
    return {**task_facts(settings), **model, **settings.options}


def differing(all_facts: Sequence[Json]) -> list[Json]:
    """What is not the same in all of them, of each."""
    names = dict.fromkeys(name for each in all_facts for name in each)
    odd = [name for name in names if any(each.get(name) != all_facts[0].get(name) for each in all_facts)]
    return [{name: each[name] for name in odd if name in each} for each in all_facts]


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
            label += f", {_skips(settings.skip_probability)}"
        if len({other.family for other in alike}) > 1 and settings.family not in label:
            label += f", {settings.family}"
        one = settings.family, settings.k_train
        alike = [other for other in alike if (other.family, other.k_train) == one]
        own, *_ = differing([settings.options, *(other.options for other in alike)])
        label += "".join(f", {name.split('.')[-1]} {value}" for name, value in own.items())
        if len({other.weights for other in alike if _plan(other) == _plan(settings)}) > 1:
            label += f", {settings.weights:,} weights"
        labels.append(label)
    return labels


def _scheme_label(settings: Settings) -> str:
    if (settings.scheme, settings.rotate) == ("contiguous", "none"):
        return "NoPE"
    return SCHEME_LABELS.get(settings.scheme, settings.scheme)


def _skips(probability: float | None) -> str:
    return f"skips in {100 * probability:g} %" if probability else "no skips"


def _plan(settings: Settings) -> tuple:
    model = settings.rotate, settings.skip_probability, str(settings.options)
    return settings.task, settings.parameters_json, *model


def curve_names(groups: Sequence[Group]) -> Iterator[tuple[Group, Curve, str]]:
    """Every curve with its group and what it is called; parameters of the task are named where they alone differ."""
    all_settings = [group.settings for group in groups]
    plans = [
        (settings.task, settings.k_train, label)
        for settings, label in zip(all_settings, scheme_labels(all_settings), strict=True)
    ]
    for group, plan in zip(groups, plans, strict=True):
        alike = [task_facts(each) for each, other in zip(all_settings, plans, strict=True) if other == plan]
        odd, *_ = differing([task_facts(group.settings), *alike])
        parameters = ", ".join(fact_text(*item) for item in odd.items())
        for curve in group.curves:
            k = "" if curve.k is None else f"k = {curve.k}, K_train = {group.settings.k_train}; "
            yield group, curve, k + plan[-1] + (f"; {parameters}" if parameters else "")


def curves_json(groups: Sequence[Group]) -> list[Json]:
    """Every curve with the numbers that are drawn: shares from 0 to 1, lengths in the task's unit."""
    return [
        {
            "name": name,
            "task": group.settings.task,
            "task_parameters": group.settings.parameters,
            **{each: getattr(group.settings, each) for each in _OF_THE_MODEL},
            "k": curve.k,
            "seeds": sorted({record.seed for record in group.records}),
            "points": [_point_json(point) for point in curve.points],
        }
        for group, curve, name in curve_names(groups)
    ]


def _point_json(point: Point) -> Json:
    expected = point.expected_error
    whole = {**asdict(point), "exact": point.exact.as_dict()}
    return {**whole, "expected_error": None if expected is None else expected.as_dict()}


def sources_json(groups: Sequence[Group]) -> list[Json]:
    """Every record that was read: its file, training seed and where it comes from."""
    return [
        {"record": str(record.path), "seed": record.seed, **record.source}
        for group in groups
        for record in group.records
    ]
