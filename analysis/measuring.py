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
from analysis.engine import PLACEBOS, SELECTORS, Engine, check_options, targets_per_batch
from analysis.faithfulness import SUBSET_KEEP_RATE, SUBSETS
from analysis.model.loaded import LoadedModel
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.runner import Run
from analysis.sampling import sample_targets
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

_IDENTITY = ("model", "model_sha256", "training_seed", "rope_scaling")
"""What settings say of another model that takes part."""


def measure(
    model: Any,
    texts: Any,
    *,
    n_long: int = 128,
    n_short: int = 16,
    targets: int = 1000,
    targets_per_block: int = 16,
    tau_nats: float = 1.0,
    ks: Sequence[int] = (1, 2, 4, 8),
    selectors: Sequence[str] = SELECTORS,
    placebos: Sequence[str] = PLACEBOS[:1],
    give_back: Sequence[str] = ("text",),
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
    batches: Sequence[int] | None = None,
    progress: bool = True,
) -> Result:
    """How much far context helps a model on sampled targets, and how much of that k influential far tokens give back.

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
        tau_nats: tau.
        ks: numbers of tokens, ascending.
        selectors: names of `analysis.selectors`, or screened forms such as ``leave-one-out@gradient:32``.
        placebos: far contexts beside the true one, of `PLACEBOS`.
        give_back: how chosen tokens are given back: text; or cache, where the whole context is read and only their keys
            and values are left; maybe with sinks or as words, such as cache:4 or text/word (`analysis.kept`).
        prefix: what stands before every context: auto (what the tokenizer puts before a text), none, bos, eos, or ids.
        seed: of everything that is drawn.
        tokenizer: a tokenizer.json, or the path of one, where the model has none.
        dtype: fp32, bf16, fp16 or auto (as stored).
        device: cpu, cuda, cuda:1, …; by default a GPU where there is one.
        attn_implementation: of transformers.
        tokens_per_batch: tokens of one forward pass, by default 1,024 on a CPU and 65,536 on a GPU; halved where memory
            runs out. Results depend on it by rounding only.
        out: folder to write to as batches are finished: the same call goes on after an interruption. None: all stays in
            memory.
        shard: "i/n", measure this share of the batches; ``out`` is the same for all, and whole once all are finished.
        split: of a prepared corpus.
        select_with: cross-fitting: the model that chooses targets and tokens, trained from another seed.
        propose_with: a smaller model of the same tokenizer, which proposes the tokens for screened selectors.
        faithfulness: also measure comprehensiveness, random subsets (LDS) and shorter contexts (docs/method.md, 2.8).
        scores: also keep the influence of every far token.
        batches: measure only batches of these numbers, such as to verify a result.
        progress: show it on standard error.

    Where no target is over tau the result has no choices, and says how much the largest gain is; the same call with a
    lower ``tau_nats`` takes the losses of the targets from ``out``.

    Raises `UserError` where model, texts and settings do not go together, a loss is not finite, or ``out`` has another
    measurement.
    """
    n_long = arguments.whole_number("n_long", n_long)
    n_short = arguments.whole_number("n_short", n_short)
    targets = arguments.whole_number("targets", targets)
    targets_per_block = arguments.whole_number("targets_per_block", targets_per_block)
    tau_nats = arguments.finite_number("tau_nats", tau_nats)
    ks = arguments.whole_numbers("ks", ks)
    selectors = arguments.names("selectors", selectors)
    placebos = arguments.names("placebos", placebos)
    give_back = arguments.names("give_back", give_back)
    seed = arguments.whole_number("seed", seed, least=0)
    if tokens_per_batch is not None:
        tokens_per_batch = arguments.whole_number("tokens_per_batch", tokens_per_batch)
    folder = None if out is None else arguments.folder("out", out)
    check_options(n_long, n_short, ks, selectors, placebos, give_back)
    drawing = {"n_long": n_long, "n_short": n_short, "seed": seed, "targets_per_block": targets_per_block}
    opening: Any = {"tokenizer": tokenizer, "prefix": prefix, "dtype": dtype, "device": device}
    with ExitStack() as stack:

        def opened(name: Any) -> LoadedModel:
            return stack.enter_context(open_model(name, attn_implementation=attn_implementation, **opening))

        def scorer_of(loaded: LoadedModel) -> Scorer:
            loaded.check_context(n_long, targets_per_block)  # a trial, which takes time
            return Scorer(loaded.model, device=loaded.device, tokens_per_batch=tokens_per_batch)

        loaded = opened(model)
        source = open_texts(texts, loaded.reader, split=split)
        loaded.check_texts(source)
        places = sample_targets(source, targets, same_group=SAME_GROUP in placebos, **drawing)
        settings: dict[str, Any] = {
            **loaded.describe(),
            "texts": source.name,
            "texts_sha256": source.sha256,
            "split": split,
            **drawing,
            "tau_nats": tau_nats,
            "ks": list(ks),
            "selectors": list(selectors),
            "far_contexts": ["true", *(name for name in PLACEBOS if name in placebos)],
            "give_back": list(give_back),
            "targets_requested": targets,
            "scores": scores,
            "faithfulness": faithfulness,
            "subsets": SUBSETS if faithfulness else None,
            "keep_rate": SUBSET_KEEP_RATE if faithfulness else None,
            "special_tokens": source.special_tokens() or None,
            "documents": len(source.lengths) if source.divided else None,
            "read_with": source.read_with or None,
            "selected_by": None,
            "proposed_by": None,
            "complete": False,
        }
        scorer = scorer_of(loaded)
        scorers: dict[str, Scorer] = {}
        for role, name in {"selected_by": select_with, "proposed_by": propose_with}.items():
            if name is not None:
                other = opened(name)
                _check_other(other, loaded, role)
                settings[role] = {named: other.describe()[named] for named in _IDENTITY}
                settings[role]["untrained"] = other.untrained
                scorers[role] = scorer_of(other)
        engine = Engine(
            settings,
            source,
            loaded.decoder,
            scorer,
            selecting=scorers.get("selected_by", scorer),
            proposing=scorers.get("proposed_by"),
            check_losses=loaded.check_losses,
        )
        log.info("%s targets; %s tokens a pass", f"{len(places):,}", f"{scorer.tokens_per_batch:,}")
        size = targets_per_batch(targets_per_block)
        run = Run(engine.measure, size, places, settings, folder, progress)
        return Result.of(run.measure(shard, batches))


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
