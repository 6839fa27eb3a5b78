"""Models that a probe measures side by side on the same texts, and what was measured of each, kept until all are.

Models with the same label are trainings of one, from other seeds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.stats.bootstrap import by_clusters
from olmo_sparsity.util.arguments import Parser, out_folder, seed_number, texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, read_json, remove, write_json

if TYPE_CHECKING:
    from analysis.contexts import Texts
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

log = logging.getLogger(__name__)

_TRAINED = ("training_length", "position_scheme", "position_target")


class Models:
    """Models and their labels.

    Args:
        models: one, as for `analysis.model.loading.open_model`, or a list of them.
        labels: a name for each; by default as much of its path as tells it apart.
        opening: further arguments of `open_model`, for all of them.

    Raises `UserError` where labels are missing.
    """

    def __init__(self, models: Any, labels: Sequence[str] | None, opening: dict[str, Any]):
        self.models = models if isinstance(models, list) else [models]
        self.labels = list(labels or _labels(self.models))
        self.opening = opening
        self.described: list[dict[str, Any]] = []
        """Label of each, what identifies it, and the lengths that it was trained on: after `read`."""
        if len(self.labels) != len(self.models):
            raise UserError(
                f"{len(self.models)} models need as many labels, not {', '.join(self.labels)}; mend --labels"
            )

    def read(self, texts: Any, split: str, check: Callable[[LoadedModel], None]) -> Texts:
        """The texts as token ids, as for `analysis.contexts.open_texts`.

        Every model is opened once, before the first is measured: nobody waits for that to learn that the last is
        refused. Raises `UserError` where ``check`` refuses one, the models do not read the texts as the same tokens, or
        one is given twice under a label, which would count it twice.
        """
        from analysis.contexts import open_texts

        source: Texts | None = None
        for model, label in zip(self.models, self.labels, strict=True):
            with self._opened(model) as loaded:
                its_texts = open_texts(texts, loaded.encode, split=split)
                loaded.check_texts(its_texts)
                check(loaded)
                if source is not None and not _same_tokens(source, its_texts):
                    raise UserError(
                        f"{loaded.name} has another tokenizer than {self.described[0]['model']}, so that their losses "
                        "are not of the same tokens; measure it by itself"
                    )
                trained = {name: loaded.trained.get(name) for name in _TRAINED}
                described = {"label": label, **loaded.describe(), **trained}
            if described in self.described:
                raise UserError(f"{loaded.name} is given twice as {label}; give each seed once")
            self.described.append(described)
            source = source or its_texts
        assert source is not None
        return source

    def measure(
        self,
        measure: Callable[[TokenLosses, str], Any],
        *,
        settings: dict[str, Any],
        parts: Path | None,
        length: int,
        tokens_per_batch: int | None = None,
        memory_limit_gb: float | None = None,
    ) -> list[Any]:
        """What ``measure`` gives of the losses and the label of each model: values that JSON can hold.

        They are kept in the folder ``parts`` until `finish`, so that the same call, interrupted, goes on with the model
        that it was at. ``settings``: all that the values depend on beside the model. ``length``: tokens of the longest
        rows, of which ``memory_limit_gb`` says how many are read at once.
        """
        from analysis.model.memory import GB, tokens_that_fit
        from analysis.model.token_losses import TokenLosses

        values = []
        for model, described in zip(self.models, self.described, strict=True):
            part = None if parts is None else parts / f"{_sha256([settings, described])[:16]}.json"
            if part is not None and part.is_file():
                log.info("%s was measured before the interruption", described["model"])
                values.append(read_json(part, f"remove {part}", expect=None))
                continue
            with self._opened(model) as loaded:
                size = tokens_per_batch
                if size is None and memory_limit_gb is not None:
                    limit = memory_limit_gb * GB
                    size = tokens_that_fit(loaded.model, loaded.device, length, limit, n_targets=length)
                token_losses = TokenLosses(loaded.model, device=loaded.device, tokens_per_batch=size)
                value = measure(token_losses, described["label"])
            if part is not None:
                write_json(part, value)
            values.append(value)
        return values

    @contextmanager
    def _opened(self, model: Any) -> Iterator[LoadedModel]:
        from analysis.model.loading import open_model

        loaded = open_model(model, **self.opening)
        try:
            yield loaded
        finally:
            loaded.give_back()


def _labels(models: Sequence[Any]) -> list[str]:
    if not all(isinstance(model, str | Path) for model in models):
        return [f"model {number}" for number in range(1, len(models) + 1)]
    from analysis.figures.training import last_parts  # with matplotlib, which --help does not need

    return last_parts([Path(model).resolve() for model in models])


def _same_tokens(first: Texts, second: Texts) -> bool:
    if hasattr(first, "tokenizer_sha256"):  # a prepared corpus, whose tokenizer `check_texts` compares
        return True
    return np.array_equal(first.lengths, second.lengths) and all(
        np.array_equal(first.tokens(number), second.tokens(number)) for number in range(len(first.lengths))
    )


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- files ---


def save_probe(path: Path, kind: str, content: dict[str, Any], rows: pd.DataFrame, parts: Path) -> None:
    """Write ``content``, whose frames become lists of rows, to ``path``, and ``rows`` into a Parquet file beside it.

    Then the ``parts`` of `Models.measure` are removed.
    """
    with atomic_path(path.with_suffix(".parquet")) as temporary:
        rows.to_parquet(temporary, compression="zstd", index=False)
    records = {
        name: value.astype(object).where(value.notna(), None).to_dict("records")
        if isinstance(value, pd.DataFrame)
        else value
        for name, value in content.items()
    }
    write_json(path, {"kind": kind, "version": 1, **records})
    remove(parts)


def load_probe(path: str | Path, name: str, kind: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """What `save_probe` wrote to ``path``, or to ``name`` in that folder. Raises `UserError` for any other file."""
    path = Path(path) / name if Path(path).is_dir() else Path(path)
    content = read_json(path, "measure again, or give the folder of a result")
    if (content.get("kind"), content.get("version")) != (kind, 1):
        raise UserError(f"{path} is no file of {kind} that this version reads; measure again")
    return content, pd.read_parquet(path.with_suffix(".parquet"))


def add_trained(
    frame: pd.DataFrame, models: Sequence[dict[str, Any]], labels: Sequence[str] | None = None
) -> pd.DataFrame:
    """What figures draw: rows of the ``models`` with these labels, in that order (None: all), and what each was trained
    on, as the columns trained_window_tokens, trained_reach_tokens and encoding.

    Raises `UserError` for a label that there is not.
    """
    by_label = {model["label"]: model for model in reversed(models)}
    if unknown := [label for label in labels or () if label not in by_label]:
        raise UserError(f"there is no model {unknown[0]!r}; choose of {', '.join(reversed(by_label))}")
    trained = pd.DataFrame([by_label[label] for label in frame["model"]], index=frame.index)
    frame = frame.assign(
        trained_window_tokens=trained["training_length"].astype(float),
        trained_reach_tokens=trained["position_target"].astype(float),
        encoding=trained["position_scheme"],
    )
    return frame if labels is None else pd.concat([frame[frame["model"] == label] for label in labels])


def intervals_by(settings: dict[str, Any], models: Sequence[dict[str, Any]]) -> str:
    """What the intervals are by, in words."""
    labels = [model["label"] for model in models]
    return by_clusters({**settings, "trainings": max(map(labels.count, labels))})


def frame_of(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A frame of `save_probe` again; what does not exist is NaN."""
    frame = pd.DataFrame(records)
    numbers = [name for name in ("value", "low", "high", "depth") if name in frame]
    return frame.astype(dict.fromkeys(numbers, float))


# --- the command ---


def add_comparison_options(parser: Parser, name: str) -> None:
    """``MODEL …``, ``--out``, ``--labels``, ``--seed``, models and texts, of a command that writes ``name``."""
    from analysis.options import MODEL, add_model_options, add_text_options

    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL}; none: draw --out again")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help=f"folder of {name}")
    parser.add_argument(
        "--labels",
        type=texts,
        help="a name for each model, with commas; trainings of one share one (default: from their paths); without any: "
        "those to draw, in this order",
    )
    parser.add_argument(
        "--figures", type=out_folder, metavar="DIR", help="where to draw (default: beside the numbers)"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="of all that is drawn (default: 0)")
    add_text_options(parser)
    add_model_options(parser)


def run_probe(given: Namespace, name: str, measure: Callable[..., Any], load: Callable[[Path], Any]) -> None:
    """Measure, write ``name``, print and draw, with options as ``measure`` takes them; or load and draw again."""
    from analysis.options import texts_of
    from olmo_sparsity.cli import show_log

    show_log("analysis")
    apart, figures = ("models", "text", "corpus", "figures"), given.figures or given.out
    if given.models:
        options = {option: value for option, value in vars(given).items() if option not in apart}
        measured = measure(given.models, texts_of(given, given.models[0]), **options)
        paths = [given.out / name, (given.out / name).with_suffix(".parquet"), *measured.draw(figures)]
    else:
        measured = load(given.out)
        paths = measured.draw(figures, given.labels)
    print(f"{measured}\n\nwrote {', '.join(map(str, paths))}")


def check_reach(loaded: LoadedModel, length: int, more: int = 0) -> None:
    """Raise `UserError` where a model has no learned position for ids up to ``length`` - 1, and ``more`` behind them.

    A rotary model is measured past the length that its configuration names: that is what the probes are for.
    """
    import torch

    at_most, inner = loaded.model.max_positions, loaded.model.model
    config: Any = getattr(inner, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if at_most is None or length + more <= at_most or getattr(config, "rope_parameters", None):
        return
    device, last = loaded.device, torch.tensor([[length + more - 1]])
    try:  # whether positions are a table shows at its end; on a GPU that would end the process
        with torch.inference_mode():
            loaded.model.cpu()(torch.zeros_like(last), position_ids=last)
    except (IndexError, RuntimeError) as error:
        raise UserError(
            f"{length + more:,} tokens are beyond the {at_most:,} learned positions of {loaded.name}; lower "
            f"--lengths to at most {at_most - more:,}"
        ) from error
    finally:
        loaded.model.to(device)
