"""The methods of FSDP2's sharded modules: each does here what it does there, eager and compiled."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from models import MLP, Residual, seeded
from tiers import compiled_late
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_compile
from fsdp_compile import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx

from ..ranks import Ranks, on_ranks
from ..training import (
    assert_bitwise,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    follow,
    mine,
    units,
    whole,
)
from ..wire import Sent, wire

STEPS = 2


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def blocks_then_root(fsdp: Any, **options: Any) -> Any:
    """The model, sharded as FSDP2's users do it."""
    model: Any = build(MLP)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def trained(fsdp: Any, how: str, configure: Callable[[Any], None], **options: Any) -> list[Tensor]:
    """Gradients of the first step and parameters after the last one, in full, with `configure` called on the model."""
    model = blocks_then_root(fsdp, **options)
    configure(model)
    step = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Tensor] = []
    for index in range(STEPS):
        for micro in range(2):
            inputs = MLP.batch(100 * dist.get_rank() + 10 * index + micro, 3)
            MLP.loss(step, inputs).backward()
        if not index:
            seen += [full(param.grad).clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [full(param.detach()).clone() for param in model.parameters()]


def _sharded(model: Any) -> list[Any]:
    return [*model.blocks, model]


def _divide(model: Any) -> None:
    for module in _sharded(model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)  # else torch wants an operation that gloo has not


def _sum(model: Any) -> None:
    for module in _sharded(model):
        module.set_force_sum_reduction_for_comms(True)


def _hook(model: Any) -> None:
    for module in _sharded(model):
        module.set_all_reduce_hook(lambda gradient: gradient.mul_(3))


def _memory(model: Any) -> None:
    model.set_reshard_after_forward(False)
    model.blocks[0].set_reshard_after_forward(True, recurse=False)
    model.set_is_last_backward(True)
    if torch.__version__ < "2.13" and isinstance(model, torch.distributed.fsdp.FSDPModule):
        return  # torch 2.11 has none of those below
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_reduce_scatter_unused_params(True)
    model.set_separate_reduce_scatter_group()


def _prefetch(model: Any) -> None:
    first, second, _ = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    model.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])


CHOICES = {choice.__name__: choice for choice in (_divide, _sum, _hook, _memory, _prefetch)}


@on_ranks(4)
def test_a_hook_averages_over_replicas() -> None:
    """Gradients averaged over replicas in a hook, as torchft's manager does, are those of hybrid sharding."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    hybrid, hooked = blocks_then_root(fsdp_compile, mesh=mesh), blocks_then_root(fsdp_compile, mesh=mesh["shards"])
    for module in _sharded(hooked):
        module.set_all_reduce_hook(lambda grad: dist.all_reduce(grad.div_(2), group=mesh.get_group("replicas")))
    for model in (hybrid, hooked):
        backward(model, MLP, mine(MLP, 1))
    for one, other in zip(hooked.parameters(), hybrid.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), full(other.grad))


DAILY = ("_divide", "_memory")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in CHOICES]
)
@on_ranks(2)
def test_as_torch(name: str) -> None:
    """Two accumulated backward passes and two steps give the gradients and parameters of FSDP2, eager and compiled."""
    configure = CHOICES[name]
    theirs = trained(torch.distributed.fsdp, "eager", configure)
    for how in ("eager", "aot_eager"):
        for mine_, other in zip(trained(fsdp_compile, how, configure), theirs, strict=True):
            torch.testing.assert_close(mine_, other, rtol=1e-5, atol=1e-6, msg=lambda text, how=how: f"{how}: {text}")


def _factors(rank: int, hybrid: bool, precision: MixedPrecisionPolicy | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2) if hybrid else (dist.get_world_size(),))
    eager, other = (blocks_then_root(fsdp_compile, mesh=mesh, mp_policy=precision) for _ in range(2))
    backwards: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        backwards.append(str(graph.graph))
        return graph.forward

    step = torch.compile(other, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)

    def same_step(seed: int, micro: int = 1) -> list[Tensor]:
        for model, run in ((eager, eager), (other, step)):
            model.zero_grad()
            for index in range(micro):
                model.set_requires_gradient_sync(index == micro - 1)
                backward(run, MLP, mine(MLP, seed + index))
        assert_bitwise(other, eager, f"step {seed}")
        return [full(param.grad).clone() for param in other.parameters()]

    def set_all(**chosen: Any) -> None:
        for module in [*_sharded(eager), *_sharded(other)]:
            for name, value in chosen.items():
                getattr(module, name)(value)

    exact = {"rtol": 1e-5, "atol": 1e-6} if precision is None else {"rtol": 1e-2, "atol": 1e-3}
    means = same_step(0)
    set_all(set_gradient_divide_factor=1.0)
    for total, mean in zip(same_step(0), means, strict=True):
        torch.testing.assert_close(total, mean * dist.get_world_size(), **exact)
    set_all(set_gradient_divide_factor=0.3)
    for total, mean in zip(same_step(0), means, strict=True):
        torch.testing.assert_close(total, mean * (dist.get_world_size() / 0.3), **exact)
    same_step(10, micro=3)
    step = torch.compile(other, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    same_step(20)
    set_all(set_gradient_divide_factor=dist.get_world_size(), set_force_sum_reduction_for_comms=True)
    for again, mean in zip(same_step(0), means, strict=True):
        torch.testing.assert_close(again, mean, **exact)
    reducing = [graph for graph in backwards if "reduce_grads" in graph]
    assert {"divisor=1.0", "divisor=0.3", f"divisor={float(dist.get_world_size())}"} == {
        text for graph in reducing for text in re.findall(r"divisor=[0-9.]+", graph)
    }
    assert sum("defer_reduce" in graph for graph in backwards) == 1  # under no_sync


def test_factors_in_graphs(two: Ranks) -> None:
    """Compiled graphs reduce by the factor that gradients are divided by, or by sums alone, set before or after
    compiling, or changed, with accumulation; gradients are those of eager steps bit for bit."""
    two.run(_factors, False, None)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_factors_in_graphs_of_replicas(four: Ranks, dtype: torch.dtype | None) -> None:
    """The same under hybrid sharding, also where a narrow dtype is divided before and after the sum."""
    four.run(_factors, True, MixedPrecisionPolicy(reduce_dtype=dtype) if dtype else None)


def _collectives(model: Any, seed: int) -> list[Sent]:
    with wire() as sent:
        backward(model, MLP, mine(MLP, seed))
    return sent


@on_ranks(2)
def test_communication() -> None:
    """What is not resharded is not gathered again, unless parameters changed; chosen modules are gathered early."""

    def gathers(model: Any, seed: int) -> int:
        return sum(each.kind == "gather" for each in _collectives(model, seed))

    model = blocks_then_root(fsdp_compile)
    assert gathers(model, 0) == 7  # four units, of which the root's stays until backward
    model.set_reshard_after_forward(False)
    assert gathers(model, 1) == 4
    model.set_reshard_after_backward(False)
    assert (gathers(model, 2), gathers(model, 3)) == (4, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0)
    assert gathers(model, 4) == 4  # values may have changed, on some rank

    model = blocks_then_root(fsdp_compile)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    before: list[int] = []
    with wire() as sent:
        for module in (model.stem, *model.blocks):
            module.register_forward_pre_hook(lambda *_: before.append(len(sent)))
        MLP.loss(model, mine(MLP, 0))
    assert before == [4, 4, 4, 4]


# --- deferred all-reduces ---------------------------------------------------------------------------------------------


@compiled_late
@on_ranks(4)
def test_deferred_all_reduce(how: str) -> None:
    """Each of three backward passes reduces within its replica, the last one all-reduces the sum: the mean over all.

    What waits is not divided yet, also if a factor divides gradients. A 2-D mesh alone asks for hybrid sharding, as in
    FSDP2.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = build(MLP), blocks_then_root(fsdp_compile, mesh=mesh)
    assert all(unit.replicas is not None for unit in units(model))
    assert_same_parameters(model, reference)
    step = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True)
    for index in range(2):
        with wire() as sent:
            for micro in range(3):
                model.set_requires_all_reduce(micro == 2)
                backward(step, MLP, mine(MLP, 10 * index + micro))
                backward(reference, MLP, whole(MLP, 10 * index + micro))
                if micro < 2:
                    assert all(param.grad is None for param in model.parameters())
        kinds = [each.kind for each in sent if each.dtype != torch.uint8]  # others: what is used
        assert (kinds.count("reduce"), kinds.count("all_reduce")) == (12, 4)
        assert_same_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
    model.set_requires_all_reduce(False)
    backward(model, MLP, mine(MLP, 90))
    model.reset_iter_state()  # drops what waits
    model.set_requires_all_reduce(True)
    follow(model, reference, MLP)
    for each in (model, reference):
        each.zero_grad()
    for module in _sharded(model):
        module.set_gradient_divide_factor(2.0)
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        backward(step, MLP, mine(MLP, micro))
        backward(reference, MLP, whole(MLP, micro))
    for param in reference.parameters():
        param.grad.mul_(2)  # the mean of four ranks is divided by four
    assert_same_gradients(model, reference)


# --- lists of modules, modules without parameters, slices, named methods ----------------------------------------------


class _Named(nn.Module):
    """A model whose methods `encode` and `decode` are called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 11), Residual(11, 13), nn.Linear(11, 5)
        self.nothing = nn.ReLU()

    def encode(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))

    def decode(self, x: Tensor) -> Tensor:
        return self.nothing(self.last(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@on_ranks(2)
def test_lists_and_methods() -> None:
    """Modules of a list share one unit, gathered once per forward; registered methods gather; modules may be empty."""
    torch.manual_seed(0)
    reference = _Named()
    torch.manual_seed(0)
    model: Any = _Named()
    returned = fully_shard([model.first, model.last], shard_placement_fn=lambda param: Shard(param.dim() - 1))
    assert returned == [model.first, model.last] and all(isinstance(each, FSDPModule) for each in returned)
    fully_shard(model.nothing)
    fully_shard(model)
    assert len(units(model)) == 2
    assert sorted(len(unit.params) for unit in units(model)) == [4, 4]
    for name in ("encode", "decode"):
        fsdp_compile.register_fsdp_forward_method(model, name)
    fsdp_compile.register_fsdp_forward_method(reference, "encode")  # not sharded: nothing happens
    with pytest.raises(ValueError, match="method_name: _Named has no method 'decipher'"):
        fsdp_compile.register_fsdp_forward_method(model, "decipher")
    x = torch.randn(4, 7, generator=seeded(1))
    with wire() as sent:
        model(x)
    assert [each.kind for each in sent] == ["gather", "gather"]
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        for each, forward in ((reference, reference), (model, run)):
            each.zero_grad()
            forward(x).square().mean().backward()
        assert_same_gradients(model, reference)
    for each in (reference, model):
        each.zero_grad()
        each.decode(each.encode(x)).square().mean().backward()
    assert_same_gradients(model, reference)
    torch.testing.assert_close(model.last(torch.ones(2, 11)), reference.last(torch.ones(2, 11)))  # alone
    with pytest.raises(ValueError, match="is in the list twice or is inside"):
        fully_shard([reference, reference.last])


@on_ranks(2)
def test_slices() -> None:
    """A slice of a sharded `Sequential` is a plain one of the same, sharded, layers; roots may share streams."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(3)]
    model: Any = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    front = model[:2]
    assert type(front) is nn.Sequential and list(front) == list(model)[:2]
    x = torch.ones(2, 5)
    torch.testing.assert_close(front(x), model[1](model[0](x)))
    other = blocks_then_root(fsdp_compile)
    share_comm_ctx([model, other])
    assert other._fsdp_runtime._streams is model._fsdp_runtime._streams
    with pytest.raises(ValueError, match="modules: Linear is not sharded"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@on_ranks(2)
def test_reset_after_failures() -> None:
    """After a failed forward and backward, `reset_iter_state` drops unreduced gradients, and training goes on right."""
    reference, model = build(MLP), blocks_then_root(fsdp_compile)
    assert_same_parameters(model, reference)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 0))
    handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*mine(MLP, 1)[:1])
    handle.remove()
    output = model(*mine(MLP, 1)[:1])
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"reset_iter_state: \w+ is inside another sharded module"):
        model.blocks[0].reset_iter_state()
    follow(model, reference, MLP)
