"""Code that was written for unsharded models, on sharded ones: right, or refused with a reason."""

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded
from tiers import both_ways, compiled_late
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from fsdp_compile import FSDPModule, fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import NIGHTLY, on_ranks
from ..training import local


def _same_gradients(model: nn.Module, reference: nn.Module, **close: float) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            torch.testing.assert_close(grad, other.grad.to(grad.dtype), msg=lambda m, at=name: f"{at}: {m}", **close)


class _Block(nn.Module):
    """Scales by the norms of its parameters, which a module without own parameters lists."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.inner.parameters()).dtype
        penalty = sum(param.pow(2).sum() for name, param in self.inner.named_parameters() if name.endswith("weight"))
        return self.inner(x.to(dtype)) * (1 + 0.1 * penalty)


class _Penalized(nn.Module):
    """Adds a penalty on parameters inside its forward: on those of the head, or on all of them."""

    def __init__(self, on_all: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head, self.on_all = nn.Linear(7, 3), on_all

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        penalized = self if self.on_all else self.head
        return self.head(x).square().mean() + 0.1 * sum(param.pow(2).sum() for param in penalized.parameters())


def _penalty(rank: int, on_all: bool, policy: Any, dtype: torch.dtype, strategy: str, how: str) -> None:
    reference = _Penalized(on_all)
    model = fully_shard(
        copy.deepcopy(reference),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=dtype),
    )
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=seeded(1)).to(dtype)
    expected = torch.stack([reference.to(dtype)(part) for part in batch.chunk(world)])
    expected.mean().backward()
    breaks = bool(on_all and policy)  # the graph, where it uses parameters of other units
    run = model if how == "eager" else torch.compile(model, backend=how, fullgraph=not breaks)
    loss = run(batch.chunk(world)[rank])
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(loss.detach().float(), expected[rank].detach().float(), **close)
    loss.backward()
    _same_gradients(model, reference, **close)


@on_ranks(2)
def test_parameters_inside_forward(rank: int) -> None:
    """What a forward computes from `self.parameters()` has the unsharded model's values and gradients.

    Compiled too: where it uses those of other units, the graph breaks.
    """
    for how in ("eager", "aot_eager"):
        _penalty(rank, False, {_Block}, torch.bfloat16, "FULL_SHARD", how)
        if how == "eager":
            _penalty(rank, False, {_Block}, torch.float32, "NO_SHARD", how)
        if how == "eager" or NIGHTLY:
            _penalty(rank, True, None, torch.float32, "SHARD_GRAD_OP", how)
        _penalty(rank, True, {_Block}, torch.float32, "FULL_SHARD", how)


# --- transforms of torch.func -----------------------------------------------------------------------------------------


def _trained_by(
    use: Callable[[nn.Module, Tensor], Tensor],
) -> Callable[[nn.Module, Tensor], list[Tensor]]:
    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        use(model, x).square().sum().backward()
        assert x.grad is not None
        grads = [torch.zeros(param.shape) if param.grad is None else param.grad for param in model.parameters()]
        return [x.grad, *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]

    return train


_TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(len(x), 3)),
    "grad": lambda model, x: [grad(lambda x: model(x).sum())(x)],
    "jacrev": lambda model, x: [jacrev(model)(x)],
    "hessian": lambda model, x: [hessian(lambda x: model(x).sum())(x)],
    "vmap": lambda model, x: [vmap(model)(torch.stack([x, 2 * x]))],
    "vmap of grad": lambda model, x: [vmap(grad(lambda x: model(x).sum()))(x)],
    "training through vmap": _trained_by(lambda model, x: vmap(model)(torch.stack([x, 2 * x]))),
    "training through jvp": _trained_by(lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1]),
    "training through grad": _trained_by(lambda model, x: grad(lambda x: model(x).sum())(x)),
    "training after all of them": _trained_by(lambda model, x: model(x)),
}


def _transform(rank: int, strategy: str, frozen: bool, how: str, names: tuple[str, ...]) -> None:
    reference = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3))
    reference[2].requires_grad_(not frozen)
    reference[0].weight.requires_grad_(not frozen)
    model = copy.deepcopy(reference)
    for unit in (model[2], model):
        fully_shard(unit, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=None)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    for name, transform in _TRANSFORMS.items():
        if name not in names:
            continue
        torch._dynamo.reset()
        run = torch.compile(transform, backend=how) if how != "eager" else transform
        for found, expected in zip(run(model, x), transform(reference, x), strict=True):
            torch.testing.assert_close(found, expected, msg=lambda text, at=(name, strategy, frozen): f"{at}: {text}")
        for each in (model, reference):
            each.zero_grad()


@pytest.mark.parametrize(
    "compiled", [("training through grad",), pytest.param(tuple(_TRANSFORMS), marks=pytest.mark.nightly)]
)
@on_ranks(2)
def test_transforms(rank: int, compiled: tuple[str, ...]) -> None:
    """`torch.func` transforms a sharded model, or a function that calls it, as an unsharded one."""
    torch.manual_seed(0)
    ways = [("FULL_SHARD", False), ("NO_SHARD", True)]
    if NIGHTLY:
        ways += [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)]
    for strategy, frozen in ways:
        _transform(rank, strategy, frozen, "eager", tuple(_TRANSFORMS))
    _transform(rank, "FULL_SHARD", False, "aot_eager", compiled)


# --- forward on the instance ------------------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class _Called(nn.Sequential):
    """Runs its first part by `call`: of the module, or of its `forward`, which takes no hooks."""

    call = "__call__"

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](getattr(self[0], self.call)(x)))  # type: ignore[no-any-return]


def _double(self: Any, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda part: lambda x: _double(part, x),
    "a method": lambda part: MethodType(_double, part),
    "a partial": lambda part: partial(_double, part),
    # As accelerate patches autocast around the forward of a model.
    "autocast": lambda model: MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model),
}


def _set_forward(model: Any, kind: str) -> None:
    owner = model if kind == "autocast" else model[0]
    owner.forward = FORWARDS[kind](owner)


@pytest.mark.parametrize("call", ["__call__", "forward"])
@pytest.mark.parametrize("when", ["before sharding", "after sharding", "after a step"])
@both_ways
@on_ranks(2)
def test_forward_set_on_the_instance(rank: int, how: str, when: str, call: str) -> None:
    """A `forward` that was set on a unit itself, whenever, runs with parameters gathered and divides by the unit's
    factor, however it is called, in a graph of the model around it too: its gradients are no means."""
    kinds, which = list(FORWARDS), 2 * (call == "forward") + (when == "before sharding")
    for kind in kinds if how == "eager" or NIGHTLY else kinds[which : which + 1]:
        torch._dynamo.reset()
        reference, sharded = _Called(*_net()), _Called(*_net())
        for model in (reference, sharded):
            model.call = call
        if when == "before sharding":
            _set_forward(sharded, kind)
        for unit in (sharded[0], sharded):
            fully_shard(unit, sharding_strategy=ShardingStrategy.NO_SHARD if kind == "a method" else None)
            unit.set_gradient_divide_factor(1.0)
        if when == "after sharding":
            _set_forward(sharded, kind)
        run = sharded if how == "eager" else torch.compile(sharded, backend=how, fullgraph=True)
        world = dist.get_world_size()
        batch = torch.randn(4 * world, 7, generator=seeded(1))
        if when == "after a step":
            run(batch.chunk(world)[rank]).square().mean().backward()
            sharded.zero_grad()
            _set_forward(sharded, kind)
        _set_forward(reference, kind)
        for _ in range(2):
            (reference(batch).float().square().mean() * world).backward()
            run(batch.chunk(world)[rank]).float().square().mean().backward()
        close = {"rtol": 3e-2, "atol": 3e-3} if kind == "autocast" else {"rtol": 1e-4, "atol": 1e-6}
        _same_gradients(sharded, reference, **close)


@on_ranks(2)
def test_forward_set_on_a_part_called_first() -> None:
    """A `forward` that was set after sharding, called by name before the module ever was."""
    for kind in ("a function", "a method", "a partial"):
        reference, part = _net()[0], fully_shard(_net()[0])
        part.set_gradient_divide_factor(1.0)
        for each, factor in ((reference, dist.get_world_size()), (part, 1)):
            each.forward = FORWARDS[kind](each)
            (each.forward(torch.ones(1, 7)).sum() * factor).backward()
        _same_gradients(part, reference)


@on_ranks(2)
def test_forward_set_on_a_block_breaks_the_graph() -> None:
    """A block's own `forward` that Dynamo cannot trace runs outside of the compiled model's graphs, gathered."""
    reference, model = _net(), _net()
    fully_shard(model[0])
    fully_shard(model)
    inner = model[0].forward

    def saved_on_cpu(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():  # Dynamo does not trace it
            return inner(x)

    model[0].forward = saved_on_cpu  # type: ignore[assignment]  # what is tested
    model.compile(backend="aot_eager")
    for each in (reference, model):
        each(torch.randn(4, 7, generator=seeded(1))).square().mean().backward()
    _same_gradients(model, reference)


# --- tensors in the place of parameters -------------------------------------------------------------------------------


@on_ranks(2)
def test_tensors_in_the_place_of_parameters() -> None:
    """A removed parameter's name may become a plain attribute; pruning after sharding is refused by name."""
    reference, model = _net(), fully_shard(_net())
    x = torch.randn(4, 7, generator=seeded(1))
    for each in (reference, model):
        del each[0].weight, each[2].weight, each[2].bias
        each[0].weight, each[2].weight, each[2].bias = torch.full((5, 7), 0.1), torch.ones(3, 5), None
    for run in (model, torch.compile(model, backend="aot_eager")):
        for each, forward in ((reference, reference), (model, run)):
            each.zero_grad()
            forward(x).square().mean().backward()
        torch.testing.assert_close(model[0].bias.grad.full_tensor(), reference[0].bias.grad)
        torch.testing.assert_close(run(x), reference(x))
    del reference[0].weight, model[0].weight  # a parameter again
    reference[0].weight = model[0].weight = nn.Parameter(torch.ones(5, 7), requires_grad=False)
    torch.testing.assert_close(model(x), reference(x))
    plain = nn.Linear(7, 5, bias=False)
    sharded = fully_shard(copy.deepcopy(plain))
    for layer in (plain, sharded):  # in the place of one that is None
        del layer.bias
        layer.bias = torch.ones(5)  # type: ignore[assignment]  # a tensor
    torch.testing.assert_close([sharded(x), torch.compile(sharded, backend="aot_eager")(x)], [plain(x)] * 2)
    pruned = fully_shard(_net())
    prune.random_unstructured(pruned[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"parameter 0.weight_orig was added after fully_shard"):
        pruned(x)


@both_ways
@on_ranks(2)
def test_functional_call_with_other_tensors(how: str) -> None:
    """`torch.func.functional_call` computes with the tensors that it is given, which get their gradients."""
    x = torch.randn(4, 7, generator=seeded(1))
    results = []
    for model in (_net(), fully_shard(_net())):
        run: Any = torch.compile(model, backend=how) if isinstance(model, FSDPModule) and how != "eager" else model
        full = {name: torch.full(param.shape, 0.1, requires_grad=True) for name, param in model.named_parameters()}
        functional_call(run, full, (x,)).square().mean().backward()  # all of them
        found = [value.grad for value in full.values()]
        functional_call(run, {"0.weight": full["0.weight"]}, (x,)).square().mean().backward()  # the others train
        found += [full["0.weight"].grad, *(param.grad for param in model.parameters())]
        model.zero_grad()
        scaled = {name: param * 2 for name, param in model.named_parameters()}
        if how == "eager":
            functional_call(run, scaled, (x,)).square().mean().backward()
            found += [param.grad for param in model.parameters()]
            pairs = {name: torch.stack([value, value * 2]).detach() for name, value in full.items()}
            call = partial(functional_call, model, args=(x,))
            found += [vmap(call)(pairs), *grad(lambda values, call=call: call(values).square().sum())(full).values()]
        results.append([*found, run(x)])
    for expected, mine in zip(*results, strict=True):
        full = mine.full_tensor() if isinstance(mine, ShardedTensor) else mine
        if expected is None:  # of a parameter that nobody used
            assert full is None or not full.any()
        else:
            torch.testing.assert_close(full, expected)


class _Adapts(nn.Module):
    """Computes with parameters that its forward has changed by a step of gradient descent, as MAML does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.body.named_parameters())
        loss = functional_call(self.body, params, (x,)).square().sum()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        adapted = {name: param - 0.1 * g for (name, param), g in zip(params.items(), grads, strict=True)}
        return self.head(functional_call(self.body, adapted, (x,)) + self.body(x))


@on_ranks(2)
def test_functional_call_within_forward() -> None:
    """A forward may call a module of its unit with tensors that it computed from the parameters."""
    x = torch.randn(4, 7, generator=seeded(1))
    reference, model = _Adapts(), fully_shard(_Adapts())
    for each in (reference, model):
        for _ in range(2):
            each(x).square().mean().backward()
    _same_gradients(model, reference)


class Adapted(nn.Module):
    """What peft's `target_parameters` does: while `base` runs, a parameter of it is the sum with a product."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name
        self.down, self.up = nn.Parameter(torch.randn(5, 2) / 3), nn.Parameter(torch.randn(2, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.base if isinstance(self.base, Adapted) else self.base
        required = getattr(base, self.name).requires_grad
        parametrize.register_parametrization(base, self.name, Plus(self.down @ self.up))
        base.parametrizations[self.name].original.requires_grad_(required)
        try:
            with parametrize.cached():
                return self.base(x)
        finally:
            parametrize.remove_parametrizations(base, self.name, leave_parametrized=False)


class Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change


class Two(nn.Module):
    """Two weights, and a layer whose weight is saved before they are parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.one.T) @ self.other


@pytest.mark.parametrize("frozen", [True, False])
@compiled_late
@on_ranks(2)
def test_parametrized_within_forward(how: str, frozen: bool) -> None:
    """A forward may parametrize parameters of its unit for its own time, also when it is recomputed."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(7, 7), Adapted(Adapted(Two(), "one"), "other")) for _ in range(2)]
    reference = nn.Sequential(*blocks)
    for name, param in reference.named_parameters():
        param.requires_grad_(not frozen or name.endswith((".down", ".up")))
    model = copy.deepcopy(reference)
    kinds = [type(each) for each in model.modules()]
    for block in model:
        fully_shard(block)
    fully_shard(model)
    run = model if how == "eager" else torch.compile(model, backend=how)
    for step in range(2):
        x = torch.randn(4, 7, generator=seeded(step))
        for each, forward in ((reference, reference), (model, run)):
            each.zero_grad()
            y = checkpoint(forward, x, use_reentrant=False) if step and how == "eager" else forward(x)
            y.square().mean().backward()
        _same_gradients(model, reference)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other.detach())
    assert all(isinstance(each, kind) for each, kind in zip(model.modules(), kinds, strict=True))


# --- refused ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_refused() -> None:
    """Trained parameters that nobody would average are refused, whenever they were added or thawed; so are compiled
    wrappers and the conversion of a part.
    """
    model = fully_shard(_net())
    x = torch.ones(2, 7)
    edits: dict[str, Callable[[], Any]] = {
        "3.weight": lambda: model.append(nn.Linear(3, 3)),
        "3.bias": lambda: model[3].bias.requires_grad_(True),
        "1.scale": lambda: model[1].register_parameter("scale", nn.Parameter(torch.ones(3))),
    }
    for name, edit in edits.items():
        edit()
        for run in (model, torch.compile(model, backend="eager")):
            with pytest.raises(ValueError, match=rf"parameter {name} was added after fully_shard"):
                run(x)
        model.get_parameter(name).requires_grad_(False)
        model[3].requires_grad_(False)  # what does not train may be there
        model(x).sum().backward()
    with pytest.raises(TypeError, match=r"sharded parameter of shape \(5, 7\) cannot be parametrized outside"):
        parametrize.register_parametrization(fully_shard(_net())[0], "weight", nn.Identity())
    for compiled in (torch.jit.script(nn.Linear(7, 7)), torch.jit.trace(nn.Linear(7, 7), x)):
        for whole in (compiled, nn.Sequential(nn.Linear(7, 7), compiled)):
            with pytest.raises(ValueError, match=r"is what torch.jit made, whose code finds no gathered parameters"):
                fully_shard(whole)
        fully_shard(whole, ignored_modules=[compiled])(x).sum().backward()
        assert compiled.bias.grad.eq(2).all()
    with pytest.raises(ValueError, match=r"module is what torch.compile made of"):
        fully_shard(torch.compile(_net()))
    with pytest.raises(RuntimeError, match=r"parameter weight of Linear is part of a unit"):
        fully_shard(_net(), auto_wrap_policy=None)[0].double()


@on_ranks(2)
def test_data_parallel_around_a_sharded_module(rank: int) -> None:
    """DistributedDataParallel around sharded modules is refused in the first forward, and so is `replicate` of one.

    Weights stay as they were. `replicate` around sharded modules averages the gradients of the others alone.
    """
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=seeded(1))
    reference = _net()
    reference(batch).square().mean().backward()
    for options in ({}, {"init_sync": False}):
        inner = _net()
        inner.register_buffer("shift", torch.full((7,), float(rank)))  # is broadcast
        fully_shard(inner[0])
        before = [local(param).clone() for param in inner.parameters()]
        for wrapped in (inner, inner[0], fully_shard(_net())):
            model = DistributedDataParallel(wrapped, **options)
            with pytest.raises(ValueError, match=r"weight is averaged by DistributedDataParallel around .* too"):
                model(batch)
        assert all(torch.equal(local(param), old) for param, old in zip(inner.parameters(), before, strict=True))
    for apply in (replicate, replicate_with_fsdp):
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            apply(fully_shard(_net()))
    inner = _net()
    fully_shard(inner[0])
    model = replicate(inner)
    for _ in range(2):
        model.zero_grad()
        model(batch.chunk(world)[rank]).square().mean().backward()
        _same_gradients(inner, reference, rtol=1e-4, atol=1e-6)
    assert len(replicate.state(model)._ddp_weakref()._module_parameters) == 2
