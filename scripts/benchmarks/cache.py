"""Leave-one-out in the cache, over far keys that rows share, beside copies a row, leave-one-out as text, and a layer.

Some far tokens, evenly spaced, are left out, and the time of a block is that of all: what is read once, the far context
and the prediction with all keys, is timed apart. Shapes: N long and M short context length, F = N - M far tokens, B
targets of a block.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    loaded.check_context(sizes["n_long"], sizes["targets_per_block"], in_cache=True)
    contexts = _random_block(loaded.model.vocabulary_size, **sizes)
    left_out = np.linspace(0, contexts.n_far - 1, rows).astype(int)
    block = LeaveOneOut(Scorer(loaded.model, device=loaded.device), contexts, left_out)
    memory = _memory(block)
    seconds, layer_flops = _time_ways(block, rounds)
    operations = _operations_of_block(loaded.model, contexts)
    about |= {
        "benchmark": "cache",
        "model": loaded.name,
        "parameters": loaded.parameters,
        **sizes,
        "rows": rows,
    }
    about |= {"tokens_per_batch": block.scorer.tokens_per_batch, "shares_far_keys": block.shares_far_keys}
    about |= {f"peak_gb_{when}": gigabytes for when, gigabytes in memory.items()}
    about |= {"tflop_a_block": operations / 1e12, "layer_tflops": layer_flops / 1e12}
    return {**about, "unit": "processor seconds", "results": _results(seconds, operations, layer_flops)}


@dataclass(frozen=True)
class LeaveOneOut:
    """Leave-one-out of a block, whose time is that of some far tokens and of what is read once."""

    scorer: Scorer
    contexts: Contexts
    """One block."""
    left_out: np.ndarray
    """(R,) columns of the far context, ascending, of which each is left out once."""

    @property
    def shares_far_keys(self) -> bool:
        """Whether rows of this model may share far keys."""
        return self.scorer.model.shares_far_keys

    def in_cache(self, shared: bool) -> float:
        """Seconds of a block over far keys that rows share, or copy."""
        masks = np.ones((len(self.left_out), self.contexts.n_far), dtype=bool)
        masks[np.arange(len(self.left_out)), self.left_out] = False
        shares = self.shares_far_keys
        self.scorer.model.shares_far_keys = shared
        try:
            return self._seconds_of_block(lambda count: self.measure_in_cache(masks[:count]))
        finally:
            self.scorer.model.shares_far_keys = shares

    def as_text(self) -> float:
        """Seconds of a block over subsequences."""
        columns = np.arange(self.contexts.n_far - 1)
        far = columns + (columns >= self.left_out[:, None])
        # the first row alone would share no prefix
        return self._seconds_of_block(
            lambda count: self.scorer.measures(self.contexts, far[:count], ("kl",)), least=2
        )

    def measure_in_cache(self, visible: np.ndarray) -> None:
        """One pass over rows with some far keys visible, (R, F) bool."""
        far_cache.measures(self.scorer, self.contexts, visible, ("kl",), self.contexts.all_targets)

    def _seconds_of_block(self, measure: Callable[[int], object], least: int = 1) -> float:
        """The time of the first ``least`` rows, with what is read once, and that of a further row for all the rest."""
        started = time.process_time()
        measure(least)
        once = time.process_time() - started
        started = time.process_time()
        measure(len(self.left_out))
        a_row = (time.process_time() - started - once) / (len(self.left_out) - least)
        return once + (self.contexts.n_far - least) * a_row


def _random_block(vocabulary_size: int, n_long: int, n_short: int, targets_per_block: int) -> Contexts:
    """One block of random tokens."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(vocabulary_size, size=(1, n_long + targets_per_block))
    return Contexts(tokens[:, :-1], tokens[:, n_long:], np.arange(targets_per_block)[None], n_short)


def _memory(block: LeaveOneOut) -> dict[str, float]:
    """Most memory of this process so far, GB, once the far context is read and once rows are."""
    block.measure_in_cache(np.ones((1, block.contexts.n_far), bool))
    after_far_pass = _peak_gb()
    block.in_cache(shared=block.shares_far_keys)
    return {"after_far_pass": after_far_pass, "after_rows": _peak_gb()}


def _time_ways(block: LeaveOneOut, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of a block in each way, round by round, and operations a second of a linear layer in between."""
    layer, inputs, operations = _largest_layer(block.scorer.model)
    ways: dict[str, Callable[[], object]] = {
        SHARED: partial(block.in_cache, shared=block.shares_far_keys),
        COPIED: partial(block.in_cache, shared=False),
        TEXT: block.as_text,
        LAYER: lambda: layer(inputs),
    }
    with torch.inference_mode():
        seconds = time_in_turn(ways, rounds, clock=time.process_time)
    return seconds, operations / float(np.median(seconds.pop(LAYER)))


def _results(seconds: dict[str, list[float]], operations: float, layer_flops: float) -> dict[str, Json]:
    """Seconds a block, ratios, and in the cache the share of the linear layer's operations a second."""
    results = rates(seconds, 1.0, (COPIED, TEXT))
    for way in (SHARED, COPIED):
        results[way]["share_of_layer"] = operations * results[way]["rate"] / layer_flops
    for row in results.values():
        row["seconds_a_block"] = 1 / row.pop("rate")
    return results


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
