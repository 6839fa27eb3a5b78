"""The k influential tokens of a text, in a notebook: a model, its tokenizer and a text go in, a result comes out.

    from analysis import influential_tokens

    influential_tokens(model, tokenizer, text)

It measures as `scripts/influence.py` does, with the same engine, on a single text and without writing anything. The
result is shown by Jupyter; `InfluentialTokens` says what else it offers.

The placebo far context comes from ``placebo_text``, or from the text itself: F tokens at a uniform place at least N
tokens before the target's long context, or behind the target [ours; the scripts take another document]. It is nearer in
subject than another document, so net recovery comes out lower. Where the text has no room for it at every target over
tau there is no placebo, and the result says so. Special tokens (such as a beginning-of-text token) are context where
they stand in it, but never targets, and never a placebo's first or last text.

Shapes: T tokens of the text, n targets, m of them over tau, N long and M short context length, F = N - M far tokens, k
selected tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import enable_grad, inference_mode, nn
from tqdm.auto import tqdm

from analysis.measure.crossfit import ModelChooser
from analysis.measure.influence import InfluenceEngine, build_scorer, selection_rounds, targets_per_batch
from analysis.measure.influence_map import context_length, map_scorer, measure_map, trained_length
from analysis.measure.selectors import check_selector
from analysis.model.adapters import Adapter, OlmoForAnalysis, Prefixed, with_prefix
from analysis.model.device import TOKENS_PER_BATCH, chunks
from analysis.model.load import (
    adapter_of,
    check_vocabulary,
    is_of_project,
    prefix_of,
    unwrapped,
    what_stands_before,
)
from analysis.model.trial import check_long_context
from analysis.records.schema import FAR_CONTEXTS, SelectionRow, Targets
from analysis.report.influence_map import InfluenceMap
from analysis.report.notebook import Choices, InfluentialTokens
from analysis.text.contexts import SampledTargets
from analysis.text.decode import TextDecoder
from analysis.text.tokenized import Passage, Passages, Placebos, read_passage
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance
from olmo_sparsity.util.provenance import current_commit
from olmo_sparsity.util.streams import Stream

MAX_TARGETS = 200


def influential_tokens(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    n_long: int = 128,
    n_short: int = 16,
    k: int = 8,
    tau_nats: float = 1.0,
    selectors: Sequence[str] = ("leave-one-out-kl", "leave-one-out"),
    placebo_text: str | None = None,
    targets: Iterable[int] | None = None,
    max_targets: int | None = MAX_TARGETS,
    targets_per_block: int = 1,
    prefix: str = "auto",
    seed: int = 0,
    tokens_per_batch: int | None = None,
) -> InfluentialTokens:
    """Which k far tokens give a model back what the long context gives it, for tokens of a text that gain.

    A target's loss is measured given the N tokens before it (L_long) and given the last M of them (L_short). Where
    L_short - L_long > tau, each selector chooses k of the F = N - M far tokens, from the text and from a placebo, and
    the loss given the short context and the first 1 … k of them is measured. How long that will take is printed at its
    start; an interrupt (Ctrl-C, or the notebook's stop button) gives the result of what is finished.

    Args:
        model: a causal language model of transformers with rotary or learned positions, or a model of this project, on
            any CPU or GPU and in any floating type. It is left as it was: place, mode, and what has gradients.
        tokenizer: the model's, of transformers, fast or slow.
        text: what is read.
        n_long: N.
        n_short: M.
        k: the most tokens to choose.
        tau_nats: tau.
        selectors: names, or screened forms such as ``leave-one-out@gradient:32``. The first of the defaults never looks
            at the target; both read the same forward passes to choose.
        placebo_text: another text for the placebo far contexts.
        targets: positions in the text, in tokens from 0, to measure; by default a random sample of all.
        max_targets: size of that sample; None measures all. Nothing else depends on it.
        targets_per_block: B, targets that follow one another and share a far context (docs/method.md, 2.1). With 32 all
            targets of a text take a fraction of the time; the short context then has M to M + 31 tokens.
        prefix: tokens that stand before every context, at the first ids: auto (what the tokenizer puts before a text;
            nothing for a model of this project), none, bos, eos, or ids such as "2". With one, positions in the text
            count without special tokens before it.
        seed: of the sample, the placebo's places and the selector ``random``.
        tokens_per_batch: tokens of one forward pass; by default what fits. Results depend on it by rounding only.

    Raises `UserError`, one line with the remedy, where the text is too short, the model cannot be measured so, or an
    option makes no sense.
    """
    names = _check_options(n_long, n_short, k, targets_per_block, selectors)
    adapter = _adapter(model, prefix, tokenizer)
    passage, other = _read(adapter, tokenizer, text, placebo_text)
    positions = _positions(passage, targets, max_targets, n_long, targets_per_block, seed)
    placebos = Placebos(passage, other, n_long, n_long - n_short, targets_per_block, seed)
    with _left_as_it_was(adapter):
        sizes = n_long, targets_per_block
        check_long_context(adapter, *sizes, name=_name(model), option="n_long")
        scorer = build_scorer(adapter, _device(adapter), *sizes, tokens_per_batch=tokens_per_batch)
        engine = InfluenceEngine(
            documents=Passages([passage, *([] if other is None else [other])]),
            decoder=TextDecoder.from_transformers(tokenizer),
            evaluator=scorer,
            chooser=ModelChooser(scorer, seed=seed, k_max=k),
            n_long=n_long,
            n_short=n_short,
            ks=range(1, k + 1),
            selectors=names,
            targets_per_block=targets_per_block,
        )
        measured, whole = _measure_gains(engine, placebos.sample(positions))
        over = measured.over(tau_nats)
        has_placebo = len(over) > 0 and bool((measured.placebo_start[over] >= 0).all())
        far_contexts = FAR_CONTEXTS if has_placebo else FAR_CONTEXTS[:1]
        rows = _select(engine, measured, over if whole else over[:0], far_contexts)
    choices = _choices(rows, names, far_contexts, k)
    return InfluentialTokens(
        pieces=passage.pieces,
        targets=measured,
        choices=choices,
        placebo_pieces=[placebos.pieces(start) for start in measured.placebo_start[over]]
        if has_placebo
        else [],
        placebo=placebos.describe(found=has_placebo or len(over) == 0),
        n_long=n_long,
        n_short=n_short,
        targets_per_block=targets_per_block,
        tau_nats=tau_nats,
        k=k,
        prefix=_prefix(adapter),
    )


def influence_map(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    n_long: int | None = None,
    n_short: int = 16,
    tau_nats: float = 1.0,
    prefix: str = "auto",
    tokens_per_batch: int | None = None,
) -> InfluenceMap:
    """Which earlier tokens every token of a text needs, and by how much: L_long, L_short and exact leave-one-out
    influence of all pairs (docs/method.md, 2.7).

    Every token is left out once, so the time grows with the length of the text times N. Special tokens are tokens like
    others here.

    Args:
        model: as in `influential_tokens`.
        tokenizer: as there.
        text: what is read.
        n_long: N, the most tokens of context; by default what the model reads, up to 1,024. A longer text is read in
            windows that overlap by half.
        n_short: M; nearer tokens are not measured.
        tau_nats: tokens that gain more are marked.
        prefix: as in `influential_tokens`.
        tokens_per_batch: tokens of one forward pass; by default what fits. Results depend on it by rounding only.

    Raises `UserError`, one line with the remedy, where the text is too short, the model cannot be measured so, or an
    option makes no sense.
    """
    adapter = _adapter(model, prefix, tokenizer)
    passage, _ = _read(adapter, tokenizer, text, None)
    n_long = context_length(len(passage.ids), n_long, n_short, trained_length(adapter))
    device = _device(adapter)
    with _left_as_it_was(adapter):
        check_long_context(adapter, n_long, name=_name(model), option="n_long")
        scorer = map_scorer(adapter, device, n_long, tokens_per_batch=tokens_per_batch)
        about = {
            "model": _name(model),
            "model_sha256": None,
            "text": None,
            "n_long": n_long,
            "n_short": n_short,
            "prefix": list(_prefix(adapter)),
            "tau_nats": float(tau_nats),
            "dtype": str(next(adapter.parameters()).dtype).removeprefix("torch."),
            "device": str(device),
            "commit": current_commit(),
        }
        measured = measure_map(scorer, passage.ids, passage.pieces, about, show=_map_progress)
    return InfluenceMap(**vars(measured))


@contextmanager
def _map_progress(total: int) -> Iterator[Advance]:
    with tqdm(total=total, desc="leaving tokens out", unit="token") as bar:
        yield bar.update


def _measure_gains(engine: InfluenceEngine, sampled: SampledTargets) -> tuple[Targets, bool]:
    """L_long and L_short of the targets; after an interrupt those of the first ones, and False."""
    count, parts = len(sampled.position), []
    whole = True
    with tqdm(total=count, desc="long and short losses", unit="target") as bar:
        try:
            for rows in chunks(np.arange(count), targets_per_batch(engine.targets_per_block)):
                parts.append(engine.measure_gains(sampled, rows, sampled.position[rows] - engine.n_long))
                bar.update(len(rows))
        except KeyboardInterrupt:
            if not parts:
                raise
            whole = False
    return Targets.joined(parts), whole


def _select(
    engine: InfluenceEngine, targets: Targets, over: np.ndarray, far_contexts: Sequence[str]
) -> list[SelectionRow]:
    """What selectors choose for the targets over tau; after an interrupt, for the first of them."""
    found: list[SelectionRow] = []
    with tqdm(total=len(over), desc="selecting tokens", unit="target") as bar:
        try:
            for rows in selection_rounds(targets, over, engine.targets_per_block):
                began = time.monotonic()
                found += engine.select(targets, rows, far_contexts)
                bar.update(len(rows))
                if bar.n == len(rows) < len(over):
                    seconds = (time.monotonic() - began) * (len(over) / len(rows) - 1)
                    said = f"selecting tokens for {len(over):,} targets takes about {_duration(seconds)}"
                    bar.write(f"{said}; an interrupt keeps what is finished", file=sys.stderr)
        except KeyboardInterrupt:
            bar.write(f"interrupted: {bar.n} of {len(over):,} targets are finished", file=sys.stderr)
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _choices(
    rows: Sequence[SelectionRow], selectors: Sequence[str], far_contexts: Sequence[str], k: int
) -> dict[str, dict[str, Choices]]:
    """By selector and far context, in the order of the targets; there may be none."""

    def of(selector: str, far_context: str) -> Choices:
        own = [row for row in rows if (row.selector, row.far_context) == (selector, far_context)]
        return Choices(
            np.array([row.selected for row in own], dtype=np.int64).reshape(-1, k),
            np.array([row.influence for row in own], dtype=np.float64).reshape(-1, k),
            np.array([row.loss_nats for row in own], dtype=np.float64).reshape(-1, k),
        )

    return {name: {far: of(name, far) for far in far_contexts} for name in selectors}


def _read(
    adapter: Adapter, tokenizer: Any, text: str, placebo_text: str | None
) -> tuple[Passage, Passage | None]:
    """The text and the placebo's, in tokens that the model knows."""
    passage = read_passage(tokenizer, text, "text", add_special_tokens=not _prefix(adapter))
    other = None
    if placebo_text is not None:
        other = read_passage(tokenizer, placebo_text, "placebo_text", add_special_tokens=False)
    for each in (passage, other):
        if each is not None:
            check_vocabulary(adapter, each.ids)
    return passage, other


def _check_options(
    n_long: int, n_short: int, k: int, targets_per_block: int, selectors: Sequence[str]
) -> list[str]:
    """The selectors' names, each once."""
    if not 0 < n_short < n_long:
        raise UserError(
            f"n_long = {n_long} must be larger than n_short = {n_short}, and that larger than 0; change one of them"
        )
    if not 1 <= k <= n_long - n_short:
        raise UserError(f"k = {k} must be from 1 to the {n_long - n_short:,} far tokens; change it")
    if targets_per_block < 1:
        raise UserError(f"targets_per_block = {targets_per_block} holds no target; give 1 or more")
    names = list(dict.fromkeys([selectors] if isinstance(selectors, str) else selectors))
    if not names:
        raise UserError("selectors is empty; name at least one, such as leave-one-out")
    for name in names:
        check_selector(name, k_max=k, n_far=n_long - n_short)
    return names


def _name(model: Any) -> str:
    """What messages call a model object."""
    inner = model.model if isinstance(model, Adapter) else model
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    return f"the model ({kind if isinstance(kind, str) else type(inner).__name__})"


def _adapter(model: Any, prefix: str, tokenizer: Any) -> Adapter:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, not a loaded model; load one with AutoModelForCausalLM.from_pretrained"
        )
    model = unwrapped(model, _name(model))
    own = isinstance(model, Adapter) or is_of_project(model, "PositionedOLMo")
    if not own and not getattr(model, "can_generate", lambda: False)():
        raise UserError(
            f"{_name(model)} is no causal language model of transformers; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    adapter = adapter_of(model, _name(model))
    of_project = isinstance(adapter, OlmoForAnalysis) or is_of_project(model, "PositionedNeoX")

    def added() -> tuple[int, ...]:
        if of_project or not callable(tokenizer):
            return ()
        plain, whole = (tokenizer("a", add_special_tokens=each)["input_ids"] for each in (False, True))
        return what_stands_before(plain, whole)

    return (
        adapter
        if isinstance(adapter, Prefixed)
        else with_prefix(adapter, prefix_of(prefix, adapter.model.config, added))
    )


def _prefix(adapter: Adapter) -> tuple[int, ...]:
    return adapter.prefix if isinstance(adapter, Prefixed) else ()


def _device(model: nn.Module) -> Any:
    device = next(model.parameters()).device
    if device.type not in TOKENS_PER_BATCH:
        raise UserError(f"the model is on the device {device}; move it to {' or '.join(TOKENS_PER_BATCH)}")
    return device


def _positions(
    passage: Passage,
    asked: Iterable[int] | None,
    max_targets: int | None,
    n_long: int,
    targets_per_block: int,
    seed: int,
) -> np.ndarray:
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
        if max_targets is not None and max_targets < 1:
            raise UserError(
                f"max_targets = {max_targets} leaves nothing to measure; give 1 or more, or None for all"
            )
        if max_targets is None or len(possible) <= max_targets:
            return possible
        generator = np.random.default_rng([Stream.PASSAGE_TARGETS, seed])
        block = (possible - n_long) // targets_per_block
        drawn = generator.choice(np.unique(block), -(-max_targets // targets_per_block), replace=False)
        return possible[np.isin(block, drawn)]
    positions = np.unique(np.array(list(asked), dtype=np.int64))
    if len(positions) == 0:
        raise UserError("targets is empty; name positions in the text, or leave it out to measure a sample")
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
        with inference_mode(False), enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for weight in learning:
            weight.requires_grad_(True)
