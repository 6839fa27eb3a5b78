"""Do far tokens break addition? Digits that are wrong, the truth before them given, by how far the model reads.

    python results/synthetic/far_tokens.py OUT.json RUN...

A digit of the sum is predicted from all tokens before it, or from those whose id is within W of its own, "+", "=" and
the beginning. A token that is left out is absent; the others keep their ids. Intervals: 95 %, bootstrap over samples.
"""

import numpy as np
import torch

from olmo_sparsity.checkpoint import load_model, resolve_checkpoint, weights_sha256
from olmo_sparsity.data.build import task_of, task_positions
from olmo_sparsity.model.build import as_predictor
from olmo_sparsity.tasks.assemble import SPECIAL_TOKENS
from olmo_sparsity.util.arguments import Parser
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.provenance import current_commit

LENGTHS, WITHIN, SAMPLES, SEED = (10, 30, 50, 75, 100), (5, 10, 20, 40, None), 100, 2


@torch.no_grad()
def wrong_digits(model, tokens, ids, start, within):
    """Which digits of the sums (samples, digits) are wrong."""
    is_wrong = []
    for column in range(start, tokens.shape[1] - 1):  # the last one is the end of the sample
        kept = np.ones((len(tokens), column), dtype=bool)
        if within is not None:
            kept = np.abs(ids[:, :column] - ids[:, [column]]) <= within
            kept |= tokens[:, :column] < len(SPECIAL_TOKENS) + 2
            kept[:, -1] = True  # predicts
        columns = np.stack([np.flatnonzero(row) for row in kept])  # as many in each: all have the same layout
        inputs = (torch.from_numpy(np.take_along_axis(values, columns, axis=1)) for values in (tokens, ids))
        logits = model(*inputs, logits_to_keep=1).logits
        is_wrong.append(logits[:, -1].argmax(dim=-1).numpy() != tokens[:, column])
    return np.stack(is_wrong, axis=1)


def with_interval(wrong):
    """Mean of (samples, digits)."""
    means = wrong.mean(axis=1)
    drawn = np.random.default_rng(0).integers(len(means), size=(2000, len(means)))
    low, high = np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])
    return {"value": float(means.mean()), "low": float(low), "high": float(high)}


def of_run(run):
    """The rows of one run."""
    checkpoint = resolve_checkpoint(run)
    model, config = load_model(checkpoint)
    model = as_predictor(model.eval())
    indices, rows = np.arange(SAMPLES), []
    for length in LENGTHS:
        batch = task_of(config).at_length(length, None).sample("test", SEED, indices)
        ids = task_positions(config).ids(batch, split="test", seed=SEED, indices=indices)
        start = int(batch.response_start[0])
        for within in WITHIN:
            wrong = wrong_digits(model, batch.tokens, ids, start, within)
            rows.append({"length": length, "within": within, "wrong": with_interval(wrong)})
            print(run, rows[-1], flush=True)
    about = {"family": config.model.family, "attention": config.model.attention, "seed": config.seed}
    return {"run": run, "weights_sha256": weights_sha256(checkpoint), **about, "rows": rows}


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("out", metavar="OUT.json")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    given = parser.parse_args()
    write_json(given.out, {"commit": current_commit(), "runs": [of_run(run) for run in given.runs]})
