"""`measure`: opens a model and texts, draws targets, has them measured batch by batch, and gives a `Result`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from analysis import arguments
from analysis.api import Result
from analysis.contexts import SAME_GROUP
from analysis.engine import Engine
from analysis.model.loaded import LoadedModel
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.options import (
    DEFAULT_SELECTORS,
    PLACEBOS,
    check_options,
    choice_settings,
    drops_tokens,
    leaves_out_of_cache,
)
from analysis.runner import Runner
from analysis.sampling import sample_targets
from analysis.selectors.names import parse_names
from analysis.settings import ChoiceSettings, ContextSettings, OtherModel, Settings, TextsIdentity
from analysis.texts import Texts
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)


def measure(
    model: Any,
    texts: Any,
    *,
    n_long: int = 128,
    n_short: int = 16,
    targets: int = 1000,
    targets_per_block: int = 16,
    lengths: Sequence[int] = (),
    before: int = 0,
    gap: int = 0,
    tau_nats: float = 1.0,
    ks: Sequence[int] = (1, 2, 4, 8),
    selectors: Sequence[str] = DEFAULT_SELECTORS,
    placebos: Sequence[str] = PLACEBOS[:1],
    keep_as: Sequence[str] = ("text",),
    prefix: str = "auto",
    seed: int = 0,
    tokenizer: Any = None,
    dtype: str = "fp32",
    device: str | None = None,
    attn_implementation: str | None = None,
    tokens_per_batch: int | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    split: str = "heldout",
    select_with: Any = None,
    propose_with: Any = None,
    faithfulness: bool = False,
    scores: bool = False,
    effects: bool = False,
    batches: Sequence[int] | None = None,
    progress: bool = True,
) -> Result:
    """How much far context helps a model on sampled targets, and how much of that k influential far tokens recover.

    A target's loss is measured given the N tokens before it and given the last M of them. Where the long context gains
    more than tau, every selector ranks the F = N - M far tokens, and the loss given the short context and the first k
    of them is measured; the same in each placebo far context (docs/method.md, 2.1 to 2.3).

    Args:
        model: path of a run, checkpoint, transformers folder or ``.gguf`` file, or the id of a model on the hub, maybe
            with ``@yarn:4`` or ``@untrained`` behind it; or ``(model, tokenizer)``.
        texts: strings; ``{group: strings}``; paths of files (.txt, .md, .jsonl, .json, .csv, .tsv, .parquet, also .gz
            or .zst) or of a folder with one kind of them; `analysis.TextFiles`, which names their fields and encoding;
            or a prepared corpus. A list of ``{"role", "content"}`` in place of a string is a conversation: its chat
            template has no targets.
        n_long: N.
        n_short: M.
        targets: how many to sample, in whole blocks; a small text offers fewer, and a conversation has fewer left.
        targets_per_block: B, targets that follow one another and share a far context: the short context of the last one
            has M + B - 1 tokens.
        lengths: numbers of tokens n, also above N: the loss of every target given its last n tokens, in a block n + b,
            is measured, too (docs/method.md, 2.1b; numbers: `Result.contexts`).
        before: so many tokens of another text stand before the long context: distractors alone. No tokens are chosen
            then.
        gap: so many position ids between far and short context have no token: distance alone.
        tau_nats: tau.
        ks: numbers of tokens, ascending.
        selectors: names of `analysis.selectors`, with where they rank, such as ``leave-one-out-kl/cache:4``, or
            screened, such as ``leave-one-out@gradient:32``; with ``/other-near`` behind it, it chooses with half of
            the short context replaced (docs/method.md, 2.3). None, ``()``: only losses are measured, and nothing is
            searched; ``ks`` and ``keep_as`` count nothing then.
        placebos: far contexts beside the true one, of `PLACEBOS`.
        keep_as: how chosen tokens are kept: text; or cache, where the whole context is read and only their keys
            and values are left; maybe with sinks, as words or with windows, such as cache:4, text/word, text:4/before:2
            or cache:4/read:2 (`analysis.kept`).
        prefix: what stands before every context: auto (what the tokenizer puts before a text), none, bos, eos, or ids.
        seed: of everything that is drawn.
        tokenizer: a tokenizer.json, or the path of one, where the model has none.
        dtype: fp32, bf16, fp16 or auto (as stored).
        device: cpu, cuda, cuda:1, …; by default a GPU where there is one.
        attn_implementation: of transformers.
        tokens_per_batch: tokens of one forward pass, by default 1,024 on a CPU and 65,536 on a GPU; halved where memory
            runs out. Results depend on it by rounding only.
        out: folder to write to as blocks are finished: the same call goes on after an interruption. None: all stays in
            memory.
        shard: "i/n", measure this share of the batches; ``out`` is the same for all, and whole once all are finished.
        split: of a prepared corpus.
        select_with: cross-fitting: the model that chooses targets and tokens, trained from another seed.
        propose_with: a smaller model of the same tokenizer, which proposes the tokens for screened selectors.
        faithfulness: also measure comprehensiveness, random subsets (LDS) and shorter contexts (docs/method.md, 2.8).
        scores: also keep the influence of every far token.
        effects: also keep what leaving each far key and value out of the cache does to all targets, over tau or not:
            the frame ``effects`` of the result. It costs what ``leave-one-out-kl/cache`` costs, and gives its passes.
        batches: measure only batches of these numbers, such as to verify a result.
        progress: show it on standard error.

    Where no target is over tau the result has no choices, and says how much the largest gain is; the same call with a
    lower ``tau_nats`` takes the losses of the targets from ``out``.

    Raises `UserError` where model, texts and settings do not go together, a loss is not finite, or ``out`` has another
    measurement.
    """
    contexts = arguments.context_settings(
        n_long=n_long,
        n_short=n_short,
        targets_per_block=targets_per_block,
        seed=seed,
        lengths=lengths,
        before=before,
        gap=gap,
    )
    choices = choice_settings(
        tau_nats=tau_nats,
        ks=ks,
        selectors=selectors,
        placebos=placebos,
        keep_as=keep_as,
        scores=scores,
        effects=effects,
        faithfulness=faithfulness,
    )
    check_options(contexts, choices)
    targets = arguments.whole_number("targets", targets)
    if tokens_per_batch is not None:
        tokens_per_batch = arguments.whole_number("tokens_per_batch", tokens_per_batch)
    folder = None if out is None else arguments.folder("out", out)
    opening: dict[str, Any] = {
        "tokenizer": tokenizer,
        "prefix": prefix,
        "dtype": dtype,
        "device": device,
        "attn_implementation": attn_implementation,
    }
    with ExitStack() as stack:
        loaded = stack.enter_context(open_model(model, **opening))
        source = open_texts(texts, loaded.reader, split=split)
        loaded.check_texts(source)
        sampled = sample_targets(
            source, targets, same_group=SAME_GROUP in choices.far_contexts, **contexts.drawn_by
        )
        scorer = _scorer(loaded, contexts, choices, tokens_per_batch)
        scorers: dict[str, Scorer] = {}
        others: dict[str, OtherModel] = {}
        for role, name in {"selected_by": select_with, "proposed_by": propose_with}.items():
            if name is not None:
                other = stack.enter_context(open_model(name, **opening))
                _check_other(other, loaded, role)
                others[role] = OtherModel.of(other.identity, untrained=other.untrained)
                scorers[role] = _scorer(other, contexts, choices, tokens_per_batch)
        settings = Settings(
            model=loaded.identity,
            texts=identity_of(source, split),
            contexts=contexts,
            choices=choices,
            targets_requested=targets,
            selected_by=others.get("selected_by"),
            proposed_by=others.get("proposed_by"),
        )
        engine = Engine(
            settings,
            source,
            loaded.decoder,
            scorer,
            selecting=scorers.get("selected_by", scorer),
            proposing=scorers.get("proposed_by"),
            encode=loaded.encode,
            check_losses=loaded.check_losses,
        )
        log.info("%s targets; %s tokens a pass", f"{len(sampled):,}", f"{scorer.tokens_per_batch:,}")
        runner = Runner(engine, sampled, folder, progress)
        return Result.of(runner.run(shard, batches))


def _scorer(
    loaded: LoadedModel, contexts: ContextSettings, choices: ChoiceSettings, tokens_per_batch: int | None
) -> Scorer:
    """Of a model that reads the longest context. Raises `UserError` where it cannot."""
    selectors = parse_names(choices.selectors)
    longest = max((contexts.n_context, *contexts.lengths))
    length_name = "N"
    if longest > contexts.n_context:
        length_name = "the longest length"
    elif contexts.before:
        length_name = "N + before"
    loaded.check_context(  # a trial, which takes time
        longest,
        contexts.targets_per_block,
        length_name=length_name,
        gap=contexts.gap,
        drops_tokens=drops_tokens(choices),
        in_cache=leaves_out_of_cache(choices),
        may_keep_in_cache=True,
        by_head=[text for text, name in selectors.items() if name.chooses_by_head] or None,
        changes_embeddings=any(name.changes_embeddings for name in selectors.values()),
    )
    return Scorer(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)


def identity_of(source: Texts, split: str) -> TextsIdentity:
    """What a result says of its texts."""
    return TextsIdentity(
        name=source.name,
        sha256=source.sha256,
        split=split,
        read_with=source.read_with or None,
        documents=len(source.lengths) if source.divided else None,
        special_tokens=source.special_tokens() or None,
    )


def _check_other(other: LoadedModel, loaded: LoadedModel, role: str) -> None:
    """Raise `UserError` where a model that takes part reads other tokens, or selects for its own weights."""
    if other.tokenizer_sha256 != loaded.tokenizer_sha256:
        raise UserError(
            f"{other.name} has another tokenizer than {loaded.name}; give models of the same tokenizer"
        )
    if role == "selected_by" and other.sha256 == loaded.sha256:
        raise UserError(
            f"{loaded.name} would select and evaluate (the weights are the same); cross-fitting takes "
            "models trained from two seeds"
        )
