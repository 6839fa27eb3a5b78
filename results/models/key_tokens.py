"""LongPPL's key tokens (arXiv 2410.23771) by the authors' package (longppl 0.3.0) and by `olmo-sparsity longppl`.

    python results/models/key_tokens.py FOLDER TEXTS.jsonl results/models/key-tokens-books.json

FOLDER holds a model as transformers saves it. The first N tokens of every text are read. Theirs shares a window of M +
S tokens among S targets, so that one of them has M to M + S - 1 tokens of short context; ours has M. Both call a token
key where it gains more than 2 nats and its loss is below 2. Prints and writes how many each calls key, how many both
do, and the perplexity on them.
Shapes: n texts, T = N - M - S targets of each.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from longppl.longppl import find_key_token
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis.model.token_losses import TokenLosses
from analysis.open_model import open_model
from analysis.probes.longppl import target_losses
from olmo_sparsity.util.files import sha256_file, write_json

N, M, S = 512, 64, 16
ALPHA = BETA = 2.0


@torch.inference_mode()
def main(folder: str, texts: str, out: str) -> None:
    """Compare on all texts that have N tokens."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    loaded = open_model(folder)
    token_losses = TokenLosses(loaded.model)
    counts = dict.fromkeys(("targets", "theirs", "ours", "both"), 0)
    key_losses: dict[str, list[float]] = {"theirs": [], "ours": []}
    for line in map(json.loads, Path(texts).read_text(encoding="utf8").splitlines()):
        whole = tokenizer(line["text"], return_offsets_mapping=True, add_special_tokens=False)
        if len(whole["input_ids"]) < N:
            continue
        text = line["text"][: whole["offset_mapping"][N - 1][1]]
        read = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        tokens, places = np.array(read["input_ids"])[None], np.array(read["offset_mapping"])
        long, short = (losses[0] for losses in target_losses(token_losses, tokens, M, S))
        is_ours = (short - long > ALPHA) & (long < BETA)
        spans = find_key_token(text, model, tokenizer, M, S, alpha=ALPHA, beta=-BETA).tolist()
        is_theirs = np.array(
            [any(a <= start and end <= b for a, b in spans) for start, end in places[M + S :]]
        )
        for name, value in zip(
            counts, (np.ones_like(is_ours), is_theirs, is_ours, is_theirs & is_ours), strict=True
        ):
            counts[name] += int(value.sum())
        key_losses["theirs"] += long[is_theirs].tolist()
        key_losses["ours"] += long[is_ours].tolist()
        print(line["group"], counts)
    perplexity = {name: float(np.exp(np.mean(losses))) for name, losses in key_losses.items()}
    model = loaded.identity
    about = {"model_sha256": model.sha256, "tokenizer_sha256": model.tokenizer_sha256, "dtype": model.dtype}
    about |= {"texts": Path(texts).name, "texts_sha256": sha256_file(texts)}
    write_json(
        out, {**about, "n_long": N, "n_short": M, "sliding_window": S, **counts, "longppl": perplexity}
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
