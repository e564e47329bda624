"""Writing gradients where parameters were: after all that still reads that part of the gathered buffer.

Inductor knows what reads and writes a buffer, not which part of it. Here it is told operation by operation, while the
pack is lowered: all operations that read parameters of the unit are known then. Checked on torch 2.11 and 2.13.
"""

from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import sympy
from torch.utils._pytree import tree_leaves

_ALL = (0, float("inf"))


class Write(NamedTuple):
    """What is to be written into the buffer: Inductor's value, its first element's place, how many elements."""

    value: Any
    offset: int
    numel: int


class Read(NamedTuple):
    """A read of the buffer: the names of what the operation computes; the first element read, and after the last."""

    computed: list[str]
    first: float
    end: float


def reads_before(name: str, writes: list[Write]) -> list[Read] | None:
    """What reads the gathered buffer `name`, of which nothing is read after the node that is being lowered.

    Returns:
        None if `writes` cannot be written there: one is computed from its own place, or two from each other's.
    """
    _compute_now(name)
    for write in writes:
        write.value.realize()
    if any(write.value.get_name() == name for write in writes):  # a view of a parameter, as it is
        return None
    reads = [
        Read([output.get_name() for output in operation.get_outputs()], *part)
        for operation in _since_its_wait(name)
        if name in _names_read(operation)
        for part in _parts(operation, name)
    ]
    order: dict[str, set[str]] = {}
    for number, write in enumerate(writes):  # one value may be the gradient of several parameters
        order.setdefault(_computed_by(write, number), set()).update(_met(reads, write.offset, write.numel))
    try:
        TopologicalSorter(order).prepare()
    except CycleError:
        return None
    return reads


def write_after(reads: list[Read], operation: str, name: str, offset: int, numel: int) -> None:
    """Let `operation`, which writes `numel` elements of the buffer `name` from `offset`, come after their `reads`."""
    from torch._inductor.virtualized import V

    V.graph.additional_star_deps[operation].add(name)  # which is filled by then
    V.graph.additional_buffer_deps[operation].update(_met(reads, offset, numel))


def hold_products(name: str, pieces: list[Any]) -> None:
    """Let library calls that write a piece of the buffer `name` run before the call that follows on what they wait for.

    Inductor's memory pass takes each piece for memory of its own and would put it off; what it reads lived as long.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    operations = [operation.get_operation_name() for operation in reversed(_since_its_wait(name))]
    place = {operation: index for index, operation in enumerate(operations)}
    writing = {piece.get_operation_name() for piece in pieces}
    calls = [
        each for each in operations if isinstance(V.graph.name_to_op[each], ir.ExternKernel) and each not in writing
    ]
    for piece in (each for each in pieces if isinstance(each, ir.ExternKernelOut)):
        own = piece.get_operation_name()
        needed = [V.graph.get_buffer(read).get_operation_name() for read in V.graph.additional_buffer_deps[own]]
        begin = max(place.get(each, 0) for each in (own, *needed))
        following = next((call for call in calls if place[call] > begin), None)
        if following is not None:
            V.graph.additional_buffer_deps[following].add(piece.get_name())


def overwritten(into: Any) -> Any:
    """An operation that says: the buffer `into` has other contents from here on. Its inputs are what wrote them."""
    from torch._inductor import ir

    return _overwritten_kernel()(into.get_name(), layout=ir.NoneLayout(device=into.get_device()))


@cache
def _overwritten_kernel() -> Any:
    from torch._inductor import ir

    class Overwritten(ir.NopKernel):
        def __init__(self, target: str, layout: Any) -> None:
            super().__init__(name=None, layout=layout, inputs=[])
            self.target = target

        def get_mutation_names(self):  # type: ignore[no-untyped-def]  # Inductor IR
            return [self.target]

        def should_allocate(self) -> bool:
            return False

    return Overwritten


# --- who reads --------------------------------------------------------------------------------------------------------


def _compute_now(name: str) -> None:
    """What is read later, and would only then be computed from the buffer, is computed while that has its contents."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for node, value in V.graph.env.items():
        if any(user not in V.graph.env for user in node.users):
            for box in tree_leaves(value):
                if isinstance(box, ir.TensorBox) and name in box.get_read_names():
                    box.realize()


def _since_its_wait(name: str) -> list[Any]:
    """The operations after the wait for the gather, the last one first."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    found: list[Any] = []
    for operation in reversed(V.graph.operations):
        if isinstance(operation, ir._WaitKernel) and operation.input_name(0) == name:
            break
        found.append(operation)
    return found


def _names_read(operation: Any) -> Iterable[str]:
    from torch._inductor import ir

    if isinstance(operation, ir.ComputedBuffer):
        return operation.get_read_names()
    return [read.name for read in operation.get_read_writes().reads]  # a call's own names are what it computes


def _met(reads: Iterable[Read], offset: int, numel: int) -> list[str]:
    """What is computed from any of `numel` elements from `offset` on."""
    return [name for read in reads if read.first < offset + numel and offset < read.end for name in read.computed]


def _computed_by(write: Write, number: int) -> str:
    """The buffer that a value is computed into; a view will be copied into a buffer of its own."""
    from torch._inductor import ir

    return write.value.get_name() if isinstance(write.value.data, ir.StorageBox) else f"copy {number}"


def _parts(operation: Any, name: str) -> list[tuple[float, float]]:
    """From where to where an operation reads the buffer; everything, where that cannot be told."""
    from torch._inductor import ir

    if isinstance(operation, ir.ComputedBuffer):
        return [_of_loop(read) for read in operation.get_read_writes().reads if read.name == name]
    views = [each for each in operation.inputs if isinstance(each, ir.IRNode) and each.get_name() == name]
    return [_of_view(view.get_layout()) for view in views] or [_ALL]


def _of_loop(read: Any) -> tuple[float, float]:
    index = getattr(read, "index", None)  # of what is read as a whole there is none
    if index is None or any(size.free_symbols for size in read.size):
        return _ALL
    steps = [index.diff(variable) for variable in read.var_names]
    first = last = index.subs(dict.fromkeys(read.var_names, 0))
    if not all(each.is_Integer for each in (first, *steps)):
        return _ALL
    for step, size in zip(steps, read.size, strict=True):
        first, last = first + min(step * (size - 1), 0), last + max(step * (size - 1), 0)
    return int(first), int(last) + 1


def _of_view(layout: Any) -> tuple[float, float]:
    last = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    first, end = sympy.sympify(layout.offset), sympy.sympify(layout.offset + last + 1)
    return (int(first), int(end)) if first.is_Integer and end.is_Integer else _ALL
