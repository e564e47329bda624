"""Gradients in the place of their parameters: pack them into the buffer that the unit was gathered into."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple

from torch import fx

from fsdp_compile.comm.collectives import ALL_GATHER, WAIT
from fsdp_compile.core.layout import FlatParamLayout, LayoutSegment
from fsdp_compile.core.ops import PACK_GRADS
from fsdp_compile.passes._torch import V, WaitKernel, bounds, ir, tree_leaves
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.analyze import gradients_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad.in_place_grads import (
    Contents,
    contents_of,
    pack_into_new_buffer,
    register_pack,
    write_slice,
)

_EVERYTHING = (0, inf)

# Note [Gradients take the place of their parameters]
# A packed buffer is laid out like the gathered one, and a parameter is read for the last time about when its gradient
# is computed. So a gradient may be written where its parameter was, and the reduce-scatter sends the memory that the
# all-gather filled: the backward of a unit needs one buffer instead of two.
#
#     wait gather  ->  grad_x = grad_y @ W  ->  slice of W = grad_y.T @ x  ->  reduce-scatter     one buffer throughout
#
# The pass `reuse_gathered` decides this on the FX graph and names the gathered buffer in the pack's last argument. It
# also moves a few nodes, so that each gradient comes after the readers of the buffer. Which reader touches which slice
# is known only when the pack is lowered. The lowering orders each write after the reads of its slice, or packs into a
# new buffer after all, if one loop both reads a parameter and computes the gradient that would replace it.


def reuse_gathered(context: GraphContext) -> None:
    """Pack gradients into the unit's gathered buffer (Note [Gradients take the place of their parameters])."""
    graph = context.graph
    waits = {nodes.tag_of(gather).unit: next(iter(gather.users)) for gather in nodes.tagged(graph, "gather")}
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        wait = waits.get(nodes.tag_of(pack).unit)
        if wait is not None and _may_reuse(pack, wait) and _in_time(pack, wait):
            _put_in_order(pack, wait)
            pack.args = (*pack.args, wait)


def _may_reuse(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether the buffers are alike, and nothing else reads the gradients or outlives the buffer."""
    packed, gathered = pack.meta["val"], wait.meta["val"]
    alike = all(getattr(packed, each) == getattr(gathered, each) for each in ("dtype", "shape", "device"))
    if not alike or not _has_zero_padding(wait):
        return False
    only_packed = all(len(grad.users) == 1 for grad in gradients_of(pack))
    only_sent = all((tag := nodes.get_tag(user)) is not None and tag.kind == "reduce" for user in pack.users)
    return only_packed and only_sent and all(reader.op != "output" for reader in nodes.readers(wait)[1])


def _has_zero_padding(wait: fx.Node) -> bool:
    """Whether shards were gathered as they are, or cast. A local program such as `1 + w` fills padding."""
    source = nodes.source_of(wait, lambda node: node.target in (WAIT, ALL_GATHER) or nodes.is_view_or_cast(node))
    return source.op == "placeholder"


def _in_time(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether gradients are computed while the parameters are alive, the last of them about when those go.

    Later gradients are better packed into a buffer of their own, which is allocated then. A matrix product before the
    first reader stays there, for the gather to hide behind, and no reduce waits for readers beyond another product.
    """
    gradients, reading = gradients_of(pack), nodes.readers(wait)[1]
    if not reading or min(gradients) > max(reading):
        return False
    early = any(nodes.is_product(grad) and grad < min(reading) for grad in gradients)
    node, last = max(gradients), max(reading)
    while not early and node < last:  # what lies between them
        node = node.next
        early = node is not last and nodes.is_product(node)
    return not early


def _put_in_order(pack: fx.Node, wait: fx.Node) -> None:
    """Move every gradient behind the first reader of the parameters, and the last gradient behind the last reader."""
    reading, gradients = nodes.readers(wait)[1], gradients_of(pack)
    first, last, gradient = min(reading), max(reading), max(gradients)
    end = max(gradient, last)
    loops = [node for node in reading if nodes.is_pointwise(node)]  # their kernels read the parameters

    def is_joined(node: fx.Node) -> bool:  # not beyond: the gradient of a residual is added up through all blocks
        return node <= end and (nodes.is_pointwise(node) or nodes.is_view(node))

    joined = [nodes.derived(node, is_joined) for node in loops]
    following = _next_pointwise(sorted(node for node in set(loops).union(*joined) if node <= end), end)
    for early in [grad for grad in gradients if grad < first]:
        first.append(early)
    if gradient < last:
        last.append(gradient)
    for node in following:
        if gradient not in node.all_input_nodes:
            gradient.prepend(node)


def _next_pointwise(before: list[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Find pointwise nodes beyond `end` that read `before`, directly or through views, and need nothing later.

    Mostly a sum with the residual's gradient. If it came later, the last result of `before` would take a trip through
    memory.
    """
    following: list[fx.Node] = []
    for node in before:
        for user in sorted(each for each in node.users if each > end):
            views = []
            while nodes.is_view(user) and len(user.users) == 1:
                views.append(user)
                user = next(iter(user.users))
            ready = all(each <= end or each in views for each in user.all_input_nodes)
            if nodes.is_pointwise(user) and ready and user not in following:
                following += [*views, user]
    return following


# --- lowering ---------------------------------------------------------------------------------------------------------

# If a pack lies in its unit's gathered buffer, each write comes after all that reads its slice. Inductor knows which
# operations read a buffer, not which slice of it, so dependencies are added operation by operation while the pack is
# lowered, when all operations that read parameters of the unit are known.


def lower_pack_grads(grads: list[Any], layout: str, into: Any = None) -> Any:
    """In place of the lowering in in_place_grads.py, which knows of no gathered buffer."""
    parsed = FlatParamLayout.parse(layout)
    contents = contents_of(grads, parsed)
    reads = None if into is None else _reads_before(into.get_name(), contents)
    return pack_into_new_buffer(parsed.numel, contents) if reads is None else _overwrite_gathered(into, contents, reads)


def _overwrite_gathered(into: Any, contents: Contents, reads: "list[Read]") -> Any:
    """Write into the gathered buffer, each slice after its `reads`. Padding stays zero there."""
    contents = [(segment, grad) for segment, grad in contents if segment.parameter is not None]
    written = [write_slice(grad, segment, into.data) for segment, grad in contents]
    for buffer, (segment, _) in zip(written, contents, strict=True):
        operation = buffer.get_operation_name()
        V.graph.additional_star_deps[operation].add(into.get_name())  # the gather has filled it by then
        V.graph.additional_buffer_deps[operation].update(_reads_of(reads, segment))
    _hold_products(into.get_name(), written)
    overwritten = _Overwritten(into.get_name(), ir.NoneLayout(device=into.get_device()))
    return register_pack(overwritten, written, into.data)


class _Overwritten(ir.NopKernel):
    """Marks the buffer `target` as mutated by the inputs of this operation."""

    def __init__(self, target: str, layout: Any) -> None:
        super().__init__(name=None, layout=layout, inputs=[])
        self.target = target

    def get_mutation_names(self) -> list[str]:
        return [self.target]

    def should_allocate(self) -> bool:
        return False


# --- who reads the gathered buffer ------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A read of the buffer: what the operation computes, by name, and the range of elements that it reads."""

    computed: list[str]
    first: float
    end: float


def _reads_before(name: str, contents: Contents) -> list[Read] | None:
    """Find the reads of the gathered buffer `name`; none comes after the node that is being lowered.

    None if gradients cannot be written there: one is computed from its own slice, or two from each other's.
    """
    for node, value in V.graph.env.items():  # what would be computed only when it is read: the buffer is intact now
        if any(user not in V.graph.env for user in node.users):
            for box in tree_leaves(value):
                if isinstance(box, ir.TensorBox) and name in box.get_read_names():
                    box.realize()
    writes = [(segment, grad) for segment, grad in contents if grad is not None]
    for _, grad in writes:
        grad.realize()
    if any(grad.get_name() == name for _, grad in writes):  # a view of a parameter, as it is
        return None
    reads = [
        Read([output.get_name() for output in operation.get_outputs()], *elements)
        for operation in _operations_after_wait(name)
        for elements in _elements_read(operation, name)
    ]
    depends_on: dict[str, set[str]] = {}
    for index, (segment, grad) in enumerate(writes):  # one value may be the gradient of several parameters
        in_place = isinstance(grad.data, ir.StorageBox)  # a view will be copied into a buffer of its own
        depends_on.setdefault(grad.get_name() if in_place else f"copy {index}", set()).update(_reads_of(reads, segment))
    try:
        TopologicalSorter(depends_on).prepare()
    except CycleError:
        return None
    return reads


def _reads_of(reads: Iterable[Read], segment: LayoutSegment) -> list[str]:
    """Names of the buffers computed from any element of `segment`."""
    end = segment.offset + segment.numel
    return [name for read in reads if read.first < end and segment.offset < read.end for name in read.computed]


def _operations_after_wait(name: str) -> list[Any]:
    backwards = reversed(V.graph.operations)
    after = takewhile(lambda each: not isinstance(each, WaitKernel) or each.input_name(0) != name, backwards)
    return list(after)[::-1]


def _elements_read(operation: Any, name: str) -> list[tuple[float, float]]:
    """Return the ranges of the buffer's elements that an operation reads; everything if they are unknown."""
    if isinstance(operation, ir.ComputedBuffer):
        if name not in operation.get_read_names():
            return []
        return [_range_of_loop(read) for read in operation.get_read_writes().reads if read.name == name]
    if all(read.name != name for read in operation.get_read_writes().reads):
        return []  # a call's own names are what it computes
    ranges: list[tuple[float, float]] = []
    for view in operation.inputs:
        if isinstance(view, ir.IRNode) and view.get_name() == name:
            layout = view.get_layout()
            last = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
            ranges.append((bounds(layout.offset, {})[0], bounds(layout.offset + last, {})[1] + 1))
    return ranges or [_EVERYTHING]


def _range_of_loop(read: Any) -> tuple[float, float]:
    index = getattr(read, "index", None)  # a dependency on the whole buffer has none
    if index is None:
        return _EVERYTHING
    loops = {variable: (0, bounds(size - 1, {})[1]) for variable, size in zip(read.var_names, read.size, strict=True)}
    first, last = bounds(index, loops)
    return first, last + 1


def _hold_products(name: str, written: list[Any]) -> None:
    """Make products that write into the buffer `name` run before the library call that follows their inputs.

    Inductor's memory pass takes each slice for a new allocation and would postpone the product and keep its inputs.
    """
    operations = [operation.get_operation_name() for operation in _operations_after_wait(name)]
    position = {operation: index for index, operation in enumerate(operations)}
    writing = {buffer.get_operation_name() for buffer in written}
    library = [each for each in operations if isinstance(V.graph.name_to_op[each], ir.ExternKernel)]
    for product in (each for each in written if isinstance(each, ir.ExternKernelOut)):
        own = product.get_operation_name()
        needed = [V.graph.get_buffer(read).get_operation_name() for read in V.graph.additional_buffer_deps[own]]
        begin = max(position.get(each, 0) for each in (own, *needed))
        following = next((call for call in library if call not in writing and position[call] > begin), None)
        if following is not None:
            V.graph.additional_buffer_deps[following].add(product.get_name())
