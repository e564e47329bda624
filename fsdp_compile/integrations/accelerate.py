"""`Accelerator` for Hugging Face accelerate: `prepare` shards models, `save_state` writes sharded checkpoints.

Everything else (`accumulate`, `backward`, `clip_grad_norm_`, ...) is accelerate's own. Checked with accelerate 1.15.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_compile import checkpoint
from fsdp_compile.api import shard_module
from fsdp_compile.checkpoint.entries import InModel, Model
from fsdp_compile.checkpoint.untrusted import path_in
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.integrations.fsdp_plugin import configured, without_fsdp
from fsdp_compile.state_dict.sharded_value import managed

__all__ = ["Accelerator"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_FOLDER = "sharded"  # within what `save_state` writes
_OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)  # that wrap models


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose models are sharded over all ranks.

    Args:
        shard: arguments of `fully_shard`, with precedence over accelerate's FSDP configuration if there is one, which
            is used in the way of integrations/fsdp_plugin.py. A model that is sharded already stays as it is.
        arguments: of `accelerate.Accelerator`.

    Raises:
        ValueError: accelerate is to distribute models in another way.
    """

    _optimizers: list[Any]
    _custom_objects: list[Any]

    def __init__(self, *, shard: dict[str, Any] | None = None, **arguments: Any) -> None:
        given, meshes = arguments.pop("fsdp_plugin", None), arguments.get("parallelism_config")
        with without_fsdp() as launched:
            self._fsdp_plugin = given or launched
            if self._fsdp_plugin and (meshes or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"):
                raise ValueError(f"parallelism_config: expected none beside an FSDP configuration, found "
                                 f"{meshes or 'one of the environment'}; pass shard=dict(mesh=...)")  # fmt: skip
            super().__init__(**arguments)
        if self.distributed_type in _OTHERS:
            raise ValueError(f"expected to shard models by this Accelerator, found {self.distributed_type.value}, "
                             f"which another Accelerator or the environment asks for; leave that out")  # fmt: skip
        self._shard_options = shard or {}
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)
        self._all: tuple[list[Any], list[Any]] = [], []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move `model` to this rank's device, shard it, and add autocast and compilation as configured."""
        if self.use_distributed and not isinstance(model, FSDPModule):
            if self.device_placement and device_placement is not False:
                model = model.to(self.device)
            plugin, options = self._fsdp_plugin, self._shard_options
            if plugin is not None:
                options = configured(plugin, model, self.mixed_precision, evaluation_mode) | options
            shard_module(model, **options)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # no wrapper around it

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on the CPU of the first rank, by all ranks; with `unwrap=False` a sharded one."""
        if not unwrap:
            return model.state_dict()
        model = self.unwrap_model(model, keep_torch_compile=False)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        firsts = {param: name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
        for name, param in model.named_parameters(remove_duplicate=False):
            if name in state:  # on the first rank; a tied parameter was gathered under each of its names
                state[name] = state[firsts[param]]
        return state

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, but all ranks write models, optimizers and registered objects, to a folder of their own.

        Of a model with peft's adapters what trains is written, and a check of the rest: load its base by its name
        first, as when training began.
        """
        with self._without_sharded():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's, also on another number of ranks."""
        with self._without_sharded():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hide optimizers and registered objects from the base class, which would save those of the first rank."""
        self._all = self._optimizers, self._custom_objects
        self._optimizers, self._custom_objects = [], []
        try:
            yield
        finally:
            self._optimizers, self._custom_objects = self._all

    def _save_sharded(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        weights.clear()
        checkpoint.save(self._state_to_save(models), Path(folder) / _FOLDER, step=0)

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        checkpoint.load(self._state_to_save(models), path_in(Path(folder), _FOLDER))
        models.clear()

    def _state_to_save(self, models: list[nn.Module]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for index, model in enumerate(models):
            inner = self.unwrap_model(model, keep_torch_compile=False)
            if hasattr(inner, "peft_config"):  # the frozen base is what the adapters were made for
                state[f"model_{index}"], state[f"base_{index}"] = Model("model", inner, only_trained=True), _Base(inner)
            else:
                state[f"model_{index}"] = model
        optimizers, objects = self._all
        for index, prepared in enumerate(optimizers):
            state[f"optimizer_{index}"] = InModel(f"optimizer {index}", models, prepared.optimizer)
        return state | {f"object_{index}": each for index, each in enumerate(objects)}


class _Base:
    """What is saved in the place of frozen parameters: for each the sum of its bits, which any number of ranks find."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, list[Any]]:
        """Names and sums; all ranks must call it."""
        names, sums = [], []
        for name, param in self.model.named_parameters():
            stored = managed(param)
            local = param.detach() if stored is None else stored.local.detach()
            if not param.requires_grad and type(local.data) is Tensor:
                total = local.contiguous().view(-1).view(_BITS[local.dtype.itemsize]).sum(dtype=torch.int64)
                if stored is not None:
                    dist.all_reduce(total, group=group_named(stored.spec.ranks.group))
                names.append(clean_name(name))
                sums.append(int(total))
        return {"names": names, "sums": sums}

    def load_state_dict(self, saved: dict[str, list[Any]]) -> None:
        """ValueError if a frozen parameter is another one than when the checkpoint was saved."""
        found, expected = (dict(zip(each["names"], each["sums"], strict=True)) for each in (self.state_dict(), saved))
        changed = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        if changed:
            raise ValueError(f"frozen parameters, which are not saved beside adapters, are not those of the save: "
                             f"{changed[0]} and {len(changed) - 1} more; load that base first")  # fmt: skip
