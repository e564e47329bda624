"""`torch.compile(fully_shard(model))`: fully sharded data parallelism on flat parameters, eager or compiled.

fully_shard                  shard a model's parameters in place
FSDPModule                   what `fully_shard` returns: the model, with methods such as `no_sync` and `clip_grad_norm_`
FullyShardedDataParallel     the same as a wrapper, for scripts written for torch.distributed.fsdp
summon_full_params           a context in which parameters have all elements on this rank
compile_step                 a whole training step as one call: forward, backward, clipping, update
export                       full weights unit by unit, cast on the shard, for an engine that generates; metadata: names
state_dict_type              a context in which `state_dict()` gives full, sharded or local values
offload, load                parameters and optimizer state to pinned host memory, and back
optim_state_dict             an optimizer's state by original names and shapes; and back: optim_state_dict_to_load
explain                      what a step takes on any cluster: seconds, tokens/s, memory; needs no GPU, no other rank
explain_plan                 the plan of a compiled step: each collective, what of it is hidden and what limits the rest
Wire                         in which formats ranks send parameters and gradients: fewer bytes on slow links
microbatch_seed              with mean_over_ranks and reduction_order="tree": the same bits on any number of ranks
CompileConfig                what to choose about compilation, for `backend="fsdp_compile", options={...}`

`import fsdp_compile` is quick and imports nothing of torch: each name is imported when it is first asked for.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name `as` itself: for type checkers it is exported
    from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
    from torch.distributed.fsdp import CPUOffload as CPUOffload
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import FlatParameter as FlatParameter
    from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
    from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
    from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
    from torch.distributed.fsdp import MixedPrecision as MixedPrecision
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
    from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
    from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
    from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
    from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
    from torch.distributed.fsdp import StateDictConfig as StateDictConfig
    from torch.distributed.fsdp import StateDictSettings as StateDictSettings
    from torch.distributed.fsdp import StateDictType as StateDictType
    from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy

    from fsdp_compile.api import explain as explain
    from fsdp_compile.api import explain_plan as explain_plan
    from fsdp_compile.api import fully_shard as fully_shard
    from fsdp_compile.comm.hops import Wire as Wire
    from fsdp_compile.config import CompileConfig as CompileConfig
    from fsdp_compile.construct.arguments import DataParallelMeshDims as DataParallelMeshDims
    from fsdp_compile.eager.runtime import UnshardHandle as UnshardHandle
    from fsdp_compile.edits.apply import load as load
    from fsdp_compile.edits.apply import offload as offload
    from fsdp_compile.edits.summon import summon_full_params as summon_full_params
    from fsdp_compile.fsdp_module import FSDPModule as FSDPModule
    from fsdp_compile.fsdp_module import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdp_compile.fsdp_module import share_comm_ctx as share_comm_ctx
    from fsdp_compile.reproducibility import mean_over_ranks as mean_over_ranks
    from fsdp_compile.reproducibility import microbatch_seed as microbatch_seed
    from fsdp_compile.state_dict.model import get_state_dict_type as get_state_dict_type
    from fsdp_compile.state_dict.model import set_state_dict_type as set_state_dict_type
    from fsdp_compile.state_dict.model import state_dict_type as state_dict_type
    from fsdp_compile.state_dict.optimizer import optim_state_dict as optim_state_dict
    from fsdp_compile.state_dict.optimizer import optim_state_dict_to_load as optim_state_dict_to_load
    from fsdp_compile.state_dict.optimizer import rekey_optim_state_dict as rekey_optim_state_dict
    from fsdp_compile.step import compile_step as compile_step
    from fsdp_compile.weights import export as export
    from fsdp_compile.weights import metadata as metadata
    from fsdp_compile.wrapper import FullyShardedDataParallel as FullyShardedDataParallel

    __version__: str

# Where each public name is defined. It is imported when it is first asked for.
_NAMES = {
    "torch.distributed.fsdp": "BackwardPrefetch CPUOffload CPUOffloadPolicy FlatParameter FullOptimStateDictConfig "
    "FullStateDictConfig LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision MixedPrecisionPolicy "
    "OffloadPolicy OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig ShardedStateDictConfig "
    "ShardingStrategy StateDictConfig StateDictSettings StateDictType",
    "torch.distributed.fsdp.wrap": "CustomPolicy ModuleWrapPolicy size_based_auto_wrap_policy",
    "fsdp_compile.api": "explain explain_plan fully_shard",
    "fsdp_compile.comm.hops": "Wire",
    "fsdp_compile.config": "CompileConfig",
    "fsdp_compile.construct.arguments": "DataParallelMeshDims",
    "fsdp_compile.edits.apply": "load offload",
    "fsdp_compile.edits.summon": "summon_full_params",
    "fsdp_compile.eager.runtime": "UnshardHandle",
    "fsdp_compile.weights": "export metadata",
    "fsdp_compile.fsdp_module": "FSDPModule register_fsdp_forward_method share_comm_ctx",
    "fsdp_compile.reproducibility": "mean_over_ranks microbatch_seed",
    "fsdp_compile.state_dict.model": "get_state_dict_type set_state_dict_type state_dict_type",
    "fsdp_compile.state_dict.optimizer": "optim_state_dict optim_state_dict_to_load rekey_optim_state_dict",
    "fsdp_compile.step": "compile_step",
    "fsdp_compile.wrapper": "FullyShardedDataParallel",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version(__name__)
        except PackageNotFoundError:  # it runs from its source
            return "0+unknown"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


if not TYPE_CHECKING:
    __all__ = sorted(_MODULES)

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
