"""What a graph writes to parameters while it also gathers them, noticed where Dynamo traces it.

    a write to a shard, then its gather      would gather the old values
    a gather, then a write to the shard      backward would gather the new values
    a write to what was gathered             would be lost

The first two break the graph: then the first is right, and for the second autograd raises. The third has Dynamo trace
again and break the graph at that unit, whose forward then runs eagerly: what it changes is kept or refused as it is
without compiling. With `fullgraph=True` Dynamo raises with the reason that is given here.

But where the graph gathered because code outside of the unit's forward reads a parameter, Dynamo traces again, and
breaks the graph at the read, so that the code has the parameter itself. So it does if a break follows while what was
read is in use: code behind it might write.
"""

# Note [Parameters that change inside a graph]
# A graph has a flat shard and the sharded tensors that lie in it as inputs of their own, and neither Dynamo nor
# AOTAutograd knows that they share memory. Dynamo runs each node on fake tensors as it is recorded, and the fakes of
# tensors that share memory share a storage: it remembers here what was done. Considered and not done: the parameters as
# further inputs of `unshard`, which costs a guard for each of them at every call; and a check of the whole graph, for
# which only our own backend has a place.

import operator
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import (
    FakeTensor,
    break_graph,
    call_with_graph,
    graph_so_far,
    plain_within,
    reading_place,
    set_inductor,
    skip_frame,
    tensor_assigned_at_break,
    trace_again,
    traced_code_changes,
    traced_variable,
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


def note_gathered(shard: Tensor, holds_plain: bool) -> None:
    """The graph gathers `shard`, a fake. NotImplementedError if it has changed or replaced a part of it before.
    `holds_plain`: whether its parameters are plain tensors, of which nothing is noted when they are written.
    """
    storage = _attributes_of_storage(shard)
    arguments = [argument for node in graph_so_far() for argument in _written_arguments(node)] if holds_plain else []
    is_written = any(_storage(each) == _storage(shard) for each in _fakes(arguments))
    if storage.get(_WRITTEN) or is_written or traced_code_changes("_parameters"):
        raise NotImplementedError(
            "a sharded parameter changes in a graph that gathers it afterwards, which would give the old values; call "
            "torch._dynamo.graph_break() in between, or change it outside of what is compiled"
        )
    storage[_GATHERED] = torch.is_grad_enabled()


# The instructions, by their code, at which parameters are read eagerly. Dynamo's caches are by code too.
_READ_EAGERLY: weakref.WeakKeyDictionary[CodeType, set[int]] = weakref.WeakKeyDictionary()
_READ_AT = "fsdp_read_at"  # in a node's meta: the place in code that reads the parameters of this unshard
_FLAT = "fsdp_flat"  # in a node's meta: the unit and the flat parameter that this unshard gives


def check_read(tracing: Any) -> None:
    """Code outside of its unit's forward reads a parameter: have it read eagerly where a graph cannot.
    Dynamo calls this before the graph gathers the unit, and `note_read` behind it.
    """
    place = reading_place(tracing)
    if place is None:
        skip_frame("a sharded parameter is read by code that is not traced")
    code, instruction = place
    if instruction in _READ_EAGERLY.get(code, ()):
        break_graph(
            "a sharded parameter is read outside of its unit's forward, and then changed or used behind a graph break; "
            "change it under torch.no_grad(), or outside of what is compiled"
        )


def note_read(tracing: Any) -> None:
    """Note what the graph has gathered for that: the flat parameters of the local variable `unit`."""
    for node in _unshard_nodes(graph_so_far())[-len(traced_variable(tracing, "unit").value.flats) :]:
        node.meta[_READ_AT] = reading_place(tracing)


def _attributes_of_storage(fake: Tensor) -> dict[str, bool]:
    return vars(fake.untyped_storage())


def check_finished_graph(tracing: Any) -> None:
    """Have Dynamo call `_check_gathered` with the graph that it traces now, and then set Inductor for it. It has just
    gathered the local variable `self`, a unit; break the graph if that one's forward writes to its parameters.
    """
    unit = traced_variable(tracing, "self").value
    if unit.written is not None:
        break_graph(
            f"forward changes parameter {unit.written} of its own unit, so it runs eagerly; leave out fullgraph=True, "
            f"change the parameter outside of forward, use a buffer instead, or name it in ignored_params"
        )
    for node, flat in zip(_unshard_nodes(graph_so_far())[-len(unit.flats) :], unit.flats, strict=True):
        node.meta[_FLAT] = unit, flat
    call_with_graph(_check_gathered)
    call_with_graph(set_inductor)


def _check_gathered(graph: torch.fx.GraphModule) -> None:
    """Where a graph of Dynamo writes to unsharded parameters, or such that were read leave it for eager code: have them
    read eagerly, or the unit's forward run so.
    """
    nodes = [node for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
    assigned = tensor_assigned_at_break()
    changed = [assigned, *_fakes([_written_arguments(node) for node in nodes])]  # which say where, before others
    changed += [each for node in nodes for each in _fakes(node.meta.get("example_value")) if each._version]
    written: dict[int, int] = {}  # by storage, where in it
    for each in _fakes(changed):
        written.setdefault(_storage(each), int(plain_within(each).storage_offset()))
    leaving = set(map(_storage, _fakes(graph.graph.output_node().all_input_nodes)))
    again = False
    for node in _unshard_nodes(nodes):
        storage, gathered = _storage(node.meta["example_value"]), node.meta.pop(_FLAT, None)  # the graph outlives units
        if _READ_AT in node.meta and (storage in written or storage in leaving):
            code, instruction = node.meta[_READ_AT]
            _READ_EAGERLY.setdefault(code, set()).add(instruction)
            again = True
        elif gathered is not None and storage in written:
            unit, flat = gathered
            index = bisect_right(flat.layout.offsets, written[storage]) - 1
            unit.written, again = flat.names[index], True
    if again:
        trace_again("a sharded parameter is changed, or was read and leaves the graph")


def _unshard_nodes(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    return [node for node in nodes if node.target is torch.ops.fsdp_flat.unshard.default]


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
    """What a node writes to, by its name, except `and_` and `or_` of Python. Functions of lists count no versions."""
    target = getattr(node.target, "overloadpacket", node.target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_of_python = getattr(target, "__module__", None) == operator.add.__module__
    in_place = target in _IN_PLACE if is_of_python else name.endswith("_") and not name.endswith("__")
    return [*node.args[: 1 if in_place else 0], *([node.kwargs["out"]] if "out" in node.kwargs else [])]
