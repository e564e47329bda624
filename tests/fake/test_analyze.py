"""What the planner reads from a graph, counted by hand."""

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, STARTS, WAIT
from fsdp_compile.passes.graph.analyze import analyze
from fsdp_compile.passes.graph.nodes import Tag, set_tag
from fsdp_compile.passes.graph.work import Costs, size_of
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload


def _step(shard_a: Tensor, shard_b: Tensor, x: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """Unit a is divided by a maximum before its gather; b is gathered and reduced in two stages, and returned."""
    a = WAIT(ALL_GATHER(shard_a / WAIT(ALL_REDUCE(shard_a.amax().view(1), "max", "0")), 4, "0")).view(8, 8)
    b = WAIT(ALL_GATHER(WAIT(ALL_GATHER(shard_b, 2, "0")), 2, "0")).view(8, 8)
    hidden = ((x + 1) @ a).relu()
    out, grad_a = hidden @ b, x.t() @ (tangents @ b.t())
    grad_b = hidden.t() @ tangents
    reduced_a = WAIT(REDUCE_SCATTER(grad_a.view(64) * 0.5, "sum", 4, "0")) * 0.5
    reduced_b = WAIT(REDUCE_SCATTER(WAIT(REDUCE_SCATTER(grad_b.view(64), "sum", 2, "0")), "sum", 2, "0"))
    return out, b, reduced_a, reduced_b


MAXIMUM = [Tag("maximum", -1, "", None)]
GATHERS = [Tag("gather", 0, "a", None, wire="bf16"), Tag("gather", 1, "b", False), Tag("gather", 1, "b", False)]
REDUCES = [Tag("reduce", 0, "a", None), Tag("reduce", 1, "b", False), Tag("reduce", 1, "b", False)]
# Name, seconds, bytes, units that are read, units whose gradients are written.
TASKS = [
    ("add", 1.0, 512), ("mm", 1.0, 640, (0,)), ("relu", 1.0, 640), ("mm_1", 1.0, 640, (1,)), ("t", 1.0, 640),
    ("mm_2", 1.0, 768, (1,)), ("mm_3", 1.0, 832, (1,), (0,)),  # b is read to the end: it is returned
    ("t_2", 1.0, 704, (1,)), ("mm_4", 1.0, 960, (1,)), ("view_4", 1.0, 1024, (1,), (1,)),
]  # fmt: skip
UNITS = (
    UnitCost("a", 4 + 0.5 + 256, 64.0, gathered=64 + 256 + 128, packed=256, keep_unsharded=None, module="a"),
    UnitCost("b", 128 + 256.0, 128.0, 128 + 256, 256, replicate=64.0, keep_unsharded=True, module="b"),
)


def test_what_the_planner_reads() -> None:
    """Tasks and units, with a second for each node and each byte that a collective fills, and half of one a launch."""
    graph = make_fx(_step)(*(torch.empty(*size, device="meta") for size in ((16,), (16,), (4, 8), (4, 8)))).graph
    starts = [node for node in graph.nodes if node.target in STARTS]
    for node, tag in zip([*starts[0].users, *starts], MAXIMUM + MAXIMUM + GATHERS + REDUCES, strict=True):
        set_tag(node, tag)
    scales = [starts[4].args[0], *next(iter(starts[4].users)).users]  # before and behind the reduce of a
    for kind, node in zip(("scale", "scale", "pack"), [*scales, scales[0].args[0]], strict=True):
        set_tag(node, Tag(kind, 0, "a", None))
    info = analyze(graph, Costs(lambda node: 1.0, lambda start: float(size_of(start)), 0.5), joint=True)
    assert info.workload == Workload(tuple(Task(*each) for each in TASKS), 5, UNITS, 0.5, can_coalesce=False)
    a, b = info.gathers["a"], info.gathers["b"]
    assert [node.name for node in info.prologue] == ["amax", "view", "all_reduce", "wait_tensor"]
    assert a.first == [] and [node.name for node in a.start] == ["div", "all_gather_into_tensor"]
    assert (b.first, b.start) == (starts[2:3], [*starts[2].users, starts[3]])
    assert [node.name for node in b.readers] == ["mm_1", "mm_2", "output"]
    a, b = info.reduces["a"], info.reduces["b"]
    assert [node.name for node in a.gradients] == ["mm_3"] and a.start == [scales[0].args[0], scales[0], starts[4]]
    assert (a.wait, a.result, a.end) == ([*starts[4].users, scales[1]], scales[1], [])
    assert (b.wait, b.end, [b.result], info.tail) == ([*starts[5].users, starts[6]], [*starts[6].users], b.end, [])
    assert analyze(fx.Graph()).workload == Workload((), 0, ())
