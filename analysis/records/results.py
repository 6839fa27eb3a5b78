"""The results that are one JSON file: what each calls itself, what makes it, and the shape that its readers need.

Read and written by `olmo_sparsity.util.result_files`; exact match has its own there.
"""

from __future__ import annotations

from olmo_sparsity.util.result_files import INTERVAL, ResultFile

_AT_LENGTHS = [{"length": int, "loss_nats": INTERVAL, "rise_nats": INTERVAL}]

LENGTH = ResultFile(
    "length.json",
    "olmo-sparsity loss by position",
    3,
    "loss by position",
    "scripts/length.py",
    shape={
        "settings": {"lengths": [int], "windows_measured": int, "documents": int},
        "models": [
            {
                "label": str,
                "bins": [{"from": int, "to": int, "loss_nats": INTERVAL}],
                "at_lengths": _AT_LENGTHS,
                "checkpoints": [
                    {
                        **dict.fromkeys(("checkpoint", "checkpoint_sha256"), str),
                        "parameters": int,
                        **dict.fromkeys(("training_seed", "training_length", "position_target"), (int, None)),
                        "position_scheme": (str, None),
                        "rope_scaling": (dict, None),
                        "at_lengths": _AT_LENGTHS,
                    }
                ],
            }
        ],
    },
)

NEEDLE = ResultFile(
    "needle.json",
    "olmo-sparsity needles",
    2,
    "needles",
    "scripts/needle.py",
    shape={
        "settings": {"lengths": [int], "ks": [int], "depths": [float], "recall": (dict, None)},
        "models": [
            {
                "label": str,
                "cells": [
                    {
                        **dict.fromkeys(("value_tokens", "length"), int),
                        "depth": float,
                        **dict.fromkeys(("exact", "absent_exact", "gain_nats"), INTERVAL),
                    }
                ],
                "checkpoints": [{"training_seed": (int, None), "recall": (dict, None)}],
            }
        ],
    },
)

RECALL = ResultFile(
    "recall.json",
    "olmo-sparsity recall of planted tokens",
    3,
    "recall of a checkpoint",
    "scripts/recall.py --checkpoint",
    shape={
        "run": str,
        "step": int,
        "task": {"name": str},
        **dict.fromkeys(("n_long", "n_short", "samples"), int),
        "ks": [int],
        "chance": {...: {...: float}},
        "cells": [{"planted": int, "accuracy": {"value": float}, "selectors": {...: {...: {...: INTERVAL}}}}],
    },
    before={"format": 2, "measured": "checkpoint"},
)

COUPLING = ResultFile(
    "coupling.json",
    "olmo-sparsity coupling",
    1,
    "coupling",
    "scripts/couple.py",
    shape={
        "marks": list,  # of text none is always the same
        "segments": [{"counted_from": str, "first_id": int, "agreement": float}],
        "as_the_task_says": (float, None),
    },
)

_FORM = {
    **dict.fromkeys(("key_tokens", "share", "longppl", "ppl_short", "mean_lsd_nats"), INTERVAL),
    "tokens_read": int,
}

LONGPPL = ResultFile(
    "longppl.json",
    "olmo-sparsity LongPPL",
    1,
    "LongPPL",
    "scripts/longppl.py",
    shape={
        **dict.fromkeys(("targets", "documents"), int),
        "ppl": INTERVAL,
        "settings": {
            **dict.fromkeys(("n_long", "n_short", "sliding_window"), int),
            **dict.fromkeys(("alpha_nats", "beta_nats"), float),
        },
        "agreement": {"jaccard": INTERVAL},
        "forms": {"exact": _FORM, "published": _FORM},
    },
    before={},
)

SIDES = ("first", "second")

_PAIRED = dict.fromkeys((*SIDES, "difference"), INTERVAL)

COMPARISON = ResultFile(
    "compare.json",
    "olmo-sparsity comparison",
    1,
    "comparison",
    "scripts/compare.py --out",
    shape={
        **{side: {"checkpoint": str} for side in SIDES},
        **dict.fromkeys(("share_over_tau", "gap_short_minus_long"), _PAIRED),
        "selectors": {...: {...: dict.fromkeys(("recovery", "placebo_recovery", "net_recovery"), _PAIRED)}},
    },
    before={},
)

CORPORA = ResultFile(
    "corpora.json", "olmo-sparsity corpora side by side", 1, "corpora side by side", "scripts/corpora.py"
)

LADDER = ResultFile("ladder.json", "olmo-sparsity ladder", 3, "ladder", "scripts/ladder.py")

INFLUENCE_BENCHMARK = ResultFile(
    "influence.json",
    "olmo-sparsity benchmark influence",
    1,
    "benchmark of the influence analysis",
    "scripts/benchmark.py influence",
)

INFLUENTIAL_TOKENS = ResultFile(
    "influential_tokens.json",
    "olmo-sparsity influential tokens",
    1,
    "influential tokens",
    "InfluentialTokens.save",
    shape={
        "pieces": [str],
        "targets": {...: list},
        "choices": {...: {...: {...: list}}},
        "placebo_pieces": list,
        "placebo": str,
        **dict.fromkeys(("n_long", "n_short", "targets_per_block", "k"), int),
        "tau_nats": float,
    },
)
