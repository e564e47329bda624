"""Private names of torch that the eager runtime uses. Checked on torch 2.11 and 2.13.

torch._C._dynamo.eval_frame, torch._dynamo.eval_frame    whether Dynamo is active, and frames that it leaves alone. When
                                                         torch moves: look for `skip_code` and the getter of the
                                                         eval-frame callback, which is None or False when off.
torch._dynamo.utils                                      permission for side effects in a checkpointed region, asked for
                                                         by `_disable_side_effect_safety_checks_for_current_subtracer`
torch._foreach_norm                                      norms of many tensors in one kernel
torch.distributed.fsdp._common_utils                     what torch's wrapper says of its state: IDLE, ...
torch.distributed.algorithms._comm_hooks.default_hooks   the hooks that users pass to `register_comm_hook`
torch.nn.modules.module                                  whether hooks of all modules are registered
torch.nn.parallel.DistributedDataParallel                the one whose forward runs, as Dynamo asks for it, and its
                                                         parameters
torch.utils._pytree                                      the tensors in the arguments and outputs of a module
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as allowed_in_regions
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_compile.core._torch import call_after_backward, current_backward

__all__ = [
    "TrainingState",
    "allowed_in_regions",
    "allreduce_hook",
    "bf16_compress_hook",
    "call_after_backward",
    "current_backward",
    "dynamo_is_active",
    "fp16_compress_hook",
    "has_global_hooks",
    "never_trace",
    "norms",
    "reduce_scatter_hook",
    "replicated_params",
    "tree_leaves",
    "tree_map",
]

FunctionT = TypeVar("FunctionT", bound=Callable)


def never_trace(function: FunctionT) -> FunctionT:
    """Let Dynamo run calls of `function` as they are where it would compile them; it still traces what calls it.

    `torch.compiler.disable` would break the graph of a caller.
    """
    skip_code(function.__code__)
    return function


@never_trace
def dynamo_is_active() -> bool:
    """Whether calls made from here are compiled by Dynamo; asked from code that is not."""
    return get_eval_frame_callback() not in (None, False)


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The vector norm of each of `tensors`, all of one dtype and device; scalars of `dtype`."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def replicated_params() -> frozenset[nn.Parameter]:
    """The parameters whose gradients the DistributedDataParallel averages whose forward runs; empty outside of one."""
    around = DistributedDataParallel._get_active_ddp_module()
    return frozenset(around._module_parameters if around is not None else ())
