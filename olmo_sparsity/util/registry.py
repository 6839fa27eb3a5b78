"""What users choose by name: each thing is registered where it is defined."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from olmo_sparsity.util.errors import UserError

Item = TypeVar("Item")


class Registry(dict[str, Item]):
    """Things of one kind by name, in the order in which they were registered.

        SELECTORS: Registry[Selector] = Registry("selector")

        @SELECTORS.register("nearest")
        def nearest(scores): …

    SELECTORS["nearest"] is that function; an unknown name is a `UserError` that lists the names.
    """

    def __init__(self, kind: str, further: str = ""):
        super().__init__()
        self.kind = kind
        """What a user calls such a thing."""
        self.further = further
        """Ends the list of names in an error, such as ", or EXACT@PROPOSER:m"."""

    def register(self, name: str) -> Callable[[Any], Any]:
        """Make what it decorates available by this name.

        Raises `UserError` where it ends a name in a longer one, or is that of something defined in another file.
        """

        def add(item: Any) -> Any:
            check_name(self.kind, name, item, self.get(name))
            self[name] = item
            return item

        return add

    def __missing__(self, name: str) -> Item:
        raise UserError(f"unknown {self.kind} {name!r}; choose from {', '.join(self)}{self.further}")


def check_name(kind: str, name: str, item: Any, former: Any) -> None:
    """Raise `UserError` where ``item`` may not be registered by this name, which ``former`` has, if it is not None.

    What is defined in one file may be registered again: a cell of a notebook is run more than once.
    """
    if not re.fullmatch(r"[^\s:,@/]+", name):
        raise UserError(f"no {kind} can be named {name!r}; leave out blanks and the signs : , @ /")
    if former is not None and getattr(former, "__module__", None) != getattr(item, "__module__", None):
        raise UserError(f"the {kind} {name!r} is there already; register yours by another name")
