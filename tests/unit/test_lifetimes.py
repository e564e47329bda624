"""When the values of a graph are alive, counted by hand."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.comm.collectives import ALL_REDUCE, WAIT
from fsdp_compile.passes.graph.analyze import analyze
from fsdp_compile.passes.graph.lifetimes import lifetimes, live_bytes
from fsdp_compile.passes.graph.nodes import Kind, Tag, is_pointwise, set_tag
from fsdp_compile.passes.graph.work import Costs

A = torch.empty(8, 8)
UNIT = 256  # bytes of each value here


def _chain(a: Tensor) -> Tensor:
    b = a @ a
    c = b @ b
    return c @ c


def _viewed(a: Tensor) -> Tensor:
    b = a @ a
    view = b.t()
    c = a @ a
    return c @ view


def _returned(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a @ a
    c = b @ b
    d = a @ a
    return c, d @ d


def _pointwise(a: Tensor) -> Tensor:
    b = a @ a
    c = b.relu()
    d = a @ a
    return c + d


def _twice(a: Tensor) -> tuple[Tensor, Tensor]:
    return _read_twice((a @ a).relu())


def _read_twice(value: Tensor) -> tuple[Tensor, Tensor]:
    return value + 1, value * 2


def _sum(a: Tensor, count: int) -> Tensor:
    total = a @ a
    for _ in range(1, count):
        total = total + a @ a
    return total


def _tuple(a: Tensor) -> Tensor:
    b = a @ a
    q, r = torch.linalg.qr(b)
    return q @ r @ b


CASES: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], list[int]]] = {
    "until it is last read": (_chain, {}, [1, 2, 2]),
    "until a view is last read": (_viewed, {}, [1, 1, 2, 3]),
    "to the end if it is returned": (_returned, {}, [1, 2, 2, 3]),
    "without memory in its only reader, whose inputs live": (_pointwise, {}, [1, 1, 2, 3]),
    "unless it is stored": (_pointwise, {"stored": {1}}, [1, 2, 2, 3]),
    "as well as its inputs with two readers": (_twice, {}, [1, 2, 3, 4]),
    "stored for two if it reads five": (lambda a: _read_twice(_sum(a, 5)), {}, [1, 2, 2, 3, 3, 4, 4, 5, 6, 2, 3]),
    "not stored for two if it reads four": (lambda a: _read_twice(_sum(a, 4)), {}, [1, 2, 2, 3, 3, 4, 5, 6, 7]),
    "nor for one": (lambda a: _sum(a, 5).relu(), {}, [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]),
    "elements from their tuple on": (_tuple, {}, [1, 3, 3, 3, 4, 3]),
    "what comes on top": (_chain, {"added": [(1, UNIT), (3, UNIT)]}, [1, 3, 3]),
    "not what is packed, whose inputs live longer": (_returned, {"packed": {1: 3}}, [1, 1, 2, 3]),
    "also what may be packed late": (_returned, {"late": {1: 3}}, [1, 2, 3, 4]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_alive(case: str) -> None:
    """The number of values that are alive at each node that computes; inputs of the caller are alive throughout."""
    function, options, expected = CASES[case]
    graph = make_fx(function, tracing_mode="fake")(A).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    position = {node: at for at, node in enumerate(nodes)}
    packed, late = ({nodes[at]: by for at, by in options.get(name, {}).items()} for name in ("packed", "late"))
    stored = {nodes[at] for at in options.get("stored", ())}
    alive = lifetimes(graph, position, packed, options.get("added", ()), stored=stored, late=late)
    assert [each - UNIT for each in live_bytes(alive, len(nodes))] == [UNIT * count for count in expected]


@pytest.mark.parametrize(("kind", "expected"), [("scale", [5, 6, 8, 10, 10]), ("update", [5, 7, 9, 11, 9])])
def test_what_forward_kept_is_alive_from_the_first_node_on(kind: Kind, expected: list[int]) -> None:
    """A backward that reduces units and gathers none counts their shards beside the values at each node, and what is
    reduced: all of it to the end, or the largest if each updates its shard. Two messages are beside what is sent."""
    graph = make_fx(
        lambda a: [WAIT(ALL_REDUCE(each, "sum", "0")).neg() for each in (a[:4] @ a, _chain(a))], tracing_mode="fake"
    )(A).graph
    for unit, start in enumerate(graph.find_nodes(op="call_function", target=ALL_REDUCE)):
        set_tag(start, Tag("reduce", unit, "", True, wire="bf16"))
        set_tag(next(iter(next(iter(start.users)).users)), Tag(kind, unit, "", True))
    workload = analyze(graph, Costs()).workload
    assert [2 * task.memory // UNIT for task in workload.tasks] == expected
    assert [unit.packed for unit in workload.units] == [UNIT, 2 * UNIT]
    computing, of_joint = ([*chain.from_iterable(analyze(graph, joint=each).tasks)] for each in (False, True))
    assert computing == of_joint  # tasks have all that computes, also before a first product or gather


@pytest.mark.parametrize(("into", "is_loop"), [(lambda a: torch.full(a.shape, 0.0), True), (torch.clone, False)])
def test_a_scatter_into_a_constant_is_a_loop(into: Callable[[Tensor], Tensor], is_loop: bool) -> None:
    """As in the gradient of a cross entropy: Inductor compares indices there, and else writes to the memory."""
    graph = make_fx(lambda a: into(a).scatter(1, torch.zeros(8, 1, dtype=torch.int64), 1.0))(A).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.scatter.value)
    assert is_pointwise(node) == is_loop
