"""What the tests of `analysis` measure: tiny models with their corpora, and losses again by one plain pass each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import rel_entr

from analysis.measure.settings import InfluenceSettings
from analysis.text.contexts import Contexts
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support import tiny
from tests.support.tiny import checkpoint

N, M, KS = 20, 5, (1, 2, 4)


@torch.no_grad()
def plain_log_p(model, text: Sequence[int], kept: Sequence[int]) -> np.ndarray:
    """log p of every token after the tokens text[j] of all j in ``kept``, each with position id j: one forward pass."""
    ids = torch.tensor([[int(text[j]) for j in kept]])
    logits = model(ids, position_ids=torch.tensor([list(kept)]), attention_mask=torch.ones_like(ids)).logits
    return logits[0, -1].double().log_softmax(-1).numpy()


def plain_loss(model, text: Sequence[int], kept: Sequence[int], token: int) -> float:
    """-log p of ``token``, see `plain_log_p`."""
    return -plain_log_p(model, text, kept)[int(token)]


@torch.no_grad()
def masked_loss(model, contexts: Contexts, row: int, kept: Sequence[int]) -> float:
    """-log p of a target given its whole context, in which an attention mask hides all but the tokens ``kept``."""
    n_long = contexts.tokens.shape[1]
    mask = torch.zeros(1, n_long, dtype=torch.long)
    mask[0, list(kept)] = 1
    tokens = torch.from_numpy(contexts.tokens[row])[None]
    logits = model(tokens, torch.arange(n_long)[None], attention_mask=mask).logits[0, -1].double()
    return float(-logits.log_softmax(-1)[contexts.targets[row, 0]])


def random_contexts(
    n_long: int, n_short: int, count: int = 3, seed: int = 0, vocabulary: int = 50
) -> Contexts:
    """Contexts of random tokens, each with one target."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, vocabulary, (count, n_long))
    targets = generator.integers(1, vocabulary, (count, 1))
    return Contexts(tokens, targets, 10 * np.arange(count)[:, None], n_short)


def plain_divergence(kind: str, log_p: np.ndarray, log_q: np.ndarray) -> float:
    """KL(p || q) by SciPy, or the most by which an event is likelier under p than under q: total variation."""
    p, q = np.exp(log_p), np.exp(log_q)
    return float(rel_entr(p, q).sum() if kind == "kl" else (p - q)[p > q].sum())


def write_models(folder: Path, lengths: Sequence[int], **models: dict) -> Path:
    """A corpus of documents of these lengths, and for each name, with changes of the model, a run of random weights."""
    documents = [document for n in lengths for document in tiny.random_documents(1, n, seed=n)]
    corpus = tiny.write_corpus(folder / "corpus", {"train": documents[:1], "heldout": documents})
    for name, changes in models.items():
        (folder / name).mkdir()
        checkpoint(folder / name, corpus=corpus, **changes)
    return folder


def influence_settings(
    trained: Path, out: Path, checkpoint: str | Path = "run", **changes
) -> InfluenceSettings:
    """Settings for a model of the fixture `trained`, on the CPU."""
    values = {"n_long": N, "n_short": M, "tau_nats": 0.05, "ks": KS, "targets": 60, "device": "cpu"}
    if changes.get("evaluate_with"):
        changes["evaluate_with"] = str(trained / changes["evaluate_with"])
    paths = {"checkpoint": str(trained / checkpoint), "corpus": str(trained / "corpus"), "out": str(out)}
    return InfluenceSettings(**{**values, **paths, **changes})


def arrays(records) -> list[np.ndarray]:
    """Losses and selected tokens of records, of every selector in both contexts."""
    both = [(name, far) for name in records.manifest.selectors for far in ("true", "placebo")]
    return [kind[name][far] for kind in (records.loss_nats, records.selected) for name, far in both]


def assert_losses_are_plain(records, corpus: Path, model) -> None:
    """Losses of the first targets again, one subsequence at a time, from the token files and the checkpoint."""
    tokens = TokenFiles.of_split(corpus, "heldout")
    targets, close = records.targets, {"abs": 1e-4}
    for row, at in enumerate(records.over[:5]):
        document, position = tokens.document(targets.document[at]), int(targets.position[at])
        window, token = document[position - read(records, at) : position], int(document[position])
        short = list(range(N - M, len(window)))
        assert token == targets.token[at]
        long = plain_loss(model, window, range(len(window)), token)
        assert targets.loss_long_nats[at] == pytest.approx(long, **close)
        assert targets.loss_short_nats[at] == pytest.approx(plain_loss(model, window, short, token), **close)
        for far, text in (("true", window), ("placebo", placebo_window(records, tokens, at))):
            for selector in records.manifest.selectors:
                chosen = records.selected[selector][far][row].tolist()
                expected = [plain_loss(model, text, sorted(chosen[:k]) + short, token) for k in KS]
                assert records.loss_nats[selector][far][row].tolist() == pytest.approx(expected, **close)


def read(records, at: int) -> int:
    """How many tokens of long context target ``at`` has: N, and in a block its place more."""
    return N + int(records.targets.target_id[at]) % records.manifest.targets_per_block


def placebo_window(records, tokens: TokenFiles, at: int) -> np.ndarray:
    """The context of target ``at`` with the far tokens of its placebo."""
    targets = records.targets
    start, position = int(targets.placebo_start[at]), int(targets.position[at])
    other = tokens.document(targets.placebo_document[at])[start : start + N - M]
    short = tokens.document(targets.document[at])[position - read(records, at) + N - M : position]
    return np.concatenate([other, short])
