"""The page of an influence map in a real, headless Chromium: pointing, clicking, letting go."""

from pathlib import Path

import pytest

from analysis.xray import InfluenceMap
from analysis.xray.page import LEAST_NATS, MOST_NEEDED
from tests.support.webdriver import NEEDS_BROWSER, Browser, chromium
from tests.support.xrays import made_map

LENGTH = 600


def lit(page: Browser, kind: str) -> list[int]:
    """Places of the tokens of a class."""
    return page.run(
        "return [...document.querySelectorAll(`#text .${arguments[0]}`)].map((e) => Number(e.dataset.at))",
        kind,
    )


def needed(xray: InfluenceMap, t: int) -> dict[int, float]:
    """What the page holds of what a token needs, in nats by place."""
    return {i: nats for i, nats in xray.strongest(t, MOST_NEEDED) if abs(nats) >= LEAST_NATS}


def listed(page: Browser, name: str) -> dict[int, float]:
    """What a list of the panel says, in nats by place."""
    script = """return [...document.querySelectorAll(`#${arguments[0]} button`)]
      .map((each) => [Number(each.dataset.at), each.querySelector('b').textContent])"""
    return {place: float(said.replace("−", "-")) for place, said in page.run(script, name)}


def assert_shows(page: Browser, xray: InfluenceMap, t: int) -> None:
    assert lit(page, "at") == [t]
    assert lit(page, "need") == sorted(needed(xray, t))
    assert list(listed(page, "needs")) == list(needed(xray, t))
    assert listed(page, "needs") == pytest.approx(needed(xray, t), abs=0.006)
    serves = [later for later in range(t + 1, LENGTH) if t in needed(xray, later)]
    assert lit(page, "serve") == serves
    assert listed(page, "serves").keys() <= set(serves)


@NEEDS_BROWSER
def test_pointing_lights_up_what_is_needed_and_what_is_served(tmp_path: Path) -> None:
    xray, path = made_map(LENGTH), tmp_path / "xray.html"
    xray.to_html(path)
    with chromium(tmp_path / "profile") as page:
        page.open(path.as_uri())
        assert page.requested() == [path.as_uri()]
        points_and_clicks(page, xray)
        assert page.log("browser") == []


def points_and_clicks(page: Browser, xray: InfluenceMap) -> None:
    assert lit(page, "at") == [] and page.run("return document.querySelector('.hint').checkVisibility()")
    over = xray.over.tolist()
    assert lit(page, "over") == over
    t = over[5]
    page.point(f"#t{t}")
    assert_shows(page, xray, t)
    first = next(iter(needed(xray, t)))
    # the strongest have their nats beside them, and shades follow the size
    script = """const token = document.getElementById(`t${arguments[0]}`);
      return [token.className, getComputedStyle(token, '::after').content];"""
    for rank, (place, nats) in enumerate(needed(xray, t).items()):
        looks, said = page.run(script, place)
        label = f"{round(nats, 3):+.2f}".replace("-", "−")
        assert said == (f'"{label}"' if rank < 6 else "none")
        steps = sum(nats > step for step in (0, 0.1, 0.3, 1, 3))
        assert (f"shade{steps}" if nats > 0 else "harm") in looks
    page.point(f"#t{first}")
    assert_shows(page, xray, first)
    assert t in lit(page, "serve")
    page.point("h1")
    assert lit(page, "at") == lit(page, "need") == lit(page, "serve") == []
    page.point(f"#t{t}", click=True)
    page.point(f"#t{first}")
    page.point("h1")
    assert_shows(page, xray, t)  # what was clicked stays
    page.press("Escape")
    page.point("h1")
    assert lit(page, "at") == []
