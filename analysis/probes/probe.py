"""What all probes share: models side by side on the same texts, the numbers of them, the files, and the command.

A probe is a subclass of `Probe`, whose fields are its settings and the options of its command, and what it gives one of
`ProbeResult`. Models with the same label are trainings of one, from other seeds.

Shapes: n stretches of text, L tokens of each, C models with all trainings, R resamples.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd

from analysis.segments import Segments
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, by_clusters, count_clusters
from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_folder,
    seed_number,
    settings_from,
    texts,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, file_in, read_json, remove, write_json
from olmo_sparsity.util.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.contexts import Texts
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

log = logging.getLogger(__name__)

Frames = dict[str, pd.DataFrame]

# --- a probe ---


@dataclass(frozen=True)
class Sample:
    """The stretches of text that every model reads."""

    segments: Segments
    """Where they stand."""
    tokens: np.ndarray
    """(n, L) token ids."""
    counts: dict[str, Any]
    """How much there is to measure, for the settings of the result."""

    def __len__(self) -> int:
        return len(self.tokens)

    def places(self) -> dict[str, np.ndarray]:
        """Text and, where there are groups, group of each stretch, as columns of a frame, (n,)."""
        group = self.segments.group
        return {"text": self.segments.text} | ({} if group is None else {"group": group})


@dataclass(kw_only=True)
class Probe(ABC):
    """Settings of a measurement, and how it is made; subclasses fill in the abstract methods."""

    RESULT: ClassVar[type[ProbeResult]]

    seed: int = field(default=0, metadata=argument("of all that is drawn", type=seed_number))
    resamples: int = DEFAULT_RESAMPLES
    """Of the bootstrap."""

    @abstractmethod
    def check(self, loaded: LoadedModel) -> None:
        """Raise `UserError` for a model that cannot be measured."""

    @abstractmethod
    def draw_sample(self, source: Texts) -> Sample:
        """What all models read. Raises `UserError` where the texts do not have it."""

    @abstractmethod
    def measure_model(self, token_losses: TokenLosses, sample: Any, label: str, progress: bool) -> Frames:
        """Frames of one model, by name: "rows", and what else there is."""

    @abstractmethod
    def numbers(self, frames: Frames, labels: Sequence[str]) -> dict[str, Any]:
        """Further fields of the result, from the frames of all models with their ``number`` in ``labels``."""

    def settings(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def measure(
        self,
        models: Any,
        texts: Any,
        *,
        labels: Sequence[str] | None = None,
        split: str = "heldout",
        out: str | Path | None = None,
        tokens_per_batch: int | None = None,
        memory_limit_gb: float | None = None,
        progress: bool = True,
        **opening: Any,
    ) -> Any:
        """Measure models, one after the other, on the same stretches of texts; a `ProbeResult`.

        Args:
            models: one, as for `analysis.model.loading.open_model`, which ``opening`` goes to, or a list of them.
            texts: as for `analysis.contexts.open_texts`, with ``split`` of a prepared corpus.
            labels: a name for each; by default as much of its path as tells it apart.
            out: folder to save to; the same call, interrupted, goes on with the model that it was at.
            tokens_per_batch: tokens of one forward pass.
            memory_limit_gb: what a forward pass may take, where ``tokens_per_batch`` is not given.
            progress: show it on standard error.

        Raises `UserError` before anything is measured, where models or texts cannot be measured so.
        """
        models = models if isinstance(models, list) else [models]
        labels = _labels_of(models, labels)
        source, described = self._read(models, labels, texts, split, opening)
        sample = self.draw_sample(source)
        settings = {"texts": source.name, "texts_sha256": source.sha256, "split": split, **self.settings()}
        parts = None if out is None else Path(out) / f"{self.RESULT.NAME}-parts"
        limits = {"tokens_per_batch": tokens_per_batch, "memory_limit_gb": memory_limit_gb}
        records: dict[str, list[dict[str, Any]]] = {}
        for number, (model, about) in enumerate(zip(models, described, strict=True)):
            key = hashlib.sha256(json.dumps([settings, about], sort_keys=True).encode()).hexdigest()[:16]
            part = None if parts is None else parts / f"{key}.json"
            if part is not None and part.is_file():
                log.info("%s was measured before the interruption", about["model"])
                of_model = read_json(part, f"remove {part}")
            else:
                of_model = self._records_of(model, opening, limits, sample, labels[number], progress)
                if part is not None:
                    write_json(part, of_model)
            head = {"number": number, "label": labels[number]}
            for name, rows in of_model.items():
                records.setdefault(name, []).extend(head | row for row in rows)
        of_models = {name: pd.DataFrame(rows) for name, rows in records.items()}
        segments = sample.segments
        settings |= {"texts_too_short": segments.texts_too_short, **sample.counts}
        settings |= count_clusters(segments.text, segments.group)
        about = {"models": described, "provenance": provenance()}
        numbers = self.numbers(of_models, labels)
        result = self.RESULT(settings=settings, rows=of_models["rows"], **numbers, **about)
        if out is not None and parts is not None:
            result.save(out)
            remove(parts)
        return result

    def _records_of(
        self,
        model: Any,
        opening: dict[str, Any],
        limits: dict[str, Any],
        sample: Sample,
        label: str,
        progress: bool,
    ) -> dict[str, list[dict[str, Any]]]:
        """The frames of one model, as JSON holds them."""
        with _opened(model, opening) as loaded:
            token_losses = _token_losses(loaded, sample.tokens.shape[1], **limits)
            frames = self.measure_model(token_losses, sample, label, progress)
        return {name: frame.to_dict("records") for name, frame in frames.items()}

    def _read(
        self, models: list[Any], labels: list[str], texts: Any, split: str, opening: dict[str, Any]
    ) -> tuple[Texts, list[dict[str, Any]]]:
        """The texts as token ids, and of each model label, what identifies it, and the lengths that it was trained on.

        Every model is opened once, before the first is measured, so that nobody waits to learn that the last is
        refused: by `check`, for other tokens of the texts, or for being given twice, which would count it twice.
        """
        from analysis.contexts import open_texts

        sources: list[Texts] = []
        described: list[dict[str, Any]] = []
        for model, label in zip(models, labels, strict=True):
            with _opened(model, opening) as loaded:
                its_texts = open_texts(texts, loaded.encode, split=split)
                loaded.check_texts(its_texts)
                self.check(loaded)
                trained = ("training_length", "position_scheme", "position_target")
                about = {"label": label, **loaded.describe()}
                about |= {name: loaded.trained.get(name) for name in trained}
            sources.append(its_texts)
            if not _same_tokens(sources[0], its_texts):
                raise UserError(
                    f"{loaded.name} has another tokenizer than {described[0]['model']}, so that their losses are not "
                    "of the same tokens; measure it by itself"
                )
            if about in described:
                raise UserError(f"{loaded.name} is given twice as {label}; give each seed once")
            described.append(about)
        return sources[0], described


@contextmanager
def _opened(model: Any, opening: dict[str, Any]) -> Iterator[LoadedModel]:
    from analysis.model.loading import open_model

    loaded = open_model(model, **opening)
    try:
        yield loaded
    finally:
        loaded.give_back()


def _labels_of(models: Sequence[Any], labels: Sequence[str] | None) -> list[str]:
    """A label for each model. Raises `UserError` where they are not as many."""
    labels = list(labels or _default_labels(models))
    if len(labels) != len(models):
        raise UserError(f"{len(models)} models need as many labels, not {', '.join(labels)}; mend --labels")
    return labels


def _default_labels(models: Sequence[Any]) -> list[str]:
    if not all(isinstance(model, str | Path) for model in models):
        return [f"model {number}" for number in range(1, len(models) + 1)]
    paths = [Path(model).resolve().parts for model in models]
    for count in range(1, max(map(len, paths), default=0) + 1):  # as many last parts as tell all apart
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return []


def _same_tokens(first: Texts, second: Texts) -> bool:
    if hasattr(first, "tokenizer_sha256"):  # a prepared corpus, whose tokenizer `check_texts` compares
        return True
    return len(first.lengths) == len(second.lengths) and all(
        np.array_equal(first.tokens(number), second.tokens(number)) for number in range(len(first.lengths))
    )


def _token_losses(
    loaded: LoadedModel, length: int, tokens_per_batch: int | None, memory_limit_gb: float | None
) -> TokenLosses:
    """Of a model that reads as many rows of ``length`` tokens at once as the memory holds."""
    from analysis.model.memory import GB, tokens_that_fit
    from analysis.model.token_losses import TokenLosses

    model, device = loaded.model, loaded.device
    if tokens_per_batch is None and memory_limit_gb is not None:
        tokens_per_batch = tokens_that_fit(model, device, length, memory_limit_gb * GB, n_targets=length)
    return TokenLosses(model, device=device, tokens_per_batch=tokens_per_batch)


def check_reach(loaded: LoadedModel, length: int, more: int = 0) -> None:
    """Raise `UserError` where a model has no learned position for ids up to ``length`` - 1, and ``more`` behind them.

    A rotary model is measured past the length that its configuration names: that is what the probes are for.
    """
    at_most = loaded.model.max_positions
    config: Any = getattr(loaded.model.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if at_most is not None and length + more > at_most and not getattr(config, "rope_parameters", None):
        raise UserError(
            f"{length + more:,} tokens are beyond the {at_most:,} learned positions of {loaded.name}; lower "
            f"--lengths to at most {at_most - more:,}"
        )


# --- numbers ---


def bootstrap_of(places: pd.DataFrame, *, seed: int, **options: Any) -> ClusterBootstrap:
    """Resamples of units that stand in ``places``: text, and group where there are groups."""
    groups = places["group"].to_numpy() if "group" in places else None
    return ClusterBootstrap(places["text"].to_numpy(), groups=groups, seed=seed, **options)


def draws_of_means(
    rows: pd.DataFrame, of: list[str], labels: Sequence[str], *, unit: str, resamples: int, seed: int
) -> tuple[ClusterBootstrap, pd.DataFrame, pd.Series]:
    """Means of models over trainings, on the same resamples, so that their differences are paired.

    Args:
        rows: number (of the model), ``unit``, the columns ``of``, sum, count, text, and group where there are groups.
        of: columns that say what a mean is of.
        labels: of the C models; those with the same are averaged.
        unit: the column of which every model has one row for each mean: text, or sample.

    Returns the bootstrap, the draws (1 + R rows; columns: label, then values of ``of``), and the sum of counts by
    values of ``of``.
    """
    sums = rows.pivot(index=unit, columns=["number", *of], values="sum")
    # every model reads the same stretches
    counts = rows[rows["number"] == 0].pivot(index=unit, columns=of, values="count").sort_index(axis=1)
    places = rows.drop_duplicates(unit).set_index(unit, drop=False).loc[sums.index]
    bootstrap = bootstrap_of(places, labels=labels, resamples=resamples, seed=seed)
    draws = {}
    for place, model in enumerate(dict.fromkeys(labels)):
        numbers = [number for number, label in enumerate(labels) if label == model]
        for key in counts:
            below = counts[key].to_numpy()
            of_trainings = [bootstrap.ratio(sums[number, *key].to_numpy(), below) for number in numbers]
            draws[model, *key] = bootstrap.over_seeds(place, of_trainings)
    frame = pd.DataFrame(draws)
    frame.columns.names = ["model", *of]
    return bootstrap, frame, counts.sum()


def intervals_frame(
    model: str,
    bootstrap: ClusterBootstrap,
    draws: dict[str, pd.DataFrame],
    trials: dict[str, pd.Series] | None = None,
) -> pd.DataFrame:
    """Model, name, what the columns of ``draws`` say, value, low and high of each; of shares also ``trials``."""
    rows = []
    for name, frame in draws.items():
        for key, column in frame.items():
            drawn, of = column.to_numpy(), (trials or {}).get(name)
            interval = bootstrap.interval(drawn) if of is None else bootstrap.share(drawn, of[key])
            place = dict(zip(frame.columns.names, key, strict=True))
            rows.append({"model": model, "name": name, **place, **vars(interval)})
    return pd.DataFrame(rows)


def names_of_trainings(labels: Sequence[str]) -> list[str]:
    """A name for each of C models: its label, numbered where it has several trainings."""
    return [
        f"{label}, {labels[: number + 1].count(label)}" if labels.count(label) > 1 else label
        for number, label in enumerate(labels)
    ]


# --- what was measured ---


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What was measured of one model or several: frames, in a JSON file, and their rows, in a Parquet file."""

    NAME: ClassVar[str]
    """Of the command and the files."""
    KIND: ClassVar[str]
    """What the JSON file calls itself."""

    settings: dict[str, Any]
    """What was measured, and how much text there was."""
    models: list[dict[str, Any]]
    """Of each, and each training of it: label, what identifies it, and what lengths it was trained on, if known."""
    rows: pd.DataFrame
    """What the numbers were made from."""
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write the JSON file and the Parquet file; returns the path of the first."""
        path = Path(folder) / f"{self.NAME}.json"
        with atomic_path(path.with_suffix(".parquet")) as temporary:
            self.rows.to_parquet(temporary, compression="zstd", index=False)
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rows"}
        for name, value in content.items():
            if isinstance(value, pd.DataFrame):
                content[name] = value.astype(object).where(value.notna(), None).to_dict("records")
        write_json(path, {"kind": self.KIND, "version": 1, **content})
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote into this folder, or this JSON file. Raises `UserError` for any other file."""
        path = file_in(path, f"{cls.NAME}.json")
        content = read_json(path, "measure again, or give the folder of a result")
        if (content.pop("kind", None), content.pop("version", None)) != (cls.KIND, 1):
            raise UserError(f"{path} is no file of {cls.KIND} that this version reads; measure again")
        for name, value in content.items():
            if name != "models" and isinstance(value, list):
                frame = pd.DataFrame(value)
                numbers = [column for column in ("value", "low", "high", "depth") if column in frame]
                content[name] = frame.astype(dict.fromkeys(numbers, float))
        return cls(rows=pd.read_parquet(path.with_suffix(".parquet")), **content)

    def figures(self, labels: Sequence[str] | None = None) -> dict[str, Figure]:
        """The figures by name. ``labels``: the models to draw, in their order (None: all)."""
        return {}

    def draw(self, folder: str | Path, labels: Sequence[str] | None = None) -> list[Path]:
        """Write the figures of these models; returns the paths."""
        from analysis.figures.style import save_figure

        figures = self.figures(labels)
        return [path for name, figure in figures.items() for path in save_figure(figure, folder, name)]

    def intervals_by(self) -> str:
        """What the intervals are by, in words."""
        trainings = pd.Series([model["label"] for model in self.models]).value_counts().max()
        return by_clusters({**self.settings, "trainings": trainings})

    def with_training(self, frame: pd.DataFrame, labels: Sequence[str] | None = None) -> pd.DataFrame:
        """What figures draw: rows of the models with these labels, in that order (None: all), and what each was trained
        on, as the columns trained_window_tokens, trained_reach_tokens and encoding.

        Raises `UserError` for a label that there is not.
        """
        trained = pd.DataFrame(self.models).drop_duplicates("label").set_index("label")
        trained = trained[["training_length", "position_target", "position_scheme"]]
        trained.columns = ["trained_window_tokens", "trained_reach_tokens", "encoding"]
        if unknown := [label for label in labels or () if label not in trained.index]:
            raise UserError(f"there is no model {unknown[0]!r}; choose of {', '.join(trained.index)}")
        tokens = ["trained_window_tokens", "trained_reach_tokens"]
        frame = frame.join(trained.astype(dict.fromkeys(tokens, float)), on="model")
        return frame if labels is None else pd.concat([frame[frame["model"] == label] for label in labels])


# --- the command ---


def run_probe(probe: type[Probe], description: str | None) -> None:
    """The command of a probe: measure, write, draw and print; or draw again."""
    from analysis.options import MODEL, add_model_options, add_text_options, texts_of
    from olmo_sparsity.cli import show_log

    name = probe.RESULT.NAME
    parser = Parser(prog=f"olmo-sparsity {name}", description=description)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL}; none: print and draw again")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help=f"folder of {name}.json")
    parser.add_argument(
        "--labels",
        type=texts,
        help="a name for each model, with commas; trainings of one share one (default: from their paths); without any: "
        "those to draw, in this order",
    )
    parser.add_argument(
        "--figures", type=out_folder, metavar="DIR", help="where to draw (default: beside the numbers)"
    )
    add_arguments(parser.add_argument_group("what is measured"), probe)
    add_text_options(parser)
    add_model_options(parser)
    given = parser.parse_args()
    show_log("analysis")
    folder = given.figures or given.out
    if given.models:
        apart = {"models", "text", "corpus", "figures", *(each.name for each in fields(probe))}
        options = {option: value for option, value in vars(given).items() if option not in apart}
        chosen = settings_from(probe, given)
        measured = chosen.measure(given.models, texts_of(given, given.models[0]), **options)
        files = [given.out / f"{name}.json", given.out / f"{name}.parquet", *measured.draw(folder)]
    else:
        measured = probe.RESULT.load(given.out)
        files = measured.draw(folder, given.labels)
    print(measured)
    if files:
        print(f"\nwrote {', '.join(map(str, files))}")
