"""One self-contained HTML page of a measurement: summary, examples, tables, figures, settings.

The page needs no network and forbids it (Content-Security-Policy): style and script are inline and known by their
hash, figures are data in the page. The template escapes all text. Text of documents reaches the page as JSON that
cannot end its own element, and is shown as text nodes only. The same records, arguments and seed give the same bytes.
Shapes: m targets over tau with finished selections, N long and M short context length.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.plots.style import figure_bytes, selector_label
from analysis.records.schema import (
    FAR_CONTEXTS,
    FURTHER,
    PROPOSER,
    PROPOSER_SCALING,
    SUBSETS,
    UNTRAINED,
    Examples,
)
from analysis.records.store import Records
from analysis.report.foreign_text import (
    DIRECTION_CONTROL,
    DIRECTION_CONTROLS,
    page_environment,
    source_of,
    text_plain,
)
from analysis.report.words import influence_unit
from analysis.stats.bootstrap import by_clusters, few_clusters
from analysis.stats.dependencies import FAR
from analysis.stats.recovery import default_selector, nats
from analysis.text.kinds import KINDS
from olmo_sparsity.util.result_files import Json

_TITLE = "How much of the far context do a few tokens carry?"
_LOSS_DIGITS = _INFLUENCE_DIGITS = 3
_ESCAPED = re.compile(rf"[&<>]|{DIRECTION_CONTROL.pattern}")
_CAPTIONS = {
    "figure2": (
        "Figure 2",
        "Loss with k far tokens, net recovery, recovery by size of the gain and, where measured, loss by position.",
    ),
    "figure2-selectors": (
        "Further selectors",
        "Loss and net recovery of the selectors that Figure 2 leaves out.",
    ),
    "kinds": ("Kinds of dependency", "Share, gain and recovery of each kind."),
    "distances": (
        "Distances",
        "Distance of the chosen tokens before the target, as their share over that of tokens drawn uniformly.",
    ),
    "tokens_needed": ("Tokens needed", "For how many targets k tokens recover most of the gain."),
    "placebos": ("Parts of a recovery", "What is luck, what other text has in common, and what is specific."),
}


def report_html(
    records: Records,
    summary: Json,
    figures: Mapping[str, Sequence[Figure]],
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
        figures: by name, in the order of the page: each for a wide screen and for a narrow one.
        command: command line that made the page, which is shown in it.
        examples: at most so many targets in the browser of examples.
        longppl: what `LONGPPL` loads, or None.
        comparison: what `COMPARISON` loads, or None.
    """
    environment = page_environment()
    environment.filters["label"] = selector_label
    rows = choose_examples(records, examples)
    manifest = records.manifest
    name = "/".join(Path(manifest.checkpoint).parts[-2:])  # the run and the step, mostly
    return environment.get_template("page.html").render(
        **page_frame(environment, "page.js"),
        made_by="report",
        first_section="words",
        title=_TITLE,
        name=name,
        plain_name=text_plain(name),
        manifest=manifest,
        tau=nats(manifest.tau_nats),
        figures=[(*_CAPTIONS[name], *map(figure_image, pair)) for name, pair in figures.items()],
        untrained=manifest.options.get(UNTRAINED, False),
        settings=shown_settings(summary["settings"]),
        summary=summary,
        default=default_selector(summary["selectors"]),
        resampled=by_clusters(summary) + ("" if "groups" in summary else " (no groups are known)"),
        few=few_clusters(summary["settings"], "_over_tau"),
        chooser=default_selector(summary["distances"]["selectors"]),
        all_far=FAR,
        longppl=longppl,
        comparison=comparison,
        measured=len(records.over),
        examples=len(rows),
        commands=[influence_command(records), command],
        data=Markup(embed_json(page_data(records, rows, summary["gain_bins"]["k"]))),
    )


def page_frame(environment: Environment, script: str) -> Json:
    """Style, script (behind the one that all pages share) and policy of a page."""
    style, *scripts = (source_of(environment, name) for name in ("style.css", "shared.js", script))
    both = "".join(scripts)
    return {"style": Markup(style), "script": Markup(both), "policy": _policy(style, both)}


def embed_json(value: Any) -> str:
    """``value`` as compact JSON for a script element: no text in it can end the element or open a comment, or reorder
    what one sees who reads the file."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # in JSON these stand in strings only, where an escape means the same
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def figure_image(figure: Figure) -> str:
    """A figure as a data address of an SVG, whose text is drawn as paths; the same figure gives the same bytes."""
    drawn = figure_bytes(figure, "svg", **{"svg.fonttype": "path"})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded or sent, and nothing runs but this style and this script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def shown_settings(settings: Json) -> Json:
    """Names and values of settings in words."""
    return {name.replace("_", " "): _shown(value) for name, value in settings.items()}


def _shown(value: Any) -> str:
    """A setting in words; checksums in full."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value) or "unknown"


def influence_command(records: Records) -> str:
    """The scripts/influence.py command line that makes these records again."""
    manifest = records.manifest
    checkpoint = (
        ["--select-with", manifest.checkpoint, "--evaluate-with", str(manifest.evaluation_checkpoint)]
        if manifest.crossfit
        else [manifest.checkpoint]
    )
    given = {
        "--corpus": manifest.corpus,
        "--out": records.folder,
        "--split": manifest.split,
        "--n-long": manifest.n_long,
        "--n-short": manifest.n_short,
        "--tau": manifest.tau_nats,
        "--k": ",".join(map(str, manifest.ks)),
        "--selectors": ",".join(manifest.selectors),
        "--targets": manifest.targets_asked,
        "--seed": manifest.seed,
    }
    if manifest.targets_per_block > 1:
        given["--targets-per-block"] = manifest.targets_per_block
    if SUBSETS in manifest.options:
        given["--subsets"] = manifest.options[SUBSETS]
    if FURTHER in manifest.options:
        given["--further-placebos"] = ",".join(manifest.options[FURTHER])
    if PROPOSER in manifest.options:
        scaling = manifest.options.get(PROPOSER_SCALING)
        weights = f"WEIGHTS-{manifest.options[PROPOSER][:12]}"  # their place is not known
        given["--propose-with"] = f"{weights}@{scaling}" if scaling else weights
    options = [str(part) for option in given.items() for part in option]
    options += [] if SUBSETS in manifest.options else ["--only-recovery"]
    weights, _, loaded = manifest.dtype.partition("-")
    options += ["--dtype", weights] if loaded else ["--bf16"] if manifest.dtype == "bf16" else []
    return shlex.join(["python", "scripts/influence.py", *checkpoint, *options])


# --- examples ---


def choose_examples(records: Records, count: int) -> np.ndarray:
    """Rows (indices into ``records.over``, ascending) of at most ``count`` targets that have text.

    Where there are more, every so-many-th of them, ordered by kind and then by gain, so that each kind and each size
    of gain keeps its proportion [ours]. No chance is involved.
    """
    if records.examples is None or count <= 0:
        return np.zeros(0, dtype=np.int64)
    targets = records.targets
    rows = np.flatnonzero(np.isin(targets.target_id[records.over], records.examples.target_id))
    if len(rows) <= count:
        return rows
    over = records.over[rows]
    kinds = np.array([KINDS.index(kind) for kind in targets.kind[over]])
    ordered = rows[np.lexsort((targets.selecting_gain_nats[over], kinds))]
    middle_of_each_share = ((np.arange(count) + 0.5) * len(rows) / count).astype(np.int64)
    return np.sort(ordered[middle_of_each_share])


def page_data(records: Records, rows: np.ndarray, k: int) -> Json:
    """All that page.js reads, as plain JSON.

    Args:
        records: with examples, unless ``rows`` is empty.
        rows: of `choose_examples`.
        k: the k that is shown first.

    ``selector`` is the number of the one that is shown first. A selection is ``[positions, influences, losses]``; an
    influence that does not exist is None. ``gain`` is that of the model that evaluates, ``selecting_gain`` the one that
    put the target over tau.
    """
    manifest = records.manifest
    kinds = [kind for kind in KINDS if kind in set(records.targets.kind[records.over[rows]].tolist())]
    return {
        "ks": manifest.ks,
        "k": k,
        "n_long": manifest.n_long,
        "n_short": manifest.n_short,
        "crossfit": manifest.crossfit,
        "selectors": manifest.selectors,
        "selector": manifest.selectors.index(default_selector(manifest.selectors)),
        "units": [influence_unit(name) for name in manifest.selectors],
        "kinds": kinds,
        "controls": DIRECTION_CONTROLS,
        "examples": _examples(records, records.examples, rows, kinds) if records.examples else [],
    }


def _examples(records: Records, texts: Examples, rows: np.ndarray, kinds: list[str]) -> list[Json]:
    targets = records.targets
    row_of_text = {int(target): row for row, target in enumerate(texts.target_id)}
    found = []
    for row in rows.tolist():
        i = records.over[row]
        text = row_of_text[int(targets.target_id[i])]
        found.append(
            {
                "id": int(targets.target_id[i]),
                "document": int(targets.document[i]),
                "position": int(targets.position[i]),
                "kind": kinds.index(str(targets.kind[i])),
                "short": round(float(targets.loss_short_nats[i]), _LOSS_DIGITS),
                "long": round(float(targets.loss_long_nats[i]), _LOSS_DIGITS),
                "gain": round(float(targets.gain_nats[i]), _LOSS_DIGITS),
                "selecting_gain": round(float(targets.selecting_gain_nats[i]), _LOSS_DIGITS),
                "context": texts.context_pieces[text],
                "target": texts.target_piece[text],
                "after": texts.after[text],
                "placebo": texts.placebo_pieces[text],
                "placebo_document": int(targets.placebo_document[i]),
                "placebo_start": int(targets.placebo_start[i]),
                "selections": [
                    [_selection(records, selector, context, row) for context in FAR_CONTEXTS]
                    for selector in records.manifest.selectors
                ],
            }
        )
    return found


def _selection(records: Records, selector: str, context: str, row: int) -> list[list]:
    influence = [
        float(f"{x:.{_INFLUENCE_DIGITS}g}") if np.isfinite(x) else None
        for x in records.influence[selector][context][row].tolist()
    ]
    losses = [round(x, _LOSS_DIGITS) for x in records.loss_nats[selector][context][row].tolist()]
    return [records.selected[selector][context][row].tolist(), influence, losses]
