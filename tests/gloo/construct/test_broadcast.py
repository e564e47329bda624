"""`sync_module_states`: every rank ends with the values of the first."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP, Case, squared_error, vectors
from tiers import STRATEGIES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import Groups
from fsdp_compile.construct.units import broadcast

from ..ranks import on_ranks
from ..training import build, full_parameters


class _WithBuffers(nn.Module):
    """A model with buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = MLP.build(), nn.BatchNorm1d(3)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _of_rank(rank: int) -> nn.Module:
    """A model whose every value depends on the rank."""
    model = build(Case(_WithBuffers, vectors, squared_error), seed=rank)
    for tensor in model.buffers():
        tensor.copy_(
            torch.full_like(tensor, rank + 1) if tensor.dtype != torch.bool else torch.tensor([rank > 0, True])
        )
    return model


def _assert_values_of_rank_0(model: nn.Module) -> None:
    expected = _of_rank(0)
    full = full_parameters(model)
    for name, param in expected.named_parameters():
        assert torch.equal(full[name], param), name
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_all_ranks_get_the_values_of_the_first(rank: int, strategy: str) -> None:
    """Parameters and buffers are those of rank 0, on the CPU over gloo (E-SYNC-1, 4, 6)."""
    model = fully_shard(_of_rank(rank), sharding_strategy=ShardingStrategy[strategy], sync_module_states=True)
    _assert_values_of_rank_0(model)


@on_ranks(2)
def test_one_rank_holds_the_checkpoint(rank: int) -> None:
    """Rank 0 alone has values, the others are on meta; all end equal (E-SYNC-6)."""
    model = _of_rank(0)
    if rank > 0:
        model = model.to("meta")
    fully_shard(
        model,
        sync_module_states=True,
        param_init_fn=lambda m: m.to_empty(device=torch.get_default_device(), recurse=False),
    )
    _assert_values_of_rank_0(model)


@on_ranks(2)
def test_ignored_parameters_are_not_sent(rank: int) -> None:
    """An ignored parameter keeps the values that its rank gave it (E-INIT-11)."""
    model = _of_rank(rank)
    alone = model.net.stem.weight.detach().clone()
    fully_shard(model, sync_module_states=True, ignored_states=[model.net.stem.weight])
    assert torch.equal(model.net.stem.weight, alone)


@on_ranks(2)
def test_buffers_are_sent_once(rank: int) -> None:
    """An enclosing call does not send again what a nested one has sent (E-SYNC-2)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    fully_shard(model[1], sync_module_states=True)
    model[1].running_mean.fill_(rank)
    model[2].running_mean.fill_(rank)
    fully_shard(model, sync_module_states=True)
    assert (model[1].running_mean == rank).all() and (model[2].running_mean == 0).all()


def _odd_tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64, torch.float32, torch.uint8)
    tensors = [(torch.randn(shape) * 9).to(dtype) for dtype in dtypes for shape in ((), (3,), (2, 5), (0, 4), (33,))]
    return [*tensors, torch.randn(4, 6).t(), torch.randn(9)[::2]]


@on_ranks(4)
def test_every_replica_gets_the_values_of_global_rank_0(rank: int) -> None:
    """Over shard and replica groups, all shapes, strides and dtypes (E-SYNC-1, 3)."""
    tensors = _odd_tensors(rank)
    mesh = init_device_mesh("cpu", (2, 2))
    broadcast(tensors, Groups.of(mesh.get_group(1), mesh.get_group(0)))
    for found, expected in zip(tensors, _odd_tensors(0), strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


class _Pair(torch.Tensor):
    """A wrapper of two tensors."""

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> "_Pair":
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@on_ranks(2)
def test_wrapper_subclasses_are_sent_by_their_parts(rank: int) -> None:
    """The tensors that a wrapper subclass consists of are sent, also of wrappers within (E-SYNC-5, E-LIM-19)."""
    pair = _Pair(torch.full((3,), 1.0 + rank), torch.full((2,), 10.0 + rank))
    outer = _Pair(_Pair(torch.full((3,), 20.0 + rank), torch.full((3,), 30.0 + rank)), torch.full((2,), 40.0 + rank))
    broadcast([pair, outer], Groups.of(dist.group.WORLD))
    assert (pair.left == 1).all() and (pair.right == 10).all()
    assert [t[0].item() for t in (outer.left.left, outer.left.right, outer.right)] == [20, 30, 40]
