"""Generated code calls the process group itself.

What the dispatcher and torch's own layers put between a compiled graph and the process group costs more than a small
collective: of torch 2.13, 10 us for a gather and its wait, 32 us for an exchange. The graph keeps torch's operators, so
Inductor knows what it deals with; the lowering of our own form of the wait gives it and the start another name.

    torch.ops._c10d_functional.all_gather_into_tensor_out.default(shard, 8, '0', out=full)  ->  direct.all_gather(...)
    torch.ops._c10d_functional.all_to_all_single.default(packed, [...], [...], '0')         ->  direct.exchange(...)
    torch.ops._c10d_functional.wait_tensor.default(full)                                    ->  direct.wait(full)
"""

from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from fsdp_compile.comm.collectives import ALL_GATHER_INTO, ALL_TO_ALL, WAIT, copies
from fsdp_compile.core.ops import WAIT_ALL_GATHER
from fsdp_compile.passes._torch import group_named, start_all_gather, start_broadcast

_NAMES = {ALL_GATHER_INTO: "direct.all_gather", ALL_TO_ALL: "direct.exchange"}
_running: dict[int, tuple[dist.Work, ...]] = {}  # by the address of what is filled


def all_gather(shard: Tensor, group_size: int, group: str, *, out: Tensor) -> None:
    """Begin to all-gather `shard`, 1-D `[n]`, into `out`, 1-D `[n * group_size]`; to be read after `wait(out)`.

    Gloo's all-gather copies its input and its output: there, as in eager steps, each rank broadcasts its slice.
    """
    ranks = group_named(group)
    if copies(out, group):
        slices = out.view(group_size, -1).unbind()
        slices[ranks.rank()].copy_(shard)
        _running[out.data_ptr()] = tuple(start_broadcast(ranks, each, source) for source, each in enumerate(slices))
    else:
        _running[out.data_ptr()] = (start_all_gather(ranks, out, shard),)


def exchange(packed: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Tensor:
    """Begin to send every rank its equal slice of `packed`, 1-D; a tensor like it for what they send, after `wait`."""
    received = packed.new_empty(packed.numel())
    _running[received.data_ptr()] = (group_named(group).alltoall_base(received, packed, [], []),)
    return received


def wait(full: Tensor) -> None:
    """Order what follows after the collective that fills `full`."""
    for work in _running.pop(full.data_ptr()):
        work.wait()


def wait_directly(start: fx.Node) -> None:
    """Let `start`, a gather with an `out` or an exchange, and its wait be direct calls."""
    (wait,) = (user for user in start.users if user.target is WAIT)
    wait.target, wait.args = WAIT_ALL_GATHER, (start, start.args[0])
    register_wait_lowering()


@cache
def register_wait_lowering() -> None:
    """Teach Inductor to lower our own form of the wait; once per process, when first needed."""
    from torch._inductor.lowering import register_lowering

    register_lowering(WAIT_ALL_GATHER, type_promotion_kind=None)(_lower_wait)


def _lower_wait(full: Any, sent: Any) -> Any:  # Inductor IR in and out; checked on torch 2.11 and 2.13
    """Inductor keeps the input of an allocating collective alive until its wait, but not that of one with an `out`."""
    from torch._inductor.virtualized import V

    _wait_kernel().create_wait(WAIT, full)
    waiting: Any = V.graph.operations[-1]
    V.graph.additional_star_deps[waiting.get_operation_name()].add(sent.get_name())
    if not V.graph.cpp_wrapper:  # where generated code is C++, collectives stay operators
        start: Any = next(op for op in reversed(V.graph.operations) if _fills(op, full.get_name()))
        start.python_kernel_name, waiting.python_kernel_name = _NAMES[start.op_overload], "direct.wait"
    return full


def _fills(operation: Any, name: str) -> bool:
    """Whether `operation` starts the collective that fills the buffer `name`."""
    return getattr(operation, "op_overload", None) in _NAMES and name in (operation.get_name(), *operation.alias_names)


@cache
def _wait_kernel() -> Any:
    """Torch's wait, in a module that knows this one."""
    from torch._inductor import ir

    class Waiting(ir._WaitKernel):
        def codegen(self, wrapper):  # type: ignore[no-untyped-def]  # likewise
            wrapper.add_import_once("from fsdp_compile.passes.post_grad import direct")
            super().codegen(wrapper)

    return Waiting
