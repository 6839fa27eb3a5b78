"""What was measured, on what and how: typed, frozen, and compared where measurements meet.

A saved result has the same settings as one flat JSON object. Whether a setting may differ stands at its field, for each
occasion on which two measurements are compared:

    resumed    the same call goes on in its folder: checksums stand for the names of what they are of
    joined     several runs of one model become one result
    verified   a result is measured again: only what its numbers rest on counts
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self

from analysis.older_records import renamed_settings
from olmo_sparsity.util.errors import UserError

Occasion = Literal["resumed", "joined", "verified"]


def _may_differ(*occasions: Occasion, saved_as: str | None = None) -> dict[str, Any]:
    """Of a field: on which occasions its value may differ, and its name in a saved result, by default its own."""
    return {"may_differ": occasions, "saved_as": saved_as}


@dataclass(frozen=True)
class ModelIdentity:
    """The model that evaluates, and how it reads."""

    name: str = field(metadata=_may_differ("resumed", "joined", "verified", saved_as="model"))
    """As it was given: a path, or the id of a model on the hub."""
    sha256: str = field(metadata=_may_differ("joined", saved_as="model_sha256"))
    """Of its weights."""
    family: str | None
    parameters: int | None
    training_seed: int | None = field(metadata=_may_differ("resumed", "joined", "verified"))
    tokenizer_sha256: str | None
    prefix: tuple[int, ...]
    """Token ids before every context."""
    rope_scaling: str | None
    """Of the evaluation, such as ``yarn:4``."""
    dtype: str


@dataclass(frozen=True)
class OtherModel:
    """A model that takes part beside the one that evaluates; two are equal where their weights are."""

    name: str = field(compare=False, metadata={"saved_as": "model"})
    sha256: str = field(metadata={"saved_as": "model_sha256"})
    training_seed: int | None = field(compare=False)
    rope_scaling: str | None = None
    untrained: bool = False

    @classmethod
    def of(cls, model: ModelIdentity, *, untrained: bool) -> Self:
        """A model, as it is named where it takes part."""
        return cls(model.name, model.sha256, model.training_seed, model.rope_scaling, untrained)


@dataclass(frozen=True)
class TextsIdentity:
    """The texts that targets are sampled from."""

    name: str = field(metadata=_may_differ("resumed", "verified", saved_as="texts"))
    """A path, or what they are."""
    sha256: str = field(metadata=_may_differ("verified", saved_as="texts_sha256"))
    split: str
    """Of a prepared corpus."""
    read_with: Mapping[str, str] | None = field(default=None, metadata=_may_differ("resumed", "verified"))
    """The fields of files and their encoding, where they were named."""
    documents: int | None = None
    """Into how many the texts were divided; None: each is one."""
    special_tokens: int | None = None
    """How many stand in the texts; None: none."""


@dataclass(frozen=True)
class ContextSettings:
    """Which contexts targets are measured in; its fields are arguments of `analysis.measure`."""

    n_long: int
    """N, tokens of the long context."""
    n_short: int
    """M, tokens of the short context."""
    seed: int
    """Of everything that is drawn."""
    targets_per_block: int = 1
    """B, consecutive targets that share a far context."""
    lengths: tuple[int, ...] = ()
    """Numbers of tokens of further contexts, ascending (docs/method.md, 2.1b)."""
    before: int = 0
    """D, tokens of another text before the long context."""
    gap: int = 0
    """Position ids between far and short context that no token has."""

    def __post_init__(self) -> None:
        if not 0 < self.n_short < self.n_long:
            raise UserError(
                f"N = {self.n_long} must be larger than M = {self.n_short}, and M at least 1; change one of them"
            )
        if self.before and self.longer_lengths:
            raise UserError(
                f"lengths has {self.lengths[-1]:,}, and N with what stands before it is {self.n_context:,} tokens: "
                "raise before, or lower the length"
            )

    @property
    def n_far(self) -> int:
        """F = N - M, tokens that only the long context has."""
        return self.n_long - self.n_short

    @property
    def n_context(self) -> int:
        """D + N, tokens that are read where a target is given its long context."""
        return self.before + self.n_long

    @property
    def longer_lengths(self) -> tuple[int, ...]:
        """Those of the further contexts that are longer than the long one."""
        return tuple(length for length in self.lengths if length > self.n_context)

    @property
    def n_text(self) -> int:
        """How many tokens of its own text must stand before the first target of a block."""
        return max((self.n_long, *self.longer_lengths))

    @property
    def drawn_by(self) -> dict[str, Any]:
        """The arguments of `analysis.sampling.sample_targets` that they are."""
        names = ("n_long", "n_short", "seed", "targets_per_block", "n_text", "before")
        return {name: getattr(self, name) for name in names}

    @property
    def unusual(self) -> dict[str, int]:
        """What captions say of the long context beside its length, by name: `before` and `gap`, where not 0."""
        values = {"before": self.before, "gap": self.gap}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True)
class ChoiceSettings:
    """For which targets tokens are chosen, by what and in which far contexts, and what is measured of the choices."""

    tau_nats: float
    ks: tuple[int, ...]
    """Numbers of tokens, ascending."""
    selectors: tuple[str, ...]
    far_contexts: tuple[str, ...]
    """``true``, then placebos."""
    keep_as: tuple[str, ...] = ("text",)
    """How chosen tokens are kept, see `analysis.kept`."""
    scores: bool = field(default=False, metadata=_may_differ("verified"))
    """Whether the influence of every far token is kept."""
    effects: bool = field(default=False, metadata=_may_differ("verified"))
    """Whether what leaving each far key and value out does to all targets of a block is kept."""
    faithfulness: bool = field(default=False, metadata=_may_differ("verified"))
    subsets: int | None = field(default=None, metadata=_may_differ("verified"))
    """Of faithfulness: how many random subsets, and what share of the far tokens they keep."""
    keep_rate: float | None = field(default=None, metadata=_may_differ("verified"))
    definitions: tuple[str, ...] = ()
    """Of selectors that a user defined, see `analysis.parameters.definitions`."""

    @property
    def k_max(self) -> int:
        """The largest k."""
        return self.ks[-1]


class Recorded:
    """Settings that are saved as one flat JSON object; a subclass is a frozen dataclass."""

    def to_json(self) -> dict[str, Any]:
        """All settings in one flat object."""
        return flat_json(self)

    @classmethod
    def from_json(cls, flat: Mapping[str, Any]) -> Self:
        """What `to_json` gave; settings that an older record does not have get their defaults.

        Raises `UserError` for a setting that there is not, and where one is missing that has no default.
        """
        try:
            left = renamed_settings(flat)
            settings = _from_json(cls, left)
        except (AttributeError, TypeError) as error:  # a value of another type is no setting either
            raise UserError(f"the result lacks settings ({error}); measure again") from error
        if left:
            raise UserError(f"the result has settings of another version: {', '.join(left)}; measure again")
        return settings

    def but(self, **changes: Any) -> Self:
        """The same with other values of some settings, by their names in a saved result."""
        return type(self).from_json(self.to_json() | changes)

    def differences(
        self, other: Recorded, *, when: Occasion | None = None, but_for: Container[str] = ()
    ) -> str:
        """``setting old -> new`` for every setting that differs, as text; empty where none does.

        Left out are those that may differ on this occasion, and those named in ``but_for``.
        """
        differing = []
        for (of, old), (_, new) in zip(_single(self), _single(other), strict=True):
            name = _saved_as(of)
            if old != new and when not in of.metadata.get("may_differ", ()) and name not in but_for:
                differing.append(f"{name} {json.dumps(_as_json(old))} -> {json.dumps(_as_json(new))}")
        return ", ".join(differing)


@dataclass(frozen=True)
class Settings(Recorded):
    """All settings of one measurement."""

    model: ModelIdentity = field(metadata={"group": ModelIdentity})
    texts: TextsIdentity = field(metadata={"group": TextsIdentity})
    contexts: ContextSettings = field(metadata={"group": ContextSettings})
    choices: ChoiceSettings = field(metadata={"group": ChoiceSettings})
    targets_requested: int
    """A small text offers fewer."""
    selected_by: OtherModel | None = None
    """The model that chose targets and tokens, where it is another (cross-fitting)."""
    proposed_by: OtherModel | None = None
    """The model that proposed tokens for screened selectors, where it is another."""
    complete: bool = field(default=False, metadata=_may_differ("resumed", "verified"))
    """Whether all targets are measured."""
    losses_not_over_tau: str | None = None
    """Of a result made smaller: what is left of the losses of targets that are not over tau, such as "sums by text"."""
    faithfulness_of_choices: str | None = None
    """Of a result made smaller: what is left of the faithfulness of its choices, such as "means by group"."""


def flat_json(settings: Any) -> dict[str, Any]:
    """`Settings`, or one group of them, as one flat object."""
    return {_saved_as(of): _as_json(value) for of, value in _single(settings)}


def _single(settings: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Field and value of every single setting, those of groups in their places."""
    for of in fields(settings):
        value = getattr(settings, of.name)
        if "group" in of.metadata:
            yield from _single(value)
        else:
            yield of, value


def _saved_as(of: Field[Any]) -> str:
    return of.metadata.get("saved_as") or of.name


def _as_json(value: Any) -> Any:
    if isinstance(value, OtherModel):
        return flat_json(value)
    return list(value) if isinstance(value, tuple) else value


def _from_json(cls: type, left: dict[str, Any]) -> Any:
    """An object of one of the classes above; its settings are taken out of ``left``."""
    values = {}
    for of in fields(cls):
        name = _saved_as(of)
        if "group" in of.metadata:
            values[of.name] = _from_json(of.metadata["group"], left)
        elif name in left:
            value = left.pop(name)
            if isinstance(value, Mapping) and name in ("selected_by", "proposed_by"):
                value = _from_json(OtherModel, dict(value))
            values[of.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
