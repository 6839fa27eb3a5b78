"""Measure how much the far context helps a model, and how much of that k influential far tokens recover (Eq. 20).

examples:
  python scripts/influence.py runs/demo --corpus runs/demo/data --out runs/demo/influence
  python scripts/influence.py runs/demo --corpus runs/demo/data --out runs/demo/influence --shard 3/8
  python scripts/influence.py runs/books --corpus runs/books/data --out runs/books/all-selectors \\
      --selectors leave-one-out,greedy,gradient,attention,leave-one-out@gradient:32,random,nearest
  python scripts/influence.py --select-with runs/books --evaluate-with runs/books-2 --corpus runs/books/data \\
      --out runs/books/crossfit

For sampled targets of the held-out split it computes L_long (N tokens of context) and L_short (the last M of them).
Where L_short - L_long exceeds tau, every selector ranks the N - M far tokens, and L_k is measured with the short
context and the first k of them. The same is done on a placebo: the far context of another document. Records are
written as they are finished; the same command goes on after an interruption. Draw them with scripts/figure2.py.
With --shard i/n, n jobs measure a part each, which scripts/merge_records.py puts together (scripts/submit.py influence
does both under SLURM); the records are those of one run without --shard.

A screened selector EXACT@PROPOSER:m lets EXACT decide among the m tokens that PROPOSER puts first, at m/(N - M) of its
cost. With --select-with A --evaluate-with B, A chooses targets and tokens and B, trained from another seed, measures
what they are worth: A's luck does not carry over (cross-fitting). A may be finished records; then nothing is selected
again. CKPT@SCHEME:FACTOR in place of a checkpoint, such as runs/rope@yarn:4, scales its RoPE as in scripts/length.py
(not in cross-fitting).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from olmo_sparsity.util.arguments import (
    Parser,
    finite_number,
    out_folder,
    positive_number,
    seed_number,
    whole_number,
    whole_numbers,
)
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from analysis.measure.settings import InfluenceSettings


def main() -> None:
    """Parse arguments and measure."""
    from analysis.measure.influence import measure_influence

    settings = parse_settings()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("analysis").setLevel(logging.INFO)
    print(f"records: {measure_influence(settings)}")


def parse_settings(arguments: Sequence[str] | None = None) -> InfluenceSettings:
    """What the command line asks for, or these ``arguments`` would. Raises `UserError` where it cannot be measured."""
    from analysis.measure.selectors import check_selector
    from analysis.measure.settings import InfluenceSettings
    from analysis.records.schema import check_measured
    from analysis.records.shards import MeasurementShard

    values = vars(_parser().parse_args(arguments))
    shard = None if values["shard"] is None else MeasurementShard.parse(values["shard"])
    values["shard"] = shard if shard is not None and shard.count > 1 else None
    values["checkpoint"] = _who_selects(
        values["checkpoint"], values.pop("select_with"), values["evaluate_with"]
    )
    values["memory_limit_gb"] = values.pop("memory_limit")
    values["tau_nats"] = values.pop("tau")
    values["ks"] = values.pop("k")
    values["selectors"] = tuple(name.strip() for name in values["selectors"].split(","))
    settings = InfluenceSettings(**values)
    check_measured(settings.n_long, settings.n_short, settings.ks, settings.selectors)
    for name in settings.selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_long - settings.n_short)
    return settings


def _parser() -> Parser:
    from analysis.measure.settings import InfluenceSettings

    default = {
        field.name: field.default for field in fields(InfluenceSettings) if field.default is not MISSING
    }
    parser = Parser(description=__doc__)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="checkpoint, run (then its last one), transformers directory, or id of a model on the Hugging Face hub",
    )
    parser.add_argument(
        "--select-with", metavar="A", help="cross-fitting: the checkpoint, or its records, that chooses"
    )
    parser.add_argument("--evaluate-with", metavar="B", help="cross-fitting: the checkpoint that measures")
    parser.add_argument(
        "--corpus", required=True, help="folder made by scripts/prepare_data.py with the same tokenizer"
    )
    parser.add_argument("--out", type=out_folder, required=True, help="folder for the records")
    parser.add_argument(
        "--split", default=default["split"], help="split of the corpus (default: %(default)s)"
    )
    _add_what_is_measured(parser, default)
    parser.add_argument("--bf16", action="store_true", help="score in bf16: faster, coarser")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    parser.add_argument(
        "--memory-limit",
        type=positive_number,
        metavar="GB",
        help="what a batch may take (default: half the memory, or 80 %% of what is free on the GPU)",
    )
    parser.add_argument(
        "--tokens-per-batch",
        type=whole_number,
        help="tokens of one forward pass (default: what fits the memory limit)",
    )
    parser.add_argument(
        "--limit",
        type=whole_number,
        metavar="n",
        help="measure n targets over tau now; the same command goes on with the rest",
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="measure part I (from 1) of N, into a folder beneath --out"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove records that are in --out")
    return parser


def _add_what_is_measured(parser: Parser, default: dict[str, Any]) -> None:
    """Arguments that decide the numbers."""
    from analysis.measure.selectors import SELECTORS

    parser.add_argument(
        "--n-long",
        type=whole_number,
        default=default["n_long"],
        help="N, long context (default: %(default)s tokens)",
    )
    parser.add_argument(
        "--n-short",
        type=whole_number,
        default=default["n_short"],
        help="M, short context (default: %(default)s tokens)",
    )
    parser.add_argument(
        "--tau",
        type=finite_number,
        default=default["tau_nats"],
        help="threshold on L_short - L_long (default: %(default)s nat)",
    )
    parser.add_argument(
        "--k",
        type=whole_numbers,
        default=",".join(map(str, default["ks"])),
        help="numbers of tokens, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--selectors",
        default=",".join(default["selectors"]),
        help=f"comma-separated, of: {', '.join(SELECTORS)}, EXACT@PROPOSER:m (default: %(default)s)",
    )
    parser.add_argument(
        "--targets",
        type=whole_number,
        default=default["targets"],
        help="targets to sample (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=default["seed"],
        help="seed of targets, placebos and the random control (default: %(default)s)",
    )


def _who_selects(checkpoint: str | None, select_with: str | None, evaluate_with: str | None) -> str:
    """The checkpoint that selects, however it was given."""
    if checkpoint and select_with:
        raise UserError(f"give {checkpoint} or --select-with {select_with}, not both")
    if select_with and not evaluate_with:
        raise UserError(
            "--select-with needs --evaluate-with: the checkpoint that measures what the other one chose"
        )
    if chosen := checkpoint or select_with:
        return chosen
    raise UserError("give a checkpoint to measure, or --select-with A --evaluate-with B")
