"""Who asks: what torch tells a sharded tensor by the stack alone. Checked on torch 2.11, 2.13 and 2.14.

Nothing else looks at frames to decide something, because an answer that depends on who asks surprises. Torch offers no
argument, attribute, hook or context that would tell:

who asks                              what                           what it would get otherwise
torch._dynamo, torch.testing          isinstance(tensor, DTensor)    yes: they read `_spec`, or compare what ranks store
torch.distributed._state_dict_utils   placements, to_local(),        ValueError where a rank stores no rows: it copies
                                      _local_tensor                  rows of a full tensor into to_local()
loaders of transformers               placements, _local_tensor      the same: they put rows of a file into the place of
                                                                     a parameter
DTensorSpec                           placement == Shard(0)          no; then its AssertionError names no parameter
...checkpoint.state_dict of torch     state_dict(), named_modules()  values of the kind that was set, maybe on one rank
                                                                     alone, and names of wrappers
a planner of dcp.save                 __create_write_items__         no writer: some keep one item of each name alone

The dispatcher of torch 2.11 asks `isinstance(tensor, DTensor)` too, and then reads `_spec`. It is told by
`torch._C._dispatch_tls_is_dispatch_key_excluded` (`dispatcher_asks`).
"""

import sys
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as save_state_dict
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["save_state_dict"]

READS_FIELDS = ("torch._dynamo.", "torch.testing.")
COPIES_ROWS = "torch.distributed._state_dict_utils"
LOADS_ROWS = (
    "transformers.core_model_loading", "transformers.modeling_utils", "transformers.distributed.sharding_utils"
)  # fmt: skip
MAKES_SPECS = "torch.distributed.tensor._dtensor_spec"
ASKS_TO_DISPATCH = torch.__version__ < "2.13"
"""Whether torch dispatches operators and detaches their results by `isinstance(tensor, DTensor)`."""
_PASS_ON = ("fsdp_compile.", "torch.nn.modules.", "torch._dynamo.", "contextlib", "torch.utils.")


def asked_by() -> str:
    """The name of the module whose code has called the caller."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name


def dispatcher_asks() -> bool:
    """Whether torch's dispatcher calls the caller: it excludes a key that no other code excludes."""
    if not ASKS_TO_DISPATCH or torch.compiler.is_compiling():
        return ASKS_TO_DISPATCH
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PythonTLSSnapshot)


def called_by_dcp() -> bool:
    """Whether the caller's caller is `torch.distributed.checkpoint.state_dict`, which needs sharded values and original
    names, whatever kind is set.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_PASS_ON):
            return bool(name == "torch.distributed.checkpoint.state_dict")
        frame = frame.f_back
    return False


def locals_of(function: Any) -> dict[str, Any]:
    """The local variables of the nearest caller that runs `function`; {} if there is none."""
    code, frame = function.__code__, sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return {} if frame is None else frame.f_locals


def spec_of(tensor: Any) -> DTensorSpec:
    """What a DTensor says of itself: `tensor`'s mesh, placements and shape. `DTensorSpec(...)` refuses placements that
    equal no `Shard`.
    """
    placements, meta = tensor.placements, TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    spec = DTensorSpec.__new__(DTensorSpec)
    vars(spec).update(mesh=tensor.device_mesh, placements=placements, tensor_meta=meta, _hash=None)
    vars(spec).update(use_strided_shard_as_shard_order=False)
    vars(spec).update(shard_order=DTensorSpec.compute_default_shard_order(placements))
    return spec
