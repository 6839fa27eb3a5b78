"""What all probes share: models side by side on the same texts, the numbers of them, the files, and the command.

A probe is a subclass of `Probe`, whose fields are its settings and the options of its command, and what it gives one of
`ProbeResult`. Models with the same label are trainings of one, from other seeds.

Shapes: n stretches of text, L tokens of each, C models with all trainings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd

from analysis.probes.models import Models, token_losses_of
from analysis.segments import Segments
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Interval,
    by_clusters,
    count_clusters,
)
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
    """Settings of a measurement, and how it is made; subclasses fill in the methods below `measure`."""

    RESULT: ClassVar[type[ProbeResult]]

    seed: int = field(default=0, metadata=argument("of all that is drawn", type=seed_number))
    resamples: int = DEFAULT_RESAMPLES
    """Of the bootstrap."""

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
        compared = Models(models, labels, opening)
        source = compared.read(texts, split, self.check)
        sample = self.draw_sample(source)
        settings = {"texts": source.name, "texts_sha256": source.sha256, "split": split, **self.settings()}

        def measure_one(loaded: LoadedModel, label: str) -> dict[str, pd.DataFrame]:
            length = sample.tokens.shape[1]
            token_losses = token_losses_of(loaded, length, tokens_per_batch, memory_limit_gb)
            return self.measure_model(token_losses, sample, label, progress)

        parts = None if out is None else Path(out) / f"{self.RESULT.NAME}-parts"
        frames = compared.measure(measure_one, settings, parts)
        segments = sample.segments
        settings |= {"texts_too_short": segments.texts_too_short, **sample.counts}
        settings |= count_clusters(segments.text, segments.group)
        numbers = self.numbers(frames, compared.labels)
        about: dict[str, Any] = {"models": compared.described, "provenance": provenance()}
        result = self.RESULT(settings=settings, rows=frames["rows"], **numbers, **about)
        if out is not None and parts is not None:
            result.save(out)
            remove(parts)
        return result

    def settings(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @abstractmethod
    def check(self, loaded: LoadedModel) -> None:
        """Raise `UserError` for a model that cannot be measured."""

    @abstractmethod
    def draw_sample(self, source: Texts) -> Sample:
        """What all models read. Raises `UserError` where the texts do not have it."""

    @abstractmethod
    def measure_model(
        self, token_losses: TokenLosses, sample: Any, label: str, progress: bool
    ) -> dict[str, pd.DataFrame]:
        """Frames of one model, by name: "rows", and what else there is."""

    @abstractmethod
    def numbers(self, frames: dict[str, pd.DataFrame], labels: Sequence[str]) -> dict[str, Any]:
        """Further fields of the result, from the frames of all models with their ``number`` in ``labels``."""


# --- numbers ---


class Means(ClusterBootstrap):
    """Means of models, on the same resamples, so that their differences are paired.

    Args:
        rows: number (of the model), ``unit``, the columns ``of``, sum, count, text, and group where there are groups.
        of: columns that say what a mean is of.
        unit: the column of which every model has one row for each mean: text, or sample.
        labels: of the C models; those with the same are averaged.
        resamples: see `ClusterBootstrap`, as for ``seed``.
    """

    def __init__(
        self, rows: pd.DataFrame, of: list[str], unit: str, labels: Sequence[str], resamples: int, seed: int
    ):
        by_unit = rows.pivot(index=unit, columns=["number", *of], values="sum")
        # every model reads the same stretches
        counts = rows[rows["number"] == 0].pivot(index=unit, columns=of, values="count")
        units = rows.drop_duplicates(unit).set_index(unit, drop=False).loc[by_unit.index]
        groups = units["group"].to_numpy() if "group" in units else None
        super().__init__(
            units["text"].to_numpy(), groups=groups, labels=labels, resamples=resamples, seed=seed
        )
        self._sums = {tuple(key): by_unit[key].to_numpy() for key in by_unit}
        self.counts = {tuple(key): counts[key].to_numpy() for key in sorted(counts)}
        """By what there are means of, values of the columns ``of``."""
        self.numbers: dict[str, list[int]] = {}
        """Of the trainings of each model, by label."""
        for number, label in enumerate(labels):
            self.numbers.setdefault(label, []).append(number)

    def mean(self, model: str, key: tuple[Any, ...]) -> np.ndarray:
        """Draws of a mean over the trainings of a model, (1 + R,)."""
        numbers = self.numbers[model]
        of_trainings = [self.ratio(self._sums[number, *key], self.counts[key]) for number in numbers]
        return self.over_seeds(list(self.numbers).index(model), of_trainings)

    def share_of(self, draws: np.ndarray, key: tuple[Any, ...]) -> Interval:
        """Interval of draws of a share, of as many trials as the mean of ``key``."""
        return self.share(draws, float(self.counts[key].sum()))


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
        labels = [model["label"] for model in self.models]
        return by_clusters({**self.settings, "trainings": max(map(labels.count, labels))})

    def with_training(self, frame: pd.DataFrame, labels: Sequence[str] | None = None) -> pd.DataFrame:
        """What figures draw: rows of the models with these labels, in that order (None: all), and what each was trained
        on, as the columns trained_window_tokens, trained_reach_tokens and encoding.

        Raises `UserError` for a label that there is not.
        """
        by_label = {model["label"]: model for model in reversed(self.models)}
        if unknown := [label for label in labels or () if label not in by_label]:
            raise UserError(f"there is no model {unknown[0]!r}; choose of {', '.join(reversed(by_label))}")
        trained = pd.DataFrame([by_label[label] for label in frame["model"]], index=frame.index)
        frame = frame.assign(
            trained_window_tokens=trained["training_length"].astype(float),
            trained_reach_tokens=trained["position_target"].astype(float),
            encoding=trained["position_scheme"],
        )
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
