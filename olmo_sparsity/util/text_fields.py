"""The fields of a row of text: its text, and the book or site that it is a part of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from olmo_sparsity.util.errors import UserError

URL_FIELD, NO_GROUPS = "url", "none"
MESSAGES_FIELD = "messages"
JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def group_of_url(url: str) -> str:
    """The work or site that a document with this ``url`` is a part of, in C4's layout.

    Web crawls have no fragments (``#…``), so one was put there to tell the parts of a work from each other: a number
    at its end counts slices of one work, and any other fragment is a part of the page before it. Without a
    fragment it is the site: the host, without "www.". What is no web address is a name already.
    """
    if not re.match("https?://", url, re.IGNORECASE):
        return url
    page, _, fragment = url.partition("#")
    if fragment:
        name = re.sub(r"-\d+$", "", fragment)
        return page if name == fragment else f"{page}#{name}"
    try:
        return (urlsplit(url).hostname or url).removeprefix("www.")
    except ValueError:  # a bracket without its partner
        return url


@dataclass(frozen=True)
class Fields:
    """Which fields of a row are its text and its group."""

    text: str = "text"
    group: str | None = None
    """Must be in every row; `NO_GROUPS`: there are no groups; None: the first of ``usual_groups`` that a row has."""
    usual_groups: tuple[str, ...] = ("group", URL_FIELD)

    @property
    def groups(self) -> tuple[str, ...]:
        """Fields that may name the group."""
        if self.group is None:
            return self.usual_groups
        return () if self.group == NO_GROUPS else (self.group,)

    def text_of(self, location: str, row: Any, *, or_messages: bool = False) -> Any:
        """The text of a row, or, with ``or_messages``, the list of ``messages`` of one without a text.

        Half an emoji (a lone surrogate, which JSON may have and UTF-8 may not) becomes a question mark. Raises
        `UserError`, which begins with ``location``, for any other row.
        """
        if not isinstance(row, dict):
            kind = JSON_TYPES.get(type(row), "a number")
            raise UserError(f'{location} is {kind}, not one JSON object with a string "{self.text}"; fix it')
        text = row.get(self.text)
        if isinstance(text, str):
            return _well_formed(text)
        takes_messages = or_messages and self.text == "text"
        messages = row.get(MESSAGES_FIELD)
        if text is None and isinstance(messages, list):
            if takes_messages:
                if not messages or not all(isinstance(message, dict) for message in messages):
                    raise UserError(
                        f'{location}: "messages" must be objects with "role" and "content", one at least; fix it, or '
                        "leave it out"
                    )
                return json.loads(_well_formed(json.dumps(messages, ensure_ascii=False, default=str)))
            if not or_messages:
                raise UserError(
                    f"{location} has no text but messages, which only `measure` reads; write them out as text"
                )
        if self.text in row:
            kind = JSON_TYPES.get(type(text), "a number")
            raise UserError(
                f'{location}: "{self.text}" is {kind}, not a string; fix it, leave it out, or name another field with '
                f"{advice('--text-field', 'NAME')}"
            )
        missing = "text and no list of messages" if takes_messages else f'field "{self.text}"'
        hint = ""
        for name, value in row.items():
            if isinstance(value, list) and value and isinstance(value[0], dict) and name != MESSAGES_FIELD:
                hint = f'if the texts are in "{name}", write that list as a separate file, or '
        raise _lacks(location, missing, row, "--text-field", hint)

    def group_of(self, location: str, row: dict[str, Any]) -> str | None:
        """What names the group of a row: of a ``url`` its site or work; None where the text stands by itself.

        Null, NaN and the empty string name none: then the next usual field is read.
        Raises `UserError` where a row does not have the field that is named.
        """
        for name in self.groups:
            value = row.get(name)
            if name == self.group and name not in row:
                raise _lacks(location, f"{name} to name its group", row, "--group-field")
            is_nan = isinstance(value, float) and math.isnan(value)
            if value is not None and value != "" and not is_nan:
                group = _well_formed(value if isinstance(value, str) else json.dumps(value, default=str))
                return group_of_url(group) if name == URL_FIELD else group
        return None

    def check_columns(self, location: str, columns: Sequence[str], hint: str = "") -> None:
        """Raise `UserError` where a table lacks the columns of its texts or named groups, or has one twice."""
        for name, option in ((self.text, "--text-field"), (self.group, "--group-field")):
            if name is not None and name != NO_GROUPS and name not in columns:
                raise _lacks(location, f'column "{name}"', columns, option, hint)
        for name in (self.text, *self.groups):
            if columns.count(name) > 1:
                raise UserError(f'{location} has the column "{name}" twice; rename one of them')


USUAL_FIELDS = Fields()
"""A text in ``text``, its group in ``group`` or ``url``."""


def _lacks(location: str, missing: str, present: Iterable[str], option: str, hint: str = "") -> UserError:
    """The error for a row or table without a field that is needed; it lists the ``present`` fields."""
    remedy = advice(option, "NAME")
    if option == "--group-field":
        remedy += f", or give {option} {NO_GROUPS}"
    return UserError(
        f"{location} has no {missing} (it has {listed(list(present))}); {hint}name another with {remedy}"
    )


def listed(names: Sequence[str]) -> str:
    """The first names, on one line; a name may be a whole text that was taken for a header."""
    shown = [
        name if len(name) <= 40 else f"{name[:40]}…" for name in (" ".join(n.split()) for n in names[:8])
    ]
    if len(names) > len(shown):
        shown.append("…")
    return ", ".join(shown) or "no fields"


def advice(option: str, value: str) -> str:
    """An option with its value, and the same in Python."""
    return f'{option} {value} (in Python: TextFiles(..., {option[2:].replace("-", "_")}="{value}"))'


def _well_formed(text: str) -> str:
    """``text`` with lone surrogates (half an emoji; legal in JSON, not in UTF-8) replaced by question marks."""
    return text if text.isascii() else text.encode("utf8", "replace").decode("utf8")
