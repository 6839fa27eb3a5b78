"""The influence map of a text for people: one page in which every word can be pointed at, and its display in Jupyter.

The page keeps the rules of `analysis.report.page`: nothing is loaded, text of others is escaped. Of each token it holds
the strongest influences only, so that a long text stays fluid.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from analysis.plots.influence_map import map_figure
from analysis.plots.style import COLUMN, PAGE
from analysis.records.influence_map import MapRecord
from analysis.report.foreign_text import DIRECTION_CONTROLS, page_environment, text_plain
from analysis.report.page import embed_json, figure_image, page_frame, shown_settings
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
        html = environment.get_template("map.html").render(
            **page_frame(environment, "map.js"),
            made_by="xray",
            first_section="words",
            title="Which earlier tokens does each token need?",
            name=name,
            plain_name=text_plain(name),
            about=self.about,
            tau=nats(self.about["tau_nats"]),
            tokens=len(self),
            over=len(self.over),
            most=MOST_NEEDED,
            least=LEAST_NATS,
            figure=(
                "Heat map",
                "Leave-one-out influence of each earlier token on each token, on a symmetric scale.",
                *(figure_image(map_figure(self, width=width)) for width in (PAGE, COLUMN)),
            ),
            settings=shown_settings(self.about),
            commands=[command] if command else [],
            data=Markup(embed_json(self._page_data())),
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
