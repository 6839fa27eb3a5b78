"""Models side by side on the same texts, each opened in its turn, and what is measured of each, kept until all are."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, write_json

if TYPE_CHECKING:
    from analysis.contexts import Texts
    from analysis.model.loading import LoadedModel
    from analysis.model.token_losses import TokenLosses

log = logging.getLogger(__name__)

_TRAINED = ("training_length", "position_scheme", "position_target")


class Models:
    """Models and their labels; see `Probe.measure`. Raises `UserError` where labels are missing."""

    def __init__(self, models: Any, labels: Sequence[str] | None, opening: dict[str, Any]):
        self.models = models if isinstance(models, list) else [models]
        self.labels = list(labels or _default_labels(self.models))
        self.opening = opening
        self.described: list[dict[str, Any]] = []
        """Label of each, what identifies it, and the lengths that it was trained on: after `read`."""
        if len(self.labels) != len(self.models):
            raise UserError(
                f"{len(self.models)} models need as many labels, not {', '.join(self.labels)}; mend --labels"
            )

    def read(self, texts: Any, split: str, check: Callable[[LoadedModel], None]) -> Texts:
        """The texts as token ids.

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
                trained = {name: loaded.trained.get(name) for name in _TRAINED}
                described = {"label": label, **loaded.describe(), **trained}
            source = source or its_texts
            if not _same_tokens(source, its_texts):
                raise UserError(
                    f"{loaded.name} has another tokenizer than {self.described[0]['model']}, so that their losses are "
                    "not of the same tokens; measure it by itself"
                )
            if described in self.described:
                raise UserError(f"{loaded.name} is given twice as {label}; give each seed once")
            self.described.append(described)
        assert source is not None
        return source

    def measure(
        self,
        measure: Callable[[LoadedModel, str], dict[str, pd.DataFrame]],
        settings: dict[str, Any],
        parts: Path | None,
    ) -> dict[str, pd.DataFrame]:
        """The frames that ``measure`` gives of the models, one below the other, with the columns number and label.

        Those of each model are kept in the folder ``parts`` until the result is saved. ``settings``: all that they
        depend on beside the model.
        """
        of_models = []
        for number, (model, described) in enumerate(zip(self.models, self.described, strict=True)):
            part = None if parts is None else parts / f"{_key([settings, described])}.json"
            if part is not None and part.is_file():
                log.info("%s was measured before the interruption", described["model"])
                records = read_json(part, f"remove {part}")
            else:
                with self._opened(model) as loaded:
                    frames = measure(loaded, described["label"])
                records = {name: frame.to_dict("records") for name, frame in frames.items()}
                if part is not None:
                    write_json(part, records)
            head = {"number": number, "label": described["label"]}
            of_models.append({name: [head | row for row in rows] for name, rows in records.items()})
        return {
            name: pd.DataFrame([row for frames in of_models for row in frames[name]]) for name in of_models[0]
        }

    @contextmanager
    def _opened(self, model: Any) -> Iterator[LoadedModel]:
        from analysis.model.loading import open_model

        loaded = open_model(model, **self.opening)
        try:
            yield loaded
        finally:
            loaded.give_back()


def _default_labels(models: Sequence[Any]) -> list[str]:
    if not all(isinstance(model, str | Path) for model in models):
        return [f"model {number}" for number in range(1, len(models) + 1)]
    from analysis.figures.training import last_parts  # with matplotlib, which --help does not need

    return last_parts([Path(model).resolve() for model in models])


def _same_tokens(first: Texts, second: Texts) -> bool:
    if hasattr(first, "tokenizer_sha256"):  # a prepared corpus, whose tokenizer `check_texts` compares
        return True
    return len(first.lengths) == len(second.lengths) and all(
        np.array_equal(first.tokens(number), second.tokens(number)) for number in range(len(first.lengths))
    )


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def token_losses_of(
    loaded: LoadedModel, length: int, tokens_per_batch: int | None, memory_limit_gb: float | None
) -> TokenLosses:
    """Of a model that reads as many rows of ``length`` tokens at once as the memory holds."""
    from analysis.model.memory import GB, tokens_that_fit
    from analysis.model.token_losses import TokenLosses

    if tokens_per_batch is None and memory_limit_gb is not None:
        limit = memory_limit_gb * GB
        tokens_per_batch = tokens_that_fit(loaded.model, loaded.device, length, limit, n_targets=length)
    return TokenLosses(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)


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
