"""The k influential tokens of a text, in a notebook: a model, its tokenizer and a text go in, a result comes out.

    from analysis.notebook import influential_tokens

    influential_tokens(model, tokenizer, text)

It measures as `scripts/influence.py` does (METHOD 2.1 to 2.3), on a single text and without writing anything.
Shapes: T tokens of the text, n targets, m of them over tau, N long and M short context length, F = N - M far tokens, k
selected tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from analysis.measure.influence import TARGETS_PER_BLOCK, TARGETS_PER_ROUND, TOKENS_AFTER, selected_losses
from analysis.measure.selectors import Question, check_selector, find_selector
from analysis.model.adapters import OlmoForAnalysis, PositionedCausalLM
from analysis.model.load import adapter_of, check_long_context, vocabulary_size
from analysis.model.memory import default_limit_bytes, tokens_that_fit
from analysis.model.scorer import TOKENS_PER_BATCH, Scorer, long_and_short_losses
from analysis.records.schema import FAR_CONTEXTS, Targets
from analysis.report.notebook import Choices, InfluentialTokens
from analysis.text.contexts import Contexts
from analysis.text.kinds import classify
from analysis.text.tokenized import Passage, Placebos, read_passage
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress


def influential_tokens(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    n_long: int = 128,
    n_short: int = 16,
    k: int = 8,
    tau_nats: float = 1.0,
    selectors: Sequence[str] = ("leave-one-out",),
    placebo_text: str | None = None,
    targets: Iterable[int] | None = None,
    seed: int = 0,
    tokens_per_batch: int | None = None,
) -> InfluentialTokens:
    """Which k far tokens give a model back what the long context gives it, for every token of a text that gains.

    Every token with N tokens before it is a target: its loss is measured given those N (L_long) and given the last M of
    them (L_short). Where L_short - L_long > tau, each selector chooses k of the F = N - M far tokens, from the text and
    from a placebo, and the loss given the short context and the first 1 … k of them is measured.

    The placebo far context comes from ``placebo_text``, or from the text itself: F tokens at a uniform place at least N
    tokens before the target's long context, or behind the target [ours; the scripts take another document]. It is
    nearer in subject than another document, so net recovery comes out lower. Where the text has no room for it at every
    target over tau there is no placebo, and the result says so. Special tokens (such as a beginning-of-text token) are
    context where they stand in it, but never targets, and never a placebo's first or last text.

    Args:
        model: a causal language model of transformers with rotary or learned positions, or a model of this project, on
            any CPU or GPU and in any floating type. It is left as it was: place, mode, and what has gradients.
        tokenizer: the model's, of transformers, fast or slow.
        text: what is read.
        n_long: N.
        n_short: M.
        k: the most tokens to choose.
        tau_nats: tau.
        selectors: names of METHOD 2.2, or screened forms such as ``leave-one-out@gradient:32``.
        placebo_text: another text for the placebo far contexts.
        targets: positions in the text, in tokens from 0, to measure; by default all. Nothing else depends on it.
        seed: of the placebo's places and of the selector ``random``.
        tokens_per_batch: tokens of one forward pass; by default what fits. Results depend on it by rounding only.

    Raises `UserError`, one line with the remedy, where the text is too short, the model cannot be measured so, or an
    option makes no sense.
    """
    names = _check_options(n_long, n_short, k, selectors)
    adapter = _adapter(model)
    passage, other = _read(adapter, tokenizer, text, placebo_text)
    positions = _positions(passage, targets, n_long)
    placebos = Placebos(passage, other, n_long, n_long - n_short, seed)
    with _left_as_it_was(adapter):
        check_long_context(adapter, n_long, name=_name(model), option="n_long")
        scorer = _scorer(adapter, n_long, tokens_per_batch)
        measured = _measure_gaps(scorer, passage, placebos, positions, n_short)
        over = measured.over(tau_nats)
        has_placebo = len(over) > 0 and bool((measured.placebo_start[over] >= 0).all())
        search = _Search(scorer, passage, placebos, has_placebo, n_short, names, k, seed)
        choices = search.run(measured, over)
    starts = measured.placebo_start[over] if has_placebo else []
    return InfluentialTokens(
        pieces=passage.pieces,
        targets=measured,
        choices=choices,
        placebo_pieces=[placebos.pieces(start) for start in starts],
        placebo=placebos.describe(found=has_placebo or len(over) == 0),
        n_long=n_long,
        n_short=n_short,
        tau_nats=tau_nats,
        k=k,
    )


def _read(
    adapter: OlmoForAnalysis | PositionedCausalLM, tokenizer: Any, text: str, placebo_text: str | None
) -> tuple[Passage, Passage | None]:
    """The text and the placebo's, in tokens that the model knows."""
    passage = read_passage(tokenizer, text, "text", add_special_tokens=True)
    other = None
    if placebo_text is not None:
        other = read_passage(tokenizer, placebo_text, "placebo_text", add_special_tokens=False)
    for each in (passage, other):
        _check_vocabulary(adapter, each)
    return passage, other


def _check_options(n_long: int, n_short: int, k: int, selectors: Sequence[str]) -> list[str]:
    """The selectors' names, each once."""
    if not 0 < n_short < n_long:
        raise UserError(
            f"n_long = {n_long} must be larger than n_short = {n_short}, and that larger than 0; change one of them"
        )
    if not 1 <= k <= n_long - n_short:
        raise UserError(f"k = {k} must be from 1 to the {n_long - n_short:,} far tokens; change it")
    names = list(dict.fromkeys([selectors] if isinstance(selectors, str) else selectors))
    if not names:
        raise UserError("selectors is empty; name at least one, such as leave-one-out")
    for name in names:
        check_selector(name, k_max=k, n_far=n_long - n_short)
    return names


def _name(model: Any) -> str:
    """What messages call a model object."""
    inner = model.model if isinstance(model, OlmoForAnalysis | PositionedCausalLM) else model
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    return f"the model ({kind if isinstance(kind, str) else type(inner).__name__})"


def _adapter(model: Any) -> OlmoForAnalysis | PositionedCausalLM:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, not a loaded model; load one with AutoModelForCausalLM.from_pretrained"
        )
    own = isinstance(model, OlmoForAnalysis | PositionedCausalLM | PositionedOLMo)
    if not own and not getattr(model, "can_generate", lambda: False)():
        raise UserError(
            f"{_name(model)} is no causal language model of transformers; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return adapter_of(model, _name(model))


def _check_vocabulary(adapter: OlmoForAnalysis | PositionedCausalLM, passage: Passage | None) -> None:
    if passage is None or len(passage.ids) == 0:
        return
    known = vocabulary_size(adapter)
    if passage.ids.max() >= known:
        raise UserError(
            f"the tokenizer gives token id {passage.ids.max():,}, and the model has {known:,} tokens; give the "
            "tokenizer that the model was trained with"
        )


def _positions(passage: Passage, asked: Iterable[int] | None, n_long: int) -> np.ndarray:
    """Positions of the targets, ascending, (n,)."""
    plain = passage.plain
    last = int(plain[-1]) if len(plain) else 0
    if last < n_long:
        remedy = (
            f"choose n_long = {last} or less, or give a longer text" if last > 1 else "give a longer text"
        )
        raise UserError(
            f"the text has {len(passage.ids):,} tokens, too few for N = {n_long:,} and a target behind them; {remedy}"
        )
    possible = plain[plain >= n_long]
    if asked is None:
        return possible
    positions = np.unique(np.array(list(asked), dtype=np.int64))
    if len(positions) == 0:
        raise UserError("targets is empty; name positions in the text, or leave it out to measure all")
    if len(refused := np.setdiff1d(positions, possible)):
        why = "is a special token" if n_long <= refused[0] <= last else "is not among them"
        raise UserError(
            f"targets must be positions from {n_long:,} (N tokens before them) to {last:,} that are no special tokens; "
            f"{refused[0]:,} {why}"
        )
    return positions


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients of weights while it runs; after it, all modules and weights are as before."""
    modes = [(module, module.training) for module in model.modules()]
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        model.eval().requires_grad_(False)
        # the caller may have turned gradients off, which the selector gradient needs
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for weight in learning:
            weight.requires_grad_(True)


def _scorer(model: nn.Module, n_long: int, tokens_per_batch: int | None) -> Scorer:
    device = next(model.parameters()).device
    if device.type not in TOKENS_PER_BATCH:
        raise UserError(f"the model is on the device {device}; move it to {' or '.join(TOKENS_PER_BATCH)}")
    fitting = tokens_per_batch or tokens_that_fit(model, device, n_long, default_limit_bytes(device))
    return Scorer(model, device=str(device), tokens_per_batch=fitting)


def _measure_gaps(
    scorer: Scorer, passage: Passage, placebos: Placebos, positions: np.ndarray, n_short: int
) -> Targets:
    """L_long and L_short of every target, its kind, and where its placebo stands."""
    n_long, n_far = placebos.n_long, placebos.n_far
    losses, kinds = [], []
    with progress("long and short losses", len(positions), "targets") as advance:
        for at in _parts(positions, TARGETS_PER_BLOCK):
            losses.append(long_and_short_losses(scorer, passage.contexts(at, n_long, n_short)))
            for t in at.tolist():
                far, short, target, after = (
                    "".join(passage.pieces[start:end])
                    for start, end in (
                        (t - n_long, t - n_long + n_far),
                        (t - n_short, t),
                        (t, t + 1),
                        (t + 1, t + 1 + TOKENS_AFTER),
                    )
                )
                kinds.append(classify(far, short, target, after))
            advance(len(at))
    long, short_nats = (np.concatenate(column) for column in zip(*losses, strict=True))
    _check_finite(long, short_nats)
    return Targets(
        target_id=positions - n_long,
        document=np.zeros_like(positions),
        position=positions,
        token=passage.ids[positions],
        loss_long_nats=long,
        loss_short_nats=short_nats,
        selecting_gain_nats=short_nats - long,
        kind=np.array(kinds),
        placebo_document=np.full_like(positions, placebos.other is not None),
        placebo_start=placebos.starts(positions),
    )


@dataclass(frozen=True)
class _Search:
    """What every selector chooses, and what it is worth."""

    scorer: Scorer
    passage: Passage
    placebos: Placebos
    has_placebo: bool
    n_short: int
    selectors: list[str]
    k: int
    seed: int

    def run(self, targets: Targets, over: np.ndarray) -> dict[str, dict[str, Choices]]:
        """By selector and far context, for the targets over tau."""
        far_contexts = FAR_CONTEXTS if self.has_placebo else ("true",)
        parts: dict[tuple[str, str], list[Choices]] = {
            (name, far): [] for name in self.selectors for far in far_contexts
        }
        with progress("selecting tokens", len(over), "targets") as advance:
            for rows in _parts(over, TARGETS_PER_ROUND):
                true = self.passage.contexts(targets.position[rows], self.placebos.n_long, self.n_short)
                contexts = {"true": true}
                if self.has_placebo:
                    contexts["placebo"] = true.with_far(self.placebos.far(targets.placebo_start[rows]))
                for (name, far), found in parts.items():
                    found.append(self._choose(name, contexts[far]))
                advance(len(rows))
        return {
            name: {far: _joined(parts[name, far], self.k) for far in far_contexts} for name in self.selectors
        }

    def _choose(self, name: str, contexts: Contexts) -> Choices:
        chosen = find_selector(name)(Question(self.scorer, contexts, self.seed, self.k))
        losses = selected_losses(self.scorer, contexts, chosen.columns, range(1, self.k + 1))
        _check_finite(losses)
        return Choices(chosen.columns, chosen.influence, losses)


def _joined(parts: list[Choices], k: int) -> Choices:
    """The choices for all targets, from those for a few at a time; there may be none."""
    return Choices(
        np.concatenate([np.empty((0, k), dtype=np.int64), *(part.selected for part in parts)]),
        np.concatenate([np.empty((0, k)), *(part.influence for part in parts)]),
        np.concatenate([np.empty((0, k)), *(part.loss_nats for part in parts)]),
    )


def _parts(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _check_finite(*losses: np.ndarray) -> None:
    if not all(np.isfinite(each).all() for each in losses):
        raise UserError(
            "a loss of the model is not finite (fp16 may overflow); load it in bfloat16 or float32"
        )
