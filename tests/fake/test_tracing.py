"""What Dynamo and AOTAutograd see of the runtime: one operator for each unit, and none of its machinery."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import step
from models import mlp
from recording import Log, RecordingDevice, unlike_blocks
from refusing import units
from tiers import all_strategies
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.core._torch import never_trace
from fsdp_compile.core.ops import UNSHARD, VIEWS
from fsdp_compile.eager.streams import Streams, UnshardedBuffer


def test_what_is_never_traced_calls_what_is_compiled() -> None:
    """Dynamo compiles what such a function calls, and not the function."""

    def inside(x: Tensor) -> Tensor:
        return x * 2

    @never_trace
    def around(x: Tensor) -> Tensor:
        return inside(x) + 1

    seen = _Dynamo()
    assert torch.equal(torch.compile(around, backend=seen)(torch.ones(2)), torch.full((2,), 3.0))
    assert [("mul" in name, "add" in name) for name in seen.calls] == [(True, False)]


class _Dynamo:
    """A backend that keeps Dynamo's graph and its inputs."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.inputs: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        self.calls += Counter(str(node.target) for node in nodes)
        self.inputs += inputs
        return aot_eager(graph, inputs)


def _traced(model: nn.Module, inputs: Tensor) -> _Dynamo:
    seen = _Dynamo()
    torch.compile(model, backend=seen, fullgraph=True)(inputs).sum().backward()
    return seen


@pytest.mark.parametrize(
    "strategy",
    # The graphs of FULL_SHARD stand in docs/passes.md.
    ["SHARD_GRAD_OP", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("FULL_SHARD", "NO_SHARD"))],
)
def test_dynamo_sees_one_operator_for_each_unit(strategy: str) -> None:
    """Beside the model's own calls there is one gather with its views for each unit: no hook, stream, event, state or
    memory operation, hence nothing to skip or to remove while tracing (E-COMP-1, E-COMP-3, E-COMP-4).

    Shards have their memory then: none was resized for tracing. It is the same while a forward before it holds what it
    gathered, as with SHARD_GRAD_OP, and after its backward (E-SHARD-10).
    """
    model = fully_shard(mlp(2), sharding_strategy=ShardingStrategy[strategy])
    count = len(units(model))
    seen, plain = _traced(model, torch.randn(3, 7)), _traced(mlp(2), torch.randn(3, 7))
    added = seen.calls - plain.calls
    reads = added.pop("<built-in function getitem>")
    assert added == {str(UNSHARD): count, str(VIEWS): count} and not plain.calls - seen.calls
    assert reads == sum(len(unit.params) for unit in units(model))
    handles = [t for t in seen.inputs if isinstance(t, Tensor) and t.dim() == 1]
    assert sorted(t.numel() for t in handles) == sorted(f.shard.numel() for u in units(model) for f in u.flats)
    assert all(handle.untyped_storage().nbytes() > 0 for handle in handles)
    loss = model(torch.randn(3, 7)).sum()
    for _ in range(2):
        torch._dynamo.reset()
        assert _traced(model, torch.randn(3, 7)).calls == seen.calls
        loss.backward(retain_graph=True)


@all_strategies
def test_compiled_graphs_run_none_of_the_machinery(strategy: str) -> None:
    """A compiled step touches no stream or event, makes no buffer of the eager runtime and installs no hook (E-COMP-2).

    Its graphs, forward and backward, resize nothing: what lives how long is up to the passes (E-COMP-3).
    """
    model = fully_shard(unlike_blocks(), sharding_strategy=ShardingStrategy[strategy])
    log, targets = Log(model), []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    run = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
    streams = {units(model)[0].device: Streams(RecordingDevice(log), limit_gathers=True)}
    refused = mock.patch.object(UnshardedBuffer, "__init__", side_effect=AssertionError("an eager gather"))
    hooks = [[*(param._backward_hooks or ())] for param in model.parameters()]
    with mock.patch.object(model._fsdp_runtime, "_streams", streams), refused:
        for _ in range(3):
            step(run, torch.randn(3, 7))
    assert not log.lines
    assert targets and not [target for target in targets if any(w in target for w in ("resize", "set_", "record"))]
    assert [[*(param._backward_hooks or ())] for param in model.parameters()] == hooks
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert any(param.grad is not None for param in model.parameters())
