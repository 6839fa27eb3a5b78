"""The influence map of a text as one page in which every word can be pointed at.

The page needs no network and forbids it (Content-Security-Policy): style and script are inline and known by their
hash, the heat map is data in the page. Text of others is escaped. Of each token the page holds the strongest influences
only, so that a long text stays fluid.
"""

from __future__ import annotations

import base64
import hashlib
import io
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.stats.recovery import nats
from analysis.xray.figure import map_figure
from analysis.xray.influences import Influences
from olmo_sparsity.util.files import write_text

MOST_NEEDED = 16
"""Influences of each token that the page holds."""
LEAST_NATS = 0.02
"""Those of smaller magnitude are left out of it."""
_DIGITS = 3
_DISPLAY_HEIGHT = 720
"""Of the page in Jupyter, in pixels."""


def page(xray: Influences, path: str | Path | None = None, *, command: str | None = None) -> str:
    """The page of a map, as HTML; written to ``path`` where one is given."""
    loader = jinja2.PackageLoader("analysis", "xray")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    here = Path(__file__).parent
    style = here.joinpath("page.css").read_text(encoding="utf8")
    script = here.joinpath("page.js").read_text(encoding="utf8")
    html = environment.get_template("page.html").render(
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:",
        name=Path(xray.about["text"] or "").name,
        about=xray.about,
        tau=nats(xray.about["tau_nats"]),
        extent=xray.extent,
        over=len(xray.over),
        most=MOST_NEEDED,
        least=LEAST_NATS,
        picture=_image(map_figure(xray)),
        command=command,
        data=page_data(xray),
    )
    if path is not None:
        write_text(path, html)
    return html


def _hash(text: str) -> str:
    """What the policy knows the style and the script by: nothing else runs, and nothing may be loaded or sent."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def in_notebook(html: str) -> str:
    """A page in a frame of its own that may run its script and nothing else."""
    return (
        f'<iframe sandbox="allow-scripts" style="width: 100%; height: {_DISPLAY_HEIGHT}px; border: 0" '
        f'srcdoc="{escape(html)}"></iframe>'
    )


def page_data(xray: Influences) -> dict[str, Any]:
    """All that page.js reads; an influence is ``[place of the token that is needed, nats]``, a loss may be null.

    ``labels``: by place, of the tokens that are shown as something else than their piece.
    """
    losses = xray.tokens[["loss_long_nats", "loss_short_nats"]].round(_DIGITS).astype(object)
    losses = losses.where(losses.notna(), None)
    pieces = xray.tokens["piece"].tolist()
    labels = {}
    needs = []
    for t, label in enumerate(xray.labels):
        if label != pieces[t]:
            labels[t] = label
        strongest = xray.strongest(t, MOST_NEEDED)
        needs.append([[i, round(nats, _DIGITS)] for i, nats in strongest if abs(nats) >= LEAST_NATS])
    return {
        "pieces": pieces,
        "labels": labels,
        "long": losses["loss_long_nats"].tolist(),
        "short": losses["loss_short_nats"].tolist(),
        "tau": xray.about["tau_nats"],
        "needs": needs,
    }


def _image(figure: Figure) -> str:
    """A figure as a data address of an SVG, whose text is drawn as paths."""
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "olmo-sparsity"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    # a fifth smaller than in base64, which its pictures are in already
    return "data:image/svg+xml," + quote(drawn.getvalue(), safe=" !$'()*+,/:;=?@~")
