"""The page of an influence map as a file: nothing in it can break out or be loaded."""

import base64
import hashlib
import html as markup
import json
import re

import pytest

from tests.support.xrays import made_map


@pytest.mark.parametrize(
    "text",
    [
        "</script ><script>window.hacked = 1</script><img src=x onerror='hacked=1'><!--&lt;\u2028",
        "<!--<script>",
        "\\u003c/script>",
    ],
)
def test_text_of_others_stays_text_and_only_our_script_may_run(text: str) -> None:
    xray = made_map(40, [text, "\n", "", " "] * 10)
    xray.about["model"] = text
    html = xray.to_html(command=text)
    assert html == xray.to_html(command=text)
    assert html.count("<script") == html.count("</script") == 2 and html.count("<img") == 1
    style, script = (
        re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]  # type: ignore[index]
        for tag in ("style", "script")
    )
    policy = markup.unescape(html.split('Policy" content="')[1].split('"')[0])
    for name, part in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    data = re.search(r'id="data">(.*?)</script>', html)
    assert data and not set("<>&") & set(data[1]) and json.loads(data[1])["pieces"][0] == text
    assert "<script>" not in xray._repr_html_() and "srcdoc" in xray._repr_html_()


def test_a_map_may_have_no_far_token_over_tau() -> None:
    xray = made_map(30)
    xray.tokens["influence"] = [row * 0 for row in xray.tokens["influence"]]
    assert xray.to_html().count("</html>") == 1
