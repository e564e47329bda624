"""Sharded tensors under stock code, beside the same code on one process: uneven cuts, empty parts, scalars.

Each test runs a family of operations on plain tensors and on sharded ones that have their values.
"""

import copy
import inspect
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import seeded
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.optim.swa_utils import AveragedModel

from fsdp_compile.comm import collectives
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_local
from fsdp_compile.tensors.sharded_view import ShardedView
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient

from ..ranks import on_ranks

SHAPES = [(7, 5), (5,), (3, 4), (6, 9), (1,), (33,), (2, 3, 4), (), (8, 16), (0, 3), (3, 7)]
Params = list[Any]


# --- building ---------------------------------------------------------------------------------------------------------


def specs_of(shapes: list[tuple[int, ...]]) -> list[ShardSpec]:
    """How a unit of parameters of these shapes is sharded over all ranks."""
    ranks = ShardRanks(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())
    layout = FlatParamLayout.build([(str(i), shape) for i, shape in enumerate(shapes)], ranks.size, 1)
    offset, specs = 0, []
    for shape in shapes:
        specs.append(ShardSpec(FlatSharding(shape, offset, layout.shard_numel), ranks))
        offset += math.prod(shape)
    return specs


def build(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> tuple[Params, Params]:
    """Plain parameters, equal on all ranks, and sharded ones with their values."""
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    return plain, shard(plain)


def shard(plain: Params) -> Params:
    sharded = [nn.Parameter(param.detach().clone()) for param in plain]
    for param, spec in zip(sharded, specs_of([tuple(param.shape) for param in plain]), strict=True):
        set_local(param, spec.local_of(param.detach()).clone(), spec)
    return sharded


def give_gradients(plain: Params, sharded: Params, seed: int, scale: float = 1.0) -> None:
    generator = seeded(seed)
    for one, other in zip(plain, sharded, strict=True):
        one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype) * scale
        other.grad = ShardedTensor(other.spec.local_of(one.grad).clone(), other.spec)


def full(value: Any) -> Any:
    """Sharded tensors and views of them gathered, within lists too."""
    if isinstance(value, (list, tuple)):
        return [full(each) for each in value]
    if isinstance(value, Tensor):
        return value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach().clone()
    return value


def assert_same(found: Any, expected: Any, name: str, tolerance: float = 1e-6) -> None:
    found, expected = full(found), full(expected)
    if isinstance(expected, (Tensor, list)):
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert found == expected, (name, found, expected)


def assert_same_params(sharded: Params, plain: Params, name: str, tolerance: float = 0.0) -> None:
    assert all(type(param) is ShardedTensor and isinstance(param, nn.Parameter) for param in sharded), name
    assert_same([param.detach() for param in sharded], [param.detach() for param in plain], name, tolerance)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that sharded tensors start, by name."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "traceable_all_gather"):
            real = getattr(collectives, name)
            patch.setattr(collectives, name, lambda *args, n=name, f=real: (names.append(n), f(*args))[1])
        yield names


# --- single operations ------------------------------------------------------------------------------------------------

MATRIX = torch.arange(35.0).view(7, 5)


def _set(name: str, value: Any) -> Callable[[Params], Any]:
    return lambda p: setattr(p[0], name, value)


ELEMENTWISE: dict[str, Callable[[Params], Any]] = {
    "mul_": lambda p: p[0].mul_(0.9),
    "data.mul_": lambda p: p[0].data.mul_(0.9),
    "data =": _set("data", MATRIX + 1),
    "data = expanded": _set("data", torch.ones(1, 1).expand(7, 5)),
    "copy_": lambda p: p[0].copy_(MATRIX),
    "copy_ broadcast": lambda p: p[0].copy_(torch.arange(5.0)),
    "copy_ float64": lambda p: p[0].copy_(MATRIX.double()),
    "copy_ 0-d": lambda p: p[7].copy_(torch.tensor(3.0)),
    "plain.copy_": lambda p: torch.empty(7, 5).copy_(p[0]),
    "out=": lambda p: torch.mul(p[0], 2, out=p[0]),
    "plain out=": lambda p: torch.mul(p[0], 2, out=torch.empty(7, 5)),
    "times a row": lambda p: p[0] * torch.arange(5.0),
    "times a column": lambda p: p[0] * torch.arange(7.0)[:, None],
    "times a matrix": lambda p: p[0] * MATRIX,
    "matrix times": lambda p: MATRIX * p[0],
    "matrix.add_": lambda p: MATRIX.clone().add_(p[0]),
    "mul_ a row": lambda p: p[0].mul_(torch.arange(5.0)),
    "mul_ a column": lambda p: p[0].mul_(torch.arange(7.0)[:, None]),
    "mul_ a scalar tensor": lambda p: p[0].mul_(torch.tensor(2.0)),
    "mul_ a sharded row": lambda p: p[0].mul_(p[1]),
    "mul_ a sharded scalar": lambda p: p[0].mul_(p[7]),
    "sharded scalar times": lambda p: p[7] * p[0],
    "sharded row times": lambda p: p[1] * p[0],
    "outer": lambda p: p[1][:, None] * p[5],
    "scalar plus float64": lambda p: p[7] + torch.tensor(1.0, dtype=torch.float64),
    "scalar plus bfloat16": lambda p: p[7] + torch.ones(3, dtype=torch.bfloat16),
    "matrix plus float64 scalar": lambda p: p[0] + torch.tensor(1.0, dtype=torch.float64),
    "matrix plus float64": lambda p: p[0] + MATRIX.double(),
    "other cut": lambda p: p[5] + p[5].flip(0),
    "power": lambda p: [p[0] ** 2, 2 ** p[0], p[0].pow(p[0].abs())],
    "where": lambda p: torch.where(p[0] > 0, p[0], 0.0),
    "where plain": lambda p: torch.where(MATRIX > 9, p[0], MATRIX),
    "masked_fill": lambda p: p[0].masked_fill(p[0] > 0, 1.0),
    "masked_fill_ plain": lambda p: p[0].masked_fill_(MATRIX > 9, 1.0),
    "clamp": lambda p: p[0].clamp(-0.5, 0.5),
    "lerp": lambda p: [p[0].lerp(MATRIX, 0.1), p[0].lerp_(p[0] * 2, 0.5)],
    "addcmul": lambda p: [p[0].addcmul(p[0], p[0], value=2), p[0].addcdiv_(p[0], p[0].abs() + 1)],
    "round trip": lambda p: [p[0].bfloat16().float(), p[0].to(torch.float64), p[0].clone()],
    "like": lambda p: [torch.zeros_like(p[0]), torch.full_like(p[5], 2.0), p[0].new_ones(7, 5), p[0].new_zeros(3)],
    "compare": lambda p: [p[0] == p[0], p[0] > MATRIX, p[0].isnan(), torch.signbit(p[0] * -0.0)],
    "fill_": lambda p: [p[0].fill_(2.0), p[1].zero_(), p[7].fill_(3.0)],
    "empty": lambda p: [p[9] * 2, p[9].sum(), p[9].sum(0), p[9].norm(), p[9].add_(1)],
}

DIMS: list[Any] = [0, 1, -1, (0, 1)]
REDUCTIONS: dict[str, Callable[[Params], Any]] = {
    "all": lambda p: [[x.sum(), x.norm(), x.norm(1)] for x in p],
    "mean": lambda p: [x.mean() for x in p if x.numel()],
    "extremes": lambda p: [[x.max(), x.min(), x.amax(), x.amin(), x.norm(math.inf)] for x in p if x.numel()],
    "sum": lambda p: [[p[0].sum(d), p[0].sum(d, keepdim=True), p[0].sum(d, dtype=torch.float64)] for d in DIMS],
    "mean dims": lambda p: [[p[0].mean(d), p[0].mean(d, keepdim=True)] for d in DIMS],
    "norms": lambda p: [[p[0].norm(dim=d), p[0].norm(3, d, keepdim=True), p[0].norm(math.inf, d)] for d in DIMS],
    "negative order": lambda p: [p[0].norm(-1), p[0].norm(-math.inf), p[0].norm(-1, 0), p[0].norm(-math.inf, 1)],
    "order 0": lambda p: [p[0].norm(0), p[0].norm(0, 0), torch.linalg.vector_norm(p[0], 0.5)],
    "amax": lambda p: [[p[0].amax(d), p[0].amin(d, keepdim=True)] for d in DIMS],
    "3-d": lambda p: [[p[6].sum(d), p[6].amax(d), p[6].norm(dim=d)] for d in (0, 1, 2, (0, 2), (1, 2), (0, 1))],
    "integers": lambda p: [(p[0] * 9).int().sum(), (p[0] * 9).long().amax(0), (p[0] > 0).sum(), (p[0] > 0).sum(0)],
    "truth": lambda p: [(p[0] > 9).any(), (p[0] > -9).all(), (p[0] > 0).any(0), (p[0] > 0).all(1, keepdim=True)],
    "truth of many dims": lambda p: [torch.any(p[6] > 0, (0, 2)), torch.all(p[6] > 0, (1, 2))],
    "isfinite": lambda p: [torch.isfinite(p[0]).all(), p[0].isnan().any()],
    "equal": lambda p: [torch.equal(p[0], p[0].clone()), torch.equal(p[0], p[0] + 1), torch.equal(p[0], p[1])],
    "equal plain": lambda p: [torch.equal(p[7], full(p[7]).clone()), torch.equal(full(p[0]), p[0])],
    "allclose": lambda p: torch.allclose(p[0], p[0] + 1e-9),
    "item": lambda p: [p[7].item(), float(p[7]), p[0].sum().item()],
    "gathered": lambda p: [p[0].std(), p[0].var(0), p[0].argmax(), p[5].topk(3)[0], p[0].max(0)[0], p[0].cumsum(0)],
    "total norm": lambda p: [nn.utils.get_total_norm(p[:9], o) for o in (2.0, 1.0, math.inf)],
    "foreach norm": lambda p: torch._foreach_norm([p[0], torch.ones(3), p[1], p[7]]),
}

VIEWS: dict[str, Callable[[Params], Any]] = {
    "p[2] =": lambda p: p[0].__setitem__(2, 0.0),
    "p[mask] =": lambda p: p[0].__setitem__(p[0] > 0, 0.0),
    "p[plain mask] =": lambda p: p[0].__setitem__(MATRIX > 9, 0.0),
    "element of flat": lambda p: p[0].view(-1)[3].add_(1),
    "transposed": lambda p: p[0].t().mul_(2),
    "of a view": lambda p: p[6][1].t()[2:].fill_(1.0),
    "copy_ into a view": lambda p: p[0][1:3].copy_(p[0][3:5]),
    "two views": lambda p: [v.mul_(2) for v in (p[0][:2], p[0].view(-1)[5:12])],
    "matmul": lambda p: [p[0] @ p[0].T, nn.functional.linear(torch.ones(2, 5), p[0], None), torch.mv(p[0], p[1])],
    "einsum": lambda p: torch.einsum("ij,kj->ik", p[0], p[0]),
    "indices": lambda p: [p[0][p[0] > 0].sum(), p[5][[1, 2]], p[0][3, 2], p[5][-1], p[0].gather(1, MATRIX.long() % 5)],
    "stack": lambda p: [torch.stack([p[0], p[0]]), torch.cat([x.flatten() for x in p])],
    "vector": lambda p: nn.utils.parameters_to_vector(p),
    "from vector": lambda p: nn.utils.vector_to_parameters(torch.arange(float(sum(x.numel() for x in p))), p),
    "split": lambda p: [*p[0].split(2), *p[0].unbind(1), *p[5].chunk(4)],
    "rows": lambda p: [len(p[0]), [row.sum() for row in p[3]]],
    "shapes": lambda p: [p[0].unsqueeze(0), p[0].reshape(5, 7), p[0].view(7, 5), p[0].permute(1, 0), p[4].squeeze()],
    "expand": lambda p: [p[1].expand(2, 5), p[7].expand(3)],
    "svd": lambda p: torch.linalg.svdvals(p[0]),
}


def _stale(p: Params) -> list[Tensor]:
    view, sums = p[0].t(), []
    for edit in (
        lambda: p[0].mul_(2),
        lambda: torch._foreach_mul_([p[0]], 3.0),
        lambda: p[0].data.mul_(2),
        lambda: p[0].view(-1)[:3].zero_(),
        lambda: p[0].detach().add_(1),
        lambda: torch.add(p[0], 1, out=p[0]),
        lambda: torch._foreach_add_([torch.ones(2), p[0]], 1.0),
        lambda: torch._foreach_copy_([p[0]], [MATRIX]),
    ):
        sums += [view.sum(), view[0].clone()]
        edit()
    return [*sums, view.sum()]


def _nan(p: Params) -> list[Tensor]:
    p[0].view(-1)[-1] = math.nan
    x = p[0]
    p[0].data.nan_to_num_(7.0)
    p[5][0] = math.nan
    return [x.sum(), p[5].amax(), p[5].amin(), p[5].norm(math.inf), p[5].norm(-math.inf), p[5].norm(), p[5].max()]


def _negative_zero(p: Params) -> list[Tensor]:
    p[0].mul_(0.0).neg_()
    return [torch.signbit(p[0]), torch.signbit(p[0].amax()), torch.signbit(p[0].abs())]


def _seeded(init: Callable[..., Any]) -> Callable[[Params], Any]:
    def case(p: Params) -> Any:
        return [init(p[0]), torch.rand(2)]  # the generator goes on as on one process

    return case


FILLS = [nn.init.normal_, nn.init.uniform_, nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_]
FILLS += [nn.init.kaiming_uniform_, torch.randn_like, torch.rand_like, torch.bernoulli, nn.init.eye_, nn.init.dirac_]
RANDOM = {init.__name__: _seeded(init) for init in FILLS[:8]}
RANDOM |= {
    name: _seeded(lambda x, name=name: getattr(x, name)()) for name in ("exponential_", "cauchy_", "random_", "normal_")
}
RANDOM |= {"dropout": _seeded(nn.functional.dropout), "bernoulli_": _seeded(lambda x: x.bernoulli_(0.3))}

FOREACH: dict[str, Callable[[Params], Any]] = {
    "mul_": lambda p: torch._foreach_mul_(p, 0.9),
    "mixed": lambda p: torch._foreach_add([p[0], torch.ones(3)], 1.0),
    "plain first": lambda p: torch._foreach_add([torch.ones(3), p[0]], [torch.ones(3), p[0]]),
    "of plain operands": lambda p: torch._foreach_add_([p[0], p[1]], [MATRIX, torch.ones(5)]),
    "mixed operands": lambda p: torch._foreach_mul([MATRIX, p[0]], [p[0], MATRIX]),
    "mixed operands in place": lambda p: torch._foreach_mul_([MATRIX.clone(), p[0]], [p[0] + 1, p[0]]),
    "sharded scalar": lambda p: torch._foreach_mul_([p[0], torch.ones(2)], p[7]),
    "into plain": lambda p: (lambda t: (torch._foreach_copy_(t, p[:2]), t)[1])([torch.ones(7, 5), torch.ones(5)]),
    "lerp_": lambda p: torch._foreach_lerp_([p[0]], [MATRIX], 0.1),
    "scalars": lambda p: torch._foreach_mul_([p[0], torch.ones(2), p[1]], [2.0, 3.0, 4.0]),
    "scalar tensor": lambda p: torch._foreach_mul_(p, torch.tensor(2.0)),
    "power of scalars": lambda p: torch._foreach_pow(2.0, [p[0], p[1]]),
    "scalar base, mixed": lambda p: torch._foreach_pow(2.0, [torch.ones(2), p[1]]),
    "addcdiv_": lambda p: torch._foreach_addcdiv_(p[:2], [MATRIX, p[1]], [MATRIX + 1, p[1].abs() + 1], 0.5),
    "max": lambda p: torch._foreach_max([p[0], p[1]]),
    "clamp": lambda p: torch._foreach_clamp_min([p[0], p[1]], 0.0),
    "dtype": lambda p: [x.bfloat16() for x in torch._foreach_sqrt([x.abs() for x in p])],
}

FAMILIES = {
    "elementwise": ELEMENTWISE,
    "reductions": REDUCTIONS,
    "views": VIEWS | {"see later edits": _stale},
    "values": {"NaN": _nan, "negative zero": _negative_zero},
    "random": RANDOM,
    "foreach": FOREACH,
}


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(3)
def test_operations(family: str) -> None:
    """Operations on sharded tensors give what they give on one process, to results and to operands."""
    tolerance = 1e-5 if family == "reductions" else 1e-6
    for name, case in FAMILIES[family].items():
        plain, sharded = build()
        results = []
        for params in (plain, sharded):
            torch.manual_seed(3)
            with torch.no_grad():
                results.append(full(case(params)))
        assert_same(results[1], results[0], name, tolerance)
        assert_same_params(sharded, plain, name, 1e-6)


# --- optimizers -------------------------------------------------------------------------------------------------------

NOT_BY_ELEMENT = ("Optimizer", "SparseAdam", "Muon", "LBFGS")  # the last two are below
KINDS = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and n not in NOT_BY_ELEMENT}
ROUNDED = ("Adafactor", "Muon", "fused")  # sums over ranks; vectors that end elsewhere


def _optimizers() -> dict[str, Callable[[Params], torch.optim.Optimizer]]:
    made: dict[str, Callable[[Params], torch.optim.Optimizer]] = {}
    for name, kind in KINDS.items():
        for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            if inspect.signature(kind).parameters.keys() >= how.keys():
                made[f"{name} {how}"] = lambda p, kind=kind, how=how: kind([x for x in p if x.numel()], lr=0.01, **how)
    decay: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    made["AdamW amsgrad"] = lambda p: torch.optim.AdamW(p, amsgrad=True, **decay)
    made["AdamW amsgrad fused"] = lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True, **decay)
    made["AdamW maximize loop"] = lambda p: torch.optim.AdamW(p, maximize=True, foreach=False, **decay)
    made["SGD momentum"] = lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, **decay)
    made["SGD momentum fused"] = lambda p: torch.optim.SGD(p, momentum=0.9, fused=True, **decay)
    made["RMSprop centered"] = lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9, **decay)
    made["tensor lr"] = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False)
    made["decay by dim"] = lambda p: torch.optim.AdamW(
        [{"params": [x for x in p if x.dim() >= 2], "weight_decay": 0.5}, {"params": [x for x in p if x.dim() < 2]}]
    )
    made["Muon"] = lambda p: torch.optim.Muon([x for x in p if x.dim() == 2 and x.numel()], **decay)
    made["mixed with plain"] = lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(3))], lr=0.1)
    return made


@on_ranks(3)
def test_optimizers() -> None:
    """Every optimizer of torch makes the steps that it makes on one process."""
    for name, make in _optimizers().items():
        plain, sharded = build()
        one, other = make(plain), make(sharded)
        for step in range(3):
            give_gradients(plain, sharded, step)
            one.step()
            other.step()
        assert_same_params(sharded, plain, name, 1e-6 if any(part in name for part in ROUNDED) else 0.0)
        for a, b in zip(plain, sharded, strict=True):
            state, expected = other.state[b], one.state[a]
            assert state.keys() == expected.keys()
            assert_same(list(state.values()), list(expected.values()), name)
            assert all(type(v) is ShardedTensor for v in state.values() if isinstance(v, Tensor) and v.dim()) or (
                "Adafactor" in name
            )


@on_ranks(3)
def test_closure() -> None:
    """LBFGS, which evaluates a closure many times, ends where it ends on one process."""
    for search in (None, "strong_wolfe"):
        plain, sharded = build([(7, 5), (5,), (), (3, 3)])
        for params in (plain, sharded):
            optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn=search)

            def closure(params: Params = params, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = sum(((x - 0.5) ** 2).sum() + (x**4).sum() for x in params)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
        assert_same_params(sharded, plain, f"LBFGS {search}", 1e-5)


def _saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


# --- clipping ---------------------------------------------------------------------------------------------------------

ORDERS = [2.0, 0.0, 0.5, 1.0, 3.0, math.inf, -math.inf]


@on_ranks(3)
def test_clipping() -> None:
    """torch's clip functions find one process's norm and scale alike, for all orders, lists and implementations."""
    for order in ORDERS:
        for foreach in (True, False, None):
            for chosen in (slice(None), slice(0, 1), slice(7, 8)):
                plain, sharded = build(SHAPES[:9])
                give_gradients(plain, sharded, 1)
                one = nn.utils.clip_grad_norm_(plain[chosen], 1.0, order, foreach=foreach)
                other = nn.utils.clip_grad_norm_(sharded[chosen], 1.0, order, foreach=foreach)
                assert type(other) is Tensor
                name = f"clip {order} {foreach} {chosen}"
                assert_same(other, one, name, 1e-5)
                assert_same([p.grad for p in sharded], [p.grad for p in plain], name, 1e-5)
    plain, sharded = build()
    give_gradients(plain, sharded, 1)
    nn.utils.clip_grad_value_(plain, 0.5)
    nn.utils.clip_grad_value_(sharded, 0.5)
    assert_same([p.grad for p in sharded], [p.grad for p in plain], "clip_grad_value_", 0.0)


@on_ranks(3)
def test_plain_and_sharded_gradients() -> None:
    """Plain gradients, of plain parameters and assigned to sharded ones, are clipped and stepped among sharded ones."""
    plain, sharded = build()
    give_gradients(plain, sharded, 1)
    for index in (0, 6):  # full plain tensors, as users may assign
        sharded[index].grad = plain[index].grad.clone()
    for params in (plain, sharded):
        params.insert(3, nn.Parameter(torch.ones(4)))
        params[3].grad = torch.ones(4)
    for foreach in (None, False):
        one = nn.utils.clip_grad_norm_(plain, 1.0, foreach=foreach)
        other = nn.utils.clip_grad_norm_(sharded, 1.0, foreach=foreach)
        assert_same(other, one, "norm")
        assert_same([p.grad for p in sharded], [p.grad for p in plain], "gradients")
    torch.optim.SGD(plain, lr=0.1).step()
    torch.optim.SGD(sharded, lr=0.1).step()
    assert_same([p.detach() for p in sharded], [p.detach() for p in plain], "step")


@on_ranks(3)
def test_collectives(rank: int) -> None:
    """Clipping does one all-reduce for each group of ranks, or each tensor without foreach; optimizers do none."""
    plain, sharded = build()
    other = dist.new_group(list(range(dist.get_world_size())))
    for order in ORDERS[:-1]:
        give_gradients(plain, sharded, 1)
        for foreach, times in ((None, 1), (True, 1), (False, len(sharded))):
            with counted() as seen:
                nn.utils.clip_grad_norm_(sharded, 1.0, order, foreach=foreach)
            assert seen == ["all_reduce"] * times, (order, foreach, seen)
        for param in sharded[4:]:  # of another group of ranks
            spec = ShardSpec(param.spec.sharding, ShardRanks(other.group_name, dist.get_world_size(), rank))
            param.grad = ShardedTensor(param.grad.local, spec)
        with counted() as seen:
            nn.utils.clip_grad_norm_(sharded, 1.0, order)
        assert seen == ["all_reduce"] * 2, seen
    give_gradients(plain, sharded, 1)
    with counted() as seen:
        torch.optim.AdamW(sharded).step()
        torch.optim.AdamW(sharded, foreach=False).step()
        torch.optim.SGD(sharded, fused=True, momentum=0.9).step()
        [p.detach().mul_(0.5).add_(p.grad * 2) for p in sharded]
    assert seen == []


@on_ranks(3)
def test_communication_by_users() -> None:
    """Collectives of torch.distributed write sharded tensors as they would full ones, equal on all ranks."""
    plain, sharded = build()
    size = dist.get_world_size()
    give_gradients(plain, sharded, 1)
    for one, other in zip(plain, sharded, strict=True):
        dist.all_reduce(other.grad.data)
        other.grad.data /= size
        torch.testing.assert_close(full(other.grad), one.grad)
        copy = other.grad.clone()
        dist.all_reduce(copy, async_op=True).wait()
        torch.testing.assert_close(full(copy), one.grad * size)
        parts = [torch.zeros_like(other) for _ in range(size)]
        dist.all_gather(parts, other.detach())
        assert all(torch.equal(full(part), one) for part in parts)
        dist.broadcast(other.data, 0)
        assert torch.equal(full(other), one)
        if one.dim() == 2 and one.shape[0] != one.shape[1]:
            with pytest.raises(NotImplementedError, match="aten::t_ changes the shape of a sharded tensor in place"):
                other.detach().clone().t_()


# --- gradients --------------------------------------------------------------------------------------------------------


class _Times(torch.autograd.Function):
    """A product with data, as users write it."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, data: Tensor) -> Tensor:
        ctx.save_for_backward(param, data)
        return param * data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        param, data = ctx.saved_tensors
        return gradient * data, gradient * param


def whole(param: Any) -> Tensor:
    return param.full_tensor() if isinstance(param, (ShardedTensor, ShardedView)) else param


def spread(param: Any) -> Tensor:
    """The parameter through a replicated DTensor."""
    return param.redistribute(placements=[Replicate()]).to_local() if isinstance(param, ShardedTensor) else param


def here(param: Any) -> Tensor:
    return param.to_local() if isinstance(param, ShardedTensor) else param


Loss = Callable[[Params, Tensor], Tensor]  # of parameters and a rank's data, 7 x 5
LOSSES: dict[str, Loss] = {
    "squares": lambda p, x: sum((each**2).sum() for each in p) * x.sum(),
    "norms": lambda p, x: sum(each.norm() for each in p if each.numel()) * x.sum(),
    "norm of rows": lambda p, x: (p[0].norm(dim=1) * x.sum(1)).sum(),
    "matmul": lambda p, x: (p[0] @ x.T).sum() + (x @ p[1]).sum(),
    "linear": lambda p, x: nn.functional.linear(x, p[0]).square().sum(),
    "product": lambda p, x: (p[0] * x).sum(),
    "product, twice used": lambda p, x: (p[0] * x * p[0]).sum() + (p[0] ** 2).sum() + (p[0] @ p[1]).sum() * x[0, 0],
    "broadcast product": lambda p, x: (p[1] * x).sum() + (p[7] * x).sum() + (x[0, 0] * p[0]).sum(),
    "scaled": lambda p, x: (p[0] * 2.0 - 1).abs().mean() * x[1, 1],
    "weight norm": lambda p, x: (p[0] / p[0].norm(dim=1, keepdim=True) * x).sum(),
    "of both": lambda p, x: ((p[0] * 2).sigmoid() * (p[0] + p[1])).sum() * x[0, 0],
    "views": lambda p, x: (p[0][1:3] * x[1:3]).sum() + p[0].t()[2].square().sum() + p[6][1, :, 2].sum() * x[0, 0],
    "cut": lambda p, x: torch.cat([each.flatten() for each in p]).square().sum() * x[0, 0],
    "extremes": lambda p, x: p[0].amax() * x[0, 0] + p[5].max() + p[0].amin(1).sum(),
    "custom function": lambda p, x: _Times.apply(p[0], x).square().sum() + _Times.apply(p[7], x[0, 0]),
    "masked": lambda p, x: torch.where(x > 0, p[0], p[0] * 2).sum(),
    "softmax": lambda p, x: (p[0].softmax(1) * x).sum() + p[5].logsumexp(0) * x[0, 0],
    "clone": lambda p, x: (p[0].clone() * x).sum() + p[1].double().sum().float() * x[0, 0],
    "var": lambda p, x: p[0].var() * x[0, 0] + p[3].std(0).sum(),
    "sqrt": lambda p, x: (p[0].exp() + p[0].abs()).sqrt().mean() * x[0, 0],
    "full_tensor": lambda p, x: (whole(p[0]) * x).sum() + (x @ whole(p[1])).sum() + whole(p[7]) * x[0, 0],
    "full_tensor of results": lambda p, x: (whole(p[0] * 2) @ x.T).square().sum() + (whole(p[0][1:3]) * x[1:3]).sum(),
    "full_tensor beside other uses": lambda p, x: (whole(p[0]) * x).sum() + (p[0] ** 2).sum() + whole(p[0]).norm(),
    "redistribute": lambda p, x: (spread(p[0]) * x).sum(),
}
OF_PARTS: dict[str, Loss] = {  # each rank's is a part of the sum, not all of it
    "to_local": lambda p, _: sum(here(each).square().sum() for each in p),
    "to_local beside other uses": lambda p, x: here(p[0]).exp().sum() + (p[0] * x).sum() + (p[0] ** 2).sum(),
    "to_local of results": lambda p, _: here(p[0] * 2 + p[0]).square().sum(),
}


def data_of(rank: int) -> Tensor:
    return torch.randn(7, 5, generator=seeded(rank)).requires_grad_()


@on_ranks(3)
def test_gradients(rank: int) -> None:
    """What is computed from sharded parameters and a rank's data gives parameters the mean gradient over ranks.

    The data gets the gradient of its rank.
    """
    world = dist.get_world_size()
    for name, loss in (LOSSES | OF_PARTS).items():
        plain, sharded = build()
        inputs, x = [data_of(each) for each in range(world)], data_of(rank)
        for times in (1, 2):  # the second time accumulates
            for param in plain:
                param.grad = param.grad * world if param.grad is not None else None
            for each in inputs:
                loss(plain, each).backward()
            for param in plain:
                param.grad = param.grad / world if param.grad is not None else None
            loss(sharded, x).backward()
            for i, (one, other) in enumerate(zip(plain, sharded, strict=True)):
                assert (one.grad is None) == (other.grad is None), (name, i)
                if one.grad is not None:
                    assert type(other.grad) is ShardedTensor and other.grad.spec == other.spec, (name, i)
                    assert_same(other.grad, one.grad, f"{name}: gradient {i}, time {times}", 2e-5)
        assert_same(x.grad, inputs[rank].grad, f"{name}: gradient of data", 2e-5)
        assert type(x.grad) in (Tensor, type(None))


@on_ranks(3)
def test_values_of_data(rank: int) -> None:
    """What is computed from sharded parameters and a rank's data is that rank's, with autograd and without."""
    x = data_of(rank)
    for enabled in (True, False):
        for name, loss in LOSSES.items():
            plain, sharded = build()
            with torch.set_grad_enabled(enabled):
                assert_same(loss(sharded, x).detach(), loss(plain, x).detach(), name, 1e-5)
    for param in (plain[0], sharded[0]):
        param.requires_grad_(False)
    frozen = [each[0] * x for each in (plain, sharded)]
    assert_same(frozen[1].detach(), frozen[0].detach(), "frozen")


@on_ranks(3)
def test_other_ways_to_gradients() -> None:
    """autograd.grad and recomputation give what they give on one process."""
    plain, sharded = build()
    found = [torch.autograd.grad((p[0] ** 2).sum() + p[7] ** 2, [p[0], p[7]]) for p in (plain, sharded)]
    assert_same([full(each) for each in found[1]], list(found[0]), "autograd.grad")
    checkpointed = []
    for params in (plain, sharded):
        params[0].grad = None
        x = data_of(0)
        torch.utils.checkpoint.checkpoint(
            lambda p, y: (p * y).sigmoid().sum(), params[0], x, use_reentrant=False
        ).backward()
        checkpointed.append(params[0].grad)
    assert_same(checkpointed[1], checkpointed[0], "checkpoint")


@on_ranks(3)
def test_hooks() -> None:
    """Hooks before and after accumulation see gradients of the full shape; `p.grad` takes plain and sharded tensors."""
    plain, sharded = build()
    seen: list[tuple[str, Any]] = []
    mask = (MATRIX > 9).float()
    for params in (plain, sharded):
        param = params[0]
        kind = "plain" if params is plain else "sharded"
        param.register_hook(lambda g: g * mask)
        param.register_hook(lambda g, kind=kind: seen.append((kind, g.shape)))
        param.register_post_accumulate_grad_hook(lambda p, kind=kind: seen.append((kind, p.grad.shape)))
        ((param**2).sum() + (param @ torch.ones(5)).sum()).backward()
    assert seen == [(kind, torch.Size([7, 5])) for kind in ("plain", "plain", "sharded", "sharded")]
    assert_same(sharded[0].grad, plain[0].grad, "hooks")  # plain, as a hook has combined it with a plain tensor
    sharded[0].grad = torch.ones(7, 5)
    assert type(sharded[0].grad) is Tensor
    sharded[0].grad = torch.ones_like(sharded[0])
    assert type(sharded[0].grad) is ShardedTensor
    with pytest.raises(RuntimeError, match="gradient"):
        sharded[0].grad = torch.ones(sharded[0].spec.numel + 1)


# --- as an object -----------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_objects() -> None:
    """Copies, pickles, versions, refusals and what a DTensor would say."""
    plain, sharded = build()
    param: Any = sharded[0]
    param.mark = "a"
    copied = copy.deepcopy(param)
    assert isinstance(copied, nn.Parameter) and type(copied) is ShardedTensor and copied.requires_grad
    assert (torch.equal(copied, param) and copied.local.data_ptr() != param.local.data_ptr()) or not param.spec.numel
    for options in ({"weights_only": True}, {"weights_only": False}):
        loaded = _saved({"p": param, "g": torch.ones_like(param)}, **options)
        assert isinstance(loaded["p"], nn.Parameter) and not isinstance(loaded["g"], nn.Parameter)
        assert torch.equal(loaded["p"], param) and loaded["p"].spec == param.spec
    version = param._version
    with torch.no_grad():
        param.mul_(0.9)
        torch._foreach_mul_(sharded, 0.9)
        torch._foreach_mul_([torch.ones(2), param], 0.9)
    assert param._version >= version + 3 and param.local._version > 0
    assert (sum(p.numel() for p in sharded), [p.dim() for p in sharded]) == (
        sum(p.numel() for p in plain),
        [p.dim() for p in plain],
    )
    for refused in (param.detach().numpy, param.tolist, param.detach()[1:].numpy):
        with pytest.raises(TypeError, match=r"full_tensor\(\)"):
            refused()
    for change in (lambda: param.detach().resize_(3), lambda: param.detach().set_(torch.ones(2))):
        with pytest.raises(TypeError, match="expected a plain tensor"):
            change()
    with pytest.raises(RuntimeError, match="out of place"):
        (param * 2).mul_(torch.ones(5))
    assert (
        "full_tensor()" in repr(param)
        and param.placements[0].is_shard()
        and param.device_mesh.size() == len(param.spec.ranges)
    )
    assert torch.equal(param.redistribute().to_local(), param.full_tensor())
    unreduced = UnreducedGradient(torch.ones(35), param.spec)
    param.grad = unreduced
    with pytest.raises(RuntimeError, match="under no_sync"):
        nn.utils.clip_grad_norm_(sharded, 1.0)
    for foreach in (True, False, None):
        with pytest.raises(RuntimeError, match="under no_sync"):
            torch.optim.AdamW(sharded, foreach=foreach).step()


@on_ranks(3)
def test_part_of_another_rank(rank: int) -> None:
    """What another rank has saved is refused where it would be taken for this rank's part, and the error names it."""
    _, sharded = build()
    file = io.BytesIO()
    torch.save([p.detach() for p in sharded], file)
    files = [file.getvalue()] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    theirs = torch.load(io.BytesIO(files[(rank + 1) % len(files)]))
    param, other = sharded[0].detach(), theirs[0]
    refused: dict[str, Callable[[], Any]] = {
        "copy_": lambda: param.copy_(other),
        "data": lambda: setattr(sharded[0], "data", other),
        "foreach": lambda: torch._foreach_add_([p.detach() for p in sharded], theirs),
        "foreach mixed": lambda: torch._foreach_add_([torch.ones(2), param], [torch.ones(2), other]),
        "plus": lambda: param + other,
        "equal": lambda: torch.equal(param, other),
        "sum": lambda: other.sum(),
        "norm": lambda: torch._foreach_norm(theirs),
        "full_tensor": lambda: other.full_tensor(),
        "view": lambda: other[2].clone(),
    }
    for name, use in refused.items():
        with pytest.raises(RuntimeError, match=f"the part of rank {(rank + 1) % len(files)}"):
            use()
            raise AssertionError(name)


@on_ranks(3)
def test_averages_of_models() -> None:
    """AveragedModel and moving averages are those of one process."""
    plain, sharded = build([(7, 5), (7,)])
    averaged = []
    for params in (plain, sharded):
        model = nn.Linear(5, 7)
        model.weight, model.bias = params
        mean = AveragedModel(model)
        ema = [p.detach().clone() for p in params]
        for _ in range(2):
            with torch.no_grad():
                torch._foreach_mul_(params, 0.9)
            mean.update_parameters(model)
            torch._foreach_lerp_(ema, [p.detach() for p in params], 0.1)
        averaged.append([*ema, *mean.module.parameters(), *params])
    assert all(type(each) is ShardedTensor for each in averaged[1])
    assert_same([each.detach() for each in averaged[1]], [each.detach() for each in averaged[0]], "averages")
