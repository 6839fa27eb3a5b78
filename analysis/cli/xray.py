"""X-ray a text: for every token, which earlier tokens it needs and by how much, as a page, a heat map and records.

examples:
  olmo-sparsity xray runs/demo --text README.md --out runs/demo/xray
  olmo-sparsity xray runs/books --text chapter.txt --out runs/books/xray --n-long 256 --n-short 32 --tau 0.5
  olmo-sparsity xray runs/books/xray                 # draws again what was measured, without the model

Every token is left out once, and the loss of all later ones is measured without it: exact leave-one-out influence, in
nats, of every token on every later one but the next M. A text that is longer than N tokens is read in windows that
overlap by half. The time grows with the length of the text times N.

Writes xray.parquet (all losses and influences), xray.png and xray.pdf (a heat map), and xray.html, in which pointing
at any word lights up those that it needs and those that it serves; it opens in any browser and loads nothing.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from analysis.measure.settings import MapSettings
from analysis.records.influence_map import MAP_NAME
from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser, add_arguments, settings_from
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import command_line

_OF_BOTH = ("checkpoint", "text", "out")


def main() -> None:
    """Measure, or read what was measured; then draw."""
    parser = Parser(description=__doc__)
    add_arguments(parser, MapSettings)
    given = parser.parse_args()
    from analysis.plots.style import save_figure
    from analysis.report.influence_map import InfluenceMap

    if given.text is None:
        _refuse_measuring_options(given, parser)
        path = Path(given.checkpoint)
        if path.is_dir() and not (path / MAP_NAME).is_file():
            raise UserError(f"{path} has no {MAP_NAME}; give --text, the text that it is to read")
        found = InfluenceMap.load(path)
        folder = given.out or (path if path.is_dir() else path.parent)
        written = []
    else:
        from analysis.measure.influence_map import measure_text_map

        show_log("analysis")
        out = given.out or Path(f"{given.text}-xray")
        path = measure_text_map(settings_from(MapSettings, given, out=out))
        found, folder, written = InfluenceMap.load(path), path.parent, [path]
    written += save_figure(found.plot(), folder, "xray")
    found.to_html(folder / "xray.html", command=command_line("scripts/xray.py"))
    print(found)
    print(f"wrote {', '.join(map(str, [*written, folder / 'xray.html']))}")


def _refuse_measuring_options(given: Namespace, parser: Parser) -> None:
    """Raise `UserError` for an option that would not change what was measured."""
    for field in fields(MapSettings):
        asked = getattr(given, field.name)
        if field.name not in _OF_BOTH and asked != parser.get_default(field.name):
            option = f"--{(field.metadata['argument']['name'] or field.name).replace('_', '-')}"
            raise UserError(f"{option} is for measuring; give --text, or leave {option} out")
