"""`FullyShardedDataParallel`: the wrapper class of `torch.distributed.fsdp`, on `fully_shard`.

A training script written for torch's class changes its import line. What differs from `fully_shard` is the shape of the
tree: the module sits below a wrapper, under the name `_fsdp_wrapped_module`; state dicts leave that name out.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType

from fsdp_compile.api import fully_shard
from fsdp_compile.comm.groups import GroupArgument
from fsdp_compile.construct.wrap_policy import AutoWrapPolicy
from fsdp_compile.core.lookup import WRAPPED
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.eager.forward import Prologue
from fsdp_compile.eager.summon import summon_full_params
from fsdp_compile.state_dict import optimizer
from fsdp_compile.state_dict.kinds import default_settings, get_state_dict_type, set_state_dict_type, state_dict_type


class FullyShardedDataParallel(Prologue, nn.Module):
    """Shard `module`, and the submodules that `auto_wrap_policy` chooses, and run it.

    Takes the arguments of `torch.distributed.fsdp.FullyShardedDataParallel`; what they mean, and what is raised, is
    said at `fully_shard`. `use_orig_params` is True: `parameters()` yields the original `nn.Parameter` objects.

    Raises:
        ValueError: `use_orig_params` is False.
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
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if not use_orig_params:
            raise ValueError(
                "use_orig_params: expected True, found False: there is no flat parameter; parameters() yields the "
                "original ones, each as this rank's part; leave the argument out"
            )
        setattr(
            self,
            WRAPPED,
            fully_shard(
                module,
                mesh=device_mesh,
                process_group=process_group,
                sharding_strategy=sharding_strategy,
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
            ),
        )
        for unit in units_used_below(module):
            unit.state_settings = unit.state_settings or default_settings(StateDictType.FULL_STATE_DICT)
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)

    @property
    def module(self) -> Any:
        """The wrapped module, a `FSDPModule`."""
        return self._modules[WRAPPED]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with full parameters."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """As `FSDPModule.no_sync`."""
        return self.module.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `FSDPModule.clip_grad_norm_`."""
        return self.module.clip_grad_norm_(max_norm, norm_type)

    def register_comm_hook(self, state: Any, hook: Callable[..., None]) -> None:
        """As `FSDPModule.register_comm_hook`."""
        self.module.register_comm_hook(state, hook)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in the tree of `module`; with `root_only`, those that no other wrapper encloses."""
        wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in wrappers if each.module._fsdp.is_root] if root_only else wrappers


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key.removeprefix(prefix)] = state.pop(key)
