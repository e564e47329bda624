"""Private names of torch's compiler that the passes use. Checked on torch 2.11, 2.13 and 2.14.

docs/upgrading_torch.md says what to look for when torch moves.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from torch import SymInt, Tensor, fx
from torch._dynamo import reset as reset_dynamo
from torch._dynamo.exc import ShortenTraceback
from torch._functorch.aot_autograd import get_graph_being_compiled
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor import ir as _ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode, refresh_group_node_dependencies
from torch._inductor.virtualized import V as _V
from torch._ops import OpOverload
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "CustomGraphPass",
    "InductorError",
    "OpOverload",
    "OrderedSet",
    "ShortenTraceback",
    "fallback_handler",
    "inductor_config",
    "lowerings",
    "preserve_node_ordering",
    "register_lowering",
    "reset_dynamo",
    "select_decomp_table",
    "tree_leaves",
    "without_dispatch_modes",
]

ir: Any = _ir  # annotated differently in the two versions of torch
V: Any = _V
WaitKernel: Any = _ir._WaitKernel
CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)  # from torch 2.13 on


_OVERLAP = "aten_distributed_optimizations"
_OFF: dict[str, Any] = {
    "reorder_for_peak_memory": False,  # moves all-gathers to their waits, and reduces to the end
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,  # from torch 2.13 on, as are two below
    "_fuse_ddp_communication": False,
    "_collective.auto_select": False,  # all-reduces of another kind
    f"{_OVERLAP}.enable_overlap_scheduling": False,
    f"{_OVERLAP}.enable_low_contention_collectives": False,
    f"{_OVERLAP}.allow_comms_decompositions": False,
    f"{_OVERLAP}.enable_simple_overlap": False,  # from torch 2.14 on, where it is on
}


def switched_off() -> dict[str, Any]:
    """The settings of Inductor, where this torch has them, that would move, fuse or replace planned collectives.

    tests/unit/test_inductor_settings.py fails when torch adds one.
    """
    return {name: value for name, value in _OFF.items() if hasattr(inductor_config, name)}


def fake_store() -> Any:
    """Return a store for a process group of the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # only predictions need torch's test helpers

    return FakeStore()


def compile_by_inductor(gm: fx.GraphModule, inputs: list[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile `gm` by Inductor with `patches` of its configuration."""
    from torch._inductor.compile_fx import compile_fx  # slow to import, and plain torch.compile imports it itself

    return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[return-value]  # declared wider


def saved_for_backward(graph: fx.Graph) -> list[fx.Node]:
    """Return the outputs of a forward graph that only its backward reads; empty for any other graph."""
    context: Any = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or direction() != "forward":
        return []
    outputs = graph.output_node().args[0]
    return [out for out in outputs[metadata.num_forward_returns :] if isinstance(out, fx.Node)]  # type: ignore[index,union-attr]  # fx


def sort(graph: fx.Graph) -> None:
    """Sort nodes topologically: Inductor's patterns leave some out of order for a later pass to sort."""
    stable_topological_sort(graph)


def restore_dependencies(nodes: list[Any]) -> list[Any]:
    """Restore the dependencies of the scheduler's nodes, and sort them if any was missing."""
    changed = False
    for node in nodes:
        members = node.get_nodes()
        lost = [each for each in members if _restore(each)]
        if lost and len(members) > 1:
            refresh_group_node_dependencies(node)
        changed |= bool(lost)
    return V.graph.scheduler.topological_sort_schedule(nodes) if changed else nodes


def _restore(node: Any) -> bool:
    """Restore the dependencies of `node`; return whether any was missing."""
    name, reads = node.get_name(), node.read_writes
    strong = OrderedSet(StarDep(buffer) for buffer in V.graph.additional_star_deps.get(name, ()))
    if reads.with_read(strong).rename(node.mutation_renames).reads == reads.reads:
        return False
    weak = OrderedSet(WeakDep(buffer, name, is_fake=True) for buffer in V.graph.additional_buffer_deps.get(name, ()))
    node.set_read_writes(reads.with_read(strong | weak).rename(node.mutation_renames))
    return True


def join_sums(nodes: list[Any]) -> list[Any]:
    """Move each reduction of the CPU up behind the first loop after which it can run: loops in a row are one kernel.

    Only where results take at most half of what they are computed from: the sooner, the less memory is held.
    """
    runs: list[list[Any]] = []  # each a node, and the sums that follow it
    loops, made_by = list[int](), dict[str, int]()  # which runs begin with a loop; the run that makes a buffer
    for node in nodes:
        is_loop = isinstance(node, SchedulerNode | FusedSchedulerNode) and not node.is_template()
        at, is_loop = len(runs), is_loop and node.get_device().type == "cpu"
        if is_loop and 2 * node.get_write_buffer_sizes() <= node.get_read_buffer_sizes():
            reads = max((made_by.get(dep.name, 0) for dep in node.unmet_dependencies), default=0)
            first = bisect_left(loops, reads)
            at = loops[first] if first < len(loops) else at
        if at == len(runs):
            runs.append([])
            loops += [at] if is_loop else []
        runs[at].append(node)
        made_by.update(dict.fromkeys(node.get_buffer_names(), at))
    return list(chain.from_iterable(runs))


def direction() -> str:
    """Return the kind of graph being compiled: "joint", "forward", "backward" or "inference"."""
    name = get_graph_being_compiled()  # model__<id>_<joint|forward|backward|inference>_<n>
    return next((word for word in ("joint", "forward", "backward") if f"_{word}_" in name), "inference")


def graph_index() -> int:
    """Return AOTAutograd's index of the graph being compiled; forward and backward share it."""
    match = re.search(r"__(\d+)_", get_graph_being_compiled())
    return int(match[1]) if match else 0


def is_caller_owned(placeholder: fx.Node) -> bool:
    """Whether an input of the graph is also an input of the model; in backward AOTAutograd names others differently."""
    return direction() != "backward" or placeholder.name.startswith("primals_")


def is_tangent(node: fx.Node) -> bool:
    """Whether `node` is an input of a joint graph that holds the gradient of an output."""
    return node.op == "placeholder" and node.name.startswith("tangents_")  # as AOTAutograd names them


# --- symbolic sizes ---------------------------------------------------------------------------------------------------

_UNBOUNDED = 8192  # stands for a size that depends on data and has no bound, as it does in Inductor
_INDEX = 1 << 20  # torch bounds sizes that it knows nothing about by what its indices can hold: no bound at all


class SizeRange(NamedTuple):
    """What a symbolic size may be, and is at tracing time; `most` is None if nothing bounds it.

    `source` is the expression that has this size in the forward.
    """

    least: int
    hint: int
    most: int | None
    source: str = "decided by data"


def size_hint(size: Any) -> int:
    """Return the size at tracing time; for a size that depends on data, its upper bound."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.xreplace({symbol: size_range(symbol).hint for symbol in expression.free_symbols}))


def largest_size(size: Any) -> int:
    """Return the most that a size may be; for symbols that nothing bounds, what it is at most at tracing time."""
    if isinstance(size, int):
        return size
    known = {symbol: size_range(symbol) for symbol in size.node.expr.free_symbols}
    ranges = {symbol: ValueRanges(each.least, each.most or each.hint) for symbol, each in known.items()}
    try:
        most = bound_sympy(size.node.expr, ranges).upper
    except Exception:  # of anything that torch makes a size of, and cannot bound
        return size_hint(size)
    return int(most) if most.is_Integer else size_hint(size)


def symbols_of(graph: fx.Graph) -> dict[Any, SizeRange]:
    """The symbols in the sizes of the inputs of `graph`, in order."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    sizes = (n for value in values for n in (value.shape if isinstance(value, Tensor) else (value,)))
    known = (n.node.expr.free_symbols for n in sizes if isinstance(n, SymInt))
    symbols = dict.fromkeys(symbol for found in known for symbol in sorted(found, key=str))
    return {symbol: size_range(symbol) for symbol in symbols}


def size_range(symbol: Any) -> SizeRange:
    """Return what the symbol may be, by the guards of the graph that is compiled."""
    context: Any = TracingContext.get()
    shapes = context.fake_mode.shape_env
    least, most = shapes.var_to_range[symbol].lower, shapes.var_to_range[symbol].upper
    if (hint := shapes.backed_var_to_val.get(symbol)) is None:  # it depends on data
        most = int(most) if most < 2**31 else _UNBOUNDED
        return SizeRange(int(least), most, most)
    source = re.sub(r"L\['(\w+)'\]", r"\1", shapes.var_to_sources[symbol][0].name)
    return SizeRange(int(least), int(hint), int(most) if most <= _INDEX else None, source)
