"""Strategies for Lightning: `Fabric(strategy=FabricStrategy(...))` and `Trainer(strategy=TrainerStrategy(...))`.

Both take the arguments of `fully_shard`, shard over all ranks, and write sharded checkpoints, which load on any number
of ranks. Checked with lightning 2.6.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from fsdp_compile.checkpoint.save_load import errors_of_ranks
from fsdp_compile.checkpoint.untrusted import SafeReader, ValuePlanner, file_in, load_item
from fsdp_compile.fsdp_module import FSDPModule, register_fsdp_forward_method

__all__ = ["FabricStrategy", "TrainerStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_METADATA = "meta.pt"  # where Lightning's base class writes what is neither a model nor an optimizer


class _ShardOverAllRanks:
    """What both strategies do about process groups and about checkpoints of unknown origin."""

    trust: bool

    def setup_environment(self: Any) -> None:
        """Make the process group; all ranks shard."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()  # type: ignore[misc]  # of Lightning's strategy, the other base class

    def _trusts(self, weights_only: bool | None) -> bool:
        return self.trust if weights_only is None else not weights_only


class FabricStrategy(_ShardOverAllRanks, _FabricBase):
    """Shards the model that `fabric.setup(model)` is given, unless it is sharded already.

    Args:
        process_group_backend: of the process group; None: the default of the device.
        timeout: of its collectives.
        trust: load values of any type from checkpoints, which can run code that their author chose. A `weights_only` of
            Lightning's own functions has precedence.
        options: the arguments of `fully_shard`.
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        trust: bool = False,
        **options: Any,
    ) -> None:
        def shard(model: nn.Module, _mesh: Any) -> nn.Module:
            return model if isinstance(model, FSDPModule) else fully_shard(model, **options)

        super().__init__(shard, process_group_backend=process_group_backend, timeout=timeout)
        self.trust = trust
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

        CheckpointError if a value is neither a tensor nor of a plain type, unless `weights_only` is False.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state: expected a dict as it was saved, found {type(state).__name__}")
        checkpoint.load(state, self.broadcast(path), trust=self._trusts(weights_only))
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
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        trust: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.trust, self._options = trust, options

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
        """Load model and optimizers from the folder that `save_checkpoint` wrote; return the rest.

        CheckpointError if it is damaged, or a value is neither a tensor nor of a plain type and `trust` was not passed.
        """
        path, trust = Path(self.broadcast(checkpoint_path)), self._trusts(weights_only)
        model = self.model
        optimizers = {f"optimizer_{index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        state |= {name: get_optimizer_state_dict(model, optimizer) for name, optimizer in optimizers.items()}
        with errors_of_ranks(f"loading {path}"):
            dcp.load(state, storage_reader=SafeReader(path), planner=ValuePlanner(trust))
        set_model_state_dict(model, state["state_dict"])
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(model, optimizer, state[name])
        with open(file_in(path, _METADATA), "rb") as file:
            rest: dict[str, Any] = load_item(file, f"{path / _METADATA}", is_value=True, trust=trust)
        return rest
