"""Strategies for Lightning: `Fabric(strategy=FabricStrategy(...))` and `Trainer(strategy=TrainerStrategy(...))`.

Both take the arguments of `fully_shard`, shard over all ranks, and write sharded checkpoints, which load on any number
of ranks. Checked with lightning 2.6.
"""

import io
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies import ModelParallelStrategy as _FabricBase
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy as _TrainerBase
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor

from fsdp_compile import checkpoint
from fsdp_compile.api import fully_shard
from fsdp_compile.checkpoint.save_load import all_succeed, errors_of_ranks
from fsdp_compile.checkpoint.structure import stored_values, tree
from fsdp_compile.checkpoint.untrusted import CheckpointError, SafeReader, ValuePlanner, file_in, load_item
from fsdp_compile.fsdp_module import FSDPModule, register_fsdp_forward_method
from fsdp_compile.state_dict._torch import ChunkedTensor
from fsdp_compile.tensors.nested import dotted, leaves, map_leaves
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

__all__ = ["FabricStrategy", "TrainerStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_METADATA = "meta.pt"  # where Lightning's base class writes what is neither a model nor an optimizer
_BESIDE = "sharded_beside_model"  # tensors of callbacks and hooks, by number; in `meta.pt` where each one belongs


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
        self._optimized: Any = None  # the module whose parameters the optimizers have

    def setup(self, trainer: Any) -> None:
        """Shard the module, and make its optimizers if it is to be trained."""
        if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
            raise TypeError("StochasticWeightAveraging copies averages into sharded parameters in a way that autograd "
                            "records; use WeightAveraging of lightning.pytorch.callbacks")  # fmt: skip
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
            self._optimized = model
        elif self._optimized is not model:
            self._reset_optimizers_and_schedulers()
        self.setup_precision_plugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder: all ranks write what is sharded, of callbacks and hooks too, and the first one the rest.

        CheckpointError if an object of another type than dicts, lists, tuples and dataclasses has sharded tensors.
        """
        if storage_options is not None:
            raise TypeError("storage_options is not supported: a checkpoint is a folder that all ranks write")
        path = Path(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{index}": each for index, each in enumerate(checkpoint.pop("optimizer_states", []))}
        beside = {where: value for where, value in leaves(checkpoint) if _is_sharded(value)}
        state[_BESIDE] = {str(index): value for index, value in enumerate(beside.values())}

        def save_rest() -> None:
            rest = map_leaves(lambda where, value: None if where in beside else value, checkpoint)
            for where, value in leaves(rest):
                _check_saved_by_one(value, dotted(where))
            if self.global_rank == 0:
                path.unlink() if path.is_file() else None  # which another strategy has written
                path.mkdir(parents=True, exist_ok=True)
                torch.save(rest | {_BESIDE: list(beside)}, path / _METADATA)

        all_succeed(save_rest, f"saving {path}", None)
        with errors_of_ranks(f"saving {path}"):
            dcp.save(state, checkpoint_id=path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the folder that `save_checkpoint` wrote; to fit, load optimizers.

        Tensors under the name and of the shape of a parameter are sharded like it, others whole.
        CheckpointError if it is damaged, or a value is neither a tensor nor of a plain type and `trust` was not passed.
        """
        path, trust, model = Path(self.broadcast(checkpoint_path)), self._trusts(weights_only), self.model
        is_fitting = model.trainer.state.fn == TrainerFn.FITTING
        optimizers = {f"optimizer_{index}": each for index, each in enumerate(self.optimizers if is_fitting else [])}
        with open(file_in(path, _METADATA), "rb") as file:
            rest: dict[str, Any] = load_item(file, f"{path / _METADATA}", is_value=True, trust=trust)
        beside = {where: (_BESIDE, str(index)) for index, where in enumerate(rest.pop(_BESIDE, []))}
        own = dict(leaves({"state_dict": get_model_state_dict(model)}))
        own |= {stored: own.get(("state_dict", where[-1])) for where, stored in beside.items()}
        with errors_of_ranks(f"loading {path}"):
            reader = SafeReader(path)
            saved = tree(stored_values(reader.read_metadata(), [], 0, 1), {})
            state = {key: saved[key] for key in ("state_dict", _BESIDE) if key in saved}
            state = map_leaves(lambda where, stored: _to_fill(stored.outline, own.get(where)), state)
            state |= {name: get_optimizer_state_dict(model, optimizer) for name, optimizer in optimizers.items()}
            dcp.load(state, storage_reader=reader, planner=ValuePlanner(trust))
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(model, optimizer, state[name])
        read = dict(leaves(state))
        rest = map_leaves(lambda where, value: read[beside[where]] if where in beside else value, rest)
        return rest | {"state_dict": state.get("state_dict", {})}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's values, which `load_checkpoint` has read and hooks may have changed."""
        set_model_state_dict(self.model, checkpoint["state_dict"], options=StateDictOptions(strict=strict))


def _to_fill(outline: Tensor | None, own: Any) -> Tensor | None:
    """A tensor of that shape, sharded as `own` if it has the shape too; None for another value."""
    if outline is None:
        return None
    is_alike = isinstance(own, Tensor) and own.shape == outline.shape
    return own.clone() if is_alike else torch.empty_like(outline, device="cpu")


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (DTensor, ShardedTensor, ChunkedTensor))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if _is_sharded(value):
            raise TypeError("it has sharded tensors, of which the first rank would write its part alone")
        return (int, ()) if isinstance(value, Tensor) else NotImplemented


def _check_saved_by_one(value: Any, where: str) -> None:
    """CheckpointError if a value that the first rank pickles has sharded tensors within."""
    if not isinstance(value, (Tensor, str, bytes, int, float)):
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception as error:  # a pickler raises nearly anything
            raise CheckpointError(f"{where}: a {type(value).__name__} cannot be saved: {error}; give dicts "
                                  f"of tensors and plain values, as state_dict() is") from error  # fmt: skip
