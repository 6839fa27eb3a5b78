"""What all probes share: models side by side on the same texts, the numbers of them, the files, and the command.

A probe is a subclass of `Probe`, whose fields are its settings and the options of its command, and what it gives one of
`ProbeResult`. Models with the same label are runs of one, from other seeds.

Shapes: C models with all runs, R resamples.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd

from analysis.older_records import renamed_frames
from analysis.parquet import read_parquet, write_rows
from analysis.saved import Parts, open_parts, read_head, write_saved
from analysis.settings import flat_json
from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    by_clusters,
    count_clusters,
    enough_for_intervals,
)
from analysis.stats.tables import INTERVAL, OF_RUNS, without_empty_runs
from olmo_sparsity.util import arguments
from olmo_sparsity.util.arguments import add_arguments, argument, settings_from
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import remove_leftovers, user_path
from olmo_sparsity.util.progress import Advance
from olmo_sparsity.util.progress import progress as show_progress
from olmo_sparsity.util.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.model.loaded import LoadedModel
    from analysis.model.token_losses import TokenLosses
    from analysis.probes.segments import Segments
    from analysis.texts import Texts

log = logging.getLogger(__name__)

Bar = Callable[[int, str], AbstractContextManager[Advance]]
"""Shows the progress of one model: given how much there is of what, a context in which it is advanced."""
TRAINED = {
    "training_length": "trained_window_tokens",
    "position_target": "trained_reach_tokens",
}
"""What is known of a model's training, and the columns that it stands in where figures are drawn."""

OF_NO_ROW = ("texts", "resamples")
"""Settings that no row of a model depends on, so that a measurement goes on with others: the path of the texts, for
which a checksum stands, and the resamples, which are of intervals."""

# --- a probe ---


@dataclass(kw_only=True)
class Probe(ABC):
    """Settings of a measurement, and how it is made; subclasses fill in the abstract methods."""

    RESULT: ClassVar[type[ProbeResult]]
    MEASURED: ClassVar[str]
    """The setting of the result that says how many stretches there were."""

    seed: int = field(
        default=0, metadata=argument("random seed of all draws", type=arguments.whole_number_or_zero)
    )
    resamples: int = DEFAULT_RESAMPLES
    """Of the bootstrap."""

    @abstractmethod
    def check(self, loaded: LoadedModel) -> None:
        """Raise `UserError` for a model that cannot be measured."""

    @abstractmethod
    def draw_sample(self, source: Texts) -> Segments:
        """What all models read. Raises `UserError` where the texts do not have it."""

    @abstractmethod
    def measure_model(self, token_losses: TokenLosses, sample: Any, bar: Bar) -> pd.DataFrame:
        """Rows of one model."""

    @abstractmethod
    def numbers(self, rows: pd.DataFrame, labels: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Further fields of the result, from the rows of all models with their ``number`` in ``labels``."""

    def settings(self, sample: Any) -> dict[str, Any]:
        """The fields as JSON holds them, and how much there is to measure."""
        settings = asdict(self)
        for name, value in settings.items():
            if isinstance(value, tuple):
                settings[name] = list(value)
        settings[self.MEASURED] = len(sample)
        settings["texts_too_short"] = sample.texts_too_short
        return settings | count_clusters(pd.DataFrame(sample.places()))

    def measure(
        self,
        models: Any,
        texts: Any,
        *,
        labels: Sequence[str] | None = None,
        split: str = "heldout",
        out: str | Path | None = None,
        tokens_per_batch: int | None = None,
        progress: bool = True,
        **opening: Any,
    ) -> Any:
        """Measure models, one after the other, on the same stretches of texts; a `ProbeResult`.

        Args:
            models: one, as for `analysis.open_model.open_model`, which ``opening`` goes to, or a list of them.
            texts: as for `analysis.open_texts.open_texts`, with ``split`` of a prepared corpus.
            labels: a name for each, see `default_labels`.
            out: folder to save to; the same call, interrupted, goes on with the model that it was at.
            tokens_per_batch: tokens of one forward pass.
            progress: show it on standard error.

        Raises `UserError` before anything is measured, where models or texts cannot be measured so.
        """
        from analysis.model.token_losses import TokenLosses
        from analysis.open_model import open_model

        if not isinstance(models, list):
            models = [models]
        labels = list(labels or default_labels(models))
        if len(labels) != len(models):
            raise UserError(f"--labels {','.join(labels)}: {len(models)} models need as many labels")
        source, described = self._check_all(models, labels, texts, split, opening)
        sample = self.draw_sample(source)
        of_texts = {"texts": source.name, "texts_sha256": source.sha256, "split": split}
        settings = of_texts | self.settings(sample)
        of_models: list[pd.DataFrame] = []
        with nullcontext() if out is None else self._open_parts(user_path(out), settings) as parts:
            for number, (model, label, about) in enumerate(zip(models, labels, described, strict=True)):
                name = _digest(about, settings)
                if parts is not None and parts.path(name).is_file():
                    log.info("%s was measured before the interruption", about["model"])
                    rows = parts.read(parts.path(name), self._rows_in)
                else:
                    bar = partial(show_progress, f"{self.RESULT.NAME}, {label}", enabled=progress)
                    with open_model(model, **opening) as loaded:
                        token_losses = TokenLosses(
                            loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch
                        )
                        rows = self.measure_model(token_losses, sample, bar)
                    if parts is not None:
                        write_saved(parts.path(name), about, {self.RESULT.NAME: rows}, write=write_rows)
                numbered = rows.assign(number=number, label=label)
                of_models.append(numbered[["number", "label", *rows]])
            rows = pd.concat(of_models, ignore_index=True)
            of_all: dict[str, Any] = {"settings": settings, "models": described, "provenance": provenance()}
            result = self.RESULT(rows=rows, **of_all, **self.numbers(rows, labels))
            if out is not None and parts is not None:
                files = [f"{self.RESULT.NAME}.json", f"{self.RESULT.NAME}.parquet"]
                remove_leftovers(user_path(out), files)
                result.save(out)
                parts.remove()
        return result

    def _rows_in(self, folder: Path) -> pd.DataFrame:
        return read_parquet(folder / f"{self.RESULT.NAME}.parquet")

    def _open_parts(self, out: Path, settings: dict[str, Any]) -> AbstractContextManager[Parts]:
        """The models that an interrupted measurement of these settings has measured."""

        def differences(there: dict[str, Any]) -> str:
            differing = []
            for name in {**there, **settings}:
                before = there.get(name)
                now = settings.get(name)
                if before != now and name not in OF_NO_ROW:
                    differing.append(f"{name} {before} -> {now}")
            return ", ".join(differing)

        folder = out / f"{self.RESULT.NAME}-parts"
        return open_parts(folder, f"{self.RESULT.NAME}.json", settings, differences=differences)

    def _check_all(
        self, models: Sequence[Any], labels: Sequence[str], texts: Any, split: str, opening: dict[str, Any]
    ) -> tuple[Texts, list[dict[str, Any]]]:
        """The texts, and of each model its label, what identifies it, and what it was trained on.

        Every model is opened once before the first is measured: nobody waits to learn that the last is refused.
        """
        from analysis.open_model import open_model
        from analysis.open_texts import open_texts

        sources: list[Texts] = []
        described: list[dict[str, Any]] = []
        for model, label in zip(models, labels, strict=True):
            with open_model(model, **opening) as loaded:
                reader = replace(loaded.reader, chat=None)
                source = open_texts(texts, reader, split=split)
                sources.append(source)
                loaded.check_texts(source)
                self.check(loaded)
                about = {"label": label, **flat_json(loaded.identity)}
                for name in TRAINED:
                    about[name] = loaded.trained.get(name)
            if not _same_tokens(sources[0], source):
                raise UserError(
                    f"{loaded.name} has another tokenizer than {described[0]['model']}, so that their losses are not "
                    "of the same tokens; measure it by itself"
                )
            if about in described:
                raise UserError(f"{loaded.name} is given twice as {label}; give each seed once")
            described.append(about)
        return sources[0], described


def default_labels(models: Sequence[Any]) -> list[str]:
    """The names of models, or their paths where two have the same name; numbers of those that are no paths."""
    if not all(isinstance(model, str | Path) for model in models):
        return [f"model {number}" for number in range(1, len(models) + 1)]
    names = [Path(model).resolve().name for model in models]
    if len(set(names)) < len(names):
        return [str(model) for model in models]
    return names


def _digest(about: dict[str, Any], settings: dict[str, Any]) -> str:
    """A name for what is measured of a model, by its weights and all settings but those of `OF_NO_ROW`."""
    names = ("label", "model", "training_seed", *OF_NO_ROW)
    measured = {name: value for name, value in {**about, **settings}.items() if name not in names}
    text = json.dumps(measured, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same_tokens(first: Texts, second: Texts) -> bool:
    if not np.array_equal(first.lengths, second.lengths):
        return False
    return all(np.array_equal(first.tokens(n), second.tokens(n)) for n in range(len(first.lengths)))


def check_reach(loaded: LoadedModel, length: int, more: int = 0) -> None:
    """Raise `UserError` where a model has no learned position for ids up to ``length`` - 1, and ``more`` behind them.

    A rotary model is measured past the length that its configuration names: that is what the probes are for.
    """
    from analysis.model.check import learned_positions

    at_most = learned_positions(loaded.model)
    if at_most is not None and length + more > at_most:
        raise UserError(
            f"{length + more:,} tokens are beyond the {at_most:,} learned positions of {loaded.name}; lower "
            f"--lengths to at most {at_most - more:,}"
        )


# --- numbers ---


def draws_of_means(
    rows: pd.DataFrame, of: list[str], labels: Sequence[str], *, unit: str, resamples: int, seed: int
) -> tuple[ClusterBootstrap, pd.DataFrame]:
    """Means of models over runs, on the same resamples, so that their differences are paired.

    ``rows``: number (of the model), ``unit`` (text or sample: a model has one row of it for each mean), the columns
    ``of``, which say what a mean is of, sum, count, text, and group where there are groups. ``labels``: of the C
    models; those with the same are averaged. Returns the bootstrap and the draws (1 + R rows; columns: label, then
    values of ``of``).
    """
    sums = rows.pivot(index=unit, columns=["number", *of], values="sum")
    of_first = rows[rows["number"] == 0]  # every model reads the same stretches
    counts = of_first.pivot(index=unit, columns=of, values="count").sort_index(axis=1)
    unit_rows = rows.drop_duplicates(unit).set_index(unit, drop=False).loc[sums.index]
    bootstrap = ClusterBootstrap.of(unit_rows, labels=labels, resamples=resamples, seed=seed)
    draws = {}
    for model_index, model in enumerate(dict.fromkeys(labels)):
        numbers = [number for number, label in enumerate(labels) if label == model]
        for key, count in counts.items():
            ratios = []
            for number in numbers:
                of_model = sums[number, *key].to_numpy()
                ratios.append(bootstrap.ratio(of_model, count.to_numpy()))
            draws[model, *key] = bootstrap.over_seeds(model_index, ratios)
    return bootstrap, pd.DataFrame(draws).rename_axis(columns=["model", *of])


def intervals_frame(
    model: str,
    bootstrap: ClusterBootstrap,
    named: Sequence[tuple[str, pd.DataFrame]],
    trials: Mapping[str, int],
) -> pd.DataFrame:
    """Model, name, what the columns of draws say, value, low and high of each, and of two runs `OF_RUNS`.

    ``named``: names and draws, as `draws_of_means` gives them; ``trials``: of those that are shares, by name.
    """
    rows = []
    for name, draws in named:
        for key, column in draws.items():
            drawn = column.to_numpy()
            interval = bootstrap.share(drawn, trials[name]) if name in trials else bootstrap.interval(drawn)
            keys = dict(zip(draws.columns.names, key, strict=True))
            rows.append({"model": model, "name": name, **keys, **vars(interval)})
    return without_empty_runs(pd.DataFrame(rows))


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
    """Of each, and each run of it: label, what identifies it, and what lengths it was trained on, if known."""
    rows: pd.DataFrame
    """What the numbers were made from."""
    provenance: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write the JSON file and the Parquet file; returns the path of the first."""
        path = user_path(folder) / f"{self.NAME}.json"
        about: dict[str, Any] = {"kind": self.KIND, "version": 1}
        for name in self._content_names():
            value = getattr(self, name)
            if isinstance(value, pd.DataFrame):
                with_none = value.astype(object).where(value.notna(), None)
                value = with_none.to_dict("records")
            about[name] = value
        write_saved(path, about, {self.NAME: self.rows}, write=write_rows)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote into this folder, or this JSON file. Raises `UserError` for any other file.

        What an older version wrote beside the fields of this one is left out.
        """
        path = user_path(path)
        if path.is_dir():
            path = path / f"{cls.NAME}.json"
        about = read_head(path, cls.KIND, 1, "measure again, or give the folder of a result")
        about = renamed_frames(about)
        if missing := [name for name in cls._content_names() if name not in about]:
            raise UserError(
                f"{path} is of an older format, without {', '.join(missing)}; measure again, or read it as JSON"
            )
        content = {}
        for name in cls._content_names():
            value = about[name]
            if name != "models" and isinstance(value, list):
                frame = pd.DataFrame(value)
                numbers = frame.columns.intersection([*INTERVAL, *OF_RUNS, "depth"])
                value = frame.astype(dict.fromkeys(numbers, float))
            content[name] = value
        rows = read_parquet(path.with_suffix(".parquet"))
        return cls(rows=rows, **content)

    @classmethod
    def _content_names(cls) -> list[str]:
        """Names of the fields that stand in the JSON file."""
        return [field.name for field in fields(cls) if field.name != "rows"]

    def figures(self, labels: Sequence[str] | None = None) -> dict[str, Figure]:
        """The figures by name. ``labels``: the models to draw, in their order (None: all)."""
        return {}

    def draw(self, folder: str | Path, labels: Sequence[str] | None = None) -> list[Path]:
        """Write the figures of these models; returns the paths."""
        from analysis.figures.style import save_figure

        paths = []
        for name, figure in self.figures(labels).items():
            paths += save_figure(figure, folder, f"{name}.png")
        return paths

    def has_intervals(self) -> bool:
        """Whether there are groups or documents enough for intervals."""
        return enough_for_intervals(self.settings)

    def intervals_by(self) -> str:
        """What the intervals are by, in words; or that there are too few documents for any."""
        return by_clusters({**self.settings, "runs": self.most_runs()})

    def most_runs(self) -> int:
        """Of how many runs a model's numbers are means, at most."""
        labels = [model["label"] for model in self.models]
        return max(labels.count(label) for label in labels)

    def with_training(self, frame: pd.DataFrame, labels: Sequence[str] | None = None) -> pd.DataFrame:
        """What figures draw: rows of the models with these labels, in that order (None: all), and what each was trained
        on, as the columns trained_window_tokens and trained_reach_tokens.

        Raises `UserError` for a label that there is not.
        """
        trained = pd.DataFrame(self.models).drop_duplicates("label").set_index("label")
        trained = trained[[*TRAINED]].rename(columns=TRAINED)
        frame = frame.join(trained.astype(float), on="model")
        if labels is None:
            return frame
        of_labels = []
        for label in labels:
            if label not in trained.index:
                raise UserError(f"there is no model {label!r}; choose from {', '.join(trained.index)}")
            of_labels.append(frame[frame["model"] == label])
        return pd.concat(of_labels)


# --- the command ---


def run_probe(probe: type[Probe], description: str | None) -> None:
    """The command of a probe: measure, write, draw and print; or draw again."""
    from analysis.cli_options import MODEL, TEXT_OPTIONS, add_model_options, add_text_options, texts_of
    from olmo_sparsity.cli import show_log

    name = probe.RESULT.NAME
    parser = arguments.Parser(prog=f"olmo-sparsity {name}", description=description)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"{MODEL}; without one, what is in --out is printed and drawn again",
    )
    parser.add_argument(
        "--out",
        type=arguments.out_folder,
        required=True,
        metavar="DIR",
        help=f"folder to write {name}.json to",
    )
    labels = (
        "a name for each model, comma-separated; runs of one model have the same (default: the models' names); "
        "without a MODEL, the names to draw, in this order"
    )
    parser.add_argument("--labels", type=arguments.texts, metavar="NAMES", help=labels)
    figures = "folder to write figures to (default: --out)"
    parser.add_argument("--figures", type=arguments.out_folder, metavar="DIR", help=figures)
    add_arguments(parser.add_argument_group("what is measured"), probe)
    add_text_options(parser)
    add_model_options(parser)
    parsed = parser.parse_args()
    show_log("analysis")
    files = []
    drawn = parsed.labels
    if parsed.models:
        not_options = {"models", *TEXT_OPTIONS, "figures", *(field.name for field in fields(probe))}
        options = {option: value for option, value in vars(parsed).items() if option not in not_options}
        source = texts_of(parsed, parsed.models[0])
        result = settings_from(probe, parsed).measure(parsed.models, source, **options)
        files = [parsed.out / f"{name}.json", parsed.out / f"{name}.parquet"]
        drawn = None
    else:
        result = probe.RESULT.load(parsed.out)
    files += result.draw(parsed.figures or parsed.out, drawn)
    print(result)
    if files:
        print(f"\nwrote {', '.join(map(str, files))}")
