"""Private names of torch about DTensors. Checked on torch 2.11, 2.13 and 2.14.

torch.distributed.tensor._dtensor_spec    `_verify_shard_order`, which compares each placement
torch._dynamo.variables.builder           asks inputs of graphs whether they are DTensors
torch.distributed._state_dict_utils       asks parameters of a model, to copy rows of full tensors into their local ones
torch.testing._comparison                 refuses to compare a DTensor with another tensor
torch._C._dispatch_tls_is_dispatch_key_excluded      before 2.13, the dispatcher asks `isinstance` and reads `_spec`
"""

import sys

import torch

_DISPATCHER_ASKS = torch.__version__ < "2.13"  # with keys excluded that no other code excludes
_READERS = ("torch._dynamo.", "torch.distributed._state_dict_utils", "torch.testing.")


def makes_dtensor_spec() -> bool:
    """Whether DTensor's spec asks, through `__eq__` of the caller, if a placement is the `Shard` that its order needs.
    It raises AssertionError without a reason if not.
    """
    return sys._getframe(2).f_code.co_name == "_verify_shard_order"


def reads_fields_of_dtensors() -> bool:
    """Whether who calls the caller is code of torch that reads the fields of a DTensor, or acts on its placements.
    It treats other tensors as their class says.
    """
    if _DISPATCHER_ASKS and torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.PythonTLSSnapshot):
        return True
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(_READERS)


def called_by(modules: tuple[str, ...]) -> bool:
    """Whether code of one of `modules` calls the caller."""
    return sys._getframe(2).f_globals.get("__name__") in modules
