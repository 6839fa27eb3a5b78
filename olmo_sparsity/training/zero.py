"""DeepSpeed's ZeRO 0 to 3, through Accelerate, with the interface of `Engine`.

Numbers are those of the plain engine: weights and optimizer state in fp32, bf16 by autocast where the config says so,
the loss normalised per token of the global batch. Every value of the DeepSpeed configuration that the YAML also knows
is filled in from there; the JSON leaves it out, or holds "auto".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor, nn

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.training_batches import local_batch_size
from olmo_sparsity.model.build import Model, decoder_of
from olmo_sparsity.model.tuples import TupleAttention
from olmo_sparsity.training.engine import (
    SEPARATOR,
    Engine,
    EngineSettings,
    chosen_precision,
    host_copy,
    process_group,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import find_shipped, read_json

AUTO = "auto"


def deepspeed_config(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the JSON that the YAML names, its "auto" values filled in from the YAML.

    Raises `UserError` where the JSON states a value that the YAML decides.
    """
    path = find_shipped(str(config.deepspeed.config))
    values: dict[str, Any] = read_json(path, "see configs/deepspeed/")
    per_process = local_batch_size(config.global_train_batch_size, world_size)
    micro = min(config.device_train_microbatch_size, per_process)
    if per_process % micro:
        # A step's last micro-batch is smaller, which DeepSpeed cannot express. It only reads whether there is more than
        # one: the loss has its weight already, and the boundary is set at every backward pass.
        micro = 1
    derived: dict[str, Any] = {
        "train_batch_size": config.global_train_batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": per_process // micro,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "torch_autocast": {
            "enabled": chosen_precision(config.precision) == "bf16",
            "dtype": "bfloat16",
            # DeepSpeed would reduce the gradients of these modules in bf16, by default those of every nn.Linear.
            "lower_precision_safe_modules": [],
        },
    }
    for name in (*derived, "optimizer", "scheduler", "bf16", "fp16"):
        if values.pop(name, AUTO) != AUTO:
            raise UserError(f"{path}: {name} is decided by the YAML; remove it there")
    return values | derived


class _Section(dict[str, Any]):
    """A section of DeepSpeed's configuration that notes which names are looked up in it."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(
            {name: _Section(value) if isinstance(value, dict) else value for name, value in values.items()}
        )
        self.looked_up: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.looked_up.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.looked_up.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined here, or ** would copy the values without looking them up

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_up.add(name)
        return super().get(name, default)

    def unread(self, prefix: str = "") -> Iterator[str]:
        """The dotted names that were not looked up; none of sections that pydantic read, which refuses such names."""
        for name, value in self.items():
            if self.looked_up and name not in self.looked_up:
                yield prefix + name
            elif isinstance(value, _Section):
                yield from value.unread(f"{prefix}{name}.")


def check_deepspeed(config: Config, world_size: int) -> None:
    """Raise `UserError`, with DeepSpeed's words, for a JSON that it refuses, or has a key that it does not know."""
    path = config.deepspeed.config
    values = deepspeed_config(config, world_size)
    with _importing_without_gpu():
        from deepspeed.runtime.config import DeepSpeedConfig
        from pydantic import ValidationError
    values["train_batch_size"] //= world_size  # here is one process, and DeepSpeed multiplies by their number
    sections = _Section(values)
    try:
        parsed = DeepSpeedConfig(sections)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {name}: {first['msg']} ({error.title} of DeepSpeed); correct it") from error
    except Exception as error:  # of many kinds, assertions among them
        words = " ".join(str(error).split())
        raise UserError(f"{path}: DeepSpeed refuses it: {words}; correct it") from error
    if unread := [*sections.unread()]:
        raise UserError(f"{path}: DeepSpeed has no {', '.join(unread)}; correct or remove it")
    offloads = parsed.zero_config.offload_optimizer is not None
    if offloads and parsed.zero_force_ds_cpu_optimizer:
        raise UserError(
            f"{path}: offload_optimizer is meant for DeepSpeed's optimizer, and OLMo's is used; add "
            '"zero_force_ds_cpu_optimizer": false to offload that one, or remove offload_optimizer'
        )


@contextmanager
def _importing_without_gpu() -> Iterator[None]:
    """Import DeepSpeed for processors where there is no GPU, or it would warn; jobs submitted from here have one."""
    chosen = "DS_ACCELERATOR" in os.environ
    if not chosen and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop("DS_ACCELERATOR", None)


class ZeroEngine(Engine):
    """The engine over DeepSpeed. Gathering weights and optimizer state is collective: every process calls it."""

    def __init__(self, deepspeed: dict[str, Any]):
        """``deepspeed``: its configuration, of `deepspeed_config`."""
        self._deepspeed = deepspeed
        super().__init__()

    def _make_accelerator(self) -> Accelerator:
        _set_launcher_variables()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        if not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"
            import deepspeed.ops

            # It would compile an extension, a minute at its first use on a machine, that sums for inference alone.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        plugin = DeepSpeedPlugin(hf_ds_config=self._deepspeed)
        accelerator = Accelerator(
            deepspeed_plugin=plugin, mixed_precision="no", kwargs_handlers=[process_group()]
        )
        assert accelerator.num_processes == int(os.environ["WORLD_SIZE"]), (
            "each process runs alone: the launcher's variables are not read"
        )
        return accelerator

    def prepare(self, model: Model, optimizer: torch.optim.Optimizer, settings: EngineSettings) -> None:
        """As `Engine.prepare`. Stage 3 gathers layers whole: hooks inside of one would break its compiled graph."""
        decoder = decoder_of(model)
        if self.stage == 3 and not isinstance(decoder, TupleAttention):
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(model, list({type(block) for block in decoder.blocks()}))
        super().prepare(model, optimizer, settings)

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.accelerator.state.deepspeed_plugin.zero_stage

    @property
    def gathers_layers(self) -> bool:
        return self.stage == 3

    def _forward_context(self) -> Any:
        return nullcontext()  # DeepSpeed enters autocast itself

    def gradient_sync(self, last: bool) -> Any:
        return nullcontext()  # the boundary below says the same to DeepSpeed

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is scaled for the whole batch already

    def clip_gradients(self, max_grad_norm: float | None) -> dict[str, Tensor]:
        """Nothing: DeepSpeed clips within its step, by its own configuration, which has the bound of all steps."""
        return {}

    def step(self, learning_rate: float) -> dict[str, float]:
        """Clip, update the weights, forget the gradients; returns ``grad_norm``, the norm before clipping."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = None
        if self.stage == 0:  # where DeepSpeed notes none; all processes have the same gradients by now
            gradients = (parameter.grad for parameter in self.raw_model.parameters())
            norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        self.model.step()
        return {"grad_norm": float(self.model.get_global_grad_norm() if norm is None else norm)}

    def weights(self) -> dict[str, Tensor]:
        """As `Engine.weights`."""
        if self.stage < 3:
            return super().weights()
        from deepspeed.utils import safe_get_full_fp32_param

        tensors = {}
        for name, parameter in self.raw_model.named_parameters():
            full = safe_get_full_fp32_param(parameter)  # collective
            if name in self._saves:
                tensors[name] = host_copy(full)
        return tensors

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """As `Engine.optimizer_tensors`."""
        if self.stage == 0:
            return super().optimizer_tensors()
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._base_optimizer.state:  # no step was trained yet: all were skipped
            return {}
        self._link_states()
        step = next(iter(self._base_optimizer.state.values())).get("step")  # LionW counts none
        tensors = {}
        for name, parameter in self.raw_model.named_parameters():
            for key in self._state_keys:
                full = safe_get_full_optimizer_state(parameter, key)  # collective
                if name in self._saves:
                    tensors[f"{name}{SEPARATOR}{key}"] = host_copy(full.reshape(self._shapes[name]))
            if step is not None and name in self._saves:
                tensors[f"{name}{SEPARATOR}step"] = torch.as_tensor(float(step))
        return tensors

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state on this number of processes and this stage, whatever it was written with."""
        if self.stage == 0:
            super().load_optimizer_tensors(tensors)
            return
        if not tensors:
            return
        step = next((tensor for name, tensor in tensors.items() if name.endswith(f"{SEPARATOR}step")), None)
        is_on_device = bool(self._base_optimizer.param_groups[0].get("fused"))
        zero = self.model.optimizer
        # The flat fp32 partitions that the base optimizer steps on.
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        for partition in flat:
            state = {key: torch.zeros_like(partition.data) for key in self._state_keys}
            if step is not None:
                state["step"] = step.clone().to(partition.device if is_on_device else "cpu")
            self._base_optimizer.state[partition] = state
        self._link_states()
        for name, parameter in self.raw_model.named_parameters():
            for key in self._state_keys:
                self._set_state(parameter, tensors[f"{name}{SEPARATOR}{key}"], key)

    def _link_states(self) -> None:
        """Let stages 1 and 2 find each parameter's state in the flat partitions.

        DeepSpeed does so once, after its first group of parameters has stepped, when the others have no state yet.
        """
        if self.stage < 3:
            self.model.optimizer._hp_optimizer_states_linked = False
            self.model.optimizer._lazy_init_hp_params_optimizer_state()

    def _set_state(self, parameter: nn.Parameter, full: Tensor, key: str) -> None:
        from deepspeed.utils import (
            safe_get_local_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, full.to(self.device), key)
            return
        # Stage 3 pads a parameter to a multiple of the processes; DeepSpeed's "full" setter forgets the padding.
        size = safe_get_local_optimizer_state(parameter, key).numel()
        padded = torch.zeros(size * self.world_size)
        padded[: full.numel()] = full.flatten()
        share = padded[self.rank * size : (self.rank + 1) * size]
        safe_set_local_optimizer_state(parameter, share.to(self.device), key)

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        return self.model.optimizer.optimizer

    @property
    def _state_keys(self) -> tuple[str, ...]:
        is_adamw = isinstance(self._base_optimizer, torch.optim.AdamW)
        return ("exp_avg", "exp_avg_sq") if is_adamw else ("exp_avg",)


def launched_processes() -> int:
    """How many processes the launcher has started; 1 where there is none."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def _set_launcher_variables() -> None:
    """DeepSpeed needs a launcher's variables; without a launcher this process is rank 0 of 1."""
    if "RANK" in os.environ:
        return
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
