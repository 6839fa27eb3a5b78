"""The templates of the pages. Text that others wrote cannot become markup there, nor reorder what stands around it.

Arabic and Hebrew read on as they are. Only the invisible characters that change the direction of writing are shown by
their names, and so do nothing: with them, a text can look like another one.
"""

from __future__ import annotations

import re
from html import escape

import jinja2
from markupsafe import Markup

from analysis.report.words import number

DIRECTION_CONTROLS = {
    "\u061c": "ALM", "\u200e": "LRM", "\u200f": "RLM", "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF",
    "\u202d": "LRO", "\u202e": "RLO", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI", "\u2069": "PDI",
}  # fmt: skip
"""Unicode's characters for the direction of writing, and their names there."""
DIRECTION_CONTROL = re.compile(f"[{''.join(DIRECTION_CONTROLS)}]")


def text_plain(text: str) -> str:
    """For titles and attributes, which hold no markup; not yet escaped."""
    return DIRECTION_CONTROL.sub(lambda found: _sign(found[0]), text)


def text_html(text: str) -> str:
    """For an element with nothing else in it."""
    return DIRECTION_CONTROL.sub(lambda found: f'<bdi class="sign">{_sign(found[0])}</bdi>', escape(text))


def foreign_html(text: str) -> str:
    """A name or a path among words of ours: whatever is in it, they stay where they are, and its parts in order."""
    return f'<bdi dir="ltr">{text_html(text)}</bdi>'


def _sign(control: str) -> str:
    return f"‹{DIRECTION_CONTROLS[control]}›"


def page_environment() -> jinja2.Environment:
    """The templates, with filters ``text`` and ``foreign`` for `text_html` and `foreign_html`; the rest is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        text=lambda text: Markup(text_html(str(text))),
        foreign=lambda text: Markup(foreign_html(str(text))),
        commas="{:,}".format,
        number=number,
    )
    return environment


def source_of(environment: jinja2.Environment, name: str) -> str:
    """A file beside the templates as it is, such as a style sheet."""
    assert environment.loader
    return environment.loader.get_source(environment, name)[0]
