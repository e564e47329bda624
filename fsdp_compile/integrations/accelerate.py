"""`Accelerator` for Hugging Face accelerate: `prepare` shards models, `save_state` writes sharded checkpoints.

Everything else (`accumulate`, `backward`, `clip_grad_norm_`, ...) is accelerate's own. Checked with accelerate 1.15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_compile import checkpoint
from fsdp_compile.api import fully_shard
from fsdp_compile.checkpoint.save_load import optimizer_in, trained_in
from fsdp_compile.checkpoint.untrusted import path_in
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.state_dict.sharded_value import managed

__all__ = ["Accelerator"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_FOLDER = "sharded"  # within what `save_state` writes


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose models are sharded over all ranks.

    Args:
        shard: arguments of `fully_shard`; None: its defaults. A model that is sharded already stays as it is.
        arguments: of `accelerate.Accelerator`, without a plugin that distributes models.
    """

    _optimizers: list[Any]

    def __init__(self, *, shard: dict[str, Any] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shard_options = shard or {}
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)
        self._all_optimizers: list[Any] = []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move `model` to this rank's device, shard it, and add autocast and compilation as configured."""
        if self.use_distributed and not isinstance(model, FSDPModule):
            if self.device_placement and device_placement is not False:
                model = model.to(self.device)
            model = fully_shard(model, **self._shard_options)
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
        """As accelerate's, but all ranks write models and optimizers, to a folder of their own.

        Of a model with peft's adapters what trains is written, and a check of the rest: load its base by its name
        first, as when training began.
        """
        with self._without_optimizers():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's, also on another number of ranks."""
        with self._without_optimizers():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Hide the optimizers from the base class, which would save those of the first rank."""
        self._all_optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._all_optimizers, self._optimizers = [], self._all_optimizers

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
                state[f"model_{index}"], state[f"base_{index}"] = trained_in(inner), _Base(inner)
            else:
                state[f"model_{index}"] = model
        for index, prepared in enumerate(self._all_optimizers):
            state[f"optimizer_{index}"] = optimizer_in(models, prepared.optimizer, f"optimizer {index}")
        return state


class _Base:
    """What is saved in the place of frozen parameters: for each the sum of its bits, which any number of ranks find."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, list[Any]]:
        """Names and sums; all ranks must call it."""
        names, sums = [], []
        for name, param in self.model.named_parameters():
            stored = managed(param)
            local = stored.local if stored is not None else param.detach()
            if not param.requires_grad and type(local.data) is Tensor:
                total = local.contiguous().view(-1).view(_BITS[local.dtype.itemsize]).sum(dtype=torch.int64)
                if stored is not None:
                    dist.all_reduce(total, group=stored.unit.group)
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
