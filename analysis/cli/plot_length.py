"""Draw loss by position again, from what scripts/length.py wrote: all models, or some of them. No model is needed.

examples:
  olmo-sparsity plot_length runs/length
  olmo-sparsity plot_length runs/length --models "RoPE,RoPE + PoSE,ALiBi" --out runs/length/encodings

Writes length.png (loss by position) and lengths.png (loss at each length), both also as pdf.
"""

from __future__ import annotations

from pathlib import Path

from olmo_sparsity.util.arguments import Parser, out_folder, texts
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Read, choose, draw."""
    arguments = _parser().parse_args()
    from analysis.plots.length import save_length_figures
    from analysis.records.results import LENGTH

    measured = LENGTH.load(arguments.folder)
    if arguments.models is not None:
        by_label = {each["label"]: each for each in measured["models"]}
        if unknown := [label for label in arguments.models if label not in by_label]:
            raise UserError(
                f"{arguments.folder} has no model {unknown[0]!r}; choose of {', '.join(by_label)}"
            )
        measured["models"] = [by_label[label] for label in arguments.models]
    beside = arguments.folder if arguments.folder.is_dir() else arguments.folder.parent
    paths = save_length_figures(measured, arguments.out or beside)
    print(f"wrote {', '.join(map(str, paths))}")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="what scripts/length.py wrote, or its length.json"
    )
    parser.add_argument(
        "--models", type=texts, metavar="LABELS", help="comma-separated, in this order (default: all)"
    )
    parser.add_argument(
        "--out", type=out_folder, metavar="DIR", help="where to write (default: beside length.json)"
    )
    return parser
