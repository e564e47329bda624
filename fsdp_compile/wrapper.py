"""`FullyShardedDataParallel`: the wrapper class of `torch.distributed.fsdp`, on `fully_shard`.

A training script written for torch's class changes its import line. What differs from `fully_shard` is the shape of the
tree: each sharded module sits below a wrapper, under the name `_fsdp_wrapped_module`.

    FSDP(net, auto_wrap_policy={Block})          wrapper -> FSDPModule net -> ... -> wrapper -> FSDPModule block -> ...

The module inside is what `fully_shard` made of it: it gathers and reduces, and it alone is compiled. A wrapper forwards
calls and attributes, and says under which names things are found: state dicts leave the wrappers' name out.
"""

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType

from fsdp_compile.api import shard_module
from fsdp_compile.comm.groups import GroupArgument
from fsdp_compile.construct.arguments import check_module
from fsdp_compile.construct.wrap_policy import AutoWrapPolicy
from fsdp_compile.core._torch import TrainingState, never_trace
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import (
    CHECKPOINTED,
    WRAPPED,
    by_original_class,
    clean_name,
    get_parameter,
    sharding_of,
    units_used_below,
)
from fsdp_compile.core.unit import Unit
from fsdp_compile.edits.summon import summon_full_params
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.state_dict import optimizer
from fsdp_compile.state_dict.model import (
    default_settings,
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from fsdp_compile.tensors._torch import called_by_dcp


class FullyShardedDataParallel(nn.Module):
    """Shard `module`, and the submodules that `auto_wrap_policy` chooses, which are replaced by wrappers around them.

    Takes the arguments of `torch.distributed.fsdp.FullyShardedDataParallel`, in its order; see `fully_shard` for what
    it does and raises. `parameters()` yields the original objects whatever `use_orig_params` is.

    Args:
        module: the module.
        process_group: group to shard over; for hybrid strategies the pair (shard group, replica group).
        sharding_strategy: FULL_SHARD frees unsharded parameters between forward and backward, and SHARD_GRAD_OP does
            not. NO_SHARD stores all parameters on every rank and averages gradients. HYBRID_SHARD, which a 2-D mesh
            means without this argument, and _HYBRID_SHARD_ZERO2 do the first two within a node, and average over nodes.
            With a shard group of one rank all strategies are NO_SHARD.
        cpu_offload: whether shards and gradients are stored, and the optimizer runs, on the CPU.
        auto_wrap_policy: as of `fully_shard`.
        backward_prefetch: with BACKWARD_PRE the next unit is gathered while the backward of this one computes, with
            BACKWARD_POST after it, with None when it is needed.
        mixed_precision: dtypes of unsharded parameters, of reduced gradients and of buffers, and which inputs are cast.
            Unless `auto_wrap_policy` is None, batch normalization, or the classes in `_module_classes_to_ignore`,
            becomes units without mixed precision.
        ignored_modules: modules to leave alone, with all below them: not sharded, moved or initialized.
        param_init_fn: called on every module that directly owns tensors on the meta device, or owns none, to give its
            own tensors memory and values. If None, `reset_parameters()` does it, as with `fully_shard`.
        device_id: device to compute on; what is on the CPU moves there, unit by unit. None means the device
            of the parameters.
        sync_module_states: send parameters and buffers of the first rank to all others before sharding.
        forward_prefetch: whether an eager forward prefetches the next unit, in the order of the first iteration.
        limit_all_gathers: whether the host waits before an all-gather while the device may still read two units that
            were freed. It must be equal in all calls under one root, else the first forward raises ValueError; of the
            other two settings those of the outermost call are in force.
        use_orig_params: no effect.
        ignored_states: the same as modules, or parameters to leave alone. At most one of the two arguments.
        device_mesh: mesh to shard over; for hybrid strategies 2-D, (replicas, shards). At most one of it and
            `process_group`; without them all ranks shard, and hybrid strategies within a node.
    """

    summon_full_params = staticmethod(summon_full_params)
    state_dict_type = staticmethod(state_dict_type)
    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    optim_state_dict = staticmethod(optimizer.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optimizer.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optimizer.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optimizer.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optimizer.rekey_optim_state_dict)

    def __init__(
        self,
        module: nn.Module,
        process_group: GroupArgument | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: AutoWrapPolicy = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if not use_orig_params:
            _warn_of_original_parameters()
        check_module(module)
        sharded_before = {each for each in module.modules() if sharding_of(each)}
        shard_module(
            module,
            mesh=device_mesh,
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            reshard_after_forward=True if sharding_strategy is None else None,
            auto_wrap_policy=auto_wrap_policy,
            mixed_precision=mixed_precision,
            cpu_offload=cpu_offload,
            ignored_modules=ignored_modules,
            ignored_states=ignored_states,
            device_id=device_id,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
        )
        _wrap_units_below(module, sharded_before)
        self._put_around(module)
        for unit in units_used_below(module):
            unit.state_settings = unit.state_settings or default_settings(StateDictType.FULL_STATE_DICT)

    def _put_around(self, module: nn.Module) -> None:
        """Become the wrapper of `module`, which is sharded."""
        setattr(self, WRAPPED, module)
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)
        self.register_load_state_dict_post_hook(_clean_incompatible_keys)

    get_parameter = get_parameter

    @property
    def module(self) -> Any:
        """The wrapped module, without activation checkpointing that was put around it, before or since."""
        inside = self._modules[WRAPPED]
        return inside._modules.get(CHECKPOINTED, inside) if inside is not None else None

    @property
    def sharded_module(self) -> FSDPModule:
        """The `FSDPModule`: what was wrapped. Checkpointing that was put around it since is not."""
        inside: Any = self._modules[WRAPPED]
        return inside if sharding_of(inside) is not None else self.module

    @never_trace  # the frame that is compiled is the forward of the module: there is a code object for each model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with full parameters."""
        return self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]  # set

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `FSDPModule.compile`."""
        self.sharded_module.compile(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As `FSDPModule.apply`, for which wrapped modules have their original class too."""
        return super().apply(by_original_class(fn))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __bool__(self) -> bool:
        """Always true, also where the wrapped module has a length of 0, or none."""
        return True

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """As `FSDPModule.no_sync`."""
        return self.sharded_module.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `FSDPModule.clip_grad_norm_`."""
        return self.sharded_module.clip_grad_norm_(max_norm, norm_type)

    def register_comm_hook(self, state: Any, hook: Callable[..., None]) -> None:
        """As `FSDPModule.register_comm_hook`."""
        self.sharded_module.register_comm_hook(state, hook)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in the tree of `module`; with `root_only`, those that no other wrapper encloses."""
        wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in wrappers if each.check_is_root() or not root_only]

    def check_is_root(self) -> bool:
        """Whether no sharded module is around this one."""
        return self.sharded_module.is_root()

    # --- names --------------------------------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`; for `torch.distributed.checkpoint.state_dict` without the wrappers' name."""
        if torch.compiler.is_compiling() or not called_by_dcp():
            return super().named_modules(memo, prefix, remove_duplicate)
        memo = set() if memo is None else memo
        inside = self._modules[WRAPPED].named_modules(memo, prefix, remove_duplicate)  # type: ignore[union-attr]  # set
        return chain(() if self in memo else [(prefix, self)], inside)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Asked for by `torch.distributed.checkpoint.state_dict`: its values are no parts of names in state dicts."""
        return {"": WRAPPED}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`; while this wrapper's parameters are summoned, without the wrappers' name."""
        named = super().named_parameters(*args, **kwargs)
        return ((clean_name(name), each) for name, each in named) if self._is_summoned else named

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As `nn.Module.named_buffers`, under names as `named_parameters` has them."""
        named = super().named_buffers(*args, **kwargs)
        return ((clean_name(name), each) for name, each in named) if self._is_summoned else named

    @property
    def _is_summoned(self) -> bool:
        return any(unit.summoned is not None for unit in self._managed_units)

    # --- settings, under the names that torch's wrapper has for them --------------------------------------------------

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force: NO_SHARD, whatever was asked for, where one rank has all parameters."""
        if self._managed_units and not self._managed_units[0].is_sharded:
            return ShardingStrategy.NO_SHARD
        return self.sharded_module._fsdp.settings.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes in force; those of the parameters where they are None."""
        return self.sharded_module._fsdp.settings.precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards and gradients are stored on the CPU."""
        return CPUOffload(offload_params=any(unit.settings.offload for unit in self._managed_units))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that parameters are sharded over; under NO_SHARD, that gradients are averaged over."""
        units = self._managed_units
        return units[0].group.find() if units else dist.distributed_c10d._get_default_group()

    @property
    def rank(self) -> int:
        """The index of this rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return self._managed_units[0].device if self._managed_units else self.sharded_module._fsdp.device

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The setting in force, that of the root, as of `forward_prefetch` and `limit_all_gathers`."""
        return self._root_settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether the eager forward prefetches."""
        return self._root_settings.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """Whether the host waits before an all-gather for two units that were freed."""
        return self._root_settings.limit_all_gathers

    @property
    def training_state(self) -> TrainingState:
        """SUMMON_FULL_PARAMS, FORWARD_BACKWARD or IDLE: what this wrapper's parameters are used for now."""
        if self._is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        is_running = any(unit.is_unsharded for unit in self._managed_units)
        return TrainingState.FORWARD_BACKWARD if is_running else TrainingState.IDLE

    @property
    def _root_settings(self) -> Settings:
        return self.sharded_module._fsdp_runtime.settings

    @property
    def _managed_units(self) -> tuple[Unit, ...]:
        """The module's own units, or, if all its parameters are those of modules below, theirs."""
        sharding = self.sharded_module._fsdp
        return sharding.units or sharding.units_below


def _wrap_units_below(root: nn.Module, left_alone: Container[nn.Module]) -> None:
    """Put a wrapper around each sharded module below `root`, wherever it is registered, but for those `left_alone`."""
    wrappers: dict[nn.Module, FullyShardedDataParallel] = {}
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or child is root or child in left_alone or not sharding_of(child):
                continue
            if child not in wrappers:
                wrappers[child] = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
                nn.Module.__init__(wrappers[child])
                wrappers[child]._put_around(child)
                wrappers[child].training = child.training
            parent._modules[name] = wrappers[child]


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key.removeprefix(prefix)] = state.pop(key)


def _clean_incompatible_keys(module: nn.Module, incompatible: tuple[list[str], list[str]]) -> None:
    for keys in incompatible:
        keys[:] = map(clean_name, keys)


@functools.cache
def _warn_of_original_parameters() -> None:
    warn_caller("use_orig_params=False has no effect: parameters() yields the original ones; leave the argument out")
