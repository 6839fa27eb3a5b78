"""A report page made of made-up records and a made-up summary, and a reader of pages: what several tests share."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from analysis.records.schema import FAR_CONTEXTS, Examples, Targets
from analysis.records.store import Records
from analysis.report.page import report_html
from analysis.text.kinds import KINDS
from tests.support.made_up_records import made_up_manifest
from tests.support.made_up_summary import interval, made_up_summary

SELECTORS = ("attention", "leave-one-out", "leave-one-in@gradient:32", "random")
WORDS = (
    " the", " house", " of", " Mr", ".", " Éva", ",", "\n", " said", "ing", " 42", " “", "”", "", " 家", "  ",
)  # fmt: skip


def readable_records(count: int = 40, n_long: int = 24, n_short: int = 8, crossfit: bool = False) -> Records:
    """Records in memory, every target over tau and with its text; losses and influences are made up."""
    rng = np.random.default_rng(count)
    other: dict[str, Any] = {"evaluation_checkpoint": "runs/b", "evaluation_checkpoint_sha256": "e" * 64}
    settings = {"n_long": n_long, "n_short": n_short, "selectors": list(SELECTORS)}
    manifest = made_up_manifest(count, **settings, **(other if crossfit else {}))
    gain = 1.001 + rng.exponential(1.5, count)
    long = rng.gamma(2.0, 1.2, count)
    targets = Targets(
        target_id=100 + np.arange(count),
        document=np.sort(rng.integers(1 + count // 3, size=count)),
        position=rng.integers(n_long, 900, count),
        token=np.zeros(count),
        loss_long_nats=long,
        loss_short_nats=long + (gain / 2 if crossfit else gain),
        selecting_gain_nats=gain,
        kind=rng.choice(KINDS[:5], count, p=[0.4, 0.3, 0.15, 0.1, 0.05]),
        placebo_document=rng.integers(99, size=count),
        placebo_start=rng.integers(500, size=count),
    )
    far, k_max, shape = n_long - n_short, manifest.k_max, (count, len(manifest.ks))
    pairs = [(name, context) for name in SELECTORS for context in FAR_CONTEXTS]
    arrays: dict[str, dict] = {name: {each: {} for each in SELECTORS} for name in ("loss", "at", "influence")}
    for name, context in pairs:
        arrays["loss"][name][context] = long[:, None] + rng.random(shape)
        arrays["at"][name][context] = np.argsort(rng.random((count, far)), axis=1)[:, :k_max].astype("i4")
        arrays["influence"][name][context] = -np.sort(-rng.normal(0.5, 0.7, (count, k_max)), axis=1)
    return Records(
        Path("runs/a/influence"), manifest, targets, np.arange(count), arrays["loss"], arrays["at"],
        arrays["influence"], made_up_examples(targets.target_id, n_long, n_short),
    )  # fmt: skip


def made_up_examples(target_id: np.ndarray, n_long: int, n_short: int) -> Examples:
    rng = np.random.default_rng(1)

    def pieces(count: int) -> list[str]:
        return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]

    return Examples(
        target_id,
        [pieces(n_long) for _ in target_id],
        [f" target{i}" for i in target_id],
        [pieces(n_long - n_short) for _ in target_id],
        ["".join(pieces(5)) for _ in target_id],
    )


def made_up(
    selectors: tuple[str, ...] = ("leave-one-out", "greedy", "best", "random"), **settings: Any
) -> dict:
    comparison = {"first": "greedy", "second": "leave-one-out", "k": 4}
    differences = {name: interval(-0.05, 0.02) for name in ("recovery_difference", "net_recovery_difference")}
    return {**made_up_summary(selectors, **settings), "comparisons": [{**comparison, **differences}]}


def make_page(records: Records, summary: dict | None = None, **options: Any) -> str:
    wide, narrow = (Figure(figsize=(width, 1)) for width in (2, 1))
    for figure in (wide, narrow):
        figure.subplots().plot([1, 2])
    options = {"command": "python scripts/report.py runs/a/influence", **options}
    return report_html(records, summary or made_up(), {"figure2": (wide, narrow)}, **options)


HOSTILE = "</script ><img src=x onerror='hacked=1'><b>&amp;"
"""What would do something in a page that took it for markup."""
CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
SIGNS = "‹ALM›‹LRM›‹RLM›‹LRE›‹RLE›‹PDF›‹LRO›‹RLO›‹LRI›‹RLI›‹FSI›‹PDI›"


class Page(HTMLParser):
    """Elements with their attributes, the text of scripts and styles, and the cells of tables."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.raw: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.isolated: list[str] = []
        self.stack: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.stack.append(tag)
        if tag == "bdi":
            self.isolated.append("")
        if tag in ("script", "style"):
            self.raw.append((tag, ""))
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("script", "style"):
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)
            return
        self.text += data
        if "bdi" in self.stack:
            self.isolated[-1] += data
        if {"td", "th"} & set(self.stack):
            self.tables[-1][-1][-1] += (" " if self.stack[-1] == "small" else "") + data

    def data(self) -> Any:
        return json.loads(self.raw[1][1])

    def rows(self, heading: str, number: int = 0) -> list[list[str]]:
        """Rows of the table, of those of which the first heading is ``heading`` the ``number``-th, without it."""
        return [table for table in self.tables if table[0][0] == heading and len(table) > 1][number][1:]
