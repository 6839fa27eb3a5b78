"""What several tests of pages share: one browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.webdriver import Browser, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found
