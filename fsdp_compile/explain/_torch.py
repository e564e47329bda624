"""Private names of torch that predictions use. Checked on torch 2.11, 2.13 and 2.14.

What to look for when torch moves:

aot_function               calls `partition_fn(joint, inputs, num_fwd_outputs=...)`, then each compiler with a graph
default_partition          forward saves what eager autograd would
min_cut_rematerialization_partition
                           as Inductor partitions; obeys `recompute` and `ac_graph_id` in nodes' metadata
select_decomp_table        the decompositions that Inductor uses
pytree                     trees of arguments and of what modules return
_World                     all process groups; `_world`, an extension point of torch, are those that count
_unregister_process_group  takes a name away from those that functional collectives find
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fsdp_compile.passes._torch import fake_store

__all__ = ["Graphs", "fake_ranks", "fake_tensors", "is_fake", "partitioned", "pytree"]


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group of so many ranks that need not exist; those that there are come back with the end."""
    kept, tables = c10d._world, ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
    none: dict[str, Any] = {name: {} for name in tables}
    # Names are counted, and no two groups of a process may have the same.
    c10d._world = type("NoGroups", (c10d._World,), {**none, "group_count": kept.group_count + 10**6})()
    try:
        c10d.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
        yield
    finally:
        for name in c10d._world.pg_names.values():
            c10d._unregister_process_group(name)
        c10d._world = kept


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors that are made meanwhile get no memory."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


@dataclass
class Graphs:
    """Forward and backward of a function after the partitioner.

    Attributes:
        forward: its outputs are those of the function, `returned` of them, and then what it saves.
        backward: its inputs are what was saved, and gradients of outputs.
        returned: how many outputs of forward are not saved for backward alone.
    """

    forward: fx.Graph = field(default_factory=fx.Graph)
    backward: fx.Graph = field(default_factory=fx.Graph)
    returned: int = 0


def partitioned(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    compiled: bool,
    tag: Callable[[fx.Graph], None] | None = None,
) -> Graphs:
    """Trace `function` and its backward, on tensors without memory.

    Args:
        function: of `arguments`; returns tensors, all of which get gradients.
        arguments: trees of tensors.
        compiled: whether operators are decomposed and saved tensors chosen as by Inductor, or as by eager autograd.
        tag: puts policies of checkpointing onto nodes of the joint graph.
    """
    graphs = Graphs()

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        graphs.returned = num_fwd_outputs
        if tag is not None:
            tag(joint.graph)
        cut = min_cut_rematerialization_partition if compiled or tag is not None else default_partition
        return cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(name: str, gm: fx.GraphModule, example_inputs: Any) -> Any:
        gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))  # random operators too
        setattr(graphs, name, gm.graph)
        return make_boxed_func(gm.forward)

    table = dict(select_decomp_table()) if compiled else {}
    compilers = partial(keep, "forward"), partial(keep, "backward")
    traced = aot_function(function, *compilers, partition_fn=partition, decompositions=table)
    outputs = [each for each in traced(*arguments) if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return graphs
