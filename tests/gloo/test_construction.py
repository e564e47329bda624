"""Construction between real ranks: equal values, groups that communicate, what is ignored, deferred or of odd shape."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Case, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_compile import fully_shard
from fsdp_compile.eager.broadcast import broadcast
from fsdp_compile.eager.groups import Groups, resolve_groups

from .ranks import Ranks
from .training import (
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    full_parameters,
    mine,
    whole,
)

MLP = MODELS["mlp"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HOWS = ["eager", "aot_eager"]


# --- broadcast --------------------------------------------------------------------------------------------------------


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


def _sync(rank: int, strategy: str) -> None:
    model = fully_shard(_of_rank(rank), sharding_strategy=ShardingStrategy[strategy], sync_module_states=True)
    _assert_values_of_rank_0(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_get_the_values_of_the_first(two: Ranks, strategy: str) -> None:
    """Parameters and buffers are those of rank 0, on the CPU over gloo (E-SYNC-1, 4, 6)."""
    two.run(_sync, strategy)


def _sync_deferred(rank: int) -> None:
    model = _of_rank(0)
    if rank > 0:
        model = model.to("meta")
    fully_shard(model, sync_module_states=True, param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False))
    _assert_values_of_rank_0(model)


def test_one_rank_holds_the_checkpoint(two: Ranks) -> None:
    """Rank 0 alone has values, the others are on meta; all end equal (E-SYNC-6)."""
    two.run(_sync_deferred)


def _sync_ignoring(rank: int) -> None:
    model = _of_rank(rank)
    alone = model.net.stem.weight.detach().clone()
    fully_shard(model, sync_module_states=True, ignored_states=[model.net.stem.weight])
    assert torch.equal(model.net.stem.weight, alone)


def test_ignored_parameters_are_not_sent(two: Ranks) -> None:
    """An ignored parameter keeps the values that its rank gave it (E-INIT-11)."""
    two.run(_sync_ignoring)


def _sync_nested(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    fully_shard(model[1], sync_module_states=True)
    model[1].running_mean.fill_(rank)
    model[2].running_mean.fill_(rank)
    fully_shard(model, sync_module_states=True)
    assert (model[1].running_mean == rank).all() and (model[2].running_mean == 0).all()


def test_buffers_are_sent_once(two: Ranks) -> None:
    """An enclosing call does not send again what a nested one has sent (E-SYNC-2)."""
    two.run(_sync_nested)


def _odd_tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64, torch.float32, torch.uint8)
    tensors = [(torch.randn(shape) * 9).to(dtype) for dtype in dtypes for shape in ((), (3,), (2, 5), (0, 4), (33,))]
    return [*tensors, torch.randn(4, 6).t(), torch.randn(9)[::2]]


def _send(rank: int, bucket_bytes: int) -> None:
    tensors = _odd_tensors(rank)
    mesh = init_device_mesh("cpu", (2, 2))
    broadcast(tensors, Groups(mesh.get_group(1), mesh.get_group(0)), bucket_bytes)
    for found, expected in zip(tensors, _odd_tensors(0), strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_every_replica_gets_the_values_of_global_rank_0(four: Ranks, bucket_bytes: int) -> None:
    """Over shard and replica groups, all shapes, strides and dtypes, buckets of any size (E-SYNC-1, 3)."""
    four.run(_send, bucket_bytes)


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


def _send_wrapped(rank: int) -> None:
    pair = _Pair(torch.full((3,), 1.0 + rank), torch.full((2,), 10.0 + rank))
    broadcast([pair], Groups(dist.group.WORLD))  # type: ignore[arg-type]
    assert (pair.left == 1).all() and (pair.right == 10).all()


def test_wrapper_subclasses_are_sent_by_their_parts(two: Ranks) -> None:
    """The tensors that a wrapper subclass consists of are sent (E-SYNC-5)."""
    two.run(_send_wrapped)


# --- groups -----------------------------------------------------------------------------------------------------------


def _reduce(rank: int) -> tuple[float, float]:
    groups = resolve_groups(None, None, ShardingStrategy.HYBRID_SHARD, True, devices_per_node=2)
    sums = []
    for group in (groups.shard, groups.replicate):
        value = torch.tensor(10.0**rank)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums[0], sums[1]


def test_groups_of_nodes_communicate(four: Ranks) -> None:
    """Each rank sums with its node, and with its place on the other node (E-PG-7)."""
    assert four.run(_reduce) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


def _hybrid_of_ones(rank: int, how: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    with pytest.warns(UserWarning, match="HYBRID_SHARD over one rank is NO_SHARD"):
        fully_shard(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, devices_per_node=1)
    executor(model, how)(torch.tensor([[1.0 + rank]])).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == 1.5


@pytest.mark.parametrize("how", HOWS)
def test_replicas_of_one_rank_are_averaged(two: Ranks, how: str) -> None:
    """Gradients 1 and 2 of two replicas that shard over one rank each become 1.5 on both (E-STRAT-9)."""
    two.run(_hybrid_of_ones, how)


def _hybrid_of_one_node(rank: int) -> None:
    reference, model = build(MLP), build(MLP)
    fully_shard(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, devices_per_node=2)
    follow(model, reference, MLP)


def test_one_node_is_plain_sharding(two: Ranks) -> None:
    """A hybrid strategy with one replica trains as FULL_SHARD does (E-STRAT-1)."""
    two.run(_hybrid_of_one_node)


def _strategies_by_unit(rank: int, how: str) -> None:
    reference, model = build(MLP), build(MLP)
    strategies = zip(model.blocks, STRATEGIES, strict=True)
    own: dict[nn.Module, Any] = {block: {"sharding_strategy": ShardingStrategy[s]} for block, s in strategies}
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda module: own.get(module, False)))
    follow(executor(model, how), reference, MLP)


@pytest.mark.parametrize("how", HOWS)
def test_units_of_different_strategies(two: Ranks, how: str) -> None:
    """A `CustomPolicy` that gives each block another strategy trains as unsharded (E-INIT-5)."""
    two.run(_strategies_by_unit, how)


# --- ignored, deferred, odd shapes ------------------------------------------------------------------------------------


def _ignore(rank: int, how: str) -> None:
    reference, local, model = build(MLP), build(MLP), build(MLP)
    fully_shard(model, ignored_modules=[model.blocks[1].up], ignored_states=None)
    run = executor(model, how)
    backward(reference, MLP, whole(MLP, 1))
    backward(local, MLP, mine(MLP, 1))
    backward(run, MLP, mine(MLP, 1))
    for ours, alone in zip(model.blocks[1].up.parameters(), local.blocks[1].up.parameters(), strict=True):
        assert ours.grad is not None and alone.grad is not None
        torch.testing.assert_close(ours.grad, alone.grad)
    head = reference.head.bias.grad
    assert head is not None
    gathered = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(gathered, model.head.bias.grad)
    pieces = [piece.flatten() for piece in gathered if piece is not None]
    torch.testing.assert_close(torch.cat(pieces), head)


@pytest.mark.parametrize("how", HOWS)
def test_ignored_parameters_are_not_reduced(two: Ranks, how: str) -> None:
    """An ignored layer has its own rank's gradient, all others have the mean (E-INIT-11)."""
    two.run(_ignore, how)


def _defer(rank: int, how: str, strategy: str) -> None:
    with torch.device("meta"):
        model = MLP.build()
    reference = MLP.build()

    def init(module: nn.Module) -> None:
        for tensor in module.parameters(recurse=False):
            nn.init.trunc_normal_(tensor, std=0.3, generator=torch.Generator().manual_seed(tensor.numel()))

    def init_deferred(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        init(module)

    reference.apply(init)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], param_init_fn=init_deferred)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert_same_parameters(model, reference)
    follow(executor(model, how), reference, MLP)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", HOWS)
def test_deferred_models_train(two: Ranks, how: str, strategy: str) -> None:
    """A model that was on meta is, from its first step on, what it is when made outright (E-META-2, 6)."""
    two.run(_defer, how, strategy)


class _Shift(nn.Module):
    """One 0-d parameter, all that its unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class _Odd(nn.Module):
    """0-d parameters and parameters without elements, in units of their own and among others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = _Shift()
        self.none = nn.Parameter(torch.empty(0, 7))
        self.empty, self.net = nn.Linear(7, 0), MLP.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.net(x) * self.scale) + (self.empty(x).sum() + self.none.sum())


def _train_odd(rank: int, how: str, strategy: str) -> None:
    case = Case(_Odd, vectors, squared_error)
    reference, model = build(case), build(case)
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy={nn.Linear, _Shift})
    run = executor(model, how)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (reference, model)]
    for seed in (1, 2):
        backward(reference, case, whole(case, seed))
        backward(run, case, mine(case, seed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = full_parameters(model)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", HOWS)
def test_parameters_of_odd_shapes_train(two: Ranks, how: str, strategy: str) -> None:
    """0-d parameters and empty ones train as unsharded (E-FLAT-11, 12)."""
    two.run(_train_odd, how, strategy)
