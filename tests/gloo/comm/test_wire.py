"""Parameters and gradients that ranks send in formats of fewer bytes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Case, mlp, part, squared_error, vectors
from tiers import LATE, compiled_late
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from fsdp_compile import FSDPModule, Wire, checkpoint, fully_shard
from fsdp_compile.comm import collectives, direct
from fsdp_compile.comm.formats import add_up, decode, encode
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.hops import gather

from ..ranks import Ranks, on_ranks
from ..training import PER_RANK, backward, build, executor, local, mine, units, whole

SMALL = Case(lambda: mlp(2), vectors, squared_error)
BOTH = Wire(gather="fp8", reduce="bf16")


# --- values -----------------------------------------------------------------------------------------------------------


def _rounded(flat: Any, format: str) -> Tensor:
    """The flat parameter as all ranks receive it: a message from each."""
    shards = gather(flat.shard.detach(), NamedGroup.of(dist.group.WORLD))
    messages = encode(shards.view(dist.get_world_size(), -1), format)
    return decode(messages, flat.layout.shard_numel, format, torch.float32).reshape(-1)


def _follow_reference(rank: int, gather: str | None, reduce: str | None) -> None:
    model = fully_shard(build(SMALL), auto_wrap_policy=None, wire=Wire(gather, reduce))
    ranks = dist.get_world_size()
    (unit,) = units(model)
    (flat,) = unit.flats
    backward(model, SMALL, mine(SMALL, 1))
    reference = build(SMALL)
    if gather is not None:
        for param, value in zip(reference.parameters(), flat.full_views(_rounded(flat, gather)), strict=True):
            param.data.copy_(value)
    rows = []
    for other in range(ranks):
        reference.zero_grad()
        backward(reference, SMALL, part(whole(SMALL, 1), other, ranks))
        packed = flat.pack([param.grad for param in reference.parameters()], torch.float32, torch.device("cpu"))
        rows.append(packed.view(ranks, -1)[rank])
    sent = torch.stack(rows)
    if reduce is None:
        expected = sent.mean(0)
    else:
        expected = add_up(encode(sent, reduce), flat.layout.shard_numel, reduce, "avg", torch.float32)
    for param, stored in zip(model.parameters(), flat.split(expected), strict=True):
        found = local(param.grad)
        assert torch.equal(found, stored.reshape(-1))


CHOICES = [("fp8", "bf16"), ("int8", "fp8"), ("bf16", "int8"), (None, "fp8"), ("int8", None)]


@pytest.mark.parametrize("world", ["two", "three"])
def test_values(request: pytest.FixtureRequest, world: str) -> None:
    """Forward computes with what messages stand for, and gradients are sums of it, bit for bit."""
    for choice in CHOICES:
        request.getfixturevalue(world).run(_follow_reference, *choice)


# --- executors --------------------------------------------------------------------------------------------------------


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    **{format: partial(dict, wire=format) for format in ("bf16", "fp8", "int8")},
    "bfloat16": partial(dict, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), wire=Wire("int8", "bf16")),
    "by name": partial(dict, wire=lambda name: None if "norm" in name or name.endswith("bias") else BOTH),
    "hybrid": lambda: {"mesh": init_device_mesh("cpu", (2, 2)), "wire": BOTH},
    "between nodes": lambda: {
        "mesh": init_device_mesh("cpu", (2, 2)),
        "wire": Wire("int8", "fp8", between_nodes_only=True),
    },
    "two stages": partial(dict, reshard_after_forward=2, wire=Wire("fp8", "fp8", between_nodes_only=True)),
    "replicated": partial(dict, sharding_strategy=ShardingStrategy.NO_SHARD, wire=BOTH),
}


def _train(how: str, case: Case, options: dict[str, Any], steps: int = 2) -> list[Tensor]:
    """What this rank stores of all gradients of some steps, and of the parameters behind them."""
    model = fully_shard(build(case), **options)
    run, found = executor(model, how), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert isinstance(model, FSDPModule)
            with model.no_sync():
                backward(run, case, mine(case, 10 + seed))
            backward(run, case, mine(case, seed))
        found += [local(param.grad).clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(param).detach().clone() for param in model.parameters()]


def _compare(rank: int, name: str, setting: str, hows: tuple[str, ...]) -> None:
    case, options = MODELS[name], OPTIONS[setting]()
    eager = _train("eager", case, options)
    plain = _train("eager", case, {key: value for key, value in options.items() if key != "wire"})
    assert any(not torch.equal(one, other) for one, other in zip(eager, plain, strict=True)) or setting == "replicated"
    for how in hows:
        found = _train(how, case, options)
        if how == "inductor":  # a value that is about the middle between two of the format may become either
            one, other = torch.cat(eager), torch.cat(found)
            assert (one - other).norm() <= 0.03 * one.norm(), (one - other).norm() / one.norm()
            continue
        for one, other in zip(eager, found, strict=True):
            assert torch.equal(one, other), (how, (one - other).abs().max())


@pytest.mark.parametrize(
    ("world", "name", "setting", "hows"),
    [("two", "mlp", "fp8", ("aot_eager",))]
    + [pytest.param("two", "gpt", setting, ("aot_eager", "inductor"), marks=LATE) for setting in list(OPTIONS)[:5]]
    + [pytest.param("four", "mlp", setting, ("aot_eager", "inductor"), marks=LATE) for setting in list(OPTIONS)[5:]],
)
def test_executors(request: pytest.FixtureRequest, world: str, name: str, setting: str, hows: tuple[str, ...]) -> None:
    """Eager and aot_eager steps are equal bit for bit, with no_sync, under hybrid sharding, in two stages and
    replicated, and nothing is compiled again (I7); Inductor's are within the rounding of the format."""
    request.getfixturevalue(world).run(_compare, name, setting, hows)


# --- bytes ------------------------------------------------------------------------------------------------------------


@contextmanager
def _sent_bytes() -> Iterator[dict[str, int]]:
    """Bytes of full buffers that gathers and reduces begin to send inside, eager or in generated code."""
    sent = {"gather": 0, "reduce": 0}
    start_all_gather, start_exchange = collectives.start_all_gather, collectives.start_exchange

    def all_gather(full: Tensor, *where: Any) -> Any:
        sent["gather"] += full.nbytes
        return start_all_gather(full, *where)

    def exchange(full: Tensor, *where: Any) -> Any:
        sent["reduce"] += full.nbytes
        return start_exchange(full, *where)

    with (
        mock.patch.object(collectives, "start_all_gather", all_gather),
        mock.patch.object(direct, "start_all_gather", all_gather),
        mock.patch.object(collectives, "start_exchange", exchange),
        mock.patch.object(direct, "start_exchange", exchange),
    ):
        yield sent


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(2)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("how", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_bytes(how: str, dtype: torch.dtype | None) -> None:
    """Gathers and reduces send 0.5 and at most 0.27 times the bytes of float32, 1 and at most 0.53 of bfloat16."""
    x = torch.randn(PER_RANK, 256)
    policy = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(dtype, dtype)}
    counted = {}
    for wire in (None, "bf16", "fp8", "int8"):
        torch.manual_seed(0)
        model = fully_shard(_wide(), reshard_after_forward=True, wire=wire, **policy)
        run = executor(model, how)
        run(x).float().square().mean().backward()
        with _sent_bytes() as sent:
            run(x).float().square().mean().backward()
        counted[wire] = sent
    bounds = {"bf16": 0.5, "fp8": 0.27, "int8": 0.27} if dtype is None else {"bf16": 1.0, "fp8": 0.53, "int8": 0.53}
    for wire, bound in bounds.items():
        for kind, full in counted[None].items():
            assert 0 < counted[wire][kind] <= bound * full, (wire, kind, counted)


# --- error feedback ---------------------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    """Its gradients are the input's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("feedback", [True, False])
@compiled_late
@on_ranks(2)
def test_error_feedback(rank: int, how: str, feedback: bool) -> None:
    """With error feedback the sum of what was sent is that of the gradients but for residuals; without, it is not."""
    model = fully_shard(_Scaled(), wire=Wire(reduce="fp8", error_feedback=feedback))
    run, sent, given = executor(model, how), torch.zeros(300), torch.zeros(300)
    for step in range(20):
        grads = [torch.randn(300, generator=torch.Generator().manual_seed(100 * step + each)) for each in (0, 1)]
        run(grads[rank]).backward()
        given += (grads[0] + grads[1]) / 2
        sent += model.weight.grad.full_tensor()
        model.zero_grad()
    lost = (sent - given).abs().max()
    residuals = list(model.error_feedback().values())
    assert bool(residuals) == feedback
    if feedback:  # all that is missing is in the residuals
        assert lost < 0.2, lost
        total = residuals[0].clone()
        dist.all_reduce(total)
        torch.testing.assert_close(sent + total / 2, given, rtol=0, atol=1e-5)
    else:
        assert lost > 0.2, lost


def _raise(*args: Any) -> Tensor:
    raise ConnectionError


@on_ranks(2)
def test_residuals_are_finite_and_outlive_failures(rank: int) -> None:
    """Elements that are not finite arrive at their places and leave no residual; a reduce that raises changes none."""
    model = fully_shard(_Scaled(), wire=Wire(reduce="fp8", error_feedback=True))
    assert isinstance(model, FSDPModule)
    grads = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    grads[[3, 200]] = torch.tensor([torch.nan, torch.inf])
    model(grads).backward()
    arrived, lost = model.weight.grad.full_tensor(), model.error_feedback()["weight"]  # type: ignore[union-attr]
    assert arrived.isfinite().logical_not().nonzero().flatten().tolist() == [3, 200]
    assert lost.isfinite().all() and lost.any() and not lost[[3, 200]].any()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(collectives, "start_exchange", _raise)
        model(torch.ones(300)).backward()
    assert torch.equal(model.error_feedback()["weight"], lost)


def _save(rank: int, folder: str, steps: int) -> list[Tensor]:
    """Train, save, train on."""
    model, optimizer = _model_with_feedback()
    _learn(model, optimizer, range(steps))
    residuals = checkpoint.PerRank(model.error_feedback())
    checkpoint.save({"model": model, "optimizer": optimizer, "residuals": residuals}, folder, step=1)
    _learn(model, optimizer, range(steps, steps + 3))
    return [param.full_tensor().detach() for param in model.parameters()]


def _load(rank: int, folder: str, steps: int) -> list[Tensor]:
    """Load, train on as those did that saved."""
    model, optimizer = _model_with_feedback()
    residuals = checkpoint.PerRank(model.error_feedback())
    checkpoint.load({"model": model, "optimizer": optimizer, "residuals": residuals}, folder)
    assert isinstance(model, FSDPModule)
    model.load_error_feedback(residuals.of_ranks)
    assert residuals.of_ranks is not None
    saved = [torch.cat([each.view(-1) for each in state.values()]) for state in residuals.of_ranks]
    mine_now = [each.view(-1) for each in model.error_feedback().values()]
    total = torch.cat(mine_now) if mine_now else torch.zeros_like(saved[0])
    dist.all_reduce(total)
    torch.testing.assert_close(total / dist.get_world_size(), torch.stack(saved).mean(0))
    _learn(model, optimizer, range(steps, steps + 3))
    return [getattr(param, "full_tensor", lambda param=param: param)().detach() for param in model.parameters()]


def _model_with_feedback() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(build(SMALL), wire=Wire(gather="int8", reduce="fp8", error_feedback=True))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        backward(model, SMALL, part(SMALL.batch(seed, 12), dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world", "steps"),
    [
        ("two", 5),
        ("three", 5),
        *(pytest.param(world, 50, marks=pytest.mark.nightly) for world in ("one", "two", "three")),
    ],
)
def test_saved_feedback(request: pytest.FixtureRequest, two: Ranks, world: str, steps: int, tmp_path: Path) -> None:
    """Residuals are saved; as many ranks go on with the same bits, others with the same mean over ranks."""
    (expected, *_), (found, *_) = (
        two.run(_save, str(tmp_path), steps),
        request.getfixturevalue(world).run(_load, str(tmp_path), steps),
    )
    for one, other in zip(expected, found, strict=True):
        if world == "two":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one.view(-1), other.view(-1), rtol=0.2, atol=0.05)


@on_ranks(1)
def test_feedback_on_one_rank() -> None:
    """One rank rounds nothing, and adds the mean of what ranks had lost to its first gradient, once."""
    model = fully_shard(_Scaled(), wire=Wire(reduce="fp8", error_feedback=True))
    lost, x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)), torch.ones(300)
    assert isinstance(model, FSDPModule)
    model.load_error_feedback([{"weight": each} for each in lost])
    for expected in (x + lost.mean(0), x):
        model(x).backward()
        assert torch.equal(model.weight.grad, expected)
        model.zero_grad()
    assert not model.error_feedback()


@on_ranks(2)
def test_copies_have_feedback() -> None:
    """A copy of a model goes on with its residuals: both train with the same bits, each with its own."""
    model, optimizer = _model_with_feedback()
    _learn(model, optimizer, range(3))
    copied: Any = copy.deepcopy(model)
    other = torch.optim.AdamW(copied.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((model, optimizer), (copied, other)):
        _learn(each, stepped, range(3, 5))
    for one, two in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(local(one), local(two))
