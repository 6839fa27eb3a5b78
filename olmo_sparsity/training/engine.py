"""Devices, precision, processes, compiling. Only this module and `zero.py` import Accelerate."""

from __future__ import annotations

import logging
import math
import os
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from olmo.config import ActivationCheckpointingStrategy
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from olmo_sparsity.config.schema import CompilerConfig
from olmo_sparsity.data.training_batches import Batch
from olmo_sparsity.evaluate.exact_match import TaskEvaluation
from olmo_sparsity.evaluate.heldout import HeldoutEvaluation
from olmo_sparsity.model.build import Model, decoder_of
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.tuples import TupleAttention
from olmo_sparsity.util.background import in_background
from olmo_sparsity.util.errors import OtherRankFailed, UserError, exit_code_of, first_line
from olmo_sparsity.util.provenance import keep_freed_memory, processor_features

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def cpu_has_fast_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices natively; elsewhere bf16 is slower than fp32 on a CPU."""
    uses_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return uses_avx512 and not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor_features())


def chosen_precision(precision: str | None) -> str:
    """Accelerate's name of the config's ``precision``; where that is None, bf16 if the machine has it.

    Raises `UserError` for bf16 on a GPU without it, such as a V100: emulated it is many times slower than fp32.
    """
    on_gpu = torch.cuda.is_available()
    gpu_has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "amp_bf16" and on_gpu and not gpu_has_bf16:
        raise UserError(
            f"precision: {torch.cuda.get_device_name()} has no bf16; set --precision=fp32, or null to let the machine "
            "decide"
        )
    if precision is not None:
        return {"amp_bf16": "bf16", "fp32": "no"}[precision]
    return "bf16" if gpu_has_bf16 or (not on_gpu and cpu_has_fast_bf16()) else "no"


def choose_flash_attention() -> None:
    """Let PyTorch's attention call what OLMO_SPARSITY_FLASH_ATTENTION names, such as FA3, where it is installed."""
    if name := os.environ.get("OLMO_SPARSITY_FLASH_ATTENTION"):
        activate_flash_attention_impl(name)


def rendezvous_timeout() -> timedelta:
    """How long processes wait for each other before they end: OLMO_SPARSITY_TIMEOUT seconds, else ten minutes."""
    return timedelta(seconds=float(os.environ.get("OLMO_SPARSITY_TIMEOUT", "600")))


def process_group() -> InitProcessGroupKwargs:
    """How processes reach each other: gloo by name, for without it each process on CPUs would run alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return InitProcessGroupKwargs(backend=backend, timeout=rendezvous_timeout())


@dataclass(frozen=True)
class EngineSettings:
    """How an engine computes a step."""

    micro_batch_size: int
    """Examples of one forward pass."""
    precision: str = "no"
    """Accelerate's name: bf16, or no, which is fp32."""
    z_weight: float = 0.0
    """Weight of OLMo's z-loss, which is added to the cross-entropy."""
    dropout_seed: int | None = None
    """None: the model has no dropout."""
    activation_checkpointing: ActivationCheckpointingStrategy | None = None
    compiler: CompilerConfig | None = None
    """None: nothing is compiled."""


class Engine:
    """Runs forward, backward and optimizer steps of one model over all processes."""

    def __init__(self) -> None:
        """Joins the process group."""
        keep_freed_memory()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]  # Accelerate would take them for ours: steps to accumulate, FSDP, a compiler
        self.accelerator = self._make_accelerator()
        self.is_rank_zero = self.accelerator.is_main_process  # it writes files and shows progress
        self.rank = self.accelerator.process_index
        self.world_size = self.accelerator.num_processes
        self.device = self.accelerator.device
        choose_flash_attention()

    def prepare(self, model: Model, optimizer: torch.optim.Optimizer, settings: EngineSettings) -> None:
        """Make ``model``, which is on the engine's device, the one that is trained: compile it and wrap it. Collective.

        ``optimizer``: of its parameters.
        """
        self.settings = settings
        decoder = decoder_of(model)
        checkpointing = settings.activation_checkpointing
        if checkpointing is not None:
            assert not isinstance(decoder, TupleAttention), "the config was checked"
            decoder.set_activation_checkpointing(checkpointing)
        self._shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
        self._saves = share_of(self.rank, self.world_size, self._shapes)
        self.raw_model = model.train()
        step_model = None
        if settings.compiler is not None:
            by_layer = checkpointing is not None or self.gathers_layers
            step_model = compiled(model, settings.compiler, by_layer=by_layer)
        self.is_compiled = step_model is not None
        with warnings.catch_warnings():
            # PyTorch 2.13 has another name for it, which Accelerate does not know yet; every process would say so.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers")
            self.model, self.optimizer = self.accelerator.prepare(
                model if step_model is None else step_model, optimizer
            )
        if isinstance(decoder, PositionedOLMo):
            decoder.prepare_loss()

    def _make_accelerator(self) -> Accelerator:
        is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
        # No second copy of the gradients; and a forward pass is no collective, so that one process may repeat one.
        buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        return Accelerator(
            mixed_precision="no",  # autocast is entered below
            cpu=not torch.cuda.is_available(),
            kwargs_handlers=[process_group(), buckets] if is_distributed else [],
        )

    @property
    def gathers_layers(self) -> bool:
        """Whether a process has the weights of a layer only while it computes with them."""
        return False

    def seed_dropout(self, step: int) -> None:
        """Make dropout a function of (seed, step, process), so that resuming needs no random state."""
        if self.settings.dropout_seed is None:  # seeding every generator takes 0.4 ms
            return
        words = np.random.SeedSequence([self.settings.dropout_seed, step, self.rank]).generate_state(1)
        torch.manual_seed(int(words[0]))

    def loss_sums(self, micro_batch: Batch) -> dict[str, Tensor]:
        """The losses of a micro-batch, summed over its tokens: `loss_nats`, and the terms that it is the sum of.

        Where compiling fails this process goes on uncompiled, except under ZeRO 3, where others would wait for weights.
        """
        try:
            with nullcontext() if self.is_compiled else uncompiled(), self._forward_context():
                batch = micro_batch.to(self.device)
                return self.model(**batch.model_inputs, **batch.targets, z_weight=self.settings.z_weight)
        except RuntimeError as error:
            if not (self.is_compiled and is_of_compiler(error)) or self.gathers_layers:
                raise
            reason = getattr(error, "inner_exception", error)
            log.warning("not compiled: compiling failed (%s)", first_line(reason))
        # The same pass again, at most once: with `is_compiled` False the branch above raises. No gradient was computed
        # yet, so that nothing is counted twice.
        self.is_compiled = False
        return self.loss_sums(micro_batch)

    def _forward_context(self) -> Any:
        is_bf16 = self.settings.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16)

    def gradient_sync(self, last: bool) -> Any:
        """Context in which gradients are exchanged between processes after the last micro-batch only."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of a loss; ``last``: of this step's micro-batches."""
        loss.backward()

    def evaluate(self, evaluation: HeldoutEvaluation | TaskEvaluation) -> dict[str, Any]:
        """Held-out measures, as a row of metrics; leaves the training state as it was. Collective."""
        self.model.eval()
        with uncompiled(), self._forward_context():  # one shape was compiled, that of training
            if isinstance(evaluation, TaskEvaluation):
                reduce_sum = (lambda value: value) if self.gathers_layers else self.all_reduce_sum
                row = evaluation.run(self.raw_model, reduce_sum, self.device)
            else:
                row = evaluation.run(self.model, self.all_reduce_sum, self.device)
        self.model.train()
        return row

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all ranks, in each of them, on its device. Collective."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")

    def gather(self, value: Result) -> list[Result]:
        """``value`` of every rank, in their order, in each of them. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def clip_gradients(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Clip the gradients; their norm before it, ``grad_norm``, on the device."""
        bound = math.inf if max_grad_norm is None else max_grad_norm
        return {"grad_norm": self.accelerator.clip_grad_norm_(self.model.parameters(), bound)}

    def step(self, learning_rate: float) -> dict[str, float]:
        """Update the weights, forget the gradients; returns what is known only now (`ZeroEngine`)."""
        # Past Accelerate's wrapper, which serves fp16 and XLA and looks for a package on disk at every step.
        optimizer = self._raw_optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {}

    def weights(self) -> dict[str, Tensor]:
        """This rank's share of the weights, by OLMo's names, as copies on the CPU. Collective."""
        named = self.raw_model.named_parameters()
        return {name: host_copy(parameter) for name, parameter in named if name in self._saves}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the optimizer's state, of the same parameters, as `export_state` says. Collective."""
        return export_state(self._raw_optimizer, self._saves)

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the whole state, whatever engine and number of processes it was written with."""
        import_state(self._raw_optimizer, tensors)

    @property
    def _raw_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # beneath Accelerate's wrapper

    def any_rank(self, *flags: bool) -> list[bool]:
        """Of each flag, whether it is set in at least one rank. Collective."""
        if self.world_size == 1:
            return list(flags)
        return [count > 0 for count in self.all_reduce_sum(torch.tensor(flags, dtype=torch.float)).tolist()]

    def results_of_all_ranks(self, running: Future[Result]) -> list[Result]:
        """Wait for the work of all ranks: what it returned, by rank. Where it failed in one, all fail. Collective.

        It may take longer than processes wait for each other: to read a large corpus, or to save on a slow disk.
        """
        if self.world_size == 1:
            return [running.result()]
        patience = rendezvous_timeout().total_seconds() / 4
        while any(self.any_rank(bool(wait([running], patience).not_done))):
            pass
        failure = running.exception()
        if failure is None:
            outcome: Any = (running.result(), None)
        else:
            message = f"rank {self.rank} failed ({type(failure).__name__}: {failure})"
            outcome = (None, (message, exit_code_of(failure)))
        outcomes: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(outcomes, outcome)
        failures = [failed for _, failed in outcomes if failed is not None]
        if failures:  # in every rank: a launcher may end the one that failed before it has printed it
            message, exit_code = failures[0]
            raise failure or OtherRankFailed(message, exit_code)
        return [result for result, _ in outcomes]

    def on_rank_zero(self, action: Callable[[], Result]) -> Result:
        """Run ``action`` in rank 0 and return its result in every rank; where it fails, all ranks fail. Collective.

        It may take as long as `results_of_all_ranks` says.
        """
        if self.world_size == 1:
            return action()
        with ThreadPoolExecutor(1) as pool:
            running: Future[Any] = pool.submit(action if self.is_rank_zero else lambda: None)
            return self.results_of_all_ranks(running)[0]

    def start_on_rank_zero(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Start ``action`` in rank 0, in the background; the returned function waits for it as `on_rank_zero` does."""
        running = in_background(action) if self.is_rank_zero else Future[Result]()
        return lambda: self.on_rank_zero(running.result)

    def assert_same_on_all_ranks(self, value: str, description: str) -> None:
        """Raise `UserError` in every rank unless ``value`` is the same in all of them. Collective.

        ``description``: what the value is of; the error begins with it.
        """
        if self.world_size == 1:
            return
        checksums = self.accelerator.gather(torch.tensor([zlib.crc32(value.encode())], device=self.device))
        if (checksums != checksums[0]).any():
            raise UserError(
                f"{description} is not the same in all processes (rank {self.rank}: {value}); make sure that all "
                "machines have the same files, then run the same command again"
            )


# --- compiling ---


def compile_options(compiler: CompilerConfig) -> dict[str, Any]:
    """What `torch.compile` is given."""
    options = asdict(compiler)
    del options["from_steps"]
    return options


def compiled(model: Model, compiler: CompilerConfig, *, by_layer: bool = False) -> Any:
    """What to train with: the compiled model, which shares all tensors with ``model``; None where nothing is compiled.

    ``by_layer``: each layer is compiled by itself, and ``model`` returned, for layers that are computed again in the
    backward pass (compiled inside of that), or gathered from other processes one by one; tuples have none.
    """
    options = compile_options(compiler)
    if not by_layer:
        return torch.compile(model, **options)
    decoder = decoder_of(model)
    if isinstance(decoder, TupleAttention):
        return None
    for block in decoder.blocks():
        block.forward = torch.compile(block.forward, **options)
    return model


def uncompiled() -> Any:
    """A context in which what was compiled is computed as it was written."""
    return torch.compiler.set_stance("force_eager")


def is_of_compiler(error: Exception) -> bool:
    """Whether compiling failed, and not what was compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


# --- what a rank saves, and an optimizer's state as named tensors, read on any number of processes without pickles ---

SEPARATOR = "|"


def share_of(rank: int, count: int, shapes: Mapping[str, torch.Size]) -> set[str]:
    """The parameters that ``rank`` of ``count`` saves: the largest come first, each to the rank with the least so far.

    So every rank has about as many bytes to write, and all ranks agree on it.
    """
    sizes = [0] * count
    share = set()
    for name in sorted(shapes, key=lambda name: (-shapes[name].numel(), name)):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += shapes[name].numel()
        if smallest == rank:
            share.add(name)
    return share


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which stays as it is while training goes on."""
    return tensor.detach().to("cpu", copy=True)


def export_state(optimizer: torch.optim.Optimizer, names: Collection[str]) -> dict[str, Tensor]:
    """Copies of the state tensors of parameters with these names, as `<parameter>|<state>` on the CPU."""
    return {
        f"{name}{SEPARATOR}{key}": host_copy(torch.as_tensor(value))
        for name, parameter in _named_parameters(optimizer).items()
        if name in names
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def import_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `export_state` gave of all parameters of the same model."""
    parameters = _named_parameters(optimizer)
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit(SEPARATOR, 1)
        is_on_device = key != "step" or bool(optimizer.param_groups[0].get("fused"))
        device = parameters[name].device if is_on_device else "cpu"
        optimizer.state[parameters[name]][key] = tensor.to(device, copy=True)


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters by the names that OLMo's optimizer groups carry."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
