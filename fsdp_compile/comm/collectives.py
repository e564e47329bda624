"""The collectives, by name: nothing else in the package names one.

Eager code calls the functions; graph passes use the operators. Both are torch's functional collectives, but for what
gloo copies on the CPU. Code that Inductor generates calls the process group itself (passes/direct.py), and puts on the
wire what an eager step does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives  # noqa: F401  (registers the operators and their fake bodies)
from torch.distributed.distributed_c10d import _resolve_process_group  # private; checked on torch 2.11 and 2.13

_c10d = torch.ops._c10d_functional

ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_GATHER_INTO = _c10d.all_gather_into_tensor_out.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_TO_ALL = _c10d.all_to_all_single.default
ALL_GATHER_COALESCED = _c10d.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER_COALESCED = _c10d.reduce_scatter_tensor_coalesced.default
BROADCAST = _c10d.broadcast_.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_IN_PLACE = _c10d.all_reduce_.default  # for graphs after autograd, on a buffer that nothing else reads
WAIT = _c10d.wait_tensor.default
GROUP_ARGUMENT = {  # of the operators that start a collective: where the group stands
    ALL_GATHER: 2,
    ALL_GATHER_INTO: 2,
    REDUCE_SCATTER: 3,
    ALL_TO_ALL: 3,
    ALL_REDUCE: 2,
    ALL_REDUCE_IN_PLACE: 2,
    ALL_GATHER_COALESCED: 2,
    REDUCE_SCATTER_COALESCED: 3,
}
STARTS = tuple(GROUP_ARGUMENT)
COALESCED = {ALL_GATHER: ALL_GATHER_COALESCED, REDUCE_SCATTER: REDUCE_SCATTER_COALESCED}  # one launch of several

_COPYING = ("gloo", "fake")  # backends that copy on the CPU; the fake one, whose ranks do not exist, stands for gloo
_copies: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"avg": torch.mean, "sum": torch.sum}


def copies(tensor: Tensor, group: str) -> bool:
    """Whether all-gathers and reduce-scatters of `tensor` in `group` would copy it: gloo's do."""
    if tensor.device.type != "cpu":
        return False
    found = _resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str in 2.13
    if found not in _copies:
        backends = dict(pair.split(":") for pair in dist.get_backend_config(found).split(","))  # cpu:gloo,cuda:nccl
        _copies[found] = backends.get("cpu") in _COPYING
    return _copies[found]


def start_all_gather(full: Tensor, shard: Tensor, group_size: int, group: str, rank: int | None = None) -> None:
    """Begin to all-gather `shard`, 1-D `[n]`, into `full`, 1-D `[n * group_size]`; read `full` after `wait(full)`.

    Gloo's all-gather copies its input and its output. Where this rank's place `rank` is known, its CPU tensors are
    filled by one broadcast for each rank's slice instead, which works in place.
    """
    if rank is None or not copies(full, group):
        ALL_GATHER_INTO(shard, group_size, group, out=full)
        return
    slices = full.view(group_size, -1)
    slices[rank].copy_(shard)
    for source in range(group_size):
        BROADCAST(slices[source], source, group)


def wait(tensor: Tensor) -> None:
    """Order what comes after the collectives that write `tensor`; nothing if there are none."""
    WAIT(tensor)


def all_gather(shard: Tensor, group_size: int, group: str) -> Tensor:
    """Concatenate every rank's `shard`, 1-D `[n]`, into a new 1-D tensor `[n * group_size]` of the same dtype."""
    full = shard.new_empty(shard.numel() * group_size)
    start_all_gather(full, shard, group_size, group)
    wait(full)
    return full


def start_reduce_scatter(
    full: Tensor, group_size: int, group: str, op: str = "avg"
) -> tuple[Tensor, Callable[[], None]]:
    """Begin to reduce `full`, 1-D `[n * group_size]`: this rank's slice of it, 1-D `[n]`, and what completes that.

    Gloo's reduce-scatter is an all-reduce of a copy, of which all but a slice is thrown away. Its slices are
    exchanged instead and each rank adds up its own: half the bytes on the wire, no copy, and sums in one order.
    """
    if copies(full, group):
        return _start_exchange(full, group_size, group, op)
    reduced = REDUCE_SCATTER(full, op, group_size, group)
    return reduced, partial(wait, reduced)


def _start_exchange(full: Tensor, group_size: int, group: str, op: str) -> tuple[Tensor, Callable[[], None]]:
    part = full.numel() // group_size
    slices = [part] * group_size
    received = ALL_TO_ALL(full, slices, slices, group)  # row i: what rank i has for this one
    reduced = full.new_empty(part)

    def finish() -> None:
        rows = WAIT(received).view(group_size, part)
        _REDUCTIONS[op](rows, 0, out=reduced)

    return reduced, finish


def reduce_scatter(full: Tensor, group_size: int, group: str, op: str = "avg") -> Tensor:
    """Reduce `full`, 1-D `[n * group_size]`, over the group; return this rank's slice, 1-D `[n]`."""
    reduced, finish = start_reduce_scatter(full, group_size, group, op)
    finish()
    return reduced


def start_all_reduce(full: Tensor, group: str, op: str = "avg") -> None:
    """Begin to reduce `full`, any shape, over the group in place; read it after `wait(full)`."""
    ALL_REDUCE_IN_PLACE(full, op, group)


def all_reduce(full: Tensor, group: str, op: str = "avg") -> Tensor:
    """Reduce `full`, any shape, over the group; return a new tensor of that shape."""
    return WAIT(ALL_REDUCE(full, op, group))


def broadcast(message: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite `message`, contiguous, of any shape and dtype, with what the group's first rank has in it."""
    dist.broadcast(message, group=group, group_src=0)


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank has for `mine`, anything that can be pickled, in the order of ranks."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def broadcast_object(mine: Any, group: dist.ProcessGroup) -> Any:
    """What the group's first rank has for `mine`, anything that can be pickled."""
    found = [mine]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]
