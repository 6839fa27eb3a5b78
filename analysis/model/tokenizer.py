"""A model's tokenizer as measurements need it: token ids of a text, and the text of each token.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import read_json, sha256_file, user_path
from olmo_sparsity.util.special_tokens import BEGIN_OF_TEXT, END_OF_TEXT

TOKENIZER = "tokenizer.json"
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or none yet."""
_REMEMBERED = 1 << 17
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that a configuration of transformers names."""
_UNKNOWN = "\ua66e"
"""A letter of one manuscript: a vocabulary of words or characters does not have it."""


def read_tokenizer(tokenizer: Any) -> TextTokenizer:
    """A tokenizer as measurements need it.

    Args:
        tokenizer: the path of a tokenizer.json or of a folder with a tokenizer, or an object: of the libraries
            tokenizers or transformers, or any other with methods ``encode(text)`` and ``decode(ids)``.

    Raises `UserError` for what is none, or cannot be read.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        path = user_path(tokenizer)
        if path.is_dir() and not (path / TOKENIZER).is_file():
            return read_tokenizer(_of_folder(path))
        return TextTokenizer(path / TOKENIZER if path.is_dir() else path)
    if isinstance(getattr(tokenizer, "backend_tokenizer", tokenizer), Tokenizer):
        return TextTokenizer(tokenizer)
    return OtherTokenizer(tokenizer)


def _of_folder(path: Path) -> Any:
    """The tokenizer of a folder without a tokenizer.json, as transformers loads it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many libraries
        raise UserError(
            f"{path} has no {TOKENIZER}, and no other tokenizer that transformers can load ({first_line(error)}); copy "
            "one there, or give the tokenizer"
        ) from error


class TextTokenizer:
    """A tokenizer of the tokenizers library: without special tokens around a text, padding and truncation.

    Args:
        tokenizer: the path of a tokenizer.json, or an object of the tokenizers library, or a fast one of transformers.
            Padding and truncation are switched off in the object.
    """

    sha256: str
    """Of the tokenizer.json, or of the one that the object would save."""

    def __init__(self, tokenizer: Any):
        self._source = tokenizer
        self._config: dict[str, Any] = {}
        sha256 = None
        if isinstance(tokenizer, str | Path):
            tokenizer, sha256 = self._open(Path(tokenizer))
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.sha256 = sha256 or hashlib.sha256(self.tokenizer.to_str(pretty=True).encode()).hexdigest()

    def _open(self, path: Path) -> tuple[Tokenizer, str]:
        """The tokenizer of a file and the SHA-256 of its bytes; reads the configuration beside it, too."""
        if not path.is_file():
            raise UserError(
                f"{path} is no tokenizer.json and no folder with a tokenizer; give the path of one"
            )
        beside = path.with_name("tokenizer_config.json")
        if beside.is_file():
            self._config = read_json(beside, "save the tokenizer again")
        try:
            return Tokenizer.from_file(str(path)), sha256_file(path)
        except Exception as error:  # the library raises bare ones
            raise UserError(
                f"{path} is no tokenizer.json of the tokenizers library ({first_line(error)}); save it again"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens around it."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def with_template(self) -> Any:
        """The same one with its chat template: what was given, or of transformers where that is a path."""
        from transformers import PreTrainedTokenizerFast as Fast

        if isinstance(self._source, str | Path):
            return Fast.from_pretrained(Path(self._source).parent, local_files_only=True)
        return self._source

    @cached_property
    def decoder(self) -> TextDecoder:
        """The text of token ids, token by token."""
        return TextDecoder(self.decode)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of the tokens that it calls special."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        further = self._config.get("additional_special_tokens")
        named = [self._config.get(f"{name}_token") for name in _NAMED]
        named += further if isinstance(further, list) else []
        ids = [self._id_of(_content(token)) for token in named]
        ids += [token_id for token_id, token in added if token.special]
        ids += getattr(self._source, "all_special_ids", None) or ()
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def boundaries(self) -> frozenset[int]:
        """Ids of the special tokens that end or begin a document [ours].

        They are those with the usual names, and its EOS token where it has no chat template, in which that may end a
        turn instead. One that stands for unknown words, too, ends none.
        """
        ids = self._ids_with_usual_names()
        if not self._has_template():
            ids |= self.named("eos")
        try:
            unknown = frozenset(self.encode(_UNKNOWN).tolist())
        except Exception:  # the library's, of a vocabulary without a token for unknown words
            unknown = frozenset()
        return (self.special & ids) - unknown

    def named(self, name: str) -> set[int]:
        """Ids of what it calls its token ``name``, such as bos: none, one or more."""
        token = self._config.get(f"{name}_token") or getattr(self._source, f"{name}_token", None)
        token_id = self._id_of(_content(token))
        return set() if token_id is None else {token_id}

    def _ids_with_usual_names(self) -> set[Any]:
        return {self._id_of(name) for name in (*END_OF_TEXT, *BEGIN_OF_TEXT)}

    def _has_template(self) -> bool:
        if not isinstance(self._source, str | Path):
            return bool(getattr(self._source, "chat_template", None))
        is_beside = Path(self._source).with_name("chat_template.jinja").is_file()
        return is_beside or "chat_template" in self._config

    def _id_of(self, token: str | None) -> int | None:
        """Id of a token by its text; None where there is none."""
        return None if token is None else self.tokenizer.token_to_id(token)

    @cached_property
    def added_before(self) -> tuple[int, ...]:
        """Special tokens that it puts before every text, by its post-processor or its configuration."""
        before = _before(self.encode("a").tolist(), self.tokenizer.encode("a").ids)
        if before or not self._config.get("add_bos_token"):
            return before
        token = self._id_of(_content(self._config.get("bos_token")))
        return () if token is None else (token,)


def _content(token: Any) -> str | None:
    """The text of a token that a configuration names, as a string, a dict or an object with it; None for none."""
    text = token.get("content") if isinstance(token, Mapping) else getattr(token, "content", token)
    return text if isinstance(text, str) else None


def _around(ids: list[int], of_nothing: list[int]) -> tuple[int, int] | None:
    """How many of the ids of an empty text stand before and behind those of a text; None where they do not."""
    before = len(os.path.commonprefix([ids, of_nothing]))  # noqa: RUF071 (of ids, as it is meant here)
    after = len(of_nothing) - before
    is_around = of_nothing and ids[len(ids) - after :] == of_nothing[before:]
    return (before, after) if is_around else None


def _before(plain: list[int], whole: list[int]) -> tuple[int, ...]:
    """What stands before the ids of a text among the ids with special tokens around it."""
    starts = range(len(whole) - len(plain) + 1)
    first = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
    return tuple(whole[:first])


class OtherTokenizer(TextTokenizer):
    """A tokenizer of any other library, or of one's own, read through its public methods.

    Those are ``encode(text)`` or a call of the object, which give the ids (or a mapping with ``input_ids``), and
    ``decode(ids)``. Options of transformers and tiktoken are passed where they are taken, and attributes such as
    ``all_special_ids`` are read where they are there. A tokenizer that cannot leave out the tokens around a text has
    them cut off: what it makes of an empty one, or else the special ones.
    """

    sha256: str
    """Of its vocabulary where it has one, and of what it makes of a few texts: it has no file."""

    def __init__(self, tokenizer: Any):
        encode = getattr(tokenizer, "encode", tokenizer)
        is_class = isinstance(tokenizer, type)
        if is_class or not callable(encode) or not callable(getattr(tokenizer, "decode", None)):
            what = f"the class {tokenizer.__name__}" if is_class else f"a {type(tokenizer).__name__}"
            raise UserError(
                f"{what} is no tokenizer: it must have encode(text), which gives token ids, and decode(ids); give the "
                "path of a tokenizer.json, or an object with both"
            )
        self._source = tokenizer
        self.tokenizer = tokenizer
        self._encode_whole = _with_options(encode, add_special_tokens=True, allowed_special="all")
        self._encode = _with_options(encode, add_special_tokens=False, allowed_special="all")
        self._decode = _with_options(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        some = self._ids(self._encode, "a")
        of_nothing = self._ids(self._encode, "").tolist()
        self._around = _around(some.tolist(), of_nothing) or self._special_around(some)
        text = self.decode(some.tolist())
        if not isinstance(text, str):
            raise UserError(
                f"the tokenizer ({type(tokenizer).__name__}) makes {str(text)[:60]} of token ids, a "
                f"{type(text).__name__}; its decode(ids) must give a string"
            )
        identity = [
            type(tokenizer).__name__,
            tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None,
            *(
                self.encode(text).tolist()
                for text in ("The quick brown fox, 1 2 3.\n", "äß жи 你 \U0001f642")
            ),
        ]
        written = json.dumps(identity, sort_keys=True, default=str)
        self.sha256 = hashlib.sha256(written.encode(errors="backslashreplace")).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """See `TextTokenizer`. Raises `UserError` where the tokenizer gives no ids."""
        before, after = self._around
        ids = self._ids(self._encode, text)
        return ids[before : len(ids) - after]

    def _ids(self, encode: Callable[[str], Any], text: str) -> np.ndarray:
        """What ``encode`` gives for a text, (T,) int64."""
        encoded = encode(text)
        is_mapping = isinstance(encoded, Mapping)
        ids = np.asarray(encoded.get("input_ids") if is_mapping else getattr(encoded, "ids", encoded))
        ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
        if ids.size == 0:
            return np.empty(0, dtype=np.int64)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
            raise UserError(
                f"the tokenizer ({type(self.tokenizer).__name__}) gives {str(encoded)[:60]} for a text; its "
                "encode(text) must give a list of token ids, whole numbers from 0"
            )
        return ids.astype(np.int64)

    def _special_around(self, ids: np.ndarray) -> tuple[int, int]:
        """How many special tokens stand at the beginning and at the end of a text that spells out none."""
        inside = np.flatnonzero(~np.isin(ids, list(self.special)))
        return (int(inside[0]), int(len(ids) - 1 - inside[-1])) if len(inside) else (0, 0)

    def decode(self, ids: Sequence[int]) -> str:
        """See `TextTokenizer`."""
        text: str = self._decode(list(ids))
        return text

    @cached_property
    def with_template(self) -> Any:
        """The tokenizer itself."""
        return self._source

    @cached_property
    def special(self) -> frozenset[int]:
        """See `TextTokenizer`; none where it does not say."""
        if hasattr(self.tokenizer, "special_tokens_set"):  # tiktoken
            return frozenset(map(self.tokenizer.encode_single_token, self.tokenizer.special_tokens_set))
        return frozenset(getattr(self.tokenizer, "all_special_ids", None) or ())

    def named(self, name: str) -> set[int]:
        """See `TextTokenizer`."""
        ids = getattr(self.tokenizer, f"{name}_token_id", None)
        return set() if ids is None else set(np.atleast_1d(ids).tolist())

    def _ids_with_usual_names(self) -> set[Any]:
        usual = {*END_OF_TEXT, *BEGIN_OF_TEXT}
        return {token_id for token_id in self.special if self.decode([token_id]).strip() in usual}

    @cached_property
    def added_before(self) -> tuple[int, ...]:
        """See `TextTokenizer`."""
        whole = self._ids(self._encode_whole, "a").tolist()
        return _before(self.encode("a").tolist(), whole)


def _with_options(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The method with those of the options that it takes."""
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:  # of a compiled one, which does not say
        return method
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return partial(method, **{name: options[name] for name in options if takes_any or name in parameters})


# --- the text of token ids, for any tokenizer: all that it must be able to do is decode ---


class TextDecoder:
    """Splits the text of a token sequence into one piece per token.

    No offsets are read, which many tokenizers do not have: the text of a token is what it adds to the decoded text of
    those before it.

    Args:
        decode: the text of a list of token ids, special tokens included and spaces as they are.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = lambda ids: decode(list(ids))
        # Text is mostly pairs of tokens that were met before; decoding is what costs.
        self._decode_few = lru_cache(maxsize=_REMEMBERED)(self._decode)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per token; joined they are the decoded text of the whole sequence.

        Special tokens are shown by their own text. A character whose bytes are spread over several tokens belongs to
        the token that completes it, and the others get "" for it. Bytes that never become a character, as at the two
        ends of a window that cuts one, are shown as `BROKEN`, as the tokenizer's decoder shows them, at the first
        token that has some of them.
        """
        whole = tuple(map(int, ids))
        pieces: list[str] = []
        # A few tokens at a time, so that a long sequence costs no more per token than a short one. A group is the
        # tokens that complete a character together, mostly a single one. It is seen behind the group before it,
        # because decoders treat the first token apart (they drop its leading space).
        before = start = 0
        for end in range(1, len(whole) + 1):
            is_open = self._decode_few(whole[before:end]).endswith(BROKEN)
            if end == len(whole) or not is_open:
                pieces += _additions(self._decode_few, whole[before:end])[start - before :]
                before, start = start, end
        if "".join(pieces) == self._decode(whole):
            return pieces
        # Some decoders let a token change text far before it: a run of byte tokens that is cut at its end loses all
        # its characters. Each token is then seen behind all those before it, at quadratic cost.
        return _additions(self._decode, whole)


def _additions(decode: Callable[[tuple[int, ...]], str], ids: tuple[int, ...]) -> list[str]:
    """What each token adds to the text: the part of it that stands once the token is there, and not before."""
    text = decode(ids)
    standing = [0]
    for end in range(1, len(ids)):
        common = os.path.commonprefix([decode(ids[:end]), text])  # noqa: RUF071 (of characters, as it is meant here)
        standing.append(max(standing[-1], len(common)))
    return [text[start:end] for start, end in pairwise([*standing, len(text)])]
