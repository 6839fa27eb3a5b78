"""Exact match of the synthetic tasks by length: read, saved as one frame, and pooled over training seeds.

`olmo-sparsity exact_match` measures a run and leaves an exact_match.json in its folder; a study keeps all rows of its
runs in one exact_match.parquet. A *group* is what was trained alike but for the seed, as far as the rows tell: they
have no precision, heads or weight decay, say. A *curve* is one k of a group, with a point for every length that at
least one seed of the group has.

Shapes: S seeds of a point.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis.parquet import read_parquet, write_table
from analysis.stats.bootstrap import LEAST_RUNS, Interval, student_t, wilson
from analysis.stats.tables import without_empty_runs
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import EXACT_MATCH_NAME, read_exact_match, user_path

Settings = Mapping[Any, Any]
"""A row of a frame, or what of it says how a model was trained."""
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
GROUP = ["task", "k_train", "model"]
"""Columns of `pool` that name a group."""

# --- the frame ---

_MODEL = ["scheme", "rotate", "skip_probability", "family", "weights"]
SETTINGS = ["task", "parameters", "trained", *_MODEL, "options"]
"""Columns in which groups differ."""
_STRINGS = ["folder", "checkpoint", "weights_sha256", "commit", "machine", *SETTINGS]
_WRONG = ["wrong_token", "wrong_id", "wrong_stop"]
_FORCED = ["teacher_forced_exact", "response_tokens", "teacher_forced_tokens"]
_COUNTS = ["step", "seed", "evaluation_seed", "weights", "length", "k", "samples", "exact", *_WRONG, *_FORCED]
_FLOATS = ["skip_probability", "teacher_forced_ids", "mean_probability", "std_probability"]
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_STRINGS, str),
    **dict.fromkeys(_COUNTS, np.int64),
    **dict.fromkeys(_FLOATS, np.float64),
}
COLUMNS = list(_TYPES)
"""A row per checkpoint, k (0 where the task plants no tokens) and length.

    folder               where it was measured, below the folder that was read
    task, parameters     every parameter of the task that was measured, JSON, keys in order
    trained              those of its training
    scheme, rotate       what RoPE rotates by; empty: the model's default
    skip_probability     share of the training samples whose coupled ids jump ahead; NaN: it couples nothing
    family, weights      how many the model has
    options              further options of training by dotted name, those that are not at their default, JSON
    teacher_forced_ids   NaN where the model predicts none; the probabilities where an old record had none

The others are of `olmo_sparsity.evaluate.exact_match.LengthResult` and the record that it stands in.
"""


def record_frame(record: Mapping[str, Any], folder: str = "") -> pd.DataFrame:
    """The rows of one evaluation, as `olmo_sparsity.evaluate.exact_match_record.exact_match_record` tells them."""
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
    table = pa.Table.from_pandas(frame[COLUMNS], preserve_index=False)
    write_table(path, table, write_page_checksum=True)


def load(paths: Sequence[str | Path], only: Sequence[str] = ()) -> pd.DataFrame:
    """The rows at these paths, each once; a folder stands for every `exact_match.parquet` and `.json` beneath it.

    ``only``: folders, as in the column ``folder``, whose rows are wanted, and those beneath them; all by default.
    Raises `UserError` where there are none.
    """
    frames = []
    for path in map(user_path, paths):
        if not path.is_dir():
            frames.append(_read(path, Path()))
            continue
        for file in sorted([*path.rglob(NAME), *path.rglob(EXACT_MATCH_NAME)]):
            frames.append(_read(file, file.parent.relative_to(path)))
    if not frames:
        raise UserError(f"no {NAME} or {EXACT_MATCH_NAME} in {', '.join(map(str, paths))}")
    rows = pd.concat(frames, ignore_index=True).drop_duplicates(ignore_index=True)
    folders = sorted(rows["folder"].unique())
    chosen = folders
    if only:
        chosen = [name for name in folders if any(Path(name).is_relative_to(folder) for folder in only)]
    if not chosen:
        raise UserError(f"no rows of {', '.join(only)}; there are {', '.join(folders)}")
    return rows[rows["folder"].isin(chosen)].reset_index(drop=True)


def _read(file: Path, below: Path) -> pd.DataFrame:
    """The rows of a file that lies ``below`` the folder that is read. Raises `UserError` for another format."""
    if file.suffix == ".json":
        try:
            frame = record_frame(read_exact_match(file))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is damaged: it lacks fields of a record ({error}); make it with olmo-sparsity exact_match"
            ) from error
    else:
        frame = read_parquet(file)
    if [*frame] != COLUMNS:
        raise UserError(f"{file} is no exact match of this format; make it with figure1 --rows")
    folders = [str(below / folder) for folder in frame["folder"]]
    return frame.assign(folder=folders)


# --- pooling ---


def pool(rows: pd.DataFrame) -> pd.DataFrame:
    """The points of the groups of these rows, a row for each k and length, in the order in which they are drawn.

        task, k_train, model    which group: K_train (0: it plants no tokens) and `labels`
        k, length               length in the task's unit
        seeds, samples, steps   how many, samples of all seeds together, the training steps of each
        value, low, high        `exact_interval`; of two seeds also first_run, second_run
        of_seeds                the share of each seed that is exact
        wrong_token, wrong_id, wrong_stop      share whose first error it is, mean over seeds
        chance                  accuracy of guessing, where all labels are equally likely whatever k; NaN elsewhere
        shortest, longest       training sample, in the task's unit
        parameters, trained, scheme, …         the settings of `COLUMNS`

    Raises `UserError` where a training seed occurs twice in a group, for the two would not be independent. Other
    lengths or k of the same weights belong together.
    """
    places = {scheme: place for place, scheme in enumerate(SCHEME_LABELS)}
    keyed = rows.assign(
        k_train=[json.loads(trained).get("k_train", 0) for trained in rows["trained"]],
        place=rows["scheme"].map(places),
        skips=-rows["skip_probability"].fillna(0),
        with_options=rows["options"] != "{}",
    )
    order = ["task", "k_train", "parameters", "place", "scheme", "rotate", "skips", "family", "weights"]
    order += ["with_options", "options", "trained", "skip_probability"]
    groups = []
    for _, members in keyed.groupby(order, dropna=False):
        _check_seeds(members)
        settings = members[["k_train", *SETTINGS]].iloc[0].to_dict()
        cells = members.sort_values("seed").groupby(["k", "length"])
        shortest, longest = json.loads(settings["trained"])["train_length"]
        settings |= {"shortest": shortest, "longest": longest, "chance": _chance(settings)}
        points = pd.DataFrame([_point(of_cell) for _, of_cell in cells])
        groups.append(points.assign(**settings))
    names = labels([points.iloc[0] for points in groups])
    named = [points.assign(model=name) for points, name in zip(groups, names, strict=True)]
    whole = without_empty_runs(pd.concat(named, ignore_index=True))
    others = [column for column in whole if column not in GROUP]
    return whole[[*GROUP, *others]]


def _check_seeds(rows: pd.DataFrame) -> None:
    """Raise `UserError` where two runs of a group have one seed, or one was measured twice at a length."""
    weights = rows.groupby("seed")["weights_sha256"].nunique()
    of_other_weights = weights.index[weights > 1]
    measured_again = rows["seed"][rows.duplicated(["seed", "k", "length"])]
    again = [*of_other_weights, *measured_again]
    if again:
        folders = rows["folder"][rows["seed"] == again[0]].unique()
        names = " and ".join(folders)
        raise UserError(f"seed {again[0]} of one setting occurs twice ({names}); give it once")


def _chance(settings: Settings) -> float:
    parameters = json.loads(settings["parameters"])
    even = {"label_function": "sum", "planted_distribution": "uniform"}
    if settings["task"] == "planted" and even.items() <= parameters.items():
        return 1 / parameters["num_planted"]
    if settings["task"] == "sparse_parity":
        return 1 / 2
    return np.nan


def _point(rows: pd.DataFrame) -> dict[str, Any]:
    """The numbers of one k and length from the rows of its seeds."""
    samples = rows["samples"].to_numpy()
    exact = rows["exact"].to_numpy()
    interval = exact_interval(exact, samples)
    wrong = {name: float(np.mean(rows[name] / samples)) for name in _WRONG}
    return {
        "k": int(rows["k"].iloc[0]),
        "length": int(rows["length"].iloc[0]),
        "seeds": len(rows),
        "samples": int(samples.sum()),
        "steps": rows["step"].tolist(),
        **vars(interval),
        "of_seeds": (exact / samples).tolist(),
        **wrong,
    }


def exact_interval(exact: np.ndarray, samples: np.ndarray) -> Interval:
    """Mean over seeds of the share that is exact, and its 95 % interval [ours]: `over_seeds`, Wilson's for one seed.

    Where no sample of any seed is exact, or all are: Wilson's interval of the pooled counts. That seeds may share their
    test samples is not accounted for.

    Args:
        exact: (S,) exact samples of each seed.
        samples: (S,) samples of each seed, 1 or more.
    """
    shares = exact / samples
    pooled = wilson(int(exact.sum()), int(samples.sum()))
    if shares.mean() in (0.0, 1.0):
        return pooled
    return over_seeds(shares, pooled)


def over_seeds(shares: np.ndarray, of_samples: Interval) -> Interval:
    """Mean share of S seeds with Student's t, S - 1 degrees of freedom, within 0 … 1 [ours]; from three seeds on.

    Never narrower than the interval of the samples alone: few seeds may agree by chance. Two have that of the samples,
    and the share of either stands beside it.
    """
    value = float(shares.mean())
    half = 0.0
    if len(shares) >= LEAST_RUNS:
        deviation = float(shares.std(ddof=1))
        half = student_t(len(shares) - 1) * deviation / len(shares) ** 0.5
    low = min(value - half, of_samples.low)
    high = max(value + half, of_samples.high)
    low, high = np.clip((low, high), 0, 1)
    first_run = second_run = None
    if len(shares) == 2:
        first_run, second_run = shares.tolist()
    return Interval(value, float(low), float(high), first_run, second_run)


# --- names ---


def scheme_label(settings: Settings) -> str:
    """A position scheme as figures name it; that of the idealised transformer has no RoPE."""
    if (settings["scheme"], settings["rotate"]) == ("contiguous", "none"):
        return "NoPE"
    scheme = str(settings["scheme"])
    label = SCHEME_LABELS.get(scheme, scheme)
    if settings["family"] == "tuples":
        label = label.replace("RoPE", "tuples")
    return label


def labels(groups: Sequence[Settings]) -> list[str]:
    """A name for each group: its scheme, and what tells it from others of its task, K_train and scheme.

    ``groups``: settings and k_train of each.
    """
    kinds = [(group["task"], group["k_train"], scheme_label(group)) for group in groups]
    names = [scheme for _, _, scheme in kinds]
    for kind in set(kinds):
        alike = [place for place, other in enumerate(kinds) if other == kind]
        facts = pd.DataFrame([_facts(groups[place]) for place in alike]).fillna("")
        shown: list[str] = []
        combinations = 1
        others = [fact for fact in facts if fact != "weights"]
        for fact in [*others, "weights"]:  # which follow from the others
            with_fact = len(facts[[*shown, fact]].drop_duplicates())
            if with_fact > combinations:  # what tells no more apart than those before it is left out
                shown.append(fact)
                combinations = with_fact
        values_of_groups = facts[shown].to_numpy().tolist()
        for place, values in zip(alike, values_of_groups, strict=True):
            names[place] = ", ".join(filter(None, [names[place], *values]))
    return names


def _facts(settings: Settings) -> dict[str, str]:
    """What groups of one task, K_train and scheme may differ in, by name, as text; what tells most about them first."""
    parameters = json.loads(settings["parameters"])
    trained = json.loads(settings["trained"])
    values = {name: settings[name] for name in ("rotate", "family", "skip_probability")}
    values |= parameters
    for name, value in trained.items():
        if value != parameters.get(name):
            values[f"trained {name}"] = value
    values |= json.loads(settings["options"])
    values["weights"] = f"{settings['weights']:,}"
    facts = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = "–".join(map(str, value))
        facts[name] = f"{name.split('.')[-1]} {value}"
    return facts


def describe(points: pd.DataFrame) -> str:
    """One line on what was evaluated: scheme if there is one, seeds, steps, samples."""
    parts: list[str] = []
    schemes = {scheme_label(row) for row in points.to_dict("records")}
    if len(schemes) == 1:
        parts += schemes
    seeds = _range_text(points["seeds"])
    if seeds == "1":
        parts.append("1 training seed")
    else:
        parts.append(f"{seeds} training seeds")
    steps = f"{_range_text(points['steps'].explode())} steps"
    if points["options"].str.contains("initial_weights").any():
        steps += " of the last stage"
    parts += [steps, f"{_range_text(points['samples'])} samples a point"]
    return "; ".join(parts)


def describe_bands(points: pd.DataFrame) -> str:
    """What the intervals of `exact_interval` are of, for headings; two seeds are pooled."""
    of_samples = "of the samples"
    if (points["seeds"] == LEAST_RUNS - 1).any():
        of_samples += ", two seeds pooled"
    if points["seeds"].max() < LEAST_RUNS:
        return f"bands: 95 %, {of_samples}"
    if points["seeds"].min() >= LEAST_RUNS:
        return "bands: 95 %, over seeds"
    return f"bands: 95 %, over {LEAST_RUNS} seeds or more, else {of_samples}"


def _range_text(values: pd.Series) -> str:
    """The smallest and the largest value, such as "1 to 3"; one where they are the same."""
    smallest = values.min()
    largest = values.max()
    if smallest == largest:
        return f"{smallest:,}"
    return f"{smallest:,} to {largest:,}"
