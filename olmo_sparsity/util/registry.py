"""What users choose by name: each thing is registered where it is defined."""

from __future__ import annotations

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
        """Make what it decorates available by this name."""

        def add(item: Any) -> Any:
            self[name] = item
            return item

        return add

    def __missing__(self, name: str) -> Item:
        raise UserError(f"unknown {self.kind} {name!r}; choose from {', '.join(self)}{self.further}")
