"""The influence map of a text as one page in which every word can be pointed at.

The page needs no network and forbids it (Content-Security-Policy): style and script are inline and known by their
hash, the heat map is data in the page. Text of others is escaped. Of each token the page holds the strongest influences
only, so that a long text stays fluid.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.stats.measured import nats
from analysis.xray.figure import map_figure
from analysis.xray.map import InfluenceMap
from olmo_sparsity.util.files import write_text

MOST_NEEDED = 16
"""Influences of each token that the page holds."""
LEAST_NATS = 0.02
"""Those of smaller magnitude are left out of it."""
_DIGITS = 3
_DISPLAY_HEIGHT = 720
"""Of the page in Jupyter, in pixels."""


def page(xray: InfluenceMap, path: str | Path | None = None, *, command: str | None = None) -> str:
    """The page of a map, as HTML; written to ``path`` where one is given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis", "xray"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    here = Path(__file__).parent
    style, script = (here.joinpath(name).read_text(encoding="utf8") for name in ("page.css", "page.js"))
    html = environment.get_template("page.html").render(
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        name=Path(xray.about["text"]).name if xray.about["text"] else "",
        about=xray.about,
        tau=nats(xray.about["tau_nats"]),
        tokens=len(xray),
        over=len(xray.over),
        most=MOST_NEEDED,
        least=LEAST_NATS,
        heat_map="Influence of each earlier token on each token, on a symmetric scale.",
        picture=_image(map_figure(xray)),
        settings={name.replace("_", " "): str(value) for name, value in xray.about.items()},
        command=command,
        data=Markup(_json(page_data(xray))),
    )
    if path is not None:
        write_text(path, html)
    return html


def in_notebook(html: str) -> str:
    """A page in a frame of its own that may run its script and nothing else."""
    return (
        f'<iframe sandbox="allow-scripts" style="width: 100%; height: {_DISPLAY_HEIGHT}px; border: 0" '
        f'srcdoc="{escape(html)}"></iframe>'
    )


def page_data(xray: InfluenceMap) -> dict[str, Any]:
    """All that page.js reads; an influence is ``[place of the token that is needed, nats]``, a loss may be null."""

    def rounded(losses: pd.Series) -> list[float | None]:
        return [None if np.isnan(loss) else round(loss, _DIGITS) for loss in losses.tolist()]

    strongest = [xray.strongest(t, MOST_NEEDED) for t in range(len(xray))]
    return {
        "pieces": xray.tokens["piece"].tolist(),
        "long": rounded(xray.tokens["loss_long_nats"]),
        "short": rounded(xray.tokens["loss_short_nats"]),
        "tau": xray.about["tau_nats"],
        "needs": [
            [[i, round(nats, _DIGITS)] for i, nats in needed if abs(nats) >= LEAST_NATS]
            for needed in strongest
        ],
    }


def _json(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return "".join(f"\\u{ord(sign):04x}" if sign in "&<>\u2028\u2029" else sign for sign in text)


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded or sent, and nothing runs but this style and this script."""
    hashes = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    style_hash, script_hash = (base64.b64encode(digest).decode() for digest in hashes)
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _image(figure: Figure) -> str:
    """A figure as a data address of an SVG, whose text is drawn as paths."""
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "olmo-sparsity"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"
