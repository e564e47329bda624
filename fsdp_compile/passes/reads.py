"""Which part of a buffer each of Inductor's operations reads: what is written there has to wait for it.

Checked on torch 2.11 and 2.13.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
from torch.utils._pytree import tree_leaves

Read = tuple[list[str], float, float]  # what the operation computes; first element that it reads, and after the last


def reads_of(name: str) -> list[Read]:
    """The operations that read the gathered buffer `name`, which nothing reads after the node that is being lowered."""
    from torch._inductor.virtualized import V

    _compute_now(name)
    return [
        ([output.get_name() for output in operation.get_outputs()], *part)
        for operation in _since_its_wait(name)
        if name in _names_read(operation)
        for part in _parts(operation, name)
    ]


def write_after(reads: list[Read], operation: str, name: str, offset: int, numel: int) -> None:
    """Let `operation`, which writes `numel` elements of the buffer `name` from `offset`, come after their `reads`."""
    from torch._inductor.virtualized import V

    V.graph.additional_star_deps[operation].add(name)  # which is filled by then
    for computed, first, end in reads:
        if first < offset + numel and offset < end:
            V.graph.additional_buffer_deps[operation].update(computed)


def hold_products(pieces: list[Any]) -> None:
    """Let library calls that write a piece run when all that they wait for has, before the call that comes next.

    Inductor's memory pass takes each piece for memory of its own and would put it off; what it reads lived as long.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    place = {operation.get_operation_name(): index for index, operation in enumerate(V.graph.operations)}
    writing = {piece.get_operation_name() for piece in pieces}
    calls = [op for op in V.graph.operations if isinstance(op, ir.ExternKernel) and op.get_operation_name() not in writing]
    for piece in pieces:
        if isinstance(piece, ir.ExternKernelOut):
            name = piece.get_operation_name()
            before = [V.graph.get_buffer(dep).get_operation_name() for dep in V.graph.additional_buffer_deps[name]]
            begin = max(place[each] for each in (name, *before))
            later = (op.get_operation_name() for op in calls if place[op.get_operation_name()] > begin)
            if (following := next(later, None)) is not None:
                V.graph.additional_buffer_deps[following].add(piece.get_name())


def _compute_now(name: str) -> None:
    """What is read later, and would only then be computed from the buffer, is computed while that has its contents."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for node, value in V.graph.env.items():
        if any(user not in V.graph.env for user in node.users):
            for box in tree_leaves(value):
                if isinstance(box, ir.TensorBox) and name in box.get_read_names():
                    box.realize()


def _since_its_wait(name: str) -> Iterator[Any]:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for operation in reversed(V.graph.operations):
        if isinstance(operation, ir._WaitKernel) and operation.inputs[0].get_name() == name:  # type: ignore[union-attr]  # one tensor
            return
        yield operation


def _names_read(operation: Any) -> Iterable[str]:
    from torch._inductor import ir

    if isinstance(operation, ir.ComputedBuffer):
        return operation.get_read_names()
    return [read.name for read in operation.get_read_writes().reads]  # a call's own names are what it computes


def _parts(operation: Any, name: str) -> Iterator[tuple[float, float]]:
    """From where to where an operation reads the buffer; everything, where that cannot be told."""
    from torch._inductor import ir

    if isinstance(operation, ir.ComputedBuffer):
        yield from (_of_loop(read) for read in operation.get_read_writes().reads if read.name == name)
        return
    views = [each for each in operation.inputs if isinstance(each, ir.IRNode) and each.get_name() == name]
    yield from (_of_view(view.get_layout()) for view in views)
    if not views:
        yield 0, float("inf")


def _of_loop(read: Any) -> tuple[float, float]:
    index = getattr(read, "index", None)  # of what is read as a whole there is none
    if index is None or not index.is_polynomial() or any(size.free_symbols for size in read.size):
        return 0, float("inf")
    ends = [index.subs(dict(zip(read.var_names, corner, strict=True))) for corner in ([0] * len(read.size), [size - 1 for size in read.size])]
    return (int(ends[0]), int(ends[1]) + 1) if all(end.is_Integer for end in ends) else (0, float("inf"))


def _of_view(layout: Any) -> tuple[float, float]:
    last = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    first, end = sympy.sympify(layout.offset), sympy.sympify(layout.offset + last + 1)
    return (int(first), int(end)) if first.is_Integer and end.is_Integer else (0, float("inf"))
