"""Where a module's own code breaks the graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import Residual, Stack, squared_error, vectors
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fsdp_compile import fully_shard


class _Breaks(Residual):
    """Breaks the graph between its two layers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(hidden)


class _Pair(nn.Module):
    """A block that computes before and after a block of its own that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(11, 23), _Breaks(11, 23)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x)))


BLOCKS = {"a block": _Breaks, "within a block": _Pair}


def _build(where: str) -> nn.Module:
    torch.manual_seed(0)
    return Stack([BLOCKS[where](11, 23) if where == "a block" else _Pair() for _ in range(3)])


def _graphs(model: nn.Module) -> list[list[str]]:
    """The operations of each graph that two steps compile."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter)
    for seed in range(2):
        squared_error(run, vectors(seed, 4)).backward()
    return [[node.name for node in graph.graph.nodes if node.op.startswith("call_")] for graph in counter.graphs]


@pytest.mark.parametrize("where", BLOCKS)
def test_as_many_graphs_as_unsharded(where: str) -> None:
    """A graph break costs what it costs without sharding: the same graphs are compiled, for all blocks once."""
    assert _graphs(fully_shard(_build(where))) == _graphs(_build(where)) != []


def test_units_are_freed_between_forward_and_backward() -> None:
    """A unit with a graph break inside is gathered by the eager runtime, which frees it after forward."""
    model = fully_shard(_build("a block"))
    loss = squared_error(torch.compile(model, backend="aot_eager"), vectors(0, 4))
    awaiting = [gathered for block in model.blocks for gathered in block._fsdp.units[0].awaiting_backward]
    assert len(awaiting) == 3 and all(buffer.is_free for each in awaiting for buffer in each.buffers)
    loss.backward()


def test_our_own_code_adds_no_reason() -> None:
    """What `torch._dynamo` reports as reasons for graph breaks are the user's, none lies in our code."""
    counters.clear()
    _graphs(fully_shard(_build("a block")))
    assert len(counters["graph_break"]) == 1, list(counters["graph_break"])


@pytest.mark.parametrize("loaded", [False, True])
def test_first_steps_of_optimizers(loaded: bool) -> None:
    """A compiled optimizer steps as an eager one, in one graph, from its first step on, also if it was given state."""

    def about_to_step(model: nn.Module) -> torch.optim.Optimizer:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)  # exact products

    model = fully_shard(_build("a block"))
    reference = copy.deepcopy(model)
    optimizer, expected = about_to_step(model), about_to_step(reference)
    if loaded:
        other = about_to_step(copy.deepcopy(model))
        other.step()
        optimizer.load_state_dict(other.state_dict())
        expected.load_state_dict(copy.deepcopy(other.state_dict()))  # memory of its own
    counters.clear()
    torch.compile(optimizer.step, backend="eager")()
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    expected.step()
    for (name, param), like in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, like), name


def test_a_parameter_that_compiled_code_returns_is_the_parameter() -> None:
    """Whoever gets it may write to it: a copy of what was gathered would lose that without a word."""
    torch._dynamo.reset()
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    weight, bias = model[0].weight, model[0].bias

    @torch.compile(backend="eager")
    def read() -> tuple[Tensor, Tensor, Tensor]:
        return model[0].weight, model[0].weight[1], model[0].bias

    whole, row, vector = read()
    assert whole is weight and vector is bias and type(row) is type(weight[1])
