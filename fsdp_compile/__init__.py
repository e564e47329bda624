"""`torch.compile(fully_shard(model))`: fully sharded data parallelism on flat parameters, eager or compiled.

fully_shard                  shard a model's parameters in place
FSDPModule                   what `fully_shard` returns: the model, with methods such as `no_sync` and `clip_grad_norm_`
FullyShardedDataParallel     the same as a wrapper, for scripts written for torch.distributed.fsdp
summon_full_params           a context in which parameters have all elements on this rank
compile_step                 a whole training step as one call: forward, backward, clipping, a compiled update
state_dict_type              a context in which `state_dict()` gives full, sharded or local values
optim_state_dict             an optimizer's state by original names and shapes; and back: optim_state_dict_to_load
explain                      what a step takes on any cluster: seconds, tokens/s, memory; needs no GPU, no other rank
explain_plan                 the plan of a compiled step: each collective, what of it is hidden and what limits the rest
Float8ErrorFeedback          with float8_reduce_scatter, a communication hook that sends gradients in float8
CompileConfig                what to choose about compilation, for `backend="fsdp_compile", options={...}`

`import fsdp_compile` is quick and imports nothing of torch: each name is imported when it is first asked for.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FlatParameter,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

    from fsdp_compile.api import explain, explain_plan, fully_shard
    from fsdp_compile.comm_hooks import Float8ErrorFeedback, float8_reduce_scatter
    from fsdp_compile.config import CompileConfig
    from fsdp_compile.construct.arguments import DataParallelMeshDims
    from fsdp_compile.eager.summon import summon_full_params
    from fsdp_compile.eager.unsharded import UnshardHandle
    from fsdp_compile.fsdp_module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
    from fsdp_compile.state_dict.model import get_state_dict_type, set_state_dict_type, state_dict_type
    from fsdp_compile.state_dict.optimizer import optim_state_dict, optim_state_dict_to_load, rekey_optim_state_dict
    from fsdp_compile.step import compile_step
    from fsdp_compile.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CompileConfig",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "Float8ErrorFeedback",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "compile_step",
    "explain",
    "explain_plan",
    "float8_reduce_scatter",
    "fully_shard",
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "register_fsdp_forward_method",
    "rekey_optim_state_dict",
    "set_state_dict_type",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "state_dict_type",
    "summon_full_params",
]

# Where names are defined that are not among torch's own, which `torch.distributed.fsdp` has.
_MODULES = {
    "CompileConfig": "fsdp_compile.config",
    "CustomPolicy": "torch.distributed.fsdp.wrap",
    "DataParallelMeshDims": "fsdp_compile.construct.arguments",
    "FSDPModule": "fsdp_compile.fsdp_module",
    "Float8ErrorFeedback": "fsdp_compile.comm_hooks",
    "FullyShardedDataParallel": "fsdp_compile.wrapper",
    "ModuleWrapPolicy": "torch.distributed.fsdp.wrap",
    "UnshardHandle": "fsdp_compile.eager.unsharded",
    "compile_step": "fsdp_compile.step",
    "explain_plan": "fsdp_compile.api",
    "float8_reduce_scatter": "fsdp_compile.comm_hooks",
    "fully_shard": "fsdp_compile.api",
    "get_state_dict_type": "fsdp_compile.state_dict.model",
    "optim_state_dict": "fsdp_compile.state_dict.optimizer",
    "optim_state_dict_to_load": "fsdp_compile.state_dict.optimizer",
    "register_fsdp_forward_method": "fsdp_compile.fsdp_module",
    "rekey_optim_state_dict": "fsdp_compile.state_dict.optimizer",
    "set_state_dict_type": "fsdp_compile.state_dict.model",
    "share_comm_ctx": "fsdp_compile.fsdp_module",
    "size_based_auto_wrap_policy": "torch.distributed.fsdp.wrap",
    "state_dict_type": "fsdp_compile.state_dict.model",
    "summon_full_params": "fsdp_compile.eager.summon",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "torch.distributed.fsdp")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:

    class _Package(ModuleType):
        """The type of this package, for which `fsdp_compile.explain` is always the function.

        Python binds the package `fsdp_compile.explain` to the same name when it is first imported, in whatever order.
        """

        @property
        def explain(self):
            from fsdp_compile.api import explain

            return explain

        @explain.setter
        def explain(self, package):
            """Ignore `package`: `from fsdp_compile.explain.report import ...` does not need it to be bound."""

    sys.modules[__name__].__class__ = _Package
