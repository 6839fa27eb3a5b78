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
from analysis.stats.bootstrap import LEAST_TRAININGS, Interval, student_t, wilson
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
_TYPES = dict.fromkeys(_STRINGS, str) | dict.fromkeys(_COUNTS, np.int64) | dict.fromkeys(_FLOATS, np.float64)
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
    """The rows of one evaluation, as `olmo_sparsity.evaluate.records.exact_match_record` tells them."""
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
    write_table(path, pa.Table.from_pandas(frame[COLUMNS], preserve_index=False), write_page_checksum=True)


def load(paths: Sequence[str | Path], only: Sequence[str] = ()) -> pd.DataFrame:
    """The rows at these paths, each once; a folder stands for every `exact_match.parquet` and `.json` beneath it.

    ``only``: folders, as in the column ``folder``, whose rows are wanted, and those beneath them; all by default.
    Raises `UserError` where there are none.
    """
    frames = []
    for path in map(user_path, paths):
        found = sorted([*path.rglob(NAME), *path.rglob(EXACT_MATCH_NAME)])
        for file in found if path.is_dir() else [path]:
            below = file.parent.relative_to(path) if path.is_dir() else Path()
            is_json = file.suffix == ".json"
            frame = record_frame(read_exact_match(file)) if is_json else read_parquet(file)
            if [*frame] != COLUMNS:
                raise UserError(f"{file} is no exact match of this format; make it with figure1 --rows")
            frames.append(frame.assign(folder=[str(below / folder) for folder in frame["folder"]]))
    if not frames:
        raise UserError(f"no {NAME} or {EXACT_MATCH_NAME} in {', '.join(map(str, paths))}")
    rows = pd.concat(frames, ignore_index=True).drop_duplicates(ignore_index=True)
    folders = sorted({*rows["folder"]})
    wanted = [one for one in folders if not only or any(Path(one).is_relative_to(part) for part in only)]
    if not wanted:
        raise UserError(f"no rows of {', '.join(only)}; there are {', '.join(folders)}")
    return rows[rows["folder"].isin(wanted)].reset_index(drop=True)


# --- pooling ---


def pool(rows: pd.DataFrame) -> pd.DataFrame:
    """The points of the groups of these rows, a row for each k and length, in the order in which they are drawn.

        task, k_train, model    which group: K_train (0: it plants no tokens) and `labels`
        k, length               length in the task's unit
        seeds, samples, steps   how many, samples of all seeds together, the training steps of each
        value, low, high        `exact_interval`
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
        groups.append(pd.DataFrame([_point(of_cell) for _, of_cell in cells]).assign(**settings))
    named = zip(groups, labels([points.iloc[0] for points in groups]), strict=True)
    points = pd.concat([points.assign(model=label) for points, label in named], ignore_index=True)
    return points[list(dict.fromkeys([*GROUP, *points]))]


def _check_seeds(rows: pd.DataFrame) -> None:
    """Raise `UserError` where two trainings of a group have one seed, or one was measured twice at a length."""
    weights = rows.groupby("seed")["weights_sha256"].nunique()
    again = [*weights.index[weights > 1], *rows["seed"][rows.duplicated(["seed", "k", "length"])]]
    if again:
        names = " and ".join(rows["folder"][rows["seed"] == again[0]].unique())
        raise UserError(f"seed {again[0]} of one setting occurs twice ({names}); give it once")


def _chance(settings: Settings) -> float:
    parameters = json.loads(settings["parameters"])
    even = {"label_function": "sum", "planted_distribution": "uniform"}
    if settings["task"] == "planted" and even.items() <= parameters.items():
        return 1 / parameters["num_planted"]
    return 1 / 2 if settings["task"] == "sparse_parity" else np.nan


def _point(rows: pd.DataFrame) -> dict[str, Any]:
    """The numbers of one k and length from the rows of its seeds."""
    samples = rows["samples"].to_numpy()
    exact = rows["exact"].to_numpy()
    return {
        "k": int(rows["k"].iloc[0]),
        "length": int(rows["length"].iloc[0]),
        "seeds": len(rows),
        "samples": int(samples.sum()),
        "steps": rows["step"].tolist(),
        **vars(exact_interval(exact, samples)),
        "of_seeds": (exact / samples).tolist(),
        **{name: float(np.mean(rows[name] / samples)) for name in _WRONG},
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
    return pooled if shares.mean() in (0.0, 1.0) else over_seeds(shares, pooled)


def over_seeds(shares: np.ndarray, of_samples: Interval) -> Interval:
    """Mean share of S seeds with Student's t, S - 1 degrees of freedom, within 0 … 1 [ours]; from three seeds on.

    Never narrower than the interval of the samples alone: few seeds may agree by chance.
    """
    value = float(shares.mean())
    half = 0.0
    if len(shares) >= LEAST_TRAININGS:
        half = student_t(len(shares) - 1) * float(shares.std(ddof=1)) / len(shares) ** 0.5
    low, high = np.clip((min(value - half, of_samples.low), max(value + half, of_samples.high)), 0, 1)
    return Interval(value, float(low), float(high))


# --- names ---


def scheme_label(settings: Settings) -> str:
    """A position scheme as figures name it; that of the idealised transformer has no RoPE."""
    if (settings["scheme"], settings["rotate"]) == ("contiguous", "none"):
        return "NoPE"
    scheme = str(settings["scheme"])
    label = SCHEME_LABELS.get(scheme, scheme)
    return label.replace("RoPE", "tuples") if settings["family"] == "tuples" else label


def labels(groups: Sequence[Settings]) -> list[str]:
    """A name for each group: its scheme, and what tells it from others of its task, K_train and scheme.

    ``groups``: settings and k_train of each.
    """
    kinds = [(group["task"], group["k_train"], scheme_label(group)) for group in groups]
    names = [scheme for _, _, scheme in kinds]
    for kind in set(kinds):
        alike = [place for place, other in enumerate(kinds) if other == kind]
        facts = pd.DataFrame([_facts(groups[place]) for place in alike]).fillna("")
        told: list[str] = []
        combinations = 1
        for fact in sorted(facts, key="weights".__eq__):  # they come last, as they follow from the rest
            with_fact = len(facts[[*told, fact]].drop_duplicates())
            if with_fact > combinations:  # what tells no more apart than those before it is left out
                told, combinations = [*told, fact], with_fact
        for place, values in zip(alike, facts[told].to_numpy().tolist(), strict=True):
            names[place] = ", ".join(filter(None, [names[place], *values]))
    return names


def _facts(settings: Settings) -> dict[str, str]:
    """What groups of one task, K_train and scheme may differ in, by name, as text; what tells most about them first."""
    parameters = json.loads(settings["parameters"])
    trained = json.loads(settings["trained"])
    values = {name: settings[name] for name in ("rotate", "family", "skip_probability")} | parameters
    values |= {f"trained {name}": value for name, value in trained.items() if value != parameters.get(name)}
    values |= {**json.loads(settings["options"]), "weights": f"{settings['weights']:,}"}
    words = {name: "–".join(map(str, v)) if isinstance(v, list) else v for name, v in values.items()}
    return {name: f"{name.split('.')[-1]} {word}" for name, word in words.items()}


def describe(points: pd.DataFrame) -> str:
    """One line on what was evaluated: scheme if there is one, seeds, steps, samples, the bands."""
    schemes = {scheme_label(row) for row in points.to_dict("records")}
    of_scheme = [*schemes] if len(schemes) == 1 else []
    seeds, steps, samples = (
        " to ".join(f"{value:,}" for value in sorted({values.min(), values.max()}))
        for values in (points["seeds"], points["steps"].explode(), points["samples"])
    )
    last = " of the last stage" if points["options"].str.contains("initial_weights").any() else ""
    parts = [f"{seeds} training seed{'' if seeds == '1' else 's'}", f"{steps} steps{last}"]
    return "; ".join([*of_scheme, *parts, f"{samples} samples a point", "bands: 95 %"])
