"""Selectors that other packages offer, asked the same question: ContextCite's estimator, and attributions of inseq.

Both packages are optional (`pip install scikit-learn inseq`); what is not installed is left out, in one line.
Shapes: m targets, F far tokens, A ablations.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import partial
from typing import Any

import numpy as np

from analysis.measure.selectors import Question, Selection, Selector, most_influential
from analysis.model.adapters import PositionedCausalLM
from olmo_sparsity.util.streams import Stream

log = logging.getLogger(__name__)

ABLATIONS = (32, 64)
ATTRIBUTIONS = ("saliency", "input_x_gradient", "integrated_gradients")
_LASSO_ALPHA = 0.01  # ContextCite's default
_STEPS = 20  # of integrated gradients


def other_selectors(model: Any) -> dict[str, Selector]:
    """By name, those whose package is installed and that can read this model."""
    found: dict[str, Selector] = {}
    if importlib.util.find_spec("sklearn"):
        found |= {f"ContextCite, {count} ablations": partial(context_cite, count) for count in ABLATIONS}
    else:
        log.info("ContextCite's estimator is left out: pip install scikit-learn")
    if not importlib.util.find_spec("inseq"):
        log.info("inseq's attributions are left out: pip install inseq")
    elif not isinstance(model, PositionedCausalLM):
        log.info("inseq's attributions are left out: give a transformers directory (scripts/export_hf.py)")
    else:
        found |= {f"inseq, {name}": InseqSelector(model, name) for name in ATTRIBUTIONS}
    return found


def context_cite(ablations: int, question: Question) -> Selection:
    """ContextCite (Cohen-Wang et al. 2024, arXiv 2409.00729): a LASSO of the logit on random ablations.

    The sources are the far tokens, of which every ablation keeps half (exactly, so that all have one length; the
    authors keep each with probability a half). Solver and its settings are those of their `LassoRegression`.
    """
    from sklearn.linear_model import Lasso
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    n_far = question.contexts.n_far
    number = question.contexts.target_id[tuple(question.targets.T)]
    kept = np.stack(
        [
            [np.sort(generator.permutation(n_far)[: n_far // 2]) for _ in range(ablations)]
            for target in number.tolist()
            for generator in [np.random.default_rng([Stream.RANDOM_SELECTOR, question.seed, target])]
        ]
    )  # (m, A, F // 2)
    losses = question.losses(kept)
    influence = np.empty((len(losses), n_far))
    for row, (columns, loss) in enumerate(zip(kept, losses, strict=True)):
        masks = np.zeros((ablations, n_far), dtype=np.float32)
        np.put_along_axis(masks, columns, 1.0, axis=1)
        logit = -loss - np.log(-np.expm1(-np.maximum(loss, 1e-12)))  # log p / (1 - p)
        lasso = Lasso(alpha=_LASSO_ALPHA, random_state=0)
        scaler = StandardScaler()
        make_pipeline(scaler, lasso).fit(masks, logit)
        influence[row] = lasso.coef_ / scaler.scale_
    return most_influential(question, influence)


class InseqSelector:
    """An attribution of inseq (Sarti et al. 2023, arXiv 2302.13942), aggregated over a token as inseq does it."""

    def __init__(self, model: PositionedCausalLM, method: str):
        import inseq

        options = {"n_steps": _STEPS} if method == "integrated_gradients" else {}
        self._options: dict[str, Any] = options
        self._model = inseq.load_model(model.model, method, tokenizer=_tokenizer_of_ids(model))

    def __call__(self, question: Question) -> Selection:
        """As any `Selector`; reads the long context at ids 0 … N - 1."""
        influence = np.stack([self._of_target(question, block, place) for block, place in question.targets])
        return most_influential(question, influence)

    def _of_target(self, question: Question, block: int, place: int) -> np.ndarray:
        alone = question.contexts.alone(int(block), int(place))
        context = " ".join(map(_word, alone.tokens[0]))
        found = self._model.attribute(
            context,
            f"{context} {_word(alone.targets[0, 0])}",
            show_progress=False,
            attr_pos_start=alone.n_long,
            **self._options,
        )
        scores = found.aggregate()[0].target_attributions[:, 0]
        assert len(scores) >= alone.n_long
        return scores[: alone.n_far].double().numpy()


def _word(token: int) -> str:
    return f"t{token}"


def _tokenizer_of_ids(model: PositionedCausalLM) -> Any:
    """inseq takes texts only: a tokenizer whose words are token ids, so that it reads exactly the tokens measured."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {_word(token): token for token in range(model.model.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {f"{name}_token": _word(0) for name in ("bos", "eos", "unk", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
