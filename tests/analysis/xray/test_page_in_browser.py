"""The page of an influence map in a real, headless Chromium: pointing, clicking, letting go."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from analysis.xray import InfluenceMap
from analysis.xray.page import LEAST_NATS, MOST_NEEDED, _hash
from tests.support.processes import SECONDS, started
from tests.support.xrays import made_map

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LENGTH = 600
# After each event: places of the tokens that are lit up, nats in both lists, and the looks of what is needed.
SEES = """
const lit = (kind) => [...document.querySelectorAll(`#text .${kind}`)];
const places = (kind) => lit(kind).map((each) => Number(each.dataset.at));
const listed = (name) => [...document.querySelectorAll(`#${name} button`)]
  .map((each) => [Number(each.dataset.at), each.querySelector('b').textContent]);
const looks = (each) => [Number(each.dataset.at), each.className, getComputedStyle(each, '::after').content];
const sees = () => ({ at: places('at'), need: places('need'), serve: places('serve'), over: places('over'),
  needs: listed('needs'), serves: listed('serves'), looks: lit('need').map(looks),
  hint: document.querySelector('.hint').checkVisibility() });
const seen = EVENTS.map(([kind, where]) => {
  const event = kind === 'keydown' ? new KeyboardEvent(kind, { key: 'Escape', bubbles: true })
    : new PointerEvent(kind, { bubbles: true });
  document.querySelector(where).dispatchEvent(event);
  return sees();
});
document.body.append(Object.assign(document.createElement('pre'), { id: 'seen', textContent: JSON.stringify(seen) }));
"""


def seen_after(xray: InfluenceMap, events: list[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """What the page shows after each event, (kind, selector of an element); its policy stays in force."""
    script = SEES.replace("EVENTS", json.dumps(events))
    page = xray.to_html().replace("script-src ", f"script-src '{_hash(script)}' ", 1)
    (folder / "xray.html").write_text(
        page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf8"
    )
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --dump-dom"
    )
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), *flags.split(), profile, (folder / "xray.html").as_uri()]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    seen = re.search(r'<pre id="seen">(.*?)</pre>', output, re.DOTALL)
    assert seen, errors
    return json.loads(html.unescape(seen[1]))


def needed(xray: InfluenceMap, t: int) -> dict[int, float]:
    """What the page holds of what a token needs, in nats by place."""
    return {i: nats for i, nats in xray.strongest(t, MOST_NEEDED) if abs(nats) >= LEAST_NATS}


def assert_shows(seen: dict[str, Any], xray: InfluenceMap, t: int) -> None:
    assert seen["at"] == [t] and seen["need"] == sorted(needed(xray, t))
    said = {place: float(nats.replace("−", "-")) for place, nats in seen["needs"]}
    assert list(said) == list(needed(xray, t)) and said == pytest.approx(needed(xray, t), abs=0.006)
    assert seen["serve"] == [later for later in range(t + 1, LENGTH) if t in needed(xray, later)]
    assert {place for place, _ in seen["serves"]} <= set(seen["serve"])
    # the strongest have their nats beside them, and shades follow the size
    looks = {place: (classes, label) for place, classes, label in seen["looks"]}
    for rank, (place, nats) in enumerate(needed(xray, t).items()):
        classes, label = looks[place]
        said = f"{round(nats, 3):+.2f}".replace("-", "−")
        assert label == (f'"{said}"' if rank < 6 else "none")
        steps = sum(nats > step for step in (0, 0.1, 0.3, 1, 3))
        assert (f"shade{steps}" if nats > 0 else "harm") in classes


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (on Debian: apt-get install chromium)")
def test_pointing_lights_up_what_is_needed_and_what_is_served(tmp_path: Path) -> None:
    xray = made_map(LENGTH)
    t = int(xray.over[5])
    first = next(iter(needed(xray, t)))
    leave, escape = ("pointerleave", "#text"), ("keydown", "body")
    events = [leave, ("pointerover", f"#t{t}"), ("pointerover", f"#t{first}"), leave, ("click", f"#t{t}"),
              ("pointerover", f"#t{first}"), leave, escape]  # fmt: skip
    nothing, over_t, over_first, left, _, _, pinned, let_go = seen_after(xray, events, tmp_path)
    assert nothing["hint"] and nothing["over"] == xray.over.tolist()
    assert_shows(over_t, xray, t)
    assert_shows(over_first, xray, first)
    assert t in over_first["serve"]
    assert_shows(pinned, xray, t)  # what was clicked stays
    for seen in (nothing, left, let_go):
        assert seen["at"] == seen["need"] == seen["serve"] == []
