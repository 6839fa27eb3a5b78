"""The influence map of a text for people: one page in which every word can be pointed at, and its display in Jupyter.

The page needs no network and forbids it (Content-Security-Policy): style and script are inline and known by their
hash, the heat map is data in the page. Text of others is escaped. Of each token the page holds the strongest influences
only, so that a long text stays fluid.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from analysis.plots.influence_map import map_figure
from analysis.plots.style import COLUMN, PAGE, figure_bytes
from analysis.records.influence_map import MapRecord
from analysis.report.foreign_text import (
    DIRECTION_CONTROL,
    DIRECTION_CONTROLS,
    page_environment,
    source_of,
    text_plain,
)
from analysis.stats.recovery import and_prefix, nats
from olmo_sparsity.util.files import write_text
from olmo_sparsity.util.result_files import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NEEDED = 16
"""Influences of each token that the page holds."""
LEAST_NATS = 0.02
"""Those of smaller magnitude are left out of it."""
_DIGITS = 3
_DISPLAY_HEIGHT = 720
"""Of the page in Jupyter, in pixels."""
_ESCAPED = re.compile(rf"[&<>]|{DIRECTION_CONTROL.pattern}")


class InfluenceMap(MapRecord):
    """The result of `analysis.notebook.influence_map`. In Jupyter it shows itself."""

    def __repr__(self) -> str:
        """One line: how many tokens gain from their far context, and the largest influence, where one is above 0."""
        about = self.about
        head = (
            f"InfluenceMap: {len(self.over):,} of {len(self):,} tokens gain more than {nats(about['tau_nats'])} "
            f"(N = {about['n_long']}, M = {about['n_short']}{and_prefix(about.get('prefix'))})"
        )
        needs = [
            f"; {self.pieces[t]!r} at {t} needs {self.pieces[i]!r} at {i} most, by {largest:.2f} nats"
            for largest, i, t in self.needed_most(1)
        ]
        return "".join([head, *needs])

    def _repr_html_(self) -> str:
        """The page, in a frame of its own that may run its script and nothing else."""
        return (
            f'<iframe sandbox="allow-scripts" style="width: 100%; height: {_DISPLAY_HEIGHT}px; border: 0" '
            f'srcdoc="{escape(self.to_html())}"></iframe>'
        )

    def plot(self) -> Figure:
        """The heat map."""
        return map_figure(self)

    def to_html(self, path: str | Path | None = None, *, command: str | None = None) -> str:
        """The page; written to ``path`` where one is given. ``command``: the command line that it is made by."""
        environment = page_environment()
        name = Path(self.about["text"]).name if self.about["text"] else ""
        style, script = (source_of(environment, each) for each in ("map.css", "map.js"))
        html = environment.get_template("map.html").render(
            style=Markup(style),
            script=Markup(script),
            policy=_policy(style, script),
            name=name,
            plain_name=text_plain(name),
            about=self.about,
            tau=nats(self.about["tau_nats"]),
            tokens=len(self),
            over=len(self.over),
            most=MOST_NEEDED,
            least=LEAST_NATS,
            heat_map="Leave-one-out influence of each earlier token on each token, on a symmetric scale.",
            wide=_image(map_figure(self, width=PAGE)),
            narrow=_image(map_figure(self, width=COLUMN)),
            settings={name.replace("_", " "): _shown(value) for name, value in self.about.items()},
            command=command,
            data=Markup(_json(self._page_data())),
        )
        if path is not None:
            write_text(path, html)
        return html

    def _page_data(self) -> Json:
        """All that map.js reads; an influence is ``[place of the token that is needed, nats]``."""
        needs = [
            [[i, round(nat, _DIGITS)] for i, nat in self.strongest(t, MOST_NEEDED) if abs(nat) >= LEAST_NATS]
            for t in range(len(self))
        ]
        losses = (self.loss_long_nats, self.loss_short_nats)
        long, short = ([0.0, *(round(x, _DIGITS) for x in each[1:].tolist())] for each in losses)
        return {
            "pieces": self.pieces,
            "long": long,
            "short": short,
            "tau": self.about["tau_nats"],
            "needs": needs,
            "controls": DIRECTION_CONTROLS,
        }


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded or sent, and nothing runs but this style and this script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _image(figure: Figure) -> str:
    """A figure as a data address of an SVG, whose text is drawn as paths; the same figure gives the same bytes."""
    drawn = figure_bytes(figure, "svg", **{"svg.fonttype": "path"})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"


def _shown(value: Any) -> str:
    """A setting in words; checksums in full."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value) or "unknown"


def _json(value: Json) -> str:
    """``value`` for a script element: no text in it can end the element or open a comment, or reorder what one sees
    who reads the file."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # in JSON these stand in strings only, where an escape means the same
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
