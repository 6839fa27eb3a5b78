"""Measure how much the far context helps a model, and how much of that k influential far tokens recover (Eq. 20).

examples:
  olmo-sparsity influence runs/demo --out runs/demo/influence
  olmo-sparsity influence runs/demo --corpus data/books --out runs/demo/on-books --shard 3/8
  olmo-sparsity influence runs/books --out runs/books/all-selectors \\
      --selectors leave-one-out,leave-one-out-kl,input-x-gradient,attention,leave-one-out@gradient:32,random
  olmo-sparsity influence --select-with runs/books --evaluate-with runs/books-2 --out runs/books/crossfit
  olmo-sparsity influence --select-with runs/books@untrained --evaluate-with runs/books --out runs/books/untrained

For sampled targets of the held-out split it computes L_long (N tokens of context) and L_short (the last M of them).
Where L_short - L_long exceeds tau, every selector ranks the N - M far tokens, and L_k is measured with the short
context and the first k of them. The same is done on a placebo: the far context of another document. Records are
written as they are finished; the same command goes on after an interruption. Draw them with figure2.
With --targets-per-block 32 targets are measured in blocks that share a far context: leave-one-out and leave-one-in, in
all forms, and attention cost one forward pass for all targets of a block instead of one for each. The short context
then has M to M + 31 tokens.

With --shard i/n, n jobs measure a part each, which merge_records puts together (submit influence does both under
SLURM); the records are those of one run without --shard.

With --further-placebos same-group,shuffled the same is done on two more far contexts: another document of the target's
own group (its book, site or package), and the true far context with its tokens in random order. With leave-one-out and
leave-one-out-kl among the selectors, figure2 then tells the parts of a recovery: luck, context that such text has in
common, and the specific rest (docs/method.md, 2.3).

Selectors are of three families. A signed one ranks by the loss of the target, with its sign: it finds what that loss
likes, luck included, so its placebo is large. An absolute one ranks by the magnitude, or the gradient's norm: it finds
what moves that loss either way. A target-blind one ranks by how far the predicted distribution moves, in KL or total
variation (tv), and never looks at the target: its choice has no luck to subtract.

A screened selector EXACT@PROPOSER:m lets EXACT decide among the m tokens that PROPOSER puts first, at m/(N - M) of its
cost. With --propose-with SMALL, a smaller model of the same tokenizer proposes. With --select-with A --evaluate-with
B, A chooses targets and tokens and B, trained from another seed, measures their gain and recovery (cross-fitting), so
that what A selected by chance does not count. A may be finished records; then nothing is selected again.
CKPT@SCHEME:FACTOR in place of a checkpoint, such as runs/rope@yarn:4, scales its RoPE as in the command length (not in
cross-fitting). CKPT@untrained is its architecture with freshly drawn weights: given to --select-with, with CKPT to
--evaluate-with, it chooses tokens for the targets of CKPT. A selector that explains CKPT must do much worse there
(sanity check).

Beside recovery it measures faithfulness: what is lost without the chosen tokens (comprehensiveness), and whether summed
influence predicts the loss on --subsets random halves of the far tokens (LDS); docs/method.md, 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.measure.selectors import FAMILIES, check_selector
from analysis.measure.settings import CHECKPOINT, InfluenceSettings
from analysis.records.schema import check_measured
from analysis.records.shards import MeasurementShard
from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser, add_arguments, settings_from
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Measure, and say what was found."""
    settings = parse_settings()
    from analysis.measure.influence import measure_influence

    show_log("analysis")
    print(f"records: {measure_influence(settings)}")
    for line in outcome(settings):
        print(line)


def parse_settings(arguments: Sequence[str] | None = None) -> InfluenceSettings:
    """What the command line asks for, or these ``arguments`` would. Raises `UserError` where it cannot be measured."""
    given = _parser().parse_args(arguments)
    shard = None if given.shard is None else MeasurementShard.parse(given.shard)
    settings = settings_from(
        InfluenceSettings,
        given,
        checkpoint=_who_selects(given.checkpoint, given.select_with, given.evaluate_with),
        shard=shard if shard is not None and shard.count > 1 else None,
    )
    check_measured(settings.n_long, settings.n_short, settings.ks, settings.selectors)
    for name in settings.selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_long - settings.n_short)
    return settings


def outcome(settings: InfluenceSettings) -> list[str]:
    """What the records say in a line, and the next command."""
    from analysis.records.store import load_records
    from analysis.stats.findings import describe_findings

    if settings.shard:
        return [
            f"next, when all {settings.shard.count} shards are finished: olmo-sparsity merge_records {settings.out}"
        ]
    records = load_records(settings.folder)
    if not records.manifest.complete:
        return [describe_findings(records), "next: the same command, which goes on with the rest"]
    return [describe_findings(records), f"next: olmo-sparsity figure2 {settings.folder}"]


def _parser() -> Parser:
    lines = [f"  {family + ':':<14}{', '.join(names)}" for family, names in FAMILIES.items()]
    epilog = "\n".join(["selectors, and EXACT@PROPOSER:m of any two:", *lines])
    parser = Parser(description=__doc__, epilog=epilog)
    parser.add_argument("checkpoint", nargs="?", help=CHECKPOINT)
    parser.add_argument(
        "--select-with", metavar="A", help="cross-fitting: the checkpoint, or its records, that chooses"
    )
    add_arguments(parser, InfluenceSettings)
    parser.add_argument(
        "--shard", metavar="I/N", help="measure part I (from 1) of N, into a folder beneath --out"
    )
    return parser


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
