"""The display of influential tokens: text that wants to be markup, and what is said."""

import errno
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from analysis.records.schema import Targets
from analysis.report.notebook import Choices, InfluentialTokens
from tests.support.made_up_map import CONTROLS, SIGNS

HOSTILE = [
    "</div><script>hacked()</script>",
    '" onmouseover="hacked()" x="',
    "<img src=x onerror=hacked()>",
    "&amp;<b>",
    "'><style>*{}</style>",
    "$\\alpha$",
    "\n\n",
    "",
]


def hostile_result():
    """4 targets behind 6 tokens each; every piece of text wants to be markup."""
    pieces = [f"{piece}{i if piece else ''}" for i, piece in enumerate((HOSTILE * 2)[:12])]
    count, k = 4, 2
    targets = Targets(
        target_id=np.arange(count),
        document=np.zeros(count),
        position=np.arange(count) + 8,
        token=np.arange(count),
        loss_long_nats=np.ones(count),
        loss_short_nats=np.array([3.0, 1.1, 4.0, 9.0]),
        selecting_gain_nats=np.array([2.0, 0.1, 3.0, 8.0]),
        kind=np.array(["name"] * count),
        placebo_document=np.ones(count),
        placebo_start=np.zeros(count),
    )
    choices = Choices(
        np.array([[0, 3], [2, 1], [3, 2]]), np.array([[2.0, 1.0]] * 3), np.array([[2.0, 1.5]] * 3)
    )
    return InfluentialTokens(
        pieces=pieces,
        targets=targets,
        choices={"<i>evil": {"true": choices, "placebo": choices}},
        placebo_pieces=[HOSTILE[:4]] * 3,
        placebo="<b>where</b>",
        n_long=6,
        n_short=2,
        targets_per_block=1,
        tau_nats=1.0,
        k=k,
    )


class Reader(HTMLParser):
    """Elements, attributes, and the text of every region; fails on tags that do not close in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open, self.texts = set(), set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append((tag, ("role", "region") in attrs))
        if self.open[-1][1]:
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(region for _, region in self.open) and self.open[-1][0] != "sup":
            self.texts[-1] += data


def signs_removed(text):
    return text.replace("↵", "").replace("∅", "").replace("␣", "")


def test_text_that_wants_to_be_markup():
    result = hostile_result()
    page = result._repr_html_()
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    table = {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert (
        reader.tags
        <= {"div", "style", "p", "b", "code", "span", "sup", "sub", "bdi", "details", "summary"} | table
    )
    harmless = {"class", "dir", "tabindex", "role", "aria-label", "title", "scope", "colspan", "open"}
    assert reader.attributes <= harmless
    assert signs_removed(reader.texts[0]) == "".join(result.pieces)
    positions = [11, 10, 8]  # those over tau, by gain
    for position, (true, placebo) in zip(
        positions, zip(reader.texts[1::2], reader.texts[2::2], strict=True), strict=True
    ):
        window = result.pieces[position - 6 : position + 1]
        assert signs_removed(true) == "".join(window)
        assert signs_removed(placebo) == "".join([*HOSTILE[:4], *window[4:]])
    assert "http" not in page and "url(" not in page  # nothing is fetched


def test_the_display_says_what_was_found():
    result = hostile_result()
    page = result._repr_html_()
    assert "<b>3 of 4 tokens</b> (75.0 %) are predicted better by more than 1 nat " in page
    assert page.count('class="chosen') == 3 * 2 * 2  # examples, far contexts, tokens
    assert page.count("<details open>") == 1
    # gains 2, 3, 8: saved at k = 1 are 1, 2, 7 of 13; at k = 2: 1.5, 2.5, 7.5
    found = result.summary["selectors"]["<i>evil"]
    assert found[1] == {"recovery": 10 / 13, "placebo_recovery": 10 / 13, "net_recovery": 0.0}
    assert "<td>77</td><td>88</td>" in page
    assert repr(result) == (
        "InfluentialTokens: 3 of 4 targets gain more than 1 nat, 0 lose more (N = 6, M = 2); <i>evil, k = 2: "
        "recovery 88%, placebo 88%, net 0%"
    )
    choices = result.choices["<i>evil"]
    harmful = replace(choices["placebo"], loss_nats=choices["placebo"].loss_nats + 9)
    found = replace(result, choices={"x": {**choices, "placebo": harmful}}).summary["selectors"]["x"]
    assert found[1]["placebo_recovery"] < 0
    assert found[1]["net_recovery"] == found[1]["recovery"]
    alone = replace(result, choices={"x": {"true": result.choices["<i>evil"]["true"]}}, placebo_pieces=[])
    assert "Placebo far context" not in alone._repr_html_()


def test_no_text_can_reorder_the_display():
    """Whatever changes the direction of writing is shown by its name; Arabic and Hebrew stay as they are."""
    result = hostile_result()
    pieces = [f"{piece}שלום{CONTROLS}" for piece in result.pieces]
    changed = replace(
        result,
        pieces=pieces,
        placebo_pieces=[[f"مرحبا{CONTROLS}"] * 4] * 3,
        choices={f"x{CONTROLS}": result.choices["<i>evil"]},
        placebo=CONTROLS,
    )
    page = changed._repr_html_()
    assert not set(CONTROLS) & set(page)
    reader = Reader()
    reader.feed(page)
    assert signs_removed(reader.texts[0]) == "".join(f"{piece}שלום{SIGNS}" for piece in result.pieces)
    assert f'<bdi dir="ltr">x{SIGNS}</bdi>' in re.sub(r'<bdi class="sign">(‹\w+›)</bdi>', r"\1", page)
    assert ".text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext;" in page


def test_a_page_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    html = hostile_result().to_html(path)

    def fill_the_disk(self, text, **options):
        self.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        hostile_result().to_html(path)
    assert path.read_text() == html and list(tmp_path.iterdir()) == [path]
