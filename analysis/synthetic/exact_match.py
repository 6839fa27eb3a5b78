"""Exact match of the synthetic tasks by length: measured, saved as one frame, and pooled over training seeds.

A *group* is what was trained alike but for the seed, as far as the frame tells: same task and parameters, scheme,
rotation, family, number of weights, further options. (It does not record precision, heads or weight decay, say.) A
*curve* is one k of a group; it has a point for every length that at least one seed of the group has.

Measuring needs torch and OLMo, reading and pooling do not. Shapes: S seeds of a point.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.stats.bootstrap import Interval, student_t, wilson
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.evaluate.exact_match import Cell
    from olmo_sparsity.tasks import Task

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
    """The rows at these paths; a folder stands for every `exact_match.parquet` beneath it.

    ``only``: folders, as in the column ``folder``, whose rows are wanted, and those beneath them; all by default.
    Raises `UserError` for a path without rows.
    """
    frames = []
    for path in map(Path, paths):
        files = sorted(path.rglob(NAME)) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no {NAME}; make one with olmo-sparsity exact_match")
        for file in files:
            frame = _read(file)
            below = file.parent.relative_to(path) if path.is_dir() else Path()
            frame["folder"] = [str(below / folder) for folder in frame["folder"]]
            frames.append(frame)
    rows = pd.concat(frames, ignore_index=True)
    if only:
        wanted = [any(Path(folder).is_relative_to(each) for each in only) for folder in rows["folder"]]
        rows = rows[wanted]
        if rows.empty:
            raise UserError(
                f"no rows of {', '.join(only)}; there are {', '.join(sorted({*frame['folder']}))}"
            )
    return rows.drop_duplicates(ignore_index=True)


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} is missing; give an {NAME}, or a folder that holds some")
    table = pq.read_table(path, page_checksum_verification=True)
    if table.schema.metadata != _FORMAT:
        raise UserError(
            f"{path} is no exact match of this format; measure it again with olmo-sparsity exact_match"
        )
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
    for values, own in rows.groupby(_SETTINGS, dropna=False):
        settings = Settings(**dict(zip(_SETTINGS, values, strict=True)))
        skips = settings.skip_probability
        settings = replace(settings, skip_probability=None if pd.isna(skips) else skips)
        again = own[own.duplicated(["seed", "k", "length"])]
        weights = own.drop_duplicates(["seed", "weights_sha256"])
        again = pd.concat([again, weights[weights.duplicated("seed")]])
        if len(again):
            both = own[own["seed"] == again["seed"].iloc[0]][["folder", "checkpoint"]].drop_duplicates()
            names = " and ".join(f"{row.folder}: {row.checkpoint}" for row in both.itertuples())
            raise UserError(
                f"seed {again['seed'].iloc[0]} of one setting occurs twice ({names}); give it once"
            )
        own = own.sort_values(["k", "length", "seed"], ignore_index=True)
        points = pd.DataFrame([_point(each) for _, each in own.groupby(["k", "length"])])
        groups.append(Group(settings, own, points))
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
    plans = [(each.task, each.k_train, label) for each, label in zip(all_settings, labels, strict=True)]
    frames = []
    for group, plan in zip(groups, plans, strict=True):
        alike = [task_facts(each) for each, other in zip(all_settings, plans, strict=True) if other == plan]
        odd, *_ = differing([task_facts(group.settings), *alike])
        name = "; ".join([plan[-1], *([", ".join(fact_text(*item) for item in odd.items())] if odd else [])])
        points = group.points.assign(**asdict(group.settings))
        planted = [f"k = {k}, K_train = {group.settings.k_train}; " if k else "" for k in points["k"]]
        points["name"] = [each + name for each in planted]
        frames.append(points[["task", "name", *group.points.columns, *_SETTINGS[1:]]])
    return pd.concat(frames, ignore_index=True)


def percent(value: float, low: float, high: float, digits: int = 1) -> str:
    """A share with its interval in per cent, without the sign."""
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(100 * value, 100 * low, 100 * high, d=digits)


# --- measuring ---


def measure_exact_match(
    checkpoint: str,
    *,
    lengths: Sequence[int] | None = None,
    ks: Sequence[int] | None = None,
    parameters: Mapping[str, Any] | None = None,
    samples: int = 200,
    seed: int = 0,
    batch_tokens: int = 1 << 15,
    out: Path | None = None,
    overwrite: bool = False,
    device: str | None = None,
) -> tuple[Path, pd.DataFrame]:
    """Exact match of a checkpoint trained on a task; writes `exact_match.parquet`, returns its path and rows.

    The command's help says what the arguments mean. What was measured before of the same weights, task, samples and
    seed is not measured again. Raises `UserError` where the checkpoint was not trained on a task, for lengths or k that
    the task refuses, and where another measurement would be replaced.
    """
    from analysis.model.memory import pick_device
    from olmo_sparsity.checkpoint import load_model, resolve_checkpoint, weights_sha256
    from olmo_sparsity.data.task_batches import TaskPositions
    from olmo_sparsity.evaluate.exact_match import exact_match_record, measure
    from olmo_sparsity.model.build import as_predictor
    from olmo_sparsity.util.progress import progress

    place, folder = pick_device(device), resolve_checkpoint(checkpoint)
    model, config = load_model(folder)
    if config.task.name is None:
        raise UserError(
            f"{folder} was trained on text, and exact match is of a task; see olmo-sparsity length"
        )
    task, cells = planned(config, lengths, ks, parameters)
    predictor, positions = as_predictor(model.to(place)), TaskPositions(config)
    path = (out or folder.parent) / NAME
    unfinished = path.with_name(f"unfinished-{NAME}")
    wanted = pd.MultiIndex.from_tuples([(length, k or 0) for length, k in cells], names=["length", "k"])

    def measured(file: Path) -> pd.DataFrame:
        """The rows of a file that are of this measurement, by cell."""
        rows = _read(file) if file.is_file() else pd.DataFrame(columns=COLUMNS)
        parameters_json = json.dumps(asdict(task), sort_keys=True)
        same = (rows["weights_sha256"] == weights_sha256(folder)) & (rows["parameters"] == parameters_json)
        same &= (rows["evaluation_seed"] == seed) & (rows["samples"] == samples)
        return rows[same].set_index(["length", "k"], drop=False)

    before = measured(path)
    if before.index.equals(wanted):
        return path, before.reset_index(drop=True)
    if path.is_file() and not overwrite:
        raise UserError(f"{path} holds another measurement; give --out, or --overwrite")
    rows = [each for _, each in measured(unfinished).iterrows() if each.name in wanted]
    done = {each.name for each in rows}
    frames = [pd.DataFrame(rows, columns=COLUMNS).astype(_TYPES)] if rows else []
    with progress("exact match", len(cells) * samples, "samples", done=len(done) * samples) as advance:
        for length, k in cells:
            if (length, k or 0) in done:
                continue
            results = measure(
                predictor,
                task,
                positions,
                lengths=[length],
                ks=None if k is None else [k],
                samples=samples,
                seed=seed,
                device=place,
                batch_tokens=batch_tokens,
                advance=advance,
            )
            record = exact_match_record(folder, config, task, predictor, results, seed=seed, device=place)
            frames.append(record_frame(record))
            save(unfinished, pd.concat(frames))
    frame = pd.concat(frames).set_index(["length", "k"], drop=False).loc[wanted].reset_index(drop=True)
    save(path, frame)
    unfinished.unlink(missing_ok=True)
    return path, frame


def planned(
    config: Config,
    lengths: Sequence[int] | None = None,
    ks: Sequence[int] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[Task, list[Cell]]:
    """The task of ``config`` with other ``parameters``, and the cells (length, k) to measure it in.

    Raises `UserError` for what cannot be measured of a run of ``config``.
    """
    from olmo_sparsity.data.task_batches import TaskPositions, task_of
    from olmo_sparsity.evaluate.exact_match import checked_grid, multiples_of_training_length
    from olmo_sparsity.tasks import make_task

    assert config.task.name is not None, "only runs of a task are measured"
    task = make_task(config.task.name, {**config.task.parameters, **(parameters or {})})
    if task.vocabulary != task_of(config).vocabulary[: len(task.vocabulary)]:
        raise UserError(
            f"--parameters {parameters} number the symbols in another way; leave them as they were trained"
        )
    return task, checked_grid(TaskPositions(config), task, lengths or multiples_of_training_length(task), ks)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command ``exact_match``: measure, write and print, unless it is measured already."""
    options = vars(parser().parse_args(arguments))
    path, rows = measure_exact_match(options.pop("checkpoint"), **options)
    print(_table(rows).to_string(index=False))
    print("token, id, stop: what the first error is; tokens, ids: right where the true ones before are read")
    print(f"{path} has these rows")


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """For a terminal: a row per length and k, without columns that do not apply; shares in per cent."""
    shares = [wilson(exact, samples) for exact, samples in zip(rows["exact"], rows["samples"], strict=True)]
    table = rows[["length", "k", "samples"]].copy()
    table["exact [%]"] = [percent(share.value, share.low, share.high) for share in shares]
    for sort in ERROR_SORTS:
        table[sort] = rows[f"wrong_{sort}"]
    for sort in ("tokens", "ids"):
        table[f"{sort} [%]"] = (100 * rows[f"teacher_forced_{sort}"] / rows["response_tokens"]).round(2)
    without_ids = ["id", "ids [%]"] if rows["teacher_forced_ids"].isna().all() else []
    return table.drop(columns=without_ids + ([] if rows["k"].any() else ["k"]))


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(
        "olmo-sparsity exact_match", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="checkpoint, or run (then its last one)")
    parser.add_argument(
        "--lengths",
        type=numbers,
        help="comma-separated (default: up to 8, from the training range to 10 times the longest training length, as "
        "far as the task's test_length goes)",
    )
    parser.add_argument(
        "--ks",
        type=numbers,
        help="planted tokens, comma-separated; every length must hold them (default: the task's k_test, each at the "
        "lengths that hold it)",
    )
    parser.add_argument(
        "--parameters",
        type=_yaml,
        help="parameters of the task that differ from those of training, as YAML: '{distance: [100, 200]}'",
    )
    parser.add_argument("--samples", type=int, default=200, help="of each length (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument(
        "--batch-tokens", type=int, default=1 << 15, help="decoded at a time (default: 32768)"
    )
    parser.add_argument("--out", type=Path, help="folder to write to (default: the run's)")
    parser.add_argument("--overwrite", action="store_true", help="replace another measurement in --out")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    return parser


def numbers(text: str) -> list[int]:
    """Whole numbers from 1 up, comma-separated: ascending, each once."""
    values = sorted({int(part) for part in text.split(",")})
    if values[0] < 1:
        raise argparse.ArgumentTypeError("give whole numbers from 1 up")
    return values


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(text))


_HELP = """Exact match by length: how often a checkpoint trained on a synthetic task answers without an error.

examples:
  olmo-sparsity exact_match runs/parity-ppc
  olmo-sparsity exact_match runs/parity-ppc/step00003000 --lengths 10,20,40,80 --samples 500 --out runs/parity-ppc/early
  olmo-sparsity exact_match runs/sparse-parity --lengths 40,80 --ks 4,8,16
  olmo-sparsity exact_match runs/planted --parameters '{distance: [100, 200]}' --lengths 300 --out runs/planted/far

The model reads its own output (free-running), chooses the likeliest token at every step, and has to give the whole
response: every token, every position id where it predicts ids, and the end where it belongs. Lengths are in the task's
own unit: bits, digits, symbols, assignments, or tokens of the prompt. Every checkpoint gets the same test samples.

Writes exact_match.parquet and prints exact match with Wilson's 95 % interval over samples, the sorts of errors, and, of
the same samples, how many tokens (and ids) are right when the model reads the true ones before them. What is measured
already is left alone, so that a sweep can be run again; the same command, interrupted, goes on at the length (and k)
that it was at. Another measurement in the same folder is replaced with --overwrite only."""
