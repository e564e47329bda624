"""Graphs of other shardings: `backend="fsdp_compile"` orders their collectives or leaves them, and values stay."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .ranks import Ranks


class Blocks(nn.Module):
    """So many blocks of two linear layers, and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class Mean(torch.autograd.Function):
    """A parameter whose gradient is averaged by a functional all-reduce, as in compiled data parallelism."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return funcol.all_reduce(grad, "avg" if grad.is_cuda else "sum", dist.group.WORLD) / dist.get_world_size()


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ Mean.apply(weight)).relu()
        return x.square().mean()


class Experts(nn.Module):
    """Each rank has an expert; rows go to it and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        halves = [len(x) // dist.get_world_size()] * dist.get_world_size()
        there = funcol.all_to_all_single_autograd(x, halves, halves, dist.group.WORLD)
        back = funcol.all_to_all_single_autograd(self.expert(there).relu(), halves, halves, dist.group.WORLD)
        return back.square().mean()


def _simple() -> nn.Module:
    return simple_fsdp(Blocks(), init_device_mesh("cpu", (dist.get_world_size(),)))


def _tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"blocks.{block}.{layer}": style for block in range(2)
            for layer, style in ((0, ColwiseParallel()), (2, RowwiseParallel()))}  # fmt: skip
    return parallelize_module(Blocks(), mesh, plan)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SimpleFSDP": (_simple, "10 all-gathers of parameters, 0 reduces of gradients: ordered"),
    "gradients averaged": (Averaged, "0 all-gathers of parameters, 3 reduces of gradients: ordered"),
    "tensor parallelism": (_tensor_parallel, "left in place"),
    "experts": (Experts, "other collectives: left in place"),
}


def _train(name: str, **options: Any) -> tuple[list[Tensor], str]:
    """Local parameters after three steps, and what was printed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, **options)
    torch.manual_seed(dist.get_rank() if name != "tensor parallelism" else 0)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(3):
            run(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    local = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
    return [each.detach().clone() for each in local], said.getvalue()


def _compare(rank: int, name: str, options: dict[str, Any]) -> None:
    expected, _ = _train(name, backend="inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        found, said = _train(name, backend="fsdp_compile", options=options)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert (MODELS[name][1] in said) == (rank == 0), said


LATE = {"gradients averaged", "tensor parallelism"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LATE else ()) for name in MODELS]
)
def test_values_stay(two: Ranks, name: str) -> None:
    """Three steps end with the parameters that torch's own backend gives, and rank 0 says what was found."""
    two.run(_compare, name, {})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{"link": "custom:2e-5,1e9"}, {"link": "custom:2e-5,1e9", "reshard_after_forward": True}]
)
def test_planned_by_time(two: Ranks, options: dict[str, Any]) -> None:
    """So they do with a link, and where backward gathers again."""
    two.run(_compare, "SimpleFSDP", options)


def _different(rank: int) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = simple_fsdp(Blocks(4), mesh)  # no graph that another test has run, which would not be compared again
    del model.blocks[4 - rank :]
    run = torch.compile(model, backend="fsdp_compile")
    with pytest.raises(RuntimeError, match="expected the same collectives in the same order on all ranks, found"):
        run(torch.randn(4, 8))


def test_ranks_that_differ(two: Ranks) -> None:
    """Ranks with different graphs raise before they communicate, as with this package's own sharding."""
    two.run(_different)
