"""What several tests of pages share: one browser for the tests of a file, and pages opened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.webdriver import Browser, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, path: Path) -> Browser:
    """The file's page, at its fixture ``path``, newly opened at a desktop's width in light colours."""
    browser.open(path.as_uri())
    return browser


@pytest.fixture
def open_html(browser: Browser, tmp_path: Path) -> Callable[[str], None]:
    """Opens a page of this text."""

    def open_page(html: str) -> None:
        (tmp_path / "page.html").write_text(html, encoding="utf8")
        browser.open((tmp_path / "page.html").as_uri())

    return open_page
