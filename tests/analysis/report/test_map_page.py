"""The page of an influence map as a file: nothing in it can break out or be loaded."""

import base64
import hashlib
import html as markup
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.made_up_map import CONTROLS, SIGNS, made_up_map

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "text",
    [
        "</script ><script>window.hacked = 1</script><img src=x onerror='hacked=1'><!--&lt;\u2028",
        "<!--<script>",
        "\\u003c/script>",
        f"a{CONTROLS}/b",
    ],
)
def test_text_of_others_stays_text_and_only_our_script_may_run(text: str) -> None:
    found = made_up_map(40, [text, "\n", "", " "] * 10)
    found.about["model"] = text
    html = found.to_html(command=text)
    assert html == found.to_html(command=text)
    assert not set(CONTROLS) & set(html)
    assert html.count("<script") == html.count("</script") == 2 and html.count("<img") == 1
    style, script = (
        re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]  # type: ignore[index]
        for tag in ("style", "script")
    )
    policy = markup.unescape(html.split('Policy" content="')[1].split('"')[0])
    for name, each in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    data = re.search(r'id="data">(.*?)</script>', html)
    assert data and not set("<>&") & set(data[1]) and json.loads(data[1])["pieces"][0] == text
    if CONTROLS in text:
        assert f"a{SIGNS}/b" in re.sub(r'<bdi class="sign">(‹\w+›)</bdi>', r"\1", html)


def test_an_installed_package_has_the_parts_of_the_pages() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = ROOT / "analysis" / "report" / "templates"
    parts = {path.relative_to(ROOT / "analysis").as_posix() for path in folder.iterdir()}
    assert {Path(part).name for part in parts} == {
        "map.css", "map.html", "map.js", "notebook.css", "notebook.html",
    }  # fmt: skip
    patterns = setup["package-data"]["analysis"]
    assert all(any(fnmatch(part, pattern) for pattern in patterns) for part in parts)
