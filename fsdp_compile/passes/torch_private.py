"""Private compiler state that passes read. Checked on torch 2.11 and 2.13."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.aot_autograd import get_graph_being_compiled
from torch._guards import TracingContext
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group


def saved_for_backward(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a forward graph that only its backward reads; empty for every other graph."""
    context: Any = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or not _is_forward():
        return []
    outputs = graph.output_node().args[0]
    return [out for out in outputs[metadata.num_forward_returns :] if isinstance(out, fx.Node)]  # type: ignore[index,union-attr]  # fx


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str in 2.13


def start_all_gather(group: dist.ProcessGroup, full: Tensor, shard: Tensor) -> dist.Work:
    """Begin to all-gather `shard` into `full`; the public function spends as long again before it comes here."""
    return group._allgather_base(full, shard)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of `group` alone: its keys are seen by no other group."""
    return _get_process_group_store(group)


def _is_forward() -> bool:
    """Graph names read `model__<id>_<joint|forward|backward|inference>_<n>`."""
    return "_forward_" in get_graph_being_compiled()
