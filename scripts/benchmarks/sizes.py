"""What a model of N parameters asks of P GPUs, by arithmetic: nothing here is measured.

AdamW in fp32: 4 bytes of weights, 4 of gradients and 8 of moments a parameter. DDP has all of them on every GPU; ZeRO 2
the weights, and a share of a copy of them, gradients and moments; ZeRO 3 a share of everything. Activations come on
top, and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_VALUE = 4
SAVED_BYTES = 3 * BYTES_PER_VALUE
"""Of a parameter in a checkpoint: the weight and two moments."""
SAVED_BYTES_PER_SECOND = 0.5e9
"""Of one process that writes to a shared file system, as `olmo-sparsity submit` assumes."""
LINK_BYTES_PER_SECOND = 50e9
"""Of a GPU between nodes: a link of 400 Gbit/s each."""
SIZES = {"150M": 0.15e9, "1B": 1e9, "3B": 3e9, "7B": 7e9}
DDP, ZERO_2, ZERO_3 = "DDP", "ZeRO 2", "ZeRO 3"
WAYS = DDP, ZERO_2, ZERO_3


def bytes_per_parameter(way: str, processes: int) -> float:
    """Memory of a GPU."""
    return {DDP: 16.0, ZERO_2: 4 + 16 / processes, ZERO_3: 16 / processes}[way]


def sent_bytes_per_parameter(way: str, processes: int, micro_batches: int) -> float:
    """What a GPU sends in a step: a reduce-scatter or an all-gather sends 4 (P - 1) / P bytes.

    DDP reduces and gathers the gradients once. ZeRO 2 reduces them after each micro-batch, and gathers the weights
    after the step. ZeRO 3 gathers the weights for each forward and backward pass, and reduces after it.
    """
    collectives = {DDP: 2, ZERO_2: micro_batches + 1, ZERO_3: 3 * micro_batches}[way]
    return collectives * BYTES_PER_VALUE * (processes - 1) / processes


def save_seconds(parameters: float, writers: int) -> float:
    """How long a checkpoint takes to write; in the background only the next one has to wait for it."""
    return SAVED_BYTES * parameters / (SAVED_BYTES_PER_SECOND * writers)


def table(processes: int, micro_batches: int, names: Sequence[str]) -> str:
    """Markdown, a row for each size. Memory and what is sent: with DDP, ZeRO 2 and ZeRO 3."""
    lines = [
        f"| {processes} GPUs, {micro_batches} micro-batches a step | GB a GPU "
        f"| s to save, by 1 or {processes} processes | GB that a GPU sends a step | at 50 GB/s |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        parameters = SIZES[name]
        memory = [parameters * bytes_per_parameter(way, processes) / 1e9 for way in WAYS]
        sent = [parameters * sent_bytes_per_parameter(way, processes, micro_batches) for way in WAYS]
        cells = [
            name,
            _listed(memory),
            _listed([save_seconds(parameters, 1), save_seconds(parameters, processes)]),
            _listed([number / 1e9 for number in sent]),
            f"{_listed([number / LINK_BYTES_PER_SECOND for number in sent])} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _listed(numbers: Sequence[float]) -> str:
    """Two digits of each, or all before the point."""
    return " / ".join(f"{number:.0f}" if number >= 10 else f"{number:.2g}" for number in numbers)


def tables() -> str:
    """Those of docs/training.md: one node, and the largest size on eight."""
    return f"{table(8, 8, list(SIZES))}\n\n{table(64, 8, ['7B'])}"
