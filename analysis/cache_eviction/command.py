"""The command `olmo-sparsity eviction`: arguments, one call, what is written, drawn and printed."""

from __future__ import annotations

import argparse
import re
from typing import Any

from analysis.cache_eviction.contenders import every_policy
from analysis.cache_eviction.reference import REFERENCES
from analysis.cache_eviction.settings import BUDGETS, DEFAULT_REFERENCES, NEARS
from analysis.cli_options import MODEL, TEXT_OPTIONS, add_model_options, add_text_options, texts_of
from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser, out_folder, texts, whole_number, whole_number_or_zero
from olmo_sparsity.util.errors import UserError

EVICTION = """Which eviction policy keeps what the next predictions need, judged by exact effect.

examples:
  olmo-sparsity eviction HuggingFaceTB/SmolLM2-135M --text books/*.txt --out runs/eviction
  olmo-sparsity eviction model-Q4_K_M.gguf --text code.jsonl.gz --budgets 6%,12%,25% \\
      --policies snapkv,snapkv:window=64,h2o:blind=1,random --out runs/three
  olmo-sparsity eviction MODEL --text FILES --targets-per-block 512 --blocks 10 \\
      --references leave-one-out-kl:first=16 --out runs/horizon
  olmo-sparsity eviction --out runs/eviction                 prints and draws what is there again

In each block of text a policy chooses once which keys and values of the F = N - M far tokens stay in the cache; then
all B targets are read with these. What that costs, in nats over the full cache, is measured at equal budgets: the mean
number of far keys a layer and head, sinks included. Policies see the far context and the near tokens, or, blind, the
far context alone. Behind an aware policy the near tokens keep the keys and values that they were read with ("kept"), as
published, or they are read again with the reduced cache ("reread"), as behind every blind one. References see the
targets; no policy can. The same command goes on after an interruption.

Writes eviction.json and three Parquet files (all losses), numbers.csv (all numbers with 95 % intervals) and
eviction.png, and prints the policies at the middle budget. More, and how to judge a policy of one's own:
docs/eviction.md.
"""


def eviction_parser() -> Parser:
    """Of `eviction`; options are named as the arguments of `analysis.eviction`."""
    parser = Parser(prog="olmo-sparsity eviction", description=EVICTION)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL}; without one, what is in --out is printed and drawn again",
    )
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="DIR", help="folder to write to, or to read"
    )
    add_text_options(parser)
    add = parser.add_argument_group("what is measured").add_argument
    n_long = "N, tokens of the long context (default: 256)"
    add("--n-long", type=whole_number, default=256, metavar="N", help=n_long)
    n_short = "M, near tokens, which no budget counts (default: 32)"
    add("--n-short", type=whole_number, default=32, metavar="M", help=n_short)
    per_block = "B, targets that are read after one choice, 2 or more (default: 32)"
    add("--targets-per-block", type=whole_number, default=32, metavar="B", help=per_block)
    blocks = "number of blocks to draw from the texts (default: 50)"
    add("--blocks", type=whole_number, default=50, metavar="COUNT", help=blocks)
    budgets = "shares of the far keys that are kept, such as 3%%, comma-separated (default: 0.03,0.06,0.12,0.25,0.5)"
    add("--budgets", type=shares, default=BUDGETS, metavar="P%,P%,…", help=budgets)
    policies = f"eviction policies, comma-separated: all, or of {', '.join(every_policy())} (default: all)"
    add("--policies", type=texts, default=("all",), metavar="NAMES", help=policies)
    sinks = "number of first far tokens that every policy keeps (default: 4)"
    add("--sinks", type=whole_number_or_zero, default=4, metavar="COUNT", help=sinks)
    references = (
        f"what ranks by the targets, comma-separated: {', '.join(REFERENCES)}, or none; :first=16 behind a name "
        "ranks by the next 16 targets (default: leave-one-out-kl)"
    )
    add("--references", type=texts, default=DEFAULT_REFERENCES, metavar="NAMES", help=references)
    near = "how near tokens are read, comma-separated: kept, reread (default: kept,reread)"
    add("--near", type=texts, default=NEARS, metavar="WAYS", help=near)
    placebo = "judge in a far context of another text, too: what shrinking any context costs"
    add("--placebo", action="store_true", help=placebo)
    kept_sets = "also save what share of layers and heads keep each far key"
    add("--kept-sets", action="store_true", help=kept_sets)
    effects = (
        "folder of `olmo-sparsity measure --effects` on the same blocks: leave-one-out-kl is read from it where near "
        "tokens are read again (default: all is measured)"
    )
    add("--effects", metavar="DIR", help=effects)
    only = (
        "judge only drawn blocks of these numbers, from 0, such as 0-7,12; the same command without it judges the "
        "others (default: all)"
    )
    add("--only-blocks", type=block_numbers, metavar="i-j,…", help=only)
    seed = "random seed of all draws (default: 0)"
    add("--seed", type=whole_number_or_zero, default=0, help=seed)
    add_model_options(parser)
    return parser


def shares(text: str) -> tuple[float, ...]:
    """Shares such as ``3%,0.06``, ascending, each once."""
    values = set()
    for item in text.split(","):
        number = item.strip()
        try:
            value = float(number.removesuffix("%"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{item!r} is no share; write it as 3% or 0.03") from None
        if number.endswith("%"):
            value /= 100
        if not 0 < value <= 1:
            raise argparse.ArgumentTypeError(
                f"{item!r} is no share of more than 0 and at most 100 %; write it as 3% or 0.03"
            )
        values.add(value)
    return tuple(sorted(values))


def block_numbers(text: str) -> tuple[int, ...]:
    """Numbers such as ``0-7,12``, ascending, each once."""
    numbers: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", item)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise argparse.ArgumentTypeError(f"{item!r} are no numbers of blocks; write them as 0-7 or 12")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def check_no_texts(parsed: argparse.Namespace) -> None:
    """Raise `UserError` for texts without a model, which may be among the files of --text."""
    for name in ("text", "corpus"):
        if vars(parsed)[name] is not None:
            raise UserError(
                f"there is no MODEL; name it before --{name}, or leave --{name} out to print what is in {parsed.out}"
            )


def main() -> None:
    """Measure, write, draw and print; or draw and print again."""
    parsed = eviction_parser().parse_args()
    show_log("analysis")
    result: Any
    files = []
    if parsed.model is None:
        check_no_texts(parsed)
        from analysis.cache_eviction.result import EvictionResult

        result = EvictionResult.load(parsed.out)
    else:
        from analysis.cache_eviction.run import eviction

        source = texts_of(parsed, parsed.model)
        not_options = ("model", *TEXT_OPTIONS)
        options = {name: value for name, value in vars(parsed).items() if name not in not_options}
        result = eviction(parsed.model, source, **options)
        if parsed.only_blocks is not None:
            print(result)
            print(
                "\nthese are some of the blocks; next: the same command without --only-blocks judges the others"
            )
            return
        files = [parsed.out / "eviction.json"]
    files += result.write(parsed.out)
    print(result)
    print(f"\nwrote {', '.join(map(str, files))}")
