"""The result files of the measurements that write no records folder: their names, kinds, and what readers need of them.

`olmo_sparsity.util.result_files` says how such a file is written and checked.
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

RECALL_NAME = "recall.json"
FORMAT, OF_HAND_BUILT = 2, "hand-built models"
"""Format of that file of hand-built models, which nothing reads, and what it says was measured."""
RECALL = ResultFile(
    RECALL_NAME,
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
        **dict.fromkeys(("n_long", "n_short", "k"), int),
        "tau_nats": float,
    },
)
