"""LongPPL: perplexity on the key tokens, those that a long context helps with (Fang et al. 2024, arXiv 2410.23771).

examples:
  python scripts/longppl.py runs/books --corpus data/books --out runs/books/longppl --n-long 256 --n-short 32
  python scripts/longppl.py runs/books --corpus data/books --out runs/books/longppl --n-long 1024 --n-short 128 \\
      --sliding-window 64 --documents 40

A token is a key token where the long context makes it likelier by more than --alpha nats than the short one does, and
its loss given the long context is below --beta nats. LongPPL is the perplexity of the key tokens given the long
context. It is measured in two forms on the same tokens: exact (every token has its own M tokens of short context) and
as published (windows of M + S tokens, S apart, whose last S tokens are measured). Writes longppl.json: key tokens,
LongPPL and plain PPL, how the forms agree, and what each costs, with 95 % intervals over documents; prints a table.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from olmo_sparsity.util.arguments import Parser, finite_number, whole_number


def main() -> None:
    """Measure, then print what was written."""
    from analysis.measure.longppl import LongPPLSettings, measure_longppl, render_longppl
    from analysis.records.results import LONGPPL

    values: dict[str, Any] = vars(_parser().parse_args())
    values["alpha_nats"], values["beta_nats"] = values.pop("alpha"), values.pop("beta")
    path = measure_longppl(LongPPLSettings(**values))
    console = Console(highlight=False, soft_wrap=True)
    console.print(render_longppl(LONGPPL.load(path)))
    console.print(f"wrote {path}", markup=False)


def _parser() -> Parser:
    from analysis.cli.arguments import add_measurement_arguments

    parser = Parser(description=__doc__)
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="checkpoint, run (then its last one), or transformers directory"
    )
    parser.add_argument("--n-long", type=whole_number, required=True, help="N, tokens of a segment")
    parser.add_argument("--n-short", type=whole_number, required=True, help="M, tokens of the short context")
    parser.add_argument(
        "--sliding-window",
        type=whole_number,
        metavar="S",
        help="tokens that share a window in the published form (default: M / 4, as in the authors' code)",
    )
    parser.add_argument(
        "--segments",
        type=whole_number,
        default=256,
        help="segments to sample, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--documents",
        type=whole_number,
        metavar="D",
        help="documents that they are drawn from, at most (default: all that are long enough)",
    )
    for name, what in (
        ("alpha", "L_short - L_long of a key token is above it"),
        ("beta", "its L_long is below"),
    ):
        parser.add_argument(
            f"--{name}",
            type=finite_number,
            default=2.0,
            metavar="NATS",
            help=f"{what} (default: %(default)s nats)",
        )
    add_measurement_arguments(parser, seed_of="segments and bootstrap")
    return parser
