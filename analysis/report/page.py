"""One self-contained HTML page of a measurement: figures, numbers, settings, and a browser of examples.

The page needs no network and forbids it (Content-Security-Policy): style and script are inline and known by their
hash, figures are data in the page. Text of documents reaches it as JSON that cannot end its own element, and is shown
as text nodes only. The same records, arguments and seed give the same bytes. No model, no torch.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shlex
from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.plots.style import STYLE
from analysis.records.results import COMPARISON, LONGPPL
from analysis.records.schema import Manifest
from analysis.records.store import Records
from analysis.report.examples import choose_examples, page_data
from analysis.report.foreign_text import DIRECTION_CONTROL, foreign_html, text_html, text_plain
from analysis.report.tables import all_tables
from analysis.report.words import bounds, number, reading
from analysis.stats.recovery import default_selector, nats

Json = dict[str, Any]

_TITLE = "What a few far tokens give back"
_ESCAPED = re.compile(rf"[&<>]|{DIRECTION_CONTROL.pattern}")
_CAPTIONS = {
    "figure2": (
        "Figure 2",
        "Loss with k far tokens, net recovery, recovery by size of the gain and, where measured, loss by position. "
        "The table of selectors has the numbers.",
    ),
    "kinds": (
        "Kinds of dependency",
        "Share, gain and recovery of each kind. The table of kinds has the numbers.",
    ),
    "distances": (
        "Distances",
        "How far before the target the chosen tokens stand, in its own text and in the placebo.",
    ),
    "tokens_needed": (
        "Tokens needed",
        "For how many targets at most k tokens bring most of the gain back. The table of this name has the numbers.",
    ),
}


def report_html(
    records: Records,
    summary: Json,
    figures: Mapping[str, Figure],
    *,
    command: str,
    examples: int = 1000,
    longppl: Json | None = None,
    comparison: Json | None = None,
) -> str:
    """The page as text.

    Args:
        records: of `load_records`.
        summary: of `summarize`, of the same records.
        figures: by name, in the order of the page.
        command: command line that made the page, which is shown in it.
        examples: at most so many targets in the browser of examples.
        longppl: of `load_longppl`, or None.
        comparison: of `load_comparison`, or None.
    """
    rows = choose_examples(records, examples)
    data = page_data(records, rows, summary["gain_bins"]["k"])
    settings = summary["settings"]
    style, script = (_part(name) for name in ("style.css", "page.js"))
    words = "".join(f"<p>{text_html(paragraph)}</p>" for paragraph in reading(summary) if paragraph)
    return Template(_part("template.html")).substitute(
        policy=_policy(style, script),
        title=escape(text_plain(f"{_TITLE}: {_checkpoint_name(records.manifest)}")),
        heading=f"{_TITLE}: {foreign_html(_checkpoint_name(records.manifest))}",
        measured=_measured(records.manifest),
        tiles=_tiles(summary),
        words=f'<div class="prose">{words}</div>',
        figures="\n".join(_figure(name, figure) for name, figure in figures.items()),
        interval_note=escape(
            f"Below each value its 95 % interval: {settings['resamples']:,} bootstrap resamples of documents, seed "
            f"{settings['bootstrap_seed']}."
        ),
        tables=all_tables(summary, longppl, comparison),
        examples_note=escape(_examples_note(records, len(rows))),
        definitions=_part("definitions.html"),
        settings=_settings(settings),
        reproduce=_reproduce(records, command),
        data=embed_json(data),
        style=style,
        script=script,
    )


def embed_json(value: Any) -> str:
    """``value`` as compact JSON for a script element: no text in it can end the element or open a comment, or reorder
    what one sees who reads the file."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # in JSON these stand in strings only, where an escape means the same
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def figure_image(figure: Figure) -> str:
    """A figure as a data address of an SVG, whose text is drawn as paths; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "olmo-sparsity", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def load_longppl(path: str | Path) -> Json:
    """A `longppl.json`, given itself or its folder. Raises `UserError` where it is none."""
    return LONGPPL.load(path)


def load_comparison(path: str | Path) -> Json:
    """The JSON of scripts/compare.py. Raises `UserError` where it is none."""
    return COMPARISON.load(path)


def _part(name: str) -> str:
    return (files("analysis.report") / "templates" / name).read_text(encoding="utf8")


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded or sent, and nothing runs but this style and this script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _checkpoint_name(manifest: Manifest) -> str:
    """The last two parts of the path: the run and the step, mostly."""
    return "/".join(Path(manifest.checkpoint).parts[-2:])


def _measured(manifest: Manifest) -> str:
    checkpoint, evaluated_by, corpus, split = (
        foreign_html(str(name))
        for name in (manifest.checkpoint, manifest.evaluation_checkpoint, manifest.corpus, manifest.split)
    )
    how = f"evaluated by {evaluated_by}, " if manifest.crossfit else ""
    return (
        f"Checkpoint {checkpoint}, {how}on {corpus} ({split}); long context N = "
        f"{manifest.n_long}, short context M = {manifest.n_short} tokens, tau = {nats(manifest.tau_nats)}."
    )


def _tiles(summary: Json) -> str:
    name, k = default_selector(summary["selectors"]), summary["gain_bins"]["k"]
    found = summary["selectors"][name][str(k)]
    tokens = f"{k} tokens of {name}"
    tiles = [
        ("lead", found["net_recovery"], 0, f"net recovery with {tokens}"),
        ("", found["recovery"], 0, "recovery, own text"),
        ("", found["placebo_recovery"], 0, "recovery, placebo: another document's text"),
        (
            "",
            summary["share_over_tau"],
            1,
            f"of the targets gain more than {nats(summary['settings']['tau_nats'])}",
        ),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div class="{kind}"><dt>{text_html(title)}</dt><dd>{number(value["value"], scale=100, digits=digits)} %'
            f"<small>{bounds(value, scale=100, digits=digits)}</small></dd></div>"
            for kind, value, digits, title in tiles
        )
        + "</dl>"
    )


def _figure(name: str, figure: Figure) -> str:
    title, text = _CAPTIONS.get(name, (name, ""))
    return (
        f'<figure><div class="canvas" tabindex="0" role="group" aria-label="{escape(title)}">'
        f'<img src="{figure_image(figure)}" alt="{escape(f"{title}. {text}")}"></div>'
        f"<figcaption><b>{escape(title)}.</b> {escape(text)}</figcaption></figure>"
    )


def _examples_note(records: Records, shown: int) -> str:
    if not shown:
        return "These records hold no text of targets, so there are no examples to show."
    of = len(records.over)
    how = (
        f"All {of:,} measured targets over tau."
        if shown == of
        else f"{shown:,} of {of:,} measured targets over tau; every kind and size of gain has its share."
    )
    return f"{how} The same selector at work in the target's own text and, beside it, in the placebo."


def _settings(settings: Json) -> str:
    """Every setting of the summary, as a list; checksums in full."""

    def show(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "none" if value is None else str(value) or "unknown"

    pairs = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{foreign_html(show(value))}</dd>"
        for name, value in settings.items()
    )
    return f'<dl class="pairs">{pairs}</dl>'


def _reproduce(records: Records, command: str) -> str:
    manifest = records.manifest
    at = f"Code at commit {foreign_html(manifest.commit)}" if manifest.commit else "Code of an unknown commit"
    return (
        f"<p>{at}. Records by the first command, which goes on where it was interrupted; this page by the "
        "second. The settings above have the checksums of weights, tokenizer and corpus.</p>"
        f"<pre>{text_html(influence_command(records))}</pre><pre>{text_html(command)}</pre>"
    )


def influence_command(records: Records) -> str:
    """The scripts/influence.py command line that makes these records again."""
    manifest = records.manifest
    checkpoint = (
        ["--select-with", manifest.checkpoint, "--evaluate-with", str(manifest.evaluation_checkpoint)]
        if manifest.crossfit
        else [manifest.checkpoint]
    )
    given: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("--corpus", manifest.corpus, str),
        ("--out", records.folder, str),
        ("--split", manifest.split, str),
        ("--n-long", manifest.n_long, str),
        ("--n-short", manifest.n_short, str),
        ("--tau", manifest.tau_nats, "{:g}".format),
        ("--k", manifest.ks, lambda ks: ",".join(map(str, ks))),
        ("--selectors", manifest.selectors, ",".join),
        ("--targets", manifest.targets_asked, str),
        ("--seed", manifest.seed, str),
    ]
    options = [part for name, value, write in given for part in (name, write(value))]
    precision = ["--bf16"] if manifest.dtype == "bf16" else []
    return shlex.join(["python", "scripts/influence.py", *checkpoint, *options, *precision])
