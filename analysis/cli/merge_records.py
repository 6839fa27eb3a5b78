"""Put the shards of one or more measurements together, each into an ordinary records folder.

example:
  olmo-sparsity merge_records runs/demo/influence

after `olmo-sparsity influence … --out runs/demo/influence --shard i/n` has finished for every i from 1 to n. Missing
and unfinished shards are named. The merged records are those of one run without --shard, ready for figure2. A merged
folder is left as it is, and a merge that was killed is done again by the same command. The shards stay; they may be
removed afterwards.
"""

from __future__ import annotations

from olmo_sparsity.cli import show_log
from olmo_sparsity.util.arguments import Parser, out_folder


def main() -> None:
    """Parse arguments and merge."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "out",
        nargs="+",
        type=out_folder,
        metavar="OUT",
        help="--out of olmo-sparsity influence, which holds shard-*-of-*",
    )
    arguments = parser.parse_args()
    from analysis.records.shards import merge_records

    show_log("analysis")
    for out in arguments.out:
        print(f"records: {merge_records(out)}")
