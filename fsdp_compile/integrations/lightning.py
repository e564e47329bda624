"""Strategies for Lightning: `Fabric(strategy=FabricStrategy(...))` and `Trainer(strategy=TrainerStrategy(...))`.

Both take the arguments of `fully_shard`, shard over all ranks, and write sharded checkpoints, which load on any number
of ranks. Checked with lightning 2.6.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies import ModelParallelStrategy as _FabricBase
from lightning.pytorch.strategies import ModelParallelStrategy as _TrainerBase
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout

from fsdp_compile import checkpoint
from fsdp_compile.api import fully_shard
from fsdp_compile.fsdp_module import FSDPModule, register_fsdp_forward_method

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_METADATA = "meta.pt"  # where Lightning's base class writes what is neither a model nor an optimizer


class _ShardOverAllRanks:
    """What both strategies do about process groups."""

    def setup_environment(self: Any) -> None:
        """Make the process group; all ranks shard."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()  # type: ignore[misc]  # of Lightning's strategy, the other base class


class FabricStrategy(_ShardOverAllRanks, _FabricBase):
    """Shards the model that `fabric.setup(model)` is given, unless it is sharded already.

    Args:
        process_group_backend: of the process group; None: the default of the device.
        timeout: of its collectives.
        options: the arguments of `fully_shard`.
    """

    def __init__(
        self, *, process_group_backend: str | None = None, timeout: timedelta = default_pg_timeout, **options: Any
    ) -> None:
        def shard(model: nn.Module, _mesh: Any) -> nn.Module:
            return model if isinstance(model, FSDPModule) else fully_shard(model, **options)

        super().__init__(shard, process_group_backend=process_group_backend, timeout=timeout)
        self._backward_sync_control = _Accumulation()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write `state`, with models and optimizers among its values, to the folder `path` (`checkpoint.save`)."""
        if storage_options is not None or filter is not None:
            raise TypeError("storage_options and filter are not supported: pass only the state that you want to load")
        checkpoint.save(state, self.broadcast(path), step=0)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote into `state`, in place; return an empty dict, as nothing else is left.

        `weights_only=False` allows values of any type, whose loading can run code.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state: expected a dict as it was saved, found {type(state).__name__}")
        checkpoint.load(state, self.broadcast(path), trust=weights_only is False)
        return {}


class _Accumulation:
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


class TrainerStrategy(_ShardOverAllRanks, _TrainerBase):
    """Shards the `LightningModule`, unless its `configure_model` has done so already.

    The steps of the module (`training_step` and the like) gather parameters as its forward does. Arguments are those of
    `FabricStrategy`.
    """

    model: Any

    def __init__(
        self, *, process_group_backend: str | None = None, timeout: timedelta = default_pg_timeout, **options: Any
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._options = options

    def setup(self, trainer: Any) -> None:
        """Shard the module, and make its optimizers if it is to be trained."""
        self.accelerator.setup(trainer)
        model: Any = self.model
        if not isinstance(model, FSDPModule):
            fully_shard(model, **self._options)
            for step in _STEPS:
                register_fsdp_forward_method(model, step)
        self.model = self.precision_plugin.convert_module(model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers from the folder that `save_checkpoint` wrote; return the rest."""
        path = Path(self.broadcast(checkpoint_path))
        model = self.model
        optimizers = {f"optimizer_{index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        state |= {name: get_optimizer_state_dict(model, optimizer) for name, optimizer in optimizers.items()}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["state_dict"])
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(model, optimizer, state[name])
        rest: dict[str, Any] = torch.load(path / _METADATA, weights_only=weights_only or False)
        return rest
