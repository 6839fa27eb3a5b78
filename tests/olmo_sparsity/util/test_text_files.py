"""Files of text: what is read of every kind, and what is refused, with file and line."""

from __future__ import annotations

import pytest

from olmo_sparsity.util.text_files import group_of_url

BOOK = "https://www.example.org/ebooks/"


@pytest.mark.parametrize(
    ("url", "group"),
    [
        ("http://www.example.com/a/b?c=1", "example.com"),
        ("HTTPS://Example.com:8080/", "example.com"),
        (f"{BOOK}1023#Bleak-House-48", f"{BOOK}1023#Bleak-House"),
        ("https://example.org/project/sympy#sympy/core/add.py", "https://example.org/project/sympy"),
        ("https://example.com/page#", "example.com"),
        ("http://[broken", "http://[broken"),
        ("books/moby-dick-1", "books/moby-dick-1"),
    ],
)
def test_the_site_or_work_of_a_url(url: str, group: str) -> None:
    assert group_of_url(url) == group
