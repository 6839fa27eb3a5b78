"""The parts of scripts/fault_test.py. Their names stand here, where nothing heavy is imported."""

FAULTS = (
    *(
        "kill",
        "full-disk",
        "bit-flip",
        "truncation",
        "deletion",
        "second-process",
        "stalled-peer",
        "dead-peer",
    ),
    *("read-only", "changed-input"),
)
UNDER_TEST = (
    *("prepare", "prepare-shard", "prepare-merge", "train", "train-resume", "train-2", "train-2-resume"),
    *("influence", "influence-shard", "merge", "export", "figure2", "report"),
)
"""Commands, as `faults.commands` describes them."""
