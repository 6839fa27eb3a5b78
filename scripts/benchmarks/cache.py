"""Leave-one-out in the cache, over far keys that rows share, beside copies a row, leave-one-out as text, and a layer.

Some far tokens, evenly spaced, are left out, and the time of a block is that of all: what is read once, the far context
and the prediction with all keys, is timed apart. Shapes: N long and M short context length, F = N - M far tokens, B
targets of a block.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from analysis.contexts import Contexts
from analysis.model import far_cache
from analysis.model.adapter import Adapter
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from benchmarks.timing import Json, about_this_run, rates, time_in_turn

SHARED, COPIED, TEXT, LAYER = (
    "in the cache, shared keys",
    "in the cache, copied keys",
    "as text",
    "linear layer",
)
LAYER_ROWS = 2048
"""Rows that the model's linear layer multiplies, to say what this machine reaches on such products."""


def run(model: str, tokenizer: str | None, rounds: int, rows: int, **sizes: int) -> Json:
    """Blocks a second of each way, ratios to text and to copies, share of the linear layer's rate, and memory.

    Processor seconds of one thread: the machine may be busy. ``sizes``: ``n_long``, ``n_short`` and
    ``targets_per_block``; ``rows``: far tokens that are left out.
    """
    torch.set_num_threads(1)
    about = about_this_run()
    loaded = open_model(model, tokenizer=tokenizer)
    n_long, n_short, size = sizes["n_long"], sizes["n_short"], sizes["targets_per_block"]
    loaded.check_context(n_long, size, in_cache=True)
    shares = loaded.model.shares_far_keys
    generator = np.random.default_rng(0)
    tokens = generator.integers(loaded.model.vocabulary_size, size=(1, n_long + size))
    contexts = Contexts(tokens[:, :-1], tokens[:, n_long:], np.arange(size)[None], n_short)
    left_out = np.linspace(0, contexts.n_far - 1, rows).astype(int)
    scorer = Scorer(loaded.model, device=loaded.device)

    def in_cache(shared: bool) -> float:
        """Seconds of a block."""
        loaded.model.shares_far_keys = shared
        masks = np.ones((rows, contexts.n_far), dtype=bool)
        masks[np.arange(rows), left_out] = False
        measured = partial(far_cache.measures, scorer, contexts, names=("kl",), targets=contexts.all_targets)
        try:
            return of_block(lambda count: measured(visible=masks[:count]))
        finally:
            loaded.model.shares_far_keys = shares

    def as_text() -> float:
        columns = np.arange(contexts.n_far - 1)
        far = columns + (columns >= left_out[:, None])
        # the first row alone would share no prefix
        return of_block(lambda count: scorer.measures(contexts, far[:count], ("kl",)), least=2)

    def of_block(measure: Callable[[int], object], least: int = 1) -> float:
        started = time.process_time()
        measure(least)
        once = time.process_time() - started
        started = time.process_time()
        measure(rows)
        a_row = (time.process_time() - started - once) / (rows - least)
        return once + (contexts.n_far - least) * a_row

    memory = {"after_far_pass": _peak_gb()}
    far_cache.measures(scorer, contexts, np.ones((1, contexts.n_far), bool), ("kl",), contexts.all_targets)
    memory["after_far_pass"] = _peak_gb()
    in_cache(shared=shares)
    memory["after_rows"] = _peak_gb()
    layer, inputs, operations = _largest_layer(loaded.model)
    ways: dict[str, Callable[[], object]] = {
        SHARED: partial(in_cache, shared=shares),
        COPIED: partial(in_cache, shared=False),
        TEXT: as_text,
        LAYER: lambda: layer(inputs),
    }
    with torch.inference_mode():
        seconds = time_in_turn(ways, rounds, clock=time.process_time)
    layer_rate = operations / float(np.median(seconds.pop(LAYER)))
    results = rates(seconds, 1.0, (COPIED, TEXT))
    counted = _operations_of_block(loaded.model, contexts)
    for way in (SHARED, COPIED):
        results[way]["share_of_layer"] = counted * results[way]["rate"] / layer_rate
    for row in results.values():
        row["seconds_a_block"] = 1 / row.pop("rate")
    about |= {
        "benchmark": "cache",
        "model": loaded.name,
        "parameters": loaded.parameters,
        **sizes,
        "rows": rows,
    }
    about |= {"tokens_per_batch": scorer.tokens_per_batch, "shares_far_keys": shares}
    about |= {f"peak_gb_{when}": gigabytes for when, gigabytes in memory.items()}
    about |= {"tflop_a_block": counted / 1e12, "layer_tflops": layer_rate / 1e12}
    return {**about, "unit": "processor seconds", "results": results}


def _peak_gb() -> float:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _linear_layers(adapter: Adapter) -> list[torch.nn.Linear]:
    """All but the head."""
    layers = [module for module in adapter.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if layer.out_features < adapter.vocabulary_size]


def _largest_layer(adapter: Adapter) -> tuple[torch.nn.Linear, torch.Tensor, float]:
    """A linear layer of the model, inputs for it, and its floating-point operations."""
    layers = _linear_layers(adapter)
    layer = max(layers, key=lambda layer: layer.weight.numel())
    inputs = torch.randn(LAYER_ROWS, layer.in_features, device=layer.weight.device)
    return layer, inputs, 2.0 * LAYER_ROWS * layer.weight.numel()


@torch.inference_mode()
def _operations_of_block(adapter: Adapter, contexts: Contexts) -> float:
    """Floating-point operations of all rows of a block: weights, head, and attention to far keys."""
    layers = _linear_layers(adapter)
    weights = sum(layer.weight.numel() for layer in layers)
    near = contexts.n_short + contexts.targets_per_block - 1
    embedding = adapter.embed(torch.zeros(1, 1, dtype=torch.long))
    head = embedding.shape[-1] * adapter.vocabulary_size
    far = adapter.far_key_values(torch.zeros(1, 1, dtype=torch.long))
    heads = _query_heads(adapter)
    attention = sum(2 * heads * (keys.shape[-1] + values.shape[-1]) for keys, values in far)
    a_row = 2 * near * weights + 2 * contexts.targets_per_block * head + near * contexts.n_far * attention
    return float(contexts.n_far * a_row)


def _query_heads(adapter: Adapter) -> int:
    config = adapter.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(config, "num_attention_heads", None) or config.n_heads)
