"""What weights of four bits change, on a model of which there are others: results/checkpoint, rounded as SmolLM2's are.

    python results/models/four_bits.py round results/checkpoint OUT     the same model with Q4_1 weights
    python results/models/four_bits.py                                  prints what the two measurements say

Matrices of layers are rounded to Q4_1 and the embedding, which is the output layer, too, to Q8_0, by the gguf package;
norms stay. The rounded one is the cell checkpoint-q4-n128 of this study, the other is in its folder checkpoint.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from analysis import load, load_study
from analysis.stats import numbers
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.tables import show

HERE, WEIGHTS, EMBEDDING = Path(__file__).parent, "model.safetensors", "model.embed_tokens.weight"
CELL = "checkpoint-q4-n128"


def rounded(name, weight):
    """A tensor as its GGUF would give it back."""
    if weight.ndim < 2:
        return weight
    kind = GGMLQuantizationType.Q8_0 if name == EMBEDDING else GGMLQuantizationType.Q4_1
    values = quants.dequantize(quants.quantize(weight.float().numpy(), kind), kind)
    return torch.from_numpy(np.ascontiguousarray(values))


def round_model(source, out):
    """Write the model with rounded weights, in float32."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("influence", "README.md"))
    tensors = load_file(Path(source, WEIGHTS))
    save_file(
        {name: rounded(name, weight) for name, weight in tensors.items()},
        Path(out, WEIGHTS),
        {"format": "pt"},
    )


def compare():
    """Print both measurements, and how they differ on the same targets."""
    whole, coarse = load(HERE / "checkpoint"), load_study(HERE)[CELL]
    for cell, result in {"checkpoint": whole, CELL: coarse}.items():
        print("\n" + show(numbers.shares(result), title=cell))
        for _, recovery in numbers.recovery(result).groupby(["level", "unit", "sinks"], sort=False):
            print("\n" + show(recovery, across="far_context", digits=0, title=cell))
    bootstrap = ClusterBootstrap.of(whole.targets)
    for name in ("loss_long_nats", "loss_short_nats"):
        more = coarse.targets[name].to_numpy(float) - whole.targets[name].to_numpy(float)
        interval = bootstrap.interval(bootstrap.ratio(more, np.ones(len(more))))
        print(
            f"{name} is higher by {interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}] with four bits"
        )
    print("correlation of the gains", np.corrcoef(whole.gain_nats, coarse.gain_nats)[0, 1])
    over = whole.targets["over_tau"].to_numpy(bool), coarse.targets["over_tau"].to_numpy(bool)
    print(f"over tau: {over[0].sum()}, {over[1].sum()}, both {(over[0] & over[1]).sum()}")
    chosen = [
        result.choices[
            (result.choices["selector"] == "leave-one-out-kl")
            & (result.choices["far_context"] == "true")
            & (result.choices["level"] == "text")
            & (result.choices["unit"] == "token")
        ].set_index("target_id")["selected"]
        for result in (whole, coarse)
    ]
    both = chosen[0].index.intersection(chosen[1].index)
    same = [len({*chosen[0][each][:4]} & {*chosen[1][each][:4]}) / 4 for each in both]
    print(
        f"of four chosen tokens {np.mean(same):.0%} are the same, the first in "
        f"{np.mean([chosen[0][each][0] == chosen[1][each][0] for each in both]):.0%} of {len(both)} targets"
    )


if __name__ == "__main__":
    round_model(*sys.argv[2:]) if sys.argv[1:2] == ["round"] else compare()
