"""What weights of four bits change, on a model of which there are others: results/checkpoint, rounded as SmolLM2's are.

    python results/models/four_bits.py round results/checkpoint OUT     the same model with Q4_1 weights
    python results/models/four_bits.py                                  prints what the two measurements say
    python results/models/four_bits.py --numbers results/models/checkpoint/numbers.csv    writes those with intervals

Matrices of layers are rounded to Q4_1 and the embedding, which is the output layer, too, to Q8_0, by the gguf package;
norms stay. The rounded one is the cell checkpoint-q4-n128 of this study, the other is in its folder checkpoint.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from analysis import load, load_study
from analysis.stats import numbers
from analysis.stats.comparisons import result_differences, result_overlaps
from analysis.stats.recovery import KEPT_AS_COLUMNS
from analysis.stats.tables import Tables, interval_text
from analysis.study_options import study_parser

HERE, WEIGHTS, EMBEDDING = Path(__file__).parent, "model.safetensors", "model.embed_tokens.weight"
CELL = "checkpoint-q4-n128"


def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A tensor as its GGUF would give it back."""
    if weight.ndim < 2:
        return weight
    kind = GGMLQuantizationType.Q8_0 if name == EMBEDDING else GGMLQuantizationType.Q4_1
    values = quants.dequantize(quants.quantize(weight.float().numpy(), kind), kind)
    return torch.from_numpy(np.ascontiguousarray(values))


def round_model(source: str, out: str) -> None:
    """Write the model with rounded weights, in float32."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("influence", "README.md"))
    tensors = load_file(Path(source, WEIGHTS))
    save_file(
        {name: rounded(name, weight) for name, weight in tensors.items()},
        Path(out, WEIGHTS),
        {"format": "pt"},
    )


def compare(arguments: Sequence[str] | None = None) -> None:
    """Print both measurements, and how they differ on the same targets; write that where it is asked for."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    whole, coarse = load(given.records / "checkpoint"), load_study(given.records)[CELL]
    tables = Tables()
    for cell, result in {"checkpoint": whole, CELL: coarse}.items():
        tables.add(cell, numbers.shares(result))
        recovery = numbers.recovery(result)
        tables.add(f"{cell}, recovery", recovery, by=KEPT_AS_COLUMNS, across="far_context", digits=0)
    differences = result_differences(coarse, whole)
    tables.frames[f"{CELL} less checkpoint"] = differences
    for name in ("loss_long_nats", "loss_short_nats"):
        [row] = differences[differences["name"] == name].to_dict("records")
        print(f"{name} is higher by {interval_text(row, digits=3)} with four bits")
    print("correlation of the gains", np.corrcoef(whole.gain_nats, coarse.gain_nats)[0, 1])
    of_whole, of_coarse = (result.targets["over_tau"].to_numpy(bool) for result in (whole, coarse))
    print(f"over tau: {of_whole.sum()}, {of_coarse.sum()}, both {(of_whole & of_coarse).sum()}")
    overlaps = result_overlaps(whole, coarse)
    tables.frames["the same tokens"] = overlaps
    overlaps = overlaps[(overlaps["selector"] == "leave-one-out-kl") & (overlaps["far_context"] == "true")]
    same = dict(zip(overlaps["k"], overlaps["value"], strict=True))
    print(
        f"of four chosen tokens {same[4]:.0%} are the same, the first in {same[1]:.0%} of "
        f"{overlaps['n_targets'].iloc[0]} targets"
    )
    if given.numbers:
        tables.save(given.numbers)


if __name__ == "__main__":
    round_model(*sys.argv[2:]) if sys.argv[1:2] == ["round"] else compare()
