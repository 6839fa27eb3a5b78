"""Losses and influences of every token of a text: the data of an X-ray, and how they are saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from analysis.parquet import read_frame
from analysis.pieces import readable
from analysis.saved import write_saved
from analysis.stats.recovery import nats
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, user_path


@dataclass(eq=False, repr=False)
class Influences:
    """Losses and influences of every token of a text. In Jupyter it shows itself."""

    tokens: pd.DataFrame
    """A row per token: token (its id), piece (its text), loss_long_nats (NaN of the first, which nothing predicts, and
    of special tokens, which are no targets),
    loss_short_nats (L_long where the context has no more than M tokens), first_far (place of the first far token),
    influence (leave-one-out influence of each far token from there on, in nats; may be empty)."""
    about: dict[str, Any]
    """What was measured: model, model_sha256, text, text_tokens (how many the text has; the map may be of the first
    ones alone), n_long, n_short, prefix (token ids), tau_nats, dtype, commit."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def gain_nats(self) -> np.ndarray:
        """(T,) L_short - L_long."""
        return (self.tokens["loss_short_nats"] - self.tokens["loss_long_nats"]).to_numpy()

    @cached_property
    def labels(self) -> list[str]:
        """What people read of every token, see `analysis.pieces.readable`, (T,)."""
        return readable(self.tokens["piece"].tolist())

    @property
    def extent(self) -> str:
        """How much was read: "282 tokens", or "1,024 tokens (the first of 3,210)"."""
        text_tokens = self.about.get("text_tokens", len(self))
        first = f" (the first of {text_tokens:,})" if text_tokens > len(self) else ""
        return f"{len(self):,} tokens{first}"

    @property
    def over(self) -> np.ndarray:
        """Places of the tokens that gain more than tau, ascending."""
        return np.flatnonzero(self.gain_nats > self.about["tau_nats"])

    def matrix(self) -> np.ndarray:
        """Influence of token i on token t at [t, i], (T, T) float32; NaN where i is no far token of t."""
        matrix = np.full((len(self), len(self)), np.nan, dtype=np.float32)
        rows = zip(matrix, self.tokens["first_far"], self.tokens["influence"], strict=True)
        for of_token, first, influence in rows:
            of_token[first : first + len(influence)] = influence
        return matrix

    def strongest(self, t: int, count: int) -> list[tuple[int, float]]:
        """Place and influence of the ``count`` far tokens of largest magnitude for token t, the strongest first."""
        row = self.tokens["influence"][t]
        first = int(self.tokens["first_far"][t])
        order = np.argsort(-np.abs(np.nan_to_num(row)), kind="stable")[:count]
        return [(first + int(i), float(row[i])) for i in order if not np.isnan(row[i])]

    def needed_most(self, count: int) -> list[tuple[float, int, int]]:
        """The ``count`` largest influences above 0, one for each token t at most: (nats, place i, t), descending."""
        rows = zip(self.tokens["first_far"], self.tokens["influence"], strict=True)
        largest = [
            (float(np.nanmax(row)), int(first + np.nanargmax(row)), t)
            for t, (first, row) in enumerate(rows)
            if not np.isnan(row).all()
        ]
        return sorted((needed for needed in largest if needed[0] > 0), reverse=True)[:count]

    def save(self, folder: str | Path) -> None:
        """Write `xray.parquet` and `xray.json` into a folder; `load` reads them."""
        write_saved(user_path(folder) / "xray.json", self.about, {"xray": self.tokens})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """What `save` wrote. Raises `UserError` where it is missing or damaged."""
        folder = user_path(folder)
        remedy = "make it with `olmo-sparsity xray MODEL --text FILE`"
        about = read_json(folder / "xray.json", remedy)
        if missing := [name for name in ("model", "n_long", "n_short", "tau_nats") if name not in about]:
            raise UserError(f"{folder / 'xray.json'} is damaged: it has no {', '.join(missing)}; {remedy}")
        return cls(read_frame(folder / "xray.parquet"), about)

    def __repr__(self) -> str:
        """One line: how many tokens gain from their far context, and the largest influence, where one is above 0."""
        about = self.about
        needs = [
            f"; {self.labels[t]!r} at {t} needs {self.labels[i]!r} at {i} most, by {most:.2f} nats"
            for most, i, t in self.needed_most(1)
        ]
        return (
            f"InfluenceMap: {len(self.over):,} of {self.extent} gain more than {nats(about['tau_nats'])} "
            f"(N = {about['n_long']}, M = {about['n_short']}){''.join(needs)}"
        )
