"""A model that is to be measured, with its tokenizer and what identifies both in results.

Shapes: T tokens of a text, N tokens of long context, B targets of a block.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jinja2 import TemplateError

from analysis.model.adapter import Adapter
from analysis.model.check import check_long_context
from analysis.model.tokenizer import TOKENIZER, OtherTokenizer, TextDecoder, TextTokenizer
from analysis.settings import ModelIdentity
from analysis.texts import TextReader
from olmo_sparsity.util.errors import UserError, first_line

if TYPE_CHECKING:
    from analysis.texts import Texts

log = logging.getLogger(__name__)

DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "auto": "auto",
}
"""Types that weights are loaded in, by name; auto: as they are stored."""
FOREIGN = 0.85
"""Of the loss of a uniform guess: with more, text and model do not go together. [ours]"""
_ON_ONE_DAY = "{% macro strftime_now(_) %}1 January 2026{% endmacro %}"  # else texts change overnight


@dataclass
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and what identifies both in results."""

    model: Adapter
    """Behind its prefix, if it has one."""
    name: str
    """``PATH``, ``PATH@scheme:factor`` or ``PATH@untrained``; of a run it is the path of its last checkpoint."""
    sha256: str
    """Of the weights: of their files' bytes in order of their names; of a model object, of its tensors."""
    family: str
    """Transformers' model type, such as llama; of a checkpoint of this project see `analysis.project`."""
    tokenizer: TextTokenizer | None = None
    training_seed: int | None = None
    """None where it is unknown."""
    rope_scaling: str | None = None
    """How its RoPE was scaled, such as yarn:4; None: as it was trained."""
    untrained: bool = False
    """Whether its weights are freshly drawn ones."""
    of_project: bool = False
    """Whether this project's trainer made its class."""
    trained: dict[str, Any] = field(default_factory=dict)
    """Of this project's checkpoints: ``training_length``, ``position_scheme``, ``position_target``, what ids reached
    beyond that length (None: they did not), and ``share_of_needles`` in its windows."""
    _before: list[tuple[Any, str, bool]] = field(default_factory=list)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Token ids that stand before every context (docs/method.md, 2.1 [ours])."""
        return self.model.prefix

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def dtype(self) -> str:
        """Type of its weights as results name it: fp32, or such as bf16-weights."""
        of_weights = next(self.model.parameters()).dtype
        name = {dtype: name for name, dtype in DTYPES.items()}.get(of_weights, str(of_weights))
        return name if name == "fp32" else f"{name}-weights"

    @property
    def reach_factor(self) -> float:
        """How many times as far its RoPE is scaled to reach."""
        return float(self.rope_scaling.partition(":")[2]) if self.rope_scaling else 1.0

    @property
    def reads(self) -> int | None:
        """How many tokens it reads: its training reached, or its configuration names, so many, times `reach_factor`."""
        trained = self.trained.get("position_target") or self.trained.get("training_length")
        reach = trained or self.model.max_positions
        return int(self.reach_factor * reach) if reach else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of the tokenizer.json; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.sha256

    @property
    def identity(self) -> ModelIdentity:
        """What identifies it in the settings of a measurement."""
        return ModelIdentity(
            name=self.name,
            sha256=self.sha256,
            family=self.family,
            parameters=self.parameters,
            training_seed=self.training_seed,
            tokenizer_sha256=self.tokenizer_sha256,
            prefix=tuple(self.prefix),
            rope_scaling=self.rope_scaling,
            dtype=self.dtype,
        )

    def _its_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.name} has no {TOKENIZER}; copy it there, or give the tokenizer: --tokenizer PATH, in Python "
                "(model, tokenizer)"
            )
        return self.tokenizer

    @property
    def reader(self) -> TextReader:
        """How it reads texts. Raises `UserError` without a tokenizer."""
        tokenizer = self._its_tokenizer()
        return TextReader(
            encode=self.encode,
            chat=self.chat,
            special=tokenizer.special,
            boundaries=tokenizer.boundaries,
            prefix=self.prefix,
            decode=tokenizer.decode,
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens around it.

        Raises `UserError` without a tokenizer, and for ids that the model has no embedding of.
        """
        tokens = self._its_tokenizer().encode(text)
        self.check_ids(tokens)
        return tokens

    def check_ids(self, ids: Sequence[int] | np.ndarray) -> None:
        """Raise `UserError` where the model has no embedding of one of some token ids."""
        largest = max(map(int, ids), default=0)
        embeddings = self.model.vocabulary_size
        if largest >= embeddings:
            token = repr(self.tokenizer.decode([largest])) if self.tokenizer else "a token"
            raise UserError(
                f"{token} has the id {largest:,}, and {self.name} has embeddings of {embeddings:,} tokens; give the "
                "model's own tokenizer, or one whose added tokens it has learned (model.resize_token_embeddings)"
            )

    def chat(self, messages: list[dict[str, Any]]) -> tuple[str, list[bool]]:
        """A conversation as the chat template writes it, and whether each token is of a message's content, (T,).

        Special tokens never are. A prefix at its beginning is left out: one stands before every context. Raises
        `UserError` for what is no conversation, and without a template that leaves contents as they are, but for space.
        """
        text_tokenizer = self._its_tokenizer()
        tokenizer = text_tokenizer.tokenizer
        template_tokenizer = text_tokenizer.with_template
        if isinstance(text_tokenizer, OtherTokenizer):
            raise UserError(
                f"{self.name}: the tokenizer ({type(tokenizer).__name__}) does not say where in a text its tokens are; "
                "conversations need a fast tokenizer of transformers; write them out as text"
            )
        if getattr(template_tokenizer, "chat_template", None) is None:
            raise UserError(f"{self.name} has no chat template; add chat_template.jinja to it, or give text")
        prefix = tokenizer.decode(list(self.prefix), skip_special_tokens=False)
        beginning = str(messages)[:120]
        try:
            template = _ON_ONE_DAY + template_tokenizer.get_chat_template()
            write = partial(template_tokenizer.apply_chat_template, chat_template=template, tokenize=False)
            contents = [rf"(\s*{re.escape(message['content'].strip())}\s*)" for message in messages]
            marked = [{**message, "content": f"\ue000{n}\ue000"} for n, message in enumerate(messages)]
            text, pattern = (write(chat).removeprefix(prefix) for chat in (messages, marked))
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"no messages with role and content as text that fit the template ({first_line(error)})"
            raise UserError(f"{beginning!r}: {why}; fix or drop them") from None
        pattern = re.sub("\ue000(\\d+)\ue000", lambda mark: contents[int(mark[1])], re.escape(pattern))
        if (match := re.fullmatch(pattern, text)) is None or match.re.groups != len(messages):
            raise UserError(
                f"{beginning!r}: the chat template changes or drops a content, such as what a model thought; give the "
                "messages as the template leaves them (without <think> … </think>), or drop the conversation"
            )
        tokens = tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(tokens.offsets).T
        starts = np.minimum(starts, [0, *ends[:-1]])  # some tokenizers leave out the space before a word
        spans = map(match.span, range(1, match.re.groups + 1))
        inside = np.any([(first <= starts) & (ends <= end) for first, end in spans], axis=0)
        return text, (inside & ~np.isin(tokens.ids, list(text_tokenizer.special))).tolist()

    @property
    def decoder(self) -> TextDecoder:
        """The text of token ids. Raises `UserError` without a tokenizer."""
        return self._its_tokenizer().decoder

    def check_texts(self, texts: Texts) -> None:
        """Raise `UserError` where texts are a corpus of another tokenizer, or of ids without an embedding."""
        if getattr(texts, "tokenizer_sha256", self.tokenizer_sha256) != self.tokenizer_sha256:
            raise UserError(
                f"{texts.name} was made with another tokenizer.json than {self.name} has; prepare the text with the "
                f"model's, or, where both do the same, give --tokenizer {texts.name}/{TOKENIZER}"
            )
        if getattr(texts, "vocabulary_size", 0) > self.model.vocabulary_size:
            self.check_ids([int(texts.tokens(n).max(initial=0)) for n in range(len(texts.lengths))])

    def check_context(self, n_long: int, targets_per_block: int = 1, **uses: Any) -> None:
        """Raise `UserError` where it cannot be measured on N tokens; ``uses``: as of `check_long_context`."""
        name = f"{self.name} ({self.family})"
        reach = None if self.untrained else self.reads
        check_long_context(self.model, n_long, targets_per_block, name=name, reach=reach, **uses)

    def check_losses(self, losses: np.ndarray) -> None:
        """Warn where losses in nats, such as L_long of some targets, are nearly those of a uniform guess."""
        ceiling = math.log(self.model.vocabulary_size)
        mean = float(losses.mean())
        if mean > FOREIGN * ceiling and not self.untrained:
            log.warning(
                "the mean loss given the long context is %.2f nats, where a uniform guess has %.2f: the tokenizer is "
                "perhaps not the model's, or the text is of a language that it has not learned",
                mean,
                ceiling,
            )

    def __enter__(self) -> Self:
        """Put it into evaluation mode again, which leaving it may have undone."""
        self.model.eval().requires_grad_(False)
        return self

    def __exit__(self, *error: object) -> None:
        """Put a model object of the caller back as it came: modules that were training, weights with gradients."""
        for part, name, value in self._before:
            setattr(part, name, value)
