"""What a graph writes to parameters while it also gathers them, noticed where Dynamo traces it.

    a write to a shard, then its gather      would gather the old values
    a gather, then a write to the shard      backward would gather the new values
    a write to what was gathered             would be lost

The first two break the graph: then the first is right, and for the second autograd raises. With `fullgraph=True` Dynamo
raises with the reason that is given here. For the third an error is raised, as the eager runtime does.
"""

# Note [Parameters that change inside a graph]
# A graph has a flat shard and the sharded tensors that lie in it as inputs of their own, and neither Dynamo nor
# AOTAutograd knows that they share memory. Dynamo runs each node on fake tensors as it is recorded, and the fakes of
# tensors that share memory share a storage: it remembers here what was done. Considered and not done: the parameters as
# further inputs of `unshard`, which costs a guard for each of them at every call; and a check of the whole graph, for
# which only our own backend has a place.

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import (
    FakeTensor,
    call_with_graph,
    plain_within,
    set_inductor,
    tensor_assigned_at_break,
    traced_code_changes,
)

_GATHERED, _WRITTEN = "_fsdp_gathered", "_fsdp_written"  # attributes of fake storages


def note_written(written: Sequence[Tensor]) -> None:
    """The graph writes to `written`, fakes of parts of shards.

    Raises:
        NotImplementedError: it has gathered one of these shards for a forward whose backward may gather it again.
    """
    for storage in map(_attributes_of_storage, written):
        if storage.get(_GATHERED):
            raise NotImplementedError(
                "a sharded parameter changes between the forward and the backward of its unit; change it after backward"
            )
        storage[_WRITTEN] = True


def note_gathered(shard: Tensor) -> None:
    """The graph gathers `shard`, a fake. NotImplementedError if it has changed or replaced a part of it before."""
    storage = _attributes_of_storage(shard)
    if storage.get(_WRITTEN) or traced_code_changes("_parameters"):
        raise NotImplementedError(
            "a sharded parameter changes in a graph that gathers it afterwards, which would give the old values; call "
            "torch._dynamo.graph_break() in between, or change it outside of what is compiled"
        )
    storage[_GATHERED] = torch.is_grad_enabled()


def _attributes_of_storage(fake: Tensor) -> dict[str, bool]:
    return vars(fake.untyped_storage())


def check_finished_graph(_tracing: Any) -> None:
    """Have Dynamo call `_refuse_lost_writes` with the graph that it traces now, and then set Inductor for it."""
    call_with_graph(_refuse_lost_writes)
    call_with_graph(set_inductor)


_LOST = (
    "compiled code changes a sharded parameter in a copy that was gathered, where the change would be lost; change it "
    "under torch.no_grad() and outside of its module's forward, or use a buffer"
)


def _refuse_lost_writes(graph: torch.fx.GraphModule) -> None:
    """Raise RuntimeError if a graph of Dynamo writes to unsharded parameters."""
    nodes = list(graph.graph.nodes)
    unshard = torch.ops.fsdp_flat.unshard.default
    gathered = {_storage(node.meta["example_value"]) for node in nodes if node.target is unshard}
    assigned = tensor_assigned_at_break()
    if assigned is not None and _storage(assigned) in gathered:
        raise RuntimeError(f"an assignment to an attribute: {_LOST}")
    for node in nodes:
        written = [each for each in _fakes(node.meta.get("example_value")) if each._version]
        written += [each for argument in _written_arguments(node) for each in _fakes(argument)]
        if any(_storage(each) in gathered for each in written):
            raise RuntimeError(f"{node.name}: {_LOST}")


def _storage(fake: Tensor) -> int:
    return plain_within(fake).untyped_storage()._cdata


def _fakes(value: Any) -> Iterator[Tensor]:
    """The plain tensors in an example value, or in an argument of a node."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("example_value")
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _fakes(each)
    elif isinstance(value, FakeTensor):
        yield value


_IN_PLACE = {operator.setitem}
_IN_PLACE |= {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_IN_PLACE |= {getattr(operator, f"i{name}") for name in ("and", "or", "xor", "lshift", "rshift", "matmul")}


def _written_arguments(node: torch.fx.Node) -> Sequence[Any]:
    """What a node of Dynamo's graph writes to, as its name says: functions of lists count no versions."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return [*node.args[: 1 if in_place else 0], *([node.kwargs["out"]] if "out" in node.kwargs else [])]
