"""How the report page looks in a real, headless Chromium: legible in light and dark, on a telephone and on paper."""

from pathlib import Path

import pytest

from tests.support.made_up_report import made_up, make_page, readable_records
from tests.support.webdriver import NEEDS_BROWSER, Browser

pytestmark = NEEDS_BROWSER
MANY = (
    "leave-one-out",
    "leave-one-in",
    "greedy",
    "gradient",
    "attention",
    "leave-one-out@gradient:32",
    "best",
    "random",
)
# Contrast (WCAG 2.1) of every element with text of its own against what lies behind it.
CONTRASTS = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const behind = (node) => {
  const colour = channels(getComputedStyle(node).backgroundColor);
  if (colour.length === 4 && colour[3] > 0) throw Error('half transparent');
  return colour.length === 3 ? colour : behind(node.parentElement);
};
const found = [];
for (const node of document.querySelectorAll('body, body *')) {
  const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
  if (!own || !node.checkVisibility() || node.closest('script, [disabled], option')) continue;
  const pair = [light(channels(getComputedStyle(node).color)), light(behind(node))];
  const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  found.push([contrast, `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`]);
}
return found;
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_page(readable_records(60, n_long=256, n_short=32), made_up(MANY)), encoding="utf8")
    return path


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_everything_is_legible(browser: Browser, path: Path, colours: str) -> None:
    browser.open(path.as_uri(), colours=colours)
    browser.set_field("k", 8)
    browser.run("document.querySelector('#text-true .chosen').focus()")
    found = browser.run(CONTRASTS)
    assert len(found) > 300 and any("chosen shade5" in what for _, what in found)
    worst = sorted(found)[:5]
    assert worst[0][0] >= 4.5, worst
    # and without colour: chosen tokens have a border, the short window an underline, the target is inverted
    looks = browser.run("""const style = (name) => getComputedStyle(document.querySelector(`#text-true ${name}`));
      return [style('.chosen').borderTopStyle, style('.short').textDecorationLine,
        style('.target').backgroundColor === style('.short').color]""")
    assert looks[0] in ("solid", "dotted") and looks[1:] == ["underline", True]


def test_light_and_dark(browser: Browser, path: Path) -> None:
    def colours() -> list[str]:
        script = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        return browser.run(script)

    seen = {}
    for name in ("light", "dark"):
        browser.open(path.as_uri(), colours=name)
        seen[name] = colours()
    assert not set(seen["light"]) & set(seen["dark"])
    for system, choice in (("dark", "light"), ("light", "dark")):
        browser.open(path.as_uri(), colours=system)
        browser.set_field("theme", choice)
        assert colours() == seen[choice]
    browser.open(path.as_uri(), colours="light")
    assert browser.run("return document.getElementById('theme').value") == "dark"  # it is remembered
    assert colours() == seen["dark"]
    browser.set_field("theme", "")
    assert colours() == seen["light"]


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_fits_a_telephone(browser: Browser, path: Path, colours: str) -> None:
    browser.open(path.as_uri(), width=400, colours=colours)
    assert browser.run("return [document.documentElement.scrollWidth, window.innerWidth]") == [400, 400]
    too_wide = """return [...document.querySelectorAll('body *')].filter((each) => each.checkVisibility()
      && each.getBoundingClientRect().right > 401 && !each.closest('.canvas, .skip'))
      .map((each) => each.outerHTML.slice(0, 80))"""
    assert browser.run(too_wide) == []


def test_paper_has_no_browser(browser: Browser, path: Path) -> None:
    browser.open(path.as_uri(), colours="dark", media="print")
    script = "return arguments[0].map((each) => document.querySelector(each).checkVisibility())"
    assert browser.run(script, ["#examples", ".contents", "#theme", "#numbers table"]) == [
        False,
        False,
        False,
        True,
    ]
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_heads_of_tables_stay_in_sight_and_other_k_are_folded_away(browser: Browser, path: Path) -> None:
    browser.open(path.as_uri())
    head, bar, left = browser.run("""const [table] = [...document.querySelectorAll('#numbers .table')]
        .filter((each) => each.textContent.includes('k ≤ 1'));
      const last = [...table.querySelectorAll('tr')].at(-3);
      window.scrollTo({ top: scrollY + last.getBoundingClientRect().top - 150, behavior: 'instant' });
      const box = (each) => each.getBoundingClientRect();
      return [box(table.querySelector('thead th')).top, box(document.querySelector('.contents')).bottom,
        box(table.querySelector('tbody')).top]""")
    assert left < 0 and bar - 1 <= head < bar + 6
    assert browser.run(
        "return [...document.querySelectorAll('#numbers details')].map((each) => each.open)"
    ) == [False]


def test_a_telephone_shows_the_narrow_figures(browser: Browser, path: Path) -> None:
    script = "return document.images[0].currentSrc === document.querySelector('picture source').srcset"
    for width, narrow in ((390, True), (1280, False)):
        browser.open(path.as_uri(), width=width)
        assert browser.run(script) is narrow
