"""Who calls: what torch tells a sharded tensor by the stack alone. Checked on torch 2.11, 2.13 and 2.14.

Nothing else looks at frames to decide something. Each question is here because torch offers no argument, attribute,
hook or context that answers it:

`called_by`       `isinstance(tensor, DTensor)` and `tensor.placements` have no argument; the same tensor has to be a
                  DTensor to users, and none to code of torch that reads the fields of one: torch._dynamo of the inputs
                  of graphs, torch.testing to compare, torch.distributed._state_dict_utils to copy rows. That one calls
                  `value.to_local().copy_(rows)`, and loaders of files take `placements` for those of rows.
`dispatcher_asks` the dispatcher of torch 2.11 asks `isinstance(tensor, DTensor)`, and then reads `_spec`. It is not
                  told by the stack, but by `torch._C._dispatch_tls_is_dispatch_key_excluded`.
`makes_spec`      DTensor's spec compares each placement with a `Shard`, as users do, in `_verify_shard_order`: by
                  `==` in torch 2.11, by `!=` since.
`called_by_dcp`   torch.distributed.checkpoint.state_dict calls `state_dict()` and `named_modules()` as users do. Before
                  it asks modules for `_fqn_modifiers()`, but so it does for optimizers, whose states need no model's.
                  It chooses the kind of torch's FullyShardedDataParallel by `isinstance` and by private state.
`current_save`    a planner asks `__create_write_items__(name, tensor)`, and is not told the writer. That is an argument
                  of `_save_state_dict`, which plans and saves, as are `no_dist` and `process_group`.
`local_of_caller` `register_parametrization` sets a tensor to itself, which autograd counts as a change of values.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

READERS_OF_FIELDS = ("torch._dynamo.", "torch.distributed._state_dict_utils", "torch.testing.")
"""Code that reads the fields of a DTensor, or acts on its placements. It treats other tensors as their class says."""
COPIES_ROWS = "torch.distributed._state_dict_utils"
"""Code that copies rows of a full tensor into what `to_local()` gives."""
ASKS_TO_DISPATCH = torch.__version__ < "2.13"
"""Whether torch dispatches operators and detaches their results by `isinstance(tensor, DTensor)`."""
_PASS_ON = ("fsdp_compile.", "torch.nn.modules.", "torch._dynamo.", "contextlib", "torch.utils.")


def called_by(modules: str | tuple[str, ...]) -> bool:
    """Whether the caller was called by code of a module whose name begins so."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(modules)


def dispatcher_asks() -> bool:
    """Whether torch's dispatcher calls the caller: it excludes a key that no other code excludes."""
    if not ASKS_TO_DISPATCH or torch.compiler.is_compiling():
        return ASKS_TO_DISPATCH
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PythonTLSSnapshot)


def makes_spec() -> bool:
    """Whether DTensor's spec asks, through `__eq__` of the caller, if a placement is the `Shard` that its order needs.
    It raises AssertionError, which says nothing of parameters, if not.
    """
    return sys._getframe(2).f_code.co_name == "_verify_shard_order"


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


class Saving(NamedTuple):
    """A save of torch.distributed.checkpoint that is being planned."""

    writer: Any  # a StorageWriter
    is_alone: bool  # it saves for one rank alone
    group: Any  # the process group that was passed to it


def current_save() -> Saving | None:
    """The save for which torch.distributed.checkpoint makes a plan."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _save_state_dict.__name__ and "storage_writer" in frame.f_locals:
            found = frame.f_locals
            return Saving(found["storage_writer"], bool(found.get("no_dist")), found.get("process_group"))
        frame = frame.f_back
    return None


def local_of_caller(code: Any, name: str) -> Any:
    """The local variable `name` of the nearest caller that has it, if that one runs `code`; else None."""
    frame: Any = sys._getframe(2)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name] if frame is not None and frame.f_code is code else None
