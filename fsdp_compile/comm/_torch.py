"""Private names of torch about groups, collectives and the stage of a step. Checked on torch 2.11, 2.13 and 2.14.

docs/upgrading_torch.md says what to look for when torch moves. Importing `_functional_collectives` registers operators.
"""

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _current_autograd_node as current_node  # whose hooks may run
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.autograd import _profiler_enabled as profiler_runs
from torch.distributed import _functional_collectives  # noqa: F401  (registers OPERATORS)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group, _world

__all__ = ["current_node", "profiler_runs"]  # of torch, for others

OPERATORS = torch.ops._c10d_functional


def current_backward() -> int:
    """Number of the backward pass that this thread runs; -1 outside of any."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return current_backward() != -1


def groups_counted() -> int:
    """Part of the next group's name: how many this process is in; from torch 2.14 on, has been asked for."""
    return int(_world.group_count) if torch.__version__ >= "2.14" else len(_world.pg_names)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that name. RuntimeError if there is none, or it was destroyed."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str in 2.13
    except RuntimeError:
        late = "destroy it after the last use of what is sharded over it"
        raise RuntimeError(f"process group {name!r} was destroyed, or nobody has held it: {late}") from None


def offer_name(name: str, group: dist.ProcessGroup) -> bool:
    """Let `group_named(name)` be `group` unless another living group has the name; return whether it is."""
    try:
        return group_named(name) is group
    except RuntimeError:  # there is none, or it is gone
        _unregister_process_group(name)  # type: ignore[arg-type]  # a NewType of str in 2.13
        _register_process_group(name, group)  # type: ignore[arg-type]  # likewise
        return True


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time after which a collective of `group` fails; None if it has no backend, or one that does not say."""
    backend: Any = group._get_backend(group._device_types[0]) if group._device_types else None
    return getattr(getattr(backend, "options", None), "_timeout", None)


def mesh_without_group(size: int, rank: int, device_type: str) -> DeviceMesh:
    """`size` ranks, as `rank` sees them, as a 1-D mesh that cannot communicate."""
    return DeviceMesh(device_type, torch.arange(size), _init_backend=False, _rank=rank)


def without_groups(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh equal to `mesh` that finds its process groups by their names, and holds none."""
    copied = copy.deepcopy(mesh, {id(mesh._rank_map): mesh._rank_map})  # a tensor, which a mode may not let be copied
    root = copied._get_root_mesh()
    for each in (copied, root, *root._flatten_mapping.values()):
        each._pg_registry.clear()
    return copied


def start_gather(group: dist.ProcessGroup, full: Tensor, shard: Tensor) -> dist.Work:
    """Begin to all-gather `shard` into `full`; the public function takes as long again before it comes here."""
    return group._allgather_base(full, shard)


def start_all_to_all(
    group: dist.ProcessGroup, received: Tensor, sent: Tensor, receive: Sequence[int] = (), send: Sequence[int] = ()
) -> dist.Work:
    """Begin to send each rank its part of `sent`, all of one size or of those given; as fast as `start_gather`."""
    backend: Any = group._get_backend(sent.device)  # the stub of its class lacks the collectives
    return backend.alltoall_base(received, sent, list(receive), list(send))


_REDUCE_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def start_in_place(group: dist.ProcessGroup, full: Tensor, op: str) -> dist.Work:
    """Begin to reduce `full` in place; unlike the operator of that name, it says what to wait for."""
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[op]  # type: ignore[assignment]  # what its stub calls another class
    return group.allreduce([full], options)


def broadcast_from(rank: int) -> dist.BroadcastOptions:
    """The options of a broadcast from the group's rank `rank`."""
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def start_broadcasts(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], options: Sequence[dist.BroadcastOptions]
) -> list[dist.Work]:
    """Begin to overwrite each of `tensors` by a broadcast, half a microsecond faster than by the call of the group."""
    backend: Any = group._get_backend(tensors[0].device)
    return [backend.broadcast([tensor], each) for tensor, each in zip(tensors, options, strict=True)]


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of `group` alone: its keys are seen by no other group."""
    return _get_process_group_store(group)
